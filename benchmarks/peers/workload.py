"""What every engine is asked to do, and the rates that follow from when its tokens came.

A request is (prompt token ids, number of new tokens); those of one run are submitted at once, answered with the same
temperature and nothing else that limits the choice, and end by length only. A timeline has an entry a step: (seconds
since the submission, indices of the requests that got a token), an index as often as it got one.
"""

import random
from dataclasses import dataclass, replace

Request = tuple[list[int], int]
Timeline = list[tuple[float, list[int]]]


@dataclass(frozen=True)
class Rates:
    """Three ways to look at a timeline."""

    first_s: float
    """Until the last of the requests had its first token."""
    decode: float
    """Tokens per second after that; 0 if there were none."""
    output: float
    """Tokens per second, from the submission to the end."""


def compute_rates(timeline: Timeline, requests: list[Request]) -> Rates:
    """Raises `ValueError` if the tokens are not those that were asked for."""
    missing = [new for _, new in requests]
    without_first = set(range(len(requests)))
    first_s, tokens, later = 0.0, 0, 0
    for at_s, indices in timeline:
        if without_first:
            first_s = at_s
        else:
            later += len(indices)
        for index in indices:
            missing[index] -= 1
            without_first.discard(index)
        tokens += len(indices)
    if any(missing):
        raise ValueError(f"tokens are missing or too many: {missing}")
    end_s = timeline[-1][0]
    return Rates(first_s, later / (end_s - first_s) if later else 0.0, tokens / end_s)


@dataclass(frozen=True)
class Cell:
    """One number of the comparison; more is better."""

    name: str
    batch: int
    prompt: tuple[int, int]
    """Shortest and longest."""
    new: tuple[int, int]
    """Fewest and most."""
    temperature: float = 0.0

    @property
    def greedy_name(self) -> str:
        """The name of the cell with the same work at temperature 0."""
        return self.name.removesuffix(DRAWN_SUFFIX)

    @property
    def is_mixed(self) -> bool:
        """Whether the requests of a run differ in length: no work for a static batch."""
        return self.prompt[0] != self.prompt[1]

    def make_requests(self, vocabulary: int, seed: int) -> list[Request]:
        """Random prompts of one run: other tokens with each seed, the same lengths with all and at any temperature."""
        lengths, chance = random.Random(self.greedy_name), random.Random(f"{self.greedy_name} {seed}")
        sizes = [(lengths.randint(*self.prompt), lengths.randint(*self.new)) for _ in range(self.batch)]
        return [([chance.randrange(300, vocabulary) for _ in range(length)], new) for length, new in sizes]

    def compute_value(self, timeline: Timeline, requests: list[Request]) -> float:
        """Tokens a second: of the prompt where one token is asked for, of all output in mixed work, else of decode."""
        found = compute_rates(timeline, requests)
        if self.new == (1, 1):
            return len(requests[0][0]) / found.first_s
        return found.output if self.is_mixed else found.decode


DRAWN_SUFFIX = "_t1"
"""Ends the name of a cell that is another one at temperature 1."""
CELLS = (
    *(Cell(f"decode_b{batch}", batch, (64, 64), (64, 64)) for batch in (1, 8, 32)),
    *(Cell(f"prefill_{length}", 1, (length, length), (1, 1)) for length in (512, 2048)),
    Cell("continuous", 64, (32, 512), (16, 128)),
)
DRAWN_CELLS = tuple(replace(cell, name=f"{cell.name}{DRAWN_SUFFIX}", temperature=1.0) for cell in CELLS)
MAX_BATCH = 64
MAX_LENGTH = 2304
"""Tokens of the longest request, with room to round up."""
CHECK_CELL = Cell("check", 1, (16, 16), (8, 8))
"""Its tokens show whether a converted model is still the same one."""
