"""docs/: every page is listed, links lead somewhere, the reference is fresh, and commands print what is shown."""

from __future__ import annotations

import json
import re
import shlex
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import torch

from llama.cli import main
from llama.engine import kernels
from llama.system.folders import cache_folder
from llama.system.memory import free_memory

from .conftest import Run
from .hub_server import environment, running
from .scripts import reference

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def links(page: Path) -> list[str]:
    """The targets of a page's links, without those in code."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    return [target for target in LINK.findall(text) if not re.match(r"https?:|mailto:", target)]


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def table(page: str, heading: str) -> list[dict[str, str]]:
    """The rows of the first table after a heading, as column -> cell."""
    text = (DOCS / page).read_text()
    found = re.search(r"(?:^\|.*\n)+", text[text.index(heading) :], re.MULTILINE)
    assert found, heading
    names, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in found[0].splitlines())
    return [dict(zip(names, cells, strict=True)) for cells in rows]


# ------------------------------------------------------------------------------------------------------------ links
def test_the_index_lists_every_page_once() -> None:
    index = DOCS / "README.md"
    assert Counter(links(index)) == Counter(str(page.relative_to(DOCS)) for page in PAGES if page != index)


def test_the_reference_is_that_of_the_parsers_and_docstrings(capsys: pytest.CaptureFixture[str]) -> None:
    assert reference.main(["--check"]) == 0, capsys.readouterr().out


def test_variables_of_the_environment_are_documented() -> None:
    sources = [file.read_text() for file in (ROOT / "llama").rglob("*.py")]
    named = {name for text in sources for name in re.findall(r'"(CLEARLLAMA_[A-Z]\w*)"', text)}
    page = (DOCS / "reference/commands.md").read_text()
    documented = {*re.findall(r"^- `(CLEARLLAMA_\w+)`", page, re.MULTILINE)}
    assert named - {"CLEARLLAMA_PARENT", "CLEARLLAMA_STORE"} == documented
    assert f"`auto`, `off`, or one of {', '.join(f'`{form}`' for form in kernels.FORMS)}\n" in page


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for target in links(page):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or file.suffix != ".md" or anchor in anchors(file), target


# --------------------------------------------------------------------------------------------------- shown commands
SHOWN = [
    block
    for page in ("start/install.md", "start/first-run.md", "start/run-a-llama.md", "start/troubleshooting.md")
    for block in re.findall(r"```console\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
]
COMMAND = re.compile(
    r"""(?:(?:printf|echo)\ (?P<quote>['"])(?P<stdin>.*)(?P=quote)\ \|\ )?  # standard input
        (?P<env>(?:\w+=\S+\ )*)clearllama\ (?P<args>.*)""",
    re.VERBOSE,
)
VARYING = (r"(?<=loaded in )[\d.]+(?= s)", r"(?<=\()[\d,]+(?= tok/s)", r"(?<=seed )\d+", r"(?<= in )[\d.]+(?= s$)",
           r"[\d.]+(?= GiB are free)")  # fmt: skip


def constant(lines: list[str]) -> list[str]:
    """Lines without what differs from run to run. Which better model is named depends on the memory."""
    lines = [line for line in lines if "this small model makes mistakes" not in line]
    for pattern in VARYING:
        lines = [re.sub(pattern, "#", line) for line in lines]
    return lines


def uses_default_model(block: str) -> bool:
    return "Tokyo" in block


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models that the pages use."""
    from scripts import make_tiny

    out = tmp_path_factory.mktemp("docs")
    make_tiny.make(out / "Meta-Llama-3-8B-Instruct", "llama-3-8b")
    make_tiny.make(out / "two", "llama-3-70b", shards=2)
    (out / "two/consolidated.01.pth").unlink()
    (out / "e").mkdir()
    return out


def check(block: str, folder: Path, clearllama: Run, env: dict[str, str] | None = None) -> None:
    """Run the command of a block; its messages must be those shown, and its answer too unless weights are random."""
    first, *shown = block.splitlines()
    found = COMMAND.fullmatch(first.removeprefix("$ "))
    assert found, first
    args = shlex.split(found["args"])
    if args[0] in ("generate", "chat") and "--dtype" not in args:
        args += ["--dtype", "bfloat16"]  # the default of the pages' processor
    env = {**(env or {}), **dict(part.split("=") for part in found["env"].split())}
    stdin = found["stdin"].encode().decode("unicode_escape").encode() if found["stdin"] else None
    result = clearllama(*args, stdin=stdin, env=env, cwd=folder)
    messages = [line for line in shown if line.startswith(("clearllama: ", "downloading "))]
    shown_answer = [line for line in shown if line not in messages]
    messages = [line for line in messages if env.get("HF_ENDPOINT") or not line.startswith("downloading ")]
    stderr = result.stderr.decode().replace(env.get("HF_ENDPOINT", "\0"), "https://huggingface.co")
    assert constant(stderr.splitlines()) == constant(messages), first
    random_answer = args[0] in ("generate", "chat") and not uses_default_model(block)
    if not random_answer:
        assert result.stdout.decode().splitlines() == shown_answer, first


@pytest.mark.parametrize(
    "block",
    [pytest.param(b, marks=pytest.mark.slow) if uses_default_model(b) or "clearllama pull" in b else b for b in SHOWN],
    ids=lambda block: block.splitlines()[0][2:70],
)
def test_commands_print_what_is_shown(
    block: str, folder: Path, tmp_path: Path, clearllama: Run, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    command = block.splitlines()[0].removeprefix("$ ")
    if command.startswith("ls "):
        assert block.splitlines()[1:] == sorted(path.name for path in (folder / command[3:]).iterdir())
    elif command.startswith("python scripts/make_tiny.py "):
        from scripts import make_tiny

        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", shlex.split(command)[1:])
        make_tiny.main()
        assert capsys.readouterr().out.splitlines() == block.splitlines()[1:]
    elif command.startswith("clearllama pull "):
        from llama.tools.convert import convert

        convert(folder / "Meta-Llama-3-8B-Instruct", tmp_path / "hf", "hf")
        name = "meta-llama/Meta-Llama-3-8B"
        with running({name: {path.name: path.read_bytes() for path in (tmp_path / "hf").iterdir()}}) as server:
            server.gated, server.cards[name] = {name}, {"license": "llama3"}
            check(block, folder, clearllama, environment(server.url, tmp_path))
    elif ("--device cuda" in command and torch.version.cuda is not None) or (
        "are free on this machine" in block and (room := free_memory()) and room.bytes > 100 * 2**30
    ):
        pytest.skip("this machine has what the page's machine lacks")
    elif "CXX=" in block:  # the cache has compiled kernels, which would be used
        from llama.hub import models

        (tmp_path / models.FILE).symlink_to(models.resolve())
        check(block, folder, clearllama, {"CLEARLLAMA_CACHE": str(tmp_path)})
    else:
        check(block, folder, clearllama, {"CLEARLLAMA_CACHE": str(cache_folder())})


# Pages whose Python code needs a service or a package that the tests do not have
NOT_RUN = {
    "guides/serving.md": "needs a server; tests/server has this client",
}
WITH_PYTHON = [
    str(page.relative_to(DOCS))
    for folder in ("guides", "start")
    for page in sorted((DOCS / folder).glob("*.md"))
    if "```python\n" in page.read_text()
]


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in WITH_PYTHON if page not in NOT_RUN])
def test_the_python_of_a_page_runs_and_prints_what_is_shown(
    page: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = (DOCS / page).read_text()
    (tmp_path / "checkpoints").symlink_to(ROOT / "checkpoints")
    (tmp_path / "document.txt").write_text("word " * 100)
    for name in ("Meta-Llama-3-8B-Instruct", "Meta-Llama-3-70B-Instruct", "MODEL"):
        (tmp_path / name).symlink_to(folder / "Meta-Llama-3-8B-Instruct")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {"__name__": "page"}
    for code, shown in re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", text, re.DOTALL):
        exec(code, names)
        printed = capsys.readouterr().out
        assert not shown or printed.replace("torch.float32, 4/8-bit", "torch.bfloat16, 4/8-bit") == shown
    assert names.keys() - {"__name__", "__builtins__"}  # else the pattern found no code


# ----------------------------------------------------------------------------------------------------------- tables
def test_the_memory_table_has_the_numbers_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    page = (DOCS / "start/run-a-llama.md").read_text()
    (command,) = re.findall(r"^\$ clearllama (plan .*)$", page, re.MULTILINE)
    rows = table("start/run-a-llama.md", "## 5. Know what fits")
    assert [row["weights"] for row in rows] == ["bfloat16", "int8", "int4"]
    for row, scheme in zip(rows, ("", "--quantize int8", "--quantize int4"), strict=True):
        for gigabytes in (8, 16, 24):
            asked = command.replace("16GB", f"{gigabytes}GB").replace("--quantize int4", scheme)
            main([*asked.split(), "--json"])
            plan = json.loads(capsys.readouterr().out)
            memory, longest = plan["memory"], plan["largest_context"]
            assert plan["batch"] == 1
            assert row["needs"] == f"{(memory['total'] - memory['reserve']) / 1e9:.1f}"
            assert row[f"{gigabytes} GB"] == (f"{longest:,}" if longest else "no")
            assert f"keys and values ({memory['kv_cache'] / 1e9:.1f} GB)" in page
            assert f"activations ({memory['activations'] / 1e9:.1f} GB)" in page


def test_the_table_of_schemes_is_that_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    page = (DOCS / "guides/quantization.md").read_text()
    main(["quantize", "--list"])
    assert f"```console\n$ clearllama quantize --list\n{capsys.readouterr().out}```" in page


def test_the_table_of_extras_has_those_for_users() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    developers = {"test", "lint", "fuzz", "docs"}
    rows = table("start/install.md", "## Extras")
    assert {row["extra"].strip("`") for row in rows} == project["optional-dependencies"].keys() - developers
