"""Pictures become the pixels and the tokens that transformers' own processors make of text and pictures."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from penstock.engine.pictures.reader import FAMILIES, PictureReader
from penstock.engine.weights.files import DEMO_MODEL
from penstock.errors import InvalidRequest, ModelLoadError
from tests.engine.test_seeing import SEEING

QWEN = {"image_token": "<|image_pad|>"}
QWEN3 = QWEN | {
    "video_token": "<|video_pad|>", "vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>",
}  # fmt: skip
INTERN = {
    "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}  # fmt: skip
IMAGE = {"image_token": "<image>"}
CLIP = {"size": {"shortest_edge": 56}, "crop_size": 56}
LLAVA = {"patch_size": 14, "num_additional_image_tokens": 1, "vision_feature_select_strategy": "default"}
ANY_RESOLUTION = {"image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]]}
TILES = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}
SQUARES = {"size": {"height": 56, "width": 56}, "crop_to_patches": True, "max_patches": 6}
PIXTRAL = {"patch_size": 14, "size": {"longest_edge": 224}}
PROCESSORS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any], dict[str, str]]] = {
    "qwen2_vl": ("Qwen2VLImageProcessorPil", {}, "Qwen2VLProcessor", {}, QWEN),
    "qwen2_5_vl": ("Qwen2VLImageProcessorPil", {}, "Qwen2_5_VLProcessor", {}, QWEN),
    "qwen3_vl": ("Qwen2VLImageProcessorPil", {"patch_size": 16}, "Qwen3VLProcessor", {}, QWEN3),
    "llava": ("CLIPImageProcessorPil", CLIP, "LlavaProcessor", LLAVA, IMAGE),
    "llava_next": ("LlavaNextImageProcessorPil", CLIP | ANY_RESOLUTION, "LlavaNextProcessor", LLAVA, IMAGE),
    "idefics3": ("Idefics3ImageProcessorPil", TILES, "Idefics3Processor", {"image_seq_len": 4}, {}),
    "mistral3": (
        "PixtralImageProcessorPil", PIXTRAL, "PixtralProcessor", {"patch_size": 14, "spatial_merge_size": 2}, {},
    ),
    "internvl": ("GotOcr2ImageProcessorPil", SQUARES, "InternVLProcessor", {"image_seq_length": 4}, INTERN),
}  # fmt: skip
"""By type of model: its image processor, its processor, and the special tokens, with sizes that suit tests."""
MORE_TOKENS = {
    "idefics3": ["<image>", "<fake_token_around_image>", "<global-img>", "<row_1_col_1>", "<row_1_col_2>"],
    "mistral3": ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
}


def draw_picture(seed: int, width: int, height: int) -> Image.Image:
    chance = np.random.default_rng(seed)
    return Image.fromarray(chance.integers(0, 256, (height, width, 3), np.uint8))


def save_processor(kind: str, directory: Path) -> Any:
    """Write the files of a processor with the demo model's tokenizer; return the model's configuration."""
    images, sizes, name, given, special = PROCESSORS[kind]
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO_MODEL, extra_special_tokens=special)
    tokenizer.add_tokens(MORE_TOKENS.get(kind, []), special_tokens=True)
    tokenizer.save_pretrained(directory)
    getattr(transformers, images)(**sizes).save_pretrained(directory)
    (directory / "processor_config.json").write_text(json.dumps({"processor_class": name, **given}))
    make_config, about = SEEING.get(kind, (transformers.LlavaNextConfig, {}))
    config = make_config(**about)
    config.save_pretrained(directory)
    return config


@pytest.mark.parametrize("kind", PROCESSORS)
def test_a_prompt_is_that_of_the_processors_own_call(kind: str, tmp_path: Path) -> None:
    if kind == "mistral3":
        pytest.importorskip("torchvision", reason="PixtralProcessor imports it")
    config = save_processor(kind, tmp_path)
    probe = PictureReader(tmp_path, config)
    token = probe.processor.image_token
    config.image_token_id = probe.processor.tokenizer.convert_tokens_to_ids(token)
    reader = PictureReader(tmp_path, config)
    pictures = [draw_picture(1, 130, 70), draw_picture(2, 60, 90)]
    text = f"In the beginning{token}God{token}created"
    ids = reader.processor.tokenizer(text)["input_ids"]
    prompt = reader.read_chat(ids, list(zip([b"1" * 32, b"2" * 32], pictures, strict=True)))
    right = reader.processor(images=[pictures] if kind == "idefics3" else pictures, text=[text], return_tensors="pt")
    assert prompt.token_ids == right["input_ids"][0].tolist()
    assert len(prompt.pixels) == 2
    rows = [at for span in prompt.spans for at in range(span.first, span.end)]
    assert rows == [at for at, token_id in enumerate(prompt.token_ids) if token_id == reader.row_id]
    (alone, num_rows), *_ = prompt.pixels.values()
    assert num_rows == sum(span.num_tokens for span in prompt.spans if span.name == prompt.spans[0].name)
    stock = reader.processor(images=[pictures[0]], text=[token], return_tensors="pt")
    assert all(torch.equal(stock[name], x) for name, x in alone.items())
    assert (prompt.positions is not None) == kind.startswith("qwen")


def test_the_pixels_are_those_of_the_stock_processor(tmp_path: Path) -> None:
    """Of one that needs no torchvision: ours leaves nothing out but videos."""
    config = save_processor("llava", tmp_path)
    stock = transformers.AutoProcessor.from_pretrained(tmp_path)
    config.image_token_id = stock.image_token_id
    picture = draw_picture(1, 130, 70)
    prompt = PictureReader(tmp_path, config).read_chat([5, stock.image_token_id, 6], [(b"", picture)])
    right = stock(images=[picture], text=["<image>"], return_tensors="pt", add_special_tokens=False)
    ((pixels, _),) = prompt.pixels.values()
    assert torch.equal(pixels["pixel_values"], right["pixel_values"])
    assert prompt.token_ids == [5, *right["input_ids"][0].tolist(), 6]


def test_names_tell_pictures_sizes_and_settings_apart(tmp_path: Path) -> None:
    names = set()
    for number, sizes in enumerate([{}, {"do_normalize": False}]):
        directory = tmp_path / str(number)
        config = save_processor("llava", directory)
        transformers.CLIPImageProcessorPil(**PROCESSORS["llava"][1], **sizes).save_pretrained(directory)
        config.image_token_id = 1024
        reader = PictureReader(directory, config)
        for digest, height in [(b"1", 60), (b"2", 60), (b"1", 61)]:
            prompt = reader.read_chat([config.image_token_id], [(digest, draw_picture(1, 60, height))])
            names |= set(prompt.pixels)
    assert len(names) == 6


def test_what_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="type gemma3 "):
        PictureReader(tmp_path, transformers.AutoConfig.for_model("gemma3"))
    assert "gemma3" not in FAMILIES
    config = save_processor("qwen2_vl", tmp_path)
    reader = PictureReader(tmp_path, config)
    with pytest.raises(InvalidRequest, match="places for 1 pictures, and the chat has 0"):
        reader.read_chat([5, reader.row_id], [])
    with pytest.raises(InvalidRequest, match=r"picture 1 of 1 cannot be read for this model: .*aspect ratio"):
        reader.read_chat([5, reader.row_id], [(b"", draw_picture(1, 900, 2))])
