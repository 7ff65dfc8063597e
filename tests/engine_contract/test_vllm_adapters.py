"""Adapters in vLLM: each answers as the model with its matrices in the weights, and shares KV with nobody."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engine.loading.description import load_config
from penstock.engine.weights.files import DEMO_MODEL
from penstock.errors import ModelLoadError
from penstock.messages import Sampling
from sim.workload import ENGINE_SETTINGS
from tests.engine_contract.engines import BLOCK, Caller, EngineUnderTest, open_vllm
from tests.engine_contract.test_vllm import needs_vllm

PROMPT = [17 + 5 * number % 800 for number in range(3 * BLOCK + 5)]
GREEDY = Sampling(max_tokens=8, temperature=0.0, ignore_eos=True)
RANKS = {"sql": 4, "chat": 8, "code": 16}


@contextmanager
def opened(directory: Path, **settings: Any) -> Iterator[EngineUnderTest]:
    under_test = open_vllm(directory, kind="vllm", **settings)
    try:
        yield under_test
    finally:
        under_test.engine.close()
        under_test.store.close()


def add(caller: Caller, name: str, adapter: str, said: list[int] | None = None, **given: Any) -> None:
    digest = caller.engine.model.adapters.get(adapter, "")
    blocks = caller.engine.hash_prompt("contract", PROMPT, adapter=digest)
    caller.add(name, PROMPT, GREEDY, said or (), blocks=blocks, adapter=digest, **given)


@needs_vllm
def test_an_adapter_answers_as_the_model_with_its_matrices_in_the_weights(tmp_path: Path) -> None:
    """All in one batch, the model itself among them; then again behind the first token, with the KV that was found."""
    from sim.adapters import generate_greedily, load_demo, merge_adapter, write_adapter

    written = {name: write_adapter(tmp_path / name, seed, rank) for seed, (name, rank) in enumerate(RANKS.items())}
    expected = {name: generate_greedily(merge_adapter(tensors), PROMPT) for name, tensors in written.items()}
    expected["demo"] = generate_greedily(load_demo(), PROMPT)
    assert len(set(map(tuple, expected.values()))) == len(expected)
    adapters = ",".join(f"{name}={tmp_path / name}" for name in RANKS)
    with opened(tmp_path / "store", adapters=adapters) as under_test:
        caller = Caller(under_test.engine)
        for name in expected:
            add(caller, name, name)
        assert caller.run_to_end() == expected
        assert {one.num_cached_tokens for one in caller.progress.values()} == {0}
        under_test.empty_memory()
        caller = Caller(under_test.engine)
        for name, tokens in expected.items():
            add(caller, name, name, tokens[:1])
        assert caller.run_to_end() == expected
        assert {one.num_cached_tokens for one in caller.progress.values()} == {3 * BLOCK}


def rewrite(directory: Path, change: Any, **told: Any) -> None:
    """Change the tensors of an adapter, and what its configuration says."""
    tensors = load_file(directory / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, directory / "adapter_model.safetensors")
    config = json.loads((directory / "adapter_config.json").read_text()) | told
    (directory / "adapter_config.json").write_text(json.dumps(config))


def keep(tensors: dict[str, torch.Tensor]) -> None:
    pass


def narrow(tensors: dict[str, torch.Tensor]) -> None:
    name = next(name for name in tensors if name.endswith("q_proj.lora_A.weight"))
    tensors[name] = tensors[name][:, :100].contiguous()


def rename(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if "q_proj" in name]:
        tensors[name.replace("q_proj", "qkv")] = tensors.pop(name)


def add_bias(tensors: dict[str, torch.Tensor]) -> None:
    tensors["base_model.model.model.layers.0.self_attn.q_proj.bias"] = torch.zeros(256)


def drop_half(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[next(name for name in tensors if name.endswith("lora_B.weight"))]


@needs_vllm
@pytest.mark.parametrize(
    ("change", "told", "words"),
    [
        (narrow, {}, r"its matrices for model.layers.0.self_attn.q_proj are .* would fit: it is of another model"),
        (rename, {}, r"the model has no linear layer model.layers.0.self_attn.qkv: it is of another model"),
        (add_bias, {}, r"it has base_model.model.model.layers.0.self_attn.q_proj.bias"),
        (drop_half, {}, r"its matrices for .* are \(\(4, \d+\), None\)"),
        (dict.clear, {}, "it has no weights"),
        (keep, {"r": 8}, r"and \(\(8, \d+\), \(\d+, 8\)\) would fit"),
        (keep, {"r": 513}, "its rank is 513, and vLLM computes ranks up to 512"),
        (keep, {"rank_pattern": {"q_proj": 600}}, "its rank is 600"),
        (keep, {"peft_type": "LOHA"}, "its peft_type is 'LOHA'"),
        (keep, {"use_dora": True}, "vLLM does not yet support DoRA"),
        (keep, {"bias": "all"}, "Adapter bias is not supported"),
        (keep, {"modules_to_save": ["lm_head"]}, "modules_to_save"),
        (keep, {"r": None}, "."),
    ],
)  # fmt: skip
def test_an_adapter_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, change: Any, told: dict[str, Any], words: str
) -> None:
    from penstock.engine_vllm.adapters import read_adapters
    from sim.adapters import write_adapter

    directory, config = tmp_path / "sql", load_config(DEMO_MODEL)
    write_adapter(directory, 1)
    assert read_adapters({"sql": directory}, config)["sql"].rank == 4
    rewrite(directory, change, **told)
    with pytest.raises(ModelLoadError, match=f"PENSTOCK_ENGINE_ADAPTERS: 'sql' .*{words}"):
        read_adapters({"sql": directory}, config)


@needs_vllm
@pytest.mark.parametrize("lost", ["", "adapter_config.json", "adapter_model.safetensors"])
def test_a_directory_that_is_none_of_an_adapter_is_refused(tmp_path: Path, lost: str) -> None:
    from penstock.engine_vllm.opening import open_vllm_core
    from sim.adapters import write_adapter

    if lost:
        write_adapter(tmp_path / "sql", 1)
        (tmp_path / "sql" / lost).unlink()
    settings = {"block_size": BLOCK, "kind": "vllm", "adapters": f"sql={tmp_path / 'sql'}"}
    with pytest.raises(ModelLoadError, match=f"there is no file {tmp_path / 'sql'}/{lost or 'adapter_config.json'}"):
        open_vllm_core(ENGINE_SETTINGS.model_copy(update=settings))


@needs_vllm
def test_the_digest_is_that_of_both_files(tmp_path: Path) -> None:
    from penstock.engine_vllm.adapters import read_adapters
    from sim.adapters import write_adapter

    found = set()
    for seed, alpha in ((1, 8), (1, 16), (2, 8), (1, 8)):
        write_adapter(tmp_path, seed, lora_alpha=alpha)
        found.add(read_adapters({"sql": tmp_path}, load_config(DEMO_MODEL))["sql"].digest)
    assert len(found) == 3


@needs_vllm
def test_answers_over_a_kill_and_a_reload_are_those_of_one_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scene of campaigns, in small."""
    from sim import adapters

    monkeypatch.setattr(adapters, "KILLS", 1)
    monkeypatch.setattr(adapters, "RELOADS", 1)
    run = adapters.play_adapters(3, tmp_path, 60)
    assert run.find_faults() == []
    assert len(run.answers) >= 60
