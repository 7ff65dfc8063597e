"""vLLM with several ranks, models with several kinds of layers, and what is refused when a model is loaded."""

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers

from penstock.bus.connect import connect_bus
from penstock.config.settings import BusSettings
from penstock.engine.loading.loading import load_model
from penstock.engine.serving import ServingEngine
from penstock.engine.weights.files import DEMO_MODEL
from penstock.engine_vllm.blocks import RankKV, combine_ranks
from penstock.engine_vllm.core import VllmCore
from penstock.errors import InvalidRequest, ModelLoadError
from penstock.local.processes import find_free_port
from penstock.local.stack import Stack
from penstock.local.valkey import ValkeyServer
from penstock.messages import Request, Sampling
from penstock.names import Pipeline
from sim.waiting import PATIENCE_S
from sim.workload import ENGINE_SETTINGS
from tests.engine_contract.engines import BLOCK, Caller, EngineUnderTest, open_vllm
from tests.engine_contract.test_engine_contract import NUM_NEW, add_all, expect, make_work, prefill_all, prompt_of

HAS_VLLM = importlib.util.find_spec("vllm") is not None
needs_vllm = pytest.mark.skipif(not HAS_VLLM, reason="vLLM is not installed: make test-vllm")
LONG_ROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 16, "long_factor": [2.0] * 16,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
RANKS = {"one rank": "", "two parts": "--tensor-parallel-size 2", "two stages": "--pipeline-parallel-size 2"}
RANKS["two by two"] = f"{RANKS['two parts']} {RANKS['two stages']}"


@contextmanager
def opened(directory: Path, ranks: str, **settings: Any) -> Iterator[EngineUnderTest]:
    under_test = open_vllm(directory, vllm_args=RANKS[ranks], **settings)
    try:
        yield under_test
    finally:
        under_test.engine.close()
        under_test.store.close()


@needs_vllm
@pytest.mark.parametrize(
    ("before", "after"), [("two parts", "one rank"), ("one rank", "two parts"), ("two stages", "one rank")]
)
def test_blocks_are_read_by_another_number_of_ranks(tmp_path: Path, before: str, after: str) -> None:
    """All full blocks of a prompt are found, and the tokens are those of one rank undivided."""
    work = make_work()
    with opened(tmp_path, before) as prefill:
        prefill_all(caller := Caller(prefill.engine), work)
        fingerprint, first = prefill.engine.model.fingerprint, dict(caller.tokens)
    with opened(tmp_path, after) as decode:
        decode.empty_memory()
        caller = Caller(decode.engine, tokens=first)
        add_all(caller, work, 1)
        assert caller.run_to_end() == expect(work)
        assert decode.engine.model.fingerprint == fingerprint
        found = {name: progress.num_cached_tokens for name, progress in caller.progress.items()}
        assert found == {one.id: count_full(one) for one in work}


def count_full(request: Request) -> int:
    return len(prompt_of(request)) // BLOCK * BLOCK


def make_model(directory: Path, kind: str, **given: Any) -> Path:
    """Save a small model of a kind of transformers, with the demo model's tokenizer. Returns its directory."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO_MODEL)
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=len(tokenizer), hidden_size=128, intermediate_size=96, num_hidden_layers=4, head_dim=32,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, bos_token_id=None, eos_token_id=1,
        pad_token_id=0, **given,
    )  # fmt: skip
    torch.manual_seed(11)
    make: Any = transformers.AutoModelForCausalLM
    make.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@needs_vllm
def test_a_model_with_windows_beside_full_attention_goes_on_elsewhere(tmp_path: Path) -> None:
    """vLLM keeps the KV that has left the windows, too: what decode loads is the whole prompt."""
    kinds = ["sliding_attention", "full_attention"] * 2
    model = make_model(tmp_path / "model", "gemma3_text", sliding_window=16, layer_types=kinds)
    with opened(tmp_path, "one rank", model=str(model)) as under_test:
        prompt = prompt_of(make_work()[-1])
        greedy = Sampling(max_tokens=NUM_NEW, temperature=0.0, ignore_eos=True)
        (caller := Caller(under_test.engine)).add_prompt("first", prompt, greedy)
        said = caller.run_to_end()["first"]
        under_test.empty_memory()
        (caller := Caller(under_test.engine)).add("rest", prompt, greedy, said)
        module: Any = transformers.AutoModelForCausalLM.from_pretrained(model)
        reference = module.generate(
            torch.tensor([prompt]), max_new_tokens=NUM_NEW, min_new_tokens=NUM_NEW, do_sample=False
        )
        assert caller.run_to_end()["rest"] == reference[0, len(prompt) :].tolist()
        assert caller.progress["rest"].num_cached_tokens == len(prompt) // BLOCK * BLOCK


@needs_vllm
@pytest.mark.parametrize(
    ("kind", "given", "told"),
    [
        (
            "phi3",
            {"original_max_position_embeddings": 512, "rope_parameters": LONG_ROPE},
            "vLLM takes other factors for its positions",
        ),
        (
            "qwen3",
            {"rope_parameters": YARN},
            "vLLM has factors for 256, to which yarn extends it",
        ),
    ],
    ids=["factors of a longer context", "factors of a shorter context"],
)
def test_a_model_whose_tokens_would_be_others_is_refused(
    tmp_path: Path, kind: str, given: dict[str, Any], told: str
) -> None:
    from penstock.engine_vllm.opening import open_vllm_core

    model = make_model(tmp_path / "model", kind, **given)
    settings = ENGINE_SETTINGS.model_copy(update={"block_size": BLOCK, "model": str(model)})
    with pytest.raises(ModelLoadError, match=told):
        open_vllm_core(settings)


@needs_vllm
def test_what_vllm_computes_otherwise_than_transformers_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM is told of a window of 30 tokens, and the model has one of 40: the prompt is longer than both."""
    from penstock.engine_vllm.opening import open_vllm_core

    kinds = ["sliding_attention", "full_attention"] * 2
    model = make_model(tmp_path / "model", "gemma3_text", sliding_window=40, layer_types=kinds, initializer_range=0.3)
    args = "--hf-overrides '{\"sliding_window\": 30}'"
    settings = ENGINE_SETTINGS.model_copy(
        update={"block_size": BLOCK, "model": str(model), "vllm_args": args, "cache_dir": str(tmp_path)}
    )
    with pytest.raises(ModelLoadError, match="other log probabilities in vLLM than by itself"):
        open_vllm_core(settings)


def make_rank(stage: int = 0, part: int = 0, num_layers: int = 3, **given: Any) -> RankKV:
    shape, dtype = given.get("shape", (1, BLOCK, 128)), given.get("dtype", "bfloat16")
    return RankKV(stage, part, num_layers, frozenset([shape]), frozenset([dtype]))


def test_a_whole_block_has_what_all_ranks_have() -> None:
    ranks = [make_rank(stage, part, 4 - stage) for stage in (0, 1) for part in (0, 1)]
    layout, slices = combine_ranks(ranks, BLOCK, 2)
    assert (layout.num_layers, layout.num_heads, layout.byte_shape) == (7, 2, (7, 2, BLOCK, 256))
    covered = np.zeros(layout.byte_shape[:2], int)
    for at in slices:
        covered[at.layers, at.heads] += 1
    assert (covered == 1).all()


def test_ranks_may_have_the_same_head() -> None:
    _, slices = combine_ranks([make_rank(part=part) for part in range(4)], BLOCK, 2)
    assert [at.heads.start for at in slices] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    "ranks",
    [
        [make_rank(shape=(BLOCK, 576))],
        [make_rank(shape=(1, 2 * BLOCK, 128))],
        [make_rank(dtype="uint8")],
        [make_rank(0), make_rank(1, shape=(1, BLOCK, 64))],
        [make_rank(part=0), make_rank(part=1), make_rank(part=2)],
    ],
    ids=["latents", "other blocks", "fp8", "layers that differ", "heads that nobody has"],
)
def test_a_form_that_is_not_known_is_refused(ranks: list[RankKV]) -> None:
    num_heads = 5 if len(ranks) == 3 else 1
    with pytest.raises(ModelLoadError):
        combine_ranks(ranks, BLOCK, num_heads)


@needs_vllm
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("--nonsense 3", "unrecognized arguments: --nonsense 3"),
        ("--tensor-parallel-size two", "invalid int value: 'two'"),
        ("--enable-expert-parallel", "--enable-expert-parallel: vLLM has no kernel for a share of the experts"),
        ("--enable-lora", "--enable-lora: set PENSTOCK_ENGINE_ADAPTERS"),
        ("--max-num-seqs 4", "--max-num-seqs: set PENSTOCK_ENGINE_MAX_BATCH"),
        ("--kv-offloading-size 1", "--kv-offloading-size: KV goes through the stores of this project"),
    ],
)
def test_arguments_that_cannot_be_given_are_refused_by_name(given: str, told: str) -> None:
    from penstock.engine_vllm.opening import open_vllm_core

    settings = ENGINE_SETTINGS.model_copy(update={"block_size": BLOCK, "vllm_args": given})
    with pytest.raises(ModelLoadError, match=told.replace("'", ".")):
        open_vllm_core(settings)


@needs_vllm
def test_arguments_of_vllm_are_read_as_it_reads_them() -> None:
    from penstock.engine_vllm.opening import parse_vllm_arguments

    assert parse_vllm_arguments("") == {}
    given = parse_vllm_arguments("--no-enforce-eager -tp 2 --hf-overrides '{\"rope_theta\": 5}'")
    assert given == {"enforce_eager": False, "tensor_parallel_size": 2, "hf_overrides": {"rope_theta": 5}}


@pytest.mark.parametrize(("gap_s", "num_tokens"), [(0.05, 532), (0.001, 42), (1.0, 1024)])
def test_a_step_has_as_many_tokens_as_take_the_longest_gap(gap_s: float, num_tokens: int) -> None:
    pool = SimpleNamespace(num_gpu_blocks=1001, reset_prefix_cache=lambda: True)
    scheduler = SimpleNamespace(max_num_scheduled_tokens=1024, kv_cache_manager=SimpleNamespace(block_pool=pool))
    model: Any = SimpleNamespace(context_length=4096)
    blocks: Any = None
    vllm_core = SimpleNamespace(scheduler=scheduler, model_executor=None)
    core = VllmCore(model, ENGINE_SETTINGS.model_copy(update={"max_batch": 32}), vllm_core, blocks)
    core._time_prompt = lambda num_tokens: num_tokens / 10_000  # type: ignore[method-assign]
    core.choose_step_tokens(gap_s)
    assert core.max_step_tokens == num_tokens


@needs_vllm
def test_steps_that_keep_to_a_short_gap_give_the_same_tokens(tmp_path: Path) -> None:
    with opened(tmp_path, "one rank") as under_test:
        assert isinstance(under_test.engine, ServingEngine)
        core = under_test.engine.core
        assert isinstance(core, VllmCore)
        before = core.max_step_tokens
        core.choose_step_tokens(1e-9)
        assert core.max_step_tokens == core.settings.max_batch < before
        caller, work = Caller(under_test.engine), make_work()
        add_all(caller, work)
        tokens = caller.run_to_end()
        core._core.scheduler.max_num_scheduled_tokens = before
    assert tokens == expect(work)


def count_results(stack: Stack) -> int:
    bus = connect_bus(stack.addresses, BusSettings())
    return len(bus.read_all(Pipeline(stack.addresses.pipeline).results_topic))


@needs_vllm
def test_a_gateway_serves_a_pipeline_with_vllm_beside_one_with_the_own_engine(tmp_path: Path) -> None:
    """Each model is computed by its own pipeline. Their blocks have different names."""
    copied = tmp_path / "copied"
    shutil.copytree(DEMO_MODEL, copied)
    plain = {"PENSTOCK_ENGINE_DTYPE": "float32", "PENSTOCK_ENGINE_DEVICE": "cpu"}
    by_vllm = {
        "PENSTOCK_ENGINE_KIND": "vllm",
        "PENSTOCK_ENGINE_BLOCK_SIZE": str(BLOCK),
        "PENSTOCK_ENGINE_MODEL": str(copied),
    }
    (work, *_), answers = make_work(), {}
    with (
        ValkeyServer(tmp_path / "valkey") as server,
        Stack(tmp_path / "a", pipeline="own", redis=server.url, gateway=find_free_port(), environment=plain) as own,
        Stack(tmp_path / "b", pipeline="vllm", redis=server.url, environment=plain | by_vllm) as other,
    ):
        own.wait_until_ready(PATIENCE_S)
        other.wait_until_ready(PATIENCE_S)
        with httpx.Client(base_url=own.gateway_url, timeout=None) as gateway:
            for model in ("demo", str(copied)):
                body = {
                    "model": model,
                    "prompt": prompt_of(work),
                    "max_tokens": NUM_NEW,
                    "temperature": 0,
                    "ignore_eos": True,
                }
                answers[model] = (
                    gateway.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]["text"]
                )
        counts = [count_results(stack) for stack in (own, other)]
    assert answers["demo"] == answers[str(copied)]
    assert counts == [1, 1]


@needs_vllm
def test_engines_of_different_kinds_do_not_share_blocks(tmp_path: Path) -> None:
    with opened(tmp_path, "one rank") as under_test:
        fingerprint = under_test.engine.model.fingerprint
    own = load_model(ENGINE_SETTINGS.model_copy(update={"block_size": BLOCK}))
    assert fingerprint != own.fingerprint


def test_pictures_are_refused() -> None:
    """Whoever asks: a job may come from workers with this project's engine."""
    seen = SimpleNamespace(pictures=SimpleNamespace())
    with pytest.raises(InvalidRequest, match="no pictures here"):
        VllmCore.check_sequence(SimpleNamespace(), seen)  # type: ignore[arg-type]
