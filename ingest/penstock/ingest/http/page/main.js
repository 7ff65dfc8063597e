// Puts the page together: a key where one is needed, then the three parts.

import { hasKey, needsKey, pause, setKey } from "./api.js";
import { byId, say } from "./draw.js";
import { PipelineView } from "./pipeline.js";
import { Playground } from "./playground.js";
import { TimelineView } from "./timeline.js";

const timeline = new TimelineView();
const playground = new Playground((id, latencyS, ttftS) => timeline.show(id, latencyS, ttftS));
const pipeline = new PipelineView(() => playground.reconnect());
let watching = new AbortController();

function askForKey(why) {
  watching.abort();
  byId("key-form").hidden = false;
  byId("forget").hidden = true;
  say(byId("health"), "–");
  say(byId("notice"), why);
  byId("key").focus();
}

async function begin() {
  watching.abort();
  watching = new AbortController();
  const { signal } = watching;
  byId("key-form").hidden = true;
  byId("forget").hidden = !needsKey;
  say(byId("notice"), "");
  try {
    await Promise.all([pipeline.watch(signal), findModels(signal)]);
  } catch (error) {
    if (!signal.aborted) askForKey(error.message);
  }
}

/** Until there is one, and then now and then: workers come and go. */
async function findModels(signal) {
  while (!signal.aborted) {
    const found = await playground.findModels().catch((error) => {
      if (error.status === 401) throw error;
      return 0;
    });
    await pause(found ? 30_000 : 1000, signal);
  }
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value);
  byId("key").value = "";
  begin();
});
byId("forget").addEventListener("click", () => {
  setKey("");
  askForKey("The key is forgotten.");
});

if (needsKey && !hasKey()) askForKey("This gateway asks for an API key. It stays in this tab, until the tab is closed.");
else begin();
