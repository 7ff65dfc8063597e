"""Record what the unchanged model's parts read and give, by which native parts are compared with them."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from penstock.engine.memory.storage import KVStorage
from penstock.engine.model.experts import find_mixtures
from penstock.engine.model.layer import find_layer_parts
from penstock.engine.model.model import LoadedModel
from penstock.engine.model.trial import draw_tokens, make_trial_sequence
from penstock.engine.steps import hooks
from penstock.engine.steps.masks import sees_interval
from penstock.engine.steps.step import make_step
from penstock.engine.steps.step_batch import StepBatch

NUM_PROBE_TOKENS = 6
"""How many tokens the model reads for the comparison."""


@dataclass
class ModuleCall:
    """The inputs and the output of one call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    """A tensor; routers give several."""


@dataclass
class ForwardRecord:
    """The inputs and outputs of a model and of its parts in one forward pass."""

    calls: dict[str, ModuleCall] = field(default_factory=dict)
    """The last call of each norm and decoder layer, by the module's name."""
    mixtures: dict[str, ModuleCall] = field(default_factory=dict)
    """The same of experts, of routers, and of the MLPs of decoder layers that they are in."""
    inputs: dict[tuple[str, int], list[str]] = field(default_factory=dict)
    """The names of the linear layers, by the name of their parent module and the `id` of the tensor they read."""
    kept: list[Tensor] = field(default_factory=list)
    """These tensors, which live as long as the record so that no other tensor gets the same `id`."""
    layers: frozenset[int] = frozenset()
    """The layers whose attention the kernels can compute: K and V are the cache's, and the mask has no gaps."""
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    """The output of the model: [T, vocabulary]."""
    position_ids: Tensor = field(default_factory=lambda: torch.empty(0))
    """The last positions of the context, because differences that depend on the position show there: [1, T]."""


def is_linear(module: nn.Module) -> bool:
    """Return whether the module is a linear layer, and not of a class that is derived from one."""
    return type(module) in (nn.Linear, Conv1D)


def record_forward(model: LoadedModel) -> ForwardRecord:
    """Run the unchanged model over a few tokens and return the inputs and outputs of its parts."""
    record, handles = ForwardRecord(), []
    for name, part in model.module.named_modules():
        if is_linear(part):
            handles.append(part.register_forward_pre_hook(_make_input_hook(record, name)))
        elif is_norm(part) or find_layer_parts(part, is_linear) is not None:
            handles.append(part.register_forward_hook(_make_call_hook(record.calls, name), with_kwargs=True))
    for experts, routers in find_mixtures(model.module):
        for name in {experts, *routers, experts.rpartition(".")[0]}:
            note = _make_call_hook(record.mixtures, name, takes_tuples=True)
            handles.append(model.module.get_submodule(name).register_forward_hook(note, with_kwargs=True))
    batch = make_batch(model)
    step = make_step(batch, make_storage(model))
    record.position_ids = place_probe(model, batch)
    try:
        output = hooks.run_module(model.module, step, position_ids=record.position_ids)
        record.logits = output.logits[0].float()
    finally:
        for handle in handles:
            handle.remove()
    record.layers = frozenset(layer for layer, how in step.attention_by_layer.items() if sees_interval(how.visible))
    return record


def _make_input_hook(record: ForwardRecord, name: str) -> Any:
    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        record.kept.append(args[0])
        record.inputs.setdefault((name.rpartition(".")[0], id(args[0])), []).append(name)

    return note


def _make_call_hook(calls: dict[str, ModuleCall], name: str, *, takes_tuples: bool = False) -> Any:
    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        # A norm may be called several times. Any call will do for the comparison, and the last one is kept.
        if isinstance(output, Tensor):
            calls[name] = ModuleCall(args, kwargs, output.clone())
        elif takes_tuples and isinstance(output, tuple) and all(isinstance(part, Tensor) for part in output):
            calls[name] = ModuleCall(args, kwargs, tuple(part.clone() for part in output))

    return note


def is_norm(module: nn.Module) -> bool:
    """Return whether the module is an RMSNorm by its name and its weight."""
    weight = getattr(module, "weight", None)
    return type(module).__name__.endswith("RMSNorm") and isinstance(weight, Tensor) and weight.dim() == 1


def draw_probe(model: LoadedModel, seed: int) -> list[int]:
    """Return the few tokens that the model reads for the comparison."""
    return draw_tokens(model.vocab_size, min(NUM_PROBE_TOKENS, model.context_length - 1), seed)


def make_batch(model: LoadedModel) -> StepBatch:
    """Return a step that reads these tokens as a prompt."""
    seq = make_trial_sequence(draw_probe(model, 7), blocks=range(NUM_PROBE_TOKENS))
    return StepBatch([(seq, seq.num_prompt_tokens)], model.layout.block_size, model.device)


def place_probe(model: LoadedModel, batch: StepBatch) -> Tensor:
    """Return the last positions of the context, or the first ones where the model counts what is cached: [1, T]."""
    if model.layout.attends_internally:
        return batch.position_ids
    return batch.position_ids + max(0, model.context_length - NUM_PROBE_TOKENS)


def make_storage(model: LoadedModel) -> KVStorage:
    """Return a pool in the model's dtype, by which parts are compared: what int8 loses is not theirs."""
    return KVStorage(replace(model.layout, is_int8=False), NUM_PROBE_TOKENS, model.device)


def input_of(call: ModuleCall) -> Tensor:
    """Return the hidden states that the module was called with."""
    given = call.args[0] if call.args else call.kwargs["hidden_states"]
    assert isinstance(given, Tensor)
    return given
