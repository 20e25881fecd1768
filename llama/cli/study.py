"""clearllama study: questions about position encodings, answered by computing."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from . import arguments, bugs, streams, tables

if TYPE_CHECKING:
    from ..study.figure import Figure

# Parameters of some topics. option: (keyword argument of the topic's report, type, metavar, help)
PARAMETERS: dict[str, tuple[str, Callable[[str], Any], str, str]] = {
    "head_dim": ("head_dim", int, "D", "dimension of a head"),
    "rope_theta": ("theta", float, "T", "base of the rotary frequencies"),
    "context": ("context", int, "N", "trained context length in tokens"),
    "rope_factor": ("factor", float, "S", "extend the context S times"),
    "model": (
        "model",
        str,
        "PATH_OR_NAME",
        "the checkpoint to take the settings from (scale), or the model to run (default: tiny-kjv, which comes with the"
        " package)",
    ),
    "text": ("text", Path, "FILE", "a long text (default: the test text of tiny-kjv)"),
    "length": ("length", int, "N", "tokens per window (default: 8 times the trained length)"),
    "windows": ("windows", int, "N", "number of windows (default: 6)"),
    "methods": (
        "methods",
        lambda text: tuple(text.split(",")),
        "LIST",
        "comma-separated list of none and KIND:FACTOR (default: none,linear:4,ntk:4,ntk:16,dynamic:1,yarn:4);"
        " dynamic rotates only the new tokens of a growing text by the frequencies of the new length",
    ),
    "dtype": ("dtype", str, "TYPE", "auto, float32, bfloat16, float16"),
}


def add_parser(commands: arguments.Subparsers) -> None:
    parser = commands.add_parser(
        "study",
        description="Answer a question about position encodings with numbers and a figure. Without TOPIC, list the"
        " topics.",
        usage="%(prog)s [options] [TOPIC] [BUG]",
    )
    parser.add_argument("topic", nargs="?", metavar="TOPIC", help="a topic; clearllama study lists them")
    parser.add_argument(
        "--figure", type=Path, metavar="FILE", help="draw a figure (.png or .svg) or write its data (.csv)"
    )
    parser.add_argument("--which", metavar="NAME", help="the figure of the topic to draw (default: the first)")
    parser.add_argument(
        "--figures", type=Path, metavar="FOLDER", help="write all figures, of TOPIC or of all topics, as .png and .csv"
    )
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page to explore RoPE in a browser: one file, works offline"
    )
    group = parser.add_argument_group("parameters of some topics")
    for name, (_, kind, metavar, about) in PARAMETERS.items():
        options = [arguments.option(name)] + ["-m"] * (name == "model")
        group.add_argument(*options, type=kind, metavar=metavar, help=about)
    bugs.add_arguments(parser)
    arguments.add_output_options(parser, json="the report as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..study import figure as figures
    from ..study import report as reports
    from ..study import topics

    if args.html is not None:
        return _write_page(args)
    if args.which is not None and args.figure is None:
        raise UsageError("--which needs --figure FILE")
    if args.topic != "bugs" and (args.quiz or args.bug is not None):
        raise UsageError("BUG and --quiz belong to the topic bugs: clearllama study bugs")
    values = {keyword: getattr(args, name) for name, (keyword, *_) in PARAMETERS.items()}
    given = {keyword: value for keyword, value in values.items() if value is not None}
    if args.topic is None:
        if given or args.json or args.figure is not None:
            raise UsageError(f"--figure, --json and parameters need a TOPIC: one of {', '.join(topics.TOPICS)}")
        if args.figures is not None:
            _draw_all(args, topics.TOPICS, {})
        else:
            streams.write(tables.table(topics.TOPICS.items()))
        return 0
    topic = topics.find(args.topic)
    _check_options(args.topic, given, topic.report)
    if args.figure is not None or args.figures is not None:
        if not topic.figures:
            raise UsageError(f"study {args.topic} has no figure")
        figure = topic.figure(args.which)
    if args.figure is not None:
        figures.check(args.figure)
        streams.check_file("--figure", args.figure)
    if args.quiz or args.bug is not None:
        return bugs.run(args)
    with streams.progress(args.quiet, "tok", unit_scale=True, leave=False) as show:
        given |= _accepted(topic.report, {"progress": show})
        if args.figures is not None:
            _draw_all(args, [args.topic], given)
        report = topic.report(**given)
        if args.figure is not None:
            _draw(args, figure, args.figure, given)
    if args.json:
        streams.write_json(reports.as_dict(args.topic, topics.TOPICS[args.topic], report))
    else:
        streams.write(reports.text(args.topic, topics.TOPICS[args.topic], report))
        if topic.figures:
            streams.info(args, f"figures: {', '.join(figure.name for figure in topic.figures)} (--figure FILE)")
        if args.topic == "bugs":
            streams.info(args, "clearllama study bugs step shows one of them; --quiz asks for a prediction of each")
    return 0


def _accepted(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The given keyword arguments that a function accepts."""
    from ..study.topics.base import options_of

    return {keyword: given[keyword] for keyword in options_of(function) if keyword in given}


def _check_options(topic: str, given: Mapping[str, Any], report: Callable[..., Any]) -> None:
    """Raise UsageError for an option that the topic does not accept; the message lists those it accepts."""
    options = {keyword: arguments.option(name) for name, (keyword, *_) in PARAMETERS.items()}
    accepted = _accepted(report, options)
    for keyword in given:
        if keyword not in accepted:
            listed = ", ".join(accepted.values()) or "none"
            raise UsageError(f"study {topic} does not accept {options[keyword]}; it accepts: {listed}")


def _write_page(args: argparse.Namespace) -> int:
    from ..study import page

    if args.json or any(getattr(args, name) is not None for name in ("topic", "figure", "which", *PARAMETERS)):
        raise UsageError("--html writes a page with its own controls: leave TOPIC and all other options out")
    streams.check_file("--html", args.html)
    size = page.write(args.html)
    streams.info(args, f"{args.html}: {size / 1000:.0f} kB; open it in a browser")
    return 0


def _draw(args: argparse.Namespace, figure: Figure, file: Path, given: Mapping[str, Any]) -> None:
    from ..study import figure as figures

    accepted = _accepted(figure.data, given)
    figures.save(figure, file, **accepted)
    ignored = ", ".join(key for key in given if key not in accepted and key != "progress")
    streams.info(args, f"{file}: figure {figure.name}{f' (its {ignored} is fixed)' if ignored else ''}")


def _draw_all(args: argparse.Namespace, names: Iterable[str], given: Mapping[str, Any]) -> None:
    from ..study import figure as figures
    from ..study import topics

    figures.check(Path("any.png"))  # before the folder is made
    try:
        args.figures.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--figures {args.figures}: {error.strerror}") from None
    for name in names:
        for figure in topics.find(name).figures:
            for ending in ("png", "csv"):
                _draw(args, figure, args.figures / f"{figure.name}.{ending}", given)
