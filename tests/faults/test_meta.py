"""Group A: damaged, hostile and unusual .pth files."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import pickle
import random
import re
import shutil
import socket
import struct
import sys
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

import llama
from llama.attention import reference
from llama.checkpoint import open_checkpoint, torchfile
from llama.engine.cpu_attention import pick_attention
from llama.errors import LlamaError, NumericalError
from llama.generation import session
from llama.tools import convert
from llama.weights import check_tensors

from ..scripts import make_tiny
from .conftest import Try
from .harness import INTEGERS, cuts, flips, integers

pytestmark = pytest.mark.usefixtures("one_thread")

RUN = ("--raw", "a", "-n", "6", "--device", "cpu", "--dtype", "float32", "--temperature", "0")
FILE, PARAMS = "consolidated.00.pth", "params.json"
WQ = "layers.1.attention.wq.weight"
State = dict[str, Any]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny.make(tmp_path_factory.mktemp("original") / "meta", "llama-3-8b")


@pytest.fixture
def meta(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "meta"))


def save(folder: Path, change: Callable[[State], object], **options: Any) -> Path:
    """Change the weights and save them again."""
    state = torch.load(folder / FILE, weights_only=True)
    change(state)
    torch.save(state, folder / FILE, **options)
    return folder


def put(name: str, value: object) -> Callable[[State], None]:
    return lambda state: state.__setitem__(name, value)


def opened(folder: Path) -> llama.checkpoint.Checkpoint:
    checkpoint = open_checkpoint(folder)
    check_tensors(checkpoint)
    return checkpoint


# ---------------------------------------------------------------------------------------------------------- the file
@pytest.mark.row("A01")
def test_an_empty_file_is_refused(meta: Path, attempt: Try) -> None:
    (meta / FILE).write_bytes(b"")
    attempt("generate", *RUN, "-m", meta).refused(FILE, "empty")


@pytest.mark.row("A02")
@pytest.mark.parametrize("keep", [1, 100, 0.5, -10])
def test_a_truncated_file_is_refused(meta: Path, attempt: Try, keep: float) -> None:
    file = meta / FILE
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep) if 0 < keep < 1 else int(keep)])
    error = attempt("generate", *RUN, "-m", meta).refused(FILE)
    assert "weights_only" not in error


@pytest.mark.row("A03")
def test_a_flipped_bit_in_a_weight_is_found_by_verify(meta: Path, attempt: Try) -> None:
    """By the archive's CRC-32 and by the md5 in checklist.chk. A run checks neither and must not claim that it did."""
    data = bytearray((meta / FILE).read_bytes())
    with zipfile.ZipFile(meta / FILE) as archive:
        record = max(archive.infolist(), key=lambda item: item.file_size)
    data[record.header_offset + record.file_size // 2] ^= 1
    (meta / FILE).write_bytes(data)
    ran = attempt("generate", *RUN, "-m", meta)
    assert ran.survived()
    assert not re.search("verif|intact|checksum", ran.error)
    found = attempt("verify", meta)
    assert found.code == 1
    lines = [line for line in found.stdout.decode().splitlines() if line.startswith("FAIL")]
    assert [line.split()[1:3] for line in lines] == [["md5", f"{FILE}:"], ["crc", f"{FILE}:"]]
    assert f" {record.filename.partition('/')[2]};" in lines[1]


class Payload:
    """A hostile pickle: it runs code when it is read, with the environment of the reading process."""

    def __init__(self, call: Callable[..., object], *args: object):
        self.call, self.args = call, args

    def __reduce__(self) -> tuple[object, ...]:
        return self.call, self.args


PAYLOADS = {
    "system": Payload(os.system, 'touch "$CANARY"'),
    "exec": Payload(exec, "import os; open(os.environ['CANARY'], 'w').close()"),
    "eval in a list": [Payload(eval, "open(__import__('os').environ['CANARY'], 'w')")],
}


@pytest.mark.row("A05")
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("payload", PAYLOADS)
def test_code_in_a_file_is_named_and_not_run(meta: Path, attempt: Try, payload: str, zipped: bool) -> None:
    save(meta, put("norm.weight", PAYLOADS[payload]), _use_new_zipfile_serialization=zipped)
    function = {"system": "system", "exec": "exec", "eval in a list": "eval"}[payload]
    error = attempt("generate", *RUN, "-m", meta).refused(
        FILE, function, "could run code", "get a file with only the weights"
    )
    assert "weights_only" not in error


# What was saved instead of the weights -> how the message describes it
OTHER_FORMATS: dict[str, tuple[Callable[[Path], object], tuple[str, ...], str]] = {
    "pickle": (lambda f: f.write_bytes(pickle.dumps({"a": 1})), ("a Python pickle", "refused"), "A06"),
    "old pickle": (lambda f: f.write_bytes(pickle.dumps({"a": 1}, 0)), ("not a torch file",), "A06"),
    "module": (lambda f: torch.save(torch.nn.Linear(2, 2), f), ("objects other than tensors", "Linear"), "A06"),
    "page": (lambda f: f.write_text("<!DOCTYPE html><p>403"), ("web page", "download it again"), "A07"),
    "pointer": (lambda f: f.write_text("version https://git-lfs.github.com/spec/v1\n"), ("git lfs pull",), "A07"),
    "answer": (lambda f: f.write_text('{"error": "no such file"}'), ("JSON", "download it again"), "A07"),
    "safetensors": (lambda f: save_file({"a": torch.ones(2)}, f), ("a safetensors file", "config.json"), "A07"),
    "gguf": (lambda f: f.write_bytes(b"GGUF\x03\0\0\0" + bytes(99)), ("a GGUF file", "end in .gguf"), "A07"),
    "gzip": (lambda f: f.write_bytes(b"\x1f\x8b\x08" + bytes(99)), ("gzip", "unpack"), "A07"),
    "zip": (lambda f: zipfile.ZipFile(f, "w").writestr("a", "b"), ("zip archive", "not written by torch"), "A07"),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.row("A06") if row == "A06" else pytest.mark.row("A07"))
        for name, (_, _, row) in OTHER_FORMATS.items()
    ],
)
def test_a_file_of_another_format_is_named(meta: Path, attempt: Try, name: str) -> None:
    make, words, _ = OTHER_FORMATS[name]
    make(meta / FILE)
    assert "weights_only" not in attempt("generate", *RUN, "-m", meta).refused(FILE, *words)


@pytest.mark.row("A08")
def test_a_legacy_file_generates_the_same_text(meta: Path, attempt: Try) -> None:
    expected = attempt("generate", *RUN, "-m", meta)
    assert expected.survived()
    save(meta, lambda state: None, _use_new_zipfile_serialization=False)
    assert not zipfile.is_zipfile(meta / FILE)
    assert attempt("generate", *RUN, "-m", meta).stdout == expected.stdout != b""


@pytest.mark.row("A09")
@pytest.mark.parametrize("name", [WQ, "norm.weight", "tok_embeddings.weight"])
def test_a_tensor_with_zero_strides_allocates_nothing(meta: Path, attempt: Try, name: str) -> None:
    shape = (2**40,) if name == "norm.weight" else (2**20, 2**20)
    save(meta, put(name, torch.zeros(1).expand(shape)))
    attempt("generate", *RUN, "-m", meta).refused(FILE, name, str(2**40 if name == "norm.weight" else 2**20), "forged")


NOT_PLAIN: dict[str, tuple[Callable[[State], object], tuple[str, ...]]] = {
    "in a dict": (lambda s: {"model": s}, ("model", "dict", "file with only the weights")),
    "a list": (lambda s: list(s.values()), ("a list", "mapping of names")),
    "numbers": (lambda s: dict(enumerate(s.values())), ("key is 0", "expected names")),
    "none": (lambda s: {}, ("tok_embeddings.weight is missing",)),
    "no text": (lambda s: {**s, "\x1b[2Jx": s[WQ]}, ("expected names",)),
    "meta": (lambda s: {**s, WQ: s[WQ].to("meta")}, (WQ, "without values", "expected a dense tensor")),
    "sparse": (lambda s: {**s, WQ: s[WQ].float().to_sparse()}, (WQ, "sparse", "expected a dense tensor")),
    "rows": (lambda s: {**s, WQ: s[WQ].float().to_sparse_csr()}, (WQ, "sparse", "expected a dense tensor")),
    "nested": (lambda s: {**s, WQ: torch.nested.nested_tensor([s[WQ][0]])}, (WQ, "nested", "expected a dense")),
    "quantized": (
        lambda s: {**s, WQ: torch.quantize_per_tensor(s[WQ].float(), 0.1, 0, torch.qint8)},
        (WQ, "quantized"),
    ),
}


@pytest.mark.row("A10")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NOT_PLAIN)
def test_anything_but_named_dense_tensors_is_refused(meta: Path, attempt: Try, name: str) -> None:
    make, words = NOT_PLAIN[name]
    torch.save(make(torch.load(meta / FILE, weights_only=True)), meta / FILE)
    attempt("generate", *RUN, "-m", meta).refused(FILE, *words)


# ------------------------------------------------------------------------------------------- the pickle as a program
def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def tensor_of(
    metadata: bytes = b"", place: str = "cpu", strides: bytes = b"K\x01\x85", offset: bytes = b"K\x00"
) -> bytes:
    """A pickle of one tensor of 2 values by torch's rules, with further arguments."""
    reference = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text(place) + b"K\x02tQ"
    arguments = offset + b"K\x02\x85" + strides + b"\x89ccollections\nOrderedDict\n)R" + metadata
    return text("a") + b"ctorch._utils\n_rebuild_tensor_v2\n(" + reference + arguments + b"tRs."


# Pickles that torch's reader without code accepts or crashes on -> what the error says
PROGRAMS: dict[str, tuple[bytes, str]] = {
    "a tuple nested a million deep as a key": (b")" + b"\x85" * 1_000_000 + b"K\x01s.", "operations"),
    "a tuple nested deep as a key": (b")" + b"\x85" * 60_000 + b"K\x01s.", "key is a tuple"),
    "a tuple nested deep as a shape": (tensor_of(strides=b")" + b"\x85" * 60_000), "damaged"),
    "a tuple that doubles": (b")q\x00" + b"h\x00\x86q\x00" * 20_000 + b"K\x01s.", "key is a tuple"),
    "4 GB of bytes": (text("a") + b"c__builtin__\nbytearray\n\x8a\x05" + (4 * 10**9).to_bytes(5, "little") + b"\x85Rs.",
                      "(it imports __builtin__.bytearray), which could run code"),
    "a slow codec": (text("a") + b"c_codecs\nencode\n" + text("".join(map(chr, range(0x4E00, 0x9000))) * 3)
                     + text("punycode") + b"\x86Rs.", "(it imports _codecs.encode), which could run code"),
    "a position of the memo": (b"r\xff\xff\xff\xff" + text("a") + b"K\x01s.", "damaged"),
    "numbers that collide as keys": (b"(" + b"".join(b"\x8a\x0a" + (i * (2**61 - 1)).to_bytes(10, "little") + b"N"
                                                     for i in range(20_000)) + b"u.", "names of tensors"),
    "a number of 8 megabytes": (b"\x8b" + struct.pack("<i", 8_000_000) + bytes(8_000_000) + b".", "LONG4"),
    "digits": (b"L" + b"9" * 8_000_000 + b"L\n.", "damaged"),
    "a fraction of many digits": (b"F" + b"9" * 8_000_000 + b"\n.", "FLOAT"),
    "a text beyond the end": (b"\x8d" + b"\xff" * 8 + b".", "damaged"),
    "a pickle of 9 megabytes": (text("a" * 9_000_000) + b"K\x01s.", "its pickle has 9,0"),
    "a list in itself": (b"0]q\x00h\x00a.", "operation POP"),
    "an endless shape": (tensor_of(strides=b"(" + b"K\x01" * 1000 + b"t"), "damaged"),
    "a negative offset": (tensor_of(offset=b"J\xff\xff\xff\xff"), "damaged"),
    "a stride beyond the storage": (tensor_of(strides=b"K\x02\x85"), "its storage has 8 bytes"),
    "hooks": (tensor_of().replace(b"OrderedDict\n)R", b"OrderedDict\n)R" + text("h") + b"Ns"), "damaged"),
    "two tensors of one name": (tensor_of()[:-1] + tensor_of(), "two entries named 'a'"),
    "other operations of pickles": (b"ctorch\nFloatStorage\n)\x81.", "the operation NEWOBJ"),
    "a class that is called": (text("a") + b"ctorch\nFloatStorage\n)Rs.", "damaged"),
    "no end": (text("a"), "ends early"),
    "an empty stack": (b"0" * 9, "damaged"),
}  # fmt: skip


Records = list[tuple[zipfile.ZipInfo, bytes]]


def write(path: Path, records: Records) -> None:
    """Write an archive by Python's zipfile, with each record aligned as torch does."""
    with open(path, "wb") as file, zipfile.ZipFile(file, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of duplicate names
        for item, data in records:
            pad = -(file.tell() + 34 + len(item.filename)) % 64
            item.extra = struct.pack("<2H", 0x4246, pad) + bytes(pad)
            archive.writestr(item, data)


def archive_of(path: Path, content: bytes) -> None:
    names = {"data/0": bytes(8), "data.pkl": b"\x80\x02}" + content, "version": b"3\n"}
    write(path, [(zipfile.ZipInfo(f"x/{name}"), data) for name, data in names.items()])


@pytest.mark.row("A25")
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_pickle_is_not_run_as_a_program(meta: Path, attempt: Try, name: str) -> None:
    """Ten seconds and 500 MB. tests/fuzz/torchfile.py limits the processor time of such cases to two seconds."""
    archive_of(meta / FILE, PROGRAMS[name][0])
    attempt("inspect", meta, memory=500 << 20).refused(FILE, PROGRAMS[name][1])


def test_the_pickle_of_these_cases_is_valid_without_the_fault(tmp_path: Path) -> None:
    archive_of(tmp_path / "a.pth", tensor_of(metadata=b"}", place="cuda:7"))
    assert {name: value.tolist() for name, value in torchfile.read_torch(tmp_path / "a.pth").items()} == {"a": [0, 0]}


@pytest.mark.row("A27")
@pytest.mark.parametrize("bit", ["neg", "conj"])
def test_a_tensor_with_the_negative_bit_is_refused(meta: Path, attempt: Try, bit: str) -> None:
    views = {"neg": lambda t: torch._neg_view(t), "conj": lambda t: torch.complex(t.float(), t.float()).conj()}
    save(meta, lambda state: put("norm.weight", views[bit](state["norm.weight"]))(state))
    attempt("inspect", meta).refused(FILE, "the negative or the conjugate", "resolve_neg")
    assert b"FAIL  open" in attempt("verify", "--tensors", meta).stdout


# --------------------------------------------------------------------------------------------------- the archive
def rewrite(path: Path, change: Callable[[Records], object]) -> None:
    """Change the records of an archive and write them again by Python's zipfile."""
    with zipfile.ZipFile(path) as archive:
        records = [(zipfile.ZipInfo(item.filename), archive.read(item)) for item in archive.infolist()]
    change(records)
    write(path, records)


def first_weight(records: Records) -> int:
    return next(i for i, (item, _) in enumerate(records) if item.filename.endswith("/data/0"))


def resized(change: int) -> Callable[[Records], object]:
    def resize(records: Records) -> None:
        item, data = records[i := first_weight(records)]
        records[i] = item, data[:change] if change < 0 else data + bytes(change)

    return resize


def set_fields(item: zipfile.ZipInfo, fields: dict[str, int]) -> None:
    for name, value in fields.items():
        setattr(item, name, value)


def marked(**fields: int) -> Callable[[Records], object]:
    return lambda records: set_fields(records[first_weight(records)][0], fields)


def renamed(old: str, new: str) -> Callable[[Records], object]:
    def rename(records: Records) -> None:
        for item, _ in records:
            item.filename = item.filename.replace(old, new)

    return rename


def added(name: str, data: bytes = b"") -> Callable[[Records], object]:
    return lambda records: records.append((zipfile.ZipInfo(f"x/{name}"), data))


CHANGES: dict[str, tuple[Callable[[Records], object], str]] = {
    "short": (resized(-64), "'data/0' has 98,240 bytes, expected 98,304"),
    "long": (resized(2), "'data/0' has 98,306 bytes"),
    "empty": (resized(-98_304), "'data/0' has 0 bytes"),
    "missing": (lambda records: records.pop(first_weight(records)), "'data/0' is missing"),
    "twice": (lambda records: records.append(records[first_weight(records)]), "is present twice"),
    "link": (marked(create_system=3, external_attr=0o120777 << 16), "a link"),
    "device": (marked(create_system=3, external_attr=0o060777 << 16), "a link, a folder or a device"),
    "compressed": (marked(compress_type=zipfile.ZIP_DEFLATED), "compressed"),
    "later format": (marked(extract_version=150), "a wrong entry"),
    "stranger": (added("data/x", b"1"), "'data/x', which belongs to no tensor"),
    "program": (added("code/__torch__.py"), "'code/__torch__.py', which belongs to no tensor"),
    "folder": (added("data/"), "a link, a folder or a device"),
    "two folders": (renamed("/data/0", "/../x/data/0"), "belongs to no tensor"),
    "no folder": (renamed("x/", ""), "not written by torch"),
    "big-endian": (added("byteorder", b"big"), "big-endian"),
    "no pickle": (renamed("data.pkl", "data.p"), "without tensors"),
}


@pytest.mark.row("A26")
@pytest.mark.parametrize("name", CHANGES)
def test_an_archive_that_torch_would_not_write_is_refused(meta: Path, name: str) -> None:
    change, words = CHANGES[name]

    def both(records: Records) -> None:
        renamed("consolidated.00/", "x/")(records)
        records[:] = [one for one in records if one[0].filename != "x/byteorder"]
        change(records)

    rewrite(meta / FILE, lambda records: None)
    opened(meta)  # an archive of another writer is accepted if it has the same records
    rewrite(meta / FILE, both)
    with pytest.raises(LlamaError, match=re.escape(words)) as caught:
        opened(meta)
    assert FILE in str(caught.value)


HEADERS: dict[str, tuple[int, bytes]] = {
    "another name": (30, b"y"), "encrypted": (6, b"\x01"), "compressed": (8, b"\x08"), "another size": (18, b"\x01"),
    "another checksum": (14, b"\x01"), "no signature": (0, b"Q"),
}  # fmt: skip


@pytest.mark.row("A26")
@pytest.mark.parametrize("name", HEADERS)
def test_a_record_must_be_described_alike_in_both_places(meta: Path, name: str) -> None:
    with zipfile.ZipFile(meta / FILE) as archive:
        at = archive.infolist()[-1].header_offset + HEADERS[name][0]
    data = bytearray((meta / FILE).read_bytes())
    data[at : at + 1] = HEADERS[name][1]
    (meta / FILE).write_bytes(data)
    with pytest.raises(LlamaError, match="does not match the records"):
        opened(meta)


@pytest.mark.row("A26")
def test_records_that_share_bytes_are_refused(meta: Path) -> None:
    """A record inside another one: its header is the other's content. Python's zipfile reads both."""
    file = meta / "inner.pth"
    inner = struct.pack("<4s5H3I2H", b"PK\x03\x04", 20, 0, 0, 0, 33, zlib.crc32(b"12345678"), 8, 8, 8, 0) + b"x/data/1"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(zipfile.ZipInfo("x/data/0"), inner + b"12345678")
        archive.writestr(zipfile.ZipInfo("x/data/1"), b"12345678")
        outer = archive.infolist()[0]
    data = bytearray(file.read_bytes())
    struct.pack_into("<I", data, data.rindex(b"x/data/1") - 4, outer.header_offset + 30 + len("x/data/0"))
    file.write_bytes(data)
    with zipfile.ZipFile(file) as archive:
        assert archive.read("x/data/1") == b"12345678"
    with pytest.raises(LlamaError, match="records overlap"):
        torchfile.records(file)


@pytest.mark.row("A25")
def test_a_table_of_contents_beyond_that_of_any_model_is_not_read(tmp_path: Path) -> None:
    write(tmp_path / "a.pth", [(zipfile.ZipInfo("x/data/0"), b"")])
    data = bytearray((tmp_path / "a.pth").read_bytes())
    struct.pack_into("<2H", data, len(data) - 14, 40_000, 40_000)
    (tmp_path / "a.pth").write_bytes(data)
    with pytest.raises(LlamaError, match="lists 40,000 records"):
        torchfile.records(tmp_path / "a.pth")


# ------------------------------------------------------------------------------------------------------- the tensors
def names(folder: Path) -> list[str]:
    return list(torch.load(folder / FILE, weights_only=True))


@pytest.mark.row("A14")
def test_each_missing_tensor_is_named(original: Path, tmp_path: Path) -> None:
    state = torch.load(original / FILE, weights_only=True)
    shutil.copy(original / PARAMS, tmp_path)
    for name in state:
        torch.save({n: t for n, t in state.items() if n != name}, tmp_path / FILE)
        with pytest.raises(LlamaError, match=rf"{re.escape(name)}.*missing|missing.*{re.escape(name)}"):
            opened(tmp_path)


@pytest.mark.row("A14")
def test_a_missing_tensor_stops_the_run(meta: Path, attempt: Try) -> None:
    save(meta, lambda state: (state.pop(WQ), state.pop("layers.1.feed_forward.w2.weight")))
    attempt("generate", *RUN, "-m", meta).refused("2 tensors are missing", WQ, "feed_forward.w2")


@pytest.mark.row("A15")
@pytest.mark.parametrize("name", ["layers.1.bonus.weight", "lm_head.weight", "layers.2.attention.wq.weight", "x", ""])
def test_an_unexpected_tensor_is_named(meta: Path, attempt: Try, name: str) -> None:
    save(meta, put(name, torch.ones(64, 64).bfloat16()))
    words = ("2 layers", "tensors of 3") if "layers.2" in name else (name, "not part of a LLaMA")
    attempt("generate", *RUN, "-m", meta).refused(*words)


@pytest.mark.row("A15")
@pytest.mark.parametrize("name", ["rope.freqs", "layers.0.attention.inner_attention.rope.freqs"])
def test_stored_rope_tables_have_no_effect(meta: Path, name: str) -> None:
    tokens = torch.arange(20)[None]
    expected = llama.load_model(meta, dtype="float32", device="cpu")(tokens)
    save(meta, put(name, torch.full((8,), 3.0)))
    assert torch.equal(llama.load_model(meta, dtype="float32", device="cpu")(tokens), expected)


@pytest.mark.row("A16")
def test_each_tensor_of_a_wrong_shape_is_refused(original: Path, tmp_path: Path) -> None:
    state = torch.load(original / FILE, weights_only=True)
    shutil.copy(original / PARAMS, tmp_path)
    tried = 0
    for name, tensor in state.items():
        shapes = {tensor[:-1].shape, tensor.flatten().shape, tensor[None].shape, tensor[:0].shape}
        for shape in sorted(shapes - {tensor.shape}):
            torch.save({**state, name: torch.ones(shape).bfloat16()}, tmp_path / FILE)
            with pytest.raises(LlamaError, match=str(tmp_path)):
                opened(tmp_path)
            tried += 1
    assert tried > 3 * 18


@pytest.mark.row("A16")
def test_both_shapes_of_a_mismatch_are_reported(meta: Path, attempt: Try) -> None:
    save(meta, put("layers.1.feed_forward.w2.weight", torch.ones(224, 64).bfloat16()))
    attempt("generate", *RUN, "-m", meta).refused("layers.1.feed_forward.w2", "(224, 64)", "(64, 224)")


def transformers_model(folder: Path) -> LlamaForCausalLM:
    """transformers' model of a folder in Meta's format. Names and row orders are converted here, independently."""
    state, params = torch.load(folder / FILE, weights_only=True), json.loads((folder / PARAMS).read_text())
    heads, kv, dim = params["n_heads"], params["n_kv_heads"], params["dim"]
    config = LlamaConfig(
        hidden_size=dim, num_hidden_layers=params["n_layers"], num_attention_heads=heads, num_key_value_heads=kv,
        intermediate_size=len(state["layers.0.feed_forward.w1.weight"]), vocab_size=params["vocab_size"],
        rms_norm_eps=params["norm_eps"], max_position_embeddings=8192, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": params["rope_theta"]},
    )  # fmt: skip

    def halves(weight: torch.Tensor, count: int) -> torch.Tensor:  # rows 0, 2, ... of a head, then rows 1, 3, ...
        rows = weight.reshape(count, dim // heads, dim)
        return torch.cat([rows[:, 0::2], rows[:, 1::2]], 1).reshape(-1, dim)

    theirs = {"model.embed_tokens.weight": state["tok_embeddings.weight"], "model.norm.weight": state["norm.weight"],
              "lm_head.weight": state["output.weight"]}  # fmt: skip
    for i in range(params["n_layers"]):
        ours, out = f"layers.{i}.", f"model.layers.{i}."
        theirs[f"{out}self_attn.q_proj.weight"] = halves(state[f"{ours}attention.wq.weight"], heads)
        theirs[f"{out}self_attn.k_proj.weight"] = halves(state[f"{ours}attention.wk.weight"], kv)
        for a, b in (("attention.wv", "self_attn.v_proj"), ("attention.wo", "self_attn.o_proj"),
                     ("feed_forward.w1", "mlp.gate_proj"), ("feed_forward.w2", "mlp.down_proj"),
                     ("feed_forward.w3", "mlp.up_proj"), ("attention_norm", "input_layernorm"),
                     ("ffn_norm", "post_attention_layernorm")):  # fmt: skip
            theirs[f"{out}{b}.weight"] = state[f"{ours}{a}.weight"]
    model = LlamaForCausalLM(config).eval()
    model.load_state_dict({name: tensor.float() for name, tensor in theirs.items()})
    return model


@pytest.mark.row("A16")
def test_no_square_matrix_is_transposed(original: Path) -> None:
    """The shape can't reveal a transposed square matrix, so the logits are compared with those of transformers."""
    tokens = torch.randint(768, (1, 60), generator=torch.Generator().manual_seed(0))
    expected = transformers_model(original)(tokens).logits
    ours = llama.load_model(original, dtype="float32", device="cpu")
    assert ours.config.dim == ours.config.n_heads * ours.config.head_dim  # so wq and wo are square
    assert float(expected.std()) > 0.3
    assert float((ours(tokens) - expected).abs().max()) < 2e-4


DTYPES = (torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64,
          torch.float8_e5m2, torch.float8_e4m3fn)  # fmt: skip


@pytest.mark.row("A17")
@pytest.mark.parametrize("name", [WQ, "norm.weight", "output.weight"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_of_another_dtype_are_refused(meta: Path, name: str, dtype: torch.dtype) -> None:
    save(meta, lambda state: put(name, state[name].float().to(dtype))(state))
    words = "float8 and their scales are missing" if "e4m3" in str(dtype) else f"{name} is stored as {dtype}"
    with pytest.raises(LlamaError, match=re.escape(words.replace("torch.", ""))):
        llama.load_model(meta, dtype="float32", device="cpu")


@pytest.mark.row("A17")
def test_an_integer_weight_stops_the_run(meta: Path, attempt: Try) -> None:
    save(meta, lambda state: put(WQ, (100 * state[WQ].float()).to(torch.int8))(state))
    attempt("generate", *RUN, "-m", meta).refused(FILE, WQ, "int8", "expected one of float32, bfloat16, float16")


@pytest.mark.row("A18")
@pytest.mark.parametrize("name", [WQ, "norm.weight", "tok_embeddings.weight", "layers.0.feed_forward.w2.weight"])
def test_a_value_beyond_float16_does_not_become_infinity(meta: Path, attempt: Try, name: str) -> None:
    save(meta, lambda state: state[name].view(-1)[5].fill_(1e5))
    run = [*RUN[:-3], "float16", *RUN[-2:]]
    attempt("generate", *run, "-m", meta).refused(name.removesuffix(".weight"), "65504", "bfloat16", "--dtype")
    assert llama.load_model(meta, dtype="bfloat16", device="cpu") is not None


# ------------------------------------------------------------------------------------------------ values not finite
def finite_after(folder: Path, dtype: str, **options: Any) -> list[int]:
    llm = llama.load(folder, device="cpu", dtype=dtype, **options)
    return list(llm.generate("a b", max_new_tokens=4).tokens)


MATRICES = ["tok_embeddings", "layers.0.attention.wq", "layers.1.attention.wk", "layers.1.attention.wv",
            "layers.0.attention.wo", "layers.1.feed_forward.w1", "layers.0.feed_forward.w2", "layers.1.ffn_norm",
            "layers.0.attention_norm", "norm", "output"]  # fmt: skip


@pytest.mark.row("A19")
@pytest.mark.parametrize("name", MATRICES)
def test_a_nan_in_any_weight_stops_the_first_step(meta: Path, name: str) -> None:
    """One NaN in any weight reaches the logits with every kernel. Attention must not treat it as a masked position."""
    where = (97, 3) if name == "tok_embeddings" else (3,) if "norm" in name else (3, 3)  # 97: the letter a
    save(meta, lambda state: state[f"{name}.weight"].__setitem__(where, torch.nan))
    for dtype, options in itertools.product(("float32", "bfloat16"), ({}, {"kv_cache": "int8"})):
        with pytest.raises(NumericalError, match="not finite"):
            finite_after(meta, dtype, **options)


@pytest.mark.row("A19")
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_weight_that_is_not_finite_is_named(meta: Path, attempt: Try, value: str) -> None:
    save(meta, lambda state: state[WQ].fill_(float(value)))
    attempt("generate", *RUN, "-m", meta).refused("logits", "not finite", "layers.1.attention.wq.weight holds")
    found = attempt("verify", meta, "--tensors")
    assert found.code == 1
    assert b"FAIL  tensors   layers.1.attention.wq.weight: has" in found.stdout


@pytest.mark.row("A19")
@pytest.mark.parametrize("plain", [True, False], ids=["torch", "kernel"])
@pytest.mark.parametrize("which", ["q", "k"])
def test_attention_propagates_nan(plain: bool, which: str) -> None:
    """Where the reference attention is NaN, the fused kernels are NaN too, at every length."""
    attend = pick_attention(torch.device("cpu"), plain)
    generator = torch.Generator().manual_seed(0)
    for T, S in ((1, 1), (1, 2), (1, 9), (1, 17), (1, 31), (1, 32), (1, 33), (1, 300), (2, 2), (5, 30), (16, 16)):
        for part in ("first", "all"):
            q, k, v = (torch.randn(2, n, m, 16, generator=generator) for n, m in ((4, T), (2, S), (2, S)))
            broken = q if which == "q" else k
            broken[1, 0, 0 if part == "first" else slice(None), 3] = torch.nan
            mask = None if T == 1 else torch.arange(S)[None] <= torch.arange(S - T, S)[:, None]
            expected, found = reference(q, k, v, mask), attend(q, k, v, mask)
            assert bool(found[expected.isnan()].isnan().all()), (T, S, part)
            assert bool(found[0].isfinite().all()), "the other row of the batch stays finite"


@pytest.mark.row("A20")
@pytest.mark.parametrize("like", ["llama-3-8b", "llama-3.2-1b"])
def test_a_missing_output_matrix_does_not_mean_a_tied_model(tmp_path: Path, attempt: Try, like: str) -> None:
    folder = make_tiny.make(tmp_path / "meta", like)
    save(folder, lambda state: state.pop("output.weight"))
    attempt("generate", *RUN, "-m", folder).refused("output.weight is missing", "1B and 3B")


@pytest.mark.row("A20")
def test_llama_3_2_may_lack_an_output_matrix(tmp_path: Path) -> None:
    """The only case in which the size implies tied embeddings."""
    config = dataclasses.replace(
        make_tiny.tiny_config("llama-3.2-1b"), dim=2048, n_layers=16, n_heads=32, n_kv_heads=8, head_dim=64,
        hidden_dim=16, vocab_size=32,
    )  # fmt: skip
    state = make_tiny.weights(dataclasses.replace(config, n_layers=1))
    for i, (name, tensor) in itertools.product(range(1, 16), list(state.items())):
        if name.startswith("layers.0."):
            state[name.replace("layers.0.", f"layers.{i}.")] = tensor
    del state["output.weight"]
    torch.save(state, tmp_path / FILE)
    params = {**make_tiny.params("llama-3.2-1b", config, 1)}
    del params["multiple_of"], params["ffn_dim_multiplier"]
    (tmp_path / PARAMS).write_text(json.dumps(params))
    assert opened(tmp_path).config.tie_embeddings


# -------------------------------------------------------------------------------------------- the file and its path
@pytest.mark.row("A21")
def test_replacing_a_checkpoint_does_not_change_its_mapped_weights(original: Path, tmp_path: Path) -> None:
    """Truncating a mapped file ends the process with SIGBUS, so no writer of this package may do that."""
    other = make_tiny.make(tmp_path / "other", "llama-3-8b", seed=1)
    target = tmp_path / "target"
    convert.convert(original, target, "hf")
    mapped = open_checkpoint(target)
    expected = {name: open_checkpoint(original).tensor(name).clone() for name in mapped.shapes}
    convert.convert(other, target, "hf", force=True)
    assert all(torch.equal(mapped.tensor(name), tensor) for name, tensor in expected.items())
    assert not torch.equal(open_checkpoint(target).tensor("norm.weight"), expected["norm.weight"])


def replace_by(kind: str, path: Path) -> None:
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with contextlib.chdir(path.parent), contextlib.closing(socket.socket(socket.AF_UNIX)) as server:
            server.bind(path.name)  # a relative path, since socket paths are limited to about 100 bytes
    else:
        path.symlink_to({"device": "/dev/zero", "null": "/dev/null", "loop": path.name, "nowhere": "gone"}[kind])


@pytest.mark.row("A22")
@pytest.mark.parametrize("kind", ["pipe", "folder", "socket", "device", "null", "loop", "nowhere"])
@pytest.mark.parametrize("name", [FILE, PARAMS])
def test_a_file_that_is_not_regular_is_refused(meta: Path, attempt: Try, name: str, kind: str) -> None:
    replace_by(kind, meta / name)
    expected = {"null": "device", "loop": "symbolic links", "nowhere": "No such file"}.get(kind, kind)
    attempt("generate", *RUN, "-m", meta).refused(name, expected)


@pytest.mark.row("A22")
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_verify_does_not_wait_for_a_pipe(meta: Path, attempt: Try, kind: str) -> None:
    for name in (FILE, PARAMS, "checklist.chk", "tokenizer.model"):
        replace_by(kind, meta / name)
    assert attempt("verify", meta).code == 1


@pytest.mark.row("A22")
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_model_path_that_is_not_regular_is_refused(tmp_path: Path, attempt: Try, kind: str) -> None:
    (tmp_path / "model").touch()
    replace_by(kind, tmp_path / "model")
    attempt("generate", *RUN, "-m", tmp_path / "model").refused("model", "neither a regular file nor a folder")


# A path, and how an error message displays it
PATHS = {
    "spaces": ("two words, and ' \" quotes", None),
    "letters": ("模型 modèle 😀", None),
    "bytes": (os.fsdecode(b"\xff\xfe model"), "\\udcff\\udcfe model"),
    "long": ("m" * 255, None),
    "control": ("a\nb\x1b[2J", "a b\\x1b[2J"),
}


@pytest.mark.row("A23")
@pytest.mark.parametrize("name", PATHS)
def test_paths_of_any_bytes_work_and_are_printable(meta: Path, tmp_path: Path, attempt: Try, name: str) -> None:
    expected = attempt("generate", *RUN, "-m", meta)
    folder, shown = tmp_path / PATHS[name][0], PATHS[name][1] or PATHS[name][0]
    meta.rename(folder)
    assert attempt("generate", *RUN, "-m", folder).stdout == expected.stdout != b""
    (folder / FILE).write_bytes(b"")
    attempt("generate", *RUN, "-m", folder).refused(shown, FILE, "empty")


@pytest.mark.row("A23")
@pytest.mark.parametrize("to", ["hf", "gguf"])
def test_every_format_is_written_and_read_in_a_folder_that_is_not_utf8(original: Path, tmp_path: Path, to: str) -> None:
    """The libraries of safetensors and tokenizers accept only names in UTF-8."""
    expected = convert.convert(original, tmp_path / "usual", to)
    folder = tmp_path / os.fsdecode(b"\xff\xfe folder")
    folder.mkdir()
    proof = convert.convert(original, folder / "odd", to)
    assert (proof.sha256, proof.warnings) == (expected.sha256, expected.warnings)
    assert llama.load_tokenizer(folder / "odd").n_vocab == llama.load_tokenizer(original).n_vocab
    model = llama.load_model(folder / "odd", dtype="float32", device="cpu")
    kept = session.Session()
    model(torch.tensor([[1, 2, 3]]), cache=kept.reuse(model, [1, 2, 3]))
    kept.tokens, kept.busy = [1, 2, 3], False
    kept.save(folder / "chat.session", model)
    assert session.Session.load(folder / "chat.session", model).tokens == [1, 2, 3]


@pytest.mark.row("A23")
def test_symbolic_links_as_in_caches_work(meta: Path, tmp_path: Path, attempt: Try) -> None:
    expected = attempt("generate", *RUN, "-m", meta)
    (tmp_path / "blobs").mkdir()
    for number, file in enumerate(sorted(meta.iterdir())):
        blob = tmp_path / "blobs" / f"{number:064x}"
        file.rename(blob)
        file.symlink_to(Path("..", "blobs", blob.name))
    (tmp_path / "link").symlink_to("meta")
    assert attempt("generate", *RUN, "-m", tmp_path / "link").stdout == expected.stdout != b""


@pytest.mark.row("A24")
@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="root is subject to file modes only if it can drop its privileges"
)
@pytest.mark.parametrize("name", [FILE, PARAMS, "."])
def test_a_file_without_read_permission_is_named(meta: Path, attempt: Try, name: str) -> None:
    mode = (meta / name).stat().st_mode
    (meta / name).chmod(0)
    try:
        attempt("generate", *RUN, "-m", meta, drop_root=True).refused(
            str(meta), "" if name == "." else name, "Permission"
        )
    finally:
        (meta / name).chmod(mode)
    assert attempt("generate", *RUN, "-m", meta, drop_root=True).survived()


# ------------------------------------------------------------------------------------------------------- by mutation
@dataclasses.dataclass(frozen=True)
class Archive:
    """The regions of a .pth file: the pickle, the local headers, the table of contents and its end record."""

    data: bytes
    pickle: range
    headers: tuple[range, ...]
    contents: range
    end: range

    @classmethod
    def of(cls, path: Path) -> Archive:
        data = path.read_bytes()
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
            start = archive.start_dir
        headers = []
        for record in records:
            name, extra = struct.unpack_from("<HH", data, record.header_offset + 26)
            headers.append(range(record.header_offset, record.header_offset + 30 + name + extra))
        at = next(i for i, record in enumerate(records) if record.filename.endswith("data.pkl"))
        body = range(headers[at].stop, headers[at].stop + records[at].file_size)
        end = data.rindex(b"PK\x05\x06")
        return cls(data, body, tuple(headers), range(start, end), range(end, len(data)))


def mutations(archive: Archive, every: int) -> Iterator[tuple[str, bytes]]:
    """Truncated files, flipped bits and replaced integers in the archive's headers and the pickle; one in `every`."""
    data = archive.data
    size = len(data) - archive.contents.start  # of the table of contents and its end record

    def moved(found: Iterator[tuple[str, bytes]], at: int) -> Iterator[tuple[str, bytes]]:
        return ((f"{what} from {at}", data[:at] + changed) for what, changed in found)

    streams = [
        cuts(data, archive.pickle.stop),
        moved(cuts(data[archive.contents.start :], size), archive.contents.start),
        flips(data, archive.pickle.stop),
        moved(flips(data[archive.contents.start :], size), archive.contents.start),
        *(moved(flips(data[h.start :], 30), h.start) for h in archive.headers[1:]),
        *(integers(data, at, 4) for at in archive.end if at + 4 <= archive.end.stop),
        *(integers(data, h.start + at, 4) for h in archive.headers for at in (14, 18, 22)),  # crc, both sizes
        *(integers(data, at, 2) for at in archive.pickle if data[at - 1 : at] == b"M"),  # BININT2: shapes, strides
        *(integers(data, at, 4) for at in archive.pickle if data[at - 1 : at] == b"J"),  # BININT: sizes of storages
    ]
    return itertools.islice(itertools.chain(*streams), random.Random(every).randrange(every), None, every)


def survive(original: Path, folder: Path, attempt: Try, every: int) -> tuple[int, int]:
    """Run each changed file, which must run or be refused. Returns (files, files that ran)."""
    shutil.copytree(original, folder)
    tried = ran = 0
    for what, data in mutations(Archive.of(original / FILE), every):
        (folder / FILE).write_bytes(data)
        outcome = attempt("generate", *RUN, "-m", folder)
        try:
            ran += outcome.survived()
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}") from None
        assert "weights_only" not in outcome.error, what
        tried += 1
    return tried, ran


@pytest.mark.row("A03")
def test_every_flipped_bit_of_the_pickle_is_found(original: Path, tmp_path: Path) -> None:
    """The pickle has the shapes, strides and offsets of the tensors, so a change of one yields another model."""
    shutil.copytree(original, tmp_path / "meta")
    archive, rng = Archive.of(original / FILE), random.Random(0)
    for at in rng.sample(archive.pickle, 150):
        changed = bytearray(archive.data)
        changed[at] ^= 1 << rng.randrange(8)
        (tmp_path / "meta" / FILE).write_bytes(changed)
        with pytest.raises(LlamaError, match=re.escape(FILE)):
            open_checkpoint(tmp_path / "meta")


@pytest.mark.row("A02")
def test_damage_in_any_header_is_refused_or_harmless(original: Path, tmp_path: Path, attempt: Try) -> None:
    tried, _ = survive(original, tmp_path / "meta", attempt, 2999)
    assert tried > 10


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.row("A02")
@pytest.mark.parametrize("part", range(4))
def test_damage_in_any_header_is_refused_or_harmless_at_length(
    original: Path, tmp_path: Path, attempt: Try, part: int
) -> None:
    tried, _ = survive(original, tmp_path / "meta", attempt, 61 + 6 * part)
    assert tried > 200


def test_the_integers_include_those_that_break_readers() -> None:
    assert {0, -1, 2**31, 2**63, 2**64 - 1} <= set(INTEGERS)
