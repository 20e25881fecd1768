"""The C++ kernels on ARM: the form for a processor, and the same results as on x86, in an emulator.

The emulator needs Debian's packages g++-aarch64-linux-gnu and qemu-user. It shows that the results are right, and
nothing about speed.
"""

from __future__ import annotations

import logging
import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from llama import loader
from llama.engine import kernels
from llama.engine.linears import FewRowsLinear

from . import tiny

SOURCE = Path(__file__).parent / "cpp" / "kernels_alone.cpp"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
DTYPES = {
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int64": torch.int64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}


# -------------------------------------------------------------------------------------------------------- the form
@pytest.mark.parametrize(
    ("features", "form"),
    [
        ("fp asimd evtstrm crc32 cpuid", None),  # Cortex-A72, in a Raspberry Pi 4
        ("fp asimd fphp asimdhp asimdrdm asimddp", "neon"),  # Neoverse N1, Cortex-A76
        ("fp asimd asimddp i8mm", "neon"),
        ("fp asimd asimddp bf16", "neon"),
        ("fp asimd asimddp sve i8mm bf16", "neon_bf16"),  # Neoverse V1 and N2
        ("fp asimd asimddpx i8mmx svebf16", None),
    ],
)
def test_the_form_follows_from_the_features_of_the_processor(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, features: str, form: str | None
) -> None:
    on(monkeypatch, tmp_path, "Linux", "aarch64", f"processor\t: 0\nBogoMIPS\t: 50.00\nFeatures\t: {features}\n")
    assert kernels.pick_form() == form


@pytest.mark.parametrize(
    ("system", "machine", "reason"),
    [
        ("Darwin", "arm64", "they need Linux, and this is macOS"),
        ("Windows", "AMD64", "they need Linux, and this is Windows"),
        ("Linux", "riscv64", "they need an x86_64 or aarch64 processor, and this one is riscv64"),
        ("Linux", "aarch64", "they need the dot product instructions (asimddp), which this processor does not have"),
    ],
)
def test_a_machine_without_a_form_gets_one_line_that_says_why(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    system: str,
    machine: str,
    reason: str,
) -> None:
    on(monkeypatch, tmp_path, system, machine, None)
    with caplog.at_level(logging.INFO, "llama"):
        assert not kernels._load.__wrapped__()
    start = "clearllama: the C++ kernels are not available, so PyTorch's slower operators run: "
    assert [record.getMessage() for record in caplog.records] == [start + reason]


@pytest.mark.parametrize(
    ("features", "dtype"),
    [
        ("asimd asimddp", torch.float32),
        ("asimd asimddp bf16", torch.float32),  # the form neon, which widens
        ("asimd asimddp i8mm bf16", torch.bfloat16),
    ],
)
@pytest.mark.parametrize("stored", ["BF16", "F16"])
def test_weights_in_16_bits_stay_in_16_bits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, features: str, dtype: torch.dtype, stored: str
) -> None:
    path = tiny.write_gguf(tmp_path / "tiny.gguf", quantization=stored)
    on(monkeypatch, tmp_path, "Linux", "aarch64", f"Features\t: {features}\n")
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda: False)
    monkeypatch.setattr(kernels, "ready", lambda: True)
    model = loader.load_model(path, device="cpu", fast=True)
    layer = model.get_submodule("layers.0.attention.wq")
    assert isinstance(layer, FewRowsLinear)
    assert layer.weight.dtype == (torch.float16 if (stored, dtype) == ("F16", torch.float32) else torch.bfloat16)
    assert model.norm.weight.dtype == dtype


def on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, system: str, machine: str, cpuinfo: str | None) -> None:
    """Let the kernels believe that they are on such a machine. None: it has no /proc/cpuinfo."""
    if cpuinfo is not None:
        (tmp_path / "cpuinfo").write_text(cpuinfo)
    monkeypatch.setenv("CLEARLLAMA_KERNELS", "auto")
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(kernels, "CPUINFO", tmp_path / "cpuinfo")


# ----------------------------------------------------------------------------------------------------- the results
def results(compiler: str, form: str, threads: int, work: Path, *emulator: str) -> dict[str, Tensor]:
    """What a build of kernels_alone.cpp computes. Its flags are those of the library."""
    program = work / f"{compiler}-{form}"
    flags = [flag for flag in kernels._flags(form) if flag != "-shared"]
    if not program.exists():
        subprocess.run([compiler, *flags, f"-I{SOURCE.parent}", str(SOURCE), "-o", str(program)], check=True)
    data = subprocess.run([*emulator, str(program), str(threads)], check=True, stdout=subprocess.PIPE).stdout
    found = {}
    while data:
        head, _, data = data.partition(b"\n")
        name, dtype, sizes = head.decode().split("|")
        shape = [int(size) for size in sizes.split(",")]
        count = torch.Size(shape).numel() * DTYPES[dtype].itemsize
        assert name not in found
        found[name] = torch.frombuffer(bytearray(data[:count]), dtype=DTYPES[dtype]).view(shape)
        data = data[count:]
    return found


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    if missing := [tool for tool in ("g++", COMPILER, EMULATOR) if shutil.which(tool) is None]:
        pytest.skip(f"needs {', '.join(missing)}")
    return results("g++", "avx2", 1, tmp_path_factory.mktemp("avx2"))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("form", ["neon_bf16", "neon"])
def test_the_kernels_compute_the_same_on_arm(expected: dict[str, Tensor], tmp_path: Path, form: str) -> None:
    emulator = (EMULATOR, "-L", "/usr/aarch64-linux-gnu")
    found = results(COMPILER, form, 1, tmp_path, *emulator)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        if not tensor.is_floating_point():
            assert torch.equal(tensor, expected[name]), name
        else:
            bound = 1e-6 if tensor.dtype == torch.float32 else 4e-3  # ARM rounds the weights of attention to bfloat16
            assert distance(tensor, expected[name]) < bound, name
    for name in [name for name in found if name.startswith("integers y")]:
        kind = re.sub("integers y(?: of one row)?, ", "", name)
        exact = found[f"integers x, {kind}"].double() @ found[f"integers w, {kind}"].double().T
        assert torch.equal(found[name].double(), exact[: len(found[name])]), name
    again = results(COMPILER, form, 3, tmp_path, *emulator)
    assert all(torch.equal(again[name], tensor) for name, tensor in found.items())
