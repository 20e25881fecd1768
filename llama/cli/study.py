"""Answer a question about position encodings.

The answer has numbers and a figure. Without TOPIC, the topics are listed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from .common import files, tables, terminal
from .common.parser import Group

if TYPE_CHECKING:
    from ..study.figure import Figure

PARAMETERS: dict[str, tuple[Any, ...]] = {  # keyword argument of a topic's report -> its option
    "head_dim": ("--head-dim N", int, "dimension of a head"),
    "theta": ("--rope-theta T", float, "base of the rotary frequencies"),
    "context": ("--context N", int, "trained context length in tokens"),
    "factor": ("--rope-factor S", float, "extend the context S times"),
    "model": (
        "-m --model PATH_OR_NAME",
        str,
        "for the topic scale: the checkpoint whose settings are used; for others: the model to run (default: tiny-kjv,"
        " which comes with the package)",
    ),
    "text": ("--text FILE", Path, "a long text (default: the test text of tiny-kjv)"),
    "length": ("--length N", int, "tokens per window (default: 8 times the trained length)"),
    "windows": ("--windows N", int, "number of windows (default: 6)"),
    "methods": (
        "--methods LIST",
        lambda text: tuple(text.split(",")),
        "comma-separated list of none and KIND:FACTOR (default: none,linear:4,ntk:4,ntk:16,dynamic:1,yarn:4); with"
        " dynamic, when a text grows, only its new tokens are rotated by the frequencies of the new length",
    ),
    "dtype": ("--dtype TYPE", str, "auto, float32, bfloat16, float16"),
}
NAMES = {keyword: row[0].split()[-2] for keyword, row in PARAMETERS.items()}
OPTIONS = [
    ("topic TOPIC", str, "a topic; clearllama study lists them", {"nargs": "?"}),
    ("bug BUG", str, "with TOPIC bugs: a bug to show", {"nargs": "?"}),
    ("--figure PATH", Path, "a file for the main figure (.png, .svg) or its data (.csv), or a folder for all figures"),
    ("--html FILE", Path, "write a page to explore RoPE in a browser: one file, works offline"),
    ("--json", bool, "write the report as one JSON object"),
    Group("parameters of some topics"),
    *((*row, {"dest": keyword}) for keyword, row in PARAMETERS.items()),
]


def run(args: argparse.Namespace) -> None:
    from ..study import figure as figures
    from ..study import report as reports
    from ..study import topics

    given = {keyword: getattr(args, keyword) for keyword in PARAMETERS if getattr(args, keyword) is not None}
    if args.html is not None:
        if args.json or args.topic or args.figure or given:
            raise UsageError("--html writes a page with its own controls: leave TOPIC and all other options out")
        from ..study import page

        files.check_file("--html", args.html)
        html = page.html()
        files.write_file(args.html, html)
        terminal.info(f"{args.html}: {len(html.encode()) / 1000:.0f} kB; open it in a browser")
        return
    if args.topic is None:
        if given or args.json or args.figure is not None:
            raise UsageError(f"--figure, --json and parameters need a TOPIC: one of {', '.join(topics.TOPICS)}")
        terminal.write(tables.table(topics.TOPICS.items()))
        return
    topic = topics.find(args.topic)
    options = accepted(topic.report, NAMES)
    if refused := [NAMES[keyword] for keyword in given if keyword not in options]:
        listed = ", ".join(options.values()) or "none"
        raise UsageError(f"study {args.topic} does not accept {refused[0]}; it accepts: {listed}")
    if args.bug is not None:
        if args.topic != "bugs" or args.figure is not None:
            raise UsageError("BUG needs the topic bugs, without --figure: clearllama study bugs BUG")
        from ..study import bugs

        terminal.show(args, *bugs.show(bugs.find(args.bug)))
        return
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
    with terminal.progress("tok", unit_scale=True, leave=False) as show:
        given |= accepted(topic.report, {"progress": show})
        report = topic.report(**given)
        for file, figure in drawn.items():
            used = accepted(figure.data, given)
            figures.save(figure, file, **used)
            ignored = ", ".join(key for key in given if key not in used and key != "progress")
            terminal.info(f"{file}: figure {figure.name}{f' (its {ignored} is fixed)' if ignored else ''}")
    about = args.topic, topics.TOPICS[args.topic], report
    terminal.show(args, reports.as_dict(*about), reports.text(*about))
    if topic.figures and not args.json:
        terminal.info(f"figures: {', '.join(figure.name for figure in topic.figures)} (--figure FOLDER)")


def accepted(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The given keyword arguments that a function accepts."""
    from ..study.topics.base import options_of

    return {keyword: given[keyword] for keyword in options_of(function) if keyword in given}
