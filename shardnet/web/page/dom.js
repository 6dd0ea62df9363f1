// Elements. What is put into them is text: a string never becomes markup.

export const byId = (id) => document.getElementById(id);

export const element = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);

export const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

function fill(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) if (value !== null && value !== undefined) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// Sets the text of an element only where it differs, so that a selection survives.
export function say(target, text) {
  if (target.textContent !== text) target.textContent = text;
}
