"""Layers that keep a state instead of keys and values: what they compute follows from each sequence alone.

transformers calls such a layer a mixer. A prompt is read in pieces, one sequence at a time: what torch's operators
compute for a sequence would depend on how many others there are, as they round differently for other sizes. One token
each of several sequences is read at once, so that the weights are read once for all: a linear layer's kernel keeps rows
apart, the functions of `tokens` do so, and other operators whose rounding depends on the size are called for each.
"""

import sys
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.engine.compare import find_tolerance, is_close
from penstock.engine.masks import Unsupported
from penstock.engine.sequence import Sequence
from penstock.engine.states import StateStorage
from penstock.engine.step import Step, current_step
from penstock.engine.tokens import replace_functions

_BY_TOKEN = {"hidden_states", "position_ids", "position_embeddings"}
"""Arguments that have a part for each token: [1, T, ...]."""
MAX_TOGETHER = 256
"""Sequences of which a mixer reads a token at once."""
_BY_SIZE = {"bmm", "exp", "gelu", "linear", "matmul", "__matmul__", "sigmoid", "silu", "softplus", "tanh"}
"""Operators that round otherwise for other sizes: the elements that are left behind the last whole vectors, or sums."""
_WHOLE_VECTORS = 64
"""So many elements, or a multiple, leave none behind, in any dtype and on any processor."""


def divide_mixers(mixers: dict[int, nn.Module], scan_chunk_tokens: int) -> None:
    """Let each of a model's mixers, by layer, compute the steps of the engine in pieces; other calls stay as they are.

    Its own chunks become no larger than a scan chunk, which would be padded otherwise.
    """
    mixer: Any
    for layer, mixer in mixers.items():
        replace_functions(vars(sys.modules[type(mixer).__module__]))
        if not isinstance(mixer.forward, DividedForward):
            mixer.forward = DividedForward(mixer.forward, layer)
        size: Any = getattr(mixer, "chunk_size", None)
        if isinstance(size, int):
            mixer.chunk_size = min(size, scan_chunk_tokens)


def choose_together(module: nn.Module, dtype: torch.dtype, read: Callable[[], tuple[StateStorage, Tensor]]) -> bool:
    """Let a model's mixers read a token of several sequences at once, if that gives each the same, bit for bit.

    `dtype` is the model's. That has to be the same as with transformers' own functions, too, but for rounding. `read`
    reads tokens of several sequences, and returns their states and logits. Returns whether they do so now.
    """
    mixers = {part: part.forward for part in module.modules() if isinstance(part.forward, DividedForward)}
    firsts = {type(part): mixer.layer for part, mixer in reversed(mixers.items())}

    def read_with(max_together: int) -> tuple[StateStorage, Tensor]:
        for mixer in mixers.values():
            mixer.max_together = max_together
        return read()

    try:
        plain, alone, *others = map(read_with, (0, 1, 2, MAX_TOGETHER))
        has_bits = all(torch.equal(one.data, alone[0].data) and torch.equal(rest, alone[1]) for one, rest in others)
        if has_bits and all(is_near(alone[0], plain[0], layer, dtype) for layer in firsts.values()):
            return True
    except (IndexError, RuntimeError, TypeError, Unsupported):  # it uses its states in another way
        pass
    for mixer in mixers.values():
        mixer.max_together = 0
    return False


def is_near(states: StateStorage, others: StateStorage, layer: int, dtype: torch.dtype) -> bool:
    """Return whether the states of a layer of a model are the same but for rounding."""
    return is_close(states.read_layer(layer), others.read_layer(layer), find_tolerance(dtype).state)


class DividedForward:
    """A mixer's forward pass over the flat batch of a step: [1, T, hidden] to the same shape."""

    def __init__(self, plain: Any, layer: int) -> None:
        self._plain, self.layer = plain, layer
        self.max_together = 0
        """Of so many sequences it reads a token at once. 0: it reads tokens like pieces."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the mixer returns."""
        step = current_step.get(None)
        if step is None or step.storage.states is None:
            return self._plain(*args, **kwargs)
        if args:
            kwargs, args = {"hidden_states": args[0], **kwargs}, args[1:]
            if args:
                raise Unsupported("a layer with a state gets arguments without a name")
        rows = {name: value for name, value in kwargs.items() if name in _BY_TOKEN and value is not None}
        _refuse_rows(step, [value for name, value in kwargs.items() if name not in rows])
        outputs = _Outputs()
        row, tokens = 0, list[_Token]()
        for seq, num_tokens in step.batch.plan:
            start = seq.num_computed_tokens
            for first, last in step.storage.states.layout.cut_pieces(start, start + num_tokens, seq.num_prompt_tokens):
                token = _Token(row, seq, last)
                if not (self.max_together and first and last - first == 1):
                    piece = range(row, row + last - first)
                    given = {name: _take_rows(value, piece, 1) for name, value in rows.items()}
                    with step.open_state(self.layer, seq, first):
                        outputs.add_rows(piece, self._plain(**{**kwargs, **given}), 0)
                    step.keep_snapshot(self.layer, seq, last)
                elif num_tokens == 1:
                    tokens.append(token)
                else:
                    outputs.add_rows([row], self._read_tokens(step, [token], kwargs, rows), 1)
                row += last - first
        while tokens:
            some, tokens = tokens[: self.max_together], tokens[self.max_together :]
            outputs.add_rows([token.row for token in some], self._read_tokens(step, some, kwargs, rows), 1)
        return outputs.join_rows()

    def _read_tokens(self, step: Step, tokens: list["_Token"], given: dict[str, Any], rows: dict[str, Any]) -> Any:
        """Return what the mixer makes of one token of each sequence: [sequences, 1, hidden]."""
        places = [token.row for token in tokens]
        given = {**given, **{name: _take_rows(value, places, 0) for name, value in rows.items()}}
        apart = _RowsApart(len(tokens)) if len(tokens) > 1 else nullcontext()
        with step.open_rows(self.layer, tuple(token.seq.state_row for token in tokens)), apart:
            output = self._plain(**given)
        for token in tokens:
            step.keep_snapshot(self.layer, token.seq, token.position)
        return output


class _Token(NamedTuple):
    """A token that a mixer reads alone, or at once with others."""

    row: int
    """In the flat batch."""
    seq: Sequence
    position: int
    """How many tokens the sequence has with it."""


class _Outputs:
    """A mixer's outputs for parts of a flat batch."""

    def __init__(self) -> None:
        self._rows: list[int] = []
        self._found: list[Tensor] = []
        self._rest: tuple[Any, ...] | None = None
        """What else the mixer returned last, if it returns several things."""

    def add_rows(self, rows: Iterable[int], output: Any, dim: int) -> None:
        """Add the output for some rows, which is [1, rows, hidden] or, with `dim` 1, [rows, 1, hidden]."""
        if isinstance(output, tuple):
            output, *rest = output
            self._rest = tuple(rest)
        self._rows += rows
        self._found.append(output.squeeze(dim))

    def join_rows(self) -> Any:
        """Return the output for all rows, [1, T, hidden], in their order."""
        whole = torch.cat(self._found)
        if self._rows != sorted(self._rows):
            whole = whole[torch.tensor(self._rows).argsort()]
        return whole[None] if self._rest is None else (whole[None], *self._rest)


class _RowsApart(TorchFunctionMode):
    """Within its context operators that round otherwise for other sizes are called for each row of [rows, .., ..]."""

    def __init__(self, num_rows: int) -> None:
        super().__init__()
        self._num_rows = num_rows

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.__name__ not in _BY_SIZE:
            return func(*args, **kwargs)
        has_rows = [self._has_rows(one) for one in args]
        is_whole = len(args[0]) and func.__name__ not in ("bmm", "linear", "matmul", "__matmul__")
        if not any(has_rows) or (is_whole and args[0][0].numel() % _WHOLE_VECTORS == 0):
            return func(*args, **kwargs)
        each = [
            func(*(one[row : row + 1] if has else one for one, has in zip(args, has_rows, strict=True)), **kwargs)
            for row in range(self._num_rows)
        ]
        return torch.cat(each)

    def _has_rows(self, value: object) -> bool:
        return isinstance(value, Tensor) and value.dim() > 2 and len(value) == self._num_rows


def _take_rows(value: Any, rows: Iterable[int], dim: int) -> Any:
    """Return some tokens of one or several tensors [1, T, ...], along dimension `dim` of two."""
    if isinstance(value, Tensor):
        return value[0, list(rows)].unsqueeze(1 - dim)
    return tuple(_take_rows(one, rows, dim) for one in value)


def _refuse_rows(step: Step, values: list[Any]) -> None:
    """Raise `Unsupported` if an argument has a part for each token: it would have to be divided, too."""
    for value in values:
        parts = value if isinstance(value, tuple | list) else [value]
        tensors = [part for part in parts if isinstance(part, Tensor) and part.dim() > 1]
        if any(tensor.shape[1] == step.batch.num_tokens for tensor in tensors):
            raise Unsupported("a layer with a state gets more for each token than hidden states")
