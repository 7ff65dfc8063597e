"""`penstock dlq` on what workers gave up, on both buses."""

import json
from collections.abc import Callable

import pytest

from penstock import names
from penstock.bus.connect import connect_bus
from penstock.bus.contract import Outgoing
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings, RecordSettings
from penstock.errors import DeadLetterError
from penstock.messages import Request, Sampling, now_s
from penstock.names import MAX_ID_CHARS, Pipeline, is_request_id
from penstock.ops.dead_letters import DeadLetter, keep_newest
from sim.line import InProcessPipeline
from sim.workload import compute_answers
from tests.bus.buses import publish_messages
from tests.commands import Terminal, penstock
from tests.pipeline.test_failures import breaks, poison


class DeadLetterCommand:
    """`penstock dlq` for one pipeline."""

    def __init__(self, addresses: Addresses, terminal: Terminal) -> None:
        self._environment = {
            "COLUMNS": "100", "PENSTOCK_STREAM_URL": addresses.stream_url, "PENSTOCK_KAFKA": addresses.kafka,
            "PENSTOCK_PIPELINE": addresses.pipeline,
        }  # fmt: skip
        self._terminal = terminal

    def __call__(self, *arguments: str, code: int = 0) -> str:
        """What the command prints; it must end with `code`."""
        done = self._terminal("dlq", *arguments, **self._environment)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout if not code else done.stdout + done.stderr


@pytest.fixture(params=["embedded", "kafka"])
def line(request: pytest.FixtureRequest, make_line: Callable[..., InProcessPipeline]) -> InProcessPipeline:
    return make_line(request.param, record=RecordSettings(fail_attempts=1))


@pytest.mark.proof
def test_dead_requests_are_listed_shown_and_asked_again(line: InProcessPipeline, terminal: Terminal) -> None:
    dlq = DeadLetterCommand(line.addresses, terminal)
    assert "no dead letters" in dlq("list")
    first, second = poison("first").model_copy(update={"deadline": now_s() + 3600}), poison("second")
    breaks(line, "prefill", lambda: ZeroDivisionError("a bug"), times=1)
    line.send_requests(first)
    line.run_until_results(1)
    breaks(line, "decode", lambda: MemoryError("no room"), output=1, times=1)
    line.send_requests(second)
    line.run_until_results(2)

    rows = json.loads(dlq("list", "--json"))
    assert [(row["id"], row["reason"], row["attempts"], row["requeued"]) for row in rows] == [
        ("first", "model_error: ZeroDivisionError: a bug", 1, False),
        ("second", "out_of_memory: MemoryError: no room", 1, False),
    ]
    shown = dlq("show", "second")
    for part in (
        "out_of_memory: MemoryError: no room",
        "in broken",
        '"token_ids": [',
        line.pipeline.job_topic("interactive"),
    ):
        assert part in shown

    assert dlq("requeue", "first") == "first is asked again as first.retry-1\n"
    assert dlq("requeue", "--all") == "second is asked again as second.retry-1\n1 put back\n"
    results = {result.id: result for result in line.run_until_results(4)}
    assert set(results) == {"first", "second", "first.retry-1", "second.retry-1"}
    for request in (first, second):
        again = results[f"{request.id}.retry-1"]
        assert (again.error, again.token_ids) == (None, compute_answers([request])[request.id].token_ids)
    assert dlq("requeue", "--all") == "0 put back\n"
    table = dlq("list")
    assert table.count("asked") == 2
    assert dlq("requeue", "second") == "second is asked again as second.retry-2\n"
    assert {result.id for result in line.run_until_results(5)} > {"second.retry-2"}


def test_what_cannot_be_put_back_is_told_in_one_line(
    redis_url: str, addresses: Addresses, pipeline: Pipeline, terminal: Terminal
) -> None:
    bus, dlq = connect_bus(addresses, BusSettings()), DeadLetterCommand(addresses, terminal)
    assert "penstock topics create" in dlq("list", code=1)
    bus.create_topics()
    origin = {names.ORIGIN_HEADER: pipeline.request_topic("batch"), names.REASON_HEADER: "id_conflict: \x1b[2J twice"}
    good = Request(id="good", prompt="x", sampling=Sampling(max_tokens=1), deadline=1.0)
    cut = {**origin, names.TRUNCATED_HEADER: "9000000"}
    letters = [
        Outgoing(pipeline.dead_letter_topic, value, key, headers)
        for value, key, headers in (
            (b"{not json \x1b[2J", None, origin),
            (b'{"v": 1, "id": "cut", "pro', "cut", cut),
            (b'{"v": 1, "id": "lost", "prompt": "x"}', "lost", {}),
            (b'{"v": 1, "id": "bad", "prompt": ""}', "bad", origin),
            (good.encode(), "good", {**origin, names.TENANT_HEADER: "default", names.ATTEMPT_HEADER: "x"}),
        )
    ]
    publish_messages(bus, letters)
    printed = dlq("requeue", "--all", code=1)
    assert "\x1b" not in printed
    assert [line for line in printed.splitlines() if "penstock" not in line] == [
        "good is asked again as good.retry-1", "1 put back, 4 cannot be",
    ]  # fmt: skip
    nameless = DeadLetter.from_message(letters[0]).id
    for part in (
        f"penstock: {nameless} is not a message with an id",
        "penstock: cut is only the beginning of its message",
        "penstock: lost came from 'nowhere'",
        "penstock: bad would be refused again: invalid_request",
    ):
        assert part in printed
    (again,) = bus.read_all(pipeline.request_topic("batch"))
    assert (again.key, dict(again.headers)) == ("good.retry-1", {names.TENANT_HEADER: "default"})
    assert "deadline" not in json.loads(again.value)
    assert "\x1b" not in dlq("show", nameless)
    assert "penstock: no dead letter has the id 'who'" in dlq("requeue", "who", code=1)
    done = penstock("dlq", "show", "who", PENSTOCK_STREAM_URL=redis_url, PENSTOCK_PIPELINE=pipeline.name)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "penstock: no dead letter has the id 'who': see penstock dlq list\n"
    assert "give an ID or --all" in dlq("requeue", code=2)


def letter(request_id: str, **headers: str) -> DeadLetter:
    value = json.dumps({"v": 1, "id": request_id, "prompt": "x"}).encode()
    known = {name.replace("_", "-"): text for name, text in headers.items()}
    return DeadLetter.from_message(
        Outgoing("dead", value, request_id, {names.ORIGIN_HEADER: Pipeline("p").request_topic("batch"), **known})
    )


def test_numbers_go_on_from_the_first_id() -> None:
    repeated = letter("a.retry-7")
    assert (repeated.base_id, repeated.retry_number) == ("a", 7)
    assert repeated.build_retry(Pipeline("p"), 8).key == "a.retry-8"
    assert (letter(".retry-1".strip(".")).retry_number, letter("a.retry-0").retry_number) == (0, 0)


def test_a_long_id_stays_one_of_its_own() -> None:
    long = ["a" * (MAX_ID_CHARS - 1) + end for end in "bc"]
    again = {letter(one).build_retry(Pipeline("p"), 12).key for one in long}
    assert len(again) == 2
    assert all(one is not None and is_request_id(one) and one.endswith(".retry-12") for one in again)


def test_of_several_the_newest() -> None:
    found = [letter("a", penstock_buried="2000"), letter("b"), letter("a", penstock_buried="1000")]
    assert keep_newest(found) == [found[1], found[0]]


def test_another_pipelines_letter_is_not_put_back() -> None:
    with pytest.raises(DeadLetterError, match="no topic of requests or jobs"):
        letter("a").build_retry(Pipeline("q"), 1)
