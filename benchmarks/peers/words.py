"""A model's directory in which every token has a text: that of a shape, with another tokenizer.

A server sends a frame when there is text. The tokenizer of `write.py` has one token a byte, and most of a shape's
vocabulary is none of them. Here a token is a space and up to four letters, so a prompt is a text of chosen length in
tokens, and answers are text for every server.
"""

import itertools
import os
import random
import shutil
import string
from pathlib import Path

from benchmarks.peers.setup import DIRECTORY
from benchmarks.peers.shapes import BOS, EOS, SHAPES
from benchmarks.peers.write import make_model_directory, write_tokenizer

_SPACE = "Ġ"
"""What byte-level BPE calls a space."""
_CHARACTERS = [chr(code) for code in range(ord("!"), ord("~") + 1)] + [_SPACE]


def list_words(vocabulary: int) -> list[str]:
    """Return the texts of all tokens, by their ids, as byte-level BPE writes them: characters first, then words."""
    words = (_SPACE + "".join(letters) for size in range(1, 5)
             for letters in itertools.product(string.ascii_lowercase, repeat=size))  # fmt: skip
    found = list(itertools.islice(itertools.chain(_CHARACTERS, words), vocabulary - 2))
    found[BOS:BOS] = ["<s>", "</s>"]
    assert found[EOS] == "</s>"
    return found


def list_merges(words: list[str]) -> list[tuple[str, str]]:
    """Return the merges that make the words, each from the word that is shorter by a letter, and that letter."""
    return [(word[:-1], word[-1]) for word in words if len(word) > 1 and word.startswith(_SPACE)]


def make_prompt(chance: random.Random, num_tokens: int) -> str:
    """Return a text of so many tokens, each a word of three letters."""
    return "".join(" " + "".join(chance.choices(string.ascii_lowercase, k=3)) for _ in range(num_tokens))


def make_words_directory(shape: str) -> Path:
    """Return the directory of the shape's model with words; written if it is not there. The weights are not copied."""
    target = DIRECTORY / "models" / f"{shape}-words"
    if not target.exists():
        scratch = target.with_suffix(f".{os.getpid()}")
        shutil.copytree(make_model_directory(SHAPES[shape], target.parent), scratch, copy_function=os.link,
                        ignore=shutil.ignore_patterns("*.gguf", "tokenizer*"))  # fmt: skip
        words = list_words(SHAPES[shape].vocabulary)
        write_tokenizer(scratch, words, list_merges(words))
        scratch.rename(target)
    return target
