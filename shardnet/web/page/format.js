// Numbers as people read them. What is not known is a dash.

const NONE = "–";

const known = (format) => (value) => (value === null || value === undefined ? NONE : format(value));

const scaled = (value, base, units) => {
  let power = 0;
  while (Math.abs(value) >= base && power < units.length - 1) { value /= base; power += 1; }
  return `${Number(value.toPrecision(3))}${units[power]}`;
};

export const whole = known((value) => Math.round(value).toLocaleString("en"));
export const short = known((value) => scaled(value >= 1000 ? value : Math.round(value), 1000, ["", "k", "M", "G", "T"]));
export const bytes = known((value) => scaled(value >= 1024 ? value : Math.round(value), 1024, [" B", " KiB", " MiB", " GiB", " TiB"]));
export const perSecond = known((value) => `${bytes(value)}/s`);
export const percent = known((share) => `${Math.round(100 * share)} %`);
export const loss = known((value) => (Math.abs(value) >= 1e5 ? value.toExponential(2) : Number(value.toPrecision(4)).toString()));

export const time = known((seconds) =>
  seconds === 0 ? "0" : seconds < 1 ? `${Number((1000 * seconds).toPrecision(3))} ms` : seconds < 60 ? `${Number(seconds.toPrecision(3))} s` : duration(seconds));

export const duration = known((seconds) => {
  const all = Math.round(seconds);
  const [hours, minutes, rest] = [Math.floor(all / 3600), Math.floor(all / 60) % 60, all % 60];
  const two = (value) => String(value).padStart(2, "0");
  return hours >= 48 ? `${Math.round(hours / 24)} days` : hours ? `${hours}:${two(minutes)}:${two(rest)}` : `${minutes}:${two(rest)}`;
});

export const clock = known((at) => new Date(1000 * at).toLocaleTimeString("en-GB"));
export const clockMinutes = (at) => clock(at).slice(0, 5);

// As much of a name as has room, its end included, in which names of machines differ. The whole of it is told by pointing at it.
export function cut(name, room) {
  if (name.length <= room) return name;
  const tail = Math.min(4, Math.floor(room / 2));
  return `${name.slice(0, Math.max(1, room - tail - 1))}…${name.slice(-tail)}`;
}

// Names of machines without their domain, where that tells them apart.
export function withoutDomain(names) {
  const first = names.map((name) => (/^[\d.:[\]]+$/.test(name) ? name : name.split(".")[0]));
  return new Set(first).size === names.length ? first : names;
}

// Round numbers that cover [low, high], about `count` of them; of bytes they are round in KiB, MiB and so on.
export function ticks(low, high, count, isBinary = false) {
  const rough = (high - low) / count || 1;
  const base = isBinary ? 1024 ** Math.max(0, Math.floor(Math.log2(rough) / 10)) : 1;
  const unit = base * 10 ** Math.floor(Math.log10(rough / base));
  const step = [1, 2, 5, 10].map((factor) => factor * unit).find((candidate) => candidate >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}
