"""What a check of the installation found, and what to do about it."""

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "note", "fail"]


@dataclass(frozen=True)
class Finding:
    """One line of the report, and what to do about it."""

    state: State
    subject: str
    detail: str
    advice: str = ""
