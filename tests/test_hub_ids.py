"""Models of the Hugging Face hub by their id. huggingface_hub itself runs, with a local server that mimics the hub.

The choice of files, the cache and the errors are tested without the server.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import tokenizers
from huggingface_hub import constants
from tokenizers import decoders, models, pre_tokenizers

from llama.errors import CheckpointError, LlamaError, UsageError
from llama.hub import models as hub
from llama.hub import repository
from llama.tokenizer.common import BYTE_OF

from . import hub_server, test_huggingface, tiny
from .conftest import Run
from .hub_server import SHA, Files, Hub, error_of, path_of, resolve
from .scripts import make_tiny


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


def files_of(folder: Path, prefix: str = "") -> Files:
    return {prefix + path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def repos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Files]:
    """Repositories like those on the hub, with more files than a model needs."""
    root = tmp_path_factory.mktemp("repos")
    write_folder(root / "hf")
    make_tiny.make(root / "meta", "llama-3.2-1b")
    write_folder(root / "sharded", max_shard_size="60KB")
    gguf = tiny.write_gguf(root / "a.gguf").read_bytes()
    more = {"README.md": b"# words", "training_args.bin": b"x", "pytorch_model.bin": b"x", "LICENSE": b"x"}
    return {
        "meta-llama/Tiny": {**files_of(root / "hf"), **files_of(root / "meta", "original/"), **more},
        "org/sharded": {**files_of(root / "sharded"), "consolidated.safetensors": b"x", **more},
        "org/gguf": {"tiny-Q4_0.gguf": gguf, "tiny-Q8_0.gguf": gguf, "config.json": b"{}", "README.md": b"x"},
        "org/one-gguf": {"tiny.gguf": gguf, "README.md": b"x"},
        "org/nothing": {"README.md": b"x", "tokenizer.json": b"{}"},
    }


@pytest.fixture
def server(repos: dict[str, Files]) -> Iterator[Hub]:
    with hub_server.running(repos) as hub:
        yield hub


@pytest.fixture
def env(server: Hub, tmp_path: Path) -> dict[str, str]:
    return hub_server.environment(server, tmp_path)


# ----------------------------------------------------------------------------------------------------- end to end
def test_a_pull_fetches_the_needed_files_and_the_id_then_works_offline(
    clearllama: Run, server: Hub, env: dict[str, str]
) -> None:
    result = clearllama("pull", "meta-llama/Tiny", env=env)
    folder = path_of(result)
    wanted = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert wanted - {"generation_config.json"} <= {file.name for file in folder.iterdir()}
    assert set(server.served) == {file.name for file in folder.iterdir()} <= wanted | {"special_tokens_map.json"}
    assert all((folder / name).read_bytes() == server.repos["meta-llama/Tiny"][name] for name in server.served)
    assert re.fullmatch(
        rb"downloading meta-llama/Tiny \(\d files, \d+ MB to download, licence not stated\)\n", result.stderr
    )

    offline = {**env, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1"}
    facts = json.loads(clearllama("inspect", "meta-llama/Tiny", "--json", env=offline).stdout)
    assert facts["path"] == str(folder)
    assert facts["format"] == "Hugging Face"
    again = clearllama("pull", "meta-llama/Tiny", env={**offline, "HF_HUB_OFFLINE": ""})  # the network is down
    assert path_of(again) == folder
    assert b"using the complete local copy" in again.stderr
    count = len(server.served)
    assert path_of(clearllama("pull", "-q", "meta-llama/Tiny", env=env)) == folder
    assert len(server.served) == count


def test_meta_fetches_the_original_files(clearllama: Run, server: Hub, env: dict[str, str]) -> None:
    folder = path_of(clearllama("pull", "-q", "meta-llama/Tiny", "--meta", env=env))
    assert folder.name == "original"
    assert sorted(server.served) == [
        f"original/{n}" for n in ("checklist.chk", "consolidated.00.pth", "params.json", "tokenizer.model")
    ]
    assert path_of(clearllama("pull", "-q", "meta-llama/Tiny/original", env=env)) == folder
    down = {**env, "HF_ENDPOINT": "http://127.0.0.1:9"}
    assert path_of(clearllama("pull", "-q", "meta-llama/Tiny", "--meta", env=down)) == folder
    assert resolve("meta-llama/Tiny", env) == str(folder)
    (folder / "tokenizer.model").unlink()  # the library knows that it is missing
    line = resolve("meta-llama/Tiny", {**env, "HF_HUB_OFFLINE": "1"})
    assert "the Hugging Face cache has no complete copy of meta-llama/Tiny" in line


def test_a_repository_with_metas_files_alone_needs_no_option(clearllama: Run, server: Hub, env: dict[str, str]) -> None:
    files = server.repos["meta-llama/Tiny"]
    server.repos["org/meta"] = {name: body for name, body in files.items() if name.startswith("original/")}
    assert path_of(clearllama("pull", "-q", "org/meta", env=env)).name == "original"
    assert resolve("org/meta", {**env, "HF_HUB_OFFLINE": "1"}).endswith("/original")


@pytest.mark.row("F03")
@pytest.mark.row("I06")
def test_an_interrupted_pull_ends_at_once_and_the_next_resumes(
    clearllama: Run, server: Hub, env: dict[str, str], tmp_path: Path
) -> None:
    shards = sorted(name for name in server.repos["org/sharded"] if name.startswith("model-"))
    assert len(shards) > 2
    server.stalled = shards[-1]
    command = [sys.executable, "-m", "llama", "pull", "org/sharded"]
    process = subprocess.Popen(
        command, env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert server.halfway.wait(10)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=5)
    assert (process.returncode, stdout) == (130, "")
    assert "downloading org/sharded was stopped; the same command resumes it" in stderr.splitlines()
    line = resolve("org/sharded", {**env, "HF_HUB_OFFLINE": "1"})
    assert "the Hugging Face cache has no complete copy of org/sharded" in line
    before = set(server.served)
    server.stalled = ""
    server.served.clear()
    folder = path_of(clearllama("pull", "-q", "org/sharded", env=env))
    assert shards[-1] in server.served
    assert not before & set(server.served), "nothing is fetched twice"
    assert {file.name for file in folder.glob("*.safetensors")} == set(shards)


def test_gguf_repositories(clearllama: Run, server: Hub, env: dict[str, str]) -> None:
    assert path_of(clearllama("pull", "-q", "org/one-gguf", env=env)).name == "tiny.gguf"
    path = path_of(clearllama("pull", "-q", "org/gguf/tiny-Q8_0.gguf@main", env=env))
    assert path.read_bytes() == server.repos["org/gguf"]["tiny-Q8_0.gguf"]
    assert server.served == ["tiny.gguf", "tiny-Q8_0.gguf"]


def test_gated_repositories_need_a_token(clearllama: Run, server: Hub, env: dict[str, str]) -> None:
    server.gated = {"org/sharded"}
    line = error_of(clearllama("pull", "org/sharded", env=env))
    assert f"accept its licence on {server.url}/org/sharded, log in with 'hf auth login' or set HF_TOKEN" in line
    path_of(clearllama("pull", "-q", "org/sharded", env={**env, "HF_TOKEN": "right"}))
    assert "Bearer right" in server.tokens


def test_missing_repositories_revisions_and_models_are_errors(
    clearllama: Run, server: Hub, env: dict[str, str]
) -> None:
    assert "no accessible repository org/none; it does not exist or is private" in error_of(
        clearllama("pull", "org/none", env=env)
    )
    assert "org/sharded has no revision 'v9'" in error_of(clearllama("pull", "org/sharded@v9", env=env))
    assert "has no model that can be run" in error_of(clearllama("pull", "org/nothing", env=env))
    assert server.served == []


@pytest.mark.row("I10")
def test_offline_mode_and_an_unreachable_hub_are_errors(clearllama: Run, env: dict[str, str]) -> None:
    line = error_of(clearllama("pull", "org/sharded", env={**env, "HF_HUB_OFFLINE": "1"}))
    assert "the Hugging Face cache has no complete copy of org/sharded, and HF_HUB_OFFLINE is set; unset it" in line
    line = error_of(clearllama("pull", "org/sharded", env={**env, "HF_ENDPOINT": "http://127.0.0.1:9"}))
    assert "downloading org/sharded from the Hugging Face hub failed (ConnectError" in line
    assert "check the network" in line


# ----------------------------------------------------------------------------------------------------------- names
@pytest.mark.parametrize(
    ("name", "repo", "path", "revision"),
    [
        ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B", "", "main"),
        ("a/b@v1.0", "a/b", "", "v1.0"),
        ("a/b@refs/pr/3", "a/b", "", "refs/pr/3"),
        ("a/b/original/mp16", "a/b", "original/mp16", "main"),
        ("a/b/Q4/x-00001-of-00002.gguf@main", "a/b", "Q4/x-00001-of-00002.gguf", "main"),
    ],
)
def test_ids_are_parsed(name: str, repo: str, path: str, revision: str) -> None:
    id = repository.hub_id(name)
    assert id == repository.HubId(repo, path, revision)
    assert repository.hub_id(str(id)) == id


@pytest.mark.parametrize(
    "name",
    ["llama", "./a/b", "../a/b", "/a/b", "a/", "a/b/", "a//b", "a/../b", "a/b/../c", "a/b@", "~/a", "a\\b", "", "a/b\n",
     "models/x.gguf", "models/7B/consolidated.00.pth", "a/b/model.safetensors", "a/b/tokenizer.model", "ä/b"],
)  # fmt: skip
def test_paths_are_not_ids(name: str) -> None:
    assert repository.hub_id(name) is None


def test_a_path_wins_over_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repository, "cached", lambda id: pytest.fail("the cache was searched"))
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub.resolve("org/name") == Path("org/name")


# --------------------------------------------------------------------------------------------- which files are chosen
HF = {"config.json", "tokenizer.json", "tokenizer_config.json", "README.md", "special_tokens_map.json"}
SMALL = sorted(HF - {"README.md"})


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        ({*HF, "model.safetensors", "pytorch_model.bin"}, [*SMALL, "model.safetensors"]),
        ({*HF, "model.safetensors", "consolidated.safetensors"}, [*SMALL, "model.safetensors"]),
        ({*HF, "model.safetensors.index.json", "x.safetensors", "y.safetensors"},
         [*SMALL, "model.safetensors.index.json", "indexed.safetensors"]),
        ({*HF, "model-00001-of-00002.safetensors"},
         [*SMALL, "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]),
        ({*HF, "pytorch_model.bin", "training_args.bin", "optimizer.bin"}, [*SMALL, "pytorch_model.bin"]),
        ({*HF, "pytorch_model.bin.index.json"}, [*SMALL, "pytorch_model.bin.index.json", "indexed.safetensors"]),
        ({*HF, "adapter_model.safetensors"}, []),
        ({*HF, "x.gguf"}, ["x.gguf"]),
        ({"x-00002-of-00002.gguf"}, ["x-00002-of-00002.gguf", "x-00001-of-00002.gguf"]),
        ({"params.json", "consolidated.00.pth", "consolidated.01.pth", "tokenizer.model", "tokenizer_checklist.chk",
          "checklist.chk", "LICENSE.pth"},
         ["checklist.chk", "params.json", "tokenizer.model", "tokenizer_checklist.chk", "consolidated.00.pth",
          "consolidated.01.pth"]),
        ({"params.json", "tokenizer.model"}, []),
        ({"model.safetensors"}, []),
        (set(), []),
    ],
)  # fmt: skip
def test_the_chosen_files(names: set[str], chosen: list[str]) -> None:
    assert repository.choose(names, lambda index: {"indexed.safetensors"}, "org/name") == chosen


# -------------------------------------------------------------------------------------- the cache of huggingface_hub
@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty snapshot of org/name in the cache; the library has no list of its files."""
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / SHA
    snapshot.mkdir(parents=True)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text(SHA)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return snapshot


@pytest.mark.row("C07")
def test_only_complete_models_are_found(cache: Path) -> None:
    assert hub.find("org/name") is None
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (cache / "model.safetensors.index.json").write_text(json.dumps(index))
    (cache / "config.json").write_text("{}")
    (cache / "model-1.safetensors").touch()
    assert hub.find("org/name") is None
    assert repository.cached(repository.HubId("org/name", "", "main")) == cache
    (cache / "model-2.safetensors").symlink_to(cache / "gone")
    assert hub.find("org/name") is None
    (cache / "gone").touch()
    assert hub.find("org/name") == hub.find(f"org/name@{SHA}") == hub.resolve("org/name") == cache
    assert hub.find("org/name@other") is None
    assert hub.find("org/name/original") is None


def test_gguf_models_in_the_cache(cache: Path) -> None:
    (cache / "x-00001-of-00002.gguf").touch()
    assert hub.find("org/name") is None
    assert hub.find("org/name/x-00001-of-00002.gguf") is None
    (cache / "x-00002-of-00002.gguf").touch()
    assert hub.find("org/name") == hub.find("org/name/x-00002-of-00002.gguf") == cache / "x-00001-of-00002.gguf"
    (cache / "y.gguf").touch()
    assert hub.find("org/name/y.gguf") == cache / "y.gguf"
    with pytest.raises(CheckpointError, match="choose one"):
        hub.find("org/name")


@pytest.mark.row("C07")
def test_a_broken_index_in_the_cache_is_an_error(cache: Path) -> None:
    (cache / "config.json").write_text("{}")
    (cache / "model.safetensors.index.json").write_text("<html>")
    with pytest.raises(CheckpointError, match="--force"):
        hub.find("org/name")


@pytest.mark.row("I12")
def test_without_huggingface_hub_the_error_names_the_extra(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    for fetch in (hub.pull, hub.resolve):
        with pytest.raises(CheckpointError, match=r"pip install 'clearllama\[hub\]'$"):
            fetch("org/name")


# ------------------------------------------------------------------------------------------ failures, without the server
@pytest.fixture
def fake_hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A hub with a valid list of files, whose download fails with the test's error."""
    files = [type("File", (), {"rfilename": name, "size": 1000})() for name in ("config.json", "model.safetensors")]
    state: dict[str, Any] = {"info": type("Info", (), {"sha": SHA, "siblings": files})(), "download": OSError("?")}

    def download(*args: Any, **options: Any) -> str:
        state["options"] = options
        raise state["download"]

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *_, **__: state["info"])
    return state


@pytest.mark.row("F01")
@pytest.mark.row("I10")
@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "is full; free some space or set HF_HOME"),
        (PermissionError(errno.EACCES, "Permission denied"), "can't write to the Hugging Face cache"),
        (RuntimeError("odd\nthings"), r"RuntimeError: odd things\); check the network and try again"),
    ],
)
def test_failures_during_a_download_are_one_line_errors(
    fake_hub: dict[str, Any], error: Exception, message: str
) -> None:
    fake_hub["download"] = error
    with pytest.raises(CheckpointError, match=message) as caught:
        hub.pull("org/name")
    assert "\n" not in str(caught.value)


@pytest.mark.row("F02")
def test_too_little_disk_space_is_an_error_before_the_download(
    fake_hub: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1999})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match="needs 0 MB; free some space or set HF_HOME"):
        hub.pull("org/name")
    assert "options" not in fake_hub
    usage.free = 2000
    with pytest.raises(CheckpointError, match="check the network"):
        hub.pull("org/name")
    assert fake_hub["options"]["revision"] == SHA


def test_force_does_not_fall_back_to_the_cache(fake_hub: dict[str, Any], cache: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (cache / name).touch()
    assert hub.pull("org/name", quiet=True) == cache
    with pytest.raises(LlamaError, match="check the network"):
        hub.pull("org/name", force=True)
    assert fake_hub["options"]["force_download"] is True


def test_invalid_names_and_options_are_errors() -> None:
    with pytest.raises(UsageError, match="ORG/NAME on the Hugging Face hub"):
        hub.pull("no-such-model")
    with pytest.raises(UsageError, match="--meta"):
        hub.pull(hub.DEFAULT, meta=True)
    with pytest.raises(UsageError, match="is not a valid name on the Hugging Face hub"):
        hub.pull("a--b/c..d")
