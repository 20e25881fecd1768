"""Run the harnesses, each in a process of its own. See tests/fuzz/__init__.py."""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from . import NAMES
from .child import FOUND

ROOT = Path(__file__).parents[2]


def main(argv: Sequence[str] | None = None) -> int:
    """Return 1 if there was a finding, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description="Fuzz everything that reads files and text."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"harnesses to run (default: all): {', '.join(NAMES)}")
    parser.add_argument("--seconds", type=float, default=20, help="time for each harness (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random mutations (default: 0)")
    parser.add_argument("--plain", action="store_true", help="random mutations, even if atheris is installed")
    parser.add_argument("--jobs", type=int, default=2, help="harnesses to run at once (default: 2)")
    parser.add_argument("--found", type=Path, default=FOUND, metavar="FOLDER", help="folder for the findings")
    parser.add_argument("--repeat", type=Path, metavar="FILE", help="try only the input in FILE")
    args = parser.parse_args(argv)
    with ThreadPoolExecutor(args.jobs) as pool:
        ended = list(pool.map(lambda name: run(name, args), args.names or NAMES))
    return int(not all(ended))


def run(name: str, args: argparse.Namespace) -> bool:
    """Run a harness. Returns whether it found nothing; saves and prints a finding."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        command = [sys.executable, "-m", "tests.fuzz.child", name, folder, f"--seconds={args.seconds}"]
        command += [f"--seed={args.seed}", *["--plain"] * args.plain]
        command += [f"--repeat={args.repeat.resolve()}"] if args.repeat else []
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", check=False)
        elapsed = time.monotonic() - start
        current = Path(folder) / "current"
        data = current.read_bytes() if current.exists() else None
    if done.returncode == 0:
        print(f"ok    {name:<12} {counts(done.stderr)} in {elapsed:.0f} s", flush=True)
        return True
    status = f"ended by signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
    lines = [line for line in done.stderr.splitlines() if not line.startswith(("INFO:", "WARNING:", "#"))]
    errors = "\n".join(lines)[-3000:].rstrip()
    if data is None:  # it failed before the first input
        print(f"FAIL  {name:<12} {status}\n{errors}", flush=True)
        return False
    saved = args.repeat
    if saved is None:
        saved = args.found / name / hashlib.sha256(data).hexdigest()[:16]
        saved.parent.mkdir(parents=True, exist_ok=True)
        saved.write_bytes(data)
    repeat = f"python -m tests.fuzz {name} --repeat {shlex.quote(str(saved))}"
    print(
        f"FAIL  {name:<12} {status} after {elapsed:.0f} s; the input is in {saved}\n{errors}\nrepeat: {repeat}",
        flush=True,
    )
    return False


def counts(stderr: str) -> str:
    """Return the number of inputs that a child reports: in its own line, or in libFuzzer's."""
    lines = stderr.splitlines()
    for line in reversed(lines):
        if line.endswith("gave a result"):
            return line
        if "number_of_executed_units" in line:
            return f"{line.split()[-1]} inputs"
    return "done"


if __name__ == "__main__":
    sys.exit(main())
