"""verify: a complete checkpoint passes, and damage in any file is found and named."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers

from llama.cli import build_parser
from llama.errors import CheckpointError, UsageError
from llama.hub import models as hub
from llama.hub import repository
from llama.tokenizer.common import BYTE_OF
from llama.tools import verify as verify_module
from llama.tools.verify import Finding, cache_sum, file_sum, format_of, read_checklist, verify

from . import test_huggingface, tiny
from .conftest import Run
from .scripts import make_tiny

pytestmark = pytest.mark.usefixtures("one_thread")

PAGE = b"\n  <!DOCTYPE html><html><body>403 Forbidden</body></html>" * 20
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123\n"


def write_folder(folder: Path, **options: Any) -> Path:
    """A random model in Hugging Face's layout from transformers, and a byte-level vocabulary from tokenizers."""
    model = test_huggingface.write(folder)
    shutil.rmtree(folder)
    model.save_pretrained(folder, **options)
    vocabulary = tokenizers.Tokenizer(models.BPE(vocab={text: id for id, text in enumerate(BYTE_OF)}, merges=[]))
    vocabulary.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocabulary.decoder = decoders.ByteLevel()
    vocabulary.add_special_tokens(["<|begin_of_text|>", "<|end_of_text|>"])
    vocabulary.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A complete checkpoint in every form; for GGUF the folder of the file or the set."""
    root = tmp_path_factory.mktemp("originals")
    make_tiny.make(root / "meta", "llama-3-70b", shards=2)
    make_tiny.make(root / "meta2" / "7B", "llama-2-7b")  # Meta's layout: the tokenizer is in the parent folder
    shutil.move(root / "meta2" / "7B" / "tokenizer.model", root / "meta2" / "tokenizer.model")
    write_md5(root / "meta2" / "tokenizer_checklist.chk", root / "meta2" / "tokenizer.model")
    write_folder(root / "hf")
    write_folder(root / "sharded", max_shard_size="100KB")
    shutil.copytree(root / "hf", root / "bin")
    torch.save(load_file(root / "bin" / "model.safetensors"), root / "bin" / "pytorch_model.bin")
    (root / "bin" / "model.safetensors").unlink()
    for name in ("gguf", "split"):
        (root / name).mkdir()
    tiny.write_gguf(root / "gguf" / "tiny.gguf")
    split_gguf(root / "split")
    return {path.name: path for path in root.iterdir()}


def split_gguf(folder: Path) -> None:
    """Two parts of a set, with the names and numbers of llama.cpp."""
    from llama.checkpoint.gguf import NAMES

    theirs = {ours: file for file, ours in NAMES.items()}
    names = []
    for name in tiny.weights():
        parts = name.removesuffix(".weight").split(".")
        block = f"blk.{parts[1]}." if parts[0] == "layers" else ""
        names.append(f"{block}{theirs['.'.join(parts[2:] if block else parts)]}.weight")
    for i, left_out in enumerate((names[5:], names[:5])):
        metadata: dict[str, Any] = {"split.no": i, "split.count": 2, "split.tensors.count": len(names)}
        if i:  # only the first part has the vocabulary and the architecture
            metadata |= dict.fromkeys((*tiny.architecture(), *tiny.byte_vocabulary()))
        tiny.write_gguf(folder / f"x-0000{i + 1}-of-00002.gguf", metadata=metadata, without=tuple(left_out))


def write_md5(target: Path, *files: Path) -> None:
    target.write_text("".join(f"{hashlib.md5(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files))


FORMS = ["meta", "meta2", "hf", "sharded", "bin", "gguf", "split"]
Copy = Callable[[str], Path]


@pytest.fixture
def copy(originals: dict[str, Path], tmp_path: Path) -> Copy:
    """Make a copy of a complete checkpoint to damage; return the path that a user would give."""

    def make(form: str) -> Path:
        folder = Path(shutil.copytree(originals[form], tmp_path / form))
        return {"meta2": folder / "7B", "gguf": folder / "tiny.gguf", "split": folder / "x-00001-of-00002.gguf"}.get(
            form, folder
        )

    return make


def failures(path: Path, **options: Any) -> list[Finding]:
    return [finding for finding in verify(path, **options) if finding.status == "fail"]


def named(findings: list[Finding], name: str, check: str = "") -> list[Finding]:
    return [f for f in findings if name in f.item and (not check or f.check == check)]


def weight_files(path: Path) -> list[Path]:
    folder = path if path.is_dir() else path.parent
    return [file for file in sorted(folder.iterdir()) if file.suffix in verify_module.WEIGHTS]


# -------------------------------------------------------------------------------------------- complete checkpoints
@pytest.mark.parametrize("form", FORMS)
def test_a_complete_checkpoint_passes(copy: Copy, form: str) -> None:
    path = copy(form)
    before = {file: file.read_bytes() for file in path.parent.rglob("*") if file.is_file()}
    findings = list(verify(path, tensors=True))
    assert [f for f in findings if f.status == "fail"] == []
    done = {f.check for f in findings if f.status == "ok"}
    assert {"files", "size", "open", "tokenizer", "tensors"} <= done
    assert ("md5" in done) == form.startswith("meta")
    assert ("crc" in done) == (form.startswith("meta") or form == "bin")
    assert ("json" in done) == (form not in ("gguf", "split"))
    assert {f.item for f in findings if f.check == "size" and f.status == "ok"} >= {f.name for f in weight_files(path)}
    expected = {"meta": "Meta", "meta2": "Meta", "gguf": "GGUF", "split": "GGUF"}.get(form, "Hugging Face")
    assert format_of(path) == expected
    assert {file: file.read_bytes() for file in path.parent.rglob("*") if file.is_file()} == before


def test_files_without_a_checksum_are_listed_as_not_verified(copy: Copy) -> None:
    for form, item, why in (
        ("hf", "model.safetensors, tokenizer.json", "the Hugging Face cache has no checksum of them"),
        ("gguf", "tiny.gguf", "the Hugging Face cache has no checksum of it"),
        ("meta", "tokenizer.model", "checklist.chk does not list it, and the Hugging Face cache has no checksum of it"),
    ):
        path = copy(form)
        warnings = [f for f in verify(path) if f.status == "warn"]
        assert [(f.check, f.item) for f in warnings] == [("sums", item)], form
        assert warnings[0].message == f"not verified: {why}"
    (path / "checklist.chk").unlink()
    (bare,) = [f for f in verify(path) if f.status == "warn"]
    assert bare.message.startswith(
        "not verified: there is no checklist.chk, and the Hugging Face cache has no checksum"
    )
    assert [f for f in verify(copy("meta2")) if f.status == "warn"] == []


# --------------------------------------------------------------------------------------------- damaged checkpoints
@pytest.mark.parametrize("form", FORMS)
def test_every_truncated_weight_file_is_found(copy: Copy, form: str) -> None:
    path = copy(form)
    for file in weight_files(path):
        whole = file.read_bytes()
        for length in (0, 1, 7, 100, len(whole) // 2, len(whole) - 10, len(whole) - 1):
            file.write_bytes(whole[:length])
            found = named(failures(path), file.name, "size")
            assert len(found) == 1, (file.name, length)
            assert ("empty" in found[0].message) == (length == 0)
        file.write_bytes(whole)
    assert failures(path) == []


@pytest.mark.parametrize("form", ["hf", "sharded"])
def test_added_bytes_are_found(copy: Copy, form: str) -> None:
    path = copy(form)
    file = weight_files(path)[-1]
    file.write_bytes(file.read_bytes() + bytes(64))
    assert named(failures(path), file.name, "size")


@pytest.mark.parametrize(("content", "reason"), [(PAGE, "web page"), (POINTER, "git-lfs pointer"), (b"", "empty")])
@pytest.mark.parametrize("form", FORMS)
def test_a_page_or_pointer_saved_in_place_of_a_file_is_named(
    copy: Copy, form: str, content: bytes, reason: str
) -> None:
    path = copy(form)
    folder = path if path.is_dir() else path.parent
    files = [file for file in folder.iterdir() if file.suffix != ".chk"]
    files += [path.parent / "tokenizer.model"] if form == "meta2" else []
    for file in files:
        whole = file.read_bytes()
        file.write_bytes(content)
        found = named(failures(path), file.name, "size")
        assert len(found) == 1, file.name
        assert reason in found[0].message
        file.write_bytes(whole)


@pytest.mark.parametrize("form", FORMS)
def test_every_missing_file_is_named(copy: Copy, form: str) -> None:
    path = copy(form)
    folder = path if path.is_dir() else path.parent
    optional = {"generation_config.json", "tokenizer_config.json", "checklist.chk", "model.safetensors.index.json"}
    for file in sorted(folder.iterdir()):
        if file.name in optional or file == path:
            continue
        whole = file.read_bytes()
        file.unlink()
        found = failures(path)
        expected = {"pytorch_model.bin": "no weights"}.get(file.name, file.name)
        assert any(expected in f.item or expected in f.message for f in found), file.name
        if form in ("sharded", "split", "meta") and file in weight_files(path):
            assert named(found, file.name, "files")
        file.write_bytes(whole)


def test_a_missing_shard_is_found_without_a_checklist(copy: Copy) -> None:
    path = copy("meta")
    for name in ("checklist.chk", "consolidated.00.pth", "params.json"):
        (path / name).unlink()
    found = failures(path)
    assert named(found, "consolidated.00.pth", "files")
    assert named(found, "params.json", "files")
    assert format_of(path) == "Meta"


def test_broken_links_and_unfinished_downloads_are_found(copy: Copy) -> None:
    path = copy("hf")
    (path / "model.safetensors").rename(path / "gone")
    (path / "model.safetensors").symlink_to("blob")
    (path / "model.safetensors.incomplete").write_bytes(bytes(1000))
    findings = list(verify(path))
    assert "a link to blob" in named(findings, "model.safetensors", "files")[0].message
    assert [f.message[:11] for f in findings if f.check == "files" and f.status == "warn"] == ["1,000 bytes"]


# --------------------------------------------------------------------------------------------------------- checksums
def flip(file: Path, at: int, bit: int = 0) -> None:
    with open(file, "rb+") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 1 << bit]))


@pytest.mark.parametrize("form", ["meta", "bin"])
def test_any_flipped_bit_in_a_weight_is_found_and_its_record_is_named(copy: Copy, form: str) -> None:
    path = copy(form)
    (path / "checklist.chk").unlink(missing_ok=True)
    file = weight_files(path)[-1]
    with zipfile.ZipFile(file) as archive:
        records = [record for record in archive.infolist() if "/data/" in record.filename]
    assert len(records) > 15
    rng = random.Random(0)
    for record in rng.sample(records, 8):
        start = record.header_offset + 30
        with open(file, "rb") as opened:  # lengths of name and extra field, at the end of the local header
            opened.seek(record.header_offset + 26)
            start += sum(int.from_bytes(opened.read(2), "little") for _ in range(2))
        at, bit = start + rng.randrange(record.file_size), rng.randrange(8)
        flip(file, at, bit)
        found = failures(path)
        assert [f.check for f in found if f.item == file.name] == ["crc"]
        assert f"records differs: {record.filename};" in named(found, file.name)[0].message
        flip(file, at, bit)
    assert failures(path) == []


def test_a_flipped_bit_anywhere_fails_the_checklist(copy: Copy) -> None:
    path = copy("meta")
    rng = random.Random(1)
    for name in ("consolidated.00.pth", "consolidated.01.pth", "params.json"):
        for _ in range(3):
            at = rng.randrange((path / name).stat().st_size)
            flip(path / name, at)
            assert named(failures(path), name, "md5"), (name, at)
            flip(path / name, at)


def test_a_tokenizer_in_the_parent_folder_has_its_own_checklist(copy: Copy) -> None:
    path = copy("meta2")
    ok = named(list(verify(path)), "../tokenizer.model", "md5")
    assert [f.status for f in ok] == ["ok"]
    flip(path.parent / "tokenizer.model", 5000)
    assert named(failures(path), "../tokenizer.model", "md5")


@pytest.mark.skipif(shutil.which("md5sum") is None, reason="there is no md5sum")
def test_md5sum_gives_the_same_result_for_a_checklist(copy: Copy) -> None:
    path = copy("meta")
    listing = subprocess.run(
        ["md5sum", "-b", "params.json", "tokenizer.model"], cwd=path, capture_output=True, text=True
    )
    assert " *params.json" in listing.stdout
    (path / "checklist.chk").write_text(listing.stdout)
    for broken in (False, True):
        if broken:
            flip(path / "params.json", 3)
        theirs = subprocess.run(["md5sum", "-c", "checklist.chk"], cwd=path, capture_output=True).returncode
        assert bool(named(failures(path), "", "md5")) == bool(theirs) == broken


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{md5} params.json", "expected an md5, two spaces and a name"),
        ("{md5}\tparams.json", "expected an md5"),
        ("{md5}0  params.json", "expected an md5"),
        ("params.json  {md5}", "expected an md5"),
        ("{md5}  ../params.json", "was ignored"),
        ("{md5}  /etc/passwd", "was ignored"),
        ("{md5}  a\\b", "was ignored"),
        ("{md5}  ..", "was ignored"),
        ("", "lists no file"),
        ("\x1b[2J", "expected an md5"),
        ("\ud800", "is not UTF-8"),
        ("x" * 2**20, "it is another file"),
    ],
)
def test_bad_lines_of_a_checklist_fail(copy: Copy, line: str, reason: str) -> None:
    path = copy("meta")
    text = line.format(md5="d41d8cd98f00b204e9800998ecf8427e")
    (path / "checklist.chk").write_bytes(text.encode(errors="surrogatepass") + b"\n")
    [found] = named(failures(path), "checklist.chk")
    assert found.check == "sums"
    assert reason in found.message
    assert found.message.isprintable()


def test_every_spelling_of_a_checklist_is_read(tmp_path: Path) -> None:
    md5 = "d41d8cd98f00b204e9800998ecf8427e"
    (tmp_path / "x.chk").write_bytes(f"# made by hand\r\n{md5}  a b.pth\r\n\r\n{md5.upper()} *c.pth".encode())
    sums, faults = read_checklist(tmp_path / "x.chk")
    assert faults == []
    assert [(s.file.name, s.value) for s in sums] == [("a b.pth", md5), ("c.pth", md5)]


def test_an_archive_without_checksums_is_a_warning(copy: Copy) -> None:
    path = copy("bin")
    file = path / "pytorch_model.bin"
    state = torch.load(file)
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    torch.save(state, file)
    torch.serialization.set_crc32_options(before)
    findings = list(verify(path))
    assert [f for f in findings if f.status == "fail"] == []
    assert [f.status for f in named(findings, file.name, "crc")] == ["warn"]


def test_the_checksums_of_the_hubs_cache_are_compared(copy: Copy, tmp_path: Path) -> None:
    """In this cache the name of a file is its sha256, or its git object id if it is small."""
    source = copy("hf")
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "c0ffee", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in source.iterdir():
        large = file.suffix == ".safetensors"
        command = ["sha256sum", file] if large else ["git", "hash-object", "--no-filters", file]
        name = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
        shutil.copy(file, blobs / name)
        (snapshot / file.name).symlink_to(Path("../../blobs", name))
    findings = list(verify(snapshot))
    assert {f.status for f in findings} == {"ok"}
    assert [f.item for f in findings if f.check == "sha256"] == ["model.safetensors"]
    assert len([f for f in findings if f.check == "git"]) == len(list(source.iterdir())) - 1

    weights = snapshot / "model.safetensors"
    flip(weights.resolve(), weights.stat().st_size - 100)  # in a weight, which no header describes
    assert [(f.check, f.item) for f in failures(snapshot)] == [("sha256", "model.safetensors")]
    (blobs / "aa.1234abcd.incomplete").write_bytes(b"x")
    assert [f.item for f in verify(snapshot) if f.status == "warn"] == ["aa.1234abcd.incomplete"]


def test_checksums_that_the_hubs_library_recorded_in_a_folder_are_compared(copy: Copy) -> None:
    path = copy("hf")
    records = path / ".cache" / "huggingface" / "download"
    records.mkdir(parents=True)
    sha256 = file_sum(path / "model.safetensors", "sha256")
    (records / "model.safetensors.metadata").write_text(f"c0ffee\n{sha256}\n1700000000.0\n")
    known = cache_sum(path / "model.safetensors")
    assert known is not None
    assert known.value == hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()
    flip(path / "model.safetensors", -100 % (path / "model.safetensors").stat().st_size)
    assert [(f.check, f.item) for f in failures(path)] == [("sha256", "model.safetensors")]


def test_a_named_model_is_compared_with_its_sha256(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    path = copy("gguf")
    model = hub.MODELS[hub.DEFAULT].__class__(
        **{**hub.MODELS[hub.DEFAULT].__dict__, "file": path.name, "size": path.stat().st_size,
           "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    )  # fmt: skip
    monkeypatch.setitem(hub.MODELS, "tiny", model)
    assert {f.status for f in verify(path)} == {"ok"}
    flip(path, path.stat().st_size - 100)
    assert [f.check for f in failures(path)] == ["sha256"]


def test_files_are_read_in_chunks_and_progress_is_reported(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    path, steps = copy("meta"), {}
    monkeypatch.setattr(verify_module, "CHUNK", 1000)

    def progress(what: str, done: int, total: int) -> None:
        before, _ = steps.get(what, (0, 0))
        assert 0 < done - before <= 1000
        steps[what] = (done, total)

    assert failures(path, tensors=True, progress=progress) == []
    assert all(done == total for done, total in steps.values())
    size = (path / "consolidated.01.pth").stat().st_size
    assert steps["md5 consolidated.01.pth"] == (size, size)
    assert 0.9 * size < steps["crc consolidated.01.pth"][0] < size
    assert steps["weights"][0] == 21


# ------------------------------------------------------------------------------------- documents, tensors, tokenizer
def test_documents_that_contradict_the_tensors_fail(copy: Copy) -> None:
    path = copy("hf")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "intermediate_size": 95}))
    found = named(failures(path), "hf", "open")
    assert len(found) == 6  # three matrices of two layers
    assert all("requires" in f.message for f in found)
    (path / "config.json").write_text(json.dumps(config)[:-1])
    assert [f.check for f in failures(path)] == ["json", "open"]
    (path / "config.json").write_text(json.dumps({**config, "vocab_size": 200}))
    assert any("has shape (320, 64)" in f.message for f in failures(path))
    (path / "config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text("{")
    assert [(f.check, f.item) for f in failures(path)] == [("json", "generation_config.json"), ("open", "hf")]


def test_the_tokenizer_of_another_model_is_found(copy: Copy) -> None:
    path = copy("meta")
    (path / "tokenizer.model").write_bytes(make_tiny.tiktoken_model(600))
    assert [f.check for f in failures(path)] == ["tokenizer"]
    path = copy("hf")
    state = load_file(path / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        state[name] = torch.cat([state[name], state[name][:80]])
    save_file(state, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "vocab_size": 400}))
    [found] = named(list(verify(path)), "tokenizer.json", "tokenizer")
    assert found.status == "warn"
    assert "258 tokens and the embedding 400 rows" in found.message


def test_the_tokenizer_is_checked_even_if_the_checkpoint_cannot_be_opened(copy: Copy) -> None:
    path = copy("hf")
    (path / "model.safetensors").unlink()
    assert [(f.status, f.item) for f in verify(path) if f.check == "tokenizer"] == [("ok", "tokenizer.json")]
    (path / "tokenizer.json").write_text("{}")
    assert named(failures(path), "tokenizer.json", "tokenizer")


@pytest.mark.parametrize(("declared", "status"), [("as is", "ok"), (5, "warn"), (None, "warn"), ("x" * 100, "warn")])
def test_the_total_size_of_the_index_is_compared(copy: Copy, declared: Any, status: str) -> None:
    path = copy("sharded")
    index = path / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    total = sum(t.nbytes for file in path.glob("*.safetensors") for t in load_file(file).values())
    assert document["metadata"]["total_size"] == total
    if declared != "as is":
        document["metadata"]["total_size"] = declared
        index.write_text(json.dumps(document))
    findings = named(list(verify(path)), index.name, "size")
    assert [f.status for f in findings] == ["ok", status]
    assert declared is None or f"{total:,}" in findings[1].message


@pytest.mark.parametrize("elements", [2**22, 1000, 1])
def test_values_that_are_not_finite_are_counted_and_the_first_is_located(
    copy: Copy, monkeypatch: pytest.MonkeyPatch, elements: int
) -> None:
    path = copy("hf")
    state = load_file(path / "model.safetensors")
    key = "model.layers.1.mlp.down_proj.weight"
    rng = random.Random(2)
    positions = {(rng.randrange(64), rng.randrange(96)) for _ in range(9)}
    values = [float("nan"), float("inf"), float("-inf")]
    for i, position in enumerate(sorted(positions)):
        state[key][position] = values[i % 3]
    state["model.norm.weight"][:] = 0
    state["model.layers.0.self_attn.q_proj.weight"][:] = 0
    state["model.layers.0.self_attn.k_proj.weight"][1:] = 0
    save_file(state, path / "model.safetensors")
    monkeypatch.setattr(verify_module, "ELEMENTS", elements)
    if elements == 1:  # one value at a time is slow, so one matrix is enough
        from llama.checkpoint import open_checkpoint

        with pytest.raises(CheckpointError, match="3 NaN and 6 infinite"):
            verify_module.describe_weight(open_checkpoint(path), "layers.1.feed_forward.w_down.weight")
        return
    findings = [f for f in verify(path, tensors=True) if f.check == "tensors"]
    bad = [f for f in findings if f.status == "fail"]
    assert [f.item for f in bad] == ["layers.1.feed_forward.w_down.weight"]
    assert f"3 NaN and 6 infinite of 6,144 values, the first at {list(min(positions))};" in bad[0].message
    assert sorted(f.item for f in findings if f.status == "warn") == ["layers.0.attention.wq.weight", "norm.weight"]
    assert not [f for f in findings if f.status == "ok"]
    assert failures(path) == [], "without --tensors no weight is read"


# ------------------------------------------------------------------------------------------------------ robustness
@pytest.mark.parametrize("form", ["meta", "sharded", "split"])
def test_no_damage_ends_the_verification(copy: Copy, form: str) -> None:
    path = copy(form)
    rng = random.Random(3)
    files = [f for f in (path if path.is_dir() else path.parent).iterdir() if f.name != "tokenizer.json"]
    for _ in range(25):
        file = rng.choice(files)
        whole = file.read_bytes()
        broken = bytearray(whole)
        near = rng.choice([range(min(2000, len(whole))), range(max(0, len(whole) - 2000), len(whole))])
        for _ in range(rng.choice([1, 3, 50])):
            broken[rng.choice(near)] = rng.randrange(256)
        file.write_bytes(broken)
        findings = list(verify(path, tensors=True))
        assert {f.check for f in findings} >= {"files", "size", "open", "tokenizer", "tensors"}
        assert all(f.message.strip() and "\n" not in f.message for f in findings)
        file.write_bytes(whole)


def test_a_path_that_is_not_a_checkpoint_is_refused(tmp_path: Path) -> None:
    assert {f.check for f in failures(tmp_path)} == {"open", "tokenizer"}
    with pytest.raises(CheckpointError, match="there is no file or folder"):
        list(verify(tmp_path / "nothing"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CheckpointError, match="neither a regular file nor a folder"):
        list(verify(tmp_path / "pipe"))
    (tmp_path / "consolidated.00.pth").write_bytes(b"x")
    with pytest.raises(UsageError, match="name the folder"):
        list(verify(tmp_path / "consolidated.00.pth"))
    (tmp_path / "model.gguf").write_bytes(PAGE)
    assert "web page" in named(failures(tmp_path / "model.gguf"), "model.gguf", "size")[0].message


# ------------------------------------------------------------------------------------------------------- the command
def run(*args: str) -> int:
    parsed = build_parser().parse_args(["verify", *args])
    code: int = parsed.run(parsed)
    return code


def test_the_command_prints_lines_and_a_summary(copy: Copy, capsys: pytest.CaptureFixture[str]) -> None:
    path = copy("meta")
    assert run(str(path)) == 0
    out, err = capsys.readouterr()
    *lines, last = out.splitlines()
    assert err == ""
    assert all(line.split()[0] in ("ok", "warn") for line in lines)
    assert last == f"nothing failed: {len(lines) - 1} ok, 1 warning"
    flip(path / "consolidated.00.pth", 5000)
    assert run(str(path)) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    failed = [line for line in lines if line.startswith("FAIL  ")]
    assert last.startswith(f"{len(failed)} FAILED, ")
    assert any(line.startswith("FAIL  md5       consolidated.00.pth: ") for line in failed)


def test_json_has_the_same_findings(copy: Copy, capsys: pytest.CaptureFixture[str]) -> None:
    path = copy("hf")
    (path / "config.json").write_text("<html>\x1b[2J")
    assert run(str(path), "--json", "--tensors") == 1
    report = json.loads(capsys.readouterr().out)
    assert list(report) == ["path", "format", "ok", "findings"]
    assert (report["path"], report["format"], report["ok"]) == (str(path), "Hugging Face", False)
    assert report["findings"] == [f.__dict__ for f in verify(path, tensors=True)]
    assert {f["status"] for f in report["findings"]} == {"ok", "warn", "fail"}


def test_progress_bars_are_shown_in_terminals_only(
    copy: Copy, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(copy("meta"))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    run(path, "-q")
    quiet = capsys.readouterr()
    assert quiet.err == ""
    run(path, "--tensors")
    out, err = capsys.readouterr()
    assert "md5 consolidated.00.pth" in err
    assert "\r" not in out
    assert out.splitlines()[:5] == quiet.out.splitlines()[:5]


def test_a_usage_error_of_the_process_is_one_line(clearllama: Run, copy: Copy) -> None:
    result = clearllama("verify", str(copy("bin") / "pytorch_model.bin"))
    assert (result.returncode, result.stdout) == (2, b"")
    assert b"name the folder" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_pulled_model_is_verified_by_its_name(originals: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repository, "snapshot", lambda wanted: originals["hf"] if wanted.repo == "org/name" else None)
    assert run("org/name") == 0
    with pytest.raises(CheckpointError, match="there is no file or folder"):
        run("org/other")
