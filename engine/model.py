"""Load a model: weights, tokenizer, the form of its KV blocks, and the fingerprint that names all of it.

`demo` is the model in this repository; a directory or a hub name takes the same way. Only safetensors weights
are read, so loading runs no code of the model's author.
"""

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from engine.hooks import ProbeCache
from engine.storage import KVLayout
from penstock.errors import ModelLoadError
from penstock.settings import EngineSettings

LAYOUT_VERSION = 1
"""Counts the changes of how a block's bytes are arranged; part of the fingerprint."""

DEMO_MODEL = Path(__file__).parent / "demo" / "model"
_HASH_PIECE = 16 * 2**20
_ENDLESS = 10**9  # tokenizers without a limit of their own say something enormous

Progress = Callable[[str, float], None]
"""Called with what is being done and how much of it is done, 0 to 1."""


@dataclass
class LoadedModel:
    """A model ready for the engine."""

    name: str
    config: Any
    tokenizer: Any
    context_length: int
    """Most tokens, prompt and output together."""
    eos_token_ids: frozenset[int]
    dtype: torch.dtype
    device: torch.device
    fingerprint: str
    """Hex SHA-256 over weights, configuration, dtype and KV layout: if equal, KV blocks can be exchanged."""
    module: Any
    """The transformers model."""
    layout: KVLayout
    vocab_size: int
    """Token ids are below this."""
    stock_attention: str
    """The attention implementation transformers would use."""


def load(settings: EngineSettings, progress: Progress | None = None) -> LoadedModel:
    """Load `settings.model`. Raises `ModelLoadError`, with the reason, for anything that cannot be served."""
    report = progress or _silent
    _silence()
    torch.set_num_threads(settings.threads)
    directory = _locate(settings.model, report)
    device = _device(settings.device)
    with _errors_of(settings.model):
        config = AutoConfig.from_pretrained(directory)
        if getattr(config, "is_encoder_decoder", False):
            raise ModelLoadError("it is an encoder-decoder model; only decoder-only models can be served")
        tokenizer = _load_tokenizer(directory)
        dtype = _dtype(settings.dtype, config, device)
        report("loading weights", 0.0)
        module, generation = _load_module(directory, config, dtype, device)
        report("loading weights", 1.0)
        layout = _probe(module, settings.block_size, dtype, device)
    return LoadedModel(
        name=settings.model,
        config=config,
        tokenizer=tokenizer,
        context_length=_context_length(settings.model, config, tokenizer),
        eos_token_ids=_eos_token_ids(generation, config, tokenizer),
        dtype=dtype,
        device=device,
        fingerprint=_fingerprint(directory, layout, report),
        module=module,
        layout=layout,
        vocab_size=module.get_input_embeddings().num_embeddings,
        stock_attention=module.config._attn_implementation,  # noqa: SLF001 - transformers has no public name for it
    )


def _silence() -> None:
    """Errors reach the caller as exceptions; transformers' own remarks and progress bars reach nobody."""
    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _silent(what: str, done: float) -> None:
    pass


@contextmanager
def _errors_of(name: str) -> Iterator[None]:
    """Whatever transformers, safetensors or tokenizers raise over a bad model becomes a `ModelLoadError`."""
    try:
        yield
    except ModelLoadError as error:
        raise ModelLoadError(f"cannot load model {name!r}: {error}") from None
    except Exception as error:
        text = " ".join(str(error).split())[:400]
        raise ModelLoadError(f"cannot load model {name!r}: {type(error).__name__}: {text}") from error


def _locate(name: str, report: Progress) -> Path:
    """The model's directory, fetched from the hub if the name is not one on disk."""
    directory = DEMO_MODEL if name == "demo" else Path(name).expanduser()
    if not directory.is_dir():
        if name == "demo" or len(Path(name).parts) > 2 or name.startswith((".", "/", "~")):
            raise ModelLoadError(f"cannot load model {name!r}: there is no directory {directory}")
        directory = _download(name, report)
    if not (directory / "config.json").is_file():
        raise ModelLoadError(f"cannot load model {name!r}: {directory} has no config.json")
    if not _weight_files(directory):
        raise ModelLoadError(f"cannot load model {name!r}: {directory} has no .safetensors weights")
    return directory


def _download(name: str, report: Progress) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    report("downloading", 0.0)
    patterns = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.txt"]
    try:
        path = snapshot_download(name, allow_patterns=patterns, ignore_patterns=["*/*"])
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        text = " ".join(str(error).split())[:300]
        raise ModelLoadError(f"cannot load model {name!r}: no such directory, and not from the hub: {text}") from error
    report("downloading", 1.0)
    return Path(path)


def _weight_files(directory: Path) -> list[Path]:
    """The files the weights are in: those the index names, if there is one."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelLoadError(f"{index} is not a weight index: {error}") from error
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise ModelLoadError(f"{index} names {missing[0]}, which is not there")
        return [directory / name for name in names]
    return sorted(directory.glob("*.safetensors"))


def _load_tokenizer(directory: Path) -> Any:
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory)
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise ModelLoadError(f"no usable tokenizer in {directory}: {text}") from error
    if not len(tokenizer):
        raise ModelLoadError(f"no usable tokenizer in {directory}: its vocabulary is empty")
    return tokenizer


def _load_module(directory: Path, config: Any, dtype: torch.dtype, device: torch.device) -> tuple[Any, Any]:
    """The transformers model in evaluation mode, and the generation settings that came with it."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        directory, config=config, dtype=dtype, use_safetensors=True, output_loading_info=True
    )
    module, info = loaded
    if info["missing_keys"]:
        missing = sorted(map(str, info["missing_keys"]))
        raise ModelLoadError(f"the weights lack {len(missing)} tensors, {missing[0]} among them")
    generation = module.generation_config
    # Only the check calls `generate()`; its answer must not depend on the author's defaults.
    plain: Any = GenerationConfig
    module.generation_config = plain(pad_token_id=0)
    return module.eval().requires_grad_(False).to(device), generation


@torch.inference_mode()
def _probe(module: Any, block_size: int, dtype: torch.dtype, device: torch.device) -> KVLayout:
    """Learn from one token what each layer caches."""
    cache = ProbeCache()
    token = torch.zeros(1, 1, dtype=torch.long, device=device)
    try:
        module(input_ids=token, position_ids=token, past_key_values=cache, use_cache=True)
    except Exception as error:
        raise ModelLoadError(
            f"architecture {type(module).__name__} is not supported: it wants another cache than keys and "
            f"values ({type(error).__name__}: {error})"
        ) from error
    if not cache.shapes:
        raise ModelLoadError(f"architecture {type(module).__name__} is not supported: it caches no keys and values")
    return KVLayout(tuple(cache.shapes[layer] for layer in sorted(cache.shapes)), block_size, dtype)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ModelLoadError(f"no device {name!r}: {str(error).splitlines()[0]}") from None
    return device


def _dtype(name: str, config: Any, device: torch.device) -> torch.dtype:
    if name != "auto":
        dtype = getattr(torch, name)
        assert isinstance(dtype, torch.dtype)
        return dtype
    own = getattr(config.get_text_config(), "dtype", None)
    return own if device.type != "cpu" and isinstance(own, torch.dtype) else torch.float32


def _context_length(name: str, config: Any, tokenizer: Any) -> int:
    text = config.get_text_config()
    for attribute in ("max_position_embeddings", "n_positions", "max_seq_len"):
        value = getattr(text, attribute, None)
        if isinstance(value, int) and value > 0:
            return value
    if tokenizer.model_max_length < _ENDLESS:
        return int(tokenizer.model_max_length)
    raise ModelLoadError(
        f"cannot load model {name!r}: neither its config nor its tokenizer says how long its context is"
    )


def _eos_token_ids(generation: Any, config: Any, tokenizer: Any) -> frozenset[int]:
    ids: set[int] = set()
    for source in (generation, config.get_text_config(), tokenizer):
        value = getattr(source, "eos_token_id", None)
        ids.update([value] if isinstance(value, int) else value or [])
    return frozenset(ids)


def _fingerprint(directory: Path, layout: KVLayout, report: Progress) -> str:
    digest = hashlib.sha256(f"penstock kv layout {LAYOUT_VERSION}\n{layout}\n".encode())
    files = [directory / "config.json", *_weight_files(directory)]
    total = math.fsum(file.stat().st_size for file in files)
    done = 0
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        with file.open("rb") as content:
            while piece := content.read(_HASH_PIECE):
                digest.update(piece)
                done += len(piece)
                report("hashing weights", done / total)
    return digest.hexdigest()
