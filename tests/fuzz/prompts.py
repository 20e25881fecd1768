"""The JSON lines of `generate --prompts`, up to token ids, and the --output file of an interrupted run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from llama.cli import batch
from llama.errors import LlamaError
from llama.tokenizer.gguf import from_metadata

from .. import tiny
from . import law

LINES = (
    {"prompt": "a b c"},
    {"prompt": "x", "id": "one", "system": "Be short.", "max_new_tokens": 3, "temperature": 0.5, "seed": 7, "top_k": 4},
    {"messages": [{"role": "user", "content": "Hi"}], "stop": ["\n", "end"], "top_p": 0.9, "min_p": 0.1, "id": 3},
)


class Harness(law.Harness):
    """The first byte names the rest: p lines of prompts, o an output file for fixed prompts."""

    allowed = ("subprocess.Popen",)  # the process that renders chat templates
    words = tuple(b'"%s"' % key.encode() for key in (*batch.KEYS, "text", "error", "role", "content", "tool_calls"))

    def __init__(self, folder: Path):
        super().__init__(folder)
        tokenizer = from_metadata(tiny.byte_vocabulary(), "tiny")
        # the attributes that encode_item uses
        self.llm: Any = SimpleNamespace(tokenizer=tokenizer, chat_template=tiny.CHATML, chat_format=None)
        self.lines = [json.dumps(line).encode() for line in LINES]

    def seeds(self) -> Iterable[bytes]:
        yield b"p" + b"\n".join(self.lines) + b"\n"
        for line in self.lines:
            yield b"p" + line
        answers = [{"id": i + 1, **{k: line[k] for k in ("id", "prompt", "messages") if k in line}, "text": "é\n"}
                   for i, line in enumerate(LINES)]  # fmt: skip
        complete = b"".join(map(batch.encode, answers))
        yield b"o" + complete
        yield b"o" + complete[:-9]

    def calls(self, data: bytes) -> Iterator[law.Call]:
        if data[:1] == b"o":
            path = self.put("answers.jsonl", data[1:])
            output = batch.Output(str(path))  # opens the file for writing, so it is created outside the call
            try:
                yield partial(resume, output, self.lines, path, data[1:])
            finally:
                output.close()
            return
        path = self.put("prompts.jsonl", data[1:])
        yield partial(self.read, str(path))

    def read(self, name: str) -> None:
        lines = batch.read_lines(name)
        batch.check_lines(argparse.Namespace(raw=False, system=None), lines, name)
        for number, line in enumerate(lines, 1):
            item = batch.parse(line, number, name)
            batch.encode({"id": item.id, **item.input, "text": ""})
            for raw in (False, True):
                if raw and "messages" in item.input:
                    continue
                try:
                    ids = batch.encode_item(self.llm, item, None, raw)
                except LlamaError as error:
                    batch.encode(batch.failed(item, error))
                    continue
                if not all(0 <= id < self.llm.tokenizer.n_vocab for id in ids):
                    raise law.Finding(f"an id is outside the vocabulary: {ids[:20]}")


def resume(output: batch.Output, lines: list[bytes], path: Path, before: bytes) -> None:
    """Resume. Raises Finding if more than an incomplete last line was removed, or a refused file was changed."""
    try:
        kept = output.answers(lines, "prompts.jsonl")
    except LlamaError:
        if path.read_bytes() != before:
            raise law.Finding("a refused output file was changed") from None
        raise
    output.truncate(kept.size)
    if path.read_bytes() != before[: before.rfind(b"\n") + 1]:
        raise law.Finding("more than the incomplete last line was removed")
