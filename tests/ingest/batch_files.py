"""Batch files for the tests, and what came of them."""

import json
from collections import Counter
from pathlib import Path
from typing import Any


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
