"""An upload as it arrives: the fields of a form, and its file in pieces that are not buffered."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from fastapi import Request
from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from penstock.ingest.errors import ApiError

MAX_FIELDS, MAX_FIELD_BYTES, MAX_HEADER_BYTES = 16, 4096, 4096


@dataclass
class FormPart:
    """One part of a form."""

    headers: dict[str, bytes] = field(default_factory=dict)
    name: str = ""
    filename: str | None = None


@dataclass
class FormPiece:
    """A piece of a part's content; the last piece of a part is empty."""

    part: FormPart
    data: bytes


def _invalid_form(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_form")


class _FormParser:
    """Turns the callbacks of the form's parser into pieces."""

    def __init__(self, boundary: bytes) -> None:
        self.pieces: list[FormPiece] = []
        self._part, self._name, self._value, self._num_parts = FormPart(), b"", b"", 0
        self.is_whole = False
        self.parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part, "on_part_data": self._add_data, "on_part_end": self._end_part,
                "on_header_field": self._header_name, "on_header_value": self._header_value,
                "on_header_end": self._header_end, "on_headers_finished": self._headers_end, "on_end": self._end_form,
            },
        )  # fmt: skip

    def _begin_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_FIELDS:
            raise _invalid_form(f"A form may have {MAX_FIELDS} parts.")
        self._part = FormPart()

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._name = self._check_header_length(self._name + data[start:end])

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value = self._check_header_length(self._value + data[start:end])

    def _header_end(self) -> None:
        self._part.headers[self._name.decode("latin-1").lower()] = self._value
        self._name, self._value = b"", b""

    def _headers_end(self) -> None:
        _, options = parse_options_header(self._part.headers.get("content-disposition", b""))
        self._part.name = options.get(b"name", b"").decode("utf-8", "replace")
        if b"filename" in options:
            self._part.filename = options[b"filename"].decode("utf-8", "replace")

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        self.pieces.append(FormPiece(self._part, data[start:end]))

    def _end_part(self) -> None:
        self.pieces.append(FormPiece(self._part, b""))

    def _end_form(self) -> None:
        self.is_whole = True

    @staticmethod
    def _check_header_length(text: bytes) -> bytes:
        if len(text) > MAX_HEADER_BYTES:
            raise _invalid_form("A part's header is too long.")
        return text


class Upload:
    """A form with one file. Raises `ApiError` 400 if it is not one."""

    def __init__(self, request: Request) -> None:
        self.fields: dict[str, str] = {}
        self.filename = ""
        self._pieces = _read_pieces(request)

    async def next_file(self) -> bool:
        """Read up to the next part that is a file; False at the end. Read its content before the next call."""
        value = b""
        async for piece in self._pieces:
            if piece.part.filename is not None:
                if piece.part.name != "file":
                    raise _invalid_form("The file's part must be named 'file'.", "file")
                self.filename = piece.part.filename
                self._first = piece
                return True
            value += piece.data
            if len(value) > MAX_FIELD_BYTES:
                raise _invalid_form(f"A field may have {MAX_FIELD_BYTES:,} bytes.", piece.part.name)
            if not piece.data:
                self.fields[piece.part.name] = value.decode("utf-8", "replace")
                value = b""
        return False

    async def read_file(self) -> AsyncIterator[bytes]:
        """Yield the content of the current file."""
        piece = self._first
        while piece.data:
            yield piece.data
            piece = await anext(self._pieces)


async def _read_pieces(request: Request) -> AsyncIterator[FormPiece]:
    kind, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 0 < len(boundary) <= 256:
        raise _invalid_form("The body must be multipart/form-data.")
    form = _FormParser(boundary)
    async for chunk in request.stream():
        try:
            form.parser.write(chunk)
        except MultipartParseError as error:
            raise _invalid_form(f"The form cannot be read: {error}") from None
        for piece in form.pieces:
            yield piece
        form.pieces.clear()
    if not form.is_whole:
        raise _invalid_form("The form has no end.")
