"""clearllama explain: one token through one block, each step with its equation, its numbers and its line of code."""

from __future__ import annotations

import argparse

from ..errors import UsageError
from . import arguments, loading, streams


def add_parser(commands: arguments.Subparsers) -> None:
    parser = commands.add_parser(
        "explain",
        help="follow one token through one block, step by step",
        description="Follow one token through one block: for every step the equation, the shapes, some of the numbers,"
        " the line of code that does it, and whether it equals the same step written out in numpy. Without --model: a"
        " tiny random model whose tokens are bytes. Exit code 1 if a step differs.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--text", default="The cat sat on the mat", metavar="TEXT", help="what the model reads (default: %(default)s)"
    )
    parser.add_argument("--token", type=int, metavar="N", help="which token to follow, from 0 (default: the last)")
    parser.add_argument("--layer", type=int, default=0, metavar="N", help="which block (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    arguments.add_model_options(parser, default=None, dtype="float32")
    arguments.add_debug(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..engine import runtime
    from ..rope_scaling import with_rope
    from ..study import explain

    arguments.check_one_device(args, "explain")
    runtime.set_threads(args.threads)
    if args.model is None:
        for option, value, known in (("--device", args.device, "cpu"), ("--dtype", args.dtype, "float32")):
            if value not in ("auto", known):
                raise UsageError(
                    f"{option} {value} is for a model of yours (-m); the tiny one runs in float32 on the CPU"
                )
        config = with_rope(explain.TINY, arguments.rope_scaling(args), args.rope_theta)
        net = explain.tiny_model(config, args.rope, args.max_seq_len)
        ids = list(args.text.encode(errors="surrogateescape"))
        name, texts = "tiny, random", [bytes([id]).decode("latin-1") for id in ids]
    else:
        from ..study.trace import spelled

        llm = loading.load(args)
        net, ids = llm.model, llm.tokenizer.encode_prompt(args.text)
        name, texts = loading.model_name(args.model), [spelled(llm.tokenizer, id) for id in ids]
    explanation = explain.explain(net, ids, args.token, args.layer, texts, {"model": name})
    if args.json:
        streams.write_json(explain.as_dict(explanation))
    else:
        streams.write(explain.text(explanation))
    return 0 if explanation.report.passed else 1
