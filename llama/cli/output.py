"""The output of --prompts: JSON lines, and beside them a record of the model and the options that made them.

The record of answers.jsonl is answers.jsonl.run.json, one line of JSON. It holds the settings that a session file also
holds (with a hash of the weights), hashes of the vocabulary and the chat template, the ids that begin and end a text,
the sampling options, and the own options of lines, by id. It does not hold what changes only the rounding of sums:
threads, batch size, --compile, the form of RoPE (except "half", which reorders the weights).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from . import arguments, streams

if TYPE_CHECKING:
    from ..text import Llama

Id = str | int
Record = dict[str, Any]

MARK, FORMAT = "clearllama_run", "2"


def record_of(llm: Llama, options: Mapping[str, Any], own: Mapping[Id, Any], **chat: Any) -> Record:
    """The record of a run.

    options  the options of the command, for Llama.generate
    own      {id: the own options of its line}
    chat     other settings that change each prompt
    """
    from ..generation import session
    from ..sampling import SamplingParams
    from ..text import GRAMMARS

    others = ("stop", "logprobs", *GRAMMARS)
    sampling = SamplingParams(**{**llm.sampling, **{key: options[key] for key in options if key not in others}})
    settings = {
        **session.settings_of(llm.model),
        "context": llm.model.max_seq_len,
        "tokenizer": llm.tokenizer.digest(),
        "stop_ids": sorted(llm.tokenizer.stop_ids),
        "bos_id": llm.tokenizer.bos_id,
        "eos_id": llm.tokenizer.eos_id,
        "add_bos": llm.tokenizer.add_bos,
        "chat_template": llm.chat_template and hashlib.sha256(str(llm.chat_template).encode()).hexdigest(),
        "chat_format": llm.chat_format,
        **chat,
        **dataclasses.asdict(sampling),
        **{key: options[key] for key in options if key in others},
    }
    lines = {json.dumps(id): own[id] for id in own if own[id]}
    record: Record = json.loads(json.dumps({MARK: FORMAT, "settings": settings, "lines": lines}))
    return record


class Output:
    """Answers in a file, which is locked while it is open, or on stdout (name None).

    A file with other content is never changed, nor one without its record: both raise UsageError.
    """

    def __init__(self, name: str | None):
        self.name, self.record = name, Path(f"{name}.run.json")
        self.kept: Record = {}
        if name is None:
            return
        if os.path.exists(name) and not os.path.isfile(name):
            raise UsageError(f"--output {name} is not a regular file; leave --output out to write to standard output")
        try:
            self.file = open(name, "a+b", buffering=0)  # noqa: SIM115  (`close` closes it)
        except OSError as error:
            raise UsageError(f"--output {name!r}: {error.strerror}; choose a writable file") from None
        try:
            import fcntl

            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # Windows has no such lock
            pass
        except OSError:
            raise UsageError(f"{name} is being written by another clearllama; choose another --output") from None
        if self.record.exists():
            self.kept = arguments.parse_json(streams.read_text(self.record).encode(), str(self.record))
            if self.kept.get(MARK) != FORMAT:
                raise UsageError(f"{self.record} is not the record of a run, so it is not replaced: move it away")
        elif os.path.getsize(name) > 0:
            raise UsageError(f"{self.record}, which says how {name} was made, is missing; choose another --output")

    def resume(self, record: Record, prompts: Mapping[Id, Mapping[str, Any]], fresh: bool) -> dict[Id, bool]:
        """Prepare the file for the answers of a run. Returns {id of an answered prompt: whether it failed}.

        An incomplete last line is removed; with `fresh`, all answers are. Raises UsageError if the answers were made
        with another model, other options or other prompts ({id: prompt}).
        """
        done: dict[Id, bool] = {}
        size = 0
        with open(str(self.name), "rb") as file:
            for line in file if not fresh else ():
                if line.endswith(b"\n"):
                    answer = arguments.parse_json(line, str(self.name))
                    id = answer.get("id", "")
                    done[id] = "error" in answer
                    size += len(line)
                    for key, value in prompts.get(id, {}).items():
                        if answer.get(key) != value:
                            raise self._other(f"the {key} {answer.get(key)!r:.80}", f"{value!r:.80}")
        if done:
            self._compare(record, done)
            record["lines"] = {**self.kept["lines"], **record["lines"]}
        self.file.truncate(size)
        streams.write_file(self.record, json.dumps(record, ensure_ascii=False) + "\n")
        return done

    def _compare(self, record: Record, done: Mapping[Id, bool]) -> None:
        """Raise UsageError if the settings of a run, or the own options of answered lines, are other than before."""
        theirs, ours = self.kept["settings"], record["settings"]
        pairs = [(key, theirs.get(key), ours.get(key)) for key in sorted(theirs.keys() | ours.keys())]
        ids = map(json.dumps, done)
        pairs += [(f"own options of {id}", self.kept["lines"].get(id), record["lines"].get(id)) for id in ids]
        if other := [pair for pair in pairs if pair[1] != pair[2]][:3]:
            made = ", ".join(f"{key} {_shown(theirs)}" for key, theirs, _ in other)
            raise self._other(made, ", ".join(_shown(ours) for *_, ours in other))

    def _other(self, made: str, found: str) -> UsageError:
        help = "repeat the run as it was, choose another --output, or start anew with --fresh"
        return UsageError(f"{self.name} was made with {made}; this run has {found}: {help}")

    def write(self, answer: Mapping[str, Any]) -> None:
        """Append a line."""
        if self.name is None:
            streams.write_json(answer)
            return
        rest = memoryview((json.dumps(answer, ensure_ascii=False, allow_nan=False) + "\n").encode())
        try:
            while rest:
                rest = rest[self.file.write(rest) :]
        except OSError as error:
            error.filename = self.name
            raise

    def close(self) -> None:
        if self.name is not None:
            self.file.close()


def _shown(value: Any) -> str:
    """A value as JSON, shortened. A hash is shortened to 12 characters."""
    text = "none" if value is None else json.dumps(value)
    return text.strip('"')[:12] if len(text) == 66 else f"{text:.80}"
