"""Llama 3's tokenizer.model: byte-level BPE, lines of a token in base64 and its rank, run by the tiktoken library.

The word pattern, the 256 control strings after the ranks and the limits on long texts are those of meta-llama's
llama-models (llama3/tokenizer.py).
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator

from ..errors import TokenizerError
from .base import Tokenizer
from .common import LLAMA3_WORDS, NOTHING, Named, check_length, library_errors, stop_ids

N_CONTROL = 256
NAMED_CONTROL = (
    "begin_of_text",
    "end_of_text",
    "reserved_special_token_0",
    "reserved_special_token_1",
    "finetune_right_pad_id",
    "step_id",
    "start_header_id",
    "end_header_id",
    "eom_id",
    "eot_id",
    "python_tag",
    "image",
)

# Llama 4's file has the same format and this many lines, but another word pattern and other control strings.
LLAMA4_TOKENS = 200_000

# tiktoken panics on longer texts, and longer runs of only white space or only other characters slow it down.
MAX_CHARACTERS = 400_000
MAX_RUN = 25_000
RUN = re.compile(r"\s+|\S+")

LINE = re.compile(rb"([A-Za-z0-9+/]+={0,2}) ([0-9]{1,9})")


def recognizes(start: bytes) -> bool:
    """Whether a file begins with a token in base64 and its rank."""
    return LINE.match(start) is not None


def control_strings() -> list[str]:
    """The 256 control strings in the order of their ids; the unnamed ones are numbered from 2."""
    reserved = [f"reserved_special_token_{2 + i}" for i in range(N_CONTROL - len(NAMED_CONTROL))]
    return [f"<|{name}|>" for name in (*NAMED_CONTROL, *reserved)]


def parse(data: bytes, where: str) -> list[bytes]:
    """The tokens of the file in the order of their ranks. Raises TokenizerError at the first invalid line.

    Skipping an invalid line would shift all control ids.
    """
    rank_of: dict[bytes, int] = {}
    for rank, line in enumerate(data.splitlines()):
        match = LINE.fullmatch(line)
        try:
            token = base64.b64decode(match[1], validate=True) if match else b""
        except binascii.Error:
            token = b""
        if not (match and token):
            raise TokenizerError(
                f"{where}: line {rank + 1} is {line[:40]!r}, expected a token in base64, a space and the rank {rank};"
                f" the file is damaged or not Llama 3's tokenizer.model, download it again"
            )
        if int(match[2]) != rank:
            raise TokenizerError(
                f"{where}: line {rank + 1} has rank {int(match[2])}, expected {rank}; a line is missing, repeated or"
                f" moved, download the file again"
            )
        if token in rank_of:
            raise TokenizerError(
                f"{where}: line {rank + 1} repeats the token of line {rank_of[token] + 1}, {token[:40]!r};"
                f" the file is damaged, download it again"
            )
        check_length(token, rank, where)
        rank_of[token] = rank
    missing = [byte for byte in range(256) if bytes([byte]) not in rank_of]
    if missing:
        raise TokenizerError(
            f"{where}: byte 0x{missing[0]:02X} is not a token ({len(missing)} of the 256 bytes are missing), so some"
            f" texts can't be encoded; the file is damaged or truncated, download it again"
        )
    if len(rank_of) == LLAMA4_TOKENS:
        raise TokenizerError(
            f"{where}: this is the tokenizer of Llama 4 ({LLAMA4_TOKENS:,} tokens), a model that is not supported"
        )
    return list(rank_of)


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

    A file truncated at the end of a line looks like a smaller vocabulary; only the model's vocabulary size shows it.
    """

    def __init__(self, data: bytes, where: str, named: Named = NOTHING):
        import tiktoken

        self.kind = "tiktoken BPE (Llama 3)"
        self._where = where
        self.data = data
        self._tokens = parse(data, where)
        self.control = {name: len(self._tokens) + i for i, name in enumerate(control_strings())}
        self.n_vocab = len(self._tokens) + N_CONTROL
        self.bos_id = self.control["<|begin_of_text|>"]
        self.eos_id = self.control["<|end_of_text|>"]
        self.add_bos = True
        stops = [id for id in named.stop_ids if id < self.n_vocab]
        if plain := [id for id in stops if id < len(self._tokens)]:
            raise TokenizerError(
                f"{where}: eos_token_id of config.json or generation_config.json is {plain[0]}, the plain text"
                f" {self._tokens[plain[0]]!r}, expected a control token; the files are of different"
                f" models, download them again"
            )
        self.stop_ids = stop_ids(self.control, [self.eos_id, *stops])
        with library_errors(where, "the vocabulary can't be built"):
            self._encoding = tiktoken.Encoding(
                name=where,
                pat_str=LLAMA3_WORDS,
                mergeable_ranks={token: rank for rank, token in enumerate(self._tokens)},
                special_tokens={},  # without them, the library can't match one in a text
            )

    def _encode(self, text: str) -> list[int]:
        with library_errors(self._where, "the text can't be encoded"):
            return [id for piece in pieces(text) for id in self._encoding.encode_ordinary(piece)]

    def token_bytes(self, id: int) -> bytes:
        id = self._check_id(id)
        return self._tokens[id] if id < len(self._tokens) else b""
