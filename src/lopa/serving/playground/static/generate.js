// The generate view: one prompt, its output as it is filled, the branches, and the player.

import { apiKey, ServerError, stream } from "./api.js";
import { BranchLanes, story } from "./branches.js";
import { LEVELS, STEP_LABELS } from "./colour.js";
import { download, exampleChips, fixed, h, plural, setAttribute, setText, visible } from "./dom.js";
import { TokenGrid } from "./grid.js";
import { Notice } from "./notice.js";
import { Player, playerKeys } from "./player.js";
import { decodeSettings, encodeSettings, SettingsForm } from "./settings.js";
import { hideTip, showTip } from "./tip.js";
import { MAX_BYTES, readTrace, Run, TraceError } from "./trace.js";

const TEXT_EVERY = 250; // ms, while playing
const NEARBY = 8; // lengths of a hole that are tried: its own, and so many more and fewer
const PARTS = ["tokens", "lanes", "more lanes", "round", "text"];

export class GenerateView {
  constructor(root, info, { onaddress }) {
    this.root = root;
    this.info = info;
    this.onaddress = onaddress;
    this.run = null;
    this.textShown = 0;
    this.wanted = new Set(); // parts that are still to be rendered
    this.turn = PARTS.length - 1;
    this.running = null; // AbortController of the run in progress
    this.element = Object.fromEntries(
      [...root.querySelectorAll("[id]")].map((element) => [element.id, element]),
    );
    const e = this.element;
    this.notice = new Notice(e["notice"]);
    this.settings = new SettingsForm(e["settings"], info, {
      open: ["Decoding"],
      onchange: () => onaddress(),
    });
    this.grid = new TokenGrid(e["grid"], {
      onpick: (position) => this.#pick(position),
      ondetail: (position, cell) => {
        if (position === null) hideTip();
        else showTip(cell, this.grid.describe(position));
      },
    });
    this.lanes = new BranchLanes(e["lanes"], { onpoint: (positions) => this.grid.point(positions) });
    this.player = new Player(e, e["round-label"], (round, moving) => this.show(round, moving));
    playerKeys(this.player, () => !root.hidden);
    this.#compose();
    this.#files();
    this.#legend();
  }

  // -- the request -------------------------------------------------------------------------------

  #compose() {
    const e = this.element;
    exampleChips(e["examples"], this.info.examples, (prompt) => {
      e["prompt"].value = prompt;
      this.onaddress();
      e["prompt"].focus();
    });
    if (this.info.hint) setText(e["prompt-hint"], `${this.info.hint} Ctrl + Enter runs it.`);
    e["all-settings"].open = matchMedia("(min-width: 900px)").matches;
    e["chat-row"].hidden = !this.info.chat;
    e["prompt"].value = this.info.examples[0]?.prompt ?? "";
    e["prompt"].addEventListener("input", () => this.onaddress());
    e["chat"].addEventListener("change", () => this.onaddress());
    e["schema"].addEventListener("input", () => {
      this.#complainOfSchema("");
      this.onaddress();
    });
    e["prompt"].addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.start();
    });
    e["compose"].addEventListener("submit", (event) => {
      event.preventDefault();
      this.start();
    });
    e["stop"].addEventListener("click", () => this.running?.abort());
    e["fill-anew"].addEventListener("click", () => this.fillAnew());
    e["api-key"].value = apiKey.get();
    e["api-key"].addEventListener("input", () => apiKey.set(e["api-key"].value.trim()));
    e["colour"].addEventListener("change", () => {
      this.grid.setColour(e["colour"].value);
      this.#legend();
    });
  }

  start() {
    const { prompt, chat } = this.element;
    if (!prompt.value.trim()) {
      this.notice.show("Write a prompt first.");
      prompt.focus();
      return null;
    }
    const settings = this.settings.values();
    this.#complainOfSchema("");
    let more;
    try {
      more = this.#format();
    } catch (error) {
      this.#complainOfSchema(`This is no JSON (${error.message}).`);
      this.element["schema"].focus();
      return null;
    }
    return this.#ask({ prompt: prompt.value, chat: chat.checked, settings, more });
  }

  // What the answer has to fit, as a field of the request.
  #format() {
    const text = this.element["schema"].value;
    if (!text.trim()) return {};
    const json_schema = { name: "answer", schema: JSON.parse(text) };
    return { response_format: { type: "json_schema", json_schema } };
  }

  #complainOfSchema(message) {
    const e = this.element;
    setText(e["schema-error"], message);
    setAttribute(e["schema"], "aria-invalid", message ? "true" : null);
    if (message) e["all-settings"].open = e["schema-group"].open = true;
  }

  // kept: how many of the prompt's last tokens are a part of the answer.
  async #ask(asked, kept = 0) {
    this.running?.abort();
    this.notice.clear();
    this.settings.complain(null);
    const control = (this.running = new AbortController());
    const run = new Run();
    run.kept = kept;
    this.#state("running");
    setText(this.element["status"], "Waiting for the first round …");
    try {
      for await (const record of stream(this.info, asked, control.signal)) {
        const type = run.push(record);
        if (type === "run") this.open(run, true);
        if (type === "error") throw new ServerError(run.error.message ?? "The run failed.");
        if (type !== "round") continue;
        if (run.total === 1) setText(this.element["status"], "Running …");
        this.player.extend(run.total, run.seconds);
      }
    } catch (error) {
      this.#failed(error, run, control, () => this.#ask(asked, kept));
    } finally {
      if (this.running === control) {
        this.running = null;
        this.#state(this.run ? "shown" : "empty");
        if (this.run === run) this.player.end();
        if (run.done) this.#finished();
      }
    }
  }

  #failed(error, run, control, again) {
    if (error.name === "AbortError") {
      if (this.running === control) setText(this.element["status"], `Stopped in round ${run.total}.`);
      return;
    }
    setText(this.element["status"], "");
    if (error instanceof TraceError) {
      this.notice.show(`The server sent a line that this page cannot read (${error.message}).`);
      return;
    }
    if (!(error instanceof ServerError)) throw error;
    if (["response_format", "schema"].includes(error.param)) this.#complainOfSchema(error.message);
    else if (error.param) this.settings.complain(error.param, error.message);
    const kept = run.total ? `The ${plural(run.total, "round")} that arrived are kept. ` : "";
    this.notice.failed(error, { kept, again });
  }

  #finished() {
    const { run } = this;
    const reasons = {
      eos: "EOS",
      stop: "a stop string",
      length: "the maximum of new tokens",
      rounds: "the maximum of rounds",
      filled: "the text behind the gap",
    };
    const [tokens, rounds] = [run.tokens[run.total], run.total];
    setText(
      this.element["status"],
      `Finished: ${plural(tokens, "token")} in ${plural(rounds, "round")}, ` +
        `ended by ${reasons[run.end.finish] ?? run.end.finish}.`,
    );
  }

  #state(state) {
    const e = this.element;
    this.root.dataset.state = state;
    const pressed = [e["run"], e["stop"]].includes(document.activeElement);
    e["stop"].hidden = state !== "running";
    e["run"].hidden = state === "running";
    if (pressed) (state === "running" ? e["stop"] : e["run"]).focus(); // they share one place
    e["welcome"].hidden = state !== "empty";
    e["stage"].hidden = this.run === null;
    e["save"].disabled = !this.run?.done;
    e["fill-anew"].disabled = state === "running" || !this.run?.done;
  }

  // -- a hole in the answer ----------------------------------------------------------------------

  // The tokens of the whole answer, what was pinned included, and the prompt before it.
  #answerIds() {
    const { run } = this;
    const split = run.prompt - run.kept;
    const tail = run.pinnedIds.at(-1) ?? [];
    const ids = [...run.promptIds.slice(split), ...run.end.token_ids, ...tail];
    return { before: run.promptIds.slice(0, split), ids };
  }

  // First and last token of what is selected in the answer's text; null: nothing is.
  #selected(ids) {
    const selection = getSelection();
    const whole = this.element["text"];
    if (selection.isCollapsed || !whole.contains(selection.anchorNode) || !whole.contains(selection.focusNode)) {
      return null;
    }
    const range = selection.getRangeAt(0);
    const upTo = document.createRange();
    upTo.selectNodeContents(whole);
    upTo.setEnd(range.startContainer, range.startOffset);
    const start = upTo.toString().length;
    const end = start + range.toString().length;
    const touched = [];
    let at = 0;
    ids.forEach((id, index) => {
      const next = at + (this.run.eos.has(id) ? 0 : this.run.piece(id).length);
      if (at < end && next > start) touched.push(index);
      at = next;
    });
    return touched.length ? [touched[0], touched.at(-1)] : null;
  }

  fillAnew() {
    const { before, ids } = this.#answerIds();
    const hole = this.#selected(ids);
    if (!hole) {
      this.notice.show("Select a part of the text first: it is taken out and filled anew.");
      return;
    }
    const [first, last] = hole;
    const [prompt, suffix] = [[...before, ...ids.slice(0, first)], ids.slice(last + 1)];
    if (!suffix.length || !prompt.length) {
      this.notice.show("Leave some text before and behind the hole.");
      return;
    }
    const count = last - first + 1;
    const search = this.element["gap-length"].value === "search";
    const least = Math.max(1, count - NEARBY);
    const lengths = Array.from({ length: count + NEARBY + 1 - least }, (_, i) => least + i);
    const { max_new_tokens: _, ...settings } = this.settings.values();
    const more = { suffix, gap_tokens: search ? lengths : count };
    this.#ask({ prompt, chat: false, settings, more }, first);
  }

  // -- showing -----------------------------------------------------------------------------------

  open(run, live = false) {
    this.run = run;
    const e = this.element;
    this.grid.setRun(run);
    this.#state(live ? "running" : "shown");
    const pieces = run.promptIds.map((_, index) => run.promptPiece(index));
    setText(e["prompt-text"], pieces.map((piece) => piece.replaceAll("\n", "↵\n")).join(""));
    const join = (ids) => ids.map((id) => (run.eos.has(id) ? "" : run.piece(id))).join("");
    setText(e["kept"], pieces.slice(pieces.length - run.kept).join(""));
    setText(e["answer"], "");
    setText(e["behind"], join(run.pinnedIds.at(-1) ?? []));
    e["answer"].setAttribute("aria-live", live ? "polite" : "off");
    this.player.reset(live);
    if (live) {
      this.show(0);
    } else {
      this.player.extend(run.total, run.seconds);
      this.player.go(run.total);
      this.#finished();
    }
  }

  // Everything at once, or, while playing, one part per frame: in turn, each at the newest round.
  show(round, moving = false) {
    if (!this.run) return;
    hideTip();
    this.round = round;
    const now = performance.now();
    // A long text is costly to lay out.
    const text = !moving || now - this.textShown > TEXT_EVERY;
    if (text) this.textShown = now;
    PARTS.forEach((part) => (part !== "text" || text) && this.wanted.add(part));
    if (moving) this.#nextPart();
    else while (this.wanted.size) this.#showPart();
  }

  #nextPart() {
    if (this.due || !this.wanted.size) return;
    this.#showPart();
    this.due = requestAnimationFrame(() => {
      this.due = 0;
      this.#nextPart();
    });
  }

  #showPart() {
    do this.turn = (this.turn + 1) % PARTS.length;
    while (!this.wanted.has(PARTS[this.turn]));
    const part = PARTS[this.turn];
    this.wanted.delete(part);
    if (part === "tokens") this.#showTokens();
    else if (part === "round") this.#showRound();
    else if (part === "text") this.#showText();
    else this.lanes.show(this.run, this.round, part === "lanes" ? 0 : 1);
  }

  #showTokens() {
    const { run, round, element: e } = this;
    this.grid.show(round);
    const tokens = run.tokens[round];
    const seconds = run.seconds[round];
    setText(e["count-rounds"], String(round));
    setText(e["count-tokens"], String(tokens));
    setText(e["count-tpf"], round ? fixed(tokens / round, 2) : "–");
    setText(e["count-speed"], seconds ? fixed(tokens / seconds, 1) : "–");
  }

  #showRound() {
    const { run, round, element: e } = this;
    const record = run.rounds[round - 1];
    setText(e["story"], story(run, round));
    setText(e["branches-title"], record ? `Branches of round ${round}` : "Branches");
    const cached = record ? record.cached + record.committed : 0;
    setText(
      e["prompt-state"],
      `${plural(run.prompt, "token")}${cached >= run.prompt && run.prompt ? " · in the cache" : ""}`,
    );
  }

  #showText() {
    const { run, round, element: e } = this;
    this.#text(run.textAt(round));
    setText(e["provisional"], run.provisionalAt(round));
    if (run.done && round >= run.total) e["answer"].setAttribute("aria-live", "off");
  }

  // Text grows at its end while a run is live; a screen reader announces only what is added.
  #text(text) {
    const answer = this.element["answer"];
    const before = answer.textContent;
    if (text === before) return;
    if (text.startsWith(before)) answer.append(text.slice(before.length));
    else answer.textContent = text;
  }

  #pick(position) {
    const cell = this.run.cells.get(position);
    if (cell?.round) this.player.go(cell.round);
  }

  repaint() {
    this.lanes.repaint();
  }

  #legend() {
    const e = this.element;
    const by = e["colour"].value;
    const swatches = Array.from({ length: LEVELS }, (_, level) =>
      h("i", {
        class: `swatch ${by === "round" ? "r" : "c"}${level}`,
        title: by === "round" ? "" : `above ${STEP_LABELS[level]}`,
      }),
    );
    const [low, high] = by === "round" ? ["first round", "last"] : ["low confidence", "high"];
    e["scale"].replaceChildren(low, h("span", { class: "swatches" }, ...swatches), high);
  }

  // -- trace files -------------------------------------------------------------------------------

  #files() {
    const e = this.element;
    e["save"].addEventListener("click", () => {
      const name = (this.run.settings.decoder ?? "run") + `-${this.run.total}-rounds.jsonl`;
      download(name, this.run.toFile());
    });
    for (const button of [e["open"], e["welcome-open"]]) {
      button.addEventListener("click", () => e["file"].click());
    }
    e["file"].addEventListener("change", () => {
      if (e["file"].files[0]) this.openFile(e["file"].files[0]);
      e["file"].value = "";
    });
  }

  async openFile(file) {
    this.running?.abort();
    this.running = null;
    this.notice.clear();
    try {
      if (file.size > MAX_BYTES) throw new TraceError(`it is larger than ${MAX_BYTES} bytes`);
      this.open(readTrace(await file.text()));
    } catch (error) {
      this.notice.show(`${visible(file.name)} is not a complete lopa trace (${error.message}).`);
    }
  }

  // -- address -----------------------------------------------------------------------------------

  address() {
    const search = encodeSettings(this.settings.values());
    search.append("prompt", this.element["prompt"].value);
    if (this.element["chat"].checked) search.append("chat", "true");
    if (this.element["schema"].value.trim()) search.append("schema", this.element["schema"].value);
    return search;
  }

  restore(search) {
    if (search.has("prompt")) this.element["prompt"].value = search.get("prompt");
    this.element["chat"].checked = search.get("chat") === "true";
    this.element["schema"].value = search.get("schema") ?? "";
    this.element["schema-group"].open = search.has("schema");
    this.settings.set(decodeSettings(search, this.info));
  }
}

