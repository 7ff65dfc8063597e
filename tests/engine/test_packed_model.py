"""Files of packed weights: they give the bits of an unpacked load, are shared, or refused where they do not fit."""

import json
import os
import shutil
import signal
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import xxhash

from penstock.config.settings import EngineSettings
from penstock.engine.loading import packed as packed_loading
from penstock.engine.loading import proof
from penstock.engine.loading.loading import load_model, open_model
from penstock.engine.loading.packed import pack_model
from penstock.engine.model.accelerate import accelerate_model, compute_probe_logits
from penstock.engine.opening import open_engine
from penstock.engine.weights.packed_file import PackedFileWriter, open_packed_file
from penstock.errors import EngineCheckFailed, ModelLoadError
from tests.engine.helpers import needs_kernels, save_model

pytestmark = needs_kernels


@pytest.fixture
def no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model, whose proof takes a second, is not proved."""
    monkeypatch.setattr(packed_loading, "prove_backend", lambda *given: None)
    monkeypatch.setattr(proof, "prove_backend", lambda *given: None)


@pytest.fixture
def packed(tiny_dir: Path, tmp_path: Path, no_proof: None) -> EngineSettings:
    """Settings of a model with a packed file in its directory."""
    settings = make_settings(Path(shutil.copytree(tiny_dir, tmp_path / "model")), tmp_path)
    pack_model(settings)
    return settings


def make_settings(directory: Path, tmp_path: Path, weights: str = "bf16") -> EngineSettings:
    given = {"model": str(directory), "weights": weights, "dtype": "bfloat16", "device": "cpu"}
    return EngineSettings.model_validate({**given, "cache_dir": str(tmp_path / "cache")})


MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "tied": (transformers.Qwen3Config, {"tie_word_embeddings": True}),
    "untied": (transformers.Qwen3Config, {"tie_word_embeddings": False}),
    "mixture": (transformers.Qwen3MoeConfig, {**MOE, "num_experts": 4, "decoder_sparse_step": 1}),
    "gpt_oss": (
        transformers.GptOssConfig, {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
    ),
    "latents": (
        transformers.DeepseekV3Config,
        {**MOE, "kv_lora_rank": 128, "q_lora_rank": 64, "qk_nope_head_dim": 128, "qk_rope_head_dim": 32,
         "v_head_dim": 64, "head_dim": 32, "n_routed_experts": 4, "n_group": 2, "topk_group": 1,
         "first_k_dense_replace": 1},
    ),
}  # fmt: skip
COMMON = {
    "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 256, "vocab_size": 1024, "max_position_embeddings": 256, "bos_token_id": 0,
    "eos_token_id": 1, "initializer_range": 0.1,
}  # fmt: skip
"""Of random models whose matrices are large enough for integers."""


def find_file(settings: EngineSettings) -> Path:
    return next(Path(settings.model).glob("*.packed"))


def is_mapped(settings: EngineSettings, caplog: pytest.LogCaptureFixture) -> bool:
    caplog.clear()
    with caplog.at_level("INFO", logger="penstock.engine"):
        open_model(settings)
    return "weights are mapped from" in caplog.text


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("weights", ["bf16", "p12", "int8", "int4"])
def test_a_packed_file_gives_the_bits_of_an_unpacked_load(
    tmp_path: Path, no_proof: None, weights: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    make_config, given = KINDS[kind]
    settings = make_settings(save_model(tmp_path / "model", make_config(**COMMON | given)), tmp_path, weights)
    expected = accelerate_model(load_model(settings), weights)
    pack_model(settings)
    caplog.clear()
    with caplog.at_level("INFO", logger="penstock.engine"):
        model = open_model(settings)
    assert "weights are mapped from" in caplog.text
    assert model.fingerprint == expected.fingerprint
    assert (model.vocab_size, model.layout, model.stock_attention) == (
        expected.vocab_size, expected.layout, expected.stock_attention,
    )  # fmt: skip
    assert torch.equal(compute_probe_logits(model), compute_probe_logits(expected))
    with torch.inference_mode():
        ids = torch.arange(model.vocab_size)
        assert torch.equal(model.module.get_input_embeddings()(ids), expected.module.get_input_embeddings()(ids))


@pytest.mark.proof
def test_two_processes_share_the_mapping(packed: EngineSettings) -> None:
    path = find_file(packed)
    model = open_model(packed)  # one in this process, the other in a child that maps the file itself
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            tensors = open_packed_file(path).map_tensors()
            total = sum(
                int(tensor.view(-1).view(torch.uint8)[::64].sum()) for tensor in tensors.values() if tensor.nbytes
            )
            parts = Path("/proc/self/smaps").read_text().split(str(path))
            clean = next(line for part in parts[1:] for line in part.splitlines() if line.startswith("Shared_Clean"))
            os.write(writing, f"{total} {clean.split()[1]}".encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(writing)
    read_total, shared_kib = os.read(reading, 100).split()
    os.close(reading)
    assert int(read_total) > 0
    assert int(shared_kib) * 1024 >= path.stat().st_size // 2
    assert model.module is not None


def rewrite_table(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what a file says of itself, with a right hash."""
    prelude, content = struct.Struct("<8sIIQQQ16s8x"), path.read_bytes()
    magic, version, zero, offset, length, _, _ = prelude.unpack(content[: prelude.size])
    table = json.loads(content[offset : offset + length])
    change(table["about"])
    changed = json.dumps(table).encode()
    fields = (magic, version, zero, offset, len(changed), offset + len(changed))
    digest = xxhash.xxh3_128_digest(prelude.pack(*fields, bytes(16)) + changed)
    path.write_bytes(prelude.pack(*fields, digest) + content[prelude.size : offset] + changed)


def flip_byte(path: Path, at: int) -> None:
    with path.open("r+b") as content:
        content.seek(at)
        old = content.read(1)[0]
        content.seek(at)
        content.write(bytes([old ^ 1]))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut off": (lambda path: os.truncate(path, path.stat().st_size - 1), "is cut off"),
    "empty": (lambda path: os.truncate(path, 0), "is no file of packed weights"),
    "a weight": (lambda path: flip_byte(path, 4096 + 100), "is not what was written"),
    "the table": (lambda path: flip_byte(path, path.stat().st_size - 10), "its table is not what was written"),
    "of a later version": (lambda path: flip_byte(path, 8), "has version 0, and this Penstock reads 1"),
    "of another torch": (
        lambda path: rewrite_table(path, lambda about: about["versions"].update(torch="1.0")), "written with torch 1.0",
    ),
    "of other logits": (
        lambda path: rewrite_table(path, lambda about: about["modules"][0].update(activation=2)), "other logits",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_what_does_not_fit_is_refused_by_name_and_not_served(
    packed: EngineSettings, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage, message = DAMAGE[name]
    damage(find_file(packed))
    with pytest.raises(ModelLoadError, match=message):
        open_model(packed.model_copy(update={"packed": str(find_file(packed))}))
    assert not is_mapped(packed, caplog)  # and still the model is served
    assert message in caplog.text


@pytest.mark.proof
def test_files_of_other_models_and_dtypes_are_refused(
    packed: EngineSettings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert is_mapped(packed.model_copy(update={"weights": "auto"}), caplog), "it takes any form without loss"
    assert not is_mapped(packed.model_copy(update={"weights": "int8"}), caplog)
    named = packed.model_copy(update={"packed": str(find_file(packed))})
    weights = Path(packed.model) / "model.safetensors"
    for change, message in (
        ({"model": "demo"}, "made of another config"),
        ({"dtype": "float32"}, "made of bfloat16, and float32 is asked for"),
        ({"weights": "int4"}, "packed as bf16, and int4 is asked for"),
        ({"packed": str(tmp_path / "none")}, "cannot be read"),
        ({}, "made of other weight files"),
    ):
        if not change:
            flip_byte(weights, weights.stat().st_size - 7)
        with pytest.raises(ModelLoadError, match=message):
            open_model(named.model_copy(update=change))


def test_killed_while_writing_leaves_nothing_that_is_taken_for_a_file(tmp_path: Path) -> None:
    path, tensor = tmp_path / "weights.packed", torch.ones(1 << 20)  # torch's threads are not there after a fork
    child = os.fork()
    if child == 0:
        with PackedFileWriter(path) as writer:
            writer.add_tensor("one", tensor)
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert not list(tmp_path.glob("*.packed"))
    with pytest.raises(ZeroDivisionError), PackedFileWriter(path):
        raise ZeroDivisionError
    assert not path.exists()


def test_the_proof_is_noted_and_runs_again_when_its_name_changes(
    tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: list[str] = []
    monkeypatch.setattr(proof, "prove_backend", lambda *given: runs.append("proof"))
    settings = make_settings(tiny_dir, tmp_path)

    def count_runs(changed: EngineSettings) -> int:
        before = len(runs)
        open_model(changed)
        return len(runs) - before

    assert [count_runs(settings), count_runs(settings)] == [1, 0]
    assert count_runs(settings.model_copy(update={"weights": "p12"})) == 1
    assert count_runs(settings.model_copy(update={"dtype": "float32"})) == 1
    assert count_runs(settings.model_copy(update={"block_size": 8})) == 1
    program = shutil.copytree(Path(proof.__file__).parents[1], tmp_path / "program")
    monkeypatch.setattr(proof, "__file__", str(program / "loading" / "proof.py"))
    monkeypatch.setattr(proof, "_hash_program", proof._hash_program.__wrapped__)
    assert count_runs(settings) == 0, "a copy of the program is the same program"
    kernel = program / "kernels" / "norm.py"
    kernel.write_bytes(bytes([kernel.read_bytes()[0] ^ 1]) + kernel.read_bytes()[1:])
    assert [count_runs(settings), count_runs(settings)] == [1, 0], "a byte of a kernel changed"
    for note in (tmp_path / "cache").glob("proof-*"):
        note.write_bytes(b"{")
    assert count_runs(settings) == 1


def test_what_was_not_proved_is_not_noted(tiny_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> None:
        raise EngineCheckFailed("on purpose")

    monkeypatch.setattr(proof, "prove_backend", fail)
    for _ in range(2):
        with pytest.raises(EngineCheckFailed):
            open_model(make_settings(tiny_dir, tmp_path))


def test_the_speed_is_noted(tiny_dir: Path, tmp_path: Path, no_proof: None) -> None:
    settings = make_settings(tiny_dir, tmp_path)
    first, second = (open_engine(settings) for _ in range(2))
    assert second.measured_speed["cost"] == first.measured_speed["cost"] is not None
    assert second.prefill_tokens_per_s() == pytest.approx(first.prefill_tokens_per_s())
    assert open_engine(settings.model_copy(update={"max_batch": 8})).measured_speed != first.measured_speed
