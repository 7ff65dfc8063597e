"""Find a model's files in a directory or on the hub."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from penstock.engine.file_checks import check_config_file, check_description, check_weights
from penstock.engine.gguf_model import check_gguf, describe_gguf
from penstock.errors import ModelLoadError, build_damage_error

DEMO_MODEL = Path(__file__).parent / "demo" / "model"
_MODEL_FORMS = "use `demo`, a directory with config.json, a tokenizer and *.safetensors, a .gguf file or a hub name"
HUB_TIMEOUT_S = 2.0
"""How long the hub may take to take a connection, where it is only asked whether it is there."""

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
    check_description(directory)
    return directory


def check_model_here(name: str, report: Progress | None = None) -> None:
    """Raise `ModelLoadError` if the model's files show that it cannot be loaded. Neither torch nor transformers is
    imported.

    With `report` a model of the hub is downloaded; without, what is there of it is read.
    """
    if (file := _find_gguf(name)) is not None:
        check_gguf(file)
        return
    directory = _find_directory(name)
    if directory is None and report is None:
        _check_hub(name)
        return
    directory = directory or _download_model(name, report or ignore_progress)
    try:
        check_description(directory)
        find_weight_files(directory)
    except OSError as error:
        raise ModelLoadError(f"{error.filename or directory} cannot be read: {error.strerror}") from error


def _find_gguf(name: str) -> Path | None:
    """Return the GGUF file that a name is of, or the one in its directory; None for a model in another form.

    Raises `ModelLoadError` if there is no such file, or if there are several in the directory.
    """
    path = Path(name).expanduser()
    if name == "demo":
        return None
    if path.suffix == ".gguf" and not path.is_dir():
        if not path.is_file():
            raise ModelLoadError(f"there is no file {path}: {_MODEL_FORMS}")
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
        raise ModelLoadError(f"there is no directory {directory}: {_MODEL_FORMS}")
    return None


def _check_hub(name: str) -> None:
    """Raise `ModelLoadError` if a model of the hub is neither in its cache nor to be had."""
    try:
        from huggingface_hub import constants, try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return  # the worker says what is to be installed
    try:
        if isinstance(config := try_to_load_from_cache(name, "config.json"), str):
            check_config_file(Path(config).parent)
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
        check_config_file(Path(snapshot_download(name, allow_patterns=["config.json", "adapter_config.json"])))
        path = snapshot_download(name, allow_patterns=patterns, ignore_patterns=["*/*"])
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelLoadError(f"no such directory, and not from the hub: {to_one_line(error)}") from error
    report("downloading", 1.0)
    return Path(path)


def find_weight_files(directory: Path) -> list[Path]:
    """Return the weight files: those that the index names, if there is one. Raises `ModelLoadError` for one that is cut
    off, or is none.
    """
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if not index.is_file():
        if not single.is_file():
            if gguf := list(directory.glob("*.gguf")):
                return gguf  # one, as `describe_gguf` wrote the directory
            if pickles := [one.name for form in ("*model*.bin", "*.pth", "*.ckpt") for one in directory.glob(form)]:
                raise ModelLoadError(
                    f"{directory} has no .safetensors weights, and {pickles[0]} may run code, so it is never read: use "
                    "a checkpoint with safetensors, or convert this one where you trust it"
                )
            raise build_damage_error(f"{directory} has no .safetensors weights: no {single.name}, no {index.name}")
        check_weights([single])
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
    check_weights(files)
    return files


def to_one_line(error: BaseException, limit: int = 300) -> str:
    """Return an exception's text in one line of at most `limit` characters."""
    return " ".join(str(error).split())[:limit]
