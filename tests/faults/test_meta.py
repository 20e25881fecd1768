"""Damaged, hostile and unusual torch files: what torch.load does not check by itself, and what surrounds it."""

from __future__ import annotations

import os
import shutil
import struct
import warnings
import zipfile
from pathlib import Path

import pytest
import torch

from llama.checkpoint.torchfile import MOST_TUPLES, read_torch
from llama.errors import LlamaError
from llama.tools import convert

from ..scripts import make_tiny
from .conftest import Try

pytestmark = pytest.mark.usefixtures("one_thread")

RUN = ("--raw", "a", "-n", "6", "--device", "cpu", "--dtype", "float32", "--temperature", "0")
FILE, PARAMS = "consolidated.00.pth", "params.json"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny.make(tmp_path_factory.mktemp("original") / "meta", "llama-3-8b")


@pytest.fixture
def meta(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "meta"))


# ---------------------------------------------------------------------------------------------------- crafted files
def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def number(value: int) -> bytes:
    return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)


def numbers(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def tensor(
    shape: tuple[int, ...] = (2, 3), strides: tuple[int, ...] = (3, 1), numel: int = 6, offset: int = 0, key: str = "0"
) -> bytes:
    """A pickle of {"a": tensor} by torch's rules."""
    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text(key) + text("cpu") + number(numel) + b"tQ"
    arguments = number(offset) + numbers(shape) + numbers(strides) + b"\x89ccollections\nOrderedDict\n)R"
    return text("a") + b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage + arguments + b"tRs."


VALUES = struct.pack("<6f", *range(6))
Records = dict[str, bytes]


def archive(path: Path, content: bytes, more: Records | None = None, crc: bool = True, **fields: int) -> Path:
    """Write an archive by Python's zipfile, with each record aligned as torch does; fields: of the first weight."""
    records = {"data.pkl": b"\x80\x02}" + content, "version": b"3\n", "data/0": VALUES, **(more or {})}
    with open(path, "wb") as file, zipfile.ZipFile(file, "w") as made, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of duplicate names
        for name, data in records.items():
            item = zipfile.ZipInfo(f"x/{name.removesuffix('#')}")
            for field, value in fields.items() if name == "data/0" else ():
                setattr(item, field, value)
            pad = -(file.tell() + 34 + len(item.filename)) % 64
            item.extra = struct.pack("<2H", 0x4246, pad) + bytes(pad)
            made.writestr(item, data)
    return path


def call(function: str, argument: bytes) -> bytes:
    return text("a") + b"c" + function.replace(" ", "\n").encode() + b"\n" + argument + b"Rs."


CODE = "more than tensors"
# A pickle -> what the error says
PICKLES: dict[str, tuple[bytes, str]] = {
    "a tuple nested a million deep": (b")" + b"\x85" * 1_000_000 + b"K\x01s.", "tuples, expected at most"),
    "lists nested a million deep": (text("a") + b"]" * 1_000_000 + b"a" * 999_999 + b"s.", "list named a"),
    "nested by a dict": (b"ccollections\nOrderedDict\n)Rq\x00" + text("a") + b"h\x00s.", "OrderedDict named a"),
    "4 GB of bytes": (call("__builtin__ bytearray", number(4 * 10**9) + b"\x85"), CODE),
    "4 GB of storage": (call("torch.storage UntypedStorage", number(4 * 10**9) + b"\x85"), "can't allocate memory"),
    "code": (call("posix system", text('touch "$CANARY"') + b"\x85"), CODE),
    "a sparse tensor": (call("torch._utils _rebuild_sparse_tensor", b")"), CODE),
    "a pickle of 5 megabytes": (text("a" * 5_000_000) + b"K\x01s.", "at most 4,194,304"),
    "digits": (b"L" + b"9" * 4_000_000 + b"L\n.", "torch.load can't read"),
    "a later protocol": (b"\x80\x04.", "protocol 4"),
    "strides of 0": (tensor((10**6, 10**6), (0, 0)), "stored entries"),
    "a product that overflows": (tensor((2**32, 2**32), (0, 0)), FILE),
    "a shape beyond the storage": (tensor((3, 3)), FILE),
    "a storage of a petabyte": (tensor((2**50,), (1,), 2**50), FILE),
}  # fmt: skip


def test_a_crafted_archive_without_a_fault_is_read(tmp_path: Path) -> None:
    found = read_torch(archive(tmp_path / "a.pth", tensor()))
    assert {name: value.tolist() for name, value in found.items()} == {"a": [[0, 1, 2], [3, 4, 5]]}
    deep = b")" + b"\x85" * (MOST_TUPLES - 4)  # the key of a dictionary, which is hashed
    with pytest.raises(LlamaError, match=r"b\.pth"):
        read_torch(archive(tmp_path / "b.pth", tensor()[:-1] + deep + b"K\x01s."))


@pytest.mark.parametrize("name", PICKLES)
def test_a_hostile_pickle_is_refused(meta: Path, attempt: Try, name: str) -> None:
    """In a child with ten seconds of CPU time and 1 GiB, which must not run code or end by a signal."""
    content, words = PICKLES[name]
    archive(meta / FILE, content)
    error = attempt("inspect", meta).refused(FILE, words)
    assert "weights_only" not in error
    assert len(error) < 600


SIZES = "the sizes of its records are not those of its tensors"
RECORDS: dict[str, tuple[Records, dict[str, int], str]] = {
    "short": ({"data/0": VALUES[:-4]}, {}, SIZES),
    "long": ({"data/0": VALUES + bytes(4)}, {}, SIZES),
    "empty": ({"data/0": b""}, {}, SIZES),
    "twice": ({"data/0#": VALUES}, {}, "two records of one name"),
    "twice but for case": ({"DATA/0": VALUES}, {}, "two records of one name"),
    "unused": ({"data/1": b"1"}, {}, SIZES),
    "compressed": ({}, {"compress_type": zipfile.ZIP_DEFLATED}, "compressed"),
    "big-endian": ({"byteorder": b"big"}, {}, "big-endian"),
    "a program": ({"constants.pkl": b"\x80\x02."}, {}, "TorchScript"),
}


@pytest.mark.filterwarnings("ignore:.*TorchScript archive")
@pytest.mark.parametrize("name", RECORDS)
def test_a_record_that_differs_from_its_tensor_is_refused(tmp_path: Path, name: str) -> None:
    more, fields, words = RECORDS[name]
    with pytest.raises(LlamaError, match=words):
        read_torch(archive(tmp_path / "a.pth", tensor(), more, **fields))


def test_a_flipped_bit_of_the_pickle_is_found(original: Path, tmp_path: Path) -> None:
    """The pickle has the shapes, strides and offsets of the tensors, so a change of one yields another model."""
    data = (original / FILE).read_bytes()
    at = data.index(b"norm.weight")
    (tmp_path / FILE).write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with pytest.raises(LlamaError, match="CRC-32"):
        read_torch(tmp_path / FILE)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["neg", "sparse", "meta", "list", "nested", "legacy"])
def test_anything_but_dense_tensors_by_name_is_refused(tmp_path: Path, name: str) -> None:
    a = torch.ones(3, 4)
    states: dict[str, object] = {
        "neg": {"a": torch._neg_view(a)}, "sparse": {"a": a.to_sparse()}, "meta": {"a": a.to("meta")}, "list": [a],
        "nested": {"model": {"a": a}}, "legacy": {"a": a},
    }  # fmt: skip
    torch.save(states[name], tmp_path / "a.pth", _use_new_zipfile_serialization=name != "legacy")
    with pytest.raises(LlamaError, match=r"a\.pth") as caught:
        read_torch(tmp_path / "a.pth")
    assert "weights_only" not in str(caught.value)
    assert ("torch 1.6" in str(caught.value)) == (name == "legacy")


# -------------------------------------------------------------------------------------------- the file and its path
@pytest.mark.parametrize("kind", ["pipe", "/dev/zero", "loop"])
@pytest.mark.parametrize("name", [FILE, PARAMS])
def test_a_file_that_is_not_regular_is_refused(meta: Path, attempt: Try, name: str, kind: str) -> None:
    (meta / name).unlink()
    if kind == "pipe":
        os.mkfifo(meta / name)
    else:
        (meta / name).symlink_to(name if kind == "loop" else kind)
    attempt("generate", *RUN, "-m", meta).refused(name)


def test_paths_of_any_characters_work_and_are_printable(meta: Path, tmp_path: Path, attempt: Try) -> None:
    name = "two words\n' \"\x1b[2J"
    expected = attempt("generate", *RUN, "-m", meta)
    convert.convert(meta, tmp_path / "hf", "hf")
    for folder in ("meta", "hf"):
        (tmp_path / folder).rename(tmp_path / name)
        assert attempt("generate", *RUN, "-m", tmp_path / name).stdout == expected.stdout != b""
        shutil.rmtree(tmp_path / name)
