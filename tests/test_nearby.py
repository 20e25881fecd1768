"""Models and tokenizers that lie near the path that was typed, and --tokenizer."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

import pytest

import llama
from llama.checkpoint import open_checkpoint
from llama.cli import main, with_options
from llama.errors import CheckpointError, LlamaError, TokenizerError, UsageError
from llama.generation.session import Session
from llama.hub import families
from llama.hub.models import DEFAULT, from_meta, resolve, similar
from llama.hub.repository import hub_id
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


# ------------------------------------------------------------------------------------------------- a folder below
def test_the_parent_folder_of_one_model(clearllama: Run, root: Path, tmp_path: Path) -> None:
    parent = tmp_path / "download"
    shutil.copytree(root / "llama-3", parent / "Llama3.2-1B")
    (parent / "notes").mkdir()
    result = clearllama("generate", "-m", str(parent), "-n", "2", "--raw", TEXT)
    assert result.returncode == 0, result.stderr
    line = f"clearllama: warning: {parent} is not a model, but contains one; using {parent / 'Llama3.2-1B'}"
    assert line in result.stderr.decode().splitlines()
    direct = clearllama("generate", "-m", str(parent / "Llama3.2-1B"), "-n", "2", "--raw", TEXT)
    assert result.stdout == direct.stdout


def test_python_warns_of_the_folder_it_chose(root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copytree(root / "llama-3", tmp_path / "download" / "Llama3.2-1B")
    expected = f"{tmp_path / 'download'} is not a model, but contains one; using {tmp_path / 'download/Llama3.2-1B'}"
    assert expected in llama.load(tmp_path / "download").warnings
    llama.load_model(tmp_path / "download")
    assert [record.getMessage() for record in caplog.records].count(f"clearllama: warning: {expected}") == 2


def test_original_below_a_folder_of_the_hub(root: Path) -> None:
    hub = root / "hub"
    shutil.copytree(root / "llama-3", hub / "original")
    (hub / "README.md").touch()
    assert open_checkpoint(hub).format == "Meta"
    shutil.copy(root / "hf" / "config.json", hub)  # a part of the other format, without its weights
    shutil.copy(root / "hf" / "tokenizer.json", hub)
    checkpoint = open_checkpoint(hub)
    assert checkpoint.format == "Meta"
    assert checkpoint.warnings[0] == f"{hub} is not a model, but contains one; using {hub / 'original'}"
    shutil.copy(root / "hf" / "model.safetensors", hub)
    assert (open_checkpoint(hub).format, list(open_checkpoint(hub).warnings)) == ("Hugging Face", [])


def test_a_folder_with_two_formats_states_which_is_read(root: Path) -> None:
    both = root / "llama-3"
    shutil.copy(root / "hf" / "config.json", both)
    found = open_checkpoint(both)
    assert found.format == "Meta"
    assert found.warnings[0].startswith(f"{both} has files of two formats: reading params.json and the .pth files; ")
    shutil.copy(root / "hf" / "model.safetensors", both)
    found = open_checkpoint(both)
    assert found.format == "Hugging Face"
    assert found.warnings[0].startswith(f"{both} has files of two formats: reading config.json and its weights; ")
    assert [w for w in open_checkpoint(root / "hf").warnings if "two formats" in w] == []
    settings = json.loads((both / "config.json").read_text())
    (both / "config.json").write_text(json.dumps(settings | {"hidden_size": 8}))
    with pytest.raises(CheckpointError, match=r"files of two models: params\.json has dim \d+, .* has hidden_size 8; "):
        open_checkpoint(both)


def test_a_folder_of_the_hubs_cache(root: Path) -> None:
    snapshot = root / "models--org--name" / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    shutil.move(root / "hf", snapshot)
    checkpoint = open_checkpoint(root / "models--org--name")
    assert checkpoint.path == snapshot
    shutil.copytree(snapshot, snapshot.with_name("1" * 40))
    with pytest.raises(
        CheckpointError, match=rf"contains several: {snapshot} and {snapshot.parent}/1+; name one of them"
    ):
        open_checkpoint(root / "models--org--name")


def test_a_gguf_beside_a_config(root: Path, tiny_gguf: Path) -> None:
    for file in (root / "hf").glob("*.safetensors"):
        file.unlink()
    shutil.copy(tiny_gguf, root / "hf")
    assert open_checkpoint(root / "hf").format == "GGUF"


def test_two_models_are_refused_with_both_names(clearllama: Run, root: Path) -> None:
    result = clearllama("inspect", str(root))
    assert (result.returncode, result.stdout) == (1, b"")
    names = f"{root / 'hf'}, {root / 'llama-2'} and {root / 'llama-3'}"
    assert result.stderr.decode() == (
        f"clearllama: error: {root} is not a model, but contains several: {names}; name one of them\n"
    )


def test_folders_deeper_than_two_levels_are_not_searched(root: Path) -> None:
    deep = root / "a" / "b" / "c"
    shutil.copytree(root / "hf", deep)
    assert open_checkpoint(root / "a").path == deep
    (root / "x").mkdir()
    shutil.move(root / "a", root / "x")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        open_checkpoint(root / "x")


# ------------------------------------------------------------------------------------------------- the tokenizer
@pytest.mark.parametrize("place", ["llama-3/tokenizer/tokenizer.model", "tokenizer.json"])
def test_a_tokenizer_elsewhere_is_found_and_named(root: Path, place: str) -> None:
    folder = root / "llama-3"
    expected = llama.load_tokenizer(folder).encode(TEXT)
    source = folder / "tokenizer.model" if place.endswith("model") else root / "hf" / "tokenizer.json"
    (root / place).parent.mkdir(exist_ok=True)
    shutil.move(source, root / place)
    (folder / "tokenizer.model").unlink(missing_ok=True)
    shutil.rmtree(root / "hf")
    llm = llama.load(folder, device="cpu")
    assert llm.tokenizer.encode(TEXT) == expected
    assert list(llm.warnings) == [f"{folder} has no tokenizer; using {root / place}"]


def test_the_tokenizer_of_a_folder_beside_is_not_used(root: Path) -> None:
    """It may be another model's, with as many tokens: Llama 2 and Mistral both have 32,000."""
    (root / "other").mkdir()
    shutil.move(root / "llama-3" / "tokenizer.model", root / "other")
    with pytest.raises(TokenizerError, match="in this folder or near it"):
        llama.load_tokenizer(root / "llama-3")


def test_a_folder_of_hugging_faces_uses_the_tokenizer_of_original(root: Path) -> None:
    folder = root / "hf"
    expected = llama.load_tokenizer(folder).encode(TEXT)
    (folder / "tokenizer.json").unlink()
    shutil.rmtree(root / "llama-2")
    with pytest.raises(
        TokenizerError, match=r"there is no tokenizer\.json or tokenizer\.model in this folder or near it"
    ):
        llama.load_tokenizer(folder)  # a neighbour's tokenizer may be another model's
    (folder / "original").mkdir()
    shutil.copy(root / "llama-3" / "tokenizer.model", folder / "original")
    assert llama.load_tokenizer(folder).encode(TEXT) == expected


def test_two_different_tokenizers_are_refused_and_two_equal_ones_are_not(root: Path) -> None:
    folder, file = root / "llama-3", root / "llama-3" / "tokenizer.model"
    data = file.read_bytes()
    file.unlink()
    for name in ("a", "b"):
        (folder / name).mkdir()
        (folder / name / "tokenizer.model").write_bytes(data)
    (folder / "c").mkdir()
    (folder / "c" / "tokenizer.model").write_text("not a tokenizer")
    assert llama.load_tokenizer(folder).n_vocab == 768
    (folder / "b" / "tokenizer.model").write_bytes(b"".join(data.splitlines(keepends=True)[:-1]))
    names = " and ".join(re.escape(str(folder / name / "tokenizer.model")) for name in "ab")
    with pytest.raises(TokenizerError, match=f"and those near it differ: {names}; name one with --tokenizer PATH"):
        llama.load_tokenizer(folder)
    assert llama.load(folder, tokenizer=folder / "a", device="cpu").tokenizer.n_vocab == 768


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
    assert f"using {folder}" in capsys.readouterr().err
    for name in ("Llama3", "../checkpoints/Llama3-8B", "."):
        assert resolve(name) == Path(".") if name == "." else not from_meta(name)
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
    facts = json.loads(clearllama("inspect", str(folder), "--tokenizer", str(own), "--json").stdout)
    assert facts["tokens"] == 768
    result = clearllama("convert", str(folder), str(tmp_path / "new"), "--to", "hf", "--tokenizer", str(own))
    assert result.returncode == 0, result.stderr
    assert llama.load_tokenizer(tmp_path / "new").encode(TEXT) == llama.load_tokenizer(own).encode(TEXT)
    (tmp_path / "text").write_text("not a vocabulary\n")
    for path, message in (
        (tmp_path / "no", r"no usable tokenizer at .*no: expected a tokenizer\.model.*No such file"),
        (tmp_path / "text", r"no usable tokenizer at .*text: expected a tokenizer\.model"),
        (default_gguf, "use the tokenizer that was published"),
    ):
        with pytest.raises(LlamaError, match=message):
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
    with pytest.raises(CheckpointError, match="was saved with another tokenizer, so its ids mean different text"):
        Session.load(tmp_path / "s", swapped.model, swapped.tokenizer)
    loaded = Session.load(tmp_path / "s", swapped.model)  # compared by the first stream
    with pytest.raises(UsageError, match="this session contains ids of another tokenizer"):
        swapped.generate(TEXT, max_new_tokens=2, session=loaded)
    again = llama.load(folder, device="cpu", dtype="float32")
    assert (
        again.generate(TEXT, max_new_tokens=2, session=Session.load(tmp_path / "s", again.model)).stats.cached_tokens
        > 0
    )


def test_every_official_model_has_a_repository_in_each_spelling() -> None:
    for name in families.official():
        if name.startswith(("llama-1", "smollm2")):  # LLaMA 1 has no public repository, SmolLM2 is the default
            assert families.repository_of(name) is None
            continue
        repository = families.repository_of(name)
        assert repository is not None, name
        assert hub_id(repository) is not None
        for spelling in (name.upper(), f"models/{name}", f"Meta-{name}", name.replace("-", "").replace("b", ":b")):
            assert families.repository_of(spelling) == repository, spelling
    assert all(families.repository_of(repository) == repository for repository in families.REPOSITORIES)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Meta-Llama-3-8B", "give its path, or: clearllama pull meta-llama/Meta-Llama-3-8B"),
        ("./Llama-2-7b-chat/", "give its path, or: clearllama pull meta-llama/Llama-2-7b-chat"),
        ("llama3.1:8b", "give its path, or: clearllama pull meta-llama/Llama-3.1-8B"),
        ("Llama-3.1-8B-Instrct", "did you mean meta-llama/Llama-3.1-8B-Instruct,"),
        ("Meta-Llama-3-8", "did you mean meta-llama/Meta-Llama-3-8B?"),
        (DEFAULT.replace("-", "_")[:-1], f"did you mean {DEFAULT}?"),
        ("Llama-4-8B", f"expected a path, ORG/NAME on the Hugging Face hub or {DEFAULT}"),
    ],
)
def test_an_absent_model_is_named_with_the_command_that_downloads_it(name: str, expected: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        resolve(name)
    assert str(caught.value).startswith(f"there is no file or folder {name!r}; {expected}")
    assert expected.endswith(",") or str(caught.value).endswith(expected)


def test_a_name_that_is_nearly_that_of_a_model_on_disk_gets_its_path(clearllama: Run, tmp_path: Path) -> None:
    for name in ("Meta-Llama-3-8B", "llama.gguf"):
        (tmp_path / name).mkdir()
    (tmp_path / "notes.txt").touch()
    wrong, meant = tmp_path / "meta_llama3-8b", f"did you mean {tmp_path / 'Meta-Llama-3-8B'}?"
    with pytest.raises(CheckpointError, match=re.escape(f"{meant} Or: clearllama pull meta-llama/Meta-Llama-3-8B")):
        resolve(wrong)
    for command in (("verify", wrong), ("inspect", wrong), ("quantize", wrong, tmp_path / "new")):
        done = clearllama(*map(str, command))
        assert (done.returncode, done.stdout) == (1, b"")
        assert meant in done.stderr.decode()
    assert similar(str(tmp_path / "note.txt")) == similar(str(tmp_path / "other")) == similar("a\0b") == ""


def test_usage_errors_name_the_option_of_a_parameter() -> None:
    args = argparse.Namespace(top_p=0.5, rope="real", gpu_layers=1, seed=0)
    for message, shown in [
        ("top_p must be a number from 0 to 1, got 2", "--top-p must be a number from 0 to 1, got 2"),
        ("seed must be an integer", "--seed must be an integer"),
        ("gpu_layers 2 requires a GPU", "--gpu-layers 2 requires a GPU"),
        ("rope scaling yarn does not accept 'x'", "rope scaling yarn does not accept 'x'"),
        ("max_seq_len must be an integer", "max_seq_len must be an integer"),
    ]:
        assert with_options(message, args) == shown
