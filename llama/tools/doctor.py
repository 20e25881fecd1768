"""Examine this machine: versions, folders, devices and C++ kernels, then the self-test.

Everything that imports torch runs in a child process. If a driver hangs, a library aborts or the processor lacks an
instruction, only the child ends, which is a finding too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from .. import __version__
from ..errors import one_line
from ..system.cores import VARIABLES, default_threads
from ..system.folders import cache_folder, state_folder
from ..system.memory import format_bytes, rooms
from .findings import Finding, failure

ANSWER = 120.0  # seconds for everything but the self-test; the first run builds the kernels
SETTINGS = (*VARIABLES, "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "HF_HOME", "CXX")
EXTRAS = ("study", "serve", "eval", "structured", "completion")  # those for users
BROKEN = "check whether python -c 'import torch' works; if not, reinstall torch"
NO_COMPILER = "install a C++ compiler (g++ or clang++), or name it in CXX"
CHILD = "from llama.tools import doctor; doctor.child({})"


def examine(self_test: bool = True, seconds: float = 60) -> Iterator[Finding]:
    """Yield each finding as soon as it is known. seconds: the time limit of the self-test.

    Nothing is written outside of the cache folder and the folder for temporary files.
    """
    for probe in (versions, machine, folders):
        yield from guarded(probe)
    yield from in_child(self_test, ANSWER + seconds)


def guarded(probe: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The findings of a probe. An exception of the probe is a finding too."""
    try:
        yield from probe()
    except Exception as error:
        yield failure(probe.__name__, "probe", error)


# ------------------------------------------------------------------------------------------------- without torch
def versions() -> Iterator[Finding]:
    """The versions of this package, Python and the dependencies, compared with the bounds that the package declares."""
    from packaging.requirements import Requirement  # huggingface_hub requires it

    package = Path(__file__).resolve().parents[1]
    yield Finding("ok", "versions", "clearllama", f"{__version__} in {package}, Python {platform.python_version()}")
    try:
        requirements = [Requirement(text) for text in importlib.metadata.requires("clearllama") or []]
    except importlib.metadata.PackageNotFoundError:
        message = "not installed with pip, so the dependencies are not known"
        yield Finding("note", "versions", "dependencies", message, "pip install -e . in the checkout")
        return
    for need in requirements:
        extra = next((name for name in ("", *EXTRAS) if not need.marker or need.marker.evaluate({"extra": name})), None)
        if extra is None:
            continue
        try:
            found = importlib.metadata.version(need.name)
        except importlib.metadata.PackageNotFoundError:
            remedy = f"pip install 'clearllama[{extra}]'" if extra else f"pip install '{need.name}{need.specifier}'"
            yield Finding("note" if extra else "fail", "versions", need.name, "not installed", remedy)
            continue
        old = any(bound.operator == ">=" and not bound.contains(found, True) for bound in need.specifier)
        fits = need.specifier.contains(found, prereleases=True)
        remedy = "" if fits else f"pip install '{need.name}{need.specifier}'"
        yield Finding(
            "ok" if fits else "fail" if old else "note",
            "versions",
            need.name,
            f"{found}, expected {need.specifier}",
            remedy,
        )


def machine() -> Iterator[Finding]:
    """The system, the processor, and the environment variables that change how the program runs."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        if match := re.search(r"^(?:model name|Model)\s*:(.*\S)", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            name = match[1].strip()
    yield Finding("ok", "machine", "system", platform.platform())
    yield Finding("ok", "machine", "processor", f"{name}, {os.cpu_count()} cores")
    settings = sorted(name for name in os.environ if name.startswith("CLEARLLAMA_") or name in SETTINGS)
    message = ", ".join(f"{name}={os.environ[name]}" for name in settings)
    yield Finding("ok", "machine", "settings", message or "no environment variable changes how the program runs")


def folders() -> Iterator[Finding]:
    """The cache and state folders of this program, and the cache of the Hugging Face hub."""
    from huggingface_hub import constants

    for item, folder, variable in (
        ("folder", cache_folder(), "CLEARLLAMA_CACHE"),
        ("state", state_folder(), "XDG_STATE_HOME"),
        ("hub", Path(constants.HF_HUB_CACHE), "HF_HOME"),
    ):
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
            yield Finding("ok", "cache", item, f"{folder}, writable")
        else:
            remedy = f"make {existing} writable, or set {variable} to another folder"
            yield Finding("note", "cache", item, f"{folder} is not writable, so nothing is kept there", remedy)


# --------------------------------------------------------------------------------------------------- in the child
def devices() -> Iterator[Finding]:
    """The free memory, and the devices that torch can compute on."""
    import torch

    for room in rooms("cpu")[:1]:
        yield Finding("ok", "memory", "free", f"{format_bytes(room.bytes)} {room.message}")
    from ..engine.runtime import pick_dtype

    dtype = str(pick_dtype("auto", torch.device("cpu"))).removeprefix("torch.")
    yield Finding("ok", "devices", "cpu", f"{default_threads()} threads; {dtype} by default")
    for i in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(i)
        free, total = (format_bytes(size) for size in torch.cuda.mem_get_info(i))
        kind = f"{about.name}, capability {about.major}.{about.minor}, {free} of {total} free"
        yield Finding("ok", "devices", f"cuda:{i}", kind)
    if not torch.cuda.is_available() and os.path.exists("/proc/driver/nvidia/version"):
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for CPUs only"
        remedy = "check nvidia-smi and CUDA_VISIBLE_DEVICES, or install torch for CUDA: https://pytorch.org/get-started"
        yield Finding(
            "note", "devices", "cuda", f"an NVIDIA driver is installed, but torch, {built}, finds no GPU", remedy
        )
    if torch.backends.mps.is_available():
        yield Finding("ok", "devices", "mps", "available")


def cpu_kernels() -> Iterator[Finding]:
    """The C++ kernels, which are built if they are not built yet, and the compiler."""
    from ..engine import kernels

    form, compiler = kernels.pick_form(), kernels.compiler()
    if os.environ.get("CLEARLLAMA_KERNELS") == "off":
        yield Finding("note", "kernels", "C++", "disabled by CLEARLLAMA_KERNELS=off", "unset it for speed")
    elif form is None:
        yield Finding("note", "kernels", "C++", f"not available: {kernels.why_none()}; torch's own operators are used")
    else:
        try:
            kernels.load(form)
            yield Finding("ok", "kernels", "C++", f"{form}, built: {kernels.built(form)}")
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            message = (
                f"{form} can't be built, so torch's own operators are used, which are slower: {one_line(str(error))}"
            )
            yield Finding("note", "kernels", "C++", message, NO_COMPILER)
    if compiler is None:
        yield Finding(
            "note", "compiler", "C++", "none of c++, g++, clang++ was found, so --compile can't work", NO_COMPILER
        )
    else:
        yield Finding("ok", "compiler", "C++", compiler)


def child(self_test: bool) -> None:
    """Print one JSON line for each finding of the probes that import torch."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of libraries goes to stderr
    from .selftest import selftest

    for probe in (devices, cpu_kernels, *([selftest] if self_test else [])):
        for finding in guarded(probe):
            print(json.dumps(dataclasses.asdict(finding)), file=out, flush=True)


def in_child(self_test: bool, seconds: float) -> Iterator[Finding]:
    """Yield the findings of `child`, and a failure if it does not end well within this time."""
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD.format(self_test)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
        start_new_session=True,  # so that a compiler that it has started can be killed with it
    )
    errors: list[bytes] = []
    reader = threading.Thread(target=lambda: errors.extend(process.stderr or ()), daemon=True)
    reader.start()
    timer = threading.Timer(seconds, _kill, [process])
    timer.start()
    try:
        for line in process.stdout or ():
            yield Finding(**json.loads(line))
        code, late = process.wait(), timer.finished.is_set()
    finally:
        timer.cancel()
        _kill(process)
    reader.join(2)
    if late:
        yield Finding("fail", "process", "child", f"no answer within {seconds:g} s", "--seconds allows more time")
    elif code:
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        last = one_line(errors[-1].decode(errors="replace").strip()) if errors else ""
        yield Finding(
            "fail", "process", "child", f"torch or the self-test ended early with {how}: {last[:200]}", BROKEN
        )


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started."""
    with contextlib.suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()
