"""An embed worker answers what is in the requests topic, whatever fails."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from penstock.bus.beats import parse_beats
from penstock.client.core import build_answer, make_request, unpack_floats
from penstock.embed_worker.engine import EmbedEngine, EmbedSequence
from penstock.embed_worker.model import EmbedModel
from penstock.engine.vectors import Floats, TextRow
from penstock.errors import REFUSED_TEXTS
from penstock.messages import EmbedOptions, EndEvent, Vectors
from penstock.names import CLASSES, PriorityClass
from penstock.worker_speed import WorkerSpeed
from sim.line import InProcessPipeline
from tests.embed.checkpoints import draw_text
from tests.embed.conftest import EmbedPipeline
from tests.embed.test_model import TEXTS, compute, measure_cosine

pytestmark = pytest.mark.in_memory


def read_vectors(found: Vectors | None) -> Floats:
    assert found is not None
    return np.array([unpack_floats(one) for one in found.split_floats()], dtype=np.float32)


@pytest.mark.proof
def test_an_answer_is_one_end_with_vectors_and_one_result(line: EmbedPipeline, bert: EmbedModel) -> None:
    line.add_embed_worker(bert)
    request = line.send(None, texts=TEXTS, tenant="acme")
    (result,) = line.run_until_results(1)
    assert (result.id, result.tenant, result.model, result.finish_reason) == (request.id, "acme", "tiny", "stop")
    assert (result.text, result.token_ids, result.usage.completion_tokens) == ("", [], 0)
    rows = bert.read_texts(TEXTS, EmbedOptions())
    assert result.usage.prompt_tokens == sum(map(len, rows))
    assert measure_cosine(read_vectors(result.vectors), compute(bert, TEXTS)) >= 0.99999
    (end,) = line.read_log(request.id)
    assert isinstance(end, EndEvent)
    assert end.vectors == result.vectors == build_answer(request.id, [end]).vectors


def test_a_heartbeat_tells_how_many_texts_and_how_fast(line: EmbedPipeline, bert: EmbedModel) -> None:
    worker = line.add_embed_worker(bert)
    line.send(None, texts=TEXTS)
    line.send(None, texts=["bar " * 200])  # too long: it is refused, and is none of them
    num_tokens = sum(result.usage.prompt_tokens for result in line.run_until_results(2) if result.error is None)
    recent = worker.metrics.summarize_recent()["minute"]
    assert (recent["texts"], recent["text_tokens"], sum(recent["text_s"])) == (len(TEXTS), num_tokens, 1)
    load = worker.report_load()
    speed = WorkerSpeed.parse(load["speed"])
    assert speed is not None
    assert 1 / speed.prompt_token_s == pytest.approx(load["prompt_tokens_per_s"], rel=1e-3)
    key, told = (
        line.pipeline.worker_key("embed", "embed-0").encode(),
        {"load": load, "lease_ms": 4000, "state": "ready"},
    )
    (beat,) = parse_beats(line.pipeline, [(key, json.dumps(told).encode(), 4000)], 0.0)
    assert (beat.takes_requests, beat.speed) == (True, speed), "slower workers leave requests to it"


def test_the_result_may_go_without_vectors(line: EmbedPipeline, bert: EmbedModel) -> None:
    line.add_embed_worker(bert)
    request = line.send(None, texts=TEXTS, embed=EmbedOptions(in_result=False, dimensions=16))
    (result,) = line.run_until_results(1)
    (end,) = line.read_log(request.id)
    assert isinstance(end, EndEvent)
    assert result.vectors is None
    assert measure_cosine(read_vectors(end.vectors), compute(bert, TEXTS)[:, :16]) >= 0.99999


def test_token_ids_have_the_vector_of_their_text(line: EmbedPipeline, bert: EmbedModel) -> None:
    line.add_embed_worker(bert)
    ids = [row.token_ids for row in bert.read_texts(TEXTS, EmbedOptions())]
    line.send(None, texts=ids)
    (result,) = line.run_until_results(1)
    assert result.usage.prompt_tokens == sum(map(len, ids))
    np.testing.assert_allclose(read_vectors(result.vectors), compute(bert, TEXTS), atol=1e-5)


def test_the_same_texts_have_the_same_vectors(line: EmbedPipeline, bert: EmbedModel) -> None:
    line.add_embed_worker(bert)
    for _ in range(2):
        line.send(None, texts=[draw_text(9)])
        line.send(None, texts=[draw_text(num, num) for num in range(1, 40)])
    results = line.run_until_results(4)
    by_size: dict[int, list[Floats]] = {}
    for result in results:
        found = read_vectors(result.vectors)
        by_size.setdefault(len(found), []).append(found)
    for one, other in by_size.values():
        assert measure_cosine(one, other) >= 0.999999


def test_a_reranker_scores_texts(line: EmbedPipeline, reranker: EmbedModel) -> None:
    line.add_embed_worker(reranker)
    line.send(None, texts=TEXTS, embed=EmbedOptions(query=TEXTS[1]))
    (result,) = line.run_until_results(1)
    np.testing.assert_allclose(read_vectors(result.vectors), compute(reranker, TEXTS, query=TEXTS[1]), atol=1e-6)


CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    "a prompt": ({"prompt": "bar"}, "invalid_request", "generates no text: send `texts`"),
    "messages": ({"messages": [{"role": "user", "content": "bar"}]}, "invalid_request", "generates no text"),
    "empty": ({"texts": ["bar", ""]}, "invalid_request", r"texts[1] is empty"),
    "NUL": ({"texts": ["\0"]}, "invalid_request", "NUL"),
    "long": ({"texts": ["bar " * 200]}, "prompt_too_long", "the model reads 120"),
    "another model": ({"texts": ["bar"], "model": "other"}, "unknown_model", "serves 'tiny'"),
    "a class": ({"texts": ["bar"], "priority_class": "batch"}, "invalid_request", "class 'batch'"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_refused(line: EmbedPipeline, bert: EmbedModel, name: str) -> None:
    fields, code, said = CASES[name]
    line.add_embed_worker(bert)
    line.send(fields.get("prompt"), **{key: value for key, value in fields.items() if key != "prompt"})
    line.send(None, texts=TEXTS[:1], id="behind")
    results = {result.id: result for result in line.run_until_results(2)}
    assert results.pop("behind").error is None
    (refused,) = results.values()
    assert refused.error is not None
    assert (refused.error.code, refused.finish_reason, refused.vectors) == (code, "error", None)
    assert said in refused.error.message


def test_models_for_text_refuse_texts(make_line: Callable[..., InProcessPipeline]) -> None:
    pipeline = make_line()
    pipeline.send_requests(make_request(None, {"texts": ["bar"]}))
    while not (results := pipeline.read_results()):
        pipeline.prefill.run_once()
        pipeline.decode.run_once()
    error = results[0].error
    assert error is not None
    assert (error.code, error.message) == ("invalid_request", REFUSED_TEXTS)


class FailingModel:
    """A model that fails at some texts, or writes numbers that are none."""

    batch_tokens = 1024

    def __init__(self, model: EmbedModel, text: str, num_failures: int, value: float | None = None) -> None:
        (self.bad,) = model.read_texts([text], EmbedOptions())
        self.model, self.num_failures, self.value = model, num_failures, value

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def compute_rows(self, rows: Sequence[TextRow]) -> Floats:
        found = self.model.compute_rows(rows)
        bad = [index for index, row in enumerate(rows) if row.token_ids == self.bad.token_ids]
        if bad and self.num_failures:
            self.num_failures -= 1
            if self.value is None:
                raise RuntimeError("cannot compute it")
            found[bad] = self.value
        return found


@pytest.mark.parametrize(
    ("num_failures", "value", "said"),
    [(2, None, None), (99, None, "cannot compute it"), (99, float("nan"), r"numbers for texts[0] are not finite")],
)
def test_a_request_that_fails_ends_alone(
    line: EmbedPipeline, bert: EmbedModel, num_failures: int, value: float | None, said: str | None
) -> None:
    """It is tried again, as often as a request may fail. The others have their vectors."""
    line.add_embed_worker(FailingModel(bert, "hill hill", num_failures, value))  # type: ignore[arg-type]
    for name, texts in (("a", TEXTS), ("bad", ["hill hill"]), ("z", TEXTS[:2])):
        line.send(None, texts=texts, id=name)
    results = {result.id: result for result in line.run_until_results(3)}
    assert measure_cosine(read_vectors(results["a"].vectors), compute(bert, TEXTS)) >= 0.99999
    assert measure_cosine(read_vectors(results["z"].vectors), compute(bert, TEXTS[:2])) >= 0.99999
    bad = results["bad"]
    assert (bad.error is None) == (said is None)
    assert len(line.read_dead_letters()) == int(said is not None)
    if bad.error is not None and said is not None:
        assert (bad.error.code, bad.vectors) == ("model_error", None)
        assert said in bad.error.message


def test_a_cancelled_request_is_dropped(line: EmbedPipeline, bert: EmbedModel) -> None:
    worker = line.add_embed_worker(bert)
    request = line.send(None, texts=TEXTS, deadline=1.0)
    (result,) = line.run_until_results(1)
    assert result.error is not None
    assert (result.id, result.error.code) == (request.id, "deadline_exceeded")
    assert not worker.engine.has_work()


def test_another_worker_computes_what_a_lost_one_had(line: EmbedPipeline, bert: EmbedModel) -> None:
    first = line.add_embed_worker(bert)
    line.send(None, texts=TEXTS)
    line.run_until(lambda: first.running)
    line.kill(first)
    line.add_embed_worker(bert, 1)
    (result,) = line.run_until_results(1)
    assert measure_cosine(read_vectors(result.vectors), compute(bert, TEXTS)) >= 0.99999


# The order of computing.


class CountingModel:
    """Notes its batches."""

    batch_tokens = 64

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def compute_rows(self, rows: Sequence[TextRow]) -> Floats:
        self.batches.append([len(row) for row in rows])
        return np.zeros((len(rows), 2), dtype=np.float32)


def make_sequence(name: str, lengths: Sequence[int], priority_class: PriorityClass = "batch") -> EmbedSequence:
    return EmbedSequence(name, [TextRow([1] * length) for length in lengths], EmbedOptions(), priority_class, name)


def run_engine(engine: EmbedEngine, count: int) -> list[str]:
    ended: list[str] = []
    while len(ended) < count:
        if engine.begin_step():
            engine.finish_step()
        ended += [event.context for event in engine.collect_events()]
    return ended


def test_batches_have_bounded_tokens_and_texts_of_about_one_length() -> None:
    model = CountingModel()
    engine = EmbedEngine(model)
    engine.add_request(make_sequence("a", [30, 4, 16, 5]))
    engine.add_request(make_sequence("b", [16, 4, 15, 200, 4]))
    assert sorted(run_engine(engine, 2)) == ["a", "b"]
    assert model.batches[:2] == [[30, 16], [16, 15, 5, 4]]
    assert all(len(batch) * max(batch) <= 64 or len(batch) == 1 for batch in model.batches)
    assert sorted(length for batch in model.batches for length in batch) == sorted([30, 4, 16, 5, 16, 4, 15, 200, 4])


def test_interactive_requests_are_computed_first() -> None:
    engine = EmbedEngine(CountingModel())
    for number in range(4):
        engine.add_request(make_sequence(f"b{number}", [60]))
    engine.begin_step()
    engine.add_request(make_sequence("i", [60], "interactive"))
    assert run_engine(engine, 5).index("i") <= 1


def test_a_worker_takes_what_fills_its_next_batches() -> None:
    engine = EmbedEngine(CountingModel())
    assert [engine.count_free(one, 32.0) for one in CLASSES] == [6, 6]
    engine.add_request(make_sequence("b", [64, 64]))
    assert [engine.count_free(one, 32.0) for one in CLASSES] == [6, 2]
    engine.add_request(make_sequence("i", [64] * 9, "interactive"))
    assert [engine.count_free(one, 32.0) for one in CLASSES] == [0, 0]
