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
SAMPLING: tuple[Defect, ...] = (
    Defect(
        "G02",
        "a prompt that fills the context gets an empty answer",
        "llama/generate.py",
        "    if len(prompt) >= context:\n",
        "    if len(prompt) > context:\n",
    ),
    Defect(
        "G03",
        "an answer goes on beyond the context",
        "llama/generate.py",
        "    room = min(params.max_new_tokens, context - len(prompt))\n",
        "    room = min(params.max_new_tokens, context - len(prompt) + 1)\n",
    ),
    Defect(
        "G05",
        "a negative temperature turns the distribution around",
        "llama/sampling.py",
        '_real("temperature", self.temperature, 0.0, 1e6)',
        '_real("temperature", self.temperature, -1e6, 1e6)',
    ),
    Defect(
        "G07",
        "a top_p above 1 is taken for none",
        "llama/sampling.py",
        '_real("top_p", self.top_p, 0.0, 1.0)',
        '_real("top_p", self.top_p, 0.0, 2.0)',
    ),
    Defect(
        "G10",
        "the layer where NaN begins is one too far",
        "llama/nonfinite.py",
        'number, leaf = int(rest[0]), ".".join(rest[1:])',
        'number, leaf = int(rest[0]) + 1, ".".join(rest[1:])',
    ),
    Defect(
        "G10",
        "logits that are NaN choose some token",
        "llama/generate.py",
        "    if not -LARGEST_LOGIT < top < LARGEST_LOGIT:\n",
        "    if top >= LARGEST_LOGIT:\n",
    ),
    Defect(
        "G18",
        "a session keeps the NaN that an error left in its cache",
        "llama/session.py",
        "        if spoilt:\n",
        "        if spoilt and False:\n",
    ),
    Defect(
        "G18",
        "one thread replaces the table of turns by a shorter one",
        "llama/rope.py",
        "                if len(table[0]) >= len(self.table[0]):\n",
        "                if table:\n",
    ),
    Defect(
        "G18",
        "a stream given up halfway keeps its session",
        "llama/session.py",
        "            self.cache, self.tokens = None, []\n        self.busy = False\n",
        "            self.cache, self.tokens = None, []\n            self.busy = False\n",
    ),
    Defect(
        "G19",
        "a single query behind a cache sees the first key only",
        "llama/attention.py",
        "q.view(*k.shape[:2], -1, q.shape[-1]), k, v, mask).view(q.shape)",
        "q.view(*k.shape[:2], -1, q.shape[-1]), k, v, is_causal=True).view(q.shape)",
    ),
    Defect(
        "G21",
        "positions beyond the table of turns take its last row",
        "llama/rope.py",
        "            table = self._table(min(max(end, 2 * len(table[0])), self.max_seq_len))\n",
        "            positions = positions.clamp(max=len(table[0]) - 1)\n",
    ),
)
CHAT: tuple[Defect, ...] = ()
PROCESS: tuple[Defect, ...] = ()
MEMORY: tuple[Defect, ...] = ()
RANKS: tuple[Defect, ...] = ()

DEFECTS = (*META, *CONFIG, *SAFETENSORS, *GGUF, *TOKENIZERS, *WRITES, *SAMPLING, *CHAT, *PROCESS, *MEMORY, *RANKS)
