"""Published chat templates with published vocabularies: no text of a user becomes a control token.

python -m benchmarks.templates [--seed N] [--chats N]

The templates and vocabularies are those in the source archive of llama-cpp-python, which pip fetches once. Each
template is played with a vocabulary of both kinds, to which its tokens are added. What is checked stands in
`sim/chats.py`. At the end stands what tokenizing a chat takes, beside transformers alone.
"""

import argparse
import random
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from penstock.engine.gguf_file import read_gguf_header
from penstock.engine.gguf_model import make_tokenizer
from penstock.messages import ChatMessage
from sim.chats import ChatChecker

ARCHIVE = "llama-cpp-python==0.3.36"
CACHE = Path(__file__).parents[1] / ".cache/templates"
VOCABULARIES = (
    ("qwen2", "llama-spm"),
    ("llama-bpe", "phi-3"),
    ("gpt-neox", "gemma-4"),
    ("aquila", "nomic-bert-moe"),
)
"""Byte BPE, and SentencePiece's BPE or Unigram. Templates take the pairs in turns."""
_TOKEN = re.compile(r"<[|｜/]?[^\s<>{}'\"%]+>|\[/?[A-Z_]{3,}\]")


def fetch_models() -> Path:
    """Return the folder with the archive's templates and vocabularies."""
    models = CACHE / "models"
    if not models.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python"]
        if not [*CACHE.glob("*.tar.gz")]:
            subprocess.run([*pip, "--dest", str(CACHE), ARCHIVE], check=True)
        scratch = CACHE / "scratch"
        (path,) = CACHE.glob("*.tar.gz")
        with tarfile.open(path) as archive:
            wanted = [
                one for one in archive if re.search(r"/models/(templates/.*\.jinja|ggml-vocab-.*\.gguf)$", one.name)
            ]
            archive.extractall(scratch, wanted, filter="data")
        next(scratch.glob("*/vendor/llama.cpp/models")).rename(models)
    return models


def play_templates(models: Path, seed: int, num_chats: int) -> int:
    """Check chats of all templates, print what is wrong, and return how many have a fault."""
    templates = {path.stem: path.read_text("utf-8") for path in sorted(models.glob("templates/*.jinja"))}
    played = [(kind, pair) for pair in range(len(VOCABULARIES)) for kind in range(2)]
    totals, num_faults = dict.fromkeys(("checked", "read", "refused"), 0), 0
    for kind, pair in played:
        path = models / f"ggml-vocab-{VOCABULARIES[pair][kind]}.gguf"
        vocabulary = make_tokenizer(path, read_gguf_header(path))
        backend, given = vocabulary.backend_tokenizer.to_str(), vocabulary.special_tokens_map
        for name in list(templates)[pair :: len(VOCABULARIES)]:
            tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(backend), **given)
            _add_tokens(tokenizer, templates[name])
            checker, rng = ChatChecker(tokenizer), random.Random(f"{seed} {name} {kind}")
            own = [mark for mark in _TOKEN.findall(templates[name]) if mark in checker.control] or list(checker.control)
            # What templates refuse is drawn again, up to five times.
            wanted = num_chats // (2 * len(templates)) + 1
            for _ in range(5 * wanted):
                if checker.outcome.checked == wanted:
                    break
                token = rng.choice(own if rng.random() < 0.8 else list(checker.control))
                for fault in checker.draw_chat(rng, token):
                    num_faults += 1
                    print(f"fault: {name}, {VOCABULARIES[pair][kind]}: {fault[:600]}", flush=True)
            for what in totals:
                totals[what] += getattr(checker.outcome, what)
            if not checker.outcome.checked:
                print(f"{name} refuses all chats", flush=True)
    print(f"{totals['checked']} chats of {len(templates)} templates, {num_faults} with a fault,", end=" ")
    print(f"{totals['read']} whose token the template read, {totals['refused']} refused by a template")
    return num_faults


def _add_tokens(tokenizer: Any, template: str) -> None:
    """Give a tokenizer a template and its tokens, of which every other one is special."""
    known, marks = tokenizer.get_vocab(), sorted(set(_TOKEN.findall(template)))
    tokenizer.chat_template = template
    tokenizer.add_tokens(
        [AddedToken(mark, special=n % 2 == 0, normalized=False) for n, mark in enumerate(marks) if mark not in known]
    )


def measure_chats(models: Path) -> None:
    """Print the processor time of chats, beside that of transformers alone."""
    path = models / "ggml-vocab-qwen2.gguf"
    tokenizer = make_tokenizer(path, read_gguf_header(path))
    _add_tokens(tokenizer, (models / "templates/Qwen-Qwen3-0.6B.jinja").read_text("utf-8"))
    checker = ChatChecker(tokenizer)
    word = "In the beginning there was a long text of quite ordinary words. "
    for what, num_turns, content in (
        ("1 turn of 13 words", 1, word),
        ("9 turns of 390 words", 9, word * 30),
        ("9 turns of 390 words with a control token each", 9, word * 30 + "<|im_end|>"),
    ):
        turns = [ChatMessage(role="assistant" if n % 2 else "user", content=content) for n in range(num_turns)]
        described = [turn.describe() for turn in turns]

        def plain(described: list[Any] = described) -> list[int]:
            text = tokenizer.apply_chat_template(described, tokenize=False, add_generation_prompt=True)
            found: list[int] = tokenizer(text, verbose=False, add_special_tokens=False)["input_ids"]
            return found

        def guarded(turns: list[ChatMessage] = turns) -> list[int]:
            return checker.chats.tokenize_chat(checker.chats.render_chat(turns, {}))

        rounds = [(_time_call(plain), _time_call(guarded)) for _ in range(15)]
        before_s, after_s = (min(times) for times in zip(*rounds, strict=True))
        print(f"{what}: {1e3 * before_s:.2f} ms, {1e3 * after_s:.2f} ms, {after_s / before_s:.2f} of it")


def _time_call(call: Callable[[], object]) -> float:
    begun_s, count = time.thread_time(), 0
    while time.thread_time() < begun_s + 0.05:
        call()
        count += 1
    return (time.thread_time() - begun_s) / count


def main() -> int:
    """Play, measure, and return 1 if a chat has a fault."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--chats", type=int, default=2000, help="how many to check in all")
    given = parser.parse_args()
    models = fetch_models()
    num_faults = play_templates(models, given.seed, given.chats)
    measure_chats(models)
    return int(num_faults > 0)


if __name__ == "__main__":
    sys.exit(main())
