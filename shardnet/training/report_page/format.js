"use strict";
// Numbers and elements as people read them.

const element = (tag, attributes = {}, ...children) => {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children); // strings become text, never markup
  return made;
};

const svgElement = (tag, attributes = {}, ...children) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
};

const byId = (id) => document.getElementById(id);

const duration = (us) =>
  us >= 1e6 ? `${(us / 1e6).toFixed(2)} s` : us >= 1e3 ? `${(us / 1e3).toFixed(us >= 1e5 ? 0 : 2)} ms` : `${us.toFixed(1)} µs`;

const bytes = (count) => {
  const power = Math.min(4, Math.floor(Math.log2(Math.max(count, 1)) / 10));
  return `${(count / 1024 ** power).toFixed(power ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
};

const percent = (share) => `${(100 * share).toFixed(1)} %`;

// Round numbers that cover [low, high], about `count` of them.
const ticks = (low, high, count) => {
  const rough = (high - low) / count || 1;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * unit).find((candidate) => candidate >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step + 0); // + 0: no "-0"
  return found;
};

// One tooltip for the page: a title, then lines; placed beside the pointer, inside the window.
const tooltip = {
  show(x, y, title, lines) {
    const box = byId("tooltip");
    box.replaceChildren(element("b", {}, title), ...lines.map((line) => element("span", {}, line)));
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    box.style.left = `${x + 16 + width > innerWidth ? Math.max(4, x - width - 16) : x + 16}px`;
    box.style.top = `${Math.max(4, Math.min(y + 14, innerHeight - height - 4))}px`;
  },
  hide() {
    byId("tooltip").hidden = true;
  },
};
