"""Requests with pictures: seen once in prefill, decoded from KV alone, and given back where that is lost."""

import base64
import hashlib
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from PIL import Image

from penstock.config.settings import EngineSettings, PictureSettings, RecordSettings, StaySettings
from penstock.engine.loading.loading import open_model
from penstock.engine.model.model import LoadedModel
from penstock.engine.serving import ServingEngine
from penstock.errors import BusUnavailable, PicturesNeeded, StorageUnavailable
from penstock.messages import ChatMessage, Job, Picture, Request, Sampling, decode_message
from penstock.names import kv_key, picture_key
from penstock.objects import ObjectStorage
from penstock.pictures.store import PictureStore
from penstock.prefill_worker.stay import StayPolicy
from penstock.worker.pictures import find_pictures
from sim.line import InProcessPipeline, run_until_idle, serving_engine
from tests.test_pictures import HOSTILE
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
    return make_line(load=lambda: replace(seeing), engine=engine, record=RecordSettings(retry_first_s=0.01))


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


def test_pixels_of_a_size_that_was_read_before_are_made_only_to_be_seen(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, made = site.model.picture_reader, list[tuple[int, int]]()
    assert reader is not None
    prepare = reader._prepare

    def note(number: int, picture: Any, num_pictures: int) -> Any:
        made.append(picture.size)
        return prepare(number, picture, num_pictures)

    monkeypatch.setattr(reader, "_prepare", note)
    first, second = draw_png(4, 100, 80), draw_png(5, 100, 80)
    right = {"a": site.generate("See: ", first, " Now."), "b": site.generate("See: ", second, " Now.")}
    assert site.answer(ask("a", "See: ", site.put(first), " Now."))["a"] == right["a"]
    assert made == [(100, 80)]
    site.answer(ask("again", "See: ", site.put(first), " And now?"))
    assert made == [(100, 80)], "nothing is to be seen again"
    assert site.answer(ask("b", "See: ", site.put(second), " Now."))["b"] == right["b"]
    assert made == [(100, 80)] * 2


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


def read_jobs(site: Site) -> list[Job]:
    """Return the jobs that no decode worker has settled."""
    messages = site.line.bus.read_all(site.line.pipeline.job_topic("interactive"))
    return [decode_message(Job, message.value) for message in messages]


def lose_kv(site: Site, job: Job) -> None:
    """Let the KV store lose the prompt of a job."""
    engine = site.line.decode.engine
    assert isinstance(engine, ServingEngine)
    pictures = find_pictures(engine, job, None)
    assert pictures is not None
    blocks = engine.hash_prompt(job.tenant, job.token_ids, pictures.spans)
    keys = [*blocks.hasher.keys, blocks.tail_key] if blocks.tail_key else blocks.hasher.keys
    site.line.client.unlink(*(kv_key(key.hash) for key in keys if key is not None))


def run_in_turn(site: Site, until: Callable[[], object]) -> None:
    """Turn both workers until something holds."""
    while not until():
        site.line.prefill.run_once()
        site.line.decode.run_once()


def hand_off(site: Site, *requests: Request) -> list[Job]:
    """Let the prefill worker hand requests off; return their jobs."""
    site.line.send_requests(*requests)
    site.line.run_prefill(len(requests))
    return read_jobs(site)


def test_a_request_whose_kv_is_lost_goes_back_to_prefill(site: Site) -> None:
    data = draw_png(1)
    (job,) = hand_off(site, ask("a", "Look: ", site.put(data), " well"))
    lose_kv(site, job)
    run_in_turn(site, site.line.read_results)
    run_until_idle(site.line.decode)
    (result,) = site.line.read_results()
    assert result.token_ids == site.generate("Look: ", data, " well")
    assert not site.line.read_dead_letters()


def test_it_goes_back_in_the_middle_of_its_answer(site: Site) -> None:
    """Its worker dies and its KV is lost: the tokens in the log are not sampled again."""
    data, line = draw_png(1), site.line
    (job,) = hand_off(site, ask("a", "Look: ", site.put(data), " well"))
    line.run_until_tokens("a", 5)
    line.decode.abandon()
    lose_kv(site, job)
    line.add_decode("decode-1")
    run_in_turn(site, line.read_results)
    (result,) = line.read_results()
    assert result.token_ids == site.generate("Look: ", data, " well")
    assert not line.read_dead_letters()


def test_a_worker_that_sees_computes_lost_kv_again(site: Site) -> None:
    """Of a job, and of one that was given back."""
    data, line = draw_png(1), site.line
    jobs = hand_off(site, *(ask(name, "Look: ", site.put(data), f" {name}") for name in ("one", "two")))
    for job in jobs:
        lose_kv(site, job)
    while not line.decode.record.count_free("prefill"):
        line.decode.run_once()
    line.decode.close()
    line.prefill.close()
    auto = line.decode = line.prefill = line.make_auto("auto-0", StayPolicy(StaySettings(), frozenset))
    while len(line.read_results()) < 2:
        auto.run_once()
    assert {one.id: one.token_ids for one in line.read_results()} == {
        name: site.generate("Look: ", data, f" {name}") for name in ("one", "two")
    }


def test_kv_that_is_lost_time_and_again_ends_the_request(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.decode_worker.role.MAX_RETURNS", 2)
    line = site.line
    hand_off(site, ask("a", "Look: ", site.put(draw_png(1)), " well"))
    (job,) = read_jobs(site)

    def lose_again() -> bool:
        lose_kv(site, job)
        return bool(line.read_results())

    run_in_turn(site, lose_again)
    (result,) = line.read_results()
    assert result.error is not None
    assert result.error.code == PicturesNeeded.code


def test_a_picture_whose_file_is_gone_ends_its_request_alone(site: Site) -> None:
    kept, gone = site.put(draw_png(1)), site.put(draw_png(2))
    site.line.client.delete(picture_key(gone.digest))
    site.line.send_requests(ask("a", "Look: ", gone), ask("b", "Look: ", kept))
    results = {one.id: one for one in site.line.run_until_results(2)}
    assert results["a"].error is not None
    assert results["a"].error.code == "picture_gone"
    assert results["b"].error is None


def test_a_picture_that_is_gone_where_it_is_to_be_seen_again(site: Site) -> None:
    picture = site.put(draw_png(2))
    (job,) = hand_off(site, ask("a", "Look: ", picture, " well"))
    lose_kv(site, job)
    site.line.prefill.close()
    site.line.add_prefill("prefill-1")  # one that has not seen it
    site.line.client.delete(picture_key(picture.digest))
    run_in_turn(site, site.line.read_results)
    (result,) = site.line.read_results()
    assert result.error is not None
    assert result.error.code == "picture_gone"


@pytest.mark.parametrize("error", [BusUnavailable("away"), StorageUnavailable("away")], ids=["redis", "objects"])
@pytest.mark.parametrize("where", ["prefill", "again"])
def test_a_request_waits_while_the_store_of_pictures_is_away(
    site: Site, monkeypatch: pytest.MonkeyPatch, error: Exception, where: str
) -> None:
    """More often than it may fail; others are answered meanwhile."""
    monkeypatch.setattr("penstock.worker.failure.OUTAGE_DEFERRAL_S", 0.01)
    data, line, get, left = draw_png(1), site.line, PictureStore.get, [2 * site.line.record_settings.fail_attempts]
    picture = site.put(data)

    def fail(store: PictureStore, digest: str, __: str) -> bytes:
        if left[0]:
            left[0] -= 1
            raise error
        return get(store, digest)

    if where == "again":
        (job,) = hand_off(site, ask("a", "Look: ", picture, " well"))
        lose_kv(site, job)
        line.prefill.close()
        line.add_prefill("prefill-1")  # one that has not seen it
    else:
        line.send_requests(ask("a", "Look: ", picture, " well"))
    monkeypatch.setattr(PictureStore, "get", fail)
    line.send_requests(ask("b", "no picture"))
    run_in_turn(site, lambda: len(line.read_results()) == 2)
    results = {one.id: one for one in line.read_results()}
    assert (left, results["b"].error) == ([0], None)
    assert results["a"].token_ids == site.generate("Look: ", data, " well")


def test_what_has_ended_is_no_dead_letter_where_its_pictures_cannot_be_read(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker died between the end of the log and the settlement, and the store is away for the next one."""
    monkeypatch.setattr("penstock.worker.worker.OUTAGE_DEFERRAL_S", 0.01)
    line, data = site.line, draw_png(1)
    line.prefill.close()
    line.prefill = line.make_auto("auto-0", StayPolicy(StaySettings(), frozenset))
    line.send_requests(ask("a", "Look: ", site.put(data)))
    with monkeypatch.context() as patched:
        patched.setattr(line.prefill.settler, "settle", lambda *_, **__: None)
        while (status := line.prefill.record.read_status("a")) is None or status.stage != "end":
            line.prefill.run_once()
    line.prefill.abandon()
    get, left = PictureStore.get, [3]

    def fail(store: PictureStore, digest: str, tenant: str) -> bytes:
        if left[0]:
            left[0] -= 1
            raise BusUnavailable("away")
        return get(store, digest, tenant)

    monkeypatch.setattr(PictureStore, "get", fail)
    line.add_prefill("prefill-1")
    run_in_turn(site, line.read_results)
    (result,) = line.read_results()
    assert (result.token_ids, left) == (site.generate("Look: ", data), [0])
    assert not line.read_dead_letters()


@pytest.mark.parametrize(
    ("pictures", "message"),
    [
        ([{"first": 3, "num_rows": 1000}], "the prompt has"),
        ([{"first": 3, "num_rows": 2}, {"first": 4, "num_rows": 2}], "the prompt has"),
        ([{"first": 2**30, "num_rows": 1}], "the prompt has"),
        ([{"first": 3, "num_rows": 4, "grid": [1, 6000, 6000]}], "has not 4 rows"),
        ([{"first": 0, "num_rows": 1, "grid": [1, 0, 1]}], "greater than or equal to 1"),
    ],
)
def test_a_job_with_pictures_that_cannot_be_ends_at_once(
    site: Site, pictures: list[dict[str, Any]], message: str
) -> None:
    named = [{"digest": "ab" * 32, "name": "cd" * 32, **one} for one in pictures]
    body = {"v": 1, "id": "a", "job": "j", "token_ids": [5] * 20, "pictures": named}
    site.line.publish_bytes(json.dumps(body).encode(), "a", site.line.pipeline.job_topic("interactive"))
    (result,) = site.line.run_until_results(1)
    assert result.error is not None
    assert message in result.error.message


def test_each_hostile_file_is_an_error_of_its_request(site: Site) -> None:
    """A worker does not trust who produced a message."""
    given = [
        (name, Picture(digest=hashlib.sha256(data).hexdigest(), data=base64.b64encode(data).decode()))
        for name, data in HOSTILE.items()
    ]
    numbers = {f"bad-{number}": name for number, (name, _) in enumerate(given)}
    bad = [ask(id_, "Look: ", picture) for id_, (_, picture) in zip(numbers, given, strict=True)]
    site.line.send_requests(*bad, ask("good", "Look: ", site.put(draw_png(1))))
    results = {one.id: one for one in site.line.run_until_results(len(bad) + 1)}
    codes = {numbers[id_]: one.error and one.error.code for id_, one in results.items() if id_ != "good"}
    assert codes == dict.fromkeys(HOSTILE, "invalid_request")
    assert results["good"].error is None
