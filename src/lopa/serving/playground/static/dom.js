// Small helpers. Everything from a model or a file is inserted as text, never as markup.

export const $ = (selector, root = document) => root.querySelector(selector);

export function h(tag, properties = {}, ...children) {
  const element = tag.startsWith("svg:")
    ? document.createElementNS("http://www.w3.org/2000/svg", tag.slice(4))
    : document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function setAttribute(element, name, value) {
  if (value === null || value === undefined) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
  } else if (element.getAttribute(name) !== String(value)) {
    element.setAttribute(name, value);
  }
}

// A token in a small cell: line breaks and spaces get a visible sign.
export function visible(piece) {
  if (/^ +$/.test(piece)) return "␣".repeat(Math.min(piece.length, 3));
  let text = "";
  for (const char of piece) {
    const code = char.codePointAt(0);
    if (char === "\n") text += "↵";
    else if (char === "\t") text += "⇥";
    else if (code < 0x20) text += String.fromCodePoint(0x2400 + code);
    // Characters that are invisible, or that reorder text, are shown by number.
    else if (/[\p{Cf}\p{Zl}\p{Zp}]/u.test(char) && !/[\u200c\u200d]/.test(char)) {
      text += `\\u${code.toString(16).padStart(4, "0")}`;
    } else text += char;
  }
  return text;
}

// Buttons for example prompts; hidden when there are none.
export function exampleChips(root, examples, onpick) {
  root.replaceChildren(
    ...examples.map(({ name, prompt }) =>
      h("button", { type: "button", class: "chip", title: prompt, onclick: () => onpick(prompt) }, name),
    ),
  );
  root.hidden = !examples.length;
}

export const quoted = (piece) => `‘${visible(piece)}’`;

export const percent = (p) => {
  if (p >= 0.9995) return "100 %";
  return `${(100 * p).toFixed(p >= 0.1 ? 1 : 2)} %`;
};

export const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

export const fixed = (value, digits) =>
  Number.isFinite(value) ? value.toFixed(digits).replace("-", "−") : "–";

export function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/jsonl" }));
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}
