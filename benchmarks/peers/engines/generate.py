"""transformers' own `generate()`: one static batch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

from benchmarks.peers.workload import Request


def prepare(model: Path) -> Path:
    """The directory as it is."""
    return model


def load(*, model: Path, threads: int, pool_mb: int) -> "Generate":
    """The model in bf16; it has no pool."""
    torch.set_num_threads(threads)
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    loaded.generation_config.eos_token_id = None  # answers end by length
    return Generate(loaded.eval())


class _Steps(BaseStreamer):  # type: ignore[misc, unused-ignore]
    """Hears of each step's tokens; of the prompts first."""

    def __init__(self, on_tokens: Callable[[], None]) -> None:
        self._on_tokens = on_tokens
        self._heard_prompts = False

    def put(self, value: object) -> None:
        if self._heard_prompts:
            self._on_tokens()
        self._heard_prompts = True

    def end(self) -> None:
        pass


class Generate:
    """Requests of one length each."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.inference_mode()
    def run(self, requests: list[Request], on_step: Callable[[list[int]], None], temperature: float) -> list[list[int]]:
        """All requests have as many prompt tokens, and ask for as many new ones."""
        prompts = torch.tensor([prompt for prompt, _ in requests])
        num_new = requests[0][1]
        everybody = list(range(len(requests)))
        output = self._model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=num_new,
            **({"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}),
            streamer=_Steps(lambda: on_step(everybody)),
        )
        tokens: list[list[int]] = output[:, prompts.shape[1] :].tolist()
        return tokens
