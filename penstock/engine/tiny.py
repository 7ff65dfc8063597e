"""A tiny random model of a shrunken configuration, made so that its tokens tell whether it was run right."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from penstock.engine.shrink import CannotShrink

MAX_PARAMETERS = 20_000_000
_SPREADS = ((0.2, 1.5), (1.0, 1.0), (3.0, 2.5), (0.2, 4.0), (1.0, 3.0))
"""By seed: standard deviations of embeddings, and of matrices in units that keep the length of a vector."""


def build_tiny_model(
    kind: type[Any], config: Any, seed: int, device: torch.device, attention: str | None = None
) -> Any:
    """A model of a shrunken configuration in float32, its random weights such that what it says varies."""
    try:
        with torch.device("meta"):
            num_parameters = sum(p.numel() for p in kind._from_config(config).parameters())  # noqa: SLF001
        if num_parameters > MAX_PARAMETERS:
            raise CannotShrink(f"{type(config).__name__}: {num_parameters:,} parameters are left")
        torch.manual_seed(seed)
        options = {} if attention is None else {"attn_implementation": attention}
        module = kind._from_config(config, dtype=torch.float32, **options)  # noqa: SLF001
        _fill_weights(module, seed)
    except CannotShrink:
        raise
    except Exception as error:
        raise CannotShrink(f"{type(config).__name__}: {type(error).__name__}: {error}") from error
    plain: Any = GenerationConfig
    module.generation_config = plain(pad_token_id=0)
    return module.eval().requires_grad_(False).to(device)


@torch.no_grad()
def _fill_weights(module: nn.Module, seed: int) -> None:
    """Weights that let what is attended to decide the next token, so that a mistake there shows."""
    generator = torch.Generator().manual_seed(seed)
    of_embeddings, of_matrices = _SPREADS[seed % len(_SPREADS)]
    embeddings = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if id(parameter) in embeddings:
            parameter.copy_(of_embeddings * noise)
        elif parameter.ndim >= 2:
            parameter.copy_(of_matrices * noise / math.sqrt(math.sqrt(parameter.shape[-1] * parameter.shape[-2])))
        else:
            parameter.add_(0.1 * noise)


def find_layer_kinds(module: nn.Module) -> set[str]:
    """What kinds of layers a model is made of: the classes of their parts, and which of them have a window."""
    kinds: set[str] = set()
    for layers in module.modules():
        if isinstance(layers, nn.ModuleList):
            kinds.update(_layer_signature(layer) for layer in layers)
    return kinds


def _layer_signature(layer: nn.Module) -> str:
    parts = {(type(part).__name__, _has_window(part)) for part in layer.modules()}
    return repr(sorted(parts))


def _has_window(part: nn.Module) -> bool:
    return isinstance(getattr(part, "sliding_window", None), int | Tensor)
