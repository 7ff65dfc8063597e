"""Pictures of the world's requests: a few small files, chats with some of them, and what the model sees in those."""

import base64
import hashlib
import io
import random
from collections.abc import Callable
from functools import cache

from PIL import Image

from penstock.messages import ChatMessage, Picture, Request
from penstock.objects import ObjectStorage, P, T
from penstock.testing.pictures import LINE_END, PLACE, list_colours, load_seeing_tokenizer

SIZES = ((1, 1), (4, 3), (4, 3), (4, 3), (16, 4), (16, 4), (7, 9))
"""Pictures of one size differ in their colours alone, as blocks of their prompts do."""
TEXTS = ("", "What is this? ", "Which of them is larger, and why? ", "word " * 60)


@cache
def draw_files() -> dict[str, bytes]:
    """Return the files of all pictures, by their digest."""
    files = dict[str, bytes]()
    for number, size in enumerate(SIZES):
        file = io.BytesIO()
        pixels = random.Random(number).randbytes(3 * size[0] * size[1])
        Image.frombytes("RGB", size, pixels).save(file, "PNG")
        files[hashlib.sha256(file.getvalue()).hexdigest()] = file.getvalue()
    return files


def draw_chat(chance: random.Random) -> list[ChatMessage]:
    """Return a chat with some pictures: one or several, side by side or not, and perhaps one of them twice."""
    content = list[str | Picture]()
    for digest in chance.choices(list(draw_files()), k=chance.choice([1, 1, 2, 3])):
        data = base64.b64encode(draw_files()[digest]).decode() if chance.random() < 0.2 else None
        content += [text] if (text := chance.choice(TEXTS)) else []
        content.append(Picture(digest=digest, data=data))
        content += content[-1:] if chance.random() < 0.2 else []
    return [ChatMessage(role="user", content=[*content, chance.choice(["?", "Say it."])])]


def list_seen(request: Request) -> list[int]:
    """Return what the model sees in the places of the prompt's tokens."""
    tokenizer, seen = load_seeing_tokenizer(), list[int]()
    place, pictures = tokenizer.convert_tokens_to_ids(PLACE), iter(request.pictures)
    assert request.messages is not None
    parts = request.messages[0].content
    text = "".join(part if isinstance(part, str) else PLACE for part in parts)
    for token_id in tokenizer(text, add_special_tokens=False)["input_ids"]:
        if token_id != place:
            seen.append(token_id)
            continue
        image = Image.open(io.BytesIO(draw_files()[next(pictures).digest]))
        colours, width = list_colours(image), image.size[0]
        for start in range(0, len(colours), width):
            seen += [*colours[start : start + width], LINE_END]
    return seen


class StorageAtOnce(ObjectStorage):
    """An object store that answers at once: its threads would be the world's, for which no other loop may wait."""

    async def _run_blocking(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return call(*args, **kwargs)


class LossyBlocks(dict[bytes, list[int]]):
    """The KV that a scene's engines share. A block that is asked for is gone by a chance."""

    def __init__(self, chance: random.Random, loss: float) -> None:
        super().__init__()
        self._chance, self.loss = chance, loss

    def get(self, key: bytes, default: object = None) -> list[int] | None:  # type: ignore[override]
        """Return a block, if it is there."""
        if self._chance.random() < self.loss:
            self.pop(key, None)
        return super().get(key)
