"""The C++ kernels under sanitizers: no access outside a tensor, no undefined behaviour, no race between threads.

The compiler instruments the kernels only; torch and OpenMP stay as they are. These tests take a minute each and are
slow; a default test requires them to be repeated whenever a C++ file changes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from llama.engine import kernels

# Run `pytest -m slow tests/test_sanitized.py`; if it passes, put the new hash here.
CHECKED = "7f57c8318476d9c9d550ce8bb87236bb0211ee14e66c05e5183d3394e3ab4880"
ROOT = Path(__file__).parents[1]
SUPPORTED = {
    "amx": "_is_avx512_bf16_supported",  # its tile instructions in C++, since sanitizers do not see the real ones
    "avx512": "_is_avx512_bf16_supported",
    "avx2": "_is_avx2_supported",
}
SCRIPT = """
import sys
from pathlib import Path
import torch
from llama.engine import kernels
kernels.SOURCE = Path(sys.argv[1])
kernels.FORMS["amx"] = f"{kernels.AVX512} -include {sys.argv[2]}"
torch.set_grad_enabled(False)
"""
EDGES = "from tests import kernel_edges; kernel_edges.main()"
# Each thread uses one OpenMP thread: GNU's OpenMP is not instrumented, so its barriers would not be seen.
THREADS = """
from concurrent.futures import ThreadPoolExecutor
from tests import kernel_edges
assert kernels.ready()
with ThreadPoolExecutor(2) as pool:
    for check in kernel_edges.CHECKS:
        list(pool.map(lambda i: check(), range(2)))
"""
# file, a part of it, and the defect in its place
DEFECTS = {
    "a key beyond the last": ("attention.h", "(s + std::min(part * LANES + j, count - 1)) * p.k_stride", "(s + part * LANES + j) * p.k_stride"),
    "x beyond its end": ("groups.h", "n < s.group ? (const T*)std::memcpy(rest, x, n * sizeof(T)) : x", "x"),
    "weights beyond the end": ("widened.h", "k + STEP <= K", "k < K"),
    "a group beyond the last column": ("rounding.h", "if (rows >= LANES && n == width) return", "return"),
    "a tile beyond its end": ("rounding.h", "(N + ROWS - 1) / ROWS, tile_bytes}", "(N + ROWS - 1) / ROWS, tile_bytes - 1}"),
    "a sum that overflows": ("groups.h", ": -f.zero * total;", ": (1 << 28) * -f.zero * total;"),
}  # fmt: skip


def library(name: str) -> str:
    """The path of one of the compiler's runtime libraries; the test is skipped if it has none."""
    found = subprocess.run(
        ["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not os.path.isabs(found):
        pytest.skip(f"g++ has no {name}")
    return found


def run(form: str, flags: str, libraries: list[str], code: str, work: Path, source: Path, **env: str):
    """Build the kernels with sanitizers, and run code in a process with them."""
    if not getattr(torch.cpu, SUPPORTED[form])():
        pytest.skip(f"this processor has no {form}")
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    preload = " ".join(map(library, [*libraries, "libstdc++.so"]))
    compiler = work / "compiler"
    compiler.write_text(f'#!/bin/sh\nunset LD_PRELOAD\nexec g++ "$@" -O1 -g1 -fno-omit-frame-pointer {flags}\n')
    compiler.chmod(0o755)
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "CLEARLLAMA_CACHE": str(work / "cache"),
        "CLEARLLAMA_KERNELS": form,
        "CXX": str(compiler),
        "OMP_NUM_THREADS": "1",
        "LD_PRELOAD": preload,
        **env,
    }
    command = [sys.executable, "-c", SCRIPT + code, str(source), str(Path(__file__).with_name("fake_amx.h"))]
    if "thread" in flags and shutil.which("setarch"):  # its memory map does not allow every random address
        command = ["setarch", "-R", *command]
    return subprocess.run(command, env=env, cwd=work, capture_output=True, text=True, check=False, timeout=590)


def edges(form: str, work: Path, source: Path = kernels.SOURCE) -> subprocess.CompletedProcess[str]:
    return run(
        form,
        "-fsanitize=address,undefined -fno-sanitize-recover=undefined",
        ["libasan.so", "libubsan.so"],
        EDGES.replace("main()", "main(kernel_edges.TILES)") if form == "amx" else EDGES,  # the rest is that of avx512
        work,
        source,
        ASAN_OPTIONS="detect_leaks=0",
    )


def test_the_sanitizers_have_seen_these_sources() -> None:
    found = hashlib.sha256(kernels.sources().encode()).hexdigest()
    assert found == CHECKED, (
        "the C++ files have changed; run pytest -m slow tests/test_sanitized.py, then update CHECKED"
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("form", SUPPORTED)
def test_no_operator_leaves_its_tensors_or_the_rules_of_the_language(form: str, tmp_path: Path) -> None:
    done = edges(form, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", DEFECTS)
def test_a_planted_defect_is_found(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "cpp"
    shutil.copytree(kernels.SOURCE.parent, folder)
    file, old, new = DEFECTS[name]
    text = (folder / file).read_text()
    assert text.count(old) == 1
    (folder / file).write_text(text.replace(old, new))
    done = edges("avx2", tmp_path, folder / kernels.SOURCE.name)
    assert done.returncode != 0
    assert "AddressSanitizer" in done.stderr or "runtime error" in done.stderr, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("shared", [False, True], ids=["as it is", "with a shared buffer"])
def test_threads_that_share_weights_do_not_race(shared: bool, tmp_path: Path) -> None:
    """A buffer that all threads share is reported as a race, so the test would notice one."""
    folder = tmp_path / "cpp"
    shutil.copytree(kernels.SOURCE.parent, folder)
    if shared:
        file, old = folder / "groups.h", "    std::vector<uint8_t> q((M + MANY) * stride);\n"
        assert file.read_text().count(old) == 1
        file.write_text(file.read_text().replace(old, "    static std::vector<uint8_t> q(1 << 20);\n"))
    done = run("avx2", "-fsanitize=thread", ["libtsan.so"], THREADS, tmp_path, folder / "kernels.cpp",
               TSAN_OPTIONS="ignore_noninstrumented_modules=1 report_signal_unsafe=0")  # fmt: skip
    assert ("data race" in done.stderr) == shared, done.stderr[-3000:]
    assert shared or done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_kernels_without_torch_stay_in_their_memory(tmp_path: Path) -> None:
    """This program also multiplies weights of 4 and 8 bits in panels, which `linear_tiles` does only with AMX."""
    if shutil.which("g++") is None or not torch.cpu._is_avx2_supported():
        pytest.skip("needs g++ and AVX2")
    source, program = ROOT / "tests" / "cpp" / "kernels_alone.cpp", tmp_path / "program"
    flags = ["-std=c++20", "-O1", "-w", "-pthread", "-fsanitize=address,undefined", f"-I{source.parent}"]
    subprocess.run(["g++", *flags, *kernels.FORMS["avx2"].split(), str(source), "-o", str(program)], check=True)
    done = subprocess.run([program, "2"], check=False, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")
