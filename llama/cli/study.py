"""Answer a question about position encodings with numbers and a figure. Without TOPIC, list the topics."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from .common import arguments, files, tables, terminal

if TYPE_CHECKING:
    from ..study.figure import Figure

MODEL = (
    "the checkpoint to take the settings from (scale), or the model to run (default: tiny-kjv, which comes with the"
    " package)"
)
METHODS = (
    "comma-separated list of none and KIND:FACTOR (default: none,linear:4,ntk:4,ntk:16,dynamic:1,yarn:4); dynamic"
    " rotates only the new tokens of a growing text by the frequencies of the new length"
)
PARAMETERS: dict[str, tuple[Any, ...]] = {  # keyword argument of a topic's report -> its option
    "head_dim": ("--head-dim", "N", "dimension of a head"),
    "theta": ("--rope-theta", "T", "base of the rotary frequencies"),
    "context": ("--context", "N", "trained context length in tokens"),
    "factor": ("--rope-factor", "S", "extend the context S times"),
    "model": ("--model -m", "PATH_OR_NAME", MODEL),
    "text": ("--text", "FILE", "a long text (default: the test text of tiny-kjv)", {"type": Path}),
    "length": ("--length", "N", "tokens per window (default: 8 times the trained length)"),
    "windows": ("--windows", "N", "number of windows (default: 6)"),
    "methods": ("--methods", "LIST", METHODS, {"type": lambda text: tuple(text.split(","))}),
    "dtype": ("--dtype", "TYPE", "auto, float32, bfloat16, float16"),
}
OPTIONS = {keyword: row[0].split()[0] for keyword, row in PARAMETERS.items()}


def add_options(parser: argparse.ArgumentParser) -> None:
    figure = "a file for the main figure (.png, .svg) or its data (.csv), or a folder for all figures"
    arguments.add(
        parser,
        ("topic", "TOPIC", "a topic; clearllama study lists them", {"nargs": "?"}),
        ("bug", "BUG", "with TOPIC bugs: a bug to show", {"nargs": "?"}),
        ("--figure", "PATH", figure, {"type": Path}),
        ("--html", "FILE", "write a page to explore RoPE in a browser: one file, works offline", {"type": Path}),
    )
    rows = ((*row[:3], {"dest": keyword, **dict(*row[3:])}) for keyword, row in PARAMETERS.items())
    arguments.add(parser.add_argument_group("parameters of some topics"), *rows)
    arguments.add_output_options(parser, json="the report as one JSON object")


def run(args: argparse.Namespace) -> int:
    from ..study import figure as figures
    from ..study import report as reports
    from ..study import topics

    given = {keyword: getattr(args, keyword) for keyword in PARAMETERS if getattr(args, keyword) is not None}
    if args.html is not None:
        if args.json or args.topic or args.figure or given:
            raise UsageError("--html writes a page with its own controls: leave TOPIC and all other options out")
        from ..study import page

        files.check_file("--html", args.html)
        size = page.write(args.html)
        terminal.info(args, f"{args.html}: {size / 1000:.0f} kB; open it in a browser")
        return 0
    if args.topic is None:
        if given or args.json or args.figure is not None:
            raise UsageError(f"--figure, --json and parameters need a TOPIC: one of {', '.join(topics.TOPICS)}")
        terminal.write(tables.table(topics.TOPICS.items()))
        return 0
    topic = topics.find(args.topic)
    options = accepted(topic.report, OPTIONS)
    if refused := [OPTIONS[keyword] for keyword in given if keyword not in options]:
        listed = ", ".join(options.values()) or "none"
        raise UsageError(f"study {args.topic} does not accept {refused[0]}; it accepts: {listed}")
    if args.bug is not None:
        if args.topic != "bugs" or args.figure is not None:
            raise UsageError("BUG needs the topic bugs, without --figure: clearllama study bugs BUG")
        from ..study import bugs

        terminal.show(args, *bugs.show(bugs.find(args.bug)))
        return 0
    drawn: dict[Path, Figure] = {}
    if args.figure is not None:
        if not topic.figures:
            raise UsageError(f"study {args.topic} has no figure")
        is_folder = args.figure.is_dir() or not args.figure.suffix
        figures.check(args.figure / "figure.png" if is_folder else args.figure)
        drawn = {args.figure: topic.figure()}
        if not is_folder:
            files.check_file("--figure", args.figure)
        else:
            args.figure.mkdir(exist_ok=True)
            drawn = {args.figure / f"{figure.name}.png": figure for figure in topic.figures}
    with terminal.progress(args.quiet, "tok", unit_scale=True, leave=False) as show:
        given |= accepted(topic.report, {"progress": show})
        report = topic.report(**given)
        for file, figure in drawn.items():
            used = accepted(figure.data, given)
            figures.save(figure, file, **used)
            ignored = ", ".join(key for key in given if key not in used and key != "progress")
            terminal.info(args, f"{file}: figure {figure.name}{f' (its {ignored} is fixed)' if ignored else ''}")
    about = args.topic, topics.TOPICS[args.topic], report
    terminal.show(args, reports.as_dict(*about), reports.text(*about))
    if topic.figures and not args.json:
        terminal.info(args, f"figures: {', '.join(figure.name for figure in topic.figures)} (--figure FOLDER)")
    return 0


def accepted(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The given keyword arguments that a function accepts."""
    from ..study.topics.base import options_of

    return {keyword: given[keyword] for keyword in options_of(function) if keyword in given}
