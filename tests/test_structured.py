"""Structured output: masks against brute force over languages that are known otherwise, on every kind of vocabulary."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import json
import random
import re
import time
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
import regex
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llama.errors import UsageError
from llama.generation import structured
from llama.generation.structured import Constraint, Grammar, compile_grammar
from llama.tokenizer import Tokenizer
from llama.tokenizer.sentencepiece import SentencePieceModelTokenizer
from llama.tokenizer.tiktoken import TiktokenTokenizer

from .scripts import make_tiny
from .test_tokenizer_write import as_gguf, as_json

END, EOM, TAG, THINK = "<end>", "<eom>", "<tag>", "<think>"


class Listed(Tokenizer):
    """A vocabulary of listed byte strings, which nothing encodes."""

    kind, bos_id, eos_id, add_bos = "listed", None, 0, False

    def __init__(self, tokens: Sequence[bytes], strips: bool = False):
        self.tokens = [b"", b"", b"", b"<think>", *tokens]
        self.control = {END: 0, EOM: 1, TAG: 2, THINK: 3}  # <think> has bytes, as one that a chat template writes
        self.n_vocab, self.stop_ids = len(self.tokens), frozenset({0, 1})
        self.strips_leading_space = strips

    def _encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def _bytes_of(self, id: int) -> bytes:
        return self.tokens[id]


# Overlapping pieces, parts of characters, a token without bytes, two ids for the same bytes, bytes that are not UTF-8
PIECES = [
    *(bytes([c]) for c in b'ab"\\, :{}[]/0123.-etruflsn\n'), b"ab", b"aab", b"bb", b"a", b" a", b" ab", b"  ", b'{"', b'":', b'"a"',
    b"\xc3", b"\xa9", b"\xc3\xa9", b"a\xc3", b"\xa9b", b"\xe6\xbc", b"\xa2", b"\xff", b"\xffa", b"", b"12", b"true", b", ", b'", "', b"]}",
]  # fmt: skip
PLAIN, STRIPPING = Listed(PIECES), Listed(PIECES, strips=True)


def ids_of(mask: torch.Tensor) -> set[int]:
    return set(mask.nonzero().flatten().tolist())


def text_of(tokenizer: Tokenizer, ids: Iterable[int]) -> bytes:
    """The bytes of an answer, as `Decoder` returns them for a text of its own."""
    data = b"".join(map(tokenizer.token_bytes, ids))
    return data.removeprefix(b" ") if tokenizer.strips_leading_space else data


def expected(tokenizer: Tokenizer, ids: Sequence[int], is_prefix: Any, is_member: Any) -> set[int]:
    """The ids that may follow: those whose bytes continue towards a member, and the stop ids after a member."""
    control = set(tokenizer.control.values())
    after = {
        id
        for id in range(tokenizer.n_vocab)
        if id not in control and tokenizer.token_bytes(id) and is_prefix(text_of(tokenizer, [*ids, id]))
    }
    text = text_of(tokenizer, ids)
    if is_member(text):
        more = any(is_prefix(text + bytes([byte])) for byte in range(256))
        return after | tokenizer.stop_ids if more else set(tokenizer.stop_ids)
    return after


def copy_of(constraint: Constraint) -> Constraint:
    """An independent constraint in the same state."""
    copied = copy.copy(constraint)
    copied._matcher = constraint._matcher.deep_copy()
    return copied


def same_masks(tokenizer: Tokenizer, grammar: Grammar, is_prefix: Any, is_member: Any, most: int = 60) -> int:
    """Compare the masks at up to `most` answers, breadth first. Returns their number."""
    queue: list[tuple[list[int], Constraint]] = [([], grammar.constraint())]
    for count, (ids, constraint) in enumerate(queue):  # the list grows
        allowed = ids_of(constraint.allowed())
        assert allowed == expected(tokenizer, ids, is_prefix, is_member), text_of(tokenizer, ids)
        assert constraint.complete == is_member(text_of(tokenizer, ids))
        if count == most:
            return count
        for id in sorted(allowed - tokenizer.stop_ids):
            if len(queue) <= most:
                queue.append(([*ids, id], copy_of(constraint)))
                queue[-1][1].advance(id)
    return len(queue)


def language(*members: str) -> tuple[Any, Any]:
    """The decisions for a finite language."""
    texts = {member.encode() for member in members}
    prefixes = {text[:length] for text in texts for length in range(len(text) + 1)}
    return prefixes.__contains__, texts.__contains__


LARK = json.dumps  # a string literal of Lark is one of JSON


# ------------------------------------------------------------------------------------------------ exact masks
@settings(max_examples=30, deadline=None)
@example(["", " ", " a", "a"], PIECES, True)  # " a" may begin the answer, which the decoder shows as "a"
@example(["<tag>", "<think>", "[1, 2]", "a/b", "\\"], PIECES, False)
@given(
    st.lists(st.text('ab é"漢\n', max_size=6), min_size=1, max_size=5, unique=True),
    st.lists(st.text('ab é"漢\n', min_size=1, max_size=3).map(str.encode), max_size=8),
    st.booleans(),
)
def test_masks_of_any_finite_language(members: list[str], pieces: list[bytes], strips: bool) -> None:
    tokenizer = Listed(
        [*pieces, *(bytes([byte]) for byte in {*'ab é"漢\n'.encode(), *"".join(members).encode()})], strips
    )
    lark = compile_grammar(tokenizer, "grammar", "start: " + " | ".join(map(LARK, members)))
    pattern = compile_grammar(tokenizer, "regex", "|".join(map(re.escape, members)))
    for grammar in (lark, pattern):
        same_masks(tokenizer, grammar, *language(*members), most=30)


PATTERNS = [
    r"a*b", r"(ab|a)*", r"[ab]{3,7}", r"a+(b|é)?a{2}", r"(?:a|b)*aa(?:a|b){3}", r"[^a]{1,3}", r".{2}", r"a|", r"^ab$", r"(?i)aB+",
    r"[0-2]+(\.[0-9]{2,3})?", r'"[^"\\]*"', r"\{\}|\[\s*\]", r" *a", r" a b", r"(?s:.)b?", r"\x61\u0062", r"a/b?/", r"[\n ]a",
]  # fmt: skip


@pytest.mark.parametrize(
    ("pattern", "tokenizer"),
    [
        *((pattern, PLAIN) for pattern in PATTERNS),
        *((pattern, STRIPPING) for pattern in (r"a*b", r"[^a]{1,3}", r" *a", r" a b", r"[\n ]a")),
    ],
)
def test_masks_of_regular_expressions(tokenizer: Tokenizer, pattern: str) -> None:
    """Compared with partial matches of the package `regex`. It knows text, so an incomplete character is completed."""
    compiled = regex.compile(pattern)

    def is_member(data: bytes) -> bool:
        try:
            return compiled.fullmatch(data.decode()) is not None
        except UnicodeDecodeError:
            return False

    def is_prefix(data: bytes) -> bool:
        for tail in (b"", b"\xa9", b"\xa2", b"\xbc\xa2"):
            try:
                text = (data + tail).decode()
            except UnicodeDecodeError:
                continue
            return compiled.fullmatch(text, partial=True) is not None
        return False

    assert same_masks(tokenizer, compile_grammar(tokenizer, "regex", pattern), is_prefix, is_member) > 2


@pytest.mark.parametrize("tokenizer", [PLAIN, STRIPPING], ids=["plain", "strips the first space"])
def test_masks_of_a_context_free_grammar(tokenizer: Tokenizer) -> None:
    def is_member(data: bytes) -> bool:
        return re.fullmatch(rb"(a*)\{\}(b*)", data) is not None and data.count(b"a") == data.count(b"b")

    def is_prefix(data: bytes) -> bool:
        return re.fullmatch(rb"a*(\{(\}b*)?)?", data) is not None and data.count(b"b") <= data.count(b"a")

    grammar = compile_grammar(tokenizer, "grammar", 'start: "a" start "b" | "{}"')
    assert same_masks(tokenizer, grammar, is_prefix, is_member) == 60


@pytest.mark.parametrize("tokenizer", [PLAIN, STRIPPING], ids=["plain", "strips the first space"])
def test_masks_of_constants_of_json(tokenizer: Tokenizer) -> None:
    values = ["a", "aab", "", 'a"b', "a\\", 1, 12, True, None, "é"]
    grammar = compile_grammar(tokenizer, "schema", {"enum": values})
    assert same_masks(tokenizer, grammar, *language(*(json.dumps(value, ensure_ascii=False) for value in values))) > 30


def test_masks_of_a_json_value_with_white_space() -> None:
    """Any amount up to 64 characters between two tokens, none before and after the value."""
    space = r"[ \n\t\r]{0,64}"
    compiled = regex.compile(rf"\[{space}(?:[012]{space}(?:,{space}[012]{space})?)?\]")
    schema = {"type": "array", "items": {"enum": [0, 1, 2]}, "maxItems": 2}

    def matches(data: bytes, **partial: bool) -> bool:
        return data.isascii() and compiled.fullmatch(data.decode(), **partial) is not None

    grammar = compile_grammar(PLAIN, "schema", schema)
    assert same_masks(PLAIN, grammar, lambda data: matches(data, partial=True), matches) == 60
    runs = grammar.constraint()
    runs.advance(4 + PIECES.index(b"["))
    for _ in range(64):
        runs.advance(4 + PIECES.index(b"\n"))
    assert ids_of(runs.allowed()) == {4 + PIECES.index(piece) for piece in (b"0", b"1", b"2", b"]", b"]}"[:1])}


# ---------------------------------------------------------------------------------------------------- control tokens
def test_no_grammar_allows_a_control_token() -> None:
    for kind, source in [("regex", "(?s:.)*"), ("schema", {}), ("grammar", "start: /(.|\\n)*/")]:
        constraint = compile_grammar(PLAIN, kind, source).constraint()  # type: ignore[arg-type]
        assert not ids_of(constraint.allowed()) & {2, 3}, kind


def test_an_answer_that_continues_a_text_keeps_its_first_space() -> None:
    grammar = compile_grammar(STRIPPING, "regex", " ab")
    a, space_a = 4 + PIECES.index(b"a"), 4 + PIECES.index(b" a")
    separate, continuing, after_control = (grammar.constraint(before) for before in ([], [a], [2]))
    assert space_a in ids_of(continuing.allowed())
    assert ids_of(separate.allowed()) == ids_of(after_control.allowed())
    assert space_a not in ids_of(separate.allowed())  # the decoder would return "ab"
    assert ids_of(separate.allowed()) >= {4 + PIECES.index(b"  ")}


def test_every_stop_id_ends_a_complete_answer() -> None:
    for stop in PLAIN.stop_ids:
        constraint = compile_grammar(PLAIN, "regex", "a+").constraint()
        with pytest.raises(UsageError, match=f"token {stop} can't come next"):
            constraint.advance(stop)
        constraint.advance(4 + PIECES.index(b"a"))
        assert ids_of(constraint.allowed()) > PLAIN.stop_ids
        constraint.advance(stop)
        assert constraint.complete
        assert ids_of(constraint.allowed()) == PLAIN.stop_ids


def test_an_id_that_is_not_allowed_changes_nothing() -> None:
    constraint = compile_grammar(PLAIN, "regex", "ab").constraint()
    before = constraint.allowed().clone()
    for id in (4 + PIECES.index(b"b"), -1, PLAIN.n_vocab, 2):
        with pytest.raises(UsageError, match="can't come next"):
            constraint.advance(id)
    assert torch.equal(constraint.allowed(), before)
    constraint.advance(4 + PIECES.index(b"ab"))
    assert ids_of(constraint.allowed()) == PLAIN.stop_ids


# ------------------------------------------------------------------------------------------------- vocabulary kinds
@pytest.fixture(scope="module")
def kinds() -> dict[str, Tokenizer]:
    tiktoken = TiktokenTokenizer(make_tiny.tiktoken_model(512), "tiny")
    pieces = SentencePieceModelTokenizer(make_tiny.sentencepiece_model(528), "tiny")
    return {
        "tiktoken": tiktoken, "tiktoken as json": as_json(tiktoken), "tiktoken as gguf": as_gguf(tiktoken),
        "pieces": pieces, "pieces as json": as_json(pieces), "pieces as gguf": as_gguf(pieces),
    }  # fmt: skip


VALUES = [{"name": "the cat é", "n": [1, -2.5, True]}, {"name": '漢字\n"', "n": []}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "n": {"type": "array", "items": {"type": ["number", "boolean"]}}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


def divided(tokenizer: Tokenizer, data: bytes, dice: random.Random) -> list[int]:
    """Bytes as random tokens of a vocabulary that has all bytes."""
    control = set(tokenizer.control.values())
    by_bytes: dict[bytes, list[int]] = {}
    for id in range(tokenizer.n_vocab):
        if id not in control:
            by_bytes.setdefault(tokenizer.token_bytes(id), []).append(id)
    ids = []
    while data:
        lengths = [n for n in range(1, min(len(data), 16) + 1) if data[:n] in by_bytes]
        length = dice.choice(lengths)
        ids.append(dice.choice(by_bytes[data[:length]]))
        data = data[length:]
    return ids


def accepts(constraint: Constraint, ids: Iterable[int]) -> bool:
    for id in ids:
        if not constraint.allowed()[id]:
            return False
        constraint.advance(id)
    return constraint.complete


KIND = ["tiktoken", "tiktoken as json", "tiktoken as gguf", "pieces", "pieces as json", "pieces as gguf"]


@pytest.mark.parametrize("kind", KIND)
def test_every_division_of_a_valid_answer_is_allowed(kinds: dict[str, Tokenizer], kind: str) -> None:
    tokenizer, dice = kinds[kind], random.Random(0)
    grammar = compile_grammar(tokenizer, "schema", SCHEMA)
    for value, style in itertools.product(VALUES, [{}, {"indent": 4}, {"separators": (",", ":")}]):
        text = json.dumps(value, ensure_ascii=False, **style)  # type: ignore[arg-type]
        for _ in range(2):
            assert accepts(grammar.constraint(), divided(tokenizer, text.encode(), dice))
        assert accepts(grammar.constraint(), tokenizer.encode(text))
        assert not accepts(grammar.constraint(), tokenizer.encode(text[:-1]))
        assert not accepts(grammar.constraint(), tokenizer.encode(text + "}"))


@pytest.mark.parametrize("kind", KIND)
def test_the_first_masks_of_every_kind(kinds: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = kinds[kind]
    members = ["the cat", " the dog", "théâtre"]
    grammar = compile_grammar(tokenizer, "grammar", "start: " + " | ".join(map(LARK, members)))
    assert same_masks(tokenizer, grammar, *language(*members), most=40) == 40


@functools.cache
def preferences(tokenizer: Tokenizer) -> torch.Tensor:
    """More weight for short tokens, and for those that close a string, list or object; little for white space."""
    tokens = [tokenizer.token_bytes(id) for id in range(tokenizer.n_vocab)]
    weights = torch.tensor([(30.0 if t[:1] in (b'"', b"}", b"]") else 1.0) / (1 + len(t)) ** 2 for t in tokens])
    weights[[not token.strip() for token in tokens]] = 0.01
    return weights


def walk(tokenizer: Tokenizer, grammar: Grammar, seed: int, most: int = 150) -> str | None:
    """An answer drawn from the masks, which ends where it first may; None if it does not."""
    generator = torch.Generator().manual_seed(seed)
    weights = preferences(tokenizer)
    constraint, ids = grammar.constraint(), list[int]()
    for _ in range(most):
        allowed = constraint.allowed()
        assert constraint.complete == bool(allowed[list(tokenizer.stop_ids)].all())
        if constraint.complete:
            return tokenizer.decode(ids)
        ids.append(int(torch.multinomial(weights * allowed, 1, generator=generator)))
        constraint.advance(ids[-1])
    return None


class Schemas:
    """Random JSON schemas of the supported keywords."""

    def __init__(self, seed: int):
        self.dice = random.Random(seed)

    def whole(self) -> dict[str, Any]:
        schema = self.one(3)
        if self.dice.random() < 0.3:
            node = {"type": "object", "properties": {"v": self.one(1), "next": {"$ref": "#/$defs/node"}}}
            one = {"list": {"$ref": "#/$defs/node"}}
            schema = {"type": "object", "$defs": {"node": node}, "properties": one, "required": ["list"]}
        return schema

    def one(self, depth: int) -> dict[str, Any]:
        makers = [self.text, self.number, self.fixed, *([self.object, self.array, self.any] * 2 if depth else [])]
        return self.dice.choice(makers)(depth)

    def text(self, depth: int) -> dict[str, Any]:
        low = self.dice.randint(0, 5)
        more: list[dict[str, Any]] = [
            {}, {"minLength": low}, {"minLength": low, "maxLength": low + self.dice.randint(0, 5)},
            {"pattern": self.dice.choice(["^[a-z]+$", "^\\\\d{2,3}-\\\\w$", "a.b", "^(x|yy)*z$", "[^\\\\s]\"?$"])},
            {"format": self.dice.choice(["date", "time", "ipv4", "ipv6", "uuid", "email"])},
        ]  # fmt: skip
        return {"type": "string", **self.dice.choice(more)}

    def number(self, depth: int) -> dict[str, Any]:
        low = self.dice.randint(-200, 200)
        more: list[dict[str, Any]] = [
            {}, {"minimum": low}, {"exclusiveMaximum": low}, {"minimum": low, "maximum": low + self.dice.randint(0, 900)},
            {"exclusiveMinimum": low, "maximum": low + 1 + self.dice.randint(0, 50)}, {"multipleOf": self.dice.choice([1, 3, 5, 12])},
        ]  # fmt: skip
        return {"type": self.dice.choice(["integer", "number"]), **self.dice.choice(more)}

    def fixed(self, depth: int) -> dict[str, Any]:
        values = [None, True, "a", 'q"\\', "é漢", 1, -2.5, [1, "b"], {"k": [], "l": {}}]
        return self.dice.choice(
            [
                {"enum": self.dice.sample(values, self.dice.randint(1, 4))}, {"const": self.dice.choice(values)},
                {"type": "boolean"}, {"type": ["null", "boolean"]},
            ]
        )  # fmt: skip

    def object(self, depth: int) -> dict[str, Any]:
        names = self.dice.sample(["a", "b c", 'd"', "é", "x-y"], self.dice.randint(0, 4))
        schema: dict[str, Any] = {"type": "object", "properties": {name: self.one(depth - 1) for name in names}}
        schema["required"] = [name for name in names if self.dice.random() < 0.6]
        if self.dice.random() < 0.7:
            schema["additionalProperties"] = self.dice.choice([False, {"type": "integer"}])
        return schema

    def array(self, depth: int) -> dict[str, Any]:
        low = self.dice.randint(0, 2)
        schema: dict[str, Any] = {"type": "array", "items": self.one(depth - 1), "minItems": low, "maxItems": low + 2}
        if self.dice.random() < 0.3:
            schema["prefixItems"] = [self.one(depth - 1)]
        return schema

    def any(self, depth: int) -> dict[str, Any]:
        return {
            self.dice.choice(["anyOf", "anyOf", "allOf"]): [self.one(depth - 1) for _ in range(self.dice.randint(1, 2))]
        }


def check_answers(schema: dict[str, Any], tokenizer: Tokenizer, answers: int, most: int = 150) -> int:
    """Draw answers and validate the completed ones. Returns their number; -1 if the schema is rejected."""
    try:
        grammar = compile_grammar(tokenizer, "schema", schema)
    except UsageError:
        return -1
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    texts = [text for seed in range(answers) if (text := walk(tokenizer, grammar, seed, most)) is not None]
    for text in texts:
        errors = list(kind(schema, format_checker=kind.FORMAT_CHECKER).iter_errors(json.loads(text)))
        assert not errors, (schema, text, errors[0].message)
    return len(texts)


@pytest.mark.parametrize(
    ("first", "count"), [(0, 40), pytest.param(40, 300, marks=pytest.mark.slow)], ids=["a few", "many"]
)
def test_every_completed_answer_meets_its_schema(kinds: dict[str, Tokenizer], first: int, count: int) -> None:
    """Random schemas; the validator is the package jsonschema."""
    seeds = range(first, first + count)
    counts = [check_answers(Schemas(seed).whole(), kinds[KIND[seed % 6]], 2, 100) for seed in seeds]
    assert sum(found > 0 for found in counts) > 0.75 * count


@pytest.mark.parametrize(
    ("name", "rule"),
    [("properties", {"a": {"type": "integer"}}), ("patternProperties", {"^a": {"type": "integer"}})],
)
def test_no_key_evades_its_rule_by_an_escape(kinds: dict[str, Tokenizer], name: str, rule: dict[str, Any]) -> None:
    tokenizer, schema = kinds["pieces"], {"type": "object", name: rule}
    grammar = compile_grammar(tokenizer, "schema", schema)
    for text, valid in (
        ('{"a":1}', True),
        ('{"b":"x\\n"}', True),
        ('{"\\u0061":1}', False),
        ('{"\\u0061":"x"}', False),
    ):
        ids = divided(tokenizer, text.encode(), random.Random(0))
        assert accepts(grammar.constraint(), ids) == valid, text


# ------------------------------------------------------------------------------------------------------- errors
ERRORS = [
    ("schema", False, "no answer meets the JSON schema false"),
    ("schema", {"type": "integer", "minimum": 5, "maximum": 3}, "Unsatisfiable schema: minimum (5) is greater"),
    ("schema", {"enum": []}, "Unsatisfiable schema: "),
    ("schema", {"type": "string", "pattern": "^ab$", "maxLength": 1}, "Unsatisfiable schema: "),
    ("schema", {"$ref": "#"}, "it allows no text"),
    ("schema", {"uniqueItems": True, "not": {}}, "Unimplemented keys"),
    ("schema", {"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    ("schema", {"type": "string", "format": "postcode"}, "can't be used: Unknown format: postcode"),
    ("schema", {"type": "strin"}, "can't be used: Invalid type: strin"),
    ("schema", {"type": "string", "pattern": "("}, "unclosed group"),
    ("schema", {"$ref": "file:///etc/passwd"}, "does not fetch resources"),
    ("schema", "{", "is not valid JSON: Expecting property name"),
    ("schema", "[" * 100_000, "is not valid JSON: "),
    ("schema", {"maximum": float("nan")}, "is not valid JSON: "),
    ("schema", {"const": {1, 2}}, "is not valid JSON: "),
    ("schema", 3, "must be an object, true or false, got 3"),
    ("schema", {"properties": {"a": {"enum": ["\\n\n", "\x01"]}}}, "control characters"),  # would give ""
    ("schema", {"pattern": "^a\x7fb$"}, "control characters"),
    ("schema", json.loads('{"items":' * 200 + "{}" + "}" * 200), "recursion limit"),
    ("regex", "(", "unclosed group"),
    ("regex", "(?=a)b", "look-ahead"),
    ("regex", r"(a)\1", "backreferences are not supported"),
    ("regex", r"[^\s\S]", "it allows no text"),
    ("regex", "a\ud800", "is not valid Unicode"),
    ("regex", b"a", "must be a string"),
    ("regex", "a" * (2**20 + 1), "has more than 1,048,576 characters"),
    ("grammar", "", "no start rule"),
    ("grammar", '{"grammars": []}', "can't be used"),
    ("grammar", 'root ::= x', "is not valid GBNF"),
    ("grammar", "start: <tag>", "unknown special token"),
    ("grammar", "start: " + "(" * 5000 + '"a"' + ")" * 5000, "too deeply nested"),
    ("lark", "start: A", "unknown kind of grammar 'lark'; known: schema, regex, grammar"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "source", "message"), ERRORS, ids=[f"{k}-{s!r:.40}" for k, s, _ in ERRORS])
def test_what_cannot_be_met_is_an_error_before_generation(kind: str, source: Any, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        compile_grammar(PLAIN, kind, source)
    assert len(str(caught.value)) < 500
    assert "\n" not in str(caught.value)


def test_text_that_the_vocabulary_cannot_spell_is_an_error() -> None:
    for kind, source in [("regex", "zb"), ("schema", {"const": 7}), ("grammar", 'start: "z" | "y"')]:
        with pytest.raises(UsageError, match="no text that the tokens of this model can spell"):
            compile_grammar(PLAIN, kind, source)  # type: ignore[arg-type]
    assert ids_of(compile_grammar(PLAIN, "regex", "zb|ab").constraint().allowed()) <= {
        4 + PIECES.index(p) for p in (b"a", b"ab")
    } | {4 + at for at, piece in enumerate(PIECES) if piece == b"a"}


def test_a_dead_end_in_an_answer_is_an_error_and_does_not_end_it() -> None:
    constraint = compile_grammar(PLAIN, "regex", "b|az").constraint()
    constraint.advance(4 + PIECES.index(b"a"))
    for _ in range(2):
        with pytest.raises(UsageError, match="no token can continue the answer"):
            constraint.allowed()
    assert not constraint.complete


def test_a_vocabulary_without_an_end_is_an_error() -> None:
    tokenizer = Listed([b"a"])
    tokenizer.stop_ids = frozenset()
    with pytest.raises(UsageError, match="needs an end-of-text token"):
        compile_grammar(tokenizer, "regex", "a")


def test_tokens_have_a_longest_length() -> None:
    limit = structured.LONGEST_TOKEN
    longest = 4
    assert longest in ids_of(compile_grammar(Listed([b"a" * limit, b"a"]), "regex", "a+").constraint().allowed())
    with pytest.raises(UsageError, match="a token of 1,025 bytes"):
        compile_grammar(Listed([b"a" * (limit + 1), b"a"]), "regex", "a+")


def test_threads_share_a_grammar(kinds: dict[str, Tokenizer]) -> None:
    tokenizer = kinds["tiktoken"]
    grammar = compile_grammar(tokenizer, "schema", SCHEMA)
    texts = [json.dumps(value, ensure_ascii=False, indent=indent) for value in VALUES for indent in (None, 2)] * 4
    made = [grammar.constraint() for _ in texts]  # in another thread than the one that uses it
    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(accepts, made, map(tokenizer.encode, texts)))


def test_a_vocabulary_is_freed_with_its_tokenizer() -> None:
    tokenizer = Listed([b"a"])
    constraint = compile_grammar(tokenizer, "regex", "a").constraint()
    kept = weakref.ref(structured.VOCABULARIES[tokenizer])
    del tokenizer, constraint
    gc.collect()
    assert kept() is None


def test_a_prompt_that_ends_inside_a_character_is_an_error() -> None:
    grammar = compile_grammar(PLAIN, "regex", "a")
    part, rest = 4 + PIECES.index(b"\xe6\xbc"), 4 + PIECES.index(b"\xa2")
    with pytest.raises(UsageError, match="the prompt ends inside a character"):
        grammar.constraint([4, part])
    grammar.constraint([4, part, rest])
    grammar.constraint([part, 4])


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=re.escape("pip install 'clearllama[structured]'")):
        compile_grammar(PLAIN, "regex", "a")


def test_a_grammar_is_compiled_once_for_a_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    first = compile_grammar(PLAIN, "schema", {"enum": [10, 12]})
    monkeypatch.setattr(structured, "CHILD", None)
    assert compile_grammar(PLAIN, "schema", {"enum": [10, 12]}) is first
    assert compile_grammar(PLAIN, "schema", '{"enum":[10,12]}') is first


# ------------------------------------------------------------------------------------------------ the child process
def chain(length: int) -> str:
    rules = "\n".join(f'r{i}: "a" r{i + 1}' for i in range(length))
    return f'start: r0\n{rules}\nr{length}: "b"'


def refs(length: int) -> dict[str, Any]:
    return {
        "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(length)} | {str(length): {}},
        "$ref": "#/$defs/0",
    }


HOSTILE = [
    pytest.param("grammar", chain(5000), "nested too deeply", id="chain of rules"),  # ends the process
    pytest.param("schema", refs(5000), "nested too deeply", id="chain of references", marks=pytest.mark.slow),
    pytest.param("schema", {"type": "integer", "multipleOf": 299_999_967}, "ran for more than 2 seconds", id="multipleOf", marks=pytest.mark.slow),
    pytest.param("schema", {"allOf": [{"type": "integer", "multipleOf": 9973}, {"multipleOf": 9967}]}, "ran for more than 2 seconds", id="multiples", marks=pytest.mark.slow),
    pytest.param("schema", {"enum": [str(i) for i in range(100_000)]}, "", id="values", marks=pytest.mark.slow),
    pytest.param("schema", {"enum": [str(i) for i in range(1_000_000)]}, "has more than 1,048,576 characters", id="more values", marks=pytest.mark.slow),
    pytest.param("schema", {"properties": {str(i): {} for i in range(20_000)}}, "", id="properties", marks=pytest.mark.slow),
    pytest.param("schema", {"allOf": [{"anyOf": [{"required": [f"{i} {j}"]} for j in range(10)]} for i in range(8)]}, "too large", id="products", marks=pytest.mark.slow),
    pytest.param("regex", "((a{1,1000}){1,1000}){1,1000}", "", id="repetitions", marks=pytest.mark.slow),
    pytest.param("regex", "(a|b)*a(a|b){1000}", "", id="states", marks=pytest.mark.slow),
    pytest.param("regex", "(a?){1000}a{1000}", "", id="options", marks=pytest.mark.slow),
    pytest.param("regex", "|".join(f"w{i}" for i in range(100_000)), "", id="alternatives", marks=pytest.mark.slow),
    pytest.param("regex", "a" * 2**19, "", id="long", marks=pytest.mark.slow),
    pytest.param("grammar", "start: a{1000}\na: b{1000}\nb: C{1000}\nC: /x{1000}/", "", id="nested repetitions", marks=pytest.mark.slow),
    pytest.param("grammar", "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(60)) + '\na60: "a"', "", id="doubling", marks=pytest.mark.slow),
    pytest.param("grammar", "start: X\nX: " + " & ".join(f"/(.|\\n)*a.{{{i}}}b(.|\\n)*/" for i in range(12)), "", id="intersections", marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "source", "message"), HOSTILE)
def test_a_hostile_grammar_costs_little(kind: str, source: Any, message: str) -> None:
    """It is rejected, or its masks are: nothing ends the process, and nothing takes long."""
    tokenizer = Listed([bytes([byte]) for byte in range(256)])
    used = time.process_time()
    with pytest.raises(UsageError, match=message) if message else contextlib.suppress(UsageError):
        constraint = compile_grammar(tokenizer, kind, source).constraint()
        for _ in range(100):
            allowed = constraint.allowed()
            if constraint.complete:
                break
            constraint.advance(int(allowed.nonzero()[-1]))
    assert time.process_time() - used < 6
