"""vLLM with models whose layers differ: windows, chunks, attention sinks, states. Each is shrunk from a published one.

A model keeps its pattern of layers, its experts and its kind of positions. Its window or chunk is longer than a block,
or as long as two.
"""

import random
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from penstock.engine.serving import ServingEngine
from penstock.engine.weights.files import DEMO_MODEL
from penstock.engine.weights.quantized import take_quantization
from penstock.engine_vllm.core import VllmCore
from penstock.errors import ModelLoadError
from penstock.messages import Sampling
from sim.adapters import generate_greedily
from sim.workload import ENGINE_SETTINGS
from tests.engine_contract.engines import BLOCK, Caller, EngineUnderTest
from tests.engine_contract.test_vllm import needs_vllm, opened
from tools.published import make_config, read_checkpoints
from tools.tiny import build_tiny_model, shrink_config

NUM_NEW = 12
GREEDY = Sampling(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
WINDOW, CHUNK = 40, 2 * BLOCK
SMALL: dict[str, Any] = {"max_position_embeddings": 1024, "head_dim": 32, "hidden_size": 128}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt-oss": (
        "openai/gpt-oss-20b",
        {
            "sliding_window": WINDOW, "intermediate_size": 64,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                "truncate": False, "original_max_position_embeddings": 32,
            },
        },
    ),
    "Llama 4 Scout": (
        "meta-llama/Llama-4-Scout-17B-16E-Instruct",
        {
            "attention_chunk_size": CHUNK,
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 500000.0, "factor": 16.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
            },
        },
    ),
    "Mistral": ("mistralai/Mistral-7B-Instruct-v0.1", {"sliding_window": WINDOW}),
}  # fmt: skip
"""By name: the published checkpoint, and sizes of its small copy."""
EDGES = (BLOCK, WINDOW, CHUNK, 3 * BLOCK, 4 * BLOCK)
LENGTHS = sorted({edge + by for edge in EDGES for by in (-1, 0, 1)} | {8, 200, 257})


def save_family(directory: Path, checkpoint: str, **given: Any) -> Path:
    """Save a small model of a published configuration, with the demo model's tokenizer. Returns its directory."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO_MODEL)
    config = deepcopy(make_config(read_checkpoints()[checkpoint]).get_text_config(decoder=True))
    take_quantization(config)
    config = shrink_config(config, {})
    for name, value in given.items():
        setattr(config, name, value)
    config.vocab_size, config.bos_token_id, config.eos_token_id, config.pad_token_id = len(tokenizer), None, 1, 0
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    module = build_tiny_model(kind, config, 2, torch.device("cpu"))
    for name, parameter in module.named_parameters():
        if name.endswith("sinks"):  # as strong as a token, and in bfloat16 as published: vLLM's CPU kernel rounds them
            parameter.copy_((2 * parameter).bfloat16().float())
    module.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By family: the directory of its model, made once."""

    @cache
    def save(family: str) -> Path:
        checkpoint, given = FAMILIES[family]
        return save_family(tmp_path_factory.mktemp("models") / "model", checkpoint, **SMALL | given)

    return save


@cache
def draw_and_answer(model: Path, length: int) -> tuple[list[int], list[int]]:
    """Return a prompt of the length, and the tokens of `generate()`."""
    module: Any = _load_module(model)
    prompt = random.Random(length).choices(range(3, module.config.vocab_size), k=length)
    return prompt, generate_greedily(module, prompt, NUM_NEW)


@cache
def _load_module(model: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


def get_core(under_test: EngineUnderTest) -> VllmCore:
    assert isinstance(under_test.engine, ServingEngine)
    assert isinstance(under_test.engine.core, VllmCore)
    return under_test.engine.core


def answer(under_test: EngineUnderTest, model: Path, lengths: list[int], num_said: int) -> dict[str, list[int]]:
    """Answer prompts together, each from a token on, and check that all of what is stored of them is found."""
    caller = Caller(under_test.engine)
    for length in lengths:
        prompt, said = draw_and_answer(model, length)
        caller.add(str(length), prompt, GREEDY, said[:num_said])
    tokens = dict(caller.run_to_end())
    assert not caller.failures
    if num_said:
        found = {name: progress.num_cached_tokens for name, progress in caller.progress.items()}
        assert found == {str(length): min(length, (length + num_said - 1) // BLOCK * BLOCK) for length in lengths}
    return tokens


@needs_vllm
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_are_those_of_generate_on_both_sides_of_windows_and_blocks(
    tmp_path: Path, models: Any, family: str
) -> None:
    """Whole, and from the store at several tokens once vLLM's own memory is empty."""
    model = models(family)
    right = {str(length): draw_and_answer(model, length)[1] for length in LENGTHS}
    with opened(tmp_path, "one rank", model=str(model)) as under_test:
        for num_said in (0, 1, NUM_NEW - 1):
            under_test.empty_memory()
            assert answer(under_test, model, LENGTHS, num_said) == right, f"from token {num_said} on"


@needs_vllm
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_have_one_block_under_a_name_and_memory_of_their_own(tmp_path: Path, models: Any, family: str) -> None:
    """The pool has as many blocks as fit, and what is written to one is in no layer of another."""
    with opened(tmp_path, "one rank", model=str(models(family))) as under_test:
        core = get_core(under_test)
        layout = core.model.layout
        assert core.num_blocks == ENGINE_SETTINGS.pool_mb * 2**20 // layout.block_bytes - 1
        # Numbers, as no bytes of broken ones are in blocks: vLLM's kernel multiplies what lies behind a prompt with 0.
        payloads = torch.randn(3, layout.block_bytes // 4).view(torch.uint8).numpy()
        blocks = core._pool.get_new_blocks(3)
        core._blocks.write_blocks([block.block_id for block in blocks], payloads)
        copies = core._blocks.copy_blocks([block.block_id for block in blocks], [BLOCK] * len(blocks))
        assert list(map(bytes, copies)) == [payload.tobytes() for payload in payloads]
        core._pool.free_blocks(blocks)


@needs_vllm
def test_layers_with_and_without_windows_are_planned_apart(tmp_path: Path, models: Any) -> None:
    with opened(tmp_path, "one rank", model=str(models("gpt-oss"))) as under_test:
        runner = get_core(under_test)._core.model_executor.driver_worker.worker.model_runner
        windows = {group.kv_cache_spec.sliding_window for groups in runner.attn_groups for group in groups}
        assert windows == {WINDOW, None}


@needs_vllm
@pytest.mark.parametrize(
    ("family", "before", "after"),
    [
        ("gpt-oss", "two by two", "one rank"),
        ("Llama 4 Scout", "two parts", "two by two"),
        ("Mistral", "one rank", "two stages"),
    ],
)
def test_a_family_goes_on_with_another_number_of_ranks(
    tmp_path: Path, models: Any, family: str, before: str, after: str
) -> None:
    model, lengths = models(family), [WINDOW + 1, CHUNK, 4 * BLOCK + 1]
    with opened(tmp_path, before, model=str(model)) as prefill:
        caller = Caller(prefill.engine)
        for length in lengths:
            caller.add_prompt(str(length), draw_and_answer(model, length)[0], GREEDY)
        caller.run_to_end()
        fingerprint = prefill.engine.model.fingerprint
    with opened(tmp_path, after, model=str(model)) as decode:
        decode.empty_memory()
        assert answer(decode, model, lengths, 1) == {
            str(length): draw_and_answer(model, length)[1] for length in lengths
        }
        assert decode.engine.model.fingerprint == fingerprint


@needs_vllm
@pytest.mark.parametrize(
    ("checkpoint", "given", "told"),
    [
        (
            "nvidia/Nemotron-H-8B-Base-8K",
            {},
            "keeps apart (FullAttentionSpec, MambaSpec): set PENSTOCK_ENGINE_KIND=own",
        ),
        ("Qwen/Qwen3-Next-80B-A3B-Instruct", {}, "keeps apart (FullAttentionSpec, MambaSpec)"),
        (FAMILIES["Llama 4 Scout"][0], {**SMALL, "attention_chunk_size": 48}, "within chunks of 48 tokens"),
    ],
    ids=["Mamba", "delta rule", "chunks that blocks do not divide"],
)
def test_a_family_that_cannot_be_served_is_refused(
    tmp_path: Path, checkpoint: str, given: dict[str, Any], told: str
) -> None:
    from penstock.engine_vllm.opening import open_vllm_core

    model = save_family(tmp_path / "model", checkpoint, **{"max_position_embeddings": 1024} | given)
    with pytest.raises(ModelLoadError) as refused:
        open_vllm_core(ENGINE_SETTINGS.model_copy(update={"block_size": BLOCK, "model": str(model)}))
    assert told in str(refused.value)
