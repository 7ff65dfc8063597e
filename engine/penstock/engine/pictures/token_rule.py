"""By which rule a gateway counts the tokens of a picture, as the model's processor makes them."""

import math
from typing import Any

import transformers
from PIL import Image

from penstock.engine.pictures.reader import PictureReader
from penstock.errors import ModelLoadError
from penstock.pictures import tokens
from penstock.pictures.tokens import PictureTokens, count_picture_tokens

SIZES = (
    *((60, 30), (448, 448), (29, 57), (112, 111), (400, 4), (4, 400), (1990, 10), (10, 1990), (64, 64), (40, 70)),
    *((224, 448), (512, 513), (640, 480), (480, 640), (900, 1200), (1024, 1024), (1920, 1080), (4032, 3024)),
)
"""Width and height. No height is 1 or 3, which some processors take for a number of colours when they count."""


def find_token_rule(reader: PictureReader) -> PictureTokens | None:
    """Return the rule that gives all tokens in the place of a picture: `model_dump()` of it goes into heartbeats.

    The prompt has these in place of the chat's placeholder, which is none of them. The rule agrees with what the
    processor says of `SIZES`. Where that is wrong or an error, two pictures are read, and a rule is found if they have
    the same number. None where no rule agrees. Raises `ModelLoadError` if no picture can be read.
    """
    rules = list[PictureTokens]()
    try:
        counts = _ask_processor(reader.processor)
        rules.append(_derive_rule(reader.processor))
    except Exception:  # processors raise what they like for settings that they cannot count with; LLaVA has no rule
        counts = {size: _count_made(reader.processor, size) for size in SIZES[:2]}
    rules.insert(0, tokens.FixedTokens(num_tokens=counts[SIZES[0]]))
    return next(
        (rule for rule in rules if all(count_picture_tokens(rule, *size) == counts[size] for size in counts)), None
    )


def _ask_processor(processor: Any) -> dict[tuple[int, int], int]:
    """Return the numbers of tokens that a processor says without pixels. Raises `ValueError` if they are wrong."""
    method = "_get_num_multimodal_tokens"  # SmolVLM's has none, and makes the text of Idefics 3
    count = getattr(type(processor), method, None) or getattr(transformers.Idefics3Processor, method)
    told = count(processor, image_sizes=[(height, width) for width, height in SIZES])["num_image_tokens"]
    counts = dict(zip(SIZES, told, strict=True))
    cheapest = min(counts, key=lambda size: counts[size])
    if _count_made(processor, cheapest) != counts[cheapest]:
        raise ValueError(f"it makes another number of tokens of {cheapest} than it says")
    return counts


def _count_made(processor: Any, size: tuple[int, int]) -> int:
    """Return how many tokens a processor makes of a picture. What changes no number is left out, as it is slow."""
    given = {"add_special_tokens": False, "do_rescale": False, "do_normalize": False, "do_pad": False}
    try:
        found = processor(images=[Image.new("RGB", size)], text=[processor.image_token], **given)
    except Exception as error:
        raise ModelLoadError(f"its processor reads no picture of {size[0]} by {size[1]} pixels: {error}") from error
    return len(found["input_ids"][0])


def _derive_rule(processor: Any) -> PictureTokens:
    """Return the rule of a processor's arithmetic with its settings."""
    images = processor.image_processor
    size = images.size
    if hasattr(images, "merge_size"):
        square = images.patch_size * images.merge_size
        return tokens.GridTokens(square=square, min_pixels=size.shortest_edge, max_pixels=size.longest_edge)
    if hasattr(images, "crop_to_patches"):
        return tokens.TileTokens(
            tile_width=size.width,
            tile_height=size.height,
            min_tiles=images.min_patches,
            max_tiles=images.max_patches,
            tokens_per_tile=processor.image_seq_length,
        )
    if hasattr(images, "max_image_size"):
        return tokens.SplitTokens(
            longest_edge=size.longest_edge,
            tile_edge=images.max_image_size["longest_edge"],
            tokens_per_tile=processor.image_seq_len,
            num_blank_tokens=len(processor.tokenizer("\n\n", add_special_tokens=False)["input_ids"]),
        )
    if hasattr(processor, "spatial_merge_size"):
        square = processor.patch_size * processor.spatial_merge_size
        return tokens.EdgeTokens(longest_edge=size.longest_edge, square=square)
    tile_edge = size.shortest_edge or min(size.height, size.width)
    if hasattr(processor, "num_image_tokens"):
        num_tokens, num_squares = processor.num_image_tokens, math.isqrt(processor.num_image_tokens)
        max_tiles = int(processor.vision_aspect_ratio.removeprefix("anyres_max_"))
    else:
        num_squares, max_tiles = tile_edge // processor.patch_size, 0
        num_tokens = num_squares**2 + processor.num_additional_image_tokens
    return tokens.CanvasTokens(
        canvases=[[width, height] for height, width in images.image_grid_pinpoints],
        tile_edge=tile_edge,
        squares_per_edge=num_squares,
        tokens_of_whole=num_tokens - (processor.vision_feature_select_strategy == "default"),
        max_tiles=max_tiles,
    )
