// Curves over time; pointing at one tells of that moment in all of them.

import { byId, element, say, svg } from "./dom.js";
import { bytes, clock, clockMinutes, loss, perSecond, short, time } from "./format.js";
import { makeScale, SIZE, timeTicks, yTicks } from "./scale.js";

const NETWORK = { of: "network", id: "traffic", title: "Network", unit: "payload", format: perSecond, axis: bytes, isBinary: true, isFromZero: true };
const MEMORY = { ...NETWORK, of: "memory", title: "Shared memory" };
const PLOTS = [
  { of: "tokens_per_s", id: "tokens", title: "Throughput", unit: "tokens a second", format: short, isFromZero: true },
  NETWORK,
  { of: "step_s", id: "step", title: "Time of a step", unit: "", format: time, isFromZero: true },
  { of: "loss", id: "loss", title: "Loss", unit: "", format: loss, isFromZero: false },
];

const EPOCH_WIDTH = 60;

let cursor = null;  // the moment that is pointed at
let last = [];

export function drawPlots(points) {
  last = points;
  const place = byId("plots");
  if (!place.childElementCount) place.append(...PLOTS.map(frame));
  for (const plot of PLOTS) drawPlot(plot === NETWORK ? traffic(points) : plot, points);
}

// The network is what holds a training up; where there is none, as on one node, memory is what there is.
function traffic(points) {
  return points.some((point) => point.memory) && !points.some((point) => point.network) ? MEMORY : NETWORK;
}

function frame(plot) {
  const picture = svg("svg", { id: `plot-${plot.id}`, role: "img", tabindex: 0 });
  const point = (at) => { cursor = at; drawPlots(last); };
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    point(picture.scale?.timeAt(event.clientX - box.left) ?? null);
  });
  picture.addEventListener("pointerleave", () => point(null));
  picture.addEventListener("blur", () => point(null));
  picture.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move || !last.length) return;
    const index = last.indexOf(nearest(last, cursor ?? last.at(-1).at_s)) + move;
    point(last[Math.max(0, Math.min(last.length - 1, index))].at_s);
    event.preventDefault();
  });
  const title = element("span", { id: `title-${plot.id}` });
  const head = element("h2", {}, title, element("small", {}, plot.unit), element("output", { id: `value-${plot.id}` }));
  return element("section", { class: "card plot" }, head, picture);
}

function drawPlot(plot, points) {
  const picture = byId(`plot-${plot.id}`);
  const values = points.map((point) => point[plot.of]).filter((value) => value !== null);
  const size = { width: Math.max(200, picture.clientWidth), height: Math.max(120, picture.clientHeight) };
  picture.setAttribute("viewBox", `0 0 ${size.width} ${size.height}`);
  picture.setAttribute("aria-label", `${plot.title}: ${readout(plot, points)}`);
  picture.scale = values.length ? makeScale(points, values, size, plot.isFromZero) : null;
  say(byId(`title-${plot.id}`), plot.title);
  say(byId(`value-${plot.id}`), readout(plot, points));
  const scale = picture.scale;
  picture.replaceChildren(...(scale
    ? [...axes(plot, scale), ...epochs(points, scale), svg("path", { class: "series", d: path(points, plot.of, scale) }), ...pointed(plot, points, scale)]
    : [svg("text", { class: "nothing", x: size.width / 2, y: size.height / 2 }, "nothing has been said of it yet")]));
}

function axes(plot, scale) {
  const base = scale.height - SIZE.bottom, right = scale.width - SIZE.right;
  const lines = yTicks(scale, plot.isBinary).flatMap((value) => {
    const y = scale.y(value).toFixed(1);
    return [svg("line", { class: "grid", x1: SIZE.left, x2: right, y1: y, y2: y }),
      svg("text", { class: "y", x: SIZE.left - 8, y: Number(y) + 4 }, (plot.axis ?? plot.format)(value))];
  });
  const { found, step } = timeTicks(scale);
  const [format, half] = step < 60 ? [clock, 30] : [clockMinutes, 18];
  const times = found.map((at) => svg("text", { class: "x", x: Math.min(scale.x(at), scale.width - half).toFixed(1), y: base + 16 }, format(at)));
  return [...lines, svg("line", { class: "axis", x1: SIZE.left, x2: right, y1: base, y2: base }), ...times];
}

// Where the world changed.
function epochs(points, scale) {
  const lines = [], words = [];
  let free = scale.width;  // up to where nothing is written
  for (const point of points.filter((each, index) => index && each.epoch !== points[index - 1].epoch).reverse()) {
    const x = scale.x(point.at_s);
    lines.push(svg("line", { class: "epoch", x1: x.toFixed(1), x2: x.toFixed(1), y1: SIZE.top, y2: scale.height - SIZE.bottom }));
    const isBefore = x <= free && x >= SIZE.left + EPOCH_WIDTH, isBehind = !isBefore && x + EPOCH_WIDTH <= free;  // where there is room
    if (!isBefore && !isBehind) continue;
    free = isBefore ? x - EPOCH_WIDTH : x;
    const place = { class: isBefore ? "epoch" : "epoch behind", x: (isBefore ? x - 4 : x + 4).toFixed(1), y: scale.height - SIZE.bottom - 6 };
    words.push(svg("text", place, `epoch ${point.epoch}`));
  }
  return [...lines, ...words];
}

// What is not known is a gap; a point between two gaps is a dot.
function path(points, name, scale) {
  let isOpen = false;
  return points.map((point, index) => {
    const value = point[name];
    if (value === null) { isOpen = false; return ""; }
    const isAlone = !isOpen && (points[index + 1]?.[name] ?? null) === null;
    const piece = `${isOpen ? "L" : "M"}${scale.x(point.at_s).toFixed(1)} ${scale.y(value).toFixed(1)}${isAlone ? "h.01" : ""}`;
    isOpen = true;
    return piece;
  }).join("");
}

function pointed(plot, points, scale) {
  if (cursor === null) return [];
  const point = nearest(points, cursor);
  const x = scale.x(point.at_s).toFixed(1), value = point[plot.of];
  const line = svg("line", { class: "cursor", x1: x, x2: x, y1: SIZE.top, y2: scale.height - SIZE.bottom });
  return value === null ? [line] : [line, svg("circle", { class: "at", cx: x, cy: scale.y(value).toFixed(1), r: 4 })];
}

function readout(plot, points) {
  if (!points.length) return "";
  const point = cursor === null ? points.at(-1) : nearest(points, cursor);
  return `${cursor === null ? "" : `${clock(point.at_s)}, step ${point.step ?? "–"}: `}${plot.format(point[plot.of])}`;
}

function nearest(points, moment) {
  return points.reduce((best, point) => (Math.abs(point.at_s - moment) < Math.abs(best.at_s - moment) ? point : best));
}
