"""Calls with random parameters, and their results in a form that can be compared with those of a fresh process.

Run as a program, this makes the calls with the given numbers, each on a freshly loaded model:
`python -m tests.faults.soak FILE SEED NUMBER ...` prints one JSON value per line.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch

from llama import loader
from llama.errors import LlamaError
from llama.generation.session import Session
from llama.text import Llama

WORDS = ("hello", "the", "hell", "o", "\n", "\U0001f642", "\u00e9", "x", "1 2 3 4", "<|im_end|>", " ")
WRONG: tuple[dict[str, Any], ...] = (
    {"temperature": -1}, {"top_p": 2}, {"nonsense": 1}, {"stop": [""]}, {"max_new_tokens": -1}, {"draft": "none"},
)  # fmt: skip


class Interrupted(Exception):
    """Raised in the middle of a forward pass to abort a call."""


def load(path: str | Path) -> tuple[Llama, Llama]:
    """Load the model twice, once for each kind of cache."""
    return tuple(loader.load(path, dtype="float32", device="cpu", kv_cache=kind) for kind in ("model", "int8"))


def describe(seed: int, number: int) -> dict[str, Any]:
    """Return call `number` of a run: the kind of call, its texts and its options."""
    draw = random.Random(seed * 1_000_003 + number)
    how = draw.choice(
        ["text"] * 4
        + ["list"] * 3
        + ["session"] * 2
        + ["chat", "abandoned", "too long", "wrong", "interrupted", "threads"]
    )
    texts = ["".join(draw.choices(WORDS, k=draw.randint(0, 12))) for _ in range(draw.randint(1, 5))]
    options: dict[str, Any] = {"max_new_tokens": draw.choice([0, 1, 2, 5, 9, 20]), "seed": draw.randrange(2**63)}
    options["temperature"] = draw.choice([0.0, 0.3, 1.0, 2.5])
    for name, values in {
        "top_k": (1, 5, 400), "top_p": (0.0, 0.5, 0.9), "min_p": (0.05, 0.5), "repetition_penalty": (0.8, 1.3),
        "logprobs": (True,), "stop": (["e"], ["lo", "\U0001f642"], ["never generated"]),
    }.items():  # fmt: skip
        if draw.random() < 0.3:
            options[name] = draw.choice(values)
    if how in ("text", "session", "abandoned", "interrupted") and draw.random() < 0.4:
        options["draft"] = draw.choice(["ngram", "model"])
    if how == "wrong":
        options |= draw.choice(WRONG)
    return {"how": how, "texts": texts, "options": options, "int8": draw.random() < 0.3, "at": draw.randint(1, 4)}


def perform(models: tuple[Llama, Llama], call: dict[str, Any]) -> list[Any]:
    """Make a call. Returns its texts, ids and finish reasons, or the error's class and message."""
    llm, options, texts = models[call["int8"]], dict(call["options"]), call["texts"]
    if options.get("draft") == "model":
        options["draft"] = llm
    try:
        match call["how"]:
            case "list":
                return [_values(c) for c in llm.generate(texts, batch_size=1 + call["at"], **options)]
            case "session":
                session, text = Session(), ""
                return [_values(llm.generate(text := text + part, session=session, **options)) for part in texts]
            case "chat":
                return [_values(llm.chat([{"role": "user", "content": texts[0]}], **options))]
            case "abandoned":
                stream = llm.stream(texts[0], **options)
                return [piece.text for _, piece in zip(range(call["at"]), stream, strict=False)]
            case "too long":
                return [_values(c) for c in llm.generate([texts[0], texts[0] + "x" * 300], **options)]
            case "interrupted":
                return _interrupted(llm, texts[0], options, call["at"])
            case "threads":
                from concurrent.futures import ThreadPoolExecutor

                with ThreadPoolExecutor(max_workers=2) as pool:
                    return [_values(c) for c in pool.map(lambda text: llm.generate(text, **options), texts)]
            case _:
                return [_values(llm.generate(texts[0], **options))]
    except LlamaError as error:
        return [type(error).__name__, str(error)]


def _interrupted(llm: Llama, text: str, options: dict[str, Any], at: int) -> list[Any]:
    """Make a call that is aborted in its forward pass number `at`."""
    passes = [0]

    def fail(*_: object) -> None:
        passes[0] += 1
        if passes[0] == at:
            raise Interrupted

    layers: Any = llm.model.layers
    hook = layers[1].register_forward_pre_hook(fail)
    try:
        return [_values(llm.generate(text, **options))]
    except Interrupted:
        return ["interrupted", passes[0]]
    finally:
        hook.remove()


def _values(completion: Any) -> list[Any]:
    scores = completion.logprobs and [round(score, 3) for score in completion.logprobs]
    return [completion.text, completion.tokens, completion.finish_reason, scores, completion.stats.prompt_tokens]


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    path, seed, *numbers = sys.argv[1:]
    torch.set_num_threads(1)
    for number in numbers:
        sys.stdout.write(json.dumps(perform(load(path), describe(int(seed), int(number)))) + "\n")


if __name__ == "__main__":
    main()
