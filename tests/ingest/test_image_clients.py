"""SDKs and frameworks send images as their users do, to a real gateway over a scripted model that sees."""

import base64
import hashlib
import importlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from penstock.messages import EndEvent
from tests.gateways import GatewayProcess, ScriptedPipeline
from tests.ingest import clients, nodejs
from tests.test_pictures import JPEG, PNG

pytestmark = pytest.mark.clients
URL = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
QUESTION, SEEN = "What is this?", "Red, and blue."
DIGESTS = {name: hashlib.sha256(data).hexdigest() for name, data in (("png", PNG), ("jpeg", JPEG))}


@pytest.fixture
def url(scripted: ScriptedPipeline, tmp_path: Path) -> Iterator[str]:
    """Where a gateway is. All requests are answered with the same words."""
    scripted.report(sees=True)
    told = EndEvent.model_validate({"finish_reason": "stop", "text": SEEN})
    settings = {"BATCH_STORE": str(tmp_path / "store")}
    with (
        GatewayProcess(scripted.addresses, tmp_path, settings) as gateway,
        scripted.answer_texts(lambda _: told),
    ):
        yield gateway.url


def list_seen(scripted: ScriptedPipeline) -> list[tuple[list[str], str]]:
    """Return the pictures of each request, and the texts of its users."""
    names = {digest: name for name, digest in DIGESTS.items()}
    return [
        (
            [names[picture.digest] for picture in request.pictures],
            "".join(turn.text for turn in request.messages or () if turn.role == "user"),
        )
        for request in scripted.read_requests()
    ]


def test_openais_sdk_sends_images_in_chats_and_responses(url: str, scripted: ScriptedPipeline) -> None:
    model = asked_model(url)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=None) as sdk:
        parts: Any = [{"type": "text", "text": QUESTION}, {"type": "image_url", "image_url": {"url": URL}}]
        chat: Any = {"model": model, "messages": [{"role": "user", "content": parts}]}
        assert sdk.chat.completions.create(**chat).choices[0].message.content == SEEN
        pieces = [chunk.choices[0].delta.content or "" for chunk in sdk.chat.completions.create(**chat, stream=True)]
        assert "".join(pieces) == SEEN
        file = sdk.files.create(file=("a.jpg", JPEG), purpose="vision")
        content: Any = [
            {"type": "input_image", "image_url": URL, "detail": "auto"},
            {"type": "input_image", "file_id": file.id, "detail": "high"},
            {"type": "input_text", "text": QUESTION},
        ]
        first = sdk.responses.create(model=model, input=[{"role": "user", "content": content}])
        second = sdk.responses.create(model=model, input="Why?", previous_response_id=first.id)
        assert (first.output_text, second.output_text) == (SEEN, SEEN)
        (item,) = sdk.responses.input_items.list(first.id)
        kept: Any = item.to_dict()["content"]
        assert [part["type"] for part in kept] == ["input_image", "input_image", "input_text"]
        assert kept[0]["image_url"] == URL
    both = ["png", "jpeg"]
    assert list_seen(scripted) == [(["png"], QUESTION)] * 2 + [(both, QUESTION), (both, f"{QUESTION}Why?")]


def asked_model(url: str) -> str:
    """Return the name of the gateway's model."""
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as sdk:
        (model,) = (one.id for one in sdk.models.list() if one.to_dict().get("own"))
    return model


def test_anthropics_sdk_sends_images_in_messages_and_results(url: str, scripted: ScriptedPipeline) -> None:
    anthropic = pytest.importorskip("anthropic")
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as files:
        file = files.files.create(file=("a.jpg", JPEG), purpose="vision")
    png: Any = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(PNG).decode()}
    jpeg: Any = {"type": "file", "file_id": file.id}
    ask = [{"type": "image", "source": png}, {"type": "text", "text": QUESTION}]
    call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "image", "source": jpeg}]}
    turns = [
        {"role": "user", "content": ask},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=None) as sdk:
        given = {"model": asked_model(url), "max_tokens": 20}
        assert sdk.messages.create(messages=turns[:1], **given).content[0].text == SEEN
        with sdk.messages.stream(messages=turns, **given) as stream:
            assert stream.get_final_text() == SEEN
    assert list_seen(scripted) == [(["png"], QUESTION), (["png", "jpeg"], QUESTION)]


@pytest.mark.parametrize("is_response", [False, True])
def test_langchain_sends_an_image(url: str, scripted: ScriptedPipeline, is_response: bool) -> None:
    langchain = pytest.importorskip("langchain_openai")
    said = importlib.import_module("langchain_core.messages").HumanMessage
    model = langchain.ChatOpenAI(
        model=asked_model(url), base_url=f"{url}/v1", api_key="none", use_responses_api=is_response
    )
    image = {"type": "image", "base64": base64.b64encode(PNG).decode(), "mime_type": "image/png"}
    assert model.invoke([said(content=[image, {"type": "text", "text": QUESTION}])]).text == SEEN
    assert list_seen(scripted) == [(["png"], QUESTION)]


def test_node_sdks_send_an_image(url: str, scripted: ScriptedPipeline, tmp_path: Path) -> None:
    """OpenAI's in chats and responses, and the AI SDK by two of its providers."""
    project = nodejs.project(clients.find_place(Path(__file__).parent / "node"), tmp_path)
    (project / "cat.png").write_bytes(PNG)
    known = {"GATEWAY": url, "MODEL": asked_model(url), "QUESTION": QUESTION, "SEEN": SEEN}
    done = subprocess.run(
        [nodejs.NODE, "--test", "--test-reporter=spec", "images.test.mjs"],
        cwd=project, env=os.environ | known, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert list_seen(scripted) == [(["png"], QUESTION)] * 5
