"""A changed file is a LlamaError, or it is loaded exactly: the law for the files of all four formats.

What a changed file holds is found by independent readers, which share no code with the package: Python's zipfile and
unpickler, json and offsets, the gguf package. Hypothesis changes bytes, header integers, pickles and JSON values.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from llama.checkpoint import Checkpoint, open_checkpoint
from llama.checkpoint.base import HUGGING_FACE_NAMES, META_NAMES, to_file_name
from llama.checkpoint.write import raw_bytes
from llama.config import ModelConfig
from llama.errors import LlamaError
from llama.weights import check_tensors

from . import tiny

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore"),  # NaN scales, UserWarnings of torch
]

CONFIG = ModelConfig(32, 1, 2, 1, 16, 32, 8, max_seq_len=64)
INTEGERS = (0, 1, 2, 3, 4, 8, 31, 33, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)


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

        def stored(item: zipfile.ZipInfo) -> bytes:
            """A record; archive.read would also compare its CRC-32, and its name before the data with the directory's."""
            start = item.header_offset + 30 + sum(struct.unpack_from("<2H", content, item.header_offset + 26))
            return content[start : start + item.file_size]

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
                data = stored(item)
                assert len(data) == numel * (4 if dtype == "FloatStorage" else 2)
                return dtype, data

        return dict(Reader(io.BytesIO(stored(archive.getinfo(f"{folder}/data.pkl")))).load())


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
    """By the gguf package."""
    names = {"F32": "Float", "F16": "Half", "BF16": "BFloat16"}
    found: Weights = {}
    for one in gguf.GGUFReader(path).tensors:
        plain = one.tensor_type.name in names
        data = one.data if plain else gguf.quants.dequantize(one.data, one.tensor_type)
        shape = tuple(reversed(one.shape.tolist()))
        found[one.name] = Weight(names.get(one.tensor_type.name, "Float"), shape, data.tobytes())
    return found


# -------------------------------------------------------------------------------------------------------- the files
def make_meta(folder: Path) -> Path:
    state = {to_file_name(name, META_NAMES): weight.bfloat16() for name, weight in tiny.weights(CONFIG).items()}
    state["norm.weight"] = torch.nn.Parameter(state["norm.weight"])
    state["output.weight"] = state["output.weight"].T.contiguous().T  # strides that are not row-major
    params = {"dim": CONFIG.dim, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "vocab_size": 8, "norm_eps": 1e-5,
              "rope_theta": 10000.0, "use_scaled_rope": False}  # fmt: skip
    (folder / "params.json").write_text(json.dumps(params))
    torch.save(state, folder / "consolidated.00.pth")
    return folder / "consolidated.00.pth"


def huggingface_state(folder: Path) -> dict[str, torch.Tensor]:
    config = {
        "model_type": "llama", "hidden_size": CONFIG.dim, "num_attention_heads": CONFIG.n_heads, "num_hidden_layers": 1,
        "num_key_value_heads": 1, "intermediate_size": CONFIG.hidden_dim, "vocab_size": CONFIG.vocab_size,
        "head_dim": 16, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "hidden_act": "silu",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    weights = tiny.weights(CONFIG).items()
    return {
        to_file_name(name, HUGGING_FACE_NAMES): weight.to(dtypes[i % 3]) for i, (name, weight) in enumerate(weights)
    }


def make_bin(folder: Path) -> Path:
    torch.save(OrderedDict(huggingface_state(folder)), folder / "pytorch_model.bin")
    return folder / "pytorch_model.bin"


def make_safetensors(folder: Path) -> Path:
    save_file(huggingface_state(folder), folder / "model.safetensors")
    return folder / "model.safetensors"


def make_gguf(quantization: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        none = dict.fromkeys((*tiny.byte_vocabulary(), "general.name"))
        return tiny.write_gguf(folder / "model.gguf", CONFIG, quantization=quantization, metadata=none)

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
        tensor = checkpoint.weight(name, checkpoint.layout).floats()
        assert tuple(tensor.shape) == checkpoint.shapes[name]
        data = raw_bytes(tensor).tobytes()
        found[checkpoint.file_name(name)] = Weight(names[tensor.dtype], tuple(tensor.shape), data)
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_an_independent_reader_finds_the_same_weights(name: str, tmp_path: Path) -> None:
    make, read = FORMATS[name]
    file = make(tmp_path)
    found, expected = ours(open_checkpoint(path_of(file))), read(file)
    assert len(expected) >= 12
    assert found == expected


# ------------------------------------------------------------------------------------------------------ changed bytes
def repacked(data: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """An archive whose pickle is changed, written again, so that sizes and checksums fit."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(made, "w") as new:
        for item in old.infolist():
            content = old.read(item)
            fresh = zipfile.ZipInfo(item.filename)
            pad = -(made.tell() + 34 + len(item.filename)) % 64
            fresh.extra = struct.pack("<2H", 0x4246, pad) + bytes(pad)
            new.writestr(fresh, change(content) if item.filename.endswith("data.pkl") else content)
    return made.getvalue()


@st.composite
def changes(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """A flipped byte, an integer, a cut, a removed or a repeated part, near the start or the end of the file or anywhere."""
    kind = draw(st.sampled_from(("byte", "integer", "cut", "remove", "repeat")))
    near, place = draw(st.sampled_from(("start", "end", "any"))), draw(st.integers(0, 2**20))
    width, value = draw(st.sampled_from((2, 4, 8))), draw(st.sampled_from(INTEGERS) | st.integers(0, 300))
    length = draw(st.integers(1, 64))

    def change(data: bytes) -> bytes:
        at = place % (len(data) if near == "any" else min(len(data), 3000)) if data else 0
        at = max(len(data) - at - 1, 0) if near == "end" else at
        if kind == "byte":
            return data[:at] + bytes([data[at] ^ (1 << value % 8) if value % 3 else value % 256]) + data[at + 1 :]
        if kind == "integer":
            at -= at % min(width, 4) if value % 2 else 0
            return data[:at] + (value % 2 ** (8 * width)).to_bytes(width, "little") + data[at + width :]
        if kind == "cut":
            return data[:at]
        return data[:at] + (data[at + length :] if kind == "remove" else data[at : at + length] + data[at:])

    return change


LENGTHS = [100, pytest.param(20_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]


@pytest.mark.parametrize("examples", LENGTHS)
@pytest.mark.parametrize("name", FORMATS)
def test_a_changed_file_is_refused_or_loaded_exactly(name: str, tmp_path: Path, examples: int) -> None:
    make, read = FORMATS[name]
    file = make(tmp_path)
    data, counts = file.read_bytes(), {"refused": 0, "exact": 0}

    @settings(max_examples=examples, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(changes(), st.booleans())
    def law(change: Callable[[bytes], bytes], inside: bool) -> None:
        made = repacked(data, change) if inside and read is read_torch else change(data)
        file.unlink()  # the old file may be mapped
        file.write_bytes(made)
        try:
            checkpoint = open_checkpoint(path_of(file))
            check_tensors(checkpoint)
            found = ours(checkpoint)
        except LlamaError:
            counts["refused"] += 1
            return
        assert found.items() <= read(file).items()
        counts["exact"] += 1

    law()
    assert min(counts.values()) > examples // 50, counts


# ------------------------------------------------------------------------------------------------------- changed JSON
# keys of params.json and config.json -> the attribute of ModelConfig that has their value
ATTRIBUTES = {
    "dim": "dim", "n_layers": "n_layers", "n_heads": "n_heads", "n_kv_heads": "n_kv_heads", "vocab_size": "vocab_size",
    "norm_eps": "norm_eps", "rope_theta": "rope_theta", "hidden_size": "dim",
    "num_attention_heads": "n_heads", "num_hidden_layers": "n_layers", "num_key_value_heads": "n_kv_heads",
    "intermediate_size": "hidden_dim", "head_dim": "head_dim", "max_position_embeddings": "max_seq_len",
    "rms_norm_eps": "norm_eps", "tie_word_embeddings": "tie_embeddings", "attention_bias": "attention_bias",
    "mlp_bias": "mlp_bias", "use_scaled_rope": "rope_scaling",
}  # fmt: skip
VALUES = st.sampled_from(
    (0, 1, 2, 3, 16, 64, -1, 2**31, 2**64, 10**400, 0.5, 1e-6, 64.0, math.nan, math.inf, True, False, None, "", "64",
     "silu", "llama", [], [1], {}, {"a": 1})
)  # fmt: skip


@pytest.mark.parametrize(("name", "file"), [("meta", "params.json"), ("safetensors", "config.json")])
def test_a_changed_value_is_refused_or_becomes_that_of_the_model(name: str, file: str, tmp_path: Path) -> None:
    FORMATS[name][0](tmp_path)
    document = json.loads((tmp_path / file).read_text())
    before = open_checkpoint(tmp_path).config
    counts = {"refused": 0, "used": 0}

    @settings(max_examples=300, derandomize=True, database=None)
    @given(st.sampled_from(sorted(document)), VALUES, st.sampled_from(("value", "value", "value", "twice", "typo")))
    def law(key: str, value: Any, how: str) -> None:
        text = json.dumps({**document, key: value})
        if how == "twice":
            text = text[:-1] + f", {json.dumps(key)}: {json.dumps(value)}}}"
        if how == "typo":
            text = json.dumps({k.replace(key, f"{key}_"): v for k, v in document.items()})
        (tmp_path / file).write_text(text)
        try:
            checkpoint = open_checkpoint(tmp_path)
            check_tensors(checkpoint)
        except LlamaError:
            counts["refused"] += 1
            return
        assert how != "twice"
        assert how != "typo" or any(f"{key}_" in warning for warning in checkpoint.warnings)
        counts["used"] += 1
        now, attribute = checkpoint.config, ATTRIBUTES.get(key)
        if attribute is None:
            assert now == before
        elif value in (None, -1) or how == "typo" or key == "use_scaled_rope":  # the default, or computed from it
            context = now.max_seq_len if key in ("use_scaled_rope", "rope_theta") else before.max_seq_len
            kept = {"max_seq_len": context, attribute: getattr(now, attribute)}
            assert now == dataclasses.replace(before, **kept)
        else:
            assert now == dataclasses.replace(before, **{attribute: value})

    law()
    assert min(counts.values()) > 2, counts
