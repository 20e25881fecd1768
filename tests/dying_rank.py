"""The command, as torchrun starts it; CLEARLLAMA_TEST_FAULT="RANK PHASE HOW" ends a rank."""

import os
import sys
from itertools import count
from typing import Any

from llama.__main__ import main
from llama.engine import parallel

RANK, PHASE, HOW = os.environ["CLEARLLAMA_TEST_FAULT"].split()
SUMS = count(1)  # 4 in each pass of a model with 2 layers


def end() -> None:
    if HOW == "kill":
        os.kill(os.getpid(), 9)
    raise MemoryError("simulated")


def forward(layer: parallel.RowParallel, x: Any, plain: Any = parallel.RowParallel.forward) -> Any:
    return end() if next(SUMS) == {"prefill": 3, "decode": 40}[PHASE] else plain(layer, x)


if os.environ["RANK"] == RANK and PHASE == "load":
    parallel.ShardedCheckpoint.tensor = lambda checkpoint, name: end()  # type: ignore[method-assign]
elif os.environ["RANK"] == RANK:
    parallel.RowParallel.forward = forward  # type: ignore[method-assign]
sys.exit(main())
