"""Ids of files and batches: when they were made, then chance. So a list in the order of names is one by age."""

import re
import secrets
import time
from typing import Literal

Prefix = Literal["file-", "batch_"]
_ID = re.compile(r"(file-|batch_)([0-9a-f]{12})[0-9a-f]{20}")


def new_id(prefix: Prefix) -> str:
    """The time in milliseconds and 80 random bits, in hex."""
    return f"{prefix}{time.time_ns() // 1_000_000:012x}{secrets.token_hex(10)}"


def is_id(text: str, prefix: Prefix) -> bool:
    """Whether `text` may be such an id: only then it becomes a part of a path."""
    match = _ID.fullmatch(text)
    return match is not None and match[1] == prefix


def made_at(some_id: str) -> float:
    """When an id was made, in seconds since the epoch; 0 for what is no id."""
    match = _ID.fullmatch(some_id)
    return int(match[2], 16) / 1000 if match else 0.0
