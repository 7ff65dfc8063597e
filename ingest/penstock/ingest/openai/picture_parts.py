"""The content of messages: text, and for models that see, pictures as clients give them."""

import base64
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from penstock.ingest.errors import ApiError
from penstock.ingest.openai.body import invalid_value, unsupported_value
from penstock.messages import Detail

PICTURE_TYPES = ("image_url", "input_image")
"""Parts with a picture, in chats and in responses."""
DATA_URL_FORM = "a data URL has the form data:image/png;base64,…"
_KEPT = re.compile(r"data:[^,]{0,99};digest,[0-9a-f]{64}")


class GivenPicture(NamedTuple):
    """A picture as a client gives it: by an address or a data URL, or as one of its files."""

    url: str
    file_id: str
    detail: Detail | None
    param: str
    """Where it stands in the body."""


class KeptPicture(str):
    """Stands for a data URL in what a kept response was asked: `data:image/png;digest,`, and the digest of the file.

    Only what a gateway has kept becomes one. A client's text never does, so nobody asks for a picture by its digest.
    """

    __slots__ = ()

    @classmethod
    def of_kept(cls, address: str) -> str:
        """Return an address out of what was kept, as one of these where it stands for a data URL."""
        return cls(address) if _KEPT.fullmatch(address) else address

    @property
    def digest(self) -> str:
        """The SHA-256 of the file, in hex."""
        return self.rpartition(",")[2]

    def write_url(self, data: bytes) -> str:
        """Return the data URL of the file."""
        return f"{self.partition(';digest,')[0]};base64,{base64.b64encode(data).decode()}"


def shorten_url(url: str, digest: str) -> str:
    """Return what stands for a data URL in what is kept."""
    kind = url[5 : url.index(",")].lower().removesuffix(";base64")
    return f"data:{kind[:99]};digest,{digest}"


def change_addresses(items: Sequence[dict[str, Any]], change: Callable[[str], str]) -> list[dict[str, Any]]:
    """Return the items of a response with what `change` makes of the addresses of their pictures."""

    def change_part(part: Any) -> Any:
        match part:
            case {"type": kind} if kind not in PICTURE_TYPES:
                return part
            case {"image_url": str(address)}:
                return part | {"image_url": change(address)}
            case {"image_url": {"url": str(address)}}:
                return part | {"image_url": part["image_url"] | {"url": change(address)}}
        return part

    return [
        item | {name: [*map(change_part, item[name])] for name in ("content", "output") if type(item.get(name)) is list}
        for item in items
    ]


def refuse_kept_addresses(items: Sequence[dict[str, Any]]) -> None:
    """Raise `ApiError` 400 for what a client gives in the form of what gateways keep: it would be read back."""

    def refuse(address: str) -> str:
        if isinstance(KeptPicture.of_kept(address), KeptPicture):
            raise ApiError(400, f"Invalid value for 'input': {DATA_URL_FORM}", param="input", code="invalid_image")
        return address

    change_addresses(items, refuse)


GivenContent = str | list[str | GivenPicture]
"""A text, or texts and pictures in their order."""


def read_content(
    content: str | Sequence[dict[str, Any]] | None, param: str, kinds: Sequence[str] = ("text",), *, sees: bool = False
) -> GivenContent:
    """Return a message's content: its text, or a list where a model that `sees` gets pictures with it.

    Raises `ApiError` 400 for other content.
    """
    if isinstance(content, str):
        return content
    parts = list[str | GivenPicture]()
    for index, part in enumerate(content or ()):
        if sees and part.get("type") in PICTURE_TYPES:
            parts.append(_read_picture(part, f"{param}.{index}"))
            continue
        if part.get("type") not in kinds:
            what = f"content of type {part.get('type')!r} is not supported, only text{' and images' if sees else ''}."
            raise unsupported_value(f"{param}.{index}", what)
        field = "refusal" if part["type"] == "refusal" else "text"
        if not isinstance(part.get(field), str):
            raise unsupported_value(f"{param}.{index}.{field}", f"a part of a message has its text in '{field}'.")
        if part.get("image_url") is not None:
            raise unsupported_value(f"{param}.{index}.image_url", "a part with a text has no image.")
        parts.append(part[field])
    return join_texts(parts)


def list_pictures(requests: Sequence[Mapping[str, Any]]) -> list[GivenPicture]:
    """Return the pictures in the turns that all these requests share."""
    contents = [turn["content"] for turn in requests[0].get("messages") or () if not isinstance(turn["content"], str)]
    return [part for content in contents for part in content if isinstance(part, GivenPicture)]


def join_texts(parts: Sequence[str | GivenPicture]) -> GivenContent:
    """Return parts in which no two texts follow each other; one text if there is nothing else."""
    joined = list[str | GivenPicture]()
    for part in parts:
        if isinstance(part, str) and joined and isinstance(joined[-1], str):
            joined[-1] += part
        elif part != "":
            joined.append(part)
    return joined if any(isinstance(part, GivenPicture) for part in joined) else "".join(map(str, joined))


def read_text(content: str | Sequence[dict[str, Any]] | None, param: str, kinds: Sequence[str] = ("text",)) -> str:
    """Return a message's text. Raises `ApiError` 400 for other content."""
    text = read_content(content, param, kinds)
    assert isinstance(text, str), "pictures are refused"
    return text


def _read_picture(part: Mapping[str, Any], param: str) -> GivenPicture:
    """Return the picture of a part: of a chat's, whose address is in an object, or of a response's."""
    address, file_id, detail = part.get("image_url"), part.get("file_id"), part.get("detail")
    if isinstance(address, dict):
        param, detail, address = f"{param}.image_url", address.get("detail", detail), address.get("url")
    if (address is None) == (file_id is None) or not isinstance(address or file_id, str):
        raise invalid_value(param, "an image is given by 'image_url', an https address or a data URL, or by 'file_id'")
    if detail not in (None, "auto", "low", "high"):
        raise invalid_value(f"{param}.detail", "it must be 'auto', 'low' or 'high'")
    return GivenPicture(address or "", file_id or "", None if detail == "auto" else detail, param)
