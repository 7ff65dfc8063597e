"""Names of OpenTelemetry's conventions for generative AI."""

from collections.abc import Mapping
from typing import Literal

from opentelemetry.util.types import AttributeValue

from penstock.messages import EndEvent, Request
from penstock.names import OPERATION_HEADER
from penstock.telemetry.catalog import PROVIDER

Operation = Literal["chat", "text_completion"]
OPERATION_ATTRIBUTE = "gen_ai.operation.name"


def get_operation(request: Request | None) -> Operation:
    """Return `gen_ai.operation.name` of a request."""
    return "chat" if request is not None and request.messages is not None else "text_completion"


def read_operation(headers: Mapping[str, str]) -> Operation:
    """Return `gen_ai.operation.name` of a job, from its headers."""
    return "chat" if headers.get(OPERATION_HEADER) == "chat" else "text_completion"


def build_attributes(operation: Operation, model: str, end: EndEvent) -> dict[str, AttributeValue]:
    """Return the attributes of the one span that stands for a whole request, which has ended."""
    failed: dict[str, AttributeValue] = {} if end.error is None else {"error.type": end.error.code}
    return failed | {
        OPERATION_ATTRIBUTE: operation,
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.usage.input_tokens": end.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": end.usage.completion_tokens,
        "gen_ai.response.finish_reasons": (end.finish_reason,),
    }
