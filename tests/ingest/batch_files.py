"""Batch files for the tests, a client that answers their rows, and what came of them."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Unpack

from penstock.bus.connect import connect_bus
from penstock.client.aio import AsyncClient
from penstock.client.core import Answer, RequestFields
from penstock.config.addresses import Addresses
from penstock.config.settings import BusSettings
from penstock.errors import BusUnavailable
from penstock.ingest.batch.answer import ModelPipeline
from penstock.ingest.batch.batches import BatchSpec, BatchStore
from penstock.ingest.batch.shapes import NewBatch
from penstock.ingest.batch.store import FileStore
from penstock.ingest.tenants import Caller
from penstock.local.stack import Stack
from penstock.messages import Result, Timings, Usage, decode_message
from penstock.names import Pipeline
from penstock.objects import ObjectStorage
from sim.waiting import wait_for


def row(number: int, max_tokens: int = 6, **changes: Any) -> dict[str, Any]:
    body = {
        "model": "demo", "messages": [{"role": "user", "content": f"In the beginning of day {number}"}],
        "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, **changes,
    }  # fmt: skip
    return {"custom_id": f"row-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in rows)


def read(content: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in content.splitlines()]


def read_file(path: Path) -> list[dict[str, Any]]:
    return read(path.read_bytes()) if path.exists() else []


def each_once(rows: list[dict[str, Any]], count: int) -> bool:
    return Counter(one["custom_id"] for one in rows) == Counter({f"row-{number}": 1 for number in range(count)})


def finished(output: Path) -> int:
    """How many rows the journal beside an output has."""
    journal = output.with_name(f"{output.name}.journal")
    entries = [json.loads(line) for line in journal.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    return sum(len(entry.get("ok", ())) + len(entry.get("failed", ())) for entry in entries)


def run_of(output: Path) -> str:
    """The name of an output's run, as it is in the ids of its requests."""
    return str(json.loads(output.with_name(f"{output.name}.journal").read_bytes().splitlines()[0])["run"])


def result_ids(stack: Stack, beginning: str) -> list[str]:
    """The ids of all results in the topic that begin so."""
    found = connect_bus(stack.addresses, BusSettings()).read_all(Pipeline(stack.addresses.pipeline).results_topic)
    return [one for message in found if (one := decode_message(Result, message.value).id).startswith(beginning)]


def wait_for_results(stack: Stack, beginning: str, count: int) -> list[str]:
    """The ids that begin so, once there are `count`: a stream ends a moment before its result is in the topic."""
    wait_for(lambda: len(result_ids(stack, beginning)) >= count, f"{count} results")
    return result_ids(stack, beginning)


async def create_batch(
    objects: ObjectStorage, caller: Caller, content: bytes, models: list[str] | None = None
) -> BatchSpec:
    """Make a batch of a gateway; nobody works on it yet."""

    async def chunks() -> AsyncIterator[bytes]:
        yield content

    file = await FileStore(objects).save_file(caller.tenant, "in.jsonl", "batch", chunks())
    new = NewBatch(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
    made = await BatchStore(objects).create_batch(caller, new, file, models)
    spec = await BatchStore(objects).find_spec(caller.tenant, made.id)
    assert spec is not None
    return spec


class ScriptedClient(AsyncClient):
    """A client whose pipeline answers at once while it is open, and not at all while it is closed."""

    def __init__(self) -> None:
        super().__init__(Addresses(pipeline="scripted", stream_url="redis://127.0.0.1:1/0"))
        self.submitted: list[str] = []
        self.fields: list[RequestFields] = []
        self.answered: list[str] = []
        self.cancelled: list[str] = []
        self.failures: list[Exception] = []
        """The next submits and results fail with these."""
        self.is_open = asyncio.Event()
        self.is_open.set()
        self.close_after: int | None = None
        """It closes after so many answers."""
        self.num_waiting = self.max_waiting = 0
        self.response_template: dict[str, Any] | None = None
        self.texts: list[str] = []
        """What the tokens of each answer say; otherwise an answer says whose it is."""

    async def find(self, _: str) -> ModelPipeline:
        """Return the pipeline of any model."""
        return ModelPipeline(self, self.response_template)

    async def submit(
        self, prompt: str | None = None, *, key: str = "", own_topics: bool = False, **fields: Unpack[RequestFields]
    ) -> str:
        if self.failures and isinstance(self.failures[0], BusUnavailable):
            raise self.failures.pop(0)
        self.submitted.append(str(fields["id"]))
        self.fields.append(fields)
        return self.submitted[-1]

    async def result(self, request_id: str, timeout_s: float = 60.0) -> Answer:
        self.num_waiting += 1
        self.max_waiting = max(self.max_waiting, self.num_waiting)
        try:
            await asyncio.sleep(0)  # so that others can be asked
            if self.close_after is not None and len(self.answered) >= self.close_after:
                self.is_open.clear()
            await self.is_open.wait()
            if self.failures:
                raise self.failures.pop(0)
        finally:
            self.num_waiting -= 1
        self.answered.append(request_id)
        usage = Usage(prompt_tokens=3, completion_tokens=2)
        texts = self.texts or [f"of {request_id}"]
        return Answer(request_id, "".join(texts), [1, 2], "stop", usage, Timings(), [], token_texts=texts)

    async def cancel(self, request_id: str) -> bool:
        self.cancelled.append(request_id)
        return True
