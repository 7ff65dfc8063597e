"""The device that computes."""

from array import array
from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(values: Sequence[float] | Sequence[Sequence[int]], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Copy numbers to the device. On a CPU, numbers in an array stay where they are."""
    if device.type == "cpu" and isinstance(values, array):
        return torch.frombuffer(values, dtype=dtype)
    return torch.tensor(values, dtype=dtype, device=device)


def describe_device(device: torch.device) -> str:
    """Return the model of a GPU, its size, and the versions of what computes on it; an empty string for a CPU."""
    if device.type == "cpu":
        return ""
    cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call, unused-ignore]
    gpu = torch.cuda.get_device_properties(device)  # type: ignore[no-untyped-call, unused-ignore]
    return (
        f"{gpu.name} {gpu.major}.{gpu.minor}, {gpu.multi_processor_count} multiprocessors, torch {torch.__version__}, "
        f"CUDA {torch.version.cuda}, cuDNN {cudnn}"
    )
