"""Models whose layers keep a state: its bits depend on the tokens alone, and it travels with the KV."""

import random
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.config.settings import EngineSettings
from penstock.engine.contract import Loaded
from penstock.engine.engine import Engine
from penstock.engine.kernels.recurrence import Run
from penstock.engine.memory.states import StateLayout, StatePart, StateStorage
from penstock.engine.model.accelerate import accelerate_model
from penstock.engine.model.mixers import MAX_TOGETHER, DividedForward
from penstock.engine.model.model import LoadedModel
from penstock.engine.sequence import Sequence
from penstock.engine.serving import ServingEngine
from penstock.engine.steps import state_runs
from penstock.engine.steps.state_runs import Group, Piece
from penstock.errors import ModelLoadError, SequenceFailed
from penstock.messages import Sampling
from tests.draws import draw_cases
from tests.engine.helpers import GREEDY, GivenDrafts, drain, make_block_keys, make_tiny, needs_kernels
from tests.engine_contract.engines import Caller, serve
from tools.compatibility import make_loaded_model

NUM_NEW = 12
SAMPLED = Sampling(temperature=0.9, top_p=0.95, seed=3)
SIZES = {
    "qwen3_next": {
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    },
    "qwen3_5_moe_text": {"head_dim": 256},
}  # fmt: skip
LENGTHS = (70, 33, 1, 48, 17, 90)


@pytest.fixture(scope="module", params=[pytest.param("lfm2", marks=pytest.mark.proof), "bamba", "zamba", "qwen3_next"])
def model(request: pytest.FixtureRequest) -> LoadedModel:
    """Tiny models with convolutions alone, a scan in chunks, one that cannot go on in chunks, and a delta rule."""
    tiny = make_tiny(request.param, 1, **SIZES.get(request.param, {}))
    model = accelerate_model(make_loaded_model(request.param, tiny))
    return replace(model, content_fingerprint="5a" * 32)


def make_prompts(model: LoadedModel) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(model.vocab_size, (length,), generator=generator).tolist() for length in LENGTHS]
    return [*prompts, [*prompts[0][:64], *prompts[1]]]


def make_engine(model: LoadedModel, **settings: Any) -> Engine:
    values = {"dtype": "float32", "pool_mb": 16, "max_batch": 8, **settings}
    return Engine(model, EngineSettings(**values), quarantine=False)


def make_sequence(prompt: list[int], number: int, said: list[int] | None = None) -> Sequence:
    sampling = SAMPLED if number % 2 else GREEDY
    seq = Sequence(
        f"seq-{number}", prompt, sampling=sampling, seed=number, max_new_tokens=NUM_NEW,
        output_token_ids=said or (), block_keys=make_block_keys(prompt),
    )  # fmt: skip
    seq.prompt_key = repr(prompt).encode()
    return seq


def read_state(engine: Engine, seq: Sequence) -> bytes:
    """Return the state of a sequence that has just said its last token."""
    assert engine.storage.states is not None
    return bytes(engine.storage.states.view_row(seq.state_row))


def run_alone(model: LoadedModel, prompt: list[int], number: int) -> tuple[list[int], bytes]:
    engine, seq = make_engine(model), make_sequence(prompt, number)
    engine.add_sequence(seq)
    while engine.has_work():
        engine.step()
    return seq.output_token_ids, read_state(engine, seq)


def run_together(engine: Engine, seqs: list[Sequence], num_new: int = NUM_NEW) -> list[tuple[list[int], bytes]]:
    """Run sequences, and return the tokens of each and its state when it had said the last of them."""
    states: dict[Sequence, bytes] = {}
    for seq in seqs:
        engine.add_sequence(seq)
    while engine.has_work():
        for item in engine.step():
            if item.seq.num_output_tokens == num_new and item.seq not in states:  # its last step may give it several
                states[item.seq] = read_state(engine, item.seq)
                engine.remove_sequence(item.seq)
        engine.scheduler.check_integrity()
        assert engine.states is not None
        engine.states.pool.check_integrity()
    return [(seq.output_token_ids, states[seq]) for seq in seqs]


@needs_kernels
def test_tokens_and_states_depend_on_no_batch_chunk_prefix_or_resumption(model: LoadedModel) -> None:
    prompts = make_prompts(model)
    alone = [run_alone(model, prompt, number) for number, prompt in enumerate(prompts)]
    seqs = [make_sequence(prompt, number) for number, prompt in enumerate(prompts)]
    for max_step_tokens in (9, 50):
        engine = make_engine(model, max_step_tokens=max_step_tokens)
        assert run_together(engine, [copy_sequence(seq) for seq in seqs]) == alone
        again = [copy_sequence(seq) for seq in seqs[::-1]]
        assert run_together(engine, again) == alone[::-1]
        assert [seq.num_cached_tokens for seq in again] == [96, 80, 16, 32, 0, 32, 64], "from snapshots"
    resumed = [make_sequence(seq.token_ids, n, alone[n][0][: 1 + n]) for n, seq in enumerate(seqs)]
    assert run_together(make_engine(model), resumed) == alone


def copy_sequence(seq: Sequence) -> Sequence:
    return make_sequence(seq.token_ids[: seq.num_prompt_tokens], int(seq.id.removeprefix("seq-")))


def list_limits(model: LoadedModel) -> set[int]:
    """Return of how many sequences the model's mixers read a token at once."""
    forwards = [part.forward for part in model.module.modules()]
    return {forward.max_together for forward in forwards if isinstance(forward, DividedForward)}


@needs_kernels
@pytest.mark.parametrize("name", ["lfm2", "bamba", "nemotron_h", "jamba", "qwen3_next", "qwen3_5_text", "kimi_linear"])
def test_tokens_of_several_sequences_are_read_at_once(name: str) -> None:
    assert list_limits(accelerate_model(make_loaded_model(name, make_tiny(name, 1)))) == {MAX_TOGETHER}


@needs_kernels
@pytest.mark.parametrize(
    "name", ["falcon_h1", "granitemoehybrid", "lfm2_moe", "olmo_hybrid", "qwen3_5_moe_text", "zamba2"]
)
def test_rows_that_depend_on_no_others_are_found(name: str) -> None:
    model = accelerate_model(make_loaded_model(name, make_tiny(name, 1, **SIZES.get(name, {}))))
    assert make_engine(model).speculates


@needs_kernels
@pytest.mark.parametrize("flaw", ["right guesses are not read", "wrong guesses are kept"])
def test_a_load_finds_that_guesses_change_a_state(flaw: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if flaw == "right guesses are not read":
        monkeypatch.setattr(StateStorage, "read_right_guesses", lambda self: None)
    else:
        monkeypatch.setattr(state_runs, "Run", lambda row, first, length, kept: Run(row, first, length, length))
    model = accelerate_model(make_loaded_model("lfm2", make_tiny("lfm2", 1)))
    assert model.native is not None
    assert model.native.has_states
    assert not make_engine(model).speculates


@needs_kernels
@pytest.mark.parametrize("name", ["kimi_linear", "nemotron_h"])
def test_nothing_is_drafted_where_torch_sums_over_rows(name: str) -> None:
    """Attention or experts run on its operators."""
    model = accelerate_model(make_loaded_model(name, make_tiny(name, 1)))
    assert not make_engine(model).speculates


@needs_kernels
@pytest.mark.parametrize("least", [1, 2], ids=["other than transformers", "other for several"])
def test_what_tokens_read_at_once_would_change_stays_apart(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    read_part = DividedForward._read_part

    def read_wrongly(self: DividedForward, step: Any, part: Piece | Group, *rest: Any) -> torch.Tensor:
        found: torch.Tensor = read_part(self, step, part, *rest)
        if isinstance(part, Group) and len(part.rows) >= least:
            step.storage.states.data[step.batch.plan[0][0].state_row, :4] += 1
        return found

    monkeypatch.setattr(DividedForward, "_read_part", read_wrongly)
    assert list_limits(accelerate_model(make_loaded_model("bamba", make_tiny("bamba", 1)))) == {0}


def test_preempted_sequences_go_on_from_snapshots(model: LoadedModel) -> None:
    prompts = make_prompts(model)
    alone = [run_alone(model, prompt, number)[0] for number, prompt in enumerate(prompts)]
    engine = make_engine(model, max_step_tokens=50)
    engine.pool.allocate_blocks(engine.pool.num_blocks - 12)  # they belong to no sequence, so the pool is smaller
    seqs = [make_sequence(prompt, number) for number, prompt in enumerate(prompts)]
    for seq in seqs:
        engine.add_sequence(seq)
    drain(engine)
    assert engine.scheduler.num_preemptions
    assert [seq.output_token_ids for seq in seqs] == alone


def test_after_a_failed_step_states_are_computed_again(model: LoadedModel) -> None:
    prompts = make_prompts(model)[:3]
    alone = [run_alone(model, prompt, number)[0] for number, prompt in enumerate(prompts)]
    engine, left = Engine(model, EngineSettings(dtype="float32", pool_mb=16)), [2]
    run_step = engine.runner.run_step

    def fail_at_the_end(batch: Any) -> torch.Tensor:
        logits = run_step(batch)
        if all(seq.num_output_tokens == 4 for seq, _ in batch.plan) and left[0]:
            left[0] -= 1
            raise RuntimeError("the step failed")
        return logits

    engine.runner.run_step = fail_at_the_end  # type: ignore[method-assign]
    seqs = [make_sequence(prompt, number) for number, prompt in enumerate(prompts)]
    for seq in seqs:
        engine.add_sequence(seq)
    failed = []
    while engine.has_work():
        try:
            engine.step()
        except SequenceFailed as error:
            failed.append(error.seq)
            engine.remove_sequence(error.seq)
    assert left == [0]
    assert len(failed) == 1, "the one that failed alone, too"
    assert all(seq in failed or seq.output_token_ids == tokens for seq, tokens in zip(seqs, alone, strict=True))


@pytest.fixture(scope="module", params=["lfm2", "bamba", "jamba", "qwen3_next"])
def drafting(request: pytest.FixtureRequest) -> LoadedModel:
    """Tiny models with all kinds of states whose rows depend on no others, and a snapshot every 64 tokens."""
    tiny = make_tiny(request.param, 1, **SIZES.get(request.param, {}))
    model = accelerate_model(make_loaded_model(request.param, tiny))
    assert model.layout.states is not None
    return replace(model, layout=replace(model.layout, states=replace(model.layout.states, interval_tokens=64)))


@needs_kernels
@pytest.mark.parametrize(
    ("max_batch", "step_tokens", "num_blocks"), draw_cases([(1, 256, 0), (8, 70, 0), (6, 256, 12)], 1)
)
def test_drafts_change_no_token_and_no_state(
    drafting: LoadedModel, max_batch: int, step_tokens: int, num_blocks: int
) -> None:
    """In batches, where sequences are preempted, and where they go on from a log and from snapshots behind drafts."""
    num_new, chance = 40, random.Random(max_batch)
    generator = torch.Generator().manual_seed(6)
    prompts = [
        torch.randint(drafting.vocab_size, (length,), generator=generator).tolist()
        for length in (70, 33, 1, 58, 60, 62, 88)
    ]

    def make(number: int, known: list[int], num_said: int = 0) -> Sequence:
        prompt, sampling = prompts[number], SAMPLED if number % 2 else GREEDY
        seq = Sequence(
            f"seq-{number}", prompt, sampling=sampling, seed=number, max_new_tokens=num_new,
            output_token_ids=known[:num_said], block_keys=make_block_keys(prompt + known), is_suspect=number == 6,
        )  # fmt: skip
        seq.prompt_key = repr(prompt).encode()
        if known:
            seq.drafter = GivenDrafts(len(prompt), known, chance, drafting.vocab_size)
        return seq

    def run(engine: Engine, seqs: list[Sequence]) -> list[tuple[list[int], bytes]]:
        return run_together(engine, seqs, num_new)

    plain = make_engine(drafting, speculate=False)
    right = [answer for number in range(len(prompts)) for answer in run(plain, [make(number, [])])]
    engine = make_engine(drafting, max_batch=max_batch, max_step_tokens=step_tokens)
    if num_blocks:
        engine.pool.allocate_blocks(engine.pool.num_blocks - num_blocks)  # they belong to no sequence
    assert run(engine, [make(number, known) for number, (known, _) in enumerate(right)]) == right
    assert 0 < engine.num_accepted_tokens < engine.num_drafted_tokens
    assert not num_blocks or engine.scheduler.num_preemptions
    resumed = [make(number, known, 5 * number) for number, (known, _) in enumerate(right)]
    assert run(engine, resumed) == right
    assert num_blocks or [seq.num_cached_tokens for seq in resumed] == [64, 32, 0, 58, 60, 62, 80]


@pytest.fixture
def line(model: LoadedModel, tmp_path: Path, exits: ExitStack) -> list[ServingEngine]:
    """A prefill engine and two decode engines over one store."""
    engines = [exits.enter_context(serve(make_engine(model), tmp_path)) for _ in range(3)]
    for engine in engines:
        engine.store.set_compute_speed(lambda: 1.0)  # so that everything found is worth reading
    return engines


def test_a_job_is_handed_over_with_its_state(model: LoadedModel, line: list[ServingEngine]) -> None:
    prompts = make_prompts(model)
    prefill, decode, another = map(Caller, line)
    samplings = [(SAMPLED if n % 2 else GREEDY).model_copy(update={"max_tokens": NUM_NEW}) for n in range(len(prompts))]
    alone = make_engine(model)
    seqs = [
        Sequence("alone", prompt, sampling=sampling, seed=sampling.seed or 0, max_new_tokens=NUM_NEW)
        for prompt, sampling in zip(prompts, samplings, strict=True)
    ]
    for seq in seqs:
        alone.add_sequence(seq)
    drain(alone)
    for number, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        prefill.add_prompt(str(number), prompt, sampling)
    prefill.run_to_end()
    requests: list[Sequence] = []
    for caller, num_generated in ((decode, 1), (another, 5)):
        for number, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
            said = seqs[number].output_token_ids[:num_generated]
            requests.append(caller.add(str(number), prompt, sampling, said))
        caller.run_to_end()
        assert caller.tokens == {str(number): seq.output_token_ids for number, seq in enumerate(seqs)}
        loaded = [event for event in caller.events if isinstance(event, Loaded)]
        assert len(loaded) == len(prompts)
        progress = [caller.progress[str(number)] for number in range(len(prompts))]
        assert [one.num_cached_tokens for one in progress] == [len(prompt) for prompt in prompts]
    tier = line[0].store.tiers[0]
    leased = {key.hash for request in requests for key in request.blocks.handed_keys()}
    assert tier.read_usage().leased == len(leased)
    for number, request in enumerate(requests):
        line[0].release_leases(f"job {number % len(prompts)}", request.blocks)
    prefill.add("last", [7], GREEDY.model_copy(update={"max_tokens": 2}))
    prefill.run_to_end()
    prefill.run_until(lambda: tier.read_usage().leased == 0, "the leases have ended")


def test_states_that_do_not_fit_are_told(model: LoadedModel) -> None:
    assert model.layout.states is not None
    few = make_engine(model, pool_mb=1, max_batch=256)
    assert few.settings.max_batch <= 256
    assert few.states is not None
    assert few.states.pool.num_blocks > few.settings.max_batch
    large = StateLayout((StatePart(0, "conv", 0, (2**18,), torch.float32),), 16, 256)
    with pytest.raises(ModelLoadError, match="has no room"):
        make_engine(replace(model, layout=replace(model.layout, states=large)), pool_mb=1)
