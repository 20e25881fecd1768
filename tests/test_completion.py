"""The shell completion, asked by bash itself."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from llama.cli import COMMANDS, build_parser

from .conftest import Run


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory, clearllama: Run) -> Path:
    pytest.importorskip("shtab")
    if not shutil.which("bash"):
        pytest.skip("there is no bash")
    result = clearllama("--print-completion", "bash")
    assert (result.returncode, result.stderr) == (0, b"")
    path = tmp_path_factory.mktemp("completion") / "clearllama.bash"
    path.write_bytes(result.stdout)
    return path


def completed(script: Path, folder: Path, *words: str) -> set[str]:
    """What bash offers for the last word of a command line."""
    line = " ".join(f"'{word}'" for word in words)
    code = (
        f"source {script}; COMP_WORDS=(clearllama {line}); COMP_CWORD={len(words)}\n"
        "$(complete -p clearllama | sed 's/.*-F \\([^ ]*\\) .*/\\1/') clearllama '' ''; printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    done = subprocess.run(["bash", "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_bash_completes_commands_options_and_paths(script: Path, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    names = set(COMMANDS)
    assert names <= completed(script, tmp_path, "")
    assert completed(script, tmp_path, "generate", "--tok") == {"--tokenizer"}
    assert completed(script, tmp_path, "convert", "x", "y", "--to", "") == {"hf", "gguf"}
    assert "model.gguf" in completed(script, tmp_path, "generate", "-m", "mod")
    assert "model.gguf" in completed(script, tmp_path, "inspect", "mod")


def test_without_shtab_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    with pytest.raises(SystemExit) as left:
        build_parser().parse_args(["--print-completion", "zsh"])
    assert left.value.code == 1
    assert "pip install 'clearllama[completion]'\n" in capsys.readouterr().err
