// The timeline of all ranks on a canvas: a row for each lane, zoomed and moved by pointer and keys.

const ROW = { compute: 28, exposed: 12, communication: 15 };
const TRACKS = { compute: "computing", exposed: "waiting for communication", communication: "communication" };
const COLOURS = { compute: "--compute", exposed: "--waiting", communication: "--communication" };
const KINDS = { compute: "forward and other computing", backward: "backward", exposed: "waiting for communication", communication: "communication" };
const GUTTER = 92; // left of the rows, for their names
const AXIS = 40; // above the rows: a line for steps, a line for time
const [NAME, START, LENGTH, BYTES, STEP] = [0, 1, 2, 3, 4]; // of a span

class Timeline {
  constructor(canvas, data) {
    this.canvas = canvas;
    this.data = data;
    this.rows = this.layOut();
    const spans = this.rows.flatMap((row) => row.spans);
    this.end = spans.reduce((latest, span) => Math.max(latest, span[START] + span[LENGTH]), 1);
    this.steps = this.findSteps(spans);
    this.view = [0, this.steps[2]?.[1] ?? this.end]; // two steps: wide enough for names, and the rest is a key away
    this.hovered = null;
    this.listen();
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  // Rows from top to bottom, with a gap between ranks.
  layOut() {
    const rows = [];
    let y = AXIS + 6;
    for (const { rank, lanes } of this.data.ranks) {
      lanes.forEach((lane, index) => {
        const height = ROW[lane.track];
        rows.push({ rank, track: lane.track, spans: lane.spans, y, height, first: index === 0 });
        y += height + 2;
      });
      y += 10;
    }
    this.height = y;
    return rows;
  }

  // Where each step begins: the first span of any rank that carries its number.
  findSteps(spans) {
    const starts = new Map();
    for (const span of spans) starts.set(span[STEP], Math.min(starts.get(span[STEP]) ?? Infinity, span[START]));
    return [...starts].sort((a, b) => a[1] - b[1]);
  }

  x(time) {
    const [from, to] = this.view;
    return GUTTER + ((time - from) / (to - from)) * (this.width - GUTTER);
  }

  time(x) {
    const [from, to] = this.view;
    return from + ((x - GUTTER) / (this.width - GUTTER)) * (to - from);
  }

  draw() {
    const ratio = devicePixelRatio || 1;
    this.width = this.canvas.clientWidth;
    this.canvas.style.height = `${this.height}px`;
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    const paint = this.canvas.getContext("2d");
    paint.scale(ratio, ratio);
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    paint.fillStyle = colour("--card");
    paint.fillRect(0, 0, this.width, this.height);
    this.drawAxis(paint, colour);
    for (const row of this.rows) this.drawRow(paint, row, colour);
    this.drawGutter(paint, colour);
    this.showShares();
  }

  drawAxis(paint, colour) {
    paint.font = "11.5px system-ui, sans-serif";
    paint.textBaseline = "middle";
    const [from, to] = this.view;
    for (const time of ticks(from, to, this.width / 110)) {
      const x = Math.round(this.x(time)) + 0.5;
      paint.fillStyle = colour("--grid");
      paint.fillRect(x - 0.5, AXIS, 1, this.height);
      paint.fillStyle = colour("--faint");
      paint.textAlign = "center";
      if (x > GUTTER + 20 && x < this.width - 20) paint.fillText(axisTime(time, to - from), x, AXIS - 11);
    }
    for (const [, start] of this.steps) {
      paint.fillStyle = colour("--faint");
      paint.fillRect(this.x(start), 4, 1.5, this.height);
    }
  }

  drawRow(paint, row, colour) {
    const fill = colour(COLOURS[row.track]);
    const backward = colour("--backward");
    paint.textAlign = "left";
    for (const span of row.spans) {
      const left = Math.max(this.x(span[START]), GUTTER - 2);
      const right = Math.min(this.x(span[START] + span[LENGTH]), this.width + 2);
      if (right < GUTTER || left > this.width) continue;
      const width = Math.max(0.7, right - left - (right - left > 4 ? 0.8 : 0));
      paint.globalAlpha = this.hovered === span ? 0.7 : 1;
      const name = this.data.names[span[NAME]];
      const isBackward = row.track === "compute" && name.endsWith("backward");
      paint.fillStyle = isBackward ? backward : fill;
      paint.beginPath();
      paint.roundRect(left, row.y, width, row.height, width > 8 ? 3 : 0);
      paint.fill();
      paint.globalAlpha = 1;
      if (width > 46 && row.height > 16) {
        paint.fillStyle = colour(isBackward ? "--on-backward" : "--on-span");
        paint.fillText(fitted(paint, name, width - 10), left + 5, row.y + row.height / 2 + 0.5);
      }
    }
  }

  // Over the spans, so that a row's name is never hidden by one that begins left of the view.
  drawGutter(paint, colour) {
    paint.fillStyle = colour("--card");
    paint.fillRect(0, 0, GUTTER - 2, this.height);
    paint.textAlign = "left";
    for (const row of this.rows) {
      paint.fillStyle = colour(row.first ? "--text" : "--faint");
      paint.font = `${row.first ? "600 12px" : "10.5px"} system-ui, sans-serif`;
      const isFirstOfTrack = this.rows.find((other) => other.rank === row.rank && other.track === row.track) === row;
      if (row.first) paint.fillText(`rank ${row.rank}`, 10, row.y + row.height / 2);
      else if (isFirstOfTrack) paint.fillText({ exposed: "waiting", communication: "network" }[row.track] ?? "", 18, row.y + row.height / 2);
    }
    paint.font = "11.5px system-ui, sans-serif";
    for (const [step, start] of this.steps) {
      const x = this.x(start);
      if (x < GUTTER - 1 || x > this.width - 40) continue;
      paint.fillStyle = colour("--text");
      paint.fillText(`step ${step}`, x + 6, 11);
    }
  }

  show(from, to) {
    const length = Math.max(20, Math.min(to - from, this.end));
    const start = Math.max(0, Math.min(from, this.end - length));
    this.view = [start, start + length];
    this.draw();
  }

  zoom(factor, x = (GUTTER + this.width) / 2) {
    const [from, to] = this.view;
    const centre = this.time(x);
    this.show(centre - (centre - from) * factor, centre + (to - centre) * factor);
  }

  move(share) {
    const [from, to] = this.view;
    this.show(from + share * (to - from), to + share * (to - from));
  }

  showStep() {
    const middle = (this.view[0] + this.view[1]) / 2;
    let index = 0;
    this.steps.forEach(([, start], i) => { if (start <= middle) index = i; });
    const start = this.steps[index][1];
    this.show(start, this.steps[index + 1]?.[1] ?? this.end);
  }

  act(action) {
    ({
      in: () => this.zoom(0.6), out: () => this.zoom(1 / 0.6), left: () => this.move(-0.25), right: () => this.move(0.25),
      all: () => this.show(0, this.end), step: () => this.showStep(),
    })[action]();
  }

  listen() {
    const keys = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", 0: "all", 1: "step" };
    this.canvas.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.metaKey || !(event.key in keys)) return;
      this.act(keys[event.key]);
      event.preventDefault();
    });
    this.canvas.addEventListener("wheel", (event) => {
      // A page must scroll: the wheel belongs to the timeline only when asked for.
      if (!event.ctrlKey && !event.metaKey && document.activeElement !== this.canvas) return;
      this.zoom(Math.exp(event.deltaY * 0.0015), event.offsetX);
      event.preventDefault();
    }, { passive: false });
    this.canvas.addEventListener("pointerdown", (event) => {
      this.grip = { x: event.offsetX, view: this.view };
      this.canvas.setPointerCapture(event.pointerId);
      this.canvas.classList.add("moving");
      tooltip.hide();
    });
    for (const name of ["pointerup", "pointercancel"]) {
      this.canvas.addEventListener(name, () => {
        this.grip = null;
        this.canvas.classList.remove("moving");
      });
    }
    this.canvas.addEventListener("pointermove", (event) => (this.grip ? this.drag(event) : this.hover(event)));
    this.canvas.addEventListener("pointerleave", () => this.hover(null));
  }

  drag(event) {
    const [from, to] = this.grip.view;
    const moved = ((this.grip.x - event.offsetX) / (this.width - GUTTER)) * (to - from);
    this.show(from + moved, to + moved);
  }

  hover(event) {
    const [row, span] = event ? this.spanAt(event.offsetX, event.offsetY) : [null, null];
    if (span !== this.hovered) {
      this.hovered = span;
      this.draw();
    }
    if (!span) return tooltip.hide();
    const lines = [`${TRACKS[row.track]} of rank ${row.rank}, step ${span[STEP]}`, duration(span[LENGTH])];
    if (span[BYTES]) lines.push(`${bytes(span[BYTES])}, ${(span[BYTES] / span[LENGTH] / 1e3).toFixed(2)} GB/s`);
    tooltip.show(event.clientX, event.clientY, this.data.names[span[NAME]], lines);
  }

  // The innermost span at a place: spans are in order of start, so it is the last that holds the place.
  spanAt(x, y) {
    const row = this.rows.find((one) => y >= one.y - 1 && y <= one.y + one.height + 1);
    if (!row || x < GUTTER) return [null, null];
    const slack = (this.time(1.5) - this.time(0));
    const [early, late] = [this.time(x) - slack, this.time(x) + slack];
    const under = row.spans.filter((span) => span[START] <= late && span[START] + span[LENGTH] >= early);
    return [row, under[under.length - 1] ?? null];
  }

  showShares() {
    const [from, to] = this.view;
    byId("timeline-shares").tBodies[0].replaceChildren(...this.data.ranks.map(({ rank, lanes }) => {
      const of = (track) => union(lanes.filter((lane) => lane.track === track).flatMap((lane) => lane.spans), from, to);
      const [waiting, communicating] = [of("exposed"), of("communication")];
      const computing = total(of("compute")) - overlap(of("compute"), waiting);
      const hidden = 1 - overlap(communicating, waiting) / (total(communicating) || 1);
      const cells = [computing, total(waiting), total(communicating)].map((time) => percent(time / (to - from)));
      return tableRow([`rank ${rank}`, ...cells, total(communicating) ? percent(hidden) : "–"]);
    }));
  }
}

const axisTime = (time, range) => (range > 4e6 ? `${(time / 1e6).toFixed(1)} s` : `${(time / 1e3).toFixed(range < 4e3 ? 2 : range < 4e4 ? 1 : 0)} ms`);

function fitted(paint, text, width) {
  let shown = paint.measureText(text).width > width ? text.split(" ")[0] : text; // the unit says more than what it does
  while (shown.length > 1 && paint.measureText(shown).width > width) shown = `${shown.slice(0, shown.endsWith("…") ? -2 : -1)}…`;
  return shown.length > 1 || shown === text ? shown : "";
}

// Spans, clipped to a view, as disjoint intervals in order.
function union(spans, from, to) {
  const clipped = spans.map((span) => [Math.max(from, span[START]), Math.min(to, span[START] + span[LENGTH])]).filter(([a, b]) => a < b);
  const merged = [];
  for (const [start, end] of clipped.sort((a, b) => a[0] - b[0])) {
    const last = merged[merged.length - 1];
    if (last && start <= last[1]) last[1] = Math.max(last[1], end);
    else merged.push([start, end]);
  }
  return merged;
}

const total = (intervals) => intervals.reduce((sum, [start, end]) => sum + end - start, 0);

function overlap(first, second) {
  let sum = 0;
  let i = 0;
  let j = 0;
  while (i < first.length && j < second.length) {
    sum += Math.max(0, Math.min(first[i][1], second[j][1]) - Math.max(first[i][0], second[j][0]));
    if (first[i][1] < second[j][1]) i++;
    else j++;
  }
  return sum;
}
