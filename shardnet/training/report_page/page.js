// Reads the run's data and fills the page.

function tableRow(cells) {
  return element("tr", {}, element("th", { scope: "row" }, cells[0]), ...cells.slice(1).map((cell) => element("td", {}, cell)));
}

function fillFigures(figures) {
  byId("figures").replaceChildren(...figures.map(({ label, value, note }) => element("div", {}, element("dt", {}, label),
    element("dd", { class: "value" }, value), element("dd", { class: "note" }, note))));
}

function fillCharts(run) {
  const column = (name) => run.steps.filter((step) => step[name] !== null).map((step) => [step.step, step[name]]);
  const loss = column("loss");
  const series = [
    { label: "training, smoothed", className: "strong", points: smooth(loss, loss.length / 40) },
    { label: "training", className: "plain", points: loss },
    { label: "validation", className: "second", points: run.validations.filter(({ loss: value }) => value !== null).map((v) => [v.step, v.loss]), dots: true },
  ];
  const drawn = series.filter((one) => one.points.length);
  const options = { width: 1080, height: 340, format: (y) => y.toFixed(1), formatExact: (y) => y.toFixed(4), label: "Loss over steps", legend: true };
  lineChart(byId("loss-chart"), drawn, options);
  small("learning-rate-chart", "Learning rate", column("learning_rate"), (y) => (y ? y.toPrecision(3).replace(/\.?0+(e|$)/, "$1") : "0"));
  small("tokens-chart", "Tokens per second", column("tokens_per_s"), (y) => Math.round(y).toLocaleString("en"));
  small("gradient-chart", "Gradient norm", column("gradient_norm"), (y) => y.toFixed(2));
  small("exposed-chart", "Waiting", column("exposed_share"), (y) => `${(100 * y).toFixed(1)} %`);
}

function small(id, label, points, format) {
  const series = [
    { label: `${label}, smoothed`, className: "strong", points: smooth(points, points.length / 60) },
    { label, className: "plain", points },
  ].filter((one) => points.length);
  lineChart(byId(id), series, { width: 500, height: 190, format, label: `${label} over steps`, zero: true });
}

function fillTimeline(timeline) {
  if (!timeline.names.length) {
    byId("timeline-section").hidden = true;
    return;
  }
  byId("timeline-legend").append(...Object.entries(KINDS).map(([kind, name]) => element("li", {}, element("i", { class: kind }), name)));
  const canvas = byId("timeline");
  canvas.setAttribute("aria-label", `Timeline of ${timeline.ranks.length} ranks; the table below gives the shares of the time in view.`);
  const drawn = new Timeline(canvas, timeline);
  for (const button of document.querySelectorAll("[data-action]")) button.addEventListener("click", () => drawn.act(button.dataset.action));
}

function fillTables(run) {
  const rows = (id, cells) => byId(id).tBodies[0].replaceChildren(...cells.map(tableRow));
  rows("ranks", run.ranks.map((rank) => [`rank ${rank.rank}`, rank.address, rank.node.split("/")[0], bytes(rank.held_bytes), bytes(rank.sent_bytes),
    bytes(rank.received_bytes), duration(rank.exposed_s * 1e6)]));
  rows("config", Object.entries(run.config));
  rows("versions", Object.entries(run.versions));
}

function fillSample(prompt, sample) {
  byId("sample-section").hidden = !sample;
  byId("sample").replaceChildren(element("span", { class: "prompt" }, prompt), sample);
}

try {
  const run = JSON.parse(byId("run-data").textContent);
  byId("subtitle").textContent = `${new Date(run.started).toLocaleString()} · shardnet ${run.versions.shardnet ?? ""}`;
  fillFigures(run.figures);
  fillCharts(run);
  fillTimeline(run.timeline);
  fillTables(run);
  fillSample(run.prompt, run.sample);
  document.documentElement.dataset.rendered = "yes";
} catch (error) {
  byId("failure").textContent = `This page could not be drawn: ${error}`;
  byId("failure").hidden = false;
  throw error;
}
