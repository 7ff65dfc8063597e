"""LMCache's remote storage on a Redis, without an engine around it: what its own check of a remote storage makes.

Chunks lie in LMCache's memory objects on the host, from where its engines' connectors take them to the GPU; they are
put and got through its remote backend, in the batches in which its storage manager does.
"""

import asyncio
import importlib
import threading
import time
from pathlib import Path
from typing import Any

_TIMEOUT_S = 60.0


def prepare(model: Path) -> Path:
    """Nothing: no weights are needed."""
    return model


def load(*, model: Path, url: str, layers: int, kv_heads: int, head_size: int, chunk: int, chunks: int) -> "LMCache":
    """Room for `chunks` chunks of `chunk` tokens of bf16 KV, in place, and a connection to `url`.

    `redis://` is its asyncio connector, `resp://` the one in C++ with eight connections.
    """
    return LMCache(url, (layers, 2, chunk, kv_heads, head_size), chunks)


class LMCache:
    """A remote backend and as many chunks in memory as it moves at once."""

    def __init__(self, url: str, shape: tuple[int, int, int, int, int], chunks: int) -> None:
        torch, config, parts = _import_modules()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        room_gb = 3 * chunks * 2 * shape[0] * 2 * shape[2] * shape[3] * shape[4] / 2**30 + 0.1
        settings = config.LMCacheEngineConfig.from_dict({
            "chunk_size": shape[2], "local_cpu": False, "max_local_cpu_size": room_gb, "remote_url": url,
            "remote_serde": "naive", "save_unfull_chunk": False, "extra_config": {"save_chunk_meta": False},
        })  # fmt: skip
        metadata = parts["metadata"].LMCacheMetadata(
            "benchmark", 1, 1, 0, 0, torch.bfloat16, shape, chunk_size=shape[2]
        )
        self._local = parts["local"].LocalCPUBackend(config=settings, metadata=metadata, dst_device="cpu")
        self._remote = parts["remote"].RemoteBackend(settings, metadata, self._loop, self._local, dst_device="cpu")
        assert self._remote.connection is not None, f"LMCache cannot reach {url}"
        sizes = metadata.get_shapes(), metadata.get_dtypes()
        self._objects = [self._local.allocate(*sizes) for _ in range(chunks)]
        for number, one in enumerate(self._objects):
            one.tensor.copy_(torch.full(one.tensor.shape, float(number), dtype=torch.bfloat16))

        def keys(round_number: int) -> list[Any]:
            key = parts["utils"].CacheEngineKey
            return [key("benchmark", 1, 0, round_number * chunks + at, torch.bfloat16) for at in range(chunks)]

        self._keys = keys

    def put(self, number: int) -> float:
        """Seconds for storing all chunks under the keys of round `number`, until the last is acknowledged."""
        keys, done = self._keys(number), threading.Semaphore(0)
        begun_s = time.perf_counter()
        self._remote.batched_submit_put_task(keys, self._objects, on_complete_callback=lambda _: done.release())
        for _ in keys:
            if not done.acquire(timeout=_TIMEOUT_S):
                raise TimeoutError("LMCache did not store its chunks")
        return time.perf_counter() - begun_s

    def get(self, number: int) -> float:
        """Seconds for reading them back. Raises `ValueError` if what was read is something else."""
        keys = self._keys(number)
        begun_s = time.perf_counter()
        found = self._remote.batched_get_blocking(keys)
        taken_s = time.perf_counter() - begun_s
        for at, one in enumerate(found):
            if one is None or float(one.tensor.flatten()[-1]) != float(self._objects[at].tensor.flatten()[-1]):
                raise ValueError(f"chunk {at} came back as something else")
            one.ref_count_down()
        return taken_s


def _import_modules() -> tuple[Any, Any, dict[str, Any]]:
    """Torch, LMCache's configuration, and the modules of its storage."""
    names = {
        "metadata": "lmcache.v1.metadata",
        "local": "lmcache.v1.storage_backend.local_cpu_backend",
        "remote": "lmcache.v1.storage_backend.remote_backend",
        "utils": "lmcache.utils",
    }
    parts = {name: importlib.import_module(module) for name, module in names.items()}
    return importlib.import_module("torch"), importlib.import_module("lmcache.v1.config"), parts
