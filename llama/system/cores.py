"""The number of threads to compute with: one for each physical core, or fewer if this process may use less.

PyTorch respects the CPU affinity of a process, but not the CPU quota of a container: on a host with 64 cores, it starts
64 threads in a container that may use 2 CPUs. The system then stops all of them for most of each period. Two threads on
one core share its arithmetic units and its caches, so they are not faster than one.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from .groups import control_groups, read_lines

VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # set by the user; PyTorch reads them too


@dataclass(frozen=True)
class Threads:
    """A number of threads and its reason in a few words."""

    count: int
    reason: str

    def __str__(self) -> str:
        return f"{self.count} thread{'s' * (self.count != 1)}: {self.reason}"


def default_threads() -> int:
    """The number of threads to compute with, unless the user names one."""
    return chosen().count


@functools.cache
def chosen() -> Threads:
    """The number of threads by the user's environment variables, by what this process may use, or by PyTorch."""
    for name in VARIABLES:
        number = os.environ.get(name, "").split(",")[0].strip()  # OpenMP accepts a list, for nested loops
        if number.isdecimal() and int(number):
            return Threads(int(number), f"by {name}")
    if not hasattr(os, "sched_getaffinity"):  # macOS and Windows
        import torch

        return Threads(torch.get_num_threads(), "PyTorch's choice")
    return available(os.sched_getaffinity(0))


def available(allowed: Collection[int], root: Path = Path("/")) -> Threads:
    """One thread for each core that this process may use, or fewer under a CPU quota.

    allowed  the numbers of the CPUs that this process may run on; a core with hyperthreads has several
    root     contains proc and sys
    """
    siblings = {  # CPU -> the CPUs of its core, such as "0,32"
        int(file.parents[1].name[3:]): "".join(read_lines(file))
        for file in root.glob("sys/devices/system/cpu/cpu[0-9]*/topology/thread_siblings_list")
    }
    cores = {siblings.get(cpu) or str(cpu) for cpu in allowed}
    count, total = len(cores), len(cores.union(siblings.values()))
    quota = min((max(1, math.ceil(cpus)) for cpus in quotas(root)), default=count)
    if quota < count:
        return Threads(quota, f"{quota} of {total} cores by the container's CPU quota")
    if count < total:
        return Threads(count, f"{count} of {total} cores by the CPU affinity of this process")
    return Threads(count, f"one for each of {total} cores" if total > 1 else "there is one core")


def quotas(root: Path) -> Iterator[float]:
    """The CPU quotas of this process's control group and of its ancestors, in CPUs."""
    for version, group in control_groups("cpu", root):
        names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = [word for name in names for line in read_lines(group / name) for word in line.split()]
        if len(words) == 2 and all(map(str.isdecimal, words)) and int(words[1]):  # without a quota: "max" or "-1"
            yield int(words[0]) / int(words[1])
