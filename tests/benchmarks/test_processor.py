"""The arithmetic of processor time: what is added within a round, and what a token adds."""

import pytest

from benchmarks.processor import Cost, Loads


def test_what_is_added_is_the_median_of_differences_within_a_round() -> None:
    short = {
        "bare": [Cost(0.1), Cost(0.2), Cost(0.4)],
        "embedded": [Cost(0.3), Cost(0.6), Cost(0.9)],
        "kafka": [Cost(0.5, 0.1), Cost(1.0, 0.2), Cost(1.0, 0.3)],
    }
    long = {
        "bare": [Cost(1.0), Cost(2.0), Cost(4.0)],
        "embedded": [Cost(1.8), Cost(3.0), Cost(5.1)],
        "kafka": [Cost(9.0)] * 3,
    }
    assert Loads(100, 4, 64, short, long).make_figures() == {
        "cpu_ms_per_request_added_embedded": pytest.approx(4.0),
        "cpu_us_per_token_added": pytest.approx(100.0),
        "cpu_ratio_added": pytest.approx(2.0),
        "cpu_ms_per_request_added_kafka": pytest.approx(6.0),
        "cpu_ms_per_request_broker": pytest.approx(2.0),
    }


def test_sides_are_compared_with_another_checkout_where_that_is_measured() -> None:
    short = {
        "bare": [Cost(1.0), Cost(2.0)],
        "before_embedded": [Cost(5.0), Cost(6.0)],
        "embedded": [Cost(3.0), Cost(4.0)],
        "one_hop_embedded": [Cost(2.0), Cost(3.0)],
    }
    alone = {"before_embedded": [Cost(1.0, 0.0, 40)] * 2, "one_hop_embedded": [Cost(1.0, 0.0, 30)] * 2}
    at_once = {"before_embedded": [Cost(1.0, 0.0, 10)] * 2, "one_hop_embedded": [Cost(1.0, 0.0, 5)] * 2}
    found = Loads(10, 4, 64, short, short, alone, at_once).make_figures()
    assert {name: value for name, value in found.items() if "_vs_before" in name} == {
        "cpu_added_one_hop_vs_before_embedded": 0.25,
        "cpu_added_two_hops_vs_before": 0.5,
        "redis_reads_one_hop_vs_before_alone": 0.75,
        "redis_reads_one_hop_vs_before": 0.5,
    }
