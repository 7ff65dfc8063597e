"""Log probabilities of a prompt's tokens: transformers' own, whatever the chunks, the cache and the other sequences."""

import pytest
import torch

from penstock.config.settings import EngineSettings
from penstock.engine.engine import Engine
from penstock.engine.kernels import library
from penstock.engine.limits import check_prompt_logprobs
from penstock.engine.loading.loading import load_model
from penstock.engine.model.accelerate import accelerate_model
from penstock.engine.model.model import LoadedModel
from penstock.engine.sequence import Sequence
from penstock.engine.steps import hooks
from penstock.errors import InvalidRequest
from penstock.messages import MAX_LOGPROBS, Logprobs, Sampling
from tests.engine.helpers import drain, run_sequences, sequence

PROMPT = [5 + 37 * n % 900 for n in range(90)]
TOP = 3


def _engine(model: LoadedModel, **settings: int) -> Engine:
    return Engine(model, EngineSettings(dtype="float32", pool_mb=16, **settings))


def _ask(name: str = "asked", max_new_tokens: int = 1, **given: object) -> Sequence:
    return sequence(PROMPT, max_new_tokens, name=name, num_prompt_logprobs=TOP, **given)


def _values(logprobs: list[Logprobs]) -> list[list[float]]:
    return [[one.logprob, *(best.logprob for best in one.top)] for one in logprobs]


@pytest.fixture(scope="module")
def expected(demo: LoadedModel) -> list[Logprobs]:
    """What an engine finds with the whole prompt in one step."""
    engine, seq = _engine(demo), _ask()
    run_sequences(engine, [seq])
    return seq.prompt_logprobs


@pytest.mark.proof
@torch.inference_mode()
def test_they_are_those_of_transformers(demo: LoadedModel, expected: list[Logprobs]) -> None:
    demo.module.set_attn_implementation(demo.stock_attention)
    logits = demo.module(input_ids=torch.tensor([PROMPT])).logits[0]
    demo.module.set_attn_implementation(hooks.ATTENTION_NAME)
    values = torch.log_softmax(logits.double(), -1)
    assert len(expected) == len(PROMPT) - 1
    for position, one in enumerate(expected):
        assert one.logprob == pytest.approx(float(values[position, PROMPT[position + 1]]), abs=1e-4)
        best = values[position].topk(TOP)
        assert [entry.logprob for entry in one.top] == pytest.approx(best.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("step_tokens", [1, 7, 16, 33, 89, 90])
def test_chunks_and_other_sequences_change_nothing(
    demo: LoadedModel, expected: list[Logprobs], step_tokens: int
) -> None:
    engine, seqs = _engine(demo, max_step_tokens=step_tokens), [_ask("a"), _ask("b")]
    others = [sequence(PROMPT[n:60], 20, name=f"other-{n}") for n in range(3)]
    run_sequences(engine, [others[0], seqs[0], *others[1:], seqs[1]])
    for seq in seqs:
        assert len(seq.prompt_logprobs) == len(expected)
        for ours, theirs in zip(_values(seq.prompt_logprobs), _values(expected), strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)
        assert all(len(one.top) == TOP for one in seq.prompt_logprobs)
    assert not any(other.prompt_logprobs for other in others)


@pytest.mark.skipif(library.load_library() is None, reason="the kernels were not built")
def test_on_the_kernels_they_are_the_same_to_the_last_bit() -> None:
    model, found = accelerate_model(load_model(EngineSettings(dtype="float32"))), []
    for step_tokens in (256, 33, 7):
        seq = _ask()
        run_sequences(_engine(model, max_step_tokens=step_tokens), [sequence(PROMPT[3:60], 20, name="other"), seq])
        found.append(seq.prompt_logprobs)
    assert found[0] == found[1] == found[2]


def test_what_is_cached_is_computed_again(demo: LoadedModel, expected: list[Logprobs]) -> None:
    engine = _engine(demo)
    first, asked, later = sequence(PROMPT, 4, name="first"), _ask(max_new_tokens=4), sequence(PROMPT, 4, name="later")
    answers = [run_sequences(engine, [seq])[0] for seq in (first, asked, later)]
    assert asked.num_cached_tokens == 0
    assert later.num_cached_tokens > 0
    assert answers[0] == answers[1] == answers[2]
    assert _values(asked.prompt_logprobs) == _values(expected)


def test_a_preempted_prompt_goes_on_where_it_was(demo: LoadedModel, expected: list[Logprobs]) -> None:
    """What another sequence has cached meanwhile is beyond what it has computed, and is computed again."""
    engine = _engine(demo, max_step_tokens=20)
    engine.pool.allocate_blocks(engine.pool.num_blocks - 8)
    asked = _ask(priority_class="batch")
    engine.add_sequence(asked)
    engine.step()
    assert 0 < len(asked.prompt_logprobs) < len(expected)
    engine.add_sequence(sequence(PROMPT, 20, name="first"))
    drain(engine)
    assert asked.num_preemptions > 0
    assert len(asked.prompt_logprobs) == len(expected)
    for ours, theirs in zip(_values(asked.prompt_logprobs), _values(expected), strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)


def test_more_than_a_result_holds_is_refused_by_name() -> None:
    check_prompt_logprobs(Sampling(prompt_logprobs=1, max_tokens=1), MAX_LOGPROBS // 2)
    check_prompt_logprobs(Sampling(), MAX_LOGPROBS)
    for sampling in (Sampling(prompt_logprobs=2), Sampling(prompt_logprobs=1, logprobs=0, max_tokens=1)):
        with pytest.raises(InvalidRequest, match=r"prompt_logprobs: .*65,536"):
            check_prompt_logprobs(sampling, MAX_LOGPROBS // 2)
