"""Pictures from files that users sent: PNG, JPEG, WebP and a GIF's first frame, and nothing else.

Only the header is read before the size is known to be allowed: a file of kilobytes may be a picture of gigabytes.
"""

import io
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from penstock.errors import DependencyMissing, InvalidRequest, PenstockError
from penstock.messages import Detail

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_RATIO = 200
"""Processors of Qwen's models resize no picture that is longer than so many times its other side."""
LOW_EDGE = 512
"""A picture of low detail has no longer side when a model sees it."""
_ORIENTATION = 0x0112
_FLIPS = {2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM"}
_TURNS = {5: "TRANSPOSE", 6: "ROTATE_270", 7: "TRANSVERSE", 8: "ROTATE_90"}
"""Pillow's transpositions that set a picture upright, by EXIF's orientation. These exchange width and height."""


def measure_picture(data: bytes, max_pixels: int, detail: Detail | None) -> tuple[int, int]:
    """Return a picture's width and height in pixels, as `decode_picture` returns it. Raises `InvalidRequest`."""
    image, turn = _open(data, max_pixels)
    width, height = image.size
    return _fit_detail((height, width) if turn in _TURNS.values() else (width, height), detail)


def decode_picture(data: bytes, max_pixels: int, detail: Detail | None) -> "Picture":
    """Return a picture in RGB, turned upright, over white where it is transparent, in the size of its detail.

    Raises `InvalidRequest`.
    """
    from PIL import Image

    image, turn = _open(data, max_pixels)
    try:
        image.load()
        if image.mode.startswith(("I", "F")):  # 16 bits of grey, which a conversion would cut off at 255
            image = image.convert("I").point(lambda level: level * (1 / 257)).convert("L")
        if image.has_transparency_data:
            layer = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), layer)
        image = image.convert("RGB")
        image = image.transpose(getattr(Image.Transpose, turn)) if turn else image
        size = _fit_detail(image.size, detail)
        return image if size == image.size else image.resize(size)
    except MemoryError:
        raise
    except Exception as error:  # decoders raise what they like for damaged files
        raise _make_refusal(error) from None


def _fit_detail(size: tuple[int, int], detail: Detail | None) -> tuple[int, int]:
    """Return the width and height in which a model sees a picture: only of low detail it is made smaller."""
    longest = max(size)
    if detail != "low" or longest <= LOW_EDGE:
        return size
    width, height = ((side * LOW_EDGE + longest // 2) // longest for side in size)
    return width, height


def _open(data: bytes, max_pixels: int) -> tuple["Picture", str]:
    """Return a picture of which the header was read, and how it is to be turned."""
    try:
        from PIL import Image
    except ImportError as error:
        raise DependencyMissing(f"pictures need pip install 'penstock[images]' ({error})") from None
    try:
        image: Any = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = image.size
        if width * height > max_pixels:
            raise InvalidRequest(f"a picture of {width:,} by {height:,} pixels; it may have {max_pixels:,}")
        if max(width, height) > MAX_RATIO * min(width, height):
            raise InvalidRequest(
                f"a picture of {width:,} by {height:,} pixels; a side may be {MAX_RATIO} times the other"
            )
        return image, _find_turn(image)
    except (MemoryError, PenstockError):
        raise
    except Exception as error:
        raise _make_refusal(error) from None


def _find_turn(image: Any) -> str:
    """Return how a picture is to be turned. EXIF behind the pixels is not read, and damaged EXIF turns nothing."""
    from PIL import Image

    exif = Image.Exif()
    with suppress(Exception):
        exif.load(image.info["exif"])
        return (_FLIPS | _TURNS).get(int(exif[_ORIENTATION]), "")
    return ""


def _make_refusal(error: Exception) -> InvalidRequest:
    what = str(error).partition(": <")[0] if "BytesIO" in str(error) else str(error)
    return InvalidRequest(f"a picture must be a PNG, JPEG, WebP or GIF file that can be read ({what[:200]})")
