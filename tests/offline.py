"""Compile the Triton kernels for GPUs that this machine lacks, with the arguments of the real callers.

A fused model on fake CUDA tensors runs a prompt and a decoding step. Each launch is recorded instead of executed.
`compile` then applies Triton's own specialization and compiler to a launch. A fake driver tells Triton the target. This
requires no GPU, no driver and no memory for weights. TRITON_INTERPRET must not be set when triton is imported.

usage: python -m tests.offline FILE JOBS      (JOBS: a JSON list of argument lists of Job; FILE: the JSON result)
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily

from llama.cache import KVCache
from llama.config import ModelConfig
from llama.engine import triton_kernels as kernels
from llama.engine.fused import FusedRunner
from llama.engine.linears import BlockLinear, SkipInit
from llama.model import Transformer
from llama.quant.rounding import quantize
from llama.quant.schemes import SCHEMES, scheme_for

from .fake_cuda import FakeRuntime, fake_mode

CONFIGS = Path(__file__).parents[1] / "configs"
MODELS = ("llama-3.2-1b", "llama-3.1-8b", "llama-3.1-70b")
KINDS = ("bfloat16", "float32", "int8", "int4")
ARCHITECTURES = (80, 90, 100)
# the names of the kernels
LAUNCHED = sorted(set(re.findall(r'launch\(\s*"(_\w+)"', Path(kernels.__file__).read_text())))


class Launch(NamedTuple):
    """A kernel, its arguments, the device of its tensors, and the current device at its launch."""

    kernel: str
    args: tuple[Any, ...]
    constants: dict[str, Any]
    devices: frozenset[int]
    current: int


class Recorder:
    """Replaces the kernels of triton_kernels and torch.cuda, and records launches."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.runtime = FakeRuntime()

    def kernel(self, name: str) -> Any:
        def launch(*args: Any, **constants: Any) -> None:
            devices = frozenset(arg.get_device() for arg in args if isinstance(arg, Tensor))
            self.launches.append(Launch(name, args, constants, devices, self.runtime.device))

        return mock.MagicMock(__getitem__=lambda _, grid: launch)

    @contextlib.contextmanager
    def recording(self) -> Iterator[list[Launch]]:
        """Yield a list that receives every launch of the kernels."""
        with contextlib.ExitStack() as stack:
            for name, value in self.runtime.stand_ins().items():
                stack.enter_context(mock.patch(f"torch.cuda.{name}", value))
            stack.enter_context(mock.patch.object(kernels, "kernel", self.kernel))
            yield self.launches


def fake_model(config: ModelConfig, kind: str, device: torch.device) -> Transformer:
    """Return a model of one layer on a CUDA device, within the current FakeTensorMode."""
    scheme = SCHEMES.get(kind)
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    with unset_fake_temporarily(), torch.device("meta"), SkipInit():
        model = Transformer(replace(config, n_layers=1), "real").requires_grad_(False).eval()
    for name, linear in [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)] if scheme else []:
        model.set_submodule(name, fake_blocks(linear, name, scheme, device))
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device=device), False))
    model.rope.table = tuple(torch.empty(part.shape, dtype=part.dtype, device=device) for part in model.rope.table)
    return model


def fake_blocks(linear: nn.Linear, name: str, scheme: Any, device: torch.device) -> BlockLinear:
    """Return a quantized layer with fake tensors. Their shapes and dtypes are taken from a real layer with one row."""
    with unset_fake_temporarily():
        layer = BlockLinear(quantize(torch.ones(1, linear.in_features), scheme_for(name, scheme).format))
    layer.out_features = linear.out_features
    for key, one in layer.named_buffers():
        layer.register_buffer(key, torch.empty(linear.out_features, *one.shape[1:], dtype=one.dtype, device=device))
    return layer


def record(name: str, kind: str, device: str = "cuda:0", length: int = 8192) -> list[Launch]:
    """Return the launches of a prompt, of a fused decoding step, and of one feed-forward layer called as a module."""
    config = ModelConfig(**json.loads((CONFIGS / f"{name}.json").read_text()))
    on = torch.device(device)
    with fake_mode() as mode, mode, Recorder().recording() as launches, torch.inference_mode():
        model = fake_model(config, kind, on)
        runner = model.runner = FusedRunner(model)
        cache: KVCache = model.new_cache(length)
        model.hidden(torch.zeros(1, 300, dtype=torch.long, device=on), cache=cache)
        token, position = torch.zeros(1, 1, dtype=torch.long, device=on), torch.zeros(1, dtype=torch.long, device=on)
        runner.launch_logits(model, token, position, cache)
        model.layers[0].feed_forward(torch.empty(1, 1, config.dim, dtype=model.norm.weight.dtype, device=on))
    return launches


# ----------------------------------------------------------------------------------------------------------- compiling
class Resources(NamedTuple):
    """Resources of a compiled kernel: registers and bytes of local memory per thread, shared memory per program."""

    registers: int
    local: int
    shared: int


class Driver:
    """A fake driver for `triton.runtime.driver`. The number of the current device is the target architecture."""

    def __init__(self, architecture: int) -> None:
        self.architecture = architecture

    def get_current_device(self) -> int:
        return self.architecture

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.architecture, 32)


def compile(launch: Launch, architecture: int, kernel: Any = None) -> Any:
    """Compile the kernel of a launch as Triton would on a GPU of an architecture, and return it."""
    from triton.runtime import driver
    from triton.runtime.jit import MockTensor

    class Aligned(MockTensor):
        def __init__(self, tensor: Tensor) -> None:
            super().__init__(tensor.dtype)
            # CUDA allocations are aligned to 512 bytes
            self.offset = tensor.storage_offset() * tensor.element_size()

        def data_ptr(self) -> int:
            return self.offset

    args = [Aligned(arg) if isinstance(arg, Tensor) else arg for arg in launch.args]
    driver.set_active(Driver(architecture))
    kernel = kernel or kernels.kernel(launch.kernel)
    return kernel.warmup(*args, grid=(1,), **launch.constants)


def resources(compiled: Any) -> Resources:
    """Return the resources that ptxas assigned, read from the binary."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return Resources(found["REG"], found["STACK"] + found["LOCAL"], compiled.metadata.shared)


class Job(NamedTuple):
    """What to compile: the launches of a model with a cache of `length` tokens, of all kernels or only of `kernels`.

    stages  replaces BlockSizes.stages unless it is None
    """

    architecture: int
    model: str
    kind: str
    length: int = 8192
    kernels: Sequence[str] = ()
    stages: int | None = None


class Variant(NamedTuple):
    """A compiled kernel and its resources."""

    kernel: str
    constants: dict[str, Any]
    job: Job
    resources: Resources


def variants(jobs: Iterable[Job]) -> Iterator[Variant]:
    """Compile the launches of the models, each variant once."""
    found = set()
    for job in jobs:
        for launch in record(job.model, job.kind, length=job.length):
            if not job.kernels or launch.kernel in job.kernels:
                if job.stages:
                    launch.constants["STAGES"] = job.stages
                compiled = compile(launch, job.architecture)
                if compiled.hash not in found:
                    found.add(compiled.hash)
                    yield Variant(launch.kernel, launch.constants, job, resources(compiled))


def main() -> None:
    file, jobs = sys.argv[1:]
    rows = [*variants(Job(*job) for job in json.loads(jobs))]
    report = {"variants": rows, "seconds": sum(os.times()[:4])}
    Path(file).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
