"""One harness in a process of its own: `python -m tests.fuzz.child NAME FOLDER --seconds S --seed N`.

FOLDER/current always holds the input that is being tried, so whatever ends this process, it is known. Exit code 0:
nothing was found; 1: a finding, told on stderr; a signal: a crash, or a call that took too long.
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

HANGS = 15  # seconds of processor time after which a call that does not come back is ended
ADDRESSES = 3 * 2**29  # bytes beyond what is mapped at the start; what is allocated there is a MemoryError
FOUND = Path(__file__).parent / "found"


def load(name: str, folder: Path, instrument: Any = contextlib.nullcontext) -> tuple[Any, ModuleType]:
    """The harness of a name, ready, and the module of the law."""
    with instrument():
        law = importlib.import_module("tests.fuzz.law")
        harness = importlib.import_module(f"tests.fuzz.{name}").Harness(folder)
    return harness, law


def found(name: str) -> list[bytes]:
    """Inputs that were findings once."""
    return [path.read_bytes() for path in sorted((FOUND / name).glob("*"))]


def inputs(harness: Any, name: str, seed: int) -> Iterator[bytes]:
    """The seeds, what was found before, and random changes of these without end."""
    from .mutate import mutate

    known = [*harness.seeds(), *found(name)]
    yield from known
    chance, pool = random.Random(seed), list(known)
    while True:
        made = mutate(chance.choice(pool), known, harness.words, chance)
        if chance.random() < 0.02:  # changes of changes
            if len(pool) < len(known) + 500:
                pool.append(made)
            else:
                pool[chance.randrange(len(known), len(pool))] = made
        yield made


def watch_for_hangs() -> Callable[[], None]:
    """Start to count processor time; what is returned begins anew. SIGPROF tells where it is and ends the process."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    faulthandler.register(signal.SIGPROF, chain=True)

    def restart() -> None:
        signal.setitimer(signal.ITIMER_PROF, HANGS)

    return restart


def main(argv: Sequence[str]) -> int:
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
    begin = harness.seeds() if args.repeat is None else [args.repeat.read_bytes()]
    restart = watch_for_hangs()
    current = os.open(args.folder / "current", os.O_RDWR | os.O_CREAT, 0o600)
    tried = worked = 0

    def one(data: bytes) -> None:
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

    for data in begin:  # whatever is imported late is imported now
        one(data)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if os.path.exists("/proc/self/statm") else 0
    if pages:
        limit = pages * resource.getpagesize() + ADDRESSES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    if args.repeat is None and atheris is not None:
        _guided(atheris, one, harness, args)
    elif args.repeat is None:
        end = time.monotonic() + args.seconds
        for data in inputs(harness, args.name, args.seed):
            one(data)
            if time.monotonic() > end:
                break
    print(f"{tried} inputs, {worked} of them gave a result", file=sys.stderr)
    return 0


def _atheris() -> Any:
    """The library, where it is installed."""
    try:
        return importlib.import_module("atheris")
    except ImportError:
        return None


def _guided(atheris: Any, one: Callable[[bytes], None], harness: Any, args: argparse.Namespace) -> None:
    """Run libFuzzer on the inputs; half of its mutations are ours. It leaves by os._exit, so this prints the counts."""
    from .mutate import LARGEST, mutate

    known = [*harness.seeds(), *found(args.name)]
    corpus = args.folder / "corpus"
    corpus.mkdir()
    for i, data in enumerate(known):
        (corpus / f"{i:04d}").write_bytes(data)

    def change(data: bytes, largest: int, seed: int) -> bytes:
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
        one,
        custom_mutator=change,
    )
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
