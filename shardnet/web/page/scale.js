// From values to places in a plot, and back.

import { ticks } from "./format.js";

export const SIZE = { left: 62, right: 10, top: 8, bottom: 22 };
const LEAST_SPAN = 30;  // seconds: a plot that has just begun does not race
const STEPS = [5, 10, 15, 30, 60, 120, 300, 600];  // between times on the axis

export function makeScale(points, values, { width, height }, isFromZero) {
  const end = points.at(-1).at_s;
  const begin = Math.min(points[0].at_s, end - LEAST_SPAN);
  const [bottom, top] = range(values, isFromZero);
  const innerWidth = width - SIZE.left - SIZE.right, innerHeight = height - SIZE.top - SIZE.bottom;
  return {
    begin, end, bottom, top, width, height,
    x: (at) => SIZE.left + ((at - begin) / (end - begin)) * innerWidth,
    y: (value) => SIZE.top + ((top - value) / (top - bottom)) * innerHeight,
    timeAt: (x) => begin + ((x - SIZE.left) / innerWidth) * (end - begin),
  };
}

function range(values, isFromZero) {
  const low = isFromZero ? 0 : Math.min(...values), high = Math.max(...values, isFromZero ? 1e-9 : -Infinity);
  const margin = 0.08 * (high - low) || Math.abs(high) * 0.05 || 1;
  return [isFromZero ? 0 : low - margin, high + margin];
}

// At least two, or nobody could tell how much is between them.
export function yTicks(scale, isBinary) {
  const tries = [5, 8, 12].map((count) => ticks(scale.bottom, scale.top, count, isBinary));
  return tries.find((found) => found.length > 1) ?? tries[0];
}

export function timeTicks(scale) {
  const step = STEPS.find((each) => (scale.end - scale.begin) / each <= (scale.width - SIZE.left) / 80) ?? 900;
  const found = [];
  for (let at = Math.ceil(scale.begin / step) * step; at <= scale.end; at += step) found.push(at);
  return { found, step };
}
