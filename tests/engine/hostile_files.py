"""Model files that nobody should trust: each is loaded by a process of its own, whose time and memory are bounded.

`python -m tests.engine.hostile_files` loads all of them and prints what came of each.
"""

import json
import random
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from penstock.config.settings import EngineSettings
from penstock.engine.loading.loading import open_model
from penstock.errors import ModelLoadError
from sim.forked import fork_process
from sim.waiting import PATIENCE_S
from tests.engine.header_fuzz import EXTREMES, damage_header, make_small_gguf

MAX_MIB = 500
MAX_CPU_S = 60
"""Processor time of a load; those that end at all take three seconds."""
REFUSED, LOADED = "refused", "loaded"
FIELDS = {
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "num_labels", "hidden_size",
                     "intermediate_size", "vocab_size", "head_dim", "max_position_embeddings"), "llama"),
    "num_local_experts": "mixtral", "num_experts": "qwen3_moe", "moe_intermediate_size": "qwen3_moe",
    "n_routed_experts": "deepseek_v3", "num_nextn_predict_layers": "deepseek_v3", "max_window_layers": "qwen2",
    "num_kv_shared_layers": "gemma3n_text", "sliding_window": "mistral", "rotary_dim": "gptj", "n_positions": "gptj",
    "index_topk": "deepseek_v32", "attention_chunk_size": "llama4_text", "mamba_n_heads": "bamba",
}  # fmt: skip
"""By a field of config.json: a type of model that reads it."""
VALUES: tuple[Any, ...] = (0, -1, 10**6, 2**31, 10**12, 2**62, 1e300, "64", [7], {"a": 7}, True)
TOKENIZERS: dict[str, Any] = {
    "empty": {}, "a list": [], "a number": 5, "no model": {"model": None}, "a list as model": {"model": []},
    "words as tokens": {"added_tokens": "x"}, "a token without id": {"added_tokens": [{"content": "<a>"}]},
    "a vocabulary of lists": {"model": {"type": "BPE", "vocab": [1, 2], "merges": []}},
    "merges that are numbers": {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": [1]}},
    "an unknown model": {"model": {"type": "Evil", "vocab": {}}},
    "a pattern that is none": {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(((("}}},
    "a deep one": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [None]}]}},
}  # fmt: skip
"""What replaces parts of tokenizer.json; with `empty`, lists and numbers, all of it."""
Damage = Callable[[Path], Path]


def list_hostile_files(model: Path) -> dict[str, Damage]:
    """Return by name what writes a hostile file into an empty directory, and returns what is to be loaded.

    `model` is a directory with a small good model.
    """
    cases: dict[str, Damage] = {}
    for name, kind in FIELDS.items():
        for value in VALUES:
            cases[f"config {name}={value}"] = partial(_change_config, model, {"model_type": kind, name: value})
    for name, change in TOKENIZERS.items():
        cases[f"tokenizer {name}"] = partial(_change_tokenizer, model, change)
    for seed in range(30):
        cases[f"safetensors {seed}"] = partial(_damage_weights, model, seed)
        cases[f"gguf {seed}"] = partial(_damage_gguf, seed)
    for number in range(6):
        cases[f"gguf tensor {number} elsewhere"] = partial(_move_tensor, number)
    return cases


def _copy(model: Path, at: Path) -> Path:
    return Path(shutil.copytree(model, at / "model"))


def _change_config(model: Path, changed: dict[str, Any], at: Path) -> Path:
    path = _copy(model, at) / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    return path.parent


def _change_tokenizer(model: Path, change: Any, at: Path) -> Path:
    path = _copy(model, at) / "tokenizer.json"
    path.write_text(
        json.dumps({**json.loads(path.read_text()), **change} if isinstance(change, dict) and change else change)
    )
    return path.parent


def _damage_weights(model: Path, seed: int, at: Path) -> Path:
    path = _copy(model, at) / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(damage_header(content, 8 + int.from_bytes(content[:8], "little"), random.Random(seed)))
    return path.parent


def _damage_gguf(seed: int, at: Path) -> Path:
    path = make_small_gguf(at / "model.gguf")
    path.write_bytes(damage_header(path.read_bytes(), 4096, random.Random(seed)))
    return path


def _move_tensor(number: int, at: Path) -> Path:
    """Write a GGUF file with one of its offsets, the last 8 bytes of a tensor's entry, changed."""
    path = make_small_gguf(at / "model.gguf")
    content, rng = bytearray(path.read_bytes()), random.Random(number)
    entry = content.index(rng.choice([b"token_embd.weight", b"output_norm.weight", b"rope_freqs.weight"]))
    name_end = entry + int.from_bytes(content[entry - 8 : entry], "little")
    offset = name_end + 4 + 8 * int.from_bytes(content[name_end : name_end + 4], "little") + 4
    content[offset : offset + 8] = rng.choice([0, 32, 64, *EXTREMES]).to_bytes(8, "little")
    path.write_bytes(content)
    return path


def load_hostile_file(path: str) -> None:
    """Load a file in this process, and print what came of it, in how much memory more than it had before."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + MAX_CPU_S
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, begun_s = _read_peak_mib(), time.perf_counter()
    settings = EngineSettings(model=path, dtype="float32", pool_mb=16, threads=1, cache_dir=f"{path}-cache")
    outcome, words = LOADED, ""
    try:
        open_model(settings)
    except ModelLoadError as error:
        outcome, words = REFUSED, str(error)
    found = {"outcome": outcome, "words": words, "mib": _read_peak_mib() - before, "s": time.perf_counter() - begun_s}
    print(json.dumps(found), flush=True)  # noqa: T201


def _read_peak_mib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024


def judge_hostile_file(damage: Damage, scratch: Path) -> dict[str, Any]:
    """Write a hostile file and load it in a process of its own. Returns what that said."""
    at = scratch / "files"
    at.mkdir()
    child = fork_process("load", scratch / "log", load_hostile_file, str(damage(at)))
    status = child.wait(PATIENCE_S)
    lines = child.read_log_tail(1000)
    assert status == 0, f"exit status {status}: {lines}"
    found: dict[str, Any] = json.loads(lines.strip().splitlines()[-1])
    return found


if __name__ == "__main__":
    from tests.engine.helpers import make_small_model

    with tempfile.TemporaryDirectory() as top:
        good = make_small_model(Path(top) / "good")
        for which, write in list_hostile_files(good).items():
            if len(sys.argv) > 1 and sys.argv[1] not in which:
                continue
            place = Path(tempfile.mkdtemp(dir=top))
            print(which, judge_hostile_file(write, place), flush=True)  # noqa: T201
            shutil.rmtree(place)
