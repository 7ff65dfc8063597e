"""Requests with pictures: seen once in prefill, decoded from KV alone, and given back where that is lost."""

import base64
import hashlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image

from penstock.config.settings import EngineSettings, PictureSettings, RecordSettings
from penstock.engine.loading.loading import open_model
from penstock.engine.model.model import LoadedModel
from penstock.messages import ChatMessage, Job, Picture, Request, Sampling, decode_message
from penstock.objects import ObjectStorage
from penstock.pictures.store import PictureStore
from penstock.worker.worker import Worker
from sim.line import InProcessPipeline, serving_engine
from tools.seeing import KINDS, save_seeing_model

NUM_TOKENS = 12


def draw_png(seed: int, width: int = 90, height: int = 60) -> bytes:
    chance = np.random.default_rng(seed)
    file = io.BytesIO()
    Image.fromarray(chance.integers(0, 256, (height, width, 3), np.uint8)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module", params=KINDS)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    directory = save_seeing_model(tmp_path_factory.mktemp("seeing"), request.param)
    settings = EngineSettings(
        model=str(directory), dtype="float32", threads=1, cache_dir=str(directory / "cache"), pool_mb=16
    )
    return open_model(settings)


@pytest.fixture
def line(seeing: LoadedModel, make_line: Callable[..., InProcessPipeline]) -> InProcessPipeline:
    engine = EngineSettings(model=seeing.name, pool_mb=16, max_step_tokens=32, threads=1)
    return make_line(load=lambda: seeing, engine=engine, record=RecordSettings(retry_first_s=0.01))


@pytest.fixture
def store(line: InProcessPipeline, tmp_path: Path) -> PictureStore:
    return PictureStore(line.addresses, ObjectStorage.open(str(tmp_path)), PictureSettings(), line.record_settings)


def ask(request_id: str, *content: str | Picture, tokens: int = NUM_TOKENS) -> Request:
    return Request(
        id=request_id,
        messages=[ChatMessage(role="user", content=list(content))],
        sampling=Sampling(max_tokens=tokens, temperature=0.0, ignore_eos=True),
    )


class Site:
    """A line whose model sees, its store of pictures, and what `generate()` answers."""

    def __init__(self, line: InProcessPipeline, model: LoadedModel, store: PictureStore) -> None:
        self.line, self.model, self.store = line, model, store

    def put(self, data: bytes) -> Picture:
        return Picture(digest=self.store.put(data))

    def generate(self, *content: str | bytes) -> list[int]:
        """Return the answer to a chat of texts and files."""
        reader = self.model.picture_reader
        assert reader is not None
        module: Any = transformers.AutoModelForImageTextToText.from_pretrained(self.model.name, dtype="float32")
        tokenizer = reader.processor.tokenizer
        parts = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in content]
        text = tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
        images = [Image.open(io.BytesIO(part)) for part in content if isinstance(part, bytes)]
        given = reader.processor(images=images, text=[text], return_tensors="pt", add_special_tokens=False)
        answer = module.generate(**given, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None)
        return list(map(int, answer[0, given["input_ids"].shape[1] :]))

    def answer(self, *requests: Request) -> dict[str, list[int]]:
        """Send requests; return the tokens of all results so far."""
        before = len(self.line.read_results())
        self.line.send_requests(*requests)
        results = self.line.run_until_results(before + len(requests))
        assert all(one.error is None for one in results), [one.error for one in results]
        return {one.id: one.token_ids for one in results}


@pytest.fixture
def site(line: InProcessPipeline, seeing: LoadedModel, store: PictureStore) -> Site:
    return Site(line, seeing, store)


def lose_kv(worker: Worker, site: Site) -> None:
    """Let all tiers lose their blocks."""
    for key in site.line.client.scan_iter("*kv*block*"):
        site.line.client.delete(key)


def test_the_answer_is_that_of_generate_and_a_second_question_finds_the_kv(site: Site) -> None:
    one, other = draw_png(1), draw_png(2, 140, 50)
    first, second = site.put(one), site.put(other)
    found = site.answer(
        ask("a", "What is this? ", first, " Say it."), ask("b", "What is this? ", second, " Say it."),
        ask("c", first, second, first, "All three"),
    )  # fmt: skip
    assert found == {
        "a": site.generate("What is this? ", one, " Say it."), "b": site.generate("What is this? ", other, " Say it."),
        "c": site.generate(one, other, one, "All three"),
    }  # fmt: skip
    assert found["a"] != found["b"], "the picture makes no difference"
    again = site.answer(ask("d", "What is this? ", first, " Say it. And then tell more."))
    assert again["d"] == site.generate("What is this? ", one, " Say it. And then tell more.")
    results = {result.id: result for result in site.line.read_results()}
    assert results["d"].usage.cached_tokens >= 16


def test_pixels_stay_where_they_are(site: Site) -> None:
    site.line.send_requests(ask("a", "Look: ", site.put(draw_png(1))))
    site.line.run_prefill(1)
    (message,) = site.line.bus.read_all(site.line.pipeline.job_topic("interactive"))
    job = decode_message(Job, message.value)
    assert job.pictures is not None
    assert len(message.value) < 8000
    assert serving_engine(site.line.decode).model.vision is None


def test_a_file_in_the_message_is_taken_out(site: Site) -> None:
    data = draw_png(3)
    digest = hashlib.sha256(data).hexdigest()
    given = Picture(digest=digest, data=base64.b64encode(data).decode())
    assert site.answer(ask("a", given, " and so"))["a"] == site.generate(data, " and so")
    assert site.store.get(digest) == data
