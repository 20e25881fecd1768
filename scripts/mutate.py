"""Mutation testing: change the package at random places and see whether a test fails.

usage: python scripts/mutate.py --count 150 --seed 1 [--jobs 2] [--path llama]... [--map FILE] [--results FILE]
       [--again FILE] [--equivalent FILE] [--limit SECONDS]

The first run executes the default tests once under coverage, including their child processes. It writes to --map which
test executes which line and how long it takes. Each mutant is then tested in a copy of the repository with the tests
that execute the changed statement. A mutant is caught by a test that fails, fails again when it runs alone, and passes
without the mutation. It is also caught by a group of tests that crashes or exceeds its time twice, and passes without
the mutation. If no test catches the mutant, or no test executes the statement, the tests that execute any other line of
the file run, most of them from test files that contain the module's name. Tests that fail or are skipped without a
mutation are not used.

Kinds of mutation: comparisons, constants, and/or, not, arithmetic, min/max and any/all, swapped arguments, dropped
statements, returned values, negated conditions. The weight of a mutant is 1 / sqrt(mutants of its kind), so that rare
kinds occur too.

Not mutated, because no test on a CPU can or should detect the change:
- llama/study/bugs, which is text
- the style of figures: limits and ticks of axes, guide lines, colours, positions of texts
- docstrings, annotations, decorators, imports, __all__, blocks under TYPE_CHECKING, texts (strings with a space,
  f-strings, the strings of help, metavar, a raised error or a warning)

Each result is appended to --results, and mutants in this file are not tested again. --again FILE draws nothing: it
tests the mutants of such a file, and names those whose line no longer exists. scripts/mutants.jsonl has mutants of
the folders that read files, and of the rest; `by` is the test that caught one, `before` a test of the longer suite
before it was cut.

A mutant that survives is printed as a diff, for a person to judge. The file --equivalent lists survivors that change no
behaviour, one key per line, as printed. The exit code is 1 if any other mutant survives. A mutant may do anything that
wrong code can do, such as delete files: use a machine without valuable data.
Needs Linux and pip install -e '.[test,mutation]'.
"""

from __future__ import annotations

import argparse
import ast
import atexit
import collections
import concurrent.futures
import ctypes
import dataclasses
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EXCLUDED = ("study/bugs/",)
TEXT = ("help", "metavar", "description", "epilog", "title", "what")  # keyword arguments whose strings are for people
SPEAKS = (
    "warn",
    "warning",
    "print",
    "say",
    "note",
    "info",
    "debug",
    "error",
    "cast",
    "TypeVar",
    "add_argument_group",
    "integer",
    "number",
    "equal",
    "below",
    "TypeAdapter",
    "namedtuple",
)
STYLE = {
    "set_xlim", "set_ylim", "set_zlim", "set_xticks", "set_yticks", "set_zticks", "set_xticklabels", "set_yticklabels",
    "set_aspect", "set_title", "set_xlabel", "set_ylabel", "set_zlabel", "axhline", "axvline", "axhspan", "axvspan",
    "text", "annotate", "legend", "grid", "tick_params", "margins", "view_init", "color", "linewidth", "lw", "zorder",
    "alpha", "fontsize", "labelpad", "pad", "ha", "va", "edgecolor", "facecolor", "hatch", "loc", "ncol", "cmap",
}  # fmt: skip
LEAST = 120.0  # seconds that a group of tests may take beyond a multiple of its usual time, on a busy machine
BATCHES = (4.0, 30.0, 120.0, math.inf)  # seconds of tests in one process: the first process, the second, ..
IGNORED = (".git", ".*_cache", "__pycache__", "*.egg-info", ".venv", ".hypothesis", "build", "dist")
PR_SET_CHILD_SUBREAPER = 36


# ---------------------------------------------------------------------------------------------------------- mutations
@dataclasses.dataclass(frozen=True)
class Mutant:
    """A change of one place: the bytes start..end of a file become `new`."""

    file: str  # relative to the repository
    kind: str
    start: int
    end: int
    new: str
    first: int  # the lines of the statement
    last: int
    imported: bool  # the statement runs when the module is imported

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.end :]

    def key(self, source: bytes) -> str:
        """The file and the changed line before and after; stable if other lines change."""
        head, tail = source[: self.start].rpartition(b"\n")[2], source[self.end :].partition(b"\n")[0]
        old = head + source[self.start : self.end] + tail
        return " | ".join(
            [self.file, *(" ".join(text.split()) for text in (old.decode(), head.decode() + self.new + tail.decode()))]
        )


COMPARE = {
    ast.Eq: [ast.NotEq], ast.NotEq: [ast.Eq], ast.Lt: [ast.LtE, ast.Gt], ast.LtE: [ast.Lt, ast.Gt],
    ast.Gt: [ast.GtE, ast.Lt], ast.GtE: [ast.Gt, ast.Lt], ast.Is: [ast.IsNot], ast.IsNot: [ast.Is],
    ast.In: [ast.NotIn], ast.NotIn: [ast.In],
}  # fmt: skip
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.Pow: ast.Mult,
}  # fmt: skip
CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}


def variants(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the kind and the new text of each mutation of a node."""
    text = ast.unparse
    match node:
        case ast.Compare(left, ops, comparators):
            for i, op in enumerate(ops):
                for other in COMPARE[type(op)]:
                    yield "compare", text(ast.Compare(left, [*ops[:i], other(), *ops[i + 1 :]], comparators))
        case ast.Constant(value=bool(value)):
            yield "constant", str(not value)
        case ast.Constant(value=int(value)):
            yield from (("constant", str(other)) for other in {value + 1, max(value - 1, 0), 0} - {value})
        case ast.Constant(value=float(value)):
            yield from (("constant", repr(other)) for other in {value * 2, value / 2, value + 1.0} - {value})
        case ast.Constant(value=str(value)):
            yield "string", repr(value + "x")
        case ast.BoolOp(op, values):
            yield "boolean", text(ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values))
        case ast.UnaryOp(ast.Not(), operand):
            yield "not", text(operand)
        case ast.BinOp(left, op, right) if type(op) in ARITHMETIC:
            yield "arithmetic", text(ast.BinOp(left, ARITHMETIC[type(op)](), right))
        case ast.AugAssign(target, op, value) if type(op) in ARITHMETIC:
            yield "arithmetic", text(ast.AugAssign(target, ARITHMETIC[type(op)](), value))
            yield "statement", "pass"
        case ast.Call(function, args, keywords):
            if isinstance(function, ast.Name) and function.id in CALLS:
                yield "call", text(ast.Call(ast.Name(CALLS[function.id]), args, keywords))
            for i, (one, two) in enumerate(itertools.pairwise(args)):
                if text(one) != text(two) and not isinstance(one, ast.Starred) and not isinstance(two, ast.Starred):
                    yield "arguments", text(ast.Call(function, [*args[:i], two, one, *args[i + 2 :]], keywords))
        case ast.Return(ast.expr()):
            yield "return", "return None"
        case (
            ast.Expr()
            | ast.Assign()
            | ast.AnnAssign(value=ast.expr())
            | ast.Raise()
            | ast.Delete()
            | ast.Break()
            | ast.Continue()
        ):
            yield "statement", "pass"


def name_of(function: ast.expr) -> str:
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def is_skipped(node: ast.AST) -> bool:
    """Whether a node is not mutated: docstrings, imports, __all__, TYPE_CHECKING, the style of figures, f-strings.

    The nodes of an f-string have no positions in Python 3.11.
    """
    match node:
        case ast.Import() | ast.ImportFrom() | ast.JoinedStr() | ast.Expr(ast.Constant()):
            return True
        case ast.Expr(ast.Call(ast.Attribute(attr=name))) | ast.keyword(arg=str(name)) if name in STYLE:
            return True
        case ast.Assign([ast.Name("__all__")]) | ast.If(ast.Name("TYPE_CHECKING")):
            return True
    return False


class Places(ast.NodeVisitor):
    """Collect the mutants of a file."""

    def __init__(self, file: str, source: bytes):
        self.file, self.source, self.found = file, source, list[Mutant]()
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.statement: ast.stmt | None = None
        self.functions = 0
        self.texts = False  # whether the current node is inside a text for people
        self.visit(ast.parse(source))

    def visit(self, node: ast.AST) -> None:
        if is_skipped(node):
            return
        if isinstance(node, ast.stmt):
            before, self.statement = self.statement, node
            self._mutate(node)
            super().visit(node)
            self.statement = before
        else:
            if isinstance(node, ast.expr):
                self._mutate(node)
            super().visit(node)

    def _mutate(self, node: ast.stmt | ast.expr) -> None:
        statement = self.statement
        assert statement is not None
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and (self.texts or " " in node.value):
            return
        body = getattr(statement, "body", None)
        last = body[0].lineno - 1 if isinstance(body, list) else statement.end_lineno or 0
        start = self.starts[node.lineno - 1] + node.col_offset
        end = self.starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        for kind, new in variants(node):
            self._add(kind, start, end, new if isinstance(node, ast.stmt | ast.Constant) else f"({new})", last)
        if isinstance(node, ast.If | ast.While):
            test = node.test
            start = self.starts[test.lineno - 1] + test.col_offset
            end = self.starts[(test.end_lineno or 0) - 1] + (test.end_col_offset or 0)
            self._add("condition", start, end, f"(not ({ast.unparse(test)}))", last)

    def _add(self, kind: str, start: int, end: int, new: str, last: int) -> None:
        assert self.statement is not None
        first = self.statement.lineno
        self.found.append(Mutant(self.file, kind, start, end, new, first, max(first, last), not self.functions))

    def generic_visit(self, node: ast.AST) -> None:
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list", "type_comment", "type_params"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        self.visit(child)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.visit(node.args)  # the defaults
        self.functions += 1
        for child in node.body:
            self.visit(child)
        self.functions -= 1

    def visit_Call(self, node: ast.Call) -> None:
        self._read(node, name_of(node.func) in SPEAKS)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._read(node, True)

    def visit_keyword(self, node: ast.keyword) -> None:
        self._read(node, node.arg in TEXT)

    def _read(self, node: ast.AST, texts: bool) -> None:
        before, self.texts = self.texts, self.texts or texts
        self.generic_visit(node)
        self.texts = before


def places(root: Path, paths: list[str]) -> list[Mutant]:
    """Return every possible mutant under some paths of the repository."""
    tops = [root / path for path in paths]
    files = [file for top in tops for file in ([top] if top.is_file() else sorted(top.rglob("*.py")))]
    names = [file.relative_to(root).as_posix() for file in files]
    names = [name for name in names if not any(part in name for part in EXCLUDED)]
    return [mutant for name in names for mutant in Places(name, (root / name).read_bytes()).found]


def by_key(mutants: list[Mutant]) -> dict[str, Mutant]:
    sources = {name: (ROOT / name).read_bytes() for name in {mutant.file for mutant in mutants}}
    return {mutant.key(sources[mutant.file]): mutant for mutant in mutants}


def draw(mutants: list[Mutant], root: Path, count: int, seed: int) -> list[Mutant]:
    """Draw different mutants, each of which compiles."""
    generator = random.Random(seed)
    kinds = collections.Counter(mutant.kind for mutant in mutants)
    weights = [kinds[mutant.kind] ** -0.5 for mutant in mutants]
    drawn: dict[tuple[str, int], Mutant] = {}
    for _ in range(20 * count):
        [mutant] = generator.choices(mutants, weights)
        source = (root / mutant.file).read_bytes()
        try:
            if ast.dump(ast.parse(mutant.apply(source))) != ast.dump(ast.parse(source)):
                drawn.setdefault((mutant.file, mutant.start), mutant)
        except SyntaxError:
            continue
        if len(drawn) == count:
            break
    return list(drawn.values())


# ------------------------------------------------------------------------------------------------------------ the map
class Lines:
    """Record the lines of the package that this process executes, for the test that CLEARLLAMA_MUTATE_TEST names.

    Runs in the pytest processes (as a plugin) and, by a sitecustomize.py on PYTHONPATH, in their children.
    """

    def __init__(self, folder: str):
        import coverage

        self.folder, self.root = Path(folder), os.environ["CLEARLLAMA_MUTATE_ROOT"]
        self.coverage = coverage.Coverage(
            data_file=None, include=[f"{self.root}/llama/*"], config_file=False, messages=False
        )
        self.coverage.set_option(
            "run:disable_warnings", ["no-data-collected", "module-not-measured", "module-not-imported"]
        )
        self.coverage.start()
        exit_now = os._exit

        def exit_after_flush(code: int) -> None:
            self.flush()
            exit_now(code)

        os._exit = exit_after_flush  # type: ignore[assignment]
        atexit.register(self.flush)
        os.register_at_fork(after_in_child=lambda: self.flush(record=False))

    def flush(self, record: bool = True) -> None:
        """Write the lines since the last flush to a file of this process."""
        try:
            self.coverage.stop()
            data = self.coverage.get_data()
            lines = (
                {os.path.relpath(file, self.root): data.lines(file) for file in data.measured_files()} if record else {}
            )
            self.coverage.erase()
            if lines:
                entry = {"test": os.environ.get("CLEARLLAMA_MUTATE_TEST", ""), "lines": lines}
                with open(self.folder / f"{os.getpid()}.jsonl", "a") as file:
                    file.write(json.dumps(entry) + "\n")
            self.coverage.start()
        except Exception:  # a child at its limit of memory or file size; its lines remain unknown
            pass


class Recorder:
    """The pytest plugin that writes each test's result, and its lines if this process records them."""

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.flush()  # the lines of imports and collection belong to the test ""
        os.environ["CLEARLLAMA_MUTATE_TEST"] = nodeid
        self.reports: list[Any] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.reports.append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.flush()
        os.environ["CLEARLLAMA_MUTATE_TEST"] = ""
        outcomes = {report.outcome for report in self.reports}
        outcome = next(kind for kind in ("failed", "skipped", "passed") if kind in outcomes)
        entry = {"test": nodeid, "seconds": sum(report.duration for report in self.reports), "outcome": outcome}
        with open(f"{os.environ['CLEARLLAMA_MUTATE_LINES']}/{os.getpid()}.jsonl", "a") as file:
            file.write(json.dumps(entry) + "\n")

    def flush(self) -> None:
        if tracer is not None:
            tracer.flush()


tracer: Lines | None = None


def trace() -> None:
    """Start to record; called by sitecustomize.py in every Python process of the run that makes the map."""
    global tracer
    if folder := os.environ.get("CLEARLLAMA_MUTATE_LINES"):
        tracer = Lines(folder)


def pytest_configure(config: Any) -> None:
    """Register the recorder in the processes that run tests; pytest loads this file with -p mutate."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", 0):
        config.pluginmanager.register(Recorder())


def hashes(root: Path) -> dict[str, str]:
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for folder in ("llama", "tests")
        for path in sorted((root / folder).rglob("*.py"))
    }


def make_map(target: Path, jobs: int, arguments: list[str]) -> None:
    """Run the default tests once and write which test executes which line.

    Tests that fail run again without coverage, because coverage makes some of them too slow.
    """
    tests: dict[str, dict[str, Any]] = {}
    found: dict[str, dict[int, set[str]]] = collections.defaultdict(lambda: collections.defaultdict(set))
    with tempfile.TemporaryDirectory() as work:
        copy, site = Path(work) / "copy", Path(work) / "site"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*IGNORED))
        site.mkdir()
        (site / "sitecustomize.py").write_text("import mutate\nmutate.trace()\n")

        def run(name: str, paths: list[Path], options: list[str]) -> None:
            lines = Path(work) / name
            lines.mkdir()
            env = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(map(str, paths)),
                "CLEARLLAMA_MUTATE_ROOT": str(copy),
                "CLEARLLAMA_MUTATE_LINES": str(lines),
            }
            command = ["-m", "pytest", "-q", "-p", "mutate", "-p", "no:cacheprovider", "-o", "timeout=900", *options]
            subprocess.run([sys.executable, *command], cwd=copy, env=env, check=False)
            for text in (line for file in lines.iterdir() for line in file.read_text().splitlines()):
                try:
                    entry = json.loads(text)
                except ValueError:  # the line is incomplete, since a test limits the size of its child's files
                    continue
                if "seconds" in entry:
                    tests[entry["test"]] = entry
                for file, numbers in entry.get("lines", {}).items():
                    for number in numbers:
                        found[file][number].add(entry["test"])

        run(
            "lines",
            [copy, site, copy / "scripts"],
            ["-n", str(jobs), *arguments],
        )
        if failed := [test for test, entry in tests.items() if entry["outcome"] == "failed"]:
            run("again", [copy, copy / "scripts"], ["-n", "1", *failed])
        if not tests:
            raise SystemExit("no test ran: see the output of pytest above")
        index = {test: number for number, test in enumerate(tests)}
        numbered = {
            name: {number: sorted(index[test] for test in by if test in index) for number, by in of.items()}
            for name, of in found.items()
        }
        target.write_text(json.dumps({"hashes": hashes(copy), "tests": tests, "lines": numbered}))


@dataclasses.dataclass
class Map:
    """Which test executes which line."""

    tests: list[str]
    seconds: list[float]
    passed: list[bool]
    lines: dict[str, dict[int, list[int]]]
    texts: dict[str, str]  # of the test files

    @classmethod
    def load(cls, path: Path) -> Map:
        found = json.loads(path.read_text())
        now = hashes(ROOT)
        if changed := [name for name in {**found["hashes"], **now} if found["hashes"].get(name) != now.get(name)]:
            raise SystemExit(
                f"{path} was made from another version of {changed[0]} ({len(changed)} files differ); remove it and run"
                " again"
            )
        tests = found["tests"]
        lines = {name: {int(line): by for line, by in of.items()} for name, of in found["lines"].items()}
        texts = {test.partition("::")[0]: "" for test in tests}
        texts = {name: (ROOT / name).read_text() for name in texts}
        return cls(
            list(tests),
            [x["seconds"] for x in tests.values()],
            [x["outcome"] == "passed" for x in tests.values()],
            lines,
            texts,
        )

    def batches(self, mutant: Mutant, limit: float) -> Iterator[tuple[list[str], float]]:
        """Yield groups of tests, and their seconds: first the tests of the statement, then those of the file."""
        of = self.lines.get(mutant.file, {})
        near = {test for line in range(mutant.first, mutant.last + 1) for test in of.get(line, ())}
        far = {test for by in of.values() for test in by}
        groups = [far] if mutant.imported else [near, far - near]
        module = Path(mutant.file).stem
        for number, group in enumerate(groups):
            spent: dict[str, float] = collections.defaultdict(float)
            order: list[tuple[float, float, str]] = []
            for test in sorted((x for x in group if self.passed[x]), key=lambda x: self.seconds[x]):
                file = self.tests[test].partition("::")[0]
                # Each test file gets the same time, one that contains the module's name eight times as much.
                spent[file] += self.seconds[test]
                order.append(
                    (spent[file] * (1 if module in self.texts[file] else 8), self.seconds[test], self.tests[test])
                )
            chosen, seconds, ends = list[str](), 0.0, list(BATCHES)
            bound = limit if number == 0 else limit / 2
            for _, cost, test in sorted(order):
                if seconds + cost > bound:
                    break
                if chosen and sum(self.cost(x) for x in chosen) + cost > ends[0]:
                    yield chosen, sum(self.cost(x) for x in chosen)
                    chosen, ends = [], ends[1:] or ends
                chosen.append(test)
                seconds += cost
            if chosen:
                yield chosen, sum(self.cost(x) for x in chosen)

    def cost(self, test: str) -> float:
        if not hasattr(self, "_costs"):
            self._costs = dict(zip(self.tests, self.seconds, strict=True))
        return self._costs[test]


# -------------------------------------------------------------------------------------------------------- one mutant
class Selection:
    """The pytest plugin that runs only the given tests and writes down the first that fails."""

    def __init__(self, tests: list[str], report: Path):
        self.tests, self.report = {test: number for number, test in enumerate(tests)}, report

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if item.nodeid in self.tests]

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.report.write_text(f"import of {report.nodeid}")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.report.write_text(report.nodeid)


def run_tests(copy: Path, tests: list[str], limit: float) -> str | None:
    """Run tests in a child of this process. Returns the one that failed, "time", "crash", or None."""
    with tempfile.TemporaryDirectory() as work:
        report, log = Path(work) / "failed", Path(work) / "log"
        if (child := os.fork()) == 0:
            code = 70
            try:
                os.setsid()
                for number, name in enumerate((os.devnull, log, log)):
                    os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_APPEND), number)
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                resource.setrlimit(resource.RLIMIT_FSIZE, (2**32, resource.RLIM_INFINITY))
                os.chdir(copy)
                sys.path.insert(0, str(copy))
                sys.argv = ["pytest"]
                os.environ.update(PYTHONPATH=str(copy), TMPDIR=work)
                tempfile.tempdir = None
                import pytest

                options = ["-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", "--basetemp", f"{work}/tmp"]
                options += ["-o", "addopts=--strict-markers", "-m", "", "--no-header"]
                files = dict.fromkeys(test.partition("::")[0] for test in tests)
                code = int(pytest.main([*options, *files], plugins=[Selection(tests, report)]))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        until = time.monotonic() + limit
        while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < until:
            time.sleep(0.02)
        timed_out = ended == (0, 0)
        reap()
        if report.exists():
            return report.read_text()
        if timed_out:
            return "time"
        code = os.waitstatus_to_exitcode(ended[1])
        return None if code in (0, 5) else f"crash ({code}): {log.read_text(errors='replace')[-200:]!r}"


def reap() -> None:
    """Kill every process that the tests left behind. They are children of this process, which adopts orphans."""
    for _ in range(100):
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        for child in children:
            os.kill(int(child), signal.SIGKILL)
            os.waitpid(int(child), 0)
        if not children:
            return


@dataclasses.dataclass
class Worker:
    """The state of a process that tests mutants: its copy of the repository."""

    copy: Path
    known: Map
    limit: float
    sound: dict[tuple[str, ...], bool] = dataclasses.field(
        default_factory=dict
    )  # whether tests pass without a mutation
    stamp: int = 2_000_000_000  # modification time of the last mutant; a new one makes Python ignore old bytecode


worker: Worker


def start_worker(path: Path, limit: float, folder: str) -> None:
    global worker
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    copy = Path(tempfile.mkdtemp(dir=folder)) / "copy"
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*IGNORED))
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["CLEARLLAMA_MUTANT"] = "1"
    import hypothesis  # noqa: F401  (each mutant's process then starts with these imported)
    import pytest  # noqa: F401
    import torch  # noqa: F401

    worker = Worker(copy, Map.load(path), limit)


def test_mutant(mutant: Mutant) -> dict[str, Any]:
    """Return the result of one mutant: the test that caught it, or None."""
    began, ran, by = time.monotonic(), 0, None
    file = worker.copy / mutant.file
    source = (ROOT / mutant.file).read_bytes()

    def put(content: bytes) -> None:
        file.write_bytes(content)
        worker.stamp += 2
        os.utime(file, (worker.stamp, worker.stamp))

    def confirmed(by: str, tests: list[str], seconds: float) -> bool:
        """Whether tests that failed fail again with the mutation, and pass without it."""
        alone = [by] if by in worker.known.tests else tests
        limit = 2 * LEAST + 16 * (worker.known.cost(by) if by in worker.known.tests else seconds)
        if run_tests(worker.copy, alone, limit) is None:
            return False
        key = tuple(alone)
        if key not in worker.sound:
            put(source)
            worker.sound[key] = run_tests(worker.copy, alone, limit) is None
            put(mutant.apply(source))
        return worker.sound[key]

    put(mutant.apply(source))
    try:
        for tests, seconds in worker.known.batches(mutant, worker.limit):
            left = tests
            while left and by is None:
                found = run_tests(worker.copy, left, LEAST + 8 * seconds)
                if found is None:
                    break
                if confirmed(found, left, seconds):
                    by = found
                left = [test for test in left if test != found] if found in left else []
            ran += len(tests)
            if by:
                break
    finally:
        put(source)
    return {
        "key": mutant.key(source),
        "kind": mutant.kind,
        "line": mutant.first,
        "by": by,
        "tests": ran,
        "seconds": round(time.monotonic() - began, 1),
    }


# --------------------------------------------------------------------------------------------------------------- run
def wilson(caught: int, total: int) -> tuple[float, float]:
    """Return the 95 % confidence interval of a proportion."""
    if not total:
        return 0.0, 1.0
    z, p = 1.96, caught / total
    middle, half = p + z * z / (2 * total), z * math.sqrt(p * (1 - p) / total + z * z / (4 * total * total))
    return (middle - half) / (1 + z * z / total), (middle + half) / (1 + z * z / total)


def show(result: dict[str, Any], equivalent: set[str]) -> None:
    file, old, new = result["key"].split(" | ", 2)
    state = f"caught by {result['by']}" if result["by"] else "EQUIVALENT" if result["key"] in equivalent else "SURVIVED"
    print(
        f"{result['seconds']:6.1f} s  {result['kind']:10} {file}:{result['line']}  {state} ({result['tests']} tests)",
        flush=True,
    )
    if not result["by"]:
        print(f"    - {old}\n    + {new}\n    key: {result['key']}", flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--path", action="append", help="mutate only this file or folder; may be repeated")
    parser.add_argument("--map", type=Path, default=Path(tempfile.gettempdir()) / "clearllama-mutation-map.json")
    parser.add_argument("--results", type=Path, help="JSON lines; mutants in it are not tested again")
    parser.add_argument("--again", type=Path, help="test the mutants of this file of results, and draw none")
    parser.add_argument("--equivalent", type=Path, help="keys of mutants that change no behaviour, one per line")
    parser.add_argument("--limit", type=float, default=400.0, help="most seconds of tests per mutant (default: 400)")
    parser.add_argument("--only-map", action="store_true", help="make the map and exit")
    args, tests = parser.parse_known_args(argv)
    if not args.map.exists():
        make_map(args.map, args.jobs, tests)
    if args.only_map:
        return 0
    known = Map.load(args.map)
    print(f"{len(known.tests)} tests, {known.passed.count(False)} of them not usable", flush=True)
    possible = places(ROOT, args.path or ["llama"])
    if args.again:
        stored = {json.loads(line)["key"] for line in args.again.read_text().splitlines()}
        keys = {key: mutant for key, mutant in by_key(possible).items() if key in stored}
        for key in sorted(stored - keys.keys()):
            print(f"no such line any more: {key}")
    else:
        keys = by_key(draw(possible, ROOT, args.count, args.seed))
    equivalent = set(args.equivalent.read_text().splitlines()) if args.equivalent else set()
    results: dict[str, dict[str, Any]] = {}
    if args.results and args.results.exists():
        before = [json.loads(line) for line in args.results.read_text().splitlines()]
        results = {result["key"]: result for result in before if result["key"] in keys}
    context = multiprocessing.get_context("fork")
    with (
        tempfile.TemporaryDirectory() as folder,
        concurrent.futures.ProcessPoolExecutor(
            args.jobs, context, start_worker, (args.map, args.limit, folder)
        ) as pool,
    ):
        waiting = [pool.submit(test_mutant, mutant) for key, mutant in keys.items() if key not in results]
        for future in concurrent.futures.as_completed(waiting):
            result = future.result()
            results[result["key"]] = result
            show(result, equivalent)
            if args.results:
                with open(args.results, "a") as file:
                    file.write(json.dumps(result) + "\n")
    survivors = [result for result in results.values() if not result["by"] and result["key"] not in equivalent]
    judged = sum(not result["by"] and result["key"] in equivalent for result in results.values())
    total = len(results) - judged
    low, high = wilson(total - len(survivors), total)
    print(f"\n{len(results)} mutants, {judged} equivalent; {total - len(survivors)} of {total} caught", end="")
    print(f" ({(total - len(survivors)) / max(total, 1):.1%}; 95 % confidence: {low:.1%} to {high:.1%})")
    for result in survivors:
        show(result, equivalent)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
