"""Examine this machine: the versions of the dependencies, the C++ kernels, and a self-test.

The kernels and the self-test run in a child process. If a library aborts, hangs or uses an instruction that the
processor lacks, only the child ends, and this is reported as a finding.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from .. import __version__
from ..errors import LlamaError, one_line

SECONDS = 300.0  # time limit of the child; the first run builds the kernels
EXTRAS = ("study", "serve", "structured", "chat")  # extras of the package that are for users, not developers
CHILD = "from llama.tools import doctor; doctor.child({})"


class Finding(NamedTuple):
    """What one check of `doctor` or `verify` found.

    status   "ok", "note" (works, but slower or without a feature), "warn" (may be wrong) or "fail"
    group    the kind of check
    item     what was checked
    remedy   what to do if the status is not "ok"
    """

    status: Literal["ok", "note", "warn", "fail"]
    group: str
    item: str
    message: str
    remedy: str = ""


def check(group: str, item: str, look: Callable[[], str], remedy: str = "") -> Finding:
    """The finding of a check. `look` returns its message; an exception becomes a finding with the status "fail"."""
    try:
        return Finding("ok", group, item, look())
    except Exception as error:
        known = isinstance(error, LlamaError)
        message = str(error) if known else f"{type(error).__name__}: {one_line(str(error))[:300]}"
        return Finding("fail", group, item, message, remedy)


def examine(self_test: bool = True) -> Iterator[Finding]:
    """Yield the findings. If the child process fails, that is the last finding."""
    yield from versions()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD.format(self_test)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=environment,
    )
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
    lines = output.splitlines()
    yield from (Finding(*json.loads(line)) for line in lines if line.startswith(b'["'))
    if process.returncode == -signal.SIGKILL:
        yield Finding("fail", "process", "child", f"it was killed, or did not end within {SECONDS:g} s")
    elif code := process.returncode:
        how = f"exit code {code}" if code > 0 else signal.Signals(-code).name
        message = f"a library ended with {how}: {one_line(b''.join(lines[-1:]).decode(errors='replace'))[:200]}"
        yield Finding("fail", "process", "child", message, "check whether python -c 'import torch' works")


def child(self_test: bool) -> None:
    """Print a JSON line for each finding about the kernels and of the self-test."""
    from .selftest import selftest

    for probe in (cpu_kernels, *([selftest] if self_test else [])):
        for finding in probe():
            print(json.dumps(finding), flush=True)


def versions() -> Iterator[Finding]:
    """The versions of this package, Python and the dependencies, compared with the bounds that the package declares."""
    from packaging.requirements import Requirement  # huggingface_hub requires it

    package = Path(__file__).resolve().parents[1]
    about = f"{__version__} in {package}, Python {platform.python_version()}, {platform.platform()}"
    yield Finding("ok", "versions", "clearllama", about)
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


def cpu_kernels() -> Iterator[Finding]:
    """A finding about the C++ kernels. If they are not built yet, builds them."""
    from ..engine import kernels

    form, remedy = kernels.pick_form(), ""
    if form is None:
        why = "CLEARLLAMA_KERNELS is off" if os.environ.get("CLEARLLAMA_KERNELS") == "off" else kernels.why_none()
    else:
        try:
            kernels.load(form)
            yield Finding("ok", "kernels", "C++", f"{form}, built: {kernels.built(form)}")
            return
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            why = f"{form} can't be built: {one_line(str(error))}"
    if kernels.compiler() is None:
        remedy = "install a C++ compiler (g++ or clang++), or name it in CXX; --compile needs one, too"
    yield Finding("note", "kernels", "C++", f"not used: {why}; torch's own operators are slower", remedy)
