"""Clients with batches: a file is uploaded, a batch made of it, and its output read, at any gateway that answers."""

import json
from typing import Any

from penstock.messages import Request
from sim.chaos.checker import Entry
from sim.world.http import HttpClient, make_body, name_request
from sim.world.ways import Place

MAX_LINES = 5
UNKNOWN_MODEL = "unheard-of"
LOOK_S = 2.0
BOUNDARY = "boundary"


class BatchClient:
    """A client with one batch."""

    def __init__(self, http: HttpClient, request: Request) -> None:
        """Make lines of a request, each with its own seed."""
        self._http, self._request = http, request
        self._lines = [make_body(request, seed) for seed in range(http.chance.randint(1, MAX_LINES))]
        for line in self._lines:
            line["model"] = UNKNOWN_MODEL if http.chance.random() < 0.1 else line["model"]

    def run(self) -> None:
        """Have the batch answered, and check that each line is answered once."""
        fields = {"method": "POST", "url": "/v1/completions"}
        rows = [fields | {"custom_id": f"line-{seed}", "body": body} for seed, body in enumerate(self._lines)]
        content = b"\n".join(json.dumps(row).encode() for row in rows)
        file = self._http.fetch("POST", "/v1/files", *_make_form(content))
        new = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        batch = None
        while batch is None:  # its models are those that the gateway knows which accepts it
            batch = self._http.fetch("POST", "/v1/batches", {}, json.dumps(new).encode(), is_there=self._knows_model)
        while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
            self._http.world.sleep(LOOK_S)
            batch = self._http.fetch("GET", f"/v1/batches/{batch['id']}")
        self._check_answers(batch)

    def _knows_model(self, place: Place) -> bool:
        """Return whether a gateway knows the model, which it then does until its process ends."""
        connection = self._http.gateways.connect(place, "GET", "/v1/models/formula", {})
        start = None if connection is None else connection.read_start(LOOK_S)
        return start is not None and start[0] == 200

    def _check_answers(self, batch: dict[str, Any]) -> None:
        answers: dict[str, dict[str, Any]] = {}
        for name in ("output_file_id", "error_file_id"):
            if batch[name] is not None:
                content = self._http.fetch("GET", f"/v1/files/{batch[name]}/content", is_json=False)
                for line in content.decode().splitlines():
                    row = json.loads(line)
                    if row["custom_id"] in answers:
                        self._http.fail(f"{batch['id']}: {row['custom_id']} is answered twice")
                    answers[row["custom_id"]] = row
        for seed, line in enumerate(self._lines):
            row = answers.get(f"line-{seed}", {})
            response = row.get("response") or {"status_code": None, "body": {}}
            error = response["body"].get("error") or {"message": "", "code": None}
            is_known = line["model"] != UNKNOWN_MODEL
            if is_known and (response["status_code"] == 200 or self._http.is_injected(error["message"])):
                self._note_answer(seed, response["request_id"], response["body"], error["code"])
            elif is_known or response["status_code"] != 404:
                self._http.fail(f"{batch['id']} ({batch['status']}): line {seed} is answered with {row}"[:400])

    def _note_answer(self, seed: int, request_id: str, answer: dict[str, Any], error: str | None) -> None:
        """Note a line's answer. That an injected exception ended it is judged by what the line's request came to."""
        self._http.note_submitted(name_request(self._request, request_id, seed), [])
        self._http.note_accepted(request_id)
        choice = {"finish_reason": None, "text": ""} if error is not None else answer["choices"][0]
        entry: Entry = {"reader": "batch", "finish": choice["finish_reason"], "text": choice["text"], "calls": []}
        self._http.note({"what": "end", "id": request_id, "count": None, "error": error, **entry})
        if error is None and (count := answer["usage"]["completion_tokens"]) != self._request.sampling.max_tokens:
            self._http.fail(f"{request_id} has {count} tokens by its usage")


def _make_form(content: bytes) -> tuple[dict[str, str], bytes]:
    """Return headers and body of an upload."""
    parts = (
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
    )
    body = parts.encode() + content + f"\r\n--{BOUNDARY}--\r\n".encode()
    return {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}, body
