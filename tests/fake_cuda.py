"""Fake CUDA tensors for a machine without CUDA. They have a shape, a dtype and a device, but no data.

PyTorch's FakeTensorMode computes only shapes, dtypes and devices, so the code under test runs unchanged on device
"cuda". An operation on tensors of two devices raises an error. `Watch` raises an error when the host would wait for the
device. PyTorch's CPU build lacks the guard that switches CUDA devices; GUARD registers one that does nothing.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from llama.engine import kernels
from llama.engine.placement import Placement
from llama.model import Transformer

GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
using c10::DeviceType;
static const c10::impl::NoOpDeviceGuardImpl<DeviceType::CUDA> guard;
extern "C" void set(int on) {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(DeviceType::CUDA)].store(on ? &guard : nullptr);
}
"""
CUDA = torch.device("cuda", 0)


class WaitError(Exception):
    """The host would wait for the device."""


@functools.cache
def built() -> ctypes.CDLL:
    """Compile and load the library with the guard, which takes two seconds."""
    root = Path(torch.__file__).parent
    flags = ["-std=c++20", "-shared", "-fPIC", "-w", f"-I{root / 'include'}", f"-L{root / 'lib'}", "-lc10"]
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "guard.cpp", Path(folder) / "guard.so"
        source.write_text(GUARD)
        subprocess.run([str(kernels.compiler()), str(source), "-o", str(library), *flags], check=True)
        return ctypes.CDLL(str(library))


@contextmanager
def fake_mode() -> Iterator[FakeTensorMode]:
    """Yield a FakeTensorMode that is not entered yet, and provide a guard for CUDA devices."""
    mode = FakeTensorMode()
    # Without this, a device that another test registered would make the mode copy single values to a real device.
    with mock.patch.object(FakeTensorMode, "avoid_device_init", True):
        if torch.version.cuda is not None:  # a CUDA build has its own guard
            yield mode
            return
        built().set(1)
        try:
            yield mode
        finally:
            built().set(0)


class Watch(TorchDispatchMode):
    """Records operations, and raises WaitError where the host would wait for a CUDA device.

    operations  the names of all operations so far
    answers     returns the value where the host reads one number; then `reads` and `copies` count instead of raising
    """

    def __init__(self, answers: Callable[[torch.dtype], float] | None = None):
        super().__init__()
        self.operations: list[str] = []
        self.answers, self.reads, self.copies = answers, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name
        if name == "prim::device":
            return func(*args, **kwargs)
        self.operations.append(name)
        if name in ("aten::_local_scalar_dense", "aten::item", "aten::is_nonzero"):
            if args[0].is_cuda and self.answers is None:
                raise WaitError(f"the value of a tensor {tuple(args[0].shape)} is read")
            self.reads += args[0].is_cuda
            answer = 0.0 if self.answers is None else self.answers(args[0].dtype)
            return answer if args[0].dtype.is_floating_point else int(answer)
        if name in ("aten::_to_copy", "aten::to", "aten::copy_"):
            target = args[0].device if name == "aten::copy_" else kwargs.get("device")
            source, late = args[name == "aten::copy_"], kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            if target is not None and torch.device(target).type == "cpu" and source.is_cuda and late is not True:
                if self.answers is None:
                    raise WaitError(f"a tensor {tuple(source.shape)} is copied to the host")
                self.copies += 1
            source.constant = None  # otherwise the mode would copy this single value to a real device
        return func(*args, **kwargs)


def to_fake(model: Transformer, mode: FakeTensorMode, placement: Placement | None = None) -> Transformer:
    """Replace the parameters, buffers and RoPE table of a model by fake tensors on cuda:0 or as placed."""
    with mode:
        for name, module in model.named_modules():
            for tensors in (module._parameters, module._buffers):
                for key, tensor in tensors.items():
                    if tensor is not None:
                        device = CUDA if placement is None else placement.device_of(f"{name}.{key}")
                        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
                        tensors[key] = nn.Parameter(fake, False) if isinstance(tensor, nn.Parameter) else fake
    model.rope.table = tuple(mode.from_tensor(table) for table in model.rope.table)
    return model


class FakeKernel:
    """Replaces a Triton kernel. Checks that its tensors are on the current CUDA device, and records the call."""

    def __init__(self, name: str, calls: list[tuple[str, torch.device]]):
        self.name, self.calls = name, calls

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(isinstance(n, int) and n > 0 for n in grid), grid

        def launch(*args: Any, **options: Any) -> None:
            tensors = [arg for arg in (*args, *options.values()) if isinstance(arg, Tensor)]
            devices = {tensor.device for tensor in tensors}
            assert len(devices) == 1, f"{self.name}: tensors on {devices}"
            (device,) = devices
            assert device.type == "cuda", f"{self.name}: a tensor on the CPU"
            assert torch.cuda.current_device() == device.index, f"{self.name}: launched on another device"
            self.calls.append((self.name, device))

        return launch


class FakeRuntime:
    """Replaces what the package uses of torch.cuda: streams, events, graphs, the current device."""

    def __init__(self) -> None:
        self.device, self.capturing, self.waits, self.graphs, self.replays = 0, False, 0, 0, 0
        self.events: list[torch.device] = []  # the device of each recorded event
        runtime = self

        class Stream:
            def __init__(self, device: torch.device | int | None = None):
                self.device = torch.device("cuda", runtime.index(device))

            def wait_event(self, event: Event) -> None:
                assert not runtime.capturing

        class Event:
            def __init__(self) -> None:
                self.recorded: torch.device | None = None

            def record(self, stream: Stream) -> None:
                assert not runtime.capturing
                self.recorded = stream.device
                runtime.events.append(stream.device)

            def synchronize(self) -> None:
                assert self.recorded is not None
                runtime.waits += 1

        class Graph:
            def __init__(self) -> None:
                self.device = runtime.device
                runtime.graphs += 1

            def replay(self) -> None:
                assert not runtime.capturing
                assert runtime.device == self.device, "replayed on another device"
                runtime.replays += 1

        self.Stream, self.Event, self.CUDAGraph = Stream, Event, Graph

    def index(self, device: torch.device | int | None) -> int:
        if isinstance(device, torch.device):
            return self.device if device.index is None else device.index
        return self.device if device is None else device

    @contextmanager
    def switch(self, device: Any) -> Iterator[None]:
        before, self.device = self.device, self.index(device)
        try:
            yield
        finally:
            self.device = before

    @contextmanager
    def graph(self, graph: Any, stream: Any = None, capture_error_mode: str = "global") -> Iterator[None]:
        assert stream is not None, "without a stream, all threads share the default stream of torch.cuda.graph"
        assert not self.capturing
        self.capturing = True
        try:
            yield
        finally:
            self.capturing = False

    def stand_ins(self) -> dict[str, Any]:
        """Return the replacements for torch.cuda, by name."""
        return {
            "Stream": self.Stream,
            "Event": self.Event,
            "CUDAGraph": self.CUDAGraph,
            "graph": self.graph,
            "device": self.switch,
            "device_of": lambda tensor: self.switch(tensor.device if tensor.is_cuda else None),
            "current_stream": self.Stream,
            "current_device": lambda: self.device,
            "is_current_stream_capturing": lambda: self.capturing,
            "get_device_capability": lambda device=None: (9, 0),
        }
