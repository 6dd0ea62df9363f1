// Where everything lies on the ring: ranks in order, clockwise; those of one node side by side, with room between nodes.

const BOX = { width: 620, height: 500 };  // with names around the ring
const MARGIN = 12;  // without
const MOST_GAP = 44, ALL_GAPS = 116;  // degrees

export const point = (angle, radius) => [radius * Math.sin(angle), -radius * Math.cos(angle)];

// `compact`: nothing is written around the ring, so that on a narrow screen the ring is as large as that.
export function place(workers, compact) {
  const runs = nodeRuns(workers);
  const gap = runs.length > 1 ? radians(Math.min(MOST_GAP, ALL_GAPS / runs.length)) : 0;
  const slot = (2 * Math.PI - gap * runs.length) / workers.length;
  const radius = workers.length === 1 ? 0 : workers.length === 2 ? 96 : 152;
  const size = workers.length === 1 ? 52 : Math.min(27, workers.length === 2 ? 27 : 0.42 * slot * radius);
  const alone = runs.length === 1;
  const places = new Map();  // by rank
  const bands = [];
  // Names of two nodes have more room above and below than at the sides.
  let angle = alone ? -slot / 2 : runs.length === 2 ? (-slot * runs[0].workers.length) / 2 : gap / 2;
  for (const run of runs) {
    const begin = angle;
    for (const worker of run.workers) {
      places.set(worker.rank, { angle: angle + slot / 2, at: point(angle + slot / 2, radius) });
      angle += slot;
    }
    bands.push({ node: run.node, begin, end: angle, middle: alone ? Math.PI : (begin + angle) / 2, whole: alone });
    angle += gap;
  }
  const band = radius + size + 20;
  const side = 2 * (band + MARGIN);
  return { places, bands, gap, radius, size, band, compact, box: compact ? { width: side, height: side } : BOX };
}

// A node whose ranks do not lie side by side has a band for each run of them.
function nodeRuns(workers) {
  const runs = [];
  for (const worker of workers) {
    if (!runs.length || runs.at(-1).node !== worker.node) runs.push({ node: worker.node, workers: [] });
    runs.at(-1).workers.push(worker);
  }
  return runs;
}

const radians = (degrees) => (degrees * Math.PI) / 180;

export function arc(radius, begin, end) {
  const [x0, y0] = point(begin, radius), [x1, y1] = point(end, radius);
  return `M${x0.toFixed(1)} ${y0.toFixed(1)}A${radius} ${radius} 0 ${end - begin > Math.PI ? 1 : 0} 1 ${x1.toFixed(1)} ${y1.toFixed(1)}`;
}

// From the rim of one worker to that of another, bent towards the middle; the two directions lie apart.
export function chord(from, to, size, sideways) {
  const middle = [(from[0] + to[0]) / 2, (from[1] + to[1]) / 2];
  const along = [to[0] - from[0], to[1] - from[1]];
  const length = Math.hypot(...along) || 1;
  const bend = [middle[0] * 0.6 - (along[1] / length) * sideways, middle[1] * 0.6 + (along[0] / length) * sideways];
  const start = towards(from, bend, size + 2), end = towards(to, bend, size + 5);
  return `M${start.map(round).join(" ")}Q${bend.map(round).join(" ")} ${end.map(round).join(" ")}`;
}

function towards(from, to, distance) {
  const length = Math.hypot(to[0] - from[0], to[1] - from[1]) || 1;
  return [from[0] + ((to[0] - from[0]) / length) * distance, from[1] + ((to[1] - from[1]) / length) * distance];
}

const round = (value) => value.toFixed(1);
