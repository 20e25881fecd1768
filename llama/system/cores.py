"""The number of threads to compute with: one for each physical core, or fewer if this process may use less.

PyTorch respects the CPU affinity of a process, but not the CPU quota of a container: on a host with 64 cores, it starts
64 threads in a container that may use 2 CPUs, and the system stops them for most of each period. Two threads on one
core share its arithmetic units and its caches, so they are not faster than one.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Collection
from pathlib import Path

from .memory import limits, read

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # set by the user; PyTorch reads them


@functools.cache
def default_threads() -> int:
    """The number of threads by the user's environment variables, or by what this process may use."""
    if any(map(os.environ.get, VARIABLES)) or not hasattr(os, "sched_getaffinity"):  # macOS and Windows lack it
        import torch

        return torch.get_num_threads()
    return available_cores(os.sched_getaffinity(0))


def available_cores(allowed: Collection[int], root: Path = Path("/")) -> int:
    """The number of cores that this process may use, rounded up under a CPU quota.

    allowed  the numbers of the CPUs that this process may run on; a core with hyperthreads has several
    root     contains proc and sys
    """
    topology = root / "sys/devices/system/cpu"
    # Each core has one list of its CPUs, such as "0,32"
    cores = len({read(topology / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in allowed})
    for _, quota, period in limits("cpu", root, "cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"):
        if period:
            cores = min(cores, max(1, math.ceil(quota / period)))
    return cores
