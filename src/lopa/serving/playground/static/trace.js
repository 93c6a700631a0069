// A run, from a stream or from a trace file: `run`, `round` and `end` records in that order. A
// position is filled once, so the state
// after any round follows from the round in which each position was filled.

export class TraceError extends Error {}

const VERSION = 2;
// Fields of a round in a file; a stream has more.
const ROUND = [
  ...["index", "start", "cached", "committed", "branches", "winner"],
  ...["fills", "spawned", "blocks", "seconds"],
];
const MAX_POSITION = 200_000; // in a file that is opened here; longer than any context
const MAX_SHOWN = 32_768; // new positions: each is an element of the page
const MAX_BRANCHES = 1_000; // of a round
export const MAX_BYTES = 2 ** 28; // of a file

export class Run {
  constructor() {
    this.promptIds = [];
    this.promptPieces = null; // texts of the prompt's tokens, where a stream gives them
    this.pinnedIds = []; // infilling: the tokens behind each gap
    this.gapTokens = []; // and how many masks each gap has
    this.kept = 0; // of the prompt, its last tokens that are a part of the answer
    this.settings = {};
    this.rounds = [];
    this.pieces = new Map(); // token id → text
    this.cells = new Map(); // position → {token, prob, kind, round, before: what it replaced}
    this.filledIn = [[]]; // by round, from 0: positions filled in it
    this.blocks = []; // {start, end, round}: in order, and the round that showed it first
    this.tokens = [0]; // by round: filled up to the first EOS
    this.seconds = [0]; // by round: time of all rounds so far
    this.sent = [""]; // by round: final text so far, where a stream gives it
    this.end = null;
    this.error = null;
    this.eos = new Set(); // ids of EOS tokens
    this.streamed = false;
  }

  get total() {
    return this.rounds.length;
  }

  get prompt() {
    return this.promptIds.length;
  }

  get done() {
    return this.end !== null;
  }

  // Add the next record; returns its type.
  push(record) {
    const type = record?.type;
    if (type === "run") this.#begin(record);
    else if (type === "round") this.#round(record);
    else if (type === "end") this.#finish(record);
    else if (type === "error") this.error = record.error ?? {};
    else throw new TraceError(`a line of unknown type ${JSON.stringify(type) ?? ""}`);
    return type;
  }

  #begin(record) {
    if (this.total || this.prompt) throw new TraceError("a second run line");
    if (record.version !== undefined && record.version !== VERSION) {
      throw new TraceError(`version ${record.version} where ${VERSION} is read`);
    }
    this.promptIds = list(record.prompt_ids, "prompt_ids");
    for (const id of this.promptIds) whole(id, "token");
    this.promptPieces = Array.isArray(record.prompt_pieces) ? record.prompt_pieces : null;
    this.settings = record.settings ?? {};
    this.pinnedIds = list(record.pinned_ids ?? [], "pinned_ids").map((ids) => list(ids, "pinned_ids"));
    this.gapTokens = list(record.gap_tokens ?? [], "gap_tokens");
    for (const id of this.pinnedIds.flat()) whole(id, "token");
    for (const length of this.gapTokens) whole(length, "gap_tokens");
    if (this.gapTokens.length !== this.pinnedIds.length) throw new TraceError("gap_tokens are missing");
    this.#pin();
    this.id = record.id ?? null;
    for (const id of record.eos_ids ?? []) this.eos.add(id);
    this.#learn(record.pieces);
    this.promptPieces?.forEach((piece, index) => this.pieces.set(this.promptIds[index], String(piece)));
  }

  #round(record) {
    if (this.done) throw new TraceError("a round after the end");
    const index = this.total + 1;
    const branches = list(record.branches, "branches");
    const winner = branches[record.winner];
    if (!winner) throw new TraceError(`round ${index} has no winner`);
    if (branches.length > MAX_BRANCHES) throw new TraceError(`round ${index} has too many branches`);
    for (const branch of branches) {
      whole(branch.end, `end of a branch of round ${index}`);
      list(branch.lookaheads, "lookaheads");
      list(branch.anchor, "anchor");
    }
    if (this.isSearch(record)) {
      this.gapTokens = [whole(this.lengthOf(winner), `length of the gap in round ${index}`)];
      this.#pin();
    }
    const filled = [];
    const put = (placed, kind) => {
      const position = whole(placed.position, `position in round ${index}`);
      this.cells.set(position, {
        token: whole(placed.token, "token"),
        prob: number(placed.max_prob, "max_prob"),
        kind,
        round: index,
        before: this.cells.get(position),
      });
      filled.push(position);
    };
    for (const ahead of winner.lookaheads) put(ahead, "lookahead");
    for (const fill of list(record.fills, "fills")) put(fill, String(fill.kind));
    for (const draft of list(record.spawned, "spawned")) list(draft, "spawned");
    for (const block of list(record.blocks, "blocks")) this.#block(block, index);
    this.#learn(record.pieces);
    this.rounds.push(record);
    this.filledIn.push(filled);
    this.tokens.push(this.#count(index));
    this.seconds.push(this.seconds.at(-1) + (Number(record.seconds) || 0));
    if (typeof record.text === "string") this.streamed = true;
    this.sent.push(this.sent.at(-1) + (record.text ?? ""));
  }

  // Pinned tokens are there from the start.
  #pin() {
    for (const [position, cell] of this.cells) if (cell.kind === "pinned") this.cells.delete(position);
    let position = this.prompt;
    this.pinnedIds.forEach((ids, gap) => {
      position += this.gapTokens[gap];
      for (const token of ids) {
        this.cells.set(position++, { token, prob: 1, kind: "pinned", round: 0, before: undefined });
      }
    });
  }

  // A round that looks for the length of the gap: its branches are the lengths.
  isSearch(record) {
    return this.pinnedIds.length === 1 && !record.blocks.length;
  }

  // The length of the gap in a branch of such a round.
  lengthOf(branch) {
    return branch.end - this.prompt - this.pinnedIds[0].length;
  }

  // Where the new text ends: behind the last gap. What follows is pinned.
  get newEnd() {
    if (!this.pinnedIds.length) return Infinity;
    const pinned = this.pinnedIds.slice(0, -1).flat().length;
    return this.prompt + pinned + this.gapTokens.reduce((sum, length) => sum + length, 0);
  }

  #block(block, index) {
    const start = Math.max(whole(block.start, `start of a block of round ${index}`), this.prompt);
    const end = whole(block.end, `end of a block of round ${index}`);
    if (end <= this.prompt) return; // the prompt itself, on its way to the cache
    if (end - this.prompt > MAX_SHOWN) {
      throw new TraceError(
        `a block of round ${index} ends ${end - this.prompt} positions after the prompt: ` +
          `more than ${MAX_SHOWN} are not shown here`,
      );
    }
    const last = this.blocks.at(-1);
    if (last && start < last.end) return; // known
    this.blocks.push({ start, end, round: index });
  }

  #finish(record) {
    this.#learn(record.pieces);
    this.end = record;
    const ids = list(record.token_ids, "token_ids");
    if (record.finish === "eos" && !this.eos.size && ids.length) {
      // A file does not have the ids of EOS tokens: it is the last token, or in parity mode the one
      // that fills the rest.
      this.eos.add(ids.at(-1));
      for (let round = 1; round <= this.total; round++) this.tokens[round] = this.#count(round);
    }
    const counted = record.summary?.tokens ?? (this.settings.early_stop === false ? null : ids.length);
    if (this.total && Number.isInteger(counted)) this.tokens[this.total] = counted;
  }

  // The token at a position after `round`; undefined: a mask.
  cellAt(position, round) {
    let cell = this.cells.get(position);
    while (cell && cell.round > round) cell = cell.before;
    return cell;
  }

  // Tokens filled after `round`, up to and including the first EOS.
  #count(round) {
    let first = Infinity;
    const there = [];
    for (const position of this.cells.keys()) {
      const cell = this.cellAt(position, round);
      if (!cell || cell.kind === "pinned") continue;
      there.push(position);
      if (position < first && this.eos.has(cell.token)) first = position;
    }
    return there.filter((position) => position <= first).length;
  }

  #learn(pieces) {
    for (const [id, text] of Object.entries(pieces ?? {})) this.pieces.set(Number(id), String(text));
  }

  piece(token) {
    return this.pieces.get(token) ?? `⟨${token}⟩`;
  }

  promptPiece(index) {
    return this.promptPieces?.[index] ?? this.piece(this.promptIds[index]);
  }

  // The final text after `round`: as the server sent it, or else joined from pieces.
  textAt(round) {
    if (this.done && round >= this.total && typeof this.end.text === "string") return this.end.text;
    if (this.streamed) return this.sent[Math.min(round, this.total)];
    let text = "";
    for (let position = this.prompt; ; position++) {
      const cell = this.cellAt(position, round);
      if (!cell || position >= this.newEnd || this.eos.has(cell.token)) return text;
      text += this.piece(cell.token);
    }
  }

  // What stands after the final text, with gaps where there are masks, up to EOS.
  provisionalAt(round) {
    let [last, first] = [this.prompt - 1, Infinity];
    for (const position of this.cells.keys()) {
      const cell = this.cellAt(position, round);
      if (!cell || position >= this.newEnd) continue;
      if (this.eos.has(cell.token)) first = Math.min(first, position);
      else last = Math.max(last, position);
    }
    let text = "";
    let final = true;
    for (let position = this.prompt; position < Math.min(first, last + 1); position++) {
      const cell = this.cellAt(position, round);
      final &&= Boolean(cell);
      if (!final) text += cell ? this.piece(cell.token) : "▁";
    }
    return text;
  }

  // Masks of the anchor before `round`, from the first block that may be filled.
  masksBefore(round) {
    const record = this.rounds[round - 1];
    const active = record.blocks.filter((b) => b.state === "semi" || b.state === "active");
    const from = Math.max(active[0]?.start ?? 0, this.prompt);
    const to = Math.max(...record.branches.map((b) => b.end));
    const places = [];
    for (let position = from; position < to; position++) {
      if (!this.cellAt(position, round - 1)) places.push(position);
    }
    return { from, to, places };
  }

  // The lines of a trace file: what lopa.trace writes, and the text at the end.
  *lines() {
    const { promptIds: prompt_ids, settings } = this;
    const gaps = { pinned_ids: this.pinnedIds, gap_tokens: this.gapTokens };
    const run = { version: VERSION, prompt_ids, settings, eos_ids: [...this.eos] };
    yield { type: "run", ...run, ...(this.pinnedIds.length ? gaps : {}) };
    for (const round of this.rounds) {
      yield { type: "round", ...Object.fromEntries(ROUND.map((name) => [name, round[name]])) };
    }
    const { token_ids, finish } = this.end;
    const pieces = Object.fromEntries(this.pieces);
    prompt_ids.forEach((id, index) => (pieces[id] ??= this.promptPiece(index)));
    yield { type: "end", token_ids, finish, pieces, text: this.textAt(this.total) };
  }

  toFile() {
    return [...this.lines()].map((line) => JSON.stringify(line) + "\n").join("");
  }
}

// A whole trace file.
export function readTrace(text) {
  const run = new Run();
  let type = null;
  try {
    for (const line of text.split("\n")) {
      if (!line.trim()) continue;
      if (type === "end") throw new TraceError("lines after its end");
      if (type === null && !line.trimStart().startsWith("{")) throw new TraceError("no JSON Lines");
      const before = type;
      type = run.push(JSON.parse(line));
      if ((type === "run") !== (before === null)) {
        throw new TraceError("it must begin with a run line");
      }
    }
  } catch (error) {
    if (error instanceof TraceError) throw error;
    throw new TraceError(error.message);
  }
  if (type !== "end") throw new TraceError("it must finish with an end line");
  return run;
}

// Bytes of a landscape: the confidence of a branch at each of its masks, 255 for 1.
export function landscape(branch) {
  const text = branch.landscape ?? "";
  const bytes = new Uint8Array(text.length >> 1);
  for (let i = 0; i < bytes.length; i++) {
    bytes[i] = (digit(text.charCodeAt(2 * i)) << 4) | digit(text.charCodeAt(2 * i + 1));
  }
  return bytes;
}

const digit = (code) => (code < 58 ? code - 48 : (code | 32) - 87); // of a hexadecimal number

function list(value, name) {
  if (!Array.isArray(value)) throw new TraceError(`${name} is missing`);
  return value;
}

function number(value, name) {
  if (typeof value !== "number") throw new TraceError(`${name} is not a number`);
  return value;
}

function whole(value, name) {
  if (!Number.isInteger(value) || value < 0 || (name !== "token" && value > MAX_POSITION)) {
    throw new TraceError(`${name} is out of range`);
  }
  return value;
}
