// Small things to draw with. Whatever comes from outside becomes text, never markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element with a class, text or children. */
export function make(tag, className = "", ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

export function shape(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

export const byId = (id) => document.getElementById(id);

/** Set an element's text, if it is another one: what did not change is not announced again. */
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const oneDigit = new Intl.NumberFormat("en-US", { maximumFractionDigits: 1 });
const none = "–";

export const count = (number) => (number == null ? none : whole.format(number));
export const percent = (share) => (share == null ? none : `${whole.format(share * 100)}%`);
export const rate = (number) => (number == null ? none : number < 10 ? oneDigit.format(number) : whole.format(number));

/** A time: 0.4 ms, 23 ms, 1.20 s, 95 s. */
export function seconds(s) {
  if (s == null) return none;
  if (s === 0) return "0 s";
  if (s < 0.01) return `${(s * 1000).toFixed(1)} ms`;
  if (s < 1) return `${Math.round(s * 1000)} ms`;
  return s < 10 ? `${s.toFixed(2)} s` : `${Math.round(s)} s`;
}

/** A line of the last values over the area under it; gaps where nothing was measured. */
export function sparkline(svg, values, length) {
  const known = values.filter((value) => value != null);
  const most = Math.max(...known, 0) || 1;
  const x = (index) => ((index + length - values.length) * 60) / (length - 1);
  const y = (value) => 15 - (value / most) * 13.5;
  const points = values.map((value, index) => (value == null ? null : `${x(index).toFixed(2)} ${y(value).toFixed(2)}`));
  let line = "";
  points.forEach((point, index) => {
    if (point !== null) line += `${index > 0 && points[index - 1] !== null ? "L" : "M"}${point}`;
  });
  svg.replaceChildren(shape("path", { class: "ground", d: "M0 15.5H60" }), shape("path", { class: "line", d: line || "M0 0" }));
}
