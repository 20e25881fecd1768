"""Group J: memory, devices, dtypes. The prediction of the memory of a run is tested in tests/test_memory.py."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from llama import loader
from llama.checkpoint import open_checkpoint
from llama.engine import runtime
from llama.generate import prefill
from llama.tools.convert import convert

from .. import tiny
from ..scripts import make_tiny
from .conftest import Try

pytestmark = pytest.mark.usefixtures("one_thread")
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux limits the address space")
RUN = ("--raw", "hello", "-n", "4", "--device", "cpu", "--dtype", "float32", "--quiet")


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    return tiny.write_gguf(tmp_path / "m.gguf")


# ---------------------------------------------------------------------------------------------- the address space
@linux
def test_a_failed_allocation_during_a_run_is_one_line(attempt: Try, tmp_path: Path) -> None:
    config = dataclasses.replace(tiny.CONFIG, n_heads=8, n_kv_heads=8, head_dim=32, max_seq_len=2**20)
    path = tiny.write_gguf(tmp_path / "m.gguf", config)
    done = attempt(
        "generate", *RUN[2:], "--raw", "-", "-m", path, "--no-memory-check", stdin=b"x" * 12_000, memory=64 << 20
    )  # 12,000 tokens, each with 8 kB of keys and values
    done.refused("out of memory")


# ----------------------------------------------------------------------------------------------- devices and dtypes
ABSENT = ("cuda", "cuda:0", "mps", "xpu", "gpu", "", "cpu:x", "meta", "cuda:-1", "vulkan", "cpu,")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ABSENT)
def test_a_missing_device_is_refused(name: str, gguf: Path, attempt: Try) -> None:
    attempt("generate", "--raw", "a", "-n", "1", "-m", gguf, f"--device={name}").refused(
        repr(name.rstrip(",")) if name != "cpu," else "''", "available here: ", "cpu", code=2
    )


@pytest.mark.parametrize("name", ["fp8", "float8_e4m3fn", "float64", "int8", "bf17", ""])
def test_an_unsupported_dtype_is_refused(name: str, gguf: Path, attempt: Try) -> None:
    attempt("generate", "--raw", "a", "-n", "1", "-m", gguf, f"--dtype={name}").refused(repr(name), "float32", code=2)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 0.01), ("bfloat16", 0.08)])
def test_a_cpu_computes_nearly_the_same_in_16_bits_as_in_32(dtype: str, tolerance: float, gguf: Path) -> None:
    tokens = tiny.random_tokens(30)
    expected = loader.build(open_checkpoint(gguf), "cpu", "float32")(tokens)
    for pack in (True, False):
        got = loader.build(open_checkpoint(gguf), "cpu", dtype, fast=pack)(tokens)
        assert float((got.float() - expected).norm() / expected.norm()) < tolerance


def test_a_gpu_without_bfloat16_uses_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated bfloat16 is slow, so it has to be asked for."""
    cuda = torch.device("cuda", 0)
    for native in (True, False):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, s=native: s)
        assert runtime.pick_dtype(None, cuda) == (torch.bfloat16 if native else torch.float16)
        assert runtime.pick_dtype("bfloat16", cuda) == torch.bfloat16


# ----------------------------------------------------------------------------------------------- mapped weights
def spans(tensors: list[Tensor]) -> list[tuple[int, int]]:
    return [
        (t.untyped_storage().data_ptr(), t.untyped_storage().data_ptr() + t.untyped_storage().nbytes()) for t in tensors
    ]


@pytest.mark.parametrize("form", ["gguf", "hf", "meta"])
def test_mapped_weights_are_writable_and_share_no_memory_with_buffers(form: str, gguf: Path, tmp_path: Path) -> None:
    """In a child, which a write to a read-only page would kill. The file does not change."""
    path = gguf
    if form != "gguf":
        path = tmp_path / form
        tiny.write_meta(path) if form == "meta" else convert(gguf, path, form)
    files = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    child = os.fork()
    if child == 0:
        code = 1
        try:
            model = loader.load_model(path, device="cpu", dtype="float32")
            cache = model.new_cache(64)
            prefill(model, [1, 2, 3], cache)
            for layer in cache.layers:
                for buffer in layer.buffers:
                    buffer.fill_(7)
            for table in model.rope.table:
                table.fill_(7)
            buffers = spans([buffer for layer in cache.layers for buffer in layer.buffers] + list(model.rope.table))
            weights = spans(list(model.parameters()))
            apart = all(a >= d or c >= b for a, b in buffers for c, d in weights)
            for weight in model.parameters():
                weight.zero_()
            code = 0 if apart and not any(bool(w.any()) for w in model.parameters()) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == files


@pytest.mark.parametrize(
    "args",
    [("generate", *RUN), ("generate", *RUN, "--kv-cache", "int8"), ("generate", *RUN, "--draft", "ngram"),
     ("generate", *RUN, "--quantize", "int8"), ("trace", "hello", "--ablate-head", "1.1"), ("inspect",)],
    ids=lambda args: " ".join(args[-2:]),
)  # fmt: skip
def test_no_command_writes_into_a_checkpoint(args: tuple[str, ...], gguf: Path, attempt: Try) -> None:
    gguf.chmod(0o444)
    model = (gguf,) if args[0] == "inspect" else ("-m", gguf)
    assert attempt(*args, *model).survived() or "int8" in args  # `attempt` compares every byte of the folder


def transposed(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous().t() if tensor.dim() == 2 else tensor


def offset(tensor: Tensor) -> Tensor:
    """A view into the middle of a larger storage."""
    larger = torch.full((tensor.numel() + 101,), 7.0, dtype=tensor.dtype)
    larger[50 : 50 + tensor.numel()] = tensor.flatten()
    return larger[50 : 50 + tensor.numel()].view(tensor.shape)


def strided(tensor: Tensor) -> Tensor:
    """Every second entry of a larger tensor."""
    larger = torch.full((*tensor.shape, 2), 7.0, dtype=tensor.dtype)
    larger[..., 0] = tensor
    return larger[..., 0]


@pytest.mark.parametrize("view", [transposed, offset, strided], ids=lambda view: view.__name__)
def test_weights_that_are_views_are_read_and_converted(view: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    plain = Path(make_tiny.make(tmp_path / "meta", "llama-3-8b"))
    tokens = tiny.random_tokens(20, loader.build(open_checkpoint(plain), "cpu", "float32").config)
    expected = {
        options: loader.build(open_checkpoint(plain), "cpu", options[0], rope=options[1], fast=True)(tokens)
        for options in (("float32", "complex"), ("bfloat16", "half"))
    }
    file = plain / "consolidated.00.pth"
    state = torch.load(file, weights_only=True)
    torch.save({name: view(tensor) for name, tensor in state.items()}, file)
    saved = torch.load(file, weights_only=True)
    assert view is offset or not saved["layers.0.attention.wq.weight"].is_contiguous()
    for (dtype, rope), logits in expected.items():
        got = loader.build(open_checkpoint(plain), "cpu", dtype, rope=rope, fast=True)(tokens)
        assert torch.equal(got, logits)
    convert(plain, tmp_path / "hf", "hf")  # and written by a conversion
    read = loader.build(open_checkpoint(tmp_path / "hf"), "cpu", "float32")
    assert torch.equal(read(tokens), loader.build(open_checkpoint(plain), "cpu", "float32")(tokens))


# ------------------------------------------------------------------------------------------------------- compiling
@linux
def test_without_a_compiler_compile_is_refused(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attempt: Try
) -> None:
    """Neither the kernels nor the step can be compiled. The command runs without kernels, but refuses --compile."""
    monkeypatch.setenv("CLEARLLAMA_CACHE", str(tmp_path.parent / f"{tmp_path.name}.cache"))
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.delenv("CXX", raising=False)
    done = attempt("generate", *RUN, "-m", gguf, "--compile")
    done.refused("c++, g++ or clang++ was not found", "leave compile out", code=2)
    monkeypatch.setenv("CXX", "/nonexistent/c++")
    attempt("generate", *RUN, "-m", gguf, "--compile").refused("/nonexistent/c++ was not found", code=2)
    assert attempt("generate", *RUN, "-m", gguf).survived()
