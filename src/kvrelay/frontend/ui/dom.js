// Elements and numbers as text. Text from outside (ids, errors, models) only ever becomes a text node.

/** An element. Attributes by name; `class`, `title`, `on...` handlers; children are elements or text. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value);
  }
  element.append(...children.map((child) => (child instanceof Node ? child : String(child ?? ""))));
  return element;
}

/** Let `parent` have one element per item, in order. Elements are kept by key, so that a click is never lost. */
export function keyed(parent, items, keyOf, create, update) {
  const known = parent.keyedElements ?? new Map();
  const kept = new Map();
  items.forEach((item, at) => {
    const key = keyOf(item);
    const element = known.get(key) ?? create(item);
    kept.set(key, element);
    update(element, item);
    if (parent.children[at] !== element) parent.insertBefore(element, parent.children[at] ?? null);
  });
  for (const [key, element] of known) if (!kept.has(key)) element.remove();
  parent.keyedElements = kept;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** A bar of `share` (0 to 1) of its room. Set by script: the page allows no style attributes. */
export function setWidth(element, share) {
  element.style.width = `${Math.min(Math.max(share, 0), 1) * 100}%`;
}

export function emptyBar() {
  return h("span", { class: "bar" }, h("span", { class: "fill" }));
}

/** A table with a head; `body` gets its rows. */
export function table(names, body) {
  const head = h("tr", {}, ...names.map((name) => h("th", { class: name.replace(" ", "-") }, name)));
  return h("div", { class: "scroll" }, h("table", {}, h("thead", {}, head), body));
}

export function number(value, digits = 0) {
  if (value == null) return "–";
  return value.toLocaleString("en", { maximumFractionDigits: digits });
}

/** Few significant digits: 0.42, 7.3, 128, 12.5k. */
export function rate(value) {
  if (value == null) return "–";
  if (value >= 1e6) return `${number(value / 1e6, 1)}M`;
  if (value >= 1e4) return `${number(value / 1e3, 1)}k`;
  return number(value, value < 1 ? 2 : value < 100 ? 1 : 0);
}

export function milliseconds(value) {
  if (value == null) return "–";
  if (Math.abs(value) >= 1e4) return `${number(value / 1e3, 1)} s`;
  if (Math.abs(value) >= 1e3) return `${number(value / 1e3, 2)} s`;
  return `${number(value, Math.abs(value) < 10 ? 2 : Math.abs(value) < 100 ? 1 : 0)} ms`;
}

export function seconds(value) {
  return milliseconds(value && 1e3 * value);
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let at = 0;
  while (value >= 1024 && at < units.length - 1) [value, at] = [value / 1024, at + 1];
  return `${number(value, value < 10 && at ? 1 : 0)} ${units[at]}`;
}

export function percent(part, whole) {
  return whole ? `${number((100 * part) / whole, 0)} %` : "–";
}

export function clock(unixSeconds) {
  return new Date(unixSeconds * 1000).toLocaleTimeString("en-GB");
}
