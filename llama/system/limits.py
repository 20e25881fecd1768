"""What this process may take of addresses, told before torch is imported.

torch's libraries are mapped as a whole. Where the limit of the shell (ulimit -v) has no room for them, the import ends
in one of several ways, and some of them abort the process without a word of Python's.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from ..errors import MemoryLimitError

MIB = 2**20
# Measured with torch 2.13 and numpy 2 on Linux: what the imports take besides the files in torch/lib, and what numpy's
# OpenBLAS takes for each further core that it starts a thread on.
BESIDES = 160 * MIB
A_CORE = 40 * MIB
MOST_CORES = 64
TO_RUN = 192 * MIB  # with less left, reading a vocabulary may abort: Rust's allocator does not ask twice


def address_limit() -> int | None:
    """The limit of addresses in bytes (ulimit -v); None where there is none."""
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if limit == resource.RLIM_INFINITY else limit


def import_bytes() -> int:
    """About how many addresses the import of torch takes; 0 where torch is not installed."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.origin:
        return 0
    libraries = (Path(found.origin).parent / "lib").glob("*.so*")
    return sum(path.stat().st_size for path in libraries) + BESIDES + A_CORE * (_cores() - 1)


def _cores() -> int:
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    asked = next((v for n in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS") if (v := os.environ.get(n, "")).isdigit()), "")
    return max(1, min(there, int(asked or there), MOST_CORES))


def check_import() -> None:
    """Raise MemoryLimitError where the limit of addresses has no room for torch."""
    limit = address_limit()
    if limit is None or "torch" in sys.modules:
        return
    needed = import_bytes()
    if limit < needed + TO_RUN:
        raise MemoryLimitError(
            f"the limit of this shell (ulimit -v) is {limit // MIB:,} MiB of addresses, and it takes about"
            f" {(needed + TO_RUN) // MIB:,} to import torch and read a vocabulary, besides the model; raise it, or"
            " start a shell without it (ulimit -v unlimited)"
        )
