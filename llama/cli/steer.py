"""Make a control vector from two prompts.

For each layer, the vector is the residual stream after the layer at the last token of the positive prompt, minus that
of the negative prompt. The vector is written to a GGUF file. The option --steer of generate, chat and serve adds it to
the layers' outputs; llama.cpp's --control-vector does the same.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..errors import UsageError
from .common import arguments, files, loading, terminal
from .common.parser import MANY, REQUIRED

PAIRS = {**MANY, **REQUIRED}
OPTIONS = [
    (
        "--positive TEXT",
        str,
        "the prompt to move towards; may be repeated together with --negative, then the vectors are averaged",
        PAIRS,
    ),
    ("--negative TEXT", str, "the prompt to move away from", PAIRS),
    ("-o --output FILE", Path, "the file to write (.gguf)", REQUIRED),
    ("--raw", bool, "use the prompts without a chat template"),
    *arguments.model(),
    *arguments.CHAT,
]


def run(args: argparse.Namespace) -> None:
    if len(args.positive) != len(args.negative):
        raise UsageError(f"got {len(args.positive)} --positive, but {len(args.negative)} --negative")
    if sorted(args.positive) == sorted(args.negative):
        raise UsageError("--positive and --negative are the same, so every direction would be 0; change one of them")
    files.check_file("--output", args.output)
    from ..generate import room_for
    from ..inside import steering
    from ..sampling import SamplingParams

    llm, read_weights = loading.prepare(args)
    raw = loading.pick_form(args, llm)

    def encoded(prompt: str) -> list[int]:
        ids = llm.tokenizer.encode_prompt(prompt) if raw else llm.encode_chat([{"role": "user", "content": prompt}])
        room_for(llm.model, ids, SamplingParams(), None)
        return ids

    pairs = [(encoded(one), encoded(other)) for one, other in zip(args.positive, args.negative, strict=True)]
    read_weights()
    vector = steering.control_vector(llm.model, pairs)
    vector.write(args.output)
    terminal.info("differences add up over the layers: start with a --steer-scale of 0.05 to 0.2")
    count, dim, last = len(vector.directions), llm.model.config.dim, max(vector.directions)
    terminal.write(f"{args.output}: {count} directions of {dim} numbers, for layers 1 to {last}\n")
