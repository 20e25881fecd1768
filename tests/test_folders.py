"""Code in the cache folder: built once, kept in a private folder, made again if it does not load."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import NoReturn

import pytest

from llama import cli
from llama.errors import UsageError
from llama.system.folders import cache_folder, is_private, load_code

NOBODY = 65534
only_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="changes owners")


def read(path: str) -> bytes:
    return Path(path).read_bytes()


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
    assert load_code(code, good, load) == code.read_bytes() == b"good"


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
    code.write_bytes(b"kept")
    if owner:
        os.chown(tmp_path, owner, owner)
    tmp_path.chmod(mode)
    assert is_private(tmp_path) == private
    if private:
        assert load_code(code, never, read) == b"kept"
    else:
        with pytest.raises(OSError, match=f"other users can write to {tmp_path}; run chmod 700 on it"):
            load_code(code, good, read)


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
