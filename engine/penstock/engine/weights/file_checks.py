"""Checks of a model's files, made before torch or transformers is imported: whether the model can be served.

config.json, the first bytes of weights, and the tokenizer's files are read here, and the registry of transformers as
text: to import it takes seconds. `loading/` reports the errors that only a load can find.
"""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.errors import ModelLoadError, build_damage_error

_OTHER_TASKS = re.compile(
    "For(MaskedLM|PreTraining|NextSentencePrediction|MultipleChoice|QuestionAnswering|(Sequence|Token|Image)Classification)"
    "|(Encoder|EncoderModel)$"
)
"""Ends of the names of encoders' and classifiers' architectures."""
_MAX_COUNT = 2**12
_COUNTS = re.compile("layer|head|expert|block|depth|label|stack|stage|group|loop|repeat")
"""Words in the names of numbers of which a configuration makes as many entries, or a model as many modules."""
_SIZES = re.compile("size|dim|width|len|position|capacity|_id|freq|index")
_MAPPING = re.compile(r"^MODEL_FOR_(\w+)_MAPPING_NAMES = OrderedDict\(\n(.*?)\n\)", re.MULTILINE | re.DOTALL)
"""A table of transformers' registry: the types that have a model for a task."""
_TYPE = re.compile(r'\(\s*"([^"]+)",')
_NO_BLOCKS = {
    **dict.fromkeys(("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"), "its layers keep no keys and values"),
    "recurrent_gemma": "it keeps its recurrent state in its modules, not in a cache",
    "minimax": "its linear attention has a cache of its own",
    "deepseek_v4": "its layers compress several tokens to one, and cache that",
}
"""By type: why the engine has no KV blocks for a model that transformers has."""
_TOKENIZER_FILE = re.compile(r"^tokenizer\.|vocab|merges|spiece|tekken|tiktoken|\.(model|bpe)$")
_MAX_HEADER_BYTES = 100_000_000  # as safetensors itself has it


def check_description(directory: Path) -> None:
    """Raise `ModelLoadError` for a directory whose config.json or tokenizer shows that no model in it can be served.

    transformers makes a configuration only of what passes here: for some counts it makes lists of as many entries.
    """
    config = check_config_file(directory)
    check_tokenizer(directory, config["model_type"])


def check_config_file(directory: Path, *, generates: bool = True) -> dict[str, Any]:
    """Return what config.json says. Raises `ModelLoadError` as `check_description` does for that file.

    Unless it `generates` text, a model of any type that transformers has will do.
    """
    path = directory / "config.json"
    if (directory / "adapter_config.json").is_file() and not path.is_file():
        raise ModelLoadError(f"{directory} has an adapter (LoRA) alone: merge it into its base model, and serve that")
    if not path.is_file() and (directory / "snapshots").is_dir():
        kept = ", ".join(sorted(f"{one}" for one in (directory / "snapshots").iterdir()))
        raise ModelLoadError(f"{directory} is the hub's cache of a model: name it as on the hub, or {kept}")
    if not path.is_file():
        raise build_damage_error(f"{directory} has no config.json")
    config = _read_json(path)
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise build_damage_error(f"{path} has no model_type")
    try:
        _check_values(path, config)
    except RecursionError:
        raise build_damage_error(f"{path} is nested too deep for a configuration") from None
    _check_type(path, config, generates=generates)
    return config


def check_weights(files: list[Path]) -> None:
    """Raise `ModelLoadError` for a safetensors file that is cut off, or is none."""
    for file in files:
        if file.suffix == ".safetensors":
            _check_safetensors(file)


def build_tokenizer_error(directory: Path, why: str) -> ModelLoadError:
    """Return the error of a directory without a tokenizer that can be used; `why` is a clause."""
    return ModelLoadError(
        f"no usable tokenizer in {directory} ({why}): use the tokenizer.json that was published with the model, or one "
        "that transformers reads without code of its authors"
    )


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise build_damage_error(f"{path} is not JSON: {error}") from error


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


def _check_type(path: Path, config: dict[str, Any], *, generates: bool) -> None:
    """Raise `ModelLoadError` for a type of model that transformers does not have, or that is to generate text and
    generates none here.
    """
    names, model_type = config.get("architectures"), config["model_type"]
    if generates and isinstance(names, list) and names and all(map(_OTHER_TASKS.search, map(str, names))):
        raise ModelLoadError(
            f"{path} is of {names[0]}, which generates no text: use a model for causal language modelling, such as one "
            "whose architecture is called ...ForCausalLM"
        )
    registry = _read_registry()
    if not registry:
        return
    if not any(f'"{model_type}"' in text for text in registry.values()):
        own = "; the model is code of its authors (auto_map), which is never run" if "auto_map" in config else ""
        raise ModelLoadError(
            f"transformers knows no model_type {model_type[:60]!r}, which {path} has{own}: use a model of a type that "
            "docs/models.md has"
        )
    if not generates:
        return
    types = parse_tables(registry.get("modeling_auto.py", ""))
    text = types.get("CAUSAL_LM", set()) | types.get("IMAGE_TEXT_TO_TEXT", set())
    translates = model_type in types.get("SEQ_TO_SEQ_CAUSAL_LM", set()) - text
    if config.get("is_encoder_decoder", translates):
        what = "is an encoder-decoder model, and only decoder-only models are served"
    elif text and model_type not in text:
        what = "is no causal language model in transformers"
    elif model_type in types.get("MASKED_LM", set()) - {"xlm"} and not config.get("is_decoder"):
        what = "is an encoder, which fills in masks or describes texts, and generates none"
    elif model_type in _NO_BLOCKS:
        what = f"cannot be served: {_NO_BLOCKS[model_type]}"
    else:
        return
    raise ModelLoadError(
        f"{path} is of type {model_type!r}, which {what}: use a model of a type that docs/models.md has"
    )


def parse_tables(registry: str) -> dict[str, set[str]]:
    """Return the types of models that transformers has for each task, by its name there."""
    return {task: set(_TYPE.findall(rows)) for task, rows in _MAPPING.findall(registry)}


def _read_registry() -> dict[str, str]:
    """Return the texts of transformers' registry by file; none where it is not installed."""
    root = _find_transformers()
    return {file.name: file.read_text("utf-8") for file in root.glob("models/auto/*.py")} if root else {}


def _find_transformers() -> Path | None:
    """Return the directory of transformers' source; None where it is not installed."""
    found = find_spec("transformers")
    return None if found is None or found.origin is None else Path(found.origin).parent


def check_tokenizer(directory: Path, model_type: str) -> None:
    """Raise `ModelLoadError` where there is no tokenizer, or one that is none or is code."""
    if not any(_TOKENIZER_FILE.search(file.name) for file in directory.iterdir()):
        raise build_tokenizer_error(directory, "no tokenizer.json, no tokenizer.model, no vocabulary")
    whole, about = directory / "tokenizer.json", directory / "tokenizer_config.json"
    if whole.is_file():
        try:
            content = json.loads(whole.read_bytes())
        except (ValueError, RecursionError) as error:
            raise build_tokenizer_error(directory, f"tokenizer.json is not JSON: {error}") from error
        if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
            raise build_tokenizer_error(directory, "tokenizer.json has no `model`, so it is none")
    elif (directory / "tiktoken.model").is_file():  # transformers would read it with the rule of other models
        why = "how tiktoken.model splits a text is code of its authors, which is never run; docs/vllm.md converts it"
        raise build_tokenizer_error(directory, why)
    given = _read_json(about) if about.is_file() else {}
    if isinstance(given, dict) and isinstance(given.get("auto_map"), dict) and given["auto_map"].get("AutoTokenizer"):
        text = _read_registry().get("tokenization_auto.py", "")
        if text and f'"{model_type}"' not in text and not _has_tokenizer_class(str(given.get("tokenizer_class"))):
            raise build_tokenizer_error(directory, "it is code of its authors, which is never run")


def _has_tokenizer_class(name: str) -> bool:
    """Return whether transformers, which is installed, has a class for tokenizers, or a base class, of this name."""
    root = _find_transformers()
    files = [root / "__init__.py", *root.glob("models/*/tokenization_*.py")] if root else []
    return any(f'"{name.removesuffix("Fast")}"' in file.read_text("utf-8") for file in files)


def _check_safetensors(file: Path) -> None:
    size = file.stat().st_size
    with file.open("rb") as opened:
        first = opened.read(8)
        length = int.from_bytes(first, "little")
        if first.startswith(b"version "):
            raise ModelLoadError(f"{file.name} is a pointer of Git LFS, and no weights: fetch them (`git lfs pull`)")
        if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
            raise build_damage_error(f"{file.name} is damaged or cut off: its header is not within its {size:,} bytes")
        header = opened.read(length)
    try:
        tensors = [tensor for name, tensor in json.loads(header).items() if name != "__metadata__"]
        end = 8 + length + max((int(tensor["data_offsets"][1]) for tensor in tensors), default=0)
    except (ValueError, RecursionError, AttributeError, KeyError, TypeError, IndexError, OverflowError) as error:
        raise build_damage_error(f"{file.name} is damaged or cut off: its header is none ({error!r:.200})") from error
    if end != size:
        raise build_damage_error(
            f"{file.name} is damaged or cut off: it has {size:,} bytes, and its header says {end:,}"
        )
