"""clearllama list and rm: the models on this machine, in a cache folder and a hub's cache made for the test."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from huggingface_hub import constants

from llama import cli
from llama.hub import models as hub

from .hub_server import SHA

FILES = {
    "models--org--one": ["config.json", "model.safetensors"],
    "models--org--meta": ["params.json", "consolidated.00.pth", "tokenizer.model"],
    "models--org--quants": ["a-Q4_K_M.gguf", "a-Q8_0.gguf", "mmproj-a.gguf", "README.md"],
    "models--org--parts": ["b-00001-of-00002.gguf", "b-00002-of-00002.gguf"],
    "models--org--half": ["config.json", "model-00001-of-00002.safetensors"],
    "datasets--org--data": ["config.json", "model.safetensors"],
}
LISTED = {  # name -> its files
    "default": ["default.gguf"],
    "org/one": FILES["models--org--one"],
    "org/meta": FILES["models--org--meta"],
    "org/quants": ["a-Q4_K_M.gguf"],
    "org/quants/a-Q8_0.gguf": ["a-Q8_0.gguf"],
    "org/parts": FILES["models--org--parts"],
}


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Both caches; the size of a file is the length of its name. Files of the hub are links to blobs, as it makes."""
    monkeypatch.setattr(hub, "DEFAULT", "default")
    monkeypatch.setattr(hub, "FILE", "default.gguf")
    monkeypatch.setattr(hub, "SIZE", len("default.gguf"))
    monkeypatch.setenv("CLEARLLAMA_CACHE", str(tmp_path / "own"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "default.gguf").write_text("default.gguf")
    for repo, names in FILES.items():
        root = tmp_path / "hub" / repo
        for folder in ("blobs", "refs", f"snapshots/{SHA}"):
            (root / folder).mkdir(parents=True)
        (root / "refs" / "main").write_text(SHA)
        for name in names:
            (root / "blobs" / name).write_text(name)
            (root / "snapshots" / SHA / name).symlink_to(f"../../blobs/{name}")
    os.utime(tmp_path / "hub/models--org--meta/blobs/params.json", (2e9, 2e9))
    return tmp_path


def remove(*words: str) -> int:
    return cli.main(["rm", *words])


def files_in(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if os.path.lexists(path)}


def test_the_list_has_the_complete_models_by_names_that_work(caches: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "--json"]) == 0
    listed = {model["name"]: model for model in json.loads(capsys.readouterr().out)["models"]}
    assert {name: model["bytes"] for name, model in listed.items()} == {
        name: sum(map(len, names)) for name, names in LISTED.items()
    }
    for name, model in listed.items():
        assert hub.resolve(name, fetch=False) == Path(model["path"])
    assert [listed[name]["format"] for name in ("default", "org/one", "org/meta", "org/parts")] == [
        *("gguf", "hf", "meta", "gguf")
    ]
    assert (next(iter(listed)), listed["org/meta"]["used"]) == ("org/meta", 2e9)
    assert cli.main(["ls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "size", "format", "last", "use"]
    assert {line.split()[0] for line in lines[1:]} == LISTED.keys()
    assert lines[1].split()[1:4] == ["45", "bytes", "meta"]


def test_an_empty_machine_lists_nothing(tmp_path: Path, caches: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "nothing"))
    (caches / "own" / "default.gguf").unlink()
    assert cli.main(["list"]) == 0
    assert tuple(capsys.readouterr()) == (
        "", "clearllama: there is no model yet; clearllama pull downloads the default model\n"
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "path", "more"),
    [("default", "own/default.gguf", ""), ("org/one", "hub/models--org--one", "other programs use this cache")],
)
def test_rm_asks_and_removes_one_model(
    caches: Path, monkeypatch, capsys: pytest.CaptureFixture[str], name: str, path: str, more: str
) -> None:
    before = files_in(caches)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    assert remove(name) == 2, "there is nobody to ask"
    for answer in ("\n", "n\n", "yesterday\n", ""):
        monkeypatch.setattr("sys.stdin", io.StringIO(answer))
        monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
        assert remove(name) == 1
    assert files_in(caches) == before
    said = capsys.readouterr().err
    assert said.count(str(caches / path)) == 5
    assert said.count(more) >= 5
    gone = {caches / path, *files_in(caches / path)}
    if name == "default":
        monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
        monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
        assert remove(name) == 0
    else:
        assert remove("https://huggingface.co/org/one", "--yes") == 0
        assert more in capsys.readouterr().err
    assert files_in(caches) == before - gone
    assert remove(name, "--yes") == 1, "it is gone"


def test_rm_leaves_what_is_outside_of_the_cache(caches: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither a link in place of a model is followed, nor one in a repository, nor is a path removed."""
    outside = caches / "outside"
    outside.mkdir()
    (outside / "weights").write_text("weights")
    blob = caches / "hub/models--org--one/blobs/model.safetensors"
    blob.unlink()
    blob.symlink_to(outside / "weights")
    (caches / "hub/models--org--one/more").symlink_to(outside)
    (caches / "hub/models--org--link").symlink_to(outside)
    (caches / "own/default.gguf").unlink()
    (caches / "own/default.gguf").symlink_to(outside / "weights")
    part = caches / f"hub/models--org--parts/snapshots/{SHA}/b-00002-of-00002.gguf"
    part.unlink()
    part.symlink_to(outside / "weights")
    before = files_in(caches)
    for name, message in {
        "org/link": "models--org--link is a symbolic link to",
        "default": "default.gguf is a symbolic link to",
        f"org/meta@{SHA}": "only a GGUF model or the whole repository can be removed: clearllama rm org/meta",
        "org/parts/b-00001-of-00002.gguf": "b-00002-of-00002.gguf is a symbolic link to",
        "org/quants:Q3_K": "there is no org/quants:Q3_K in",
        "org/quants/mmproj-b.gguf": "there is no org/quants/mmproj-b.gguf in",
        str(outside): "is no name of a model in a cache",
        "../outside": "is no name of a model in a cache",
        "org/..": "is no name of a model in a cache",
    }.items():
        assert remove(name, "--yes") == (1 if "there is no" in message else 2)
        assert message in capsys.readouterr().err
    assert files_in(caches) == before
    assert remove("org/one", "--yes") == 0
    assert (outside / "weights").read_text() == "weights"
    assert not (caches / "hub/models--org--one").exists()


@pytest.mark.parametrize("name", ["org/quants:Q8_0", "hf.co/org/quants:Q8_0", "org/quants/a-Q8_0.gguf", "org/parts"])
def test_rm_removes_one_quantization_with_its_blobs(caches: Path, name: str) -> None:
    """The other files of the repository stay, and no revision keeps a link to what is gone."""
    other = caches / "hub/models--org--quants/snapshots/older"
    other.mkdir()
    for file in ("a-Q8_0.gguf", "a-Q4_K_M.gguf"):
        (other / file).symlink_to(f"../../blobs/{file}")
    before = files_in(caches)
    gone = {path for path in before if path.name == "a-Q8_0.gguf"}
    assert len(gone) == 3
    if name == "org/parts":
        name += "/b-00001-of-00002.gguf"
        gone = {path for path in before if path.name.startswith("b-")}
        assert len(gone) == 4
    assert remove(name, "--yes") == 0
    assert files_in(caches) == before - gone
    assert hub.resolve("org/quants", fetch=False).name == "a-Q4_K_M.gguf"
