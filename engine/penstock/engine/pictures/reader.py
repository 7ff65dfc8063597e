"""Reads pictures for a model: transformers' own processors make pixels, and the tokens that stand for their rows.

A picture is prepared by itself, by Pillow whatever else is installed: pixels depend on no other picture of the prompt,
and on no worker.
"""

import hashlib
import inspect
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import transformers
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

from penstock.engine.pictures.rows import Grid, PromptPicture
from penstock.engine.pictures.vision import KEPT_BYTES, Pixels
from penstock.errors import InvalidRequest, ModelError, ModelLoadError, PromptTooLong

FAMILIES = frozenset({
    "deepseek_vl", "idefics3", "internvl", "lighton_ocr", "llava", "llava_next", "llava_onevision", "mistral3",
    "paddleocr_vl", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "vipllava",
})  # fmt: skip
"""Types of models whose tokens were compared with those of `generate()`. In others, rows of a picture may see those
behind them, which chunks of a prompt do not allow."""
_AXES = frozenset({"paddleocr_vl", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe"})
"""Those with positions of three axes."""


LARGE_EDGE = 4096
"""A square of so many pixels is divided as often as any, or made smaller."""
LAYER_VALUES = 16
"""How many values of a patch a layer of a vision part has in memory at a time, by value of its input."""
MAX_KNOWN_SIZES = 256
"""Of how many sizes the tokens are kept."""


class PicturePrompt(NamedTuple):
    """A prompt with the rows of its pictures."""

    token_ids: list[int]
    pictures: list[PromptPicture]
    pixels: dict[bytes, Pixels]
    """By name of a picture. `read_again` makes those of a size that was read before: KV may be found in their place."""


class PictureReader:
    """Makes a prompt of a chat's tokens and its pictures."""

    def __init__(self, directory: Path, config: Any) -> None:
        """Load the processor of a model. Raises `ModelLoadError` where its pictures cannot be read."""
        if config.model_type not in FAMILIES:
            raise ModelLoadError(f"pictures of models of type {config.model_type} are not read here, only texts")
        try:
            self.processor = _load_processor(directory, config)
        except Exception as error:
            reason = " ".join(str(error).split())  # of a library that is missing, with what to install
            raise ModelLoadError(f"its processor of pictures cannot be loaded: {reason}") from error
        self.row_id: int = config.image_token_id
        """The token that a chat has for each picture, and a prompt for each row."""
        token = self.processor.image_token
        if self.processor.tokenizer.convert_tokens_to_ids(token) != self.row_id:
            raise ModelLoadError(
                f"its processor writes {token!r} for a picture, which is not token {self.row_id} of config.json"
            )
        self._vision = config.vision_config
        self._has_axes = config.model_type in _AXES
        images = self.processor.image_processor
        settings = json.dumps(images.to_dict(), sort_keys=True, default=str)
        self._settings = f"{type(images).__name__} {settings}".encode()
        self._known: dict[tuple[tuple[int, int], bool], tuple[list[int], Grid | None]] = {}
        """By a picture's size, and whether it is alone: the tokens in its place, and its grid."""

    def read_chat(
        self, token_ids: Sequence[int], pictures: Iterable[tuple[bytes, Any]], max_tokens: int = sys.maxsize
    ) -> PicturePrompt:
        """Return the prompt of a chat whose tokens have one for each picture.

        `pictures` yields the digest of each, and the picture itself, as Pillow's `Image` in RGB: one at a time, as each
        may be large. Raises `InvalidRequest`, and `PromptTooLong` once it has more than `max_tokens` tokens.
        """
        num_pictures, left = token_ids.count(self.row_id), iter(pictures)
        ids, found, pixels = list[int](), list[PromptPicture](), dict[bytes, Pixels]()
        for token_id in token_ids:
            if token_id != self.row_id:
                ids.append(token_id)
                continue
            digest, picture = next(left, (b"", None))
            if picture is None:
                raise InvalidRequest(f"the chat has {len(found)} pictures, and its template has {num_pictures} places")
            name, kind = self.name_picture(digest, picture), (picture.size, num_pictures == 1)
            if (known := self._known.get(kind)) is None:
                replacement, pixels[name] = self._prepare(len(found) + 1, picture, num_pictures)
                known = replacement, self._find_grid(pixels[name]) if self._has_axes else None
                if len(self._known) >= MAX_KNOWN_SIZES:
                    self._known.clear()
                self._known[kind] = known
            replacement, grid = known
            first, num_rows = len(ids) + replacement.index(self.row_id), replacement.count(self.row_id)
            found.append(PromptPicture(name, first, num_rows, grid))
            ids += replacement
            if len(ids) > max_tokens:
                raise PromptTooLong(
                    f"This model's maximum context length is {max_tokens} tokens. However, texts and pictures have "
                    f"at least {len(ids)}. Send fewer pictures, or smaller ones."
                )
        if next(left, None) is not None:
            raise InvalidRequest(f"the chat has more than the {num_pictures} pictures that its template has places for")
        return PicturePrompt(ids, found, pixels)

    def name_picture(self, digest: bytes, picture: Any) -> bytes:
        """Return the digest of all that the rows of a picture follow from."""
        return hashlib.sha256(b"picture %dx%d " % picture.size + digest + self._settings).digest()

    def read_again(self, digest: bytes, picture: Any, name: bytes) -> Pixels:
        """Return the pixels of a picture that was read before. Raises `ModelError` where that was done otherwise."""
        if self.name_picture(digest, picture) != name:
            raise ModelError("another worker has read a picture of the prompt by another processor")
        return self._prepare(1, picture, 1)[1]

    def measure_most_bytes(self, itemsize: int) -> int:
        """Return about how much memory a large picture takes, and what is kept of others, where the model computes with
        numbers of so many bytes. Raises `ModelLoadError` where the processor reads no pictures.
        """
        from PIL import Image

        try:
            _, pixels = self._prepare(1, Image.new("RGB", (LARGE_EDGE, LARGE_EDGE)), 1)
        except InvalidRequest as error:
            raise ModelLoadError(str(error)) from error
        patch, num_frames = self._vision.patch_size, getattr(self._vision, "temporal_patch_size", None) or 1
        edge = patch if isinstance(patch, int) else max(patch)
        num_patches = max(x.numel() for x in pixels.values()) // (3 * num_frames * edge**2)
        width = max(getattr(self._vision, name, None) or 0 for name in ("hidden_size", "embed_dim"))
        return KEPT_BYTES + sum(x.nbytes for x in pixels.values()) + num_patches * width * LAYER_VALUES * itemsize

    def _prepare(self, number: int, picture: Any, num_pictures: int) -> tuple[list[int], Pixels]:
        """Return the tokens in the place of a picture, and its pixels."""
        try:
            found = self.processor(
                images=[picture], text=[self.processor.image_token], add_special_tokens=False, return_tensors="pt"
            )
        except Exception as error:  # it refuses some shapes, each processor by an error of its own
            raise InvalidRequest(
                f"picture {number} of {num_pictures} cannot be read for this model: {error}"
            ) from error
        pixels = {key: x for key, x in found.items() if key not in ("input_ids", "attention_mask", "mm_token_type_ids")}
        if "batch_num_images" in pixels and num_pictures > 1:
            raise InvalidRequest("this model reads one picture of a chat: it divides one otherwise beside others")
        return found["input_ids"][0].tolist(), pixels

    def _find_grid(self, pixels: Pixels) -> Grid:
        time, height, width = pixels["image_grid_thw"][0].tolist()
        merge = self.processor.image_processor.merge_size
        return time, height // merge, width // merge


def _load_processor(directory: Path, config: Any) -> Any:
    """Return the processor of a model's texts and pictures. That of videos, which needs torchvision, is left out."""
    stock: Any = getattr(transformers, _name_processor(directory) or PROCESSOR_MAPPING_NAMES[config.model_type])
    known = inspect.signature(stock.__init__).parameters

    class Processor(stock):  # type: ignore[misc]
        def __init__(self, image_processor: Any, tokenizer: Any, **given: Any) -> None:
            super().__init__(image_processor=image_processor, tokenizer=tokenizer, **given)

    described, _ = stock.get_processor_dict(directory)
    given = {name: value for name, value in described.items() if name in known}
    if "video_processor" in known:
        given["video_processor"] = None
    images = transformers.AutoImageProcessor.from_pretrained(directory, backend="pil")
    # One of its own: some processors add tokens to it.
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    return Processor(
        images, tokenizer, **{name: x for name, x in given.items() if name not in ("image_processor", "tokenizer")}
    )


def _name_processor(directory: Path) -> str:
    """Return which of transformers' processors a model's files name; empty if none. Pixtral's type is LLaVA's."""
    for path in (directory / "processor_config.json", directory / "preprocessor_config.json"):
        name = json.loads(path.read_bytes()).get("processor_class") if path.is_file() else None
        if name in PROCESSOR_MAPPING_NAMES.values():
            return str(name)
    return ""
