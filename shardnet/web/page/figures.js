// What stands above: which job, how far it is, and a choice where there are several.

import { byId, element, say } from "./dom.js";
import { duration, loss, short, time, whole } from "./format.js";

export function drawHead(view) {
  const { job, rendezvous } = view;
  say(byId("name"), job ? job.name : "shardnet");
  document.title = job ? `${job.name} – shardnet` : "shardnet";
  const state = byId("state");
  state.hidden = !job;
  if (job) {
    say(state, job.state);
    state.className = `pill ${job.state}`;
  }
  const health = rendezvous.health === "serving" ? "" : `, ${rendezvous.health}`;
  say(byId("place"), `rendezvous ${rendezvous.address}${health}, ${rendezvous.connections}, up ${duration(rendezvous.uptime_s)}, shardnet ${rendezvous.version}`);
}

export function drawJobs(view, choose) {
  const nav = byId("jobs");
  nav.hidden = view.jobs.length < 2;
  const drawn = JSON.stringify([view.jobs, view.job?.name]);
  if (nav.dataset.drawn === drawn) return;  // who is about to press a button still has it
  nav.dataset.drawn = drawn;
  nav.replaceChildren(...view.jobs.map((job) => {
    const button = element("button", { type: "button", "aria-pressed": job.name === view.job?.name }, element("b", {}, job.name), ` ${job.state}`);
    button.addEventListener("click", () => choose(job.name));
    return button;
  }));
}

export function drawFigures(job) {
  const progress = job.progress ?? {};
  const here = job.workers.filter((worker) => worker.state !== "gone").length;
  const [least, most] = job.wanted;
  const waiting = job.joined > here ? `, ${job.joined - here} waiting` : "";
  const figures = [
    figure("step", whole(progress.step), stepNote(progress), progress.step / progress.total_steps),
    figure("loss", loss(progress.loss)),
    figure("tokens a second", short(progress.tokens_per_s)),
    figure("a step", time(progress.step_s)),
    figure("time left", duration(progress.left_s)),
    figure("workers", `${here}`, `of ${least === most ? most : `${least} to ${most}`}${waiting}`),
    figure("epoch", `${job.epoch}`, job.absent ? `${job.absent} not back` : ""),
  ];
  byId("figures").replaceChildren(...figures);
}

function stepNote({ total_steps: total, note }) {
  return [total ? `of ${whole(total)}` : "", note].filter(Boolean).join(", ");
}

function figure(name, value, note = "", share = NaN) {
  const parts = [element("dt", {}, name), element("dd", {}, element("b", {}, value), ` ${note}`)];
  if (Number.isFinite(share)) parts.push(element("dd", {}, element("progress", { max: 1, value: Math.min(1, share), "aria-label": name })));
  return element("div", {}, ...parts);
}
