// Asks once a second, and draws what is told.

import { byId, say } from "./dom.js";
import { drawEvents } from "./events.js";
import { drawFigures, drawHead, drawJobs } from "./figures.js";
import { clock } from "./format.js";
import { Memory } from "./memory.js";
import { drawPlots } from "./plots.js";
import { drawRing } from "./ring.js";
import { OVER } from "./states.js";
import { followPointer, refreshTip } from "./tip.js";
import { drawWorkers } from "./workers.js";

const INTERVAL_MS = 1000;
const ANSWER_MS = 5000;
const VERSION = 1;

const memory = new Memory();
let wanted = new URLSearchParams(location.hash.slice(1)).get("job");  // that was chosen
let heardAt = Date.now() / 1000;
let asking = null;
let round = 0;  // of questions; an answer to an earlier one comes too late

async function look(mine) {
  const view = await ask(memory.query(wanted ?? (isOver() ? "" : null)));
  if (mine !== round) return;
  if (!view) {
    silence(`No answer from ${location.host} since ${clock(heardAt)}. This is the last picture.`);
    return;
  }
  if (view.version !== VERSION) { location.reload(); return; }  // another version was started at this address
  memory.add(view);
  if (view.job?.name !== wanted) wanted = null;  // there is no such job any more
  heardAt = Date.now() / 1000;
  silence("");
  draw();
}

// Null if there is no answer, or one that is cut off.
async function ask(query) {
  try {
    const reply = await fetch(`view.json?${query}`, { signal: AbortSignal.timeout(ANSWER_MS) });
    return reply.ok ? await reply.json() : null;
  } catch {
    return null;
  }
}

// Whether the job that is shown has ended and another one has not: nobody chose it, so the page goes on with that.
function isOver() {
  const { job, jobs } = memory.view ?? {};
  return OVER.includes(job?.state) && jobs.some((other) => !OVER.includes(other.state));
}

function silence(words) {
  const line = byId("silence");
  line.hidden = !words;
  say(line, words);
  document.body.classList.toggle("stale", Boolean(words));
}

function draw() {
  const { view, points, events, recent } = memory;
  if (!view?.rendezvous) return;
  drawHead(view);
  drawJobs(view, choose);
  byId("none").hidden = Boolean(view.job);
  byId("job").hidden = !view.job;
  if (view.job) {
    drawFigures(view.job);
    drawRing(view.job);
    drawPlots(points);
    drawWorkers(view.job, recent);
    drawEvents(events);
  } else {
    const certs = view.rendezvous.connections === "plaintext" ? "" : " --certs DIR";
    say(byId("how"), `shardnet run --rendezvous ${view.rendezvous.address} --nproc 2${certs} train.py`);
  }
  refreshTip();
  document.documentElement.dataset.looks = view.number;
}

function choose(name) {
  wanted = name;
  history.replaceState(null, "", `#${new URLSearchParams({ job: name })}`);
  clearTimeout(asking);
  go();
}

async function go() {
  const mine = ++round;
  try {
    await look(mine);
  } finally {
    if (mine === round) asking = setTimeout(go, INTERVAL_MS);
  }
}

followPointer();
addEventListener("resize", draw);
go();
