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

export const SHORTEST_S = 0.00005; // below this a time is not told exactly

/** A time: <0.1 ms, 0.4 ms, 23 ms, 1.20 s, 95 s. */
export function seconds(s) {
  if (s == null) return none;
  if (s === 0) return "0 s";
  if (s < SHORTEST_S) return "<0.1 ms";
  if (s < 0.01) return `${(s * 1000).toFixed(1)} ms`;
  if (s < 1) return `${Math.round(s * 1000)} ms`;
  return s < 10 ? `${s.toFixed(2)} s` : `${Math.round(s)} s`;
}

const SPAN_S = 60;
const GAP_S = 3; // there is a look each second; across a longer gap no line is drawn
const WIDTH = 60;
const HEIGHT = 16;

/** A line of the last minute's values, with its scale from zero to the largest, and its time from the oldest to now. */
export class Sparkline {
  constructor(element, format) {
    this._format = format;
    this._points = [];
    this._line = shape("path", { class: "line", d: "M0 0" });
    this._plot = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" });
    this._plot.append(shape("path", { class: "ground", d: `M0 0H${WIDTH}M0 ${HEIGHT}H${WIDTH}` }), this._line);
    this._largest = make("span", "largest");
    this._oldest = make("span", "oldest");
    element.append(this._plot, this._largest, make("span", "least", "0"), this._oldest, make("span", "now", "now"));
  }

  /** Take in a value; null where nothing was measured. */
  add(atS, value) {
    this._points = this._points.filter((point) => point.atS < atS && point.atS >= atS - SPAN_S);
    this._points.push({ atS, value });
    const largest = Math.max(0, ...this._points.map((point) => point.value ?? 0));
    const spanS = atS - this._points[0].atS;
    this._line.setAttribute("d", this._path(largest || 1, spanS));
    const top = largest ? this._format(largest) : "";
    const begin = spanS >= 1 ? `${Math.round(spanS)} s ago` : "";
    say(this._largest, top);
    say(this._oldest, begin);
    this._plot.setAttribute("aria-label", `${begin ? `since ${begin} ` : ""}at most ${top || "0"}, now ${this._format(value)}`);
  }

  /** The line takes the whole width from the second value on; the time below says how long that is. */
  _path(largest, spanS) {
    const from = this._points[0].atS;
    let path = "";
    let last = null;
    for (const { atS, value } of this._points) {
      if (value !== null && value !== undefined) {
        const x = spanS ? ((atS - from) / spanS) * WIDTH : WIDTH;
        const place = `${x.toFixed(2)} ${(HEIGHT - (value / largest) * HEIGHT).toFixed(2)}`;
        path += last !== null && atS - last <= GAP_S ? `L${place}` : `M${place}h0`; // a value alone is a dot
        last = atS;
      } else last = null;
    }
    return path || "M0 0";
  }
}
