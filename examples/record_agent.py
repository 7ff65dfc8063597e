"""Records the shape of what an agent sends to a gateway: names and types of fields, and no texts.

    python record_agent.py http://127.0.0.1:8000 8001 shapes.json

The agent's base URL is http://127.0.0.1:8001, with `/v1` where it wants that. Each request is passed on to the gateway,
and the answer back as it comes. `shapes.json` has each shape once, with the agent's name and version.
"""

import json
import sys
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

GATEWAY, PORT, FILE = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
WORDS = {
    "type", "role", "status", "phase", "effort", "reasoning_effort", "summary", "verbosity", "tool_choice", "include",
    "truncation",
}  # fmt: skip
"""Fields whose texts are words of the API."""
SCHEMAS = {"parameters", "input_schema", "output_schema", "schema"}
NOT_PASSED_ON = {"host", "connection", "content-length", "accept-encoding"}
shapes: list[dict[str, Any]] = []


def describe_shape(value: Any, field: str = "") -> Any:
    """Return a value with a type in place of each text and number; equal entries of a list are one."""
    if isinstance(value, dict):
        return "<schema>" if field in SCHEMAS else {name: describe_shape(one, name) for name, one in value.items()}
    if isinstance(value, list):
        entries = [describe_shape(one, field) for one in value]
        return [one for place, one in enumerate(entries) if one not in entries[:place]]
    if value is None or isinstance(value, bool) or (field in WORDS and isinstance(value, str)):
        return value
    return "<text>" if isinstance(value, str) else "<number>"


class Recorder(BaseHTTPRequestHandler):
    """Records one request, passes it on, and the answer back."""

    def do_POST(self) -> None:
        """Do that with a request that has a body."""
        body = self.rfile.read(int(self.headers["content-length"]))
        agent, path = self.headers.get("user-agent", "").partition(" ")[0], self.path.partition("?")[0]
        shape = {"agent": agent, "path": path, "body": describe_shape(json.loads(body))}
        if shape not in shapes:
            shapes.append(shape)
            FILE.write_text(json.dumps(shapes, indent=1) + "\n")
        headers = {name: text for name, text in self.headers.items() if name.lower() not in NOT_PASSED_ON}
        try:
            answer = urllib.request.urlopen(urllib.request.Request(GATEWAY + self.path, body, headers))
        except urllib.error.HTTPError as refused:
            answer = refused
        with answer:
            self.send_response(answer.status)
            self.send_header("content-type", answer.headers.get("content-type", "text/plain"))
            self.end_headers()
            while piece := answer.read1():
                self.wfile.write(piece)


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", PORT), Recorder).serve_forever()
