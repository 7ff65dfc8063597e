"""Where a prompt has rows of pictures, at which positions they are, and what the model sees in them.

A *row* is a token of the prompt that stands for a part of a picture. Its id is the same for all rows of all pictures;
what the model reads in its place was computed from pixels. Behind the first layers, some models add more to it.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import InvalidRequest, PicturesNeeded
from penstock.kvstore.block import Span

if TYPE_CHECKING:  # `penstock plan` schedules sequences without torch
    from torch import Tensor

Grid = tuple[int, int, int]
"""How many rows a picture has in time, in height, and in width."""


class PromptPicture(NamedTuple):
    """A picture of a prompt: what any worker has to know to go on with the prompt's KV."""

    name: bytes
    """Digest of all that its rows follow from (32 bytes)."""
    first: int
    """Index of its first row among the prompt's tokens."""
    num_rows: int
    """There may be other tokens between them."""
    grid: Grid | None = None
    """Only where positions have three axes."""


class SeenPicture(NamedTuple):
    """What the model sees in a picture: [rows, hidden size] each."""

    rows: "Tensor"
    """What it reads in the place of the tokens' embeddings."""
    added: "tuple[Tensor, ...]" = ()
    """What is added behind the first layers, one behind the other."""

    def cut(self, first: int, end: int) -> "SeenPicture":
        """Return the same of some of the rows."""
        return SeenPicture(self.rows[first:end], tuple(rows[first:end] for rows in self.added))

    @property
    def num_bytes(self) -> int:
        """How much memory it takes."""
        return sum(rows.numel() * rows.itemsize for rows in (self.rows, *self.added))


See = Callable[[bytes], "Future[SeenPicture]"]
"""Has the model see the picture of a name. A second call returns the same."""


class Pictures:
    """The pictures of a prompt, in order.

    `see` is None in a worker without pixels, which can go on only where no row of a picture is to be computed.
    """

    def __init__(self, token_ids: Sequence[int], pictures: Sequence[PromptPicture], see: See | None = None) -> None:
        """Raises `InvalidRequest` where the prompt has not all of their rows, one picture behind the other."""
        self.spans: list[Span] = []
        """Their rows, those of a picture in one span or in several."""
        for picture in pictures:
            self.spans += find_spans(token_ids, picture, self.end)
        self.pictures = pictures
        """What any worker has to know of them."""
        grids = [(picture.first, picture.grid) for picture in pictures if picture.grid is not None]
        positions = find_axis_positions(len(token_ids), grids) if grids else None
        self._positions, self._see = positions, see
        self._asked: dict[bytes, Future[SeenPicture]] = {}
        """By name. They stay, so that no step waits for what was seen before, and are small beside their KV."""
        self.has_axes = positions is not None
        """Whether positions have three axes."""
        self.delta = 0 if positions is None else int(positions.max()) + 1 - positions.shape[1]
        """What is added to the place of a token behind the prompt to get its position."""

    @property
    def can_see(self) -> bool:
        """Whether rows can be computed here."""
        return self._see is not None

    @property
    def end(self) -> int:
        """The index behind the last row; 0 without any."""
        return self.spans[-1].end if self.spans else 0

    def find_positions(self, start: int, end: int) -> Sequence[Sequence[int]]:
        """Return the positions of the tokens from `start` to before `end`, behind the prompt too, on each of three
        axes.
        """
        num_prompt = 0 if self._positions is None else self._positions.shape[1]
        behind = range(max(start, num_prompt) + self.delta, max(end, num_prompt) + self.delta)
        if self._positions is None or start >= num_prompt:  # each step of an answer
            return [behind] * 3
        return [[*axis, *behind] for axis in self._positions[:, start:end].tolist()]

    def find_seen(self, start: int, end: int) -> Iterator[tuple[int, SeenPicture]]:
        """Yield what the model sees in the rows from `start` to before `end`: where each part begins, and the part.

        Waits until it has seen them. Raises `PicturesNeeded` where there are no pixels, and what made seeing fail.
        """
        for span in self.spans:
            first, last = max(start, span.first), min(end, span.end)
            if first < last:
                if self._see is None:
                    raise PicturesNeeded(f"token {first:,} of the prompt is of a picture, whose pixels are not here")
                shift = span.row - span.first
                yield first, self._ask(span.name).result().cut(first + shift, last + shift)

    def has_seen_behind(self, start: int) -> bool:
        """Return whether all is seen that is needed to compute the prompt from a token on. If not, it now will be."""
        return all(seen.done() for seen in self.see_behind(start))

    def see_behind(self, start: int) -> "list[Future[SeenPicture]]":
        """Have the model see what is needed to compute the prompt from a token on."""
        names = dict.fromkeys(span.name for span in self.spans if span.end > start)
        return [] if self._see is None else [self._ask(name) for name in names]

    def _ask(self, name: bytes) -> "Future[SeenPicture]":
        assert self._see is not None
        return self._asked.get(name) or self._asked.setdefault(name, self._see(name))

    def leave_out_rows(self, token_ids: Sequence[int]) -> list[int]:
        """Return the tokens of the prompt that stand for themselves."""
        bounds = [0, *(bound for span in self.spans for bound in (span.first, span.end)), len(token_ids)]
        pairs = zip(bounds[::2], bounds[1::2], strict=True)
        return [token_id for first, end in pairs for token_id in token_ids[first:end]]


def find_spans(token_ids: Sequence[int], picture: PromptPicture, start: int = 0) -> list[Span]:
    """Return where a picture's rows are among the prompt's tokens. Raises `InvalidRequest` if not all of them are there
    from `start` on.
    """
    spans, place, row = list[Span](), picture.first, 0
    while start <= place < len(token_ids) and row < picture.num_rows:
        end, most = place, min(len(token_ids), place + picture.num_rows - row)
        while end < most and token_ids[end] == token_ids[picture.first]:
            end += 1
        if end > place:
            spans.append(Span(place, end - place, picture.name, row))
        row, place = row + end - place, max(end, place + 1)
    if row == picture.num_rows:
        return spans
    raise InvalidRequest(f"the prompt has {row} of the {picture.num_rows} rows of the picture at token {picture.first}")


def find_axis_positions(num_tokens: int, pictures: Sequence[tuple[int, Grid]]) -> NDArray[np.int64]:
    """Return the positions of a prompt's tokens on three axes, [3, tokens].

    `pictures` are the first row of each, and its rows in time, height and width. A picture takes as many positions as
    its longer side has rows, and so the text behind it has lower ones than places.
    """
    parts, place, position = [], 0, 0
    for first, grid in pictures:
        parts.append(np.broadcast_to(np.arange(first - place) + position, (3, first - place)))
        position += first - place
        parts.append(np.indices(grid).reshape(3, -1) + position)
        place, position = first + int(np.prod(grid)), position + max(grid[1:])
    rest = num_tokens - place
    return np.concatenate([*parts, np.broadcast_to(np.arange(rest) + position, (3, rest))], 1)
