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
TOKENIZERS: tuple[Defect, ...] = (
    Defect(
        "E02",
        "a malformed line of the tokenizer file is skipped, and all control ids shift",
        "llama/tokenizer/tiktoken.py",
        """        if not (match and token):
            raise""",
        """        if not (match and token):
            continue
            raise""",
    ),
    Defect(
        "E08",
        "half a surrogate pair becomes U+FFFD",
        "llama/tokenizer/base.py",
        "        text.encode()\n",
        "        return text.encode(errors='surrogatepass').decode(errors='replace')\n",
    ),
    Defect(
        "E11",
        "begin-of-text is put in front of what a template wrote",
        "llama/chat/template.py",
        "    ids: list[int] = []\n",
        "    ids: list[int] = tokenizer.encode('', bos=True)\n",
    ),
    Defect(
        "E12",
        "rows of the embedding without a token are drawn",
        "llama/text.py",
        "            n_vocab=self.tokenizer.n_vocab,\n",
        "            n_vocab=None,\n",
    ),
)
WRITES: tuple[Defect, ...] = ()
SAMPLING: tuple[Defect, ...] = ()
CHAT: tuple[Defect, ...] = (
    Defect(
        "H02",
        "a loop's turns are not counted",
        "llama/chat/bounded.py",
        '        node.iter = self._hook("a turn", node.iter)\n',
        "",
    ),
    Defect(
        "H05",
        "a control string in a user's text becomes its id",
        "llama/chat/template.py",
        "    ids: list[int] = []\n",
        "    sparse = full = cut(str)\n    ids: list[int] = []\n",
    ),
)
PROCESS: tuple[Defect, ...] = ()
MEMORY: tuple[Defect, ...] = ()
RANKS: tuple[Defect, ...] = ()

DEFECTS = (*META, *CONFIG, *SAFETENSORS, *GGUF, *TOKENIZERS, *WRITES, *SAMPLING, *CHAT, *PROCESS, *MEMORY, *RANKS)
