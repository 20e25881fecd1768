"""Show the tokens of a text.

Each line has the id and the text of a token. A token that is a part of a character is shown as bytes, such as <0xE5>,
and a control token is shown by its name. --model may also name a tokenizer.json or tokenizer.model.
"""

from __future__ import annotations

import argparse

from ..hub import default_model
from .common import arguments, files, tables, terminal

OPTIONS = [
    *arguments.PROMPT,
    ("--parse-special", bool, "read strings such as <|im_end|> as control tokens"),
    ("-m --model PATH_OR_NAME", str, "the model whose tokenizer is used", {"default": default_model()}),
    ("--json", bool, "write one JSON object: prompt, tokens (the ids), pieces"),
]


def run(args: argparse.Namespace) -> None:
    from ..loader import load_tokenizer

    prompt = files.read_prompt(args)
    tokenizer = load_tokenizer(args.model)
    ids = tokenizer.encode_prompt(prompt, args.parse_special)
    pieces = [tokenizer.shown(id) for id in ids]
    terminal.info(f"{len(ids):,} token{'s' * (len(ids) != 1)}")
    facts = {"prompt": prompt, "tokens": ids, "pieces": pieces}
    terminal.show(args, facts, tables.table((str(id), repr(piece)) for id, piece in zip(ids, pieces, strict=True)))
