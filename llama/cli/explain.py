"""Follow one token through one block.

Each step shows its equation, shapes, some values, its line of code, and whether numpy computes the same result.
Without --model, a tiny random model with byte tokens is used. Exit code 1 if a step differs.
"""

from __future__ import annotations

import argparse

from ..errors import UsageError
from .common import arguments, loading, terminal

OPTIONS = [
    ("--text TEXT", str, "the text", {"default": "The cat sat on the mat"}),
    ("--token N", int, "index of the token, from 0 (default: the last)"),
    ("--layer N", int, "index of the block", {"default": 0}),
    ("--json", bool, "write one JSON object"),
    *arguments.model(dtype="float32", optional=True),
]


def run(args: argparse.Namespace) -> int:
    from ..inside import explain
    from ..loader import with_rope

    arguments.check_plain(args, "explain")
    if args.model is None:
        plain = args.device in ("auto", "cpu") and args.dtype in ("auto", "float32")
        if not plain or args.adapter or args.tokenizer or args.quantize:
            raise UsageError("the tiny random model runs in float32 on the CPU; other options of a model need --model")
        config = with_rope(explain.TINY, arguments.rope_scaling(args), args.rope_theta)
        net = explain.random_model(config, args.rope, max_seq_len=args.max_seq_len)
        ids = list(args.text.encode(errors="surrogateescape"))
        name, texts = "tiny, random", [bytes([id]).decode("latin-1") for id in ids]
    else:
        # fast=False gives layers of nn.Linear: the steps are recomputed from their weights
        llm, read_weights = loading.prepare(args, fast=False)
        net, ids = llm.model, llm.tokenizer.encode_prompt(args.text)
        explain.check(net, ids, args.token, args.layer)
        read_weights()
        name, texts = loading.model_name(args.model), [llm.tokenizer.shown(id) for id in ids]
    found = explain.explain(net, ids, args.token, args.layer, texts, {"model": name})
    terminal.show(args, found, explain.text(found))
    return 0 if found["passed"] else 1
