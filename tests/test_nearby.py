"""Models and tokenizers that lie near the path that was typed, and --tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import llama
from llama.checkpoint import open_checkpoint
from llama.cli import main
from llama.errors import CheckpointError, LlamaError, TokenizerError, UsageError
from llama.generation.session import Session
from llama.hub.models import resolve
from llama.tools.convert import convert

from .conftest import Run
from .scripts import make_tiny

TEXT = "two words meet"


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("originals")
    make_tiny.make(root / "llama-3", "llama-3.2-1b")
    make_tiny.make(root / "llama-2", "llama-2-7b")
    convert(root / "llama-3", root / "hf", "hf")
    return root


@pytest.fixture
def root(originals: Path, tmp_path: Path) -> Path:
    """A copy of a model of Meta's, the same as a folder of Hugging Face's, and one of Llama 2."""
    shutil.copytree(originals, tmp_path / "root")
    return tmp_path / "root"


def test_original_below_a_folder_of_the_hub(root: Path) -> None:
    hub = root / "hub"
    shutil.copytree(root / "llama-3", hub / "original")
    for name in ("config.json", "tokenizer.json"):  # a part of the other format, without its weights
        assert open_checkpoint(hub).format == "Meta"
        shutil.copy(root / "hf" / name, hub)
    found = open_checkpoint(hub)
    assert (found.format, found.warnings[0]) == (
        "Meta",
        f"{hub} is not a model, but contains one; using {hub / 'original'}",
    )
    shutil.copy(root / "hf" / "model.safetensors", hub)
    assert (open_checkpoint(hub).format, list(open_checkpoint(hub).warnings)) == ("Hugging Face", [])


def test_a_folder_of_the_hubs_cache_is_searched_two_levels_deep(root: Path, tiny_gguf: Path) -> None:
    snapshot = root / "models--org--name" / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    shutil.move(root / "hf", snapshot)
    assert open_checkpoint(root / "models--org--name").path == snapshot
    shutil.copytree(snapshot, snapshot.with_name("1" * 40))
    with pytest.raises(CheckpointError, match=f"contains 2 models; name one of them, such as {snapshot}"):
        open_checkpoint(root / "models--org--name")
    (root / "x").mkdir()
    shutil.move(root / "models--org--name", root / "x")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        open_checkpoint(root / "x")
    folder = root / "x" / "models--org--name" / "snapshots" / ("0" * 40)
    (folder / "model.safetensors").unlink()  # what is left is no checkpoint of Hugging Face's
    shutil.copy(tiny_gguf, folder)
    assert open_checkpoint(folder).format == "GGUF"


# ------------------------------------------------------------------------------------------------- the tokenizer
@pytest.mark.parametrize("format", ["llama-3", "hf"])
@pytest.mark.parametrize("place", [".", "..", "original"])
def test_a_tokenizer_is_found_in_the_folder_its_parent_or_original(root: Path, format: str, place: str) -> None:
    folder = root / format
    own = folder / ("tokenizer.model" if format == "llama-3" else "tokenizer.json")
    expected = llama.load_tokenizer(folder).encode(TEXT)
    (folder / place).mkdir(exist_ok=True)
    own.rename(folder / place / own.name)
    assert llama.load_tokenizer(folder).encode(TEXT) == expected
    (folder / place / own.name).rename(folder / "tokenizer.old")
    for other in ("tokenizer", "../other"):  # a folder beside may have another model's, with as many tokens
        (folder / other).mkdir()
        shutil.copy(folder / "tokenizer.old", folder / other / own.name)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json.*; name one: tokenizer=PATH"):
        llama.load_tokenizer(folder)
    assert llama.load(folder, tokenizer=folder / "tokenizer", device="cpu").tokenizer.encode(TEXT) == expected


# ------------------------------------------------------------------------------------------------- --tokenizer
def test_a_folder_of_metas_downloader_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    folder = make_tiny.make(tmp_path / "home/.llama/checkpoints/Llama3-8B", "llama-3-8b")
    assert resolve("Llama3-8B", quiet=True) == folder
    assert main(["verify", "Llama3-8B"]) == 0
    assert main(["inspect", "Llama3-8B"]) == 0
    assert str(folder) in capsys.readouterr().out
    assert resolve(".") == Path(".")
    for name in ("Llama3", "../checkpoints/Llama3-8B"):
        with pytest.raises(CheckpointError, match="there is no file or folder"):
            resolve(name)
    make_tiny.make(tmp_path / "Llama3-8B", "llama-2-7b")
    assert resolve("Llama3-8B") == Path("Llama3-8B")  # a folder that is here comes first


def test_the_given_tokenizer_replaces_the_own_one(
    clearllama: Run, root: Path, tmp_path: Path, tiny_gguf: Path, default_gguf: Path
) -> None:
    folder = root / "llama-3"
    own = tmp_path / "own.model"
    shutil.move(folder / "tokenizer.model", own)
    shutil.rmtree(root / "hf")
    result = clearllama("generate", "-m", str(folder), "--tokenizer", str(own), "-n", "2", "--raw", TEXT)
    assert result.returncode == 0, result.stderr
    assert f"tokenizer override: {own}, tiktoken".encode() in result.stderr
    convert(folder, tmp_path / "new", "hf", tokenizer=own)
    assert llama.load_tokenizer(tmp_path / "new").encode(TEXT) == llama.load_tokenizer(own).encode(TEXT)
    (tmp_path / "text").write_text("not a vocabulary\n")
    for path in (tmp_path / "no", tmp_path / "text", default_gguf):
        with pytest.raises(
            LlamaError,
            match=r"no is missing|text begins with b'not a vo', expected a tokenizer|use the tokenizer that was publ",
        ):
            llama.load(folder, tokenizer=path, device="cpu")
    assert open_checkpoint(tiny_gguf, tiny_gguf).tokenizer().n_vocab == open_checkpoint(tiny_gguf).tokenizer().n_vocab


def test_a_session_belongs_to_its_tokenizer(root: Path, tmp_path: Path) -> None:
    folder, other = root / "llama-3", tmp_path / "other.model"
    lines = (folder / "tokenizer.model").read_bytes().splitlines(keepends=True)
    tokens = [line.split()[0] for line in lines]
    tokens[300], tokens[301] = tokens[301], tokens[300]
    other.write_bytes(b"".join(b"%s %d\n" % pair for pair in zip(tokens, range(len(tokens)), strict=True)))
    llm = llama.load(folder, device="cpu", dtype="float32")
    swapped = llama.load(folder, tokenizer=other, device="cpu", dtype="float32")
    session = Session()
    llm.generate(TEXT, max_new_tokens=2, session=session)
    session.save(tmp_path / "s", llm.model)
    Session.load(tmp_path / "s", llm.model, llm.tokenizer)
    with pytest.raises(CheckpointError, match="was saved with tokenizer"):
        Session.load(tmp_path / "s", swapped.model, swapped.tokenizer)
    loaded = Session.load(tmp_path / "s", swapped.model)  # compared by the first stream
    with pytest.raises(UsageError, match="this session holds ids of another tokenizer"):
        swapped.generate(TEXT, max_new_tokens=2, session=loaded)
