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
SAFETENSORS: tuple[Defect, ...] = (
    Defect(
        "C02",
        "of two tensors of one name the last is taken",
        "llama/checkpoint/safetensors_header.py",
        "document = parse_json(raw, where)",
        "document = __import__('json').loads(raw)",
    ),
    Defect(
        "C05",
        "of a tensor in two files the last is taken",
        "llama/checkpoint/huggingface.py",
        "            if name in self._places:\n",
        "            if False:\n",
    ),
    Defect(
        "C05",
        "a tensor that the index does not name is taken all the same",
        "llama/checkpoint/huggingface.py",
        "if extra := sorted(held - told):",
        "if extra := []:",
    ),
    Defect(
        "C08",
        "rows of q and k are taken as Meta orders them",
        "llama/checkpoint/huggingface.py",
        'layout: Layout = "half"',
        'layout: Layout = "interleaved"',
    ),
)
GGUF: tuple[Defect, ...] = (
    Defect(
        "D06",
        "tensors may lie on the same bytes",
        "llama/checkpoint/gguf.py",
        "        if offset != expected:\n",
        "        if False:\n",
    ),
    Defect(
        "D10",
        "the architecture is not looked at",
        "llama/checkpoint/gguf.py",
        'if architecture != "llama":',
        "if False:",
    ),
    Defect(
        "D12",
        "rows of q and k are taken as Hugging Face orders them",
        "llama/checkpoint/gguf.py",
        'layout = "interleaved"',
        'layout = "half"',
    ),
    Defect(
        "D12",
        "rope_freqs.weight is left out",
        "llama/checkpoint/gguf.py",
        "                    tables[file_name] = part.tensor(file_name).double().flatten().tolist()\n",
        "",
    ),
)
TOKENIZERS: tuple[Defect, ...] = ()
WRITES: tuple[Defect, ...] = ()
SAMPLING: tuple[Defect, ...] = ()
CHAT: tuple[Defect, ...] = ()
PROCESS: tuple[Defect, ...] = ()
MEMORY: tuple[Defect, ...] = ()
RANKS: tuple[Defect, ...] = ()

DEFECTS = (*META, *CONFIG, *SAFETENSORS, *GGUF, *TOKENIZERS, *WRITES, *SAMPLING, *CHAT, *PROCESS, *MEMORY, *RANKS)
