"""Group C: Hugging Face folders: damaged, hostile and mixed-up safetensors files and indexes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import llama

from .. import tiny
from ..scripts import make_tiny
from .conftest import Try
from .harness import INTEGERS, cuts, flips, integers, loads

pytestmark = pytest.mark.usefixtures("one_thread")

RUN = ("--raw", "a", "-n", "1", "--device", "cpu", "--dtype", "float32")
SLOW = (pytest.mark.slow, pytest.mark.timeout(3600))  # thousands of children
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
Change = Callable[[Path], object]


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights in one file (one/), in three files (many/), and in Meta's format (meta/)."""
    from llama.tools.convert import convert

    root = tmp_path_factory.mktemp("originals")
    make_tiny.make(root / "meta", "llama-3-8b")
    convert(root / "meta", root / "one", "hf")
    convert(root / "meta", root / "many", "hf", shards=3)
    return root


@pytest.fixture
def one(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals / "one", tmp_path / "one"))


@pytest.fixture
def many(originals: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(originals / "many", tmp_path / "many"))


def shard(folder: Path, number: int = 1) -> Path:
    return folder / f"model-{number:05d}-of-00003.safetensors"


# ----------------------------------------------------------------------------------------------------- the header
def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def join(header: dict[str, Any] | bytes, data: bytes) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + data


NORM, EMBEDDING = "model.norm.weight", "model.embed_tokens.weight"  # of 64 and of 768 x 64 numbers in BF16


def entry(**changes: Any) -> Callable[[bytes], bytes]:
    """Change the header's entry of the last norm."""

    def change(data: bytes) -> bytes:
        header, rest = split(data)
        header[NORM].update(changes)
        return join(header, rest)

    return change


def moved(by: int) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        header, rest = split(data)
        header[NORM]["data_offsets"] = [offset + by for offset in header[NORM]["data_offsets"]]
        return join(header, rest)

    return change


def twice(data: bytes) -> bytes:
    """Duplicate a name, the second time with the bytes of another tensor. The library uses the last one."""
    header, rest = split(data)
    other = header.pop("model.layers.0.input_layernorm.weight")
    raw = json.dumps(header).encode()
    return join(raw[:-1] + b", " + json.dumps({NORM: other}).encode()[1:], rest)


def twice_the_same(data: bytes) -> bytes:
    header, rest = split(data)
    return join(json.dumps(header).encode()[:-1] + b", " + json.dumps({NORM: header[NORM]}).encode()[1:], rest)


def metadata(value: Any) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        header, rest = split(data)
        return join({**header, "__metadata__": value}, rest)

    return change


def length(value: int) -> Callable[[bytes], bytes]:
    return lambda data: value.to_bytes(8, "little") + data[8:]


def named(name: str) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        header, rest = split(data)
        return join({name if key == NORM else key: value for key, value in header.items()}, rest)

    return change


DAMAGED, AGAIN = "the file is damaged, download it again", "download it again"
# (row, fault, how it is made, required text of the message)
HEADERS: list[tuple[str, str, Callable[[bytes], bytes], tuple[str, ...]]] = [
    ("C01", "empty", lambda d: b"", ("is empty",)),
    ("C01", "7 bytes", lambda d: d[:7], ("has 7 bytes", AGAIN)),
    ("C01", "8 bytes", lambda d: d[:8], ("has 8 bytes, but its header would take", AGAIN)),
    *[("C01", f"length {n}", length(n), (f"its header would take {n:,}", AGAIN))
      for n in (10**9, 2**31, 2**63, 2**64 - 1)],
    ("C01", "length 0", length(0), ("begins with b''", AGAIN)),
    ("C01", "not UTF-8", lambda d: join(b'{"\xff": 1}', b""), ("is not UTF-8", DAMAGED)),
    ("C01", "not JSON", lambda d: join(b"{nonsense}", b""), (" is not valid JSON", "column 2", DAMAGED)),
    ("C01", "a list", lambda d: join(b"[1]", b""), ("begins with b'[1]'", AGAIN)),
    ("C01", "a space first", lambda d: join(b" " + json.dumps(split(d)[0]).encode(), split(d)[1]),
     ("instead of b'{'", AGAIN)),
    ("C01", "nested deep", lambda d: join(b'{"a":' * 50_000 + b"1" + b"}" * 50_000, b""), ("deep", DAMAGED)),
    ("C01", "NaN", lambda d: join(b'{"a": NaN}', b""), ("NaN is not a JSON number", DAMAGED)),
    ("C01", "a number of 5,000 digits", entry(data_offsets=[0, 10**4000]), ("data_offsets", DAMAGED)),
    ("C01", "overlap", moved(-64), (NORM, "expected", DAMAGED)),
    ("C01", "hole", moved(64), (NORM, "expected", DAMAGED)),
    ("C01", "beyond the file", moved(2**40), ("of the data, expected", DAMAGED)),
    ("C01", "bytes after the last", lambda d: d + bytes(64), ("bytes were added", AGAIN)),
    ("C01", "cut", lambda d: d[:-1], ("it is truncated", AGAIN)),
    ("C01", "cut in the middle", lambda d: d[: len(d) // 2], ("it is truncated", AGAIN)),
    ("C01", "shape whose product wraps", entry(shape=[2**32, 2**32, 64]), (NORM, "bytes, found 128", DAMAGED)),
    ("C01", "shape of 2^63", entry(shape=[2**63]), (NORM, "list of sizes", DAMAGED)),
    ("C01", "shape of a million sizes", entry(shape=[2**62] * 10**5), (NORM, "list of sizes", DAMAGED)),
    ("C01", "another shape", entry(shape=[32]), (NORM, "expected 64 bytes, found 128", DAMAGED)),
    ("C01", "shape negative", entry(shape=[-64]), (NORM, "list of sizes, got [-64]", DAMAGED)),
    ("C01", "shape with a fraction", entry(shape=[64.0]), ("got [64.0]", DAMAGED)),
    ("C01", "shape true", entry(shape=[True]), ("got [True]", DAMAGED)),
    ("C01", "shape a text", entry(shape="64"), ("got '64'", DAMAGED)),
    ("C01", "no shape", entry(shape=None), ("got None", DAMAGED)),
    ("C01", "offsets negative", entry(data_offsets=[-128, 0]), (NORM, "data_offsets", DAMAGED)),
    ("C01", "offsets backwards", entry(data_offsets=[128, 0]), (NORM, "data_offsets", DAMAGED)),
    ("C01", "offsets with fractions", entry(data_offsets=[0.0, 128.0]), (NORM, "data_offsets", DAMAGED)),
    ("C01", "three offsets", entry(data_offsets=[0, 1, 2]), (NORM, "data_offsets", DAMAGED)),
    ("C01", "dtype unknown", entry(dtype="F99"), (NORM, "is stored as 'F99'", DAMAGED)),
    ("C01", "dtype a number", entry(dtype=5), (NORM, "is stored as 5", DAMAGED)),
    ("C01", "dtype of another size", entry(dtype="F32"), ("expected 256 bytes, found 128", DAMAGED)),
    ("C01", "dtype of integers", entry(dtype="I16"), (f"{NORM} is stored as I16, expected one of F32, BF16",)),
    ("C01", "entry a number", lambda d: join({**split(d)[0], "a": 5}, b""), ("'a'", DAMAGED)),
    ("C01", "metadata of numbers", metadata({"a": 1}), ("__metadata__ must map names to strings", DAMAGED)),
    ("C01", "metadata a text", metadata("a"), ("__metadata__ must map names to strings", DAMAGED)),
    ("C02", "a name twice", twice, (f"the key '{NORM}' occurs twice", DAMAGED)),
    ("C02", "a name twice, the same bytes", twice_the_same, (f"the key '{NORM}' occurs twice", DAMAGED)),
    ("C03", "name with NUL", named("model.norm\0.weight"), (FILE, r"model.norm\x00.weight", "not part of")),
    ("C03", "name with ESC", named("\x1b[2Jmodel.norm.weight"), (FILE, r"\x1b[2Jmodel.norm.weight", "not part of")),
    ("C03", "name with line breaks", named("a\nclearllama: error: b"), (FILE, r"a\nclearllama", "not part of")),
    ("C03", "name a path up", named("../../canary.weight"), (FILE, "'../../canary.weight'", "not part of")),
    ("C03", "name a path", named("/etc/passwd"), (FILE, "'/etc/passwd'", "not part of")),
    ("C03", "name a lone surrogate", named("model.\ud800.weight"), (FILE, "lone surrogate", DAMAGED)),
    ("C03", "name of a megabyte", named("a" * 2**20), (FILE, "aaaa", "not part of")),
    ("C03", "name with other digits", named("model.layers.\u0661.input_layernorm.weight"), (FILE, "not part of")),
    ("C03", "name of 5,000 digits", named(f"model.layers.{'1' * 5000}.input_layernorm.weight"), (FILE, "not part of")),
    ("C03", "no name", named(""), (FILE, "not part of")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [pytest.param(*case, id=case[0], marks=pytest.mark.row(row)) for row, *case in HEADERS],
)
def test_each_fault_of_the_header_is_refused(
    one: Path, attempt: Try, name: str, change: Callable[[bytes], bytes], says: tuple[str, ...]
) -> None:
    file = one / FILE
    file.write_bytes(change(file.read_bytes()))
    error = attempt("inspect", one, memory=1 << 28).refused(*says)
    assert FILE in error
    assert "deserializing" not in error
    assert len(error) < 1000


@pytest.mark.row("C02")
def test_the_library_alone_accepts_duplicate_names(one: Path) -> None:
    """So the check of this package is necessary."""
    before = {name: tensor.clone() for name, tensor in load_file(one / FILE).items()}
    (one / FILE).write_bytes(twice_the_same((one / FILE).read_bytes()))
    assert all(torch.equal(tensor, before[name]) for name, tensor in load_file(one / FILE).items())


# ----------------------------------------------------------------------------------------- a valid file, changed
def survey(attempt: Try, folder: Path, name: str, changed: Iterator[tuple[str, bytes]], every: int) -> tuple[int, int]:
    """Replace a file by one content in `every` and run. Returns (contents that ran, contents that were refused)."""
    counts = [0, 0]
    for i, (what, content) in enumerate(changed):
        if i % every == every // 2:
            (folder / name).write_bytes(content)
            try:
                counts[not attempt("generate", *RUN, "-m", folder).survived()] += 1
            except AssertionError as error:
                raise AssertionError(f"{name}, {what}") from error
    return counts[0], counts[1]


def edits(value: Any) -> Iterator[tuple[str, Any]]:
    """A JSON document with one value replaced by an invalid one, for each value in turn."""
    invalid = (*INTEGERS, 2**64, -1.5, 1e300, "", "4", "\0\x1b", None, True, [], {}, [0] * 9)
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            for what, changed in edits(value[key]):
                out = dict(value) if isinstance(value, dict) else list(value)
                out[key] = changed  # type: ignore[index]
                yield f"{key} {what}", out
            if isinstance(value, dict):
                yield f"no {key}", {other: kept for other, kept in value.items() if other != key}
    for new in invalid:
        if type(new) is not type(value) or new != value:
            yield f"is {new!r:.20}", new


def kinds(data: bytes) -> dict[str, Iterator[tuple[str, bytes]]]:
    header, rest = split(data)
    end = len(data) - len(rest)
    return {
        "cuts": cuts(data, end),
        "flips": flips(data, end, every=9),
        "length": integers(data, 0, 8),
        "edits": ((what, join(json.dumps(new).encode(), rest)) for what, new in edits(header)),
    }


@pytest.mark.row("C01")
@pytest.mark.parametrize(
    ("kind", "every", "fewest"),
    [
        ("cuts", 500, 4),
        ("flips", 400, 3),
        ("length", 3, 3),
        ("edits", 500, 4),
        pytest.param("cuts", 12, 150, marks=SLOW),
        pytest.param("flips", 8, 150, marks=SLOW),
        pytest.param("length", 1, 10, marks=SLOW),
        pytest.param("edits", 12, 150, marks=SLOW),
    ],
)
def test_a_changed_file_runs_or_is_refused(one: Path, attempt: Try, kind: str, every: int, fewest: int) -> None:
    ran, refused = survey(attempt, one, FILE, kinds((one / FILE).read_bytes())[kind], every)
    assert refused >= fewest, (ran, refused)
    assert ran == 0 or kind in ("flips", "edits")


@pytest.mark.row("C04")
@pytest.mark.parametrize("every", [150, pytest.param(4, marks=SLOW)])
def test_a_changed_index_runs_or_is_refused(many: Path, attempt: Try, every: int) -> None:
    document = json.loads((many / INDEX).read_text())
    changed = ((what, json.dumps(new).encode()) for what, new in edits(document))
    _, refused = survey(attempt, many, INDEX, changed, every)
    assert refused > 2


@pytest.mark.slow
@pytest.mark.row("C01")
def test_every_change_of_a_header_or_an_index_loads_or_is_refused(
    one: Path, many: Path, record_property: Callable[[str, object], None]
) -> None:
    """In this process, since there are thousands. The other tests check time and memory in child processes."""
    counts = [0, 0]
    document = json.loads((many / INDEX).read_text())
    for what, new in edits(document):
        (many / INDEX).write_text(json.dumps(new))
        counts[not loads(many, f"index: {what}")] += 1
    for kind, changed in kinds((one / FILE).read_bytes()).items():
        for what, content in changed:
            (one / "new").write_bytes(content)
            (one / "new").rename(one / FILE)  # an open mapping keeps the old file
            counts[not loads(one, f"{kind}: {what}")] += 1
    record_property("inputs", sum(counts))
    assert counts[1] > 5000


# ------------------------------------------------------------------------------------------------------ the index
def assign(value: Any) -> Change:
    """Set the file of a tensor in the index."""

    def change(folder: Path) -> None:
        document = json.loads((folder / INDEX).read_text())
        document["weight_map"][NORM] = value
        (folder / INDEX).write_text(json.dumps(document))

    return change


def forget(folder: Path) -> None:
    document = json.loads((folder / INDEX).read_text())
    del document["weight_map"][NORM]
    (folder / INDEX).write_text(json.dumps(document))


def copy_into(number: int) -> Change:
    """Add a tensor of the first shard to another shard, with other values."""

    def change(folder: Path) -> None:
        state = load_file(shard(folder, number))
        state[EMBEDDING] = -load_file(shard(folder))[EMBEDDING]
        save_file(state, shard(folder, number))

    return change


def without_index(change: Change) -> Change:
    return lambda folder: (change(folder), (folder / INDEX).unlink())


PLAIN = "which is not a plain file name"
INDEXES: list[tuple[str, str, Change, tuple[str, ...]]] = [
    *[("C04", repr(value), assign(value), (INDEX, NORM, PLAIN))
      for value in ("../x.safetensors", "/etc/passwd", "a/b", "C:\\x", "", ".", "..", "\0", "a\nb", "\x1b[2J",
                    "https://example.org/x.safetensors", "file:///etc/passwd", "~", 5, None, ["a"], {"a": 1})],
    ("C04", "another file of the folder", assign("config.json"), ("config.json", AGAIN)),
    ("C04", "a file that is not there", assign("x.safetensors"), ("1 of 4 weight files are missing: x.safetensors",)),
    ("C05", "shard missing", lambda d: shard(d, 2).unlink(), ("1 of 3 weight files are missing: model-00002",)),
    ("C05", "all shards missing", lambda d: [shard(d, n).unlink() for n in (1, 2, 3)], ("3 of 3 weight files",)),
    ("C05", "tensor in two shards", copy_into(3), ("model-00003-of-00003", "contains", EMBEDDING, INDEX)),
    ("C05", "tensor in two shards, no index", without_index(copy_into(3)), (EMBEDDING, "is in model-00001", "00003")),
    ("C05", "tensor in another shard", assign("model-00001-of-00003.safetensors"), (NORM, "should be in model-00001")),
    ("C05", "tensor absent from the index", forget, ("contains", NORM, f"{INDEX} does not list it there")),
    ("C05", "no index, a shard missing", without_index(lambda d: shard(d, 2).unlink()), ("missing",)),
    ("C05", "weight_map a list", lambda d: (d / INDEX).write_text('{"weight_map": []}'), ("weight_map must map",)),
    ("C05", "no weight_map", lambda d: (d / INDEX).write_text("{}"), (INDEX, "weight_map must map")),
    ("C05", "index cut", lambda d: (d / INDEX).write_text('{"weight_map": {'), (f"{INDEX} is not valid", "column 17")),
    ("C05", "index next to a single file", lambda d: shutil.copy(shard(d), d / FILE), ("unclear which one applies",)),
    ("C05", "a shard a folder", lambda d: (shard(d).unlink(), shard(d).mkdir()), ("missing: model-00001",)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [pytest.param(*case, id=case[0], marks=pytest.mark.row(row)) for row, *case in INDEXES],
)
def test_each_fault_of_the_index_is_refused(
    many: Path, attempt: Try, name: str, change: Change, says: tuple[str, ...]
) -> None:
    change(many)
    attempt("generate", *RUN, "-m", many).refused(*says)


@pytest.mark.row("C05")
@pytest.mark.parametrize("size", [5, None, "x", -1])
def test_a_wrong_total_size_is_a_warning(many: Path, attempt: Try, size: Any) -> None:
    quiet = attempt("generate", *RUN, "--temperature", "0", "-m", many)
    assert INDEX not in quiet.error
    document = json.loads((many / INDEX).read_text())
    document["metadata"]["total_size"] = size
    (many / INDEX).write_text(json.dumps(document))
    outcome = attempt("generate", *RUN, "--temperature", "0", "-m", many)
    assert outcome.code == 0
    assert outcome.stdout == quiet.stdout
    assert (f"total_size is {size!r}, but the files contain" in outcome.error) == (size is not None)


@pytest.mark.row("C05")
def test_one_file_and_many_have_the_same_logits(originals: Path) -> None:
    tokens = tiny.random_tokens(20)
    one, many = (llama.load_model(originals / name, dtype="float32", device="cpu")(tokens) for name in ("one", "many"))
    assert torch.equal(one, many)


# ---------------------------------------------------------------------------------------------- links and leftovers
def as_cache(source: Path, root: Path) -> Path:
    """A snapshot as in the cache of huggingface_hub: each file is a link to ../../blobs/HASH."""
    snapshot, blobs = (
        root / "models--org--name" / "snapshots" / ("c0ffee" * 6 + "c0ff"),
        root / "models--org--name" / "blobs",
    )
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (root / "models--org--name" / "refs").mkdir()
    (root / "models--org--name" / "refs" / "main").write_text(snapshot.name)
    for number, file in enumerate(sorted(source.iterdir())):
        shutil.copy(file, blobs / f"{number:064x}")
        (snapshot / file.name).symlink_to(Path("../../blobs", f"{number:064x}"))
    return snapshot


@pytest.mark.row("C04")
@pytest.mark.parametrize("form", ["one", "many"])
def test_a_snapshot_of_links_generates_the_same_text(
    originals: Path, tmp_path: Path, attempt: Try, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    snapshot = as_cache(originals / form, tmp_path / "hub")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    options = ("--raw", "a model", "-n", "8", "--temperature", "0", "--device", "cpu", "--dtype", "float32", "-m")
    plain, linked, by_id = (attempt("generate", *options, model)
                            for model in (originals / form, snapshot, "org/name"))  # fmt: skip
    assert plain.code == linked.code == by_id.code == 0, (linked.error, by_id.error)
    assert len(plain.stdout) > 8
    assert plain.stdout == linked.stdout == by_id.stdout


@pytest.mark.row("C07")
def test_a_partly_downloaded_snapshot_is_refused(
    originals: Path, tmp_path: Path, attempt: Try, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = as_cache(originals / "many", tmp_path / "hub")
    blob = shard(snapshot, 2).resolve()
    blob.rename(f"{blob}.incomplete")
    attempt("generate", *RUN, "-m", snapshot).refused("model-00002-of-00003.safetensors", "resume the download")
    shard(snapshot, 2).unlink()
    attempt("generate", *RUN, "-m", snapshot).refused("model-00002-of-00003.safetensors", "resume the download")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    attempt("generate", *RUN, "-m", "org/name").refused("no complete copy of org/name", "HF_HUB_OFFLINE is set")


@pytest.mark.row("C07")
@pytest.mark.parametrize("leftover", ["model.safetensors.incomplete", "model.safetensors.part"])
def test_a_partly_downloaded_file_is_refused(one: Path, attempt: Try, leftover: str) -> None:
    (one / FILE).rename(one / leftover)
    attempt("generate", *RUN, "-m", one).refused(leftover, "resume the download")


@pytest.mark.row("C07")
def test_a_dangling_link_is_refused(one: Path, attempt: Try) -> None:
    (one / FILE).unlink()
    (one / FILE).symlink_to("../../blobs/gone")
    attempt("generate", *RUN, "-m", one).refused(FILE, "resume the download")


@pytest.mark.row("C06")
@pytest.mark.parametrize("damage", ["cut", "empty", "folder", "pipe", "torch"])
def test_a_pickle_never_replaces_a_damaged_file(one: Path, attempt: Try, damage: str) -> None:
    import os

    file, state = one / FILE, load_file(one / FILE)
    torch.save(state, one / "pytorch_model.bin")
    data = file.read_bytes()
    file.unlink()
    if damage == "folder":
        file.mkdir()
    elif damage == "pipe":
        os.mkfifo(file)
    elif damage == "torch":
        torch.save(state, file)
    else:
        file.write_bytes({"cut": data[:-5], "empty": b""}[damage])
    attempt("generate", *RUN, "-m", one).refused(FILE)


@pytest.mark.row("C09")
@pytest.mark.parametrize(
    ("keep", "add", "says"),
    [
        ((), ("adapter_config.json", "adapter_model.safetensors"), ("an adapter", "pass its base model as --model")),
        (("config.json",), ("adapter_model.safetensors",), ("an adapter", "pass its base model as --model")),
        (("config.json",), ("adapter_model.bin",), ("an adapter", "pass its base model as --model")),
        (("tokenizer.json", "tokenizer_config.json"), (), ("a tokenizer but no model",)),
        (("tokenizer.json", "config.json"), (), ("no weights", "download them")),
        ((FILE,), (), ("not a checkpoint", "config.json", FILE)),
        ((), ("README.md",), ("not a checkpoint", "README.md")),
        ((), (), ("is an empty folder",)),
    ],
    ids=str,
)
def test_a_folder_without_a_model_is_refused(
    one: Path, attempt: Try, keep: tuple[str, ...], add: tuple[str, ...], says: tuple[str, ...]
) -> None:
    for file in one.iterdir():
        if file.name not in keep:
            file.unlink()
    for name in add:
        if name.endswith(".safetensors"):
            save_file({"base_model.model.lora_A.weight": torch.ones(2, 2)}, one / name)
        else:
            (one / name).write_text("{}")
    attempt("generate", *RUN, "-m", one).refused(str(one), *says)


# -------------------------------------------------------------------------------------------- layouts of q and k
@pytest.mark.row("C08")
def test_rows_of_q_and_k_are_read_in_hugging_faces_order(originals: Path, tmp_path: Path) -> None:
    """The logits are those of transformers and of Meta's folder. With rows in Meta's order they would differ."""
    from transformers import LlamaForCausalLM

    tokens = tiny.random_tokens(40)
    meta, ours = (llama.load_model(originals / name, dtype="float32", device="cpu")(tokens) for name in ("meta", "one"))
    theirs = LlamaForCausalLM.from_pretrained(originals / "one", dtype=torch.float32)(tokens).logits
    assert float(theirs.std()) > 0.3
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)
    torch.testing.assert_close(meta, theirs, rtol=0, atol=1e-3)

    mixed = Path(shutil.copytree(originals / "one", tmp_path / "mixed"))
    state = load_file(mixed / FILE)
    shard = torch.load(originals / "meta" / "consolidated.00.pth")
    for layer in range(2):
        for part in "qk":
            state[f"model.layers.{layer}.self_attn.{part}_proj.weight"] = shard[
                f"layers.{layer}.attention.w{part}.weight"
            ]
    save_file(state, mixed / FILE)
    wrong = llama.load_model(mixed, dtype="float32", device="cpu")(tokens)
    assert float((wrong - theirs).abs().max()) > 0.1  # so the comparison above detects a wrong order


def test_the_original_files_are_valid(originals: Path, attempt: Try) -> None:
    for form in ("one", "many", "meta"):
        assert attempt("generate", *RUN, "-m", originals / form).survived()
    with safe_open(originals / "one" / FILE, framework="pt") as file:
        header, _ = split((originals / "one" / FILE).read_bytes())
        assert set(file.keys()) == set(header) - {"__metadata__"}
        assert header[NORM]["shape"] == [64]
