// What the page knows of the job that it shows: points and events are told once.

const KEPT = { points: 900, events: 100, recent: 90 };

export class Memory {
  constructor() {
    this.view = null;
    this.points = [];
    this.events = [];
    this.recent = new Map();  // by address: bytes a second that were sent
  }

  // How to ask for what is not known yet.
  query(wanted) {
    const job = wanted ?? this.view?.job?.name ?? "";
    const query = { job };
    if (this.view?.job?.name === job) Object.assign(query, { run: this.view.run, since: this.view.number });
    return new URLSearchParams(query);
  }

  add(view) {
    const job = view.job;
    const rows = (job?.points ?? []).map((row) => Object.fromEntries(job.columns.map((name, index) => [name, row[index]])));
    const isNew = !this.view || view.since === null || view.number > this.view.number;
    if (view.since === null) {
      this.points = rows;
      this.events = view.events;
      this.recent = new Map(Object.entries(job?.recent ?? {}));
    } else {
      this.points = [...this.points, ...rows].slice(-KEPT.points);
      this.events = [...this.events, ...view.events].slice(-KEPT.events);
      if (isNew) this.#addRecent(job?.workers ?? []);
    }
    this.view = view;
  }

  #addRecent(workers) {
    this.recent = new Map(workers.map((worker) => [worker.address, [...(this.recent.get(worker.address) ?? []), worker.sent ?? null].slice(-KEPT.recent)]));
  }
}
