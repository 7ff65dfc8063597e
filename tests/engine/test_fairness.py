"""Nobody starves, no tenant is held up by another, and nobody waits for nothing."""

from collections import Counter

import pytest

from penstock.engine.scheduling.fairness import FairQueue
from penstock.engine.scheduling.scheduler import AGING_STEPS
from penstock.engine.sequence import State
from tests.draws import mark_some
from tests.engine.schedules import ScheduledEngine, seq_of

pytestmark = pytest.mark.usefixtures("unknown_growth")


# Tenants


def _admitted_before(dummy: ScheduledEngine, name: str) -> Counter[str]:
    """Whose sequences are served until one of the tenant is."""
    served: Counter[str] = Counter()
    seen = set()
    while not served[name]:
        for seq, _ in dummy.step():
            if seq not in seen:
                seen.add(seq)
                served[seq.tenant] += 1
    return served


@pytest.mark.proof
def test_a_flood_of_one_tenant_does_not_delay_another() -> None:
    dummy = ScheduledEngine(max_batch=2)
    dummy.add(*(seq_of(8, 4, first=20 * i, tenant="flood") for i in range(50)))
    for _ in range(3):
        dummy.step()
    dummy.add(seq_of(8, 4, first=5000, tenant="other"))
    assert _admitted_before(dummy, "other")["flood"] <= 4  # two run already, two at most come before it


@pytest.mark.parametrize(
    ("length", "max_new_tokens", "weight"), mark_some([(64, 16, 1.0), (8, 4, 3.0)], pytest.mark.proof)
)
def test_tenants_get_tokens_by_weight_whatever_the_size_of_their_requests(
    length: int, max_new_tokens: int, weight: float
) -> None:
    dummy = ScheduledEngine(num_blocks=400, max_batch=4, budget=40)
    for i in range(300):
        dummy.add(seq_of(8, 4, first=20 * i, tenant="small"))
        seq = seq_of(length, max_new_tokens, first=10_000 + 100 * i, tenant="other")
        seq.weight = weight
        dummy.add(seq)
    tokens: Counter[str] = Counter()
    for _ in range(150):
        for seq, num in dummy.step():
            tokens[seq.tenant] += num + (num == 1)  # a decoded token costs twice
    assert tokens["other"] == pytest.approx(weight * tokens["small"], rel=0.2)


def test_being_away_earns_no_credit() -> None:
    queue = FairQueue()
    queue.push(seq_of(4, tenant="busy"))
    queue.charge_tenant("busy", 1000)
    late = seq_of(4, tenant="late")
    queue.push(late)
    assert queue.tokens_served("late") == 1000
    queue.charge_tenant("late", 1)
    assert queue.peek() is not late


def test_a_tenant_that_comes_again_keeps_what_it_had_too_much() -> None:
    queue = FairQueue()
    greedy, other = seq_of(4, tenant="greedy"), seq_of(4, tenant="other")
    queue.push(greedy)
    queue.push(other)
    queue.charge_tenant("greedy", 1000)
    queue.remove(greedy)
    queue.push(greedy)
    assert queue.tokens_served("greedy") == 1000
    assert queue.peek() is other


def test_when_nobody_waits_the_last_that_did_is_the_measure() -> None:
    queue = FairQueue()
    busy = seq_of(4, tenant="busy")
    queue.push(busy)
    queue.remove(busy)
    queue.charge_tenant("busy", 1000)
    queue.push(seq_of(4, tenant="late"))
    assert queue.tokens_served("late") == 1000


def test_tenants_that_are_gone_are_forgotten() -> None:
    queue = FairQueue()
    for i in range(100):
        seq = seq_of(4, tenant=f"tenant-{i}")
        queue.push(seq)
        queue.charge_tenant(seq.tenant, 10)
        queue.remove(seq)
    assert len(queue._served) <= 2


# Classes


def test_batch_work_does_not_starve_under_endless_interactive_load() -> None:
    dummy = ScheduledEngine(num_blocks=40, max_batch=4)
    batch = [seq_of(8, 6, priority_class="batch", first=50 * i) for i in range(3)]
    dummy.add(*batch)
    number, served = 1000, Counter[str]()
    while any(seq.state is not State.DONE for seq in batch):
        while dummy.scheduler.num_waiting < 12:
            number += 20
            dummy.add(seq_of(8, 10, first=number))
        plan = dummy.step()
        served.update(seq.priority_class for seq, _ in plan)
        assert sum(seq.priority_class == "batch" for seq, _ in plan) <= 1
        assert dummy.scheduler._num_steps < 4 * 2 * AGING_STEPS
    assert served["interactive"] > 20 * served["batch"]


def test_a_batch_sequence_that_is_preempted_again_and_again_ends() -> None:
    dummy = ScheduledEngine(num_blocks=12, max_batch=4)
    batch = seq_of(8, 12, priority_class="batch")
    dummy.add(batch)
    number = 1000
    while batch.state is not State.DONE:
        if dummy.scheduler.num_waiting < 2:
            number += 50
            dummy.add(seq_of(15, 6, first=number))
        dummy.step()
        assert dummy.scheduler._num_steps < 4 * AGING_STEPS
    assert batch.num_preemptions > 0


@pytest.mark.parametrize(("num_blocks", "max_batch"), [(100, 3), (9, 8)])
def test_batch_work_makes_way_for_interactive_work_at_once(num_blocks: int, max_batch: int) -> None:
    dummy = ScheduledEngine(num_blocks, max_batch=max_batch)
    batch = [seq_of(8, 4, priority_class="batch", first=50 * i) for i in range(3)]
    dummy.add(*batch)
    dummy.step()
    interactive = seq_of(8, 4, first=500)
    dummy.add(interactive)
    assert (interactive, 8) in dummy.step()
    assert batch[-1].state is State.WAITING
    assert batch[0].state is State.RUNNING


# The line


def _until_in(*, others: bool) -> tuple[int, int]:
    """In which step a large sequence behind two long-lived ones comes in, and how many small ones were done by then."""
    dummy = ScheduledEngine(num_blocks=12)
    large = seq_of(32, 4, first=500)
    dummy.add(seq_of(8, 12), seq_of(8, 16, first=50), large)
    small = [seq_of(2, 3, first=1000 + 10 * i) for i in range(40)]
    if others:
        dummy.add(*small)
    num_steps = dummy.run(until=lambda: large.state is State.RUNNING)
    return num_steps, sum(seq.state is State.DONE for seq in small)


def test_small_ones_pass_a_large_one_and_do_not_delay_it() -> None:
    alone, none_done = _until_in(others=False)
    passed, some_done = _until_in(others=True)
    assert passed == alone
    assert none_done == 0 < some_done


def test_a_guest_that_paused_makes_way() -> None:
    dummy = ScheduledEngine(num_blocks=4)
    first, large, guest = seq_of(3, 6), seq_of(8, 4, first=500), seq_of(3, 14, first=1000)
    dummy.add(first, large, guest)
    dummy.run(until=lambda: first.state is State.DONE)
    assert guest.num_computed_tokens == 8
    dummy.pool.allocate_blocks(2)
    dummy.budget = 3
    assert dummy.step() == [(large, 3)]
