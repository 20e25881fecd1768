"""An example for CONTRIBUTING.md: one token a line, in hexadecimal, and the control tokens as they are: <s>, </s>."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from llama.errors import TokenizerError
from llama.tokenizer import Named, Tokenizer


def recognizes(start: bytes) -> bool:
    return re.match(rb"([0-9a-f]{2})+\n", start) is not None


class OwnTokenizer(Tokenizer):
    """The longest token that fits is taken."""

    kind, add_bos = "lines in hexadecimal", False

    def __init__(self, data: bytes, where: str, settings: Mapping[str, Any], named: Named):
        self.data, lines = data, data.decode().splitlines()
        self.control = self.special = {line: id for id, line in enumerate(lines) if line.startswith("<")}
        self.bos_id, self.eos_id, self.n_vocab = self.control["<s>"], self.control["</s>"], len(lines)
        self.stop_ids = frozenset({self.eos_id, *named.stop_ids})
        self._bytes = [b"" if line in self.control else bytes.fromhex(line) for line in lines]
        self._ids = {token: id for id, token in enumerate(self._bytes) if token}
        if len(self._ids.keys() & {bytes([byte]) for byte in range(256)}) < 256:
            raise TokenizerError(f"{where}: a byte is not a token, so some texts can't be encoded")
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile(b"|".join(map(re.escape, longest_first)))

    def _encode(self, text: str) -> list[int]:
        return [self._ids[token] for token in self._pattern.findall(text.encode())]

    def _bytes_of(self, id: int) -> bytes:
        return self._bytes[id]
