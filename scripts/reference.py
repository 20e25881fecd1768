"""Write docs/reference/commands/ from the parsers of the command line, and docs/reference/python.md from docstrings.

    python scripts/reference.py           write the pages
    python scripts/reference.py --check   write nothing; exit code 1 if a committed page is stale

A docstring becomes Markdown: lines of the form "name  description" become a list, indented lines a code block.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import inspect
import itertools
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import llama
from llama import cli, errors, loader, study, text

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
COMMANDS = DOCS / "reference" / "commands"
PYTHON = DOCS / "reference" / "python.md"
NOTE = "<!-- Written by scripts/reference.py. Change the {} and run it again. -->\n"

# The guides of a command, below docs/
GUIDES = {
    "generate": [
        *("guides/prompts.md", "guides/batches.md", "guides/structured.md", "guides/long-contexts.md"),
        *("guides/extend-context.md", "guides/speculative.md"),
    ],
    "chat": ["guides/chat.md", "guides/long-contexts.md", "guides/extend-context.md", "guides/speculative.md"],
    "serve": ["guides/serving.md", "guides/structured.md", "guides/extend-context.md"],
    "inspect": ["reference/formats.md"],
    "plan": ["guides/sizing.md", "guides/several-devices.md"],
    "convert": ["reference/formats.md"],
    "quantize": ["reference/formats.md", "guides/sizing.md"],
    "pull": ["reference/formats.md"],
    "verify": ["reference/formats.md"],
    "doctor": [],
    "evaluate": ["guides/evaluate.md"],
    "bench": ["evidence/performance.md"],
    "perplexity": ["guides/extend-context.md"],
    "study": ["learn/README.md"],
    "trace": ["guides/inside.md", "guides/prompts.md"],
    "steer": ["guides/inside.md"],
    "explain": ["learn/explain.md"],
}

INDEX = """# Commands

`clearllama COMMAND [options]`, or `python -m llama COMMAND [options]`. Each page lists all options of a command, as
`clearllama COMMAND --help` does. Options can't be abbreviated.

| Command | What it does |
| --- | --- |
{table}

Standard output contains the answer only: text, or JSON with `--json`. Messages, progress bars and speed go to standard
error.

## Global options

{options}

## Exit codes

| Code | Meaning |
| --- | --- |
| 0 | Success. |
| 1 | Failure: one line on standard error gives the reason. Or a check found a fault: see `doctor` or `verify`. |
| 2 | Usage error: an unknown option, or a value of the wrong type or out of range. |
| 129, 130, 143 | Ended by a signal: 129 hang-up, 130 Ctrl-C, 143 termination. |
| 141 | The program that reads standard output closed the pipe. |

## Environment variables

| Variable | Meaning |
| --- | --- |
| `CLEARLLAMA_MODEL` | The model to use without `--model`. |
| `CLEARLLAMA_CACHE` | The folder for downloaded models and compiled code. Default: the user's cache folder. |
| `CLEARLLAMA_API_KEY` | The key that clients of `clearllama serve` must send. |
| `CLEARLLAMA_KERNELS` | The form of the C++ kernels: `auto` (default), `off`, or one of {kernels}. |
| `HF_HOME`, `HF_HUB_CACHE` | Where the Hugging Face hub's cache is. |
| `HF_TOKEN` | The access token for the Hugging Face hub. |
| `HF_HUB_OFFLINE` | `1`: use only what is in the Hugging Face hub's cache. |
| `OMP_NUM_THREADS` | The number of CPU threads without `--threads`. |
| `CUDA_VISIBLE_DEVICES` | The GPUs that a process may use. |
"""

API = """# Python API

```python
import llama

llm = llama.load("smollm2-135m-instruct")
print(llm.generate("The capital of France is", max_new_tokens=8))
```

The names on this page are public. Other names may change in any release. Letters in shapes: B batch, T new tokens,
S cached tokens, H query heads, KV key/value heads, D head_dim, C model dim, V vocabulary.

{contents}
"""
# section -> (prefix of the names, objects)
SECTIONS: dict[str, tuple[str, list[Any]]] = {
    "Load a model": ("llama.", [llama.load, llama.load_model, llama.load_tokenizer, loader.LoadOptions]),
    "Quantize and save": ("llama.", [llama.quantize]),
    "Generate text": (
        "llama.",
        [llama.Llama, text.Completion, text.Piece, text.Stats, llama.SamplingParams, llama.Session],
    ),
    "Tokenize": ("llama.", [llama.Tokenizer]),
    "Run the model": ("llama.", [llama.Transformer, llama.ModelConfig, llama.KVCache]),
    "RoPE": (
        "llama.",
        [
            *(llama.inverse_frequencies, llama.precompute_freqs_cis, llama.apply_rotary_emb),
            *(llama.apply_rotary_emb_real, llama.rotate_half, llama.apply_rotary_pos_emb),
        ],
    ),
    "Look inside a model": (
        "llama.study.",
        [
            *(study.activations, study.Activations, study.patch, study.Place, study.patching_grid, study.Grid),
            *(study.control_vector, study.ControlVector, study.steer),
        ],
    ),
}


# ------------------------------------------------------------------------------------------------------------- prose
CODE = re.compile(
    r"`[^`]*`|'clearllama [^']*'|\[?\{[^{}]*\}(?:, \.\.\.\])?|<\|?[\w ]+\|?>|\"[^\"\s]+\""  # quoted, or JSON
    r"|(?<![\w-])--[a-z][a-z-]*\b|(?<![\w-])-m\b|\b[A-Z]+/[A-Z]+[\w/.]*(?:\[[:@]?[A-Z]+\])*"  # options, ORG/NAME
    r"|\barXiv:\d+\.\d+|\bdocs/[\w/-]+\.md|(?<![\w.])[\w/]*\.(?:json|py|model|gguf|chk|yaml|pth|bin|png|svg|csv)\b"
    r"|\b[a-z]+(?:_\w+)*=(?:[\w.+-]*\w|\[\]|\{\}|\"[^\"\s]*\")|\b[a-z]+(?:_[a-z]+)+\b"  # names
    r"|\b[A-Z]+(?:_[A-Z]+)+\b|\b[A-Z]\w+Error\b"
)


def prose(words: str, page: Path, known: Mapping[str, str] = MappingProxyType({})) -> str:
    """A help text or docstring as Markdown: options, files and code marked, pages linked.

    known  names to link, with the anchors of their headings
    """

    def code(match: re.Match[str]) -> str:
        word = match[0].strip("`'")
        if word.startswith("arXiv:"):
            return f"[{word}](https://arxiv.org/abs/{word.removeprefix('arXiv:')})"
        if word.startswith("docs/"):
            return link(ROOT / word, page)
        if (command := word.removeprefix("clearllama ").split()[:1]) and word.startswith("clearllama "):
            file = COMMANDS / f"{command[0]}.md"
            return f"[`{word}`]({relative(file, page)})" if command[0] in GUIDES and file != page else f"`{word}`"
        if word.endswith(".py") and (file := ROOT / "llama" / word.removeprefix("llama/")).exists():
            return f"[{file.relative_to(ROOT).as_posix()}]({relative(file, page)})"
        return f"[`{word}`](#{known[word]})" if word in known else f"`{word}`"

    parts, end = [], 0
    for match in CODE.finditer(words):
        parts += [_escape(words[end : match.start()]), code(match)]
        end = match.end()
    return "".join([*parts, _escape(words[end:])])


def _escape(words: str) -> str:
    return re.sub(r"([*<\[\]])", r"\\\1", words)


def relative(file: Path, page: Path) -> str:
    """The link to a file from a page."""
    return Path(os.path.relpath(file, page.parent)).as_posix()


def link(file: Path, page: Path) -> str:
    """A link with the title of a page of docs/."""
    title = re.search(r"^# (.*)$", file.read_text(), re.MULTILINE)
    if title is None:
        raise ValueError(f"{file} has no title: expected a line that begins with '# '")
    return f"[{title[1]}]({relative(file, page)})"


# ---------------------------------------------------------------------------------------------------------- commands
def command_page(name: str, parser: argparse.ArgumentParser, summary: str) -> str:
    """The page of one command."""
    page = COMMANDS / f"{name}.md"
    needed = [action for action in parser._actions if action.required or not action.option_strings]
    usage = (parser.usage or " ".join(["%(prog)s [options]", *map(placeholder, needed)])) % {"prog": parser.prog}
    about = prose(" ".join((parser.description or summary).split()), page)
    parts = [f"# clearllama {name}\n", NOTE.format("parser"), f"{about}\n", f"```text\n{usage}\n```\n"]
    for group in parser._action_groups:
        if actions := [action for action in group._group_actions if action.help != argparse.SUPPRESS]:
            title = {"positional arguments": "arguments"}.get(group.title or "", group.title or "")
            parts.append(f"## {title[:1].upper()}{title[1:]}\n")
            if words := " ".join((group.description or "").split()):
                parts.append(f"{prose(words[:1].upper() + words[1:], page).removesuffix('.')}.\n")
            parts.append("\n".join(option(action, page) for action in actions) + "\n")
            for exclusive in parser._mutually_exclusive_groups:
                if exclusive._group_actions and exclusive._group_actions[0] in actions:
                    names = ", ".join(f"`{action.option_strings[0]}`" for action in exclusive._group_actions)
                    parts.append(f"Use at most one of {names}.\n")
    seen = [link(DOCS / guide, page) for guide in GUIDES[name]]
    exits = f"[exit codes and environment variables]({relative(COMMANDS / 'README.md', page)}#exit-codes)"
    parts.append(f"See also: {', '.join([*seen, exits])}\n")
    return "\n".join(parts)


def placeholder(action: argparse.Action) -> str:
    """An option with its value, or an argument, as in a usage line."""
    name = max(action.option_strings, key=len, default="")
    default = action.dest.upper() if name else action.dest
    values = "" if action.nargs == 0 else argparse.HelpFormatter("")._format_args(action, default)
    return " ".join(filter(None, (name, values)))


def option(action: argparse.Action, page: Path) -> str:
    """One option or argument as an item of a list."""
    action = copy.copy(action)
    action.help = (action.help or "").replace("%(default)s", "`%(default)s`")
    about = prose(" ".join(argparse.HelpFormatter("")._expand_help(action).split()), page)
    *others, last = sorted(action.option_strings, key=len) or [str(action.metavar or action.dest)]
    names = [*others, placeholder(action) if action.option_strings else last]
    return f"- {', '.join(f'`{name}`' for name in names)}<br>{about}"


def commands() -> Iterator[tuple[Path, str]]:
    """The pages of all commands, and their index."""
    from llama.engine.kernels import FORMS

    with mock.patch.dict(os.environ):
        os.environ.pop("CLEARLLAMA_MODEL", None)  # a default in the help texts
        parser = cli.build_parser()
    (subparsers,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    summaries = {action.dest: action.help or "" for action in subparsers._choices_actions}
    for name, command in subparsers.choices.items():
        yield COMMANDS / f"{name}.md", command_page(name, command, summaries[name])
    page = COMMANDS / "README.md"
    yield (
        page,
        INDEX.format(
            table="\n".join(f"| [{name}]({name}.md) | {prose(words, page)} |" for name, words in summaries.items()),
            options="\n".join(option(action, page) for action in parser._actions if action.option_strings),
            kernels=", ".join(f"`{form}`" for form in FORMS),
        ).replace("\n\n", f"\n\n{NOTE.format('parser')}\n", 1),
    )


# ------------------------------------------------------------------------------------------------------------ Python
TABLE = re.compile(r"^(\w+(?:, \w+)*) {2,}(\S.*)$")


def docstring(value: Any, known: Mapping[str, str]) -> str:
    """The docstring of an object as Markdown."""
    say = partial(prose, page=PYTHON, known=known)

    def item(line: str) -> str:
        names, about = TABLE.findall(line)[0]
        return f"- {', '.join(f'`{name}`' for name in names.split(', '))}: {say(about)}"

    blocks = []
    for block in re.split(r"\n\s*\n", inspect.getdoc(value) or ""):
        if block.startswith("    "):
            blocks.append(f"```text\n{inspect.cleandoc(block)}\n```")
            continue
        parts: list[str] = []  # paragraphs, and items of a list; an indented line continues an item
        for line in block.splitlines():
            starts = not parts or TABLE.match(line) or (TABLE.match(parts[-1]) and not line.startswith(" "))
            parts = [*parts, line] if starts else [*parts[:-1], f"{parts[-1]} {line.strip()}"]
        for is_list, group in itertools.groupby(parts, lambda part: TABLE.match(part) is not None):
            blocks.append("\n".join(item(part) if is_list else say(part) for part in group))
    return "\n\n".join(blocks)


def annotation(value: Any, names: dict[str, Any]) -> str:
    """An annotation as it is written, with the package's names for types written out."""

    def alias(match: re.Match[str]) -> str:
        found = names.get(match[0])
        if isinstance(found, types.UnionType | types.GenericAlias) or (
            typing.get_origin(found) is not None and not isinstance(found, type)
        ):
            written = re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", repr(found))
            return written if len(written) <= 80 else match[0]
        return match[0]

    written = getattr(value, "__forward_arg__", value)
    return re.sub(
        r"\b[A-Z]\w+\b(?!\.)", alias, written if isinstance(written, str) else inspect.formatannotation(written)
    )


def signature(value: Callable[..., Any], name: str) -> str:
    """The call of a function or class, on one line or with one line for each parameter."""
    names = sys.modules[value.__module__].__dict__
    found = inspect.signature(value)
    factories = (
        {f.name: f.default_factory for f in dataclasses.fields(value)} if dataclasses.is_dataclass(value) else {}
    )
    words, keywords = [], False
    for parameter in found.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not keywords:
            keywords = True
            words.append("*")
        keywords |= parameter.kind is parameter.VAR_POSITIONAL
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        word = f"{star}{parameter.name}"
        if parameter.annotation is not parameter.empty:
            word += f": {annotation(parameter.annotation, names)}"
        if parameter.default is not parameter.empty:
            factory = factories.get(parameter.name, dataclasses.MISSING)
            shown = "..." if isinstance(parameter.default, types.FunctionType) else repr(parameter.default)
            word += f" = {shown}" if factory is dataclasses.MISSING else f" = {factory.__name__}()"
        words.append(word)
    returns = "" if isinstance(value, type) or found.return_annotation is found.empty else found.return_annotation
    after = f" -> {annotation(returns, names)}" if returns and returns != "None" else ""
    if value.__code__.co_filename == contextlib.__file__ if hasattr(value, "__wrapped__") else False:
        after = after.replace("Iterator", "ContextManager")
    line = f"{name}({', '.join(words)}){after}"
    return line if len(line) <= 88 else f"{name}(\n" + "".join(f"    {word},\n" for word in words) + f"){after}"


def members(cls: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties that a class defines and documents."""
    for name, member in cls.__dict__.items():
        if (
            not name.startswith("_")
            and member.__doc__
            and isinstance(member, types.FunctionType | classmethod | staticmethod | property)
        ):
            yield name, member


def heading(value: Any) -> str:
    """The heading of an object of the API."""
    return f"class {value.__name__}" if isinstance(value, type) else value.__name__


def slug(title: str) -> str:
    """The anchor of a heading, on GitHub and on the site."""
    return re.sub(r"[^\w-]", "", title.lower().replace(" ", "-"))


def entry(value: Any, prefix: str, known: Mapping[str, str]) -> str:
    """An object of the API with its members."""
    name = value.__name__
    if name not in (*llama.__all__, *study.__all__):
        prefix = "llama.text." if name in text.__all__ else f"{value.__module__}."
    call = f"{prefix}{name}" if inspect.isabstract(value) else signature(value, f"{prefix}{name}")
    parts = [
        f"### {heading(value)}\n",
        f"```python\n{call}\n```\n",
        f"{docstring(value, known)}\n",
    ]
    for member, found in members(value) if isinstance(value, type) else ():
        parts.append(f"#### {name}.{member}\n")
        if isinstance(found, property):
            kind = annotation(found.fget.__annotations__.get("return", "Any"), sys.modules[value.__module__].__dict__)
            parts.append(f"```python\n{name}.{member}: {kind}\n```\n")
        else:
            bound = found.__func__ if isinstance(found, classmethod | staticmethod) else found
            parts.append(f"```python\n{signature(bound, f'{name}.{member}')}\n```\n")
        parts.append(f"{docstring(found, known)}\n")
    return "\n".join(parts)


def python() -> str:
    """The page of the Python API."""
    names = {value.__name__ for _, values in SECTIONS.values() for value in values}
    if missing := {*llama.__all__, *study.__all__} - names - {"__version__", "LlamaError", "SITES"}:
        raise ValueError(f"SECTIONS lacks {', '.join(sorted(missing))}")
    classes = [value for _, values in SECTIONS.values() for value in values if isinstance(value, type)]
    known = {value.__name__: slug(heading(value)) for _, values in SECTIONS.values() for value in values}
    known |= {
        f"{cls.__name__}.{member}": slug(f"{cls.__name__}.{member}") for cls in classes for member, _ in members(cls)
    }
    subclasses = [cls for cls in errors.LlamaError.__subclasses__() if cls.__module__ == errors.__name__]
    known |= {cls.__name__: "errors" for cls in subclasses} | {"SITES": "sites"}
    contents = [
        f"- [{title}](#{slug(title)}): "
        + ", ".join(f"[`{value.__name__}`](#{known[value.__name__]})" for value in values)
        for title, (_, values) in SECTIONS.items()
    ]
    parts = [
        API.format(contents="\n".join([*contents, "- [Errors](#errors)"])).replace(
            "\n\n", f"\n\n{NOTE.format('docstring')}\n", 1
        )
    ]
    for title, (prefix, values) in SECTIONS.items():
        parts.append(f"## {title}\n")
        parts += [entry(value, prefix, known) for value in values]
        if values[0] is study.activations:
            sites = [f"| `{site}` | `{found.shape}` |" for site, found in study.SITES.items()]
            parts.append(
                "\n".join(["### SITES\n", "The tensors that have a name, in the order of the forward pass:\n"])
            )
            parts.append("\n".join(["| Name | Shape |", "| --- | --- |", *sites]) + "\n")
    parts.append(f"## Errors\n\n### LlamaError\n\n{docstring(errors.LlamaError, known)}\n")
    parts.append("The subclasses are in `llama.errors`. Most are also an exception of Python:\n")
    rows = ["| Error | Also a | Exit code | Meaning |", "| --- | --- | --- | --- |"]
    for cls in subclasses:
        also = ", ".join(f"`{base.__name__}`" for base in cls.__bases__ if base is not errors.LlamaError)
        rows.append(f"| `{cls.__name__}` | {also} | {cls.exit_code} | {docstring(cls, known)} |")
    return "\n".join([*parts, "\n".join(rows)]) + "\n"


# --------------------------------------------------------------------------------------------------------------- run
def pages() -> dict[Path, str]:
    """Every page that this script writes, with its content."""
    return {**dict(commands()), PYTHON: python()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a committed page is stale")
    args = parser.parse_args(arguments)
    found = pages()
    stale = [file for file, content in found.items() if not file.exists() or file.read_text() != content]
    gone = [file for file in COMMANDS.glob("*.md") if file not in found]
    for file in [*stale, *gone]:
        print(f"{'stale' if args.check else 'written' if file in found else 'deleted'}: {file.relative_to(ROOT)}")
        if args.check:
            continue
        if file in gone:
            file.unlink()
        else:
            file.parent.mkdir(exist_ok=True)
            file.write_text(found[file])
    if args.check and (stale or gone):
        print("run 'python scripts/reference.py' and commit what it writes", file=sys.stderr)
    return int(args.check and bool(stale or gone))


if __name__ == "__main__":
    sys.exit(main())
