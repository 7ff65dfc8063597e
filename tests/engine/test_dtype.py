"""The dtype of a model where the settings leave it open: it follows from the model and the machine."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3NextConfig

from penstock.config.settings import EngineSettings
from penstock.engine.loading import dtype as dtypes
from penstock.engine.loading.dtype import PARTLY_NATIVE, choose_dtype
from penstock.engine.loading.loading import load_stage_models, open_model
from penstock.engine.model.replacing import Replacer
from penstock.engine.opening import open_engine
from tests.engine.helpers import use_instruction_set

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96, "vocab_size": 128,
}  # fmt: skip
LLAMA = LlamaConfig(**SIZES, dtype=torch.bfloat16)
WITH_STATES = Qwen3NextConfig(**SIZES, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("config", "isa", "dtype", "reason"),
    [
        (LLAMA, "amx", torch.bfloat16, "no slower than float32 on amx"),
        (LLAMA, "avx2", torch.float32, "take longer on avx2"),
        (LLAMA, "avx512_bf16", torch.float32, "take longer on avx512_bf16"),
        (LLAMA, "avx512", torch.float32, "take longer on avx512"),
        (LLAMA, "plain", torch.float32, "take longer on plain"),
        (LLAMA, "", torch.float32, "same on all processors"),
        (WITH_STATES, "amx", torch.float32, PARTLY_NATIVE),
        (LlamaConfig(**SIZES, dtype=torch.float32), "amx", torch.float32, "same on all processors"),
        (LlamaConfig(**SIZES, dtype=torch.float16), "amx", torch.float32, "same on all processors"),
    ],
)
def test_it_follows_from_the_model_and_the_instruction_set(
    config: Any, isa: str, dtype: torch.dtype, reason: str
) -> None:
    chosen = choose_dtype("auto", config, CPU, isa)
    assert (chosen.dtype, chosen.is_open) == (dtype, dtype == torch.bfloat16)
    assert reason in chosen.reason


def test_what_is_set_holds_and_a_quantised_checkpoint_stays_in_float32() -> None:
    for name in ("float32", "bfloat16", "float16"):
        assert choose_dtype(name, LLAMA, CPU, "amx")[:2] == (getattr(torch, name), "PENSTOCK_ENGINE_DTYPE")
    assert choose_dtype("auto", LLAMA, CPU, "amx", is_quantized=True).dtype == torch.float32
    assert choose_dtype("auto", LLAMA, torch.device("cuda"))[:2] == (torch.bfloat16, "the model's own")


def test_where_float32_does_not_fit_the_machine_it_is_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtypes, "count_total_bytes", lambda: 256 * 2**20)
    for isa in ("avx512", "amx"):
        chosen = choose_dtype("auto", LLAMA, CPU, isa)
        assert (chosen.dtype, chosen.is_open) == (torch.bfloat16, False)
        assert chosen.reason.endswith("of 256")
    assert choose_dtype("auto", LLAMA, CPU).dtype == torch.float32, "torch's bfloat16 depends on the batch"


@pytest.fixture
def fast_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineSettings]:
    """Settings under which the demo model is computed in bfloat16, as if AVX2 were as fast in it as AMX is."""
    monkeypatch.setattr(dtypes, "BFLOAT16_ISAS", {"avx2"})
    with use_instruction_set("avx2"):
        yield EngineSettings(dtype="auto", isa="avx2", device="cpu", cache_dir=str(tmp_path), pool_mb=8, threads=1)


def test_one_line_says_all_choices(fast_settings: EngineSettings, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "penstock.engine"):
        model = open_engine(fast_settings).model
    assert (model.arithmetic, model.is_batch_invariant) == ("bfloat16 on avx2", True)
    (line,) = (line for line in caplog.messages if " computes in " in line)
    assert line == (
        "demo computes in bfloat16 (the model's own, no slower than float32 on avx2) on cpu by avx2 "
        "(PENSTOCK_ENGINE_ISA), with 1 threads (PENSTOCK_ENGINE_THREADS) and a KV pool of 8 MiB "
        "(PENSTOCK_ENGINE_POOL_MB)"
    )


def test_a_model_of_which_the_kernels_compute_a_part_is_loaded_again_in_float32(
    fast_settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Replacer, "build_native_model", lambda _: None)
    model = open_model(fast_settings)
    assert (model.dtype, model.dtype_reason, model.arithmetic) == (torch.float32, PARTLY_NATIVE, "float32")
    assert model.is_batch_invariant
    model = open_model(fast_settings.model_copy(update={"dtype": "bfloat16"}))
    assert (model.dtype, model.is_batch_invariant) == (torch.bfloat16, False), "as it was set"


def test_prompts_and_answers_have_one_dtype_and_say_the_same_arithmetic(fast_settings: EngineSettings) -> None:
    both = fast_settings.model_copy(update={"prefill_weights": "bf16", "weights": "int4"})
    answers, prompts = load_stage_models(both), load_stage_models(both, only_prompts=True)
    assert answers.dtype == prompts.dtype == torch.bfloat16
    assert answers.dtype_reason == prompts.dtype_reason
    assert answers.arithmetic == prompts.arithmetic
    assert answers.arithmetic.startswith("bfloat16, weights of prompts as they are stored, of answers int4 (version ")
    assert replace(answers, stage_forms=None, weight_form="int8").arithmetic.startswith(
        "bfloat16, weights in int8 (ver"
    )
