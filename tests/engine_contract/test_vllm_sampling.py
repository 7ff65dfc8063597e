"""What a step within vLLM draws, without vLLM: a small engine of its form has this project's sampler in it."""

import sys
from collections.abc import Iterator
from concurrent.futures import Future
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.config.settings import EngineSettings
from penstock.engine.sequence import Sequence
from penstock.errors import ModelError, SequenceFailed
from penstock.messages import Sampling

VOCABULARY = 50
NUM_NEW = 6
NAMES = ("a", "b", "c", "d")
TAKEN_FROM_VLLM = {
    "vllm": ("SamplingParams",),
    "vllm.v1.request": ("Request",),
    "vllm.v1.sample.logits_processor": ("BatchUpdate", "LogitsProcessor", "MoveDirectionality"),
}
"""What `penstock.engine_vllm` takes from vLLM's modules for a step."""


class Given:
    """An object with the attributes that it is made with."""

    def __init__(self, *values: Any, **named: Any) -> None:
        self.values = values
        self.__dict__.update(named)


@pytest.fixture(autouse=True)
def without_vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the names that are taken from vLLM be there, whether or not it is installed."""
    for name, taken in TAKEN_FROM_VLLM.items():
        module = ModuleType(name)
        for one in taken:
            setattr(module, one, type(one, (Given,), {}))
        monkeypatch.setitem(sys.modules, name, module)
    own = ("penstock.engine_vllm.sampler", "penstock.engine_vllm.rank")
    before = {name: sys.modules.pop(name, None) for name in own}
    yield
    for name in own:
        sys.modules.pop(name, None)
        if (module_before := before[name]) is not None:
            sys.modules[name] = module_before


class SmallVllm:
    """Has of vLLM's `EngineCore`, scheduler and executor what a step asks for. All requests are in each step.

    `damage` is called with the row of a sequence's logits, its name, and how many tokens it has.
    """

    def __init__(self, damage: Any) -> None:
        from penstock.engine_vllm.rank import RankExtension
        from penstock.engine_vllm.sampler import PenstockSampler

        self._damage = damage
        self._rank, self._sampler = RankExtension(), PenstockSampler(None, torch.device("cpu"), False)
        self.scheduler = self.model_executor = self
        self.kv_cache_manager = SimpleNamespace(block_pool=None)
        self.requests: dict[str, Any] = {}
        self._rows: dict[str, int] = {}

    def add_request(self, given: Any) -> None:
        name, tokens, params, _ = given.values
        self.requests[name] = SimpleNamespace(tokens=tokens, num_tokens=len(tokens), num_computed_tokens=0)
        self._rows[name] = len(self._rows)
        self._sampler.update_state(Given(removed=[], added=[(self._rows[name], params)], moved=[]))

    def abort_requests(self, names: list[str]) -> None:
        for name in names:
            del self.requests[name]
            self._sampler.update_state(Given(removed=[self._rows[name]], added=[], moved=[]))

    def has_requests(self) -> bool:
        return bool(self.requests)

    def schedule(self) -> Any:
        new = [
            SimpleNamespace(req_id=n, num_computed_tokens=0)
            for n, r in self.requests.items()
            if not r.num_computed_tokens
        ]
        counts = {name: one.num_tokens - one.num_computed_tokens for name, one in self.requests.items()}
        for one in self.requests.values():
            one.num_computed_tokens = one.num_tokens
        return SimpleNamespace(
            num_scheduled_tokens=counts, total_num_scheduled_tokens=sum(counts.values()), preempted_req_ids=set(),
            scheduled_new_reqs=new, scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
        )  # fmt: skip

    def collective_rpc(self, name: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return [getattr(self._rank, name)(*args)]

    def execute_model(self, output: Any, *, non_block: bool) -> "Future[dict[str, int]]":
        logits = torch.zeros(len(self._rows), VOCABULARY)
        for name in output.num_scheduled_tokens:
            tokens = self.requests[name].tokens
            row = logits[self._rows[name]]
            row.copy_(torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(hash(tuple(tokens)))))
            self._damage(row, name.rpartition("-")[2], len(tokens))
        logits = self._sampler.apply(logits)
        done: Future[dict[str, int]] = Future()
        done.set_result({name: int(logits[self._rows[name]].argmax()) for name in output.num_scheduled_tokens})
        return done

    def update_from_output(self, output: Any, drawn: dict[str, int]) -> dict[int, Any]:
        for name, token in drawn.items():
            self.requests[name].tokens.append(token)
            self.requests[name].num_tokens += 1
        outputs = [
            SimpleNamespace(request_id=name, new_token_ids=[token], new_prompt_logprobs_tensors=None)
            for name, token in drawn.items()
        ]
        return {0: SimpleNamespace(outputs=outputs)}


def run_sequences(damage: Any, sampling: Sampling) -> tuple[dict[str, list[int]], dict[str, Exception]]:
    """Return the tokens of the sequences, and the errors of those that failed."""
    from penstock.engine_vllm.core import VllmCore

    model: Any = SimpleNamespace(context_length=100, eos_token_ids=frozenset())
    core = VllmCore(model, EngineSettings(), SmallVllm(damage), None)  # type: ignore[arg-type]
    seqs = [
        Sequence(name, [number + 1] * 5, sampling=sampling, seed=number, max_new_tokens=NUM_NEW)
        for number, name in enumerate(NAMES)
    ]
    for seq in seqs:
        core.add_sequence(seq)
    failed: dict[str, Exception] = {}
    while core.has_work():
        assert core.begin_step()
        try:
            sampled = core.finish_step()
        except SequenceFailed as error:
            failed[error.seq.id] = error.error
            core.remove_sequence(error.seq)
            continue
        for one in sampled:
            if one.seq.num_output_tokens == NUM_NEW:
                core.remove_sequence(one.seq)
    return {seq.id: seq.output_token_ids for seq in seqs}, failed


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_fail_their_sequences_alone(number: float, temperature: float) -> None:
    sampling = Sampling(temperature=temperature, ignore_eos=True)
    expected, failed = run_sequences(lambda *given: None, sampling)
    assert not failed
    assert all(len(tokens) == NUM_NEW for tokens in expected.values())

    def damage(row: torch.Tensor, name: str, num_tokens: int) -> None:
        if name in ("a", "c") and num_tokens == 5 + 2:
            row[7] = number

    tokens, failed = run_sequences(damage, sampling)
    assert {name: (type(error), str(error)) for name, error in failed.items()} == dict.fromkeys(
        ("a", "c"), (ModelError, "the model computed logits that are not finite")
    )
    assert tokens == expected | {name: expected[name][:2] for name in ("a", "c")}


def test_logits_that_a_model_forbids_are_no_fault() -> None:
    def forbid(row: torch.Tensor, name: str, num_tokens: int) -> None:
        row[1:] = -torch.inf

    tokens, failed = run_sequences(forbid, Sampling(temperature=1.0))
    assert not failed
    assert tokens == dict.fromkeys(NAMES, [0] * NUM_NEW)
