"""Facts about the machine: versions, processor, memory, devices, C++ kernels, cache folders, one finding for each.

The last four probes import torch and may crash with it, so the doctor runs them in a child process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import itertools
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from .. import __version__
from ..errors import one_line
from ..system.cores import VARIABLES, default_threads
from ..system.folders import cache_folder, state_folder
from ..system.memory import format_bytes, rooms
from ..system.temporary import check_writable

Status = Literal["ok", "note", "fail"]
MOST_FILES = 20_000  # a folder's size is counted up to this number of files
LOW_MEMORY = 2**28  # bytes; the default model needs about this much
SETTINGS = (
    *VARIABLES,
    "OMP_WAIT_POLICY",
    "GOMP_SPINCOUNT",
    "CUDA_VISIBLE_DEVICES",
    "HF_HUB_OFFLINE",
    "HF_HOME",
    "HF_HUB_CACHE",
    "CXX",
)
EXTRAS = {
    "study": "drawing the figures of the study",
    "completion": "--print-completion",
    "structured": "answers that meet a JSON schema, a regular expression or a grammar",
    "eval": "clearllama evaluate",
}  # extra -> what needs it
REPORT = "don't trust text generated here; reinstall torch and clearllama, try CLEARLLAMA_KERNELS=off, report it"
NO_COMPILER = "install a C++ compiler (g++ or clang++), or name it in CXX"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line of the report. The remedy says what to do if the status is not "ok"."""

    status: Status
    group: str
    item: str
    message: str
    remedy: str = ""

    def as_dict(self) -> dict[str, str]:
        """The finding in the form of `doctor --json`, where the key of the message is "told"."""
        return {("told" if key == "message" else key): value for key, value in dataclasses.asdict(self).items()}


Probe = Callable[[], Iterator[Finding]]


def guarded(group: str, probe: Probe) -> Iterator[Finding]:
    """The findings of a probe. An exception of the probe is a finding too."""
    try:
        yield from probe()
    except Exception as error:
        yield Finding(
            "fail", group, "probe", f"could not be done: {type(error).__name__}: {one_line(str(error))[:300]}"
        )


# ------------------------------------------------------------------------------------------------------- versions
def versions() -> Iterator[Finding]:
    """The versions of this package, Python and the dependencies, compared with the bounds that the package declares."""
    package = Path(__file__).resolve().parents[1]
    yield Finding("ok", "versions", "clearllama", f"{__version__} in {package}")
    python, requirements = declared_requirements(package.parent)
    yield _compare("Python", platform.python_version(), python, "install a newer Python")
    if not requirements:
        message = "not installed with pip, so the dependencies are not known"
        yield Finding("note", "versions", "dependencies", message, "pip install -e . in the checkout")
    for requirement in requirements:
        name, bounds, extra = parse_requirement(requirement)
        if extra not in (None, *EXTRAS):
            continue
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if extra:
                message = f"not installed; {EXTRAS[extra]} needs it"
                yield Finding("note", "versions", name, message, f"pip install 'clearllama[{extra}]'")
            else:
                message = f"not installed, expected {bounds}"
                yield Finding("fail", "versions", name, message, f"pip install '{requirement}'")
            continue
        yield _compare(name, found, bounds, f"pip install '{name}{bounds}'")


def declared_requirements(checkout: Path) -> tuple[str, list[str]]:
    """(bounds for Python, requirements), from pyproject.toml in a checkout, otherwise from the installed package."""
    with contextlib.suppress(OSError, KeyError, ValueError):
        import tomllib

        project = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        if project["name"] == "clearllama":
            extras = project["optional-dependencies"].items()
            optional = [f'{need}; extra == "{extra}"' for extra, needs in extras for need in needs]
            return project["requires-python"], [*project["dependencies"], *optional]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        metadata = importlib.metadata.metadata("clearllama")
        return metadata["Requires-Python"] or "", importlib.metadata.requires("clearllama") or []
    return "", []


def parse_requirement(text: str) -> tuple[str, str, str | None]:
    """'torch<2.14,>=2.10; extra == "x"' -> ('torch', '<2.14,>=2.10', 'x')."""
    need, _, marker = text.partition(";")
    match = re.match(r"\s*([\w.-]*)(.*)", need, re.DOTALL)
    extra = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", marker)
    name, bounds = (match[1], match[2]) if match else (need, "")
    return name, bounds.strip(), extra[1] if extra else None


def release(version: str) -> tuple[int, ...]:
    """The release numbers of a version without trailing zeros: '2.10.0+cpu' -> (2, 10)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, re.sub(r"(\.0+)+$", "", match[0]).split("."))) if match else ()


def _compare(name: str, found: str, bounds: str, remedy: str) -> Finding:
    """Compare a version with bounds like '>=2.10,<2.14'."""
    for bound in filter(None, bounds.replace(" ", "").split(",")):
        if bound.startswith(">=") and release(found) < release(bound[2:]):
            return Finding("fail", "versions", name, f"{found} is below {bound[2:]}", remedy)
        if bound.startswith("<") and release(found) >= release(bound[1:]):
            message = f"{found} is newer than the tested versions, below {bound[1:]}"
            return Finding("note", "versions", name, message, remedy)
    return Finding("ok", "versions", name, f"{found}, expected {bounds}" if bounds else found)


# -------------------------------------------------------------------------------------------------------- machine
def machine() -> Iterator[Finding]:
    """The system, the processor, its cores, and the environment variables that change how the program runs."""
    yield Finding("ok", "machine", "system", platform.platform())
    yield Finding("ok", "machine", "processor", f"{processor()}, {platform.machine()}")
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("ok", "machine", "cores", f"{os.cpu_count()}, {usable} of them for this process")
    names = sorted(name for name in os.environ if name.startswith("CLEARLLAMA_") or name in SETTINGS)
    settings = ", ".join(f"{name}={os.environ[name]}" for name in names)
    yield Finding("ok", "machine", "settings", settings or "no environment variable changes how the program runs")


def processor() -> str:
    """The name of the processor."""
    with contextlib.suppress(OSError):
        if match := re.search(r"^(?:model name|Model)\s*:(.*\S)", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return match[1].strip()
    return platform.processor() or "unknown"


# ---------------------------------------------------------------------------------------------------- cache folders
def caches() -> Iterator[Finding]:
    """The cache and state folders of this program, and the cache of the Hugging Face hub."""
    from huggingface_hub import constants

    from ..hub.models import MODELS, find

    yield from _cache("folder", cache_folder(), "CLEARLLAMA_CACHE")
    for name in MODELS:
        path = find(name)
        absent = "not downloaded; the first run downloads it"
        yield Finding("ok", "cache", name, f"{path}, {format_bytes(path.stat().st_size)}" if path else absent)
    try:
        yield from _cache("state", state_folder(), "XDG_STATE_HOME", "; what was typed in chat")
    except RuntimeError:
        message = "the home folder is not known, so what is typed in chat is not kept"
        yield Finding("note", "cache", "state", message, "set HOME")
    folder = Path(constants.HF_HUB_CACHE)
    models = sorted(path.name.removeprefix("models--").replace("--", "/") for path in folder.glob("models--*"))
    names = ", ".join(models[:20]) + ", ..." * (len(models) > 20)
    yield from _cache("hub", folder, "HF_HOME", f"; {len(models)} models: {names}" if models else "")


def _cache(item: str, folder: Path, variable: str, contents: str = "") -> Iterator[Finding]:
    status, message, remedy = folder_state(folder)
    yield Finding(
        status, "cache", item, message + contents, remedy and f"{remedy}, or set {variable} to another folder"
    )


def folder_state(folder: Path) -> tuple[Status, str, str]:
    """(status, message, remedy) for a folder: its size, and whether it is writable. Leaves no file in it."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    if folder.is_dir() and writable:
        try:
            check_writable(folder)
        except OSError:
            writable = False
    size, complete = _size(folder)
    state = f"{format_bytes(size)}{'' if complete else ' or more'}" if folder.is_dir() else "does not exist yet"
    if not writable:
        return "note", f"{folder}: {state}, not writable, so nothing is kept there", f"make {existing} writable"
    free = shutil.disk_usage(existing).free
    return "ok", f"{folder}: {state}, writable, {format_bytes(free)} free on its disk", ""


def _size(folder: Path) -> tuple[int, bool]:
    """(bytes of up to MOST_FILES files below a folder, whether these are all of them). Links are not followed."""
    paths = (os.path.join(root, name) for root, _, names in os.walk(folder) for name in names)
    first = list(itertools.islice(paths, MOST_FILES + 1))
    size = 0
    for path in first[:MOST_FILES]:
        with contextlib.suppress(OSError):
            size += os.lstat(path).st_size
    return size, len(first) <= MOST_FILES


# ------------------------------------------------------------------------------------------------ with torch's help
def memory() -> Iterator[Finding]:
    """The free memory under each limit, the lowest limit first."""
    found = rooms("cpu")
    if not found:
        yield Finding("note", "memory", "free", "this system does not report its free memory")
    for i, room in enumerate(found):
        binds = " (the limit that binds)" if i == 0 and len(found) > 1 else ""
        yield Finding("ok", "memory", "free", f"{format_bytes(room.bytes)} {room.message}{binds}")
    if found and found[0].bytes < LOW_MEMORY:
        message = f"{format_bytes(found[0].bytes)} is less than the default model needs"
        yield Finding("note", "memory", "least", message, "end other programs, or raise the limit")


def devices() -> Iterator[Finding]:
    """The devices that torch can compute on."""
    import torch

    dtype = "bfloat16" if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported() else "float32"
    yield Finding("ok", "devices", "cpu", f"{default_threads()} threads; {dtype} by default")
    version = torch.version.cuda or torch.version.hip
    driver = any(map(os.path.exists, ("/proc/driver/nvidia/version", "/dev/nvidiactl")))
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            yield from guarded("devices", lambda i=i: _cuda(i))  # type: ignore[misc]
    elif driver and version:
        message = f"an NVIDIA driver is installed, but torch, built for CUDA {version}, finds no GPU"
        yield Finding("note", "devices", "cuda", message, "check nvidia-smi and CUDA_VISIBLE_DEVICES")
    elif driver:
        remedy = "install torch for CUDA: https://pytorch.org/get-started/locally/"
        message = "an NVIDIA driver is installed, but torch is built for CPUs only"
        yield Finding("note", "devices", "cuda", message, remedy)
    else:
        yield Finding("ok", "devices", "cuda", f"none; torch is built for CUDA {version}" if version else "none")
    if torch.backends.mps.is_available():
        yield Finding("ok", "devices", "mps", "available")


def _cuda(i: int) -> Iterator[Finding]:
    import torch

    about = torch.cuda.get_device_properties(i)
    free, total = torch.cuda.mem_get_info(i)
    with torch.cuda.device(i):
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    dtype = "bfloat16" if bf16 else "no bfloat16, so float16 by default"
    sizes = f"{format_bytes(free)} of {format_bytes(total)} free"
    yield Finding(
        "ok", "devices", f"cuda:{i}", f"{about.name}, capability {about.major}.{about.minor}, {sizes}, {dtype}"
    )


def instructions() -> dict[str, bool]:
    """The processor's instruction sets that the kernels use, and whether torch finds them."""
    import torch

    if platform.machine() == "aarch64":
        from ..engine.kernels import arm_features

        return arm_features()
    names = {
        "AVX2": "_is_avx2_supported",
        "AVX-512": "_is_avx512_supported",
        "VNNI": "_is_vnni_supported",
        "BF16": "_is_avx512_bf16_supported",
        "AMX": "_is_amx_tile_supported",
    }
    return {name: bool(getattr(torch.cpu, function, lambda: False)()) for name, function in names.items()}


def kernels_and_compiler() -> Iterator[Finding]:
    """The processor's instructions, the C++ kernels, and the compiler that torch.compile uses."""

    from ..engine import kernels

    available = ", ".join(f"{name} {'yes' if found else 'no'}" for name, found in instructions().items())
    yield Finding("ok", "kernels", "processor", available)
    compiler = kernels.compiler()
    version = _first_line([compiler.split()[0], "--version"]) if compiler else None
    form = kernels.pick_form()
    if os.environ.get("CLEARLLAMA_KERNELS") == "off":
        yield Finding("note", "kernels", "C++", "disabled by CLEARLLAMA_KERNELS=off", "unset it for speed")
    elif form is None:
        yield Finding("note", "kernels", "C++", f"not available: {kernels.why_none()}; torch's own operators are used")
    elif (built := kernels.built(form)) is not None:
        yield Finding("ok", "kernels", "C++", f"{form}, built: {built}")
    elif version is None:
        message = f"{form}, not built, since there is no C++ compiler; torch's own operators are used, which are slower"
        yield Finding("note", "kernels", "C++", message, NO_COMPILER)
    else:
        yield Finding("ok", "kernels", "C++", f"{form}, not built yet; the first run builds them")
    if version is None:
        why = f"{compiler} does not run" if compiler else "found none of c++, g++, clang++, so --compile can't work"
        yield Finding("note", "compiler", "C++", why, NO_COMPILER)
    else:
        yield Finding("ok", "compiler", "C++", f"{compiler}: {version}")


def build() -> Iterator[Finding]:
    """Build the C++ kernels if they are not built yet. The self-test uses them, and its time is limited."""
    from ..engine import kernels

    form, started = kernels.pick_form(), time.monotonic()
    if form is None or kernels.built(form) is not None or kernels.compiler() is None:
        return
    try:
        kernels.load(form)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        message = f"the build failed, so torch's own operators are used, which are slower: {one_line(str(error))[:300]}"
        remedy = "see what the compiler is missing, or set CLEARLLAMA_CACHE"
        yield Finding("note", "kernels", "build", message, remedy)
        return
    yield Finding("ok", "kernels", "build", f"built in {time.monotonic() - started:.0f} s: {kernels.built(form)}")


def _first_line(command: Sequence[str]) -> str | None:
    """The first line that a command prints; None if it does not run."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=10, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.decode(errors="replace").splitlines()
    return None if done.returncode else (lines[0] if lines else "no version")
