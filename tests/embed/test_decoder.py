"""A model whose vectors are its last tokens' is computed by the engine, in workers that answer chats beside it."""

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from penstock.client.core import make_request
from penstock.config.settings import StaySettings
from penstock.engine.loading.loading import load_model
from penstock.engine.loading.loading import open_model as open_packed_model
from penstock.engine.loading.packed import pack_model
from penstock.engine.loading.vector_files import find_decoder
from penstock.engine.model.accelerate import accelerate_model
from penstock.engine.model.model import LoadedModel
from penstock.engine.serving import ServingEngine
from penstock.engine.vectors import Floats
from penstock.errors import REFUSED_PROMPTS
from penstock.messages import EmbedOptions, EndEvent, Request, Result, Text
from penstock.prefill_worker.stay import StayPolicy
from penstock.worker.worker import Worker
from sim.line import InProcessPipeline, core_of, run_until_running
from sim.workload import ENGINE_SETTINGS
from tests.embed.checkpoints import KINDS, draw_text, write_checkpoint
from tests.embed.test_model import TEXTS, measure_cosine
from tests.embed.test_worker import read_vectors

pytestmark = pytest.mark.in_memory

DECODERS = [name for name, kind in KINDS.items() if kind.pooling == "lasttoken"]
PROMPTS = {"query": " ".join(draw_text(30, 5).split()) + " "}
SETTINGS = ENGINE_SETTINGS.model_copy(update={"max_step_tokens": 24, "pool_mb": 4})
"""Steps in which the longest texts are computed in several parts, beside others."""

MakeAuto = Callable[[Path], tuple[InProcessPipeline, Worker]]


@cache
def open_model(directory: Path) -> LoadedModel:
    return accelerate_model(load_model(SETTINGS.model_copy(update={"model": str(directory)})))


@pytest.fixture
def make_auto(make_line: Callable[..., InProcessPipeline], exits: Any) -> MakeAuto:
    """Starts an `auto` worker of a checkpoint. The other workers of the pipeline are not turned."""

    def make(directory: Path) -> tuple[InProcessPipeline, Worker]:
        line = make_line(load=lambda: open_model(directory), engine=SETTINGS)
        return line, add_auto(line, "auto-0")

    def add_auto(line: InProcessPipeline, name: str) -> Worker:
        worker = line.make_auto(name, StayPolicy(StaySettings(), lambda: ()))
        exits.callback(worker.close)
        return worker

    return make


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that generates text as well, with a prompt."""
    return write_checkpoint(tmp_path_factory.mktemp("qwen"), "qwen3", generates=True, prompts=PROMPTS, truncate_dim=48)


def send_texts(line: InProcessPipeline, texts: Sequence[Text], **fields: Any) -> Request:
    asked: Any = {"texts": texts, **fields}
    request = make_request(None, asked)
    line.send_requests(request)
    return request


def run_until_results(line: InProcessPipeline, worker: Worker, count: int) -> dict[str, Result]:
    while len(results := line.read_results()) < count:
        worker.run_once()
    return {result.id: result for result in results}


def read_answer(line: InProcessPipeline, worker: Worker, request: Request) -> Floats:
    found = run_until_results(line, worker, len(line.read_results()) + 1)[request.id]
    assert found.error is None
    return read_vectors(found.vectors)


@pytest.mark.proof
@pytest.mark.parametrize("name", DECODERS)
def test_vectors_are_those_of_sentence_transformers(make_auto: MakeAuto, tmp_path: Path, name: str) -> None:
    """A text has the same bits alone, beside others, and where the pool has its beginning."""
    directory = write_checkpoint(tmp_path, name, prompts=PROMPTS)
    library = SentenceTransformer(str(directory), device="cpu")
    line, worker = make_auto(directory)
    together = read_answer(line, worker, send_texts(line, TEXTS))
    assert measure_cosine(together, library.encode(TEXTS)) >= 0.99999
    alone = [read_answer(line, worker, send_texts(line, [text]))[0] for text in TEXTS]
    assert [one.tobytes() for one in alone] == [one.tobytes() for one in together]
    asked = [send_texts(line, TEXTS, embed=EmbedOptions(prompt="query")) for _ in range(2)]
    results = run_until_results(line, worker, len(line.read_results()) + 2)
    first, again = (results[one.id] for one in asked)
    assert again.usage.cached_tokens > 0
    assert first.vectors == again.vectors
    assert measure_cosine(read_vectors(first.vectors), library.encode(TEXTS, prompt_name="query")) >= 0.99999


def test_the_longest_texts_are_computed_whole(make_line: Callable[..., InProcessPipeline], tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, "qwen3", max_length=8192, positions=8192)
    settings = SETTINGS.model_copy(update={"max_step_tokens": 2048, "pool_mb": 16, "model": str(directory)})
    line = make_line(load=lambda: open_model(directory), engine=settings)
    worker = line.make_auto("auto-0", StayPolicy(StaySettings(), lambda: ()))
    texts = [" bar" * count for count in (8190, 8191)]  # and the token of the end
    request = send_texts(line, texts)
    result = run_until_results(line, worker, 1)[request.id]
    assert result.usage.prompt_tokens == 8191 + 8192
    theirs = SentenceTransformer(str(directory), device="cpu").encode(texts)
    assert measure_cosine(read_vectors(result.vectors), theirs) >= 0.99999
    longer = send_texts(line, [" bar" * 8192], id="longer")
    error = run_until_results(line, worker, 2)[longer.id].error
    assert error is not None
    assert (error.code, "8,193 tokens" in error.message) == ("prompt_too_long", True)
    worker.close()


def test_token_ids_get_the_bits_of_the_text_that_has_them(make_auto: MakeAuto, qwen: Path) -> None:
    """They are read as they are: no prompt and no token of the end is added."""
    line, worker = make_auto(qwen)
    reader = open_model(qwen).text_reader
    assert reader is not None
    prompted = EmbedOptions(prompt="query")
    wanted = read_answer(line, worker, send_texts(line, TEXTS, embed=prompted))
    ids = [row.token_ids for row in reader.read_texts(TEXTS, prompted)]
    request = send_texts(line, [*ids, TEXTS[0]], id="ids")
    found = read_answer(line, worker, request)
    plain = read_answer(line, worker, send_texts(line, TEXTS[:1]))
    assert found.tobytes() == wanted.tobytes() + plain.tobytes()
    longest = max(ids, key=len)
    limit = reader.card.max_length
    (end,), (start,) = (
        reader.read_texts([longest * limit], EmbedOptions(truncate=side)) for side in ("end", "start")
    )  # fmt: skip
    assert (end.token_ids, start.token_ids) == ((longest * limit)[:limit], (longest * limit)[-limit:])
    size = reader.card.vocab_size
    wrong: list[tuple[list[list[int]], dict[str, Any], str, str]] = [
        ([[1, 2], [3, size, size + 1]], {}, "invalid_request", rf"texts[1][1]: the model has no token {size}: "),
        ([[]], {}, "invalid_request", "texts[0] is empty"),
        ([longest * limit], {}, "prompt_too_long", f"{limit:,}"),
        ([[1]], {"embed": EmbedOptions(query="a")}, "invalid_request", "query"),
        ([[1]], {"embed": prompted}, "invalid_request", "prompt: token ids are read as they are"),
    ]
    for given, fields, code, words in wrong:
        refused = send_texts(line, given, **fields)
        error = run_until_results(line, worker, len(line.read_results()) + 1)[refused.id].error
        assert error is not None
        assert (error.code, words in error.message) == (code, True), error.message


def test_an_answer_is_one_end_and_leaves_nothing_behind(make_auto: MakeAuto, qwen: Path) -> None:
    line, worker = make_auto(qwen)
    request = send_texts(line, TEXTS, embed=EmbedOptions(dimensions=16, in_result=False), tenant="acme")
    result = run_until_results(line, worker, 1)[request.id]
    assert (result.tenant, result.finish_reason, result.text, result.vectors) == ("acme", "stop", "", None)
    with line.open_client() as client:
        (end,) = client.stream(request.id)
    assert isinstance(end, EndEvent)
    found = read_vectors(end.vectors)
    assert found.shape == (len(TEXTS), 16)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0, atol=1e-6)
    assert not worker.engine.has_work()
    assert core_of(worker).num_free_blocks == core_of(worker).num_blocks


def test_chats_have_the_same_tokens_beside_texts(make_auto: MakeAuto, qwen: Path) -> None:
    line, worker = make_auto(qwen)
    chats = [make_request(draw_text(9, number), {"max_tokens": 12, "seed": number}) for number in range(3)]
    line.send_requests(*chats)
    alone = run_until_results(line, worker, 3)
    again = [chat.model_copy(update={"id": f"{chat.id}-again"}) for chat in chats]
    line.send_requests(*again[:1])
    texts = send_texts(line, TEXTS)
    line.send_requests(*again[1:])
    beside = run_until_results(line, worker, 7)
    assert [beside[f"{chat.id}-again"].token_ids for chat in chats] == [alone[chat.id].token_ids for chat in chats]
    assert beside[texts.id].usage.completion_tokens == 0


def test_another_worker_computes_what_a_lost_one_had(make_line: Any, make_auto: MakeAuto, qwen: Path) -> None:
    line, worker = make_auto(qwen)
    wanted = read_answer(line, worker, send_texts(line, TEXTS))
    request = send_texts(line, TEXTS, id="lost")
    run_until_running(worker)
    worker.run_once()
    worker.abandon()
    other = line.make_auto("auto-1", StayPolicy(StaySettings(), lambda: ()))
    result = run_until_results(line, other, 2)[request.id]
    assert read_vectors(result.vectors).tobytes() == wanted.tobytes()
    assert not worker.engine.has_work()
    other.close()


def test_texts_that_are_late_are_dropped(make_auto: MakeAuto, qwen: Path) -> None:
    line, worker = make_auto(qwen)
    request = send_texts(line, TEXTS, deadline=1.0)
    result = run_until_results(line, worker, 1)[request.id]
    assert result.error is not None
    assert result.error.code == "deadline_exceeded"
    assert not worker.engine.has_work()


def test_a_model_without_a_head_generates_nothing(make_auto: MakeAuto, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, "mistral")
    line, worker = make_auto(directory)
    line.send_requests(make_request("bar", {}))
    (result,) = run_until_results(line, worker, 1).values()
    assert result.error is not None
    assert (result.error.code, result.error.message) == ("invalid_request", REFUSED_PROMPTS)
    assert worker.role.describe_model()["task"] == "embed"  # type: ignore[attr-defined]


def test_a_prefill_worker_computes_texts_and_decode_settles_them(
    make_line: Callable[..., InProcessPipeline], qwen: Path
) -> None:
    line = make_line(load=lambda: open_model(qwen), engine=SETTINGS)
    request, bare = send_texts(line, TEXTS), send_texts(line, TEXTS, embed=EmbedOptions(in_result=False))
    results = {result.id: result for result in line.run_until_results(2)}
    result = results[request.id]
    assert (result.error, results[bare.id].error, results[bare.id].vectors) == (None, None, None)
    assert read_vectors(result.vectors).shape == (len(TEXTS), 48)
    recent = line.prefill.metrics.summarize_recent()["minute"]
    assert (recent["texts"], recent["text_tokens"]) == (2 * len(TEXTS), 2 * result.usage.prompt_tokens)
    for one in (request, bare):
        (end,) = line.open_client().stream(one.id)
        assert isinstance(end, EndEvent)
        assert end.vectors == result.vectors


def test_decode_computes_texts_again_whose_record_is_lost(
    make_line: Callable[..., InProcessPipeline], qwen: Path
) -> None:
    """Redis loses it behind the logged end, while the job waits for a worker."""
    line = make_line(load=lambda: open_model(qwen), engine=SETTINGS)
    asked: Any = {"embed": EmbedOptions(prompt="query", dimensions=16)}
    wanted, lost = (send_texts(line, TEXTS, id=name, **asked) for name in ("wanted", "lost"))
    line.run_prefill(2)
    line.forget_record(lost.id)
    results = {result.id: result for result in line.run_until_results(2)}
    assert [result.error for result in results.values()] == [None, None]
    assert results[lost.id].vectors == results[wanted.id].vectors
    assert results[lost.id].usage.prompt_tokens == results[wanted.id].usage.prompt_tokens
    (end,) = line.open_client().stream(lost.id)
    assert isinstance(end, EndEvent)
    assert end.vectors == results[wanted.id].vectors
    assert not line.decode.engine.has_work()


def test_what_decode_has_not_read_of_lost_texts_is_not_counted(
    make_line: Callable[..., InProcessPipeline], qwen: Path
) -> None:
    """It is cancelled before decode computes again what prefill has found in part."""
    line = make_line(load=lambda: open_model(qwen), engine=SETTINGS)
    long = ["some words to find " * 4]
    send_texts(line, long, id="before")
    line.run_prefill(1)
    lost = send_texts(line, long, id="lost")
    line.run_prefill(2)
    line.forget_record(lost.id)
    line.open_client().cancel(lost.id)
    result = next(result for result in line.run_until_results(2) if result.id == lost.id)
    assert result.error is not None
    assert result.error.code == "cancelled"
    assert (result.usage.prompt_tokens, result.usage.cached_tokens) == (0, 0)


@pytest.mark.parametrize(("num_failures", "is_answered"), [(2, True), (99, False)])
def test_a_request_that_fails_ends_alone(
    make_auto: MakeAuto, qwen: Path, monkeypatch: pytest.MonkeyPatch, num_failures: int, is_answered: bool
) -> None:
    """It is tried again, as often as a request may fail. The others have their vectors."""
    line, worker = make_auto(qwen)
    core, failures = core_of(worker), list[str]()
    run_step = core.runner.run_step

    def run_or_fail(batch: Any) -> Any:
        logits = run_step(batch)
        for row, seq in enumerate(batch.sampled_sequences):
            if seq.id.startswith("bad#") and len(failures) < num_failures:
                failures.append(seq.id)
                core.runner.hidden[row] = float("nan")
        return logits

    monkeypatch.setattr(core.runner, "run_step", run_or_fail)
    for name, texts in (("a", TEXTS), ("bad", TEXTS[:1]), ("z", TEXTS[1:])):
        send_texts(line, texts, id=name)
    results = run_until_results(line, worker, 3)
    assert results["a"].error is None
    assert results["z"].error is None
    bad = results["bad"]
    assert (bad.error is None) == is_answered
    assert bad.error is None or bad.error.code == "model_error"
    assert not worker.engine.has_work()


def test_a_packed_file_computes_vectors_too(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", "qwen3")
    settings = SETTINGS.model_copy(update={"model": str(directory), "cache_dir": str(tmp_path / "cache")})
    pack_model(settings, tmp_path / "packed")
    packed = open_packed_model(settings.model_copy(update={"packed": str(tmp_path / "packed")}))
    assert packed.text_reader is not None
    assert packed.text_reader.card.size == 48


def test_many_texts_of_a_request_leave_places_to_others(make_auto: MakeAuto, qwen: Path) -> None:
    line, worker = make_auto(qwen)
    engine = worker.engine
    assert isinstance(engine, ServingEngine)
    send_texts(line, [draw_text(20, number) for number in range(64)])
    run_until_running(worker)
    assert engine.core.num_waiting < 8
    assert engine.count_waiting_tokens("interactive", 40) == 40
    assert engine.free_capacity("interactive", 10) > 0


@pytest.mark.parametrize(
    ("about", "is_found"), [({}, True), ({"is_causal": False}, False), ({"model_type": "bert"}, False)]
)
def test_what_the_engine_does_not_compute(tmp_path: Path, about: dict[str, Any], is_found: bool) -> None:
    directory = write_checkpoint(tmp_path, "qwen3")
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | about))
    assert (find_decoder(directory) is not None) == is_found
