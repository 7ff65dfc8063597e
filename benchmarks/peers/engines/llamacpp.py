"""llama.cpp through its C interface, with the batching its server does: running sequences first, then prompts."""

import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.gguf_file import write_gguf
from benchmarks.peers.workload import MAX_BATCH, MAX_LENGTH, Request

BATCH_TOKENS = 2048
_FLASH_ATTENTION = 1
_MIXED_FORMS = {"Q4_K_M": 15}
"""By name: llama.cpp's number of a form with tensors of several types."""


def prepare(model: Path, form: str = "BF16") -> Path:
    """The GGUF file, in the directory of the original; made once. `form`: GGUF's name for that of matrices."""
    target = model / f"{form}.gguf"
    if not target.exists():
        scratch = target.with_suffix(".unfinished")
        if form in _MIXED_FORMS:
            _quantize(prepare(model), scratch, _MIXED_FORMS[form])
        else:
            write_gguf(model, scratch, form)
        scratch.rename(target)
    return target


def _quantize(source: Path, target: Path, number: int) -> None:
    """Let llama.cpp choose the types of a file's tensors, and round them."""
    api: Any = importlib.import_module("llama_cpp")
    given = api.llama_model_quantize_default_params()
    given.ftype = number
    if status := api.llama_model_quantize(str(source).encode(), str(target).encode(), given):
        raise RuntimeError(f"llama.cpp cannot quantise {source}: {status}")


def load(*, model: Path, threads: int, pool_mb: int, order: str = "own") -> "LlamaCpp":
    """The model, and room for the longest request. `order` of the weights: its `own`, or that of the `file`."""
    return LlamaCpp(model, threads, pool_mb, is_reordered=order == "own")


@dataclass
class _Running:
    """A request in a slot: what is not in the cache yet, and what it has said."""

    index: int
    slot: int
    pending: list[int]
    left: int
    position: int = 0
    said: list[int] = field(default_factory=list)


class LlamaCpp:
    """One context at a time, made for the run's shape; a shape that comes again finds it there."""

    def __init__(self, model: Path, threads: int, pool_mb: int, *, is_reordered: bool = True) -> None:
        self._api: Any = importlib.import_module("llama_cpp")
        self._quiet = self._api.llama_log_callback(lambda *_: None)
        self._api.llama_log_set(self._quiet, None)
        self._api.llama_backend_init()
        self._threads = threads
        given = self._api.llama_model_default_params()
        given.use_extra_bufts = is_reordered
        self._model = self._api.llama_model_load_from_file(str(model).encode(), given)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        self._vocabulary = self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(self._model))
        self._pool_tokens = pool_mb * 2**20 // count_token_bytes(model)
        self._batch = self._api.llama_batch_init(BATCH_TOKENS, 0, 1)
        self._sampler = self._api.llama_sampler_init_dist(7)
        self._room, self._handle = (1, MAX_LENGTH), self._make_room(1, MAX_LENGTH)

    def run(self, requests: list[Request], on_step: Callable[[list[int]], None], temperature: float) -> list[list[int]]:
        """As many requests at once as the pool has slots for; the others wait for one."""
        length = -(-max(len(prompt) + new for prompt, new in requests) // 256) * 256
        slots = max(1, min(len(requests), MAX_BATCH, self._pool_tokens // length))
        if self._room != (slots, length):
            self._api.llama_free(self._handle)
            self._room, self._handle = (slots, length), self._make_room(slots, length)
        memory = self._api.llama_get_memory(self._handle)
        self._api.llama_memory_clear(memory, False)
        tokens: list[list[int]] = [[] for _ in requests]
        waiting = [(index, *request) for index, request in reversed(list(enumerate(requests)))]
        free, running = list(range(slots)), list[_Running]()
        while waiting or running:
            while waiting and free:
                index, prompt, new = waiting.pop()
                running.append(_Running(index, free.pop(), list(prompt), new))
            sampled = self._run_step(running, temperature)
            on_step([request.index for request in sampled])
            for request in [request for request in sampled if request.left == 0]:
                running.remove(request)
                tokens[request.index] = request.said
                self._api.llama_memory_seq_rm(memory, request.slot, -1, -1)
                free.append(request.slot)
        return tokens

    def _run_step(self, running: list[_Running], temperature: float) -> list[_Running]:
        """Compute one batch; returns the requests that got a token."""
        batch, size, decided = self._batch, 0, list[tuple[_Running, int]]()
        for request in sorted(running, key=lambda request: len(request.pending) > 1):
            part = request.pending[: BATCH_TOKENS - size]
            for token in part:
                batch.token[size], batch.pos[size] = token, request.position
                batch.n_seq_id[size], batch.seq_id[size][0], batch.logits[size] = 1, request.slot, False
                request.position += 1
                size += 1
            request.pending = request.pending[len(part) :]
            if part and not request.pending:
                batch.logits[size - 1] = True
                decided.append((request, size - 1))
        batch.n_tokens = size
        status = self._api.llama_decode(self._handle, batch)
        if status:
            raise RuntimeError(f"llama_decode says {status}")
        for request, row in decided:
            best = self._draw_token(row) if temperature else self._find_likeliest(row)
            request.said.append(best)
            request.pending = [best]
            request.left -= 1
        return [request for request, _ in decided]

    def _find_likeliest(self, row: int) -> int:
        logits = self._api.llama_get_logits_ith(self._handle, row)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocabulary,)).argmax())

    def _draw_token(self, row: int) -> int:
        """Draw a token by its own sampler, at temperature 1, which leaves logits as they are."""
        return int(self._api.llama_sampler_sample(self._sampler, self._handle, row))

    def _make_room(self, slots: int, length: int) -> Any:
        """Return a context of `slots` sequences of `length` tokens each."""
        wanted = self._api.llama_context_default_params()
        wanted.n_seq_max, wanted.n_ctx = slots, slots * length
        wanted.n_batch, wanted.n_ubatch = BATCH_TOKENS, 512
        wanted.n_threads = wanted.n_threads_batch = self._threads
        wanted.flash_attn_type = _FLASH_ATTENTION
        wanted.kv_unified = False
        handle = self._api.llama_init_from_model(self._model, wanted)
        if not handle:
            raise RuntimeError(f"llama.cpp has no room for {slots} sequences of {length} tokens")
        return handle


def count_token_bytes(model: Path) -> int:
    """KV of one token, 16 bits a number, from the configuration beside the converted model."""
    config = json.loads((model.parent / "config.json").read_text())
    return 4 * int(config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"])
