"""The health and the weights of endpoints, by a clock that the test turns."""

from collections import Counter

import pytest

from penstock.endpoint_worker.endpoints import (
    FIRST_PAUSE_S,
    MAX_PAUSE_S,
    UNREACHABLE,
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


def test_each_endpoint_has_its_key_and_its_name_of_the_model() -> None:
    urls = "http://a,http://b,http://c"
    found = parse_urls(urls, 1, "k-a, ,k-c", "m-a,m-b,m-c")
    assert [(one.key, one.model) for one in found] == [("k-a", "m-a"), ("", "m-b"), ("k-c", "m-c")]
    assert [(one.key, one.model) for one in parse_urls(urls, 1, "k", "m")] == [("k", "")] * 3
    assert [one.key for one in parse_urls("http://a", 1, "k,with,commas")] == ["k,with,commas"]
    for keys, models, told in (
        ("k-a,k-b", "", "KEY has 2 parts for 3"),
        ("k-a\n", "", "KEY has a line break"),
        ("", "m,m,", "MODEL has an empty name"),
    ):
        with pytest.raises(SettingsError, match=told) as refused:
            parse_urls(urls, 1, keys, models)
        assert "k-a" not in str(refused.value)


@pytest.mark.proof
def test_requests_are_dealt_out_by_weight(clock: Clock) -> None:
    one, other = Endpoint("one", 1.0, 100), Endpoint("other", 3.0, 100)
    endpoints, chosen = Endpoints([one, other], clock), Counter[str]()
    for _ in range(40):
        endpoint = endpoints.choose()
        assert endpoint is not None
        endpoint.under_way.append(clock.now_s)
        chosen[endpoint.url] += 1
    assert chosen == {"one": 10, "other": 30}


def test_no_endpoint_has_more_than_it_may(clock: Clock) -> None:
    endpoints = Endpoints(
        [Endpoint("one", max_requests=2, under_way=[0.0, 0.0]), Endpoint("other", max_requests=1)], clock
    )
    assert endpoints.count_free() == 1
    endpoint = endpoints.choose()
    assert endpoint is endpoints.all[1]
    endpoint.under_way.append(clock.now_s)
    assert (endpoints.choose(), endpoints.count_free(), endpoints.current_problem) == (None, 0, "")


@pytest.mark.proof
def test_pauses_grow_up_to_a_limit_and_end_with_an_answer(clock: Clock) -> None:
    endpoint = Endpoint("one")
    endpoints, pauses = Endpoints([endpoint], clock), []
    for _ in range(8):
        endpoint.note_failure(UNREACHABLE, "gone", clock.now_s, clock.now_s)
        pauses.append(endpoint.paused_until_s - clock.now_s)
        assert endpoints.choose() is None
        assert endpoints.current_problem == "one: gone"
        clock.now_s = endpoint.paused_until_s
        assert endpoints.count_free() == 1, "it is tried with one request"
        clock.now_s += 0.001
    assert all(FIRST_PAUSE_S * 2**n * 0.8 <= pause for n, pause in enumerate(pauses[:4]))
    assert max(pauses) <= MAX_PAUSE_S
    assert pauses[-1] >= MAX_PAUSE_S * 0.8
    assert endpoints.count_refusing() == 0
    endpoint.note_answer(clock.now_s)
    assert endpoints.count_free() == endpoint.max_requests
    assert endpoints.current_problem == ""
    endpoint.num_failures = 1100  # after hours
    endpoint.note_failure(UNREACHABLE, "gone", clock.now_s, clock.now_s)
    assert endpoint.paused_until_s - clock.now_s <= MAX_PAUSE_S


def test_requests_that_fail_together_are_one_failure(clock: Clock) -> None:
    endpoint = Endpoint("one")
    for _ in range(10):
        endpoint.note_failure(UNREACHABLE, "gone", asked_s=90.0, now_s=clock.now_s)
    assert endpoint.num_failures == 1
    assert endpoint.paused_until_s <= clock.now_s + FIRST_PAUSE_S


@pytest.mark.proof
def test_a_busy_endpoint_is_left_alone_for_as_long_as_it_says(clock: Clock) -> None:
    """Once it has said so to three different requests; that is no failure."""
    one, other = Endpoint("one"), Endpoint("other", 0.1, under_way=[0.0] * 5)
    endpoints = Endpoints([one, other], clock)
    for name in ("a", "b", "b", "c"):
        assert endpoints.choose() is one
        one.note_refusal("429", "busy", name, clock.now_s, clock.now_s, 20.0)
    assert endpoints.choose() is other
    told = {"url": "one", "cause": "429", "problem": "busy", "rests_s": 20.0}
    assert endpoints.describe_rests() == [told, {"url": "other", "cause": "", "problem": "", "rests_s": 0.0}]
    clock.now_s += 20.0
    assert endpoints.choose() is one
    assert one.count_free(clock.now_s) == one.max_requests


@pytest.mark.parametrize(
    ("happens", "rests"),
    [
        ("a b c", True), ("a b a b", False), ("a b A c", False), ("a A b c d", True), ("a b +g c", False),
        ("+g a b c", True), ("a +g b c -g", True), ("a +g b c", False), ("a +g b c *g", False), ("+g a b c *g", True),
        ("a b c +g *g", False), ("a b 5 c", True), ("a b 5 6", False),
    ],
)  # fmt: skip
def test_three_refusals_alike_with_none_answered_between_are_the_endpoints(
    clock: Clock, happens: str, rests: bool
) -> None:
    """Letters: a request is asked for and refused. Capital: one is answered. +g, *g, -g: one is asked for, and later
    answered or refused. Digits: refused otherwise.
    """
    endpoint, asked_s = Endpoint("one"), 0.0
    for word in happens.split():
        clock.now_s += 0.01
        if word == "+g":
            asked_s = clock.now_s
            endpoint.under_way.append(asked_s)
        elif word.isupper():
            endpoint.note_answer(clock.now_s)
        elif word == "*g":
            endpoint.under_way.remove(asked_s)
            endpoint.note_answer(asked_s)
        else:
            at_s = asked_s if word == "-g" else clock.now_s
            endpoint.under_way = [] if word == "-g" else endpoint.under_way
            endpoint.note_refusal("500" if word.isdigit() else "403", "no", word, at_s, clock.now_s)
    assert endpoint.is_resting(clock.now_s) == rests
    assert endpoint.count_free(clock.now_s) == (0 if rests else endpoint.max_requests - len(endpoint.under_way))


def test_an_endpoint_that_refuses_is_reached_again(clock: Clock) -> None:
    endpoint = Endpoint("one")
    endpoint.note_failure(UNREACHABLE, "gone", clock.now_s, clock.now_s)
    endpoint.note_refusal("403", "no", "a", 99.0, clock.now_s)
    clock.now_s = endpoint.paused_until_s
    assert endpoint.count_free(clock.now_s) == 1, "that was asked before"
    endpoint.note_refusal("403", "no", "a", clock.now_s, clock.now_s)
    assert endpoint.count_free(clock.now_s) == endpoint.max_requests


def test_an_endpoint_that_failed_is_tried_with_one_request_beside_older_ones(clock: Clock) -> None:
    endpoint = Endpoint("one", under_way=[1.0, 2.0])
    for name in "abc":
        endpoint.note_refusal("403", "no", name, clock.now_s, clock.now_s)
    clock.now_s = endpoint.paused_until_s
    assert endpoint.count_free(clock.now_s) == 1
    endpoint.under_way.append(clock.now_s)
    assert endpoint.count_free(clock.now_s) == 0
    endpoint.note_answer(2.0)
    assert endpoint.is_resting(clock.now_s), "an answer from before says nothing"
