"""The rule of a processor's tokens is that of the tokens which its reader makes."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import transformers
from PIL import Image

from penstock.engine.pictures.reader import PictureReader
from penstock.engine.pictures.token_rule import find_token_rule
from penstock.errors import ModelLoadError
from penstock.pictures.tokens import PICTURE_TOKENS, PictureTokens, count_picture_tokens
from tests.engine.test_picture_reader import MISSING, PROCESSORS, save_processor

KINDS = {
    "qwen2_vl": "grid", "qwen2_5_vl": "grid", "qwen3_vl": "grid", "llava": "fixed", "llava_next": "canvas",
    "llava_onevision": "canvas", "idefics3": "split", "smolvlm": "split", "mistral3": "edge", "internvl": "tiles",
    "pixtral": "edge", "vipllava": "fixed", "deepseek_vl": "fixed", "qwen3_vl_moe": "grid",
}  # fmt: skip
UNTOLD = ("lighton_ocr", "paddleocr_vl")
"""Their gateways count none of a picture's tokens."""
EXTREME = ((1, 1), (2, 3), (3, 2), (1, 190), (190, 1), (3, 590), (590, 3), (7, 1390), (1390, 7), (1600, 1200))


def list_sizes(name: str) -> list[tuple[int, int]]:
    draw = random.Random(name)
    sides = [(draw.uniform(2.5, 6.5), draw.uniform(2.5, 6.5)) for _ in range(30 - len(EXTREME))]
    return [*EXTREME, *((round(2.718**width), round(2.718**height)) for width, height in sides)]


def make_reader(kind: str, directory: Path, given: dict[str, Any], **settings: Any) -> PictureReader:
    """Return a reader whose processor and image processor have other settings."""
    config = save_processor(kind, directory)
    described = json.loads((directory / "processor_config.json").read_text())
    (directory / "processor_config.json").write_text(json.dumps(described | given))
    images, sizes, *_ = PROCESSORS[kind]
    getattr(transformers, images)(**(sizes | settings)).save_pretrained(directory)
    return PictureReader(directory, config)


def count_rows(reader: PictureReader, size: tuple[int, int]) -> int:
    """Return how many tokens a prompt gets for its placeholder."""
    prompt = reader.read_chat([5, reader.row_id, 6], [(b"", Image.new("RGB", size))])
    return len(prompt.token_ids) - 2


def tell(reader: PictureReader) -> PictureTokens:
    """Return a reader's rule as a gateway reads it from a heartbeat."""
    rule = find_token_rule(reader)
    assert rule is not None
    return PICTURE_TOKENS.validate_python(json.loads(json.dumps(rule.model_dump())))


def compare(rule: PictureTokens, reader: PictureReader, sizes: list[tuple[int, int]]) -> None:
    counted = [(size, count_picture_tokens(rule, *size)) for size in sizes]
    assert counted == [(size, count_rows(reader, size)) for size in sizes]


@pytest.mark.parametrize("kind", KINDS)
def test_a_rule_counts_the_tokens_that_a_prompt_gets(kind: str, tmp_path: Path) -> None:
    if kind in MISSING:
        pytest.importorskip(MISSING[kind])
    reader = make_reader(kind, tmp_path, {})
    rule = tell(reader)
    assert rule.kind == KINDS[kind]
    compare(rule, reader, list_sizes(kind))
    assert {*KINDS, *UNTOLD} == {*PROCESSORS}


@pytest.mark.parametrize("kind", UNTOLD)
def test_a_processor_that_no_rule_agrees_with_has_none(kind: str, tmp_path: Path) -> None:
    assert find_token_rule(make_reader(kind, tmp_path, {})) is None


OTHER: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "LLaVA without a crop, of which the processor says nothing": (
        "llava", {}, {"size": {"height": 56, "width": 56}, "do_center_crop": False, "crop_size": None}, "fixed",
    ),
    "LLaVA with the class token": ("llava", {"vision_feature_select_strategy": "full"}, {}, "fixed"),
    "LLaVA-NeXT with the class token": ("llava_next", {"vision_feature_select_strategy": "full"}, {}, "canvas"),
    "LLaVA-OneVision with fewer tiles": (
        "llava_onevision", {"vision_aspect_ratio": "anyres_max_2"}, {}, "canvas",
    ),
    "Idefics 3 that splits nothing": ("idefics3", {}, {"do_image_splitting": False}, "fixed"),
    "Idefics 3 of one row": ("idefics3", {"image_seq_len": 9}, {"max_image_size": {"longest_edge": 112}}, "fixed"),
    "InternVL without tiles": ("internvl", {}, {"max_patches": 1}, "fixed"),
    "InternVL with two tiles at least": ("internvl", {}, {"min_patches": 2}, "tiles"),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER)
def test_a_rule_has_the_settings_of_the_processor(name: str, tmp_path: Path) -> None:
    kind, given, settings, rule_kind = OTHER[name]
    reader = make_reader(kind, tmp_path, given, **settings)
    rule = tell(reader)
    assert rule.kind == rule_kind
    compare(rule, reader, list_sizes(name)[:14])


@pytest.mark.parametrize(
    ("kind", "given", "settings"),
    [
        ("llava_next", {}, {"size": {"shortest_edge": 336}, "crop_size": 336}),
        ("llava_onevision", {"num_image_tokens": 729}, {"size": {"height": 384, "width": 384}}),
    ],
)
def test_released_settings_of_llava_are_counted_as_the_processor_counts_them(
    kind: str, given: dict[str, Any], settings: dict[str, Any], tmp_path: Path
) -> None:
    canvases = getattr(transformers, PROCESSORS[kind][0]).image_grid_pinpoints
    reader = make_reader(kind, tmp_path, given, **settings, image_grid_pinpoints=canvases)
    rule, draw = tell(reader), random.Random(kind)
    sizes = [(round(10 ** draw.uniform(1, 3)), round(10 ** draw.uniform(1, 3))) for _ in range(300)]
    told = reader.processor._get_num_multimodal_tokens(image_sizes=[(height, width) for width, height in sizes])
    counted = [count_picture_tokens(rule, *size) for size in sizes]
    assert counted == told["num_image_tokens"]
    assert len(set(counted)) > 20


@pytest.mark.parametrize(
    ("kind", "settings"), [("llava", {"do_center_crop": False}), ("llava_next", {"crop_size": 28})]
)
def test_there_is_no_rule_where_the_processor_makes_other_tokens_than_it_says(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    assert find_token_rule(make_reader(kind, tmp_path, {}, **settings)) is None


def test_a_processor_that_reads_no_picture_is_refused_at_load(tmp_path: Path) -> None:
    reader = make_reader("qwen2_vl", tmp_path, {}, size={"height": 56, "width": 56})
    with pytest.raises(ModelLoadError, match=r"reads no picture of 60 by 30 pixels: .*shortest_edge"):
        find_token_rule(reader)
