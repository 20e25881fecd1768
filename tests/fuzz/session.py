"""Session files: their header, their metadata, and loading one into a model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from llama.config import ModelConfig
from llama.generation import session

from .. import tiny
from . import law


class Harness(law.Harness):
    """The first byte names the rest: f a complete file, h a header for valid tensors, a the metadata entry `about`."""

    words = (
        b'"__metadata__"', b'"clearllama_session"', b'"about"', b'"settings"', b'"messages"', b'"sha256"', b'"tokens"',
        b'"role"', b'"content"', b'"dtype"', b'"shape"', b'"data_offsets"', b'"I64"', b'"F32"', b'"layers.0.k"',
    )  # fmt: skip

    def __init__(self, folder: Path):
        super().__init__(folder)
        self.model = tiny.model(ModelConfig(16, 1, 1, 1, 8, 16, 16, max_seq_len=16))
        saved = session.Session()
        cache = saved.reuse(self.model, [1, 2, 3])
        self.model(tiny.random_tokens(3, self.model.config), cache=cache)
        saved.tokens, saved.busy = [1, 2, 3], False
        saved.messages = [{"role": "user", "content": "Hi"}]
        saved.save(folder / "seed.session", self.model)
        self.valid = (folder / "seed.session").read_bytes()
        (folder / "seed.session").unlink()
        length = int.from_bytes(self.valid[:8], "little")
        self.header, self.data = self.valid[8 : 8 + length], self.valid[8 + length :]

    def seeds(self) -> Iterable[bytes]:
        yield b"f" + self.valid
        yield b"h" + self.header
        yield b"a" + json.loads(self.header)["__metadata__"]["about"].encode()

    def calls(self, data: bytes) -> Iterator[law.Call]:
        kind, rest = data[:1], data[1:]
        if kind == b"a":
            header = json.loads(self.header)
            header["__metadata__"]["about"] = rest.decode(errors="replace")
            kind, rest = b"h", json.dumps(header).encode()
        if kind == b"h":
            rest = len(rest).to_bytes(8, "little") + rest + self.data
        path = self.put("chat.session", rest)
        yield partial(session.Session.load, path, self.model)
        yield partial(session.is_session, path)
