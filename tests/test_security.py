"""The trust boundary of SECURITY.md in the code: what is unpickled, and what code is loaded."""

from __future__ import annotations

import re
from pathlib import Path

from llama.engine import kernels
from llama.system import folders

ROOT = Path(__file__).parents[1]


def test_files_that_the_page_names_exist() -> None:
    names = re.findall(r"`((?:tests|llama|\.ci)/[\w./]*|pyproject\.toml)`", (ROOT / "SECURITY.md").read_text())
    assert not [name for name in names if not (ROOT / name).exists()]


def test_only_one_file_unpickles_and_only_in_the_safe_mode() -> None:
    unpickles = re.compile(r"torch\.load\(.*|\bpickle\.(?:loads?|Unpickler)\b")
    found = {path.name: unpickles.findall(path.read_text()) for path in (ROOT / "llama").rglob("*.py")}
    found = {name: calls for name, calls in found.items() if calls}
    assert list(found) == ["torchfile.py"]
    assert len(found["torchfile.py"]) == 1
    assert all("weights_only=True" in call for call in found["torchfile.py"])


def test_code_is_loaded_only_from_the_checked_cache() -> None:
    loading = re.compile(r"ops\.load_library\((.*?)\)|CDLL\((.*?)\)")
    found = {
        (path.name, next(filter(None, match.groups())))
        for path in (ROOT / "llama").rglob("*.py")
        for match in loading.finditer(path.read_text())
    }
    found = {(file, argument) for file, argument in found if argument != "None"}  # this process itself
    # OpenMP in runtime.py is already loaded.
    assert found == {("kernels.py", "path"), ("runtime.py", "path")}
    assert kernels.load_code is folders.load_code
