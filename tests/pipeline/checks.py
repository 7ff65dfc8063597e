"""Checks of what a client and the results topic saw against the promises."""

import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from penstock.bus.connect import connect_bus
from penstock.client.sync import Client
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings
from penstock.messages import EndEvent, Request, Result, TokenEvent, decode_message
from penstock.names import START_HASH, Pipeline, event_id, roll_hash
from sim.waiting import PATIENCE_S
from sim.workload import ExpectedAnswer, compute_answers


class Streams:
    """Reads the streams of many requests at once, each to its end."""

    def __init__(self, client: Client, work: Sequence[Request]) -> None:
        self._client = client
        self._done = threading.Semaphore(0)
        self.events: dict[str, list[TokenEvent | EndEvent]] = {request.id: [] for request in work}
        self._pool = ThreadPoolExecutor(len(work))
        self._futures = [self._pool.submit(self._read, request.id) for request in work]

    def _read(self, request_id: str) -> None:
        try:
            for event in self._client.stream(request_id, timeout_s=PATIENCE_S):
                self.events[request_id].append(event)
        finally:
            self._done.release()

    def wait_for(self, count: int) -> None:
        """Wait until `count` more streams have ended."""
        for _ in range(count):
            assert self._done.acquire(timeout=PATIENCE_S), "a stream does not end"

    def finish(self) -> None:
        """Wait until all streams have ended; raise what any reader raised."""
        for future in self._futures:
            future.result()
        self._pool.shutdown()


def results_of(addresses: Addresses) -> list[Result]:
    """Return all results in the pipeline's results topic."""
    bus = connect_bus(addresses, BusSettings())
    return [
        decode_message(Result, message.value) for message in bus.read_all(Pipeline(addresses.pipeline).results_topic)
    ]


def check_streams(streams: Streams, expected: dict[str, ExpectedAnswer]) -> None:
    """Check that each stream has every position once, in order, with the expected event ids, tokens and texts."""
    for request_id, events in streams.events.items():
        *tokens, end = events
        assert isinstance(end, EndEvent), request_id
        rolled = START_HASH
        for position, event in enumerate(tokens):
            assert isinstance(event, TokenEvent)
            rolled = roll_hash(rolled, event.token)
            assert event.id == event_id(position, rolled), request_id
        token_ids = [event.token for event in tokens if isinstance(event, TokenEvent)]
        assert token_ids == expected[request_id].token_ids, request_id
        assert "".join(event.text for event in events) == expected[request_id].text, request_id
        assert end.finish_reason == expected[request_id].finish_reason, request_id


def check_results(results: Sequence[Result], expected: dict[str, ExpectedAnswer]) -> None:
    """Check that each id has exactly one result, with the expected tokens and text."""
    counts = Counter(result.id for result in results if result.id in expected)
    assert counts == Counter(expected.keys())
    for result in results:
        if result.id in expected:
            answer = expected[result.id]
            assert (result.token_ids, result.text) == (answer.token_ids, answer.text), result.id
            assert result.error is None


def check_tokens(results: Sequence[Result], work: list[Request]) -> None:
    """Check that each request has exactly one result, with the undivided model's tokens, and that there is no other."""
    expected = {name: answer.token_ids for name, answer in compute_answers(work).items()}
    assert {result.id: result.token_ids for result in results} == expected
    assert len(results) == len(expected)
