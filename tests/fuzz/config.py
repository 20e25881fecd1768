"""params.json, config.json and the documents next to it: up to ModelConfig, RoPE scaling and tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path

from llama.checkpoint import meta, open_checkpoint
from llama.rope import Rope
from llama.rope_scaling import PARAMETERS, SCALINGS

from ..scripts import make_tiny
from . import law

# first byte of an input -> (folder, document)
DOCUMENTS = {
    b"p": ("meta", "params.json"), b"c": ("hf", "config.json"), b"g": ("hf", "generation_config.json"),
    b"t": ("hf", "tokenizer_config.json"), b"j": ("hf", "chat_template.jinja"),
}  # fmt: skip
SCALED = (
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 64},
    {"type": "yarn", "factor": 4.0, "beta_fast": 32, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False},
    {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 2.0},
    {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    {"type": "dynamic", "factor": 2.0},
)  # fmt: skip


class Harness(law.Harness):
    words = tuple(
        b'"%s"' % word.encode()
        for word in (*meta.KNOWN_PARAMS, *huggingface.MUST_BE, *huggingface.UNSUPPORTED, *huggingface.SAMPLING,
                     *SCALINGS, *(key for keys in PARAMETERS.values() for key in keys), "rope_scaling",
                     "rope_parameters", "rope_theta", "quantization_config", "layer_types", "head_dim", "model",
                     "architectures", "auto_map", "do_sample", "eos_token_id", "bos_token", "chat_template")
    )  # fmt: skip

    def __init__(self, folder: Path):
        super().__init__(folder)
        for format in ("meta", "hf"):
            make_tiny.make(folder / format, "llama-3-8b", format=format)
        self.valid = {name: (folder / kind / name).read_bytes() for kind, name in DOCUMENTS.values()
                      if (folder / kind / name).exists()}  # fmt: skip

    def seeds(self) -> Iterable[bytes]:
        config = json.loads(self.valid["config.json"])
        yield b"p" + self.valid["params.json"]
        yield b"p" + json.dumps({"model": json.loads(self.valid["params.json"]), "use_scaled_rope": True}).encode()
        yield b"c" + self.valid["config.json"]
        for i, scaling in enumerate(SCALED):
            yield b"c" + json.dumps({**config, ("rope_scaling", "rope_parameters")[i % 2]: scaling}).encode()
        yield b'g{"do_sample": true, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [5, 7], "bos_token_id": 4}'
        yield b't{"bos_token": "<|begin_of_text|>", "eos_token": {"content": "<|end_of_text|>"}, "add_bos_token": true}'
        yield b't{"chat_template": [{"name": "default", "template": "{{ messages }}"}]}'
        yield b"j{{ messages }} \xc3\xa9"

    def calls(self, data: bytes) -> Iterator[law.Call]:
        kind, name = DOCUMENTS.get(data[:1], DOCUMENTS[b"c"])
        folder = self.folder / kind
        path = self.put(f"{kind}/{name}", data[1:])
        yield partial(read, folder)
        if name == "params.json":
            yield partial(meta.read_params, path)
        if name not in ("params.json", "config.json"):
            path.unlink()
        else:
            path.write_bytes(self.valid[name])


def read(folder: Path) -> None:
    """Open a checkpoint, its RoPE and its tokenizer; the model is not built."""
    checkpoint = open_checkpoint(folder)
    config = checkpoint.config
    if config.head_dim <= 256 and config.max_seq_len <= 2**17:
        Rope("real", config.head_dim, config.max_seq_len, config.rope_theta, config.rope_scaling)
    law.inspect(checkpoint)
    tokenizer = checkpoint.tokenizer()
    if not all(0 <= id < tokenizer.n_vocab for id in tokenizer.stop_ids):
        raise law.Finding(f"a stop id is outside the vocabulary: {tokenizer.stop_ids}")
