"""The files of a checkpoint for vectors or scores, read before any library of models: what it is, and what is refused.

Nothing of a checkpoint is run, and nothing is unpickled: its modules have to be of these kinds, with safetensors.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from penstock.engine.weights.files import Progress, check_whole_model, find_whole_model, list_model_files
from penstock.errors import ModelLoadError, build_damage_error

EmbedTask = Literal["embed", "score"]
"""What a checkpoint is for: a vector of each text, or a score of each pair of a query and a text."""
MODULES_FILE, ABOUT_FILE = "modules.json", "config_sentence_transformers.json"
_MODULES = (
    "Transformer", "Pooling", "Normalize", "Dense", "LayerNorm", "Dropout", "WeightedLayerPooling", "LogitScore",
)  # fmt: skip
"""The modules that are read. Others of the library read word lists or images, or run code."""
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt")
_WEIGHTS = "model.safetensors"


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


def open_checkpoint(name: str, report: Progress | None = None) -> Checkpoint:
    """Return a checkpoint, downloaded from the hub if there is none on disk. Raises `ModelLoadError`."""
    directory = find_whole_model(name, report)
    about, modules = _read_object(directory / ABOUT_FILE), directory / MODULES_FILE
    paths = _check_modules(modules) if modules.is_file() else [directory]
    config = check_whole_model(paths[0])
    if not modules.is_file() and not _is_classifier(config) and not about:
        raise ModelLoadError(
            f"{directory} has no {MODULES_FILE} and no classifier: an embed worker needs a checkpoint that was saved "
            "by sentence-transformers, or a reranker; for a model that generates text use penstock worker auto"
        )
    is_scoring = about.get("model_type") == "CrossEncoder" or (not modules.is_file() and _is_classifier(config))
    return Checkpoint(directory, "score" if is_scoring else "embed", paths[0], about, config)


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
    starts = [start for start in range(len(whole) - len(bare) + 1) if whole[start : start + len(bare)] == bare]
    return list(whole[starts[0] + len(bare) :]) if starts else []


def _check_modules(file: Path) -> list[Path]:
    """Return the directories of the modules, the transformer's first. Raises `ModelLoadError` for what is never run."""
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
    paths = [file.parent / path for _, path in named]
    for directory in paths[1:]:
        _refuse_pickles(directory)
    return paths


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
