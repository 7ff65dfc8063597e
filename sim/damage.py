"""Damages messages: a seeded grammar of what broken senders write."""

import json
import os
import random
from typing import Any

VALUES: tuple[Any, ...] = (
    None, True, False, "", "\ud800", "a\udfffb", "\x00", "9" * 400, "x" * 20_000, [], {}, [[[[]]]],
    {"\ud800": "\udc00"}, 0, -1, 2**31, 2**63, 2**70, -(2**70), 10**400, 1e308, -0.0, 0.5,
    float("nan"), float("inf"), float("-inf"),
)  # fmt: skip
DEPTH = 3000

NUM_DAMAGED = int(os.environ.get("TEST_NUM_DAMAGED", "1000"))
"""How many damaged replies or messages a test sends; 20,000 take an hour."""


class Damage:
    """One seed's damage: the same calls give the same bytes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def pick_value(self) -> Any:
        """Return a value that hardly any field may have."""
        return self.random.choice(VALUES)

    def damage_value(self, value: Any) -> Any:
        """Return a copy of a JSON value, in which one place is replaced, removed, doubled or nested."""
        is_inside = self.random.random() < 0.85
        if isinstance(value, dict) and value and is_inside:
            return self._damage_fields(value)
        if isinstance(value, list) and value and is_inside:
            return self._damage_items(value)
        if isinstance(value, str) and self.random.random() < 0.4:
            place = self.random.randint(0, len(value))
            return value[:place] + self.random.choice(["\ud800", "\udc00", "\x00", "\u2028", "😀"]) + value[place:]
        return [value] if self.random.random() < 0.1 else self.pick_value()

    def _damage_fields(self, value: dict[str, Any]) -> dict[str, Any]:
        name = self.random.choice(list(value))
        match self.random.randrange(8):
            case 0:
                return {other: value[other] for other in value if other != name}
            case 1:
                return {**value, self.random.choice(["", "\ud800", "id", name * 2]): self.pick_value()}
        return {**value, name: self.damage_value(value[name])}

    def _damage_items(self, value: list[Any]) -> list[Any]:
        index = self.random.randrange(len(value))
        match self.random.randrange(6):
            case 0:
                return value[:index] + value[index + 1 :]
            case 1:
                return [*value, value[index]]
        return [*value[:index], self.damage_value(value[index]), *value[index + 1 :]]

    def damage_bytes(self, raw: bytes) -> bytes:
        """Return bytes that are cut, doubled, not UTF-8, or have a value that is nested deeply."""
        start = self.random.randint(0, len(raw))
        end = self.random.randint(start, len(raw))
        match self.random.randrange(6):
            case 0:
                return raw[:start]
            case 1:
                return raw[:end] + raw[start:]
            case 2:
                return raw[:start] + self.random.choice([b"\xff", b"\xc3", b"\xed\xa0\x80", b"\x00"]) + raw[start:]
            case 3:
                return raw[:start] + raw[end:]
            case 4:
                return raw.replace(b":", b":" + b"[" * DEPTH, 1)
        return raw[:start] + bytes(self.random.randrange(256) for _ in range(4)) + raw[start:]

    def encode(self, value: Any) -> bytes:
        """Return the JSON of a damaged value; now and then its bytes are damaged too, or alone."""
        kind = self.random.random()
        if kind < 0.8:
            value = self.damage_value(value)
        raw = json.dumps(value).encode()
        return self.damage_bytes(raw) if kind > 0.7 else raw
