// The race view: one prompt, up to four settings, compared at the same round or the same second.

import { ServerError, stream } from "./api.js";
import { Chart } from "./chart.js";
import { exampleChips, fixed, h, plural, setText } from "./dom.js";
import { TokenGrid } from "./grid.js";
import { Notice } from "./notice.js";
import { Player, playerKeys } from "./player.js";
import { decodeSettings, encodeSettings, SettingsForm, summary } from "./settings.js";
import { Run } from "./trace.js";

const MAX_LANES = 4;
const TIME_STEPS = 400; // positions of the scrubber when it counts seconds

export class RaceView {
  constructor(root, info, { onaddress }) {
    this.root = root;
    this.info = info;
    this.onaddress = onaddress;
    this.lanes = [];
    this.running = null;
    const e = (this.element = Object.fromEntries(
      [...root.querySelectorAll("[id]")].map((element) => [element.id.replace("race-", ""), element]),
    ));
    this.notice = new Notice(e["notice"]);
    this.chart = new Chart(e["chart"]);
    this.player = new Player(e, e["label"], (tick) => this.show(tick));
    this.ends = 0; // rounds or seconds
    this.player.describe = (tick, total) =>
      this.byTime
        ? `${((tick / TIME_STEPS) * this.ends).toFixed(2)} s of ${this.ends.toFixed(2)} s`
        : `round ${tick} of ${total}`;
    playerKeys(this.player, () => !root.hidden);
    e["prompt"].value = info.examples[0]?.prompt ?? "";
    e["tokens"].value = info.start.max_new_tokens;
    exampleChips(e["examples"], info.examples, (prompt) => {
      e["prompt"].value = prompt;
      onaddress();
    });
    e["form"].addEventListener("submit", (event) => {
      event.preventDefault();
      this.start();
    });
    e["stop"].addEventListener("click", () => this.running?.abort());
    e["add"].addEventListener("click", () => {
      this.addLane({});
      onaddress();
    });
    e["by"].addEventListener("change", () => this.#retime());
    e["chat-row"].hidden = !info.chat;
    for (const name of ["prompt", "tokens", "together", "chat"]) {
      e[name].addEventListener("input", () => onaddress());
    }
    info.contestants.forEach((values) => this.addLane(values));
    this.#ready();
  }

  addLane(values) {
    if (this.lanes.length >= MAX_LANES) return;
    const index = this.lanes.length;
    const lane = { run: null, tick: 0, error: null };
    lane.title = h("h2", {});
    lane.counters = h("p", { class: "lane-counters" });
    lane.gridRoot = h("div", {});
    lane.text = h("span");
    lane.provisional = h("span", { class: "provisional" });
    const form = h("div", { class: "lane-form" });
    lane.details = h("details", { class: "lane-settings" }, h("summary", {}, "Settings"), form);
    lane.remove = h(
      "button",
      { type: "button", class: "icon", "aria-label": "Remove this contestant" },
      "×",
    );
    lane.remove.addEventListener("click", () => this.#removeLane(lane));
    lane.root = h(
      "article",
      { class: "lane-card" },
      h("header", {}, h("i", { class: "lane-mark" }), lane.title, lane.remove),
      lane.details,
      lane.counters,
      lane.gridRoot,
      h("p", { class: "lane-text" }, lane.text, lane.provisional),
    );
    lane.grid = new TokenGrid(lane.gridRoot, { compact: true });
    this.lanes.push(lane);
    lane.form = new SettingsForm(form, this.info, {
      prefix: `lane-${Date.now().toString(36)}-${index}-`,
      without: ["max_new_tokens"],
      open: ["Decoding"],
      onchange: () => {
        this.#name(lane);
        this.onaddress();
      },
    });
    lane.form.set(values);
    this.element["lanes"].append(lane.root);
    this.#ready();
  }

  #removeLane(lane) {
    this.running?.abort();
    this.lanes.splice(this.lanes.indexOf(lane), 1);
    lane.root.remove();
    this.#ready();
    this.#retime();
    this.onaddress();
    this.element["add"].focus();
  }

  #ready() {
    this.lanes.forEach((lane, index) => {
      lane.root.dataset.lane = index;
      lane.remove.hidden = this.lanes.length < 2;
      this.#name(lane);
    });
    this.element["add"].hidden = this.lanes.length >= MAX_LANES;
  }

  #name(lane) {
    setText(lane.title, summary(lane.form.values(), this.info));
  }

  // -- running -----------------------------------------------------------------------------------

  async start() {
    this.running?.abort();
    this.notice.clear();
    const e = this.element;
    if (!e["prompt"].value.trim()) {
      this.notice.show("Write a prompt first.");
      return;
    }
    const control = (this.running = new AbortController());
    this.root.dataset.state = "running";
    this.together = e["together"].checked;
    e["stop"].hidden = false;
    e["start"].hidden = true;
    e["track"].hidden = false;
    e["results"].hidden = true;
    setText(e["status"], "");
    for (const lane of this.lanes) {
      lane.run = new Run();
      lane.error = null;
      lane.tick = 0;
      lane.details.open = false;
      lane.grid.setRun(lane.run);
      setText(lane.text, "");
      setText(lane.provisional, "");
      setText(lane.counters, "waiting");
    }
    this.player.reset(true);
    const lanes = [...this.lanes];
    if (this.together) {
      await Promise.all(lanes.map((lane) => this.#drive(lane, control)));
    } else {
      for (const lane of lanes) await this.#drive(lane, control);
    }
    if (this.running !== control) return;
    this.running = null;
    this.root.dataset.state = "done";
    e["stop"].hidden = true;
    e["start"].hidden = false;
    this.#retime();
    this.player.end();
    this.player.go(this.player.total);
    this.#results();
  }

  async #drive(lane, control) {
    const { prompt, chat, tokens } = this.element;
    const settings = lane.form.values();
    if (Number(tokens.value)) settings.max_new_tokens = Number(tokens.value);
    const asked = { prompt: prompt.value, chat: chat.checked, settings };
    try {
      for await (const record of stream(this.info, asked, control.signal)) {
        const type = lane.run.push(record);
        if (type === "error") throw new ServerError(lane.run.error.message ?? "The run failed.");
        if (type === "round") this.#retime();
      }
    } catch (error) {
      if (error.name === "AbortError") return;
      if (!(error instanceof ServerError)) throw error;
      lane.error = error.message;
      setText(lane.counters, error.message);
      if (error.param) lane.form.complain(error.param, error.message);
      this.notice.failed(error, { kept: "", again: () => this.start() });
    }
  }

  // -- time --------------------------------------------------------------------------------------

  get byTime() {
    return this.element["by"].value === "time";
  }

  // The end of the common clock: while all run together, that of the slowest still running.
  #retime() {
    const runs = this.lanes.map((lane) => lane.run).filter((run) => run);
    const live = this.running !== null;
    const open = live ? runs.filter((run) => !run.done && (run.total || this.together)) : [];
    const most = (values) => Math.max(0, ...values);
    let end = most(runs.map((run) => (this.byTime ? run.seconds.at(-1) : run.total)));
    if (open.length && this.together) {
      end = Math.min(end, ...open.map((run) => (this.byTime ? run.seconds.at(-1) : run.total)));
    }
    this.ends = end;
    const ticks = this.byTime ? (end > 0 ? TIME_STEPS : 0) : end;
    const times = Array.from({ length: ticks + 1 }, (_, tick) =>
      this.byTime ? (tick / TIME_STEPS) * end : this.#slowest(runs, tick),
    );
    const e = this.element;
    for (const option of e["speed"].options) option.hidden = this.byTime && option.value !== "time";
    if (this.byTime) e["speed"].value = "time";
    this.player.extend(ticks, times);
    if (!live && this.player.total) this.show(Math.min(this.player.shown, this.player.total));
    e["shared"].hidden = !(this.byTime && this.together);
  }

  #slowest(runs, tick) {
    return Math.max(0, ...runs.map((run) => run.seconds[Math.min(tick, run.total)]));
  }

  show(tick) {
    const now = this.byTime ? (tick / TIME_STEPS) * this.ends : tick;
    const series = [];
    this.lanes.forEach((lane) => {
      const { run } = lane;
      if (!run) {
        series.push({ points: [], upTo: 0 });
        return;
      }
      let round = Math.min(tick, run.total);
      if (this.byTime) {
        round = 0;
        while (round < run.total && run.seconds[round + 1] <= now + 1e-9) round++;
      }
      lane.tick = round;
      lane.grid.show(round);
      setText(lane.text, run.textAt(round));
      setText(lane.provisional, run.provisionalAt(round));
      if (!lane.error) {
        const tokens = run.tokens[round];
        const over = run.done && round === run.total;
        setText(
          lane.counters,
          `${plural(round, "round")} · ${plural(tokens, "token")} · TPF ${round ? fixed(tokens / round, 2) : "–"}` +
            ` · ${fixed(run.seconds[round], 2)} s${over ? " · done" : ""}`,
        );
        lane.root.dataset.done = over ? "yes" : "no";
      }
      series.push({
        points: run.tokens.map((count, r) => [this.byTime ? run.seconds[r] : r, count]),
        upTo: round,
      });
    });
    this.chart.show(series, this.byTime ? "seconds" : "rounds", now);
  }

  // -- the table ---------------------------------------------------------------------------------

  #results() {
    const rows = this.lanes.filter((lane) => lane.run?.done);
    const e = this.element;
    e["results"].hidden = !rows.length;
    if (!rows.length) return;
    const figures = rows.map(({ run }) => {
      const [rounds, tokens, seconds] = [run.total, run.tokens[run.total], run.seconds[run.total]];
      return { rounds, tokens, tpf: tokens / rounds, speed: tokens / seconds, seconds };
    });
    const columns = [
      ["rounds", "rounds", 0, Math.min],
      ["tokens", "tokens", 0, null],
      ["tpf", "TPF", 2, Math.max],
      ["speed", "tokens/s", 1, Math.max],
      ["seconds", "seconds", 2, Math.min],
    ];
    const cells = (row) =>
      columns.map(([key, , digits, best]) => {
        const value = figures[row][key];
        const wins = rows.length > 1 && best && value === best(...figures.map((f) => f[key]));
        return h("td", { class: wins ? "number best" : "number" }, fixed(value, digits));
      });
    e["table"].replaceChildren(
      h("caption", { class: "unseen" }, "Results of the race"),
      h(
        "thead",
        {},
        h(
          "tr",
          {},
          h("th", { scope: "col" }, "settings"),
          ...columns.map(([, name]) => h("th", { scope: "col", class: "number" }, name)),
          h("th", { scope: "col" }, "text"),
        ),
      ),
      h(
        "tbody",
        {},
        ...rows.map((lane, row) =>
          h(
            "tr",
            { "data-lane": this.lanes.indexOf(lane) },
            h("th", { scope: "row" }, h("i", { class: "lane-mark" }), summary(lane.form.values(), this.info)),
            ...cells(row),
            h("td", { class: "answer-cell" }, lane.run.textAt(lane.run.total)),
          ),
        ),
      ),
    );
    const fewest = Math.min(...figures.map((f) => f.rounds));
    const first = rows[figures.findIndex((f) => f.rounds === fewest)];
    const same = new Set(rows.map((lane) => lane.run.textAt(lane.run.total))).size === 1;
    setText(
      e["status"],
      `${summary(first.form.values(), this.info)} has the fewest rounds: ${fewest}. ` +
        (rows.length > 1 ? (same ? "All texts are the same." : "The texts differ.") : ""),
    );
  }

  // -- address -----------------------------------------------------------------------------------

  address() {
    const e = this.element;
    const search = new URLSearchParams({ prompt: e["prompt"].value, tokens: e["tokens"].value });
    if (e["together"].checked) search.append("together", "yes");
    if (e["chat"].checked) search.append("chat", "true");
    for (const lane of this.lanes) search.append("lane", encodeSettings(lane.form.values()));
    return search;
  }

  restore(search) {
    const e = this.element;
    if (search.has("prompt")) e["prompt"].value = search.get("prompt");
    if (Number(search.get("tokens"))) e["tokens"].value = Number(search.get("tokens"));
    e["together"].checked = search.get("together") === "yes";
    e["chat"].checked = search.get("chat") === "true";
    const lanes = search.getAll("lane").slice(0, MAX_LANES);
    if (!lanes.length) return;
    for (const lane of this.lanes.splice(0)) lane.root.remove();
    for (const lane of lanes) this.addLane(decodeSettings(new URLSearchParams(lane), this.info));
  }
}
