"""Write parts of docs/reference: commands.md from the parsers, python.md from docstrings, rope.md from configurations.

    python scripts/reference.py           write the pages
    python scripts/reference.py --check   write nothing; exit code 1 if a committed page is stale

A part stands between the comments "NAME" and "end of NAME"; the rest of a page is written by hand. An option that
several commands share stands once, at the end. A docstring becomes Markdown: lines of the form "name  description"
become a list, indented lines a code block.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import math
import os
import re
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import llama
from llama import cli, errors, inside, loader, rope_scaling, text
from llama.checkpoint import architectures

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = ROOT / "docs" / "reference" / "commands.md"
PYTHON = ROOT / "docs" / "reference" / "python.md"
ROPE = ROOT / "docs" / "reference" / "rope.md"
EVERY, GENERAL = "Options of every command", "General options"
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
        "llama.inside.",
        [
            *(inside.activations, inside.Activations, inside.patch, inside.Place, inside.patching_grid, inside.Grid),
            *(inside.ablation_grid, inside.AblationGrid, inside.control_vector, inside.ControlVector, inside.steer),
            *(inside.fit_jacobian_lens, inside.JacobianLens),
        ],
    ),
}
AS_OPTIONS = (loader.LoadOptions, llama.SamplingParams)  # classes whose fields are options of the command line


# ------------------------------------------------------------------------------------------------------------- prose
CODE = re.compile(
    r"`[^`]*`|'clearllama [^']*'|\[?\{[^{}]*\}(?:, \.\.\.\])?|<\|?[\w ]+\|?>|\"[^\"\s]+\""  # quoted, or JSON
    r"|(?<![\w-])--[a-z][a-z-]*\b|\barXiv:\d+\.\d+|\bdocs/[\w/-]+\.md|(?<![\w.])\w+\.(?:json|model|gguf)\b"
    r"|\b[a-z]+(?:_\w+)*=(?:[\w.+-]*\w|\[\]|\{\}|\"[^\"\s]*\")|\b[a-z]+(?:_[a-z]+)+\b"  # names
)


def prose(words: str, page: Path) -> str:
    """A help text or docstring as Markdown: options, names and files marked, pages linked."""

    def code(match: re.Match[str]) -> str:
        word = match[0].strip("`'")
        if word.startswith("arXiv:"):
            return f"[{word}](https://arxiv.org/abs/{word.removeprefix('arXiv:')})"
        if word.startswith("docs/"):
            return f"[{Path(word).stem}]({Path(os.path.relpath(ROOT / word, page.parent)).as_posix()})"
        return f"`{word}`"

    parts, end = [], 0
    for match in CODE.finditer(words):
        parts += [_escape(words[end : match.start()]), code(match)]
        end = match.end()
    return "".join([*parts, _escape(words[end:])])


def _escape(words: str) -> str:
    return re.sub(r"([*<\[\]])", r"\\\1", words)


# ---------------------------------------------------------------------------------------------------------- commands
def groups(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str, list[argparse.Action]]]:
    """Title, description and shown options of each group of a command, without --help."""
    for group in parser._action_groups:
        shown = [
            action
            for action in group._group_actions
            if action.help != argparse.SUPPRESS and not isinstance(action, argparse._HelpAction)
        ]
        if shown:
            words = " ".join((group.description or "").split())
            yield (group.title or "").capitalize().replace("Rope", "RoPE"), words, shown


def option(action: argparse.Action) -> tuple[str, str, str]:
    """The names of an option or argument, its item of a list without the default, and "(default: ...)" or ""."""
    action = copy.copy(action)
    action.help = (action.help or "").replace("%(default)s", "`%(default)s`")
    about = prose(" ".join(argparse.HelpFormatter("")._expand_help(action).split()), COMMANDS)
    meaning, default = re.fullmatch(r"(.*?)( \(default[^()]*(?:\([^()]*\)[^()]*)*\))?", about).groups()  # type: ignore[union-attr]
    *others, last = sorted(action.option_strings, key=len) or [str(action.metavar or action.dest)]
    values = argparse.HelpFormatter("")._format_args(action, action.dest.upper()) if action.nargs != 0 else ""
    names = [*others, f"{last} {values}".strip() if action.option_strings else last]
    return last, f"- {', '.join(f'`{name}`' for name in names)}: {meaning}", default or ""


def commands() -> dict[str, str]:
    """The parts of the page of all commands: each with its own options, the options of several, and other names.

    An option that several commands share stands with the default of the first; the others name only their own default.
    """
    from llama.cli.common.arguments import FIELD

    with mock.patch.dict(os.environ):
        os.environ.pop("CLEARLLAMA_MODEL", None)  # a default in the help texts
        parser = cli.build_parser()
    (subparsers,) = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    summaries = {action.dest: action.help or "" for action in subparsers._choices_actions}
    choices: dict[str, argparse.ArgumentParser] = dict(subparsers.choices)
    uses = Counter(option(action)[1] for sub in choices.values() for _, _, found in groups(sub) for action in found)
    titles = Counter(title for sub in choices.values() for title, _, _ in groups(sub))
    shared: dict[str, list[str]] = {EVERY: [], GENERAL: []}  # a section -> its description and items
    place: dict[str, tuple[str, str]] = {}  # an item of several commands -> its title and default
    sections = []
    for name, command in choices.items():
        parts = [f"## {name}", prose(" ".join((command.description or summaries[name]).split()), COMMANDS)]
        also: dict[str, None] = {}
        for title, description, actions in groups(command):
            about = prose(description[:1].upper() + description[1:], COMMANDS).removesuffix(".") + "."
            own = []
            for last, item, default in map(option, actions):
                if uses[item] == 1:
                    own.append(item + default)
                    continue
                if item not in place:
                    general = titles[title] == 1 or title in ("Options", "Positional arguments")
                    section = EVERY if uses[item] == len(choices) else GENERAL if general else title
                    place[item] = (section, default)
                    new = section not in shared
                    shared.setdefault(section, []).extend([f"{about}\n"] if new and about != "." else [])
                    shared[section].append(item + default)
                section, first = place[item]
                if default != first:
                    own.append(f"- `{last}`: {default[2:-1] or 'no default'}")
                if section == title:
                    also[f"[{section}](#{section.lower().replace(' ', '-')})"] = None
                elif section != EVERY:
                    also[f"`{last.split()[0]}`"] = None
            if own and about != "." and title not in shared:
                parts.append(f"**{title}.** {about}")
            if own:
                parts.append("\n".join(own))
        sections.append("\n\n".join([*parts, f"Also: {', '.join(also)}"] if also else parts))
    return {
        "commands": "\n\n".join(sections),
        "options": "\n\n".join(f"### {title}\n\n" + "\n".join(items) for title, items in shared.items()),
        "synonyms": "\n".join(
            f"- `{name}`: {', '.join(f'`{other}`' for other in names.split())}" for name, names in FIELD.items()
        ),
    }


# ------------------------------------------------------------------------------------------------------------ Python
CONSTANTS = str | int | float | bool | tuple | None  # defaults that a signature shows
TABLE = re.compile(r"^(\w+(?:, \w+)*) {2,}(\S.*)$")
say = partial(prose, page=PYTHON)


def docstring(value: Any, options: str = "") -> str:
    """The first paragraph of an object's docstring as Markdown, and its lists, each item up to its first semicolon.

    A semicolon in brackets does not count.
    Items with the name of an option that the page `options` describes are only named.
    """
    same = []

    def item(line: str) -> str:
        names, about = TABLE.findall(line)[0]
        return f"- {', '.join(f'`{name}`' for name in names.split(', '))}: {say(re.split(r'; (?![^(]*[)])', about)[0])}"

    first, *others = re.split(r"\n\s*\n", inspect.getdoc(value) or "")
    blocks = [say(" ".join(first.split()))]
    for block in others:
        parts: list[str] = []  # an indented line continues an item
        for line in [] if block.startswith(" ") else block.splitlines():
            parts = [*parts[:-1], f"{parts[-1]} {line.strip()}"] if parts and line.startswith(" ") else [*parts, line]
        found = [part for part in parts if TABLE.match(part)]
        known = [part for part in found if re.search(f"`--{part.split()[0].replace('_', '-')}[ `]", options)]
        same += [f"`{part.split()[0]}`" for part in known]
        if items := [item(part) for part in found if part not in known]:
            blocks.append("\n".join(items))
    if same:
        blocks.append(f"The [options](commands.md#model) of the same names describe these fields: {', '.join(same)}.")
    return "\n\n".join(blocks)


def signature(value: Callable[..., Any], name: str) -> str:
    """The call of a function or class: names and defaults, without types."""

    def plain(parameter: inspect.Parameter) -> inspect.Parameter:
        shown = parameter.default is parameter.empty or isinstance(parameter.default, CONSTANTS)
        return parameter.replace(annotation=parameter.empty, default=parameter.default if shown else ...)

    found = inspect.signature(value)
    parameters = [plain(each) for each in found.parameters.values() if each.name not in ("self", "cls")]
    call = str(found.replace(parameters=parameters, return_annotation=found.empty))
    return f"{name}{call.replace('Ellipsis', '...')}"


def entry(value: Any, prefix: str, options: str) -> str:
    """An object of the API, with the methods and properties that its class defines and documents."""
    name = value.__name__
    if name not in (*llama.__all__, *inside.__all__):
        prefix = "llama.text." if name in text.__all__ else f"{value.__module__}."
    call = f"{prefix}{name}" if inspect.isabstract(value) else signature(value, f"{prefix}{name}")
    kinds = types.FunctionType | classmethod | staticmethod | property
    members = []
    for member, found in value.__dict__.items() if isinstance(value, type) else ():
        if not member.startswith("_") and found.__doc__ and isinstance(found, kinds):
            call_of = member if isinstance(found, property) else signature(getattr(value, member), member)
            first = " ".join(re.split(r"\n\s*\n", inspect.getdoc(found) or "")[0].split())
            members.append(f"- `{call_of}`: {say(first)}")
    heading = f"class {name}" if isinstance(value, type) else name
    parts = [f"### {heading}", f"`{call}`", docstring(value, options)]
    return "\n\n".join([*parts, "Members:", "\n".join(members)] if members else parts)


def python(options: str) -> dict[str, str]:
    """The parts of the page of the Python API. `options`: those of all commands, for most fields of LoadOptions."""
    names = {value.__name__ for _, values in SECTIONS.values() for value in values}
    if missing := {*llama.__all__, *inside.__all__} - names - {"__version__", "LlamaError", "SITES"}:
        raise ValueError(f"SECTIONS lacks {', '.join(sorted(missing))}")
    entries = []
    for title, (prefix, values) in SECTIONS.items():
        entries += [f"## {title}", *(entry(value, prefix, options if value in AS_OPTIONS else "") for value in values)]
    subclasses = [cls for cls in errors.LlamaError.__subclasses__() if cls.__module__ == errors.__name__]
    return {
        "entries": "\n\n".join(entries),
        "errors": "\n".join(f"- `{cls.__name__}` ({cls.exit_code}): {docstring(cls)}" for cls in subclasses),
    }


# -------------------------------------------------------------------------------------------------------------- RoPE
def models() -> str:
    """The table of the models in configs/: one row for all that have the same RoPE."""
    same: dict[tuple[str, ...], list[str]] = {}
    for file in sorted((ROOT / "configs").glob("*.json")):
        fields = json.loads(file.read_text())
        config = llama.ModelConfig(**{**fields, "no_rope_layers": tuple(fields.get("no_rope_layers", ()))})
        trained = int(rope_scaling.trained_length(config))
        rotated = rope_scaling.rotated_entries(config.head_dim, config.rope_scaling)
        inv_freq, _ = llama.inverse_frequencies(rotated, config.rope_theta)  # unscaled, (D/2,)
        slow = int((trained * inv_freq.double() < 2 * math.pi).sum())
        scaling = config.rope_scaling or {}
        by = f" ({scaling['rope_type']}, factor {scaling['factor']:g})" if scaling else ""
        part = [f"{rotated} of {config.head_dim} entries"] * (rotated < config.head_dim)
        without = [f"not in {len(config.no_rope_layers)} layers"] * bool(config.no_rope_layers)
        window = [f"window {config.sliding_window}"] * bool(config.sliding_window)
        cells = (
            *(f"{config.rope_theta:,.0f}", f"{trained:,}", f"{rope_scaling.reach(config):,}{by}"),
            *(f"{slow} of {rotated // 2}", ", ".join([*part, *without, *window]) or "all"),
        )
        same.setdefault(cells, []).append(f"`{file.stem}`")
    heads = "model", "base", "trained length", "context", "slow pairs", "rotated"
    return _table(heads, [[", ".join(names), *cells] for cells, names in same.items()])


def families() -> str:
    """The table of the model types of config.json: what applies if the file does not say otherwise."""
    rows = []
    for name, kind in architectures.MODEL_TYPES.items():
        size = f" ({kind.window:,})" if kind.window else ""
        window = {"never": "none", "always": f"if stated{size}", "if used": f"if used{size}"}[kind.slides]
        every = kind.no_rope_interval
        cells = (
            *(f"`{name}`", f"{kind.theta:,.0f}", f"{kind.context:,}"),
            "all or a part" if kind.trained else "all",
            *(f"every {every}th" if every else "none", window, "before RoPE" if kind.qk_norm else "none"),
        )
        rows.append(cells)
    heads = "`model_type`", "base", "context", "rotated", "layers without RoPE", "window", "norm of q and k"
    return _table(heads, rows)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head, *lines = (f"| {' | '.join(cells)} |" for cells in (heads, *rows))
    return "\n".join([head, "|" + "---|" * len(heads), *lines])


def rope() -> dict[str, str]:
    """The parts of the page of the RoPE of each model and family."""
    paired: dict[str, list[str]] = {}
    for name, layout in architectures.GGUF_LAYOUTS.items():
        paired.setdefault(layout, []).append(f"`{name}`")
    needs = {need: [f"`{name}`" for name in names.split()] for need, names in architectures.NEEDS.items()}
    lists = {"pairing": paired, "needs": needs}
    return {
        "models": models(),
        "families": families(),
        **{part: "\n".join(f"- {key}: {', '.join(names)}" for key, names in of.items()) for part, of in lists.items()},
    }


# --------------------------------------------------------------------------------------------------------------- run
def filled(page: str, parts: dict[str, str]) -> str:
    """The page with these parts. Raises ValueError if it lacks the comments of one."""
    for name, content in parts.items():
        between = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->\n)", re.DOTALL)
        page, count = between.subn(lambda match, new=content: f"{match[1]}\n{new}\n\n{match[2]}", page)
        if count != 1:
            raise ValueError(f"the page has {count} parts <!-- {name} -->, expected 1")
    return page


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a committed page is stale")
    args = parser.parse_args(arguments)
    parts = {COMMANDS: commands(), ROPE: rope()}
    parts[PYTHON] = python("\n".join(parts[COMMANDS].values()))
    found = {page: filled(page.read_text(), of) for page, of in parts.items()}
    stale = [page for page, content in found.items() if page.read_text() != content]
    for file in stale:
        print(f"{'stale' if args.check else 'written'}: {file.relative_to(ROOT)}")
        if not args.check:
            file.write_text(found[file])
    if args.check and stale:
        print("run 'python scripts/reference.py' and commit what it writes", file=sys.stderr)
    return int(args.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
