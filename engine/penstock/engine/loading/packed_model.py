"""A model whose parts are native, in a file of packed weights: written once, and mapped by whoever serves it.

    pack:  load, prove ─▶ modules that were replaced, and all tensors that are left ─▶ logits of a few tokens ─▶ file
    load:  table agrees? ─▶ content checked once ─▶ skeleton + mapped tensors ─▶ the same logits?

The file has everything that the module consists of after `accelerate_model`, buffers included, so no weight of the
checkpoint is read or packed again. The native layers were compared with the original ones when the file was written,
and the model was proved then. At load it reads the same few tokens again. On the instruction set on which the file was
written the logits must have the same bits, since no result depends on threads or batch; on another one, which rounds in
another way, they may differ as much as those of a replacement.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from penstock.engine.kernels.library import Library
from penstock.engine.kernels.norm import NativeNorm
from penstock.engine.kernels.packed import (
    PACKING_VERSION,
    Activation,
    PackedEmbedding,
    PackedFollower,
    PackedLinear,
    PackedLinears,
    PackedWeight,
    make_packed_weight,
)
from penstock.engine.memory.storage import LayerShape
from penstock.engine.model.accelerate import compute_probe_logits
from penstock.engine.model.compare import find_tolerance, measure_logits_error
from penstock.engine.model.experts import Gate, NativeExperts
from penstock.engine.model.layer import AttentionParams, NativeLayer, make_native_model
from penstock.engine.model.model import QUANTIZATION_VERSION, LoadedModel
from penstock.engine.steps.latent import LatentHeads, set_latent_heads
from penstock.engine.steps.native_step import NativeParts
from penstock.engine.weights.files import Progress
from penstock.engine.weights.load_cache import LoadCache, describe_file
from penstock.engine.weights.packed_file import PackedFile, PackedFileRefused, PackedFileWriter, open_packed_file
from penstock.errors import ModelLoadError

log = logging.getLogger("penstock.engine")


def list_fitting_forms(weights: str) -> tuple[str, ...]:
    """Return the forms of files that will do for a setting, the best one first: those without loss for `auto`."""
    return ("auto", "p12", "bf16") if weights == "auto" else (weights,)


def find_difference(about: dict[str, Any], weights: str, source: dict[str, Any]) -> str:
    """Return how a file with this table differs from what is asked for, or "" if it does not.

    `source` is what the file is to be made of, as `write_packed_model` was told.
    """
    if about.get("weights") not in list_fitting_forms(weights):
        return f"its weights are packed as {about.get('weights')}, and {weights} is asked for"
    stored, versions = about.get("source", {}), about.get("versions", {})
    for name, mine in source.items():
        if stored.get(name) != mine:
            what = {
                "config": "another config.json", "files": "other weight files", "dtype": str(stored.get("dtype")),
                "form": "another form of KV blocks",
            }  # fmt: skip
            return f"it was made of {what[name]}" + (f", and {mine} is asked for" if name == "dtype" else "")
    for name, own in list_versions().items():
        if versions.get(name) != own:
            return f"it was written with {name} {versions.get(name)}, and this is {own}"
    return ""


def list_versions() -> dict[str, str]:
    """Return the versions that a packed file depends on."""
    return {
        "packing": str(PACKING_VERSION), "quantization": str(QUANTIZATION_VERSION), "torch": torch.__version__,
        "transformers": transformers.__version__,
    }  # fmt: skip


# Writing


def write_packed_model(model: LoadedModel, weights: str, source: dict[str, Any], path: Path) -> PackedFile:
    """Write a proved model, which was made of `source`.

    Raises `ModelLoadError` if it has parts that a file cannot hold, and `OSError`.
    """
    if model.native is None:
        raise ModelLoadError("only what the native kernels compute is packed: it needs a CPU, and the kernels built")
    if model.layout.states is not None:
        raise ModelLoadError("its layers keep a recurrent or convolution state: such models are not packed yet")
    if model.layout.attends_internally:
        raise ModelLoadError("it reads one sequence at a time, as it attends by itself: such models are not packed yet")
    with PackedFileWriter(path) as writer:
        groups: dict[int, str] = {}
        modules = []

        def add_group(group: PackedLinears) -> str:
            if id(group) not in groups:
                groups[id(group)] = name = f"group {len(groups)}"
                named = {part: writer.add_tensor(f"{name} {part}", tensor) for part, tensor in group.tensors.items()}
                described[name] = {"about": group.describe(), "tensors": named}
            return groups[id(group)]

        described: dict[str, Any] = {}
        firsts: dict[int, str] = {}
        for name, part in model.module.named_modules():
            found = _describe_module(name, part, add_group, writer, firsts)
            if found is not None:
                modules.append({"name": name, **found})
        logits = compute_probe_logits(model)
        writer.add_tensor("logits", logits)
        left = {name: writer.add_tensor(name, tensor) for name, tensor in _iter_tensors(model.module)}
        writer.finish_file({
            "weights": weights, "source": source, "versions": list_versions(), "isa": model.native.library.isa,
            "weight_form": model.weight_form, "groups": described, "modules": modules, "tensors": left,
            "attention_layers": sorted(model.native.layers), "has_body": model.native.body is not None,
            "layers": [asdict(shape) for shape in model.layout.layers], "vocab_size": model.vocab_size,
            "stock_attention": model.stock_attention, "checkpoint_bytes": model.weights.num_bytes,
        })  # fmt: skip
    return open_packed_file(path)


def _describe_module(
    name: str, part: nn.Module, add_group: Callable[[PackedLinears], str], writer: PackedFileWriter,
    firsts: dict[int, str],
) -> dict[str, Any] | None:  # fmt: skip
    """Return how to make a native module again; None for one of the model's own."""
    found: dict[str, Any] | None = None
    match part:
        case NativeLayer():
            found = {
                "kind": "layer", "attention": asdict(part.attention), "activation": int(part.activation),
                "groups": [add_group(group) for group in part.groups],
                "norms": [_describe_norm(f"{name} norm {at}", norm, writer) for at, norm in enumerate(part.norms)],
                "has_mlp": part.mlp is not None,
            }  # fmt: skip
        case NativeNorm():
            found = {"kind": "norm", **_describe_norm(f"{name} norm", part, writer)}
        case PackedLinear():
            firsts[id(part)] = name
            found = {"kind": "linear", "group": add_group(part.group)}
        case PackedFollower():
            found = {"kind": "follower", "first": firsts[id(part.first)], "index": part.index}
        case PackedEmbedding():
            found = {"kind": "embedding", "group": add_group(part.group)}
        case NativeExperts():
            found = {
                "kind": "experts", "groups": [add_group(group) for group in part.groups], "gate": asdict(part.gate),
            }  # fmt: skip
        case nn.Module(weight=PackedWeight() as weight):
            bias = vars(part).get("bias")
            found = {
                "kind": "router", "group": add_group(weight.group),
                "bias": None if bias is None else writer.add_tensor(f"{name} bias", bias),
            }  # fmt: skip
        case LatentHeads():
            found = {"kind": "latent heads", "count": len(part.queries)}
        case _ if type(part).__module__.startswith("penstock."):
            raise ModelLoadError(f"its {name} ({type(part).__name__}) cannot be kept in a packed file")
    return found


def _describe_norm(name: str, norm: NativeNorm, writer: PackedFileWriter) -> dict[str, Any]:
    return {"weight": writer.add_tensor(name, norm.weight), "eps": norm.eps, "plus_one": norm.plus_one}


def _iter_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and buffers that are left, those that are no part of a state dict included."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


# Reading


def check_packed_content(file: PackedFile, load_cache: LoadCache, report: Progress) -> None:
    """Raise `PackedFileRefused` if the file is damaged. One that was checked, and is the same, is not read again."""
    about = describe_file(file.path)
    if about is not None and load_cache.read_finding("packed", about) == file.digest:
        report("checking packed weights", 1.0)
        return
    file.check_content(report)
    if about is not None:
        load_cache.write_finding("packed", about, file.digest)


def restore_module(file: PackedFile, skeleton: Any, native: Library) -> tuple[Any, NativeParts]:
    """Give the skeleton its native parts and tensors. Raises `PackedFileRefused` where they do not belong to it."""
    about, tensors = file.about, file.map_tensors()
    groups = {
        name: PackedLinears.restore(
            native, one["about"], {part: tensors[stored] for part, stored in one["tensors"].items()}
        )
        for name, one in about["groups"].items()
    }
    for one in about["modules"]:
        made = _restore_module(one, skeleton, native, groups, tensors)
        if isinstance(made, LatentHeads):
            set_latent_heads(skeleton.get_submodule(one["name"].rpartition(".")[0]), made)
        else:
            skeleton.set_submodule(one["name"], made)
    for name, stored in about["tensors"].items():
        _set_tensor(skeleton, name, tensors[stored])
    for name, part in skeleton.named_modules():
        for key, value in [
            *part.named_parameters(recurse=False),
            *part.named_buffers(recurse=False),
            *vars(part).items(),
        ]:
            if isinstance(value, Tensor) and value.is_meta and not isinstance(value, PackedWeight):
                raise PackedFileRefused(f"{file.path} lacks {name}.{key}")
    body = make_native_model(skeleton) if about["has_body"] else None
    if about["has_body"] and body is None:
        raise PackedFileRefused(f"{file.path} is of a model with other parts")
    has_experts = any(isinstance(part, NativeExperts) for part in skeleton.modules())
    has_latents = any(isinstance(part, LatentHeads) for part in skeleton.modules())
    parts = NativeParts(native, frozenset(about["attention_layers"]), body, has_experts, has_latents)
    return skeleton.eval().requires_grad_(False), parts


def _restore_module(
    one: dict[str, Any], root: Any, native: Library, groups: dict[str, PackedLinears], tensors: dict[str, Tensor]
) -> nn.Module:
    """Return the native module that was described so."""
    module: nn.Module
    match one["kind"]:
        case "layer":
            packed = [groups[name] for name in one["groups"]]
            norms = [_restore_norm(norm, native, tensors) for norm in one["norms"]]
            mlp = root.get_submodule(f"{one['name']}.mlp") if one["has_mlp"] else None
            params = AttentionParams(**one["attention"])
            module = NativeLayer(params, packed, norms, Activation(one["activation"]), mlp)
        case "experts":
            gate_up, down = (groups[name] for name in one["groups"])
            gate = Gate(**{**one["gate"], "activation": Activation(one["gate"]["activation"])})
            module = NativeExperts(native, gate_up, down, gate)
        case "router":
            router = root.get_submodule(one["name"])
            weight = make_packed_weight(router.weight, groups[one["group"]])
            del router.weight
            router.weight = weight
            if one["bias"] is not None:
                del router.bias
                router.bias = tensors[one["bias"]]
            module = router
        case "latent heads":
            module = LatentHeads(one["count"])
        case "norm":
            module = _restore_norm(one, native, tensors)
        case "linear":
            module = PackedLinear(groups[one["group"]])
        case "follower":
            module = PackedFollower(root.get_submodule(one["first"]), one["index"])
        case "embedding":
            module = PackedEmbedding(native, groups[one["group"]])
        case kind:
            raise PackedFileRefused(f"a packed file has a part of unknown kind {kind!r}")
    return module


def _restore_norm(one: dict[str, Any], native: Library, tensors: dict[str, Tensor]) -> NativeNorm:
    return NativeNorm(native, tensors[one["weight"]], one["eps"], plus_one=one["plus_one"])


def _set_tensor(root: nn.Module, name: str, tensor: Tensor) -> None:
    parent, _, child = name.rpartition(".")
    part = root.get_submodule(parent)
    if child in part._parameters:  # noqa: SLF001 - a parameter on `meta` cannot be given another tensor's memory
        part._parameters[child] = nn.Parameter(tensor, requires_grad=False)  # noqa: SLF001
    elif child in part._buffers:  # noqa: SLF001
        # A buffer is small, and some models write to theirs.
        part._buffers[child] = tensor.clone()  # noqa: SLF001
    else:
        raise PackedFileRefused(f"{name} of the packed file is no tensor of the model")


def read_layer_shapes(file: PackedFile) -> tuple[LayerShape, ...]:
    """Return what each layer caches for a token."""
    return tuple(
        LayerShape(shape["layer"], tuple(shape["k_shape"]), tuple(shape["v_shape"])) for shape in file.about["layers"]
    )


@torch.inference_mode()
def compare_probe_logits(file: PackedFile, model: LoadedModel) -> None:
    """Raise `PackedFileRefused` if the model gives other logits than when the file was written."""
    assert model.native is not None
    right, mine = file.map_tensors()["logits"], compute_probe_logits(model)
    if model.native.library.isa == file.about["isa"]:
        is_same = torch.equal(right, mine)
    else:
        is_same = measure_logits_error(mine, right) <= find_tolerance(model.dtype).part
    if not is_same:
        raise PackedFileRefused(f"{file.path} gives other logits here than where it was written")
