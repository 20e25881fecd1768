"""Each format is read a second time by a small independent reader: the same names, dtypes, shapes and bytes.

The readers here share no code with the package: Python's zipfile and unpickler, json and offsets, struct. Of damaged files,
those that both readers accept must be read alike.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import random
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from llama.checkpoint import Checkpoint, meta, open_checkpoint
from llama.checkpoint.base import to_file_name
from llama.checkpoint.write import raw_bytes
from llama.errors import LlamaError

from . import tiny
from .fuzz.gguf import CONFIG
from .fuzz.mutate import mutate
from .fuzz.safetensors import their_names

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),  # from NaN scales
]


class Weight(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    data: bytes


Weights = dict[str, Weight]


# ------------------------------------------------------------------------------------------------- independent readers
def read_torch(path: Path) -> Weights:
    """By Python's unpickler, whose find_class returns stubs, and zipfile."""
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        folder = archive.namelist()[0].split("/")[0]

        def rebuild(storage: tuple[str, bytes], offset: int, shape: Any, strides: Any, *rest: Any) -> Weight:
            dtype, data = storage
            width = {"FloatStorage": 4, "HalfStorage": 2, "BFloat16Storage": 2}[dtype]
            cells = np.frombuffer(data, f"V{width}")[offset:]
            assert min((0, *shape, *strides)) == 0
            if 0 in shape:
                return Weight(dtype.removesuffix("Storage"), tuple(shape), b"")
            assert sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) < len(cells)
            view = np.lib.stride_tricks.as_strided(cells, shape, [step * width for step in strides])
            return Weight(dtype.removesuffix("Storage"), tuple(shape), view.tobytes())

        known = {"_rebuild_tensor_v2": rebuild, "_rebuild_parameter": lambda weight, *rest: weight,
                 "OrderedDict": OrderedDict}  # fmt: skip

        class Reader(pickle.Unpickler):
            def find_class(self, module: str, name: str) -> Any:
                return known.get(name, name)

            def persistent_load(self, reference: Any) -> tuple[str, bytes]:
                _, dtype, key, _, numel = reference
                item = archive.getinfo(f"{folder}/data/{key}")
                start = item.header_offset + 30 + sum(struct.unpack_from("<2H", content, item.header_offset + 26))
                data = content[start : start + item.file_size]  # not archive.read, which compares the CRC-32
                assert len(data) == numel * (4 if dtype == "FloatStorage" else 2)
                return dtype, data

        return dict(Reader(io.BytesIO(archive.read(f"{folder}/data.pkl"))).load())


def read_safetensors(path: Path) -> Weights:
    """By json and offsets."""
    data = path.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    names = {"F32": "Float", "F16": "Half", "BF16": "BFloat16"}
    return {
        name: Weight(names[one["dtype"]], tuple(one["shape"]), data[start:][slice(*one["data_offsets"])])
        for name, one in header.items()
    }


def read_gguf(path: Path) -> Weights:
    """By struct. Blocks are dequantized as in ggml: a scale in float16, then 32 integers."""
    file = io.BytesIO(path.read_bytes())

    def take(form: str) -> Any:
        return struct.unpack(f"<{form}", file.read(struct.calcsize(f"<{form}")))[0]

    def text() -> str:
        return file.read(take("Q")).decode()

    def value(kind: int) -> Any:
        if kind == 8:
            return text()
        if kind == 9:
            inner, count = take("I"), take("Q")
            return [value(inner) for _ in range(count)]
        return take("BbHhIif?__QqD".replace("D", "d")[kind])

    assert file.read(4) == b"GGUF"
    assert take("I") in (2, 3)
    tensors, entries = take("Q"), take("Q")
    metadata = {text(): value(take("I")) for _ in range(entries)}
    found = [(text(), [take("Q") for _ in range(take("I"))], take("I"), take("Q")) for _ in range(tensors)]
    align = metadata.get("general.alignment", 32)
    start = -(-file.tell() // align) * align
    weights: Weights = {}
    for name, reverse, kind, offset in found:
        shape = tuple(reversed(reverse))
        n = math.prod(shape)
        file.seek(start + offset)
        if kind in (0, 1, 30):
            dtype, width = {0: ("Float", 4), 1: ("Half", 2), 30: ("BFloat16", 2)}[kind]
            weights[name] = Weight(dtype, shape, file.read(n * width))
            continue
        width = {2: 18, 8: 34}[kind]
        blocks = np.frombuffer(file.read(n // 32 * width), np.uint8).reshape(-1, width)
        scales, codes = blocks[:, :2].copy().view(np.float16).astype(np.float32), blocks[:, 2:]
        integers = codes.view(np.int8) if kind == 8 else np.concatenate([codes & 15, codes >> 4], 1).astype(np.int8) - 8
        weights[name] = Weight("Float", shape, (scales * integers.astype(np.float32)).tobytes())
    return weights


# -------------------------------------------------------------------------------------------------------- the files
def make_meta(folder: Path) -> Path:
    state = {to_file_name(name, meta.STEMS): weight.bfloat16() for name, weight in tiny.weights(CONFIG).items()}
    state["norm.weight"] = torch.nn.Parameter(state["norm.weight"])
    state["output.weight"] = state["output.weight"].T.contiguous().T  # strides that are not row-major
    params = {"dim": CONFIG.dim, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "vocab_size": 8}
    (folder / "params.json").write_text(json.dumps(params))
    torch.save(state, folder / "consolidated.00.pth")
    return folder / "consolidated.00.pth"


def huggingface_state(folder: Path) -> dict[str, torch.Tensor]:
    config = {
        "model_type": "llama", "hidden_size": CONFIG.dim, "num_attention_heads": CONFIG.n_heads, "num_hidden_layers": 1,
        "num_key_value_heads": 1, "intermediate_size": CONFIG.hidden_dim, "vocab_size": CONFIG.vocab_size,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    weights = tiny.weights(CONFIG).items()
    return {their_names()[name]: weight.to(dtypes[i % 3]) for i, (name, weight) in enumerate(weights)}


def make_bin(folder: Path) -> Path:
    torch.save(OrderedDict(huggingface_state(folder)), folder / "pytorch_model.bin")
    return folder / "pytorch_model.bin"


def make_safetensors(folder: Path) -> Path:
    save_file(huggingface_state(folder), folder / "model.safetensors")
    return folder / "model.safetensors"


def make_gguf(quantization: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        none = dict.fromkeys((*tiny.byte_vocabulary(), "general.name"))
        tiny.write_gguf(folder / "model.gguf", CONFIG, quantization=quantization, metadata=none)
        return folder / "model.gguf"

    return make


# format -> (a function that makes a checkpoint and returns its file of weights, the independent reader)
FORMATS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], Weights]]] = {
    "meta": (make_meta, read_torch),
    "bin": (make_bin, read_torch),
    "safetensors": (make_safetensors, read_safetensors),
    **{f"gguf {kind}": (make_gguf(kind), read_gguf) for kind in ("F32", "F16", "Q8_0", "Q4_0")},
}


def path_of(file: Path) -> Path:
    return file if file.suffix == ".gguf" else file.parent


def ours(checkpoint: Checkpoint) -> Weights:
    names = {torch.float32: "Float", torch.float16: "Half", torch.bfloat16: "BFloat16"}
    found: Weights = {}
    for name in checkpoint.shapes:
        tensor = checkpoint.tensor(name).detach()
        found[checkpoint.file_name(name)] = Weight(
            names[tensor.dtype], tuple(tensor.shape), raw_bytes(tensor).tobytes()
        )
    return found


@pytest.mark.row("A26")
@pytest.mark.parametrize("name", FORMATS)
def test_an_independent_reader_finds_the_same_weights(name: str, tmp_path: Path) -> None:
    make, read = FORMATS[name]
    file = make(tmp_path)
    found, expected = ours(open_checkpoint(path_of(file))), read(file)
    assert len(expected) >= 12
    assert found == expected


def changed(data: bytes, name: str, chance: random.Random) -> bytes:
    """The file with a random change. In an archive the pickle may be changed, and all checksums computed again."""
    if name in ("meta", "bin") and chance.random() < 0.5:
        made = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(made, "w") as new:
            for item in old.infolist():
                content = old.read(item)
                if item.filename.endswith("data.pkl"):
                    content = mutate(content, [], [], chance)
                pad = -(made.tell() + 34 + len(item.filename)) % 64
                fresh = zipfile.ZipInfo(item.filename)
                fresh.extra = struct.pack("<2H", 0x4246, pad) + bytes(pad)
                new.writestr(fresh, content)
        return made.getvalue()
    return mutate(data, [], [], chance)


def compare_changed(name: str, folder: Path, count: int) -> tuple[int, int]:
    """Read changed files twice. Returns how many both readers accepted, and how many only ours did."""
    make, read = FORMATS[name]
    file, chance = make(folder), random.Random(0)
    data, both, alone = file.read_bytes(), 0, 0
    for _ in range(count):
        made = changed(data, name, chance)
        file.unlink()  # the old file may be mapped
        file.write_bytes(made)
        try:
            found = ours(open_checkpoint(path_of(file)))
        except LlamaError:
            continue
        try:
            expected = read(file)
        except Exception:
            alone += 1
            continue
        both += 1
        assert found.items() <= expected.items(), made[:200]
    return both, alone


@pytest.mark.parametrize("name", FORMATS)
def test_changed_files_that_both_readers_accept_are_read_alike(name: str, tmp_path: Path) -> None:
    both, alone = compare_changed(name, tmp_path, 60)
    assert both > 5
    assert alone == 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FORMATS)
def test_changed_files_that_both_readers_accept_are_read_alike_at_length(name: str, tmp_path: Path) -> None:
    both, alone = compare_changed(name, tmp_path, 10_000)
    assert both > 500
    assert alone == 0
