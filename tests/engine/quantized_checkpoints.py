"""Checkpoints of small models in every published format, written by the formats' own descriptions.

Each writer takes a plain matrix [outputs, inputs] and returns what is stored of it, by the endings of the names, and
the matrix that it stands for. Numbers are packed one by one here, unlike in what reads them.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Written = tuple[dict[str, Tensor], Tensor]
Writer = Callable[[Tensor], Written]
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)
"""By place in a word: which of eight neighbours is there."""


def quantize(weight: Tensor, bits: int, groups: Tensor, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return unsigned numbers [outputs, inputs], and scales and zeros [outputs, groups]; `groups` is by input."""
    most, scales, zeros = 2**bits - 1, [], []
    for group in range(int(groups.max()) + 1):
        part = weight[:, groups == group]
        low, high = part.amin(1), part.amax(1)
        scale = part.abs().amax(1) * 2 / most if symmetric else (high - low) / most
        scales.append(scale.clamp(min=1e-6).half().float())
        zeros.append(torch.full_like(low, (most + 1) // 2) if symmetric else (-low / scales[-1]).round().clamp(0, most))
    scale, zero = torch.stack(scales, 1), torch.stack(zeros, 1)
    numbers = (weight / scale[:, groups] + zero[:, groups]).round().clamp(0, most)
    return numbers.int(), scale, zero.int()


def restore(numbers: Tensor, scales: Tensor, zeros: Tensor, groups: Tensor) -> Tensor:
    """Return the weights that numbers stand for."""
    return (numbers - zeros[:, groups]).float() * scales[:, groups]


def pack(numbers: Tensor, bits: int, places: tuple[int, ...] = tuple(range(32))) -> Tensor:
    """Return the words of 32 bits of each row; the last is filled up with zeros."""
    per_word = 32 // bits
    rows = []
    for row in torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % per_word)).tolist():
        words = [row[first : first + per_word] for first in range(0, len(row), per_word)]
        rows.append([sum(word[places[i]] << (bits * i) for i in range(per_word)) for word in words])
    return torch.tensor(rows, dtype=torch.int64).to(torch.int32)


def make_groups(inputs: int, size: int, *, shuffled: bool = False) -> Tensor:
    groups = torch.arange(inputs) // size
    return groups[torch.randperm(inputs, generator=torch.Generator().manual_seed(1))] if shuffled else groups


def write_packed(bits: int, size: int | None, *, symmetric: bool = True, shuffled: bool = False) -> Writer:
    """compressed-tensors, pack-quantized; without a size there is one group."""

    def write(weight: Tensor) -> Written:
        groups, half = make_groups(weight.shape[1], size or weight.shape[1], shuffled=shuffled), 2 ** (bits - 1)
        numbers, scales, zeros = quantize(weight, bits, groups, symmetric=symmetric)
        stored = {
            "weight_packed": pack(numbers, bits), "weight_scale": scales.bfloat16(),
            "weight_shape": torch.tensor(weight.shape),
        }  # fmt: skip
        if not symmetric:
            stored["weight_zero_point"] = pack(zeros.T, bits).T.contiguous()
        if shuffled:
            stored["weight_g_idx"] = groups.int()
        return stored, restore(numbers - half, scales.bfloat16().float(), zeros - half, groups)

    return write


def write_older(weight: Tensor) -> Written:
    """What `write_packed(8, 16, symmetric=False)` writes as older versions did: zeros as bytes, -1 for no order."""
    groups = make_groups(weight.shape[1], 16)
    stored, plain = write_packed(8, 16, symmetric=False)(weight)
    numbers = quantize(weight, 8, groups, symmetric=False)[2] - 128
    return {**stored, "weight_zero_point": numbers.to(torch.int8), "weight_g_idx": torch.full_like(groups, -1)}, plain


def write_bytes(weight: Tensor) -> Written:
    """compressed-tensors, int-quantized with a scale for each row."""
    groups = make_groups(weight.shape[1], weight.shape[1])
    numbers, scales, zeros = quantize(weight, 8, groups, symmetric=True)
    return {"weight": (numbers - 128).to(torch.int8), "weight_scale": scales}, restore(numbers, scales, zeros, groups)


def write_fp8(height: int | None, width: int | None, shape: tuple[int, ...] | None, name: str) -> Writer:
    """FP8 with a scale for each block of this size; None stands for the whole. The scales are stored in `shape`."""

    def write(weight: Tensor) -> Written:
        rows = torch.arange(weight.shape[0]) // (height or weight.shape[0])
        columns = torch.arange(weight.shape[1]) // (width or weight.shape[1])
        scales = torch.zeros(int(rows.max()) + 1, int(columns.max()) + 1)
        for i, j in torch.cartesian_prod(torch.arange(scales.shape[0]), torch.arange(scales.shape[1])).tolist():
            scales[i, j] = weight[rows == i][:, columns == j].abs().max() / 448
        spread = scales[rows][:, columns]
        stored = (weight / spread).to(torch.float8_e4m3fn)
        written = {"weight": stored, name: scales if shape is None else scales.reshape(shape)}
        return written, stored.float() * spread

    return write


def write_powers(weight: Tensor) -> Written:
    """FP8 with a scale for each row that is a power of two, and stored as its exponent."""
    scales = (weight.abs().amax(1, keepdim=True) / 448).log2().ceil().exp2()
    stored = (weight / scales).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale_inv": scales.to(torch.float8_e8m0fnu)}, stored.float() * scales


def write_gptq(bits: int, size: int, *, symmetric: bool, stored_less: bool, shuffled: bool = False) -> Writer:
    """GPTQ, which stores zeros in its first form less one, subtracted from words of several of them."""

    def write(weight: Tensor) -> Written:
        one_in_each_place = int("1" * 8 if bits == 4 else "01" * 4, 16)
        groups = make_groups(weight.shape[1], size if size > 0 else weight.shape[1], shuffled=shuffled)
        numbers, scales, zeros = quantize(weight, bits, groups, symmetric=symmetric)
        stored = {
            "qweight": pack(numbers, bits).T.contiguous(), "scales": scales.T.half().contiguous(),
            "qzeros": pack(zeros.T, bits) - (one_in_each_place if stored_less else 0), "g_idx": groups.int(),
        }  # fmt: skip
        return stored, restore(numbers, scales, zeros, groups)

    return write


def write_awq(weight: Tensor, size: int = 16) -> Written:
    """AWQ in its order for GEMM."""
    groups = make_groups(weight.shape[1], size)
    numbers, scales, zeros = quantize(weight, 4, groups, symmetric=False)
    stored = {
        "qweight": pack(numbers.T, 4, AWQ_PLACES), "qzeros": pack(zeros.T, 4, AWQ_PLACES),
        "scales": scales.T.half().contiguous(),
    }  # fmt: skip
    return stored, restore(numbers, scales, zeros, groups)


def write_mxfp4(experts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return blocks, scales and the plain weights of experts [experts, inputs, outputs]."""
    by_group = experts.mT.reshape(experts.shape[0], experts.shape[2], -1, 32)
    powers = (by_group.abs().amax(-1, keepdim=True) / 6).log2().ceil()
    values = torch.tensor([*FP4, *(-value for value in FP4)])
    numbers = ((by_group / 2**powers).unsqueeze(-1) - values).abs().argmin(-1)
    blocks = (numbers[..., 0::2] + 16 * numbers[..., 1::2]).to(torch.uint8)
    plain = (values[numbers] * 2**powers).flatten(2).mT.contiguous()
    return blocks, (powers.squeeze(-1) + 127).to(torch.uint8), plain


def _write_fp4(weight: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    """Return the numbers of 4 bits that are nearest to the weights by their scales, two in a byte, and the weights."""
    values = torch.tensor([*FP4, *(-value for value in FP4)])
    numbers = ((weight / spread).unsqueeze(-1) - values).abs().argmin(-1)
    return (numbers[:, 0::2] + 16 * numbers[:, 1::2]).to(torch.uint8), values[numbers] * spread


def write_nvfp4(packed: str, global_scale: str, *, is_divisor: bool) -> Writer:
    """NVFP4: an FP8 scale for 16 neighbours, and one for all scales, which they are divided or multiplied by."""

    def write(weight: Tensor) -> Written:
        most = weight.reshape(len(weight), -1, 16).abs().amax(-1) / 6
        whole = most.max() / 448
        scales = (most / whole).clamp(min=0.01).to(torch.float8_e4m3fn)
        stored_whole = 1 / whole if is_divisor else whole
        by_group = scales.float() / stored_whole if is_divisor else scales.float() * stored_whole
        pairs, plain = _write_fp4(weight, by_group.repeat_interleave(16, 1))
        stored = {
            packed: pairs, "weight_scale": scales, global_scale: stored_whole.reshape(1 if is_divisor else ()),
            "input_scale": torch.ones(()),
        }  # fmt: skip
        return stored, plain

    return write


def write_blocks_of_4_bits(block: int, inner: int | None) -> Writer:
    """bitsandbytes in 4 bits, with values of our own; `inner`: how many of the blocks' largest values form a block."""

    def write(weight: Tensor) -> Written:
        values = torch.linspace(-1, 1, 16).sign() * torch.linspace(-1, 1, 16).square()
        most = weight.reshape(-1, block).abs().amax(1)
        about = {"quant_type": "nf4", "blocksize": block, "dtype": "float32", "shape": list(weight.shape)}
        stored: dict[str, Tensor] = {}
        if inner:
            inner_values, offset = torch.linspace(-1, 1, 256), float(most.mean())
            padded = torch.nn.functional.pad(most - offset, (0, -len(most) % inner)).view(-1, inner)
            outer = padded.abs().amax(1)
            codes = ((padded / outer[:, None]).unsqueeze(-1) - inner_values).abs().argmin(-1).view(-1)[: len(most)]
            most = inner_values[codes] * outer.repeat_interleave(inner)[: len(most)] + offset
            about |= {"nested_blocksize": inner, "nested_dtype": "float32", "nested_offset": offset}
            stored = {
                "weight.absmax": codes.to(torch.uint8), "weight.nested_absmax": outer,
                "weight.nested_quant_map": inner_values,
            }  # fmt: skip
        else:
            stored["weight.absmax"] = most
        numbers = ((weight.reshape(-1, block) / most[:, None]).unsqueeze(-1) - values).abs().argmin(-1)
        text = torch.tensor(list(json.dumps(about).encode()), dtype=torch.uint8)
        stored |= {
            "weight": (16 * numbers.view(-1)[0::2] + numbers.view(-1)[1::2]).to(torch.uint8)[:, None],
            "weight.quant_map": values, "weight.quant_state.bitsandbytes__nf4": text,
        }  # fmt: skip
        return stored, (values[numbers] * most[:, None]).view(weight.shape)

    return write


def write_rows_of_8_bits(weight: Tensor) -> Written:
    """bitsandbytes in 8 bits, where 127 stands for the largest value of a row."""
    most = weight.abs().amax(1)
    numbers = (weight * 127 / most[:, None]).round().to(torch.int8)
    stored = {"weight": numbers, "SCB": most, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return stored, numbers.float() * (most[:, None] * (1 / 127))


def write_checkpoint(source: Path, directory: Path, settings: dict[str, Any], write: Writer) -> dict[str, Tensor]:
    """Write a llama of `source` with quantised layers, and return the plain weights that it stands for."""
    shutil.copytree(source, directory)
    stored: dict[str, Tensor] = {}
    plain = load_file(directory / "model.safetensors")
    for name, tensor in list(plain.items()):
        if "_proj.weight" not in name:
            stored[name] = tensor
            continue
        written, plain[name] = write(tensor)
        stored |= {name.removesuffix("weight") + ending: part for ending, part in written.items()}
    save_checkpoint(directory, settings, stored)
    return plain


def save_checkpoint(directory: Path, settings: dict[str, Any] | None, stored: dict[str, Tensor]) -> None:
    """Store tensors in a model's directory, and the settings in its config.json."""
    save_file({name: part.contiguous() for name, part in stored.items()}, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
