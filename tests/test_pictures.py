"""Pictures: hostile files have a typed error each, allowed ones look as they should, and their tokens are counted."""

import hashlib
import io
import math
import random
import struct
import sys
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
import redis
from PIL import Image

from penstock.config.addresses import Addresses
from penstock.config.settings import PictureSettings, RecordSettings
from penstock.errors import InvalidRequest, PictureGone, StorageUnavailable
from penstock.messages import Detail
from penstock.names import picture_key
from penstock.objects import ObjectStorage
from penstock.pictures import store as store_module
from penstock.pictures.decoding import decode_picture, measure_picture
from penstock.pictures.store import FOLDER, PictureStore, delete_old_pictures
from penstock.pictures.tokens import (
    PICTURE_TOKENS,
    EdgeTokens,
    FixedTokens,
    GridTokens,
    PictureTokens,
    SplitTokens,
    TileTokens,
    count_picture_tokens,
)
from tests.silent_store import serve_silence

MAX_PIXELS = 2_000_000
RED, BLUE = (255, 0, 0), (0, 0, 255)


def save(image: Image.Image, kind: str, **how: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **how)
    return out.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, *chunks: bytes, depth: int = 8, color: int = 2) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(chunks) + chunk(b"IEND", b"")


def webp(width: int, height: int) -> bytes:
    canvas = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"VP8X" + struct.pack("<I", 10) + bytes(4) + canvas
    return b"RIFF" + struct.pack("<I", 4 + len(body)) + b"WEBP" + body


def make_picture() -> Image.Image:
    """The left half is red, the right one blue."""
    image = Image.new("RGB", (64, 32), RED)
    image.paste(BLUE, (32, 0, 64, 32))
    return image


PICTURE = make_picture()
JPEG, PNG, WEBP, GIF = (save(PICTURE, kind) for kind in ("JPEG", "PNG", "WEBP", "GIF"))
ZEROS = zlib.compress(bytes(20_000_000))
SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"><image href="file:///etc/passwd"/></svg>'
HOSTILE: dict[str, bytes] = {
    "nothing": b"",
    "a text": b"hello",
    "zeros": bytes(4096),
    "SVG": SVG,
    "SVG behind a byte order mark": b"\xef\xbb\xbf" + SVG,
    "XML with an entity bomb": b'<?xml version="1.0"?><!DOCTYPE a [<!ENTITY b "bbbb">]><svg>&b;</svg>',
    "FITS": b"SIMPLE  =                    T".ljust(2880),
    "FITS with a GZIP table": b"XTENSION= 'BINTABLE'".ljust(5760),
    "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    "PDF": b"%PDF-1.7\n1 0 obj\n",
    "TIFF": save(PICTURE, "TIFF"),
    "BMP": save(PICTURE, "BMP"),
    "ICO": save(PICTURE, "ICO"),
    "PPM": save(PICTURE, "PPM"),
    "JPEG 2000's mark": b"\x00\x00\x00\x0cjP  \r\n\x87\n",
    "AVIF's mark": b"\x00\x00\x00\x1cftypavif" + bytes(64),
    "PSD": b"8BPS\x00\x01" + bytes(64),
    "Windows metafile": b"\xd7\xcd\xc6\x9a" + bytes(64),
    "HTML": b"<html><img src=x onerror=alert(1)></html>",
    "a script in a GIF's name": b"GIF89a/*<svg/onload=alert(1)>*/=1;",
    "a bomb of PNG, by its header": png(50_000, 50_000, chunk(b"IDAT", ZEROS)),
    "a bomb of PNG, all that its header can say": png(2**31 - 1, 2**31 - 1, chunk(b"IDAT", ZEROS)),
    "a bomb of PNG, one pixel too many": png(2_000_001, 1, chunk(b"IDAT", ZEROS)),
    "a bomb in a colour profile": png(64, 64, chunk(b"iCCP", b"x\x00\x00" + ZEROS), chunk(b"IDAT", zlib.compress(b""))),
    "a bomb in a text": png(64, 64, chunk(b"zTXt", b"x\x00\x00" + ZEROS * 9), chunk(b"IDAT", zlib.compress(b""))),
    "a bomb of WebP": webp(16_383, 16_383),
    "a bomb of WebP, all that its header can say": webp(2**24, 2**24),
    "a bomb of GIF": b"GIF89a" + struct.pack("<HH", 65_535, 65_535) + b"\x00\x00\x00;",
    "65,535 pixels wide": save(Image.new("L", (65_535, 1)), "PNG"),
    "65,535 pixels high in JPEG": save(Image.new("L", (1, 65_500)), "JPEG"),
    "a side of nothing": png(0, 64, chunk(b"IDAT", zlib.compress(b""))),
    "a PNG cut in its header": PNG[:20],
    "a PNG cut in its pixels": PNG[: len(PNG) * 2 // 3],
    "a PNG with a wrong sum": PNG[:40] + bytes([PNG[40] ^ 255]) + PNG[41:],
    "a PNG without pixels": png(64, 32),
    "a JPEG cut in its header": JPEG[:100],
    "a JPEG cut in its pixels": JPEG[: len(JPEG) - 40],
    "a JPEG of marks alone": b"\xff\xd8" + b"\xff\xe0\x00\x02" * 9 + b"\xff\xd9",
    "a WebP cut in its pixels": WEBP[: len(WEBP) // 2],
    "a GIF cut in its pixels": GIF[: len(GIF) * 2 // 3],
    "a GIF without a frame": GIF[:13] + b";",
    "a JPEG's end in front": b"\xff\xd9" + JPEG,
}


@pytest.mark.filterwarnings("default")  # as where no test runs
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_within_little_memory(name: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match="a picture"):
            decode_picture(HOSTILE[name], MAX_PIXELS, None)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100 * 2**20
    assert len(HOSTILE) >= 40


def exif(orientation: int) -> bytes:
    made = Image.Exif()
    made[0x0112] = orientation
    return made.tobytes()


def grey16() -> Image.Image:
    """The left half is at a third of white."""
    image = Image.new("I;16", (64, 32), 65_535)
    image.paste(65_535 // 3, (0, 0, 32, 32))
    return image


def animated() -> bytes:
    frames = [Image.new("RGB", (64, 32), BLUE), Image.new("RGB", (64, 32), "green")]
    return save(PICTURE, "GIF", save_all=True, append_images=frames)


def translucent() -> Image.Image:
    image = PICTURE.convert("RGBA")
    image.paste((0, 0, 0, 0), (32, 0, 64, 32))
    return image


def see_through_palette() -> bytes:
    image = Image.new("P", (64, 32), 1)
    image.putpalette([0, 0, 255, 255, 0, 0])
    image.paste(0, (32, 0, 64, 32))
    return save(image, "PNG", transparency=0)


WHITE, GREY = (255, 255, 255), (85, 85, 85)
LEGAL: dict[str, tuple[bytes, tuple[int, int], Any, Any]] = {
    "PNG": (PNG, (64, 32), RED, BLUE),
    "JPEG": (JPEG, (64, 32), RED, BLUE),
    "WebP": (save(PICTURE, "WEBP", lossless=True), (64, 32), RED, BLUE),
    "GIF": (GIF, (64, 32), RED, BLUE),
    "the first frame of several": (animated(), (64, 32), RED, BLUE),
    "the first frame of an animated WebP": (
        save(PICTURE, "WEBP", save_all=True, append_images=[Image.new("RGB", (64, 32))], lossless=True),
        (64, 32), RED, BLUE,
    ),
    "CMYK": (save(PICTURE.convert("CMYK"), "JPEG"), (64, 32), RED, BLUE),
    "16 bits of grey": (save(grey16(), "PNG"), (64, 32), GREY, WHITE),
    "one bit": (save(Image.new("1", (64, 32), 1), "PNG"), (64, 32), WHITE, WHITE),
    "nothing behind is white": (save(translucent(), "PNG"), (64, 32), RED, WHITE),
    "a palette's colour that is seen through": (see_through_palette(), (64, 32), RED, WHITE),
    "turned upside down by EXIF": (save(PICTURE, "JPEG", exif=exif(3)), (64, 32), BLUE, RED),
    "mirrored by EXIF": (save(PICTURE, "PNG", exif=exif(2)), (64, 32), BLUE, RED),
    "turned to the side by EXIF": (save(PICTURE.rotate(90, expand=True), "JPEG", exif=exif(6)), (64, 32), RED, BLUE),
    "an orientation that there is not": (save(PICTURE, "JPEG", exif=exif(77)), (64, 32), RED, BLUE),
    "EXIF that is damaged": (save(PICTURE, "JPEG", exif=b"Exif\x00\x00MM\x00*\xff\xff\xff\xff"), (64, 32), RED, BLUE),
    "an archive behind it": (PNG + b"PK\x03\x04" + bytes(99), (64, 32), RED, BLUE),
    "a script in its comment": (save(PICTURE, "JPEG", comment=b"<script>alert(1)</script>"), (64, 32), RED, BLUE),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("name", LEGAL)
def test_a_picture_is_seen_as_browsers_show_it(name: str) -> None:
    data, size, left, right = LEGAL[name]
    seen = decode_picture(data, MAX_PIXELS, None)
    assert (seen.mode, seen.size, measure_picture(data, MAX_PIXELS, None)) == ("RGB", size, size)
    for x, wanted in ((8, left), (56, right)):
        found: Any = seen.getpixel((x, 16))
        assert max(abs(one - other) for one, other in zip(found, wanted, strict=True)) <= 8


def test_a_pictures_size_is_told_without_its_pixels() -> None:
    """Its pixels are damaged, which the reading of its header cannot find."""
    data = HOSTILE["a JPEG cut in its pixels"]
    assert measure_picture(data, MAX_PIXELS, None) == (64, 32)
    with pytest.raises(InvalidRequest, match="that can be read"):
        decode_picture(data, MAX_PIXELS, None)
    with pytest.raises(InvalidRequest, match="64 by 32 pixels; it may have 2,047"):
        measure_picture(PNG, 64 * 32 - 1, None)


@pytest.mark.parametrize(
    ("size", "low"),
    [((512, 512), (512, 512)), ((30, 511), (30, 511)), ((513, 512), (512, 511)), ((1024, 1024), (512, 512)),
     ((1500, 1000), (512, 341)), ((1000, 1501), (341, 512)), ((1024, 641), (512, 321)), ((1990, 10), (512, 3)),
     ((10, 2000), (3, 512))],
)  # fmt: skip
def test_a_picture_of_low_detail_fits_512_pixels_as_it_was_measured(
    size: tuple[int, int], low: tuple[int, int]
) -> None:
    """The one that is turned has its sides exchanged."""
    left = Image.new("RGB", size, BLUE)
    left.paste(RED, (0, 0, (size[0] + 1) // 2, size[1]))
    turned = save(left.rotate(90, expand=True), "JPEG", exif=exif(6))
    sizes: list[tuple[Detail | None, tuple[int, int]]] = [("low", low), ("high", size), (None, size)]
    for data in (save(left, "PNG"), turned):
        for detail, seen_size in sizes:
            seen = decode_picture(data, MAX_PIXELS, detail)
            assert (seen.size, measure_picture(data, MAX_PIXELS, detail)) == (seen_size, seen_size)
            ends: Any = seen.getpixel((0, low[1] // 2)), seen.getpixel((seen_size[0] - 1, low[1] // 2))
            assert (ends[0][0] > 200, ends[1][2] > 200) == (True, True)


# The numbers of tokens, as transformers' processors tell them.


def count_as_processor(kind: str, how: dict[str, Any]) -> Callable[[int, int], int]:
    """Return what counts by the method of a processor that is put together without a tokenizer's files."""

    def find(model: str, kind: str, name: str) -> Any:
        return getattr(import_module(f"transformers.models.{model}.{kind}_{model}"), name)

    # The other backend of this processor's pixels needs torchvision, and has the same function.
    pil = import_module("transformers.models.pixtral.image_processing_pil_pixtral")
    sys.modules.setdefault("transformers.models.pixtral.image_processing_pixtral", pil)
    makers: dict[str, tuple[Any, Any]] = {
        "grid": (
            find("qwen2_vl", "processing", "Qwen2VLProcessor"),
            find("qwen2_vl", "image_processing_pil", "Qwen2VLImageProcessorPil"),
        ),
        "tiles": (
            find("internvl", "processing", "InternVLProcessor"),
            find("got_ocr2", "image_processing_pil", "GotOcr2ImageProcessorPil"),
        ),
        "split": (
            find("idefics3", "processing", "Idefics3Processor"),
            find("idefics3", "image_processing_pil", "Idefics3ImageProcessorPil"),
        ),
        "edge": (find("pixtral", "processing", "PixtralProcessor"), SimpleNamespace),
        "fixed": (find("llava", "processing", "LlavaProcessor"), SimpleNamespace),
    }
    processor, images = makers[kind]
    given = {"images": {}, "own": {}} | how
    blank = [0] * given.pop("blank", 1)
    bare = SimpleNamespace(
        image_processor=images(**given["images"]),
        _merge_kwargs=lambda **_: {"images_kwargs": {}},
        tokenizer=lambda *_, **__: {"input_ids": blank},
        **given["own"],
    )
    method = processor._get_num_multimodal_tokens
    return lambda width, height: method(bare, image_sizes=[(height, width)])["num_image_tokens"][0]


RULES: dict[str, tuple[PictureTokens, dict[str, Any]]] = {
    "LLaVA": (
        FixedTokens(num_tokens=576),
        {"images": {"crop_size": {"height": 336, "width": 336}},
         "own": {"patch_size": 14, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}},
    ),
    "Qwen2-VL": (
        GridTokens(square=28, min_pixels=56 * 56, max_pixels=28 * 28 * 1280),
        {"images": {"size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}}},
    ),
    "Qwen3-VL": (
        GridTokens(square=32, min_pixels=65_536, max_pixels=4_000_000),
        {"images": {"patch_size": 16, "size": {"shortest_edge": 65_536, "longest_edge": 4_000_000}}},
    ),
    "InternVL": (
        TileTokens(tile_width=448, tile_height=448, min_tiles=1, max_tiles=12, tokens_per_tile=256),
        {"images": {"size": {"height": 448, "width": 448}, "crop_to_patches": True, "max_patches": 12},
         "own": {"image_seq_length": 256}},
    ),
    "InternVL without tiles": (
        TileTokens(tile_width=448, tile_height=448, min_tiles=1, max_tiles=1, tokens_per_tile=256),
        {"images": {"size": {"height": 448, "width": 448}}, "own": {"image_seq_length": 256}},
    ),
    "SmolVLM": (
        SplitTokens(longest_edge=2048, tile_edge=512, tokens_per_tile=64),
        {"images": {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}},
         "own": {"image_seq_len": 64}},
    ),
    "Idefics 3, with two tokens for an empty line": (
        SplitTokens(longest_edge=5000, tile_edge=364, tokens_per_tile=169, num_blank_tokens=2),
        {"images": {"size": {"longest_edge": 5000}, "max_image_size": {"longest_edge": 364}}, "blank": 2,
         "own": {"image_seq_len": 169}},
    ),
    "Pixtral": (
        EdgeTokens(longest_edge=1024, square=16),
        {"images": {"size": {"longest_edge": 1024}}, "own": {"patch_size": 16, "spatial_merge_size": 1}},
    ),
    "Mistral 3": (
        EdgeTokens(longest_edge=1540, square=28),
        {"images": {"size": {"longest_edge": 1540}}, "own": {"patch_size": 14, "spatial_merge_size": 2}},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_tokens_are_counted_as_the_models_processor_counts_them(name: str) -> None:
    rule, how = RULES[name]
    count, draw = count_as_processor(rule.kind, how), random.Random(name)
    sizes = [(1, 1), (1, 190), (448, 448), (2048, 2048), (4096, 31), (640, 480), (480, 640), (1457, 1456), (1455, 1456)]
    sizes += [(round(math.exp(draw.uniform(1, 8))), round(math.exp(draw.uniform(1, 8)))) for _ in range(300)]
    # Pixtral's takes a side of 1 or 3 for the number of colours.
    sizes = [size for size in sizes if max(size) <= 200 * min(size) and (rule.kind != "edge" or min(size) > 3)]
    told = PICTURE_TOKENS.validate_json(rule.encode())
    assert [(size, count_picture_tokens(told, *size)) for size in sizes] == [(size, count(*size)) for size in sizes]


# The store.


@pytest.fixture
def objects(tmp_path: Path) -> Iterator[ObjectStorage]:
    with closing(ObjectStorage.open(str(tmp_path / "objects"))) as made:
        yield made


@pytest.fixture
def pictures(addresses: Addresses, objects: ObjectStorage) -> Iterator[PictureStore]:
    settings = PictureSettings(redis_max_kb=4)
    with closing(PictureStore(addresses, objects, settings, RecordSettings(pending_keep_s=600))) as made:
        yield made


def draw_bytes(num: int) -> bytes:
    return random.SystemRandom().randbytes(num)


def test_a_small_file_lies_in_redis_and_its_time_begins_anew_when_it_is_read(
    pictures: PictureStore, addresses: Addresses
) -> None:
    data = draw_bytes(4096)
    digest = pictures.put(data)
    key = picture_key(digest)
    assert digest == hashlib.sha256(data).hexdigest()
    with redis.Redis.from_url(addresses.stream_url) as server:
        assert server.get(key) == data
        server.expire(key, 9)
        assert pictures.get(digest) == data
        assert server.ttl(key) in range(500, 601)
        server.set(key, data[1:])
        with pytest.raises(PictureGone, match="send it again"):
            pictures.get(digest)
        server.delete(key)
    with pytest.raises(PictureGone, match=digest[:12]):
        pictures.get(digest)
    assert pictures.put(data) == digest
    assert pictures.get(digest) == data


@pytest.mark.parametrize("reason", ["it is large", "redis is half full"])
def test_other_files_lie_in_the_object_store_until_their_time_is_over(
    pictures: PictureStore, addresses: Addresses, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    if reason == "redis is half full":
        monkeypatch.setattr(store_module, "measure_share", lambda _: 0.5)
    data = draw_bytes(4097 if reason == "it is large" else 16)
    digest = pictures.put(data)
    with redis.Redis.from_url(addresses.stream_url) as server:
        assert not server.exists(picture_key(digest))
    assert (tmp_path / "objects" / FOLDER / digest).read_bytes() == data
    assert pictures.get(digest) == data


def test_an_object_store_that_is_silent_is_left_in_time(addresses: Addresses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "MAX_OBJECT_S", 0.1)
    with serve_silence(monkeypatch) as (_, is_over):
        objects, settings = ObjectStorage.open("s3://bucket"), PictureSettings(redis_max_kb=0)
        with closing(objects), closing(PictureStore(addresses, objects, settings, RecordSettings())) as pictures:
            for call in (lambda: pictures.put(PNG), lambda: pictures.get("0" * 64)):
                with pytest.raises(StorageUnavailable, match=r"did not answer for 0\.1 seconds"):
                    call()
            is_over.set()


async def test_files_are_swept_when_no_request_that_waits_can_name_them(
    objects: ObjectStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    record = RecordSettings(pending_keep_s=600)
    await objects.put(f"{FOLDER}/a", b"x")
    assert await delete_old_pictures(objects, record) == 0
    over = record.model_copy(update={"pending_keep_s": -5})
    with monkeypatch.context() as patched:  # one that was stored again since it was listed
        patched.setattr(ObjectStorage, "list_by_age", AsyncMock(return_value=[(0.0, "a")]))
        assert await delete_old_pictures(objects, record) == 0
    assert await delete_old_pictures(objects, over) == 1
    assert await objects.get(f"{FOLDER}/a") is None
