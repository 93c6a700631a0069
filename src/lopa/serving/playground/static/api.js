// Requests to the server, the stream of a run, and errors.

const KEY = "lopa-api-key";

export class ServerError extends Error {
  constructor(message, { status = 0, param = null, retryAfter = null, lost = false } = {}) {
    super(message);
    Object.assign(this, { status, param, retryAfter, lost });
  }
}

export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

// Paths are relative to the page, so that it also works behind a proxy's prefix.
export async function request(path, { body, signal } = {}) {
  const headers = {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  if (apiKey.get()) headers.Authorization = `Bearer ${apiKey.get()}`;
  let response;
  try {
    response = await fetch(path, {
      method: body === undefined ? "GET" : "POST",
      headers,
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
      cache: "no-store",
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached.", { lost: true });
  }
  if (!response.ok) throw await failure(response);
  return response;
}

async function failure(response) {
  let error = {};
  try {
    error = (await response.json()).error ?? {};
  } catch {
    // Not from this server (a proxy, say): there is only the status.
  }
  const message = error.message ?? `The server answered ${response.status} ${response.statusText}.`;
  return new ServerError(message, {
    status: response.status,
    param: error.param ?? null,
    retryAfter: Number(response.headers.get("Retry-After")) || null,
  });
}

// Start a run; yields its records. Throws a ServerError when it cannot start or breaks off.
// more: other fields of the request, such as { suffix, gap_tokens } of text that is to be filled.
export async function* stream(info, { prompt, chat, settings, more = {} }, signal) {
  const asChat = info.chat && chat;
  const asked = asChat ? { messages: [{ role: "user", content: prompt }] } : { prompt };
  const response = await request(asChat ? "v1/chat/completions" : "v1/completions", {
    body: { model: info.model, ...asked, ...settings, ...more, stream: true, stream_mode: "denoise" },
    signal,
  });
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  const events = new EventReader();
  let complete = false;
  try {
    while (true) {
      const { done, value } = await reader.read();
      for (const data of events.push(done ? "" : decoder.decode(value, { stream: true }))) {
        if (data === "[DONE]") return;
        const record = JSON.parse(data);
        // An error in mid-stream in OpenAI's format has no type.
        if (record.error && !record.type) record.type = "error";
        complete = record.type === "end" || record.type === "error";
        yield record;
      }
      if (done) break;
    }
  } catch (error) {
    if (error.name === "AbortError" || error instanceof ServerError) throw error;
    if (!complete) throw new ServerError(LOST, { lost: true });
  } finally {
    reader.cancel().catch(() => {});
  }
  if (!complete) throw new ServerError(LOST, { lost: true });
}

const LOST = "The connection to the server broke off in the middle of the run.";

// Server-sent events from chunks that may end anywhere.
export class EventReader {
  #rest = "";
  #data = [];

  push(chunk) {
    const found = [];
    const lines = (this.#rest + chunk).split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop();
    for (const line of lines) {
      if (line === "") {
        if (this.#data.length) found.push(this.#data.join("\n"));
        this.#data = [];
      } else if (line.startsWith("data:")) {
        this.#data.push(line.slice(line[5] === " " ? 6 : 5));
      }
    }
    return found;
  }
}

// Resolves once the server answers again.
export async function recovery(signal) {
  for (let wait = 500; ; wait = Math.min(wait * 1.5, 4000)) {
    await new Promise((resolve, reject) => {
      const timer = setTimeout(resolve, wait);
      signal.addEventListener("abort", () => {
        clearTimeout(timer);
        reject(signal.reason);
      });
    });
    try {
      const response = await fetch("health", { signal, cache: "no-store" });
      if (response.ok) return;
    } catch (error) {
      if (signal.aborted) throw error;
    }
  }
}
