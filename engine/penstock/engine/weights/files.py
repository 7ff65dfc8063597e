"""Find a model's files in a directory or on the hub."""

import errno
import json
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.config.settings import EngineSettings
from penstock.engine.gguf.gguf_model import check_gguf, describe_gguf, find_description
from penstock.engine.weights.file_checks import check_config_file, check_description, check_tokenizer, check_weights
from penstock.errors import ModelLoadError, ModelUnavailable, build_damage_error, choose_load_error

DEMO_MODEL = Path(__file__).parents[1] / "demo" / "model"
MODULES_FILE = "modules.json"
_VECTOR_FILES = [MODULES_FILE, "config_sentence_transformers.json", "sentence_bert_config.json", "config.json"]
PACKED_MAGIC = b"PENSTOCK"
PACKED_PRELUDE = struct.Struct("<8sIIQQQ16s8x")
"""The beginning of a packed file: magic, version, 0, the table's offset and length, the file's length, the digest."""
_MODEL_FORMS = "use `demo`, a directory with config.json, a tokenizer and *.safetensors, a .gguf file or a hub name"

_downloaded: dict[str, Path] = {}
"""The directories of the hub's models for which this process has asked, by their names."""

Progress = Callable[[str, float], None]
"""Called with the current activity and its progress from 0 to 1."""


def ignore_progress(activity: str, progress: float) -> None:
    """Report nothing."""


@contextmanager
def _explain_unreadable_files() -> Iterator[None]:
    """Raise a `ModelLoadError` for a file or a directory that cannot be read within the context."""
    try:
        yield
    except OSError as error:
        told = f"{error.filename} cannot be read: {error.strerror}" if error.filename else to_one_line(error)
        raise choose_load_error(error)(told) from error


@_explain_unreadable_files()
def find_model(name: str, report: Progress, cache: Path) -> Path:
    """Return the model's directory, downloaded from the hub if there is none on disk. Raises `ModelLoadError`.

    The directory of a GGUF file is in the directory `cache`, and is written if need be.
    """
    if (file := _find_gguf(name)) is not None:
        return describe_gguf(file, cache)
    directory = _find_directory(name) or _download_model(name, report)
    check_description(directory)
    return directory


@_explain_unreadable_files()
def check_model_here(name: str, report: Progress | None = None, cache: Path | None = None) -> None:
    """Raise `ModelLoadError` if the model's files show that it cannot be loaded. Neither torch nor transformers is
    imported.

    With `report` a model of the hub is downloaded; without, what is there of it is read. With `cache` that directory
    has to take the description of a GGUF file.
    """
    if (file := _find_gguf(name)) is not None:
        check_gguf(file)
        if cache is not None:
            find_description(file, cache)
        return
    directory = _find_directory(name)
    if directory is None and report is None:
        _check_hub(name)
        return
    directory = directory or _download_model(name, report or ignore_progress)
    check_description(directory)
    find_weight_files(directory)


@_explain_unreadable_files()
def find_whole_model(name: str, report: Progress | None = None) -> Path:
    """Return the directory of a model with its folders of modules, which models that generate text do without.

    With `report` it is downloaded from the hub if there is none on disk. Raises `ModelLoadError`.
    """
    directory = _find_directory(name)
    return directory or _download_model(name, report or ignore_progress, with_folders=True)


@_explain_unreadable_files()
def find_vector_files(name: str) -> Path:
    """Return the directory of a model with the small files that say what its vectors are; those of a model of the hub
    are downloaded. Raises `ModelLoadError`.
    """
    return _find_directory(name) or _download_vector_files(name)


@_explain_unreadable_files()
def check_whole_model(directory: Path) -> dict[str, Any]:
    """Return what config.json says of a model that need not generate text. Raises `ModelLoadError` where the files show
    that it cannot be loaded.
    """
    config = check_config_file(directory, generates=False)
    check_tokenizer(directory, config["model_type"])
    for file in find_weight_files(directory):
        if file.suffix != ".safetensors":
            raise ModelLoadError(f"{file} is for models that generate text: use a checkpoint with safetensors")
    return config


@_explain_unreadable_files()
def list_model_files(name: str) -> set[str]:
    """Return the names of a model's files, on disk or else on the hub. Raises `ModelLoadError`."""
    if _find_gguf(name) is not None:
        return set()
    directory = _find_directory(name)
    if directory is None:
        from huggingface_hub import HfApi, constants, try_to_load_from_cache

        config = try_to_load_from_cache(name, "config.json")
        if not isinstance(config, str):
            with _explain_hub_errors():
                found = HfApi().model_info(name, timeout=constants.HF_HUB_ETAG_TIMEOUT)
            return {file.rfilename for file in found.siblings or []}
        directory = Path(config).parent
    return {file.name for file in directory.iterdir()}


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
    if path.is_file():
        with path.open("rb") as file:
            if file.read(4) == b"GGUF":
                raise ModelLoadError(f"{path} is a GGUF file: give it, or a link to it, a name that ends with .gguf")
        raise ModelLoadError(f"{path} is a file, and no GGUF file: name the directory that has all of the model")
    files = [] if any(path.glob("*.safetensors")) else sorted(path.glob("*.gguf"))
    if len(files) > 1:
        raise ModelLoadError(f"{path} has {len(files)} GGUF files: name one, such as {files[0]}")
    return files[0] if files else None


def _find_directory(name: str) -> Path | None:
    """Return the model's directory on disk; None for a name of the hub. Raises `ModelLoadError`, and `OSError`."""
    directory = DEMO_MODEL if name == "demo" else Path(name).expanduser()
    if directory.is_dir():
        if not os.access(directory, os.R_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(directory))
        return directory
    if name == "demo" or len(Path(name).parts) > 2 or name.startswith((".", "/", "~")):
        raise ModelLoadError(f"there is no directory {directory}: {_MODEL_FORMS}")
    return None


def find_packed_by_digest(settings: EngineSettings, digest: str) -> Path | None:
    """Return the packed file with this digest among those that workers with these settings may find, or None.

    It needs no torch, and checks nothing of the file. Raises `ModelLoadError`, and `OSError`.
    """
    beside = _find_directory(settings.model)
    files = [Path(settings.packed).expanduser()] if settings.packed else []
    files += [*settings.find_cache_directory().glob("packed/*/*.packed"), *(beside.glob("*.packed") if beside else ())]
    for file in files:
        with file.open("rb") as content:
            start = content.read(PACKED_PRELUDE.size)
        if start.startswith(PACKED_MAGIC) and len(start) == PACKED_PRELUDE.size:
            *_, found = PACKED_PRELUDE.unpack(start)
            if found.hex() == digest:
                return file
    return None


@contextmanager
def _explain_hub_errors() -> Iterator[None]:
    """Raise a `ModelLoadError` for whatever the hub's library raises within the context."""
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError

    try:
        yield
    except ModelLoadError:
        raise
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", 0)
        is_lasting = status in (401, 403, 404) or isinstance(error, HFValidationError | PermissionError)
        kind = ModelLoadError if is_lasting or constants.HF_HUB_OFFLINE else ModelUnavailable
        told = f"no such directory, and not from the hub at {constants.ENDPOINT}: {to_one_line(error)}"
        raise kind(told) from None


def _check_hub(name: str) -> None:
    """Raise `ModelLoadError` if a model of the hub is neither in its cache nor to be had, and `OSError`."""
    try:
        from huggingface_hub import HfApi, constants, try_to_load_from_cache
    except ImportError:
        return  # the worker says what is to be installed
    with _explain_hub_errors():
        config = try_to_load_from_cache(name, "config.json")
        if not isinstance(config, str):
            found = HfApi().model_info(name, timeout=constants.HF_HUB_ETAG_TIMEOUT)
            files = sorted(file.rfilename for file in found.siblings or [])
            if "config.json" not in files and (gguf := [file for file in files if file.endswith(".gguf")]):
                command = f"hf download {name} {gguf[0]}"
                raise ModelLoadError(
                    f"{name} has GGUF files alone there: download one (`{command}`), and name that file"
                )
            return
    check_config_file(Path(config).parent)


def _download_model(name: str, report: Progress, *, with_folders: bool = False) -> Path:
    """Return the directory of a model of the hub, for which a process asks once. Raises `ModelLoadError`.

    Where the hub does not answer in time, what is in its cache is taken as it is.
    """
    if (known := _downloaded.get(name)) is not None and known.is_dir():
        return known
    from huggingface_hub import snapshot_download, try_to_load_from_cache

    report("downloading", 0.0)
    patterns = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.txt"]
    with _limit_waits(), _explain_hub_errors():
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            _check_hub(name)
            described = Path(snapshot_download(name, allow_patterns=["config.json", "adapter_config.json"]))
            check_config_file(described, generates=not with_folders)
        ignored = ["onnx/*", "openvino/*"] if with_folders else ["*/*"]
        path = Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=ignored))
    if not with_folders and (path / MODULES_FILE).is_file():
        _download_vector_files(name, path.name)
    _downloaded[name] = path
    report("downloading", 1.0)
    return path


def _download_vector_files(name: str, revision: str | None = None) -> Path:
    from huggingface_hub import snapshot_download

    with _limit_waits(), _explain_hub_errors():
        return Path(snapshot_download(name, revision=revision, allow_patterns=[*_VECTOR_FILES, "*/config.json"]))


@contextmanager
def _limit_waits() -> Iterator[None]:
    """Limit how long the hub may take for each answer: most requests of its library have no limit of their own."""
    from huggingface_hub import constants, get_session

    def limit_wait(request: Any) -> None:
        limits = request.extensions["timeout"]
        request.extensions["timeout"] = {part: limits[part] or constants.HF_HUB_ETAG_TIMEOUT for part in limits}

    hooks = get_session().event_hooks
    get_session().event_hooks = {**hooks, "request": [*hooks["request"], limit_wait]}
    try:
        yield
    finally:
        get_session().event_hooks = hooks


def find_weight_files(directory: Path) -> list[Path]:
    """Return the weight files: those that the index names, if there is one. Raises `ModelLoadError` for one that is cut
    off, or is none.
    """
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if not index.is_file():
        if not single.is_file():
            if gguf := list(directory.glob("*.gguf")):
                return gguf  # one, as `describe_gguf` wrote the directory
            raise _explain_missing_weights(directory, f"no {single.name}, no {index.name}")
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


def _explain_missing_weights(directory: Path, missing: str) -> ModelLoadError:
    """Return the error of a directory in which there are neither weights in one file nor an index of several."""
    if parts := sorted(directory.glob("*.safetensors")):
        return build_damage_error(f"{directory} has {missing}, which says what is in {parts[0].name}")
    if pickles := [one.name for form in ("*model*.bin", "*.pth", "*.ckpt") for one in directory.glob(form)]:
        return ModelLoadError(
            f"{directory} has no .safetensors weights, and {pickles[0]} may run code, so it is never read: use "
            "a checkpoint with safetensors, or convert this one where you trust it"
        )
    return build_damage_error(f"{directory} has no .safetensors weights: {missing}")


def to_one_line(error: BaseException, limit: int = 300) -> str:
    """Return an exception's text in one line of at most `limit` characters."""
    return " ".join(str(error).split())[:limit]
