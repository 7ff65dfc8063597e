"""A server with OpenAI's API that counts instead of thinking, and fails as it is told.

The answer to a prompt that ends with `|` is ` 0 1 2 …`, a number in each piece, as many as `max_tokens`. Asked to go on
behind ` 0 1`, it continues with ` 2`: so a text in which a number is missing, or comes twice, tells what was lost. A
chat with tools is told three numbers, and calls each tool once; where its last turn has the word `think`, there is
reasoning before. As a process: `python -m sim.endpoint PORT [PAUSE_S]`.
"""

import contextlib
import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, Self

MODEL = "counting"
NUM_TOLD = 3
"""The numbers that are told before calls."""
Choice = dict[str, Any]
"""A chunk's choice, without its index."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one request."""

    kind: Literal["status", "cut", "hang", "error"]
    """`status`: an HTTP error. After a number of pieces: `cut` closes the connection, `hang` sends nothing more,
    `error` sends an error in the stream."""
    after: int = 0
    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    message: str = "as told"


class CountingEndpoint:
    """The server, on a thread of this process."""

    def __init__(self, port: int = 0, pause_s: float = 0.0, owner: str = "vllm") -> None:
        """`pause_s` is the time before each piece, `owner` what it says that its model is `owned_by`."""
        self.pause_s, self.owner = pause_s, owner
        self.faults: deque[Fault] = deque()
        """Faults of the next requests, one each."""
        self.bodies: list[dict[str, Any]] = []
        """What was asked, in order."""
        self.headers: list[dict[str, str]] = []
        self.gate = threading.Event()
        """Pieces are sent while it is set."""
        self.gate.set()
        self.pass_piece: Callable[[dict[str, Any], int], object] = lambda _, __: self.gate.wait()
        """Called with the question before each piece of the answer, which is counted from 0: it may wait."""
        self.models, self.models_status = [MODEL], 200
        self.with_usage = True
        self.stream_headers = {"Content-Type": "text/event-stream", "Transfer-Encoding": "chunked"}
        self.delta_fields: dict[str, Any] = {}
        """What the first piece of a chat's answer has besides its text."""
        self.write_choices: Callable[[dict[str, Any]], Sequence[Choice]] = call_tools
        """Returns all choices of the answer to a chat with tools."""
        self.num_pieces: int | None = None
        """How many pieces an answer has, whatever was asked for; None for as many as were asked for."""
        self.end_fields: dict[str, Any] = {}
        """What the last choice of each answer says in place of what is true."""
        self.usage_fields: dict[str, Any] = {}
        """What the usage of each answer says in place of what is true."""
        self.write_reply: Callable[[dict[str, Any]], bytes | None] = lambda _: None
        """Returns all that is written to a question, the status line included; None for the answer itself."""
        self.num_under_way = self.max_under_way = 0
        self.lock = threading.Lock()
        self._server = _Server(("127.0.0.1", port), _Handler)
        self._server.endpoint = self
        self.port = int(self._server.server_address[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def start(self) -> Self:
        """Serve from now on."""
        self._thread.start()
        return self

    def stop(self) -> None:
        """Serve no more, and end the requests under way."""
        self.gate.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @contextlib.contextmanager
    def count_request(self) -> Iterator[None]:
        """Count a request as under way."""
        with self.lock:
            self.num_under_way += 1
            self.max_under_way = max(self.max_under_way, self.num_under_way)
        try:
            yield
        finally:
            with self.lock:
                self.num_under_way -= 1


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256
    endpoint: CountingEndpoint

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: readers close their connections."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """List the models."""
        endpoint = self.server.endpoint
        models = [{"id": name, "object": "model", "owned_by": endpoint.owner} for name in endpoint.models]
        self._send_json(endpoint.models_status, {"object": "list", "data": models})

    def do_POST(self) -> None:
        """Count."""
        endpoint = self.server.endpoint
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with endpoint.lock:
            endpoint.bodies.append(body)
            endpoint.headers.append({name.lower(): value for name, value in self.headers.items()})
            fault = endpoint.faults.popleft() if endpoint.faults else None
        self.close_connection = True
        if (reply := endpoint.write_reply(body)) is not None:
            with contextlib.suppress(OSError):
                self.wfile.write(reply)
            return
        if fault is not None and fault.kind == "status":
            self._send_json(fault.status, {"error": {"message": fault.message}}, fault.headers)
            return
        with contextlib.suppress(OSError):
            with endpoint.count_request():
                ends = self._stream_pieces(body, fault)
            # Only now, as the next question may be here before this thread goes on after the last write.
            for content in ends:
                self._send_chunk(content)

    def _stream_pieces(self, body: dict[str, Any], fault: Fault | None) -> list[bytes]:
        """Send the pieces of an answer, and return the chunks that end it; none after a fault."""
        endpoint, is_chat = self.server.endpoint, self.path.endswith("/chat/completions")
        self.send_response(200)
        for name, value in endpoint.stream_headers.items():
            self.send_header(name, value)
        self.end_headers()
        if body.get("tools"):
            *choices, end = endpoint.write_choices(body)
        else:
            choices, end = self._count(body)
        for index, choice in enumerate(choices):
            if fault is not None and index == fault.after:
                self._fail(fault)
                return []
            endpoint.pass_piece(body, index)
            time.sleep(endpoint.pause_s)
            delta = choice["delta"] | (endpoint.delta_fields if index == 0 else {})
            told = {"index": 0, **choice, "delta": delta} if is_chat else {"text": delta["content"]}
            self._send_event({"choices": [told]})
        count = len(choices)
        ends = [_encode_event({"choices": [{"index": 0, "delta": {}, "text": "", **end, **endpoint.end_fields}]})]
        if endpoint.with_usage and (body.get("stream_options") or {}).get("include_usage"):
            prompt = len(str(body.get("prompt") or body.get("messages")).split())
            details = {"prompt_tokens_details": {"cached_tokens": 1}}
            usage = {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
            ends.append(_encode_event({"choices": [], "usage": usage | details | endpoint.usage_fields}))
        return [*ends, b"data: [DONE]\n\n", b""]

    def _count(self, body: dict[str, Any]) -> tuple[list[Choice], Choice]:
        """Return the choices that count, and the fields of the last one."""
        first, count = _count_so_far(body), self.server.endpoint.num_pieces or body.get("max_tokens") or 8
        texts = [f" {first + index}" for index in range(count)]
        stop = next((index for index, text in enumerate(texts) if text in (body.get("stop") or ())), None)
        end = {"finish_reason": "length"} if stop is None else {"finish_reason": "stop", "stop_reason": texts[stop]}
        return [{"delta": {"content": text}} for text in texts[:stop]], end

    def _fail(self, fault: Fault) -> None:
        """Do what a fault says. The connection ends then."""
        if fault.kind == "error":
            self._send_event({"error": {"message": fault.message, "code": fault.status}})
        elif fault.kind == "hang":
            self.connection.settimeout(None)
            with contextlib.suppress(OSError):
                self.connection.recv(1)  # until the reader closes it

    def _send_event(self, event: dict[str, Any]) -> None:
        self._send_chunk(_encode_event(event))

    def _send_chunk(self, content: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(content), content))
        self.wfile.flush()

    def _send_json(self, status: int, content: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        encoded = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)


def _encode_event(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def _count_so_far(body: dict[str, Any]) -> int:
    """Return the number that comes next: how many stand behind the prompt, or in the turn to be continued."""
    if "messages" in body:
        return len(body["messages"][-1]["content"].split()) if body.get("continue_final_message") else 0
    prompt = body["prompt"]
    return len(prompt.partition("|")[2].split()) if isinstance(prompt, str) else 0


def call_tools(body: dict[str, Any]) -> list[Choice]:
    """Return the choices of an answer that reasons, counts to `NUM_TOLD`, and calls each tool, in pieces in turns."""
    asked = next(turn["content"] for turn in reversed(body["messages"]) if turn["role"] != "assistant")
    first = _count_so_far(body)
    thoughts = ["I", " must", " count."] if "think" in asked and first == 0 else []
    deltas: list[dict[str, Any]] = [{"reasoning_content": text} for text in thoughts]
    deltas += [{"content": f" {number}"} for number in range(first, NUM_TOLD)]
    names = [tool["function"]["name"] for tool in body["tools"]]
    heads = [{"id": f"theirs-{index}", "function": {"name": name, "arguments": ""}} for index, name in enumerate(names)]
    rows = [heads] + [
        [{"function": {"arguments": text[place : place + 3]}} for text in map(write_arguments, names)]
        for place in range(0, max(map(len, map(write_arguments, names))), 3)
    ]
    deltas += [{"tool_calls": [{"index": index, **call}]} for row in rows for index, call in enumerate(row)]
    return [*({"delta": delta} for delta in deltas), {"finish_reason": "tool_calls"}]


def write_arguments(name: str) -> str:
    """Return the arguments with which a tool is called."""
    return f'{{"of": "{name}", "n": [1, 2.0]}}'


def write_numbers(count: int) -> str:
    """Return the whole answer of `count` pieces."""
    return "".join(f" {number}" for number in range(count))


def main() -> None:
    """Serve until killed."""
    port, pause_s = int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
    CountingEndpoint(port, pause_s).start()
    threading.Event().wait()


if __name__ == "__main__":
    main()
