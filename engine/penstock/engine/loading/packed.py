"""Open a model's file of packed weights, or write one."""

import hashlib
import logging
import os
from pathlib import Path
from typing import Any

from penstock.config.settings import EngineSettings
from penstock.engine.kernels.library import load_library
from penstock.engine.loading.checkpoint import load_checkpoint, prove_once
from penstock.engine.loading.description import LAYOUT_VERSION, Load, as_load_errors
from penstock.engine.loading.packed_model import (
    check_packed_content,
    compare_probe_logits,
    find_difference,
    list_fitting_forms,
    read_layer_shapes,
    restore_module,
    write_packed_model,
)
from penstock.engine.loading.proof import describe_proof, prove_backend
from penstock.engine.memory.memory import check_memory
from penstock.engine.memory.storage import BlockLayout
from penstock.engine.model.model import LoadedModel
from penstock.engine.weights.files import Progress, ignore_progress
from penstock.engine.weights.module import build_skeleton, leave_out_vision
from penstock.engine.weights.packed_file import PackedFile, PackedFileRefused, open_packed_file
from penstock.engine.weights.quantized import UNPACKING_VERSION

log = logging.getLogger("penstock.engine")


def open_packed(load: Load) -> LoadedModel | None:
    """Return the model from the first packed file that fits, or None, after it is logged why none does.

    Raises `PackedFileRefused` for a file that the settings name.
    """
    for path in _list_packed_files(load):
        try:
            return _load_packed(load, path)
        except PackedFileRefused as error:
            if load.settings.packed:
                raise
            log.warning("packed weights are not used: %s", error)
    return None


def _list_packed_files(load: Load) -> list[Path]:
    """Return the packed files that there are for these settings. A named one is listed even if it is not there."""
    settings = load.settings
    if settings.packed:
        return [Path(settings.packed).expanduser()]
    if not load.can_pack():
        return []
    return [path for path in _list_places(load) if path.is_file()]


def _list_places(load: Load) -> list[Path]:
    """Return where a packed file may be, the best place first: beside the model, or in the cache."""
    digest, dtype = hashlib.sha256(str(load.directory.resolve()).encode()).hexdigest(), str(load.dtype)
    directories = load.directory, load.settings.find_cache_directory() / "packed" / digest[:32]
    forms = list_fitting_forms(load.settings.weights)
    names = [f"penstock-{form}-{dtype.removeprefix('torch.')}.packed" for form in forms]
    return [directory / name for name in names for directory in directories]


def _load_packed(load: Load, path: Path) -> LoadedModel:
    """Load a packed file. Raises `PackedFileRefused` if it does not fit, is damaged or gives other logits."""
    settings, native = load.settings, load_library()
    if native is None or not load.can_pack():
        raise PackedFileRefused(f"{path} needs the native kernels, a CPU, and float32 or bfloat16")
    file = open_packed_file(path)
    load.hash_files()
    if difference := find_difference(file.about, settings.weights, _describe_source(load)):
        raise PackedFileRefused(f"{path} is not used: {difference}; `penstock weights pack` writes it anew")
    left_out = 0 if load.has_vision else leave_out_vision(build_skeleton(load.config, load.dtype))
    check_memory(file.num_bytes - left_out, settings.pool_mb, load.device, load.picture_bytes)
    with load.measure("content"):
        check_packed_content(file, load.load_cache, load.report)
    with load.measure("mapping"):
        module, parts = restore_module(file, build_skeleton(load.config, load.dtype), native)
        if not load.has_vision:  # it is mapped, and no page of it was read
            leave_out_vision(module)
        layout = BlockLayout(read_layer_shapes(file), settings.block_size, load.dtype, settings.kv_dtype == "int8")
        if layout.is_int8 and parts.layers != layout.by_layer.keys():
            raise PackedFileRefused(f"{path} has attention that the kernels cannot compute over int8")
        model = load.build_model(
            module, layout, vocab_size=file.about["vocab_size"], stock_attention=file.about["stock_attention"],
            native=parts, weight_form=file.about["weight_form"],
        )  # fmt: skip
    with load.measure("logits"):
        native.set_threads(settings.num_threads)
        compare_probe_logits(file, model)
    about = describe_proof(model, settings, packed=file.digest)
    if not load.load_cache.read_finding("proof", about):  # what the file has was proved before, but not the backend
        with load.measure("proof"):
            prove_backend(model, settings)
        load.load_cache.write_finding("proof", about, found=True)
    load.report("checking the engine", 1.0)
    log.info("weights are mapped from %s", path)
    return model


def _describe_source(load: Load) -> dict[str, Any]:
    """Return what a packed file has to be made of: configuration, weight files, dtype, form of KV and unpacking."""
    return {
        "config": hashlib.sha256((load.directory / "config.json").read_bytes()).hexdigest(),
        "files": [[file.name, file.stat().st_size, one] for file, one in zip(load.files, load.hashes, strict=True)],
        "dtype": str(load.dtype).removeprefix("torch."),
        "form": f"penstock kv layout {LAYOUT_VERSION}" + (f" {UNPACKING_VERSION}" if load.quantization else ""),
    }


def pack_model(settings: EngineSettings, out: Path | None = None, report: Progress = ignore_progress) -> PackedFile:
    """Load, prove and pack `settings.model` into a file, load that, and return it.

    Without `out` it is written beside the model, or into the cache where that cannot be written. Raises
    `ModelLoadError`.
    """
    with as_load_errors(settings.model):
        settings = settings.model_copy(update={"packed": ""})
        load = Load(settings, report)
        model = prove_once(load, load_checkpoint(load))
        source = _describe_source(load)
        path = out or _choose_place(load)
        path.parent.mkdir(parents=True, exist_ok=True)
        report("writing packed weights", 0.0)
        file = write_packed_model(model, settings.weights, source, path)
        report("writing packed weights", 1.0)
        load.check_unchanged()
        # It was proved above, and what is proved once with this file need not be proved again.
        load.load_cache.write_finding("proof", describe_proof(model, settings, packed=file.digest), found=True)
        _load_packed(load, path)
        return file


def _choose_place(load: Load) -> Path:
    beside_model, in_cache, *_ = _list_places(load)
    is_writable = os.access(load.directory, os.W_OK) and load.settings.model != "demo"
    return beside_model if is_writable else in_cache


def find_packed_place(settings: EngineSettings) -> Path:
    """Return where `pack_model` writes the file of these settings. Raises `ModelLoadError`."""
    with as_load_errors(settings.model):
        return _choose_place(Load(settings, ignore_progress))


def find_packed_file(settings: EngineSettings) -> tuple[PackedFile | None, str]:
    """Return the packed file that a load would open first, or None and why there is none. It reads no weights."""
    with as_load_errors(settings.model):
        load = Load(settings, ignore_progress)
        for path in _list_packed_files(load):
            try:
                return open_packed_file(path), ""
            except PackedFileRefused as error:
                return None, str(error)
    return None, ""
