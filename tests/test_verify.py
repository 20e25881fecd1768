"""verify: a complete checkpoint passes, and damage in any file is found and named."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from llama.cli import main
from llama.hub import models as hub
from llama.tools.convert import convert
from llama.tools.doctor import Finding
from llama.tools.verify import WEIGHTS, find_files, verify

from . import tiny
from .faults.harness import snapshot
from .scripts import make_tiny
from .test_huggingface import edit

pytestmark = pytest.mark.usefixtures("one_thread")

PAGE = b"\n  <!DOCTYPE html><html><body>403 Forbidden</body></html>" * 20
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 123\n"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A complete checkpoint in every form; for GGUF the folder of the file."""
    root = tmp_path_factory.mktemp("originals")
    make_tiny.make(root / "meta", "llama-3-70b", shards=2)
    make_tiny.make(root / "meta2" / "7B", "llama-2-7b")  # Meta's layout: the tokenizer is in the parent folder
    shutil.move(root / "meta2" / "7B" / "tokenizer.model", root / "meta2" / "tokenizer.model")
    write_md5(root / "meta2" / "tokenizer_checklist.chk", root / "meta2" / "tokenizer.model")
    convert(root / "meta", root / "hf", "hf")
    convert(root / "meta", root / "sharded", "hf", shards=3)
    shutil.copytree(root / "hf", root / "bin")
    torch.save(load_file(root / "bin" / "model.safetensors"), root / "bin" / "pytorch_model.bin")
    (root / "bin" / "model.safetensors").unlink()
    (root / "gguf").mkdir()
    tiny.write_gguf(root / "gguf" / "tiny.gguf")
    return {path.name: path for path in root.iterdir()}


def write_md5(target: Path, *files: Path) -> None:
    target.write_text("".join(f"{hashlib.md5(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files))


FORMS = ["meta", "meta2", "hf", "sharded", "bin", "gguf"]
Copy = Callable[[str], Path]


@pytest.fixture
def copy(originals: dict[str, Path], tmp_path: Path) -> Copy:
    """Make a copy of a complete checkpoint to damage; return the path that a user would give."""

    def make(form: str) -> Path:
        folder = Path(shutil.copytree(originals[form], tmp_path / form))
        return {"meta2": folder / "7B", "gguf": folder / "tiny.gguf"}.get(form, folder)

    return make


def failures(path: Path, name: str = "", group: str = "") -> list[Finding]:
    """The failures of an item and a kind of check."""
    found = [one for one in verify(path) if one.status == "fail"]
    return [one for one in found if name in one.item and group in one.group]


# ----------------------------------------------------------------------------------------------- complete or damaged
@pytest.mark.parametrize("form", FORMS)
def test_a_complete_checkpoint_passes(copy: Copy, form: str) -> None:
    path = copy(form)
    before = snapshot(path.parent)
    findings = list(verify(path))
    assert failures(path) == []
    done = {f.group for f in findings if f.status == "ok"}
    assert {"files", "open", "tokenizer"} <= done
    assert ("md5" in done, "crc32" in done) == (form.startswith("meta"), form in ("meta", "meta2", "bin"))
    weights = {file.name for file in path.rglob("*") if file.suffix in WEIGHTS}
    assert {f.item for f in findings if f.group == "files"} >= weights
    bare = {"meta2": [], "meta": ["tokenizer.model"], "hf": ["model.safetensors, tokenizer.json"]}
    if form in bare:
        assert [f.item for f in findings if f.status == "warn" and f.group == "sums"] == bare[form]
    assert snapshot(path.parent) == before


@pytest.mark.parametrize("form", FORMS)
def test_every_damaged_or_missing_file_is_named(copy: Copy, form: str) -> None:
    """A file that is truncated, has more bytes, is a web page, a pointer of git-lfs, or is missing."""
    path = copy(form)
    optional = {"generation_config.json", "tokenizer_config.json", "model.safetensors.index.json"}
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        if file.suffix == ".chk":
            continue
        whole = file.read_bytes()
        contents = {b"": "empty", PAGE: "web page", POINTER: "git-lfs pointer"}
        if file.suffix in WEIGHTS:
            contents |= {whole[:length]: "" for length in (7, len(whole) // 2, len(whole) - 10, len(whole) - 1)}
        if file.suffix == ".safetensors":
            contents[whole + bytes(64)] = ""
        for content, reason in contents.items():
            file.write_bytes(content)
            found = [f for f in failures(path) if file.name in f.item + f.message]
            assert any(reason in f.message for f in found), (file.name, len(content))
        if file.name not in optional and file != path:
            file.unlink()
            expected = {"pytorch_model.bin": "no weights"}.get(file.name, file.name)
            assert any(expected in f.item + f.message for f in failures(path)), file.name
        file.write_bytes(whole)
    assert failures(path) == []


def test_missing_files_and_broken_links_are_found(copy: Copy, tmp_path: Path) -> None:
    path = copy("meta")
    (path / "consolidated.00.pth").unlink()
    (path / "params.json").unlink()
    (path / "params.json").symlink_to("blob")
    found = failures(path, group="md5")
    assert {one.item for one in found} == {"params.json", "consolidated.00.pth"}
    assert all("checklist.chk lists it" in one.message for one in found)
    parts = [tmp_path / f"[x]-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for part in parts:
        part.touch()
    assert find_files(parts[1]) == parts


# --------------------------------------------------------------------------------------------------------- checksums
def flip(file: Path, at: int) -> None:
    with open(file, "rb+") as opened:
        opened.seek(at)
        byte = opened.read(1)[0]
        opened.seek(at)
        opened.write(bytes([byte ^ 1]))


def test_a_flipped_bit_is_found_by_the_checksums_of_the_archive(copy: Copy) -> None:
    file = copy("bin") / "pytorch_model.bin"
    with zipfile.ZipFile(file) as archive:
        record = max(archive.infolist(), key=lambda record: record.file_size)
    flip(file, record.header_offset + record.file_size // 2)
    [found] = [one for one in verify(file.parent) if one.group == "crc32"]
    assert f"CRC-32 of {record.filename} differs" in found.message


@pytest.mark.parametrize("tool", ["md5sum", "sha256sum"])
def test_a_checklist_finds_what_the_tool_finds(copy: Copy, tool: str) -> None:
    path, group, names = copy("meta"), tool.removesuffix("sum"), ["params.json", "tokenizer.model"]
    listing = subprocess.run([tool, "-b", *names], cwd=path, capture_output=True, check=True).stdout
    (path / "checklist.chk").write_bytes(b"# made by hand\r\n" + listing)
    assert {f.item for f in verify(path) if f.group == group and f.status == "ok"} == set(names)
    for name in names:
        flip(path / name, 9)
        assert failures(path, name, group), name
        flip(path / name, 9)
    for line in (b"d41d8cd98f00b204e9800998ecf8427e  ../x", b"\x1b[2J", b"\xff"):
        (path / "checklist.chk").write_bytes(line + b"\n")
        [found] = failures(path, "checklist.chk", "sums")
        assert found.message.isprintable()


@pytest.mark.parametrize("kept", ["links", "records"])
def test_the_checksums_that_the_hubs_library_recorded_are_compared(copy: Copy, tmp_path: Path, kept: str) -> None:
    """In its cache a file is a link to its sha256, or its git object id if it is small; elsewhere there are records."""
    source = copy("hf")
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "c0ffee", tmp_path / "models--a--b" / "blobs"
    records = source / ".cache" / "huggingface" / "download"
    for folder in (snapshot, blobs, records):
        folder.mkdir(parents=True)
    for file in [file for file in source.iterdir() if file.is_file()]:
        large = file.suffix == ".safetensors"
        command = ["sha256sum", file] if large else ["git", "hash-object", "--no-filters", file]
        name = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
        (records / f"{file.name}.metadata").write_text(f"c0ffee\n{name}\n1700000000.0\n")
        shutil.copy(file, blobs / name)
        (snapshot / file.name).symlink_to(Path("../../blobs", name))
    path = snapshot if kept == "links" else source
    findings = list(verify(path))
    assert {f.status for f in findings} == {"ok"}
    assert [f.item for f in findings if f.group == "sha256"] == ["model.safetensors"]
    assert len([f for f in findings if f.group == "git"]) == len(list(snapshot.iterdir())) - 1
    weights = path / "model.safetensors"
    flip(weights.resolve(), weights.stat().st_size - 100)  # in a weight, which no header describes
    assert [(f.group, f.item) for f in failures(path)] == [("sha256", "model.safetensors")]


def test_the_default_model_is_compared_with_its_sha256(copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    path = copy("gguf")
    own = {"FILE": path.name, "SIZE": path.stat().st_size, "SHA256": hashlib.sha256(path.read_bytes()).hexdigest()}
    for name, value in own.items():
        monkeypatch.setattr(hub, name, value)
    assert {f.status for f in verify(path)} == {"ok"}
    flip(path, path.stat().st_size - 100)
    assert [f.group for f in failures(path)] == ["sha256"]


# ------------------------------------------------------------------------------------- documents, tensors, tokenizer
def test_files_that_contradict_each_other_fail(copy: Copy) -> None:
    path = copy("hf")
    edit(path, intermediate_size=95)
    assert len(failures(path, "hf", "open")) == 6  # three matrices of two layers
    path = copy("meta")
    (path / "tokenizer.model").write_bytes(make_tiny.tiktoken_model(600))
    assert "tokenizer" in {f.group for f in failures(path)}


# ------------------------------------------------------------------------------------------------------- the command
def test_a_path_that_is_not_a_checkpoint_fails(tmp_path: Path) -> None:
    (tmp_path / "consolidated.00.pth").write_bytes(b"x")
    for path in (tmp_path, tmp_path / "nothing", tmp_path / "consolidated.00.pth"):
        assert "open" in {f.group for f in failures(path)}


def test_the_command_prints_lines_and_a_summary_or_json(copy: Copy, capsys: pytest.CaptureFixture[str]) -> None:
    path = copy("meta")
    assert main(["verify", str(path)]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == f"no damage found, but not all could be checked: {len(lines) - 1} ok, 1 warn"
    (path / "params.json").write_text("<html>\x1b[2J")
    assert main(["verify", str(path)]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert any(line.startswith("FAIL  md5       params.json: ") for line in lines)
    assert " FAILED, " in last
    assert main(["verify", str(path), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert list(report) == ["path", "ok", "findings"]
    assert (report["path"], report["ok"]) == (str(path), False)
    assert len(report["findings"]) == len(lines)
    assert list(report["findings"][0]) == ["status", "group", "item", "message", "remedy"]


def test_a_pulled_model_is_verified_by_its_name(originals: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "find_cached", lambda wanted: originals["hf"] if wanted.repo == "org/name" else None)
    assert [main(["verify", name]) for name in ("org/name", "org/other")] == [0, 1]
