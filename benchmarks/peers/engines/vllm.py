"""vLLM on a CPU: the engine under its `LLM`, compiled, driven step by step.

With `cache_mb` it has a prefix cache of this size and is not compiled, and its scheduler is in this process.
"""

import importlib
import itertools
import os
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from benchmarks.peers.workload import MAX_BATCH, MAX_LENGTH, Request

CACHE_BLOCK_TOKENS = 32
"""The fewest that vLLM has on a CPU."""
CACHE_STEP_TOKENS = 512


def prepare(model: Path) -> Path:
    """The directory as it is."""
    return model


def load(
    *, model: Path, threads: int, pool_mb: int, cache_mb: int = 0, max_length: int = MAX_LENGTH
) -> "VLLM | CachingVLLM":
    """Threads and pool are in its environment, but for the size of a cache."""
    if cache_mb:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it counts in GiB, and goes before a size in bytes
    vllm = importlib.import_module("vllm")
    how: dict[str, Any] = {"max_num_batched_tokens": MAX_LENGTH, "enable_prefix_caching": False}
    if cache_mb:
        how = {
            "max_num_batched_tokens": CACHE_STEP_TOKENS, "enable_prefix_caching": True, "enforce_eager": True,
            "block_size": CACHE_BLOCK_TOKENS, "kv_cache_memory_bytes": cache_mb * 2**20, "async_scheduling": False,
        }  # fmt: skip
    llm = vllm.LLM(
        model=str(model), dtype="bfloat16", max_model_len=max_length, max_num_seqs=MAX_BATCH, disable_log_stats=True,
        **how,
    )  # fmt: skip
    return (CachingVLLM if cache_mb else VLLM)(vllm.SamplingParams, llm.llm_engine)


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
            self._add_request(name, prompt, num_new, temperature)
        tokens: list[list[int]] = [[] for _ in requests]
        while self._engine.has_unfinished_requests():
            told = []
            for output in self._engine.step():
                index, new = names[output.request_id], list(output.outputs[0].token_ids)
                tokens[index] += new
                told += [index] * len(new)
            on_step(told)
        return tokens

    def _add_request(self, name: str, prompt: list[int], num_new: int, temperature: float) -> None:
        sampling = self._sampling(
            temperature=temperature, max_tokens=num_new, ignore_eos=True, detokenize=False, output_kind=self._delta
        )
        self._engine.add_request(name, {"prompt_token_ids": prompt}, sampling)


class CachingVLLM(VLLM):
    """vLLM with its prefix cache, whose blocks are least recently used first."""

    def __init__(self, sampling: Any, engine: Any) -> None:
        super().__init__(sampling, engine)
        self._pool = engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
        self._utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
        self._others = itertools.count()

    def ask(self, prompt: list[int], num_new: int) -> dict[str, Any]:
        """Answer a request alone: the seconds to its first token, its tokens, and how many of the prompt were found."""
        begun_s, first_s, num_cached, tokens = time.perf_counter(), 0.0, 0, list[int]()
        self._add_request(f"ask {next(self._runs)}", prompt, num_new, 0.0)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                first_s = first_s or time.perf_counter() - begun_s
                num_cached = output.num_cached_tokens or num_cached
                tokens += output.outputs[0].token_ids
        return {"first_s": first_s, "tokens": tokens, "num_cached": num_cached}

    def fill(self, num_tokens: int) -> None:
        """Let blocks of others take their place in the cache, as if so many tokens had been computed for them."""
        left = num_tokens // CACHE_BLOCK_TOKENS
        while left:
            blocks = self._pool.get_new_blocks(min(left, self._pool.get_num_free_blocks()))
            for block in blocks:
                key = self._utils.BlockHash(sha256(f"other {next(self._others)}".encode()).digest())
                named = self._utils.make_block_hash_with_group_id(key, 0)
                self._pool._insert_block_hash(named, block, num_tokens=CACHE_BLOCK_TOKENS)  # noqa: SLF001 - what `cache_full_blocks` does, without a request
            self._pool.free_blocks(blocks)
            left -= len(blocks)
