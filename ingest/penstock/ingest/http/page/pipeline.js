// The live view: the last snapshot of the pipeline, and lines of those before it.

import { ask, backoffMs, events, listen, pause, SILENCE_MS } from "./api.js";
import { byId, count, make, percent, rate, say, seconds, shape, Sparkline } from "./draw.js";

const MOST = 100_000; // tokens at which a tank is full; its marks are powers of ten
const CLASSES = ["interactive", "batch"];
const STAGES = ["prefill", "decode"];
const TIERS = ["pool", "shm", "disk", "redis"];
const LAG = { prefill: "prompt_tokens", decode: "output_tokens" };
const FORMATS = { requests: rate, prefill: rate, cached: rate, jobs: count, decode: rate, ttft: seconds, itl: seconds };
const TANK = { bottom: 64, height: 54 };

/** What the controller wants, and why; empty where none runs. */
const describeScaling = (told) => {
  if (!told) return "";
  const numbers = Object.entries(told.reasons).map(([kind, reason]) => `${count(told.workers[kind])} ${kind} wanted (${reason})`);
  return [...numbers, ...told.alerts].join(" · ");
};
const describeRegions = (regions) => (regions ?? []).map((region, index) => {
  const models = Object.entries(region.models).map(([name, model]) => (model.differs ? `${name} is another model` : `${name} waits ${seconds(model.wait_s.interactive)}`));
  const place = index ? `${region.state}${region.state === "ready" ? `, ${seconds(region.round_trip_s)} away` : ""}` : "here";
  return [`${region.name} ${place}`, ...(region.reason ? [region.reason] : []), ...models].join(", ");
}).join(" · ");
const timeOf = (atS) => new Date(atS * 1000).toLocaleTimeString("en-GB");
const at = (name) => document.querySelectorAll(`[data-at="${name}"]`);
const put = (name, text) => at(name).forEach((element) => say(element, text));

export class PipelineView {
  /** `onSilence()`: nothing has come for too long, so that other connections may be dead, too. */
  constructor(onSilence) {
    this._onSilence = onSilence;
    this._lines = {};
    for (const element of document.querySelectorAll("[data-spark]")) {
      const name = element.dataset.spark;
      this._lines[name] = new Sparkline(element, FORMATS[name]);
    }
    this._shelves = TIERS.map((_, index) => shape("rect", { class: "level", x: 21.5, y: 9.5 + index * 14.5, width: 0, height: 11.5 }));
    document.querySelector("[data-shelves]").append(...this._shelves);
  }

  /** Watch until the signal aborts. Throws `Refused` where no key opens it. */
  async watch(signal) {
    for (let tries = 0; !signal.aborted; tries += 1) {
      const ear = listen(signal);
      try {
        for await (const { event, data } of events(await ask("/v1/live", { signal: ear.signal }), ear.heard)) {
          tries = 0;
          if (event === "unavailable") this._away(JSON.parse(data).message);
          else this.show(JSON.parse(data));
        }
      } catch (error) {
        if (signal.aborted) return;
        if (error.status === 401) throw error;
        if (ear.isLate()) this._silent();
        else this._away(error.status ? error.message : "This gateway does not answer.");
      } finally {
        ear.end();
      }
      await pause(backoffMs(tries), signal);
    }
  }

  show(snapshot) {
    byId("pipeline").classList.remove("away");
    say(byId("notice"), snapshot.health.reasons.join(" · "));
    byId("health").dataset.state = snapshot.health.state;
    say(byId("health"), snapshot.health.state);
    say(byId("name"), snapshot.pipeline);
    say(byId("at"), timeOf(snapshot.at));
    this._showLag(snapshot.lag);
    const toGenerate = CLASSES.reduce((sum, priorityClass) => sum + (snapshot.lag[priorityClass].decode.output_tokens ?? 0), 0);
    put("jobs.tokens", count(toGenerate));
    this._lines.jobs.add(snapshot.at, toGenerate);
    this._showWorkers(snapshot);
    say(byId("scaling"), describeScaling(snapshot.scaling));
    say(byId("regions"), describeRegions(snapshot.regions));
    for (const [name, found] of [["ttft", snapshot.ttft_s], ["itl", snapshot.itl_s], ["text", snapshot.text_s]]) {
      for (const part of ["p50", "p90", "p99"]) put(`${name}.${part}`, seconds(found[part]));
      this._lines[name]?.add(snapshot.at, found.p50);
    }
    byId("text-latency").hidden = !snapshot.text_s.count;
    if (!snapshot.workers) return; // a tenant's summary
    this._showTiers(snapshot.tiers);
    const rates = snapshot.rates;
    this._rate(snapshot.at, "requests", rates.requests_per_s, ["requests", "tiers"]);
    this._rate(snapshot.at, "prefill", rates.prefill_tokens_per_s, ["prefill", "jobs"]);
    this._rate(snapshot.at, "cached", rates.cached_tokens_per_s, []);
    this._rate(snapshot.at, "decode", rates.decode_tokens_per_s, ["decode", "streams"]);
    put("rates.texts", rate(rates.texts_per_s));
    byId("texts").hidden = !snapshot.text_s.count;
    this._showAccount(snapshot.account);
  }

  _showAccount(account) {
    byId("account").hidden = !account;
    if (!account) return;
    const amount = (number) => `${number.toFixed(2)} ${account.currency}`.trim();
    say(byId("account"), `Today: tokens ${amount(account.sold)}, workers ${amount(account.cost)} and idle ${amount(account.idle_cost)}, margin ${amount(account.margin)}`);
  }

  _showWorkers({ workers, lost, at }) {
    const all = [...(workers ?? []), ...(lost ?? []).map((worker) => ({ ...worker, state: "lost" }))];
    all.sort((one, other) => one.name.localeCompare(other.name, "en", { numeric: true }));
    const numBoth = all.filter(doesBoth).length;
    for (const stage of STAGES) {
      // Who does the work of both stages is one worker: it is shown where its answers are, and named at the other one.
      const rows = all.filter((worker) => worker.stage === stage || (stage === "decode" && doesBoth(worker))).map((worker) => workerRow(worker, at));
      if (stage === "prefill" && numBoth) rows.push(make("li", "elsewhere", `${numBoth === 1 ? "1 worker" : `${count(numBoth)} workers`} under Decode`));
      if (!rows.length) rows.push(make("li", "nobody", workers ? "no worker" : "not shown with an API key"));
      document.querySelector(`[data-workers="${stage}"]`).replaceChildren(...rows);
    }
  }

  _silent() {
    const shown = byId("at").textContent;
    this._away(`No news of the pipeline has come for ${SILENCE_MS / 1000} s${shown === "–" ? "" : `: what is shown is of ${shown}`}.`);
    this._onSilence();
  }

  _away(why) {
    byId("pipeline").classList.add("away");
    byId("health").dataset.state = "down";
    say(byId("health"), "unreachable");
    say(byId("notice"), why);
  }

  _showLag(lag) {
    for (const priorityClass of CLASSES) {
      for (const [stage, which] of Object.entries(LAG)) {
        const { messages, [which]: tokens } = lag[priorityClass][stage];
        put(`${stage}.${priorityClass}.tokens`, count(tokens));
        put(`${stage}.${priorityClass}.messages`, count(messages));
        const share = Math.min(1, Math.log10(1 + (tokens ?? 0)) / Math.log10(1 + MOST));
        const level = document.querySelector(`[data-level="${stage}.${priorityClass}"]`);
        level.setAttribute("y", TANK.bottom - share * TANK.height);
        level.setAttribute("height", share * TANK.height);
      }
      put(`wait.${priorityClass}`, seconds(lag[priorityClass].estimated_wait_s));
    }
  }

  _showTiers(tiers) {
    TIERS.forEach((tier, index) => {
      put(`tiers.${tier}.share`, percent(tiers[tier]?.share));
      put(`tiers.${tier}.hits`, count(tiers[tier]?.hits));
      this._shelves[index].setAttribute("width", 53 * Math.min(1, tiers[tier]?.share ?? 0));
    });
  }

  _rate(atS, name, perS, stations) {
    put(`rates.${name}`, rate(perS));
    this._lines[name].add(atS, perS);
    for (const station of stations) {
      document.querySelector(`[data-station="${station}"]`).classList.toggle("flows", perS > 0);
    }
    for (const motion of document.getAnimations()) {
      if (motion instanceof CSSAnimation) motion.startTime = 0; // one stream, whenever its parts began to flow
    }
  }
}

const doesBoth = ({ stage }) => !STAGES.includes(stage);

function workerRow(worker, at) {
  const name = make("b", "name", worker.name, ...(doesBoth(worker) ? [make("small", "", worker.stage === "embed" ? " vectors or scores" : " prefill and decode")] : []));
  name.title = worker.host ? `${worker.name} on ${worker.host}` : worker.name;
  const row = make("li", "worker", name, make("span", "is", stateOf(worker)));
  row.dataset.state = worker.state;
  row.dataset.worker = worker.name;
  if (worker.reason) row.title = worker.reason;
  if (worker.state !== "lost") {
    const used = worker.blocks_total ? worker.blocks_used / worker.blocks_total : 0;
    const gauge = make("span", "gauge", make("i"));
    gauge.firstChild.style.width = `${(used * 100).toFixed(1)}%`;
    const prompts = worker.prompts_s == null ? "" : `, ${seconds(worker.prompts_s)} of prompts`;
    const load = make("span", "load", `${count(worker.running)} running, ${count(worker.waiting)} waiting${prompts}`);
    if (prompts) load.title = "how long it will compute the prompts that wait for it";
    const texts = worker.texts_per_s ? `${rate(worker.texts_per_s)} texts/s, ` : "";
    row.append(load, make("span", "speed", `${texts}${rate(worker.tokens_per_s)} tok/s`), gauge);
    gauge.setAttribute("role", "img");
    gauge.setAttribute("aria-label", `${percent(used)} of its KV pool used`);
    gauge.title = `KV pool: ${count(worker.blocks_used)} of ${count(worker.blocks_total)} blocks`;
    for (const { url, rests_s: restsS, problem } of worker.resting) {
      const until = restsS > 0 ? `rests until ${timeOf(at + restsS)}` : "is tried with one request";
      row.append(make("span", "rests", `${url} ${until}: ${problem}`));
    }
  }
  return row;
}

function stateOf({ state, progress, seen_s_ago: ago }) {
  if (state === "lost") return `lost ${Math.round(ago)} s ago`;
  return state === "loading" && progress != null ? `loading ${percent(progress)}` : state;
}
