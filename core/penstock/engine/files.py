"""Find a model's files in a directory or on the hub."""

import json
from collections.abc import Callable
from pathlib import Path

from penstock.errors import ModelLoadError

DEMO_MODEL = Path(__file__).parent / "demo" / "model"

Progress = Callable[[str, float], None]
"""Called with the current activity and its progress from 0 to 1."""


def find_model(name: str, report: Progress) -> Path:
    """Return the model's directory, downloaded from the hub if there is none on disk."""
    directory = DEMO_MODEL if name == "demo" else Path(name).expanduser()
    if directory.suffix == ".gguf" or (any(directory.glob("*.gguf")) and not any(directory.glob("*.safetensors"))):
        raise ModelLoadError("GGUF files are not read: use a checkpoint of the model in safetensors")
    if not directory.is_dir():
        if name == "demo" or len(Path(name).parts) > 2 or name.startswith((".", "/", "~")):
            raise ModelLoadError(f"there is no directory {directory}")
        directory = _download_model(name, report)
    _check_config(directory)
    return directory


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
    path = directory / "config.json"
    if not path.is_file():
        raise ModelLoadError(f"{directory} has no config.json")
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelLoadError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelLoadError(f"{path} has no model_type")


def find_weight_files(directory: Path) -> list[Path]:
    """Return the weight files: those that the index names, if there is one."""
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if not index.is_file():
        if not single.is_file():
            raise ModelLoadError(f"{directory} has no .safetensors weights: no {single.name}, no {index.name}")
        return [single]
    try:
        names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        files = [directory / name for name in names]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{index} is not a weight index: {to_one_line(error)}") from error
    if not files:
        raise ModelLoadError(f"{index} names no file")
    for file in files:
        if not file.is_file():
            raise ModelLoadError(f"{index} names {file.name}, which is not there")
    return files


def to_one_line(error: BaseException, limit: int = 300) -> str:
    """Return an exception's text in one line of at most `limit` characters."""
    return " ".join(str(error).split())[:limit]
