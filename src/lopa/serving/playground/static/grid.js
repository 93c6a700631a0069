// The output as a grid of tokens, block by block. `show(round)` changes only what differs from the
// round shown before, so the cost of a frame does not grow with the output.

import { confidenceLevel, roundLevel } from "./colour.js";
import { h, percent, plural, quoted, setAttribute, setText, visible } from "./dom.js";

export const KINDS = {
  threshold: "above the threshold",
  forced: "forced: the best of its block, below the threshold",
  lookahead: "lookahead: its branch won",
  merged: "merged: other branches agree",
  count: "by count: a fixed number per round",
  edited: "edited: replaces a token",
  pinned: "pinned: given, never filled",
};

const STATES = {
  semi: ["semi-activated", "fills only tokens above the threshold"],
  active: ["active", "fills at least one token per round"],
  to_cache: ["committing", "complete: its KV is committed to the cache in this round"],
  committed: ["committed", "read from the cache, no longer computed"],
  done: ["complete", "no masks left"],
  ahead: ["not appended", "appended in a later round"],
};

// Drafts of the round after this one. With branches auto it tries the first few of those that were
// spawned: how many is known once it has run.
function nextDrafts(run, round) {
  const spawned = run.rounds[round - 1]?.spawned ?? [];
  const next = run.rounds[round];
  return next ? spawned.slice(0, next.branches.length - 1) : spawned;
}

export class TokenGrid {
  // compact: small squares without text. onpick(position): a token was clicked.
  constructor(root, { compact = false, onpick = null, ondetail = null } = {}) {
    this.root = root;
    this.compact = compact;
    this.colourBy = "confidence";
    root.classList.add("token-grid");
    root.classList.toggle("compact", compact);
    this.clear();
    if (!compact) this.#listen(onpick, ondetail);
  }

  clear() {
    this.run = null;
    this.shown = 0;
    this.cells = new Map(); // position → element
    this.heads = []; // by block: elements and what they show
    this.fresh = [];
    this.candidates = [];
    this.pointed = [];
    this.coloured = 0; // rounds that the colours by round are spread over
    this.entry = null; // the cell that is the tab stop
    this.root.replaceChildren();
  }

  setRun(run) {
    this.clear();
    this.run = run;
  }

  setColour(by) {
    this.colourBy = by;
    for (const [position, element] of this.cells) this.#paint(position, element);
  }

  show(round) {
    const { run } = this;
    if (!run) return;
    while (this.heads.length < run.blocks.length) this.#addBlock(run.blocks[this.heads.length]);
    const before = this.shown;
    this.shown = round;
    for (let r = before + 1; r <= round; r++) {
      for (const position of run.filledIn[r]) this.#paint(position);
    }
    for (let r = before; r > round; r--) {
      for (const position of run.filledIn[r]) this.#paint(position);
    }
    this.#mark("fresh", "fresh", run.filledIn[round] ?? []);
    this.#candidates(round < run.total || !run.done ? nextDrafts(run, round) : []);
    if (this.colourBy === "round" && this.coloured !== run.total) {
      for (const [position, element] of this.cells) this.#paint(position, element);
      this.coloured = run.total;
    }
    this.heads.forEach((head, index) => this.#state(head, run.blocks[index], round));
  }

  point(positions) {
    this.#mark("pointed", "pointed", positions);
  }

  // Details of a position after the round shown.
  describe(position) {
    const { run } = this;
    const cell = run.cellAt(position, this.shown);
    const place = position - run.prompt;
    if (!cell) {
      const drafts = nextDrafts(run, this.shown);
      const found = drafts.flatMap((draft) => draft.filter((a) => a.position === position));
      const rows = [["place", `+${place}`]];
      if (found.length) {
        rows.push(["next lookahead", quoted(run.piece(found[0].token))]);
        rows.push(["probability", percent(found[0].max_prob)]);
      }
      if (found.length > 1) rows.push(["in branches", `${found.length} of ${drafts.length}`]);
      return { title: "mask", rows };
    }
    if (cell.kind === "pinned") {
      return { title: quoted(run.piece(cell.token)), rows: [["place", `+${place}`], ["fill", KINDS.pinned]] };
    }
    return {
      title: quoted(run.piece(cell.token)),
      rows: [
        ["place", `+${place}`],
        ["probability", percent(cell.prob)],
        ["filled in", `round ${cell.round} of ${run.total}`],
        ["fill", KINDS[cell.kind] ?? cell.kind],
        ...(cell.before ? [["before", quoted(run.piece(cell.before.token))]] : []),
        ["token id", String(cell.token)],
      ],
    };
  }

  #addBlock(block) {
    const number = this.heads.length + 1;
    const state = h("span", { class: "state" });
    const left = h("span", { class: "left" });
    const body = h("div", { class: "cells" });
    const element = h("section", { class: "block", "aria-label": `block ${number}` });
    if (!this.compact) {
      element.append(h("header", {}, h("b", {}, `Block ${number}`), state, left));
    }
    element.append(body);
    if (this.compact) body.style.setProperty("--columns", Math.min(block.end - block.start, 32));
    for (let position = block.start; position < block.end; position++) {
      const cell = this.compact
        ? h("i", { class: "cell" })
        : h(
            "button",
            { type: "button", class: "cell", tabindex: -1, "data-position": position },
            h("span"), // a box of fixed size for the text, so that only it is laid out
          );
      this.cells.set(position, cell);
      this.#paint(position, cell);
      body.append(cell);
    }
    if (!this.compact && !this.entry) {
      this.entry = this.cells.get(block.start);
      this.entry.tabIndex = 0;
    }
    this.heads.push({ element, state, left });
    this.root.append(element);
  }

  #paint(position, element = this.cells.get(position)) {
    if (!element) return;
    const cell = this.run.cellAt(position, this.shown);
    if (!cell) {
      element.className = "cell";
      if (!this.compact) {
        setText(element.firstChild, "·");
        setAttribute(element, "aria-label", `mask at +${position - this.run.prompt}`);
      }
      return;
    }
    const scale =
      this.colourBy === "round"
        ? `r${roundLevel(cell.round, this.run.total)}`
        : `c${confidenceLevel(cell.prob)}`;
    const isEos = this.run.eos.has(cell.token);
    const piece = this.run.piece(cell.token);
    const text = isEos ? "∎" : visible(piece);
    element.className = `cell ${cell.kind === "pinned" ? "" : `filled ${scale} `}${cell.kind}${isLong(text) ? " long" : ""}`;
    if (this.compact) return;
    setText(element.firstChild, text);
    setAttribute(
      element,
      "aria-label",
      cell.kind === "pinned"
        ? `${quoted(piece)} at +${position - this.run.prompt}, pinned`
        : `${quoted(piece)} at +${position - this.run.prompt}, ${percent(cell.prob)}, ` +
            `round ${cell.round}, ${cell.kind}`,
    );
  }

  #mark(list, name, positions) {
    for (const position of this[list]) this.cells.get(position)?.classList.remove(name);
    for (const position of positions) this.cells.get(position)?.classList.add(name);
    this[list] = positions;
  }

  // Masks where the next round looks ahead show the lookahead token; of several drafts with a token
  // at the same mask, that of the best-ranked.
  #candidates(drafts) {
    if (!this.compact) {
      for (const position of this.candidates) {
        if (!this.run.cellAt(position, this.shown)) this.#paint(position);
      }
    }
    const ahead = new Map();
    for (const draft of drafts) {
      for (const { position, token } of draft) if (!ahead.has(position)) ahead.set(position, token);
    }
    this.#mark("candidates", "candidate", [...ahead.keys()]);
    if (this.compact) return;
    for (const [position, token] of ahead) {
      const element = this.cells.get(position);
      if (!element) continue;
      const text = this.run.eos.has(token) ? "∎" : visible(this.run.piece(token));
      setText(element.firstChild, text);
      element.classList.toggle("long", isLong(text));
    }
  }

  #state(head, block, round) {
    const { run } = this;
    const [state, masks] = blockState(run, block, round);
    const [label, meaning] = STATES[state] ?? [state, ""];
    setAttribute(head.element, "data-state", state);
    if (this.compact) return;
    setText(head.state, label);
    setAttribute(head.state, "title", meaning);
    setText(head.left, masks ? plural(masks, "mask") + " left" : "");
  }

  #listen(onpick, ondetail) {
    const at = (event) => {
      const cell = event.target.closest?.("button.cell");
      return cell ? Number(cell.dataset.position) : null;
    };
    this.root.addEventListener("click", (event) => {
      const position = at(event);
      if (position === null) return;
      onpick?.(position);
      ondetail?.(position, this.cells.get(position));
    });
    for (const type of ["pointerover", "focusin"]) {
      this.root.addEventListener(type, (event) => {
        const position = at(event);
        if (position !== null) ondetail?.(position, this.cells.get(position));
        else if (type === "pointerover") ondetail?.(null);
        if (type === "focusin" && position !== null) this.#enter(this.cells.get(position));
      });
    }
    this.root.addEventListener("pointerleave", () => ondetail?.(null));
    this.root.addEventListener("focusout", () => ondetail?.(null));
    // The grid is one tab stop; arrow keys move inside it.
    this.root.addEventListener("keydown", (event) => {
      const position = at(event);
      if (position === null || event.ctrlKey || event.metaKey || event.altKey) return;
      const columns = this.#columns();
      const moves = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns };
      const next = event.key in moves ? this.cells.get(position + moves[event.key]) : null;
      if (event.key in moves) {
        event.preventDefault();
        event.stopPropagation();
      }
      next?.focus();
    });
  }

  #enter(cell) {
    if (this.entry) this.entry.tabIndex = -1;
    this.entry = cell;
    cell.tabIndex = 0;
  }

  #columns() {
    const body = this.heads[0].element.lastElementChild;
    return getComputedStyle(body).gridTemplateColumns.split(" ").length;
  }
}

const isLong = (text) => text.trim().length > 4; // a cell holds so many letters, whatever they are

// The state of a block after `round`, as that round found it, and its masks now.
export function blockState(run, block, round) {
  let masks = 0;
  for (let position = block.start; position < block.end; position++) {
    masks += !run.cellAt(position, round);
  }
  const record = run.rounds[Math.max(round, 1) - 1];
  if (!record) return ["ahead", masks];
  if (block.round > Math.max(round, 1)) return ["ahead", masks];
  const view = record.blocks.find((b) => Math.max(b.start, run.prompt) === block.start);
  if (!view) {
    // Left of the round's blocks it is in the cache; right of them, another branch appended it.
    const first = record.blocks.find((b) => b.end > run.prompt)?.start ?? Infinity;
    return [block.start < first ? "committed" : "ahead", masks];
  }
  return [masks ? view.state : view.state === "to_cache" ? "to_cache" : "done", masks];
}
