"""Models of the Hugging Face hub by their id. huggingface_hub itself runs, with a local server that mimics the hub."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from huggingface_hub import constants

from llama.checkpoint import open_checkpoint
from llama.cli.common import loading
from llama.errors import CheckpointError
from llama.hub import models as hub
from llama.hub.repository import HubId, choose, choose_gguf, hub_id

from . import hub_server, test_huggingface, tiny
from .hub_server import SHA, Files, Hub
from .patience import PATIENCE
from .scripts import make_tiny

NEXT = "abcdef1234567890abcdef1234567890abcdef12"  # a later commit


def files_of(folder: Path, prefix: str = "") -> Files:
    return {prefix + path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def repos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Files]:
    """Repositories like those on the hub, with more files than a model needs."""
    root = tmp_path_factory.mktemp("repos")
    test_huggingface.write(root / "hf").save_pretrained(root / "sharded", max_shard_size="60KB")
    settings = {"tokenizer_config.json": b'{"chat_template": "{{ messages }}"}', "generation_config.json": b"{}"}
    (root / "hf" / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE"}}))
    make_tiny.make(root / "meta", "llama-3.2-1b")
    gguf = tiny.write_gguf(root / "a.gguf").read_bytes()
    more = {"README.md": b"# words", "training_args.bin": b"x", "pytorch_model.bin": b"x", "modeling_tiny.py": b"x"}
    three = {"tiny-Q2_K.gguf": b"GGUF2", "tiny-Q4_K_M.gguf": gguf, "tiny-Q8_0.gguf": b"GGUF8"}
    return {
        "meta-llama/Tiny": {**files_of(root / "hf"), **settings, **files_of(root / "meta", "original/"), **more},
        "org/meta": files_of(root / "meta", "original/"),
        "org/sharded": {**files_of(root / "sharded"), "consolidated.safetensors": b"x", **more},
        "org/gguf": {**three, "config.json": b"{}", "mmproj-tiny-f16.gguf": b"x", "README.md": b"x"},
        "org/evil": {"../evil.gguf": gguf},
        "org/nothing": {"README.md": b"x", "tokenizer.json": b"{}"},
    }


@pytest.fixture
def server(repos: dict[str, Files], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The local hub, which huggingface_hub uses in this process, with an empty cache."""
    for name, value in hub_server.environment("", tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    with hub_server.running(repos) as hub:
        files = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        new = {"ENDPOINT": hub.url, "HUGGINGFACE_CO_URL_TEMPLATE": files, "HF_HUB_OFFLINE": False}
        for name, value in new.items():
            monkeypatch.setattr(constants, name, value)
        yield hub


@contextmanager
def down(offline: bool = True) -> Iterator[None]:
    """Nothing answers, and HF_HUB_OFFLINE may say so."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        patch.setattr(constants, "HF_HUB_OFFLINE", offline)
        yield


def error_of(act: Callable[[str], object], name: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        act(name)
    assert "\n" not in caught.value.args[0]
    return str(caught.value)


# ----------------------------------------------------------------------------------------------------- end to end
def test_a_pull_fetches_the_needed_files_and_the_id_then_works_offline(
    server: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "meta-llama/Tiny"
    server.cards[name] = {"license": "llama3.2\x1b"}
    folder = hub.pull(name)
    wanted = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {*server.served} == {file.name for file in folder.iterdir()} == wanted
    assert all((folder / file).read_bytes() == server.repos[name][file] for file in wanted)
    line = "downloading meta-llama/Tiny (5 files, 0 MB, licence llama3.2\\x1b)\n"
    assert tuple(capsys.readouterr()) == ("", line)
    with down():
        assert hub.resolve(name) == folder
    assert hub.pull(name, quiet=True) == folder
    assert len(server.served) == len(wanted), "nothing is fetched twice"
    assert hub.pull(name, force=True, quiet=True) == folder
    assert len(server.served) == 2 * len(wanted)
    server.commit = NEXT
    assert hub.resolve(name) == hub.resolve(f"{name}@{SHA}") == folder
    assert hub.pull(name, quiet=True) == hub.resolve(name) == folder.with_name(NEXT)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["meta-llama/Tiny/original", "org/meta", "org/meta/original"])
def test_metas_files_are_in_the_folder_original(server: Hub, name: str) -> None:
    folder = hub.pull(name)
    assert folder.name == "original"
    names = ("checklist.chk", "consolidated.00.pth", "params.json", "tokenizer.model")
    assert sorted(server.served) == [f"original/{name}" for name in names]
    assert hub.resolve(name) == folder


def test_an_interrupted_pull_ends_at_once_and_the_next_fetches_the_rest(server: Hub, tmp_path: Path) -> None:
    shards = sorted(name for name in server.repos["org/sharded"] if name.startswith("model-"))
    server.stalled = shards[-1]
    env = {**os.environ, **hub_server.environment(server.url, tmp_path)}
    command = [sys.executable, "-m", "llama", "pull", "org/sharded"]
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert server.halfway.wait(PATIENCE)
    process.send_signal(signal.SIGINT)
    stdout, _ = process.communicate(timeout=PATIENCE / 2)  # the server waits longer
    assert (process.returncode, stdout) == (130, b"")
    with down():
        expected = "the Hugging Face cache has no complete copy of org/sharded; unset HF_HUB_OFFLINE"
        assert expected in error_of(hub.resolve, "org/sharded")
    before, server.stalled, server.served = {*server.served}, "", []
    folder = hub.pull("org/sharded")
    assert not before & {*server.served}, "nothing is fetched twice"
    assert {file.name for file in folder.glob("*.safetensors")} == {*shards}


def test_the_quantizations_of_a_repository(server: Hub) -> None:
    names = {"org/gguf": "tiny-Q4_K_M", "org/gguf:q8_0": "tiny-Q8_0", "org/gguf/tiny-Q2_K.gguf@main": "tiny-Q2_K"}
    for name, file in names.items():
        assert hub.resolve(name).name == f"{file}.gguf"
    assert server.served == [f"{file}.gguf" for file in names.values()]
    with down():
        assert hub.resolve("org/gguf:Q8_0").name == "tiny-Q8_0.gguf"
    assert "org/gguf:Q5_0 has no single GGUF model of type Q5_0; choose one" in error_of(hub.resolve, "org/gguf:Q5_0")


def test_every_error_of_the_hub_is_one_line_with_its_remedy(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.gated = {"org/sharded"}
    for name, message in [
        ("org/sharded", f"accept its licence on {server.url}/org/sharded, log in with 'hf auth login' or set HF_TOKEN"),
        ("org/none", "has no repository org/none, or it is private: check the name, or log in"),
        ("org/sharded@v9", "org/sharded has no revision 'v9'; branches, tags and commits are on"),
        ("org/nothing", "org/nothing has no complete model that can be run: expected config.json with"),
        ("org/evil", "downloading org/evil failed (ValueError: "),
        ("org/a--b", "downloading org/a--b failed (HFValidationError: "),
    ]:
        assert message in error_of(hub.pull, name)
    with down():
        assert "no complete copy of org/gguf; unset HF_HUB_OFFLINE" in error_of(hub.pull, "org/gguf")
    with down(offline=False):
        assert "downloading org/gguf failed (ConnectError: " in error_of(hub.pull, "org/gguf")
    assert server.served == []
    monkeypatch.setenv("HF_TOKEN", "right")
    assert hub.pull("org/sharded").is_dir()


# ----------------------------------------------------------------------------------------- a damaged or partial cache
def test_what_is_missing_or_damaged_is_fetched_again(server: Hub) -> None:
    name = "meta-llama/Tiny"
    folder = hub.pull(name)
    ref = folder.parents[1] / "refs" / "main"
    files = ("generation_config.json", "tokenizer_config.json", "tokenizer.json", "config.json", "model.safetensors")
    for file in (*files, ref):
        server.served.clear()
        if file == ref:
            ref.write_bytes(b"../../../x\xff")  # not UTF-8 either
        else:
            (folder / file).resolve().unlink()  # the link dangles
            assert f"{file} is " in error_of(open_checkpoint, str(folder))  # also if the user names the folder
        with down():
            assert f"no complete copy of {name}" in error_of(hub.resolve, name)
        assert hub.resolve(name) == folder
        assert server.served == ([] if file == ref else [file])
    assert ref.read_text() == SHA
    assert all((folder / file).read_bytes() == server.repos[name][file] for file in files)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty snapshot of org/name in the cache."""
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / SHA
    snapshot.mkdir(parents=True)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text(SHA)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return snapshot


def test_only_complete_models_of_the_cache_are_found(cache: Path) -> None:
    for name in ("config.json", "model-00001-of-00002.safetensors"):
        (cache / name).write_text("{}")
        assert hub.find("org/name") is None
    (cache / "model-00002-of-00002.safetensors").touch()
    assert hub.find("org/name") == hub.find(f"org/name@{SHA}") == hub.resolve("org/name") == cache
    assert hub.find("org/name@other") is hub.find("org/name/original") is hub.find("org/name:Q8_0") is None
    (cache / "x-Q8_0.gguf").touch()
    assert hub.find("org/name:Q8_0") == hub.find("org/name/x-Q8_0.gguf") == cache / "x-Q8_0.gguf"
    trees = cache.parent.parent / "trees"  # the list that snapshot_download stores
    trees.mkdir()
    entry = {"size": 2, "blob_id": "0" * 40}
    listed = dict.fromkeys(("config.json", "model.safetensors", "tokenizer_config.json"), entry)
    (trees / f"{SHA}.json").write_text(json.dumps({"format_version": 1, "files": listed}))
    (cache / "model.safetensors").touch()
    assert hub.find("org/name") is None
    (cache / "tokenizer_config.json").touch()
    assert hub.find("org/name") == cache


# ----------------------------------------------------------------------------------------------------------- names
@pytest.mark.parametrize(
    ("name", "id"),
    [
        ("a/b@refs/pr/3", HubId("a/b", revision="refs/pr/3")),
        ("a/b:Q4_K_M@v1.0", HubId("a/b", "", "v1.0", "Q4_K_M")),
        ("a/b/original/mp16", HubId("a/b", "original/mp16")),
        ("a/b/Q4/x-00001-of-00002.gguf@x", HubId("a/b", "Q4/x-00001-of-00002.gguf", "x")),
        *((name, None) for name in ("llama", "./a/b", "../a/b", "/a/b", "a/", "a//b", "a/b/../c", "a/b@", "a\\b", "a/b\n",
                                    "", "models/x.gguf", "a/b/model.safetensors", "ä/b", "a/b/x.gguf:Q8_0")),
    ],
)  # fmt: skip
def test_ids_and_paths(name: str, id: HubId | None) -> None:
    assert hub_id(name) == id
    assert id is None or str(id) == name


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("https://huggingface.co/a/b", "a/b"),
        ("https://www.huggingface.co/a/b/?library=transformers#files", "a/b"),
        ("http://hf.co/a/b/tree/main", "a/b"),
        ("huggingface.co/a/b/tree/v1.0/original", "a/b/original@v1.0"),
        ("https://huggingface.co/a/b/blob/main/x-Q4_K_M.gguf", "a/b/x-Q4_K_M.gguf"),
        ("https://huggingface.co/a/b/resolve/main/Q4/x.gguf?download=true", "a/b/Q4/x.gguf"),
        ("hf.co/a/b:Q4_K_M", "a/b:Q4_K_M"),
        *((other, None) for other in ("https://huggingface.co/a", "hf.co/a/..", "https://example.org/a/b", "hf.co/",
                                      "https://huggingface.co/a/b/blob/main/model.safetensors")),
    ],
)  # fmt: skip
def test_addresses_of_the_hub_are_names(address: str, name: str | None) -> None:
    assert hub_id(address) == (name and hub_id(name))
    assert name is None or loading.model_name(address) == name


# --------------------------------------------------------------------------------------------- which files are chosen
SMALL = ["config.json", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"]
META = ["checklist.chk", "consolidated.00.pth", "consolidated.01.pth", "params.json", "tokenizer.model"]
PARTS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        ([*SMALL, "model.safetensors", "pytorch_model.bin", "x.safetensors"], [*SMALL, "model.safetensors"]),
        ([*SMALL, "model.safetensors.index.json", *PARTS, "model.safetensors"],
         [*SMALL, *PARTS, "model.safetensors.index.json"]),
        ([*SMALL, PARTS[0]], [*SMALL, *PARTS]),
        ([*SMALL, "adapter_model.safetensors"], []),
        ([*SMALL, "additional_chat_templates/tool_use.jinja", "x/model.safetensors", "model.safetensors"],
         [*SMALL, "additional_chat_templates/tool_use.jinja", "model.safetensors"]),
        ([*META, "LICENSE.pth", "config.json"], META),
        ([f"original/{name}" for name in META], [f"original/{name}" for name in META]),
        (["model.safetensors"], []),
    ],
)  # fmt: skip
def test_the_chosen_files(names: list[str], chosen: list[str]) -> None:
    assert choose(HubId("org/name"), names) == sorted(chosen)
    inside = [f"a/b/{name}" for name in names]
    assert choose(HubId("org/name"), inside) == [], "models are in the root or in original/"
    if not names[0].startswith("original/"):
        assert choose(HubId("org/name", "a/b"), inside) == sorted(f"a/b/{name}" for name in chosen)


@pytest.mark.parametrize(
    ("names", "quant", "chosen"),
    [
        ("m-Q4_0 m-Q4_K_M m", "", "m-Q4_K_M"),
        ("m-F16 m-bf16 m-Q8_0", "f16", "m-F16"),
        ("m.q4_k m.q4_k_m m.iq4_k", "Q4_K", "m.q4_k"),
        ("m-UD-Q4_K_XL m-Q2_K", "q4_k_xl", "m-UD-Q4_K_XL"),
        ("Q4_K_M/m-00002-of-00002 m-Q8_0", "", "Q4_K_M/m-00001-of-00002 Q4_K_M/m-00002-of-00002"),
        ("7b-Q4_K_M 13b-Q4_K_M", "Q4_K_M", None),
        ("a-Q4_0", "Q8_0", None),
    ],
)
def test_the_chosen_quantization(names: str, quant: str, chosen: str | None) -> None:
    files = [f"{name}.gguf" for name in names.split()]
    if chosen is None:
        with pytest.raises(CheckpointError, match=r"no single GGUF model of type .*; choose one, as in org/name:TYPE"):
            choose_gguf(files, quant, "org/name")
    else:
        assert sorted(choose_gguf(files, quant, "org/name")) == [f"{name}.gguf" for name in chosen.split()]
