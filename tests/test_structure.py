"""The shape of the project: who imports whom, how long the model is, what the README promises."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import llama
from llama.cache import KVCache, LayerCache
from llama.model import Attention, FeedForward, Runner, Transformer, TransformerBlock
from llama.rope import Rope

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
    {"study", "tools", "server"},
    {"text", "loader"},
    {"generation", "weights"},
    {"engine"},
    {"checkpoint", "chat", "tokenizer", "hub", "quant"},
    *DECODER,
    {"checks"},
    {"errors", "system"},
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


def test_there_are_at_most_ten_layers_between_cli_and_errors() -> None:
    """The files of the decoder count as one layer: they are read together."""
    assert len(LAYERS) - len(DECODER) + 1 - len([{"__main__"}, {"cli"}, {"errors"}]) <= 10


@pytest.mark.parametrize("name", sorted(set().union(*DECODER)))
def test_no_file_of_the_decoder_imports_a_folder(name: str) -> None:
    assert imports(PACKAGE / f"{name}.py") <= FILES_OF_THE_DECODER


@pytest.mark.parametrize(("module", "most"), [("llama.model", 1466), ("llama.generate", 1927)])
def test_the_decoder_is_all_that_its_import_loads(module: str, most: int) -> None:
    code = (
        f"import sys, {module};"
        "print(*(m.__file__ for name, m in sys.modules.items() if name.split('.')[0] == 'llama'), sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    files = {Path(line) for line in done.stdout.splitlines()}
    assert {file.parent for file in files} == {PACKAGE}
    assert {file.stem for file in files} <= FILES_OF_THE_DECODER
    assert sum(len(file.read_text().splitlines()) for file in files) <= most


def test_every_module_has_a_layer() -> None:
    assert {noun(path) for path in modules()} - {"__init__"} <= set(LEVEL)


def test_the_model_stays_readable() -> None:
    assert len((PACKAGE / "model.py").read_text().splitlines()) <= 240


# ------------------------------------------------------------------------------------------------------------ seams
def methods(*classes: type) -> set[str]:
    """The names of the methods of classes, and of the attributes that hold functions or layers."""
    return {name for kind in classes for name in vars(kind) if callable(getattr(kind, name)) and name[0] != "_"}


SEAMS = methods(Transformer, TransformerBlock, Attention, FeedForward, Runner, KVCache, LayerCache, Rope) | {
    *("attend", "apply_rotary_emb", "function", "rotate"),
}


def replaced_seams(source: str) -> list[str]:
    """The statements that replace a method or a function of an object from outside, or look whether somebody did."""
    tree, found = ast.parse(source), []
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = [part for target in node.targets for part in ast.walk(target) if isinstance(part, ast.expr)]
        elif isinstance(node, ast.AnnAssign | ast.AugAssign):
            targets = [node.target]
        for target in targets:
            if isinstance(target, ast.Attribute) and target.attr in SEAMS and isinstance(target.ctx, ast.Store):
                own = isinstance(target.value, ast.Name) and target.value.id == "self"
                found += [] if own else [ast.unparse(node)]
        if isinstance(node, ast.Call):
            names = [node.func, *node.args]  # setattr(x, "run", f), and stack.callback(setattr, x, "run", f)
            sets = any(isinstance(name, ast.Name) and name.id in ("setattr", "delattr") for name in names)
            words = [arg.value for arg in node.args if isinstance(arg, ast.Constant)]
            if sets and SEAMS.intersection(words):
                found.append(ast.unparse(node))
            if (
                isinstance(node.func, ast.Name)
                and node.func.id == "vars"
                and [ast.unparse(arg) for arg in node.args] != ["args"]
            ):
                found.append(ast.unparse(node))
    return found


def test_no_method_is_replaced_from_outside() -> None:
    files = [*modules(), *sorted((ROOT / "scripts").glob("*.py"))]
    assert {path.name: found for path in files if (found := replaced_seams(path.read_text()))} == {}


@pytest.mark.parametrize(
    "statement",
    [
        "model.run = fused",
        "block.forward = partial(step, block)",
        "model.hidden, model.new_cache = leader, leader.new_cache",
        "block.attention.attend = kernel",
        "stack.callback(setattr, block.attention, 'attend', attend)",
        "setattr(layer, 'update', update)",
        "cache.place: object = place",
        "alone = 'hidden' not in vars(model)",
    ],
)
def test_a_replaced_method_would_be_found(statement: str) -> None:
    assert replaced_seams(statement)
    assert not replaced_seams("self.run = run; model.runner = Runner(); self.attend = Attend(f); vars(args)")


def test_every_way_of_executing_is_a_subclass_of_runner() -> None:
    for module in pkgutil.walk_packages(llama.__path__, "llama."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found, todo = set(), [Runner]
    while todo:
        todo += (subclasses := todo.pop().__subclasses__())
        found |= {kind for kind in subclasses if kind.__module__.startswith("llama.")}
    assert {kind.__name__ for kind in found} == {"CompiledRunner", "KernelRunner", "PlacedRunner"}
    assert all(kind.__module__.startswith("llama.engine.") for kind in found)


def test_the_runner_is_set_in_one_place() -> None:
    """By `attach_runner` in the loader. Transformer.__init__ sets the default."""
    places = {
        path.name
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "runner" and isinstance(node.ctx, ast.Store)
    }
    assert places == {"loader.py", "model.py"}


# ------------------------------------------------------------------------------------------------------------- sizes
def functions(path: Path) -> Iterator[tuple[ast.FunctionDef, int, int]]:
    """The functions of a file with their lines and parameters."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            args = node.args
            count = len([*args.posonlyargs, *args.args, *args.kwonlyargs])
            yield node, (node.end_lineno or 0) - node.lineno + 1, count


def test_a_large_function_has_its_reason_beside_it() -> None:
    """More than 100 lines or 10 parameters, outside the study: a comment with the word "parameters" or "lines"."""
    for path in modules():
        lines = path.read_text().splitlines()
        for node, length, parameters in functions(path):
            if noun(path) != "study" and (length > 100 or parameters > 10):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                beside = " ".join(lines[max(0, first - 3) : node.lineno + 2])
                assert re.search(r"#.*(parameters|lines)", beside), f"{path.name}: {node.name}"


def test_the_loader_has_only_short_functions() -> None:
    assert all(length <= 60 for _, length, _ in functions(PACKAGE / "loader.py"))


PRIVATE_WORDS = re.compile(r"(^|_)(told|said|held|taken|rounded)($|_)", re.IGNORECASE)


NAMES = {
    **{ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg", ast.keyword: "arg"},
    **{ast.FunctionDef: "name", ast.ClassDef: "name"},
}


def test_names_are_the_words_of_the_field() -> None:
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, NAMES.get(type(node), "_"), None) or ""
            assert not PRIVATE_WORDS.search(name), f"{path.name}: {name}"


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


# ---------------------------------------------------------------------------------------------------------- words
ARCHITECTURE = re.findall(r"^```text\n(.*?)^```$", (ROOT / "docs/reference/architecture.md").read_text(), re.S | re.M)


def test_the_layers_in_the_documentation_are_those_that_a_test_checks() -> None:
    layers = [set(re.findall(r"\w+", line.split("   ")[0])) for line in ARCHITECTURE[0].splitlines()]
    assert layers == LAYERS[1:]


def test_the_repository_speaks_of_the_software_only() -> None:
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *modules()]:
        assert not re.search(r"/(work|farm|root|tmp)/", path.read_text()), path
