"""Torch files: pickles of the operations of state dicts and of attacks, and archives with unusual records."""

from __future__ import annotations

import io
import json
import random
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from llama.checkpoint import meta, torchfile
from llama.checkpoint.base import to_file_name
from llama.checkpoint.write import raw_bytes
from llama.tools import verify

from .. import tiny
from . import law
from .gguf import CONFIG, read

FILE = "consolidated.00.pth"
GLOBALS = (
    "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3", "torch._utils _rebuild_parameter",
    "torch._utils _rebuild_parameter_with_state", "torch._utils _rebuild_sparse_tensor",
    "torch._utils _rebuild_qtensor", "torch._utils _rebuild_nested_tensor",
    "torch._utils _rebuild_meta_tensor_no_storage", "torch._utils _rebuild_wrapper_subclass",
    "torch._tensor _rebuild_from_type_v2", "torch FloatStorage", "torch BFloat16Storage", "torch QInt8Storage",
    "torch.storage UntypedStorage", "torch float32", "torch float8_e4m3fn", "torch Size", "torch device",
    "torch Tensor", "torch._C _set_neg", "torch serialization", "collections OrderedDict", "collections Counter",
    "__builtin__ bytearray", "__builtin__ set", "_codecs encode", "builtins complex", "os system",
)  # fmt: skip
INTEGERS = (0, 1, 2, 3, 4, 8, 255, 2**16, 2**31 - 1, -1, -(2**31), 2**62, 2**63 - 1, 2**63, 2**200)
NAMES = ("storage", "cpu", "cuda:3", "meta", "0", "1", "00", "../0", "norm.weight", "é", "\x1b[2J", "", "punycode")


STATE = {to_file_name(name, meta.STEMS): weight.bfloat16() for name, weight in tiny.weights(CONFIG).items()}


class Harness(law.Harness):
    """The first byte names the rest: f a file, p a pickle, r the seed of a random pickle, else of a random archive."""

    words = (
        b"\x80\x02", b"}", b"]", b")", b"(", b"t", b"\x85", b"\x86", b"\x87", b"\x85" * 3000, b"(" * 3000, b"R", b"Q",
        b"b", b"s", b"u", b"a", b"e", b"0", b"2", b"\x81", b"\x8b", b"\x8d", b"\x93", b"\x94", b"r\xff\xff\xff\xff",
        b"j\xff\xff\xff\xff", b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07",
        *(b"c" + name.replace(" ", "\n").encode() + b"\n" for name in GLOBALS),
    )  # fmt: skip

    def __init__(self, folder: Path):
        super().__init__(folder)
        params = {"dim": CONFIG.dim, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "vocab_size": 8}
        (folder / "params.json").write_text(json.dumps(params))
        self.file = saved(STATE)
        with zipfile.ZipFile(io.BytesIO(self.file)) as archive:
            self.records = {item.filename: archive.read(item) for item in archive.infolist()}
        self.pickle = self.records["archive/data.pkl"]

    def seeds(self) -> Iterable[bytes]:
        yield b"f" + self.file
        yield b"f" + saved(STATE, _use_new_zipfile_serialization=False)
        yield b"f" + saved({name: torch.nn.Parameter(tensor) for name, tensor in STATE.items()})
        yield b"p" + self.pickle
        yield b"r"  # without random changes
        yield b"z"
        for seed in range(15):  # so that most mutations change a seed
            yield b"r%d" % seed
            yield b"z%d" % seed

    def calls(self, data: bytes) -> Iterator[law.Call]:
        kind, rest = data[:1], data[1:]
        chance = random.Random(rest) if rest else None
        records = list(self.records.items())
        if kind in (b"p", b"r"):
            made = rest if kind == b"p" else composed(self.pickle, chance)
            rest = zipped([(name, made if name.endswith("data.pkl") else value) for name, value in records])
        elif kind != b"f":
            rest = zipped(records, chance)
        path = self.put(FILE, rest)
        yield partial(compare, path)
        yield partial(read, self.folder)
        yield partial(list, verify.verify(self.folder))


def saved(state: object, **options: Any) -> bytes:
    """Return a file of torch.save."""
    file = io.BytesIO()
    torch.save(state, file, **options)
    return file.getvalue()


def compare(path: Path) -> None:
    """Read a file, and again by torch's reader. Raises Finding if both accept it and differ."""
    ours = torchfile.read_torch(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # torch refuses some valid files, such as legacy files with float8
        return
    if list(ours) != list(theirs):
        raise law.Finding(f"the names differ from torch's: {sorted(ours.keys() ^ theirs.keys())[:3]!r}")
    for name, tensor in ours.items():
        other = theirs[name]
        if (tensor.dtype, tensor.shape, tensor.stride()) != (other.dtype, other.shape, other.stride()):
            raise law.Finding(f"{name!r} is {tensor.dtype}, {tensor.shape}, and torch's {other.dtype}, {other.shape}")
        if raw_bytes(tensor).tobytes() != raw_bytes(other.detach()).tobytes():
            raise law.Finding(f"the values of {name!r} differ from torch's")


# ------------------------------------------------------------------------------------------------------ random pickles
def composed(valid: bytes, chance: random.Random | None) -> bytes:
    """Return a pickle from the operations of state dicts and of attacks; the valid one without `chance`."""
    if chance is None:
        return valid
    name = string(chance.choice(NAMES))
    if chance.random() < 0.75:  # the valid pickle with one more entry, usually at its end
        at = valid.rindex(b"u.") if chance.random() < 0.9 else chance.randrange(len(valid))
        made = tensor(chance) if chance.random() < 0.85 else value(chance, 0)
        return valid[:at] + name + made + valid[at:]
    entries = b"".join(string(chance.choice(NAMES)) + value(chance, 0) for _ in range(chance.choice((1, 1, 2, 5))))
    return b"\x80\x02}" + chance.choice((b"(" + entries + b"u", name + value(chance, 0) + b"s")) + b"."


def string(text: str) -> bytes:
    raw = text.encode(errors="surrogatepass")
    return b"X" + struct.pack("<I", len(raw)) + raw


def integer(number: int, chance: random.Random) -> bytes:
    """Return an operation that pushes a number, not always the shortest one."""
    if -(2**31) <= number < 2**31 and chance.random() < 0.7:
        return b"K" + bytes([number]) if 0 <= number < 256 else b"J" + struct.pack("<i", number)
    raw = number.to_bytes(number.bit_length() // 8 + 1, "little", signed=True)
    return (b"\x8a" + bytes([len(raw)]) if chance.random() < 0.9 else b"\x8b" + struct.pack("<I", len(raw))) + raw


def tensor(chance: random.Random) -> bytes:
    """Return the operations that describe a tensor on one of the storages, often with one unusual part."""
    odd = chance.choice((None, *range(9)))
    key, numel = chance.choice(list(enumerate(weight.numel() for weight in STATE.values())))
    rows = chance.choice((1, 2, 4, 8))
    sizes, steps = chance.choice((([numel], [1]), ([numel // rows, rows], [rows, 1]), ([rows, 2], [1, rows]), ([], [])))
    if odd == 0:
        sizes, steps = sizes[:-1], steps + [1] * chance.choice((0, 1, 70))
    elif odd == 1 and steps:
        steps[0] = chance.choice(INTEGERS)
    elif odd == 2 and sizes:
        sizes[0] = chance.choice(INTEGERS)
    shape, strides = ((b"(" + b"".join(integer(n, chance) for n in values) + b"t") for values in (sizes, steps))
    storage = "torch.storage UntypedStorage" if odd == 3 else "torch BFloat16Storage"
    numel = numel * 2 if odd == 3 else chance.choice(INTEGERS) if odd == 4 else numel
    place = string(chance.choice(("cpu", "cuda:1", "meta", "privateuseone:7", "\x00")) if odd == 5 else "cpu")
    reference = b"(" + string("storage") + named(storage) + string(str(key)) + place + integer(numel, chance) + b"tQ"
    offset = integer(chance.choice((*INTEGERS, -1)) if odd == 6 else 0, chance)
    hooks = value(chance, 3) if odd == 7 else b"ccollections\nOrderedDict\n)R"
    form = (
        named(chance.choice(("torch bfloat16", "torch float8_e4m3fn", "torch int64", "torch x"))) if odd == 3 else b""
    )
    rest = b"}" + string(chance.choice(("neg", "conj", "x"))) + b"\x88s" if odd == 8 else b""
    function = named("torch._utils _rebuild_tensor_v3" if form else "torch._utils _rebuild_tensor_v2")
    made = function + b"(" + reference + offset + shape + strides + b"\x89" + hooks + form + rest + b"tR"
    return named("torch._utils _rebuild_parameter") + made + b"\x89N\x87R" if chance.random() < 0.1 else made


def named(name: str) -> bytes:
    return b"c" + name.replace(" ", "\n").encode() + b"\n"


def value(chance: random.Random, depth: int) -> bytes:
    """Return operations that push one value, or nearly."""
    inner = partial(value, chance, depth + 1)
    ways: list[Callable[[], bytes]] = [
        lambda: tensor(chance),
        lambda: tensor(chance),
        lambda: integer(chance.choice(INTEGERS), chance),
        lambda: string(chance.choice(NAMES) * chance.choice((1, 1, 1, 5000))),
        lambda: chance.choice((b"N", b"\x88", b"\x89", b")", b"]", b"}", b"G" + bytes(8))),
        lambda: b"q" + bytes([chance.randrange(4)]),
        lambda: b"h" + bytes([chance.randrange(4)]),
        lambda: b"N" + chance.choice((b"r", b"j")) + struct.pack("<I", chance.choice((5, 2**20, 2**32 - 1))),
        lambda: chance.choice(EXTREMES),
    ]
    if depth < 6:
        ways += [
            lambda: b"(" + b"".join(inner() for _ in range(chance.choice((0, 1, 3, 20)))) + b"t",
            lambda: b"](" + b"".join(inner() for _ in range(chance.randrange(4))) + b"e",
            lambda: b"}" + inner() + inner() + b"s",
            lambda: named(chance.choice(GLOBALS)) + b"(" + inner() + inner() + b"tR",
            lambda: named(chance.choice(GLOBALS)) + inner() + chance.choice((b"\x85R", b"R", b"\x81", b"b")),
            lambda: inner() + chance.choice((b"\x85", b"]", b"(")) * chance.choice((1, 10, 30_000)),
            lambda: inner() + b"q\x00" + b"h\x00\x86q\x00" * chance.choice((1, 50, 10_000)),
            lambda: inner() + inner() + b"b",
            lambda: b"(" + inner() + inner() + b"tQ",
        ]
    return chance.choice(ways)()


EXTREMES = (
    b"\x8d" + b"\xff" * 8, b"\x8d" + struct.pack("<Q", 2**40), b"X\xff\xff\xff\xff", b"\x8b\xff\xff\xff\x7f",
    b"\x8b" + struct.pack("<i", 30_000) + bytes(30_000), b"\x8e" + struct.pack("<Q", 2**62), b"\x96" + b"\x00" * 8,
    b"T\xff\xff\xff\x7f", b"L" + b"9" * 5000 + b"L\n", b"F1e999\n", b"V\\ud800\n", b"I01\n", b"\x95" + b"\xff" * 8,
    b"\x80\x05", b"\x94", b"\x93", b"\x97", b"0", b"1", b"2", b"P0\n", b"i__builtin__\neval\n", b"o", b"\x82\x01",
    b"c__builtin__\nbytearray\n\x8a\x05" + (4 * 10**9).to_bytes(5, "little") + b"\x85R",
    b"c_codecs\nencode\n" + string("".join(map(chr, range(0x4E00, 0x6000)))) + string("punycode") + b"\x86R",
)  # fmt: skip


# ----------------------------------------------------------------------------------------------------- random archives
def zipped(records: list[tuple[str, bytes]], chance: random.Random | None = None) -> bytes:
    """Return an archive as torch writes it; with `chance`, of one or two unusual records or fields."""
    made, table = bytearray(), bytearray()

    def odd(usual: int, width: int, often: float = 0.01) -> int:
        if chance is None or chance.random() > often:
            return usual
        return (usual + chance.choice((*INTEGERS, len(made), len(table)))) % 2 ** (8 * width)

    if chance is not None:
        records = shuffled(records, chance)
    for name, data in records:
        raw = name.encode()
        extra = b"FB" + struct.pack("<H", pad := -(len(made) + 34 + len(raw)) % 64) + bytes(pad)
        sizes = [zlib.crc32(data), odd(len(data), 4), odd(len(data), 4)]
        common = [odd(0, 2), odd(0x800, 2), odd(0, 2), 0, 0]
        offset = odd(len(made), 4)
        made += struct.pack("<4s5H3I2H", b"PK\x03\x04", *common, *sizes, len(raw), len(extra))
        made += (raw if odd(0, 1) == 0 else raw[::-1]) + extra + data
        wide, fields = b"", sizes
        if chance is not None and chance.random() < 0.05:  # sizes in a field of 64 bits
            wide = struct.pack("<2H3Q", odd(1, 2), odd(24, 2), odd(sizes[2], 8), odd(sizes[1], 8), odd(offset, 8))
            fields, offset = [sizes[0], 2**32 - 1, 2**32 - 1], 2**32 - 1
        mode = odd(0, 1, 0.02) and chance is not None and chance.choice((0o120777, 0o040755, 0o100644)) << 16
        end = [odd(len(wide), 2), odd(0, 2), odd(0, 2), 0, mode, offset]
        table += struct.pack("<4s6H3I5H2I", b"PK\x01\x02", 0, *common, *fields, len(raw), *end) + raw + wide
    start, count = len(made), len(records)
    large = [odd(44, 8), 0, 45, odd(0, 4), odd(0, 4), odd(count, 8), odd(count, 8), odd(len(table), 8), odd(start, 8)]
    at = start + len(table)
    made += table + struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", *large)
    made += struct.pack("<4sIQI", b"PK\x06\x07", odd(0, 4), odd(at, 8), odd(1, 4))
    last = [odd(0, 2), odd(0, 2), odd(count, 2), odd(count, 2), odd(len(table), 4), odd(start, 4), odd(0, 2)]
    return bytes(made + struct.pack("<4s4H2IH", b"PK\x05\x06", *last))


def shuffled(records: list[tuple[str, bytes]], chance: random.Random) -> list[tuple[str, bytes]]:
    """Return records in another order, with one that is missing, doubled, renamed, truncated or new."""
    out = chance.sample(records, len(records))
    at, way = chance.randrange(len(out)), chance.randrange(8)
    name, data = out[at]
    if way == 0:
        del out[at]
    elif way == 1:
        out.append((name, data[::-1]))
    elif way == 2:
        out[at] = name, data[: chance.randrange(len(data) + 1)]
    elif way == 3:
        out[at] = name, data + data
    elif way == 4:
        out[at] = chance.choice(("archive/data/x", "data/0", "archive/", "archive/data/../0", "\x00", "é", "")), data
    elif way == 5:
        out.append((f"archive/{chance.choice(('x', 'byteorder', 'constants.pkl', 'data/99', 'data/'))}", data))
    return out
