"""The lines of a batch file, and their checks."""

import hashlib
import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from penstock.errors import PenstockError
from penstock.ingest.batch.shapes import LineError
from penstock.ingest.openai.embeddings import EMBEDDINGS
from penstock.ingest.openai.tokens import CHARS_PER_TOKEN
from penstock.messages import MAX_REQUEST_BYTES, Sampling, Usage

CHUNK_BYTES = 2**20
"""How many bytes are read or written at once."""
MAX_LINE_BYTES = MAX_REQUEST_BYTES
MAX_LISTED_ERRORS = 100
TOKENS_PER_IMAGE = 1000
"""An estimate: models make a few hundred to a few thousand tokens of a photograph."""
_DATA_URL = re.compile(rb'(?<="image_url":)\s*"data:image/[^"]*"|(?<="url":)\s*"data:image/[^"]*"')
"""The value of a part with an image. Within a text its key would have escaped quotes."""
NO_USAGE = Usage()


@dataclass(frozen=True)
class BatchRow:
    """One request of a batch file."""

    number: int
    """The number of its line, from 1."""
    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RowTerms:
    """A batch, as far as one of its rows is concerned."""

    name: str
    """It is in the ids of all requests, and never changes, so asking a row again joins the same request."""
    tenant: str = "default"
    key: str = ""
    """The id of the API key that its rows are counted by."""
    weight: float = 1.0
    deadline: float | None = None
    max_request_tokens: int | None = None
    """The most output tokens that one request may ask for."""
    models: frozenset[str] | None = None
    """The models that its rows may name, as they were when it was accepted; None: it is not known which exist."""
    regions: frozenset[str] | None = None
    """The regions that may answer them, in topics of their tenant's own; None: all, in those of all tenants."""


@dataclass(frozen=True)
class LentRow:
    """A row that another region may answer."""

    terms: RowTerms
    row: BatchRow


@dataclass(frozen=True)
class FinishedRow:
    """A row that is finished; `line` goes to the output if `is_ok`, else to the error file."""

    number: int
    line: bytes
    is_ok: bool
    usage: Usage = NO_USAGE


class InvalidLine(PenstockError):
    """A line because of which the whole file is refused."""

    def __init__(self, error: LineError) -> None:
        super().__init__(f"line {error.line}: {error.message}")
        self.error = error


async def split_lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[tuple[int, bytes]]:
    """Yield the lines that are not blank, with their numbers.

    Raises `InvalidLine` for one that is too long, and for the first one of a file that is not in UTF-8.
    """
    number, rest = 0, b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            number += 1
            if line.strip():
                _check_encoding(number, line)
                yield number, line
        if len(rest) > MAX_LINE_BYTES:
            raise invalid_line(number + 1, "line_too_long", f"A line may have {MAX_LINE_BYTES:,} bytes.")
    if rest.strip():
        _check_encoding(number + 1, rest)
        yield number + 1, rest


def _check_encoding(number: int, line: bytes) -> None:
    """Raise `InvalidLine` for a first line in UTF-16 or UTF-32: what ends a line there is no line break of UTF-8."""
    if number == 1 and not (encoding := json.detect_encoding(line)).startswith("utf-8"):
        raise invalid_line(1, "invalid_json_line", f"The file is in {encoding.upper()}: write it in UTF-8.")


def invalid_line(line: int, code: str, message: str, param: str | None = None) -> InvalidLine:
    """Return an `InvalidLine`."""
    return InvalidLine(LineError(code=code, message=message, line=line, param=param))


def parse_row(number: int, line: bytes, urls: tuple[str, ...]) -> BatchRow:
    """Return a line's request. Its body is checked later, so a wrong one fails alone. Raises `InvalidLine`."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        raise invalid_line(number, "invalid_json_line", "This line is not parseable as valid JSON.") from None
    if not isinstance(entry, dict):
        raise invalid_line(number, "invalid_json_line", "This line is not a JSON object.")
    custom_id, body = entry.get("custom_id"), entry.get("body")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= 512:
        raise invalid_line(
            number, "invalid_custom_id", "A 'custom_id' of 1 to 512 characters is required.", "custom_id"
        )
    if entry.get("method") != "POST":
        raise invalid_line(number, "invalid_method", "The 'method' must be 'POST'.", "method")
    if entry.get("url") not in urls:
        raise invalid_line(number, "mismatched_url", f"The 'url' must be {' or '.join(map(repr, urls))}.", "url")
    if not isinstance(body, dict):
        raise invalid_line(number, "missing_required_parameter", "A 'body' that is an object is required.", "body")
    return BatchRow(number, custom_id, entry["url"], body)


def estimate_row_tokens(row: BatchRow, line: bytes) -> int:
    """Estimate the tokens of a request, prompt and output, from its length and its limit."""
    line, num_images = _DATA_URL.subn(b"", line)
    num_tokens = len(line) // CHARS_PER_TOKEN + num_images * TOKENS_PER_IMAGE
    if row.url == EMBEDDINGS.path:
        return num_tokens
    limits = [row.body.get(name) for name in ("max_completion_tokens", "max_output_tokens", "max_tokens")]
    max_tokens = next((one for one in limits if isinstance(one, int) and one > 0), Sampling().max_tokens)
    count = row.body.get("n")
    return num_tokens + max_tokens * (count if isinstance(count, int) and count > 1 else 1)


def count_inputs(row: BatchRow) -> int:
    """Return how many texts a request for vectors has; 0 for other requests."""
    found = row.body.get("input") if row.url == EMBEDDINGS.path else []
    return len(found) if isinstance(found, list) else 1


async def check_lines(
    lines: AsyncIterator[tuple[int, bytes]], urls: tuple[str, ...], max_lines: int
) -> tuple[int, list[LineError]]:
    """Return how many requests a file has, and the errors because of which it is refused."""
    total, num_inputs, errors, seen = 0, 0, list[LineError](), set[bytes]()
    try:
        async for number, line in lines:
            total += 1
            if total > max_lines:
                errors.append(LineError(code="too_many_lines", message=f"A batch may have {max_lines:,} requests."))
                break
            try:
                row = parse_row(number, line, urls)
            except InvalidLine as found:
                errors.append(found.error)
            else:
                num_inputs += count_inputs(row)
                if num_inputs > max_lines:
                    message = f"A batch may have {max_lines:,} inputs of embeddings in all its requests."
                    errors.append(LineError(code="too_many_inputs", message=message, line=number))
                    break
                digest = hashlib.blake2b(row.custom_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
                if digest in seen:
                    message = f"The custom_id {row.custom_id[:64]!r} was used before in this file."
                    errors.append(invalid_line(number, "duplicate_custom_id", message, "custom_id").error)
                seen.add(digest)
            if len(errors) == MAX_LISTED_ERRORS:
                break
    except InvalidLine as found:
        errors.append(found.error)
    if not total and not errors:
        errors.append(LineError(code="empty_file", message="The file has no requests."))
    return total, errors
