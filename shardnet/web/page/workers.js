// The table of workers, with a small curve of what each has sent.

import { byId, element, svg } from "./dom.js";
import { bytes, percent, perSecond, time, whole, withoutDomain } from "./format.js";
import { condition } from "./states.js";

const COLUMNS = ["rank", "node", "state", "step", "a step", "wait", "late", "sent", "received", "memory"];
const WORDS = new Set(["node", "state"]);
const CURVE = { width: 48, height: 16 };

export function drawWorkers(job, recent) {
  const head = element("thead", {}, element("tr", {}, ...COLUMNS.map((name) => element("th", { scope: "col", class: WORDS.has(name) ? null : "number" }, name))));
  byId("workers-card").hidden = !job.workers.length;
  const names = withoutDomain(job.nodes);
  byId("workers").replaceChildren(head, element("tbody", {}, ...job.workers.map((worker) => row(worker, job, names, recent))));
}

function row(worker, job, names, recent) {
  const { kind, sign, word } = condition(worker);
  const number = (text, mark) => element("td", { class: `number${mark ? " worry" : ""}` }, text);
  const node = job.nodes[worker.node] || "–";
  return element("tr", { class: kind, "data-rank": worker.rank },
    element("th", { scope: "row", class: "number" }, `${worker.rank}`),
    element("td", { class: "node", "data-tip": `${node}\n${worker.address}` }, element("i", { class: `dot n${worker.node % 8}` }), names[worker.node] || node),
    element("td", { class: "state" }, sign ? element("i", { class: "sign" }, sign) : "", word || worker.state),
    number(whole(worker.step)),
    number(time(worker.step_s)),
    number(percent(worker.wait), worker.wait > 0.3),
    number(percent(worker.late_share), kind === "late"),
    element("td", { class: "number sent" }, curve(recent.get(worker.address) ?? []), perSecond(worker.sent)),
    number(perSecond(worker.received)),
    number(bytes(worker.resident_bytes)));
}

function curve(values) {
  const most = Math.max(...values, 1);
  const x = (index) => ((index + 90 - values.length) / 89) * CURVE.width;
  const points = values.map((value, index) => (value === null ? "" : `${x(index).toFixed(1)},${(CURVE.height - 1 - (value / most) * (CURVE.height - 2)).toFixed(1)}`));
  return svg("svg", { class: "curve", ...CURVE, "aria-hidden": "true" }, svg("polyline", { points: points.join(" ").trim() }));
}
