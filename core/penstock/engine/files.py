"""Find a model's files in a directory or on the hub."""

import json
import re
import socket
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from penstock.engine.gguf_model import check_gguf, describe_gguf
from penstock.errors import ModelLoadError, build_damage_error

DEMO_MODEL = Path(__file__).parent / "demo" / "model"
MODEL_ADVICE = (
    "set PENSTOCK_ENGINE_MODEL to `demo`, a directory with config.json, a tokenizer and *.safetensors, a .gguf "
    "file, or a name of the hub"
)
HUB_TIMEOUT_S = 2.0
"""How long the hub may take to take a connection, where it is only asked whether it is there."""

_OTHER_TASKS = re.compile(
    "For(MaskedLM|PreTraining|NextSentencePrediction|MultipleChoice|QuestionAnswering|(Sequence|Token|Image)Classification)"
    "|(Encoder|EncoderModel)$"
)
"""What the architectures of encoders and classifiers are called."""
_MAX_COUNT = 2**12
_COUNTS = re.compile("layer|head|expert|block|depth|label|stack|stage|group|loop|repeat")
"""What is in the names of numbers of which a configuration makes as many entries, or a model as many modules."""
_SIZES = re.compile("size|dim|width|len|position|capacity|_id|freq|index")

Progress = Callable[[str, float], None]
"""Called with the current activity and its progress from 0 to 1."""


def ignore_progress(activity: str, progress: float) -> None:
    """Report nothing."""


def find_model(name: str, report: Progress, cache: Path) -> Path:
    """Return the model's directory, downloaded from the hub if there is none on disk. Raises `ModelLoadError`.

    That of a GGUF file is in the directory `cache`, and is written if need be.
    """
    if (file := _find_gguf(name)) is not None:
        return describe_gguf(file, cache)
    directory = _find_directory(name) or _download_model(name, report)
    _check_config(directory)
    return directory


def check_model_here(name: str) -> None:
    """Raise `ModelLoadError` if it can be seen that the model cannot be loaded, without loading or downloading it."""
    if (file := _find_gguf(name)) is not None:
        check_gguf(file)
        return
    if (directory := _find_directory(name)) is None:
        _check_hub(name)
        return
    _check_config(directory)
    find_weight_files(directory)


def _find_gguf(name: str) -> Path | None:
    """Return the GGUF file that a name is of, or the one in its directory; None for a model in another form.

    Raises `ModelLoadError` if there is no such file, or if there are several in the directory.
    """
    path = Path(name).expanduser()
    if name == "demo":
        return None
    if path.suffix == ".gguf" and not path.is_dir():
        if not path.is_file():
            raise ModelLoadError(f"there is no file {path}")
        return path
    files = [] if any(path.glob("*.safetensors")) else sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise ModelLoadError(f"{path} has {len(files)} GGUF files: name one, such as {files[0]}")
    return files[0] if files else None


def _find_directory(name: str) -> Path | None:
    """Return the model's directory on disk; None for a name of the hub. Raises `ModelLoadError`."""
    directory = DEMO_MODEL if name == "demo" else Path(name).expanduser()
    if directory.is_dir():
        return directory
    if name == "demo" or len(Path(name).parts) > 2 or name.startswith((".", "/", "~")):
        raise ModelLoadError(f"there is no directory {directory}")
    return None


def _check_hub(name: str) -> None:
    """Raise `ModelLoadError` if a model of the hub is neither in its cache nor to be had."""
    try:
        from huggingface_hub import constants, try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return  # the worker says what is to be installed
    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return
    except HFValidationError as error:
        raise ModelLoadError(f"no such directory, and no name of the hub: {to_one_line(error)}") from None
    if constants.HF_HUB_OFFLINE:
        raise ModelLoadError("no such directory, and not in the hub's cache, while HF_HUB_OFFLINE is set")
    hub = urlsplit(constants.ENDPOINT)
    if getproxies():
        return  # whether they reach it is not known here
    try:
        socket.create_connection(
            (hub.hostname or "", hub.port or (80 if hub.scheme == "http" else 443)), HUB_TIMEOUT_S
        ).close()
    except OSError as error:
        raise ModelLoadError(f"no such directory, and the hub at {hub.hostname} cannot be reached: {error}") from None


def _download_model(name: str, report: Progress) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    report("downloading", 0.0)
    patterns = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.txt"]
    try:
        path = snapshot_download(name, allow_patterns=patterns, ignore_patterns=["*/*"])
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelLoadError(f"no such directory, and not from the hub: {to_one_line(error)}") from error
    report("downloading", 1.0)
    return Path(path)


def _check_config(directory: Path) -> None:
    """Raise `ModelLoadError` for a directory whose config.json is none, or is of a model that cannot be served.

    transformers makes a configuration only of what passes here: for some counts it makes lists of as many entries.
    """
    path = directory / "config.json"
    if not path.is_file():
        raise build_damage_error(f"{directory} has no config.json")
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise build_damage_error(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise build_damage_error(f"{path} has no model_type")
    _check_values(path, config)
    names = config.get("architectures")
    if isinstance(names, list) and names and all(map(_OTHER_TASKS.search, map(str, names))):
        raise ModelLoadError(
            f"{path} is of {names[0]}, which generates no text: use a model for causal language modelling, such as one "
            "whose architecture is called ...ForCausalLM"
        )
    transformers, model_type = find_spec("transformers"), config["model_type"]
    if transformers is None or transformers.origin is None:
        return
    # Its registry is read as text: to import it takes seconds.
    registry = (Path(transformers.origin).parent / "models" / "auto").glob("*.py")
    if not any(f'"{model_type}"' in file.read_text() for file in registry):
        own = "; the model is code of its authors (auto_map), which is never run" if "auto_map" in config else ""
        raise ModelLoadError(
            f"transformers knows no model_type {model_type[:60]!r}, which {path} has{own}: use a model of a type that "
            "docs/models.md has"
        )


def _check_values(path: Path, values: Any) -> None:
    """Raise `ModelLoadError` for a number of layers, heads or the like that no model has, and for the name of code."""
    for name, value in values.items() if isinstance(values, dict) else enumerate(values):
        if isinstance(value, dict | list):
            if name != "label2id":  # a classifier's classes have any name
                _check_values(path, value)
        elif str(name).endswith("_implementation") and "/" in str(value):
            raise ModelLoadError(
                f"{path} says {name} {value!r}, which is code of the hub, and is never run: take it out"
            )
        elif isinstance(value, int) and not -_MAX_COUNT <= value <= _MAX_COUNT and _is_count(str(name)):
            raise ModelLoadError(
                f"{path} says {name} {value:,}, and no model has more than {_MAX_COUNT:,}: use the config.json that "
                "was published with the weights"
            )


def _is_count(name: str) -> bool:
    return bool(_COUNTS.search(name)) and not _SIZES.search(name)


def find_weight_files(directory: Path) -> list[Path]:
    """Return the weight files: those that the index names, if there is one."""
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if not index.is_file():
        if not single.is_file():
            if gguf := list(directory.glob("*.gguf")):
                return gguf  # one, as `describe_gguf` wrote the directory
            raise build_damage_error(f"{directory} has no .safetensors weights: no {single.name}, no {index.name}")
        return [single]
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        files = [directory / name for name in names]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise build_damage_error(f"{index} is not a weight index: {to_one_line(error)}") from error
    if not files:
        raise build_damage_error(f"{index} names no file")
    for name, file in zip(names, files, strict=True):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise build_damage_error(f"{index} names {name}, which is not in the model's directory")
        if not file.is_file():
            raise build_damage_error(f"{index} names {file.name}, which is not there")
    return files


def to_one_line(error: BaseException, limit: int = 300) -> str:
    """Return an exception's text in one line of at most `limit` characters."""
    return " ".join(str(error).split())[:limit]
