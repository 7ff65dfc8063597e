"""vLLM on a CPU: the engine under its `LLM`, compiled, driven step by step."""

import importlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.peers.workload import MAX_BATCH, MAX_LENGTH, Request


def prepare(model: Path) -> Path:
    """The directory as it is."""
    return model


def load(*, model: Path, threads: int, pool_mb: int) -> "VLLM":
    """Threads and pool are in its environment."""
    vllm = importlib.import_module("vllm")
    llm = vllm.LLM(
        model=str(model), dtype="bfloat16", max_model_len=MAX_LENGTH, max_num_batched_tokens=MAX_LENGTH,
        max_num_seqs=MAX_BATCH, enable_prefix_caching=False, disable_log_stats=True,
    )  # fmt: skip
    return VLLM(vllm.SamplingParams, llm.llm_engine)


class VLLM:
    """Its requests have names; these are made of a run's number and the request's index."""

    def __init__(self, sampling: Any, engine: Any) -> None:
        self._sampling, self._engine = sampling, engine
        self._runs = itertools.count()
        self._delta = importlib.import_module("vllm.sampling_params").RequestOutputKind.DELTA

    def run(self, requests: list[Request], on_step: Callable[[list[int]], None], temperature: float) -> list[list[int]]:
        """Submit all, and step until nothing is left."""
        number = next(self._runs)
        names = {f"{number}.{index}": index for index in range(len(requests))}
        for name, index in names.items():
            prompt, num_new = requests[index]
            sampling = self._sampling(
                temperature=temperature, max_tokens=num_new, ignore_eos=True, detokenize=False, output_kind=self._delta
            )
            self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        tokens: list[list[int]] = [[] for _ in requests]
        while self._engine.has_unfinished_requests():
            told = []
            for output in self._engine.step():
                index, new = names[output.request_id], list(output.outputs[0].token_ids)
                tokens[index] += new
                told += [index] * len(new)
            on_step(told)
        return tokens
