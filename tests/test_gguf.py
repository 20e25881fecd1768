"""The GGUF reader: exact weights of every type and layout of a file, and the configuration by its metadata."""

from __future__ import annotations

import dataclasses
import math
import os
import pickle
import re
import struct
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from llama import loader
from llama.checkpoint import open_checkpoint
from llama.checkpoint.gguf import PLAIN_VALUES, GGUFFile, GGUFWeight
from llama.checkpoint.gguf_header import LARGEST_HEADER, read_header
from llama.errors import CheckpointError, DamagedError, LlamaError
from llama.quant.groups import READERS
from llama.rope_scaling import inverse_frequencies

from . import tiny

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = tiny.random_tokens(30)
# Types without groups for the kernels
RARE = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4")


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load(path: Path, **options: Any) -> Any:
    return loader.load_model(path, **{"dtype": "float32", "device": "cpu", **options})


# ----------------------------------------------------------------------------------------------------------- weights


def test_the_header_equals_that_of_the_gguf_package(tmp_path: Path) -> None:
    """With every kind of value, alone and in an array."""
    kinds = [kind for kind in gguf.GGUFValueType if kind.name not in ("STRING", "ARRAY")]
    special = {"BOOL": True, "FLOAT32": 1.5, "FLOAT64": 1.5}
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "llama")
    for kind in kinds:
        value = special.get(kind.name, -7 if kind.name[0] == "I" else 200)
        writer.add_key_value(kind.name, value, kind)
        writer.add_key_value(f"{kind.name}s", [value] * 2, gguf.GGUFValueType.ARRAY, kind)
    tiny.add_metadata(writer, tiny.byte_vocabulary())
    for name, shape in (("a", (3, 5)), ("b", (7,))):
        writer.add_tensor(name, np.zeros(shape, np.float32))
    finish(writer)
    metadata, tensors = read_header((tmp_path / "x.gguf").read_bytes(), "x")
    theirs = gguf.GGUFReader(tmp_path / "x.gguf")
    assert list(tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        info = tensors[tensor.name]
        assert info.shape == tuple(reversed(tensor.shape.tolist()))
        assert (info.type, info.offset, info.nbytes) == (tensor.tensor_type.name, tensor.data_offset, tensor.n_bytes)
    for key, value in metadata.items():
        assert (value.tolist() if isinstance(value, np.ndarray) else value) == theirs.fields[key].contents()


@pytest.mark.parametrize("form", ["complex", "real", "half"])
@pytest.mark.parametrize("biases", [False, True])
def test_logits_are_those_of_the_weights_in_the_file(tmp_path: Path, biases: bool, form: str) -> None:
    config = dataclasses.replace(tiny.CONFIG, attention_bias=biases, mlp_bias=biases)
    path = tiny.write_gguf(tmp_path / "x.gguf", config)
    expected = tiny.model(config)(TOKENS)
    torch.testing.assert_close(
        load(path, rope=form)(TOKENS), expected, rtol=0, atol=1e-6 if form == "complex" else 1e-4
    )


@pytest.mark.parametrize("name", [*READERS, *RARE])
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_quantized_tensors_equal_those_of_the_gguf_package(tmp_path: Path, name: str) -> None:
    type = gguf.GGMLQuantizationType[name]
    per_block, size = gguf.GGML_QUANT_SIZES[type]
    raw = np.random.default_rng(0).integers(0, 256, (40, 1536 // per_block * size), dtype=np.uint8)
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "llama")
    for label, blocks in (("matrix", raw), ("vector", raw[0])):
        writer.add_tensor(label, blocks, raw_dtype=type)
    finish(writer)
    expected = torch.from_numpy(gguf.quants.dequantize(raw, type))
    assert float(expected.isfinite().float().mean()) > 0.8  # random scales may be NaN or infinite
    matrix, vector = GGUFFile(tmp_path / "x.gguf").tensors.values()
    parts = [(matrix.floats(), expected), (vector.floats(), expected[0])]
    for columns in (slice(0, 7), slice(33, 100), slice(None)):
        parts.append((matrix[3:9, columns].floats(), expected[3:9, columns]))
    for found, wanted in parts:
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    part = matrix[3:9, 256:768]
    assert (part.format is None) == (name in RARE)
    if part.format is not None:
        assert part.groups().format == part.format
        torch.testing.assert_close(part.groups().weight, expected[3:9, 256:768], rtol=0, atol=0, equal_nan=True)


def test_a_type_that_is_not_supported_is_an_error(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "llama")
    writer.add_tensor("w", np.zeros((1, 292), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_K)
    finish(writer)
    with pytest.raises(CheckpointError, match="stored as Q8_K are not supported"):
        GGUFFile(tmp_path / "x.gguf").tensors["w"].floats()


def test_reading_never_changes_the_file(tiny_gguf: Path) -> None:
    before, model = tiny_gguf.read_bytes(), load(tiny_gguf)
    model.norm.weight.fill_(9)  # float32 weights are in the mapped file; a write goes to a private copy
    assert tiny_gguf.read_bytes() == before


@pytest.mark.parametrize("type", ["F32", "Q8_0", "Q5_0"])
@pytest.mark.parametrize("options", [{"fast": True}, {"quantize": "int8"}, {"rope": "half"}])
def test_a_weight_is_read_when_its_layer_is_filled_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, type: str, options: dict[str, Any]
) -> None:
    path, read, raw = tiny.write_gguf(tmp_path / "x.gguf", tiny.WIDE, quantization=type), [], GGUFWeight.raw
    monkeypatch.setattr(GGUFWeight, "raw", property(lambda self: (read.append(self.name), raw.__get__(self))[1]))
    checkpoint = open_checkpoint(path)
    plan = loader.make_plan(checkpoint, loader.LoadOptions("cpu", **options))
    loader.check_memory(plan)
    model = loader.empty_model(plan)
    assert read == []
    loader.fill(model, plan)
    assert set(read) == {checkpoint.file_name(name) for name in checkpoint.shapes}


# ----------------------------------------------------------------------------------------------------------- surplus
@pytest.mark.parametrize("alignment", [4, 64])
def test_surplus_that_nothing_reads_is_accepted(tiny_gguf: Path, tmp_path: Path, alignment: int) -> None:
    """Another alignment, a tensor without entries, and bytes after the last tensor."""
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "llama")
    writer.add_custom_alignment(alignment)
    tiny.add_metadata(writer, {**tiny.architecture(), **tiny.byte_vocabulary()})
    for name, tensor in [("empty", torch.zeros(0)), *GGUFFile(tiny_gguf).tensors.items()]:
        writer.add_tensor(name, (tensor if isinstance(tensor, Tensor) else tensor.floats()).numpy())
    finish(writer)
    with open(tmp_path / "x.gguf", "ab") as file:
        file.write(bytes(7))
    assert torch.equal(load(tmp_path / "x.gguf")(TOKENS), load(tiny_gguf)(TOKENS))


# ---------------------------------------------------------------------------------------------------------- metadata
@pytest.mark.parametrize("key", PLAIN_VALUES)
def test_a_key_that_changes_the_computation_is_refused(tmp_path: Path, key: str) -> None:
    plain, key = PLAIN_VALUES[key], f"llama.{key}"
    open_checkpoint(tiny.write_gguf(tmp_path / "plain.gguf", metadata={key: plain}))
    other = not plain if isinstance(plain, bool) else plain + 2
    with pytest.raises(CheckpointError, match=re.escape(f"{key} is {other}, expected {plain}")):
        open_checkpoint(tiny.write_gguf(tmp_path / "other.gguf", metadata={key: other}))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"metadata": {"general.architecture": "gpt2"}}, "architecture is 'gpt2'"),
        ({"metadata": {"llama.embedding_length": None}}, "embedding_length is missing"),
        ({"metadata": {"llama.attention.head_count_kv": [2, 1]}}, r"head_count_kv must be an integer, got ndarray"),
        ({"metadata": {"llama.attention.head_count": 8}}, "attn_q.weight has shape"),
        ({"metadata": {"llama.block_count": 2**31}}, "has 2147483648 layers"),
        ({"metadata": {"llama.rope.dimension_count": 8}}, "rope.dimension_count is 8, expected 16"),
        ({"metadata": {"tokenizer.chat_template": 5}}, "chat_template must be a string, got 5"),
        ({"without": ("token_embd.weight",)}, "token_embd.weight is missing"),
        ({"extra": {"blk.0.attn_norm.bias": torch.zeros(64)}}, "1 tensor is unexpected: blk.0.attn_norm.bias"),
        ({"extra": {"blk.0.other.weight": torch.zeros(64)}}, "blk.0.other.weight is not part of a LLaMA decoder"),
    ],
    ids=str,
)
def test_metadata_and_tensors_must_agree(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(LlamaError, match=says):
        load(tiny.write_gguf(tmp_path / "x.gguf", **options))


def test_defaults_are_those_of_llama_cpp(tmp_path: Path) -> None:
    keys = ("attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.freq_base",
            "rope.dimension_count")  # fmt: skip
    config = dataclasses.replace(tiny.CONFIG, n_kv_heads=4)
    path = tiny.write_gguf(tmp_path / "x.gguf", config, metadata=dict.fromkeys(f"llama.{key}" for key in keys))
    assert open_checkpoint(path).config == config
    assert open_checkpoint(tiny.write_gguf(tmp_path / "y.gguf", without=("output.weight",))).config.tie_embeddings
    window = {"llama.attention.sliding_window": 128, "tokenizer.ggml.pre": None}
    warned = open_checkpoint(tiny.write_gguf(tmp_path / "z.gguf", metadata=window))
    assert warned.config.sliding_window == 128
    assert ["no key tokenizer.ggml.pre" in warned.warnings[0], "window" in warned.warnings[1]] == [True, True]
    sizes = {"attention.head_count": [4, 4], "attention.head_count_kv": [2, 2], "feed_forward_length": [96, 96]}
    arrays = tiny.write_gguf(tmp_path / "v.gguf", metadata={f"llama.{key}": size for key, size in sizes.items()})
    assert open_checkpoint(arrays).config == tiny.CONFIG
    older = tiny.write_gguf(tmp_path / "w.gguf", metadata={"llama.rope.scale_linear": 4.0})
    assert open_checkpoint(older).config.rope_scaling == {"rope_type": "linear", "factor": 4.0}


SHORT, LONG = [1 + i / 7 for i in range(8)], [1.0 + i for i in range(8)]
FREQS, LENGTHS = "rope_freqs.weight", {"rope_factors_short.weight": SHORT, "rope_factors_long.weight": LONG}
YARN = {"rope_type": "yarn", "factor": 4.0}
SCALINGS: list[tuple[dict[str, Any], dict[str, list[float]], Any]] = [
    ({"type": "linear", "factor": 4.0}, {}, {"rope_type": "linear", "factor": 4.0}),
    ({"factor": 4.0}, {}, {"rope_type": "linear", "factor": 4.0}),  # llama.cpp's default
    ({"factor": 1.0}, {}, None),
    ({"type": "none", "factor": 4.0, "finetuned": True}, {}, None),
    ({"factor": -1.0}, {}, "'factor' must be a number above 0"),
    ({"factor": 4.0, "attn_factor": 2.0}, {}, "linear, .*attn_factor is not supported"),
    ({"type": "spiral", "factor": 4.0}, {}, "spiral, .* is not supported"),
    ({"type": "yarn", "factor": 4.0, "yarn_ext_factor": 0.5}, {}, "yarn_ext_factor is not supported in"),
    ({"type": "yarn", "factor": 4.0, "original_context_length": 64}, {}, {**YARN, "original_max_position_embeddings": 64}),
    ({"type": "yarn", "factor": 4.0, "attn_factor": 2.0}, {},
     {**YARN, "attention_factor": 2 * (0.1 * math.log(4) + 1)}),  # llama.cpp multiplies its own by it
    ({"type": "longrope", "original_context_length": 64, "attn_factor": 1.25}, LENGTHS,
     {"rope_type": "longrope", "original_max_position_embeddings": 64, "attention_factor": 1.25}),
    ({}, LENGTHS, {"rope_type": "longrope", "attention_factor": 1.0}),
    ({}, {FREQS: LONG}, {"rope_type": "divisors", "divisors": LONG}),
    ({"type": "yarn", "factor": 4.0}, {FREQS: LONG}, "yarn, .*rope_freqs.weight is not supported"),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "tables", "expected"), SCALINGS, ids=str)
def test_rope_scaling_is_read_as_by_llama_cpp(tmp_path: Path, keys: dict[str, Any], tables, expected: Any) -> None:
    metadata = {f"llama.rope.scaling.{key}": value for key, value in keys.items()}
    extra = {name: torch.tensor(values) for name, values in tables.items()}
    path = tiny.write_gguf(tmp_path / "x.gguf", metadata=metadata, extra=extra)
    if isinstance(expected, str):
        with pytest.raises(CheckpointError, match=expected):
            open_checkpoint(path)
        return
    found = open_checkpoint(path).config.rope_scaling
    for kind in ("short", "long"):
        values = [float(x) for x in extra[f"rope_factors_{kind}.weight"].double()] if tables == LENGTHS else None
        assert (found or {}).pop(f"{kind}_factor", None) == values
    assert found == (pytest.approx(expected) if expected and "divisors" not in expected else expected)


@pytest.mark.parametrize(("factor", "length"), [(8.0, 8192), (32.0, 8192), (4.0, 64)])
def test_divisors_of_llama3_are_recognized(tmp_path: Path, factor: float, length: int) -> None:
    made = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": length}  # fmt: skip
    plain, scaled = (inverse_frequencies(16, 10000.0, kind)[0] for kind in (None, made))
    read = open_checkpoint(tiny.write_gguf(tmp_path / "x.gguf", extra={FREQS: plain / scaled})).config.rope_scaling
    assert read is not None
    assert torch.equal(inverse_frequencies(16, 10000.0, read)[0], scaled)  # bit for bit


# ------------------------------------------------------------------------------------------------------------- files
def split(folder: Path, tensors: int = 5) -> list[Path]:
    """The tiny model split into several files by the gguf package."""
    writer = gguf.GGUFWriter(str(folder / "part.gguf"), "llama", split_max_tensors=tensors)
    tiny.add_metadata(writer, {**tiny.architecture(), **tiny.byte_vocabulary()})
    for tensor in gguf.GGUFReader(tiny.write_gguf(folder / "whole.bin")).tensors:
        writer.add_tensor(tensor.name, tensor.data)
    finish(writer)
    return sorted(folder.glob("part-*.gguf"))


def test_an_error_of_another_process_names_its_remedy_once() -> None:
    error = DamagedError("x is short")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(error).count("download it again") == 1


def test_a_split_model_opens_from_any_part(tmp_path: Path) -> None:
    parts = split(tmp_path)
    assert len(parts) > 2
    expected = load(tmp_path / "whole.bin")(TOKENS)  # the format is detected by the content
    for path in (parts[0], parts[-1], tmp_path):
        checkpoint = open_checkpoint(path)
        assert checkpoint.parts == {part.name: part.stat().st_size for part in parts}
        assert torch.equal(loader.build(checkpoint, "cpu", "float32")(TOKENS), expected)
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(DamagedError, match="files have the same tensor"):
        open_checkpoint(parts[0])
    parts[1].unlink()
    with pytest.raises(CheckpointError, match=rf"{parts[1].name} is missing"):
        open_checkpoint(parts[2])
    tiny.write_gguf(tmp_path / "stray.gguf")
    with pytest.raises(CheckpointError, match="contains several GGUF models; name one of them"):
        open_checkpoint(tmp_path)


# ---------------------------------------------------------------------------------------------------- crafted files
def string(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


def entry(key: bytes, type: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", type) + value


def array(type: int, count: int, items: bytes = b"") -> bytes:
    return struct.pack("<IQ", type, count) + items


def tensor(name: bytes = b"t", dims: tuple[int, ...] = (32,), type: int = 0, offset: int = 0) -> bytes:
    shape = struct.pack("<I", len(dims)) + b"".join(struct.pack("<Q", d) for d in dims)
    return string(name) + shape + struct.pack("<IQ", type, offset)


def file(entries: list[bytes], tensors: list[bytes] = (), data: int = 0, **header: Any) -> bytes:  # type: ignore[assignment]
    head = header.get("magic", b"GGUF") + struct.pack(
        "<IQQ", header.get("version", 3), header.get("n_tensors", len(tensors)), header.get("n_kv", len(entries))
    )
    body = head + b"".join(entries) + b"".join(tensors)
    return body + bytes(-len(body) % 32) + bytes(data)


HUGE = (2**31, 2**32, 2**63, 2**64 - 1)
# Required text of the message -> files
CRAFTED: dict[str, list[bytes]] = {
    "the header needs": [
        *(file([entry(b"k", 9, array(type, n))]) for n in HUGE for type in (0, 12, 8)),
        *(file([], n_kv=n) for n in HUGE),
    ],
    "a string ends at byte": [
        *(file([entry(b"k", 8, string(b"", n))]) for n in HUGE),
        *(file([], [string(b"", n) + bytes(24)]) for n in (2**40, 2**64 - 1)),
    ],
    "is cut or not UTF-8": [*(file([], n_tensors=n)[:24] for n in HUGE), file([entry(b"k", 8, string(b"\xff"))])],
    "expected a number or a string": [file([entry(b"k", 9, array(9, 1) * 5000)]), file([entry(b"k", 13, bytes(8))])],
    "has GGUF version": [*(file([], version=n) for n in (0, 1, 4)), b"GGUF" + struct.pack(">IQQ", 3, 0, 0)],
    "dimensions, expected 1 to 4": [file([], [tensor(dims=dims)], 128) for dims in ((), (1, 1, 1, 1, 32))],
    "has the unknown type 999": [file([], [tensor(type=999)], 128)],
    "not a multiple of 32": [file([], [tensor(dims=(33,), type=2)], 128)],
    "of a file with": [
        file([], [tensor(dims=(2**32 + 1, 2**32 - 1, 2**32, 2**32 + 4))], 128),  # the product wraps to 4
        file([], [tensor()], 127),
        *(file([], [tensor(b"a"), tensor(b"b", offset=n)], 256) for n in (0, 1, 127)),
    ],
    "key k occurs twice": [file([entry(b"k", 0, b"x")] * 2)],
    "tensor t occurs twice": [file([], [tensor(), tensor(offset=128)], 256)],
    "expected a power of two": [
        file([entry(b"general.alignment", type, value)])
        for type, value in ((4, bytes(4)), (4, b"\3\0\0\0"), (8, string(b"32")), (6, struct.pack("<f", 32)))
    ],
}  # fmt: skip


@pytest.mark.parametrize("says", CRAFTED)
def test_each_crafted_fault_is_refused(says: str) -> None:
    _, good = read_header(file([entry(b"k", 9, array(8, 1, string(b"a")))], [tensor()], 128), "good.gguf")
    assert good["t"].nbytes == 128
    for content in CRAFTED[says]:
        with pytest.raises(CheckpointError, match=says) as error:
            read_header(content, "bad.gguf")
        assert len(str(error.value)) < 400


def test_a_header_is_limited_before_it_is_read(tmp_path: Path) -> None:
    """Files with holes: a few bytes on disk that claim millions of strings or numbers."""
    for type, count in ((8, 10**8), (4, 10**9), (4, LARGEST_HEADER // 4)):
        (tmp_path / "x.gguf").write_bytes(file([entry(b"k", 9, array(type, count))]))
        os.truncate(tmp_path / "x.gguf", 2**33)
        used = time.process_time()
        with pytest.raises(CheckpointError, match=r"x\.gguf"):
            open_checkpoint(tmp_path / "x.gguf")
        assert time.process_time() - used < 5  # reading them takes half a minute
