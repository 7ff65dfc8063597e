"""Vectors of texts through the pipeline, beside sentence-transformers in a process of its own, and Infinity's server.

python -m benchmarks.embeddings [--quick | --smoke] [--json FILE]

Two encoders of BERT's form with random weights, of 110 and 22 million parameters, in float32. Texts have a log-normal
number of tokens, 128 in the mean. sentence-transformers gets all texts of a load in one call, which a server never
sees: it sorts them. The servers are asked by 64 clients over HTTP, one text at a time: Penstock with its gateway, a
Valkey server and one `embed` worker, and Infinity. Each side computes with the same number of threads. The sides take
turns in one run; a ratio is formed within a round. Before, the vectors of all sides are compared.

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

from benchmarks.common import Arguments, run_benchmark
from benchmarks.comparison import compute_ratio, draw_boxes, measure_in_turns, print_table
from benchmarks.embeddings_library import run_library
from benchmarks.peers.setup import environment_python, is_installed
from benchmarks.systems import PipedProcess, open_stack
from penstock.engine.weights.files import DEMO_MODEL
from penstock.errors import PenstockError
from penstock.local.processes import find_free_port, start_child
from penstock.waiting import wait_until

SHAPES = {
    "110m": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
    "22m": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    "smoke": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128},
}
VOCABULARY, MAX_TOKENS = 30_522, 512
MEDIAN_TOKENS, SIGMA = 100, 0.7
"""A text's number of tokens is log-normal with these two: 128 in the mean."""
NUM_CLIENTS, NUM_THREADS = 64, 1
MODEL = "encoder"
LIBRARY, PIPELINE, INFINITY = "sentence-transformers", "pipeline", "infinity"
EmbedAll = Callable[[Sequence[str]], np.ndarray]
"""Returns the vectors of texts, in their order."""


def make_encoder(shape: str, directory: Path) -> str:
    """Write an encoder with random weights, which pools by the mean and normalises. Return where it is."""
    import torch
    from transformers import BertConfig, BertModel, logging

    logging.disable_progress_bar()
    torch.manual_seed(1)
    config = BertConfig(vocab_size=VOCABULARY, max_position_embeddings=MAX_TOKENS, **SHAPES[shape])
    BertModel(config).save_pretrained(directory)
    shutil.copy(DEMO_MODEL / "tokenizer.json", directory)
    # The class of transformers 4 and 5 alike: Infinity has the older one.
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [
        {"idx": index, "name": str(index), "path": f"{index}_{kind}" if index else "",
         "type": f"sentence_transformers.models.{kind}"} for index, kind in enumerate(kinds)
    ]  # fmt: skip
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": MAX_TOKENS}))
    for module in modules[1:]:
        (directory / str(module["path"])).mkdir()
    pooling = {"word_embedding_dimension": SHAPES[shape]["hidden_size"], "pooling_mode_mean_tokens": True}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
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
    return ["".join(chance.choices(words, k=length)) for length in lengths]


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
def open_pipeline(model: str, given: Arguments) -> Iterator[EmbedAll]:
    """Start Penstock with a gateway and one worker."""
    settings = {"MODEL": model, "SERVED_NAME": MODEL, "THREADS": str(NUM_THREADS), "DTYPE": "float32", "DEVICE": "cpu"}
    environment = {f"PENSTOCK_ENGINE_{name}": value for name, value in settings.items()}
    numbers = {"prefill": 0, "decode": 0, "embed": 1, "gateway": find_free_port()}
    with (
        open_stack(given.choose_stack(), environment, **numbers) as stack,
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
    """Return the texts a second of each side in each round, with one encoder."""
    with tempfile.TemporaryDirectory(prefix="penstock-encoder-") as folder, ExitStack() as exits:
        model = make_encoder(shape, Path(folder, "model"))
        sides = {LIBRARY: exits.enter_context(open_library(model))}
        sides[PIPELINE] = exits.enter_context(open_pipeline(model, given))
        if is_installed("infinity") and given.size != "smoke":
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
        return measure_in_turns(asked, rounds, f"encoder of {shape}", num_warm=0 if given.size == "smoke" else 1)


def run(given: Arguments) -> dict[str, float]:
    """Measure and print; return the figures."""
    shapes = given.choose_size({"110m": 256, "22m": 1024}, {"22m": 128}, {"smoke": 64})
    rounds, figures, charts = given.choose_size(7, 2, 1), dict[str, float](), dict[str, dict[str, list[float]]]()
    for shape, num_texts in shapes.items():
        found = compare_sides(shape, given, rounds, num_texts)
        print_table(found, "texts a second")
        charts[f"Encoder of {shape.upper()}, texts a second"] = found
        for name, values in found.items():
            figures[f"texts_s_{name.replace('-', '_')}_{shape}"] = statistics.median(values)
            if name != PIPELINE:
                suffix = "" if shape == "110m" else f"_{shape}"
                figures[f"pipeline_texts_s_vs_{name.replace('-', '_')}{suffix}"] = compute_ratio(found, PIPELINE, name)
    if given.is_full:
        draw_boxes("embeddings", charts)
    return figures


if __name__ == "__main__":
    run_benchmark(__doc__, run)
