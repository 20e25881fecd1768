"""safetensors files, their headers with a valid length prefix, and model.safetensors.index.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from safetensors import torch as st

from llama.checkpoint import open_checkpoint
from llama.tools import verify

from .. import tiny
from . import law
from .gguf import CONFIG

INDEX = "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


class Harness(law.Harness):
    """The first byte names the rest: f a complete file, h the header for a fixed file, i an index."""

    words = (
        b'"dtype"', b'"shape"', b'"data_offsets"', b'"F32"', b'"BF16"', b'"F16"', b'"I64"', b'"F8_E4M3"', b'"BOOL"',
        b'"__metadata__"', b'"weight_map"', b'"metadata"', b'"total_size"', b'"lm_head.weight"',
        *map(str.encode, SHARDS),
    )  # fmt: skip

    def __init__(self, folder: Path):
        super().__init__(folder)
        config = {
            "model_type": "llama", "hidden_size": CONFIG.dim, "num_attention_heads": CONFIG.n_heads,
            "num_hidden_layers": 1, "num_key_value_heads": 1, "intermediate_size": CONFIG.hidden_dim,
            "vocab_size": CONFIG.vocab_size, "rms_norm_eps": 1e-5,
        }  # fmt: skip
        names = their_names()
        state = {names[name]: tensor.bfloat16() for name, tensor in tiny.weights(CONFIG).items()}
        self.single, self.indexed = folder / "single", folder / "indexed"
        for checkpoint in (self.single, self.indexed):
            checkpoint.mkdir()
            (checkpoint / "config.json").write_text(json.dumps(config))
        self.file = st.save(state)
        half = len(state) // 2
        items = list(state.items())
        self.weight_map: dict[str, str] = {}
        for shard, part in zip(SHARDS, (items[:half], items[half:]), strict=True):
            st.save_file(dict(part), self.indexed / shard)
            self.weight_map |= {name: shard for name, _ in part}
        (folder / "outside.safetensors").write_bytes(self.file)

    def seeds(self) -> Iterable[bytes]:
        length = int.from_bytes(self.file[:8], "little")
        yield b"f" + self.file
        yield b"f" + st.save({"a": tiny.weights(CONFIG)["norm.weight"]}, {"format": "pt"})
        yield b"h" + self.file[8 : 8 + length]
        yield b'h{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"__metadata__":{"a":"b"}}'
        yield b"i" + json.dumps({"metadata": {"total_size": 8}, "weight_map": self.weight_map}).encode()

    def calls(self, data: bytes) -> Iterator[law.Call]:
        kind, rest = data[:1], data[1:]
        if kind == b"i":
            folder = self.indexed
            self.put(f"indexed/{INDEX}", rest)
        else:
            folder = self.single
            if kind == b"h":
                length = int.from_bytes(self.file[:8], "little")
                rest = len(rest).to_bytes(8, "little") + rest + self.file[8 + length :]
            self.put("single/model.safetensors", rest)
        yield partial(read, folder)
        yield partial(list, verify.verify(folder))


def their_names() -> dict[str, str]:
    """Return the model's tensor names -> Hugging Face's."""
    from llama.checkpoint.base import to_file_name
    from llama.checkpoint.huggingface import LAYERS, NAMES

    return {name: to_file_name(name, NAMES, LAYERS) for name in tiny.weights(CONFIG)}


def read(folder: Path) -> None:
    """Open a checkpoint and read all its tensors."""
    checkpoint = open_checkpoint(folder)
    law.inspect(checkpoint)
    for name in checkpoint.shapes:
        checkpoint.stored(name)
        if tuple(checkpoint.tensor(name).shape) != checkpoint.shapes[name]:
            raise law.Finding(f"{name}: the shape differs from the one in the header")
