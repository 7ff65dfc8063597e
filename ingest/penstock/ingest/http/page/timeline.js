// One request's life: its spans as bars over one axis.

import { askJson, pause } from "./api.js";
import { byId, make, say, seconds, SHORTEST_S } from "./draw.js";

// The words for spans, as `penstock explain` has them (SPAN_WORDS). Traces have the names on the left.
const WORDS = {
  request: "accept", "queue.wait": "wait in queue", taken_over: "take over", preprocess: "read prompt", prefill: "prefill",
  "kv.read": "fetch KV", first_token: "first token", "kv.write": "store KV", hand_off: "hand off", decode: "decode",
  end: "write end", settle: "publish result", endpoint: "endpoint", embed: "compute texts", unknown: "not known", total: "total", measured: "measured",
};
const LOOKS_MS = [200, 300, 500, 1000, 1000, 2000, 2000, 4000];

export class TimelineView {
  constructor() {
    this._shown = 0;
    byId("life-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.show(byId("life-id").value.trim());
    });
  }

  /** Draw a request's life as soon as it is known, beside what was measured here, if it was. */
  async show(id, latencyS = null, ttftS = null) {
    const turn = (this._shown += 1);
    byId("life-id").value = id;
    let isDrawn = false;
    if (byId("bars").dataset.id !== id) byId("bars").replaceChildren();
    tell("Loading the timeline.");
    try {
      for (const waitMs of [...LOOKS_MS, null]) {
        const { choices: [life] } = await askJson(`/v1/requests/${encodeURIComponent(id)}/timeline`);
        if (turn !== this._shown) return;
        const isWhole = hasAll(life.spans);
        isDrawn = life.spans.length > 0;
        if (isDrawn) draw(id, life, latencyS, ttftS, isWhole);
        if (isWhole) return;
        if (waitMs === null) break;
        await pause(waitMs);
      }
      if (isDrawn) return;
      byId("bars").replaceChildren();
      tell("No trace of this request is stored: traces are kept for a limited time, and a request may go untraced.");
    } catch (error) {
      if (turn !== this._shown) return;
      byId("bars").replaceChildren();
      tell(error.status ? error.message : "This gateway does not answer.", "failed");
    }
  }
}

/** Whether nothing is missing up to the answer's end: spans arrive from several processes, some a little later. */
function hasAll(spans) {
  const names = new Set(spans.map(({ name }) => name));
  const end = spans.find(({ name }) => name === "end");
  const hasEnder = end && spans.some(({ id }) => id === end.parent); // the worker in which it ended
  return Boolean(hasEnder) && names.has("request") && (names.has("prefill") || !names.has("decode"));
}

function tell(text, kind = "") {
  byId("life-state").dataset.state = kind;
  say(byId("life-state"), text);
}

function draw(id, { spans, account, start_s: begun, latency_s: toldS }, latencyS, ttftS, isWhole) {
  const endS = Math.max(...spans.map((span) => span.end_s)) - begun;
  const totalS = toldS ?? endS;
  const scaleS = Math.max(endS, latencyS ?? 0) || 1;
  const rows = spans.map((span) => bar(span.name, span.service, span.start_s - begun, span.end_s - begun, scaleS, told(span)));
  rows.unshift(whole(account, begun, totalS, scaleS), make("p", "shares", ...shares(account)));
  if (latencyS !== null) rows.push(here(latencyS, ttftS, scaleS));
  byId("bars").replaceChildren(axis(scaleS), ...rows);
  Object.assign(byId("bars").dataset, { id, totalS, latencyS: latencyS ?? "", whole: isWhole });
  const numProcesses = new Set(spans.map(({ service }) => service)).size;
  const measured = latencyS === null ? "" : `; this browser measured ${seconds(latencyS)}`;
  tell(`Answered in ${seconds(totalS)}${measured}. ${spans.length} spans from ${numProcesses} processes.`);
}

/** The account: every stretch of the time in one bar, without gap or overlap. */
function whole(account, begun, totalS, scaleS) {
  const row = bar("total", "by span", 0, totalS, scaleS, "The whole time, each moment in the colour of its span.");
  const fills = account.map(({ name, start_s: start, end_s: end }) => {
    const fill = placed("fill", (start - begun) / scaleS, (end - start) / scaleS);
    fill.dataset.name = name;
    fill.dataset.s = end - start;
    fill.title = `${WORDS[name] ?? name}: ${seconds(end - start)}`;
    return fill;
  });
  row.classList.add("whole");
  row.querySelector(".track").replaceChildren(...fills);
  return row;
}

/** What each kind of span took of it, the largest first, with its colour. */
function shares(account) {
  const sums = new Map();
  for (const { name, start_s: start, end_s: end } of account) sums.set(name, (sums.get(name) ?? 0) + end - start);
  const sorted = [...sums].sort(([, one], [, other]) => other - one);
  return sorted.filter(([, s]) => s >= SHORTEST_S).map(([name, s]) => {
    const mark = make("i", "swatch");
    mark.dataset.name = name;
    return make("span", "", mark, `${WORDS[name] ?? name} ${seconds(s)}`);
  });
}

/** What was measured in this browser, with the first token. */
function here(latencyS, ttftS, scaleS) {
  const row = bar("measured", "browser", 0, latencyS, scaleS, "From the click to the last byte.");
  row.classList.add("here");
  if (ttftS !== null) {
    const mark = placed("first", ttftS / scaleS);
    mark.title = `first token after ${seconds(ttftS)}`;
    row.querySelector(".track").append(mark);
  }
  return row;
}

function placed(className, left, width = null) {
  const element = make("i", className);
  element.style.left = `${left * 100}%`;
  if (width !== null) element.style.width = `${Math.max(0, width) * 100}%`;
  return element;
}

function bar(name, service, startS, endS, scaleS, title) {
  const fill = placed("fill", startS / scaleS, (endS - startS) / scaleS);
  const label = make("span", "what", make("b", "", WORDS[name] ?? name), make("small", "", service.replace(/^penstock-/, "")));
  const row = make("div", "bar", label, make("span", "track", fill), make("span", "long", endS - startS < SHORTEST_S ? "<0.1 ms" : seconds(endS - startS)));
  row.dataset.name = name;
  row.title = title;
  return row;
}

function told({ start_s: start, attributes }) {
  const pairs = Object.entries(attributes).map(([name, value]) => `${name} ${value}`);
  return [new Date(start * 1000).toISOString(), ...pairs].join("\n");
}

/** Marks at round times. */
function axis(scaleS) {
  const step = [1, 2, 5, 10].map((n) => n * 10 ** Math.floor(Math.log10(scaleS / 4))).find((s) => scaleS / s <= 5);
  const track = make("span", "track");
  for (let time = 0; time <= scaleS; time += step) {
    const mark = placed("mark", time / scaleS);
    mark.textContent = seconds(time);
    track.append(mark);
  }
  const row = make("div", "bar axis", make("span", "what"), track, make("span", "long"));
  row.setAttribute("aria-hidden", "true");
  return row;
}
