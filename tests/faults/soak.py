"""Calls of random parameters, and what each gives, in words that can be compared with a fresh process'.

Started as a program, this makes the calls of whose numbers its arguments are, each on a model just loaded:
`python -m tests.faults.soak FILE SEED NUMBER ...` prints a JSON object a line.
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
    """What a call is broken off by, in the middle of a pass."""


def load(path: str | Path) -> tuple[Llama, Llama]:
    """The model with its two kinds of cache; the weights are shared by neither."""
    return tuple(loader.load(path, dtype="float32", device="cpu", kv_cache=kind) for kind in ("model", "int8"))


def describe(seed: int, number: int) -> dict[str, Any]:
    """Call `number` of the run of that seed: how it is made, of what texts and with what options."""
    draw = random.Random(seed * 1_000_003 + number)
    how = draw.choice(
        ["text"] * 4 + ["list"] * 3 + ["session"] * 2 + ["chat", "half", "too long", "wrong", "interrupted", "threads"]
    )
    texts = ["".join(draw.choices(WORDS, k=draw.randint(0, 12))) for _ in range(draw.randint(1, 5))]
    options: dict[str, Any] = {"max_new_tokens": draw.choice([0, 1, 2, 5, 9, 20]), "seed": draw.randrange(2**63)}
    options["temperature"] = draw.choice([0.0, 0.3, 1.0, 2.5])
    for name, values in {
        "top_k": (1, 5, 400), "top_p": (0.0, 0.5, 0.9), "min_p": (0.05, 0.5), "repetition_penalty": (0.8, 1.3),
        "logprobs": (True,), "stop": (["e"], ["lo", "\U0001f642"], ["never said"]),
    }.items():  # fmt: skip
        if draw.random() < 0.3:
            options[name] = draw.choice(values)
    if how in ("text", "session", "half", "interrupted") and draw.random() < 0.4:
        options["draft"] = draw.choice(["ngram", "model"])
    if how == "wrong":
        options |= draw.choice(WRONG)
    return {"how": how, "texts": texts, "options": options, "int8": draw.random() < 0.3, "at": draw.randint(1, 4)}


def perform(models: tuple[Llama, Llama], call: dict[str, Any]) -> list[Any]:
    """What a call gives: texts, ids and ends, or the error's words."""
    llm, options, texts = models[call["int8"]], dict(call["options"]), call["texts"]
    if options.get("draft") == "model":
        options["draft"] = llm
    try:
        match call["how"]:
            case "list":
                return [_told(c) for c in llm.generate(texts, batch_size=1 + call["at"], **options)]
            case "session":
                session, text = Session(), ""
                return [_told(llm.generate(text := text + part, session=session, **options)) for part in texts]
            case "chat":
                return [_told(llm.chat([{"role": "user", "content": texts[0]}], **options))]
            case "half":
                stream = llm.stream(texts[0], **options)
                return [piece.text for _, piece in zip(range(call["at"]), stream, strict=False)]
            case "too long":
                return [_told(c) for c in llm.generate([texts[0], texts[0] + "x" * 300], **options)]
            case "interrupted":
                return _interrupted(llm, texts[0], options, call["at"])
            case "threads":
                from concurrent.futures import ThreadPoolExecutor

                with ThreadPoolExecutor(max_workers=2) as pool:
                    return [_told(c) for c in pool.map(lambda text: llm.generate(text, **options), texts)]
            case _:
                return [_told(llm.generate(texts[0], **options))]
    except LlamaError as error:
        return [type(error).__name__, str(error)]


def _interrupted(llm: Llama, text: str, options: dict[str, Any], at: int) -> list[Any]:
    passes = [0]

    def fail(*_: object) -> None:
        passes[0] += 1
        if passes[0] == at:
            raise Interrupted

    layers: Any = llm.model.layers
    hook = layers[1].register_forward_pre_hook(fail)
    try:
        return [_told(llm.generate(text, **options))]
    except Interrupted:
        return ["interrupted", passes[0]]
    finally:
        hook.remove()


def _told(completion: Any) -> list[Any]:
    scores = completion.logprobs and [round(score, 3) for score in completion.logprobs]
    return [completion.text, completion.tokens, completion.finish_reason, scores, completion.stats.prompt_tokens]


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    path, seed, *numbers = sys.argv[1:]
    torch.set_num_threads(1)
    for number in numbers:
        sys.stdout.write(json.dumps(perform(load(path), describe(int(seed), int(number)))) + "\n")


if __name__ == "__main__":
    main()
