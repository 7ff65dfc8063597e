"""Layers that keep a state instead of keys and values read one sequence at a time, in pieces that follow from it alone.

transformers calls such a layer a mixer. It would take several sequences in one call, but what it computes for one of
them would then depend on how many the others are: torch's operators round differently for other sizes.
"""

from typing import Any

import torch
from torch import Tensor, nn

from penstock.engine.masks import Unsupported
from penstock.engine.step import Step, current_step

_BY_TOKEN = {"hidden_states", "position_ids", "position_embeddings"}
"""Arguments that have a part for each token: [1, T, ...]."""


def divide_mixers(mixers: dict[int, nn.Module], scan_chunk_tokens: int) -> None:
    """Let each of a model's mixers, by layer, compute the steps of the engine in pieces; other calls stay as they are.

    Its own chunks become no larger than a scan chunk, which would be padded otherwise.
    """
    mixer: Any
    for layer, mixer in mixers.items():
        if not isinstance(mixer.forward, _DividedForward):
            mixer.forward = _DividedForward(mixer.forward, layer)
        size: Any = getattr(mixer, "chunk_size", None)
        if isinstance(size, int):
            mixer.chunk_size = min(size, scan_chunk_tokens)


class _DividedForward:
    """A mixer's forward pass over the flat batch of a step: [1, T, hidden] to the same shape."""

    def __init__(self, plain: Any, layer: int) -> None:
        self._plain, self._layer = plain, layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step = current_step.get(None)
        if step is None or step.storage.states is None:
            return self._plain(*args, **kwargs)
        if args:
            kwargs, args = {"hidden_states": args[0], **kwargs}, args[1:]
            if args:
                raise Unsupported("a layer with a state gets arguments without a name")
        rows = {name: value for name, value in kwargs.items() if name in _BY_TOKEN and value is not None}
        _refuse_rows(step, [value for name, value in kwargs.items() if name not in rows])
        outputs: list[Tensor] = []
        row, rest = 0, None
        for seq, num_tokens in step.batch.plan:
            start = seq.num_computed_tokens
            for first, last in step.storage.states.layout.cut_pieces(start, start + num_tokens, seq.num_prompt_tokens):
                part = slice(row + first - start, row + last - start)
                piece = {name: _take_rows(value, part) for name, value in rows.items()}
                with step.open_state(self._layer, seq, first):
                    output = self._plain(**{**kwargs, **piece})
                step.keep_snapshot(self._layer, seq, last)
                if isinstance(output, tuple):
                    output, *rest = output
                outputs.append(output)
            row += num_tokens
        whole = torch.cat(outputs, 1)
        return whole if rest is None else (whole, *rest)


def _take_rows(value: Any, part: slice) -> Any:
    """Return some tokens of [1, T, ...], or of each of several such tensors."""
    if isinstance(value, Tensor):
        return value[:, part].contiguous()
    return tuple(_take_rows(one, part) for one in value)


def _refuse_rows(step: Step, values: list[Any]) -> None:
    """Raise `Unsupported` if an argument has a part for each token: it would have to be divided, too."""
    for value in values:
        parts = value if isinstance(value, tuple | list) else [value]
        tensors = [part for part in parts if isinstance(part, Tensor) and part.dim() > 1]
        if any(tensor.shape[1] == step.batch.num_tokens for tensor in tensors):
            raise Unsupported("a layer with a state gets more for each token than hidden states")
