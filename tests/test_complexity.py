"""Every field of variable length of every reader, at n, 2n and 4n: the time is proportional to the length.

A field either is read in linear time or has a limit. A slope is the exponent of the length in the time: 1 is linear, 2
is quadratic. It is measured in processor time, best of several, with n so large that a call takes longer than noise.
"""

from __future__ import annotations

import base64
import contextlib
import gc
import json
import math
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llama.checkpoint import documents, gguf, open_checkpoint
from llama.checkpoint.safetensors_header import read_header
from llama.cli import batch
from llama.errors import LlamaError
from llama.generation.session import Session
from llama.tokenizer import open_tokenizer
from llama.tokenizer.gguf import from_metadata
from llama.tokenizer.huggingface import HuggingFaceTokenizer
from llama.tokenizer.patterns import check_pattern
from llama.tokenizer.sentencepiece import SentencePieceModelTokenizer, write_field
from llama.tokenizer.tiktoken import TiktokenTokenizer
from llama.tools import verify

from . import tiny
from .fuzz import tokenizer as fuzzed
from .scripts import make_tiny

pytestmark = pytest.mark.usefixtures("one_thread")

STEEPEST = 1.3
SHORTEST = 0.010  # seconds of the first measurement; shorter times are noise
LARGEST = 2**21  # the largest n of a first measurement

Make = Callable[[int, Path], Callable[[], object]]  # a length and a folder -> the call to measure

FIELDS: dict[str, Make] = {}


def field(name: str) -> Callable[[Make], Make]:
    def add(make: Make) -> Make:
        FIELDS[name] = make
        return make

    return add


def seconds(call: Callable[[], object], repetitions: int = 3) -> float:
    """Return the least processor time of a call. A refusal counts as reading."""
    best = math.inf
    gc.disable()  # its time depends on all objects of the process
    try:
        for _ in range(repetitions):
            started = time.process_time()
            with contextlib.suppress(LlamaError):
                call()
            best = min(best, time.process_time() - started)
    finally:
        gc.enable()
    return best


def slope(make: Make, folder: Path, attempts: int = 3) -> float:
    """Return the exponent of the length in the time of a call; 0 if it is short even for the largest length.

    The least of several attempts at growing lengths counts, since another process can only lengthen a measurement.
    """
    n, found = 1000, []
    while n <= LARGEST and len(found) < attempts:
        if seconds(make(n, folder), 1) >= SHORTEST:
            m = n
            times = [seconds(make(length, folder)) for length in (m, 2 * m, 4 * m)]
            while times[2] < times[0] / 2:  # a limit of the length lies between: measure below it
                m //= 2
                times = [seconds(make(length, folder)) for length in (m, 2 * m, 4 * m)]
            found.append(math.log2(times[2] / times[0]) / 2)
            if found[-1] <= STEEPEST:
                break
        n *= 2
    return min(found, default=0.0)


# --------------------------------------------------------------------------------------------------------------- GGUF
def raw_gguf(entries: bytes, count: int, tensors: bytes = b"", n_tensors: int = 0) -> bytes:
    """Return a GGUF header with entries that are already encoded, and data for its tensors."""
    head = b"GGUF" + struct.pack("<IQQ", 3, n_tensors, count) + entries + tensors
    return head + bytes(-len(head) % 32) + bytes(32 * n_tensors)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


@field("GGUF: a string")
def _(n: int, folder: Path) -> Callable[[], object]:
    data = raw_gguf(text(b"k") + struct.pack("<I", 8) + text(b"a" * n), 1)
    return lambda: gguf.read_header(data, "f")


@field("GGUF: an array of numbers")
def _(n: int, folder: Path) -> Callable[[], object]:
    data = raw_gguf(text(b"k") + struct.pack("<IIQ", 9, 4, n) + bytes(4 * n), 1)
    return lambda: gguf.read_header(data, "f")


@field("GGUF: an array of strings")
def _(n: int, folder: Path) -> Callable[[], object]:
    data = raw_gguf(text(b"k") + struct.pack("<IIQ", 9, 8, n) + text(b"abc") * n, 1)
    return lambda: gguf.read_header(data, "f")


@field("GGUF: keys")
def _(n: int, folder: Path) -> Callable[[], object]:
    data = raw_gguf(b"".join(text(b"k%d" % i) + struct.pack("<II", 4, i) for i in range(n)), n)
    return lambda: gguf.read_header(data, "f")


@field("GGUF: the length of a key")
def _(n: int, folder: Path) -> Callable[[], object]:
    data = raw_gguf(text(b"k" * n) + struct.pack("<II", 4, 1), 1)
    return lambda: gguf.read_header(data, "f")


@field("GGUF: tensors")
def _(n: int, folder: Path) -> Callable[[], object]:
    infos = b"".join(text(b"t%d" % i) + struct.pack("<IQIQ", 1, 1, 0, 32 * i) for i in range(n))
    data = raw_gguf(b"", 0, infos, n)[: -28 if n else None]
    return lambda: gguf.read_header(data, "f")


def checkpoint(folder: Path, name: str, data: bytes) -> Callable[[], object]:
    (folder / name).write_bytes(data)
    return lambda: open_checkpoint(folder / name)


@field("GGUF: tensors of a checkpoint")
def _(n: int, folder: Path) -> Callable[[], object]:
    keys = b"".join(
        text(b"llama." + key) + struct.pack("<II", 4, 2)
        for key in (b"block_count", b"embedding_length", b"attention.head_count", b"feed_forward_length")
    )
    arch = text(b"general.architecture") + struct.pack("<I", 8) + text(b"llama")
    infos = b"".join(text(b"blk.%d.ffn_up.weight" % i) + struct.pack("<IQIQ", 1, 1, 0, 32 * i) for i in range(n))
    return checkpoint(folder, "model.gguf", raw_gguf(arch + keys, 5, infos, n)[:-28])


def gguf_tokens(tokens: list[str], kind: str = "llama", **more: Any) -> Callable[[], object]:
    base = fuzzed.pieces() if kind == "llama" else tiny.byte_vocabulary()
    count = len(base["tokenizer.ggml.tokens"])
    values = {**base, "tokenizer.ggml.tokens": [*base["tokenizer.ggml.tokens"], *tokens]}
    values["tokenizer.ggml.token_type"] = [*base["tokenizer.ggml.token_type"], *[more.pop("type", 1)] * len(tokens)]
    if kind == "llama":
        values["tokenizer.ggml.scores"] = [-float(i) for i in range(count + len(tokens))]
    return lambda: from_metadata({**values, **more}, "f")


@field("GGUF vocabulary: the length of a token")
def _(n: int, folder: Path) -> Callable[[], object]:
    return gguf_tokens(["t" * n])


@field("GGUF vocabulary: the lengths of nested tokens")
def _(n: int, folder: Path) -> Callable[[], object]:
    return gguf_tokens(["t" * length for length in range(2, math.isqrt(n))])


@field("GGUF vocabulary: pieces")
def _(n: int, folder: Path) -> Callable[[], object]:
    return gguf_tokens([f"the{i}" for i in range(n)])


@field("GGUF vocabulary: user-defined pieces")
def _(n: int, folder: Path) -> Callable[[], object]:
    return gguf_tokens([f"the{i}" for i in range(n)], type=4)


@field("GGUF vocabulary: control tokens")
def _(n: int, folder: Path) -> Callable[[], object]:
    return gguf_tokens([f"<|{i}|>" for i in range(n)], type=3)


@field("GGUF vocabulary: byte-level tokens and merges")
def _(n: int, folder: Path) -> Callable[[], object]:
    tokens = [f"q{i}" for i in range(n)]
    known = tiny.byte_vocabulary()["tokenizer.ggml.merges"]
    return gguf_tokens(
        [*tokens, *(f"{token}x" for token in tokens)], "gpt2",
        **{"tokenizer.ggml.merges": [*known, *(f"{token} x" for token in tokens)]},
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------------- tokenizer.json
def tokenizer_json(change: Callable[[dict[str, Any]], None], unigram: bool = False) -> Callable[[], object]:
    source = json.loads(fuzzed.unigram_json() if unigram else fuzzed.tokenizer_json())
    change(source)
    data = json.dumps(source).encode()
    return lambda: HuggingFaceTokenizer(data, "f")


def added(start: int, contents: list[str], **flags: Any) -> list[dict[str, Any]]:
    return [{"id": start + i, "content": text, **fuzzed.SPECIAL, **flags} for i, text in enumerate(contents)]


@field("tokenizer.json: tokens and merges")
def _(n: int, folder: Path) -> Callable[[], object]:
    def change(source: dict[str, Any]) -> None:
        first = 1 + max(source["model"]["vocab"].values())
        source["model"]["vocab"] |= {f"q{i}": first + i for i in range(n)}
        source["model"]["vocab"] |= {f"q{i}x": first + n + i for i in range(n)}
        source["model"]["merges"] += [f"q{i} x" for i in range(n)]

    return tokenizer_json(change)


@field("tokenizer.json: the length of a token")
def _(n: int, folder: Path) -> Callable[[], object]:
    return tokenizer_json(lambda source: source["model"]["vocab"].update({"q" * n: 9999}))


@field("tokenizer.json: control tokens")
def _(n: int, folder: Path) -> Callable[[], object]:
    return tokenizer_json(lambda source: source["added_tokens"].extend(added(9999, [f"<|{i}|>" for i in range(n)])))


@field("tokenizer.json: plain added tokens")
def _(n: int, folder: Path) -> Callable[[], object]:
    tokens = added(9999, [f"[{i}]" for i in range(n)], special=False)
    return tokenizer_json(lambda source: source["added_tokens"].extend(tokens))


@field("tokenizer.json: normalized added tokens")
def _(n: int, folder: Path) -> Callable[[], object]:
    tokens = added(9999, [f"[{i}]" for i in range(n)], special=False, normalized=True)
    return tokenizer_json(lambda source: source["added_tokens"].extend(tokens), unigram=True)


@field("tokenizer.json: plain and control tokens in turns, in a Unigram model")
def _(n: int, folder: Path) -> Callable[[], object]:
    tokens = added(9999, [f"[{i}]" for i in range(n)])
    for i, token in enumerate(tokens):
        token["special"] = bool(i % 2)
    return tokenizer_json(lambda source: source["added_tokens"].extend(tokens), unigram=True)


@field("tokenizer.json: pieces of a Unigram model")
def _(n: int, folder: Path) -> Callable[[], object]:
    return tokenizer_json(lambda source: source["model"]["vocab"].extend([[f"q{i}", -1.0] for i in range(n)]), True)


@field("tokenizer.json: steps")
def _(n: int, folder: Path) -> Callable[[], object]:
    steps = [{"type": "Strip", "strip_left": False, "strip_right": False}] * n
    return tokenizer_json(lambda source: source.update(normalizer={"type": "Sequence", "normalizers": steps}))


@field("tokenizer.json: a replacement")
def _(n: int, folder: Path) -> Callable[[], object]:
    step = {"type": "Replace", "pattern": {"String": "a" * n}, "content": "b" * n}
    return tokenizer_json(lambda source: source.update(normalizer=step))


@field("tokenizer.json: a table of replacements")
def _(n: int, folder: Path) -> Callable[[], object]:
    blocks = 1 + n // 1024
    table = struct.pack("<I", 1024 * blocks) + bytes(1024 * blocks) + b"ab\0" * n
    step = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(table).decode()}
    return tokenizer_json(lambda source: source.update(normalizer=step))


PATTERNS = {
    "characters": "a", "alternatives": "a|", "groups": "(a)", "optional items": "a?", "classes": "[a-c]",
    "escapes": r"\p{L}", "repetitions": "a{2}", "open groups": "(?:", "open classes": "[", "flags": "(?i:a)",
}  # fmt: skip
for kind, unit in PATTERNS.items():

    @field(f"a pattern: {kind}")
    def _(n: int, folder: Path, unit: str = unit) -> Callable[[], object]:
        return lambda: check_pattern(unit * (n // len(unit)), "f")


# ---------------------------------------------------------------------------------------------------- tokenizer.model
@field("tiktoken: lines")
def _(n: int, folder: Path) -> Callable[[], object]:
    tokens = [bytes([byte]) for byte in range(256)] + [b"%d" % i for i in range(1000, 1000 + n)]
    data = b"\n".join(base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens))
    return lambda: TiktokenTokenizer(data, "f")


@field("tiktoken: the length of a line")
def _(n: int, folder: Path) -> Callable[[], object]:
    lines = make_tiny.tiktoken_model(260).splitlines()
    data = b"\n".join([*lines[:-1], base64.b64encode(b"a" * n) + b" %d" % (len(lines) - 1)])
    return lambda: TiktokenTokenizer(data, "f")


MODEL = make_tiny.sentencepiece_model(340)


def sentencepiece_model(more: bytes) -> Callable[[], object]:
    return lambda: SentencePieceModelTokenizer(MODEL + more, "f")


def piece(name: bytes, type: int = 1) -> bytes:
    return write_field(1, write_field(1, name) + write_field(3, type))


@field("SentencePiece: pieces")
def _(n: int, folder: Path) -> Callable[[], object]:
    return sentencepiece_model(b"".join(piece(b"q%d" % i) for i in range(n)))


@field("SentencePiece: user-defined pieces that look like control tokens")
def _(n: int, folder: Path) -> Callable[[], object]:
    return sentencepiece_model(b"".join(piece(b"<|%d|>" % i, 4) for i in range(n)))


@field("SentencePiece: the length of a piece")
def _(n: int, folder: Path) -> Callable[[], object]:
    return sentencepiece_model(piece(b"q" * n))


@field("SentencePiece: the length of an integer")
def _(n: int, folder: Path) -> Callable[[], object]:
    return sentencepiece_model(b"\x08" + b"\xff" * n + b"\0")


@field("SentencePiece: fields of a piece")
def _(n: int, folder: Path) -> Callable[[], object]:
    return sentencepiece_model(write_field(1, write_field(1, b"<|x|>") + write_field(3, 4) * n))


@field("SentencePiece: a table of replacements")
def _(n: int, folder: Path) -> Callable[[], object]:
    blocks = 1 + n // 1024
    table = struct.pack("<I", 1024 * blocks) + bytes(1024 * blocks) + b"ab\0" * n
    return sentencepiece_model(write_field(3, write_field(2, table)))


# ---------------------------------------------------------------------------------------------------------- documents
DOCUMENTS: dict[str, Callable[[int], str]] = {
    "a string": lambda n: json.dumps({"a": "x" * n}),
    "escapes": lambda n: '{"a": "' + "\\u00e9" * n + '"}',
    "keys": lambda n: json.dumps({f"k{i}": i for i in range(n)}),
    "the length of a key": lambda n: json.dumps({"k" * n: 1}),
    "a list": lambda n: json.dumps({"a": [1] * n}),
    "objects": lambda n: json.dumps({"a": [{"b": 1}] * n}),
    "nesting": lambda n: '{"a":' * n + "1" + "}" * n,
    "nested lists": lambda n: '{"a":' + "[" * n + "]" * n + "}",
    "digits": lambda n: '{"a": ' + "1" * n + "}",
    "digits of a fraction": lambda n: '{"a": 0.' + "1" * n + "}",
    "white space": lambda n: '{"a":' + " \n" * n + "1}",
    "an error after many lines": lambda n: '{"a":' + "\n" * n + "x}",
    "a key twice": lambda n: json.dumps({f"k{i}": i for i in range(n)})[:-1] + ', "k0": 1}',
}
for kind, document in DOCUMENTS.items():

    @field(f"a JSON document: {kind}")
    def _(n: int, folder: Path, document: Callable[[int], str] = document) -> Callable[[], object]:
        data = document(n).encode()
        return lambda: documents.parse_json(data, "f")


def folder_with(folder: Path, files: dict[str, Any]) -> Callable[[], object]:
    inner = folder / "model"
    inner.mkdir(exist_ok=True)
    for old in inner.iterdir():
        old.unlink()
    for name, content in files.items():
        (inner / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return lambda: open_checkpoint(inner)


CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 32,
    "intermediate_size": 64, "rms_norm_eps": 1e-5, "max_position_embeddings": 64,
}  # fmt: skip


@field("params.json: unknown keys")
def _(n: int, folder: Path) -> Callable[[], object]:
    params = {"dim": 64, "n_layers": 1, "n_heads": 2, "vocab_size": 32, **{f"k{i}": 1 for i in range(n)}}
    return folder_with(folder, {"params.json": params, "consolidated.00.pth": b"PK"})


@field("config.json: unknown keys")
def _(n: int, folder: Path) -> Callable[[], object]:
    config = {**CONFIG, **{f"k{i}": 1 for i in range(n)}}
    return folder_with(folder, {"config.json": config, "model.safetensors": struct.pack("<Q", 2) + b"{}"})


@field("index.json: tensors")
def _(n: int, folder: Path) -> Callable[[], object]:
    index = {"weight_map": {f"model.layers.{i}.x": "model-00001.safetensors" for i in range(n)}}
    empty = struct.pack("<Q", 2) + b"{}"
    return folder_with(
        folder, {"config.json": CONFIG, "model.safetensors.index.json": index, "model-00001.safetensors": empty}
    )


def safetensors(folder: Path, head: dict[str, Any], size: int) -> Callable[[], object]:
    raw = json.dumps(head).encode()
    (folder / "f.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(size))
    return lambda: read_header(folder / "f.safetensors")


@field("safetensors: tensors")
def _(n: int, folder: Path) -> Callable[[], object]:
    entries = {f"t{i}": {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]} for i in range(n)}
    return safetensors(folder, entries, n)


@field("safetensors: the length of a name")
def _(n: int, folder: Path) -> Callable[[], object]:
    return safetensors(folder, {"t" * n: {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, 1)


@field("safetensors: metadata")
def _(n: int, folder: Path) -> Callable[[], object]:
    return safetensors(folder, {"__metadata__": {f"k{i}": "v" for i in range(n)}}, 0)


@field("safetensors: dimensions")
def _(n: int, folder: Path) -> Callable[[], object]:
    return safetensors(folder, {"t": {"dtype": "U8", "shape": [1] * n, "data_offsets": [0, 1]}}, 1)


# ------------------------------------------------------------------------------------------ other files of the command
@field("checklist.chk: lines")
def _(n: int, folder: Path) -> Callable[[], object]:
    (folder / "checklist.chk").write_bytes(b"".join(b"%032x  f%d.pth\n" % (i, i) for i in range(n)))
    return lambda: verify.read_checklist(folder / "checklist.chk")


@field("checklist.chk: the length of a line")
def _(n: int, folder: Path) -> Callable[[], object]:
    (folder / "checklist.chk").write_bytes(b"0" * 32 + b" " * n + b"f.pth\n")
    return lambda: verify.read_checklist(folder / "checklist.chk")


def prompt_lines(lines: list[dict[str, Any]]) -> Callable[[], object]:
    import argparse

    args = argparse.Namespace(raw=False, system=None)
    written = [json.dumps(line).encode() for line in lines]
    return lambda: batch.check_lines(args, written, "f")


@field("prompts: lines")
def _(n: int, folder: Path) -> Callable[[], object]:
    return prompt_lines([{"id": i, "prompt": "a"} for i in range(n)])


@field("prompts: the length of a prompt")
def _(n: int, folder: Path) -> Callable[[], object]:
    return prompt_lines([{"prompt": "a" * n}])


@field("prompts: messages")
def _(n: int, folder: Path) -> Callable[[], object]:
    return prompt_lines([{"messages": [{"role": "user", "content": "a"}] * n}])


@field("prompts: stop strings")
def _(n: int, folder: Path) -> Callable[[], object]:
    return prompt_lines([{"prompt": "a", "stop": ["b"] * n}])


@field("a session: its metadata")
def _(n: int, folder: Path) -> Callable[[], object]:
    about = json.dumps({"settings": {}, "messages": [{"role": "user", "content": "a"}] * n})
    metadata = {"clearllama_session": "1", "about": about, "sha256": "0" * 64}
    raw = json.dumps({"__metadata__": metadata}).encode()
    (folder / "s").write_bytes(struct.pack("<Q", len(raw)) + raw)
    model = tiny.model()
    return lambda: Session.load(folder / "s", model)


@field("a tokenizer file of another kind")
def _(n: int, folder: Path) -> Callable[[], object]:
    (folder / "t").write_bytes(b" " * n + b"x")
    return lambda: open_tokenizer(folder / "t")


# The cheap ones run always: those whose defects were found, and one of each kind of reader.
ALWAYS = (
    "GGUF vocabulary: the length of a token", "GGUF vocabulary: the lengths of nested tokens",
    "a pattern: characters", "a pattern: open groups", "SentencePiece: the length of an integer",
    "tiktoken: the length of a line", "a JSON document: digits",
)  # fmt: skip


@pytest.mark.row("E14")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in FIELDS]
)
def test_reading_a_field_takes_linear_time(name: str, tmp_path: Path) -> None:
    assert slope(FIELDS[name], tmp_path) <= STEEPEST


def test_every_always_measured_field_exists() -> None:
    assert set(ALWAYS) <= set(FIELDS)


@pytest.mark.row("E14")
def test_a_quadratic_reader_is_found(tmp_path: Path) -> None:
    def slices(n: int, folder: Path) -> Callable[[], object]:
        data = "a" * n
        return lambda: sum(len(data[at:]) for at in range(n))

    def linear(n: int, folder: Path) -> Callable[[], object]:
        return lambda: sum(value * value for value in range(n))

    assert slope(slices, tmp_path, attempts=1) > STEEPEST
    assert slope(linear, tmp_path) < STEEPEST
