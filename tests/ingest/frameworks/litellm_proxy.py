# /// script
# requires-python = ">=3.11"
# dependencies = ["litellm[proxy]==1.108.7", "openai>=2,<3", "anthropic>=0.80,<1"]
# ///
"""LiteLLM's proxy stands between clients and the gateway, for OpenAI's chat and for Anthropic's messages."""

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
from pydantic import BaseModel, ConfigDict, Field

url, model = sys.argv[1:]
KEY = f"sk-{secrets.token_hex(16)}"
"""The proxy's own: it does not start without one."""


class Report(BaseModel):
    """What is answered at last."""

    model_config = ConfigDict(extra="forbid")

    color: str = Field(max_length=12)
    num_cities: int = Field(ge=0, le=9)


QUESTION = "What is the weather of Lisbon and Porto?"
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}}
SCHEMA |= {"required": ["city"], "additionalProperties": False}
FUNCTION = {"name": "get_weather", "description": "Get the weather of a city.", "parameters": SCHEMA, "strict": True}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]


def ask_chat(proxy: str) -> None:
    """Let the model call its tool until it answers by its type, and stream the first turn as well."""
    with openai.OpenAI(base_url=proxy, api_key=KEY) as client:
        turns: list[Any] = [{"role": "user", "content": QUESTION}]
        options: dict[str, Any] = {"model": model, "tools": TOOLS, "temperature": 0}
        cities: list[str] = []
        while True:
            answer = client.chat.completions.parse(messages=turns, response_format=Report, **options)
            message = answer.choices[0].message
            turns.append(message)
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                cities.append(json.loads(call.function.arguments)["city"])
                turns.append({"role": "tool", "tool_call_id": call.id, "content": '{"weather": "red"}'})
        assert isinstance(message.parsed, Report), message
        assert cities
        pieces: dict[int, str] = {}
        for chunk in client.chat.completions.create(messages=turns[:1], stream=True, **options):
            for piece in (chunk.choices[0].delta.tool_calls or []) if chunk.choices else []:
                pieces[piece.index] = pieces.get(piece.index, "") + (piece.function.arguments or "")
        assert [json.loads(text)["city"] for text in pieces.values()] == ["Lisbon", "Porto"], pieces


def ask_messages(proxy: str) -> None:
    """Ask in Anthropic's form, which the proxy translates."""
    tool: Any = {"name": "get_weather", "description": "Get the weather of a city.", "input_schema": SCHEMA}
    with anthropic.Anthropic(base_url=proxy, api_key=KEY) as client:
        answer = client.messages.create(
            model=model, max_tokens=80, tools=[tool], messages=[{"role": "user", "content": QUESTION}],
            extra_body={"temperature": 0},  # newer releases have no parameter for it
        )  # fmt: skip
    used = [block.input for block in answer.content if block.type == "tool_use"]
    assert used == [{"city": "Lisbon"}, {"city": "Porto"}], answer


def wait_until_live(proxy: str, process: "subprocess.Popen[bytes]") -> None:
    """Return once the proxy answers. Raises `SystemExit` if it ends before."""
    while process.poll() is None:
        try:
            if httpx.get(f"{proxy}/health/liveliness", timeout=60).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.1)
    raise SystemExit("the proxy has ended")


with tempfile.TemporaryDirectory() as folder:
    config = Path(folder) / "config.json"  # JSON is YAML
    params = {"model": f"openai/{model}", "api_base": url, "api_key": "none"}
    config.write_text(json.dumps({"model_list": [{"model_name": model, "litellm_params": params}]}))
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    program = str(Path(sys.executable).parent / "litellm")
    command = [program, "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    # Prices are asked for in the network otherwise.
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": KEY}
    with subprocess.Popen(command, env=environment) as process:
        try:
            wait_until_live(f"http://127.0.0.1:{port}", process)
            ask_chat(f"http://127.0.0.1:{port}")
            ask_messages(f"http://127.0.0.1:{port}")
        finally:
            process.terminate()
