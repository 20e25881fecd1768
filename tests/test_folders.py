"""Code in the cache folder: built once, kept in a private folder, made again if it does not load."""

from __future__ import annotations

import os
import random
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from llama import cli
from llama.errors import UsageError
from llama.system import temporary
from llama.system.folders import cache_folder, is_private, load_code
from llama.system.temporary import own_temporary

NOBODY = 65534
only_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="changes owners")


def read(path: str) -> bytes:
    """Read a file without the checksum at its end."""
    return Path(path).read_bytes()[:-32]


def good(path: Path) -> None:
    path.write_bytes(b"good")


def never(path: Path) -> NoReturn:
    pytest.fail("it was made although it is kept")


def test_code_is_made_once_in_a_private_folder(tmp_path: Path) -> None:
    code = tmp_path / "cache" / "kernels" / "avx.so"
    assert load_code(code, good, read) == b"good"
    assert load_code(code, never, read) == b"good"
    assert [path.name for path in code.parent.iterdir()] == ["avx.so"]
    assert stat.S_IMODE(code.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("error", [OSError, RuntimeError])
def test_what_does_not_load_is_made_again_and_never_kept(tmp_path: Path, error: type[Exception]) -> None:
    def load(path: str) -> bytes:
        if (content := read(path)) == b"junk":
            raise error("file too short")
        return content

    code = tmp_path / "cache" / "avx.so"
    with pytest.raises(error, match="file too short"):
        load_code(code, lambda path: path.write_bytes(b"junk"), load)
    assert list(code.parent.iterdir()) == []
    code.write_bytes(b"junk")
    assert load_code(code, good, load) == read(str(code)) == b"good"


SIZE = 20_000


@pytest.mark.parametrize("kept", [0, 1, 31, 32, 33, 4095, 4096, 4097, 8192, SIZE - 32, SIZE - 1, SIZE, SIZE + 31])
@pytest.mark.parametrize("filled", [False, True], ids=["truncated", "zeros"])
def test_what_a_crash_damaged_is_made_again_without_being_loaded(tmp_path: Path, kept: int, filled: bool) -> None:
    """Loading a truncated library ends the process with SIGBUS. After a power cut, a file can end in zeros."""
    content = random.Random(1).randbytes(SIZE)
    made, loaded = [], []

    def make(path: Path) -> None:
        path.write_bytes(content)
        made.append(path)

    def load(path: str) -> None:
        loaded.append(read(path))

    code = tmp_path / "avx.so"
    load_code(code, make, load)
    whole = code.read_bytes()
    code.write_bytes(whole[:kept] + bytes(len(whole) - kept if filled else 0))
    load_code(code, make, load)
    assert (len(made), loaded) == (2, [content] * 2)
    assert code.read_bytes() == whole


KILLED = """
import os, pathlib, sys, time
from llama.system.temporary import own_temporary
with own_temporary(pathlib.Path(sys.argv[1]), ".build") as work:
    (work / "part").write_text("x")
    print(work.name, flush=True)
    time.sleep(1000)
"""


def test_the_temporary_folder_of_a_killed_process_is_removed_by_the_next(tmp_path: Path) -> None:
    """The folder of a running process is kept, and so are all other files."""
    for name in (".build-notes", ".build-abc.tmp", ".pull-abc.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / ("part" if name == ".build-abc.tmp" else ".lock")).touch()
    processes = [
        subprocess.Popen([sys.executable, "-c", KILLED, tmp_path], stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    try:
        kept, left = (process.stdout.readline().strip() for process in processes if process.stdout)
        processes[1].kill()
        processes[1].wait()
        assert (tmp_path / left / "part").exists()
        with own_temporary(tmp_path, ".build") as work:
            others = {".build-notes", ".build-abc.tmp", ".pull-abc.tmp"}
            assert {path.name for path in tmp_path.iterdir()} == others | {kept, work.name}
            assert (tmp_path / kept / "part").exists()
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("owner", "mode", "private"),
    [
        (0, 0o700, True),
        (0, 0o755, True),
        (0, 0o775, False),
        (0, 0o757, False),
        (0, 0o1777, False),
        pytest.param(NOBODY, 0o700, False, marks=only_root),
    ],
)
def test_code_that_others_could_replace_is_not_loaded(tmp_path: Path, owner: int, mode: int, private: bool) -> None:
    code = tmp_path / "avx.so"
    load_code(code, lambda path: path.write_bytes(b"kept"), read)
    if owner:
        os.chown(tmp_path, owner, owner)
    tmp_path.chmod(mode)
    assert is_private(tmp_path) == private
    if private:
        assert load_code(code, never, read) == b"kept"
    else:
        with pytest.raises(OSError, match=f"other users can write to {tmp_path}; run chmod 700 on it"):
            load_code(code, good, read)


def test_a_temporary_folder_in_which_a_program_still_writes_is_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed process may leave a program that writes into the folder while it is being removed."""
    left, remove = tmp_path / ".build-abc.tmp", temporary.shutil.rmtree
    left.mkdir()
    (left / ".lock").touch()

    def removes_the_lock_alone(path: Path | str, **options: Any) -> None:
        (left / ".lock").unlink() if Path(path) == left else remove(path, **options)

    for function in (removes_the_lock_alone, remove):
        monkeypatch.setattr(temporary.shutil, "rmtree", function)
        with own_temporary(tmp_path, ".build"):
            assert left.exists() == (function is not remove)


def test_the_cache_folder_is_the_variable_or_in_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CLEARLLAMA_CACHE", "~/models")
    assert cache_folder() == tmp_path / "models"
    monkeypatch.setenv("CLEARLLAMA_CACHE", "")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert tmp_path in cache_folder().parents

    def unknown(path: Path) -> NoReturn:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", unknown)
    with pytest.raises(UsageError, match="the home folder is not known; set HOME, or CLEARLLAMA_CACHE to a writable"):
        cache_folder()


def test_a_user_without_a_home_folder_gets_a_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """expanduser of os.path leaves ~ then; that of pathlib raises RuntimeError."""
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert cli.main(["inspect", "-m", "no-model-of-this-name"]) == 1
    assert "there is no file or folder 'no-model-of-this-name'" in capsys.readouterr().err
