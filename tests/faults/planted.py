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
MEMORY: tuple[Defect, ...] = ()
RANKS: tuple[Defect, ...] = ()

DEFECTS = (*META, *CONFIG, *SAFETENSORS, *GGUF, *TOKENIZERS, *WRITES, *SAMPLING, *CHAT, *PROCESS, *MEMORY, *RANKS)
