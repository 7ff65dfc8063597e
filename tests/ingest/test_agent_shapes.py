"""What coding agents send: shapes that examples/record_agent.py recorded from them, through the models of bodies."""

import contextlib
import itertools
import json
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.ingest.endpoints import ENDPOINTS
from penstock.ingest.errors import ApiError
from penstock.ingest.ignored import strip_ignored_fields
from penstock.ingest.openai.endpoint import use_response_template
from penstock.local.processes import find_free_port
from sim.waiting import wait_for
from tests.ingest.answers import TEMPLATE

FOLDER = Path(__file__).with_name("agents")
RECORDER = Path(__file__).parents[2] / "examples" / "record_agent.py"
IGNORED = {
    "claude-code-2.1.332": {
        "context_management", "messages.*.content.*.cache_control", "messages.*.content.*.caller",
        "messages.*.content.*.is_error", "output_config.effort", "system.*.cache_control", "thinking.display",
        "tools.*.defer_loading",
    },
    "codex-0.171.0": {"client_metadata", "reasoning.summary", "tools[web_search]"},
    "opencode-1.18.33": {"reasoning.summary"},
}  # fmt: skip
"""By the agent and its version: what is ignored of all that it sends."""
SHAPES = {name: json.loads((FOLDER / f"{name}.json").read_text()) for name in IGNORED}


def fill_shape(shape: Any, numbers: "itertools.count[int]", field: str = "") -> Any:
    """Return a body of a shape. Each name is another one; calls and results have the same `call_id`."""
    if isinstance(shape, dict):
        return {name: fill_shape(one, numbers, name) for name, one in shape.items()}
    if isinstance(shape, list):
        return [fill_shape(one, numbers, field) for one in shape]
    filled = {"<text>": f"x{next(numbers)}" if field == "name" else "x", "<number>": 1, "<schema>": {"type": "object"}}
    return filled.get(shape, shape) if isinstance(shape, str) else shape


def test_each_file_has_a_version_of_an_agent() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == IGNORED.keys()


@pytest.mark.parametrize("name", SHAPES)
def test_bodies_of_all_shapes_are_taken(name: str) -> None:
    ignored = set[str]()
    for one in SHAPES[name]:
        endpoint, given = ENDPOINTS[one["path"]], fill_shape(one["body"], itertools.count())
        body = endpoint.parse_body(given)
        requests = endpoint.make_requests(body, "r")
        use_response_template(endpoint, body, requests, TEMPLATE)
        ignored |= set(strip_ignored_fields(endpoint.path, given)[1])
        with pytest.raises(ApiError, match="no_such_field"):
            endpoint.parse_body(given | {"no_such_field": 1})
    assert ignored == IGNORED[name]


def is_listening(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


class Answering(BaseHTTPRequestHandler):
    """Answers each request with its path and body."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(400)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        self.wfile.write(self.path.encode() + b" " + body)


def test_the_recorder_writes_no_texts_and_passes_all_on(tmp_path: Path) -> None:
    file, port = tmp_path / "shapes.json", find_free_port()
    body = {
        "model": "secret", "stream": True, "temperature": 0.5, "stop": None, "input": [
            {"type": "message", "content": "secret"}, {"type": "message", "content": "another"},
            {"type": "function_call", "arguments": '{"secret": 1}'},
        ],
        "tools": [{"type": "function", "name": "secret", "parameters": {"properties": {"secret": {"type": "string"}}}}],
    }  # fmt: skip
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as gateway:
        threading.Thread(target=gateway.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{gateway.server_port}"
        command = [sys.executable, str(RECORDER), url, str(port), str(file)]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as recorder:
            wait_for(lambda: is_listening(port), "the recorder listens")
            for _ in range(2):
                answer = httpx.post(
                    f"http://127.0.0.1:{port}/v1/responses?a=b", json=body, headers={"user-agent": "agent/1 (x)"}
                )
                assert (answer.status_code, answer.headers["content-type"]) == (400, "text/event-stream")
                assert answer.content.partition(b" ")[::2] == (b"/v1/responses?a=b", answer.request.content)
            recorder.terminate()
        gateway.shutdown()
    assert json.loads(file.read_text()) == [{
        "agent": "agent/1", "path": "/v1/responses", "body": {
            "model": "<text>", "stream": True, "temperature": "<number>", "stop": None, "input": [
                {"type": "message", "content": "<text>"}, {"type": "function_call", "arguments": "<text>"},
            ],
            "tools": [{"type": "function", "name": "<text>", "parameters": "<schema>"}],
        },
    }]  # fmt: skip
