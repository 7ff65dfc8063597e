"""How one step's attention is computed: in torch over gathered rows, unless a subclass has a kernel for the layer.

A model that attends by itself gets K and V of its one sequence as transformers' own cache would return them.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cached_property

from torch import Tensor
from transformers.cache_utils import LinearAttentionLayer

from penstock.engine.kernels.recurrence import Runs
from penstock.engine.memory.storage import KVStorage, number_index_keys
from penstock.engine.steps.attention import GatheredRows, LayerAttention, attend_gathered
from penstock.engine.steps.masks import OwnAttention, Unsupported
from penstock.engine.steps.rows import RowsApart
from penstock.engine.steps.state_runs import Division, Group, Piece
from penstock.engine.steps.step_batch import StepBatch


class Step:
    """One step over a batch: the layers write their K and V to the pool, and attend to what the pool holds."""

    def __init__(self, batch: StepBatch, storage: KVStorage) -> None:
        self.batch, self.storage = batch, storage
        self.num_cached_tokens = 0
        """How many tokens the model takes for cached. None, as it is told the positions of all tokens."""
        self.num_attention_calls = 0
        """How often a layer's attention was computed in this step."""
        self.attention_by_layer: dict[int, LayerAttention] = {}
        """By layer whose attention in torch got exactly the K and V that `write_kv` returned: its parameters."""
        self._kv_by_layer: dict[int, tuple[Tensor, Tensor]] = {}
        """By layer: the K and V that `write_kv` returned."""
        self._open_state: tuple[int, LinearAttentionLayer] | None = None
        """The layer with a state that is computed now, and its state of the sequence that it reads, or all states."""
        self.state_runs: Runs | None = None
        """The tokens of several sequences that the layer reads at once; None: it reads one sequence."""
        self.rows = RowsApart()
        """Keeps rows apart where it is entered: around the whole step, or in groups of tokens."""
        self.is_within_rows = False
        """Whether it is around the whole step."""
        self._division: Division | None = None

    @cached_property
    def gathered(self) -> GatheredRows:
        """The rows that each sequence attends to, for attention in torch."""
        return GatheredRows(self.batch.plan, self.batch.block_size, self.batch.device)

    def write_kv(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store new K and V, [1, heads, T, size]; return those to attend to, here of all gathered rows."""
        keys, values = self.storage.keys[layer], self.storage.values[layer]
        self.store_rows(layer, key, value)
        table = self.gathered.block_ids
        return self.keep_kv(layer, gather_rows(keys, table), gather_rows(values, table))

    def store_rows(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store new K and V, both [1, heads, T, size], with torch."""
        self.storage.keys[layer].index_put_(self.batch.slots, key[0].transpose(0, 1))
        self.storage.values[layer].index_put_(self.batch.slots, value[0].transpose(0, 1))

    def keep_kv(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return K and V, and remember that they are this layer's."""
        self._kv_by_layer[layer] = found = (key, value)
        return found

    def write_index_keys(self, layer: int, keys: Tensor) -> Tensor:
        """Store the keys of a sparse layer's indexer; return those of all tokens. Raises `OwnAttention` here."""
        raise OwnAttention("a sparse indexer keeps keys of its own")

    def find_layer(self, key: Tensor, value: Tensor) -> int | None:
        """Return the layer for which `write_kv` returned exactly these tensors, or None."""
        found = (layer for layer, (k, v) in reversed(self._kv_by_layer.items()) if k is key and v is value)
        return next(found, None)

    def compute_attention(self, query: Tensor, key: Tensor, value: Tensor, how: LayerAttention) -> Tensor:
        """Compute a layer's attention: query [1, heads, T, size] to [1, T, heads, size of V]."""
        layer = self.find_layer(key, value)
        if layer is not None:
            self.attention_by_layer[layer] = how
        if key.shape[2] != self.gathered.num_rows:
            raise Unsupported("a layer's keys and values do not come from the cache")
        return attend_gathered(self.gathered, (query, key, value), how)

    @contextmanager
    def open_states(self, layer: int, part: Piece | Group) -> Iterator[None]:
        """Let a layer within the context read a part of the batch into its states, and keep the snapshots behind it.

        A piece's state is as if there was no other; those of a group are among the states of all rows.
        """
        assert self.storage.states is not None
        rows = self.rows
        if isinstance(part, Group):
            pieces, row, rows.num_rows, self.state_runs = part.pieces, slice(None), len(part.rows), part.runs
        else:
            pieces, row, rows.num_rows = [part], slice(part.seq.state_row, part.seq.state_row + 1), 0
        rows.is_group = self.state_runs is not None
        self._open_state = layer, self.storage.states.open_layer(layer, row, is_new=pieces[0].start == 0)
        try:
            with rows if rows.num_rows > 1 and not self.is_within_rows else nullcontext():
                yield
        finally:
            self._open_state = self.state_runs = None
            rows.num_rows, rows.is_group = self.batch.num_tokens, False
        for piece in pieces:
            snapshot = self.batch.snapshot_rows.get((piece.seq, piece.end))
            if snapshot is not None:
                self.storage.states.copy_layer(piece.seq.state_row, snapshot, layer)

    def divide_tokens(self, max_together: int) -> Division:
        """Return how layers with a state read the batch; all of a model have the same limit."""
        if self._division is None:
            assert self.storage.states is not None
            self._division = Division(self.batch, self.storage.states, max_together)
        return self._division

    def find_state(self, layer: int) -> LinearAttentionLayer:
        """Return the state of the layer and the sequence that are computed now."""
        if self._open_state is None or self._open_state[0] != layer:
            raise Unsupported("a layer's state is used outside of the layer")
        return self._open_state[1]


class SingleSequenceStep(Step):
    """A step over one sequence, whose model computes the attention itself: it takes the tokens before for cached."""

    def __init__(self, batch: StepBatch, storage: KVStorage) -> None:
        super().__init__(batch, storage)
        (seq, num), *others = batch.plan
        assert not others, "a model that attends by itself reads one sequence at a time"
        self.num_cached_tokens = seq.num_computed_tokens
        self._length = seq.num_computed_tokens + num

    def write_kv(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store new K and V, [1, heads, T, size]; return those of all tokens of the sequence."""
        keys, values = super().write_kv(layer, key, value)
        return keys[:, :, : self._length], values[:, :, : self._length]

    def write_index_keys(self, layer: int, keys: Tensor) -> Tensor:
        """Store the keys of a sparse layer's indexer, [1, T, size]; return those of all tokens."""
        number = number_index_keys(layer)
        nothing = keys.new_empty(1, 0, keys.shape[1], 0)
        return self.write_kv(number, keys[:, None], nothing)[0][:, 0]


def make_step(batch: StepBatch, storage: KVStorage) -> Step:
    """Return a step that is computed with torch."""
    return (SingleSequenceStep if storage.layout.attends_internally else Step)(batch, storage)


current_step: ContextVar[Step] = ContextVar("current_step")
"""The step that is computed now. Not every architecture passes extra arguments on to its attention."""


def gather_rows(pool: Tensor, table: Tensor) -> Tensor:
    """Return the rows of the blocks in `table`, of a layer's K or V: [1, heads, rows, size]."""
    return pool.index_select(0, table).flatten(0, 1).transpose(0, 1)[None]
