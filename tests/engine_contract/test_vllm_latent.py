"""vLLM with latent attention (MLA): blocks of latents are handed over, and what vLLM or a processor lacks is refused.

The models are the published ones by name, with fewer and smaller layers. They are computed in bfloat16, where a token
that is computed in a prompt is rounded otherwise than one of an answer. So each prompt is alone in its steps, and an
answer that goes on is compared with that of vLLM alone to the same tokens, which has the same blocks in its own cache.
"""

import base64
import importlib
import importlib.util
import json
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from penstock.engine.loading.description import load_tokenizer
from penstock.engine.weights.file_checks import check_tokenizer
from penstock.engine.weights.files import DEMO_MODEL
from penstock.engine_vllm.blocks import RankKV, combine_ranks
from penstock.engine_vllm.opening import CPU_LATENT_ARGUMENTS, open_vllm_core
from penstock.errors import ModelLoadError
from penstock.messages import Sampling
from sim.workload import ENGINE_SETTINGS
from tests.engine_contract.engines import BLOCK, Caller, EngineUnderTest, open_vllm

HAS_VLLM = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed: make test-vllm")
has_amx: Callable[[], bool] = torch.cpu._is_amx_tile_supported
needs_amx = pytest.mark.skipif(not has_amx(), reason="vLLM has no prefix cache for latent attention without AMX")
NUM_NEW = 24
LENGTHS = (7, BLOCK - 1, BLOCK, 2 * BLOCK + 9, 4 * BLOCK)
"""Tokens of the prompts."""
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
GREEDY = Sampling(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", **LATENT},
    "deepseek_v2": {"q_lora_rank": None, "n_group": 1, "topk_group": 1, **LATENT},
    "glm4_moe_lite": {"n_group": 1, "topk_group": 1, **LATENT},
}
"""By type. Kimi K2 is `deepseek_v3` with one group of experts."""


def make_latent_model(directory: Path, kind: str, **given: Any) -> Path:
    """Save a small model with latent attention, with the demo model's tokenizer. Returns its directory."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO_MODEL)
    small = {
        "vocab_size": len(tokenizer), "hidden_size": 128, "intermediate_size": 96, "moe_intermediate_size": 64,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512,
        "q_lora_rank": 64, "qk_nope_head_dim": 64, "v_head_dim": 64, "n_routed_experts": 8, "num_experts_per_tok": 2,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
        "initializer_range": 0.1,
    }  # fmt: skip
    config = transformers.AutoConfig.for_model(kind, **(small | given))
    torch.manual_seed(11)
    make: Any = transformers.AutoModelForCausalLM
    make.from_config(config).bfloat16().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@contextmanager
def opened(directory: Path, model: Path, **settings: Any) -> Iterator[EngineUnderTest]:
    under_test = open_vllm(directory, model=str(model), dtype="bfloat16", **settings)
    try:
        yield under_test
    finally:
        under_test.engine.close()
        under_test.store.close()


def make_prompts() -> dict[str, list[int]]:
    return {f"p{length}": [(7 * length + 5 * at * at) % 900 + 20 for at in range(length)] for length in LENGTHS}


def answer_each(under_test: EngineUnderTest, said: dict[str, list[int]]) -> tuple[dict[str, list[int]], list[int]]:
    """Return the tokens of each prompt, whose first ones are said, and how many of the prompt's were found."""
    tokens, num_found = dict[str, list[int]](), []
    for name, prompt in make_prompts().items():
        (caller := Caller(under_test.engine)).add(name, prompt, GREEDY, said.get(name, ()))
        tokens |= caller.run_to_end()
        num_found.append(caller.progress[name].num_cached_tokens)
    return tokens, num_found


@cache
def open_bare_vllm(model: Path) -> Any:
    """Open vLLM's own engine in this process. It stays, as its end would end what all engines here share."""
    from vllm import LLM

    return LLM(
        str(model), dtype="bfloat16", enforce_eager=True, block_size=BLOCK, max_num_seqs=4, seed=0,
        kv_cache_memory_bytes=64 * 2**20, disable_log_stats=True, max_num_batched_tokens=512,
        compilation_config=CPU_LATENT_ARGUMENTS["compilation_config"],
    )  # fmt: skip


def answer_by_vllm(model: Path, said: dict[str, list[int]]) -> dict[str, list[int]]:
    """Return the tokens that vLLM's own engine and sampler give, each prompt alone, with its own cache of prefixes."""
    from vllm import SamplingParams

    llm, answers = open_bare_vllm(model), {}
    for name, prompt in make_prompts().items():
        begun = said.get(name, [])
        params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW - len(begun), ignore_eos=True, detokenize=False)
        (found,) = llm.generate({"prompt_token_ids": prompt + begun}, params, use_tqdm=False)
        answers[name] = [*begun, *found.outputs[0].token_ids]
    return answers


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_latent_model(tmp_path_factory.mktemp("model"), "deepseek_v3", **FAMILIES["deepseek_v3"])


@needs_vllm
@needs_amx
def test_latents_are_handed_over_and_found_again(tmp_path: Path, deepseek: Path) -> None:
    """Split after the prompt, resumed at several tokens with KV from the store, and gone on with after a crash."""
    with opened(tmp_path, deepseek) as under_test:
        right = answer_by_vllm(deepseek, {})  # in this process, as opening vLLM here has set
        assert answer_each(under_test, {})[0] == right
        for num_said in (1, 2, 9, NUM_NEW - 1):
            under_test.empty_memory()
            said = {name: tokens[:num_said] for name, tokens in right.items()}
            tokens, num_found = answer_each(under_test, said)
            assert tokens == answer_by_vllm(deepseek, said), f"after {num_said} tokens"
            assert num_found == [min(one, (one + num_said - 1) // BLOCK * BLOCK) for one in LENGTHS]
        caller = Caller(under_test.engine)
        name, prompt = list(make_prompts().items())[-1]
        caller.add(name, prompt, GREEDY)
        caller.run_until(lambda: len(caller.tokens[name]) > 5, "it runs")
        under_test.engine.begin_step()
        under_test.engine.abandon()
    with opened(tmp_path, deepseek) as successor:
        successor.empty_memory()
        tokens, num_found = answer_each(successor, {name: caller.tokens[name]})
        assert tokens[name] == answer_by_vllm(deepseek, {name: caller.tokens[name]})[name]
        assert num_found[-1] == LENGTHS[-1]


@needs_vllm
@needs_amx
@pytest.mark.parametrize("kind", ["deepseek_v2", "glm4_moe_lite"])
def test_a_prompt_and_its_answer_are_computed_apart(tmp_path: Path, kind: str) -> None:
    model = make_latent_model(tmp_path / "model", kind, **FAMILIES[kind])
    with opened(tmp_path, model) as under_test:
        right, _ = answer_each(under_test, {})
        assert len({tuple(tokens) for tokens in right.values()}) == len(LENGTHS)
        said = {name: tokens[:1] for name, tokens in right.items()}
        near, _ = answer_each(under_test, said)  # with the latents that vLLM has
        under_test.empty_memory()
        tokens, num_found = answer_each(under_test, said)
        assert tokens == near
        assert num_found == [length // BLOCK * BLOCK for length in LENGTHS]


@needs_vllm
@needs_amx
def test_latents_of_two_ranks_are_read_by_one(tmp_path: Path, deepseek: Path) -> None:
    """Both ranks have all of a latent. In bfloat16 two ranks add in another order, so tokens are not compared."""
    with opened(tmp_path, deepseek, vllm_args="--tensor-parallel-size 2") as two:
        right, _ = answer_each(two, {})
        fingerprint, kept = two.engine.model.fingerprint, read_latents(two)
        parts = [kv.layer_shapes for kv in two.engine.core._blocks.executor.collective_rpc("penstock_describe_kv")]  # type: ignore[attr-defined]
    assert parts == [frozenset([(1, BLOCK, 576)])] * 2
    with opened(tmp_path, deepseek) as one:
        assert one.engine.model.fingerprint == fingerprint
        one.empty_memory()
        _, num_found = answer_each(one, {name: tokens[:1] for name, tokens in right.items()})
        assert num_found == [length // BLOCK * BLOCK for length in LENGTHS]
        assert read_latents(one) == kept


def read_latents(under_test: EngineUnderTest) -> list[bytes]:
    """Return the first full block of the longest prompt's latents, as it is in vLLM."""
    core: Any = under_test.engine.core  # type: ignore[attr-defined]
    name, prompt = list(make_prompts().items())[-1]
    caller = Caller(under_test.engine)
    seq = caller.add_prompt(f"again {name}", prompt, GREEDY)
    caller.run_until(lambda: seq.num_computed_tokens, "its prompt is computed")
    copies = [bytes(one.payload) for one in core.pin_blocks(seq, [0, 2])] if seq in core._ids else []
    caller.run_to_end()
    return copies


def make_latent_rank(stage: int = 0, part: int = 0) -> RankKV:
    return RankKV(stage, part, 2, frozenset([(1, BLOCK, 576)]), frozenset(["bfloat16"]))


def test_all_parts_of_a_stage_have_the_same_latents() -> None:
    layout, slices = combine_ranks([make_latent_rank(stage, part) for stage in (0, 1) for part in (0, 1)], BLOCK, 1)
    assert layout.byte_shape == (4, 1, BLOCK, 1152)
    assert [(at.layers.start, at.heads.start) for at in slices] == [(0, 0), (0, 0), (2, 0), (2, 0)]


def make_vllm_config(**given: Any) -> Any:
    """Return what vLLM has settled for a model: here as it does with AMX, but for what is given."""
    found = {
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "dtype": torch.bfloat16,
        "size": 576,
    } | given
    groups = SimpleNamespace(n_group=found.get("n_group", 1))
    return SimpleNamespace(
        cache_config=SimpleNamespace(enable_prefix_caching=found["enable_prefix_caching"]),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=found["enable_chunked_prefill"]),
        model_config=SimpleNamespace(dtype=found["dtype"], get_head_size=lambda: found["size"], hf_text_config=groups),
    )


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"enable_prefix_caching": False}, "on a CPU it needs AMX"),
        ({"enable_chunked_prefill": False}, "on a CPU it needs AMX"),
        ({"dtype": torch.float32}, "PENSTOCK_ENGINE_DTYPE=bfloat16"),
        ({"size": 320}, "its latents have 320 numbers"),
        ({"n_group": 8}, "it chooses its experts by groups"),
    ],
    ids=["no prefix cache", "no prefill in parts", "float32", "another size", "groups of experts"],
)
def test_latents_that_vllm_does_not_serve_here_are_refused(given: dict[str, Any], told: str) -> None:
    from penstock.engine_vllm.opening import _check_latents

    _check_latents(make_vllm_config(), is_cpu=True)
    with pytest.raises(ModelLoadError, match=told):
        _check_latents(make_vllm_config(**given), is_cpu=True)


@needs_vllm
def test_a_processor_without_amx_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    model = make_latent_model(tmp_path, "deepseek_v3", **FAMILIES["deepseek_v3"])
    with pytest.raises(ModelLoadError, match=r"latent attention .* needs AMX"):
        open_vllm_core(make_settings(model))


@needs_vllm
@needs_amx
@pytest.mark.parametrize(
    ("given", "dtype", "told"),
    [
        ({}, "float32", "PENSTOCK_ENGINE_DTYPE=bfloat16"),
        ({"kv_lora_rank": 256}, "bfloat16", "latents have 320 numbers"),
    ],
    ids=["float32", "another size"],
)
def test_latents_of_another_form_are_refused(tmp_path: Path, given: dict[str, Any], dtype: str, told: str) -> None:
    model = make_latent_model(tmp_path, "deepseek_v3", **(FAMILIES["deepseek_v3"] | given))
    with pytest.raises(ModelLoadError, match=told):
        open_vllm_core(make_settings(model, dtype=dtype))


@needs_vllm
@pytest.mark.parametrize("kind", ["glm_moe_dsa", "deepseek_v32"])
def test_sparse_indexers_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    model = make_latent_model(tmp_path, kind, n_group=1, topk_group=1, **LATENT)
    with pytest.raises(ModelLoadError, match=f"{kind} has sparse attention, whose indexer"):
        open_vllm_core(make_settings(model))


def make_settings(model: Path, **given: Any) -> Any:
    values = {"block_size": BLOCK, "model": str(model), "dtype": "bfloat16"} | given
    return ENGINE_SETTINGS.model_copy(update=values)


@needs_vllm
def test_equal_tokens_in_any_batch_are_not_promised_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(ModelLoadError, match="VLLM_BATCH_INVARIANT=1: vLLM has no such computation on a CPU"):
        open_vllm_core(ENGINE_SETTINGS.model_copy(update={"block_size": BLOCK}))


@needs_vllm
@pytest.mark.parametrize(("version", "is_warned"), [("0.32.0", False), ("0.32.0+cpu", False), ("0.31.0", True)])
def test_a_version_that_was_not_tried_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str, is_warned: bool
) -> None:
    import vllm

    monkeypatch.setattr(vllm, "__version__", version)
    with caplog.at_level(logging.WARNING), pytest.raises(ModelLoadError, match="--enable-lora"):
        open_vllm_core(ENGINE_SETTINGS.model_copy(update={"block_size": BLOCK, "vllm_args": "--enable-lora"}))
    assert (f"vLLM {version} was not tried" in caplog.text) == is_warned


KIMI_PATTERN = (
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'d)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s+(?!\S)",
    r"\s+",
)
"""A rule of the form that Kimi's tokenizer has."""
KIMI_TEXTS = (
    "It's what 模型 said: 12345 tokens\n",
    "汉字abc it'd be 2nd, IT'S",
    "<|im_end|>模型<|reserved_token_271|>",
)


def write_tiktoken_files(directory: Path) -> dict[bytes, int]:
    """Write a tiktoken file and its authors' code, in the form of Kimi's. Returns the ranks of the tokens."""
    words = ["it", "'s", "It", "It's", "模", "模型", "型", " s", " sa", "12", "123", "said", "ab", "abc", "汉", " be"]
    pieces = [bytes([number]) for number in range(256)]
    for word in words:
        data = word.encode()
        pieces += [data[:end] for end in range(2, len(data) + 1) if data[:end] not in pieces]
    ranks = {piece: rank for rank, piece in enumerate(pieces)}
    lines = [base64.b64encode(piece).decode() + f" {rank}" for piece, rank in ranks.items()]
    (directory / "tiktoken.model").write_text("\n".join(lines) + "\n")
    code = f'raise RuntimeError("this is run")\nclass Kimi:\n    pat_str = "|".join({list(KIMI_PATTERN)!r})\n'
    (directory / "tokenization_kimi.py").write_text(code)
    special = {str(len(ranks) + 2): {"content": "<|im_end|>", "special": True}}
    about = {
        "added_tokens_decoder": special, "tokenizer_class": "TikTokenTokenizer", "eos_token": "<|im_end|>",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
    }  # fmt: skip
    (directory / "tokenizer_config.json").write_text(json.dumps(about))
    (directory / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"}))
    return ranks


def test_a_tiktoken_file_alone_is_refused(tmp_path: Path) -> None:
    """transformers reads it with another rule than its authors', and would give other tokens."""
    write_tiktoken_files(tmp_path)
    with pytest.raises(ModelLoadError, match=r"tiktoken.model .* is never run; docs/vllm.md converts it"):
        check_tokenizer(tmp_path, "kimi_k25")


@needs_vllm
def test_a_tiktoken_file_is_converted_as_the_documentation_shows(tmp_path: Path) -> None:
    tiktoken: Any = importlib.import_module("tiktoken")
    ranks = write_tiktoken_files(tmp_path)
    (script,) = re.findall(r"```python\n(.*?)```", Path("docs/vllm.md").read_text("utf-8"), re.DOTALL)
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)
    check_tokenizer(tmp_path, "deepseek_v3")
    tokenizer = load_tokenizer(tmp_path)
    special = {f"<|reserved_token_{number}|>": number for number in range(len(ranks), len(ranks) + 256)}
    special = {name: number for name, number in special.items() if number != len(ranks) + 2}
    special["<|im_end|>"] = len(ranks) + 2
    theirs = tiktoken.Encoding("kimi", pat_str="|".join(KIMI_PATTERN), mergeable_ranks=ranks, special_tokens=special)
    for text in KIMI_TEXTS:
        ids = theirs.encode(text, allowed_special="all")
        assert tokenizer.encode(text, add_special_tokens=False) == ids
        assert tokenizer.decode(ids) == text
    assert len(tokenizer) == len(ranks) + 256
    assert tokenizer.eos_token_id == len(ranks) + 2
