// What the page asks of the gateway. A key travels in a header alone, and is kept by this tab until it is closed.

const KEPT = "penstock-key";
// Who sends nothing for so long is not believed in any more. A look at brokers that do not answer takes up to 15 s (BROKER_TIMEOUT_S).
export const SILENCE_MS = 20_000;
let key = sessionStorage.getItem(KEPT) ?? "";

export const needsKey = document.documentElement.dataset.keys === "needed";
export const hasKey = () => key !== "";

export function setKey(text) {
  key = text.trim();
  if (key) sessionStorage.setItem(KEPT, key);
  else sessionStorage.removeItem(KEPT);
}

/** An answer that is an error, in the gateway's words. */
export class Refused extends Error {
  constructor(status, error) {
    super(error?.message ?? `the gateway answered with ${status}`);
    this.status = status;
    this.code = error?.code ?? null;
  }

  /** Whether the same may go well later, without anybody changing it. */
  get passes() {
    return [502, 503, 504].includes(this.status);
  }
}

/** A response, once its head is there. Throws `Refused`, or fetch's own TypeError where nobody answers. */
export async function ask(path, { headers = {}, ...options } = {}) {
  const authorization = key ? { Authorization: `Bearer ${key}` } : {};
  const response = await fetch(path, { cache: "no-store", ...options, headers: { ...authorization, ...headers } });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new Refused(response.status, body?.error);
}

/** What a request answers, which takes a moment: one that is not answered is given up. */
export async function askJson(path) {
  return (await ask(path, { signal: AbortSignal.timeout(SILENCE_MS) })).json();
}

/** A signal that aborts with another one, or once `heard` has not been called for too long; `end` ends the waiting. */
export function listen(signal) {
  const late = new AbortController();
  let timer;
  const heard = () => { clearTimeout(timer); timer = setTimeout(() => late.abort(), SILENCE_MS); };
  heard();
  return { signal: AbortSignal.any([signal, late.signal]), heard, end: () => clearTimeout(timer), isLate: () => late.signal.aborted };
}

/** The server-sent events of a response: {id, event, data}; `heard` is called at any byte. Ends as the connection does, throws when it breaks. */
export async function* events(response, heard) {
  heard();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const begun = () => ({ id: "", event: "message", data: "" });
  let rest = "";
  let event = begun();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      heard();
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        const field = /^(id|event|data): ?(.*)$/.exec(line);
        if (field) event[field[1]] = field[2];
        if (line === "") {
          if (event.data) yield event;
          event = begun();
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Wait; ends at once when the signal aborts. */
export function pause(ms, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    signal?.addEventListener("abort", () => { clearTimeout(timer); resolve(); }, { once: true });
  });
}

/** How long to wait before the n-th try, from 0: longer each time, and not the same for all. */
export function backoffMs(tries) {
  return Math.min(5000, 200 * 2 ** tries) * (0.75 + Math.random() / 2);
}
