"""OpenAI's endpoints as data: bodies in, pipeline requests out, answers and streaming pieces back. No I/O."""

from collections.abc import Mapping
from typing import Any

from ingest.openai.chat import CHAT
from ingest.openai.completions import COMPLETIONS
from ingest.openai.endpoint import Ask, Card, Endpoint, card_of
from ingest.openai.responses import RESPONSES

ENDPOINTS: Mapping[str, Endpoint[Any]] = {CHAT.path: CHAT, COMPLETIONS.path: COMPLETIONS, RESPONSES.path: RESPONSES}
"""By path."""

__all__ = ["CHAT", "COMPLETIONS", "ENDPOINTS", "RESPONSES", "Ask", "Card", "Endpoint", "card_of"]
