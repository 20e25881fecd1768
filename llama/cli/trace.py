"""Run the model on plain text and show what it computes.

The results are the surprisal of every token, the prediction after each layer, every attention map and the angles of
RoPE; with an intervention, also the difference from the unchanged model. Layers and heads are numbered from 0.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from .common import arguments, files, loading, terminal

if TYPE_CHECKING:
    from ..study.intervene import Intervention
    from ..text import Llama


def add_options(parser: argparse.ArgumentParser) -> None:
    arguments.add_prompt_options(parser, "text")
    arguments.add(
        parser,
        ("--html", "FILE", "write a page for a browser: one file, works offline", {"type": Path}),
        ("--max-tokens", "N", "longest text (default: %(default)s)", {"default": 256}),
    )
    arguments.add_output_options(parser, json="all numbers as one JSON object, in place of the summary")
    patching = (
        "copy the residual stream of TEXT into this run, one layer and token at a time, and show the effect of each"
    )
    head = "set the output of a head to zero, for example 3.5; may be repeated"
    arguments.add(
        parser.add_argument_group("interventions", "the options of RoPE below are interventions, too"),
        ("--ablate-head", "LAYER.HEAD", head, {**arguments.MANY, "default": []}),
        ("--layers", "FIRST:END", "run only these layers: 0:8 is layers 0 to 7"),
        ("--no-rope", None, "do not rotate queries and keys"),
        ("--patch-from", "TEXT", patching),
    )
    arguments.add_model_options(parser, dtype="float32")


def run(args: argparse.Namespace) -> int:
    if args.html is not None:
        files.check_file("--html", args.html)
    arguments.check_plain(args, "trace")
    from ..loader import with_rope
    from ..rope_scaling import reach
    from ..study import intervene, trace, trace_page

    prompt, scaling = files.read_prompt(args), arguments.rope_scaling(args)
    # the RoPE options are interventions, so the model is loaded without them
    unchanged = dict.fromkeys(("rope_scaling", "rope_factor", "rope_theta"))
    llm, read_weights = loading.prepare(argparse.Namespace(**{**vars(args), **unchanged}))
    config = llm.model.config
    stretched = reach(with_rope(config, scaling, args.rope_theta))
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
    source = ids if args.patch_from is None else llm.tokenizer.encode_prompt(args.patch_from)
    if len(source) != len(ids):
        pieces = " | ".join(trace.spelled(llm.tokenizer, id) for id in source)
        raise UsageError(f"--patch-from must have {len(ids)} tokens as the prompt, got {len(source)}: {pieces:.400}")
    trace.check(llm.model, ids)
    read_weights()
    traced = trace.trace(llm.model, ids, intervention)
    about = {"model": loading.model_name(args.model), "prompt": prompt, "dtype": loading.dtype_name(llm.model)}
    about |= {name: getattr(config, name) for name in ("n_layers", "n_heads", "n_kv_heads", "head_dim")}
    facts = trace.facts(traced, llm.tokenizer, about)
    if args.patch_from is not None:
        facts["patching"] = patching_facts(llm, source, ids, intervention)
    if args.html is not None:
        files.write_file(args.html, trace_page.render(facts, trace.packed_maps(traced.weights)))
        terminal.info(args, f"{args.html}: open it in a browser")
    text = trace.summary(facts)
    terminal.show(args, facts | {"attention": trace.attention_rows(traced.weights)} if args.json else facts, text)
    return 0


def patching_facts(llm: Llama, source: list[int], ids: Sequence[int], intervention: Intervention) -> dict[str, Any]:
    """The patching grid from another text to the traced one, under the same intervention."""
    from ..study import patching
    from ..study.trace import spelled

    with intervention.on(llm.model):
        grid = patching.patching_grid(llm.model, source, ids)
    return patching.facts(grid, {id: spelled(llm.tokenizer, id) for id in {*source, *ids, *grid.answers}})
