"""Functions that choose the device, the dtype and the number of threads."""

from __future__ import annotations

import ctypes
import functools
import os
import re
from pathlib import Path

import torch

from .. import checks
from ..errors import UsageError
from ..system.cores import default_threads
from ..system.memory import read

DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


def pick_device(name: str | torch.device | None = None) -> torch.device:
    """The device with this name; None or "auto": the best one. Raises UsageError, which lists the available devices."""
    here = ["cpu"]
    if torch.cuda.is_available():
        here = [f"cuda:{i}" for i in range(torch.cuda.device_count())] + here
    if torch.backends.mps.is_available():
        here = ["mps", *here]
    if name is None or str(name) == "auto":
        return torch.device(here[0])
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise UsageError(f"unknown device {name!r}; available here: auto, {', '.join(here)}") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if not any(h == str(device) or h.split(":")[0] == str(device) for h in here):
        without = device.type == "cuda" and not torch.backends.cuda.is_built()
        cause = " because PyTorch was built without CUDA" if without else ""
        raise UsageError(f"device {str(device)!r} is not available{cause}; available here: {', '.join(here)}")
    return device


def pick_dtype(name: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """The dtype with this name; None or "auto": the fastest on the device, bfloat16 if it has instructions for that.

    A decoding step spends most of its time on reading weights, so half the bytes take half the time. On a CPU without
    bfloat16, 16-bit weights stay in 16 bits, and the products are computed in float32 (`linears.kept_dtype`).
    """
    if isinstance(name, torch.dtype):
        if name not in DTYPES.values():
            raise UsageError(f"dtype {name} is not supported; supported: float32, bfloat16, float16")
        return name
    if name is not None and name != "auto":
        if not isinstance(name, str) or name not in DTYPES:
            hint = f"; quantize={name!r} (--quantize {name}) quantizes weights" if name in ("int8", "int4") else ""
            raise UsageError(f"unknown dtype {name!r}; known: auto, {', '.join(DTYPES)}{hint}")
        return DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    if device.type == "cpu":
        from . import kernels  # imported here, since kernels.py imports this module

        fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
        fast = fast or kernels.arm_features()["bf16"]
        return torch.bfloat16 if fast and kernels.pick_form() not in kernels.WIDENING else torch.float32
    return torch.bfloat16


def set_threads(count: int | None) -> None:
    """Set the number of threads per operation, for this process; None: `cores.default_threads`."""
    if count is None:
        count = default_threads()
    else:
        checks.integer("threads", count, 1, max(64, 4 * (os.cpu_count() or 1)))
    if count != torch.get_num_threads():
        torch.set_num_threads(count)


# ----------------------------------------------------------------------------------------------------------- OpenMP
def end_openmp_threads() -> None:
    """End the threads that GNU's OpenMP has started for the calling thread; the next operation starts them again.

    Called before a fork, since the child has only the thread that forked, and OpenMP there would wait for the others.
    Called before the kernels run, since OpenMP's threads spin for milliseconds on the cores that the kernels need.
    """
    for library in _openmp():
        library.omp_pause_resource_all(2)  # omp_pause_hard


@functools.cache
def _openmp() -> list[ctypes.CDLL]:
    """The loaded libraries of GNU's OpenMP, usually PyTorch's copy. Other implementations work after a fork."""
    paths = sorted(set(re.findall(r"\S*/libgomp[^/\n]*", read(Path("/proc/self/maps")))))  # none outside Linux
    return [library for path in paths if hasattr(library := ctypes.CDLL(path), "omp_pause_resource_all")]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=end_openmp_threads)
