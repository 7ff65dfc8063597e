"""Layers that keep a state instead of keys and values: what they compute follows from each sequence alone.

transformers calls such a layer a mixer. A prompt is read in pieces, one sequence at a time: what torch's operators
compute for a sequence would depend on how many others there are, as they round differently for other sizes. Tokens of
answers are read at once, so that the weights are read once for all: a linear layer's kernel keeps rows apart, the
functions of `tokens` do so, and `rows` lets torch's functions do so.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.memory.states import StateStorage
from penstock.engine.model.compare import find_tolerance, is_close
from penstock.engine.steps.masks import Unsupported
from penstock.engine.steps.state_runs import Group, Piece
from penstock.engine.steps.step import Step, current_step
from penstock.engine.steps.tokens import replace_functions

_BY_TOKEN = {"hidden_states", "position_ids", "position_embeddings"}
"""Arguments that have a part for each token: [1, T, ...]."""
MAX_TOGETHER = 256
"""Tokens of answers that a mixer reads at once."""


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


def choose_together(
    module: nn.Module, dtype: torch.dtype, read: Callable[[int], tuple[StateStorage, Tensor]]
) -> tuple[StateStorage, Tensor] | None:
    """Let a model's mixers read tokens of several sequences at once, if that gives each the same, bit for bit.

    `dtype` is the model's. The result has to be the same as with transformers' own functions, too, but for rounding.
    `read` reads tokens of several sequences, at most so many at once, and returns their states and logits. Returns what
    it did if they do so now, or None.
    """
    mixers = {part: part.forward for part in module.modules() if isinstance(part.forward, DividedForward)}
    firsts = {type(part): mixer.layer for part, mixer in reversed(mixers.items())}

    def read_with(max_together: int) -> tuple[StateStorage, Tensor]:
        for mixer in mixers.values():
            mixer.max_together = max_together
        return read(max_together)

    try:
        plain, alone, *others = map(read_with, (0, 1, 2, MAX_TOGETHER))
        has_bits = all(torch.equal(one.data, alone[0].data) and torch.equal(rest, alone[1]) for one, rest in others)
        if has_bits and all(is_near(alone[0], plain[0], layer, dtype) for layer in firsts.values()):
            return alone
    except (IndexError, RuntimeError, TypeError, Unsupported):  # it uses its states in another way
        pass
    for mixer in mixers.values():
        mixer.max_together = 0
    return None


def is_near(states: StateStorage, others: StateStorage, layer: int, dtype: torch.dtype) -> bool:
    """Return whether the states of a layer of a model are the same but for rounding."""
    return is_close(states.read_layer(layer), others.read_layer(layer), find_tolerance(dtype).state)


class DividedForward:
    """A mixer's forward pass over the flat batch of a step: [1, T, hidden] to the same shape."""

    def __init__(self, plain: Any, layer: int) -> None:
        self._plain, self.layer = plain, layer
        self.max_together = 0
        """So many tokens it reads at once. 0: it reads each like a piece."""

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
        division = step.divide_tokens(self.max_together)
        outputs = [self._read_part(step, part, kwargs, rows) for part in division.parts]
        return _join_rows(outputs, division.order)

    def _read_part(self, step: Step, part: Piece | Group, given: dict[str, Any], rows: dict[str, Any]) -> Any:
        """Return what the mixer makes of a piece, [1, tokens, hidden], or of a group, [tokens, 1, hidden]."""
        dim = int(isinstance(part, Piece))
        given = {**given, **{name: _take_rows(value, part.rows, dim) for name, value in rows.items()}}
        with step.open_states(self.layer, part):
            return self._plain(**given)


def _join_rows(outputs: list[Any], order: Tensor | None) -> Any:
    """Return the output for all rows, [1, T, hidden], from those for parts, and what else the last one has."""
    parts = [output[0] if isinstance(output, tuple) else output for output in outputs]
    whole = torch.cat([part.flatten(0, 1) for part in parts]) if len(parts) > 1 else parts[0].flatten(0, 1)
    if order is not None:
        whole = whole[order]
    return (whole[None], *outputs[-1][1:]) if isinstance(outputs[-1], tuple) else whole[None]


def _take_rows(value: Any, rows: Sequence[int], dim: int) -> Any:
    """Return some tokens of one or several tensors [1, T, ...], along dimension `dim` of two."""
    if isinstance(value, Tensor):
        is_slice = rows[-1] - rows[0] == len(rows) - 1
        return value[0, slice(rows[0], rows[-1] + 1) if is_slice else list(rows)].unsqueeze(1 - dim)
    return tuple(_take_rows(one, rows, dim) for one in value)


def _refuse_rows(step: Step, values: list[Any]) -> None:
    """Raise `Unsupported` if an argument has a part for each token: it would have to be divided, too."""
    for value in values:
        parts = value if isinstance(value, tuple | list) else [value]
        tensors = [part for part in parts if isinstance(part, Tensor) and part.dim() > 1]
        if any(tensor.shape[1] == step.batch.num_tokens for tensor in tensors):
            raise Unsupported("a layer with a state gets more for each token than hidden states")
