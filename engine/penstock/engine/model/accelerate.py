"""Choose a model's backend, and replace parts of the model by native kernels where these are the backend.

1. The unchanged model reads a few tokens, and the inputs and outputs of its parts are recorded.
2. The experts of a mixture become one native call (`experts.py`), and so does a decoder layer of the common form, with
   or without a mixture (`layer.py`). In other layers RMSNorms and linear layers are replaced one by one; linear layers
   with the same input are packed together.
3. New experts, a new layer or norm are given the recorded inputs of the original, and stay only if the output is the
   same.

An original's weights are freed as soon as they are packed, so that memory never holds the model twice.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu
from transformers.pytorch_utils import Conv1D

from penstock.engine.kernels.library import TORCH, Library, load_library
from penstock.engine.kernels.norm import NativeNorm
from penstock.engine.kernels.packed import (
    DTYPES,
    Activation,
    PackedEmbedding,
    PackedFollower,
    PackedLinear,
    Release,
    keep_weight,
    weight_of,
)
from penstock.engine.memory.states import StateStorage
from penstock.engine.memory.storage import KVStorage
from penstock.engine.model.compare import find_tolerance, is_close, measure_logits_error
from penstock.engine.model.experts import NativeExperts, find_experts_parts, find_mixtures, pack_experts, pack_router
from penstock.engine.model.layer import NativeLayer, NativeModel, find_layer_parts, has_experts, make_native_model
from penstock.engine.model.mixers import choose_together
from penstock.engine.model.model import LoadedModel
from penstock.engine.model.trial import compute_tokens, draw_tokens, make_trial_sequence
from penstock.engine.sequence import Sequence
from penstock.engine.steps import hooks
from penstock.engine.steps.latent import (
    LatentHeads,
    attend_twice,
    find_latent_layers,
    make_latent_heads,
    set_latent_heads,
)
from penstock.engine.steps.masks import MaskRule, Unsupported, sees_interval
from penstock.engine.steps.native_step import Body, NativeParts, NativeStep
from penstock.engine.steps.rows import RowsApart, WatchedRows, keeps_rows_apart
from penstock.engine.steps.runner import ModelRunner
from penstock.engine.steps.step import make_step
from penstock.engine.steps.step_batch import StepBatch
from penstock.engine.weights.forms import GGUF, QUANTIZED, WeightPacker
from penstock.errors import ModelLoadError

NUM_PROBE_TOKENS = 6
"""How many tokens the model reads for the comparison."""


@dataclass
class _ModuleCall:
    """The inputs and the output of one call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    """A tensor; routers give several."""


@dataclass
class _ForwardRecord:
    """The inputs and outputs of a model and of its parts in one forward pass."""

    calls: dict[str, _ModuleCall] = field(default_factory=dict)
    """The last call of each norm and decoder layer, by the module's name."""
    mixtures: dict[str, _ModuleCall] = field(default_factory=dict)
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


@torch.inference_mode()
def accelerate_model(model: LoadedModel, weights: str = "auto") -> LoadedModel:
    """Return the model with what computes it fastest here: the native kernels, or torch.

    For the native kernels the module is changed in place, and only the returned model can be used any more. `weights`
    is the setting. Raises `ModelLoadError` where the weights cannot have that form.
    """
    is_native = can_pack(model.device, model.dtype)
    if not is_native and weights in ("p12", *QUANTIZED):
        raise ModelLoadError(
            f"PENSTOCK_ENGINE_WEIGHTS={weights} needs the native kernels, a CPU, and float32 or bfloat16: set `auto`"
        )
    if not is_native and model.layout.is_int8:
        raise ModelLoadError(
            "PENSTOCK_ENGINE_KV_DTYPE=int8 needs the native kernels, a CPU, and float32 or bfloat16: set `auto`"
        )
    native = load_library()
    if native is None or not is_native:
        return model
    if not model.layout.attends_internally:
        _absorb_projections(model)
    record = _record_forward(model)
    if model.layout.is_int8 and (record.layers != model.layout.by_layer.keys() or model.layout.states is not None):
        raise ModelLoadError(
            "PENSTOCK_ENGINE_KV_DTYPE=int8 is for models whose attention the native kernels compute in all layers, and "
            "this is none: set `auto`"
        )
    replacer = _Replacer(model, native, record, weights)
    replacer.replace_parts()
    is_quantized = weights in QUANTIZED
    if is_quantized and not replacer.packer.num_quantized:
        raise ModelLoadError(f"PENSTOCK_ENGINE_WEIGHTS={weights}: it has no linear layers that could be made integers")
    is_from_gguf = replacer.packer.num_from_gguf > 0
    model.weights.read_to_stay(*model.module.modules())
    has_experts = any(isinstance(part, NativeExperts) for part in model.module.modules())
    has_latents = any(isinstance(part, LatentHeads) for part in model.module.modules())
    parts = NativeParts(native, record.layers, replacer.build_native_model(), has_experts, has_latents)
    if model.layout.states is not None:
        parts = _read_together(model, parts)
    form = weights if is_quantized else GGUF if is_from_gguf else ""
    return replace(model, native=parts, weight_form=form)


def _read_together(model: LoadedModel, parts: NativeParts) -> NativeParts:
    """Return the parts, and with them whether states read single tokens at once, and rows do not depend on others."""
    torch.set_num_threads(1)  # as it will be beside the kernels
    together, rows = replace(parts, has_states=True), WatchedRows()
    a_token_each = dict.fromkeys(range(NUM_PROBE_TOKENS), 1)

    def read_answers(max_together: int) -> tuple[StateStorage, Tensor]:
        return _read_answers(model, parts, rows if max_together else None, [a_token_each] * 2)

    right = choose_together(model.module, model.dtype, read_answers)
    if right is None:
        return parts
    two_tokens_each = dict.fromkeys(range(1, NUM_PROBE_TOKENS), 2)
    found = [
        _read_answers(model, parts, rows, [{0: 1}, {0: 1, **two_tokens_each}]),
        _read_answers(model, parts, rows, [], guesses=True),
    ]
    is_same = all(torch.equal(states.data, right[0].data) and torch.equal(rest, right[1]) for states, rest in found)
    has_attention = parts.layers == model.layout.by_layer.keys()
    if not (is_same and has_attention and rows.is_exact):
        return together
    return replace(together, keeps_rows_apart=True, has_uneven_rows=rows.has_split)


def _read_answers(
    model: LoadedModel,
    parts: NativeParts,
    rows: RowsApart | None,
    steps: list[dict[int, int]],
    *,
    guesses: bool = False,
) -> tuple[StateStorage, Tensor]:
    """Read prompts, and two tokens of answers to them, in steps; return their states, and the logits of the last ones.

    A step has a number of tokens by prompt. With `guesses` one more step has all second tokens as guesses.
    """
    storage = KVStorage(model.layout, NUM_PROBE_TOKENS, model.device, 3 * NUM_PROBE_TOKENS)
    assert storage.states is not None
    runner, logits = ModelRunner(model.module, storage, parts, rows), torch.empty(0)
    tokens = [_draw_probe(model, seed) for seed in range(NUM_PROBE_TOKENS)]
    seqs = [
        make_trial_sequence(some[:-2], some[-2:], blocks=[seed], state_row=2 * seed + 1)
        for seed, some in enumerate(tokens)
    ]
    prompts = {number: seq.num_prompt_tokens for number, seq in enumerate(seqs)}
    for step in (prompts, *steps):
        logits = compute_tokens(runner, [(seqs[number], num_tokens) for number, num_tokens in step.items()])
    if guesses:
        logits = _read_guesses(runner, seqs, model.vocab_size)
        storage.states.read_right_guesses()
    return storage.states, logits


def _read_guesses(runner: ModelRunner, seqs: list[Sequence], vocab_size: int) -> Tensor:
    """Read a token of each sequence, its last one as a guess, and a wrong guess; return the logits after the last ones.

    What is left to do is to read the right guesses into the states.
    """
    for seq in seqs:
        last = seq.token_ids.pop()
        seq.draft = [last, (last + 1) % vocab_size]
    logits = compute_tokens(runner, [(seq, 1) for seq in seqs])
    for seq in seqs:
        seq.token_ids.append(seq.draft[0])
        seq.num_computed_tokens += 1
    return logits[1::3]


def _absorb_projections(model: LoadedModel) -> None:
    """Let tokens of answers attend to latents where that gives the same, but for rounding."""
    for part in list(find_latent_layers(model.module)):
        heads = make_latent_heads(part)
        right, mine = attend_twice(part, heads, NUM_PROBE_TOKENS)
        if is_close(mine, right, find_tolerance(model.dtype).part):
            set_latent_heads(part, heads)


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the native kernels compute models of this dtype here."""
    native = load_library()
    return device.type == "cpu" and native is not None and native.isa != TORCH and dtype in DTYPES


@torch.inference_mode()
def compute_probe_logits(model: LoadedModel) -> Tensor:
    """Return the logits of a few tokens, computed by the native kernels as they serve the model: [T, vocabulary]."""
    native = model.native
    assert native is not None
    step = NativeStep(_make_batch(model), _make_storage(model), native.library, native.layers)
    return _compute_all_rows(model.module, native.body, step, _place_probe(model, step.batch))


def _compute_all_rows(module: Any, body: Body | None, step: NativeStep, position_ids: Tensor) -> Tensor:
    """Return the logits after each token of a step, computed by a module, or by what computes in its place."""
    if body is not None:
        return body.compute_rows(step, position_ids, torch.arange(step.num_rows)).float()
    logits: Tensor = hooks.run_module(module, step, position_ids=position_ids).logits[0].float()
    return logits


def is_linear(module: nn.Module) -> bool:
    """Return whether the module is a linear layer, and not of a class that is derived from one."""
    return type(module) in (nn.Linear, Conv1D)


def _record_forward(model: LoadedModel) -> _ForwardRecord:
    """Run the unchanged model over a few tokens and return the inputs and outputs of its parts."""
    record, handles = _ForwardRecord(), []
    for name, part in model.module.named_modules():
        if is_linear(part):
            handles.append(part.register_forward_pre_hook(_make_input_hook(record, name)))
        elif _is_norm(part) or find_layer_parts(part, is_linear) is not None:
            handles.append(part.register_forward_hook(_make_call_hook(record.calls, name), with_kwargs=True))
    for experts, routers in find_mixtures(model.module):
        for name in {experts, *routers, experts.rpartition(".")[0]}:
            note = _make_call_hook(record.mixtures, name, takes_tuples=True)
            handles.append(model.module.get_submodule(name).register_forward_hook(note, with_kwargs=True))
    batch = _make_batch(model)
    step = make_step(batch, _make_storage(model))
    record.position_ids = _place_probe(model, batch)
    try:
        output = hooks.run_module(model.module, step, position_ids=record.position_ids)
        record.logits = output.logits[0].float()
    finally:
        for handle in handles:
            handle.remove()
    record.layers = frozenset(layer for layer, how in step.attention_by_layer.items() if sees_interval(how.visible))
    return record


def _make_input_hook(record: _ForwardRecord, name: str) -> Any:
    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        record.kept.append(args[0])
        record.inputs.setdefault((name.rpartition(".")[0], id(args[0])), []).append(name)

    return note


def _make_call_hook(calls: dict[str, _ModuleCall], name: str, *, takes_tuples: bool = False) -> Any:
    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        # A norm may be called several times. Any call will do for the comparison, and the last one is kept.
        if isinstance(output, Tensor):
            calls[name] = _ModuleCall(args, kwargs, output.clone())
        elif takes_tuples and isinstance(output, tuple) and all(isinstance(part, Tensor) for part in output):
            calls[name] = _ModuleCall(args, kwargs, tuple(part.clone() for part in output))

    return note


def _is_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return type(module).__name__.endswith("RMSNorm") and isinstance(weight, Tensor) and weight.dim() == 1


def _draw_probe(model: LoadedModel, seed: int) -> list[int]:
    return draw_tokens(model.vocab_size, min(NUM_PROBE_TOKENS, model.context_length - 1), seed)


def _make_batch(model: LoadedModel) -> StepBatch:
    seq = make_trial_sequence(_draw_probe(model, 7), blocks=range(NUM_PROBE_TOKENS))
    return StepBatch([(seq, seq.num_prompt_tokens)], model.layout.block_size, model.device)


def _place_probe(model: LoadedModel, batch: StepBatch) -> Tensor:
    """Return the last positions of the context, or the first ones where the model counts what is cached: [1, T]."""
    if model.layout.attends_internally:
        return batch.position_ids
    return batch.position_ids + max(0, model.context_length - NUM_PROBE_TOKENS)


def _make_storage(model: LoadedModel) -> KVStorage:
    """Return a pool in the model's dtype, by which parts are compared: what int8 loses is not theirs."""
    return KVStorage(replace(model.layout, is_int8=False), NUM_PROBE_TOKENS, model.device)


class _RecordedMixture(nn.Module):
    """Gives the recorded output of a mixture, and keeps its input."""

    def __init__(self, call: _ModuleCall) -> None:
        super().__init__()
        self._call, self.x = call, torch.empty(0)

    def forward(self, x: Tensor) -> Any:
        """Keep the input."""
        self.x = x
        return self._call.output


class _Replacer:
    """Replaces the parts of one model by native ones that give the recorded outputs."""

    def __init__(self, model: LoadedModel, native: Library, record: _ForwardRecord, weights: str) -> None:
        self._model, self._native, self._record = model, native, record
        matrices = model.weights.find_matrices(model.module)
        self.packer = WeightPacker(native, weights, model.dtype, model.vocab_size, model.weights, matrices)
        self._release: Release = model.weights.drop_tensor_pages
        self._root: nn.Module = model.module
        self._storage, self._tolerance = _make_storage(model), find_tolerance(model.dtype).part
        form = GGUF if matrices and weights == "auto" else weights
        self._layer_tolerance = find_tolerance(model.dtype, form).part
        """Of what linear layers are part of."""

    def replace_parts(self) -> None:
        """Replace mixtures of experts, decoder layers, then the norms and the linear layers that are left."""
        # The parts are held by name, because a reference to a module would keep its weights in memory.
        for experts, routers in list(find_mixtures(self._root)):
            self._replace_experts(experts)
            for name in routers:
                self._replace_router_weight(name)
        for name in self._record.calls:
            self._replace_layer(name)
        for name in self._record.calls:
            if self._is_present(name, _is_norm):
                norm = self._make_norm(name, self._root.get_submodule(name))
                if norm is not None:
                    self._root.set_submodule(name, norm)
        for names in self._record.inputs.values():
            self._replace_linears(names)
        self._replace_embeddings()
        self._replace_latent_heads()

    def build_native_model(self) -> NativeModel | None:
        """Return what computes the whole model, if its form allows that and it gives the same logits."""
        masks = [call.kwargs.get("attention_mask") for call in self._record.calls.values() if call.kwargs]
        new = make_native_model(self._root)
        if new is None or not all(isinstance(mask, MaskRule) and mask.visibility is None for mask in masks):
            return None
        mixtures = {
            name: call for name, call in self._record.mixtures.items() if has_experts(self._root.get_submodule(name))
        }
        if not all(keeps_rows_apart(self._root.get_submodule(n), c.args, c.kwargs) for n, c in mixtures.items()):
            return None
        num_rounded = self.packer.num_quantized + self.packer.num_from_gguf
        is_like_stored = not num_rounded and not self._record.mixtures
        right = self._record.logits if is_like_stored else self._run(None)
        try:
            mine = self._run(new)
        except TypeError:  # its rotary embedding is made for each kind of layer (Mellum)
            return None
        return new if measure_logits_error(mine, right) <= self._tolerance else None

    def _run(self, compute: NativeModel | None) -> Tensor:
        """Return the logits of the module with its replaced parts, or of what computes in its place."""
        return _compute_all_rows(self._root, compute, self._make_step(), self._record.position_ids)

    def _make_step(self) -> NativeStep:
        """Return a step over the recorded batch whose attention the kernels compute."""
        return NativeStep(_make_batch(self._model), self._storage, self._native, self._record.layers)

    # Mixtures of experts

    def _replace_experts(self, name: str) -> None:
        """Replace the named experts if native ones give the same."""
        experts: Any = self._root.get_submodule(name)
        call = self._record.mixtures.get(name)
        parts = find_experts_parts(experts)
        if parts is None or call is None or any(one.weight.dtype != self._model.dtype for one in parts.down):
            return
        new = pack_experts(self._native, parts, self.packer.pack_linears, self._release)
        if self._gives_recorded(new, call, self._layer_tolerance):
            self._root.set_submodule(name, new)
        for weight in (experts.gate_up_proj, experts.down_proj):
            self._release(weight.detach())

    def _replace_router_weight(self, name: str) -> None:
        """Replace the weight of the named router by a packed one if that gives the same."""
        router: Any = self._root.get_submodule(name)
        call = self._record.mixtures.get(name)
        if call is None:
            return
        weight, bias = router.weight, getattr(router, "bias", None)
        for dtype in dict.fromkeys((self._model.dtype, torch.float32)):  # some convert it and their input
            del router.weight
            router.weight = pack_router(self._native, weight, bias, dtype)
            if self._gives_recorded(router, call, self._tolerance):
                if bias is not None:
                    del router.bias
                    router.bias = bias.detach()  # no parameter: the packed weight has it
                return
            router.weight = weight

    def _gives_recorded(self, new: nn.Module, call: _ModuleCall, tolerance: float) -> bool:
        """Return whether the module gives the outputs of a recorded call, and nearly all of the same indices."""
        try:
            found = new(*call.args, **call.kwargs)
        except (TypeError, ValueError, RuntimeError):  # it is called in another way
            return False
        mine, right = ((output,) if isinstance(output, Tensor) else output for output in (found, call.output))
        return len(mine) == len(right) and all(
            one.dtype == other.dtype and is_close(one, other, tolerance) for one, other in zip(mine, right, strict=True)
        )

    # Decoder layers

    def _replace_layer(self, name: str) -> None:
        """Replace the named module if it is a decoder layer of the common form and its replacement gives the same."""
        layer = self._root.get_submodule(name)
        form = find_layer_parts(layer, is_linear)
        if form is None or form.attention.index not in self._record.layers:
            return
        mlp = layer.get_submodule("mlp")
        is_mixture = not form.gate_up
        activation = Activation.NONE if is_mixture else _find_activation(mlp)
        paths = {id(part): path for path, part in layer.named_modules(prefix=name)}
        norms = [self._make_norm(paths[id(norm)], norm) for norm in form.norms + form.head_norms]
        good = [norm for norm in norms if norm is not None]
        if activation is None or len(good) < len(norms) or len({norm.plus_one for norm in good}) > 1:
            return
        groups = [
            self.packer.pack_linears(form.projections, keep_weight),
            self.packer.pack_linears([form.output_projection], keep_weight),
        ]
        if is_mixture:
            new = NativeLayer(form.attention, groups, good, mlp=mlp)
            is_same = self._gives_same_around(new, name)
        else:
            groups.append(self.packer.pack_linears(form.gate_up, keep_weight, activation))
            groups.append(self.packer.pack_linears(form.down_projection, keep_weight))
            new = NativeLayer(form.attention, groups, good, activation)
            is_same = self._gives_same(new, name)
        if not is_same:
            return
        self._root.set_submodule(name, new)
        for linear in (*form.projections, form.output_projection, *form.gate_up, *form.down_projection):
            self._release(weight_of(linear))

    def _gives_same_around(self, new: NativeLayer, name: str) -> bool:
        """Return whether the new layer gives the recorded input to its mixture, and with that one's output its own.

        In 16 bits the mixture itself may choose another expert for an input that is rounded otherwise.
        """
        call = self._record.mixtures.get(f"{name}.mlp")
        if call is None:
            return False
        mixture, recorded = new.mlp, _RecordedMixture(call)
        new.mlp = recorded
        is_same = self._gives_same(new, name)
        new.mlp = mixture
        return is_same and is_close(recorded.x, _input_of(call), self._layer_tolerance)

    def _gives_same(self, new: nn.Module, name: str) -> bool:
        """Return whether the new layer gives the recorded output of the named one."""
        call = self._record.calls[name]
        try:
            with hooks.run_with_step(self._root, self._make_step()):
                mine = new(*call.args, **call.kwargs)
        except (TypeError, ValueError, Unsupported):
            return False
        added = call.output.float() - _input_of(call).float()
        return is_close(mine, call.output, self._layer_tolerance, added)

    # Norms

    def _make_norm(self, name: str, norm: nn.Module) -> NativeNorm | None:
        """Return a native norm of one of the two usual forms that gives the recorded output, or None."""
        eps: Any = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        weight: Any = norm.weight
        if not isinstance(eps, float) or weight.dtype != self._model.dtype or name not in self._record.calls:
            return None
        call = self._record.calls[name]
        x = _input_of(call)
        if x.shape[-1] != weight.numel() or x.dtype != weight.dtype or call.output.dtype != weight.dtype:
            return None
        for plus_one in (False, True):
            new = NativeNorm(self._native, weight.detach(), eps, plus_one=plus_one)
            if is_close(new(x), call.output, self._tolerance):
                return new
        return None

    # Linear layers

    def _replace_linears(self, names: list[str]) -> None:
        """Pack the named linear layers, which have the same input, into one group."""
        names = [name for name in dict.fromkeys(names) if self._is_present(name, is_linear)]
        linears = [self._root.get_submodule(name) for name in names]
        if not linears or any(linear.weight.dtype != self._model.dtype for linear in linears):
            return
        tied = self._find_tied_embedding(linears[0])
        group = self.packer.pack_linears(linears, keep_weight if tied == "" else self._release)
        first = PackedLinear(group)
        for index, name in enumerate(names):
            self._root.set_submodule(name, first if index == 0 else PackedFollower(first, index))
        if tied:
            self._root.set_submodule(tied, PackedEmbedding(self._native, group))

    def _replace_embeddings(self) -> None:
        """Pack embeddings of their own that are in a GGUF file, so that they take what they take there."""
        for name, part in list(self._root.named_modules()):
            if type(part) is nn.Embedding and part.max_norm is None:
                group = self.packer.pack_matrix(part)
                if group is not None:
                    self._root.set_submodule(name, PackedEmbedding(self._native, group))

    def _replace_latent_heads(self) -> None:
        """Pack the linear layers of latent attention, which have an input each: no token of the record reached them."""
        parts = [part for part in self._root.modules() if isinstance(part, LatentHeads)]
        for linears in (linears for part in parts for linears in (part.queries, part.sums)):
            for number, linear in enumerate(linears):
                linears[number] = PackedLinear(self.packer.pack_linears([linear], self._release))

    def _is_present(self, name: str, is_kind: Callable[[nn.Module], bool]) -> bool:
        """Return whether the model still has a module of this name and kind: its decoder layer may be replaced."""
        try:
            return is_kind(self._root.get_submodule(name))
        except AttributeError:
            return False

    def _find_tied_embedding(self, linear: nn.Module) -> str | None:
        """Return the name of the embedding that has the linear layer's weight.

        Returns None if no module shares the weight, and "" if the one that does cannot be replaced.
        """
        address = weight_of(linear).data_ptr()
        for name, part in self._root.named_modules():
            weight = getattr(part, "weight", None)
            if part is not linear and isinstance(weight, Tensor) and weight.data_ptr() == address:
                return name if type(part) is nn.Embedding and part.max_norm is None else ""
        return None


def _input_of(call: _ModuleCall) -> Tensor:
    given = call.args[0] if call.args else call.kwargs["hidden_states"]
    assert isinstance(given, Tensor)
    return given


def _find_activation(mlp: Any) -> Activation | None:
    """Return the kernels' activation that computes the same as the module's own, or None."""
    x = torch.linspace(-6, 6, 97)
    function = next(
        (f for f in (getattr(mlp, "act_fn", None), getattr(mlp, "activation_fn", None)) if callable(f)), None
    )
    if function is None:
        return None
    for activation, right in ((Activation.SILU, silu(x)), (Activation.GELU_TANH, gelu(x, approximate="tanh"))):
        if torch.allclose(function(x), right, atol=1e-6):
            return activation
    return None
