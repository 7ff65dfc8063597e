"""Whose fault a refusal is: each row of the table in docs/endpoints.md, on a real HTTP server."""

import gzip
import itertools
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.endpoint_worker import engine
from penstock.endpoint_worker.answer import AnswerWriter
from penstock.endpoint_worker.endpoints import MAX_PAUSE_S, Endpoint
from penstock.endpoint_worker.question import Question
from penstock.endpoint_worker.reply import EndpointReply
from penstock.messages import Result
from sim.endpoint import CountingEndpoint, write_numbers
from tests.endpoint.conftest import EndpointPipeline, engine_of

pytestmark = pytest.mark.in_memory

PAGE = (Path(__file__).parents[2] / "docs/endpoints.md").read_text()
ROWS = [cells for line in PAGE.splitlines() if len(cells := line.strip("| ").split(" | ")) == 5][1:]
"""What comes, when it counts, after how many times the request ends, with what, and when the server rests."""
WORDS = "blocked by the firewall"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
PIECE = b'data: {"choices": [{"index": 0, "text": " 0"}]}\n\n'
END = b'data: {"choices": [{"index": 0, "text": " 1", "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
GOOD = write_numbers(2)
INTERIM = b"".join(b"HTTP/1.1 %d Early\r\nLink: </a>\r\n\r\n" % code for code in (100, 102, 103, 103, 199))


def answer_status(code: int, header: str = "X: y", words: str = WORDS) -> bytes:
    words = "" if code in (101, 204, 304) else words  # these have no body
    return f"HTTP/1.1 {code} As told\r\nConnection: close\r\n{header}\r\n\r\n<html>{words}</html>".encode()


def stream(*parts: bytes, header: bytes = b"Connection: close") -> bytes:
    return b"%b%b\r\n\r\n%b" % (HEAD, header, b"".join(parts))


def fail(code: int | None) -> bytes:
    return b"data: " + json.dumps({"error": {"message": WORDS, "code": code}}).encode() + b"\n\n"


REPLIES: dict[str, list[bytes | None]] = {
    "200 and a stream": [stream(PIECE, END), INTERIM + stream(PIECE, END)],
    "400 or 422 that": [answer_status(code, words="its context length is 8") for code in (400, 422)],
    "429, 503": [answer_status(code, header) for code in (429, 503) for header in ("X: y", "Retry-After: 15")],
    "no HTTP": [b"ICY 200 OK\r\nicy-name: x\r\n\r\n", b"\0\0\x12\4\0\0\0\0\0\0\3\0\0\0\x64\n"],
    "200 and no stream": [
        HEAD.replace(b"event-stream", b"html") + b"\r\n<html>",
        stream(gzip.compress(bytes(10**7)), header=b"Content-Encoding: gzip"),
    ],
    "a stream that is": [
        *(stream(part) for part in (b"data: {\n\n", b'data: {"choices": 5}\n\n', fail(None), fail(500), fail(404)))
    ],
    "the connection is lost before": [
        b"", stream(), None, *(stream(part, header=b"Transfer-Encoding: chunked") for part in (b"5\r\nda", b"zz\r\nda"))
    ],
    "the connection is lost behind": [stream(PIECE)],
    "an error in the stream": [stream(PIECE, fail(None)), stream(PIECE, fail(404))],
    "an end for another": [
        stream(END.replace(b'"stop"', b'"abort"')), stream(END.replace(b'"stop"', b'"content_filter"')),
        stream(PIECE.replace(b'"text": " 0"', b'"delta": {"function_call": [1]}')),
    ],
    "no connection": [],
}  # fmt: skip
"""Replies of a row's kind, by its beginning; None for one that does not come. Those of other rows are statuses."""


def list_statuses(what: str) -> list[int]:
    """Return the HTTP statuses that a row is about."""
    spans = re.findall(r"(\d{3})(?: to (\d{3}))?", what.partition(" (a ")[0])
    return [code for first, last in spans for code in range(int(first), int(last or first) + 1)]


def list_replies(what: str) -> list[bytes | None]:
    for beginning, replies in REPLIES.items():
        if what.startswith(beginning):
            return replies
    statuses = list_statuses(what)
    return [answer_status(code) for code in statuses if len(statuses) < 6 or code in statuses[:: len(statuses) // 2]]


CASES: list[tuple[Any, ...]] = [(*cells, reply) for cells in ROWS for reply in list_replies(cells[0])]


class Clock:
    """A clock whose time passes only where a test lets it."""

    now_s = 100.0

    def __call__(self) -> float:
        self.now_s += 1e-6  # no two things happen at once
        return self.now_s


class Door:
    """The pipeline before one endpoint that gives a reply to each prompt that begins with `bad`."""

    def __init__(
        self, line: EndpointPipeline, endpoint: CountingEndpoint, reply: bytes | None = b"", **settings: Any
    ) -> None:
        self.line, self.reply, self.clock = line, reply, Clock()
        self.refused: tuple[str, ...] = ("bad",)
        self.asked, self.over = Counter[str](), threading.Event()
        endpoint.write_reply = self._write_reply
        self.engine = engine_of(line.add_worker(endpoint, **settings))
        self.engine.endpoints.clock = self.clock
        self.endpoint = self.engine.endpoints.all[0]

    def _write_reply(self, body: dict[str, Any]) -> bytes | None:
        name = body["prompt"].partition("|")[0]
        self.asked[name] += 1
        if not name.startswith(self.refused):
            return None
        if self.reply is None:
            self.over.wait()
        return self.reply

    def send(self, *names: str) -> None:
        for name in names:
            self.line.send(f"{name}|", id=name, max_tokens=2 + 18 * name.startswith("bad"))

    @property
    def results(self) -> dict[str, Result]:
        return {result.id: result for result in self.line.read_results()}

    def run_until(self, condition: Callable[[], object]) -> None:
        """Turn the worker until the condition holds. Time passes while nothing is under way at the endpoint."""

        def pass_time() -> bool:
            if not self.endpoint.under_way:
                self.clock.now_s += 2 * MAX_PAUSE_S
            return bool(condition())

        self.line.run_until(pass_time)

    def run_until_ended(self, *names: str) -> None:
        self.run_until(lambda: self.results.keys() >= {*names})

    def send_good_until_ended(self, *names: str) -> None:
        """Send good requests, one after the other, until all of these have a result."""
        for number in itertools.count():
            if self.results.keys() >= {*names}:
                return
            self.send(f"later-{number}")
            self.run_until_ended(f"later-{number}")

    def check_results(self, code: str) -> None:
        """The good ones were answered and asked for once, and the others ended as the table says."""
        for name, result in self.results.items():
            is_good = not name.startswith("bad")
            if is_good or code == "answered":
                assert (result.text, result.error) == (GOOD, None)
            else:
                assert result.error is not None
                assert result.error.code == code.strip("`")
                assert WORDS not in str(self.reply) or WORDS in result.error.message
            assert not is_good or self.asked[name] == 1


@pytest.fixture
def door(line: EndpointPipeline, endpoint: CountingEndpoint, monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    """An answer that does not come is waited for but shortly."""

    def ask(
        endpoint: Endpoint, question: Question, writer: AnswerWriter, silence_s: float, report: Any
    ) -> EndpointReply:
        is_silent = made.reply is None and b'"bad' in question.body
        return EndpointReply(endpoint, question, writer, 0.05 if is_silent else silence_s, report)

    monkeypatch.setattr(engine, "EndpointReply", ask)
    made = Door(line, endpoint)
    yield made
    made.over.set()


each_case = pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, id=f"{case[0][:20]}-{case[-1]!r:.40}", marks=[pytest.mark.proof] * (b" 403 " in (case[-1] or b""))
        )
        for case in CASES
    ],
)


def test_the_table_has_each_status_once() -> None:
    statuses = [code for cells in ROWS if "that names" not in cells[0] for code in list_statuses(cells[0])]
    assert sorted(code for code in statuses if code != 200) == [code for code in range(100, 600) if code != 200]
    assert len(CASES) > 40


@each_case
def test_one_request_among_ten_good_ones_ends_alone(door: Door, case: tuple[Any, ...]) -> None:
    _, counts, num_asks, code, _, door.reply = case
    good = [f"good-{number}" for number in range(10)]
    if "never alone" in counts:
        door.send("bad")
        door.run_until(lambda: door.asked["bad"] > int(num_asks) + 1)
        assert not door.results
    door.send(*good[:5], *([] if "never alone" in counts else ["bad"]), *good[5:])
    door.run_until_ended(*good)
    door.send_good_until_ended("bad")
    door.check_results(code)
    assert door.endpoint.failed_at_s < 0, "the endpoint never rests"
    assert "never" in counts or code == "answered" or door.asked["bad"] == int(num_asks)


@each_case
def test_three_requests_alike_make_the_endpoint_rest_until_a_good_one_is_answered(
    door: Door, case: tuple[Any, ...]
) -> None:
    _, counts, num_asks, code, rests, door.reply = case
    names = "bad-1", "bad-2", "bad-3"
    door.send(*names)
    if counts.startswith("by the rule"):
        door.run_until(lambda: all(door.asked[name] > int(num_asks) for name in names))
        assert not door.results, "nothing counts"
        door.run_until(lambda: door.engine.report_state().get("reason"))
    else:
        door.run_until_ended(*names)
        assert (door.endpoint.failed_at_s > 0) == (rests == "after three requests")
    door.send("good")
    door.run_until_ended("good")
    door.send_good_until_ended(*names)
    door.check_results(code)
    assert not door.endpoint.is_resting(door.clock())


def test_an_endpoint_without_a_connection_rests_at_once(door: Door, endpoint: CountingEndpoint) -> None:
    assert ROWS[-1][0::4] == ["no connection", "at once"]
    endpoint.stop()
    door.send(*(f"good-{number}" for number in range(10)))
    door.run_until(lambda: door.endpoint.num_failures > 3)
    with CountingEndpoint(endpoint.port) as back:
        back.write_reply = door._write_reply
        door.run_until(lambda: len(door.results) == 10)
        door.check_results("answered")


def test_a_good_request_is_taken_in_behind_more_forbidden_ones_than_the_worker_may_ask_for(
    line: EndpointPipeline, endpoint: CountingEndpoint
) -> None:
    door = Door(line, endpoint, answer_status(403), max_requests=2)
    forbidden = [f"bad-{number}" for number in range(8)]
    door.send(*forbidden, "good")
    door.run_until_ended("good")
    door.send_good_until_ended(*forbidden)
    door.check_results("invalid_request")


@pytest.mark.parametrize("status", [400, 401, 403])
def test_what_an_endpoint_says_to_all_counts_against_none_while_it_goes_on_with_older_answers(
    door: Door, endpoint: CountingEndpoint, status: int
) -> None:
    """Its account has no credit, or its key was changed: what was begun before is answered, and says nothing."""
    door.reply, door.refused = answer_status(status), ("new",)
    endpoint.gate.clear()
    door.send("old-1", "old-2", "old-3")
    door.run_until(lambda: endpoint.num_under_way == 3)
    new = [f"new-{number}" for number in range(5)]
    door.send(*new)
    door.run_until(lambda: len(door.asked) == 8 and door.endpoint.num_failures)
    endpoint.gate.set()
    door.run_until_ended("old-1", "old-2", "old-3")
    door.run_until(lambda: all(door.asked[name] > 4 for name in new))
    assert len(door.results) == 3
    assert door.engine.report_state()["reason"] == f"{door.endpoint.url}: HTTP {status}: <html>{WORDS}</html>"
    door.refused = ()
    door.run_until_ended(*new)
    assert {(result.text, result.error) for result in door.results.values()} == {(GOOD, None)}


SECOND = PIECE.replace(b'"index": 0, "text": " 0"', b'"index": 1, "text": "another answer"')
BOTH = b'data: {"choices": [{"index": 1, "text": "x", "finish_reason": "abort"}, {"index": 0, "text": " 0"}]}\n\n'


@pytest.mark.parametrize(
    "parts",
    [
        (b"\xef\xbb\xbf", PIECE, END), (b"\xef\xbb\xbf: hello\n", PIECE, END), (SECOND, PIECE, SECOND, END),
        (BOTH, END), (PIECE.replace(b"0, ", b"null, "), END), (PIECE.replace(b"\n", b"\r"), END),
        (PIECE.replace(b"\n", b"\r\n"), END),
    ],
)  # fmt: skip
def test_what_stands_before_and_beside_an_answer_is_no_part_of_it(door: Door, parts: tuple[bytes, ...]) -> None:
    door.reply = stream(*parts)
    door.send("bad")
    door.run_until_ended("bad")
    door.check_results("answered")
