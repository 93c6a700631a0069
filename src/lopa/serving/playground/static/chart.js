// Tokens against rounds, or against seconds: a line for each contestant, rendered up to now.

import { h, setAttribute, setText } from "./dom.js";

const HEIGHT = 240;
const MARGIN = { left: 44, right: 16, top: 12, bottom: 36 };

export class Chart {
  constructor(root) {
    this.width = 640; // in pixels, so that text has the same size on any screen
    this.last = null;
    new ResizeObserver(() => {
      const width = Math.max(280, Math.round(root.clientWidth));
      if (!root.clientWidth || width === this.width) return;
      this.width = width;
      this.rendered = "";
      if (this.last) this.show(...this.last);
    }).observe(root);
    this.axes = h("svg:g", { class: "axes" });
    this.lines = h("svg:g");
    this.cursor = h("svg:line", { class: "cursor", y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom });
    this.title = h("svg:title", {}, "Tokens against rounds");
    this.across = h("svg:text", { class: "axis-name", y: HEIGHT - 4 });
    this.svg = h(
      "svg:svg",
      { role: "img", class: "chart" },
      this.title,
      this.axes,
      this.lines,
      this.cursor,
      this.across,
      h("svg:text", { class: "axis-name", x: -HEIGHT / 2 + 12, y: 11, transform: "rotate(-90)" }, "tokens"),
    );
    this.rendered = "";
    root.replaceChildren(this.svg);
  }

  // series: [{points: [[x, tokens], …], upTo}], with x in `unit`; at: where the cursor stands.
  show(series, unit, at) {
    this.last = [series, unit, at];
    const far = Math.max(1e-9, ...series.flatMap((s) => s.points.map((p) => p[0])));
    const high = Math.max(1, ...series.flatMap((s) => s.points.map((p) => p[1])));
    const across = ticks(far, 6);
    const up = ticks(high, 4);
    const x = (value) => MARGIN.left + (value / far) * (this.width - MARGIN.left - MARGIN.right);
    const y = (value) =>
      HEIGHT - MARGIN.bottom - (value / up.at(-1)) * (HEIGHT - MARGIN.top - MARGIN.bottom);
    const frame = [unit, far, up.at(-1)].join();
    if (frame !== this.rendered) {
      this.rendered = frame;
      setAttribute(this.svg, "viewBox", `0 0 ${this.width} ${HEIGHT}`);
      setAttribute(this.across, "x", this.width / 2);
      this.#axes(across.filter((v) => v <= far), up, x, y);
      setText(this.across, unit);
      setText(this.title, `Tokens against ${unit}`);
    }
    while (this.lines.childElementCount < series.length * 3) {
      const lane = this.lines.childElementCount / 3;
      this.lines.append(
        h("svg:polyline", { class: `line ghost lane-${lane}` }),
        h("svg:polyline", { class: `line lane-${lane}` }),
        h("svg:circle", { class: `dot lane-${lane}`, r: 4 }),
      );
    }
    series.forEach(({ points, upTo }, lane) => {
      const [ghost, line, dot] = [0, 1, 2].map((i) => this.lines.children[3 * lane + i]);
      const path = (list) => list.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" ");
      setAttribute(ghost, "points", path(points));
      setAttribute(line, "points", path(points.slice(0, upTo + 1)));
      const [a, b] = points[Math.min(upTo, points.length - 1)] ?? [0, 0];
      setAttribute(dot, "cx", x(a).toFixed(1));
      setAttribute(dot, "cy", y(b).toFixed(1));
    });
    for (let i = series.length * 3; i < this.lines.childElementCount; i++) {
      if (i % 3 < 2) setAttribute(this.lines.children[i], "points", "");
      else setAttribute(this.lines.children[i], "cx", -99);
    }
    const here = x(Math.min(at, far)).toFixed(1);
    setAttribute(this.cursor, "x1", here);
    setAttribute(this.cursor, "x2", here);
  }

  #axes(across, up, x, y) {
    this.axes.replaceChildren(
      ...up.flatMap((value) => [
        h("svg:line", { x1: MARGIN.left, x2: this.width - MARGIN.right, y1: y(value), y2: y(value) }),
        h("svg:text", { x: MARGIN.left - 8, y: y(value) + 4, class: "up" }, String(value)),
      ]),
      ...across.map((value) =>
        h("svg:text", { x: x(value), y: HEIGHT - MARGIN.bottom + 16, class: "across" }, String(value)),
      ),
    );
  }
}

// Round numbers from 0 to at least `most`.
export function ticks(most, count) {
  const raw = most / count;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((m) => m * power >= raw) * power;
  const digits = Math.max(0, -Math.floor(Math.log10(step)));
  const values = [];
  for (let i = 0; i * step < most + step * 0.999; i++) values.push(Number((i * step).toFixed(digits)));
  return values;
}
