"""The files of a checkpoint for vectors or scores, read before any library of models: what it is, and what is refused.

Nothing of a checkpoint is run, and nothing is unpickled: its modules have to be of these kinds, with safetensors.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.engine.weights.files import (
    MODULES_FILE,
    Progress,
    check_whole_model,
    find_vector_files,
    find_whole_model,
    list_model_files,
)
from penstock.errors import ModelLoadError, build_damage_error
from penstock.messages import EmbedTask

ABOUT_FILE = "config_sentence_transformers.json"
_MODULES = (
    "Transformer", "Pooling", "Normalize", "Dense", "LayerNorm", "Dropout", "WeightedLayerPooling", "LogitScore",
)  # fmt: skip
"""The modules that are read. Others of the library read word lists or images, or run code."""
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt")
_WEIGHTS = "model.safetensors"


DECODERS = frozenset({"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi3", "olmo2"})
"""The types of models whose texts the engine computes: each token reads those before it."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files passed."""

    directory: Path
    """The whole of it."""
    task: EmbedTask
    transformer: Path
    """The directory of its transformer, with config.json, weights and tokenizer."""
    about: dict[str, Any] = field(default_factory=dict)
    """What it says of itself: prompts and dimensions."""
    config: dict[str, Any] = field(default_factory=dict)
    """Its transformer's config.json."""
    modules: tuple[tuple[str, Path], ...] = ()
    """The names of its modules, and their directories."""

    @property
    def pools_last_token(self) -> bool:
        """Whether a text's vector is what the transformer says of its last token, and each token reads those before it
        alone.
        """
        names, pooling = [name for name, _ in self.modules], {}
        if names in (["Transformer", "Pooling"], ["Transformer", "Pooling", "Normalize"]):
            pooling = _read_object(self.modules[1][1] / "config.json")
        modes = [name for name, value in pooling.items() if name.startswith("pooling_mode_") and value is True]
        is_last = modes == ["pooling_mode_lasttoken"] or pooling.get("pooling_mode") == "lasttoken"
        reads_ahead = self.config.get("is_causal") is False or self.config.get("use_bidirectional_attention")
        reads_other = _read_object(self.transformer / "sentence_bert_config.json").get("do_lower_case")
        return is_last and not reads_other and self.config.get("model_type") in DECODERS and not reads_ahead

    @property
    def normalizes(self) -> bool:
        """Whether its vectors have a length of 1."""
        return any(name == "Normalize" for name, _ in self.modules)

    @property
    def prompts(self) -> dict[str, str]:
        """The texts that may be put before a text, by name. Raises `ModelLoadError`."""
        found = self.about.get("prompts") or {}
        if not isinstance(found, dict) or not all(isinstance(text, str | None) for text in found.values()):
            raise build_damage_error(f"{self.directory / ABOUT_FILE}: its prompts are no texts with names")
        return {str(name): text or "" for name, text in found.items()}

    @property
    def max_length(self) -> int | None:
        """The most tokens of a text, if sentence-transformers' own file says it."""
        found = _read_object(self.transformer / "sentence_bert_config.json").get("max_seq_length")
        return found if isinstance(found, int) and found > 0 else None

    def list_dimensions(self) -> list[int] | None:
        """Return the lengths to which its vectors may be cut; empty where any will do, None where none."""
        for said in (self.about, self.config):
            for name in ("matryoshka_dims", "matryoshka_dimensions"):
                if isinstance(dims := said.get(name), list) and dims and all(isinstance(one, int) for one in dims):
                    return sorted(dims)
            if said.get("truncate_dim") or said.get("is_matryoshka"):
                return []
        return None


def is_for_embedding(name: str) -> bool:
    """Return whether a model computes vectors or scores, by the names of its files and its config.json. What cannot be
    found is no such model.
    """
    try:
        if {MODULES_FILE, ABOUT_FILE} & list_model_files(name):
            return True
        path = Path(name).expanduser() / "config.json"
        return path.is_file() and _is_classifier(_read_object(path))
    except (ModelLoadError, OSError, ImportError):
        return False


def is_for_engine(name: str) -> bool:
    """Return whether the engine computes a model's vectors, by its small files: those of the hub are downloaded."""
    try:
        return find_decoder(find_vector_files(name)) is not None
    except (ModelLoadError, OSError, ImportError):
        return False


def find_decoder(directory: Path) -> Checkpoint | None:
    """Return the checkpoint in a directory if the engine computes its vectors; None if it has none, or others."""
    try:
        found = read_checkpoint(directory)
        is_found = (directory / MODULES_FILE).is_file() and found.transformer == directory and found.pools_last_token
    except (ModelLoadError, OSError):
        return None
    return found if is_found else None


def open_checkpoint(name: str, report: Progress | None = None) -> Checkpoint:
    """Return a checkpoint, downloaded from the hub if there is none on disk. Raises `ModelLoadError`."""
    found = read_checkpoint(find_whole_model(name, report))
    check_whole_model(found.transformer)
    return found


def read_checkpoint(directory: Path) -> Checkpoint:
    """Return what the files of a checkpoint say of it. Raises `ModelLoadError`."""
    about, modules = _read_object(directory / ABOUT_FILE), directory / MODULES_FILE
    named = _check_modules(modules) if modules.is_file() else [("Transformer", directory)]
    config = _read_object(named[0][1] / "config.json")
    if not modules.is_file() and not _is_classifier(config) and not about:
        raise ModelLoadError(
            f"{directory} has no {MODULES_FILE} and no classifier: an embed worker needs a checkpoint that was saved "
            "by sentence-transformers, or a reranker; for a model that generates text use penstock worker auto"
        )
    is_scoring = about.get("model_type") == "CrossEncoder" or (not modules.is_file() and _is_classifier(config))
    return Checkpoint(directory, "score" if is_scoring else "embed", named[0][1], about, config, tuple(named))


def find_end_tokens(checkpoint: Checkpoint, tokenizer: Any) -> list[int]:
    """Return the token ids that the checkpoint's tokenizer files demand at the end of a text, and that its tokenizer
    does not write.

    transformers makes some tokenizers anew, and then leaves out what tokenizer.json or `add_eos_token` says of the end.
    """
    demanded = _find_demanded_end(checkpoint.transformer)
    said = _read_object(checkpoint.transformer / "tokenizer_config.json")
    if not demanded and said.get("add_eos_token") is True and tokenizer.eos_token_id is not None:
        demanded = [tokenizer.eos_token_id]
    written = list(tokenizer("a")["input_ids"])
    return [] if not demanded or written[-len(demanded) :] == demanded else demanded


def _find_demanded_end(directory: Path) -> list[int]:
    """Return the token ids that tokenizer.json puts behind each text."""
    from tokenizers import Tokenizer

    if not (path := directory / "tokenizer.json").is_file():
        return []
    raw = Tokenizer.from_file(str(path))
    raw.no_truncation()
    raw.no_padding()
    whole, bare = raw.encode("a").ids, raw.encode("a", add_special_tokens=False).ids
    return find_around(whole, bare)[1]


def find_around(whole: list[int], bare: list[int]) -> tuple[list[int], list[int]]:
    """Return the token ids before and behind a text, whose own are `bare`; none where they are not in the `whole`."""
    for start in range(len(whole) - len(bare) + 1):
        if whole[start : start + len(bare)] == bare:
            return whole[:start], whole[start + len(bare) :]
    return [], []


def _check_modules(file: Path) -> list[tuple[str, Path]]:
    """Return the modules' names and directories. Raises `ModelLoadError` for those that are never run."""
    try:
        modules = json.loads(file.read_bytes())
        named = [(str(one["type"]), str(one["path"])) for one in modules]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise build_damage_error(f"{file} is no list of modules: {error!r:.200}") from error
    for kind, path in named:
        library, _, name = kind.rpartition(".")
        if name not in _MODULES or library.partition(".")[0] != "sentence_transformers":
            raise ModelLoadError(
                f"{file} has the module {kind[:100]}, which is not run here: only {', '.join(_MODULES)} are"
            )
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise build_damage_error(f"{file} names {path[:100]}, which is not in the model's directory")
    if not named or not named[0][0].endswith(".Transformer"):
        raise ModelLoadError(f"{file} does not begin with a Transformer: only such models are computed here")
    found = [(kind.rpartition(".")[2], file.parent / path) for kind, path in named]
    for _, directory in found[1:]:
        _refuse_pickles(directory)
    return found


def _refuse_pickles(directory: Path) -> None:
    found = [one for pattern in _PICKLES for one in directory.glob(pattern)] if directory.is_dir() else []
    if found and not (directory / _WEIGHTS).is_file():
        raise ModelLoadError(
            f"{found[0]} may run code, so it is never read: convert it to safetensors where you trust it (load the "
            "model with sentence-transformers and save it again), or use a checkpoint that has safetensors"
        )


def _is_classifier(config: dict[str, Any]) -> bool:
    names = config.get("architectures")
    return isinstance(names, list) and any(str(one).endswith("ForSequenceClassification") for one in names)


def _read_object(path: Path) -> dict[str, Any]:
    """Return the object in a file of JSON, empty where there is no file. Raises `ModelLoadError`."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise build_damage_error(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise build_damage_error(f"{path} is no object")
    return found
