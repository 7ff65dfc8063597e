// The playground: a chat, whose answers come as streams.

import { askJson } from "./api.js";
import { byId, count, make, rate, say, seconds } from "./draw.js";
import { Stream } from "./stream.js";

const SENTENCE = /[.!?:;\n]\s/g;

export class Playground {
  /** `onAnswered(id, latencyS, ttftS)`: an answer is complete. */
  constructor(onAnswered) {
    this._onAnswered = onAnswered;
    this._messages = [];
    this._stream = null;
    byId("prompt-form").addEventListener("submit", (event) => { event.preventDefault(); this._send(); });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      byId("prompt-form").requestSubmit();
    });
    byId("stop").addEventListener("click", () => this._stop());
    byId("clear").addEventListener("click", () => this._clear());
  }

  /** Fill the list of models. Throws as `ask`. */
  async findModels() {
    const { data } = await askJson("/v1/models");
    const list = byId("model");
    const chosen = list.value;
    const served = data.length ? data.map(({ id }) => [id, id]) : [["none yet", ""]];
    list.replaceChildren(...served.map(([name, value]) => new Option(name, value)));
    if (data.some(({ id }) => id === chosen)) list.value = chosen;
    return data.length;
  }

  async _send() {
    if (this._stream !== null) return;
    const prompt = byId("prompt").value;
    const turn = new Turn(prompt);
    byId("chat").prepend(turn.element);
    byId("prompt").value = "";
    const messages = [...this._messages, { role: "user", content: prompt }];
    this._stream = new Stream({ ...parameters(), messages }, {
      begun: (id) => turn.begun(id),
      piece: (text, tokens) => turn.piece(text, tokens),
      broken: (tokens, waitMs) => turn.broken(tokens, waitMs),
      resumed: (tokens, awayMs) => turn.resumed(tokens, awayMs),
    });
    byId("send").disabled = byId("clear").disabled = true;
    byId("stop").disabled = false;
    try {
      await this._stream.read();
      turn.ended(this._stream);
      this._messages = [...messages, { role: "assistant", content: turn.text }];
      if (!this._stream.isStopped) this._onAnswered(this._stream.id, turn.latencyS, turn.ttftS);
    } catch (error) {
      turn.failed(error);
      byId("prompt").value ||= prompt;
    } finally {
      this._stream = null;
      byId("send").disabled = byId("clear").disabled = false;
      byId("stop").disabled = true;
    }
  }

  _stop() {
    byId("stop").disabled = true;
    this._stream?.stop().catch((error) => state("failed", `It could not be told to stop: ${error.message}`));
  }

  _clear() {
    if (this._stream !== null) return;
    this._messages = [];
    byId("chat").replaceChildren();
    state("idle", "Nothing asked yet.");
    byId("prompt").focus();
  }
}

function parameters() {
  const optional = (id, name) => (byId(id).value === "" ? {} : { [name]: Number(byId(id).value) });
  return {
    model: byId("model").value,
    max_tokens: Number(byId("max-tokens").value),
    service_tier: byId("class").value === "batch" ? "flex" : "default",
    ...optional("temperature", "temperature"),
    ...optional("seed", "seed"),
  };
}

function state(kind, text) {
  byId("state").dataset.state = kind;
  say(byId("state"), text);
}

/** A prompt and its answer, as they are shown. */
class Turn {
  constructor(prompt) {
    this.text = "";
    this.ttftS = this.latencyS = null;
    this._begunAt = performance.now();
    this._lastAt = null;
    this._spoken = 0;
    this._id = make("code", "id", "");
    this._piece = make("span", "piece");
    this._answer = make("div", "answer", this._piece);
    this.element = make("article", "turn", make("p", "prompt", prompt), this._answer, make("p", "foot", this._id));
    byId("spoken").replaceChildren();
    for (const id of ["ttft", "tokens", "speed"]) say(byId(id), "–");
    state("waiting", "Sent; waiting for the first token.");
  }

  get _sinceS() {
    return (performance.now() - this._begunAt) / 1000;
  }

  begun(id) {
    say(this._id, id);
  }

  piece(text, tokens) {
    this._lastAt = this._sinceS;
    this.ttftS ??= this._lastAt;
    if (this.text === "") text = text.trimStart();
    this.text += text;
    this._piece.append(text);
    this._speak(false);
    state("streaming", "Streaming.");
    this._measure(tokens);
  }

  broken(tokens, waitMs) {
    const when = waitMs < 1000 ? "at once" : `in ${seconds(waitMs / 1000)}`;
    const where = tokens ? `after token ${count(tokens)}` : "before the first token";
    state("broken", `The connection broke ${where}; trying again ${when}. The answer goes on meanwhile.`);
  }

  resumed(tokens, awayMs) {
    const where = tokens ? `after token ${count(tokens)}` : "at its beginning";
    this._piece = make("span", "piece");
    this._answer.append(make("span", "seam", `resumed ${where}, ${seconds(awayMs / 1000)} away`), this._piece);
    state("streaming", `Resumed ${where}.`);
  }

  ended(stream) {
    this.latencyS = this._sinceS;
    this._speak(true);
    this._measure(stream.usage?.completion_tokens ?? stream.tokens);
    if (stream.isStopped) state("stopped", `Stopped after ${count(stream.tokens)} tokens.`);
    else {
      const why = { length: "as long as it was allowed to be", stop: "complete" }[stream.finishReason] ?? stream.finishReason;
      state("done", `The answer is ${why}: ${seconds(this.latencyS)} in all.`);
    }
  }

  failed(error) {
    this._speak(true);
    state("failed", error.message);
  }

  _measure(tokens) {
    const seconds_ = this._lastAt - this.ttftS;
    say(byId("ttft"), seconds(this.ttftS));
    say(byId("tokens"), count(tokens));
    if (tokens > 1 && seconds_ > 0) say(byId("speed"), rate((tokens - 1) / seconds_));
  }

  /** For who listens: whole sentences, as they are complete. */
  _speak(isAll) {
    const ends = [...this.text.slice(this._spoken).matchAll(SENTENCE)];
    const to = isAll ? this.text.length : this._spoken + (ends.length ? ends.at(-1).index + 1 : 0);
    if (to > this._spoken) byId("spoken").append(make("p", "", this.text.slice(this._spoken, to)));
    this._spoken = to;
  }
}
