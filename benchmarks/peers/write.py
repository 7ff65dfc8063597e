"""Write a model of random bf16 weights as a directory that every engine can load or convert."""

import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from benchmarks.peers.shapes import BOS, EOS, MAX_LENGTH, Shape

_SPECIALS = {BOS: "<s>", EOS: "</s>"}


def make_model_directory(shape: Shape, parent: Path) -> Path:
    """The directory of the shape's model under `parent`; written if it is not there."""
    directory = parent / shape.name
    if not directory.exists():
        scratch = write_directory(shape, parent / f"{shape.name}.{os.getpid()}", shape.tensor_shapes())
        try:
            scratch.rename(directory)
        except OSError:  # another process was faster
            shutil.rmtree(scratch)
    return directory


def write_directory(shape: Shape, directory: Path, tensors: Mapping[str, tuple[int, ...]]) -> Path:
    """Write the shape's model with these of its tensors, and return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    _write_weights(shape, tensors, directory / "model.safetensors")
    _write_json(directory / "config.json", shape.make_config())
    _write_json(directory / "generation_config.json", {"bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": EOS})
    write_tokenizer(directory, *_list_bytes())
    return directory


def _write_weights(shape: Shape, sizes: Mapping[str, tuple[int, ...]], file: Path) -> None:
    """Normal weights, scaled so that activations keep their size through the layers; norms are one."""
    import torch
    from safetensors.torch import save_file

    chance = torch.Generator().manual_seed(0)
    tensors = {}
    for name, size in sizes.items():
        if len(size) == 1:
            tensors[name] = torch.ones(size, dtype=torch.bfloat16)
        else:
            scale = 1.0 if "embed_tokens" in name and not shape.tied else 1 / math.sqrt(size[-1])
            tensors[name] = torch.randn(size, generator=chance).mul_(scale).to(torch.bfloat16)
    save_file(tensors, file, metadata={"format": "pt"})


def _list_bytes() -> tuple[list[str], list[tuple[str, str]]]:
    """A byte is a token: byte-level BPE that merges nothing."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet()), []


def write_tokenizer(directory: Path, words: list[str], merges: list[tuple[str, str]]) -> None:
    """Write a tokenizer of byte-level BPE. `words` are the texts of its tokens, by their ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in _SPECIALS.values()])
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"bos_token": _SPECIALS[BOS], "eos_token": _SPECIALS[EOS], "pad_token": _SPECIALS[EOS]}
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": MAX_LENGTH}
    _write_json(directory / "tokenizer_config.json", kind | names)


def _write_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
