// The branches of one round: a lane each, with the token it looked ahead to, its score, and how
// sure it was at every mask that it had left.

import { landscapeColours } from "./colour.js";
import { fixed, h, percent, quoted, setAttribute, setText } from "./dom.js";
import { landscape } from "./trace.js";

export class BranchLanes {
  constructor(root, { onpoint = null } = {}) {
    this.body = h("div", { role: "rowgroup" });
    this.onpoint = onpoint;
    this.lanes = [];
    this.state = [null, 0];
    const head = (name, label) => h("span", { role: "columnheader", class: name }, label);
    // Not a table element: its cells would be laid out anew, all of them, when a text changes.
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
          head("ahead", "looks ahead to"),
          head("prob", "p"),
          head("score", "score"),
          head("strip-cell", "how sure at each mask it has left"),
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
      const ahead = branch.lookahead;
      setAttribute(lane.row, "class", won ? "lane won" : "lane");
      setText(lane.rank, ahead ? String(index + 1) : "–");
      setText(lane.token, ahead ? quoted(shownPiece(run, ahead.token)) : "anchor");
      setText(lane.place, ahead ? ` at +${ahead.position - run.prompt}` : " as it is");
      setText(lane.prob, ahead ? percent(ahead.max_prob) : "");
      lane.position = ahead?.position ?? null;
      // The worst is a stub, not nothing: scores are compared, they have no zero.
      const share = span > 0 ? (branch.score - low) / span : 1;
      lane.bar.style.backgroundSize = `${(4 + 96 * share).toFixed(1)}% 100%`;
      setText(lane.figure, fixed(branch.score, 3));
      setText(lane.verdict, won ? "won" : "");
      this.#strip(lane, run, branch, field);
    });
  }

  repaint() {
    if (this.state[0]) this.show(...this.state);
  }

  #addLane() {
    // What changes stands in a box of fixed size inside its cell, and is laid out by itself.
    const box = () => h("span", { class: "box" });
    const cell = (name, role, content) => h("span", { role, class: name }, content);
    const lane = {
      rank: box(),
      ahead: box(),
      token: h("span", { class: "token" }),
      place: h("span", { class: "place" }),
      verdict: h("span", { class: "verdict" }),
      prob: box(),
      score: box(),
      bar: h("span", { class: "track" }),
      figure: h("span", { class: "figure" }),
      canvas: h("canvas", { class: "strip", height: 1, width: 1, role: "img" }),
      position: null,
    };
    lane.ahead.append(lane.token, lane.place, lane.verdict);
    lane.score.append(lane.bar, lane.figure);
    lane.row = h(
      "div",
      {
        role: "row",
        class: "lane",
        onpointerenter: () => this.onpoint?.(lane.position),
        onpointerleave: () => this.onpoint?.(null),
      },
      cell("rank", "cell", lane.rank),
      cell("ahead", "rowheader", lane.ahead),
      cell("prob", "cell", lane.prob),
      cell("score", "cell", lane.score),
      cell("strip-cell", "cell", lane.canvas),
    );
    lane.pen = lane.canvas.getContext("2d");
    this.lanes.push(lane);
    this.body.append(lane.row);
  }

  // A pixel a position, stretched by the style sheet; the same positions in every lane.
  #strip(lane, run, branch, { from, to, places }) {
    const width = Math.max(to - from, 1);
    if (lane.canvas.width !== width) lane.canvas.width = width;
    const colours = landscapeColours();
    const image = lane.pen.createImageData(width, 1);
    const pixels = new Int32Array(image.data.buffer);
    const levels = landscape(branch);
    pixels.fill(colours.filled);
    if (branch.end < to) pixels.fill(colours.none, branch.end - from);
    let index = 0;
    let sum = 0;
    for (const position of places) {
      if (position === branch.lookahead?.position || index >= branch.masks) continue;
      const level = levels[index++];
      pixels[position - from] = level === undefined ? colours.none : colours.levels[level];
      sum += level ?? 0;
    }
    if (branch.lookahead) pixels[branch.lookahead.position - from] = colours.ahead;
    lane.pen.putImageData(image, 0, 0);
    const mean = levels.length ? `, ${percent(sum / 255 / levels.length)} sure on average` : "";
    setAttribute(lane.canvas, "aria-label", `${branch.masks} masks left${mean}`);
  }
}

// Names of tokens that end a text are long, and there are many of them.
function shownPiece(run, token) {
  return run.eos.has(token) ? "∎" : run.piece(token);
}

// The round in a sentence.
export function story(run, round) {
  const record = run.rounds[round - 1];
  if (!record) return "Nothing but masks: the model has not been asked yet.";
  const winner = record.branches[record.winner];
  const count = record.branches.length;
  const filled = record.fills.length;
  const forced = record.fills.filter((fill) => fill.kind === "forced").length;
  const tokens = `${filled} ${filled === 1 ? "token" : "tokens"}`;
  const how = !filled
    ? "nothing more was to fill"
    : forced === filled
      ? `nothing was sure enough, so the best ${forced === 1 ? "one was" : `${forced} were`} filled anyway`
      : `${tokens} filled at once${forced ? ` (${forced} forced)` : ""}`;
  if (count === 1) return `One forward over ${winner.masks} masks: ${how}.`;
  const anchor = record.branches[count - 1];
  if (!winner.lookahead) {
    return `${count} branches in one forward. None of the lookaheads beat the anchor (score ${fixed(winner.score, 2)}): ${how}.`;
  }
  return (
    `${count} branches in one forward. Placing ${quoted(shownPiece(run, winner.lookahead.token))} early ` +
    `(${percent(winner.lookahead.max_prob)} sure, rank ${record.winner + 1}) made the rest look clearest: ` +
    `score ${fixed(winner.score, 2)} against ${fixed(anchor.score, 2)} without it. From the same forward, ${how}.`
  );
}
