"""OpenAI's endpoints as data: bodies in, pipeline requests out, answers and stream events back. No I/O."""

from collections.abc import Mapping
from typing import Any

from penstock.ingest.openai.chat import CHAT
from penstock.ingest.openai.completions import COMPLETIONS
from penstock.ingest.openai.embeddings import EMBEDDINGS
from penstock.ingest.openai.endpoint import ApiEndpoint, StreamMeta, SubmitArgs, make_stream_meta
from penstock.ingest.openai.responses import RESPONSES

ENDPOINTS: Mapping[str, ApiEndpoint[Any]] = {one.path: one for one in (CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS)}
"""All of OpenAI's endpoints, by path."""


__all__ = [
    "CHAT",
    "COMPLETIONS",
    "EMBEDDINGS",
    "ENDPOINTS",
    "RESPONSES",
    "ApiEndpoint",
    "StreamMeta",
    "SubmitArgs",
    "make_stream_meta",
]
