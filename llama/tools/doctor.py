"""Examine this machine: versions, folders, devices and C++ kernels, then the self-test.

Everything runs in a child process. If a driver hangs, a library aborts or the processor lacks an instruction, only the
child ends, which is a finding too.
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
from collections.abc import Iterator
from pathlib import Path

from .. import __version__
from ..errors import one_line
from ..system.cores import VARIABLES, default_threads
from ..system.folders import cache_folder
from ..system.memory import format_bytes, rooms
from .findings import Finding, failure

START = 120.0  # seconds for everything but the self-test; the first run builds the kernels
SETTINGS = (*VARIABLES, "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "HF_HOME", "CXX")
EXTRAS = ("study", "serve", "eval", "structured", "chat", "completion")  # those for users
CHILD = "from llama.tools import doctor; doctor.child({})"


def examine(self_test: bool = True, seconds: float = 60) -> Iterator[Finding]:
    """Yield each finding of a child process as soon as it is known, and a failure if the child does not end well.

    Nothing is written outside of the cache folder and the folder for temporary files.

    seconds  the time limit of the self-test
    """
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD.format(self_test)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
        start_new_session=True,  # so that a compiler that it has started can be killed with it
    )
    timer, last = threading.Timer(START + seconds, _kill, [process]), b""
    timer.start()
    try:
        for line in process.stdout or ():
            if line.startswith(b'{"status": '):
                yield Finding(**json.loads(line))
            else:  # of a library
                last = line
        code, late = process.wait(), timer.finished.is_set()
    finally:
        timer.cancel()
        _kill(process)
    if late:
        yield Finding("fail", "process", "child", f"no end within {START + seconds:g} s", "--seconds allows more time")
    elif code:
        how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
        message = f"a library or the self-test ended with {how}: {one_line(last.decode(errors='replace'))[:200]}"
        yield Finding("fail", "process", "child", message.strip(), "check whether python -c 'import torch' works")


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and all that it has started."""
    with contextlib.suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()


def child(self_test: bool) -> None:
    """Print one JSON line for each finding. An exception of a probe is a finding too."""
    for probe in (versions, machine, folders, devices, cpu_kernels, *([computations] if self_test else [])):
        try:
            for finding in probe():
                print(json.dumps(dataclasses.asdict(finding)), flush=True)
        except Exception as error:
            print(json.dumps(dataclasses.asdict(failure(probe.__name__, "probe", error))), flush=True)


# ------------------------------------------------------------------------------------------------------- the probes
def versions() -> Iterator[Finding]:
    """The versions of this package, Python and the dependencies, compared with the bounds that the package declares."""
    from packaging.requirements import Requirement  # huggingface_hub requires it

    package = Path(__file__).resolve().parents[1]
    yield Finding("ok", "versions", "clearllama", f"{__version__} in {package}, Python {platform.python_version()}")
    try:
        needs = [Requirement(text) for text in importlib.metadata.requires("clearllama") or []]
    except importlib.metadata.PackageNotFoundError:
        yield Finding("note", "versions", "dependencies", "not known", "pip install -e . in the checkout")
        return
    for need in needs:
        extra = next((name for name in ("", *EXTRAS) if not need.marker or need.marker.evaluate({"extra": name})), None)
        if extra is None:
            continue
        remedy = f"pip install 'clearllama[{extra}]'" if extra else f"pip install '{need.name}{need.specifier}'"
        try:
            found = importlib.metadata.version(need.name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding("note" if extra else "fail", "versions", need.name, "not installed", remedy)
        else:
            fits = need.specifier.contains(found, prereleases=True)
            message = f"{found}, expected {need.specifier}"
            yield Finding("ok" if fits else "note", "versions", need.name, message, "" if fits else remedy)


def machine() -> Iterator[Finding]:
    """The system, the processor, and the environment variables that change how the program runs."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        if match := re.search(r"^(?:model name|Model)\s*:(.*\S)", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            name = match[1].strip()
    yield Finding("ok", "machine", "system", f"{platform.platform()}, {name}, {os.cpu_count()} cores")
    settings = sorted(name for name in os.environ if name.startswith("CLEARLLAMA_") or name in SETTINGS)
    yield Finding("ok", "machine", "settings", ", ".join(f"{name}={os.environ[name]}" for name in settings) or "none")


def folders() -> Iterator[Finding]:
    """The cache folder of this program, and that of the Hugging Face hub."""
    from huggingface_hub import constants

    for item, folder in (("folder", cache_folder()), ("hub", Path(constants.HF_HUB_CACHE))):
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        if existing.is_dir() and os.access(existing, os.W_OK | os.X_OK):
            yield Finding("ok", "cache", item, str(folder))
        else:
            remedy = "set CLEARLLAMA_CACHE or HF_HOME to another folder"
            yield Finding("note", "cache", item, f"{folder} is not writable", remedy)


def devices() -> Iterator[Finding]:
    """The free memory, and the devices that torch can compute on."""
    import torch

    from ..engine.runtime import pick_dtype

    for room in rooms("cpu")[:1]:
        yield Finding("ok", "memory", "free", f"{format_bytes(room.bytes)} {room.message}")
    dtype = str(pick_dtype("auto", torch.device("cpu"))).removeprefix("torch.")
    yield Finding("ok", "devices", "cpu", f"{default_threads()} threads, {dtype} by default")
    for i in range(torch.cuda.device_count()):
        about, (free, total) = torch.cuda.get_device_properties(i), map(format_bytes, torch.cuda.mem_get_info(i))
        message = f"{about.name}, capability {about.major}.{about.minor}, {free} of {total} free"
        yield Finding("ok", "devices", f"cuda:{i}", message)
    if not torch.cuda.is_available() and os.path.exists("/proc/driver/nvidia/version"):
        message = f"an NVIDIA driver is installed, but torch, built for CUDA {torch.version.cuda}, finds no GPU"
        yield Finding("note", "devices", "cuda", message, "https://pytorch.org/get-started, or CUDA_VISIBLE_DEVICES")
    if torch.backends.mps.is_available():
        yield Finding("ok", "devices", "mps", "available")


def cpu_kernels() -> Iterator[Finding]:
    """The C++ kernels, which are built if they are not built yet, and the compiler."""
    from ..engine import kernels

    form, compiler = kernels.pick_form(), kernels.compiler()
    if form is None:
        why = "CLEARLLAMA_KERNELS is off" if os.environ.get("CLEARLLAMA_KERNELS") == "off" else kernels.why_none()
        yield Finding("note", "kernels", "C++", f"not used: {why}; torch's own operators are slower")
    else:
        try:
            kernels.load(form)
            yield Finding("ok", "kernels", "C++", f"{form}, built: {kernels.built(form)}")
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            message = f"{form} can't be built, and torch's own operators are slower: {one_line(str(error))}"
            yield Finding("note", "kernels", "C++", message)
    if compiler is None:
        remedy = "install a C++ compiler (g++ or clang++), or name it in CXX"
        yield Finding("note", "compiler", "C++", "none was found, so --compile can't work", remedy)
    else:
        yield Finding("ok", "compiler", "C++", compiler)


def computations() -> Iterator[Finding]:
    """The self-test."""
    from .selftest import selftest

    yield from selftest()
