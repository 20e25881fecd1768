"""Show what a model computes on a plain text.

The results are the surprisal of every token, the prediction after each layer, every attention map and the angles of
RoPE; with an intervention, also the difference from the unchanged model. Layers and heads are numbered from 0.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..checks import dtype_name
from ..errors import UsageError
from .common import arguments, files, loading, terminal
from .common.parser import MANY, Group

if TYPE_CHECKING:
    from ..text import Llama

OPTIONS = [
    *arguments.PROMPT,
    ("--html FILE", Path, "write a page for a browser: one file, works offline"),
    arguments.LENS,
    ("--fit-lens FILE", Path, "fit a Jacobian lens to the text (parts of 128 tokens); if FILE exists, resume its fit"),
    ("--max-tokens N", int, "maximum number of tokens in the text", {"default": 256}),
    ("--json", bool, "write one JSON object with all numbers, no summary"),
    Group("interventions", "the RoPE options below are also interventions"),
    ("--ablate-head LAYER.HEAD", str, "set the output of a head to zero, for example 3.5; may be repeated", MANY),
    ("--layers FIRST:END", str, "run only these layers: 0:8 is layers 0 to 7"),
    ("--no-rope", bool, "do not rotate queries and keys"),
    ("--patch-from TEXT", str, "patch from TEXT: show what its residual stream changes here, by layer and token"),
    *arguments.model(dtype="float32"),
]


def run(args: argparse.Namespace) -> None:
    for option, path in (("--html", args.html), ("--fit-lens", args.fit_lens)):
        if path is not None:
            files.check_file(option, path)
    arguments.check_plain(args, "trace")
    from ..inside import intervene, jacobian, patching, trace, trace_page
    from ..loader import with_rope
    from ..rope_scaling import reach

    prompt, scaling = files.read_prompt(args), arguments.rope_scaling(args)
    # the RoPE options are interventions, so the model is loaded without them
    llm, read_weights = loading.prepare(args, rope_scaling=None, rope_theta=None)
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
    if args.fit_lens is not None:
        read_weights()
        return fit(args, llm, prompt)
    ids = llm.tokenizer.encode_prompt(prompt)
    if len(ids) > args.max_tokens:
        raise UsageError(f"the text has {len(ids)} tokens, more than --max-tokens {args.max_tokens}; raise it")
    source = ids if args.patch_from is None else llm.tokenizer.encode_prompt(args.patch_from)
    if len(source) != len(ids):
        pieces = " | ".join(llm.tokenizer.shown(id) for id in source)
        raise UsageError(f"--patch-from must have {len(ids)} tokens, like the prompt; got {len(source)}: {pieces:.400}")
    trace.check(llm.model, ids)
    read_weights()
    lens = loading.read_lens(args, llm.model)
    traced = trace.trace(llm.model, ids, intervention)
    about = {
        "model": loading.model_name(args.model),
        "prompt": prompt,
        "dtype": dtype_name(llm.model.norm.weight.dtype),
    }
    about |= {name: getattr(config, name) for name in ("n_layers", "n_heads", "n_kv_heads", "head_dim")}
    facts = trace.facts(traced, llm.tokenizer, about)
    if args.patch_from is not None:
        with intervention.on(llm.model):
            grid = patching.patching_grid(llm.model, source, ids)
        facts["patching"] = patching.facts(grid, llm.tokenizer)
    if args.html is not None:
        files.write_file(args.html, trace_page.render(facts, trace.packed_maps(traced.weights)))
        terminal.info(f"{args.html}: open it in a browser")
    text = trace.summary(facts)
    if lens is not None and not args.json:
        with intervention.on(llm.model):
            text += "\n" + jacobian.summary(lens, llm, ids)
    terminal.show(args, facts | {"attention": trace.attention_rows(traced.weights)} if args.json else facts, text)


def fit(args: argparse.Namespace, llm: Llama, text: str) -> None:
    """Fit the lens to the parts of a text; write the file after each part. If the file exists, resume its fit."""
    from ..inside import jacobian

    first = llm.tokenizer.encode_prompt("")  # the tokens that begin every text, if any
    ids, size = llm.tokenizer.encode_prompt(text)[len(first) :], jacobian.LENGTH - len(first)
    parts = [first + ids[at : at + size] for at in range(0, len(ids) - size + 1, size)]
    if not parts:
        raise UsageError(f"the text has {len(ids)} tokens; --fit-lens needs {jacobian.LENGTH} or more")
    metadata = {"model": loading.model_name(args.model), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    start = jacobian.JacobianLens.read(args.fit_lens, llm) if args.fit_lens.exists() else None
    if start is not None and start.metadata != metadata:
        raise UsageError(f"{args.fit_lens} was fitted to another text or model; choose another file")
    done = 0 if start is None else start.n_prompts
    with terminal.progress("row") as show:
        tick = partial(show, "fitting")
        for lens in jacobian.fit_jacobian_lens(llm, parts[done:], start=start, tick=tick):
            dataclasses.replace(lens, metadata=metadata).write(args.fit_lens)
            terminal.info(f"{args.fit_lens}: fitted to {lens.n_prompts} of {len(parts)} parts of the text")
