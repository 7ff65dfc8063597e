"""Shared by the engine's tests: sequences, running them, and the tokens of transformers itself."""

import hashlib
import os
import random
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING

from penstock.engine.drafts import Drafter
from penstock.engine.engine import Engine
from penstock.engine.kernels import library
from penstock.engine.kernels.library import Library
from penstock.engine.memory.staging import StagedPoolBlocks
from penstock.engine.model.model import LoadedModel
from penstock.engine.sequence import Sequence, State
from penstock.engine.steps import hooks
from penstock.engine.steps.choice import FirstOfEqual
from penstock.engine.weights.files import DEMO_MODEL
from penstock.errors import SettingsError
from penstock.grammar.state import GrammarState
from penstock.messages import Sampling
from tools.compatibility_cases import KEYWORDS, SIZES
from tools.handover import export_blocks, import_blocks
from tools.tiny import build_tiny_model, shrink_config

GREEDY = Sampling(temperature=0.0)
BLOCK = 16

if "TEST_KERNEL_LIBRARY" in os.environ:  # one with checks (tools/sanitize.py)
    assert not library.load_library.cache_info().misses, "the usual library was loaded before this one took its place"
    pytest.MonkeyPatch().setattr(library, "LIBRARY", Path(os.environ["TEST_KERNEL_LIBRARY"]))
needs_kernels = pytest.mark.skipif(library.load_library() is None, reason="no compiler, so no kernels")


@contextmanager
def use_instruction_set(name: str) -> Iterator[Library]:
    """Let the native kernels run on an instruction set for a while. Skips the test where there is none."""
    native = library.load_library()
    if native is None:
        pytest.skip("no compiler, so no kernels")
    before = native.isa
    try:
        native.select_isa(name)
    except SettingsError:
        pytest.skip(f"this processor has no {name}")
    yield native
    native.select_isa(before)
    native.set_threads(1)


def save_model(directory: Path, config: Any) -> Path:
    """Write a random model of a configuration of transformers, with the demo model's tokenizer."""
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForCausalLM
    auto.from_config(config).save_pretrained(directory)
    copy_tokenizer(directory)
    return directory


def make_small_model(directory: Path) -> Path:
    """Write a random model of two layers, with the demo model's tokenizer."""
    config: Any = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=64,
        vocab_size=1024, max_position_embeddings=256, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return save_model(directory, config)


def copy_tokenizer(directory: Path) -> None:
    """Copy the demo model's tokenizer into a directory."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, directory / name)


def make_tiny(architecture: str, seed: int = 0, **sizes: int) -> Any:
    """Return a tiny random module of an architecture, as transformers makes it."""
    config = CONFIG_MAPPING[architecture](**KEYWORDS.get(architecture, {}))
    auto: Any = transformers.AutoModelForCausalLM
    small = shrink_config(config, {**SIZES.get(architecture, {}), **sizes})
    return build_tiny_model(auto._model_mapping[type(config)], small, seed, torch.device("cpu"))


class GivenDrafts(Drafter):
    """Drafts the sequence's own answer, known from elsewhere, with wrong tokens in it."""

    def __init__(self, num_prompt_tokens: int, answer: list[int], chance: random.Random, most: int = 900) -> None:
        """Wrong tokens are below `most`."""
        super().__init__()
        self._num_prompt_tokens, self._answer, self._chance, self._most = num_prompt_tokens, answer, chance, most

    def propose_tokens(
        self, token_ids: list[int], grammar: GrammarState | None, max_tokens: int
    ) -> tuple[list[int], list[float]]:
        first = len(token_ids) - self._num_prompt_tokens
        tokens = self._answer[first : first + self._chance.randrange(max_tokens + 1)]
        draft = [self._chance.randrange(3, self._most) if self._chance.random() < 0.15 else token for token in tokens]
        return draft, [1.0] * len(draft)


def make_block_keys(prompt: list[int], block_size: int = BLOCK) -> list[bytes]:
    """Return the keys of the full blocks of a prompt, as a worker makes them."""
    keys, key = [], b""
    for end in range(block_size, len(prompt) + 1, block_size):
        key = hashlib.sha256(key + repr(prompt[end - block_size : end]).encode()).digest()
        keys.append(key)
    return keys


def sequence(prompt: list[int], max_new_tokens: int = 12, *, name: str = "seq", **given: Any) -> Sequence:
    values: dict[str, Any] = {"sampling": GREEDY, "seed": 7, "block_keys": make_block_keys(prompt), **given}
    return Sequence(name, prompt, max_new_tokens=max_new_tokens, **values)


def stage_blocks(engine: Engine, keys: list[bytes]) -> StagedPoolBlocks:
    """Stage blocks for `keys`; there must be capacity at once."""
    staged = engine.stage_blocks(keys)
    assert staged is not None
    return staged


def drain(engine: Engine, after_step: Callable[[], None] = lambda: None) -> None:
    """Step until the engine is idle, and remove sequences that are done."""
    while engine.has_work():
        for item in engine.step():
            if item.seq.state is State.DONE:
                engine.remove_sequence(item.seq)
        after_step()


def run_sequences(engine: Engine, seqs: Iterable[Sequence], *, remove: bool = True) -> list[list[int]]:
    """Add all sequences, step until idle, and return the outputs."""
    seqs = list(seqs)
    for seq in seqs:
        engine.add_sequence(seq)
    while engine.has_work():
        for sampled in engine.step():
            if remove and sampled.seq.num_output_tokens == sampled.seq.max_new_tokens:
                engine.remove_sequence(sampled.seq)
    engine.pool.check_integrity()
    return [seq.output_token_ids for seq in seqs]


def hand_over(first: Engine, second: Engine, seq: Sequence) -> Sequence:
    """Import a prompt's KV into the second engine, and return the decode sequence with the first token given."""
    prompt = seq.token_ids[: seq.num_prompt_tokens]
    copy = sequence(
        prompt,
        seq.max_new_tokens,
        output_token_ids=seq.output_token_ids[:1],
        sampling=seq.sampling,
        seed=seq.seed,
        block_keys=make_block_keys(prompt, first.settings.block_size),
    )
    num_blocks = import_blocks(second, copy, export_blocks(first, seq))
    assert num_blocks == len(copy.block_keys), "no room for what is handed over"
    return copy


@torch.inference_mode()
def generate_with_transformers(model: LoadedModel, prompts: list[list[int]], num_new: int) -> list[list[int]]:
    """Return transformers' own greedy tokens, one prompt at a time, with its own attention."""
    model.module.set_attn_implementation(model.stock_attention)
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with FirstOfEqual():
            output = model.module.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_new, do_sample=False
            )
        answers.append(output[0, len(prompt) :].tolist())
    model.module.set_attn_implementation(hooks.ATTENTION_NAME)
    return answers
