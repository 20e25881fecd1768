"""Run one command in several processes: start the ranks, or be one of the ranks that torchrun started."""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from ..checks import integer
from ..errors import CheckpointError, ConfigError, ParallelError, UsageError
from ..system.cores import available_cores
from . import arguments, loading, streams

PARENT = "CLEARLLAMA_PARENT"  # environment variable: id of the process that started the ranks and monitors them
NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # environment variables that torchrun sets for each rank
CLOSE_SECONDS = 5  # time for a rank to end after a signal


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add --tensor-parallel and --pipeline-parallel."""
    group = parser.add_argument_group(
        "several processes",
        "split the model over N x P processes of this host. Each process uses one GPU or, on the CPU, a share of the"
        " cores. For several hosts, see docs/guides/several-devices.md",
    )
    group.add_argument(
        "--tensor-parallel",
        type=int,
        metavar="N",
        help="split each matrix into N parts (default: 1; under torchrun, the number of its processes)",
    )
    group.add_argument(
        "--pipeline-parallel",
        type=int,
        metavar="P",
        help="split the layers into P consecutive stages (default: 1)",
    )
    parser.set_defaults(world=None)


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """Run args.run(args), in several processes if the options or the environment request it."""
    parallel = hasattr(args, "world")  # `plan` has options with the same names
    sizes = [getattr(args, f"{name}_parallel") if parallel else None for name in ("tensor", "pipeline")]
    for name, size in zip(("tensor", "pipeline"), sizes, strict=True):
        if size is not None:
            integer(f"--{name}-parallel", size)
    rank_and_size = environment()
    if rank_and_size is None:
        if (sizes[0] or 1) * (sizes[1] or 1) == 1:
            return int(args.run(args))
        return start(args, argv, sizes[0] or 1, sizes[1] or 1)
    rank, size = rank_and_size
    if size == 1 and set(sizes) <= {None, 1}:
        return int(args.run(args))
    try:
        return _run_rank(args, rank, size, sizes)
    except (UsageError, ParallelError) as error:
        if rank == 0:
            raise
        message = streams.describe(error)
        if PARENT in os.environ or message.startswith("rank "):
            streams.error(message)
        time.sleep(1)  # rank 0 most likely reports the same error; let it end first
        return error.exit_code


def environment() -> tuple[int, int] | None:
    """Rank and number of ranks from the environment; None without them. Raises UsageError if they are incomplete."""
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return None
    needed = NEEDED[:2] if "CLEARLLAMA_STORE" in os.environ else NEEDED
    if missing := [name for name in needed if not os.environ.get(name)]:
        present = ", ".join(name for name in NEEDED if os.environ.get(name))
        raise UsageError(
            f"the environment has {present} but not {', '.join(missing)}; a rank needs all of them: start it with"
            " torchrun (torchrun --nproc-per-node N -m llama ...), or unset them to run in one process"
        )
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", *(["MASTER_PORT"] if "MASTER_PORT" in needed else [])):
        try:
            numbers[name] = int(os.environ[name])
        except ValueError:
            raise UsageError(f"{name} in the environment is {os.environ[name]!r:.40}, expected an integer") from None
    rank, size = numbers["RANK"], numbers["WORLD_SIZE"]
    if not 0 <= rank < size:
        raise UsageError(
            f"RANK {rank} in the environment is out of range; with WORLD_SIZE {size} it is 0 to {size - 1}"
        )
    return rank, size


ONE_PROCESS_ONLY = (
    "compile",
    "gpu_layers",
    "steer",
    "save_session",
    "load_session",
)  # a session would have one rank's keys only


def _check_options(args: argparse.Namespace) -> None:
    """Raise UsageError for an option that several processes do not support."""
    if args.device is not None and "," in args.device:
        raise UsageError(
            f"--device {args.device} names several devices, but several processes need --device cpu or --device cuda"
            " (one GPU per process)"
        )
    for name in ONE_PROCESS_ONLY:
        value = getattr(args, name, None)
        if value is not None and value is not False:
            raise UsageError(
                f"{arguments.option(name)} does not support several processes; leave it out, or run in one process"
            )


# ---------------------------------------------------------------------------------------------------- in each rank
def _run_rank(args: argparse.Namespace, rank: int, size: int, sizes: list[int | None]) -> int:
    """Run the command as one of the ranks: rank 0 runs it, the others follow rank 0."""
    _end_with_parent()
    if rank:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Python handlers do not run inside a collective operation
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 handles interrupts
    if not hasattr(args, "world"):
        raise UsageError(
            f"clearllama {args.command} runs in one process, but {size} were started;"
            " see docs/guides/several-devices.md"
        )
    tensor, pipeline = sizes
    if tensor is None:
        tensor = size // (pipeline or 1)
    pipeline = size // tensor if pipeline is None else pipeline
    if tensor * pipeline != size:
        raise UsageError(
            f"--tensor-parallel {tensor} times --pipeline-parallel {pipeline} must be the number of processes, {size}"
        )
    _check_options(args)
    from ..checkpoint import open_checkpoint
    from ..engine import parallel, runtime
    from ..engine.sharding import Rank, check_world
    from ..hub import resolve

    runtime.set_threads(_share_of_threads() if args.threads is None else args.threads)
    if PARENT not in os.environ:  # else the parent has checked it
        with contextlib.suppress(CheckpointError, ConfigError):  # reported to all ranks after they have joined
            check_world(open_checkpoint(resolve(args.model, True)).config, tensor, pipeline)
    world = args.world = parallel.join(Rank(rank, tensor, pipeline), args.device)
    args.device = str(world.device)
    if rank:
        code = _follow(args)
        sys.stderr.flush()
        os._exit(code)  # if rank 0 has ended, closing the connections would abort this process
    try:
        code = int(args.run(args))
    except Exception:
        if world.lost and PARENT in os.environ:
            time.sleep(2 * CLOSE_SECONDS)  # the parent reports which rank ended, and ends this one
        if world.loaded and world.broken is None:
            with contextlib.suppress(ParallelError):
                parallel.leave(world)
        raise
    except SystemExit as left:  # a signal; closing the connections could make gloo's threads abort the process
        sys.stderr.flush()
        os._exit(left.code if isinstance(left.code, int) else 1)
    parallel.leave(world)
    return code


def _follow(args: argparse.Namespace) -> int:
    """Load this rank's part of the model and follow rank 0. Only errors of this rank alone are reported."""
    from ..engine import parallel

    args.quiet, world = True, args.world
    try:
        model = loading.load_model(args)
    except Exception:  # any error, for example when memory runs out
        if world.broken is None:
            return 0  # all ranks know of the error, and rank 0 reports it
        model = None
    try:
        if model is not None:
            parallel.follow(model, world)
            parallel.leave(world)
            return 0
    except Exception as error:
        if args.debug:
            raise
        if not world.lost:  # the error is this rank's own, not the end of another rank
            streams.error(f"rank {world.rank.number}: {streams.describe(error)}")
            return 1
    if PARENT in os.environ:
        time.sleep(2 * CLOSE_SECONDS)  # as in _run_rank
    return 1


def _share_of_threads() -> int | None:
    """Threads of a rank: its share of the cores; None if OMP_NUM_THREADS is set, except to torchrun's default of 1."""
    if os.environ.get("OMP_NUM_THREADS", "1") != "1":
        return None
    cores = available_cores(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ["WORLD_SIZE"]))


def _end_with_parent() -> None:
    """Let the operating system kill this rank when the process that started it ends."""
    parent = os.environ.get(PARENT)
    if parent is None:
        return
    if sys.platform == "linux":
        import ctypes

        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        os._exit(1)


# -------------------------------------------------------------------------------------------------- in the parent
def start(args: argparse.Namespace, argv: Sequence[str], tensor: int, pipeline: int) -> int:
    """Start the ranks on this host with torchrun's launcher and end all of them together. Returns the exit code.

    The ranks find each other through a file, so only the ranks listen, on the loopback interface.
    """
    import torch
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std, start_processes

    from ..checkpoint import open_checkpoint
    from ..engine.runtime import pick_device
    from ..engine.sharding import check_world
    from ..hub import resolve
    from ..weights import check_tensors

    _check_options(args)
    device = pick_device(args.device)
    if device.type == "cuda" and torch.cuda.device_count() < tensor * pipeline:
        raise UsageError(
            f"{tensor * pipeline} processes need a GPU each, but this host has {torch.cuda.device_count()}; use fewer"
            " processes or --device cpu"
        )
    checkpoint = open_checkpoint(resolve(args.model, args.quiet))
    check_tensors(checkpoint)
    check_world(checkpoint.config, tensor, pipeline)
    if not args.debug:
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL + 1)  # failures are reported below
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGTERM,SIGHUP"
    size = tensor * pipeline
    # The ranks import from the same paths as this process.
    paths = [os.path.abspath(path) for path in sys.path]
    # After an error, gloo's threads would abort a process that closes its connections in order.
    code = (
        f"import os, sys; sys.path[:] = {paths}; from llama.__main__ import main; code = main();"
        " sys.stdout.flush(); sys.stderr.flush(); os._exit(code) if code else sys.exit()"
    )
    with tempfile.TemporaryDirectory(prefix="clearllama-ranks-") as folder:
        shared = {
            "WORLD_SIZE": str(size),
            "LOCAL_WORLD_SIZE": str(size),
            "CLEARLLAMA_STORE": str(Path(folder) / "store"),
            PARENT: str(os.getpid()),
            **({} if args.debug else {"TORCH_CPP_LOG_LEVEL": "ERROR"}),
        }
        ranks = start_processes(
            "clearllama",
            sys.executable,
            args=dict.fromkeys(range(size), ("-c", code, *argv)),
            envs={rank: {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)},
            logs_specs=DefaultLogsSpecs(folder, {rank: Std.ALL if rank else Std.NONE for rank in range(size)}),
        )
        ranks.close = functools.partial(ranks.close, timeout=CLOSE_SECONDS)  # type: ignore[method-assign]

        def interrupt(number: int, frame: FrameType | None) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(ranks.pids()[0], number)  # rank 0 ends the command or, in a chat, the answer

        signal.signal(signal.SIGINT, interrupt)
        try:
            result = ranks.wait(period=0.05)
        except SignalException as error:
            return 128 + int(error.sigval)
        finally:
            ranks.close()
        return _exit_code(args, result)


def _exit_code(args: argparse.Namespace, result: Any) -> int:
    """The exit code of the command. Reports a rank that failed, unless rank 0 has reported its own failure."""
    if not result.failures:
        return 0
    rank, failure = next(iter(result.failures.items()))  # the first failure; the other ranks were stopped
    if args.debug:
        for log in result.stderrs.values():
            streams.write_stderr(Path(log).read_text(errors="replace") if log else "")
    if rank == 0 and failure.exitcode > 0:
        return int(failure.exitcode)
    lines = Path(result.stderrs[rank]).read_text(errors="replace").strip().splitlines() if rank else []
    if lines and failure.exitcode > 0 and lines[-1].startswith("clearllama: "):
        message = lines[-1].removeprefix("clearllama: error: ")
    elif failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        message = f"rank {rank} was killed by {name}" + " (out of memory?)" * (name == "SIGKILL")
    else:
        message = f"rank {rank} ended with exit code {failure.exitcode}"
    streams.error(f"{streams.one_line(message)}; the other ranks were stopped")
    return 1
