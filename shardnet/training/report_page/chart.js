// Line charts in SVG, read with the pointer or, when focused, with the arrow keys.

const SIZE = { left: 52, right: 14, top: 10, bottom: 26 };

// `series`: [{ label, className, points: [[x, y]], dots }]; the first lies on top and is what the cursor follows.
// `options`: width and height in CSS pixels, format(y) for the axis and formatExact(y) for the tooltip, label for those who
// cannot see it, zero (the axis begins at 0), legend (show it).
function lineChart(container, series, options) {
  options = { ...options, width: Math.min(options.width, Math.max(container.clientWidth, 280)) };  // text keeps its size on a narrow screen
  const { width, height, format, label } = options;
  const points = series.flatMap((one) => one.points);
  if (!points.length) {
    container.append(element("p", { class: "hint" }, "No data."));
    return;
  }
  const [left, right] = extent(points.map(([x]) => x), 1);
  const scale = makeScale(left, right, robustExtent(points.map(([, y]) => y), options), width, height);
  const svg = svgElement("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", tabindex: 0, "aria-label": `${label}. ${summary(series[0], format)}` });
  drawAxes(svg, scale, format, width, height);
  for (const one of [...series].reverse()) drawSeries(svg, one, scale);
  if (options.legend) container.append(legend(series));
  container.append(svg);
  addCursor(svg, series, scale, options);
}

function extent(values, least) {
  const low = values.reduce((a, b) => Math.min(a, b), Infinity);
  const high = values.reduce((a, b) => Math.max(a, b), -Infinity);
  return high - low < 1e-12 ? [low - least / 2, high + least / 2] : [low, high];
}

function robustExtent(values, options) {
  const [low, high] = extent(values, Math.abs(values[0]) || 1);
  const margin = 0.04 * (high - low);
  return [options.zero ? Math.min(0, low) : low - margin, high + margin];
}

function makeScale(left, right, [bottom, top], width, height) {
  const innerWidth = width - SIZE.left - SIZE.right;
  const innerHeight = height - SIZE.top - SIZE.bottom;
  return {
    left, right, bottom, top,
    x: (value) => SIZE.left + ((value - left) / (right - left)) * innerWidth,
    y: (value) => SIZE.top + ((top - value) / (top - bottom)) * innerHeight,
    valueAt: (x) => left + ((x - SIZE.left) / innerWidth) * (right - left),
  };
}

function drawAxes(svg, scale, format, width, height) {
  for (const value of ticks(scale.bottom, scale.top, Math.max(4, height / 48))) {
    const y = scale.y(value);
    svg.append(svgElement("line", { class: "grid", x1: SIZE.left, x2: width - SIZE.right, y1: y, y2: y }));
    svg.append(svgElement("text", { x: SIZE.left - 8, y: y + 4, "text-anchor": "end" }, format(value)));
  }
  const base = height - SIZE.bottom;
  svg.append(svgElement("line", { class: "axis", x1: SIZE.left, x2: width - SIZE.right, y1: base, y2: base }));
  for (const value of ticks(scale.left, scale.right, width / 110).filter(Number.isInteger)) {
    svg.append(svgElement("text", { x: scale.x(value), y: base + 17, "text-anchor": "middle" }, `${value}`));
  }
  svg.append(svgElement("text", { x: SIZE.left - 8, y: base + 17, "text-anchor": "end" }, "step"));
}

function drawSeries(svg, one, scale) {
  const path = one.points.map(([x, y], i) => `${i ? "L" : "M"}${scale.x(x).toFixed(1)} ${scale.y(y).toFixed(1)}`).join("");
  svg.append(svgElement("path", { class: `series ${one.className}`, d: path }));
  if (one.dots) for (const [x, y] of one.points) svg.append(svgElement("circle", { class: "dot", cx: scale.x(x), cy: scale.y(y), r: 4 }));
}

function legend(series) {
  return element("ul", { class: "legend" }, ...series.map((one) => element("li", {}, element("i", { class: one.className }), one.label)));
}

function summary(one, format) {
  const [first, last] = [one.points[0], one.points[one.points.length - 1]];
  return `${one.label} from ${format(first[1])} at step ${first[0]} to ${format(last[1])} at step ${last[0]}.`;
}

function addCursor(svg, series, scale, options) {
  const line = svgElement("line", { class: "cursor", y1: SIZE.top, y2: options.height - SIZE.bottom, visibility: "hidden" });
  const dot = svgElement("circle", { class: "focus", r: 4.5, visibility: "hidden" });
  svg.append(line, dot);
  const guide = series[0].points;
  let index = guide.length - 1;

  const show = (clientX, clientY) => {
    const [x, y] = guide[index];
    for (const [name, value] of [["x1", scale.x(x)], ["x2", scale.x(x)], ["visibility", "visible"]]) line.setAttribute(name, value);
    for (const [name, value] of [["cx", scale.x(x)], ["cy", scale.y(y)], ["visibility", "visible"]]) dot.setAttribute(name, value);
    const box = svg.getBoundingClientRect();
    const lines = series.map((one) => [one, nearest(one.points, x, one.dots ? 0 : Infinity)]).filter(([, point]) => point);
    tooltip.show(clientX ?? box.left + scale.x(x) * (box.width / options.width), clientY ?? box.top + box.height / 3, `step ${x}`,
      lines.map(([one, point]) => `${one.label}: ${(options.formatExact ?? options.format)(point[1])}`));
  };
  const hide = () => {
    line.setAttribute("visibility", "hidden");
    dot.setAttribute("visibility", "hidden");
    tooltip.hide();
  };
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const value = scale.valueAt(((event.clientX - box.left) / box.width) * options.width);
    index = guide.indexOf(nearest(guide, value, Infinity));
    show(event.clientX, event.clientY);
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: index - 1, ArrowRight: index + 1, Home: 0, End: guide.length - 1 };
    if (!(event.key in moves)) return;
    index = Math.max(0, Math.min(guide.length - 1, moves[event.key]));
    show();
    event.preventDefault();
  });
}

function nearest(points, x, reach) {
  let best = null;
  for (const point of points) if (!best || Math.abs(point[0] - x) < Math.abs(best[0] - x)) best = point;
  return best && Math.abs(best[0] - x) <= reach ? best : null;
}

// Mean over the neighbours up to `reach` away on both sides (fewer near the ends): unlike a running mean it does not lag.
function smooth(points, reach) {
  return points.map(([x], i) => {
    const near = Math.min(Math.floor(reach), i, points.length - 1 - i);
    const around = points.slice(i - near, i + near + 1);
    return [x, around.reduce((sum, [, y]) => sum + y, 0) / around.length];
  });
}
