"""clearllama study: the claims about RoPE, each computed on the spot."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..errors import UsageError
from . import common

# option -> keyword of a topic's report
OPTIONS = {"head_dim": "head_dim", "rope_theta": "theta", "context": "context", "rope_factor": "factor"}


def add_parser(commands: common.Subparsers) -> None:
    parser = commands.add_parser(
        "study",
        help="learn RoPE: every claim, computed on the spot",
        description="Answer a question about position encoding: the claim, what was computed, what was expected, PASS"
        " or FAIL. Without TOPIC: the list of topics. Exit code 1 if a check fails.",
        allow_abbrev=False,
    )
    parser.add_argument("topic", nargs="?", metavar="TOPIC", help="see the list that 'clearllama study' prints")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw it: .png or .svg; .csv or .json for the data")
    parser.add_argument("--which", metavar="NAME", help="which of the topic's figures (default: the first)")
    parser.add_argument("--json", action="store_true", help="the report as one JSON object")
    group = parser.add_argument_group("numbers to try, on topics that take them")
    group.add_argument("--head-dim", type=int, metavar="D", help="entries of a head")
    group.add_argument("--rope-theta", type=float, metavar="T", help="base of the frequencies")
    group.add_argument("--context", type=int, metavar="N", help="tokens of the trained context")
    group.add_argument("--rope-factor", type=float, metavar="S", help="how much longer the context is to become")
    common.add_debug(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..study import topics

    if args.topic is None:
        for name, question in topics.TOPICS.items():
            common.write(f"{name:<12} {question}\n")
        return 0
    topic = topics.find(args.topic)
    from ..study import report as reports

    given = {OPTIONS[name]: getattr(args, name) for name in OPTIONS if getattr(args, name) is not None}
    report = topic.report(**_taken(args.topic, given, topic.report))
    if args.figure is not None:
        _draw(args, topic, given)
    if args.json:
        common.write_json(reports.as_dict(report))
    else:
        common.write(reports.text(report))
        if topic.figures:
            common.say(args, f"figures: {', '.join(figure.name for figure in topic.figures)} (--figure FILE)")
    return 0 if report.passed else 1


def _draw(args: argparse.Namespace, topic: Any, given: dict[str, Any]) -> None:
    from ..study import figure as figures
    from ..study.topics.base import options_of

    names = [figure.name for figure in topic.figures]
    name = args.which or (names[0] if names else None)
    if name not in names:
        raise UsageError(f"study {args.topic} has no figure {name!r}; it has: {', '.join(names) or 'none'}")
    figure = topic.figures[names.index(name)]
    taken = {key: value for key, value in given.items() if key in options_of(figure.data)}
    figures.save(figure, args.figure, **taken)
    common.say(args, f"{args.figure}: figure {name}")


def _taken(topic: str, given: dict[str, Any], report: Any) -> dict[str, Any]:
    """The options given, if the topic takes them; else an error that says which it takes."""
    from ..study.topics.base import options_of

    known = options_of(report)
    spelled = {keyword: f"--{option.replace('_', '-')}" for option, keyword in OPTIONS.items()}
    for keyword in given:
        if keyword not in known:
            takes = ", ".join(spelled[name] for name in known if name in spelled) or "none"
            raise UsageError(f"study {topic} does not take {spelled[keyword]}; it takes: {takes}")
    return given
