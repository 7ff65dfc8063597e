"""The entry to the engine: open it alone or above a KV store, and write a file of packed weights."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from penstock.config.settings import EngineSettings, KVSettings, SloSettings
from penstock.cores import list_usable_cores
from penstock.engine.engine import Engine
from penstock.engine.kernels.products import find_slow_products, list_products
from penstock.engine.loading.loading import load_stage_models
from penstock.engine.loading.packed import find_packed_place, pack_model
from penstock.engine.loading.proof import describe_proof
from penstock.engine.memory.memory import choose_pool
from penstock.engine.serving import EngineCore, ServingEngine
from penstock.engine.weights.files import Progress, ignore_progress
from penstock.engine.weights.load_cache import LoadCache
from penstock.engine.weights.packed_file import accept_packed_file
from penstock.kvstore.store import KVStore, StoreLayout

__all__ = [
    "Engine", "OpenCore", "accept_packed_file", "describe_speed", "find_packed_place", "open_engine",
    "open_serving_engine", "pack_model",
]  # fmt: skip

OpenCore = Callable[[EngineSettings, Progress], EngineCore]
"""Opens a core, as `open_engine` does."""

log = logging.getLogger("penstock.engine")

MAX_SPEED_AGE_S = 3600.0
"""How long the engine's measured speed is taken from the load cache: it also depends on what else the machine did."""


def open_engine(
    settings: EngineSettings,
    report: Progress = ignore_progress,
    *,
    only_prompts: bool = False,
    sees: bool = True,
    slo: SloSettings | None = None,
) -> Engine:
    """Load the model, prove that the engine gives its tokens, and return the engine after it measured its speed.

    With `only_prompts` it computes prompts and the token after them, and has only the weights that this needs.
    Without `sees` it computes no row of a picture, and its model has no vision part. `slo` bounds the gaps of
    interactive answers; without it the defaults do. Raises `ModelLoadError`; its `EngineCheckFailed` means that tokens
    differ from `generate()`'s. Raises `SettingsError` for an instruction set that this machine lacks.
    """
    model = load_stage_models(settings, report, only_prompts=only_prompts, sees=sees)
    begun_s, pool = time.perf_counter(), choose_pool(model.layout, model.context_length, settings, model.device)
    log.info(
        "%s computes in %s (%s) on %s by %s (%s), with %d threads (%s) and a KV pool of %d MiB (%s)",
        settings.model, str(model.dtype).removeprefix("torch."), model.dtype_reason, model.device, model.backend_name,
        "the best here" if settings.isa == "auto" else "PENSTOCK_ENGINE_ISA", settings.num_threads,
        "PENSTOCK_ENGINE_THREADS" if settings.threads else "the cores that it may use", *pool,
    )  # fmt: skip
    settings = settings.model_copy(update={"pool_mb": pool.pool_mb})
    engine = Engine(model, settings)
    engine.scheduler.slo = slo or engine.scheduler.slo
    load_cache, about = LoadCache(settings.find_cache_directory()), describe_speed(engine)
    speed = load_cache.read_finding("speed", about, max_age_s=MAX_SPEED_AGE_S)
    if speed:
        engine.use_measured_speed(speed)
    else:
        engine.measure_speed()
        speed = {**engine.measured_speed, "slow_products": []}
        if model.native is not None:
            speed["slow_products"] = find_slow_products(model.native.library, list_products(model.module))
            model.native.library.set_threads(settings.num_threads)
        load_cache.write_finding("speed", about, speed)
    engine.slow_products = speed["slow_products"]
    if engine.slow_products:
        log.warning(
            "native kernels are slower than torch for these shapes; kept because torch's results depend on the batch "
            "size: %s", "; ".join(engine.slow_products),
        )  # fmt: skip
    engine.pool_mapping.start()
    log.info("%s: found the speed of steps in %.2f s", settings.model, time.perf_counter() - begun_s)
    return engine


def describe_speed(engine: Engine) -> dict[str, Any]:
    """Return all that the engine's speed depends on, but for what else this machine does."""
    names = ("num_threads", "max_batch", "max_step_tokens", "prefill_weights")
    sizes = {name: getattr(engine.settings, name) for name in names}
    return {**describe_proof(engine.model, engine.settings), **sizes, "cores": list_usable_cores()}


@contextmanager
def open_serving_engine(core: EngineCore, kv: KVSettings, kv_urls: str, pipeline: str) -> Iterator[ServingEngine]:
    """Open the tiers of a KV store for a core, and give both as an engine. The store is closed at the end.

    Raises what `KVStore.open` raises.
    """
    store = KVStore.open(StoreLayout.from_model(core.model), kv, kv_urls, pipeline)
    try:
        store.set_compute_speed(core.prefill_tokens_per_s)
        yield ServingEngine(core, store)
    finally:
        if core.model.vision is not None:
            core.model.vision.close()
        store.close()
