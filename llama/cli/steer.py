"""clearllama steer: make a control vector from two prompts."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import UsageError
from . import arguments, loading, streams


def add_parser(commands: arguments.Subparsers) -> None:
    parser = commands.add_parser(
        "steer",
        description="Run the model on two prompts and write the difference of their residual streams, after each layer"
        " at the last token, as a GGUF control vector. The option --steer of generate, chat and serve adds the vector"
        " to the layers' outputs; llama.cpp's --control-vector does the same.",
        usage="%(prog)s --positive TEXT --negative TEXT --output FILE [options]",
    )
    parser.add_argument(
        "--positive",
        action="append",
        required=True,
        metavar="TEXT",
        help="the prompt to move towards; may be repeated, each time with a --negative: the differences are averaged",
    )
    parser.add_argument("--negative", action="append", required=True, metavar="TEXT", help="the prompt to move from")
    parser.add_argument("--output", "-o", type=Path, required=True, metavar="FILE", help="the file to write (.gguf)")
    parser.add_argument("--raw", action="store_true", help="use the prompts as plain text, without a chat template")
    arguments.add_chat_format(parser, "no format is used and the texts are plain")
    arguments.add_output_options(parser)
    arguments.add_model_options(parser)
    arguments.add_rope_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if len(args.positive) != len(args.negative):
        raise UsageError(f"got {len(args.positive)} --positive, but {len(args.negative)} --negative")
    if args.compile:
        raise UsageError("steer can't read the outputs of compiled layers: leave --compile out")
    streams.check_file("--output", args.output)
    from ..chat import encode_chat
    from ..study import steering

    llm = loading.load(args)
    format = None if args.chat_format == "auto" else args.chat_format
    plain = args.raw or (format is None and llm.chat_template is None)

    def encoded(prompt: str) -> list[int]:
        if plain:
            return llm.tokenizer.encode_prompt(prompt)
        messages = [{"role": "user", "content": prompt}]
        return encode_chat(llm.tokenizer, llm.chat_template, messages, format=format or llm.chat_format)

    pairs = [(encoded(one), encoded(other)) for one, other in zip(args.positive, args.negative, strict=True)]
    vector = steering.control_vector(llm.model, pairs)
    vector.write(args.output)
    streams.info(args, "differences add up over the layers: start with a --steer-scale of 0.05 to 0.2")
    count, dim, last = len(vector.directions), llm.model.config.dim, max(vector.directions)
    streams.write(f"{args.output}: {count} directions of {dim} numbers, for layers 1 to {last}\n")
    return 0
