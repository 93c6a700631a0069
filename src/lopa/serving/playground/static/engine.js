// The engine view: requests and counters, from `/slots` and `/metrics`.

import { request, ServerError } from "./api.js";
import { fixed, h, setText } from "./dom.js";
import { Notice } from "./notice.js";

const EVERY = 1000; // ms
const HISTORY = 60; // points

export class EngineView {
  constructor(root) {
    this.root = root;
    this.element = Object.fromEntries(
      [...root.querySelectorAll("[id]")].map((element) => [
        element.id.replace("engine-", ""),
        element,
      ]),
    );
    this.notice = new Notice(this.element["notice"]);
    this.history = [];
    this.timer = null;
  }

  start() {
    if (this.timer !== null) return;
    this.timer = 0;
    this.#tick();
  }

  stop() {
    clearTimeout(this.timer);
    this.timer = null;
  }

  async #tick() {
    try {
      const [slots, metrics] = await Promise.all([
        request("slots").then((response) => response.json()),
        request("metrics").then((response) => response.text()),
      ]);
      if (this.element["notice"].hidden === false) this.notice.clear();
      this.show(slots, parseMetrics(metrics));
      this.root.dataset.state = "live";
    } catch (error) {
      if (!(error instanceof ServerError)) throw error;
      this.root.dataset.state = "lost";
      const message =
        error.status === 401
          ? "This server needs an API key: enter it in the settings of Generate."
          : `${error.message} Trying again …`;
      this.notice.show(message);
    }
    if (this.timer !== null) this.timer = setTimeout(() => this.#tick(), EVERY);
  }

  show(slots, metrics) {
    const e = this.element;
    const now = performance.now() / 1000;
    const sum = (name) => metrics.get(name)?.reduce((total, s) => total + s.value, 0);
    const point = {
      now,
      tokens: sum("lopa_tokens_committed_total") ?? 0,
      rounds: sum("lopa_rounds_total") ?? 0,
      running: sum("lopa_requests_running") ?? 0,
      waiting: sum("lopa_requests_waiting") ?? 0,
    };
    this.history.push(point);
    if (this.history.length > HISTORY) this.history.shift();
    const count = sum("lopa_tokens_per_forward_count");
    const tpf = count ? sum("lopa_tokens_per_forward_sum") / count : NaN;
    const before = this.history[Math.max(0, this.history.length - 6)];
    const span = point.now - before.now;
    const rate = (name) => (span > 0 ? (point[name] - before[name]) / span : NaN);
    const figures = {
      running: point.running,
      waiting: point.waiting,
      tpf: fixed(tpf, 2),
      rounds: fixed(rate("rounds"), 1),
      tokens: point.tokens,
      ranks: sum("lopa_ranks_alive") ?? "–",
    };
    for (const [name, value] of Object.entries(figures)) setText(e[name], String(value));
    this.#slots(slots);
    this.#histogram(e["round-times"], metrics.get("lopa_round_seconds_bucket"), seconds);
    this.#histogram(e["forward-tokens"], metrics.get("lopa_tokens_per_forward_bucket"), String);
    this.#wins(metrics.get("lopa_branch_wins_total"));
    this.#more(metrics);
  }

  #slots(response) {
    const list = (response.slots ?? []).map(({ state, ...slot }) => [state, slot]);
    this.element["slots-empty"].hidden = list.length > 0;
    this.element["slots"].hidden = list.length === 0;
    const columns = [...new Set(list.flatMap(([, slot]) => Object.keys(slot)))].filter((name) =>
      list.some(([, slot]) => ["string", "number"].includes(typeof slot[name])),
    );
    this.element["slots"].replaceChildren(
      h("caption", { class: "unseen" }, "Requests in the engine"),
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          h("th", { scope: "col" }, "state"),
          ...columns.map((name) => h("th", { scope: "col" }, name.replaceAll("_", " "))),
        ),
      ),
      h(
        "tbody",
        {},
        ...list.map(([state, slot]) =>
          h(
            "tr",
            {},
            h("td", {}, h("span", { class: `badge ${state}` }, state)),
            ...columns.map((name) =>
              h("td", { class: typeof slot[name] === "number" ? "number" : null }, cell(slot[name])),
            ),
          ),
        ),
      ),
    );
  }

  // Cumulative buckets of Prometheus as bars.
  #histogram(root, buckets, label) {
    const bounds = (buckets ?? [])
      .map((sample) => ({ le: Number(sample.labels.le.replace("+Inf", "Infinity")), n: sample.value }))
      .sort((a, b) => a.le - b.le);
    const bars = bounds.map(({ le, n }, i) => ({ le, low: bounds[i - 1]?.le ?? 0, n: n - (bounds[i - 1]?.n ?? 0) }));
    const used = bars.filter((bar) => bar.n > 0);
    if (!used.length) {
      root.replaceChildren(h("p", { class: "empty" }, "No round yet."));
      return;
    }
    const from = bars.indexOf(used[0]);
    const to = bars.indexOf(used.at(-1));
    const shown = bars.slice(Math.max(0, from - 1), to + 2);
    const total = used.reduce((sum, bar) => sum + bar.n, 0);
    this.#bars(
      root,
      shown.map((bar) => [
        bar.le === Infinity ? `over ${label(bar.low)}` : `up to ${label(bar.le)}`,
        bar.n,
      ]),
      total,
    );
  }

  #wins(samples) {
    const wins = (samples ?? []).map(({ labels, value }) => [labels.rank, value]);
    const order = ([rank]) => (rank === "anchor" ? Infinity : Number(rank));
    wins.sort((a, b) => order(a) - order(b));
    const root = this.element["wins"];
    if (!wins.length) root.replaceChildren(h("p", { class: "empty" }, "No round with branches yet."));
    else {
      this.#bars(
        root,
        wins.map(([rank, n]) => [rank === "anchor" ? "anchor" : `lookahead ${rank}`, n]),
        wins.reduce((sum, [, n]) => sum + n, 0),
      );
    }
  }

  #bars(root, pairs, total) {
    const most = Math.max(...pairs.map(([, n]) => n), 1);
    const rows = pairs.map(([name, n]) => {
      const bar = h("span", { class: "track" });
      bar.style.backgroundSize = `${((100 * n) / most).toFixed(1)}% 100%`;
      return h(
        "tr",
        {},
        h("th", { scope: "row" }, name),
        h("td", { class: "bar-cell" }, bar),
        h("td", { class: "number" }, String(n)),
        h("td", { class: "number share" }, `${Math.round((100 * n) / Math.max(total, 1))} %`),
      );
    });
    root.replaceChildren(h("table", { class: "bars" }, h("tbody", {}, ...rows)));
  }

  #more(metrics) {
    const names = [
      ["lopa_cache_pages_used", "cache pages used"],
      ["lopa_cache_pages", "cache pages"],
      ["lopa_cache_tokens", "cache tokens reserved"],
      ["lopa_engine_restarts", "engine restarts"],
      ["lopa_requests_rejected_total", "requests refused (429)"],
      ["lopa_answers_dropped_total", "clients disconnected"],
    ];
    this.element["more"].replaceChildren(
      ...names
        .filter(([name]) => metrics.has(name))
        .flatMap(([name, label]) => [
          h("dt", {}, label),
          h("dd", {}, String(metrics.get(name).reduce((sum, s) => sum + s.value, 0))),
        ]),
    );
  }
}

const seconds = (value) => (value < 1 ? `${1000 * value} ms` : `${value} s`);

function cell(value) {
  if (typeof value === "number" && !Number.isInteger(value)) return value.toFixed(2);
  return value === null || value === undefined ? "" : String(value);
}

// Prometheus' text format: name → [{labels, value}].
export function parseMetrics(text) {
  const metrics = new Map();
  for (const line of text.split("\n")) {
    const match = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)/.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) {
      labels[name] = value.replace(/\\(.)/g, (_, char) => (char === "n" ? "\n" : char));
    }
    if (!metrics.has(match[1])) metrics.set(match[1], []);
    metrics.get(match[1]).push({ labels, value: Number(match[3]) });
  }
  return metrics;
}
