"""The health and the weights of endpoints, by a clock that the test turns."""

from collections import Counter

import pytest

from penstock.endpoint_worker.endpoints import (
    FIRST_PAUSE_S,
    MAX_PAUSE_S,
    MAX_TOLD_PAUSE_S,
    Endpoint,
    Endpoints,
    parse_urls,
)
from penstock.errors import SettingsError


class Clock:
    """The time, as the test says it."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_addresses_have_a_path_and_a_weight() -> None:
    found = parse_urls("http://a:8000, https://b/openai/v1/#2.5,http://c:1/", 7)
    assert [(one.url, one.weight, one.max_requests) for one in found] == [
        ("http://a:8000/v1", 1.0, 7),
        ("https://b/openai/v1", 2.5, 7),
        ("http://c:1/v1", 1.0, 7),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "", " , ", "a:8000", "ftp://a", "http://", "http://a#0", "http://a#-1", "http://a#x", "http://a#inf", "http://a?b=c",
        "http://me:secret@a", "http://a:99999", "http://a,http://a/v1",
    ],
)  # fmt: skip
def test_addresses_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="PENSTOCK_ENDPOINT_URLS"):
        parse_urls(text, 1)


@pytest.mark.proof
def test_requests_are_dealt_out_by_weight(clock: Clock) -> None:
    one, other = Endpoint("one", 1.0, 100), Endpoint("other", 3.0, 100)
    endpoints, chosen = Endpoints([one, other], clock), Counter[str]()
    for _ in range(40):
        endpoint = endpoints.choose()
        assert endpoint is not None
        endpoint.num_running += 1
        chosen[endpoint.url] += 1
    assert chosen == {"one": 10, "other": 30}


def test_no_endpoint_has_more_than_it_may(clock: Clock) -> None:
    endpoints = Endpoints([Endpoint("one", max_requests=2, num_running=2), Endpoint("other", max_requests=1)], clock)
    assert endpoints.count_free() == 1
    endpoint = endpoints.choose()
    assert endpoint is endpoints.all[1]
    endpoint.num_running += 1
    assert (endpoints.choose(), endpoints.count_free(), endpoints.current_problem) == (None, 0, "")


@pytest.mark.proof
def test_pauses_grow_up_to_a_limit_and_end_with_an_answer(clock: Clock) -> None:
    endpoint = Endpoint("one")
    endpoints, pauses = Endpoints([endpoint], clock), []
    for _ in range(8):
        endpoint.note_failure("gone", clock.now_s, clock.now_s)
        pauses.append(endpoint.paused_until_s - clock.now_s)
        assert endpoints.choose() is None
        assert endpoints.current_problem == "one: gone"
        clock.now_s = endpoint.paused_until_s
        assert endpoints.count_free() == 1, "it is tried with one request"
        clock.now_s += 0.001
    assert all(FIRST_PAUSE_S * 2**n * 0.8 <= pause for n, pause in enumerate(pauses[:4]))
    assert max(pauses) <= MAX_PAUSE_S
    assert pauses[-1] >= MAX_PAUSE_S * 0.8
    endpoint.note_answer()
    assert endpoints.count_free() == endpoint.max_requests
    assert endpoints.current_problem == ""
    endpoint.num_failures = 1100  # after hours
    endpoint.note_failure("gone", clock.now_s, clock.now_s)
    assert endpoint.paused_until_s - clock.now_s <= MAX_PAUSE_S


def test_requests_that_fail_together_are_one_failure(clock: Clock) -> None:
    endpoint = Endpoint("one")
    for _ in range(10):
        endpoint.note_failure("gone", asked_s=90.0, now_s=clock.now_s)
    assert endpoint.num_failures == 1
    assert endpoint.paused_until_s <= clock.now_s + FIRST_PAUSE_S


@pytest.mark.proof
def test_a_busy_endpoint_is_left_alone_for_as_long_as_it_says(clock: Clock) -> None:
    one, other = Endpoint("one"), Endpoint("other", 0.1, num_running=5)
    endpoints = Endpoints([one, other], clock)
    one.note_busy("429", 20.0, clock.now_s)
    assert endpoints.choose() is other
    clock.now_s += 20.0
    assert endpoints.choose() is one
    assert one.count_free(clock.now_s) == one.max_requests, "to be busy is no failure"
    one.note_busy("429", 1e9, clock.now_s)
    assert one.paused_until_s == clock.now_s + MAX_TOLD_PAUSE_S
