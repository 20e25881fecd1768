"""clearllama trace: show what the model computes on a text."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checks import integer
from ..errors import UsageError
from . import arguments, loading, streams

STDOUT = Path("-")

if TYPE_CHECKING:
    from ..study.intervene import Intervention
    from ..text import Llama


def add_parser(commands: arguments.Subparsers) -> None:
    parser = commands.add_parser(
        "trace",
        description="Run the model on plain text and show what it computes: the surprisal of every token, the"
        " prediction after each layer, every attention map, and the angles of RoPE. With an intervention, it also shows"
        " the difference from the unchanged model. Layers and heads are numbered from 0.",
        usage="%(prog)s [options] [PROMPT]",
    )
    arguments.add_prompt_options(parser, "text")
    parser.add_argument("--sample", action="store_true", help="use a text of about 40 tokens that is included")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page for a browser: one file, works offline")
    parser.add_argument(
        "--json",
        nargs="?",
        const=STDOUT,
        type=Path,
        metavar="FILE",
        help="write all numbers as one JSON object to FILE (default: to standard output, in place of the summary)",
    )
    parser.add_argument("--max-tokens", type=int, default=256, metavar="N", help="longest text (default: %(default)s)")
    arguments.add_output_options(parser)
    group = parser.add_argument_group("interventions", "the options of RoPE below are interventions, too")
    group.add_argument(
        "--ablate-head",
        action="append",
        default=[],
        metavar="LAYER.HEAD",
        help="set the output of a head to zero, for example 3.5; may be repeated",
    )
    group.add_argument("--layers", metavar="FIRST:END", help="run only these layers: 0:8 is layers 0 to 7")
    group.add_argument("--no-rope", action="store_true", help="do not rotate queries and keys")
    group.add_argument("--against", metavar="METHOD", help="compare --rope-scaling with this one, such as linear:4")
    group.add_argument(
        "--patch-from",
        metavar="TEXT",
        help="copy the residual stream of TEXT into the run on PROMPT, at one layer and token at a time; show how much"
        " of the difference between the two answers each copy restores. TEXT must have as many tokens as PROMPT",
    )
    arguments.add_model_options(parser, dtype="float32")
    arguments.add_rope_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    integer("--max-tokens", args.max_tokens)
    if args.html is not None and args.html == args.json:
        raise UsageError(f"--html and --json both name {args.html}")
    for option, file in (("--html", args.html), ("--json", args.json)):
        if file not in (None, STDOUT):
            streams.check_file(option, file)
    arguments.check_one_device(args, "trace")
    if args.sample and (args.text, args.prompt, args.file) != (None, None, None):
        raise UsageError("--sample is the text: leave the prompt out")
    from ..loader import with_rope
    from ..rope_scaling import reach
    from ..study import intervene, trace, trace_page
    from ..study.perplexity import scaling_of

    prompt, scaling = trace.SAMPLE if args.sample else streams.read_prompt(args), arguments.rope_scaling(args)
    if args.against is not None and scaling is None:
        raise UsageError("--against compares two scalings: add --rope-scaling, for example --rope-scaling yarn")
    against = args.against and intervene.Intervention(scaling=scaling_of(args.against))
    # the RoPE options are interventions, so the model is loaded without them
    unchanged = dict.fromkeys(("rope_scaling", "rope_factor", "rope_theta"))
    llm = loading.load(argparse.Namespace(**{**vars(args), **unchanged}))
    config = llm.model.config
    stretched = reach(with_rope(config, scaling, args.rope_theta))
    if against:
        stretched = max(stretched, reach(with_rope(config, against.scaling, None)))
    if args.max_seq_len is None and stretched > llm.model.max_seq_len:  # the unchanged model must fit the text too
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
        raise UsageError(f"the text has {len(ids)} tokens, more than --max-tokens {args.max_tokens}; raise it")
    traced = trace.trace(llm.model, ids, intervention, against)
    about = {"model": loading.model_name(args.model), "prompt": prompt, "dtype": loading.dtype_name(llm.model)}
    about |= {name: getattr(config, name) for name in ("n_layers", "n_heads", "n_kv_heads", "head_dim")}
    facts = trace.facts(traced, llm.tokenizer, about)
    if args.patch_from is not None:
        facts["patching"] = patching_facts(llm, args.patch_from, ids, intervention)
    if args.html is not None:
        streams.write_file(args.html, trace_page.render(facts, trace.packed_maps(traced.weights)))
        streams.info(args, f"{args.html}: open it in a browser")
    if args.json is not None:
        everything = facts | {"attention": trace.attention_rows(traced.weights)}
        if args.json == STDOUT:
            streams.write_json(everything)
            return 0
        streams.write_file(args.json, json.dumps(everything, allow_nan=False) + "\n")
    streams.write(trace.summary(facts))
    return 0


def patching_facts(llm: Llama, text: str, ids: Sequence[int], intervention: Intervention) -> dict[str, Any]:
    """The patching grid from another text to the traced one, under the same intervention."""
    from ..study import patching
    from ..study.trace import spelled

    source = llm.tokenizer.encode_prompt(text)
    if len(source) != len(ids):
        pieces = " | ".join(spelled(llm.tokenizer, id) for id in source)
        raise UsageError(f"--patch-from must have {len(ids)} tokens as the prompt, got {len(source)}: {pieces:.400}")
    with intervention.on(llm.model):
        grid = patching.patching_grid(llm.model, source, ids)
    return patching.facts(grid, {id: spelled(llm.tokenizer, id) for id in {*source, *ids, *grid.answers}})
