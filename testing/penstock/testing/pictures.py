"""Pictures for a model by formula: what it sees in one are the colours of its pixels, one row of the prompt for each.

Its prompts, its jobs and the names of its blocks are those of any model that sees.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from transformers import AutoTokenizer

from penstock.engine.pictures.reader import PictureReader
from penstock.engine.pictures.rows import PromptPicture, SeenPicture
from penstock.engine.pictures.vision import Pixels
from penstock.engine.weights.files import DEMO_MODEL

PLACE = "<image>"
"""What a chat has for a picture."""
LINE_END = 299
"""The token behind each line of a picture's rows."""
FIRST_COLOUR = 2**20
"""What is seen in a black pixel; no token has this id."""
TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] or [] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}"
)


@cache
def load_seeing_tokenizer() -> Any:
    """Return the demo model's tokenizer, with a token for pictures, and a chat template that has places for them."""
    tokenizer = AutoTokenizer.from_pretrained(str(DEMO_MODEL), extra_special_tokens={"image_token": PLACE})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def list_colours(image: Any) -> list[int]:
    """Return what is seen in the pixels of a picture, given as Pillow's `Image` in RGB."""
    raw = image.tobytes()
    return [FIRST_COLOUR + int.from_bytes(raw[place : place + 3], "big") for place in range(0, len(raw), 3)]


class ColourReader(PictureReader):
    """Makes a prompt of a chat's tokens and its pictures: a token for each pixel, and one behind each line."""

    def __init__(self) -> None:
        """Read pictures for the tokenizer of `load_seeing_tokenizer`."""
        self.row_id = load_seeing_tokenizer().convert_tokens_to_ids(PLACE)
        self._has_axes, self._settings, self._known = False, b"colours", {}

    def _prepare(self, number: int, picture: Any, num_pictures: int) -> tuple[list[int], Pixels]:
        width, height = picture.size
        return [*[self.row_id] * width, LINE_END] * height, {"colours": torch.tensor(list_colours(picture))}


def look(read: Callable[[PromptPicture], Pixels], picture: PromptPicture) -> SeenPicture:
    """Return what is seen in a picture that is read first."""
    return SeenPicture(read(picture)["colours"])
