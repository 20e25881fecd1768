"""The shape of the project: who imports whom, and that the decoder is closed."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import llama
from llama.model import Runner

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "llama"

# Layers, top first: a module may import from layers below its own and, within a layer, never in a circle. `system`
# may be imported from anywhere but the decoder.
DECODER = [
    {"generate"},
    {"model", "sampling"},
    {"rope", "attention", "cache"},
    {"rope_scaling", "config"},
]
LAYERS = [
    {"__main__"},
    {"cli"},
    {"study", "server"},
    {"inside"},
    {"tools"},
    {"text", "loader"},
    {"generation", "weights"},
    {"engine"},
    {"checkpoint", "chat", "tokenizer", "hub", "quant"},
    *DECODER,
    {"checks", "system"},
    {"errors"},
]
FILES_OF_THE_DECODER = {"__init__", "errors", "checks", *set().union(*DECODER)}
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def noun(path: Path) -> str:
    """The top-level name that a file belongs to: cli for cli/chat.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Top-level names inside the package that a file imports, at run time (TYPE_CHECKING blocks don't count)."""
    tree = ast.parse(path.read_text())
    skipped = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for child in ast.walk(node)
    }
    found: set[str] = set()
    depth = len(path.relative_to(PACKAGE).parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level and id(node) not in skipped:
            if depth - node.level > 0:
                continue  # a neighbour within the same folder
            found |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    me = noun(path)
    if me == "__init__":
        return
    for other in imports(path) - {me, "__version__"}:
        assert LEVEL[me] <= LEVEL[other], f"{me} must not import {other}"


def test_no_circles() -> None:
    graph: dict[str, set[str]] = {}
    for path in modules():
        graph.setdefault(noun(path), set()).update(imports(path) - {noun(path), "__version__"})
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"circle: {' -> '.join((*trail, name))}"
        if name not in done:
            for other in graph.get(name, ()):
                visit(other, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


@pytest.mark.parametrize("name", sorted(set().union(*DECODER)))
def test_no_file_of_the_decoder_imports_a_folder(name: str) -> None:
    assert imports(PACKAGE / f"{name}.py") <= FILES_OF_THE_DECODER


def test_the_decoder_is_all_that_its_import_loads() -> None:
    """In one process, which imports torch once: llama.model first, then llama.generate, which imports it, too."""
    limits = {"llama.model": 1575, "llama.generate": 2265}
    shown = "print(*(m.__file__ for name, m in sys.modules.items() if name.split('.')[0] == 'llama'))"
    code = "import sys\n" + "".join(f"import {module}\n{shown}\n" for module in limits)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    for line, most in zip(done.stdout.splitlines(), limits.values(), strict=True):
        files = [Path(name) for name in line.split()]
        assert {file.parent for file in files} == {PACKAGE}
        assert {file.stem for file in files} <= FILES_OF_THE_DECODER
        assert sum(len(file.read_text().splitlines()) for file in files) <= most


def test_every_module_has_a_layer() -> None:
    assert {noun(path) for path in modules()} - {"__init__"} <= set(LEVEL)


def test_the_model_stays_readable() -> None:
    assert len((PACKAGE / "model.py").read_text().splitlines()) <= 250


def test_every_way_of_executing_is_a_subclass_of_runner() -> None:
    for module in pkgutil.walk_packages(llama.__path__, "llama."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found = {kind.__name__ for kind in Runner.__subclasses__() if kind.__module__.startswith("llama.engine.")}
    assert found <= {"GraphRunner", "KernelRunner", "PlacedRunner"}


def test_no_assert_guards_user_input() -> None:
    for path in modules():
        assert not any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(path.read_text()))), path


def test_the_public_api_is_what_the_package_exports() -> None:
    for name in llama.__all__:
        value = getattr(llama, name)
        assert name == "__version__" or inspect.getdoc(value), f"{name} has no docstring"
    assert set(llama.__all__) == set(dir(llama))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = llama.nonsense


def test_importing_a_module_does_not_shadow_the_api() -> None:
    for module in pkgutil.walk_packages(llama.__path__, "llama."):
        if not module.name.endswith("__main__"):
            __import__(module.name)
    assert callable(llama.load)
    assert callable(llama.load_model)


def test_the_layers_in_the_documentation_are_those_that_a_test_checks() -> None:
    (block,) = re.findall(r"^```text\n(.*?)^```$", (ROOT / "docs/reference/architecture.md").read_text(), re.S | re.M)
    assert [set(re.findall(r"\w+", line.split("   ")[0])) for line in block.splitlines()] == LAYERS[1:]


def test_the_repository_speaks_of_the_software_only() -> None:
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *modules()]:
        assert not re.search(r"/(work|farm|root|tmp)/", path.read_text()), path
