"""Llama 3's tokenizer.model: byte-level BPE. A line has a token in base64 and its rank; the tiktoken library encodes.

The word pattern, the 256 control strings after the ranks and the limits on long texts are those of meta-llama's
llama-models (llama3/tokenizer.py).
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import TokenizerError
from .base import Tokenizer
from .common import LLAMA3_WORDS, NOTHING, Named, library_errors, stop_ids

# The 256 control strings in the order of their ids; the unnamed ones are numbered from 2
N_CONTROL = 256
NAMED = (
    "begin_of_text", "end_of_text", "reserved_special_token_0", "reserved_special_token_1", "finetune_right_pad_id",
    "step_id", "start_header_id", "end_header_id", "eom_id", "eot_id", "python_tag", "image",
)  # fmt: skip
UNNAMED = [f"reserved_special_token_{2 + i}" for i in range(N_CONTROL - len(NAMED))]

# Llama 4's file has the same format and this many lines, but another word pattern and other control strings.
LLAMA4_TOKENS = 200_000

# tiktoken panics on longer texts, and longer runs of only white space or only other characters slow it down.
MAX_CHARACTERS = 400_000
MAX_RUN = 25_000
RUN = re.compile(r"\s+|\S+")


def recognizes(start: bytes) -> bool:
    """Whether a file begins with a token in base64 and its rank."""
    return re.match(rb"[A-Za-z0-9+/]+={0,2} [0-9]", start) is not None


def parse(data: bytes, where: str) -> dict[bytes, int]:
    """Token -> rank. Raises TokenizerError at the first invalid line; skipping it would shift all control ids.

    tiktoken's own reader accepts ranks in any order and missing ones, and the library then fails on some texts.
    """
    rank_of: dict[bytes, int] = {}
    for rank, line in enumerate(data.splitlines()):
        encoded, _, number = line.partition(b" ")
        try:
            token = base64.b64decode(encoded, validate=True)
        except ValueError:
            token = b""
        if not token or number != b"%d" % rank or token in rank_of:
            raise TokenizerError(
                f"{where}: line {rank + 1} is {line[:40]!r}, expected a new token in base64 and the rank {rank}"
            )
        rank_of[token] = rank
    if missing := {bytes([byte]) for byte in range(256)} - rank_of.keys():
        raise TokenizerError(f"{where}: {min(missing)!r} is not a token, so some texts can't be encoded")
    if len(rank_of) == LLAMA4_TOKENS:
        raise TokenizerError(f"{where}: this is the tokenizer of Llama 4, a model that is not supported")
    return rank_of


def pieces(text: str) -> Iterator[str]:
    """The text in pieces that tiktoken can encode, cut exactly where Meta's tokenizer cuts it."""
    for at in range(0, len(text), MAX_CHARACTERS):
        part = text[at : at + MAX_CHARACTERS]
        start = 0
        if len(part) > MAX_RUN:
            for run in RUN.finditer(part):
                for cut in range(run.start() + MAX_RUN, run.end(), MAX_RUN):
                    yield part[start:cut]
                    start = cut
        yield part[start:]


class TiktokenTokenizer(Tokenizer):
    """The tokenizer of Llama 3's tokenizer.model; the control ids follow the last rank.

    A file truncated at the end of a line looks like a smaller vocabulary; only the model's vocabulary size reveals it.
    """

    def __init__(self, data: bytes, where: str, settings: Mapping[str, Any] | None = None, named: Named = NOTHING):
        import tiktoken

        self.kind = "tiktoken BPE (Llama 3)"
        self.data, self._where = data, where
        rank_of = parse(data, where)
        self._tokens = list(rank_of)
        self.special = self.control = {f"<|{name}|>": len(rank_of) + i for i, name in enumerate((*NAMED, *UNNAMED))}
        self.n_vocab = len(rank_of) + N_CONTROL
        self.bos_id, self.eos_id = self.control["<|begin_of_text|>"], self.control["<|end_of_text|>"]
        self.add_bos = True
        self.stop_ids = stop_ids(self.control, [self.eos_id, *named.stop_ids])
        with library_errors(where, "the vocabulary can't be built"):
            # Without special tokens, the library can't match one in a text
            self._encoding = tiktoken.Encoding(where, pat_str=LLAMA3_WORDS, mergeable_ranks=rank_of, special_tokens={})

    def _encode(self, text: str) -> list[int]:
        with library_errors(self._where, "the text can't be encoded"):
            return [id for piece in pieces(text) for id in self._encoding.encode_ordinary(piece)]

    def _bytes_of(self, id: int) -> bytes:
        return self._tokens[id] if id < len(self._tokens) else b""
