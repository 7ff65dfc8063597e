"""Which products of the kernels are slower here than torch's own, by shape and form: found at load, and said.

The kernels compute them all the same: a row of torch's own may depend on the rows beside it. With
`PENSTOCK_ENGINE_ISA=torch` models are computed by torch alone.
"""

import platform
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from torch.nn.functional import linear

from penstock.engine.kernels.library import TORCH, Library
from penstock.engine.kernels.packed import PackedLinears, WeightForm, make_linear

NUM_ROWS = (1, 16, 64)
"""Rows of the products that are compared: of one answer, of several, and of a prompt."""
MAX_OUTPUTS = 1024
"""A probe takes this part of a larger matrix."""
MAX_RATIO = 1.25
"""A product that takes no more of torch's time is not said to be slower: times of so short a work vary."""
NUM_PROBES = 4
_X86 = ("x86_64", "AMD64")


@dataclass(frozen=True)
class Product:
    """The product of rows with a matrix. `form` is how the kernels have the matrix; torch has it as it is stored."""

    outputs: int
    inputs: int
    dtype: torch.dtype
    form: WeightForm

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.") if self.form == WeightForm.STORED else self.form.name.lower()
        return f"{self.outputs} x {self.inputs} in {kind}"


def list_products(module: nn.Module) -> list[Product]:
    """Return the products of a model's groups of linear layers, each once, as far as they are probed.

    Those with a GGUF file's blocks are not: torch has nothing to compare with them.
    """
    groups = (one for one in _groups(module) if one.form != WeightForm.GGUF)
    products = (Product(min(sum(one.outputs), MAX_OUTPUTS), one.inputs, one.dtype, one.form) for one in groups)
    return list(dict.fromkeys(products))


def _groups(module: nn.Module) -> Iterator[PackedLinears]:
    for part in module.modules():
        for value in vars(part).values():
            for one in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(one, PackedLinears):
                    yield one


@torch.inference_mode()
def find_slow_products(native: Library, products: Iterable[Product]) -> list[str]:
    """Return the products that take the kernels longer than torch, as text with the ratios by number of rows."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    native.set_threads(1)
    try:
        return [text for one in products if (text := _describe_slowness(native, one))]
    finally:
        torch.set_num_threads(num_threads)


def choose_products(native: Library, dtype: torch.dtype) -> None:
    """Let torch compute models on processors whose own vectors the kernels do not use, if it is faster there."""
    if platform.machine() not in _X86 and find_slow_products(native, [Product(1024, 1024, dtype, WeightForm.STORED)]):
        native.select_isa(TORCH)


def _describe_slowness(native: Library, product: Product) -> str:
    """Return the product and the kernels' time to torch's where that is too long, or ""."""
    weight = torch.randn(product.outputs, product.inputs).to(product.dtype) / product.inputs**0.5
    group = PackedLinears.pack(native, [make_linear(weight)], lambda _: None, form=product.form)
    product = replace(product, form=group.form)  # not all weights can be compressed
    slow = []
    for rows in NUM_ROWS:
        if product.form == WeightForm.COMPRESSED and rows == 1:
            continue  # reading less from memory is all that it gains, and was measured when the form was chosen
        x = torch.randn(rows, product.inputs).to(product.dtype)
        outs = group(x)  # whose memory the kernels write to again
        ratio = compare_times(group.repeat_product, partial(linear, x, weight))
        del outs
        if ratio > MAX_RATIO:
            slow.append(f"{rows} rows {ratio:.1f}")
    return f"{product} ({', '.join(slow)})" if slow else ""


def compare_times(
    one: Callable[[], object], other: Callable[[], object], prepare: Callable[[], object] = lambda: None
) -> float:
    """Return the least time of the processor that one takes, to that of the other. They take turns, each prepared."""
    spent = [float("inf"), float("inf")]
    for _ in range(1 + NUM_PROBES):
        for number, compute in enumerate((one, other)):
            prepare()
            begun_s = time.thread_time()
            compute()
            spent[number] = min(spent[number], time.thread_time() - begun_s)
    return spent[0] / spent[1]
