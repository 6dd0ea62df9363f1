// What has happened, the newest first.

import { byId, element } from "./dom.js";
import { clock } from "./format.js";

export function drawEvents(events) {
  const list = byId("events");
  const newest = events.length ? `${events.at(-1)}` : "";
  if (list.dataset.newest === newest && list.childElementCount) return;  // a selection survives
  list.dataset.newest = newest;
  const lines = [...events].reverse().map(([, at, what, bad]) =>
    element("li", { class: bad ? "bad" : null }, element("time", {}, clock(at)), element("i", { "aria-label": bad ? "bad" : null }, bad ? "▲" : "·"), element("span", {}, what)));
  list.replaceChildren(...(lines.length ? lines : [element("li", { class: "nothing" }, "Nothing has happened since the page is watching.")]));
}
