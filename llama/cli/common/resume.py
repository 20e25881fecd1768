"""The output of --prompts: a file of JSON lines, and a second file, the record of the model and options of the run.

The record of answers.jsonl is answers.jsonl.run.json, one line of JSON. It holds the settings that a session file also
holds (with a hash of the weights), hashes of the vocabulary and the chat template, the ids that begin and end a text,
the sampling options, and for each id the options that its line sets. Options that change only the rounding of sums are
left out: threads, batch size, --compile, the form of RoPE (except "half", which reorders the weights).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import UsageError
from ...generation import session
from ...sampling import SamplingParams
from ...system.documents import parse_json
from ...system.temporary import lock
from ...text import Llama
from . import files

Id = str | int
Record = dict[str, Any]

MARK, FORMAT = "clearllama_run", "2"


def record_of(llm: Llama, options: Mapping[str, Any], own: Mapping[Id, Any], **chat: Any) -> Record:
    """The record of a run.

    options  the options of the command, for Llama.generate
    own      {id: the options that its line sets}
    chat     other settings on which every prompt depends
    """
    tokenizer, template = llm.tokenizer, llm.chat_template
    settings = {
        **session.settings_of(llm.model),
        "context": llm.model.max_seq_len,
        "tokenizer": tokenizer.digest(),
        "stop_ids": sorted(tokenizer.stop_ids),
        **{name: getattr(tokenizer, name) for name in ("bos_id", "eos_id", "add_bos")},
        "chat_template": template and hashlib.sha256(str(template).encode()).hexdigest(),
        "chat_format": llm.chat_format,
        "template_options": llm.template_options,
        **chat,
        **dataclasses.asdict(SamplingParams()),
        **llm.sampling,
        **options,
    }
    lines = {json.dumps(id): options for id, options in own.items() if options}
    return json.loads(json.dumps({MARK: FORMAT, "settings": settings, "lines": lines}))


class Output:
    """A file of answers, locked while it is open.

    A file with other content, or without its record, raises UsageError and is not changed.
    """

    def __init__(self, name: str):
        self.name, self.record = name, Path(f"{name}.run.json")
        files.check_file("--output", Path(name))
        if os.path.exists(name) and not os.path.isfile(name):
            raise UsageError(f"--output {name} is not a regular file; leave --output out to write to standard output")
        self.file = open(name, "a+b", buffering=0)  # noqa: SIM115  (open as long as this object)
        try:
            with contextlib.suppress(ImportError):  # Windows has no such lock
                lock(self.file)
        except OSError:
            raise UsageError(f"{name} is being written by another clearllama; choose another --output") from None
        self.kept: Record = {}
        if self.record.exists():
            self.kept = parse_json(files.read_text(self.record).encode(), str(self.record), UsageError)
            if self.kept.get(MARK) != FORMAT:
                raise UsageError(f"{self.record} is not the record of a run, so it is not replaced: move it away")
        elif os.path.getsize(name) > 0:
            raise UsageError(f"{self.record}, which says how {name} was made, is missing; choose another --output")

    def resume(self, record: Record, prompts: Mapping[Id, Mapping[str, Any]]) -> dict[Id, bool]:
        """Prepare the file for the answers of a run. Returns {id of an answered prompt: whether it failed}.

        An incomplete last line is removed. Raises UsageError if the answers were made with another model, other options
        or other prompts ({id: prompt}).
        """
        done: dict[Id, bool] = {}
        made: list[tuple[str, Any, Any]] = []  # (what, then, now)
        size = 0
        with open(self.name, "rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    answer = parse_json(line, self.name, UsageError)
                    id = answer.get("id", "")
                    done[id] = "error" in answer
                    size += len(line)
                    made += [(f"the {key}", answer.get(key), value) for key, value in prompts.get(id, {}).items()]
        if done:
            then, now = self.kept["settings"], record["settings"]
            made += [(key, then.get(key), now.get(key)) for key in sorted(then.keys() | now.keys())]
            then, now = self.kept["lines"], record["lines"]
            made += [(f"options of the line with id {id}:", then.get(id), now.get(id)) for id in map(json.dumps, done)]
            record["lines"] = {**then, **now}
        for what, then, now in made:
            if then != now:
                help = "repeat the run as it was, choose another --output, or delete it to start over"
                raise UsageError(f"{self.name} was made with {what} {_shown(then)}; this run has {_shown(now)}: {help}")
        self.file.truncate(size)
        files.write_file(self.record, json.dumps(record, ensure_ascii=False) + "\n")
        return done

    def write(self, answer: Mapping[str, Any]) -> None:
        """Append an answer as one line."""
        rest = (json.dumps(answer, ensure_ascii=False, allow_nan=False) + "\n").encode()
        try:
            while rest:
                rest = rest[self.file.write(rest) :]
        except OSError as error:
            error.filename = self.name
            raise


def _shown(value: Any) -> str:
    """A value as JSON, cut at 80 characters; a hash is cut at 12."""
    text = "none" if value is None else json.dumps(value)
    return text.strip('"')[:12] if len(text) == 66 else f"{text:.80}"
