"""Vectors of texts through the pipeline, beside sentence-transformers in a process of its own, and Infinity's server.

python -m benchmarks.embeddings [--quick | --smoke] [--json FILE]

Two encoders of BERT's form with random weights, of 110 and 22 million parameters, and a decoder of Qwen3's, of 134
million, in float32. Texts have a log-normal number of tokens, 128 in the mean. sentence-transformers gets all texts of
a load in one call, which a server never sees: it sorts them. The servers are asked by 64 clients over HTTP, one text at
a time: Penstock with its gateway, a Valkey server and one worker, `embed` for encoders and `auto` for the decoder, and
Infinity. Each side computes with the same number of threads. The sides take turns in one run; a ratio is formed within
a round. Before, the vectors of all sides are compared.

Then some chats are answered by an `auto` worker with a small decoder, alone and beside a batch of 20,000 texts; the
gaps between their tokens are compared.

`python -m benchmarks.peers.setup` installs Infinity (`infinity`); without it that side is left out.
"""

import http.client
import json
import os
import random
import shutil
import statistics
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from benchmarks.common import TIMEOUT_S, Arguments, run_benchmark
from benchmarks.comparison import compute_ratio, draw_boxes, measure_in_turns, print_table
from benchmarks.embeddings_library import run_library
from benchmarks.interference import compute_percentile_ms, measure_stream_gaps
from benchmarks.peers.setup import environment_python, is_installed
from benchmarks.systems import PipedProcess, open_stack
from penstock.client.sync import Client
from penstock.engine.weights.files import DEMO_MODEL
from penstock.errors import PenstockError
from penstock.local.processes import find_free_port, start_child
from penstock.local.stack import Stack
from penstock.messages import MAX_TEXTS, TokenEvent
from penstock.names import WorkerKind
from penstock.waiting import wait_until
from sim.workload import write_modules

ENCODERS = {
    "110m": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "22m": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    "smoke": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128},
}
DECODERS = {
    "134m": {"hidden_size": 768, "num_hidden_layers": 18, "num_attention_heads": 12, "num_key_value_heads": 4,
             "intermediate_size": 2048},
    "11m": {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
            "intermediate_size": 768},
    "smoke_decoder": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
                      "intermediate_size": 128},
}  # fmt: skip
VOCABULARY, MAX_TOKENS = 30_522, 512
MEDIAN_TOKENS, SIGMA = 100, 0.7
"""A text's number of tokens is log-normal with these two: 128 in the mean."""
NUM_CLIENTS, NUM_THREADS = 64, 1
NUM_CHATS, ANSWER_TOKENS = 4, 128
MODEL = "encoder"
LIBRARY, PIPELINE, INFINITY = "sentence-transformers", "pipeline", "infinity"
EmbedAll = Callable[[Sequence[str]], np.ndarray]
"""Returns the vectors of texts, in their order."""


def make_model(shape: str, directory: Path) -> str:
    """Write a model with random weights, which normalises: an encoder that pools by the mean, or a decoder that gives
    the vector of its last token, and text. Return where it is.
    """
    import torch
    from transformers import BertConfig, BertModel, Qwen3Config, Qwen3ForCausalLM, logging

    logging.disable_progress_bar()
    torch.manual_seed(1)
    common = {"vocab_size": VOCABULARY, "max_position_embeddings": MAX_TOKENS}
    if is_decoder := shape in DECODERS:
        Qwen3ForCausalLM(
            Qwen3Config(**common, **DECODERS[shape], head_dim=64, tie_word_embeddings=True)
        ).save_pretrained(directory)
    else:
        BertModel(BertConfig(**common, **ENCODERS[shape])).save_pretrained(directory)
    shutil.copy(DEMO_MODEL / "tokenizer.json", directory)
    # The class of transformers 4 and 5 alike: Infinity has the older one.
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "</s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    size = (DECODERS if is_decoder else ENCODERS)[shape]["hidden_size"]
    write_modules(directory, size, "lasttoken" if is_decoder else "mean_tokens", MAX_TOKENS)
    return str(directory)


def find_words() -> list[str]:
    """Return tokens of the demo model's tokenizer that are words with a blank before them."""
    vocabulary = json.loads((DEMO_MODEL / "tokenizer.json").read_text())["model"]["vocab"]
    return [token for token in vocabulary if token.startswith("Ġ") and token[1:].isalpha()]


def draw_texts(seed: int, count: int) -> list[str]:
    """Return random texts whose number of tokens is log-normal."""
    chance = random.Random(seed)
    words = [token.replace("Ġ", " ") for token in find_words()]
    lengths = [
        min(MAX_TOKENS - 2, max(1, round(chance.lognormvariate(np.log(MEDIAN_TOKENS), SIGMA)))) for _ in range(count)
    ]
    # Infinity reads a text without the blanks around it.
    return ["".join(chance.choices(words, k=length)).strip() for length in lengths]


@contextmanager
def open_library(model: str) -> Iterator[EmbedAll]:
    """Start sentence-transformers in a process of its own."""
    process = PipedProcess(get_context("spawn"), run_library, model, NUM_THREADS)

    def embed_all(texts: Sequence[str]) -> np.ndarray:
        return np.asarray(process.ask(list(texts)))

    yield embed_all
    process.close()


@contextmanager
def open_clients(url: str, path: str) -> Iterator[EmbedAll]:
    """Return what asks a server for one text at a time, by 64 clients with a connection each."""
    host = urllib.parse.urlsplit(url).netloc
    free = [http.client.HTTPConnection(host, timeout=300) for _ in range(NUM_CLIENTS)]

    def embed_one(text: str) -> np.ndarray:
        connection = free.pop()
        body = json.dumps({"model": MODEL, "input": text, "encoding_format": "float"})
        try:
            connection.request("POST", path, body, {"content-type": "application/json"})
            answer = connection.getresponse()
            content = answer.read()
        except (OSError, http.client.HTTPException):
            connection.close()  # the next request opens it again
            raise
        finally:
            free.append(connection)
        if answer.status != 200:
            raise PenstockError(f"{url} answered {answer.status}: {content[:300]!r}")
        return np.asarray(json.loads(content)["data"][0]["embedding"], dtype=np.float32)

    def embed_all(texts: Sequence[str]) -> np.ndarray:
        for connection in free:  # the server closes them while the other sides have their turns
            connection.close()
        return np.stack(list(pool.map(embed_one, texts)))

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        yield embed_all


@contextmanager
def open_worker(model: str, given: Arguments, kind: WorkerKind) -> Iterator[Stack]:
    """Start Penstock with a gateway and one worker of a kind."""
    settings = {"MODEL": model, "SERVED_NAME": MODEL, "THREADS": str(NUM_THREADS), "DTYPE": "float32", "DEVICE": "cpu"}
    environment = {f"PENSTOCK_ENGINE_{name}": value for name, value in settings.items()}
    numbers = {"prefill": 0, "decode": 0, kind: 1, "gateway": find_free_port()}
    with open_stack(given.choose_stack(), environment, **numbers) as stack:
        yield stack


@contextmanager
def open_pipeline(model: str, given: Arguments, kind: WorkerKind) -> Iterator[EmbedAll]:
    """Start Penstock, and clients that ask its gateway."""
    with (
        open_worker(model, given, kind) as stack,
        open_clients(stack.gateway_url, "/v1/embeddings") as embed_all,
    ):
        yield embed_all


@contextmanager
def open_infinity(model: str, directory: Path) -> Iterator[EmbedAll]:
    """Start Infinity's server."""
    port = find_free_port()
    command = [
        str(environment_python("infinity").with_name("infinity_emb")), "v2", "--model-id", model,
        "--served-model-name", MODEL, "--engine", "torch", "--device", "cpu", "--dtype", "float32",
        "--no-bettertransformer", "--no-model-warmup", "--batch-size", "32", "--host", "127.0.0.1", "--port", str(port),
    ]  # fmt: skip
    threads = {"OMP_NUM_THREADS": str(NUM_THREADS), "MKL_NUM_THREADS": str(NUM_THREADS), "DO_NOT_TRACK": "1"}
    child = start_child(command, name=INFINITY, log=directory / "infinity.log", environment=os.environ | threads)
    try:
        with open_clients(f"http://127.0.0.1:{port}", "/embeddings") as embed_all:

            def answers() -> bool:
                if not child.is_alive():
                    raise PenstockError(f"Infinity ended; its log ends: {child.read_log_tail(5)}")
                try:
                    return bool(embed_all([" a"]).size)
                except OSError:
                    return False

            wait_until(answers, 120.0, "Infinity answers", 0.5)
            yield embed_all
    finally:
        child.stop(30.0)


def find_least_cosine(found: np.ndarray, wanted: np.ndarray) -> float:
    """Return the least cosine between vectors and those that they should be."""
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(wanted, axis=1)
    return float(((found * wanted).sum(axis=1) / lengths).min())


def compare_sides(shape: str, given: Arguments, rounds: int, num_texts: int) -> dict[str, list[float]]:
    """Return the texts a second of each side in each round, with one model."""
    with tempfile.TemporaryDirectory(prefix="penstock-vectors-") as folder, ExitStack() as exits:
        model, is_decoder = make_model(shape, Path(folder)), shape in DECODERS
        sides = {LIBRARY: exits.enter_context(open_library(model))}
        sides[PIPELINE] = exits.enter_context(open_pipeline(model, given, "auto" if is_decoder else "embed"))
        if is_installed("infinity") and given.size != "smoke" and not is_decoder:
            sides[INFINITY] = exits.enter_context(open_infinity(model, Path(folder)))
        some = draw_texts(0, 64)
        wanted = sides[LIBRARY](some)
        for name, embed_all in list(sides.items()):
            least = find_least_cosine(embed_all(some), wanted)
            print(f"{shape}, {name}: least cosine to {LIBRARY} {least:.7f}")
            if least < 0.9999 and name == PIPELINE:
                raise PenstockError("the pipeline's vectors are others")
            if least < 0.9999:
                print(f"{name} computes other vectors, and is left out")
                del sides[name]

        def measure(name: str, number: int) -> float:
            texts = draw_texts(1 + number, num_texts)
            begun_s = time.perf_counter()
            sides[name](texts)
            return num_texts / (time.perf_counter() - begun_s)

        asked = {name: lambda number, name=name: measure(name, number) for name in sides}
        return measure_in_turns(asked, rounds, f"model of {shape}", num_warm=0 if given.size == "smoke" else 1)


def compare_gaps(given: Arguments) -> dict[str, float]:
    """Measure the gaps of chats in one `auto` worker, alone and beside a batch of texts; return the figures."""
    shape = given.choose_size("11m", "11m", "smoke_decoder")
    with tempfile.TemporaryDirectory(prefix="penstock-gaps-") as folder, ExitStack() as exits:
        stack = exits.enter_context(open_worker(make_model(shape, Path(folder)), given, "auto"))
        client = exits.enter_context(Client(stack.addresses))
        seconds, rounds = given.choose_size((20.0, 6), (6.0, 2), (0.5, 1))
        texts, done = draw_texts(5, given.choose_size(20_000, 20_000, 128)), list[float]()

        def answer() -> Iterator[object]:
            request_id = client.submit("".join(draw_texts(6, 1))[:200], max_tokens=ANSWER_TOKENS, ignore_eos=True)
            return (event for event in client.stream(request_id, timeout_s=TIMEOUT_S) if isinstance(event, TokenEvent))

        def measure_beside(_: int) -> list[float]:
            parts = [texts[start : start + MAX_TEXTS] for start in range(0, len(texts), MAX_TEXTS)]
            ids, begun_s = [client.submit(texts=part, priority_class="batch") for part in parts], time.perf_counter()
            gaps_s = measure_stream_gaps(answer, seconds, NUM_CHATS)
            taken_s = time.perf_counter() - begun_s
            done.append(MAX_TEXTS * sum(not client.cancel(one) for one in ids) / taken_s)  # those that have ended
            return gaps_s

        sides = {"alone": lambda _: measure_stream_gaps(answer, seconds, NUM_CHATS), "beside": measure_beside}
        seen = measure_in_turns(sides, rounds, "chats", num_warm=0 if given.size == "smoke" else 1)
    alone_ms, beside_ms = (compute_percentile_ms([s for gaps in seen[name] for s in gaps], 99) for name in sides)
    print(f"gaps of {NUM_CHATS} chats (p99): {alone_ms:.1f} ms alone, {beside_ms:.1f} ms beside {len(texts):,} texts")
    return {"interactive_gap_p99_ratio": beside_ms / alone_ms, "texts_s_beside_chats": statistics.median(done)}


def run(given: Arguments) -> dict[str, float]:
    """Measure and print; return the figures."""
    shapes = given.choose_size(
        {"110m": 128, "22m": 1024, "134m": 128}, {"22m": 64, "11m": 64}, {"smoke": 64, "smoke_decoder": 64}
    )
    rounds, figures, charts = given.choose_size(7, 2, 1), dict[str, float](), dict[str, dict[str, list[float]]]()
    for shape, num_texts in shapes.items():
        found = compare_sides(shape, given, rounds, num_texts)
        print_table(found, "texts a second")
        charts[f"{'Decoder' if shape in DECODERS else 'Encoder'} of {shape.upper()}, texts a second"] = found
        for name, values in found.items():
            figures[f"texts_s_{name.replace('-', '_')}_{shape}"] = statistics.median(values)
            if name != PIPELINE:
                suffix = "" if shape == "110m" else f"_{shape}"
                figures[f"pipeline_texts_s_vs_{name.replace('-', '_')}{suffix}"] = compute_ratio(found, PIPELINE, name)
    if given.is_full:
        draw_boxes("embeddings", charts)
    return figures | compare_gaps(given)


if __name__ == "__main__":
    run_benchmark(__doc__, run)
