"""Run one harness in this process: `python -m tests.fuzz.child NAME FOLDER --seconds S --seed N`.

FOLDER/current contains the input being tried, so that it survives a crash. Exit code 0: no finding; 1: a finding,
printed on stderr; a signal: a crash, or a call that took too long.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import os
import random
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

HANGS = 15  # seconds of processor time after which a call is killed
ADDRESSES = 3 * 2**29  # bytes of address space beyond what is mapped at the start; more raises MemoryError
FOUND = Path(__file__).parent / "found"


def load(name: str, folder: Path, instrument: Any = contextlib.nullcontext) -> tuple[Any, ModuleType]:
    """Import a harness and the law. Returns an instance of the harness, and the module `law`."""
    with instrument():
        law = importlib.import_module("tests.fuzz.law")
        harness = importlib.import_module(f"tests.fuzz.{name}").Harness(folder)
    return harness, law


def found(name: str) -> list[bytes]:
    """Return the inputs of past findings."""
    return [path.read_bytes() for path in sorted((FOUND / name).glob("*"))]


def inputs(harness: Any, name: str, seed: int) -> Iterator[bytes]:
    """Yield the seeds, the inputs of past findings, and random mutations of these without end."""
    from .mutate import mutate

    known = [*harness.seeds(), *found(name)]
    yield from known
    chance, pool = random.Random(seed), list(known)
    while True:
        made = mutate(chance.choice(pool), known, harness.words, chance)
        if chance.random() < 0.02:  # mutations to mutate again
            if len(pool) < len(known) + 500:
                pool.append(made)
            else:
                pool[chance.randrange(len(known), len(pool))] = made
        yield made


def watch_for_hangs() -> Callable[[], None]:
    """Return a function that restarts the time limit. SIGPROF then prints a traceback and ends the process."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    faulthandler.register(signal.SIGPROF, chain=True)

    def restart() -> None:
        signal.setitimer(signal.ITIMER_PROF, HANGS)

    return restart


def main(argv: Sequence[str]) -> int:
    """Run a harness for --seconds, or on the input of --repeat. Returns 0 if there was no finding."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--repeat", type=Path)
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    os.environ["OMP_NUM_THREADS"] = "1"
    atheris = None if args.plain or args.repeat else _atheris()
    instrument: Any = contextlib.nullcontext
    if atheris is not None:
        instrument = lambda: atheris.instrument_imports(include=["llama", "jinja2"])  # noqa: E731
    work = args.folder / "work"
    work.mkdir()
    harness, law = load(args.name, work, instrument)
    first = harness.seeds() if args.repeat is None else [args.repeat.read_bytes()]
    restart = watch_for_hangs()
    current = os.open(args.folder / "current", os.O_RDWR | os.O_CREAT, 0o600)
    tried = worked = 0

    def try_input(data: bytes) -> None:
        nonlocal tried, worked
        tried += 1
        os.pwrite(current, data, 0)
        os.ftruncate(current, len(data))
        restart()
        try:
            worked += law.check(harness, data) > 0
        except law.Finding as finding:
            print(f"{args.name}: {finding}", file=sys.stderr, flush=True)
            cause = finding.__cause__
            if cause is not None and cause.__traceback__ is not None:
                import traceback

                print("".join(traceback.format_exception(cause)[-6:]), file=sys.stderr, flush=True)
            os._exit(1)

    for data in first:  # this also completes lazy imports, before memory is limited
        try_input(data)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if os.path.exists("/proc/self/statm") else 0
    if pages:
        limit = pages * resource.getpagesize() + ADDRESSES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    if args.repeat is None and atheris is not None:
        _guided(atheris, try_input, harness, args)
    elif args.repeat is None:
        end = time.monotonic() + args.seconds
        for data in inputs(harness, args.name, args.seed):
            try_input(data)
            if time.monotonic() > end:
                break
    print(f"{tried} inputs, {worked} of them gave a result", file=sys.stderr)
    return 0


def _atheris() -> Any:
    """Return the library, or None if it is not installed."""
    try:
        return importlib.import_module("atheris")
    except ImportError:
        return None


def _guided(atheris: Any, try_input: Callable[[bytes], None], harness: Any, args: argparse.Namespace) -> None:
    """Run libFuzzer; half of the mutations are those of mutate.py. It prints its statistics and exits by os._exit."""
    from .mutate import LARGEST, mutate

    known = [*harness.seeds(), *found(args.name)]
    corpus = args.folder / "corpus"
    corpus.mkdir()
    for i, data in enumerate(known):
        (corpus / f"{i:04d}").write_bytes(data)

    def custom_mutator(data: bytes, largest: int, seed: int) -> bytes:
        chance = random.Random(seed)
        made = mutate(data, known, harness.words, chance) if seed % 2 else atheris.Mutate(data, largest)
        return bytes(made[:largest])

    options = {
        "max_total_time": max(1, round(args.seconds)), "seed": args.seed + 1, "max_len": LARGEST, "verbosity": 0,
        "timeout": 600, "rss_limit_mb": 0, "print_final_stats": 1, "artifact_prefix": f"{args.folder}/",
    }  # fmt: skip
    atheris.enabled_hooks.add("RegEx")
    atheris.Setup(
        [sys.argv[0], str(corpus), *(f"-{key}={value}" for key, value in options.items())],
        try_input,
        custom_mutator=custom_mutator,
    )
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
