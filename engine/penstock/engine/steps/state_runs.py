"""How layers that keep a state read the tokens of a step: prompts in pieces, all other tokens at once.

Guessed tokens are read into a copy of the state. A layer's inputs for them are kept until the step's tokens are drawn.
Then the right guesses are read once more, into the state itself.
"""

from itertools import chain, zip_longest
from typing import NamedTuple

import torch

from penstock.engine.kernels.recurrence import Run, Runs
from penstock.engine.memory.states import Guess, StateStorage
from penstock.engine.sequence import Sequence
from penstock.engine.steps.step_batch import StepBatch


class Piece(NamedTuple):
    """Tokens of a sequence, one behind the other."""

    seq: Sequence
    start: int
    """How many tokens the sequence has before them."""
    rows: range
    """Where they are in the flat batch."""

    @property
    def end(self) -> int:
        """How many tokens the sequence has with them."""
        return self.start + len(self.rows)


class Group(NamedTuple):
    """Tokens that are read at once."""

    pieces: list[Piece]
    rows: list[int]
    """Where they are in the flat batch."""
    runs: Runs


class Division:
    """The parts of a step's batch, the same for all layers, which read them in this order."""

    def __init__(self, batch: StepBatch, storage: StateStorage, max_together: int) -> None:
        """Single tokens are read in groups of `max_together` at most; with 0 each is a piece by itself."""
        self._batch, self._storage, self._max_together = batch, storage, max_together
        self.parts: list[Piece | Group] = []
        """The pieces that are read by themselves, then the groups."""
        row, runs = 0, list[list[Piece]]()
        for seq, num_tokens in batch.plan:
            runs.append(self._cut_tokens(seq, range(row, row + num_tokens)))
            row += num_tokens
        for each in zip_longest(*runs):
            pieces = [piece for piece in each if piece is not None]
            while pieces:
                pieces = self._group_first(pieces)
        rows = list(chain.from_iterable(part.rows for part in self.parts))
        self.order = None if rows == sorted(rows) else torch.tensor(rows).argsort()
        """Where the rows of the batch are among those of the parts; None: at the same places."""

    def _cut_tokens(self, seq: Sequence, rows: range) -> list[Piece]:
        """Add what is read by itself to the parts, and return the runs of single tokens, each read in a group."""
        start, end = seq.num_computed_tokens, seq.num_computed_tokens + len(rows)
        runs, begin = list[Piece](), start
        for first, last in self._storage.layout.cut_pieces(start, end, seq.num_prompt_tokens):
            is_single = self._max_together and first and last - first == 1
            is_cut = last == end or last - begin == self._max_together or (seq, last) in self._batch.snapshot_rows
            if not is_single or is_cut:
                piece = Piece(seq, begin, rows[begin - start : last - start])
                (runs if is_single else self.parts).append(piece)
                begin = last
        return runs

    def _group_first(self, pieces: list[Piece]) -> list[Piece]:
        """Put the first of these runs, of a sequence each, into a group; return those that have no place in it."""
        runs, rows = list[Run](), list[int]()
        for piece in pieces:
            if rows and len(rows) + len(piece.rows) > self._max_together:
                break
            num_kept = min(len(piece.rows), max(0, len(piece.seq.token_ids) - piece.start))
            runs.append(Run(piece.seq.state_row, len(rows), len(piece.rows), num_kept))
            rows += piece.rows
        group = Group(pieces[: len(runs)], rows, Runs(runs))
        self.parts.append(group)
        for piece, run in zip(group.pieces, runs, strict=True):
            if run.kept < run.length:
                guess = Guess(piece.seq, piece.start + run.kept, group.runs, run.first + run.kept)
                self._storage.guesses.append(guess)
        return pieces[len(runs) :]
