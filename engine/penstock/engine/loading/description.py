"""The description of a model, known before any of its weights is read: configuration, tokenizer, context, dtype."""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoConfig, AutoTokenizer

from penstock.config.settings import EngineSettings
from penstock.engine.kernels.library import TORCH, load_library
from penstock.engine.kernels.products import choose_products
from penstock.engine.loading.dtype import choose_dtype
from penstock.engine.loading.probe import check_config, find_unscaled_context
from penstock.engine.loading.vector_files import Checkpoint, find_around, find_decoder, find_end_tokens
from penstock.engine.loading.windows import list_unproved_windows, list_unread_windows
from penstock.engine.memory.storage import BlockLayout
from penstock.engine.model.accelerate import can_pack
from penstock.engine.model.model import LoadedModel
from penstock.engine.pictures.reader import FAMILIES, PictureReader
from penstock.engine.text.chat_template import check_template
from penstock.engine.text.response_template import find_response_template
from penstock.engine.text.template_process import shared_process
from penstock.engine.vectors import TextReader, VectorCard
from penstock.engine.weights.file_checks import build_tokenizer_error
from penstock.engine.weights.files import Progress, find_model, find_weight_files, to_one_line
from penstock.engine.weights.fingerprint import compute_fingerprint, hash_files
from penstock.engine.weights.load_cache import LoadCache
from penstock.engine.weights.module import load_generation_config
from penstock.engine.weights.quantized import UNPACKING_VERSION, take_quantization
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


class Load:
    """The load of one model: what is known of it before any of its weights is read, and how long the parts took."""

    def __init__(self, settings: EngineSettings, report: Progress, *, sees: bool = True) -> None:
        """Read the model's description. Raises `ModelLoadError` if it shows that the model cannot be served.

        Without `sees` the model is to read texts, and what others have seen, and needs no vision part.
        """
        self.settings, self.report, self._sees = settings, report, sees
        self.load_cache = LoadCache(settings.find_cache_directory())
        self.hashes: list[str] = []
        """The hash of each weight file, once they were found."""
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
            self.has_vision = sees or self.config.model_type not in FAMILIES
            """Whether the model is loaded with its vision part, if it has one."""
            self.vectors = find_decoder(self.directory)
            """What the checkpoint says of vectors of texts, if the engine computes them."""
            text = self.config.get_text_config()
            self.has_head = self.vectors is None or _has_head(
                self.files, is_tied=bool(getattr(text, "tie_word_embeddings", False))
            )
            if not self.has_head:  # its embeddings are one, only to prove the engine: no answer is drawn from it
                text.tie_word_embeddings = True
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
        with self.measure("pictures"):
            self.picture_reader, self.picture_bytes = self._open_pictures()

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

    def _open_pictures(self) -> tuple[PictureReader | None, int]:
        """Return what reads the model's pictures, and about how many bytes they take. None where it is not to see, or
        cannot, which is logged.
        """
        if not self._sees or type(self.config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
            return None, 0
        try:
            reader = PictureReader(self.directory, self.config)
            return reader, reader.measure_most_bytes(self.dtype.itemsize)
        except ModelLoadError as error:
            log.info("%s is served for texts alone: %s", self.settings.model, to_one_line(error, 300))
            return None, 0

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
            text_reader=self._make_text_reader(),
            picture_reader=self.picture_reader,
            **given,
        )

    def _make_text_reader(self) -> TextReader | None:
        """Return what reads texts to compute vectors of; None where the model has none, or what it says of them cannot
        be read and it generates text.
        """
        if self.vectors is None:
            return None
        try:
            return make_text_reader(
                self.vectors, self.tokenizer, self.config.get_text_config(), self.context_length, has_head=self.has_head
            )
        except Exception as error:
            if not self.has_head:
                raise
            log.warning("%s computes no vectors here: %s", self.settings.model, _name_cause(error))
            return None


def make_text_reader(
    checkpoint: Checkpoint, tokenizer: Any, config: Any, context_length: int, *, has_head: bool
) -> TextReader:
    """Return the reader of a checkpoint whose model has this configuration. Raises `ModelLoadError`."""
    whole, bare = (list(tokenizer("a", add_special_tokens=special)["input_ids"]) for special in (True, False))
    start_ids, end_ids = find_around(whole, bare)
    card = VectorCard(
        task="embed",
        size=config.hidden_size,
        max_length=min(context_length, checkpoint.max_length or context_length, tokenizer.model_max_length),
        vocab_size=config.vocab_size,
        pooling="lasttoken",
        prompts=checkpoint.prompts,
        default_prompt=checkpoint.about.get("default_prompt_name") or "",
        dimensions=checkpoint.list_dimensions(),
    )
    end_ids += find_end_tokens(checkpoint, tokenizer)
    if card.max_length <= len(start_ids) + len(end_ids):
        raise ModelLoadError(f"it says that a text has {card.max_length} tokens at most, and puts as many around it")
    return TextReader(card, tokenizer, checkpoint.normalizes, has_head, start_ids, end_ids)


def _has_head(files: list[Path], *, is_tied: bool) -> bool:
    """Return whether a model was saved to generate text: it has a head, or its embeddings are one, and its tensors have
    the names that the whole model gives them.
    """
    from safetensors import safe_open

    opened: list[Any] = [safe_open(file, "pt") for file in files if file.suffix == ".safetensors"]
    names = [name for file in opened for name in file.keys()]  # noqa: SIM118 - it is no dictionary
    return not names or any(name.startswith(("model.", "lm_head.") if is_tied else "lm_head.") for name in names)


def _select_isa(isa: str) -> None:
    """Let the kernels run on the instruction set that a setting names. Raises `SettingsError` if that cannot be."""
    native = load_library()
    if native is not None:
        native.select_isa("" if isa == "auto" else isa)
    elif isa not in ("auto", TORCH):
        raise SettingsError(f"PENSTOCK_ENGINE_ISA={isa} needs the native kernels, which were not built: set `auto`")


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
        log.info("%s: the proof at load does not cover its %s", name, _describe_windows(unread))
    if context_length in unproved.values():
        log.warning(
            "%s is served with %d of its %d tokens: for longer sequences of models of type %s it was not proved that "
            "tokens are those of generate(), as %s matters for them",
            name, context_length, full, config.get_text_config().model_type, _describe_windows(unproved),
        )  # fmt: skip
    elif full > context_length:
        log.warning(
            "%s is served with %d of its %d tokens: its rotary embedding has other frequencies for longer sequences. "
            "transformers would use them for a whole batch, and tokens would depend on their neighbours",
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
