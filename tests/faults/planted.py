"""Defects to plant, one for every fault that used to pass in silence, to prove that its case can fail.

A defect is a small edit of the library's source. `test_planted.py` makes it in a copy of the repository, runs the
cases of the row there, and wants at least one of them to fail.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Defect:
    row: str  # A13
    what: str  # what goes wrong with it, in a few words, for docs/reliability.md
    file: str  # below the repository's root
    old: str  # stands in the file once
    new: str


# A tuple for each group.
META: tuple[Defect, ...] = ()
CONFIG: tuple[Defect, ...] = ()
SAFETENSORS: tuple[Defect, ...] = ()
GGUF: tuple[Defect, ...] = ()
TOKENIZERS: tuple[Defect, ...] = ()
WRITES: tuple[Defect, ...] = ()
SAMPLING: tuple[Defect, ...] = ()
CHAT: tuple[Defect, ...] = ()
PROCESS: tuple[Defect, ...] = ()
MEMORY: tuple[Defect, ...] = (
    Defect(
        "J07",
        "compiled steps are never taken",
        "llama/compiled.py",
        "        if h.shape[0] == 1 and mask.dim() == 2:\n",
        "        if h.shape[0] == 0 and mask.dim() == 2:\n",
    ),
    Defect(
        "J07",
        "a compiled step reads the wrong turn",
        "llama/compiled.py",
        "return step([h, *turns, mask, positions, *cache.buffers, *weights])",
        "return step([h, *turns[::-1], mask, positions, *cache.buffers, *weights])",
    ),
)
RANKS: tuple[Defect, ...] = (
    Defect(
        "K04",
        "ranks with other weights work together",
        "llama/loader.py",
        '        world.told.append(f"weights whose sample has the hash {sample_hash(checkpoint)}")\n',
        "",
    ),
    Defect(
        "K04",
        "ranks don't compare what they have",
        "llama/parallel.py",
        """        if other["told"] != heard[0]["told"]:""",
        """        if other["told"] is None:""",
    ),
    Defect(
        "K04",
        "a rank feeds itself",
        "llama/parallel.py",
        """        tokens = torch.tensor(order["tokens"], device=device)  # (B, T)""",
        """        tokens = torch.tensor(order["tokens"], device=device) + 1  # (B, T)""",
    ),
)

DEFECTS = (*META, *CONFIG, *SAFETENSORS, *GGUF, *TOKENIZERS, *WRITES, *SAMPLING, *CHAT, *PROCESS, *MEMORY, *RANKS)
