"""All endpoints that make requests, and what follows from a path: its prompt's parameter, its errors' form."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from penstock.ingest import openai
from penstock.ingest.anthropic.messages import MESSAGES
from penstock.ingest.cohere.embed import COHERE_EMBED
from penstock.ingest.cohere.rerank import RERANKS, SCORE
from penstock.ingest.errors import ApiError
from penstock.ingest.openai import ApiEndpoint

ENDPOINTS: Mapping[str, ApiEndpoint[Any]] = {
    **openai.ENDPOINTS, MESSAGES.path: MESSAGES, COHERE_EMBED.path: COHERE_EMBED, **RERANKS, SCORE.path: SCORE,
}  # fmt: skip
"""All endpoints, by path. Batches have those of OpenAI alone."""


def find_endpoint(path: str) -> ApiEndpoint[Any] | None:
    """Return the endpoint at a path, or that the path lies under; None for other paths."""
    return next((one for one in ENDPOINTS.values() if path == one.path or path.startswith(f"{one.path}/")), None)


def find_prompt_field(path: str) -> str | None:
    """Return the parameter that has the prompt at an endpoint or at paths under it; None for other paths."""
    found = find_endpoint(path)
    return None if found is None else found.prompt_field


def make_error_body(path: str, error: ApiError) -> BaseModel:
    """Return the body of an error at a path."""
    found = find_endpoint(path)
    return error.body if found is None else found.make_error_body(error)
