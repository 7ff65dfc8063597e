"""Published checkpoints: their configurations in `tools/configurations/`, and what is said of each on docs/models.md.

A file has the checkpoints of one family by their names on the hub. `config` has those keys of a checkpoint's
config.json that its architecture depends on; with `like` they are added to those of another checkpoint. `source` is a
key of sources.json: where the values were read. `rebuilt` says what they were rebuilt from instead.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoConfig

from penstock.engine.weights.quantized import take_quantization, unpack_weights
from penstock.engine.weights.weights import MappedWeights
from penstock.errors import ModelLoadError

FOLDER = Path(__file__).parent / "configurations"
MOST_USED: dict[str, str] = {
    "Qwen/Qwen3-VL-2B-Instruct": "among the first by circulation",
    "Qwen/Qwen3.6-35B-A3B": "among the first by circulation, 21 million downloads a month",
    "Qwen/Qwen3.6-27B": "among the first by circulation",
    "google/gemma-4-26B-A4B-it": "among the first by circulation",
    "google/gemma-4-31B-it": "among the first by circulation",
    "openai/gpt-oss-20b": "eighth by circulation",
    "Qwen/Qwen3-0.6B": "among the most downloaded text models",
    "Qwen/Qwen3-4B": "among the most downloaded text models",
    "deepseek-ai/DeepSeek-V4-Flash": "among the most used on OpenRouter",
    "MiniMaxAI/MiniMax-M3": "among the most used on OpenRouter",
    "zai-org/GLM-5.2": "among the most used on OpenRouter",
}
"""Checkpoints that are used the most, and what is known of it."""
USAGE_SOURCE = "leaderboards of solmaz.io, the Hugging Face hub and OpenRouter, as noted in November 2026"
_SOURCES = FOLDER / "sources.json"


@dataclass(frozen=True)
class Checkpoint:
    """A published checkpoint: weights and a configuration."""

    family: str
    name: str
    """Its name on the hub."""
    config: dict[str, Any]
    source: str
    """Where its configuration was read, or what it was rebuilt from."""
    is_rebuilt: bool


@dataclass(frozen=True)
class CheckpointVerdict:
    """What was found out about one published checkpoint."""

    checkpoint: Checkpoint
    kernels: str
    """How much of it the native kernels compute: `whole`, `layers`, `parts`; empty where it is refused."""
    weights: str
    """The format of its weights, empty where they are plain."""
    reason: str
    """Why it is refused, a sentence; empty if it is served."""

    @property
    def is_served(self) -> bool:
        """Whether its tokens were proved equal, and its weights can be read."""
        return not self.reason


@cache
def read_checkpoints() -> dict[str, Checkpoint]:
    """Read all configurations, by the names of the checkpoints. Raises `ValueError` for one that is not complete."""
    sources = json.loads(_SOURCES.read_text())
    families = [json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json")) if path != _SOURCES]
    entries = {name: (file["family"], entry) for file in families for name, entry in file["models"].items()}
    checkpoints = {}
    for name, (family, entry) in entries.items():
        if ("source" in entry) == ("rebuilt" in entry) or entry.get("source", "mlc-llm") not in sources:
            raise ValueError(f"{name} must have either a source that sources.json knows, or what it was rebuilt from")
        config = dict(entry["config"])
        base = entry.get("like")
        while base is not None:
            config = {**entries[base][1]["config"], **config}
            base = entries[base][1].get("like")
        source = sources[entry["source"]] if "source" in entry else entry["rebuilt"]
        checkpoints[name] = Checkpoint(family, name, config, source, "rebuilt" in entry)
    return checkpoints


def make_config(checkpoint: Checkpoint) -> Any:
    """Return transformers' configuration of the checkpoint, read as the engine reads it. Raises `ModelLoadError`."""
    with TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(checkpoint.config))
        try:
            return AutoConfig.from_pretrained(directory, trust_remote_code=False)
        except Exception as error:
            if "does not recognize this architecture" in str(error):
                kind = checkpoint.config["model_type"]
                raise ModelLoadError(f"transformers has no model of type {kind}, only code of its authors") from error
            raise ModelLoadError(f"its configuration cannot be read: {error}") from error


def describe_weights(checkpoint: Checkpoint) -> str:
    """Return the format of the checkpoint's weights in a few words; empty if they are plain."""
    config = checkpoint.config
    settings = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if settings is None:
        return ""
    method = settings["quant_method"]
    if method == "compressed-tensors":
        return f"compressed-tensors {settings['format']}"
    if method == "gptq":
        return f"GPTQ {settings['bits']} bits"
    if method == "modelopt":
        return f"ModelOpt {settings['quant_algo']}"
    if method == "bitsandbytes":
        return f"bitsandbytes {4 if settings.get('load_in_4bit') else 8} bits"
    return {"fp8": "FP8", "awq": "AWQ", "mxfp4": "MXFP4"}.get(method, str(method))


def check_weights(config: Any) -> None:
    """Raise `ModelLoadError` if weights in the format that the configuration names cannot be read.

    `quantization_config` is taken out of `config`.
    """
    unpack_weights(MappedWeights([]), take_quantization(config), torch.float32)


def make_rows(verdicts: Iterable[CheckpointVerdict]) -> str:
    """Return the tables of all families: a row for all checkpoints of which the same is said."""
    families: dict[str, dict[tuple[str, str, str, str], list[Checkpoint]]] = {}
    for verdict in verdicts:
        rows = families.setdefault(verdict.checkpoint.family, {})
        key = (verdict.checkpoint.config["model_type"], verdict.weights, verdict.kernels, verdict.reason)
        rows.setdefault(key, []).append(verdict.checkpoint)
    text = ""
    for family, rows in families.items():
        text += f"\n### {family}\n\n| Checkpoints | Architecture | Weights | | Kernels, or why not |\n"
        text += "|---|---|---|---|---|\n"
        for (kind, weights, kernels, reason), checkpoints in rows.items():
            names = "<br>".join(point.name + ("*" if point.is_rebuilt else "") for point in checkpoints)
            text += f"| {names} | {kind} | {weights} | {'refused' if reason else 'equal'} | {reason or kernels} |\n"
    return text


def make_usage_table(verdicts: Iterable[CheckpointVerdict]) -> str:
    """Return what is said of the checkpoints that are used the most."""
    by_name = {verdict.checkpoint.name: verdict for verdict in verdicts}
    served = sum(by_name[name].is_served for name in MOST_USED)
    rows = "".join(
        f"| {name} | {use} | {'equal' if by_name[name].is_served else 'refused'} |\n" for name, use in MOST_USED.items()
    )
    return (
        f"{served} of these {len(MOST_USED)} are served ({USAGE_SOURCE}; most of the figures are ranks, so a share of "
        f"all use is not known).\n\n| Checkpoint | Use | |\n|---|---|---|\n{rows}"
    )
