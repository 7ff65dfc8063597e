"""Logs of answers, what a reader is sent of them, and how the tool model writes its calls."""

import json
from collections.abc import Sequence
from typing import Any

from penstock.client.core import Event
from penstock.ingest.openai import ApiEndpoint, StreamMeta
from penstock.ingest.openai.cursor import SentEvent, SseCursor
from penstock.ingest.openai.sse import ResumePoint
from penstock.messages import EndEvent, FinishReason, Logprobs, TokenEvent, TokenLogprob, Usage
from penstock.names import START_HASH, roll_hash
from sim.workload import TOOL_MODEL

TEMPLATE: dict[str, Any] = json.loads((TOOL_MODEL / "tokenizer_config.json").read_text())["response_template"]


def make_log(
    texts: Sequence[str], rest: str = "", reason: FinishReason = "stop", *, has_logprobs: bool = False, seed: int = 0
) -> list[Event]:
    """Return the tokens with these texts, and the end with the rest."""
    events: list[Event] = []
    rolled = START_HASH
    for position, text in enumerate(texts):
        token = 100 * seed + position
        rolled = roll_hash(rolled, token)
        told = Logprobs(logprob=-1, text=f"<{position}>", top=[TokenLogprob(token=token, logprob=-1, text=text)])
        events.append(TokenEvent.at_position(position, rolled, token, text, told if has_logprobs else None))
    usage = Usage(prompt_tokens=3, cached_tokens=1, completion_tokens=len(texts))
    return [*events, EndEvent(finish_reason=reason, text=rest, usage=usage)]


def read_stream(
    endpoint: ApiEndpoint[Any], meta: StreamMeta, log: Sequence[Event], after: str | None = None, number: int = -1
) -> list[SentEvent]:
    """Return all that a reader is sent who comes back with an event's id, or with a number."""
    cursor = SseCursor(endpoint, meta, ResumePoint(1, after), number)
    sent = cursor.open_stream()
    for event in log:
        sent += cursor.add_event(0, event)
    return sent + cursor.end_stream()
