// One request and its stream: asked once, read to its end over as many connections as it takes.
//
//   1  POST with an Idempotency-Key: where the connection breaks before an id came, the same POST joins the request
//   2  read events; the last one's id is where the reader is
//   3  the connection breaks: GET /v1/streams/{id} with Last-Event-ID goes on after it, for as long as it takes

import { ask, backoffMs, events, pause, Refused, SILENCE_MS } from "./api.js";

const POSITION = /^(\d+)-/;

export class Stream {
  /** `on`: begun(id), piece(text, tokens), called(calls), broken(tokens, waitMs), resumed(tokens, awayMs). */
  constructor(body, on) {
    this.id = null;
    this.tokens = 0;
    this.usage = null;
    this.finishReason = null;
    this.calls = []; // {id, name, arguments} as far as they came
    this.isStopped = false;
    this._body = JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } });
    this._on = on;
    this._key = Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
    this._lastEventId = "";
    this._left = new AbortController();
    this._connection = new AbortController();
    this._heardAt = 0;
  }

  /** Read to the end. Throws `Refused` for an error that stays one. */
  async read() {
    let brokenAt = null;
    for (let tries = 0; !this._left.signal.aborted; tries += 1) {
      try {
        const response = await this._connect();
        if (brokenAt !== null) this._on.resumed(this.tokens, performance.now() - brokenAt);
        brokenAt = null;
        if (response.status === 204 || (await this._readOne(response, () => { tries = 0; }))) return;
      } catch (error) {
        const mayGoOn = error instanceof Refused ? error.passes && (this.id !== null || brokenAt !== null) : true;
        if (this._left.signal.aborted || (this.isStopped && this.id === null)) return;
        if (!mayGoOn) throw error;
      }
      brokenAt ??= performance.now();
      const waitMs = backoffMs(tries);
      this._on.broken(this.tokens, waitMs);
      await pause(waitMs, this._left.signal);
    }
  }

  /** Give the connection up, which may be dead if nothing came of late, and go on with another one. */
  reconnect() {
    if (performance.now() > this._heardAt + SILENCE_MS / 2) this._connection.abort();
  }

  /** Ask for the request's end; what was read stays. Where its id is not known yet, as soon as it is. */
  async stop() {
    this.isStopped = true;
    if (this.id !== null) await this._cancel();
  }

  async _cancel() {
    this._left.abort();
    await ask(`/v1/streams/${this.id}/cancel`, { method: "POST" });
  }

  async _connect() {
    this._connection = new AbortController();
    const signal = AbortSignal.any([this._left.signal, this._connection.signal]);
    if (this.id !== null) {
      const headers = this._lastEventId ? { "Last-Event-ID": this._lastEventId } : {};
      return ask(`/v1/streams/${this.id}`, { signal, headers });
    }
    const headers = { "Content-Type": "application/json", "Idempotency-Key": this._key };
    const response = await ask("/v1/chat/completions", { signal, method: "POST", headers, body: this._body });
    this.id = response.headers.get("x-request-id");
    this._on.begun(this.id);
    if (this.isStopped) await this._cancel();
    return response;
  }

  /** The events of one connection; whether the stream is over. */
  async _readOne(response, came) {
    for await (const { id, event, data } of events(response, () => { this._heardAt = performance.now(); })) {
      came();
      if (id) this._lastEventId = id;
      if (event === "error") {
        const { error } = JSON.parse(data);
        throw new Refused(id === "done" ? 500 : 503, error);
      }
      if (data === "[DONE]") return true;
      this._take(id, JSON.parse(data));
    }
    return false;
  }

  _take(id, chunk) {
    this.usage = chunk.usage ?? this.usage;
    const [choice] = chunk.choices;
    const position = POSITION.exec(id);
    if (position) this.tokens = Number(position[1]) + 1;
    if (choice) {
      this.finishReason = choice.finish_reason ?? this.finishReason;
      for (const { index, id: callId, function: part } of choice.delta.tool_calls ?? []) {
        const call = (this.calls[index] ??= { id: callId, name: "", arguments: "" });
        call.name += part.name ?? "";
        call.arguments += part.arguments ?? "";
      }
      if (choice.delta.tool_calls) this._on.called(this.calls);
      if (position || choice.delta.content) this._on.piece(choice.delta.content ?? "", this.tokens);
    }
  }
}
