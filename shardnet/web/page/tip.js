// One tooltip: tells the `data-tip` of what is pointed at, also after that was drawn anew.

import { byId, element } from "./dom.js";

let pointer = null;

export function followPointer() {
  document.addEventListener("pointermove", (event) => show({ x: event.clientX, y: event.clientY }));
  document.addEventListener("pointerleave", () => show(null));
}

export const refreshTip = () => show(pointer);

function show(at) {
  pointer = at;
  const tip = byId("tip");
  const text = at && document.elementFromPoint(at.x, at.y)?.closest("[data-tip]")?.dataset.tip;
  tip.hidden = !text;
  if (!text) return;
  tip.replaceChildren(...text.split("\n").map((line) => element("span", {}, line)));
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, at.x + 14 + width > innerWidth ? at.x - width - 12 : at.x + 14)}px`;
  tip.style.top = `${Math.max(4, Math.min(at.y + 14, innerHeight - height - 4))}px`;
}
