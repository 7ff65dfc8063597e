// The playground: a chat, whose answers come as streams. Where a model can call tools, it may be offered some to try.

import { askJson } from "./api.js";
import { byId, count, make, rate, say, seconds } from "./draw.js";
import { contentOf, drawn, Images } from "./images.js";
import { Stream } from "./stream.js";
import { runTool, TOOLS } from "./tools.js";

const SENTENCE = /[.!?:;\n]\s/g;
const TOO_LONG = "context_length_exceeded";
const MAX_ROUNDS = 4; // of calls, within one turn
const NEAR_PX = 40; // what is so near to the end of the chat, or of the window, counts as there

export class Playground {
  /** `onAnswered(id, latencyS, ttftS)`: an answer is complete. */
  constructor(onAnswered) {
    this._onAnswered = onAnswered;
    this._messages = [];
    this._stream = null;
    this._models = ""; // as they are listed
    this._images = new Images(() => canDo("sees"));
    byId("prompt-form").addEventListener("submit", (event) => { event.preventDefault(); this._send(); });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      byId("prompt-form").requestSubmit();
    });
    byId("stop").addEventListener("click", () => this._stop());
    byId("clear").addEventListener("click", () => this._clear());
    for (const id of ["model", "tools"]) byId(id).addEventListener("change", () => this._showSkills());
    for (const example of document.querySelectorAll("[data-example]")) {
      example.addEventListener("click", () => { byId("prompt").value = example.textContent; byId("prompt").focus(); });
    }
  }

  /** Fill the list of models, and say why nothing can be sent while there is none. Throws as `ask`. */
  async findModels() {
    const { data: listed } = await askJson("/v1/models");
    const data = listed.filter(({ task }) => (task ?? "generate") === "generate"); // the others answer no chat
    const others = data.filter(({ own: isOwn }) => isOwn === false);
    const own = data.filter((model) => !others.includes(model));
    const none = others.length ? "No worker of this pipeline serves a model yet; one of another pipeline may be chosen."
      : "No worker serves a model yet. A prompt can be sent as soon as one is ready.";
    say(byId("no-model"), own.length ? "" : none);
    const found = JSON.stringify(data.map(({ id, own: isOwn, supports_tools: can, sees }) => [id, isOwn, can, sees]));
    if (found === this._models) return own.length; // a list that somebody may have open
    this._models = found;
    const list = byId("model");
    const chosen = list.value;
    list.replaceChildren(...(own.length ? own.map(option) : [new Option("none yet", "")]));
    if (others.length) {
      const group = make("optgroup", "", ...others.map(option));
      group.label = "other pipelines";
      list.append(group);
    }
    if (data.some(({ id }) => id === chosen)) list.value = chosen;
    this._showSkills();
    this._enable();
    return own.length;
  }

  /** Go on over another connection, where the one of the answer may be dead. */
  reconnect() {
    this._stream?.reconnect();
  }

  async _send() {
    if (byId("send").disabled) return; // the Enter key asks as well
    const prompt = byId("prompt").value;
    const images = this._images.take();
    const turn = new Turn(prompt, images);
    growChat(() => byId("chat").append(turn.element), true);
    byId("prompt").value = "";
    const messages = [...this._messages];
    const given = parameters();
    byId("send").disabled = byId("clear").disabled = true;
    try {
      messages.push({ role: "user", content: await contentOf(prompt, images) });
      for (let rounds = 0; !(await this._read(turn, { ...given, messages })); rounds += 1) {
        if (rounds === MAX_ROUNDS) throw new Error(`the model called tools ${MAX_ROUNDS + 1} times and did not answer.`);
        messages.push(...turn.answerCalls(this._stream.calls));
      }
      turn.ended(this._stream);
      this._messages = [...messages, { role: "assistant", content: turn.text }];
      if (!this._stream.isStopped) this._onAnswered(this._stream.id, turn.latencyS, turn.ttftS);
    } catch (error) {
      turn.failed(error);
      byId("prompt").value ||= prompt;
      this._images.putBack(images);
      if (error.code === TOO_LONG && this._messages.length) turn.offerNewChat(() => this._clear());
    } finally {
      this._stream = null;
      this._enable();
    }
  }

  /** Read one answer. Returns whether it is the last, and no calls whose results the model waits for. */
  async _read(turn, body) {
    this._stream = new Stream(body, {
      begun: (id) => turn.begun(id),
      piece: (text, tokens) => turn.piece(text, tokens),
      called: (calls) => turn.called(calls),
      broken: (tokens, waitMs) => turn.broken(tokens, waitMs),
      resumed: (tokens, awayMs) => turn.resumed(tokens, awayMs),
    });
    this._enable();
    await this._stream.read();
    return this._stream.isStopped || this._stream.finishReason !== "tool_calls";
  }

  /** What the model can do: a switch for tools, with what is offered where it is on, and images. */
  _showSkills() {
    byId("tools").closest("label").hidden = !canDo("tools");
    byId("offered").hidden = !canDo("tools") || !byId("tools").checked;
    this._images.show();
  }

  /** The buttons that make sense now. */
  _enable() {
    const isAsking = this._stream !== null;
    byId("send").disabled = isAsking || !byId("model").value;
    byId("clear").disabled = isAsking;
    byId("stop").disabled = !isAsking;
  }

  _stop() {
    byId("stop").disabled = true;
    this._stream?.stop().catch((error) => state("broken", `The request could not be stopped: ${error.message}`));
  }

  _clear() {
    if (this._stream !== null) return;
    this._messages = [];
    this._images.forget();
    byId("chat").replaceChildren();
    state("idle", "Nothing asked yet.");
    byId("prompt").focus();
  }
}

function option({ id, supports_tools: tools, sees }) {
  const made = new Option(id, id);
  Object.assign(made.dataset, { tools, sees });
  return made;
}

const canDo = (skill) => byId("model").selectedOptions[0]?.dataset[skill] === "true";

function parameters() {
  const optional = (id, name) => (byId(id).value === "" ? {} : { [name]: Number(byId(id).value) });
  return {
    model: byId("model").value,
    max_tokens: Number(byId("max-tokens").value),
    service_tier: byId("class").value === "batch" ? "flex" : "default",
    ...optional("temperature", "temperature"),
    ...optional("seed", "seed"),
    ...(byId("offered").hidden ? {} : { tools: TOOLS }),
  };
}

function state(kind, text) {
  growChat(() => {
    byId("state").dataset.state = kind;
    say(byId("state"), text);
  });
}

/**
 * Change the chat. The newest turn is followed until its question is at the top, so that its first lines stay; further
 * on who scrolls to its end. Who had the form in view keeps it, if the chat fits beside it. `isAsked` brings both.
 */
function growChat(change, isAsked = false) {
  const chat = byId("chat");
  const form = byId("prompt-form");
  const { bottom } = form.getBoundingClientRect();
  const isInView = isAsked || (bottom > 0 && bottom < window.innerHeight + NEAR_PX);
  const isAtEnd = isAsked || chat.scrollHeight - chat.scrollTop - chat.clientHeight < NEAR_PX;
  change();
  if (isAtEnd && chat.lastElementChild) {
    const toBegin = chat.lastElementChild.getBoundingClientRect().top - chat.getBoundingClientRect().top;
    chat.scrollTop = toBegin < -1 && !isAsked ? chat.scrollHeight : chat.scrollTop + toBegin;
  }
  if (isInView) {
    form.scrollIntoView({ block: "nearest" });
    if (chat.getBoundingClientRect().top < 0) chat.scrollIntoView({ block: "start" });
  }
}

/** A prompt and its answer, as they are shown. */
class Turn {
  constructor(prompt, images) {
    this.latencyS = null;
    this._numCalls = 0;
    this._begin();
    this._id = make("code", "id", "");
    this._piece = make("span", "piece");
    this._answer = make("div", "answer", this._piece);
    this._outcome = make("p", "outcome");
    this.element = make("article", "turn", ...clamped(prompt), ...images.map(drawn), this._answer, this._outcome, make("p", "foot", this._id));
    byId("spoken").replaceChildren();
    for (const id of ["ttft", "tokens", "speed"]) say(byId(id), "–");
    state("waiting", "Sent; waiting for the first token.");
  }

  /** An answer begins: the first one, or the one after the results of calls. */
  _begin() {
    this.text = "";
    this._begunAt = performance.now();
    this.ttftS = this._lastAt = null;
    this._spoken = 0;
    this._calls = []; // {shown, result} of the calls of this answer
  }

  get _sinceS() {
    return (performance.now() - this._begunAt) / 1000;
  }

  begun(id) {
    growChat(() => say(this._id, id));
  }

  piece(text, tokens) {
    this._lastAt = this._sinceS;
    this.ttftS ??= this._lastAt;
    if (this.text === "") text = text.trimStart();
    this.text += text;
    growChat(() => this._piece.append(text));
    this._speak(false);
    state("streaming", "Streaming.");
    this._measure(tokens);
  }

  /** Show calls as far as they came. */
  called(calls) {
    growChat(() => calls.forEach((call, index) => {
      this._calls[index] ??= this._addCall();
      say(this._calls[index].shown, `${call.name}(${call.arguments})`);
    }));
  }

  _addCall() {
    const call = { shown: make("code"), result: make("code", "result") };
    this._answer.append(make("div", "call", call.shown, call.result));
    this._numCalls += 1;
    return call;
  }

  /** Make the calls and show what they return. Returns the messages that the next answer follows. */
  answerCalls(calls) {
    const results = calls.map(runTool);
    const made = calls.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
    const messages = [{ role: "assistant", content: this.text || null, tool_calls: made }];
    results.forEach((content, index) => messages.push({ role: "tool", tool_call_id: calls[index].id, content }));
    this._speak(true);
    const told = calls.map((call, index) => `${call.name} returned ${results[index]}.`).join(" ");
    byId("spoken").append(make("p", "", told));
    this._piece = make("span", "piece");
    growChat(() => {
      results.forEach((content, index) => say(this._calls[index].result, content));
      this._answer.append(this._piece);
    });
    this._begin();
    state("waiting", "The results were sent; waiting for the answer.");
    return messages;
  }

  broken(tokens, waitMs) {
    const when = waitMs < 1000 ? "at once" : `in ${seconds(waitMs / 1000)}`;
    const where = tokens ? `after token ${count(tokens)}` : "before the first token";
    state("broken", `The connection broke ${where}; trying again ${when}. The pipeline goes on with the answer meanwhile.`);
  }

  resumed(tokens, awayMs) {
    const where = tokens ? `after token ${count(tokens)}` : "at its beginning";
    this._piece = make("span", "piece");
    const seam = make("span", "seam", `resumed ${where}, ${seconds(awayMs / 1000)} without a connection`);
    growChat(() => this._answer.append(seam, this._piece));
    state("streaming", `Resumed ${where}.`);
  }

  ended(stream) {
    this.latencyS = this._sinceS;
    this._speak(true);
    this._measure(stream.usage?.completion_tokens ?? stream.tokens);
    const after = this._numCalls ? ` after ${this._numCalls} call${this._numCalls === 1 ? "" : "s"}` : "";
    const tokens = `${count(stream.tokens)} token${stream.tokens === 1 ? "" : "s"}`;
    const done = "Answered. Ask on, or start a new chat.";
    if (stream.isStopped) this._end("stopped", `Stopped after ${tokens}.`, "Stopped.");
    else if (stream.finishReason === "length") this._end("done", `Ended at the token limit: ${tokens} in ${seconds(this.latencyS)}.`, done);
    else this._end("done", `Complete${after}: ${tokens} in ${seconds(this.latencyS)}.`, done);
  }

  failed(error) {
    this._speak(true);
    const how = this.text ? "Broken off" : "Not answered";
    byId("spoken").append(make("p", "", `${how}: ${error.message}`));
    this._end("failed", `${how}: ${error.message}`, "Ask again, or start a new chat.");
  }

  /** Say that the chat has filled the model's context, and give a way out. */
  offerNewChat(begin) {
    const button = make("button", "", "Start a new chat");
    button.type = "button";
    button.addEventListener("click", begin);
    const offer = make("p", "offer", "The question is kept for a new chat. ", button);
    growChat(() => this._outcome.after(offer));
  }

  /** How it ended stays with the turn; the line above the form is about the latest one alone. */
  _end(kind, text, line) {
    this.element.dataset.state = kind;
    growChat(() => say(this._outcome, text));
    state(kind, line);
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

/** A prompt of which the first lines are shown, and a button that opens the rest where there is more. */
function clamped(prompt) {
  const shown = make("p", "prompt", prompt);
  const button = make("button", "quiet more", "Show all");
  button.type = "button";
  button.hidden = true;
  button.setAttribute("aria-expanded", "false");
  button.addEventListener("click", () => {
    const isOpen = shown.classList.toggle("open");
    button.setAttribute("aria-expanded", String(isOpen));
    say(button, isOpen ? "Show less" : "Show all");
  });
  new ResizeObserver(() => {
    if (!shown.classList.contains("open")) growChat(() => { button.hidden = shown.scrollHeight <= shown.clientHeight + 1; });
  }).observe(shown);
  return [shown, button];
}
