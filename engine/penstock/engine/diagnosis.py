"""Checks for `penstock doctor`: whether this machine has what computes the model of the settings.

torch is imported only where a check needs it: the cheap checks come first.
"""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.config.settings import EngineSettings
from penstock.engine.weights.files import DEMO_MODEL, check_model_here
from penstock.errors import DependencyMissing, ModelLoadError, PenstockError, SettingsError
from penstock.findings import Finding

if TYPE_CHECKING:
    from penstock.engine.kernels.library import Library


def check_engine(settings: EngineSettings) -> Iterator[Finding]:
    """Yield the findings about the model, its packed weights, this machine and the kernels."""
    yield from _check_model(settings)
    yield from _check_packed_weights(settings)
    yield from _check_machine()
    yield from check_kernels(settings)


def _check_model(settings: EngineSettings) -> Iterator[Finding]:
    if settings.kind == "openai":
        return
    try:
        check_model_here(settings.model, cache=settings.find_cache_directory())
    except ModelLoadError as error:
        yield Finding("fail", "model", f"{settings.model}: {error}", "")
    else:
        yield Finding("ok", "model", f"{settings.model}, which callers ask for as {settings.find_served_name()!r}")


def _check_packed_weights(settings: EngineSettings) -> Iterator[Finding]:
    """Say whether a worker would map packed weights, and what a file of them saves."""
    directory = DEMO_MODEL if settings.model == "demo" else Path(settings.model)
    if settings.kind != "own" or not directory.exists() or importlib.util.find_spec("torch") is None:
        return
    file, reason = None, ""
    # Which of them fits only a load says, for which torch is imported.
    if settings.packed or [*directory.glob("*.packed"), *settings.find_cache_directory().glob("packed/*/*.packed")]:
        from penstock.engine.loading.packed import find_packed_file

        try:
            file, reason = find_packed_file(settings)
        except PenstockError:
            return  # of what is wrong with the model, the worker that loads it says more
    if file is not None:
        stored = file.about["checkpoint_bytes"]
        found = (
            f"{file.path}: {file.num_bytes / 2**20:,.0f} MiB, mapped by all workers, of {stored / 2**20:,.0f} stored"
        )
        yield Finding("ok", "packed weights", found)
        return
    found = reason or "no file: each worker packs its own copy when it starts"
    yield Finding("note", "packed weights", found, f"penstock weights pack {settings.model}")


def _check_machine() -> Iterator[Finding]:
    yield Finding("ok", "cores", str(os.cpu_count()))
    if importlib.util.find_spec("torch") is not None:
        import torch

        found = torch.cuda.get_device_name() if torch.cuda.is_available() else "none, workers run on the CPU"
        yield Finding("ok", "GPU", found)


def check_kernels(settings: EngineSettings) -> Iterator[Finding]:
    """Check that the engine's kernels were built, and say what that means for tokens in 16 bits."""
    if importlib.util.find_spec("torch") is None:
        return
    from penstock.engine.kernels import library

    try:
        native = library.load_library()
        if native is not None and (isa := settings.isa) != "auto":
            native.select_isa(isa)
    except (DependencyMissing, SettingsError) as error:
        yield Finding("fail", "native kernels", str(error))
        return
    if native is not None:
        yield from _check_products(native)
        return
    found = "not built: slower, and in bfloat16 some tokens depend on the batch; in float32 none does"
    advice = "install a C++ compiler (Debian: apt-get install g++), then the project again"
    yield Finding("note", "native kernels", found, advice)


def _check_products(native: "Library") -> Iterator[Finding]:
    """Compare the kernels' products with torch's own, in each form."""
    import torch

    from penstock.engine.kernels.library import TORCH
    from penstock.engine.kernels.packed import DTYPES, WeightForm
    from penstock.engine.kernels.products import Product, find_slow_products

    if native.isa == TORCH:
        found = (
            "not used (PENSTOCK_ENGINE_ISA=torch): in bfloat16 some tokens depend on the batch; in float32 none does"
        )
        yield Finding("note", "native kernels", found, "unset PENSTOCK_ENGINE_ISA")
        return
    yield Finding("ok", "native kernels", f"{native.isa}; in bfloat16 too no token depends on the batch")
    products = [Product(1024, 1024, dtype, WeightForm.STORED) for dtype in DTYPES]
    products += [
        Product(1024, 1024, torch.bfloat16, form) for form in (WeightForm.INT8, WeightForm.INT4, WeightForm.COMPRESSED)
    ]
    if slow := find_slow_products(native, products):
        advice = "they are kept, as no token depends on the batch; PENSTOCK_ENGINE_ISA=torch computes with torch's"
        yield Finding("note", "native products", f"slower than torch's own: {'; '.join(slow)}", advice)
