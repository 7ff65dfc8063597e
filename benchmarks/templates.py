"""Published chat templates with published vocabularies: no text of a user becomes a control token.

python -m benchmarks.templates [--quick | --smoke] [--json FILE] [--seed N]

The templates and vocabularies are those in the source archive of llama-cpp-python, which pip fetches once. Each
template is played with a vocabulary of both kinds, to which its tokens are added. What is checked stands in
`sim/chats.py`; the exit status is 1 if a chat has a fault.

    chats, faults        how many were checked, and how many have a fault
    read, refused        of how many the template read the token, and how many it refused
    short_ratio, …       processor time of tokenizing a chat, to that of transformers alone

`--smoke` takes the model of the tests for tools, and fetches nothing.
"""

import random
import re
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from benchmarks.common import Arguments, run_benchmark
from penstock.engine.gguf.gguf_file import read_gguf_header
from penstock.engine.gguf.gguf_model import make_tokenizer
from penstock.messages import ChatMessage
from sim.chats import ChatChecker
from sim.workload import TOOL_MODEL

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


def load_published_models(models: Path) -> Iterator[tuple[str, Any]]:
    """Yield a name and a tokenizer for each template with a vocabulary of both kinds."""
    templates = {path.stem: path.read_text("utf-8") for path in sorted(models.glob("templates/*.jinja"))}
    for pair, vocabularies in enumerate(VOCABULARIES):
        for vocabulary in vocabularies:
            path = models / f"ggml-vocab-{vocabulary}.gguf"
            read = make_tokenizer(path, read_gguf_header(path))
            backend, given = read.backend_tokenizer.to_str(), read.special_tokens_map
            for name in list(templates)[pair :: len(VOCABULARIES)]:
                tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(backend), **given)
                _add_tokens(tokenizer, templates[name])
                yield f"{name}, {vocabulary}", tokenizer


def play_templates(played: Iterable[tuple[str, Any]], seed: int, wanted: int) -> dict[str, float]:
    """Check as many chats as are wanted of each tokenizer, print what is wrong, and return the sums."""
    totals = dict.fromkeys(("checked", "read", "refused", "faults"), 0)
    for name, tokenizer in played:
        checker, rng = ChatChecker(tokenizer), random.Random(f"{seed} {name}")
        control = list(checker.control)
        own = [mark for mark in _TOKEN.findall(tokenizer.chat_template) if mark in checker.control] or control
        # What templates refuse is drawn again, up to five times.
        for _ in range(5 * wanted):
            if checker.outcome.checked == wanted:
                break
            token = rng.choice(own if rng.random() < 0.8 else control)
            for fault in checker.draw_chat(rng, token):
                totals["faults"] += 1
                print(f"fault: {name}: {fault[:600]}", flush=True)
        for what in ("checked", "read", "refused"):
            totals[what] += getattr(checker.outcome, what)
        if not checker.outcome.checked:
            print(f"{name}: the template refuses all chats", flush=True)
    print(f"{totals['checked']} chats of templates with vocabularies, {totals['faults']} with a fault")
    return {"chats": totals.pop("checked"), **totals}


def _add_tokens(tokenizer: Any, template: str) -> None:
    """Give a tokenizer a template and its tokens, of which every other one is special."""
    known, marks = tokenizer.get_vocab(), sorted(set(_TOKEN.findall(template)))
    tokenizer.chat_template = template
    tokenizer.add_tokens(
        [AddedToken(mark, special=n % 2 == 0, normalized=False) for n, mark in enumerate(marks) if mark not in known]
    )


def measure_chats(tokenizer: Any) -> dict[str, float]:
    """Print the processor time of chats, beside that of transformers alone; return the ratios."""
    ratios = {}
    checker = ChatChecker(tokenizer)
    word = "In the beginning there was a long text of quite ordinary words. "
    for name, what, num_turns, content in (
        ("short", "1 turn of 13 words", 1, word),
        ("long", "9 turns of 390 words", 9, word * 30),
        ("attack", "9 turns of 390 words with a control token each", 9, word * 30 + "<|im_end|>"),
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
        ratios[f"{name}_ratio"] = after_s / before_s
    return ratios


def _time_call(call: Callable[[], object]) -> float:
    begun_s, count = time.thread_time(), 0
    while time.thread_time() < begun_s + 0.05:
        call()
        count += 1
    return (time.thread_time() - begun_s) / count


@dataclass(frozen=True)
class Options(Arguments):
    """The arguments of all benchmarks, and the seed of the chats."""

    seed: int = 0


def run(given: Options) -> dict[str, float]:
    """Play and measure; return the figures."""
    if given.size == "smoke":
        tokenizer = AutoTokenizer.from_pretrained(TOOL_MODEL)
        return play_templates([("demo", tokenizer)], given.seed, 10) | measure_chats(tokenizer)
    models = fetch_models()
    path = models / "ggml-vocab-qwen2.gguf"
    tokenizer = make_tokenizer(path, read_gguf_header(path))
    _add_tokens(tokenizer, (models / "templates/Qwen-Qwen3-0.6B.jinja").read_text("utf-8"))
    num_pairs = 2 * len(list(models.glob("templates/*.jinja")))
    wanted = given.choose_size(20_000, 2000, 0) // num_pairs + 1
    return play_templates(load_published_models(models), given.seed, wanted) | measure_chats(tokenizer)


if __name__ == "__main__":
    sys.exit(int(run_benchmark(__doc__, run, Options, seed={"type": int, "default": 0})["faults"] > 0))
