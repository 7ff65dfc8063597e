"""Whatever an endpoint writes, the worker lives, and each request comes to one end."""

import json
from collections import Counter
from typing import Any

import pytest

from penstock.endpoint_worker import endpoints
from sim.damage import NUM_DAMAGED, Damage
from sim.endpoint import CountingEndpoint, write_numbers
from tests.endpoint.conftest import EndpointPipeline

pytestmark = pytest.mark.in_memory

PIPELINE_REQUESTS = 1_000
"""Requests in one pipeline: each round reads all results again."""
ROUND = 50
"""Requests under way at once: four of five get a damaged reply."""
NUM_DAMAGED_REPLIES = 2
"""How many replies to a request are damaged. The next one is good: else some requests would be asked for ever."""
PIECES = [
    {"choices": [{"index": 0, "text": " 0", "delta": {"role": "assistant", "content": " 0"}}]},
    {"choices": [{"index": 0, "text": " 1", "delta": {"content": " 1"}, "logprobs": None}]},
    {"choices": [{"index": 0, "text": "", "delta": {}, "finish_reason": "stop", "stop_reason": " 2"}]},
    {
        "choices": [],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}},
    },
]  # fmt: skip
ERROR = {"error": {"message": "the prompt is no good", "type": "BadRequestError", "param": None, "code": 400}}


@pytest.mark.parametrize("start", range(0, NUM_DAMAGED, PIPELINE_REQUESTS))
def test_no_reply_of_an_endpoint_ends_a_worker(
    start: int, line: EndpointPipeline, endpoint: CountingEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "FIRST_PAUSE_S", 0.0)
    asked: Counter[str] = Counter()

    def write_reply(body: dict[str, Any]) -> bytes | None:
        prompt = str(body.get("prompt") or body["messages"][0]["content"])
        name = prompt.partition("|")[0]
        asked[name] += 1
        if not name.startswith("damaged") or asked[name] > NUM_DAMAGED_REPLIES:
            return None
        return write_damaged_reply(Damage(int(name.split()[1]) * 10 + asked[name]))

    endpoint.write_reply = write_reply
    line.add_worker(endpoint, max_requests=16)
    results: dict[str, Any] = {}
    for first in range(start, start + PIPELINE_REQUESTS, ROUND):
        for seed in range(first, first + ROUND):
            is_damaged = seed % 5 != 0
            prompt = f"damaged {seed}|" if is_damaged else "good|"
            line.send(prompt, max_tokens=4, tell_stop=True, id=f"{'damaged' if is_damaged else 'good'}-{seed}")
        try:
            found = line.run_until_results(first - start + ROUND)
        except Exception as error:
            raise AssertionError(f"the worker ended within the requests from {first} on") from error
        results = {result.id: result for result in found}
        assert len(results) == len(found) == first - start + ROUND
    for name, result in results.items():
        assert name.startswith("damaged") or result.text == write_numbers(4)
        assert sum(hasattr(event, "finish_reason") for event in line.read_log(name)) == 1


def write_damaged_reply(damage: Damage) -> bytes:
    """Return a reply, the status line included: an error, or a stream in which something is damaged."""
    if damage.random.random() < 0.3:
        status = damage.random.choice([b"400 Bad Request", b"422 Unprocessable Entity", b"500 Error", b"413 Large"])
        return b"HTTP/1.1 %b\r\nConnection: close\r\n\r\n%b" % (status, damage.encode(ERROR))
    place = damage.random.randrange(len(PIECES))
    lines = [
        damage.encode(piece) if index == place else json.dumps(piece).encode() for index, piece in enumerate(PIECES)
    ]
    if damage.random.random() < 0.1:
        lines[place] = damage.encode(ERROR)
    stream = b"".join(b"data: " + line + b"\n\n" for line in [*lines, b"[DONE]"])
    if damage.random.random() < 0.1:
        stream = damage.damage_bytes(stream)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n"
    if damage.random.random() < 0.1:
        head += b"Content-Length: %d\r\n" % (len(stream) + damage.random.randint(-20, 20))
    elif damage.random.random() < 0.1:
        head = damage.damage_bytes(head)
    return head + b"\r\n" + stream
