"""clearllama trace: what the model computes on a text, as a page to look at."""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path

from ..errors import UsageError
from . import arguments, generate, loading, streams


def add_parser(commands: arguments.Subparsers) -> None:
    parser = commands.add_parser(
        "trace",
        help="see what the model computes on a text, and what changes without a part of it",
        description="Run the model over a raw text and show what it computed: the surprise at every token, the answer"
        " as it forms layer by layer, every attention map, the angles of RoPE. With an intervention: what changes"
        " against the untouched model. Layers and heads count from 0.",
        allow_abbrev=False,
    )
    parser.add_argument("text", nargs="?", metavar="PROMPT", help="the text; '-' or a pipe reads standard input")
    parser.add_argument("--prompt", "-p", help="the text, as an option")
    parser.add_argument("--html", type=Path, metavar="FILE", help="a page to look at: one file, no network needed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="everything as numbers, in one JSON object")
    parser.add_argument(
        "--max-tokens", type=int, default=256, metavar="N", help="refuse longer texts (default: %(default)s)"
    )
    group = parser.add_argument_group("interventions", "besides --rope-scaling, --rope-factor and --rope-theta")
    group.add_argument(
        "--ablate-head",
        action="append",
        default=[],
        metavar="LAYER.HEAD",
        help="zero a head's output, as 3.5; may be repeated",
    )
    group.add_argument("--layers", metavar="FIRST:END", help="run only these layers, as 0:8 for layers 0 to 7")
    group.add_argument("--no-rope", action="store_true", help="rotate nothing")
    arguments.add_model_options(parser, dtype="float32")
    arguments.add_debug(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.max_tokens < 1:
        raise UsageError(f"--max-tokens must be at least 1, got {args.max_tokens}")
    for option, file in (("--html", args.html), ("--json", args.json)):
        if file is not None:
            streams.check_file(option, file)
    if args.html is not None and args.json is not None and args.html.resolve() == args.json.resolve():
        raise UsageError(f"--html and --json both name {args.html}; one would overwrite the other")
    arguments.check_one_device(args, "trace")
    prompt = generate.read_prompt(args)
    scaling = arguments.rope_scaling(args)
    untouched = copy.copy(args)  # another rotation is an intervention here, so the model is loaded without
    untouched.rope_scaling = untouched.rope_factor = untouched.rope_theta = None
    from ..rope_scaling import reach, with_rope
    from ..study import intervene, trace, trace_page

    intervene.Intervention(
        no_rope=args.no_rope, theta=args.rope_theta, scaling=scaling
    )  # slips are told before loading
    for text in args.ablate_head:
        intervene.head_numbers(text)
    if args.layers is not None:
        intervene.layer_numbers(args.layers)
    llm = loading.load(untouched)
    config = llm.model.config
    changed = with_rope(config, scaling, args.rope_theta)
    stretched = reach(changed.max_seq_len, changed.rope_scaling)
    if args.max_seq_len is None and stretched > llm.model.max_seq_len:  # the untouched model is compared on all of it
        llm.model.max_seq_len = llm.model.rope.max_seq_len = stretched
    intervention = intervene.Intervention(
        heads=tuple(dict.fromkeys(intervene.parse_head(text, config) for text in args.ablate_head)),
        layers=None if args.layers is None else intervene.parse_layers(args.layers, config),
        no_rope=args.no_rope,
        theta=args.rope_theta,
        scaling=scaling,
    )
    ids = llm.tokenizer.encode_prompt(prompt)
    if len(ids) > args.max_tokens:
        raise UsageError(
            f"the text is {len(ids)} tokens and a trace takes at most {args.max_tokens}, since its maps grow with the"
            f" square; shorten it or raise --max-tokens"
        )
    traced = trace.trace(llm.model, ids, intervention)
    about = {
        "model": loading.model_name(args.model),
        "prompt": prompt,
        "dtype": str(llm.model.tok_embeddings.weight.dtype).removeprefix("torch."),
        "n_layers": config.n_layers,
        "n_heads": config.n_heads,
        "n_kv_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
    }
    facts = trace.facts(traced, llm.tokenizer, about)
    if args.json is not None:
        whole = facts | {"attention": trace.attention_rows(traced.weights)}
        text = json.dumps(whole, allow_nan=False) + "\n"
        streams.write_file(args.json, text)
        streams.say(args, f"{args.json}: {len(text) / 1000:,.0f} kB")
    if args.html is not None:
        text = trace_page.render(facts, trace.packed_maps(traced.weights))
        streams.write_file(args.html, text)
        streams.say(args, f"{args.html}: {len(text.encode()) / 1000:,.0f} kB; open it in a browser")
    streams.write(trace.summary(facts))
    if args.html is None and args.json is None:
        streams.say(args, "--html FILE draws it")
    return 0
