"""Compile the Triton kernels for GPUs that this machine lacks: resources are limited, launches use the right device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from llama.engine.triton_kernels import BlockSizes, Weight, pick_block_sizes

from . import offline
from .offline import KINDS, MODELS, Job, Resources, Variant

pytestmark = pytest.mark.triton

pytest.importorskip("triton")
ROOT = Path(__file__).parents[1]

# Per thread. Triton 3.6 uses at most 118 for 9.0 and 126 for 10.0, Triton 3.9 at most 129. Up to this limit, at least
# three programs of four warps run on a multiprocessor.
REGISTERS = 136
SHARED = 99 * 1024  # bytes of a program; some GPUs since 8.0 allow no more
# Bytes of local memory per thread, which hold spilled registers. For 10.0, ptxas spills four registers of one int4
# kernel to use only 80. Without the spill it uses 96, and fewer programs run at once.
LOCAL = {80: 0, 90: 0, 100: 16}


def faults(what: Resources, architecture: int) -> list[str]:
    """Return which limits the resources of a compiled kernel exceed."""
    found = [f"{what.registers} registers"] if what.registers > REGISTERS else []
    found += [f"{what.local} bytes of local memory"] if what.local > LOCAL[architecture] else []
    return found + ([f"{what.shared} bytes of shared memory"] if what.shared > SHARED else [])


def compiled(folder: Path, jobs: list[Job]) -> dict[str, Any]:
    """Compile in another process, since this process may use Triton's interpreter."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": str(ROOT)}
    out = folder / "variants.json"
    subprocess.run([sys.executable, "-m", "tests.offline", str(out), json.dumps(jobs)], check=True, env=env, cwd=ROOT)
    report: dict[str, Any] = json.loads(out.read_text())
    report["variants"] = [Variant(*row[:2], Job(*row[2]), Resources(*row[3])) for row in report["variants"]]
    return report


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    jobs = [Job(90, "llama-3.1-8b", kind) for kind in ("bfloat16", "int4")]
    jobs += [Job(90, "llama-3.1-8b", "int8", kernels=("_qkv", "_unpack"))]
    jobs += [Job(80, "llama-3.2-1b", "bfloat16", kernels=("_attend", "_qkv"))]
    jobs += [Job(100, "llama-3.1-70b", "int4", kernels=("_attend", "_qkv"))]
    jobs += [Job(90, "llama-3.1-8b", "int8", kernels=["_qkv"], stages=2)]
    return compiled(tmp_path_factory.mktemp("triton"), jobs)


def check(variants: list[Variant]) -> None:
    assert not [(row, found) for row in variants if (found := faults(row.resources, row.job.architecture))]
    assert {row.kernel for row in variants} == set(offline.LAUNCHED)


def test_the_kernels_of_an_8b_model_compile_without_spills(report: dict[str, Any]) -> None:
    check(report["variants"])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("architecture", offline.ARCHITECTURES)
def test_the_kernels_compile_for_every_architecture(architecture: int, tmp_path: Path) -> None:
    jobs = [Job(architecture, model, kind, n) for n in (8192, 1001) for model in MODELS for kind in KINDS]
    found = compiled(tmp_path, jobs)
    most = Resources(*map(max, zip(*(row.resources for row in found["variants"]), strict=True)))
    print(f"sm_{architecture}: {len(found['variants'])} variants in {found['seconds']:.0f} s, at most {most}")
    check(found["variants"])


def test_kernels_are_launched_on_the_device_of_their_tensors() -> None:
    launches = offline.record("llama-3.2-1b", "int4", "cuda:1")  # the current device is cuda:0
    assert {launch.kernel for launch in launches} == set(offline.LAUNCHED)
    assert {(launch.devices, launch.current) for launch in launches} == {(frozenset([1]), 1)}


@pytest.mark.parametrize(
    ("rows", "columns", "bits", "expected"),
    [
        (6144, 4096, 16, BlockSizes(4, 1024, 4)),  # 8B: qkv
        (4096, 4096, 16, BlockSizes(2, 1024, 4)),  # 8B: wo. With 4 rows it would have 1,024 programs
        (4096, 14336, 16, BlockSizes(2, 1024, 4)),  # 8B: w_down
        (28672, 4096, 16, BlockSizes(4, 1024, 4)),  # 8B: w_gate and w_up
        (2048, 8192, 16, BlockSizes(2, 1024, 4)),  # 1B: w_down
        (8192, 28672, 16, BlockSizes(4, 1024, 4)),  # 70B: w_down
        (4096, 14336, 8, BlockSizes(4, 2048, 4)),
        (4096, 14336, 4, BlockSizes(4, 4096, 4)),
        (2048, 2048, 4, BlockSizes(4, 2048, 2)),  # 1B: wo; a row has only 1,024 bytes
    ],
)
def test_few_rows_are_divided_among_more_programs(rows: int, columns: int, bits: int, expected: BlockSizes) -> None:
    data = torch.empty(rows, columns, dtype=torch.bfloat16, device="meta")
    group = columns if bits == 16 else 32
    assert pick_block_sizes(Weight(data, None, None, None, rows, columns, bits, group)) == expected
