"""Load a model: weights, tokenizer, the form of its KV blocks, and the fingerprint that names all of it.

`demo` is the model in this repository; a directory or a hub name takes the same way. Only safetensors weights
are read, so loading runs no code of the model's author.

    files ─▶ enough memory? ─▶ map, sizes agree? ─▶ read once: digests ─▶ module ─▶ probe ─▶ fingerprint

Quantised weights are unpacked while the module reads them (`quantized.py`). Where there is a file of packed weights,
it is mapped instead, and no tensor of the checkpoint is read (`packed_model.py`). Hashes of files and the proof are
noted on this machine (`load_cache.py`), so that the next start finds them.
"""

import hashlib
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer

from penstock.config.settings import EngineSettings
from penstock.engine.device import describe_device
from penstock.engine.kernels.library import TORCH, load_library
from penstock.engine.kernels.products import choose_products
from penstock.engine.loading.dtype import PARTLY_NATIVE, choose_dtype
from penstock.engine.loading.packed_model import (
    check_packed_content,
    compare_probe_logits,
    find_difference,
    list_fitting_forms,
    read_layer_shapes,
    restore_module,
    write_packed_model,
)
from penstock.engine.loading.probe import check_config, find_unscaled_context, probe_layout
from penstock.engine.loading.proof import describe_proof, prove_backend, prove_model
from penstock.engine.loading.windows import list_unproved_windows, list_unread_windows
from penstock.engine.memory.memory import check_memory
from penstock.engine.memory.storage import BlockLayout
from penstock.engine.model.accelerate import accelerate_model, can_pack
from penstock.engine.model.model import LoadedModel
from penstock.engine.text.chat_template import check_template
from penstock.engine.text.response_template import find_response_template
from penstock.engine.text.template_process import shared_process
from penstock.engine.weights.file_checks import build_tokenizer_error
from penstock.engine.weights.files import Progress, find_model, find_weight_files, ignore_progress, to_one_line
from penstock.engine.weights.fingerprint import compute_fingerprint, hash_files
from penstock.engine.weights.forms import GGUF, QUANTIZED, can_use_blocks
from penstock.engine.weights.load_cache import LoadCache
from penstock.engine.weights.module import (
    build_skeleton,
    check_weight_sizes,
    count_bytes,
    load_generation_config,
    load_module,
)
from penstock.engine.weights.packed_file import PackedFile, PackedFileRefused, open_packed_file
from penstock.engine.weights.quantized import UNPACKING_VERSION, take_quantization, unpack_weights
from penstock.engine.weights.weights import MappedWeights
from penstock.errors import (
    EngineCheckFailed,
    ModelLoadError,
    ModelUnavailable,
    SettingsError,
    build_damage_error,
    choose_load_error,
    is_failure,
)

log = logging.getLogger("penstock.engine")

LAYOUT_VERSION = 2
"""Counts the changes of how a block's bytes are arranged; part of the fingerprint."""
MAX_CONTEXT = 2**31
"""More tokens no request may ask for."""
_NO_LENGTH_LIMIT = 10**9  # tokenizers without a limit of their own say something enormous


def load_stage_models(
    settings: EngineSettings, report: Progress = ignore_progress, *, only_prompts: bool = False
) -> LoadedModel:
    """Load and prove the model, twice where prompts and answers are computed with weights in two forms.

    Returns the one for answers, which has that for prompts; with `only_prompts` that for prompts. Raises as
    `open_engine`.
    """
    for_prompts = settings.model_copy(update={"weights": settings.prefill_weights or settings.weights})
    forms = _name_form(for_prompts, settings.weights), _name_form(settings, for_prompts.weights)
    if forms[0] == forms[1]:
        used = for_prompts if only_prompts else settings
        return open_model(used, report)
    for_prompts = for_prompts.model_copy(update={"packed": ""})  # it names the file for answers
    prompts = open_model(for_prompts, report)
    prompts = replace(prompts, stage_forms=forms)
    if prompts.layout.states is not None:
        raise ModelLoadError(
            f"{settings.model} keeps a recurrent or convolution state, which one form of weights computes: leave out "
            f"PENSTOCK_ENGINE_PREFILL_WEIGHTS"
        )
    if only_prompts:
        return prompts
    # Both write to one pool, in the dtype that was chosen for prompts.
    dtype = str(prompts.dtype).removeprefix("torch.")
    answers = replace(
        open_model(settings.model_copy(update={"dtype": dtype}), report), dtype_reason=prompts.dtype_reason
    )
    if answers.content_fingerprint != prompts.content_fingerprint:
        raise ModelUnavailable(f"{settings.model} was written to while it was loaded")
    return replace(answers, stage_forms=forms, prompt_model=prompts)


def _name_form(settings: EngineSettings, other: str) -> str:
    """Return the form of a stage's weights: what has the same bits has the same name. `other` is the other stage's."""
    if settings.weights != "auto" or other == "auto":  # where both stages have one setting there is nothing to tell
        return settings.weights if settings.weights in QUANTIZED else ""
    with as_load_errors(settings.model):
        files = find_weight_files(find_model(settings.model, ignore_progress, settings.find_cache_directory()))
    return GGUF if files[0].suffix == ".gguf" else ""


def load_model(settings: EngineSettings, report: Progress = ignore_progress) -> LoadedModel:
    """Load `settings.model`. Raises `ModelLoadError`, with the reason, for anything that cannot be served."""
    with as_load_errors(settings.model):
        model = _load_checkpoint(_Load(settings, report))
        check_memory(model.weights.count_saved_bytes(), settings.pool_mb, model.device)
        model.weights.read_to_stay(*model.module.modules())
    return model


class _Load:
    """The load of one model: what is known of it before any of its weights is read, and how long the parts took."""

    def __init__(self, settings: EngineSettings, report: Progress) -> None:
        """Read the model's description. Raises `ModelLoadError` if it shows that the model cannot be served."""
        self.settings, self.report = settings, report
        self.load_cache = LoadCache(settings.find_cache_directory())
        self.hashes: list[str] = []
        """Of the weight files, once they were found."""
        self._seconds: dict[str, float] = {}
        with self.measure("description"):
            prepare_transformers()
            torch.set_num_threads(settings.num_threads)
            _select_isa(settings.isa)
            self.directory = find_model(settings.model, report, settings.find_cache_directory())
            self.files = find_weight_files(self.directory)
            self._stats = self._stat_files()
            self.device = _parse_device(settings.device)
            self.config = load_config(self.directory)
            check_config(self.config)
            self.quantization = take_quantization(self.config)
        with self.measure("tokenizer"):
            self.tokenizer = load_tokenizer(self.directory)
            self.context_length = find_context_length(self.config, self.tokenizer)
            _report_context(settings.model, self.config, self.context_length)
        with self.measure("dtype"):
            native, forms = load_library(), {settings.weights, settings.prefill_weights, settings.kv_dtype}
            isa = native.isa if native is not None and native.isa != TORCH else ""
            is_quantized = self.quantization is not None
            self.chosen = choose_dtype(settings.dtype, self.config, self.device, isa, is_quantized=is_quantized)
            self.dtype = self.chosen.dtype
            if native is not None and settings.isa == "auto" and forms <= {"auto", "bf16", ""} and self.can_pack():
                choose_products(native, self.dtype)

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        """Add the time within the context to that of a part of the load."""
        begun_s = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[part] = self._seconds.get(part, 0.0) + time.perf_counter() - begun_s

    def log_end(self) -> None:
        """Log how long the load and its parts took."""
        parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in self._seconds.items())
        log.info("%s is loaded in %.2f s (%s)", self.settings.model, sum(self._seconds.values()), parts)

    def can_pack(self) -> bool:
        """Return whether the native kernels compute the model."""
        return can_pack(self.device, self.dtype)

    def _stat_files(self) -> list[tuple[int, ...]]:
        """Return the attributes of the model's files that change when one is written or replaced."""
        stats = map(Path.stat, [self.directory / "config.json", *self.files])
        return [(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for s in stats]

    def check_unchanged(self) -> None:
        """Raise `ModelUnavailable` if a file was written to since it was first looked at."""
        if self._stat_files() != self._stats:
            raise ModelUnavailable(f"{self.directory} was written to while it was loaded")

    def hash_files(self) -> None:
        """Find the hash of each weight file, read or noted."""
        with self.measure("hashes"):
            self.hashes = hash_files(self.files, self.report, self.load_cache)

    def build_model(self, module: Any, layout: BlockLayout, **given: Any) -> LoadedModel:
        """Return the loaded model."""
        form = f"penstock kv layout {LAYOUT_VERSION}\n{layout}"
        if self.quantization is not None:
            form += f"\nunpacking {UNPACKING_VERSION}"
        name = compute_fingerprint(self.directory, self.files, self.hashes, module.config, form)
        self.check_unchanged()
        generation = load_generation_config(self.directory)
        template = self.settings.response_template
        return LoadedModel(
            name=self.settings.model,
            config=self.config,
            tokenizer=self.tokenizer,
            response_template=find_response_template(self.tokenizer, self.config.model_type, template),
            context_length=self.context_length,
            eos_token_ids=find_eos_token_ids(generation, self.config, self.tokenizer),
            dtype=self.dtype,
            dtype_reason=self.chosen.reason,
            device=self.device,
            content_fingerprint=name,
            module=module,
            layout=layout,
            **given,
        )


def _select_isa(isa: str) -> None:
    """Let the kernels run on the instruction set that a setting names. Raises `SettingsError` if that cannot be."""
    native = load_library()
    if native is not None:
        native.select_isa("" if isa == "auto" else isa)
    elif isa not in ("auto", TORCH):
        raise SettingsError(f"PENSTOCK_ENGINE_ISA={isa} needs the native kernels, which were not built: set `auto`")


def _load_checkpoint(load: _Load) -> LoadedModel:
    """Load the model's own weights. A GGUF file's matrices that the kernels will compute with stay there until then."""
    native, weights = load_library(), MappedWeights(load.files)
    with load.measure("skeleton"):
        skeleton = build_skeleton(load.config, load.dtype, 4 * len(weights.tensors) + 1000)
    unpack_weights(weights, load.quantization, load.dtype)
    if native is not None and load.can_pack():
        weights.keeps_blocks = can_use_blocks(native, load.settings.weights)
    check_weight_sizes(skeleton, weights)
    check_memory(count_bytes(skeleton) - weights.count_saved_bytes(), load.settings.pool_mb, load.device)
    load.hash_files()
    with load.measure("weights"):
        module = load_module(skeleton, load.config, weights, load.device, load.report)
        layout = probe_layout(module, load.settings.block_size, load.dtype, load.device)
        layout = replace(layout, is_int8=load.settings.kv_dtype == "int8")
        if layout.attends_internally:
            log.warning(
                "%s attends in a way of its own: the sequences of a step are computed one after the other",
                load.settings.model,
            )
        weights.drop_pages()
        weights.read_when_used(module)  # the layout does not depend on values
    return load.build_model(
        module, layout,
        vocab_size=module.get_input_embeddings().num_embeddings,
        stock_attention=module.config._attn_implementation,  # noqa: SLF001 - transformers has no public name for it
        device_name=describe_device(load.device),
        weights=weights,
    )  # fmt: skip


def open_model(settings: EngineSettings, report: Progress = ignore_progress) -> LoadedModel:
    """Return the model, proved and ready to serve: from a packed file where there is one, else packed here.

    Raises as `open_engine`.
    """
    with as_load_errors(settings.model):
        load = _Load(settings, report)
        model = _open_packed(load)
        if model is None:
            model = _load_checkpoint(load)
            with load.measure("proof"):
                model = _prove_once(load, model)
    load.log_end()
    if load.chosen.is_open and model.native is not None and model.native.body is None:
        log.info("%s is loaded again in float32: %s", settings.model, PARTLY_NATIVE)
        del model  # it holds its weights
        model = open_model(settings.model_copy(update={"dtype": "float32", "packed": ""}), report)
        return replace(model, dtype_reason=PARTLY_NATIVE)
    return model


def _open_packed(load: _Load) -> LoadedModel | None:
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


def _prove_once(load: _Load, model: LoadedModel) -> LoadedModel:
    """Return what `prove_model` returns, which is not proved again where all that the proof depends on is noted."""
    about = describe_proof(model, load.settings)
    if load.load_cache.read_finding("proof", about):
        model = accelerate_model(model, load.settings.weights)
        load.report("checking the engine", 1.0)
        return model
    model = prove_model(model, load.settings, load.report)
    load.load_cache.write_finding("proof", about, found=True)
    return model


def _list_packed_files(load: _Load) -> list[Path]:
    """Return the packed files that there are for these settings. A named one is listed even if it is not there."""
    settings = load.settings
    if settings.packed:
        return [Path(settings.packed).expanduser()]
    if not load.can_pack():
        return []
    return [path for path in _list_places(load) if path.is_file()]


def _list_places(load: _Load) -> list[Path]:
    """Return where a packed file may be, the best place first: beside the model, or in the cache."""
    digest, dtype = hashlib.sha256(str(load.directory.resolve()).encode()).hexdigest(), str(load.dtype)
    directories = load.directory, load.settings.find_cache_directory() / "packed" / digest[:32]
    forms = list_fitting_forms(load.settings.weights)
    names = [f"penstock-{form}-{dtype.removeprefix('torch.')}.packed" for form in forms]
    return [directory / name for name in names for directory in directories]


def _load_packed(load: _Load, path: Path) -> LoadedModel:
    """Load a packed file. Raises `PackedFileRefused` if it does not fit, is damaged or gives other logits."""
    settings, native = load.settings, load_library()
    if native is None or not load.can_pack():
        raise PackedFileRefused(f"{path} needs the native kernels, a CPU, and float32 or bfloat16")
    file = open_packed_file(path)
    load.hash_files()
    if difference := find_difference(file.about, settings.weights, _describe_source(load)):
        raise PackedFileRefused(f"{path} is not used: {difference}; `penstock weights pack` writes it anew")
    check_memory(file.num_bytes, settings.pool_mb, load.device)
    with load.measure("content"):
        check_packed_content(file, load.load_cache, load.report)
    with load.measure("mapping"):
        module, parts = restore_module(file, build_skeleton(load.config, load.dtype), native)
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


def _describe_source(load: _Load) -> dict[str, Any]:
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
        load = _Load(settings, report)
        model = _prove_once(load, _load_checkpoint(load))
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


def _choose_place(load: _Load) -> Path:
    beside_model, in_cache, *_ = _list_places(load)
    is_writable = os.access(load.directory, os.W_OK) and load.settings.model != "demo"
    return beside_model if is_writable else in_cache


def find_packed_file(settings: EngineSettings) -> tuple[PackedFile | None, str]:
    """Return the packed file that a load would open first, or None and why there is none. It reads no weights."""
    with as_load_errors(settings.model):
        load = _Load(settings, ignore_progress)
        for path in _list_packed_files(load):
            try:
                return open_packed_file(path), ""
            except PackedFileRefused as error:
                return None, str(error)
    return None, ""


def prepare_transformers() -> None:
    """Silence transformers' messages and progress bars, and let it make tensors one after the other."""
    # With threads it converts tensors ahead of those that are in place, and a model whose experts are merged is in
    # memory twice.
    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"


@contextmanager
def as_load_errors(name: str) -> Iterator[None]:
    """Raise a `ModelLoadError` for whatever transformers, safetensors or tokenizers raise within the context."""
    try:
        yield
    except (EngineCheckFailed, SettingsError):
        raise  # the first says which model, which was loaded; the second is not about the model
    except ModelLoadError as error:
        raise choose_load_error(error)(f"cannot load model {name!r}: {to_one_line(error, 600)}") from error.__cause__
    except BaseException as error:
        if not is_failure(error):
            raise
        raise choose_load_error(error)(f"cannot load model {name!r}: {_name_cause(error, 400)}") from error


def load_config(directory: Path) -> Any:
    """Return transformers' configuration of a model. Raises `ModelLoadError` where config.json has none."""
    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:
        raise ModelLoadError(
            f"config.json is no configuration that transformers reads ({_name_cause(error)}): "
            "use the one that was published with the weights"
        ) from error


def load_tokenizer(directory: Path) -> Any:
    """Return the tokenizer in a directory. Raises `ModelLoadError` where there is none that can be used."""
    shared_process.start()  # to be ready when the chat template is tried
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except BaseException as error:
        if not is_failure(error):
            raise
        raise build_tokenizer_error(directory, _name_cause(error)) from error
    # Where there are no files, transformers makes some tokenizers up: with special tokens only.
    special = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
    if len(tokenizer) <= len(special):
        raise build_damage_error(f"no usable tokenizer in {directory}: its vocabulary is empty")
    check_template(tokenizer, str(directory))
    return tokenizer


def _name_cause(error: BaseException, limit: int = 300) -> str:
    """Return an error of a library as a clause, without advice that only holds for other programs."""
    if "trust_remote_code" in str(error):
        return "it is code of its authors, which is never run"
    return f"{type(error).__name__}: {to_one_line(error, limit)}"


def _parse_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise choose_load_error(error)(f"no device {name!r}: {str(error).splitlines()[0]}") from None
    if device.type not in ("cpu", "cuda"):
        raise ModelLoadError(f"no device {name!r}: models run on cpu and cuda")
    return device


def find_context_length(config: Any, tokenizer: Any) -> int:
    """Return how many tokens a sequence may have. Raises `ModelLoadError` where nothing says it."""
    length = _find_configured_length(config, tokenizer)
    return min([length, *list_unproved_windows(config, length).values()])


def _find_configured_length(config: Any, tokenizer: Any) -> int:
    text = config.get_text_config()
    if unscaled := find_unscaled_context(text):
        return unscaled
    for attribute in ("max_position_embeddings", "n_positions", "max_seq_len"):
        value = getattr(text, attribute, None)
        if isinstance(value, int) and value > 0:
            if value > MAX_CONTEXT:
                raise build_damage_error(f"{attribute} {value:,} in config.json is the context of no model")
            return value
    if tokenizer.model_max_length < _NO_LENGTH_LIMIT:
        return int(tokenizer.model_max_length)
    raise build_damage_error("neither its config nor its tokenizer says how long its context is")


def _report_context(name: str, config: Any, context_length: int) -> None:
    """Log that a model is served with fewer tokens than its configuration has, and what its proof does not reach."""
    full = getattr(config.get_text_config(), "max_position_embeddings", None) or 0
    unread, unproved = (list_windows(config, full) for list_windows in (list_unread_windows, list_unproved_windows))
    if unread:
        log.info("the proof of %s at load does not reach its %s", name, _describe_windows(unread))
    if context_length in unproved.values():
        log.warning(
            "%s is served with %d of its %d tokens: for longer sequences of models of type %s it was not proved that "
            "tokens are those of generate(), as %s matters for them",
            name, context_length, full, config.get_text_config().model_type, _describe_windows(unproved),
        )  # fmt: skip
    elif full > context_length:
        log.warning(
            "%s is served with %d of its %d tokens: its rotary embedding has other frequencies for longer sequences, "
            "which transformers would take for all sequences of a batch: tokens would depend on their neighbours",
            name,
            context_length,
            full,
        )


def _describe_windows(windows: dict[str, int]) -> str:
    return ", ".join(f"{name} {size}" for name, size in windows.items())


def find_eos_token_ids(generation: Any, config: Any, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end an answer."""
    ids: set[int] = set()
    for source in (generation, config.get_text_config(), tokenizer):
        value = getattr(source, "eos_token_id", None)
        ids.update([value] if isinstance(value, int) else value or [])
    return frozenset(ids)
