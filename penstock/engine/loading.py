"""Load a model: weights, tokenizer, the form of its KV blocks, and the fingerprint that names all of it.

`demo` is the model in this repository; a directory or a hub name takes the same way. Only safetensors weights
are read, so loading runs no code of the model's author.

    files ─▶ enough memory? ─▶ map, sizes agree? ─▶ read once: digests ─▶ module ─▶ probe ─▶ fingerprint

Quantised weights are unpacked while the module reads them (`quantized.py`).
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoTokenizer

from penstock.config.settings import EngineSettings
from penstock.engine.cuda.backend import CudaBackend, describe_device
from penstock.engine.cuda.sizing import size_for_device
from penstock.engine.engine import Engine
from penstock.engine.files import Progress, find_model, find_weight_files, to_one_line
from penstock.engine.fingerprint import compute_fingerprint, hash_files, stat_files
from penstock.engine.kernels.forms import QUANTIZED
from penstock.engine.memory import check_memory
from penstock.engine.model import LoadedModel, TorchBackend
from penstock.engine.module import build_skeleton, check_weight_sizes, count_bytes, load_generation_config, load_module
from penstock.engine.probe import check_config, find_unscaled_context, probe_layout
from penstock.engine.proof import prove_model
from penstock.engine.quantized import UNPACKING_VERSION, take_quantization, unpack_weights
from penstock.engine.response_template import find_response_template
from penstock.engine.weights import MappedWeights
from penstock.errors import ModelLoadError

LAYOUT_VERSION = 2
"""Counts the changes of how a block's bytes are arranged; part of the fingerprint."""

_NO_LENGTH_LIMIT = 10**9  # tokenizers without a limit of their own say something enormous


def open_engine(settings: EngineSettings, progress: Progress | None = None, *, only_prompts: bool = False) -> Engine:
    """Load the model, prove that the engine gives its tokens, and return the engine after it measured its speed.

    With `only_prompts` it computes prompts and the token after them, and has only the weights that this needs. Raises
    `ModelLoadError`; its `EngineCheckFailed` means that tokens differ from `generate()`'s.
    """
    model = load_stage_models(settings, progress, only_prompts=only_prompts)
    engine = Engine(model, size_for_device(model, settings))
    with torch.inference_mode():
        engine.runner.record_steps(partial(progress or _ignore_progress, "recording steps"))
    engine.measure_speed()
    return engine


def load_stage_models(
    settings: EngineSettings, progress: Progress | None = None, *, only_prompts: bool = False
) -> LoadedModel:
    """Load and prove the model, twice where prompts and answers are computed with weights in two forms.

    Returns the one for answers, which has that for prompts; with `only_prompts` that for prompts. Raises as
    `open_engine`.
    """
    for_prompts = settings.model_copy(update={"weights": settings.prefill_weights or settings.weights})
    forms = (for_prompts.weights, settings.weights)
    if _has_same_bits(*forms):
        used = for_prompts if only_prompts else settings
        return prove_model(load_model(used, progress), used, progress)
    prompts = prove_model(load_model(for_prompts, progress), for_prompts, progress)
    stage_forms = (prompts.weight_form, settings.weights if settings.weights in QUANTIZED else "")
    prompts = replace(prompts, stage_forms=stage_forms)
    if only_prompts:
        return prompts
    answers = prove_model(load_model(settings, progress), settings, progress)
    if answers.content_fingerprint != prompts.content_fingerprint:
        raise ModelLoadError(f"{settings.model} was written to while it was loaded")
    return replace(answers, stage_forms=stage_forms, prompt_model=prompts)


def _has_same_bits(first: str, second: str) -> bool:
    """Return whether results with weights in these two forms have the same bits."""
    return first == second or not {first, second} & set(QUANTIZED)


def load_model(settings: EngineSettings, progress: Progress | None = None) -> LoadedModel:
    """Load `settings.model`. Raises `ModelLoadError`, with the reason, for anything that cannot be served."""
    with as_load_errors(settings.model):
        return _load_model(settings, progress or _ignore_progress)


def _load_model(settings: EngineSettings, report: Progress) -> LoadedModel:
    prepare_transformers()
    torch.set_num_threads(settings.threads)
    directory = find_model(settings.model, report)
    files = find_weight_files(directory)
    sources = [directory / "config.json", *files]
    before = stat_files(sources)
    device = _parse_device(settings.device)
    config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    check_config(config)
    quantization = take_quantization(config)
    tokenizer = load_tokenizer(directory)
    context_length = find_context_length(config, tokenizer)
    dtype = choose_dtype(settings.dtype, config, device)
    skeleton = build_skeleton(config, dtype)
    is_sized_later = device.type == "cuda" and "pool_mb" not in settings.model_fields_set
    check_memory(count_bytes(skeleton), 0 if is_sized_later else settings.pool_mb, device)
    weights = MappedWeights(files)
    unpack_weights(weights, quantization, dtype)
    check_weight_sizes(skeleton, weights)
    hashes = hash_files(files, report)
    module = load_module(skeleton, config, weights, device, report)
    layout = probe_layout(module, settings.block_size, dtype, device)
    if settings.kv_dtype == "int8":
        layout = replace(layout, is_int8=True)
    weights.drop_pages()
    form = f"penstock kv layout {LAYOUT_VERSION}\n{layout}"
    if quantization is not None:
        form += f"\nunpacking {UNPACKING_VERSION}"
    name = compute_fingerprint(directory, files, hashes, module.config, form)
    if stat_files(sources) != before:
        raise ModelLoadError(f"{directory} was written to while it was loaded")
    return LoadedModel(
        name=settings.model,
        config=config,
        tokenizer=tokenizer,
        response_template=find_response_template(tokenizer, config.model_type, settings.response_template),
        context_length=context_length,
        eos_token_ids=find_eos_token_ids(load_generation_config(directory), config, tokenizer),
        dtype=dtype,
        device=device,
        content_fingerprint=name,
        module=module,
        layout=layout,
        vocab_size=module.get_input_embeddings().num_embeddings,
        stock_attention=module.config._attn_implementation,  # noqa: SLF001 - transformers has no public name for it
        backend=CudaBackend(device_name=describe_device(device)) if device.type == "cuda" else TorchBackend(),
        weights=weights,
    )


def prepare_transformers() -> None:
    """Silence transformers' messages and progress bars, and let it make tensors one after the other."""
    # With threads it converts tensors ahead of those that are in place, and a model whose experts are merged is in
    # memory twice.
    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"


def _ignore_progress(what: str, done: float) -> None:
    pass


@contextmanager
def as_load_errors(name: str) -> Iterator[None]:
    """Raise a `ModelLoadError` for whatever transformers, safetensors or tokenizers raise within the context."""
    try:
        yield
    except ModelLoadError as error:
        raise ModelLoadError(f"cannot load model {name!r}: {to_one_line(error, 600)}") from error.__cause__
    except Exception as error:
        raise ModelLoadError(
            f"cannot load model {name!r}: {type(error).__name__}: {to_one_line(error, 400)}"
        ) from error


def load_tokenizer(directory: Path) -> Any:
    """Return the tokenizer in a directory. Raises `ModelLoadError` where there is none that can be used."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:
        raise ModelLoadError(f"no usable tokenizer in {directory}: {to_one_line(error)}") from error
    # Where there are no files, transformers makes some tokenizers up: with special tokens only.
    special = {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}
    if len(tokenizer) <= len(special):
        raise ModelLoadError(f"no usable tokenizer in {directory}: its vocabulary is empty")
    return tokenizer


def _parse_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ModelLoadError(f"no device {name!r}: {str(error).splitlines()[0]}") from None
    if device.type not in ("cpu", "cuda"):
        raise ModelLoadError(f"no device {name!r}: models run on cpu and cuda")
    return device


def choose_dtype(name: str, config: Any, device: torch.device) -> torch.dtype:
    """Return the dtype of that name; for `auto` the model's own on a GPU, float32 on a CPU."""
    if name != "auto":
        dtype = getattr(torch, name)
        assert isinstance(dtype, torch.dtype)
        return dtype
    own = getattr(config.get_text_config(), "dtype", None)
    return own if device.type != "cpu" and isinstance(own, torch.dtype) else torch.float32


def find_context_length(config: Any, tokenizer: Any) -> int:
    """Return how many tokens a sequence may have. Raises `ModelLoadError` where nothing says it."""
    text = config.get_text_config()
    if unscaled := find_unscaled_context(text):
        return unscaled
    for attribute in ("max_position_embeddings", "n_positions", "max_seq_len"):
        value = getattr(text, attribute, None)
        if isinstance(value, int) and value > 0:
            return value
    if tokenizer.model_max_length < _NO_LENGTH_LIMIT:
        return int(tokenizer.model_max_length)
    raise ModelLoadError("neither its config nor its tokenizer says how long its context is")


def find_eos_token_ids(generation: Any, config: Any, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end an answer."""
    ids: set[int] = set()
    for source in (generation, config.get_text_config(), tokenizer):
        value = getattr(source, "eos_token_id", None)
        ids.update([value] if isinstance(value, int) else value or [])
    return frozenset(ids)
