"""Tenants: who calls, and what they may do."""

from dataclasses import dataclass

from penstock.names import CLASSES, PriorityClass


@dataclass(frozen=True)
class Caller:
    """Who makes a request: derived from the API key alone, never from what the request says."""

    tenant: str = "default"
    classes: tuple[PriorityClass, ...] = CLASSES
    """Which classes its requests may have."""
    weight: float = 1.0
    """Its share of the pipeline where tenants compete."""
    requests_per_min: int | None = None
    tokens_per_min: int | None = None
    """Prompt and output tokens together."""
    max_request_tokens: int | None = None
    """The most output tokens that one request may ask for."""
