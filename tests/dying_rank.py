"""The command, as torchrun starts it. Of CLEARLLAMA_TEST_FAULT="RANK PHASE HOW NOTE", the rank makes NOTE and ends."""

import os
import sys
from itertools import count
from pathlib import Path
from typing import Any

from llama.__main__ import main
from llama.engine import parallel

RANK, PHASE, HOW, NOTE = os.environ["CLEARLLAMA_TEST_FAULT"].split()
SUMS = count(1)  # 4 in each pass of a model with 2 layers
plain = parallel.RowParallel.forward


def fail(*inputs: Any) -> Any:
    if PHASE != "load" and next(SUMS) != {"prefill": 3, "decode": 40}[PHASE]:
        return plain(*inputs)
    Path(NOTE).touch()
    if HOW == "kill":
        os.kill(os.getpid(), 9)
    raise MemoryError("simulated")


if os.environ["RANK"] == RANK:
    setattr(*((parallel.ShardedCheckpoint, "weight") if PHASE == "load" else (parallel.RowParallel, "forward")), fail)
sys.exit(main())
