"""Replace the parts of a model by native ones that give the recorded outputs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from penstock.engine.kernels.library import Library
from penstock.engine.kernels.norm import NativeNorm
from penstock.engine.kernels.packed import (
    Activation,
    PackedEmbedding,
    PackedFollower,
    PackedLinear,
    Release,
    keep_weight,
    weight_of,
)
from penstock.engine.model.compare import find_tolerance, is_close, measure_logits_error
from penstock.engine.model.experts import find_experts_parts, find_mixtures, pack_experts, pack_router
from penstock.engine.model.layer import NativeLayer, NativeModel, find_layer_parts, has_experts, make_native_model
from penstock.engine.model.model import LoadedModel
from penstock.engine.model.recording import (
    ForwardRecord,
    ModuleCall,
    input_of,
    is_linear,
    is_norm,
    make_batch,
    make_storage,
)
from penstock.engine.steps import hooks
from penstock.engine.steps.latent import LatentHeads
from penstock.engine.steps.masks import MaskRule, Unsupported
from penstock.engine.steps.native_step import Body, NativeStep
from penstock.engine.steps.rows import keeps_rows_apart
from penstock.engine.weights.forms import GGUF, WeightPacker


def compute_all_rows(module: Any, body: Body | None, step: NativeStep, position_ids: Tensor) -> Tensor:
    """Return the logits after each token of a step, computed by a module, or by what computes in its place."""
    if body is not None:
        return body.compute_rows(step, position_ids, torch.arange(step.num_rows)).float()
    logits: Tensor = hooks.run_module(module, step, position_ids=position_ids).logits[0].float()
    return logits


class _RecordedMixture(nn.Module):
    """Gives the recorded output of a mixture, and keeps its input."""

    def __init__(self, call: ModuleCall) -> None:
        super().__init__()
        self._call, self.x = call, torch.empty(0)

    def forward(self, x: Tensor) -> Any:
        """Keep the input."""
        self.x = x
        return self._call.output


class Replacer:
    """Replaces the parts of one model by native ones that give the recorded outputs."""

    def __init__(self, model: LoadedModel, native: Library, record: ForwardRecord, weights: str) -> None:
        self._model, self._native, self._record = model, native, record
        matrices = model.weights.find_matrices(model.module)
        self.packer = WeightPacker(native, weights, model.dtype, model.vocab_size, model.weights, matrices)
        self._release: Release = model.weights.drop_tensor_pages
        self._root: nn.Module = model.module
        self._storage, self._tolerance = make_storage(model), find_tolerance(model.dtype).part
        form = GGUF if matrices and weights == "auto" else weights
        self._layer_tolerance = find_tolerance(model.dtype, form).part
        """Tolerance for parts that contain linear layers."""

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
            if self._is_present(name, is_norm):
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
        except (TypeError, IndexError, RuntimeError):  # its rotary embedding reads more than positions (Mellum)
            return None
        return new if measure_logits_error(mine, right) <= self._tolerance else None

    def _run(self, compute: NativeModel | None) -> Tensor:
        """Return the logits of the module with its replaced parts, or of what computes in its place."""
        return compute_all_rows(self._root, compute, self._make_step(), self._record.position_ids)

    def _make_step(self) -> NativeStep:
        """Return a step over the recorded batch whose attention the kernels compute."""
        return NativeStep(make_batch(self._model), self._storage, self._native, self._record.layers)

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

    def _gives_recorded(self, new: nn.Module, call: ModuleCall, tolerance: float) -> bool:
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
        return is_same and is_close(recorded.x, input_of(call), self._layer_tolerance)

    def _gives_same(self, new: nn.Module, name: str) -> bool:
        """Return whether the new layer gives the recorded output of the named one."""
        call = self._record.calls[name]
        try:
            with hooks.run_with_step(self._root, self._make_step()):
                mine = new(*call.args, **call.kwargs)
        except (TypeError, ValueError, Unsupported):
            return False
        added = call.output.float() - input_of(call).float()
        return is_close(mine, call.output, self._layer_tolerance, added)

    # Norms

    def _make_norm(self, name: str, norm: nn.Module) -> NativeNorm | None:
        """Return a native norm of one of the two usual forms that gives the recorded output, or None."""
        eps: Any = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
        weight: Any = norm.weight
        if not isinstance(eps, float) or weight.dtype != self._model.dtype or name not in self._record.calls:
            return None
        call = self._record.calls[name]
        x = input_of(call)
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
