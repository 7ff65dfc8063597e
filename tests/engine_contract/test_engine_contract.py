"""What workers may expect of any engine (`penstock.engine.contract`)."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.contract import Loaded, Stored
from penstock.errors import InvalidRequest, PromptTooLong
from penstock.kvstore.tiers.host import HostTier
from penstock.messages import GrammarSpec, Request, Sampling
from sim.waiting import wait_for
from sim.workload import compute_answers, make_requests, start_grammar
from tests.draws import mark_some
from tests.engine_contract.engines import BLOCK, ENGINES, Caller, EngineUnderTest
from tests.kvstore.places import overwrite_block

NUM_NEW = 24
OpenEngine = Callable[..., EngineUnderTest]


@pytest.fixture(params=list(ENGINES))
def open_engine(request: pytest.FixtureRequest, tmp_path: Path, exits: ExitStack) -> OpenEngine:
    """Opens engines over one store. They are closed after the test."""

    def open_one(**settings: Any) -> EngineUnderTest:
        under_test = ENGINES[request.param](tmp_path, **settings)
        exits.callback(under_test.store.close)
        exits.enter_context(closing(under_test.engine))
        return under_test

    return open_one


@pytest.fixture
def under_test(open_engine: OpenEngine) -> EngineUnderTest:
    return open_engine()


@pytest.fixture
def caller(under_test: EngineUnderTest) -> Caller:
    return Caller(under_test.engine)


def make_work(count: int = 9) -> list[Request]:
    """Return greedy and sampled requests, whose prompts also end at a block, before its end, and in the first one."""
    made = make_requests(count, "contract")
    longest = prompt_of(made[-1])
    lengths = {count - 1: 3 * BLOCK, count - 2: 4 * BLOCK - 1, count - 3: 7}
    for index, length in lengths.items():
        made[index] = made[index].model_copy(update={"token_ids": longest[:length]})
    longer = {"max_tokens": NUM_NEW, "ignore_eos": True}
    return [one.model_copy(update={"sampling": one.sampling.model_copy(update=longer)}) for one in made]


def expect(work: list[Request]) -> dict[str, list[int]]:
    return {name: answer.token_ids for name, answer in compute_answers(work).items()}


def prompt_of(request: Request) -> list[int]:
    assert request.token_ids is not None
    return request.token_ids


def add_all(caller: Caller, work: list[Request], num_generated: int = 0, **given: Any) -> None:
    """Add all requests, after the first tokens that they have in the caller already."""
    for one in work:
        caller.add(one.id, prompt_of(one), one.sampling, caller.tokens.get(one.id, [])[:num_generated], **given)


def prefill_all(caller: Caller, work: list[Request]) -> None:
    """Compute all prompts for jobs, each with its first token."""
    for one in work:
        caller.add_prompt(one.id, prompt_of(one), one.sampling)
    caller.run_to_end()


@pytest.mark.proof
def test_tokens_are_those_of_each_request_alone(caller: Caller) -> None:
    work = make_work()
    add_all(caller, work)
    assert caller.run_to_end() == expect(work)
    assert caller.count_used_blocks() == 0


@pytest.mark.proof
def test_a_prompt_and_its_answer_may_be_computed_apart(under_test: EngineUnderTest, caller: Caller) -> None:
    """What another process computes of an answer finds all of its prompt's blocks, the partial one too."""
    work = make_work()
    prefill_all(caller, work)
    assert all(future is not None and future.done() for future in caller.stored.values())
    assert {event.context for event in caller.events if isinstance(event, Stored)} <= {one.id for one in work}
    under_test.empty_memory()
    caller.events.clear()
    add_all(caller, work, 1)
    assert caller.run_to_end() == expect(work)
    loaded = {event.context: event for event in caller.events if isinstance(event, Loaded)}
    assert {name: event.num_tier_blocks + event.num_pool_blocks for name, event in loaded.items()} == {
        one.id: -(-len(prompt_of(one)) // BLOCK) for one in work
    }
    assert under_test.store.stats.recomputed_jobs == 0


@pytest.mark.parametrize("num_generated", mark_some([2, 9, NUM_NEW - 1], pytest.mark.proof))
def test_another_engine_goes_on_after_any_token(
    under_test: EngineUnderTest, caller: Caller, num_generated: int
) -> None:
    """The tokens before are never sampled again."""
    work = make_work()
    add_all(caller, work)
    expected = dict(caller.run_to_end())
    under_test.empty_memory()
    caller.sampled.clear()
    add_all(caller, work, num_generated)
    assert caller.run_to_end() == expected == expect(work)
    assert len(caller.sampled) == len(work) * (NUM_NEW - num_generated)


@pytest.mark.parametrize("num_generated", mark_some([1, 9], pytest.mark.proof))
def test_a_request_may_leave_in_the_middle_of_its_answer(
    under_test: EngineUnderTest, caller: Caller, num_generated: int
) -> None:
    """An auto worker computes prompt and answer in one, until it hands off; the next one finds the full blocks."""
    work = make_work()
    add_all(caller, work, was_handed_off=False)

    def let_go() -> bool:
        for name in [name for name in caller.requests if len(caller.tokens[name]) >= num_generated]:
            under_test.engine.finish_request(name)
            del caller.requests[name]
        return not caller.requests

    caller.run_until(let_go, "all have left")
    caller.run_to_end()
    assert caller.count_used_blocks() == 0
    under_test.empty_memory()
    add_all(caller, work, num_generated)
    assert caller.run_to_end() == expect(work)
    for one in work:
        assert caller.progress[one.id].num_cached_tokens >= len(prompt_of(one)) // BLOCK * BLOCK


@pytest.mark.proof
def test_blocks_of_an_answer_are_stored_some_at_once(
    under_test: EngineUnderTest, caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the prompt at once, four of the answer, and the rest at its end."""
    longest, written = make_work()[-1], list[int]()
    store_blocks = under_test.store.store_blocks

    def count(blocks: Sequence[Any], **how: Any) -> None:
        written.append(len(blocks))
        store_blocks(blocks, **how)

    monkeypatch.setattr(under_test.store, "store_blocks", count)
    sampling = longest.sampling.model_copy(update={"max_tokens": 6 * BLOCK + 1})
    caller.add(longest.id, prompt_of(longest), sampling)
    caller.run_to_end()
    assert written == [3, 4, 2]


@pytest.mark.proof
@pytest.mark.parametrize("is_emptied", [False, True], ids=["in memory", "in the stores"])
def test_a_prefix_is_found(under_test: EngineUnderTest, caller: Caller, is_emptied: bool) -> None:
    one, *_, longest = make_work()
    prompt = prompt_of(longest)
    caller.add_prompt("first", prompt, longest.sampling)
    caller.run_to_end()
    if is_emptied:
        under_test.empty_memory()
    further = Request(id="second", token_ids=[*prompt, *prompt_of(one)], sampling=longest.sampling)
    add_all(caller, [further])
    assert caller.run_to_end()["second"] == expect([further])["second"]
    assert caller.progress["second"].num_cached_tokens == len(prompt) // BLOCK * BLOCK


@pytest.mark.parametrize("when", mark_some(["loading", "waiting", "planned", "running"], pytest.mark.proof))
def test_a_request_that_is_removed_says_no_more(open_engine: OpenEngine, when: str) -> None:
    under_test = open_engine(max_batch=2)
    caller = Caller(under_test.engine)
    gone, *others = make_work()
    if when == "waiting":
        add_all(caller, others)
        caller.run_until(lambda: caller.sampled, "the batch is full")
    add_all(caller, [gone])
    if when == "planned":
        caller.run_until(lambda: caller.tokens[gone.id], "it runs")
        assert under_test.engine.begin_step()
        caller.remove(gone.id)
        assert list(under_test.engine.finish_step()) == []
    else:
        if when == "running":
            caller.run_until(lambda: caller.tokens[gone.id], "it runs")
        caller.remove(gone.id)
    under_test.engine.remove_request(gone.id)  # nothing is there any more
    num_tokens = len(caller.tokens[gone.id])
    if when != "waiting":
        add_all(caller, others)
    expected = expect(others)
    found = caller.run_to_end()
    assert {name: found[name] for name in expected} == expected
    assert len(found[gone.id]) == num_tokens
    assert caller.count_used_blocks() == 0
    if when == "loading":
        assert gone.id not in {event.context for event in caller.events}


def test_more_than_fits_is_computed_one_after_the_other(open_engine: OpenEngine) -> None:
    """Requests that lose their blocks to others go on where they were."""
    under_test = open_engine(pool_mb=8)
    caller, (*_, sampled) = Caller(under_test.engine), make_work(8)
    work = [
        Request(
            id=f"r{number}",
            token_ids=prompt_of(make_work()[-1])[number : number + 60],
            sampling=sampled.sampling.model_copy(update={"max_tokens": 60, "seed": number}),
        )
        for number in range(16)
    ]
    add_all(caller, work)
    assert caller.run_to_end() == expect(work)
    assert under_test.count_preemptions() > 0
    assert len(caller.sampled) == 60 * len(work)


@pytest.mark.proof
def test_batch_makes_way_for_interactive(open_engine: OpenEngine) -> None:
    """The first token of an interactive request does not wait for any answer of batch, nor for its neighbours."""
    under_test = open_engine(max_batch=2)
    caller, engine = Caller(under_test.engine), under_test.engine
    quick, *slow = make_work()
    add_all(caller, slow, priority_class="batch")
    caller.run_until(lambda: sum(map(len, caller.tokens.values())) >= 2, "batch runs")
    assert engine.free_capacity("batch", 100) == 0
    assert engine.free_capacity("interactive", 100) == 2
    assert engine.count_waiting_tokens("interactive", 100) == 0
    assert engine.count_waiting_tokens("batch", 100) > engine.count_waiting_tokens("batch", 1) > 0
    add_all(caller, [quick])
    caller.run_until(lambda: caller.progress[quick.id].is_waiting is False, "it runs")
    num_others = len(caller.sampled)
    caller.run_until(lambda: caller.tokens[quick.id], "its first token")
    assert len(caller.sampled) - num_others <= 4
    assert caller.run_to_end() == expect([quick, *slow])


@pytest.mark.proof
def test_blocks_that_cannot_be_read_are_computed_again(under_test: EngineUnderTest, caller: Caller) -> None:
    work = make_work()
    prefill_all(caller, work)
    (tier,) = under_test.store.tiers
    assert isinstance(tier, HostTier)
    damaged = [entry.key for entry in tier.list_entries()][::3]
    for key in damaged:
        assert overwrite_block(tier, key, lambda stored: stored[: len(stored) // 2])
    under_test.empty_memory()
    add_all(caller, work, 1)
    assert caller.run_to_end() == expect(work)
    assert under_test.store.stats.recomputed_jobs > 0


@pytest.mark.proof
def test_a_jobs_blocks_are_leased_until_it_ends(under_test: EngineUnderTest, caller: Caller) -> None:
    one = make_work()[-2]
    request = caller.add_prompt(one.id, prompt_of(one), one.sampling)
    caller.run_to_end()
    (tier,) = under_test.store.tiers
    assert tier.read_usage().leased == len(request.blocks.prompt_keys()) == 4
    under_test.engine.release_leases(request.lease_owner, request.blocks)
    wait_for(lambda: tier.read_usage().leased == 0, "the leases end")


@pytest.mark.proof
def test_closing_writes_the_blocks_that_jobs_wait_for(under_test: EngineUnderTest, caller: Caller) -> None:
    """And drops everything else. Another worker goes on with the engine."""
    one, other = make_work()[-2:]
    caller.add_prompt(one.id, prompt_of(one), one.sampling)
    caller.run_until(lambda: caller.stored, "its first token")
    add_all(caller, [other])
    caller.requests.clear()
    under_test.engine.close()
    future = caller.stored[one.id]
    assert future is not None
    assert future.done()
    (tier,) = under_test.store.tiers
    assert tier.read_usage().leased == 4
    assert not under_test.engine.has_work()
    assert caller.count_used_blocks() == 0
    add_all(caller, [other])
    assert caller.run_to_end()[other.id] == expect([other])[other.id]


@pytest.mark.proof
def test_an_abandoned_engine_is_empty_and_settles_nothing(under_test: EngineUnderTest) -> None:
    """As after a crash: no job goes out. Who goes on gives the same tokens."""
    work = make_work()
    caller, engine = Caller(under_test.engine), under_test.engine
    add_all(caller, work[:4])
    caller.run_until(lambda: min(map(len, caller.tokens.values())) > 3, "all run")
    for one in work[4:]:
        caller.add_prompt(one.id, prompt_of(one), one.sampling)
    engine.begin_step()
    engine.abandon()
    assert not engine.has_work()
    assert not engine.is_moving_blocks()
    assert list(engine.collect_events()) == []
    assert caller.count_used_blocks() == 0
    assert not engine.begin_step()
    caller.requests.clear()
    for one in work:
        caller.add(one.id, prompt_of(one), one.sampling, caller.tokens[one.id])
    assert caller.run_to_end() == expect(work)


@pytest.mark.proof
def test_a_grammar_goes_on_where_it_was(caller: Caller) -> None:
    sampling = Sampling(
        max_tokens=60, temperature=1.0, seed=4, grammar=GrammarSpec(kind="regex", source="[a-c]{5}-[0-9]{3}")
    )
    prompt = prompt_of(make_work()[3])
    caller.add("whole", prompt, sampling, grammar=start_grammar(sampling))
    whole = caller.run_to_end()["whole"]
    assert caller.sampled[-1].is_grammar_ended
    said = whole[: len(whole) // 2]
    grammar = start_grammar(sampling)
    assert grammar is not None
    grammar.advance(said)
    caller.add("rest", prompt, sampling, said, grammar=grammar)
    assert caller.run_to_end()["rest"] == whole


@pytest.mark.proof
def test_log_probabilities_are_told_of_prompt_and_answer(caller: Caller) -> None:
    work = make_work()[3]
    sampling = work.sampling.model_copy(update={"logprobs": 2, "prompt_logprobs": 1, "temperature": 0.0})
    caller.add("asked", prompt_of(work), sampling, num_prompt_logprobs=1)
    tokens = caller.run_to_end()["asked"]
    told = [item.logprobs for item in caller.sampled]
    assert [one.top[0].token for one in told if one is not None] == tokens
    assert {len(one.top) for one in told if one is not None} == {2}
    assert len(caller.progress["asked"].prompt_logprobs) == len(prompt_of(work)) - 1


@pytest.mark.proof
def test_what_can_never_run_is_refused(under_test: EngineUnderTest, caller: Caller) -> None:
    length, greedy = under_test.engine.limits.max_length, Sampling(max_tokens=10, temperature=0.0)
    with pytest.raises(PromptTooLong):
        caller.add("long", [5] * (length - 9), greedy)
    with pytest.raises(PromptTooLong):  # the answer is limited by another engine, which could not compute it
        caller.add_prompt("job", [5] * (length - 9), greedy)
    with pytest.raises(InvalidRequest):
        caller.add("unknown", [5, under_test.engine.model.vocab_size], greedy)
    assert not under_test.engine.is_moving_blocks()
    caller.add("long", [5] * (length - 10), greedy)
    assert len(caller.run_to_end()["long"]) == 10
