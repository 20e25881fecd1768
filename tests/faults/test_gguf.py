"""Group D: a crafted GGUF file for each fault, and a valid file with every number of its header changed."""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import llama
from llama.checkpoint.gguf_header import read_header

from .. import tiny
from .conftest import Try
from .harness import cuts, flips, integers, loads

pytestmark = pytest.mark.usefixtures("one_thread")

RUN = ("--raw", "a", "-n", "1", "--device", "cpu", "--dtype", "float32")
SLOW = (pytest.mark.slow, pytest.mark.timeout(3600))  # thousands of children


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


def aligned(type: int, value: bytes) -> bytes:
    return file([entry(b"general.alignment", type, value)])


HUGE = (2**31, 2**32, 2**63, 2**64 - 1)
# (row, fault, file, required text of the message, so that no other check can satisfy the test)
CRAFTED: list[tuple[str, str, bytes, str]] = [
    *[("D01", f"array of {n} {what}", file([entry(b"k", 9, array(type, n))]), says)
      for n in HUGE for what, type, says in (("bytes", 0, "are left"), ("doubles", 12, "are left"),
                                             ("strings", 8, "more than the file can hold"))],
    ("D01", "strings overrun", file([entry(b"k", 9, array(8, 2, string(b"a") + string(b"b", 2**62)))]),
     "string 1 of k reaches past the end"),
    ("D02", "nested array", file([entry(b"k", 9, array(9, 1, array(0, 1, b"x")))]), "does not need"),
    ("D02", "nested 5,000 deep", file([entry(b"k", 9, array(9, 1) * 5000)]), "does not need"),
    ("D02", "nested and 2^63 long", file([entry(b"k", 9, array(9, 2**63))]), "does not need"),
    *[("D03", f"{n} tensors", file([], n_tensors=n), "more than the file can hold") for n in HUGE],
    # as many entries of 32 and 13 bytes as fit, and one byte less
    *[("D03", f"{n} bytes for a tensor and an entry", file([], n_tensors=1, n_kv=1)[:24] + bytes(n),
       "more than the file can hold" if n < 45 else "") for n in (44, 45)],
    *[("D03", f"{n} entries", file([], n_kv=n), "more than the file can hold") for n in HUGE],
    *[("D03", f"string of {n}", file([entry(b"k", 8, string(b"", n))]), "are left") for n in (2**40, *HUGE)],
    *[("D03", f"key of {n}", file([string(b"", n) + bytes(20)]), "are left") for n in (2**40, 2**64 - 1)],
    *[("D03", f"name of {n}", file([], [string(b"", n) + bytes(24)]), "are left") for n in (2**40, 2**64 - 1)],
    ("D03", "bad magic", file([], magic=b"GGUG"), "begins with b'GGUG"),
    ("D03", "unknown value type", file([entry(b"k", 13, bytes(8))]), "unknown type 13"),
    ("D04", "sizes whose product wraps to 4", file([], [tensor(dims=(2**32 + 1, 2**32 - 1, 2**32, 2**32 + 4))], 128),
     "ends at byte"),
    ("D04", "sizes whose product wraps to 0", file([], [tensor(dims=(2**32, 2**32, 4))], 128), "ends at byte"),
    ("D04", "sizes of 2^63", file([], [tensor(dims=(2**63, 2**63))], 128), "ends at byte"),
    ("D05", "rank 0", file([], [tensor(dims=())]), "0 dimensions, expected 1 to 4"),
    ("D05", "rank 5", file([], [tensor(dims=(1, 1, 1, 1, 32))], 128), "5 dimensions, expected 1 to 4"),
    ("D05", "rank 10^6", file([], [string(b"t") + struct.pack("<I", 10**6) + bytes(64)]), "expected 1 to 4"),
    ("D05", "size 0", file([], [tensor(dims=(0, 32))]), "sizes must be above 0"),
    ("D05", "unknown tensor type", file([], [tensor(type=999)], 128), "the unknown type 999, which is not supported"),
    ("D05", "ragged row of IQ2_XXS", file([], [tensor(dims=(32,), type=16)], 128), "a multiple of 256"),
    ("D07", "IQ2_XXS cut", file([], [tensor(dims=(256, 2**50), type=16)], 128), "it is truncated, download it again"),
    ("D05", "ragged quantized row", file([], [tensor(dims=(33,), type=2)], 128), "a multiple of 32"),
    ("D06", "two tensors on the same bytes", file([], [tensor(b"a"), tensor(b"b")], 256),
     "b begins at byte 0 of the data, expected byte 128"),
    ("D06", "hole between tensors", file([], [tensor(b"a"), tensor(b"b", offset=256)], 512), "expected byte 128"),
    ("D06", "offset not aligned", file([], [tensor(b"a"), tensor(b"b", offset=129)], 512), "expected byte 128"),
    ("D06", "in another order", file([], [tensor(b"a", offset=128), tensor(b"b")], 256), "expected byte 0"),
    ("D06", "bytes after the data", file([], [tensor()], 128 + 64), "64 bytes follow the last tensor"),
    ("D07", "offset beyond the file", file([], [tensor(offset=2**40)], 128), "tensor t begins at"),
    ("D07", "data truncated", file([], [tensor()], 127), "tensor t ends at byte"),
    *[("D08", f"version {n}", file([], version=n), f"has GGUF version {n}, expected 2 or 3") for n in (0, 1, 4, 99)],
    ("D08", "big-endian", b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    ("D09", "duplicate key", file([entry(b"k", 0, b"x")] * 2), "key k occurs twice"),
    ("D09", "duplicate tensor", file([], [tensor(), tensor(offset=128)], 256), "tensor t occurs twice"),
    ("D09", "layer of 5,000 digits", file([entry(b"general.architecture", 8, string(b"llama"))],
                                          [tensor(b"blk." + b"1" * 5000 + b".attn_q.weight")], 128), "is not part of"),
    ("D09", "empty key", file([entry(b"", 0, b"x")]), "not a valid name"),
    ("D09", "key not UTF-8", file([entry(b"\xff\xfe", 0, b"x")]), "not UTF-8"),
    ("D09", "key with a control character", file([entry(b"a\x1b[2J", 0, b"x")]), "not a valid name"),
    ("D09", "name with a control character", file([], [tensor(b"\x1b[2J")], 128), "name of tensor 0 is not valid"),
    ("D09", "string not UTF-8", file([entry(b"k", 8, string(b"\xff"))]), "not UTF-8"),
    *[("D09", f"alignment {n}", aligned(4, struct.pack("<I", n)), "general.alignment must be a power of two")
      for n in (0, 1, 3, 33, 2**30, 2**31)],
    ("D09", "alignment as text", aligned(8, string(b"32")), "general.alignment must be a power of two"),
    ("D09", "alignment as a list", aligned(9, array(4, 2, bytes(8))), "general.alignment must be a power of two"),
    ("D09", "alignment -32", aligned(5, struct.pack("<i", -32)), "general.alignment must be a power of two"),
    ("D09", "alignment 32.0", aligned(6, struct.pack("<f", 32)), "general.alignment must be a power of two"),
    *[("D14", f"no dequantizer ({name})", file([], [tensor(dims=(256,), type=type)], 512),
       f"type {type} ({name}), which is not supported") for name, type in (("Q8_1", 9), ("Q8_K", 15), ("Q1_0", 41))],
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [pytest.param(*case, id=case[0], marks=pytest.mark.row(row)) for row, *case in CRAFTED],
)
def test_each_crafted_fault_is_refused(tmp_path: Path, attempt: Try, name: str, content: bytes, says: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    attempt("inspect", path, seconds=2, memory=1 << 27).refused("bad.gguf", says)


def test_the_builder_can_build_a_valid_file() -> None:
    good = file([entry(b"k", 9, array(8, 1, string(b"a")))], [tensor(), tensor(b"u", offset=128)], 256)
    assert list(read_header(good, "good").tensors) == ["t", "u"]


# -------------------------------------------------------------------------------------------- a valid file, changed
SMALL = dataclasses.replace(
    tiny.CONFIG, dim=32, n_layers=1, n_heads=2, n_kv_heads=1, hidden_dim=32, vocab_size=8, max_seq_len=64
)
PIECES: dict[str, Any] = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.pre": None,
    "tokenizer.ggml.merges": None,
    "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "\u2581a", "c"],
    "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -1.0, -2.0, -3.0, -0.5, -4.0],
    "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 1],
    "tokenizer.chat_template": "{{ messages[0].content }}",
}


@pytest.fixture(scope="session")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A complete model of 20 kB with a header of 2 kB."""
    return tiny.write_gguf(tmp_path_factory.mktemp("good") / "good.gguf", SMALL, metadata=PIECES).read_bytes()


class Integer(NamedTuple):
    """An integer of the header."""

    what: str
    at: int
    width: int


WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
SHOWN = 3  # items of an array whose integers are changed


def walk(data: bytes) -> tuple[list[Integer], dict[str, tuple[int, int]], int]:
    """The integers of a header; the begin and end of each key's type and value; the end of the header."""
    found, values, at = [], {}, 4

    def number(what: str, width: int, keep: bool = True) -> int:
        nonlocal at
        if keep:
            found.append(Integer(what, at, width))
        at += width
        return int.from_bytes(data[at - width : at], "little")

    def text(what: str, keep: bool = True) -> str:
        nonlocal at
        length = number(f"length of {what}", 8, keep)
        at += length
        return data[at - length : at].decode()

    number("version", 4)
    n_tensors, n_entries = number("tensors", 8), number("entries", 8)
    for i in range(n_entries):
        key = text(f"key {i}")
        start, type = at, number(f"type of {key}", 4)
        item, count = (number(f"item type of {key}", 4), number(f"count of {key}", 8)) if type == 9 else (type, 1)
        for j in range(count):
            if item == 8:
                text(f"{key}[{j}]", j < SHOWN)
            else:
                number(f"{key}[{j}]", WIDTHS[item], j < SHOWN)
        values[key] = start, at
    for i in range(n_tensors):
        name = text(f"name {i}")
        for j in range(number(f"rank of {name}", 4)):
            number(f"size {j} of {name}", 8)
        number(f"type of {name}", 4)
        number(f"offset of {name}", 8)
    return found, values, at


def survey(attempt: Try, tmp_path: Path, changed: Iterator[tuple[str, bytes]], every: int = 1) -> tuple[int, int]:
    """Run one file in `every`. Returns (files that ran, files that were refused)."""
    counts = [0, 0]
    for i, (what, content) in enumerate(changed):
        if i % every == every // 2:
            path = tmp_path / f"{what}.gguf"
            path.write_bytes(content)
            counts[attempt("generate", *RUN, "-m", path).survived() is False] += 1
            path.unlink()
    return counts[0], counts[1]


def changed_integers(data: bytes) -> Iterator[tuple[str, bytes]]:
    for what, at, width in walk(data)[0]:
        for value, content in integers(data, at, width):
            yield f"{what} {value}".replace("/", "_"), content


VALUES = {
    "text": struct.pack("<I", 8) + string(b"x"),
    "no text": struct.pack("<I", 8) + string(b""),
    "control": struct.pack("<I", 8) + string(b"\x1b[2J\n\0"),
    "numbers": struct.pack("<I", 9) + array(4, 3, struct.pack("<3I", 1, 2, 3)),
    "no numbers": struct.pack("<I", 9) + array(4, 0),
    "texts": struct.pack("<I", 9) + array(8, 2, string(b"a") + string(b"b")),
    "no texts": struct.pack("<I", 9) + array(8, 0),
    "NaNs": struct.pack("<I", 9) + array(6, 8, b"\x00\x00\xc0\x7f" * 8),
    "NaN": struct.pack("<If", 6, float("nan")),
    "infinity": struct.pack("<Id", 12, float("inf")),
    "fraction": struct.pack("<If", 6, 1.5),
    "true": struct.pack("<IB", 7, 1),
    "negative": struct.pack("<Iq", 11, -1),
    "2^63": struct.pack("<IQ", 10, 2**63),
}


def changed_values(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Replace each entry by values of other types. The data moves to the next aligned offset."""
    _, values, end = walk(data)
    first = -(-end // 32) * 32
    for key, (start, stop) in values.items():
        for name, value in VALUES.items():
            header = data[:start] + value + data[stop:end]
            yield f"{key} {name}", header + bytes(-len(header) % 32) + data[first:]


@pytest.mark.row("D03")
def test_the_original_file_is_valid(good: bytes, tmp_path: Path, attempt: Try) -> None:
    """The tests of changed files are meaningful only for a valid original. `walk` ends where read_header ends."""
    (tmp_path / "good.gguf").write_bytes(good)
    attempt("generate", *RUN, "-m", tmp_path / "good.gguf").survived()
    found, _, end = walk(good)
    assert len(found) > 100
    assert -(-end // 32) * 32 == min(info.offset for info in read_header(good, "good").tensors.values())


def kinds(data: bytes) -> dict[str, Iterator[tuple[str, bytes]]]:
    end = walk(data)[2]
    return {
        "cuts": cuts(data, end),
        "flips": flips(data, end, every=9),
        "integers": changed_integers(data),
        "values": changed_values(data),
    }


@pytest.mark.parametrize(
    ("kind", "every", "fewest"),
    [
        pytest.param("cuts", 200, 8, marks=pytest.mark.row("D03")),
        pytest.param("flips", 180, 4, marks=pytest.mark.row("D03")),
        pytest.param("integers", 170, 6, marks=pytest.mark.row("D03")),
        pytest.param("values", 28, 6, marks=pytest.mark.row("D10")),
        pytest.param("cuts", 8, 200, marks=[pytest.mark.row("D03"), *SLOW]),
        pytest.param("flips", 8, 100, marks=[pytest.mark.row("D03"), *SLOW]),
        pytest.param("integers", 8, 120, marks=[pytest.mark.row("D03"), *SLOW]),
        pytest.param("values", 1, 200, marks=[pytest.mark.row("D11"), *SLOW]),
    ],
)
def test_a_changed_file_runs_or_is_refused(
    good: bytes, tmp_path: Path, attempt: Try, kind: str, every: int, fewest: int
) -> None:
    ran, refused = survey(attempt, tmp_path, kinds(good)[kind], every)
    assert refused >= fewest, (ran, refused)
    assert ran == 0 or kind != "cuts"


@pytest.mark.slow
@pytest.mark.row("D03")
def test_every_change_of_the_header_loads_or_is_refused(
    good: bytes, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """In this process, since there are thousands. The other tests check time and memory in child processes."""
    path, counts = tmp_path / "x.gguf", [0, 0]
    for kind, changed in kinds(good).items():
        for what, content in changed:
            path.write_bytes(content)
            counts[not loads(path, f"{kind}: {what}")] += 1
    record_property("inputs", sum(counts))
    assert counts[1] > 4000


# ------------------------------------------------------------------------------------------------- architectures
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"general.architecture": "gemma2"}, "architecture is 'gemma2', a model with capped logits; only llama, qwen2"),
        ({"llama.attention.head_count": None}, "llama.attention.head_count is missing"),
        ({"llama.attention.head_count": "2"}, "head_count must be one number, got '2'"),
        ({"llama.attention.head_count": [2, 2]}, "head_count must be one number"),
        ({"llama.attention.head_count_kv": [1]}, "head_count_kv must be one number"),
    ],
    ids=str,
)
@pytest.mark.row("D10")
def test_another_architecture_is_refused(tmp_path: Path, attempt: Try, changes: dict[str, Any], says: str) -> None:
    """The tensors match in every case, so without the check the model would run and generate wrong text."""
    path = tiny.write_gguf(tmp_path / "x.gguf", SMALL, metadata={**PIECES, **changes})
    attempt("generate", *RUN, "-m", path).refused("x.gguf", says)


# -------------------------------------------------------------------------------------------------- vocabularies
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"scores": [0.0] * 7}, "8 tokens but 7 scores"),
        ({"scores": None}, "8 tokens but 0 scores"),
        ({"scores": ["a"] * 8}, "scores"),
        ({"scores": [float("nan")] * 8}, "scores"),
        ({"scores": 5}, "scores"),
        ({"token_type": [1] * 9}, "8 tokens but 9 token types"),
        ({"token_type": ["a"] * 8}, "token_type"),
        ({"token_type": [1.5] * 8}, "token_type"),
        ({"token_type": [float("nan")] * 8}, "token_type"),
        ({"token_type": [99] * 8}, "token_type"),
        ({"token_type": 3}, "token_type"),
        ({"tokens": [1, 2, 3]}, "tokenizer.ggml.tokens must be an array of strings"),
        ({"tokens": None}, "tokenizer.ggml.tokens must be an array of strings, found nothing"),
        ({"tokens": "abc"}, "tokenizer.ggml.tokens must be an array of strings"),
        ({"tokens": ["<unk>", "<s>", "</s>"]}, "3 tokens but 8 token types"),
        ({"bos_token_id": 8}, "bos_token_id is 8, outside the vocabulary of 8 tokens"),
        ({"bos_token_id": None}, "the key tokenizer.ggml.bos_token_id is missing"),
        ({"bos_token_id": "1"}, "bos_token_id is '1'"),
        ({"model": "gpt2"}, "tokenizer.ggml.merges must be an array of strings"),
        ({"model": ["llama"]}, "tokenizer model"),
        ({"model": 5}, "tokenizer model 5 is not supported"),
        ({"model": "gpt2", "merges": ["a b", "c"]}, "merge 1 is 'c'"),
        ({"model": "gpt2", "merges": [], "pre": ["a"]}, "pre-tokenizer"),
        ({"add_bos_token": "no"}, "add_bos_token"),
    ],
    ids=str,
)
@pytest.mark.row("D11")
def test_an_invalid_vocabulary_is_refused(tmp_path: Path, attempt: Try, changes: dict[str, Any], says: str) -> None:
    entries = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    path = tiny.write_gguf(tmp_path / "x.gguf", SMALL, metadata={**PIECES, **entries})
    attempt("generate", *RUN, "-m", path).refused("x.gguf", says)


# ------------------------------------------------------------------------------------------------ RoPE and row order
ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 4096, "rope_theta": 500000.0}  # fmt: skip
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def neighbours(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Interleave the two halves of each head in wq or wk, as converters to GGUF do."""
    rows = weight.unflatten(0, (heads, 2, -1))  # (heads, half, pair, C)
    return torch.stack([rows[:, 0], rows[:, 1]], 2).flatten(0, 2)


def llama3_divisors(head_dim: int) -> torch.Tensor:
    """rope_freqs.weight: the divisor of each frequency by the formula of Meta's apply_scaling, in numpy."""
    base, factor, low, high, length = (
        ROPE[k]
        for k in ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    )
    out = []
    for frequency in np.asarray(base) ** (-np.arange(0, head_dim, 2) / head_dim):
        rotations = length * frequency / (2 * np.pi)
        smooth = np.clip((rotations - low) / (high - low), 0, 1)
        out.append(1 / ((1 - smooth) / factor + smooth))
    return torch.tensor(np.array(out), dtype=torch.float32)


@pytest.mark.row("D12")
def test_rows_and_frequencies_are_those_of_transformers(tmp_path: Path) -> None:
    """Write transformers' weights with the gguf package and compare the logits, also past position 8192."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=320, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16, max_position_embeddings=32768, rms_norm_eps=1e-5,
            rope_parameters=ROPE, tie_word_embeddings=False,
        )
    ).eval()  # fmt: skip
    for name, parameter in model.named_parameters():
        scale = 3 * parameter.shape[-1] ** -0.5 if name.endswith(("q_proj.weight", "k_proj.weight")) else 0.2
        parameter.copy_(scale * torch.randn(parameter.shape) + (1.0 if "norm" in name else 0.0))
    tensors = {"rope_freqs.weight": llama3_divisors(16)}
    for name, value in model.state_dict().items():
        stem = name.removesuffix(".weight")
        if stem in ("model.embed_tokens", "model.norm", "lm_head"):
            target = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}[stem]
        else:
            _, _, layer, part = stem.split(".", 3)
            target = f"blk.{layer}.{NAMES[part]}"
            heads = {"attn_q": 4, "attn_k": 2}.get(NAMES[part])
            value = neighbours(value, heads) if heads else value
        tensors[f"{target}.weight"] = value
    config = dataclasses.replace(tiny.CONFIG, max_seq_len=32768, rope_theta=500000.0)
    path = write(tmp_path / "x.gguf", {**tiny.architecture(config), "llama.feed_forward_length": 64}, tensors)

    tokens = tiny.random_tokens(48, seed=1)
    positions = torch.cat([torch.arange(16), 5000 + torch.arange(16), 9000 + torch.arange(16)])  # far apart
    expected = model(tokens, position_ids=positions[None]).logits
    ours = llama.load_model(path, dtype="float32", device="cpu")
    assert float(expected.std()) > 0.3
    # The tolerance is the error of float32 angles at position 9000.
    assert float((ours(tokens, positions) - expected).abs().max()) < 1e-2


def write(path: Path, entries: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    writer = gguf.GGUFWriter(str(path), "llama")
    for key, value in entries.items():
        if key in tiny.FLOATS:
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for name, value in tensors.items():
        writer.add_tensor(name, value.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# ---------------------------------------------------------------------------------------------------- split files
@pytest.mark.parametrize(
    ("name", "split", "says"),
    [
        ("x-00002-of-00003.gguf", {"no": 1, "count": 3}, "2 are missing: x-00001-of-00003.gguf, x-00003-of-00003.gguf"),
        ("x.gguf", {"no": 1, "count": 3}, "rename it to its original name"),
        ("x-00001-of-00003.gguf", {"no": 1, "count": 3}, "part 1 (from 0) of 3"),
        ("x-00001-of-00002.gguf", {"no": 0, "count": "2"}, "split.count"),
        ("x-00001-of-00002.gguf", {"no": "0", "count": 2}, "split.no"),
        ("x-00001-of-00002.gguf", {"no": 0, "count": [2, 2]}, "split.count"),
        ("x-99999-of-99999.gguf", {"no": 99998, "count": 99999}, "99998 are missing: x-00001-of-99999.gguf"),
        ("x-00001-of-00002.gguf", {"no": 0, "count": 2**31}, "part 0 (from 0) of 2147483648"),
    ],
    ids=str,
)
@pytest.mark.row("D13")
def test_an_incomplete_split_model_is_refused(
    tmp_path: Path, attempt: Try, name: str, split: dict[str, Any], says: str
) -> None:
    metadata = {**PIECES, **{f"split.{key}": value for key, value in split.items()}}
    path = tiny.write_gguf(tmp_path / name, SMALL, metadata=metadata)
    attempt("generate", *RUN, "-m", path).refused(name, says)
