"""Simulated devices away:0, away:1, ...: their tensors compute on the CPU, but can't be mixed with other devices'.

PyTorch reserves a backend (privateuseone) for external devices; this one is written in Python. An Away tensor wraps a
CPU tensor. Every operator checks that its tensors are on one device, then runs on the wrapped tensors. Only copies may
cross devices, and they are recorded. So code that places layers on several devices is shown to move what it must, and
nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

DEVICES = 4
MOVES: list[tuple[str, str, tuple[int, ...]]] = []  # source, target and shape of every copy between devices
ACROSS = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default, torch.ops.aten._local_scalar_dense.default)


class _Module(_DummyBackendModule):
    def device_count(self) -> int:
        return DEVICES


class Away(Tensor):
    """A tensor on a simulated device."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor, device: torch.device) -> Away:
        self = torch.Tensor._make_wrapper_subclass(
            cls, raw.shape, raw.stride(), raw.storage_offset(), dtype=raw.dtype, device=device
        )
        self.raw = raw
        return self

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Away({self.raw!r}, {self.device})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.tolist:
            return args[0].raw.tolist()
        if func not in UNDECOMPOSED:
            with torch._C.DisableTorchFunctionSubclass():  # a result on the CPU is not Away
                return func(*args, **(kwargs or {}))
        flat = _tensors(args, kwargs)
        _reject_mixed(func, flat)
        return Away(func(*tree_map(_raw, args), **tree_map(_raw, kwargs or {})), flat[0].device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            return func.decompose(*args, **kwargs)  # inference mode does not decompose it
        flat = _tensors(args, kwargs)
        if func not in ACROSS:
            _reject_mixed(func, flat)
        device = flat[0].device
        if "device" in kwargs and kwargs["device"] is not None:
            device = _indexed(kwargs["device"])
            kwargs["device"] = torch.device("cpu")
        source, target = (flat[-1].device, flat[0].device) if func is ACROSS[1] else (flat[0].device, device)
        if func in ACROSS[:2] and source != target:
            MOVES.append((str(source), str(target), tuple(flat[-1].shape)))
        out = func(*tree_map(_raw, args), **tree_map(_raw, kwargs))
        own = {id(leaf.raw): leaf for leaf in flat if isinstance(leaf, Away)}

        def wrap(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) in own:  # an in-place result
                return own[id(leaf)]
            return leaf if device.type == "cpu" else Away(leaf, device)

        return tree_map(wrap, out)


# Run without decomposition. The CPU has kernels for the first two; decomposed, they would sum in another order. In
# inference mode, slicing a tensor created outside of that mode fails for a wrapper.
UNDECOMPOSED = (F.linear, F.scaled_dot_product_attention, Tensor.__getitem__)


def _tensors(args: Any, kwargs: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]


def _reject_mixed(func: Any, tensors: list[Tensor]) -> None:
    """Raise RuntimeError if the tensors are on several devices. As in PyTorch, 0-d CPU tensors match any device."""
    devices = {str(t.device) for t in tensors if t.dim() or isinstance(t, Away)}
    if len(devices) > 1:
        raise RuntimeError(f"{func} was given tensors on {' and '.join(sorted(devices))}")


def _raw(leaf: Any) -> Any:
    return leaf.raw if isinstance(leaf, Away) else leaf


def _indexed(device: torch.device | str) -> torch.device:
    device = torch.device(device)
    return torch.device("away", device.index or 0) if device.type == "away" else device


def _empty(size: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    return Away(torch.empty(size, dtype=dtype), _indexed(device))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    return Away(torch.empty_strided(size, stride, dtype=dtype), _indexed(device))


def _arange(*numbers: Any, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    return Away(torch.arange(*numbers, dtype=dtype), _indexed(device))


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """The copy at the end of torch.tensor(..., device=...)."""
    _raw(target).copy_(_raw(source))
    return target


def register() -> None:
    """Register the devices with PyTorch, once per process."""
    if torch._C._get_privateuse1_backend_name() != "away":
        _setup_privateuseone_for_python_backend("away", backend_module=_Module())
        torch.library.impl("aten::empty.memory_format", "privateuseone")(_empty)
        torch.library.impl("aten::empty_strided", "privateuseone")(_empty_strided)
        torch.library.impl("aten::_copy_from", "privateuseone")(_copy_from)
        for name in ("arange", "arange.start", "arange.start_step"):
            torch.library.impl(f"aten::{name}", "privateuseone")(_arange)


@contextmanager
def counted() -> Iterator[list[tuple[str, str, tuple[int, ...]]]]:
    """Record the copies between devices inside the context."""
    MOVES.clear()
    yield MOVES
