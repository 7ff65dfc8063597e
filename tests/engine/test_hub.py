"""Models of the hub, from a server that stands for it: asked once a process, and never for ever."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from penstock.config.settings import EngineSettings
from penstock.engine.loading.loading import open_model
from penstock.engine.loading.vector_files import is_for_embedding, is_for_engine
from penstock.engine.weights import files
from penstock.engine.weights.files import DEMO_MODEL, check_model_here, find_model, ignore_progress
from penstock.errors import ModelLoadError, ModelUnavailable
from tests.embed.checkpoints import write_checkpoint

NAME = "org/model"


class Hub(ThreadingHTTPServer):
    """A server of one model's files, which can also be away, busy or silent."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.files: dict[str, bytes] = {}
        self.commit = "0" * 40
        self.status = 200
        self.asked: list[str] = []
        self.is_over = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answer(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        hub, place = self.server, self.path.partition("?")[0]
        hub.asked.append(place)
        if hub.status == 0:
            hub.is_over.wait()
            return
        name = place.removeprefix(f"/{NAME}/resolve/{hub.commit}/")
        status, content = hub.status, hub.files.get(name)
        if place.endswith("/revision/main") or place == f"/api/models/{NAME}":
            content = json.dumps({"id": NAME, "sha": hub.commit, "siblings": self.list_files("rfilename")}).encode()
        elif place.endswith(f"/tree/{hub.commit}"):
            content = json.dumps(self.list_files("path")).encode()
        self.send_response(404 if content is None and status == 200 else status)
        if status == 404:
            self.send_header("X-Error-Code", "RepoNotFound")
        content = content if content is not None and status == 200 else b""
        for header, value in {"X-Repo-Commit": hub.commit, "ETag": f'"{name}"', "Content-Length": len(content)}.items():
            self.send_header(header, str(value))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET  # noqa: N815 - as the base class names it

    def list_files(self, key: str) -> list[dict[str, object]]:
        files = self.server.files.items()
        return [{"type": "file", key: name, "size": len(content), "oid": name} for name, content in files]

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with Hub() as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        for name, value in {
            "ENDPOINT": server.url, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": False,
            "HUGGINGFACE_CO_URL_TEMPLATE": server.url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_ETAG_TIMEOUT": 0.3,
        }.items():  # fmt: skip
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        server.files = {file.name: file.read_bytes() for file in DEMO_MODEL.iterdir() if file.is_file()}
        yield server
        server.is_over.set()
        server.shutdown()
        serving.join()


@pytest.fixture(autouse=True)
def asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_downloaded", {})


def is_resolving(place: str) -> bool:
    return place.endswith("/revision/main")


def test_a_process_asks_for_a_model_once_and_takes_the_cached_one_where_the_hub_is_silent(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check_model_here(NAME, ignore_progress)
    asked = len(hub.asked)
    directory = find_model(NAME, ignore_progress, tmp_path)
    assert directory.name == hub.commit
    assert len(hub.asked) == asked, "the load asks no more"
    for hub.status in (0, 503, 200):
        monkeypatch.setattr(files, "_downloaded", {})
        hub.asked.clear()
        check_model_here(NAME, ignore_progress)
        assert find_model(NAME, ignore_progress, tmp_path) == directory
        assert len([place for place in hub.asked if is_resolving(place)]) == 1


@pytest.mark.parametrize(
    ("status", "kind", "words"),
    [(0, ModelUnavailable, "imed out"), (503, ModelUnavailable, "503"), (404, ModelLoadError, "404")],
)
def test_only_what_the_hub_will_say_again_is_final(
    hub: Hub, status: int, kind: type[ModelLoadError], words: str
) -> None:
    hub.status = status
    with pytest.raises(ModelLoadError, match=rf"not from the hub at .*{words}") as caught:
        check_model_here(NAME, ignore_progress)
    assert type(caught.value) is kind
    with pytest.raises(ModelLoadError, match=rf"cannot load model '{NAME}': .*{words}") as caught:
        open_model(EngineSettings(model=NAME))
    assert caught.value.exit_status == kind.exit_status


@pytest.mark.parametrize(("name", "is_decoder"), [("bert", False), ("qwen3", True)])
def test_a_decoder_for_vectors_is_known_by_small_files_and_loaded_with_its_modules(
    hub: Hub, tmp_path: Path, name: str, is_decoder: bool
) -> None:
    directory = write_checkpoint(tmp_path / "model", name)
    found = [file for file in directory.rglob("*") if file.is_file()]
    hub.files = {str(file.relative_to(directory)): file.read_bytes() for file in found}
    assert (is_for_embedding(NAME), is_for_engine(NAME)) == (True, is_decoder)
    assert not [place for place in hub.asked if place.endswith((".safetensors", "/tokenizer.json"))]
    if is_decoder:
        settings = EngineSettings(model=NAME, threads=1, cache_dir=str(tmp_path / "cache"))
        assert open_model(settings).text_reader is not None
    hub.status = 0
    assert is_for_engine(NAME) == is_decoder, "the hub is silent, and its cache has the files"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"a-q8_0.gguf": b"GGUF", "b": b""},
            rf"{NAME} has GGUF files alone there: download one \(`hf download {NAME} a-",
        ),
        ({"README.md": b""}, r"has no config\.json"),
        ({"config.json": b'{"model_type": "t5"}', "model.safetensors": b""}, "is an encoder-decoder model"),
    ],
)
def test_a_model_of_the_hub_that_cannot_be_served_is_refused_before_its_weights_are_downloaded(
    hub: Hub, files: dict[str, bytes], message: str
) -> None:
    hub.files = files
    with pytest.raises(ModelLoadError, match=message):
        check_model_here(NAME, ignore_progress)
    assert not [place for place in hub.asked if place.endswith((".safetensors", ".gguf"))]
