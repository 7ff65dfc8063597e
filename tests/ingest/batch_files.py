"""Batch files for the tests, and what came of them."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from penstock.bus.connect import connect_bus
from penstock.config.settings import BusSettings
from penstock.local.stack import Stack
from penstock.messages import Result, decode_message
from penstock.names import Pipeline


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


def count_ids(rows: list[dict[str, Any]]) -> Counter[str]:
    return Counter(one["custom_id"] for one in rows)


def each_once(rows: list[dict[str, Any]], count: int) -> bool:
    return count_ids(rows) == Counter({f"row-{number}": 1 for number in range(count)})


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
