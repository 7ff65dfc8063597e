"""Calls of tools, streamed, cut at every event and resumed on another gateway: each must equal the call read whole.

python -m benchmarks.tool_resumes [--quick | --smoke] [--json FILE]

Real workers with the tool model, two gateways and a real Valkey. Conversations are those of the model's corpus that it
answers with calls. Each is streamed once, to count its events; every third is asked with log probabilities, whose
stream has an event for each token, so that many cuts are in the middle of a call. Then, for each event but the last, it
is asked anew: one gateway streams it, its reader leaves after that event and goes on at the other gateway, by the id
of the event. Meanwhile the answer is being written. What the reader saw is equal if both parts together are the stream
that is read afterwards without a cut, byte for byte, and say what the answer says that is read whole.

Every second conversation is held to a grammar, so that its calls come in pieces: it has to call, or has a schema for an
answer that does not, and every eighth is a call with long arguments. Some of those are asked again with every limit of
tokens up to their length: the answer that is cut says the same whole and streamed, and what was a call stays one. And a
long call is asked of decode workers of which each is killed at the first token that it writes.

    resumes        answers that were cut and resumed
    resumes_equal  those that are equal
    conversations  of so many different ones
    resumed_calls  calls of tools in these answers
    cuts_in_calls  cuts after which calls, or more of their arguments, were still to come
    limits         answers that a limit cut
    limits_equal   those that say the same whole and streamed
    kills          decode workers that were killed while they wrote one call
    kills_equal    1 if that answer is the one of a worker that lives
"""

import itertools
import json
import tempfile
import time
import uuid
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common import TIMEOUT_S, describe_machine, parse_arguments, report_figures
from penstock.local.processes import find_free_port
from sim.conversations import Body, make_chat_bodies
from sim.forked import ForkedStack
from sim.workload import TOOL_MODEL

NUM_RESUMES, NUM_QUICK_RESUMES = 2000, 100
NUM_READERS = 8
"""Readers at once: their answers are written in batches."""
LOGPROBS_EVERY = 3
"""Of so many conversations one is asked with log probabilities."""
MAX_TOKENS = 120
ENVIRONMENT = {
    "PENSTOCK_ENGINE_MODEL": str(TOOL_MODEL), "PENSTOCK_ENGINE_DTYPE": "float32", "PENSTOCK_ENGINE_DEVICE": "cpu",
    "PENSTOCK_ENGINE_POOL_MB": "64",
}  # fmt: skip
NOTE = {
    "type": "object",
    "properties": {"text": {"type": "string", "minLength": 400, "maxLength": 500}, "red": {"type": "boolean"}},
    "required": ["text", "red"],
    "additionalProperties": False,
}
NOTE_TOOL = {"type": "function", "function": {"name": "note", "parameters": NOTE, "strict": True}}
LONG_CALL: Body = {
    "messages": [{"role": "user", "content": "Note what you know."}], "tools": [NOTE_TOOL],
    "tool_choice": "required", "parallel_tool_calls": False, "stop": ["e", "a", '"'],
    "chat_template_kwargs": {"enable_thinking": False},
}  # fmt: skip
"""Its stop strings do nothing in the call."""
HELD: Sequence[Body] = (
    {"tool_choice": "required"},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "note", "schema": NOTE}}},
    {"parallel_tool_calls": False},
    LONG_CALL,
)
"""What every second conversation has besides, in turn."""
NUM_LIMITED, NUM_QUICK_LIMITED = 4, 1
"""Held conversations that are asked with every limit."""
MAX_KILLS = 60
"""Tokens of the call over which decode workers are killed: each starts anew, in some seconds."""
KILLED = {
    "PENSTOCK_FAILPOINTS": "decode.7.confirmed=kill@1", "PENSTOCK_RECORD_LEASE_S": "0.5",
    "PENSTOCK_RECORD_MAX_ATTEMPTS": "1000", "PENSTOCK_ENGINE_SPECULATE": "false",
}  # fmt: skip
"""Without drafts a step writes one token."""
Event = tuple[str, str]
"""Id and data of a server-sent event."""
Call = tuple[str, str, str]
"""Id, name and arguments."""


@dataclass(frozen=True)
class Message:
    """What an answer says."""

    content: str
    reasoning: str
    calls: list[Call]
    finish_reason: str


@dataclass(frozen=True)
class Resume:
    """What came of one answer that was cut and resumed."""

    is_equal: bool
    num_calls: int
    is_in_calls: bool
    """Whether calls came after the cut."""


class Gateways:
    """Two gateways before one pipeline, and how they are asked."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls
        self._client = httpx.Client(timeout=TIMEOUT_S)

    def read_stream(self, body: Body) -> list[Event]:
        """Return all events of a streamed answer."""
        return list(self._post_stream(self._urls[0], body, {}))

    def resume_answer(self, body: Body, num_events: int, first: int) -> Resume:
        """Ask gateway `first` for an answer, leave after `num_events`, and read the rest at the other one."""
        one, other = self._urls[first], self._urls[1 - first]
        headers = {"Idempotency-Key": uuid.uuid4().hex}
        with closing(self._post_stream(one, body, headers)) as events:
            before = list(itertools.islice(events, num_events))
        stream = f"{other}/v1/streams/{json.loads(before[0][1])['id']}"
        after = list(self._get_stream(stream, {"Last-Event-ID": before[-1][0]}))
        whole = list(self._get_stream(stream, {}))
        answer = self._client.post(f"{other}/v1/chat/completions", json=body, headers=headers).raise_for_status()
        choice = answer.json()["choices"][0]
        expected, found = parse_message(choice["message"], choice["finish_reason"]), join_deltas([*before, *after])
        is_equal = before + after == whole and found == expected
        if not is_equal:
            print(f"unequal, cut after {num_events} events: {found}, not {expected}", flush=True)
        return Resume(is_equal, len(expected.calls), bool(join_deltas(after).calls))

    def ask_limited(self, body: Body, limit: int) -> tuple[Message, Message]:
        """Return what an answer of so many tokens says, whole and streamed; calls without their ids."""
        limited = {**body, "max_tokens": limit}
        answer = self._client.post(f"{self._urls[0]}/v1/chat/completions", json=limited).raise_for_status()
        choice = answer.json()["choices"][0]
        whole, streamed = parse_message(choice["message"], choice["finish_reason"]), self.read_stream(limited)
        return strip_ids(whole), strip_ids(join_deltas(streamed))

    @contextmanager
    def _open(self, method: str, url: str, headers: dict[str, str], body: Body | None) -> Iterator[Iterator[Event]]:
        with self._client.stream(method, url, headers=headers, json=body) as answer:
            answer.raise_for_status()
            yield parse_events(answer.iter_lines())

    def _post_stream(self, url: str, body: Body, headers: dict[str, str]) -> Generator[Event, None, None]:
        with self._open("POST", f"{url}/v1/chat/completions", headers, {**body, "stream": True}) as events:
            yield from events

    def _get_stream(self, url: str, headers: dict[str, str]) -> Iterator[Event]:
        with self._open("GET", url, headers, None) as events:
            yield from events

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def parse_events(lines: Iterator[str]) -> Iterator[Event]:
    """Yield the server-sent events of a stream."""
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(": ")
        if name:
            fields[name] = value
        elif "data" in fields:
            yield fields.get("id", ""), fields["data"]
            fields = {}


def parse_message(message: dict[str, Any], finish_reason: str) -> Message:
    """Return what an answer says that came whole."""
    calls = message.get("tool_calls") or ()
    return Message(
        message["content"] or "",
        message.get("reasoning_content") or "",
        [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in calls],
        finish_reason,
    )


def join_deltas(events: Sequence[Event]) -> Message:
    """Return what a stream says."""
    content = reasoning = finish_reason = ""
    calls: dict[int, Call] = {}
    for _, data in events:
        if data == "[DONE]":
            continue
        choice = json.loads(data)["choices"][0]
        delta, finish_reason = choice["delta"], choice["finish_reason"] or finish_reason
        content += delta.get("content") or ""
        reasoning += delta.get("reasoning_content") or ""
        for part in delta.get("tool_calls") or ():
            old, function = calls.get(part["index"], ("", "", "")), part.get("function") or {}
            new = part.get("id") or "", function.get("name") or "", function.get("arguments") or ""
            calls[part["index"]] = (old[0] + new[0], old[1] + new[1], old[2] + new[2])
    return Message(content, reasoning, [calls[index] for index in sorted(calls)], finish_reason)


def strip_ids(message: Message) -> Message:
    """Return a message whose calls have no ids, which follow from the request's."""
    return replace(message, calls=[("", *call[1:]) for call in message.calls])


def check_limits(gateways: Gateways, bodies: Iterable[Body]) -> dict[str, float]:
    """Ask for each body's answer with every limit up to its length; return the figures."""
    num_limits = num_equal = 0
    for body in bodies:
        last = Message("", "", [], "length")
        for limit in range(1, body["max_tokens"] + 1):
            before, (whole, last) = last, gateways.ask_limited(body, limit)
            stays = len(before.calls) <= len(last.calls) and all(map(is_begun, before.calls, last.calls))
            num_limits, num_equal = num_limits + 1, num_equal + (whole == last and stays)
            if whole != last or not stays:
                print(f"unequal with {limit} tokens: {whole}, {last}, before {before}", flush=True)
            if last.finish_reason != "length":
                break
    return {"limits": num_limits, "limits_equal": num_equal}


def is_begun(call: Call, longer: Call) -> bool:
    """Return whether a call is the beginning of one of a longer answer."""
    return call[1] == longer[1] and longer[2].startswith(call[2])


def resume_answers(gateways: Gateways, bodies: Iterator[Body], num_resumes: int, cut_every: int) -> dict[str, float]:
    """Cut and resume answers of one conversation after the other, each after some more events; return the figures."""
    found: list[Resume] = []
    num_conversations = 0
    with ThreadPoolExecutor(NUM_READERS) as pool:
        while len(found) < num_resumes:
            body, num_conversations = next(bodies), num_conversations + 1
            num_cuts = len(gateways.read_stream(body)) - 1
            cut = partial(gateways.resume_answer, body)
            found += pool.map(cut, range(1, num_cuts + 1, cut_every), itertools.cycle((0, 1)))
            print(f"{len(found)} answers, {sum(one.is_equal for one in found)} equal", end="\r", flush=True)
    return {
        "resumes": len(found),
        "resumes_equal": sum(one.is_equal for one in found),
        "conversations": num_conversations,
        "resumed_calls": sum(one.num_calls for one in found),
        "cuts_in_calls": sum(one.is_in_calls for one in found),
    }


def make_bodies(number: int) -> Iterator[Body]:
    """Yield what is asked, greedily and by chance in turn."""
    for place, body in enumerate(make_chat_bodies(number, "resumes")):
        asked = {"model": str(TOOL_MODEL), "max_tokens": MAX_TOKENS, "seed": place, "temperature": 0.5 * (place % 2)}
        if place % 2:
            asked |= HELD[place // 2 % len(HELD)]
        if place % LOGPROBS_EVERY == LOGPROBS_EVERY - 1:
            asked |= {"logprobs": True}
        yield {**body, **asked} | ({"max_tokens": 2 * MAX_TOKENS} if "stop" in asked else {})


@contextmanager
def serve_tools(directory: Path) -> Iterator[Gateways]:
    """Serve the tool model behind two gateways."""
    with ForkedStack(directory / "one", gateway=find_free_port(), environment=ENVIRONMENT) as stack:
        redis = stack.addresses.stream_url
        with ForkedStack(
            directory / "other", redis=redis, prefill=0, decode=0, gateway=find_free_port(), environment=ENVIRONMENT
        ) as other:
            stack.wait_until_ready(TIMEOUT_S)
            other.wait_until_ready(TIMEOUT_S)
            gateways = Gateways([stack.gateway_url, other.gateway_url])
            try:
                yield gateways
            finally:
                gateways.close()


def kill_decode_workers(directory: Path, body: Body, expected: Message) -> dict[str, float]:
    """Have one decode worker after the other write a token of a call, and be killed; return the figures."""
    with (
        ForkedStack(directory, gateway=find_free_port(), environment=ENVIRONMENT | KILLED) as stack,
        ThreadPoolExecutor(1) as pool,
        closing(Gateways([stack.gateway_url])) as gateways,
    ):
        stack.wait_until_ready(TIMEOUT_S)
        asked, num_kills = pool.submit(gateways.read_stream, body), 0
        while not asked.done():
            num_kills += len(stack.restart_dead())
            for worker in stack.workers:
                worker.failures, worker.start_at = 0, 0.0  # without the delay of a worker that fails
            time.sleep(0.02)
    found = strip_ids(join_deltas(asked.result()))
    if found != expected:
        print(f"unequal over kills: {found}, not {expected}", flush=True)
    return {"kills": num_kills, "kills_equal": float(found == expected)}


def main() -> None:
    given = parse_arguments(__doc__)
    num_resumes, cut_every = given.choose_size((NUM_RESUMES, 1), (NUM_QUICK_RESUMES, 1), (2, 8))
    num_limited, limit = given.choose_size((NUM_LIMITED, 2 * MAX_TOKENS), (NUM_QUICK_LIMITED, 2 * MAX_TOKENS), (1, 4))
    held = [body for place, body in enumerate(make_bodies(2 * num_limited + 6)) if place % 2][-num_limited:]
    held = [body | {"max_tokens": min(limit, body["max_tokens"])} for body in held]
    with tempfile.TemporaryDirectory(prefix="penstock-resumes-") as directory:
        with serve_tools(Path(directory)) as gateways:
            figures = resume_answers(gateways, make_bodies(num_resumes), num_resumes, cut_every)
            figures |= check_limits(gateways, held)
            killed = held[0] | {"max_tokens": min(limit, MAX_KILLS)}
            expected = strip_ids(join_deltas(gateways.read_stream(killed)))
        figures |= kill_decode_workers(Path(directory) / "kills", killed, expected)
    print(f"\n{describe_machine()}")
    report_figures(figures, given)


if __name__ == "__main__":
    main()
