"""Our engine, and which of its tokens depend on the batch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.peers.workload import MAX_BATCH, Request
from penstock.config.settings import EngineSettings
from penstock.engine.engine import Engine
from penstock.engine.opening import open_engine
from penstock.engine.sequence import Sequence
from penstock.messages import Sampling
from tools.handover import export_blocks, import_blocks

STEP_TOKENS = 2048
_GREEDY = Sampling(temperature=0.0, ignore_eos=True)
_DRAWN = Sampling(temperature=1.0, ignore_eos=True)


def prepare(model: Path, form: str = "") -> Path:
    """The directory as it is, or the GGUF file that llama.cpp was given in this form."""
    return model / f"{form}.gguf" if form else model


def load(*, model: Path, threads: int, pool_mb: int, **more: str) -> "Penstock":
    """The engine, with a batch and a token budget as the others have them; `more` are other settings of it."""
    settings = EngineSettings.model_validate(
        {"model": str(model), "dtype": "bfloat16", "device": "cpu", "threads": threads, "pool_mb": pool_mb,
         "max_batch": MAX_BATCH, "max_step_tokens": STEP_TOKENS, **more}
    )  # fmt: skip
    engine = open_engine(settings)
    engine.pool_mapping.wait_until_done()  # the others touch their pools at the start too
    return Penstock(engine)


class Penstock:
    """The engine in this process."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def run(self, requests: list[Request], on_step: Callable[[list[int]], None], temperature: float) -> list[list[int]]:
        """Add all, and step until nothing is left."""
        sampling = Sampling(temperature=temperature, ignore_eos=True)
        seqs = [_sequence(index, *request, sampling) for index, request in enumerate(requests)]
        _drive(self._engine, seqs, on_step)
        return [seq.output_token_ids for seq in seqs]

    def flips(self, prompts: list[list[int]], num_new: int) -> dict[str, float]:
        """By way of running, the share of tokens that are other ones than those of each prompt on its own.

        Half of the prompts are answered greedily, half with draws. A token counts whatever the reason: after one that
        differs, the following ones differ too.
        """
        alone = [self._generate_tokens([index], prompts, num_new)[0] for index in range(len(prompts))]
        everyone = list(range(len(prompts)))
        ways: dict[str, Callable[[], list[list[int]]]] = {
            "batched": lambda: self._generate_tokens(everyone, prompts, num_new),
            "chunks of 48": lambda: self._generate_tokens(everyone, prompts, num_new, max_step_tokens=48),
            "handed over": lambda: self._generate_handed_over(prompts, num_new),
            "one thread": lambda: self._generate_tokens(everyone, prompts, num_new, threads=1),
        }
        return {way: _share(tokens(), alone) for way, tokens in ways.items()}

    def _open_variant(self, **changes: Any) -> Engine:
        """Another engine on the same weights; pool and threads are its own."""
        return Engine(self._engine.model, self._engine.settings.model_copy(update=changes))

    def _generate_tokens(
        self, which: list[int], prompts: list[list[int]], num_new: int, **changes: Any
    ) -> list[list[int]]:
        seqs = [_sequence(index, prompts[index], num_new, _sampling(index)) for index in which]
        _drive(self._open_variant(**changes) if changes else self._engine, seqs)
        if changes:
            self._engine = self._open_variant()  # its threads again
        return [seq.output_token_ids for seq in seqs]

    def _generate_handed_over(self, prompts: list[list[int]], num_new: int) -> list[list[int]]:
        """First tokens from one pool, all others from another that got the KV as bytes."""
        first, second = self._engine, self._open_variant()
        seqs = [_sequence(index, prompt, num_new, _sampling(index)) for index, prompt in enumerate(prompts)]
        _step_to_first_tokens(first, seqs)
        copies = [_hand_over(first, second, seq) for seq in seqs]
        for seq in seqs:
            first.remove_sequence(seq)
        _drive(second, copies)
        return [seq.output_token_ids for seq in copies]


def _hand_over(first: Engine, second: Engine, seq: Sequence) -> Sequence:
    """The sequence as the second engine goes on with it: the prompt's KV as bytes, and the first token."""
    prompt, size = seq.token_ids[: seq.num_prompt_tokens], first.settings.block_size
    copy = Sequence(
        seq.id, prompt, sampling=seq.sampling, seed=seq.seed, max_new_tokens=seq.max_new_tokens,
        output_token_ids=seq.output_token_ids[:1],
        block_keys=[repr(prompt[:end]).encode() for end in range(size, len(prompt) + 1, size)],
    )  # fmt: skip
    import_blocks(second, copy, export_blocks(first, seq))
    return copy


def _sequence(index: int, prompt: list[int], num_new: int, sampling: Sampling = _GREEDY) -> Sequence:
    return Sequence(str(index), prompt, sampling=sampling, seed=index, max_new_tokens=num_new)


def _sampling(index: int) -> Sampling:
    return _DRAWN if index % 2 else _GREEDY


def _step_to_first_tokens(engine: Engine, seqs: list[Sequence]) -> None:
    for seq in seqs:
        engine.add_sequence(seq)
    while any(seq.num_output_tokens == 0 for seq in seqs):
        engine.step()


def _drive(engine: Engine, seqs: list[Sequence], on_step: Callable[[list[int]], None] = lambda indices: None) -> None:
    """Until all sequences are done."""
    for seq in seqs:
        engine.add_sequence(seq)
    while engine.has_work():
        sampled = engine.step()
        for one in sampled:
            if one.seq.num_output_tokens == one.seq.max_new_tokens:
                engine.remove_sequence(one.seq)
        on_step([int(one.seq.id) for one in sampled])


def _share(tokens: list[list[int]], reference: list[list[int]]) -> float:
    pairs = [pair for ours, theirs in zip(tokens, reference, strict=True) for pair in zip(ours, theirs, strict=True)]
    return sum(one != other for one, other in pairs) / len(pairs)
