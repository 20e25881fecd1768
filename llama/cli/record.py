"""The record beside the output of --prompts: what its answers were made with, so that a resumed run can't mix models.

The record of answers.jsonl is answers.jsonl.run.json. It holds the settings that a session file also holds (with a hash
of the weights), hashes of the first answer, the vocabulary and the chat template, the ids that begin and end a text,
the sampling options, and the options of single lines. It does not hold what changes only the rounding of sums: threads,
batch size, --compile, the form of RoPE (except "half", which reorders the weights).

The hash of the first answer shows whether the output was moved or replaced. It is written before that answer, so a run
that is killed in between can be resumed.

The user does not name the record's file. A symbolic link in its place is therefore refused, and a file that is not a
record is never replaced. An output that is a symbolic link is followed, since the user named it; its record lies beside
the link's target.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import LlamaError, UsageError
from . import arguments, streams

if TYPE_CHECKING:
    from ..text import Llama

MARK, FORMAT = "clearllama_run", "1"
LARGEST = 2**28  # bytes of a record; a record with the options of 100,000 lines has about 20 MB
HELP = "run with the same model and options, choose another --output, or start anew with --fresh"


def settings_of(llm: Llama, options: dict[str, Any], chat: dict[str, Any]) -> dict[str, Any]:
    """The settings that all answers of a run depend on, as JSON values.

    options  the options of the command, for Llama.generate
    chat     other settings that change each prompt: raw, system
    """
    from ..generation import session
    from ..sampling import SamplingParams
    from ..text import GRAMMARS

    own = {key: value for key, value in options.items() if key not in ("stop", "logprobs", *GRAMMARS)}
    sampling = dataclasses.asdict(SamplingParams(**{**llm.sampling, **own}))
    settings = {
        **session.settings_of(llm.model),
        "context": llm.model.max_seq_len,
        "tokenizer": llm.tokenizer.digest(),
        "stop_ids": sorted(llm.tokenizer.stop_ids),
        "bos_id": llm.tokenizer.bos_id,
        "eos_id": llm.tokenizer.eos_id,
        "add_bos": llm.tokenizer.add_bos,
        "chat_template": None if llm.chat_template is None else _hash(str(llm.chat_template).encode()),
        "chat_format": llm.chat_format,
        **chat,
        **sampling,
        "stop": options.get("stop", []),
        "logprobs": options.get("logprobs", False),
        **{name: options[name] for name in GRAMMARS if name in options},
    }
    plain: dict[str, Any] = json.loads(json.dumps(settings))
    return plain


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Record:
    """The record of an output.

    settings  those of the present run
    lines     {line number as text: the line's own options}
    """

    def __init__(self, output: str, settings: dict[str, Any], lines: dict[str, Any]):
        target = os.path.realpath(output) if os.path.islink(output) else output
        self.output, self.path = output, Path(f"{target}.run.json")
        self.content: dict[str, Any] = {MARK: FORMAT, "settings": settings, "lines": lines}
        self.kept: dict[str, Any] | None = None  # the content of the file, if `check` read it

    def check(self, done: int, first: bytes, fresh: bool) -> None:
        """Raise UsageError unless the first `done` answers were made with the settings of this run.

        first  the line of the first answer
        fresh  the answers will be deleted, so a record may be replaced whatever it holds, but no other file
        """
        self.kept = self._read(fresh)
        if fresh or not done:
            return
        if self.kept is None:
            raise UsageError(
                f"{self.output} has answers, but {self.path.name}, which records their model and options, is missing"
                " (older versions wrote none): choose another --output, or start anew with --fresh"
            )
        self.content["first"] = _hash(first)
        if self.kept.get("first") != self.content["first"]:
            raise UsageError(
                f"{self.path.name} does not belong to the answers in {self.output}, so one of the files was moved or"
                " replaced: restore the matching file, choose another --output, or start anew with --fresh"
            )
        theirs, ours = self.kept["settings"], self.content["settings"]
        if other := [key for key in sorted(theirs.keys() | ours.keys()) if theirs.get(key) != ours.get(key)]:
            made = ", ".join(f"{key} {_shown(theirs.get(key))}" for key in other[:3])
            found = ", ".join(_shown(ours.get(key)) for key in other[:3])
            more = f", and {len(other) - 3} more settings differ" if len(other) > 3 else ""
            raise UsageError(f"{self.output} was made with {made}; this run has {found}{more}: {HELP}")
        for number in map(str, range(1, done + 1)):
            made, found = self.kept["lines"].get(number), self.content["lines"].get(number)
            if made != found:
                raise UsageError(
                    f"{self.output} line {number} was made with the options {_shown(made)}; in this run, the line has"
                    f" {_shown(found)}: {HELP}"
                )

    def _read(self, fresh: bool) -> dict[str, Any] | None:
        """The content of the record; None if there is no file, or if --fresh replaces it.

        Raises UsageError if the file is not a record.
        """
        if self.path.is_symlink():
            raise UsageError(f"{self.path} is a symbolic link, which is not followed: remove it or move it away")
        if not self.path.exists():
            return None
        foreign = f"{self.path} is not the record of a run, so it is not replaced: move it away"
        if not self.path.is_file() or self.path.stat().st_size > LARGEST:
            raise UsageError(foreign)
        try:
            content = arguments.parse_json(streams.read_file(self.path, "the record of a run"), str(self.path))
        except UsageError as error:
            raise UsageError(f"{error}; it is not the record of a run, so it is not replaced: move it away") from None
        if MARK not in content:
            raise UsageError(foreign)
        if fresh:
            return None
        help = "move it away, or start anew with --fresh"
        if content[MARK] != FORMAT:
            made = _shown(content[MARK])
            raise UsageError(f"{self.path} has the format {made}, but this version reads {FORMAT!r}; {help}")
        if not all(isinstance(content.get(key), dict) for key in ("settings", "lines")):
            raise UsageError(f"{self.path} is damaged: it lacks the settings or the lines; {help}")
        return content

    def write(self, first: bytes | None = None) -> None:
        """Write the record atomically, unless the file already has this content.

        first  the line of the first answer, which will be written next
        """
        from ..system.temporary import write_atomically

        if first is not None:
            self.content["first"] = _hash(first)
        if self.content == self.kept:
            return
        try:
            content = (json.dumps(self.content, ensure_ascii=False) + "\n").encode()
            write_atomically(self.path, content)
            self.kept = dict(self.content)
        except OSError as error:
            raise LlamaError(f"{self.path}: {error.strerror or error}; no answer was written") from None


def _shown(value: Any) -> str:
    """A value as JSON, shortened. A hash is shortened to 12 characters."""
    if value is None:
        return "none"
    text = json.dumps(value)
    return text.strip('"')[:12] if len(text) == 66 else text if len(text) <= 80 else f"{text[:76]} ..."
