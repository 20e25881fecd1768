"""One command in several processes: starts them as torchrun does, or takes its place among those that were started."""

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

from ..errors import CheckpointError, ConfigError, ParallelError, UsageError
from . import loading, streams

PARENT = "CLEARLLAMA_PARENT"  # the process that started the ranks and watches over them
NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # what torchrun tells each rank
CLOSE_SECONDS = 5  # for a rank to end when it is asked to


def add_options(parser: argparse.ArgumentParser) -> None:
    """How many processes share the model."""
    group = parser.add_argument_group(
        "several processes",
        "one model shared by N x P processes, each with its part of the weights: on this host, one for each GPU or for"
        " some of the cores; over several hosts, see docs/parallel.md",
    )
    group.add_argument(
        "--tensor-parallel",
        type=int,
        metavar="N",
        help="cut each matrix into N parts (default: 1, or all of torchrun's)",
    )
    group.add_argument(
        "--pipeline-parallel",
        type=int,
        metavar="P",
        help="put the layers into P stages, one after the other (default: 1)",
    )
    parser.set_defaults(world=None)


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    """args.run(args), in as many processes as the options and the environment ask for."""
    shares = hasattr(args, "world")  # `plan` has options of the same names
    sizes = [getattr(args, f"{name}_parallel") if shares else None for name in ("tensor", "pipeline")]
    for name, size in zip(("tensor", "pipeline"), sizes, strict=True):
        if size is not None and size < 1:
            raise UsageError(f"--{name}-parallel must be at least 1, got {size}")
    found = environment()
    if found is None:
        if (sizes[0] or 1) * (sizes[1] or 1) == 1:
            return int(args.run(args))
        return start(args, argv, sizes[0] or 1, sizes[1] or 1)
    rank, size = found
    if size == 1 and set(sizes) <= {None, 1}:
        return int(args.run(args))
    try:
        return _take_part(args, rank, size, sizes)
    except (UsageError, ParallelError) as error:
        if rank == 0:
            raise
        told = streams.describe(error)
        if PARENT in os.environ or told.startswith("rank "):
            streams.tell(f"clearllama: error: {told}")
        time.sleep(1)  # most likely rank 0 says the same
        return error.exit_code


def environment() -> tuple[int, int] | None:
    """Rank and number of ranks, where this process is one of several. Raises UsageError where half of it is told."""
    if "RANK" not in os.environ and "WORLD_SIZE" not in os.environ:
        return None
    needed = NEEDED[:2] if "CLEARLLAMA_STORE" in os.environ else NEEDED
    if missing := [name for name in needed if not os.environ.get(name)]:
        there = ", ".join(name for name in NEEDED if os.environ.get(name))
        raise UsageError(
            f"{there} set in the environment without {', '.join(missing)}: a rank needs all of them; torchrun sets them"
            " (torchrun --nproc-per-node N -m llama ...). To run in one process, unset them"
        )
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", *(["MASTER_PORT"] if "MASTER_PORT" in needed else [])):
        try:
            numbers[name] = int(os.environ[name])
        except ValueError:
            raise UsageError(
                f"{name} in the environment is {os.environ[name]!r:.40}, expected a whole number"
            ) from None
    rank, size = numbers["RANK"], numbers["WORLD_SIZE"]
    if not 0 <= rank < size:
        raise UsageError(f"RANK {rank} and WORLD_SIZE {size} in the environment: a rank lies between 0 and {size - 1}")
    return rank, size


ALONE = ("compile", "gpu_layers", "save_session", "load_session")  # a session's file would hold one rank's keys


def _check_options(args: argparse.Namespace) -> None:
    """Raise UsageError for an option that several processes can't follow."""
    if args.device is not None and "," in args.device:
        raise UsageError(
            f"--device {args.device} names several devices, which are for one process; several processes take --device"
            " cpu or --device cuda, each a GPU of its own"
        )
    for name in ALONE:
        value = getattr(args, name, None)
        if value is not None and value is not False:
            raise UsageError(
                f"--{name.replace('_', '-')} is for one process, and several were asked for; leave one of both out"
            )


# ----------------------------------------------------------------------------------------------------------- a rank
def _take_part(args: argparse.Namespace, rank: int, size: int, sizes: list[int | None]) -> int:
    """Be one of the ranks."""
    _end_with_parent()
    if rank:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a rank that waits inside of a collective hears no handler
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides what an interrupt ends
    if not hasattr(args, "world"):
        raise UsageError(
            f"clearllama {args.command} runs in one process, and {size} were started; see docs/parallel.md"
        )
    tensor, pipeline = sizes
    if tensor is None:
        tensor = size // (pipeline or 1)
    pipeline = size // tensor if pipeline is None else pipeline
    if tensor * pipeline != size:
        raise UsageError(
            f"--tensor-parallel {tensor} times --pipeline-parallel {pipeline} is not the number of processes that were"
            f" started, {size}"
        )
    _check_options(args)
    if args.threads is None:
        args.threads = _share_of_threads()
    from ..checkpoint import open_checkpoint
    from ..engine import parallel
    from ..engine.sharding import Rank, check_world
    from ..hub.named import resolve

    if PARENT not in os.environ:  # who started the ranks looked before
        with contextlib.suppress(CheckpointError, ConfigError):  # which is told to all, once they have met
            check_world(open_checkpoint(resolve(args.model)).config, tensor, pipeline)
    world = args.world = parallel.join(Rank(rank, tensor, pipeline), args.device)
    args.device = str(world.device)
    if rank:
        code = _follow(args)
        sys.stderr.flush()
        os._exit(code)  # where rank 0 is gone already, closing the connections would abort this process
    try:
        code = int(args.run(args))
    except Exception:
        if world.lost and PARENT in os.environ:
            time.sleep(2 * CLOSE_SECONDS)  # who started the ranks knows which of them ended, says so, and ends this one
        if world.loaded and world.broken is None:
            with contextlib.suppress(ParallelError):
                parallel.leave(world)
        raise
    except SystemExit as left:  # a signal; the connections are left as they are, or gloo's threads abort the process
        sys.stderr.flush()
        os._exit(left.code if isinstance(left.code, int) else 1)
    parallel.leave(world)
    return code


def _follow(args: argparse.Namespace) -> int:
    """Load a part of the model and do as rank 0 does. Nothing is said but what went wrong here alone."""
    from ..engine import parallel

    args.quiet, world = True, args.world
    try:
        model = loading.load_model(args)
    except Exception:  # one that is no LlamaError as well, memory that ran out for example
        if world.broken is None:
            return 0  # all ranks know, and rank 0 says so
        model = None
    try:
        if model is not None:
            parallel.follow(model, world)
            parallel.leave(world)
            return 0
    except Exception as error:
        if args.debug:
            raise
        if not world.lost:  # it was not another one that ended
            streams.tell(f"clearllama: error: rank {world.rank.number}: {streams.describe(error)}")
            return 1
    if PARENT in os.environ:
        time.sleep(2 * CLOSE_SECONDS)  # as above
    return 1


def _share_of_threads() -> int | None:
    """Threads of a rank: its share of the cores, unless somebody has set a number. (torchrun sets 1.)"""
    if os.environ.get("OMP_NUM_THREADS", "1") != "1":
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ["WORLD_SIZE"]))


def _end_with_parent() -> None:
    """Let the system end this rank when the process that started it ends, however that happens."""
    parent = os.environ.get(PARENT)
    if parent is None:
        return
    if sys.platform == "linux":
        import ctypes

        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        os._exit(1)


# ------------------------------------------------------------------------------------------------------- the parent
def start(args: argparse.Namespace, argv: Sequence[str], tensor: int, pipeline: int) -> int:
    """Start the ranks of this host with torchrun's own means, and see that they end together. Returns the exit code.

    They meet at a file, so nothing has to listen but the ranks themselves, on the loopback interface.
    """
    import torch
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std, start_processes

    from ..checkpoint import open_checkpoint
    from ..engine.runtime import pick_device
    from ..engine.sharding import check_world
    from ..hub.named import resolve
    from ..weights import check_tensors

    _check_options(args)
    device = pick_device(args.device)
    if device.type == "cuda" and torch.cuda.device_count() < tensor * pipeline:
        raise UsageError(
            f"{tensor * pipeline} processes want a GPU each; this host has {torch.cuda.device_count()}: take fewer, or"
            " --device cpu"
        )
    checkpoint = open_checkpoint(resolve(args.model))
    check_tensors(checkpoint)
    check_world(checkpoint.config, tensor, pipeline)
    if not args.debug:
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL + 1)  # what it says is said below
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGTERM,SIGHUP"
    size = tensor * pipeline
    # The ranks import from where this process did.
    paths = [os.path.abspath(path) for path in sys.path]
    code = f"import sys; sys.path[:] = {paths}; from llama.__main__ import main; sys.exit(main())"
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
                os.kill(ranks.pids()[0], number)  # it ends what it does, or an answer only

        signal.signal(signal.SIGINT, interrupt)
        try:
            result = ranks.wait(period=0.05)
        except SignalException as told:
            return 128 + int(told.sigval)
        finally:
            ranks.close()
        return _told(args, result)


def _told(args: argparse.Namespace, result: Any) -> int:
    """The exit code, and a line about a rank that ended by itself and could not say why."""
    if not result.failures:
        return 0
    rank, failure = next(iter(result.failures.items()))  # the first that failed; the others were stopped
    if args.debug:
        for log in result.stderrs.values():
            streams.tell(Path(log).read_text(errors="replace") if log else "")
    if rank == 0 and failure.exitcode > 0:
        return int(failure.exitcode)
    lines = Path(result.stderrs[rank]).read_text(errors="replace").strip().splitlines() if rank else []
    if lines and failure.exitcode > 0 and lines[-1].startswith("clearllama: "):
        told = lines[-1].removeprefix("clearllama: error: ")
    elif failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        told = f"rank {rank} was ended by {name}" + " (was there too little memory?)" * (name == "SIGKILL")
    else:
        told = f"rank {rank} ended with exit code {failure.exitcode}"
    streams.tell(f"clearllama: error: {streams.one_line(told)}; the other ranks were stopped")
    return 1
