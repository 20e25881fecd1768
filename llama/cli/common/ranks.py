"""Run a command as one of several processes that torchrun started: each has a part of the model (engine/parallel.py).

All ranks run the same program. Only rank 0 reads and writes; `first` sends its input to the other ranks. A rank that
fails writes one line and ends; then torchrun and lost connections end the other ranks.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO, TypeVar

from ...errors import UsageError
from ...system.cores import available_cores
from . import arguments, terminal

T = TypeVar("T")
ONE_PROCESS_ONLY = ("compile", "gpu_layers", "draft", "steer", "save_session", "load_session")


def first(args: argparse.Namespace, function: Callable[[], T]) -> T:
    """Call a function. With several ranks, only rank 0 calls it, and all ranks get the result or error."""
    return function() if args.world is None else args.world.first(function)


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Run args.run(args); if torchrun started this process, as a rank. args.world is then the World, otherwise None."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        check(args, argv, 1)
        return args.run(argparse.Namespace(**vars(args), world=None)) or 0
    from torch.distributed.rendezvous import rendezvous

    store, rank, size = next(rendezvous("env://"))
    errors = sys.stderr if rank == 0 or args.debug else silence()
    signal.signal(signal.SIGINT, signal.getsignal(signal.SIGTERM))  # Ctrl-C ends the run, not only an answer
    try:
        check(args, argv, size)
        joined = join(args, store, rank, size)
        code = args.run(joined) or 0
        joined.world.leave()
        return code if rank == 0 else 0
    except (Exception, SystemExit) as error:
        if args.debug or isinstance(error, BrokenPipeError):
            raise
        for number in (signal.SIGINT, signal.SIGTERM):  # this process ends anyway, after it has written its line
            signal.signal(number, signal.SIG_IGN)
        message = terminal.describe(error)
        if isinstance(error, SystemExit):  # a signal
            message = "interrupted" if error.code == 130 else "another rank ended, or torchrun was stopped"
        elif re.search("gloo|NCCL|Connection", message):
            time.sleep(1)  # the other rank may write the reason
            message = "another rank ended or can't be reached; --debug shows where"
        elif not isinstance(error, UsageError):
            message = f"rank {rank}: {message}"
        if store.add("clearllama/failed", 1) == 1:  # no other rank has written a line
            print(f"clearllama: error: {message}", file=errors, flush=True)
        os._exit(getattr(error, "exit_code", 1))  # closing lost connections could abort the process


def check(args: argparse.Namespace, argv: Sequence[str], size: int) -> None:
    """Raise UsageError if the options do not fit the number of processes."""
    if "tensor_parallel" not in args:
        if size > 1:
            raise UsageError(f"clearllama {args.command} runs in one process; start it without torchrun")
        return
    if args.tensor_parallel not in (None, size):
        start = f"torchrun --nproc-per-node {args.tensor_parallel} -m llama {shlex.join(argv)}"
        raise UsageError(f"--tensor-parallel needs that many processes, found {size}; type: {start}")
    for name in ONE_PROCESS_ONLY if size > 1 else ():
        value = getattr(args, name)
        if value is not None and value is not False:
            raise UsageError(f"{arguments.option(name)} does not support several processes; leave it out")


def silence() -> TextIO:
    """Replace the standard streams with the null device; return the former stderr."""
    errors = os.fdopen(os.dup(2), "w")
    null = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(null, stream)
    return errors


def join(args: argparse.Namespace, store: Any, rank: int, size: int) -> argparse.Namespace:
    """Connect to the other ranks, check that they have the same options, and take a share of the cores.

    Returns the options of this rank, with its World and its device. Only rank 0 writes.
    """
    from ...engine import parallel, runtime

    world = parallel.join(store, rank, size, args.device)
    world.check_same("options", str({**vars(args), "run": None, "threads": None}))
    if args.threads is None and os.environ.get("OMP_NUM_THREADS", "1") == "1":  # torchrun sets this variable to 1
        cores = available_cores(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        runtime.set_threads(max(1, (cores or 1) // world.on_this_host))
    own: dict[str, Any] = {"world": world, "device": str(world.device)}
    if rank:
        terminal.show_log(quiet=True)
        own |= {"quiet": True, "output": None}
    return argparse.Namespace(**{**vars(args), **own})
