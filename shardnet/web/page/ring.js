// The ring: workers by rank, nodes as bands around them, and what flows between them.

import { arc, chord, place, point } from "./circle.js";
import { byId, element, say, svg } from "./dom.js";
import { bytes, cut, percent, perSecond, time, whole, withoutDomain } from "./format.js";
import { condition } from "./states.js";

const COLOURS = 8;
const NARROW = 420;  // pixels
const LINE = 19;
const FAINT = 0.02;  // of the widest flow: what is less is not drawn
const CROWD = 8;  // workers
const MANY_LABELS = 5;  // more words than these would lie on each other

export function drawRing(job) {
  const picture = byId("ring");
  const parts = [];
  const layout = place(job.workers, picture.parentElement.clientWidth < NARROW);
  if (job.workers.length) {
    const flows = collect(job.workers);
    parts.push(svg("circle", { class: "guide", r: layout.radius || 1 }));
    parts.push(...drawMemory(flows, layout), ...drawNetwork(flows, layout));
    parts.push(...drawNodes(job, flows, layout), ...drawBetween(job, flows, layout));
    parts.push(...job.workers.map((worker) => drawWorker(worker, job, layout)));
  } else {
    parts.push(svg("circle", { class: "guide", r: 150 }), svg("text", { class: "nobody", y: 5 }, nobody(job)));
  }
  picture.setAttribute("viewBox", `${-layout.box.width / 2} ${-layout.box.height / 2} ${layout.box.width} ${layout.box.height}`);
  say(byId("routing"), job.routing);
  picture.setAttribute("aria-label", summary(job));
  picture.replaceChildren(arrowHead(), ...parts);
  picture.querySelectorAll("[data-room]").forEach(fit);
  drawLegend(job, layout);
}

const colour = (node) => `n${node % COLOURS}`;

function nobody(job) {
  if (job.state === "lost") return "no worker is left";
  return job.state === "finished" ? "all workers have left" : `waiting for workers: ${job.joined} of ${job.wanted[0]}`;
}

function summary(job) {
  const ill = job.workers.filter((worker) => condition(worker).word);
  const words = ill.map((worker) => `rank ${worker.rank} ${condition(worker).word}`).join(", ");
  return `${job.workers.length} workers on ${job.nodes.length} nodes; ${words || "all are well"}`;
}

// Network: one entry a direction. Memory: one a pair.
function collect(workers) {
  const network = [], memory = new Map();
  for (const worker of workers) {
    for (const [peer, overNetwork, throughMemory] of worker.to ?? []) {
      if (overNetwork > 0) network.push({ from: worker.rank, to: peer, rate: overNetwork });
      const pair = [Math.min(worker.rank, peer), Math.max(worker.rank, peer)];
      if (throughMemory > 0) memory.set(`${pair}`, { from: pair[0], to: pair[1], rate: (memory.get(`${pair}`)?.rate ?? 0) + throughMemory });
    }
  }
  return { network, memory: [...memory.values()] };
}

function drawNetwork({ network }, layout) {
  const most = Math.max(...network.map((flow) => flow.rate), 1);
  return network.filter((flow) => layout.places.has(flow.to) && flow.rate > FAINT * most).map((flow) => svg("path", {
    class: "network", d: chord(layout.places.get(flow.from).at, layout.places.get(flow.to).at, layout.size, 16),
    "stroke-width": (1 + 2.4 * Math.sqrt(flow.rate / most)).toFixed(2), "marker-end": "url(#head)",
    "data-tip": `rank ${flow.from} to ${flow.to}, over the network\n${perSecond(flow.rate)}`,
  }));
}

function drawMemory({ memory }, layout) {
  const most = Math.max(...memory.map((flow) => flow.rate), 1);
  return memory.filter((flow) => layout.places.has(flow.to)).map((flow) => svg("path", {
    class: "memory", d: chord(layout.places.get(flow.from).at, layout.places.get(flow.to).at, layout.size, 0),
    "stroke-width": (0.8 + 2 * Math.sqrt(flow.rate / most)).toFixed(2),
    "data-tip": `ranks ${flow.from} and ${flow.to}, through memory that they share\n${perSecond(flow.rate)}`,
  }));
}

function drawNodes(job, flows, layout) {
  const nodeOf = new Map(job.workers.map((worker) => [worker.rank, worker.node]));
  const names = withoutDomain(job.nodes);
  return layout.bands.map((band) => {
    const name = job.nodes[band.node] || "unknown node";
    const rate = flows.memory.filter((flow) => nodeOf.get(flow.from) === band.node).reduce((sum, flow) => sum + flow.rate, 0);
    const outline = band.whole ? svg("circle", { r: layout.band }) : svg("path", { d: arc(layout.band, band.begin, band.end) });
    const tip = rate ? `${name}\nthrough shared memory ${perSecond(rate)}` : name;
    const lines = [[names[band.node] || name, "name"], ...(rate ? [[perSecond(rate), "memory-rate"]] : [])];
    return svg("g", { class: `node ${colour(band.node)}`, "data-tip": tip }, outline, label(lines, band.middle, layout, 16));
  });
}

// From each node to the next one around the ring.
function drawBetween(job, flows, layout) {
  if (layout.bands.length < 2) return [];
  const nodeOf = new Map(job.workers.map((worker) => [worker.rank, worker.node]));
  return layout.bands.map((band, index) => {
    const next = layout.bands[(index + 1) % layout.bands.length];
    const rate = flows.network
      .filter((flow) => nodeOf.get(flow.from) === band.node && nodeOf.get(flow.to) === next.node)
      .reduce((sum, flow) => sum + flow.rate, 0);
    const inset = layout.gap * 0.16;
    const path = svg("path", { d: arc(layout.band, band.end + inset, band.end + layout.gap - inset * 1.2), "marker-end": rate ? "url(#head)" : null });
    const words = rate ? [[perSecond(rate), "rate"]] : [];
    const tip = `${job.nodes[band.node]} to ${job.nodes[next.node]}, over the network\n${perSecond(rate)}`;
    return svg("g", { class: `between${rate ? "" : " idle"}`, "data-tip": tip }, path, label(words, band.end + layout.gap / 2, layout, 14));
  });
}

// Lines of text outside the ring; they end at the edge of the picture.
function label(lines, angle, layout, distance) {
  if (layout.compact) return "";
  const radius = layout.band + distance;
  const [x, y] = point(angle, radius);
  const side = Math.abs(x) < 0.3 * radius ? "middle" : x > 0 ? "start" : "end";
  const room = side === "middle" ? layout.box.width - 8 : layout.box.width / 2 - Math.abs(x) - 4;
  const drop = y < -0.5 * radius ? -LINE * (lines.length - 1) : y > 0.5 * radius ? 12 : 5 - (LINE / 2) * (lines.length - 1);
  const spans = lines.map(([text, kind], index) => svg("tspan", { class: kind, x: x.toFixed(1), y: (y + drop + LINE * index).toFixed(1), "data-room": room }, text));
  return svg("text", { "text-anchor": side }, ...spans);
}

function fit(line) {
  const text = line.textContent, room = Number(line.dataset.room);
  for (let length = text.length; length > 3 && line.getComputedTextLength() > room; length -= 1) say(line, cut(text, length - 1));
}

function drawWorker(worker, job, layout) {
  const { at, angle } = layout.places.get(worker.rank);
  const { kind, sign, word } = condition(worker);
  const size = layout.size;
  const parts = [svg("circle", { class: "body", r: size.toFixed(1) }), svg("text", { class: "rank", y: ".36em" }, `${worker.rank}`)];
  if (sign) {
    const edge = Math.min(size * 0.78, size - 5);
    parts.push(svg("g", { class: "badge", transform: `translate(${edge.toFixed(1)} ${(-edge).toFixed(1)})` },
      svg("circle", { r: 8.5 }), svg("text", { y: 4.5 }, sign)));
  }
  const ill = job.workers.filter((other) => condition(other).word).length;
  if (word && (ill < MANY_LABELS || job.workers.length <= CROWD)) parts.push(conditionLabel(word, worker, angle, layout));
  const group = { "font-size": Math.min(30, Math.max(10, size * 0.75)).toFixed(1), class: `worker ${kind} ${colour(worker.node)}`, transform: `translate(${at.map((value) => value.toFixed(1)).join(" ")})` };
  return svg("g", { ...group, "data-rank": worker.rank, "data-state": worker.state, "data-tip": tip(worker, job) }, ...parts);
}

// Towards the middle, where there is room: below or above, or beside where many stand close together.
function conditionLabel(word, worker, angle, layout) {
  const text = word === "late" && worker.late_share > 0.01 ? `late ${percent(worker.late_share)}` : word;
  const isCrowded = layout.places.size > CROWD;
  const [x, y] = isCrowded ? point(angle, -(layout.size + 12)) : [0, (Math.cos(angle) < 0 ? -1 : 1) * (layout.size + 12)];
  const side = Math.abs(x) < 0.5 * (layout.size + 12) ? "middle" : x > 0 ? "start" : "end";
  return svg("text", { class: "condition", x: x.toFixed(1), y: (y + 5).toFixed(1), "text-anchor": side }, text);
}

function tip(worker, job) {
  const lines = [`rank ${worker.rank}: ${worker.state}`, job.nodes[worker.node] || "unknown node", worker.address];
  if (worker.step !== undefined) {
    lines.push(`step ${whole(worker.step)}, ${time(worker.step_s)} a step`);
    lines.push(`sends ${perSecond(worker.sent)}, receives ${perSecond(worker.received)}`, `${bytes(worker.resident_bytes)} of memory`);
  }
  if (worker.late_share > 0.01) lines.push(`others wait for it ${percent(worker.late_share)} of the time`);
  return [...lines, ...(worker.stuck ?? []).map((stuck) => `waits in ${stuck}`)].join("\n");
}

function arrowHead() {
  const head = { id: "head", viewBox: "0 0 8 8", refX: 6, refY: 4, markerWidth: 8, markerHeight: 8, markerUnits: "userSpaceOnUse", orient: "auto" };
  return svg("defs", {}, svg("marker", head, svg("path", { d: "M0 0.5L7.5 4L0 7.5z" })));
}

function drawLegend(job, layout) {
  const entry = (kind, text) => element("li", {}, element("i", { class: kind }), text);
  const entries = job.network ? [entry("network", `network ${perSecond(job.network)}`)] : [];
  if (job.memory) entries.push(entry("memory", `shared memory ${perSecond(job.memory)}`));
  if (layout.compact) entries.unshift(...job.nodes.map((name, node) => entry(`dot ${colour(node)}`, name || "unknown node")));
  byId("ring-legend").replaceChildren(...entries);
}
