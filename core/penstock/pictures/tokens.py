"""How many tokens of a prompt a picture becomes: from its size alone, as transformers' processors count them.

A worker tells the rule of its model's processor in its heartbeat, so a gateway counts without the processor. Each rule
repeats the arithmetic of the processor with its rounding, floating point included.
"""

import math
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from penstock.messages import Wire

Count = Annotated[int, Field(ge=1, lt=2**31)]
MAX_SPLIT_EDGE = 4096
"""Idefics 3 makes no picture longer before it is split."""


class FixedTokens(Wire):
    """All pictures become the same number (LLaVA)."""

    kind: Literal["fixed"] = "fixed"
    num_tokens: Count


class GridTokens(Wire):
    """A token for each square of a resized picture (Qwen2-VL to Qwen3-VL)."""

    kind: Literal["grid"] = "grid"
    square: Count
    """The side of a square, in pixels: of a patch, times the patches that are merged."""
    min_pixels: Count
    max_pixels: Count


class TileTokens(Wire):
    """Tiles in the arrangement whose shape is nearest to the picture's, and the whole picture (InternVL)."""

    kind: Literal["tiles"] = "tiles"
    tile_width: Count
    tile_height: Count
    min_tiles: Count
    max_tiles: Count
    """1: pictures are not cut."""
    tokens_per_tile: Count
    num_marks: Annotated[int, Field(ge=0)] = 2
    """Tokens around the whole."""


class SplitTokens(Wire):
    """Rows of tiles with marks before each tile and a line's end behind each row, and the whole (Idefics 3)."""

    kind: Literal["split"] = "split"
    longest_edge: Count
    """In pixels, of the picture before it is split."""
    tile_edge: Count
    tokens_per_tile: Count
    num_blank_tokens: Count = 1
    """How many tokens two line ends are."""


class EdgeTokens(Wire):
    """A token for each square of a picture that is made smaller if need be, and one behind each row (Pixtral)."""

    kind: Literal["edge"] = "edge"
    longest_edge: Count
    square: Count


class CanvasTokens(Wire):
    """Those of the whole picture, and a token for each square of it on a canvas, and behind each row (LLaVA-NeXT)."""

    kind: Literal["canvas"] = "canvas"
    canvases: list[list[Count]] = Field(min_length=1)
    """Width and height of each, in pixels: a picture is made to fit the one that shows most of it."""
    tile_edge: Count
    squares_per_edge: Count
    """Along the edge of a tile."""
    tokens_of_whole: Count
    max_tiles: Annotated[int, Field(ge=0)] = 0
    """Where a picture's squares are those of more tiles, by a tenth of its edges, they are made fewer (OneVision)."""


PictureTokens = FixedTokens | GridTokens | TileTokens | SplitTokens | EdgeTokens | CanvasTokens
PICTURE_TOKENS: TypeAdapter[PictureTokens] = TypeAdapter(Annotated[PictureTokens, Field(discriminator="kind")])


def count_picture_tokens(rule: PictureTokens, width: int, height: int) -> int:
    """Return how many tokens a picture of this size, in pixels, becomes."""
    match rule:
        case FixedTokens():
            return rule.num_tokens
        case GridTokens():
            return _count_grid(rule, width, height)
        case TileTokens():
            columns, rows = _choose_tiles(rule, width, height)
            num_tiles = columns * rows + 1 if columns * rows > 1 else 1
            return rule.num_marks + rule.tokens_per_tile * num_tiles
        case SplitTokens():
            return _count_split(rule, width, height)
        case EdgeTokens():
            ratio = max(height / rule.longest_edge, width / rule.longest_edge)
            if ratio > 1:
                width, height = math.floor(width / ratio), math.floor(height / ratio)
            return ((width - 1) // rule.square + 2) * ((height - 1) // rule.square + 1)
        case CanvasTokens():
            return _count_canvas(rule, width, height)


def _count_grid(rule: GridTokens, width: int, height: int) -> int:
    columns, rows = round(width / rule.square), round(height / rule.square)
    num_pixels = columns * rows * rule.square**2
    if num_pixels > rule.max_pixels:
        scale = math.sqrt(height * width / rule.max_pixels)
        columns, rows = (max(1, math.floor(side / scale / rule.square)) for side in (width, height))
    elif num_pixels < rule.min_pixels:
        scale = math.sqrt(rule.min_pixels / (height * width))
        columns, rows = (math.ceil(side * scale / rule.square) for side in (width, height))
    return columns * rows


@lru_cache(16)
def _list_arrangements(min_tiles: int, max_tiles: int) -> list[tuple[int, int]]:
    sides = range(1, max_tiles + 1)
    found = [(columns, rows) for columns in sides for rows in sides if min_tiles <= columns * rows <= max_tiles]
    return sorted(found, key=lambda one: one[0] * one[1])


def _choose_tiles(rule: TileTokens, width: int, height: int) -> tuple[int, int]:
    """Return columns and rows; of several that are equally near, more tiles while they cover at most twice the area."""
    best, best_distance = (1, 1), math.inf
    for columns, rows in _list_arrangements(rule.min_tiles, rule.max_tiles) if rule.max_tiles > 1 else ():
        distance = abs(width / height - columns / rows)
        is_filled = width * height > 0.5 * rule.tile_height * rule.tile_width * columns * rows
        if distance < best_distance or (distance == best_distance and is_filled):
            best, best_distance = (columns, rows), distance
    return best


def _count_split(rule: SplitTokens, width: int, height: int) -> int:
    ratio = width / height
    long, short = rule.longest_edge, int(rule.longest_edge / ratio if width >= height else rule.longest_edge * ratio)
    short = max(1, short + short % 2)
    if long > MAX_SPLIT_EDGE:
        ratio = long / short if width >= height else short / long
        long, short = MAX_SPLIT_EDGE, int(MAX_SPLIT_EDGE / ratio if width >= height else MAX_SPLIT_EDGE * ratio)
    long_tiles, short_tiles = math.ceil(long / rule.tile_edge), math.ceil(max(1, short) / rule.tile_edge)
    columns, rows = (long_tiles, short_tiles) if width >= height else (short_tiles, long_tiles)
    whole = rule.tokens_per_tile + 3
    if columns * rows == 1:
        return whole
    return whole + rule.num_blank_tokens - 1 + rows * (columns * (rule.tokens_per_tile + 2) + 1)


def _count_canvas(rule: CanvasTokens, width: int, height: int) -> int:
    def measure_fit(canvas: list[int]) -> tuple[int, int]:
        """Return how many pixels of the picture a canvas shows, and then less for one that stays emptier."""
        scale = min(canvas[0] / width, canvas[1] / height)
        num_shown = min(int(width * scale) * int(height * scale), width * height)
        return num_shown, num_shown - canvas[0] * canvas[1]

    columns, rows = (side // rule.tile_edge * rule.squares_per_edge for side in max(rule.canvases, key=measure_fit))
    # Margins without the picture have no tokens.
    if width / height > columns / rows:
        rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
    else:
        columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
    ratio = math.sqrt(rows * columns / ((rule.max_tiles or math.inf) * rule.squares_per_edge**2))
    if ratio > 1.1:
        columns, rows = int(columns // ratio), int(rows // ratio)
    return rule.tokens_of_whole + rows * (columns + 1)
