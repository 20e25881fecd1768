"""Limits of this process: its address space, checked before torch is imported, and its open files.

The import maps all of torch's libraries. If the limit of the shell (ulimit -v) is too low for them, the import fails
in one of several ways, and some of them abort the process without a Python error.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from ..errors import MemoryLimitError

MIB = 2**20
# Measured with torch 2.13 and numpy 2 on Linux: what the imports map in addition to the files in torch/lib, and what
# numpy's OpenBLAS maps for each core after the first, since it starts a thread on each.
OTHER_IMPORTS = 160 * MIB
PER_CORE = 40 * MIB
MOST_CORES = 64
MOST_FILES = 2**14  # more are not needed
TO_RUN = 192 * MIB  # with less left, reading a vocabulary may abort: Rust aborts when an allocation fails


def address_limit() -> int | None:
    """The limit of the address space in bytes (ulimit -v); None if there is none."""
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def open_files() -> int:
    """Raise the limit of open files to MOST_FILES, or as far as the system allows. Returns the new limit."""
    try:
        import resource
    except ImportError:  # not on Windows
        return MOST_FILES
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit, most = (MOST_FILES if one == resource.RLIM_INFINITY else one for one in limits)
    wanted = max(limit, min(most, MOST_FILES))
    if wanted > limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, limits[1]))
    return wanted


def import_bytes() -> int:
    """An estimate of the address space that importing torch needs; 0 if torch is not installed."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.origin:
        return 0
    libraries = (Path(found.origin).parent / "lib").glob("*.so*")
    return sum(path.stat().st_size for path in libraries) + OTHER_IMPORTS + PER_CORE * (_threads() - 1)


def usable_cores() -> int:
    """The number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _threads() -> int:
    """The number of threads that OpenBLAS starts."""
    variables = (os.environ.get(name, "") for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"))
    wanted = next((value for value in variables if value.isdigit()), "")
    return max(1, min(usable_cores(), int(wanted or MOST_CORES), MOST_CORES))


def check_import() -> None:
    """Raise MemoryLimitError if the limit of the address space is too low for torch."""
    limit = address_limit()
    if limit is None or "torch" in sys.modules:
        return
    needed = import_bytes()
    if limit < needed + TO_RUN:
        raise MemoryLimitError(
            f"the limit of this shell (ulimit -v) is {limit // MIB:,} MiB of address space, but importing torch and"
            f" reading a vocabulary needs about {(needed + TO_RUN) // MIB:,} MiB in addition to the model; raise the"
            " limit, or start a shell without one (ulimit -v unlimited)"
        )
