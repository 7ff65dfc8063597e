"""Bad input: a typed error as the one result, nobody stopped, nobody behind it blocked."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from penstock import names
from penstock.bus.contract import MAX_MESSAGE_BYTES, Delivery
from penstock.messages import Request, Sampling
from sim.line import InProcessPipeline

GOOD: dict[str, Any] = {"v": 1, "prompt": "In the beginning", "sampling": {"max_tokens": 4, "temperature": 0}}
TEN_MB = "a" * 10_000_000


def body(**changes: Any) -> bytes:
    return json.dumps(GOOD | changes).encode()


def sampling(**changes: Any) -> dict[str, Any]:
    return {"max_tokens": 4} | changes


BAD: dict[str, tuple[bytes, str]] = {
    "not-json": (b"{not json", "invalid_request"),
    "many-errors": (b'{"v": 1, "id": "many-errors", "token_ids": [' + b"-1," * 2_000_000 + b"-1]}", "invalid_request"),
    "many-bad-messages": (
        b'{"v": 1, "id": "many-bad-messages", "messages": [' + b"{}," * 2_000_000 + b"{}]}",
        "invalid_request",
    ),
    "many-unknown": (b'{"v": 1, ' + b",".join(b'"f%d": 1' % n for n in range(200_000)) + b"}", "invalid_request"),
    "not-utf8": (b'{"v": 1, "id": "not-utf8", "prompt": "\xff\xfe"}', "invalid_request"),
    "half-a-character": (b'{"v": 1, "id": "half-a-character", "prompt": "\\ud800"}', "invalid_request"),
    "version": (body(id="version", v=2), "unsupported_version"),
    "unknown-token": (json.dumps({"v": 1, "id": "unknown-token", "token_ids": [10**6]}).encode(), "invalid_request"),
    "long-prompt": (body(id="long-prompt", prompt="word " * 5000), "prompt_too_long"),
    "huge-max-tokens": (body(id="huge-max-tokens", sampling=sampling(max_tokens=10**6)), "prompt_too_long"),
    "past-deadline": (body(id="past-deadline", deadline=1.0), "deadline_exceeded"),
    "unknown-model": (body(id="unknown-model", model="gpt-17"), "unknown_model"),
    "wrong-class": (body(id="wrong-class", **{"class": "batch"}), "invalid_request"),
    "ten-megabytes": (body(id="ten-megabytes", prompt=TEN_MB), "request_too_large"),
    "seven-megabytes": (body(id="seven-megabytes", prompt=TEN_MB[:7_000_000]), "prompt_too_long"),
}  # fmt: skip
"""By id the message and its error. `tests/test_messages.py` has all forms of what is no request."""


@pytest.fixture(params=["embedded", "kafka"])
def line(request: pytest.FixtureRequest, make_line: Callable[..., InProcessPipeline]) -> InProcessPipeline:
    return make_line(request.param)


@pytest.mark.proof
def test_each_bad_input_has_its_error_and_good_ones_go_on(line: InProcessPipeline) -> None:
    for number, (name, (value, _)) in enumerate(BAD.items()):
        line.publish_bytes(value, key=name)
        line.send_requests(Request(id=f"good-{number}", prompt="In the beginning", sampling=Sampling(max_tokens=4)))
    results = line.run_until_results(2 * len(BAD))
    found = {result.id: result.error.code if result.error else "ok" for result in results}
    assert len(results) == len(found)
    assert {name: found[name] for name in BAD} == {name: code for name, (_, code) in BAD.items()}
    assert all(found[f"good-{number}"] == "ok" for number in range(len(BAD)))


def test_without_an_id_only_the_dead_letter_topic_can_tell(line: InProcessPipeline) -> None:
    line.publish_bytes(b"{not json")
    line.publish_bytes(json.dumps(GOOD | {"id": "no spaces allowed"}).encode())
    line.send_requests(Request(id="good", prompt="In the beginning", sampling=Sampling(max_tokens=4)))
    results = line.run_until_results(1)
    assert [result.id for result in results] == ["good"]
    reasons = [message.headers[names.REASON_HEADER] for message in line.run_until_dead(2)]
    assert all(reason.startswith("invalid_request") for reason in reasons)


def test_a_message_too_large_for_any_topic_is_buried_in_part(line: InProcessPipeline) -> None:
    """What cannot be read and only just fits its own topic still has to fit the dead letters'."""
    value = b"{" * (MAX_MESSAGE_BYTES - 10)
    line.publish_bytes(value)
    line.send_requests(Request(id="good", prompt="In the beginning", sampling=Sampling(max_tokens=4)))
    line.run_until_results(1)
    (dead,) = line.run_until_dead(1)
    assert dead.headers[names.TRUNCATED_HEADER] == str(len(value))
    assert value.startswith(dead.value)


def test_of_what_is_too_large_nothing_is_kept(line: InProcessPipeline) -> None:
    """Neither when it is claimed nor while it waits. Without a key its id is read all the same."""
    value = body(id="large", prompt=TEN_MB)
    line.publish_bytes(value)
    (result,) = line.run_until_results(1)
    assert result.error is not None
    assert result.error.code == "request_too_large"
    kept = line.client.hget(line.pipeline.record_key("large"), "message")
    assert not kept
    waiting = Delivery(line.pipeline.request_topic("batch"), "0:0", value, None, {}, "batch", 0.0)
    assert line.prefill.intake.make_claim_request(waiting) is None
