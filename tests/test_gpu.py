"""The model on a GPU: one pass over fake tensors, which needs none, and the laws, which run where there is a GPU.

Fake tensors have a shape, a dtype and a device, but no data. So a pass over them fails if an operation mixes devices or
if the host waits for a number. What they can't show are the numbers: the laws compare those with the CPU's.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from llama.checkpoint import open_checkpoint
from llama.checkpoint.weight import MemoryWeight
from llama.engine import kernels, linears
from llama.engine.compiled import GraphRunner
from llama.engine.linears import GroupedLinear, Int4Linear, make_linear
from llama.generate import generate, prefill
from llama.generation.batch import Batch, Request, TokenEvent
from llama.generation.speculative import NGramDraft, speculate
from llama.model import Transformer
from llama.quant.groups import READERS
from llama.quant.schemes import SCHEMES, quantize, scheme_for
from llama.sampling import SamplingParams
from llama.weights import plan_weights, storage_warnings

from . import tiny

CUDA = torch.device("cuda", 0)
CONFIG = dataclasses.replace(tiny.WIDE, max_seq_len=128)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]

# PyTorch's CPU build lacks the guard that makes a CUDA device current; this one does nothing.
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
static const c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> guard;
extern "C" void set(int on) {
  c10::impl::device_guard_impl_registry[static_cast<size_t>(c10::DeviceType::CUDA)].store(on ? &guard : nullptr);
}
"""


# ----------------------------------------------------------------------------------------------- without a GPU
@pytest.fixture(scope="module")
def guard(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if kernels.compiler() is None:
        pytest.skip("needs a C++ compiler")
    root, folder = Path(torch.__file__).parent, tmp_path_factory.mktemp("guard")
    (folder / "guard.cpp").write_text(GUARD)
    flags = ["-std=c++20", "-shared", "-fPIC", "-w", f"-I{root / 'include'}", f"-L{root / 'lib'}", "-lc10"]
    command = [str(kernels.compiler()), str(folder / "guard.cpp"), "-o", str(folder / "guard.so"), *flags]
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(folder / "guard.so"))


@pytest.fixture
def mode(guard: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTensorMode]:
    """Fake tensors, also on CUDA devices."""
    monkeypatch.setattr(FakeTensorMode, "avoid_device_init", True)  # else some operations would initialize CUDA
    guard.set(torch.version.cuda is None)
    yield FakeTensorMode()
    guard.set(0)


def to_cuda(model: Transformer, mode: FakeTensorMode) -> Transformer:
    """Replace the weights and the RoPE table of a model by fake tensors; those of the weights are on CUDA."""
    with mode:
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=CUDA)
                        tensors[name] = nn.Parameter(fake, False) if isinstance(tensor, nn.Parameter) else fake
    model.rope.table = tuple(mode.from_tensor(table) for table in model.rope.table)
    return model


def block_model(scheme: str | None, rope: str) -> Transformer:
    """A model in bfloat16 with the layers of a GPU."""
    model = tiny.model(CONFIG, rope=rope, attention="sdpa").bfloat16()
    linear_layers = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for name, linear in linear_layers if scheme else ():
        blocks = quantize(linear.weight, scheme_for(name, SCHEMES[scheme]).format)
        model.set_submodule(name, GroupedLinear(blocks, linear.bias))
    return model


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.long, device=CUDA)


@pytest.mark.parametrize(("scheme", "rope", "kind"), [
    ("int8", "half", "model"), ("int4", "complex", "int8"),
    *(pytest.param(*options, marks=pytest.mark.slow) for options in ((None, "complex", "model"), (None, "half", "int8"), ("int8", "real", "model"))),
])  # fmt: skip
def test_prefill_decoding_and_batch_steps_stay_on_the_device_and_never_wait(
    mode: FakeTensorMode, scheme: str | None, rope: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llama.generate.prompt_chunk", lambda device: 3)
    model = to_cuda(block_model(scheme, rope), mode)
    model.cache_kind = kind
    with mode, torch.inference_mode():
        cache = model.new_cache(100)
        for logits in (prefill(model, PROMPT, cache)[None], model(zeros(1, 1), cache=cache)[:, -1]):
            assert (logits.device, logits.dtype, logits.shape) == (CUDA, torch.float32, (1, CONFIG.vocab_size))
        rows = model.new_cache(100, batch=3).rows(0, 3)
        step = functools.partial(tiny.next_logits, model, zeros(3, 1), cache=rows)
        assert step(zeros(3, 1)).device == CUDA
        with pytest.raises(Exception, match="cuda:0"):  # a mix of devices is noticed
            step(zeros(3, 1).new_zeros(3, 1, device="cpu"))
        with pytest.raises(DataDependentOutputException):  # so is a number that the host reads
            logits.max().item()


@pytest.mark.parametrize(("scheme", "columns"), [("int4", 64), ("int4", 192), ("int4", 256)])
def test_int4_weights_are_handed_over_as_pytorchs_kernel_reads_them(
    monkeypatch: pytest.MonkeyPatch, scheme: str, columns: int
) -> None:
    """The kernel's documented formula, in place of the kernel: (quant - 8) * scale + zero, even columns in high halves."""

    def product(x: Tensor, packed: Tensor, group: int, scale_and_zero: Tensor) -> Tensor:
        quants = torch.stack((packed >> 4, packed & 15), dim=-1).flatten(-2).unflatten(-1, (-1, group)).float() - 8
        scale, zero = scale_and_zero.float().transpose(0, 1).unbind(-1)  # (N, groups) each
        return (x.float() @ (quants * scale[..., None] + zero[..., None]).flatten(1).T).bfloat16()

    inner: list[int] = []
    monkeypatch.setattr(linears, "has_int4_kernel", lambda *args: True)
    monkeypatch.setattr(
        torch.ops.aten, "_convert_weight_to_int4pack", lambda packed, tiles: (inner.append(tiles), packed)[1]
    )
    monkeypatch.setattr(torch.ops.aten, "_weight_int4pack_mm", product)
    weight, bias, x = noise(24, columns), noise(24), noise(2, 3, columns)
    blocks = quantize(weight, SCHEMES[scheme].format)
    layer = Int4Linear(blocks, bias)
    expected = nn.functional.linear(x, blocks.weight, bias)
    assert float((layer(x) - expected).norm() / expected.norm()) < 0.01
    assert float((layer.weight - blocks.weight).norm() / blocks.weight.norm()) < 0.005
    assert columns % (16 * inner[0]) == 0
    assert layer.to(torch.float32)(x).shape == (2, 3, 24)
    assert "int4-g" in repr(layer)


@pytest.mark.parametrize(("rows", "columns", "group", "capability", "expected"), [
    (64, 128, 32, (8, 0), True), (64, 128, 128, (9, 0), True), (60, 128, 32, (8, 0), False),
    (64, 96, 64, (8, 0), False), (64, 128, 16, (8, 0), False), (64, 128, 32, (7, 5), False),
])  # fmt: skip
def test_pytorchs_int4_kernel_is_used_where_it_works(
    monkeypatch: pytest.MonkeyPatch, rows: int, columns: int, group: int, capability: tuple[int, int], expected: bool
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    format = SCHEMES["int4"].format._replace(group=group)
    assert linears.has_int4_kernel(format, (rows, columns), CUDA) == expected
    assert not linears.has_int4_kernel(format._replace(bits=8), (rows, columns), CUDA)
    assert not linears.has_int4_kernel(format, (rows, columns), torch.device("cpu"))


@pytest.mark.parametrize("type", ["Q4_0", "Q4_1", "Q8_0", "Q5_1", "Q2_K", "Q4_K", "Q6_K", "IQ4_NL"])
def test_only_plain_types_of_a_file_stay_packed(type: str) -> None:
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type]]
    format = READERS[type](np.random.default_rng(0).integers(0, 48, (4, 2 * size), np.uint8)).format
    assert (linears.kept_format(format, CUDA) is not None) == (type in ("Q4_0", "Q4_1", "Q8_0"))
    assert linears.kept_format(format, torch.device("mps")) is None


@pytest.mark.parametrize(("type", "expected"), [
    ("Q8_0", []), ("Q5_0", ["Q5_0 are dequantized to bfloat16, which takes 0.0 GB"]),
])  # fmt: skip
def test_one_line_says_what_is_dequantized(type: str, expected: list[str], tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny.write_gguf(tmp_path / "x.gguf", CONFIG, quantization=type))
    on_gpu, on_cpu = (
        plan_weights(checkpoint, lambda _, d=d: d, torch.bfloat16, keep=True) for d in (CUDA, torch.device("cpu"))
    )
    lines = storage_warnings(on_gpu, torch.bfloat16)
    assert [words in line for words, line in zip(expected, lines, strict=True)] == [True] * len(expected)
    assert storage_warnings(on_cpu, torch.bfloat16) == []


def test_a_large_weight_is_dequantized_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = GroupedLinear(quantize(noise(50, 96), SCHEMES["int4"].format), noise(50)), noise(2, 3, 96)
    expected, sizes, rows = layer(x), [], GroupedLinear.rows
    monkeypatch.setattr(GroupedLinear, "rows", lambda self, part: (sizes.append(part), rows(self, part))[1])
    monkeypatch.setattr(linears, "DEQUANTIZED_ENTRIES", 7 * 96)
    torch.testing.assert_close(layer(x), expected)
    assert sizes == [slice(first, first + 7) for first in range(0, 50, 7)]


def test_scales_that_a_file_stores_by_columns_can_be_moved() -> None:
    blocks = quantize(noise(50, 96), SCHEMES["int4"].format)
    layer, expected = GroupedLinear(blocks._replace(scale=blocks.scale.mT.contiguous().mT)), GroupedLinear(blocks)
    assert torch.equal(layer.to("cpu").weight, expected.weight)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_a_compiled_product_equals_the_eager_one(scheme: str) -> None:
    """Compiled code multiplies one row by another expression, which Inductor can fuse."""
    torch._dynamo.reset()
    layer = GroupedLinear(quantize(noise(6, 200), SCHEMES[scheme].format), noise(6))
    compiled = torch.compile(lambda x: layer(x), backend="eager", fullgraph=True)
    for shape in ((200,), (1, 1, 200), (2, 3, 200)):
        x = noise(*shape)
        torch.testing.assert_close(compiled(x), layer(x), rtol=0, atol=1e-4)


def test_the_step_for_cuda_is_one_graph_for_all_layers_and_equals_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    compilations: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Any:
        compilations.append(graph)
        return graph.forward

    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, mode: compile(function, backend=backend, fullgraph=True))
    begun: list[int] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: begun.append(1))
    model, fast = block_model("int8", "real"), block_model("int8", "real")
    fast.runner = GraphRunner(fast)
    caches = [net.new_cache(40, fixed=True) for net in (model, fast)]
    for part in (PROMPT, [5], [3], [2]):
        expected, found = (
            net(torch.tensor([part]), cache=cache) for net, cache in zip((model, fast), caches, strict=True)
        )
        assert float((found - expected).norm() / expected.norm()) < 0.02
    assert len(compilations) == 1
    assert len(begun) == 3  # once for each token


# -------------------------------------------------------------------------------------------------------- on a GPU
def law(test: Any) -> Any:
    """Mark a test that needs a GPU."""
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")(test))


def gpu_model(scheme: str | None = None, dtype: torch.dtype = torch.bfloat16) -> Transformer:
    model = tiny.model(CONFIG, rope="real", attention="sdpa").to(CUDA, dtype)
    return tiny.quantized(model, scheme) if scheme else model


def answer(model: Transformer, prompt: list[int], count: int = 24) -> list[int]:
    return [token.id for token in generate(model, prompt, SamplingParams(max_new_tokens=count))]


def gap(found: Tensor, expected: Tensor) -> float:
    return float((found.cpu().float() - expected).norm() / expected.norm())


@law
@pytest.mark.parametrize(("dtype", "kind", "bound"), [
    (torch.float32, "model", 1e-4), (torch.bfloat16, "model", 0.03), (torch.float32, "int8", 0.02),
])  # fmt: skip
def test_logits_equal_those_of_the_cpu(dtype: torch.dtype, kind: str, bound: float) -> None:
    model, ids = gpu_model(dtype=dtype), torch.tensor([PROMPT])
    expected = tiny.model(CONFIG, rope="real", attention="sdpa")(ids)
    model.cache_kind = kind
    cache = model.new_cache(64)
    chunks = [model(part, cache=cache) for part in ids.to(CUDA).split([3, 1, 4], 1)]
    assert gap(torch.cat(chunks, 1), expected) < bound
    assert gap(model(ids.to(CUDA)), expected) < bound


@law
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_quantized_products_equal_those_of_the_dequantized_weight(scheme: str, compile: bool) -> None:
    weight, bias = noise(64, 256), noise(64)
    format = SCHEMES[scheme].format
    layer = make_linear(MemoryWeight(weight), CUDA, format, bias.to(CUDA, torch.bfloat16))
    run = torch.compile(layer) if compile else layer
    for shape in ((1, 256), (1, 9, 256), (300, 256)):
        x = noise(*shape).bfloat16()
        assert gap(run(x.to(CUDA)), nn.functional.linear(x.float(), quantize(weight, format).weight, bias)) < 0.015


@law
@pytest.mark.parametrize("scheme", [None, "int8", "int4"])
def test_a_batch_and_a_draft_give_the_tokens_of_a_single_run(scheme: str | None) -> None:
    model = gpu_model(scheme, torch.float32 if scheme is None else torch.bfloat16)
    prompts = [PROMPT, PROMPT[2:], [*PROMPT, 7, 7]]
    expected, params = [answer(model, prompt) for prompt in prompts], SamplingParams(max_new_tokens=24)
    found: list[list[int]] = [[] for _ in prompts]
    for event in Batch(model, [Request(prompt, params) for prompt in prompts], slots=2):
        if isinstance(event, TokenEvent):
            found[event.number].append(event.token.id)
    drafted = [[token.id for token in speculate(model, prompt, params, NGramDraft())] for prompt in prompts]
    if (
        scheme is None
    ):  # in other dtypes, products of several rows are rounded otherwise, which may change a close choice
        assert found == drafted == expected
    assert [ids[0] for ids in found] == [ids[0] for ids in drafted] == [ids[0] for ids in expected]


@law
@pytest.mark.parametrize("scheme", [None, "int8", "int4"])
def test_the_compiled_step_gives_the_logits_of_the_block(scheme: str | None) -> None:
    model, fast = gpu_model(scheme), gpu_model(scheme)
    fast.runner = GraphRunner(fast)
    for slots in (40, 100, 40):  # graphs are recorded for each cache
        caches = [net.new_cache(slots, fixed=True) for net in (model, fast)]
        for part in (PROMPT, *([token] for token in PROMPT)):
            ids = torch.tensor([part], device=CUDA)
            expected, found = (net(ids, cache=cache) for net, cache in zip((model, fast), caches, strict=True))
            assert gap(found, expected.cpu()) < 0.03
