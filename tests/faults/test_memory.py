"""Group J: memory, devices, dtypes. The prediction of the memory of a run is tested in tests/test_memory.py."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path

import pytest
import torch

from llama import loader
from llama.engine import runtime
from llama.generate import prefill
from llama.tools.convert import convert

from .. import tiny
from .conftest import Try
from .harness import snapshot

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
def test_a_wrong_device_or_dtype_is_refused(gguf: Path, attempt: Try) -> None:
    for option in ("--device=gpu", "--device=cpu:x", "--device=meta", "--device=cuda:-1", "--dtype=fp8", "--dtype="):
        known = "available here: " if "device" in option else "float32"
        attempt("generate", "--raw", "a", "-n", "1", "-m", gguf, option).refused(known, code=2)


def test_a_gpu_without_bfloat16_uses_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulated bfloat16 is slow, so it has to be asked for."""
    cuda = torch.device("cuda", 0)
    for native in (True, False):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, s=native: s)
        assert runtime.pick_dtype(None, cuda) == (torch.bfloat16 if native else torch.float16)
        assert runtime.pick_dtype("bfloat16", cuda) == torch.bfloat16


# ----------------------------------------------------------------------------------------------- mapped weights


@pytest.mark.parametrize("form", ["gguf", "hf", "meta"])
def test_mapped_weights_are_writable_and_share_no_memory_with_buffers(form: str, gguf: Path, tmp_path: Path) -> None:
    """In a child, which a write to a read-only page would kill. The file does not change."""
    path = gguf if form == "gguf" else tmp_path / form
    if form == "meta":
        tiny.write_meta(path)
    elif form == "hf":
        convert(gguf, path, form)
    before = snapshot(tmp_path)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            model = loader.load_model(path, device="cpu", dtype="float32")
            cache = model.new_cache(64)
            prefill(model, [1, 2, 3], cache)
            for weight in model.parameters():
                weight.zero_()
            for buffer in (*(buffer for layer in cache.layers for buffer in layer.buffers), *model.rope.table):
                buffer.fill_(7)
            code = 0 if not any(bool(w.any()) for w in model.parameters()) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert snapshot(tmp_path) == before


# ------------------------------------------------------------------------------------------------------- compiling
@linux
def test_a_model_runs_without_a_compiler(
    gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attempt: Try
) -> None:
    monkeypatch.setenv("CLEARLLAMA_CACHE", str(tmp_path.parent / f"{tmp_path.name}.cache"))
    monkeypatch.setenv("PATH", "/nonexistent")
    for compiler in (None, "/nonexistent/c++"):
        monkeypatch.delenv("CXX", raising=False) if compiler is None else monkeypatch.setenv("CXX", compiler)
        assert attempt("generate", *RUN, "-m", gguf).survived()
