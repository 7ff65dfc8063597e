"""A trace of what a pipeline served: times and tokens from its results, what prompts share from its requests.

No text is in it. A prompt's blocks are numbers, as in Mooncake's traces. Where a prompt is a text, as many characters
make a block as a block's tokens have on the mean of all.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from hashlib import blake2b
from typing import Any

from penstock.bus.contract import Bus
from penstock.bus.placement import chain_prompt
from penstock.errors import PenstockError, PlanError
from penstock.messages import Request, Result, decode_message
from penstock.names import Pipeline
from penstock.plan.trace import HASH_BLOCK_TOKENS

Row = dict[str, Any]


def record_trace(bus: Bus, pipeline: Pipeline) -> list[Row]:
    """Return a line of a trace for each request whose answer has tokens, or vectors or scores, by time.

    Shared prefixes are known only for requests whose messages are still in the topics. Raises `PlanError` if there is
    no answer, and `BusUnavailable`.
    """
    answered = [one for one in _read_results(bus, pipeline) if one.timings.published and _is_answered(one)]
    if not answered:
        raise PlanError(f"the pipeline {pipeline.name} has no answered request to plan from")
    answered.sort(key=lambda one: one.timings.published)
    begun_s = answered[0].timings.published
    rows: dict[str, Row] = {
        one.id: {
            "at_s": round(one.timings.published - begun_s, 3),
            "prompt_tokens": one.usage.prompt_tokens,
            "output_tokens": one.usage.completion_tokens,
            "class": one.priority_class,
        }
        for one in answered
    }
    requests = [one for one in _read_requests(bus, pipeline) if one.id in rows]
    chats = dict[bytes, int]()  # the trace has numbers: a hash of the beginning could reveal a prompt
    for request, hash_ids in zip(requests, _number_blocks(requests, rows), strict=True):
        chat = chats.setdefault(chain_prompt(request).home, len(chats))
        rows[request.id] |= {"hash_ids": hash_ids, "chat": str(chat)}
    return list(rows.values())


def _is_answered(result: Result) -> bool:
    """Return whether an answer has tokens, or vectors or scores: those have no tokens, and may be in the log alone."""
    usage = result.usage
    return usage.completion_tokens > 0 or (result.finish_reason == "stop" and usage.prompt_tokens > 0)


def _read_results(bus: Bus, pipeline: Pipeline) -> Iterator[Result]:
    for message in bus.read_all(pipeline.results_topic):
        with suppress(PenstockError):  # damaged, or of a newer version
            yield decode_message(Result, message.value)


def _read_requests(bus: Bus, pipeline: Pipeline) -> Iterator[Request]:
    for topic in pipeline.input_topics("prefill").values():
        for message in bus.read_all(topic):
            with suppress(PenstockError):  # an unreadable request has no answer with tokens
                yield decode_message(Request, message.value)


def _number_blocks(requests: list[Request], rows: Mapping[str, Row]) -> Iterator[list[int]]:
    """Yield the numbers of each prompt's blocks."""
    texts = {one.id: _join_text(one) for one in requests if one.token_ids is None}
    num_tokens = sum(rows[id_]["prompt_tokens"] for id_ in texts)
    num_chars = max(1, round(HASH_BLOCK_TOKENS * sum(map(len, texts.values())) / max(1, num_tokens)))
    numbers = dict[bytes, int]()
    for request in requests:
        content = texts.get(request.id) or request.token_ids or ()
        size, digest, found = (
            num_chars if request.id in texts else HASH_BLOCK_TOKENS,
            request.tenant.encode(),
            list[int](),
        )
        for start in range(0, len(content), size):
            digest = blake2b(digest + repr(content[start : start + size]).encode()).digest()
            found.append(numbers.setdefault(digest, len(numbers)))
        yield found[: -(-rows[request.id]["prompt_tokens"] // HASH_BLOCK_TOKENS)]


def _join_text(request: Request) -> str:
    if request.texts is not None:
        return "\n".join(map(str, request.texts))
    return request.prompt or "".join(f"{message.role}\n{message.text}\n" for message in request.messages or ())
