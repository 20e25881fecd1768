"""The parser of a command: it makes options from rows of a table, and prints help and usage errors.

Does not import torch.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn

from . import terminal

REQUIRED = {"required": True}
MANY = {"action": "append", "default": []}  # settings of an option that may be repeated
RARE = {"rare": True}  # settings of an option that only --help-all shows
Row = tuple[Any, ...]


class Group(NamedTuple):
    """The options that follow in a table, up to the next group."""

    title: str | None = None  # None for the general options
    about: str | None = None
    rare: bool = False  # whether only --help-all shows them
    exclusive: bool = False  # whether they exclude each other


def add(parser: argparse.ArgumentParser, options: Iterable[Row | Group]) -> None:
    """Add options. Each option is a row: names, type, help and, if needed, more settings.

    names     an option and its value ("-m --model PATH_OR_NAME"), or an argument and its value ("text PROMPT")
    type      bool for a switch, a list of choices (the first is the default), or a function that parses the text
    help      the text in --help; if it names no default, the default is added
    settings  RARE, or keyword arguments of argparse's add_argument
    """
    group: argparse._ActionsContainer = parser
    rare = False
    for row in options:
        if isinstance(row, Group):
            group = parser if row.title is None else parser.add_argument_group(row.title, row.about)
            group = group.add_mutually_exclusive_group() if row.exclusive else group
            rare = row.rare
            continue
        names, kind, about, *more = row
        words = names.split()
        flags = [word for word in words if word.startswith("-")] or words[:1]
        settings: dict[str, Any] = {"type": kind, "metavar": words[-1]}
        if kind is bool:
            settings = {"action": "store_true"}
        elif isinstance(kind, list):
            settings = {"choices": kind, "default": kind[0]}
        settings.update(*more)
        is_rare, default = settings.pop("rare", rare), settings.get("default")
        if default not in (None, [], argparse.SUPPRESS) and "(default" not in about:
            about += " (default: %(default)s)"
        action: Any = group.add_argument(*flags, help=about, **settings)
        action.rare = is_rare


class Formatter(argparse.HelpFormatter):
    """Help that shows an option's value name once."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings or action.nargs == 0:
            return super()._format_action_invocation(action)
        return f"{', '.join(action.option_strings)} {self._format_args(action, action.dest.upper())}"


class Brief(Formatter):
    """Help with one line for each option: if its text is too long, only the part up to the first ; or : or (."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        text = text if len(text) <= width else re.split(r"[;(]|: ", text)[0]
        return [textwrap.shorten(text, width, placeholder=" ...")]


class HelpAll(argparse._HelpAction):
    """--help-all."""

    def __call__(self, parser: Any, *_: Any, **__: Any) -> None:
        terminal.write_raw(parser.format_help(all=True))
        parser.exit()


class Parser(argparse.ArgumentParser):
    """argparse with usage errors on one line and a help of one screen."""

    commands: dict[str, Parser]  # of the main parser

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {terminal.one_line(message)} (see {self.prog} --help)\n")

    def format_help(self, all: bool = False) -> str:
        """The common options in one line each, or all options in groups with their whole texts."""
        formatter = (Formatter if all else Brief)(self.prog, max_help_position=29)
        needed = [action for action in self._actions if action.required or not action.option_strings]
        formatter.add_usage(None, needed, [])
        formatter.add_text(self.description if all else first_sentence(self.description))
        common = [action for action in self._actions if action.dest != "help" and not getattr(action, "rare", False)]
        common.sort(key=lambda action: bool(action.option_strings))  # arguments first
        groups = [(group.title, group.description, group._group_actions) for group in self._action_groups]
        for title, about, actions in groups if all else [(None, None, common)]:
            formatter.start_section(title)
            formatter.add_text(about)
            for action in actions:
                formatter.add_arguments(getattr(action, "_choices_actions", [action]))  # all commands, or one option
            formatter.end_section()
        formatter.add_text(self.epilog)
        return formatter.format_help()


def first_sentence(text: str | None) -> str:
    """The first sentence of a docstring."""
    return re.split(r"\.\s", f"{text}\n")[0] + "."
