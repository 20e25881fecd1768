"""The Modelfile with which `ollama create` imports a GGUF file: FROM, TEMPLATE, PARAMETER.

Ollama uses Go templates; chat templates are Jinja programs. A template is translated if it only puts fixed texts around
each message. These texts are found by rendering a few conversations, and the translation must render longer ones to the
same text. Messages must not begin or end with white space, which Jinja can strip and Go can't.
Sources: ollama, docs/modelfile.md, parser/parser.go, template/template.go.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..chat import render
from ..checkpoint.write import Model
from ..errors import TemplateError, UsageError
from ..tokenizer import Tokenizer

LARGEST_CONTEXT = 8192  # Ollama reserves memory for the complete context when it loads a model

Messages = Sequence[Mapping[str, str]]


def modelfile(gguf: Path, model: Model) -> str:
    """The text of a Modelfile beside a GGUF file. Raises UsageError if the chat template has no exact translation."""
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise UsageError(f"--modelfile: Ollama needs a tokenizer, and {model.no_tokenizer}; leave --modelfile out")
    template = "{{ .Prompt }}" if model.chat_template is None else translated(model.chat_template, tokenizer)
    texts = {id: text for text, id in tokenizer.control.items()}
    stops = [texts.get(id) or tokenizer.decode([id]) for id in sorted(tokenizer.stop_ids)]
    quoted = [text for text in (gguf.name, *stops) if '"' in text]
    if odd := [*quoted, *(text for text in (template, gguf.name, *stops) if '"""' in text or not _is_plain(text))]:
        raise UsageError(
            f"--modelfile: a Modelfile can't hold the text {odd[0]!r:.60}; leave --modelfile out, or, if this is the"
            " name of the new file, choose another name"
        )
    lines = [f'FROM "./{gguf.name}"', f'TEMPLATE """{template}"""', *(f'PARAMETER stop "{stop}"' for stop in stops)]
    context = min(model.config.max_seq_len, LARGEST_CONTEXT)
    if context < model.config.max_seq_len:
        lines.append(f"# The model's context is {model.config.max_seq_len}; Ollama reserves memory for all of num_ctx.")
    return "\n".join([*lines, f"PARAMETER num_ctx {context}", ""])


def _is_plain(text: str) -> bool:
    """Whether Ollama's parser keeps every character: it drops the unprintable ones."""
    return all(character.isprintable() or character == "\n" for character in text)


def translated(template: str, tokenizer: Tokenizer) -> str:
    """A Jinja chat template as a Go template, without the begin-of-text token if llama.cpp adds it."""

    def rendered(messages: Messages, prompt: bool, now: datetime.datetime | None = None) -> str:
        text = render(template, messages, tokenizer, add_generation_prompt=prompt, now=now)
        if tokenizer.add_bos and not text.startswith(bos):
            raise _Refused("it does not begin with the token that llama.cpp puts before every text")
        return text.removeprefix(bos) if tokenizer.add_bos else text

    bos = next((text for text, id in tokenizer.control.items() if id == tokenizer.bos_id), "")
    try:
        turns = _turns(rendered)
        for messages in CONVERSATIONS:
            if turns.render(messages) != rendered(messages, True):
                raise _Refused("it does more than put fixed texts around each message")
        days = {rendered(CONVERSATIONS[0], True, datetime.datetime(2020, month, 3)) for month in (1, 2)}
        if len(days) > 1:
            raise _Refused("it writes the date")
        if "{{" in "".join(turns.texts):
            raise _Refused("it writes braces, which begin an action in Go")
    except (_Refused, TemplateError) as error:
        raise UsageError(
            f"--modelfile: the model's chat template has no exact translation for Ollama: {error}; leave --modelfile"
            f" out, and write a Modelfile by hand"
        ) from None
    return turns.go


class _Refused(Exception):
    """The reason why a template can't be translated."""


@dataclass(frozen=True)
class Turns:
    """The fixed texts around messages, each as (before, after).

    first     before a user message that begins the conversation
    prompt    the start of the answer
    """

    first: str
    system: tuple[str, str]
    user: tuple[str, str]
    assistant: tuple[str, str]
    prompt: str

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.first, *self.system, *self.user, *self.assistant, self.prompt)

    def render(self, messages: Messages) -> str:
        """The text that the template `go` renders."""
        text = ""
        for i, message in enumerate(messages):
            before, after = {"system": self.system, "user": self.user, "assistant": self.assistant}[message["role"]]
            if message["role"] == "user" and i == 0:
                before = self.first
            elif message["role"] == "user" and i == 1 and messages[0]["role"] == "system":
                before = ""  # the text after a system message includes it
            text += before + message["content"] + after
        return text + self.prompt

    @property
    def go(self) -> str:
        """The Go template. No action trims white space, so all other text is literal."""
        first, (before, after), (left, right) = self.first, self.system, self.user
        opening, start = (
            "",
            f"{{{{ if eq $i 0 }}}}{first}{{{{ else if not (and $.System (eq $i 1)) }}}}{left}{{{{ end }}}}",
        )
        head = "{{ range $i, $message := .Messages }}"
        if first.endswith(left) and after.endswith(left):  # each message has its own texts, wherever it stands
            head, start, after = "{{ range .Messages }}", left, after.removesuffix(left)
            if opening := first.removesuffix(left):
                opening = f"{{{{ if not .System }}}}{opening}{{{{ end }}}}"
        return (
            f'{opening}{head}{{{{ if eq .Role "system" }}}}{before}{{{{ .Content }}}}{after}'
            f'{{{{ else if eq .Role "user" }}}}{start}{{{{ .Content }}}}{right}'
            f'{{{{ else if eq .Role "assistant" }}}}{self.assistant[0]}{{{{ .Content }}}}{self.assistant[1]}'
            f"{{{{ end }}}}{{{{ end }}}}{self.prompt}"
        )


def _conversation(*texts: str, system: str | None = None) -> list[dict[str, str]]:
    """Messages of user and assistant in turn."""
    head = [] if system is None else [{"role": "system", "content": system}]
    return head + [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


TALK = (
    "Why?\n\nTell me: {{ x }} <b>",
    "Because.",
    "Über 10 % of 日本 'do'\n- \"so\"",
    "1. one\n2. two",
    "ok",
    "fine",
    "bye",
)
CONVERSATIONS = [
    _conversation(*TALK[:count], system=system)
    for count in (1, 3, 7)
    for system in (None, "You answer.\n\nBriefly: yes")
]


def _turns(rendered: Callable[[Messages, bool], str]) -> Turns:
    """The texts around messages, from four conversations. Raises _Refused if they do not fit together."""
    question, answer, other, rules = "QUESTION", "ANSWER", "OTHER", "RULES"
    opening, between, again, end = _cut(rendered(_conversation(question, answer, other), True), question, answer, other)
    before, after, ending = _cut(rendered(_conversation(question, system=rules), True), rules, question)
    _, right = _cut(rendered(_conversation(question), False), question)
    _, _, answered = _cut(rendered(_conversation(question, answer), False), question, answer)
    if not (end.startswith(right) and between.startswith(right) and again.startswith(answered) and ending == end):
        raise _Refused("the texts around a message depend on the messages after it")
    user = again.removeprefix(answered), right
    assistant = between.removeprefix(right), answered
    return Turns(opening, (before, after), user, assistant, end.removeprefix(right))


def _cut(text: str, *contents: str) -> list[str]:
    """The text before, between and after the contents of messages."""
    pieces = []
    for content in contents:
        if text.count(content) != 1:
            raise _Refused("it does not write the content of each message once")
        before, text = text.split(content)
        pieces.append(before)
    return [*pieces, text]
