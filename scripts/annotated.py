"""docs/learn/one-file.md: scripts/one_file.py beside the reason for each line and what it computes for one prompt.

Its code must be that of the file, line by line. In each step, the part between the comments "output" and "end of
output" is written here: what a line assigns or returns when it runs for the first time.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import gguf
import one_file
import torch
from torch import Tensor

from llama.hub import models

FILE = Path(one_file.__file__)
PROMPT = "The capital of France is"
STEP = re.compile(r'(<div class="beside" markdown>\n\n```python\n(.*?)```\n.*?\n)</div>\n', re.DOTALL)


def annotated(page: str, values: dict[int, list[str]]) -> str:
    """The page with these results, by line. Raises ValueError if its code is not that of the file."""
    rest = [(number, line) for number, line in enumerate(FILE.read_text().splitlines(), 1) if line.strip()]

    def step(match: re.Match[str]) -> str:
        found = []
        for line in filter(str.strip, match[2].splitlines()):
            number, expected = rest.pop(0) if rest else (0, "its end")
            if line != expected:
                raise ValueError(f"line {number} of one_file.py is {expected!r}, but in the page {line!r}")
            found += values.get(number, [])
        results = "\n".join(["<!-- output -->", "```text", *found, "```", "<!-- end of output -->\n\n"])
        return f"{match[1]}{results if found else ''}</div>\n"

    made = STEP.sub(step, page)
    if rest:
        raise ValueError(f"the page lacks line {rest[0][0]} of one_file.py, {rest[0][1]!r}")
    return made


def recorded() -> dict[int, list[str]]:
    """Map the number of each line to what it computes for PROMPT: with the likeliest token, then with a drawn one."""
    source, values = FILE.read_text(), dict[int, list[str]]()
    names = dict[int, list[str]]()  # line -> the names that it assigns
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id != "_":
            names.setdefault(node.lineno, []).append(node.id)

    def trace(frame: FrameType, event: str, value: Any) -> Any:
        if frame.f_code.co_filename != str(FILE):
            return None
        last = frame.f_lineno  # this line has run when the next event comes

        def step(frame: FrameType, event: str, value: Any) -> Any:
            nonlocal last
            found = [(name, frame.f_locals[name]) for name in names.get(last, ())]
            found += [("→", value)] if event == "return" else []
            if last not in values:
                comment = source.splitlines()[last - 1].partition("# ")[2]
                values[last] = [text for name, each in found for text in shown(name, each, comment)]
            last = frame.f_lineno
            return step

        return step

    file = gguf.GGUFReader(models.pull(models.DEFAULT))
    metadata = {name: field.contents() for name, field in file.fields.items()}
    model, tokenizer = one_file.read_model(file, metadata), one_file.read_tokenizer(metadata)
    torch.manual_seed(0)
    sys.settrace(trace)
    try:
        one_file.precompute_freqs_cis(model.head_dim, len(model.freqs_cis), metadata["llama.rope.freq_base"])
        for temperature in (0.0, 1.0):
            list(one_file.generate(model, tokenizer.encode(PROMPT).ids, 2, temperature, 0.9))
    finally:
        sys.settrace(None)
    return values


def shown(name: str, value: Any, comment: str) -> list[str]:
    """Show a tensor by the letters of its shape in the comment, its shape and its last row; show a number as it is."""
    if not isinstance(value, Tensor) or not value.ndim:
        return [f"{name} = {value}"] if isinstance(value, int | list) else []
    letters = [axes for axes in re.findall(r"\(([^()]*)\)", comment) if len(axes.strip(",").split(",")) == value.ndim]
    row = value.reshape(-1, value.shape[-1])[-1].tolist()
    numbers = [str(x) if isinstance(x, int) else f"{x:.3f}" for x in row[: 7 if len(row) < 8 else 4]]
    axes = f"({letters[-1]}) = " if letters else ""
    return [f"{name} {axes}{tuple(value.shape)}", "  " + " ".join([*numbers, "…"][: len(row)])]
