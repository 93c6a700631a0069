// The branches of one round: a lane each, with its lookahead tokens, what the anchor of the same round
// predicts in their place, its score, and its confidence at every remaining mask.

import { landscapeColours } from "./colour.js";
import { fixed, h, percent, plural, quoted, setAttribute, setText } from "./dom.js";
import { landscape } from "./trace.js";

const NAMED = 2; // lookahead tokens of a branch that are shown; of more there is the number

export class BranchLanes {
  constructor(root, { onpoint = null } = {}) {
    this.body = h("div", { role: "rowgroup" });
    this.onpoint = onpoint;
    this.lanes = [];
    this.state = [null, 0];
    const head = (name, label) => h("span", { role: "columnheader", class: name }, label);
    // Not a table element: all of its cells would be laid out again when a text changes.
    this.table = h(
      "div",
      { class: "lanes", role: "table", "aria-label": "Branches of the round shown" },
      h(
        "div",
        { role: "rowgroup" },
        h(
          "div",
          { role: "row", class: "lane heads" },
          head("rank", "#"),
          head("ahead", "lookahead"),
          head("prob", "p"),
          head("anchor", "anchor"),
          head("score", "score"),
          head("strip-cell", "confidence at each remaining mask"),
        ),
      ),
      this.body,
    );
    root.replaceChildren(this.table);
  }

  // half: 0 or 1, every other lane; both unless given.
  show(run, round, half = null) {
    this.state = [run, round];
    const record = run?.rounds[round - 1];
    this.table.hidden = !record;
    if (!record) return;
    while (this.lanes.length < record.branches.length) this.#addLane();
    const scores = record.branches.map((branch) => branch.score);
    const low = Math.min(...scores);
    const span = Math.max(...scores) - low;
    const field = run.masksBefore(round);
    this.lanes.forEach((lane, index) => {
      if (half !== null && index % 2 !== half) return;
      const branch = record.branches[index];
      const hidden = !branch;
      if (lane.row.hidden !== hidden) lane.row.hidden = hidden;
      if (hidden) return lane.row.classList.remove("won");
      const won = index === record.winner;
      const ahead = branch.lookaheads;
      const [first] = ahead;
      const verdict = won ? "won" : branch.refused ? `refused: ${branch.refused}` : "";
      setAttribute(lane.row, "class", won ? "lane won" : branch.refused ? "lane refused" : "lane");
      setText(lane.rank, first ? String(index + 1) : "–");
      const alone = run.isSearch(record) ? plural(run.lengthOf(branch), "token") : "anchor";
      setText(lane.token, first ? names(run, ahead) : alone);
      const place = first ? `+${first.position - run.prompt}` : "";
      setText(lane.place, first ? ` ${ahead.length > 1 ? "from" : "at"} ${place}` : "");
      setText(lane.prob, first ? least(ahead) : "");
      this.#opinion(lane, run, branch);
      lane.positions = ahead.map((a) => a.position);
      // The worst still has a short bar: scores are compared and have no zero.
      const share = span > 0 ? (branch.score - low) / span : 1;
      lane.bar.style.backgroundSize = `${(4 + 96 * share).toFixed(1)}% 100%`;
      setText(lane.figure, fixed(branch.score, 3));
      setText(lane.verdict, verdict && ` ${verdict}`);
      setAttribute(lane.ahead, "title", verdict && !won ? verdict : null); // it may be cut
      this.#strip(lane, run, branch, field);
    });
  }

  repaint() {
    if (this.state[0]) this.show(...this.state);
  }

  #addLane() {
    // Text that changes is in a box of fixed size inside its cell, so that only the box is laid out.
    const box = () => h("span", { class: "box" });
    const cell = (name, role, content) => h("span", { role, class: name }, content);
    const lane = {
      rank: box(),
      ahead: box(),
      token: h("span", { class: "token" }),
      place: h("span", { class: "place" }),
      verdict: h("span", { class: "verdict" }),
      prob: box(),
      anchor: box(),
      score: box(),
      bar: h("span", { class: "track" }),
      figure: h("span", { class: "figure" }),
      canvas: h("canvas", { class: "strip", height: 1, width: 1, role: "img" }),
      positions: [],
    };
    lane.ahead.append(lane.token, lane.place, lane.verdict);
    lane.score.append(lane.bar, lane.figure);
    lane.row = h(
      "div",
      {
        role: "row",
        class: "lane",
        onpointerenter: () => this.onpoint?.(lane.positions),
        onpointerleave: () => this.onpoint?.([]),
      },
      cell("rank", "cell", lane.rank),
      cell("ahead", "rowheader", lane.ahead),
      cell("prob", "cell", lane.prob),
      cell("anchor", "cell", lane.anchor),
      cell("score", "cell", lane.score),
      cell("strip-cell", "cell", lane.canvas),
    );
    lane.pen = lane.canvas.getContext("2d");
    this.lanes.push(lane);
    this.body.append(lane.row);
  }

  // What the anchor predicts where the branch has placed its tokens: the probability if it is the same
  // token, else the other one.
  #opinion(lane, run, branch) {
    const others = branch.anchor.filter((o, i) => o.token !== branch.lookaheads[i]?.token);
    const text = others.length ? names(run, others, 1) : branch.anchor.length ? least(branch.anchor) : "";
    setText(lane.anchor, text);
    setAttribute(lane.anchor, "class", others.length ? "box other" : "box");
    const says = others.length ? "anchor predicts another token" : "probability by the anchor";
    setAttribute(lane.anchor, "title", text ? `${says}: ${text}` : null);
  }

  // One pixel per position, stretched by the style sheet; the same positions in every lane.
  #strip(lane, run, branch, { from, to, places }) {
    const width = Math.max(to - from, 1);
    if (lane.canvas.width !== width) lane.canvas.width = width;
    const colours = landscapeColours();
    const image = lane.pen.createImageData(width, 1);
    const pixels = new Int32Array(image.data.buffer);
    const levels = landscape(branch);
    pixels.fill(colours.filled);
    if (branch.end < to) pixels.fill(colours.none, branch.end - from);
    const ahead = new Set(branch.lookaheads.map((a) => a.position));
    let index = 0;
    let sum = 0;
    for (const position of places) {
      if (ahead.has(position) || index >= branch.masks) continue;
      const level = levels[index++];
      pixels[position - from] = level === undefined ? colours.none : colours.levels[level];
      sum += level ?? 0;
    }
    for (const position of ahead) pixels[position - from] = colours.ahead;
    lane.pen.putImageData(image, 0, 0);
    const mean = levels.length ? `, mean confidence ${percent(sum / 255 / levels.length)}` : "";
    setAttribute(lane.canvas, "aria-label", `${branch.masks} masks left${mean}`);
  }
}

// EOS tokens have long names, and there are many of them.
function shownPiece(run, token) {
  return run.eos.has(token) ? "∎" : run.piece(token);
}

// The first of the tokens, and how many more there are.
function names(run, placed, count = NAMED) {
  const shown = placed.slice(0, count).map(({ token }) => quoted(shownPiece(run, token)));
  return [...shown, ...(placed.length > count ? [`+${placed.length - count} more`] : [])].join(" ");
}

// The probability; of several the least.
function least(placed, several = "≥ ") {
  const found = percent(Math.min(...placed.map((a) => a.max_prob)));
  return placed.length > 1 ? several + found : found;
}

// The round in words.
export function story(run, round) {
  const record = run.rounds[round - 1];
  if (!record) return "Before round 1: only masks.";
  const winner = record.branches[record.winner];
  const count = record.branches.length;
  if (run.isSearch(record)) {
    const lengths = `${plural(count, "length")} of the gap in one forward`;
    if (count === 1) return "The prompt goes to the cache, before several lengths of the gap are tried.";
    if (!record.branches.some((branch) => branch.refused)) return `${lengths}: all are filled.`;
    return `${lengths}: the likeliest text has ${plural(run.lengthOf(winner), "token")}.`;
  }
  const ofKind = (kind) => record.fills.filter((fill) => fill.kind === kind).length;
  const [merged, forced, edited] = ["merged", "forced", "edited"].map(ofKind);
  const filled = record.fills.length - edited;
  const apart = [merged && `${merged} merged`, forced && `${forced} forced`].filter(Boolean);
  const tokens = plural(filled, "token");
  const fills = !filled
    ? "no token filled"
    : forced === filled
      ? `no token above the threshold, ${forced === 1 ? "the best one" : `the best ${forced}`} forced`
      : `${tokens} filled${apart.length ? ` (${apart.join(", ")})` : ""}`;
  const how = edited ? `${fills}, ${edited} edited` : fills;
  if (count === 1) return `One forward over ${winner.masks} masks: ${how}.`;
  const anchor = record.branches[count - 1];
  const refused = record.branches.filter((branch) => branch.refused).length;
  const rows =
    `${plural(count - 1, "lookahead")} and the anchor in one forward` +
    `${refused ? `, ${refused === count - 1 ? "all" : refused} refused` : ""}.`;
  const ahead = winner.lookaheads;
  const exact = run.settings.accept === "exact"; // the anchor decides, and no score
  if (!ahead.length) {
    return exact
      ? `${rows} No lookahead was confirmed by the anchor: ${how}.`
      : `${rows} The anchor won (score ${fixed(anchor.score, 2)}): ${how}.`;
  }
  const named = `Lookahead ${record.winner + 1}, ${names(run, ahead)} (${least(ahead, "at least ")}),`;
  if (exact) return `${rows} ${named} was confirmed by the anchor; ${how}.`;
  const scores = `score ${fixed(winner.score, 2)}, anchor ${fixed(anchor.score, 2)}`;
  return `${rows} ${named} won: ${scores}; ${how}.`;
}
