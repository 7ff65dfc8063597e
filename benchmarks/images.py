"""Pictures: a second question about one, token streams beside them, and a decode worker's memory without vision.

python -m benchmarks.images [--quick | --smoke] [--json FILE]

A model of SmolVLM-500M's shape with random weights in bfloat16: SmolLM2-360M's text, SigLIP's tower, tiles of 512
pixels and 64 tokens. Pictures have 1,024 by 1,024 pixels, which its processor doubles: 17 tiles, about 1,140 tokens.
All is asked over HTTP, through gateways. `--quick` has fewer layers, and `--smoke` a tiny shape.

**Second question.** One prefill and one decode worker. Each picture is asked about twice, in two requests, one after
the other; the times to the first token are compared, picture by picture.

**Streams.** Eight token streams run while pictures are seen: a new one is sent to a side in its turn, and the gaps
between tokens count until it is answered. A stall of a step is a gap of each stream, and so not in the 99th percentile
of a long answer: the longest gap is told too. The sides have two cores, as `penstock up` divides them:

    split             one prefill and one decode worker, a core and a thread each
    auto              one `auto` worker with both cores and two threads, which sees on a thread beside its steps
    auto_no_thread    the same, which sees within its steps (`benchmarks.systems.UnthreadedStack`)

**Memory.** What is resident of the split's workers behind the questions, without their pools and what they share.
"""

import base64
import http.client
import io
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import torch
import transformers
from PIL import Image

from benchmarks.common import Arguments, run_benchmark
from benchmarks.comparison import compute_ratio, measure_in_turns, print_table
from benchmarks.interference import NUM_STREAMS, StackSide, collect_stream_gaps, compute_percentile_ms
from benchmarks.peers.words import list_merges, list_words
from benchmarks.peers.write import write_tokenizer
from benchmarks.processor import Meter, read_own_bytes
from benchmarks.systems import UnthreadedStack, list_pids, open_stack
from penstock.client.sync import Client
from penstock.errors import PenstockError
from penstock.local.processes import find_free_port
from penstock.local.stack import Stack
from penstock.waiting import wait_until
from sim.forked import ForkedStack
from tools.seeing import write_files

EDGE, TILE_EDGE, PICTURE_EDGE = 2048, 512, 1024
"""Pixels of a picture's longer side before it is divided, of a tile, and of each picture that is sent."""
SHUFFLE, TILE_TOKENS = 4, 64
"""So many patches in a row, and in a column, become one token."""
TEXT = {
    "model_type": "llama", "hidden_size": 960, "intermediate_size": 2560, "num_attention_heads": 15,
    "num_key_value_heads": 5, "max_position_embeddings": 8192, "rope_theta": 100_000.0, "pad_token_id": 257,
    "bos_token_id": 256, "eos_token_id": 257,
}  # fmt: skip
TOWER = {
    "model_type": "idefics3_vision", "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12,
    "patch_size": 16, "image_size": TILE_EDGE,
}  # fmt: skip
TINY_TEXT = {"hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 3, "num_key_value_heads": 1}
TINY_TOWER = {"hidden_size": 24, "intermediate_size": 32, "num_attention_heads": 2}
MODEL, PATIENCE_S = "seer", 600.0
SPLIT, AUTO, NO_THREAD = "split", "auto", "auto_no_thread"
SIDES: Mapping[str, tuple[type[Stack], dict[str, int]]] = {
    SPLIT: (ForkedStack, {"prefill": 1, "decode": 1}),
    AUTO: (ForkedStack, {"prefill": 0, "decode": 0, "auto": 1}),
    NO_THREAD: (UnthreadedStack, {"prefill": 0, "decode": 0, "auto": 1}),
}
"""How each side is started: from forked processes all, as one of them is."""


def make_model(directory: Path, text: Mapping[str, Any], tower: Mapping[str, Any], vocabulary: int) -> None:
    """Write a model of these shapes with random weights, and all files that a published one has."""
    grid = range(1, EDGE // TILE_EDGE + 1)
    marks = ["<image>", "<fake_token_around_image>", "<global-img>"]
    marks += [f"<row_{row}_col_{column}>" for row in grid for column in grid]
    directory.mkdir()
    words = list_words(vocabulary - len(marks))
    write_tokenizer(directory, words, list_merges(words))
    about = {
        "image": "<image>", "tokens": marks, "config": transformers.Idefics3Config, "text": text, "vision": tower,
        "joined": {"scale_factor": SHUFFLE}, "pixels": transformers.Idefics3ImageProcessorPil,
        "sizes": {"size": {"longest_edge": EDGE}, "max_image_size": {"longest_edge": TILE_EDGE}},
        "processor": {"processor_class": "Idefics3Processor", "image_seq_len": TILE_TOKENS},
    }  # fmt: skip
    config = write_files(directory, about, transformers.AutoTokenizer.from_pretrained(directory))
    torch.manual_seed(1)
    kind: Any = transformers.Idefics3ForConditionalGeneration
    kind._from_config(config, dtype=torch.bfloat16).save_pretrained(directory)  # noqa: SLF001


def draw_picture(seed: int) -> str:
    """Return the data URL of a random picture with large and small forms, as a JPEG file."""
    chance, size = np.random.default_rng(seed), (PICTURE_EDGE, PICTURE_EDGE)
    layers = [
        np.asarray(Image.fromarray(chance.integers(0, 256, (side, side, 3), np.uint8)).resize(size), np.float32)
        for side in (8, 64, 256)
    ]
    file = io.BytesIO()
    Image.fromarray(np.mean(layers, axis=0).astype(np.uint8)).save(file, "JPEG", quality=90)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


class SeeingSide(StackSide):
    """A pipeline that is asked about pictures through its gateway, and has streams."""

    stream_tokens = 1024  # they last for longer than a picture: the hand-off of a new one would be a gap

    def __init__(self, stack: Stack, client: Client) -> None:
        super().__init__(client)
        self._address = urlsplit(stack.gateway_url).netloc
        self.stack = stack

    def ask(self, picture: str, question: str) -> float:
        """Return the seconds to the first text of an answer, which is read to its end."""
        content = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": question}]
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 4, "stream": True,
                "temperature": 0, "ignore_eos": True}  # fmt: skip
        first_s = None
        with closing(http.client.HTTPConnection(self._address, timeout=PATIENCE_S)) as connection:
            begun_s = time.perf_counter()
            connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                raise PenstockError(f"the gateway answered {answer.status}: {answer.read(500)!r}")
            for line in answer:
                if first_s is None and line.startswith(b"data: {") and has_text(json.loads(line[6:])):
                    first_s = time.perf_counter() - begun_s
        if first_s is None:
            raise PenstockError(f"no text came: {line!r}")
        return first_s

    def run_alone(self, seconds: float, _: int) -> list[float]:
        """Return the gaps between the streams' tokens without pictures."""
        return self._run_beside(partial(time.sleep, seconds))[0]

    def run_beside_picture(self, seed: int, number: int) -> tuple[list[float], float]:
        """Return the gaps until a picture is answered, and the seconds to its first token."""
        return self._run_beside(partial(self.ask, draw_picture(seed + number), "What is it?"))

    def _run_beside(self, work: Callable[[], Any]) -> tuple[list[float], Any]:
        """Return the gaps while some work is done, once all streams run, and what that returned."""
        begun_s, begin_s = list[float](), math.inf

        def answer() -> Iterator[object]:
            for number, token in enumerate(self.stream_answer()):
                if number == 1:  # behind the hand-off
                    begun_s.append(time.perf_counter())
                yield token

        def begin() -> Any:
            nonlocal begin_s
            wait_until(lambda: len(begun_s) >= NUM_STREAMS, PATIENCE_S, "all streams run", 0.01)
            begin_s = time.perf_counter()
            return work()

        with ThreadPoolExecutor(1) as pool:
            working = pool.submit(begin)
            return collect_stream_gaps(answer, NUM_STREAMS, lambda: begin_s, working.done), working.result()


def has_text(event: Mapping[str, Any]) -> bool:
    """Return whether an event of a stream has text; an error raises `PenstockError`."""
    if "error" in event:
        raise PenstockError(str(event["error"]))
    return any(choice["delta"].get("content") for choice in event["choices"])


def compare_questions(side: SeeingSide, count: int) -> dict[str, float]:
    """Ask twice about each picture; return the figures."""
    found: dict[str, list[float]] = {"first": [], "second": []}
    for number in range(count):
        picture = draw_picture(number)
        for name, question in (("first", "What is it?"), ("second", "Where is it?")):
            found[name].append(side.ask(picture, question))
    print_table(found, "ms to the first token", 1000)
    return {
        "ttft_first_question_ms": 1000 * statistics.median(found["first"]),
        "ttft_second_question_ms": 1000 * statistics.median(found["second"]),
        "ttft_second_question_vs_first": compute_ratio(found, "second", "first"),
    }


def compare_gaps(sides: Mapping[str, SeeingSide], rounds: int, seconds: float) -> dict[str, float]:
    """Let the sides take turns with a picture beside streams, and first without one; return the figures."""
    runs = {name: partial(side.run_alone, seconds) for name, side in sides.items() if name != NO_THREAD}
    alone = measure_in_turns(runs, rounds, "alone")
    seen = measure_in_turns(
        {name: partial(side.run_beside_picture, 1000) for name, side in sides.items()}, rounds, "seen"
    )

    def compute_p99(rounds_s: list[list[float]]) -> float:
        return compute_percentile_ms([gap_s for gaps_s in rounds_s for gap_s in gaps_s], 99)

    found = {name: [gaps_s for gaps_s, _ in windows] for name, windows in seen.items()}
    gaps_ms = {name: compute_p99(gaps) for name, gaps in found.items()}
    by_round = {name: [compute_percentile_ms(gaps_s, 99) for gaps_s in gaps] for name, gaps in found.items()}
    longest = {name: [1000 * max(gaps_s) for gaps_s in gaps] for name, gaps in found.items()}
    medians = {name: [compute_percentile_ms(gaps_s, 50) for gaps_s in gaps] for name, gaps in found.items()}
    print_table(medians, "ms between tokens (p50); much less than a step's: whoever reads them waits for a core")
    print_table(by_round, "ms between tokens (p99) beside a picture")
    print_table({name: [s for _, s in windows] for name, windows in seen.items()}, "s to a picture's first token")
    return {
        **{f"gap_p99_{name}_ms": gap_ms for name, gap_ms in gaps_ms.items()},
        "gap_alone_ms": compute_p99(alone[AUTO]),
        "gap_alone_split_ms": compute_p99(alone[SPLIT]),
        **{f"gap_longest_{name}_ms": statistics.median(rounds_ms) for name, rounds_ms in longest.items()},
        **{f"ttft_beside_{name}_ms": 1000 * statistics.median(s for _, s in windows) for name, windows in seen.items()},
        "gap_auto_vs_split": compute_ratio(by_round, AUTO, SPLIT),
        "gap_no_thread_vs_auto": compute_ratio(by_round, NO_THREAD, AUTO),
        "gap_longest_no_thread_vs_auto": compute_ratio(longest, NO_THREAD, AUTO),
    }


def compare_memory(stack: Stack, pool_mb: int) -> dict[str, float]:
    """Return how much memory the decode worker has to the prefill worker's, without their pools."""
    pids = list_pids(stack)
    Meter(pids).wait_idle()
    own_mb = {
        slot.stage: read_own_bytes([pid]) / 2**20 - pool_mb for slot, pid in zip(stack.workers, pids, strict=True)
    }
    print_table({stage: [one] for stage, one in own_mb.items()}, "MiB")
    return {"decode_memory_without_vision": own_mb["decode"] / own_mb["prefill"]}


def run(given: Arguments) -> dict[str, float]:
    """Measure and print; return the figures."""
    layers, tower_layers = given.choose_size((32, 12), (8, 2), (2, 1))
    vocabulary = given.choose_size(49_280, 49_280, 1024)
    tiny_text, tiny_tower = (TINY_TEXT, TINY_TOWER) if given.size == "smoke" else ({}, {})
    pool_mb = given.choose_size(768, 384, 64)
    count, rounds, seconds = given.choose_size((6, 3, 20.0), (2, 1, 5.0), (1, 1, 0.2))
    with tempfile.TemporaryDirectory(prefix="penstock-images-") as folder, ExitStack() as exits:
        model = Path(folder) / "model"
        make_model(
            model, TEXT | tiny_text | {"num_hidden_layers": layers},
            TOWER | tiny_tower | {"num_hidden_layers": tower_layers}, vocabulary,
        )  # fmt: skip
        settings = {
            "ENGINE_MODEL": str(model), "ENGINE_SERVED_NAME": MODEL, "ENGINE_CACHE_DIR": f"{folder}/cache",
            "ENGINE_DEVICE": "cpu", "ENGINE_DTYPE": "bfloat16", "ENGINE_POOL_MB": str(pool_mb),
            "KV_STORE_SHARED_MB": str(pool_mb),
        }  # fmt: skip
        environment = {f"PENSTOCK_{name}": value for name, value in settings.items()}

        def open_side(name: str) -> SeeingSide:
            how, workers = SIDES[name]
            stack = exits.enter_context(open_stack(how, environment, **workers, gateway=find_free_port()))
            return SeeingSide(stack, exits.enter_context(Client(stack.addresses)))

        split = open_side(SPLIT)
        split.ask(draw_picture(900), "Is it seen?")
        figures = compare_questions(split, count) | compare_memory(split.stack, pool_mb)
        sides = {SPLIT: split, AUTO: open_side(AUTO), NO_THREAD: open_side(NO_THREAD)}
        return figures | compare_gaps(sides, rounds, seconds)


if __name__ == "__main__":
    run_benchmark(__doc__, run)
