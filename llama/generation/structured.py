"""Structured output: a JSON schema, a regular expression or a grammar limits which tokens may come next.

    grammar = compile_grammar(tokenizer, "schema", {"type": "object", ...})          once
    constraint = grammar.constraint()                                                for each answer
    logits = logits.masked_fill(~constraint.allowed(), -inf)                         for each token
    constraint.advance(id)

The masks are exact: a token is allowed if and only if the answer, followed by the token's bytes, is the beginning of a
text that the grammar accepts. It does not matter how the tokenizer would split that text. So greedy decoding is the
argmax under the mask, and sampling draws from the model's distribution, renormalized. llguidance computes the masks
(github.com/guidance-ai/llguidance).

With a draft (speculative.py), no state is rolled back: the mask is applied when a drafted token is verified, to the
model's distribution, and `advance` is called only for tokens of the answer. The draft's own distribution is not masked.
"""

from __future__ import annotations

import codecs
import functools
import importlib.util
import itertools
import json
import logging
import re
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from .. import checks
from ..chat.thoughts import Thoughts, ThoughtStream
from ..chat.tool_calls import ToolCallStream, call_marks
from ..errors import UsageError
from ..system.child import Child, ChildError
from ..tokenizer import Tokenizer, token_ids
from ..tokenizer.base import LONGEST_PARTIAL

if TYPE_CHECKING:
    from llguidance import LLMatcher

log = logging.getLogger(__name__)
warn_once = functools.cache(log.warning)
LONGEST = 2**20  # characters of a schema, regular expression or grammar
KEPT = 64  # number of compiled grammars that are cached for a tokenizer
LONGEST_TOKEN = 1024  # bytes; llguidance fails if a token is longer

CHILD = Child(Path(__file__).with_name("grammar.py"), ("llguidance",), seconds=2.0, space=768 * 2**20)

# JSON allows any amount of white space between its tokens, and a small model may repeat it endlessly. So a run of white
# space is limited to 64 characters: enough for 15 levels, indented by 4.
WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,64}"
# Without \uXXXX a string has one spelling, so that no key evades the rules for its name.
ESCAPES = 'nrbtf\\"'
# Characters in JSON text that these escapes can't spell. llguidance drops them from constants and patterns silently.
UNSPELLED = re.compile(r"(?<!\\)(?:\\\\)*\\u00(?:0[0-7bef]|1.|7f)")

# Without this, llguidance allows only one tokenization where the grammar leaves only one text
EXACT = '%llguidance {"no_forcing": true}'

# Options of a rule in llguidance's Lark syntax that are refused: `temperature` would have no effect here, and `stop`
# would have to remove tokens from the answer. Each has a replacement.
NOT_SUPPORTED = {
    "temperature": "set the temperature of the answer instead",
    "stop": "use suffix=... or lazy instead",
}

DEAD_END = "NoExtension"  # how llguidance's message begins if the grammar allows no token


# ------------------------------------------------------------------------------------------------ kinds of grammars
def _json_schema(source: Any) -> list[dict[str, Any]]:
    """The answer is a JSON value that matches a schema, given as a mapping, JSON text or a model of pydantic."""
    try:
        if isinstance(source, type) and hasattr(source, "model_json_schema"):
            source = source.model_json_schema()
        schema = json.loads(source) if isinstance(source, str) else json.loads(json.dumps(source, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"the JSON schema is not valid JSON: {error}") from None
    checks.instance("a JSON schema", schema, dict | bool, "an object, true or false")
    if schema is False:
        raise UsageError("no answer meets the JSON schema false; the schema {} allows every value")
    answer = _spelled({} if schema is True else schema, whitespace_pattern=WHITE_SPACE)
    return [{"lark_grammar": f"{EXACT}\nstart: @answer"}, {"name": "answer", "json_schema": answer}]


def _spelled(schema: Mapping[str, Any], **form: object) -> dict[str, Any]:
    """A schema with llguidance's options for the form of its values."""
    if UNSPELLED.search(json.dumps(schema)):
        raise UsageError("a JSON schema can't contain control characters other than \\b \\t \\n \\f \\r; remove them")
    return {**schema, "x-guidance": {**form, "json_allowed_escapes": ESCAPES}}


def _regex(source: Any) -> list[dict[str, Any]]:
    """The complete answer matches a regular expression (docs.rs/regex: no look-around, no back-references)."""
    from llguidance import LLMatcher

    lark = json.loads(LLMatcher.grammar_from_regex(_text("regular expression", source)))["grammars"][0]["lark_grammar"]
    return [{"lark_grammar": f"{lark}\n{EXACT}"}]


def _lark(source: Any) -> list[dict[str, Any]]:
    """The answer matches a grammar in llguidance's Lark syntax, or in llama.cpp's GBNF."""
    text = _text("grammar", source)
    if "::=" in text:
        from llguidance.gbnf_to_lark import gbnf_to_lark

        try:
            text = gbnf_to_lark(text)
        except Exception as error:  # gbnf_to_lark raises several types of errors, without a common base
            raise UsageError(f"the grammar is not valid GBNF: {error}") from None
    for options in re.findall(r"^[ \t]*[?!]?[\w-]+(?:::_)?[ \t]*\[([^\]\n]*)\]", text, re.MULTILINE):
        for name, remedy in NOT_SUPPORTED.items():
            if re.search(rf"\b{name}[ \t]*=", options):
                raise UsageError(f"the grammar sets {name}= for a rule, which is not supported; {remedy}")
    return [{"lark_grammar": f"{text}\n{EXACT}"}]


def forced_call(choice: object, tools: Sequence[Mapping[str, Any]]) -> str | None:
    """A Lark grammar for a call of any tool, or of the tool that `choice` names; None for "auto" and "none".

    White space between the parts of a call is fixed. Otherwise a model may write it without end.
    """
    if choice in ("auto", "none"):
        return None
    calls = []
    for function in (tool.get("function", tool) for tool in tools):
        name = function["name"]
        if choice in ("required", name, {"type": "function", "function": {"name": name}}):
            schema = {"type": "object", **function.get("parameters", {})}
            schema = _spelled(schema, whitespace_flexible=False, item_separator=", ", key_separator=": ")
            begin = json.dumps(f'{{"name": {json.dumps(name, ensure_ascii=False)}, "parameters": ')
            calls.append(f'{begin} %json {json.dumps(schema)} "}}"')
    if not calls:
        raise UsageError(
            'tool_choice must be "none", "auto", "required" or {type: function, function: {name}} with the name of one'
            f" of the tools, got {checks.shown(choice)}"
        )
    return f"start: {' | '.join(calls)}"


def _arguments(function: Mapping[str, Any]) -> str:
    """A Lark grammar for a call after the name, up to any text: ": ARGUMENTS", or ", "arguments": ARGUMENTS"."""
    schema = _spelled({"type": "object", **(function.get("parameters") or {})}, whitespace_pattern=WHITE_SPACE)
    return f"""start: (":" WS arguments | "," WS KEY WS ":" WS arguments WS "}}") REST?
        WS: /[\\x20\\n\\r\\t]{{0,64}}/
        KEY: "\\"arguments\\"" | "\\"parameters\\""
        REST: ~""
        arguments: %json {json.dumps(schema)}"""


def _text(what: str, source: Any) -> str:
    checks.instance(f"a {what}", source, str, "a string")
    try:
        source.encode()
    except UnicodeEncodeError:
        raise UsageError(f"the {what} is not valid Unicode: it has a lone surrogate") from None
    return source


# Option of an answer -> its name in messages, and the function that converts it to llguidance's grammars
KINDS: dict[str, tuple[str, Callable[[Any], list[dict[str, Any]]]]] = {
    "schema": ("JSON schema", _json_schema),
    "regex": ("regular expression", _regex),
    "grammar": ("grammar", _lark),
}


# -------------------------------------------------------------------------------------------------------- vocabulary
class Vocabulary:
    """A tokenizer's tokens in llguidance's form, and the grammars compiled for it.

    If the tokenizer strips a leading space, each token that begins with a space gets a copy without the space,
    under an id of n_vocab or more. The copy is the text that the token has at the start of an answer.
    """

    def __init__(self, tokenizer: Tokenizer):
        from llguidance import LLTokenizer

        from . import grammar

        if not tokenizer.stop_ids:
            raise UsageError(
                "structured output needs an end-of-text token, but this vocabulary has none; leave out the"
                " schema, regex or grammar"
            )
        self.n_vocab, self.stop_ids = tokenizer.n_vocab, tokenizer.stop_ids
        self.strips = tokenizer.strips_leading_space
        self.text = [tokenizer.token_bytes(id) for id in range(self.n_vocab)]
        if (longest := max(map(len, self.text))) > LONGEST_TOKEN:
            raise UsageError(
                f"this vocabulary has a token of {longest:,} bytes, and llguidance takes at most {LONGEST_TOKEN:,}, so"
                " answers can't be constrained"
            )
        # No text in UTF-8 has the byte 0xFF, which marks control tokens in llguidance
        tokens = [b"" if text.startswith(b"\xff") else text for text in self.text]
        for name, id in tokenizer.control.items():
            tokens[id] = b"\xff" + name.encode()
        spaced = [id for id, token in enumerate(tokens) if self.strips and token.startswith(b" ")]
        self.tokens = tokens + [tokens[id][1:] for id in spaced]
        self.without_space = {id: self.n_vocab + i for i, id in enumerate(spaced)}
        self.spaced = torch.tensor(spaced, dtype=torch.long)  # (n_spaced,)
        self.only_space = torch.tensor([id for id in spaced if tokens[id] == b" "], dtype=torch.long)
        stops = sorted(self.stop_ids)
        self.library = LLTokenizer(cast(Any, grammar.Vocabulary(self.tokens, stops[0])), eos_token=stops)
        self.stops = torch.zeros(self.n_vocab, dtype=torch.bool)  # (n_vocab,)
        self.stops[stops] = True
        self.compile = functools.lru_cache(KEPT)(functools.partial(_compile, self))

    def matcher(self, grammar: str) -> LLMatcher:
        """A new matcher. Each answer needs its own: copies of a matcher share a cache of limited size."""
        from llguidance import LLMatcher, LLParserLimits

        from .grammar import LIMITS

        return LLMatcher(self.library, grammar, log_level=0, limits=LLParserLimits(**LIMITS))

    def mask(self, matcher: LLMatcher) -> Tensor:
        """Whether a matcher allows each token next: (n_vocab + len(spaced),) bool. UsageError if the matcher fails."""
        found = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():  # the mask would allow the stop ids
            raise UsageError(f"no token can continue the answer: {_reason(matcher.get_error())}; simplify the grammar")
        bits = np.unpackbits(found, bitorder="little")
        return torch.from_numpy(bits.view(np.bool_))[: self.library.vocab_size]


VOCABULARIES: weakref.WeakKeyDictionary[Tokenizer, Vocabulary] = weakref.WeakKeyDictionary()
LOCK = threading.Lock()


def _vocabulary(tokenizer: Tokenizer) -> Vocabulary:
    """The vocabulary of a tokenizer, built once."""
    with LOCK:
        if tokenizer not in VOCABULARIES:
            VOCABULARIES[tokenizer] = Vocabulary(tokenizer)
        return VOCABULARIES[tokenizer]


# ---------------------------------------------------------------------------------------------------------- grammars
def compile_grammar(tokenizer: Tokenizer, kind: str, source: str | bool | Mapping[str, Any]) -> Grammar:
    """Compile a grammar for the answers of a model with this tokenizer. Compiled grammars are cached.

    kind    one of KINDS: "schema", "regex" or "grammar"
    source  the text; a JSON schema may be a mapping

    A child process compiles the grammar first, so that a hostile one costs 2 s and 768 MiB at most. Raises UsageError
    if the source is not valid, is not supported, exceeds a limit, or allows no answer that the vocabulary can spell,
    and if llguidance is not installed.
    """
    what, convert = KINDS[checks.choice("kind of grammar", kind, KINDS)]
    if importlib.util.find_spec("llguidance") is None:
        raise UsageError(
            f"a {what} for the answer needs a package that is not installed: pip install 'clearllama[structured]'"
        )
    if len(text := json.dumps({"grammars": convert(source)}, ensure_ascii=False)) > LONGEST:
        raise UsageError(f"the {what} has more than {LONGEST:,} characters")
    return _vocabulary(tokenizer).compile(what, text)


def _compile(vocabulary: Vocabulary, what: str, grammar: str) -> Grammar:
    """Compile a grammar in llguidance's JSON form."""
    try:
        error = CHILD.ask({"grammar": grammar})
    except ChildError as stopped:
        raise UsageError(f"compiling the {what} failed: {stopped}; simplify it") from None
    if error:
        reason = _reason(error).removeprefix("at 1(8): " if what == KINDS["regex"][0] else "")  # in start: /REGEX/
        raise UsageError(f"the {what} can't be used: {reason}")
    vocabulary.mask(vocabulary.matcher(grammar))  # raises if no answer can begin
    return Grammar(vocabulary, grammar)


def after_thought(grammar: Grammar, tokenizer: Tokenizer, thoughts: Thoughts) -> Grammar:
    """Extend a grammar to answers with a thought: any text up to the closing mark, then the text that matches.

    The thought may be missing if the prompt has not opened it.
    """
    if thoughts.state == "closed":
        return grammar
    ids = [(tokenizer.control.get(mark), mark) for mark in thoughts[:2]]
    opening, closing = (json.dumps(mark) if id is None else f"<[{id}]>" for id, mark in ids)  # or as plain text
    end = re.escape(thoughts.closing).replace("/", r"\/")
    lark = rf"""{EXACT}
start: {"thought" if thoughts.state == "open" else "(SPACE? opening thought)?"} @constrained
opening: {json.dumps(thoughts.opening)} | {opening}
thought: (until_text | TEXT? {closing}) SPACE?
until_text[lazy]: /(?s:.*){end}/
TEXT: /(?s:.*)/
SPACE: /[ \t\r\n]{{1,64}}/"""
    first, *rest = json.loads(grammar.text)["grammars"]
    grammars = [{"lark_grammar": lark}, {"name": "constrained", **first}, *rest]
    return Grammar(grammar.vocabulary, json.dumps({"grammars": grammars}))


def _reason(message: str) -> str:
    """llguidance's message as one line, without its listing of the grammar, to which this file added a line."""
    if message.startswith(DEAD_END):
        return "it allows no text that the tokens of this model can spell"
    message = re.sub(r"(?m)^ *\d+ \|.*$|^ *\^+$|<non-verbose/>", "", message)
    return " ".join(message.split())[:300]


class Grammar:
    """A compiled grammar, made by `compile_grammar`. Threads may share it."""

    def __init__(self, vocabulary: Vocabulary, text: str):
        self.vocabulary, self.text = vocabulary, text

    def constraint(self, before: Sequence[int] = ()) -> Constraint:
        """The constraint of a new answer.

        before  ids whose text the answer continues, as for `tokenizer.Decoder`: the prompt, or nothing in a chat. If
                they have no text, the decoder strips the answer's first space, and the constraint does too.
        """
        vocabulary, utf8 = self.vocabulary, codecs.getincrementaldecoder("utf-8")("replace")
        texts = (vocabulary.text[id] for id in reversed(token_ids(before)) if 0 <= id < vocabulary.n_vocab)
        last = list(itertools.islice(filter(None, texts), LONGEST_PARTIAL))
        utf8.decode(b"".join(last[::-1]))
        if utf8.getstate()[0]:
            raise UsageError(
                "the prompt ends inside a character, so the answer can't match a grammar; end it after a character"
            )
        return Constraint(vocabulary, vocabulary.matcher(self.text), vocabulary.strips and not last)

    def after(self, text: str) -> Constraint | None:
        """The constraint of an answer that has begun with a text; None if no answer can begin with it."""
        ids, matcher = self.vocabulary.library.greedy_tokenize(text), self.vocabulary.matcher(self.text)
        return Constraint(self.vocabulary, matcher, False) if matcher.try_consume_tokens(ids) == len(ids) else None


class Constraint:
    """The tokens that may come next in one answer. Not thread-safe.

    n_vocab  number of ids
    """

    def __init__(self, vocabulary: Vocabulary, matcher: LLMatcher, at_start: bool):
        self.n_vocab = vocabulary.n_vocab
        self._vocabulary, self._matcher, self._at_start = vocabulary, matcher, at_start
        self._allowed: Tensor | None = None
        self._ended = False

    @property
    def complete(self) -> bool:
        """Whether the grammar accepts the answer so far."""
        return self._ended or self._matcher.is_accepting()

    def allowed(self) -> Tensor:
        """The ids that may come next: (n_vocab,) bool, on the CPU. Do not modify it.

        Only the stop ids are allowed if nothing can follow a complete answer. Raises UsageError if no id is allowed, or
        if llguidance reaches a limit.
        """
        if self._allowed is None:
            finished = self._ended or (self._matcher.is_stopped() and self._matcher.is_accepting())
            self._allowed = self._vocabulary.stops if finished else self._masked()
        return self._allowed

    def _masked(self) -> Tensor:
        mask, spaced = self._vocabulary.mask(self._matcher), self._vocabulary.spaced
        allowed = mask[: self.n_vocab]
        if self._at_start:
            text_follows = bool((allowed & ~self._vocabulary.stops).any())
            allowed[spaced] = mask[self.n_vocab :]
            allowed[self._vocabulary.only_space] = text_follows
        return allowed

    def advance(self, id: int) -> None:
        """Add an id to the answer; a stop id ends it. Raises UsageError if the id is not allowed."""
        if not 0 <= id < self.n_vocab or not self.allowed()[id]:
            raise UsageError(f"token {checks.shown(id)} can't come next in an answer that matches the grammar")
        vocabulary, token = self._vocabulary, id
        if id in vocabulary.stop_ids and self.complete:
            self._allowed, self._ended = None, True
            return
        if self._at_start and vocabulary.text[id]:
            self._at_start = False
            token = vocabulary.without_space.get(id, id)
        if vocabulary.tokens[token] and not self._matcher.consume_token(token):
            raise UsageError(f"no token can continue the answer: {_reason(self._matcher.get_error())}")
        self._allowed = None


# ------------------------------------------------------------------------------------------------- calls in an answer
class CallConstraint:
    """Limits the arguments of calls in one answer to the schemas of their functions. Not thread-safe.

    All ids are allowed until `ToolCallStream` has found the name of a function, and again after the arguments. So other
    text is not limited and costs nothing, and every format with JSON arguments after the name is constrained. The
    limits begin right after the name, so they include a token in which the arguments begin. A thought has no calls.
    `thoughts` and `before` are those of `ThoughtStream`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Sequence[Mapping[str, Any]],
        thoughts: Thoughts = Thoughts(),  # noqa: B008, it is a constant
        before: Sequence[int] = (),
    ):
        self._stream, self._marks = ToolCallStream(tools), call_marks(tokenizer)
        self._thoughts = ThoughtStream(tokenizer, thoughts, before)
        self._called: tuple[str, str, int] | None = None
        self._arguments: Constraint | None = None
        self._grammars: dict[str, Grammar] = {}
        for function in (tool.get("function", tool) for tool in tools):
            try:
                self._grammars[function["name"]] = compile_grammar(tokenizer, "grammar", _arguments(function))
            except UsageError as error:
                warn_once("calls are not limited to a function's schema: llguidance is not installed, or refuses it")
                log.debug("%s", error)

    def allowed(self) -> Tensor | None:
        """The ids that may come next: (n_vocab,) bool, on the CPU; None if all may. Do not modify it."""
        return None if self._arguments is None else self._arguments.allowed()

    def advance(self, id: int) -> None:
        """Add an id to the answer. Raises UsageError if the id is not allowed."""
        if self._arguments is not None:
            self._arguments.advance(id)
        thought, text = self._thoughts.feed(id)
        self._stream.feed(text if thought is not None else self._marks.get(id, "") + text)
        if (called := self._stream.called) is not self._called:
            self._called, self._arguments = called, None
            if called is not None and called[0] in self._grammars:
                rest = called[1] + "".join(self._stream.pending[called[2] :])
                self._arguments = self._grammars[called[0]].after(rest)
