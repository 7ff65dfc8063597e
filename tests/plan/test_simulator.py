"""The pipeline in virtual time: times that can be done by hand, what placers see, and that nothing is lost."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.bus.placement import MAX_SENT_S, Link, PromptChain
from penstock.config.settings import SloSettings
from penstock.engine.scheduling.cost import StepCost
from penstock.errors import PlanError
from penstock.plan.placing import Beat, PlacedRequest, RoundRobin, Tier, View, WorkerSpec, plan_fetch
from penstock.plan.simulator import Simulation
from sim.placement.rules import RULES, compute_imbalance, count_sent_tokens
from sim.placement.traces import make_placed_request

COST = StepCost(fixed_s=0.01, row_s=0.001, context_s=0.0, chunk_s=0.0, token_s=0.001)
SPEC = WorkerSpec(COST, num_blocks=64, block_size=16, slo=SloSettings(interactive_gap_s=1.0))
KEYS = tuple(f"block {number}".encode() for number in range(12))
"""Of a text of 192 tokens."""
FIRST = PlacedRequest("first", 0.0, 64, 33, KEYS[:6])
LATER = PlacedRequest("later", 10.0, 120, 3, KEYS[:7])
"""A turn of the same chat behind the first: its prompt begins with that one's prompt and answer."""


class Always:
    """A rule: requests go to the workers that are told, in turn."""

    memory_s = 60.0

    def __init__(self, *workers: int) -> None:
        self._workers = list(workers)
        self.views: list[View] = []

    def choose_worker(self, request: PlacedRequest, view: View) -> int:
        self.views.append(view)
        return self._workers.pop(0)


def test_steps_take_what_they_cost() -> None:
    (done,) = Simulation({"auto": (1, SPEC)}, [RoundRobin()]).run([PlacedRequest("r", 1.0, 100, 3)])
    assert done.ttft_s == pytest.approx(0.11), "a step with a hundred prompt tokens"
    assert done.itl_s == pytest.approx(0.011), "steps of one row"
    assert done.end_s == pytest.approx(1.132)


def test_what_comes_during_a_step_is_read_behind_it() -> None:
    requests = [PlacedRequest("busy", 0.0, 100, 5), PlacedRequest("late", 0.05, 50, 1)]
    _, late = Simulation({"auto": (1, SPEC)}, [RoundRobin()]).run(requests)
    assert late.first_s == pytest.approx(0.11 + 0.061), "both share the next step"
    _, late = Simulation({"auto": (1, SPEC)}, [RoundRobin()]).run([FIRST, replace(LATER, at_s=0.05)])
    assert late.first_s == pytest.approx(0.074 + 0.011 + 0.067), "a row's step passes while its 64 tokens are found"
    _, late = Simulation({"auto": (1, SPEC)}, [RoundRobin()]).run([requests[0], replace(requests[1], at_s=1.0)])
    assert late.ttft_s == pytest.approx(0.06), "nobody else is there"
    _, late = Simulation({"auto": (1, SPEC)}, [RoundRobin()], way_s=0.02).run(
        [requests[0], replace(requests[1], at_s=1.0)]
    )
    assert late.ttft_s == pytest.approx(0.08), "with the way to the worker and back"


@pytest.mark.parametrize(("ttft_s", "first_s"), [(4.0, 0.11 + 0.05 + 0.022), (0.1, 0.11 + 0.061)])
def test_a_prompt_keeps_to_the_gap_of_an_answer_unless_its_own_first_token_were_late(
    ttft_s: float, first_s: float
) -> None:
    spec = replace(SPEC, slo=SloSettings(interactive_gap_s=0.0505, interactive_ttft_s=ttft_s))
    requests = [PlacedRequest("busy", 0.0, 100, 5), PlacedRequest("late", 0.05, 50, 1)]
    _, late = Simulation({"auto": (1, spec)}, [RoundRobin()]).run(requests)
    assert late.first_s == pytest.approx(first_s), "39 tokens and then 11; or all at once"


def test_a_turn_finds_prompt_and_answer_in_the_pool_of_its_worker() -> None:
    _, later = Simulation({"auto": (2, SPEC)}, [Always(1, 1)]).run([FIRST, LATER])
    assert (later.pool_tokens, later.fetched_tokens) == (96, 0), "96 of 97 tokens are in full blocks"
    assert later.ttft_s == pytest.approx(0.034), "24 tokens are left"


@pytest.mark.parametrize(("block_s", "fetched", "ttft_s"), [(0.001, 96, 0.042), (0.02, 0, 0.13)])
def test_another_worker_fetches_it_where_that_is_quicker(block_s: float, fetched: int, ttft_s: float) -> None:
    tier = Tier(bytes_per_s=1 / block_s, fixed_s=0.002, block_bytes=1, num_blocks=100)
    _, later = Simulation({"auto": (2, SPEC)}, [Always(1, 0)], [tier]).run([FIRST, LATER])
    assert (later.pool_tokens, later.fetched_tokens) == (0, fetched)
    assert later.ttft_s == pytest.approx(ttft_s), "8 ms and 24 tokens; or 120 tokens, as 122 ms are more"


def test_a_tier_forgets_the_ends_of_what_was_not_used_for_longest() -> None:
    tier = Tier(1.0, 0.0, 1, num_blocks=8)
    tier.store_blocks(0, KEYS[:6])
    tier.store_blocks(1, (b"other", b"text", b"more"))
    assert tier.count_prefix(2, KEYS) == 5


def test_each_block_is_read_from_the_first_tier_that_has_it() -> None:
    memory, redis = Tier(1.0, 0.5, 1, 100, workers_of_host=2), Tier(0.1, 0.0, 1, 100)
    for tier, count in ((memory, 3), (redis, 6)):
        tier.store_blocks(0, KEYS[:count])
    assert plan_fetch([memory, redis], 1, KEYS, 1) == (6, 0.5 + 2 + 30), "it is on the same host"
    assert plan_fetch([memory, redis], 2, KEYS, 1) == (6, 50), "five blocks, at ten seconds each"
    assert plan_fetch([memory, redis], 2, KEYS, 8) == (8, 0), "it has more than they"


def test_a_job_is_decoded_elsewhere_and_computes_no_prompt() -> None:
    tier = Tier(bytes_per_s=1000, fixed_s=0.05, block_bytes=1, num_blocks=100)
    fleet = Simulation({"prefill": (1, SPEC), "decode": (1, SPEC)}, [RoundRobin()], [tier])
    (done,) = fleet.run([PlacedRequest("r", 0.0, 100, 3)])
    assert done.ttft_s == pytest.approx(0.11)
    assert done.end_s == pytest.approx(0.11 + 0.056 + 2 * 0.011), "six blocks are fetched, then two steps of one row"


def test_what_fits_no_pool_is_an_error() -> None:
    with pytest.raises(PlanError, match="r needs 65 KV blocks, and the pool has 64"):
        Simulation({"auto": (1, SPEC)}, [RoundRobin()]).run([PlacedRequest("r", 0.0, 1000, 26)])


def test_batch_work_waits_for_what_is_interactive_and_heartbeats_tell_both() -> None:
    class Watching(RoundRobin):
        def choose_worker(self, request: PlacedRequest, view: View) -> int:
            beats.append(view.beats[0])
            return 0

    beats = list[Beat]()
    requests = [
        PlacedRequest("batch", 0.5, 800, 2, priority_class="batch"),
        PlacedRequest("asked", 0.6, 400, 2),
        PlacedRequest("late", 1.01, 16, 2),
    ]
    spec = replace(SPEC, num_blocks=1000)
    batch, asked, _ = Simulation({"auto": (1, spec)}, [Watching()], heartbeat_delay_s=0.0).run(requests)
    assert asked.first_s < batch.first_s
    assert (beats[-1].waiting_tokens, beats[-1].batch_tokens) == (944, 544), "the first step is over"


def test_a_placer_sees_heartbeats_late_and_its_own_requests_at_once() -> None:
    rule = Always(0, 0, 0)
    seen: list[tuple[Beat, int, int, int]] = []

    class Watching(RoundRobin):
        memory_s = 60.0

        def choose_worker(self, request: PlacedRequest, view: View) -> int:
            own = view.own[0]
            seen.append((view.beats[0], own.num_requests, own.prompt_tokens, count_sent_tokens(view, 0)))
            return 0

    requests = [PlacedRequest(str(at_s), at_s, 1600, 2) for at_s in (0.9, 1.4, 1.6)]
    spec = replace(SPEC, num_blocks=1000)
    Simulation({"auto": (1, spec)}, [Watching()], heartbeat_delay_s=0.5).run(requests)
    (_, *first), (late, *second), (beat, *third) = seen
    assert first == [0, 0, 0]
    assert (late.at_s, second) == (0.0, [1, 1600, 1600])
    assert (beat.at_s, beat.waiting_tokens) == (1.0, 1600), "the first step was not over"
    assert third == [2, 3200, 1600], "the first was sent before that heartbeat"
    assert rule.views == []


def test_a_placer_remembers_where_it_sent_what_for_a_while() -> None:
    view = View(2, SPEC, None, memory_s=60.0)
    for request, worker, now_s in ((FIRST, 1, 0.0), (LATER, 0, 10.0), (LATER, 0, 65.0)):
        view.begin_request(request, now_s)
        if now_s < 65.0:
            view.record_sent(request, worker)
        else:
            assert view.hits == [112, 0], "the full blocks of the prompt; what was sent to the other is too old"
    assert count_sent_tokens(view, 0) == 0, f"more than {MAX_SENT_S} s ago"
    view.begin_request(LATER, 10.0 + MAX_SENT_S)
    assert count_sent_tokens(view, 0) == 120
    assert view.hits == [112, 64]


def test_short_chats_stay_with_their_workers_though_two_gateways_do_not_see_each_others_requests() -> None:
    """400 chats of one system prompt, a hundred at a time, on four workers that compute 2,000 tokens a second each."""
    requests, num_earlier = list[PlacedRequest](), dict[str, int]()
    for number in range(400):
        rng, name = random.Random(f"chat {number}"), f"chat-{number}"
        at_s, segments = rng.uniform(0.0, 60.0), [("system", 450)]
        for turn in range(rng.choice((3, 4))):
            num_earlier[f"{name}.{turn}"] = sum(length for _, length in segments[1:])
            segments.append((f"user {name}.{turn}", rng.randint(100, 200)))
            answer = (f"answer {name}.{turn}", 6)
            requests.append(make_placed_request(f"{name}.{turn}", at_s, segments, answer, None, name, 16))
            segments.append(answer)
            at_s += rng.uniform(7.0, 21.0)
    requests.sort(key=lambda one: one.at_s)
    cost = StepCost(fixed_s=0.0125, row_s=0.001, context_s=0.0, chunk_s=0.0, token_s=4e-4)
    fleet = Simulation({"auto": (4, WorkerSpec(cost, num_blocks=12_000))}, [RULES["ours"](), RULES["ours"]()])
    played = fleet.run(requests)
    found = sum(max(0, one.pool_tokens - 450) for one in played if num_earlier[one.request.id])
    assert found >= 0.93 * sum(num_earlier.values())
    assert compute_imbalance(fleet.readers) <= 1.2


REQUESTS = st.lists(
    st.builds(
        lambda at_s, tokens, output, chat: (at_s, tokens, output, chat),
        st.floats(0, 5), st.integers(1, 900), st.integers(1, 40), st.integers(0, 3),
    ), min_size=1, max_size=25,
)  # fmt: skip


@settings(max_examples=25)
@given(drawn=REQUESTS, rule=st.sampled_from(sorted(RULES)), kinds=st.sampled_from(["auto", "split", "all"]))
def test_every_request_is_answered_and_nothing_stays(
    drawn: list[tuple[float, int, int, int]], rule: str, kinds: str
) -> None:
    requests = [
        PlacedRequest(
            f"r{number}",
            at_s,
            tokens,
            output,
            tuple(f"{chat} {at}".encode() for at in range((tokens + output) // 16)),
            chain=PromptChain(
                "interactive", b"%d" % chat, (Link(b"%d" % chat, min(64, tokens)),), tokens, is_tokens=True
            ),
        )
        for number, (at_s, tokens, output, chat) in enumerate(drawn)
    ]
    counts = {"auto": (0, 2, 0), "split": (2, 0, 2), "all": (1, 1, 1)}[kinds]
    fleet = Simulation(
        {"prefill": (counts[0], SPEC), "auto": (counts[1], SPEC), "decode": (counts[2], SPEC)},
        [RULES[rule](), RULES[rule]()],
        [Tier(1e7, 0.0, 1000, 20, workers_of_host=1), Tier(1e6, 0.001, 1000, 50)],
    )
    for done in fleet.run(requests):
        assert done.request.at_s < done.first_s <= done.end_s
        assert done.pool_tokens + done.fetched_tokens < done.request.prompt_tokens
        assert done.itl_s == 0 or done.request.output_tokens > 1
    for worker in fleet.readers:
        worker.scheduler.check_integrity()
        assert not worker.sequences
    assert 1 <= compute_imbalance(fleet.readers) <= len(fleet.readers)
