// The form of decoding settings, made from the server's description. An empty field is the
// default; only what was given is sent.

import { h, setAttribute, setText } from "./dom.js";

export class SettingsForm {
  // info: the server's description; without: names that this form leaves out.
  constructor(root, info, { without = [], prefix = "", open = [], onchange = () => {} } = {}) {
    this.info = info;
    this.prefix = prefix;
    this.onchange = onchange;
    this.rows = new Map(); // name → {field, row, input, slider, error}
    this.preset = h("select", { id: `${prefix}preset` }, h("option", { value: "" }, "–"));
    for (const name of Object.keys(info.presets)) {
      this.preset.append(h("option", { value: name }, name));
    }
    this.preset.addEventListener("change", () => {
      this.set(this.preset.value ? { ...info.presets[this.preset.value] } : {});
      onchange();
    });
    const groups = new Map();
    for (const field of info.fields) {
      if (without.includes(field.name)) continue;
      if (!groups.has(field.group)) groups.set(field.group, []);
      groups.get(field.group).push(this.#row(field));
    }
    this.groups = [...groups].map(([name, rows]) => {
      const body = h("div", { class: "fields" }, ...rows);
      return h("details", { class: "group", open: open.includes(name) }, h("summary", {}, name), body);
    });
    root.replaceChildren(
      h(
        "div",
        { class: "field preset" },
        h("label", { for: this.preset.id }, "preset"),
        this.preset,
        h("p", { class: "line" }, "Settings published with the paper, by task"),
      ),
      ...this.groups,
    );
    this.refresh();
  }

  // What was given, by name.
  values() {
    const values = {};
    const used = this.#variant().used;
    for (const [name, { field, input }] of this.rows) {
      const value = read(field, input);
      if (value !== undefined && used.includes(name)) values[name] = value;
    }
    return values;
  }

  set(values) {
    for (const [name, { field, input }] of this.rows) write(field, input, values[name]);
    this.refresh();
  }

  // The value that applies: given, or else the default.
  effective(name) {
    return this.values()[name] ?? this.#variant().defaults[name];
  }

  // Show an error beside its field; returns whether there is such a field.
  complain(name, message) {
    for (const [key, { error, input }] of this.rows) {
      setText(error, key === name ? message : "");
      setAttribute(input, "aria-invalid", key === name ? "true" : null);
    }
    const row = this.rows.get(name);
    if (row) row.row.closest("details").open = true;
    return Boolean(row);
  }

  refresh() {
    const { used, defaults } = this.#variant();
    for (const [name, { field, row, input, slider }] of this.rows) {
      row.hidden = !used.includes(name);
      const fallback = defaults[name];
      if (field.kind === "choice" || field.kind === "bool") {
        setText(input.options[0], `default (${shown(fallback)})`);
      } else if (field.kind !== "texts") {
        setAttribute(input, "placeholder", fallback === undefined ? "off" : shown(fallback));
      }
      if (slider) slider.value = read(field, input) ?? fallback ?? slider.min;
    }
    for (const group of this.groups) {
      group.hidden = [...group.lastElementChild.children].every((row) => row.hidden);
    }
    this.complain(null);
  }

  // The chosen decoder, window, accept and score decide which options there are.
  #variant() {
    const given = (name) => {
      const row = this.rows.get(name);
      return row ? read(row.field, row.input) : undefined;
    };
    const { variants, defaults } = this.info;
    const decoder = given("decoder") ?? defaults.decoder;
    const own = variants.filter((variant) => variant.decoder === decoder);
    const first = own[0] ?? variants[0];
    const window = given("window") ?? first.window;
    const accept = given("accept") ?? first.accept;
    const score = given("score");
    const fitting = own.filter((v) => v.window === window && v.accept === accept);
    return fitting.find((v) => v.score === score) ?? fitting[0] ?? first;
  }

  #row(field) {
    const id = `${this.prefix}${field.name}`;
    const line = `${id}-line`;
    const common = { id, "aria-describedby": line };
    let input;
    let slider = null;
    if (field.kind === "choice" || field.kind === "bool") {
      const choices = field.kind === "bool" ? ["true", "false"] : field.choices;
      input = h("select", common, h("option", { value: "" }, "default"));
      for (const choice of choices) input.append(h("option", { value: choice }, named(choice)));
    } else if (field.kind === "texts") {
      input = h("textarea", { ...common, rows: 2, placeholder: "one per line", spellcheck: "false" });
    } else {
      const step = field.kind === "int" ? 1 : "any";
      input = h("input", {
        ...common,
        // A count may also be a word ("auto"), which a number input does not take.
        type: field.words ? "text" : "number",
        inputmode: field.kind === "int" ? "numeric" : "decimal",
        min: field.low,
        max: field.high,
        step,
        autocomplete: "off",
      });
      const most = field.slider ?? field.high;
      if (most !== null && most <= 128 && most - field.low > 0.5) {
        slider = h("input", {
          type: "range",
          min: field.low,
          max: most,
          step: field.kind === "int" ? 1 : 0.01,
          tabindex: -1,
          "aria-hidden": "true",
        });
        slider.addEventListener("input", () => {
          input.value = slider.value;
          this.#changed();
        });
      }
    }
    input.addEventListener(input.tagName === "SELECT" ? "change" : "input", () => this.#changed());
    const error = h("p", { class: "field-error", role: "status" });
    const row = h(
      "div",
      { class: slider ? "field sliding" : "field" },
      h("label", { for: id }, field.name),
      input,
      slider,
      h("p", { class: "line", id: line }, field.line),
      error,
    );
    this.rows.set(field.name, { field, row, input, slider, error });
    return row;
  }

  #changed() {
    this.preset.value = "";
    this.refresh();
    this.onchange();
  }
}

function read(field, input) {
  const text = input.value;
  if (text.trim() === "") return undefined;
  if (field.kind === "bool") return text === "true";
  if (field.kind === "texts") return text.split("\n").filter((line) => line !== "");
  if (field.kind === "choice" || field.words?.includes(text.trim())) return text.trim();
  const value = Number(text);
  return Number.isNaN(value) ? text : value;
}

function write(field, input, value) {
  if (value === undefined || value === null) input.value = "";
  else if (field.kind === "texts") input.value = [value].flat().join("\n");
  else input.value = String(value);
}

function shown(value) {
  return value === true ? "yes" : value === false ? "no" : String(value ?? "none");
}

function named(choice) {
  return { true: "yes", false: "no" }[choice] ?? choice;
}

// Settings in short: the decoder and what differs from its defaults.
export function summary(values, info) {
  const { decoder = info.defaults.decoder, ...rest } = values;
  const short = { branches: "k", threshold: "τ", block_size: "B", max_new_tokens: "N" };
  const parts = Object.entries(rest).map(([name, value]) =>
    name in short ? `${short[name]} ${value}` : `${name} ${shown(value)}`,
  );
  return [decoder, ...parts].join(" · ");
}

// -- in the address of the page, after the #, so that no server sees it -------------------------

export function encodeSettings(values) {
  const search = new URLSearchParams();
  for (const [name, value] of Object.entries(values)) {
    for (const item of [value].flat()) search.append(name, item);
  }
  return search;
}

export function decodeSettings(search, info) {
  const values = {};
  for (const field of info.fields) {
    const given = search.getAll(field.name);
    if (!given.length) continue;
    const [text] = given;
    if (field.kind === "texts") values[field.name] = given;
    else if (field.kind === "bool") values[field.name] = text === "true";
    else if (field.kind === "choice" || field.words?.includes(text)) values[field.name] = text;
    else if (text.trim() !== "" && !Number.isNaN(Number(text))) values[field.name] = Number(text);
  }
  return values;
}
