// Details of a token, in a tooltip.

import { h } from "./dom.js";

const tip = h("div", { class: "tip", role: "tooltip", id: "tip", hidden: true });
document.querySelector("main").append(tip);

export function showTip(element, { title, rows }) {
  tip.replaceChildren(
    h("strong", {}, title),
    h("dl", {}, ...rows.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, value)])),
  );
  tip.hidden = false;
  const box = element.getBoundingClientRect();
  const { offsetWidth: width, offsetHeight: height } = tip;
  const left = Math.min(Math.max(box.left + box.width / 2 - width / 2, 8), innerWidth - width - 8);
  const above = box.top - height - 8;
  const top = above > 8 ? above : box.bottom + 8;
  tip.style.transform = `translate(${Math.round(left)}px, ${Math.round(top)}px)`;
}

export function hideTip() {
  tip.hidden = true;
}

document.addEventListener("keydown", (event) => event.key === "Escape" && hideTip());
document.addEventListener("scroll", hideTip, { passive: true, capture: true });
