"""The shape of the project: who imports whom, how long the model is, what the README promises."""

from __future__ import annotations

import ast
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import llama

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "llama"

# Layers, top first: a module may import from layers below its own and, within a layer, never in a circle.
LAYERS = [
    {"__main__"},
    {"cli"},
    {"study", "tools"},
    {"text", "loader"},
    {"generation", "weights"},
    {"engine"},
    {"checkpoint", "chat", "tokenizer", "hub", "quant"},
    {"generate"},
    {"model", "sampling"},
    {"rope", "attention", "cache"},
    {"rope_scaling", "config"},
    {"checks"},
    {"errors", "system"},
]
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


def test_every_module_has_a_layer() -> None:
    assert {noun(path) for path in modules()} - {"__init__"} <= set(LEVEL)


def test_the_model_stays_readable() -> None:
    assert len((PACKAGE / "model.py").read_text().splitlines()) < 250


def test_no_assert_guards_user_input() -> None:
    for path in modules():
        assert not any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(path.read_text()))), path


def test_the_package_is_typed() -> None:
    assert (PACKAGE / "py.typed").exists()


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


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_everything_public_has_a_docstring(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree) or not tree.body
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            contract = node.name in ("add_parser", "run", "recognizes", "draw") or node.name.endswith("_draw")
            named = contract or ast.get_docstring(node)  # those do what their caller's interface says
            assert named or "dataclass" in ast.dump(node), f"{path.name}: {node.name} has no docstring"


# ---------------------------------------------------------------------------------------------------------- README
README = (ROOT / "README.md").read_text()


def test_the_readme_shows_the_two_commands_that_ci_runs() -> None:
    assert 'pip install -e . && clearllama generate "What is the capital of Japan?"' in README
    assert "pip install -e '.[test]' && pytest" in README


def test_the_readme_maps_every_file_of_the_package() -> None:
    tree = README[README.index("llama/") :]
    for path in modules():
        name = path.relative_to(PACKAGE)
        if name.name not in ("__init__.py", "__main__.py") and len(name.parts) == 1:
            assert re.search(rf"^\s+{name.name}\s", tree, re.MULTILINE), f"{name} is not in the README's tree"


def test_the_repository_speaks_of_the_software_only() -> None:
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *modules()]:
        assert not re.search(r"/(work|farm|root|tmp)/", path.read_text()), path
