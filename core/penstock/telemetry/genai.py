"""Names of OpenTelemetry's conventions for generative AI."""

from collections.abc import Mapping
from typing import Literal

from opentelemetry.util.types import AttributeValue

from penstock.messages import Request, Usage
from penstock.names import OPERATION_HEADER
from penstock.telemetry.catalog import PROVIDER

Operation = Literal["chat", "text_completion"]


def get_operation(request: Request | None) -> Operation:
    """Return `gen_ai.operation.name` of a request."""
    return "chat" if request is not None and request.messages is not None else "text_completion"


def read_operation(headers: Mapping[str, str]) -> Operation:
    """Return `gen_ai.operation.name` of a job, from its headers."""
    return "chat" if headers.get(OPERATION_HEADER) == "chat" else "text_completion"


def build_request_attributes(operation: Operation, model: str | None) -> dict[str, AttributeValue]:
    """Return the attributes of a span that stands for a request."""
    named: dict[str, AttributeValue] = {} if model is None else {"gen_ai.request.model": model}
    return {"gen_ai.operation.name": operation, "gen_ai.provider.name": PROVIDER} | named


def build_usage_attributes(usage: Usage, finish_reason: str) -> dict[str, AttributeValue]:
    """Return the attributes of a span that ends with the request's end."""
    return {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.response.finish_reasons": (finish_reason,),
    }
