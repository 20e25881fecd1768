"""Answers that meet a schema, an expression or a grammar: in Python, in batches, on the command line."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pydantic
import pytest
import torch

from llama import cli
from llama.chat.thoughts import Thoughts
from llama.chat.tool_calls import ToolCallStream
from llama.errors import UsageError
from llama.generation.structured import CallConstraint, warn_once
from llama.text import Llama, Piece

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"enum": ["dog", "cat", "llama"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["name", "legs"],
    "additionalProperties": False,
}


class Animal(pydantic.BaseModel, extra="forbid"):
    name: str = pydantic.Field(pattern="^[a-z]{1,5}$")
    legs: int = pydantic.Field(ge=0, le=9)


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 2.0, "seed": 3}, {"temperature": 1.0, "top_p": 0.5, "seed": 1}]
)
def test_an_answer_meets_its_schema(tiny_llm: Llama, options: dict[str, Any]) -> None:
    found = tiny_llm.generate("An animal: ", schema=SCHEMA, max_new_tokens=200, **options)
    assert found.finish_reason == "stop"
    jsonschema.validate(json.loads(found.text), SCHEMA)
    chat = tiny_llm.chat([{"role": "user", "content": "An animal?"}], schema=Animal, max_new_tokens=200, **options)
    Animal.model_validate_json(chat.text)


def test_answers_of_a_batch_have_grammars_of_their_own(tiny_llm: Llama) -> None:
    options: dict[str, Any] = {"max_new_tokens": 60, "temperature": 1.5, "seed": 7}
    together = tiny_llm.generate([*"aba"], regex="(yes|no)( maybe){0,2}", **options)
    for prompt, one in zip("aba", together, strict=True):
        assert one.text == tiny_llm.generate(prompt, regex="(yes|no)( maybe){0,2}", **options).text
        assert one.text.split()[0] in ("yes", "no")


def test_greedy_is_unchanged_where_the_grammar_forbids_nothing(tiny_llm: Llama) -> None:
    free = tiny_llm.generate("abc", max_new_tokens=20)
    assert tiny_llm.generate("abc", max_new_tokens=20, regex=r"(?s:.*)").tokens == free.tokens or "�" in free.text
    lark = "start: /(?s:.)*/"
    assert tiny_llm.generate("abc", max_new_tokens=20, grammar=lark).text.startswith(free.text[:3])


def test_log_probabilities_stay_those_of_the_model(tiny_llm: Llama) -> None:
    found = tiny_llm.generate("abc", regex="[0-9]{4}", logprobs=True, top_logprobs=1)
    ids = tiny_llm.tokenizer.encode_prompt("abc") + found.tokens
    rows = tiny_llm.model(torch.tensor([ids]))[0, -len(found.tokens) - 1 : -1, : tiny_llm.tokenizer.n_vocab]
    expected = rows.log_softmax(-1)
    torch.testing.assert_close(
        torch.tensor(found.logprobs), expected[range(len(found.tokens)), found.tokens], atol=1e-4, rtol=0
    )
    assert [list(top)[0] for top in found.top_logprobs or []] == expected.argmax(-1).tolist()  # noqa: RUF015


def test_draws_follow_the_masked_distribution(tiny_llm: Llama) -> None:
    """All answers to a{1,2}b? by enumeration, against 300 draws: chi-square, p above 1e-4."""
    words = {"a", "aa", "ab", "aab"}
    tokenizer, temperature = tiny_llm.tokenizer, 1.7
    pieces = {id: tokenizer.token_bytes(id).decode(errors="replace") for id in range(tokenizer.n_vocab)}
    stops = set(tokenizer.stop_ids)
    prompt = tokenizer.encode_prompt("xyz")
    chances: dict[tuple[int, ...], float] = {}

    def visit(ids: tuple[int, ...], text: str, chance: float) -> None:
        logits = tiny_llm.model(torch.tensor([[*prompt, *ids]]))[0, -1, : tokenizer.n_vocab]
        allowed = [
            id
            for id, piece in pieces.items()
            if (id in stops and text in words)
            or (id not in stops and piece and any(word.startswith(text + piece) for word in words))
        ]
        for id, p in zip(allowed, (logits[allowed] / temperature).softmax(0).tolist(), strict=True):
            if id in stops:
                chances[ids] = chances.get(ids, 0) + chance * p
            else:
                visit((*ids, id), text + pieces[id], chance * p)

    visit((), "", 1.0)
    assert sum(chances.values()) == pytest.approx(1, abs=1e-5)
    runs = 300
    prepared = tiny_llm.prepare(prompt, {"regex": "a{1,2}b?", "temperature": temperature, "seed": 0}, runs)
    ended = (piece.completion for _, piece in tiny_llm.answers(prepared, batch_size=128) if isinstance(piece, Piece))
    drawn = [tuple(completion.tokens) for completion in ended if completion is not None]
    assert set(drawn) <= set(chances)
    statistic = sum((drawn.count(ids) - runs * p) ** 2 / (runs * p) for ids, p in chances.items())
    freedom = (len(chances) - 1) / 2
    assert float(torch.special.gammaincc(torch.tensor(freedom), torch.tensor(statistic / 2))) > 1e-4


# -------------------------------------------------------------------------------------------------- calls in an answer
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "animal", "parameters": SCHEMA}},
    {"name": "now", "parameters": {"type": "object", "additionalProperties": False}},
]
# What a model writes before the arguments. The name `animal2` is not declared.
HEADS = [
    '{"name": "animal", "arguments":', 'Yes.\n```json\n{\n  "name": "animal",', '<tool_call>{"name":"animal","parameters"', "[TOOL_CALLS]animal[ARGS]",
    '<|python_tag|>{"type": "function", "name": "animal", ', '[TOOL_CALLS][{"name": "now", "arguments": {}}, {"name": "animal",',
    "[TOOL_CALLS]animal{", "<function=animal>", "[TOOL_CALLS]animal[CALL_ID]a1b2[ARGS]", 'functools[{"name": "animal","arguments"',
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>animal\n```json\n", '{"name": "now", "parameters": {}}; {"name": "animal", "parameters": {',
]  # fmt: skip


@pytest.mark.parametrize("head", HEADS)
def test_the_arguments_of_a_call_meet_the_schema_of_its_function(tiny_llm: Llama, head: str) -> None:
    """Ids are drawn from those that are allowed, mostly printable ones; jsonschema judges the call."""
    tokenizer, draw = tiny_llm.tokenizer, random.Random(head)
    printable = torch.tensor([tokenizer.decode([id]).strip().isprintable() for id in range(tokenizer.n_vocab)])
    for _ in range(5):
        constraint, stream, text = CallConstraint(tokenizer, TOOLS), ToolCallStream(TOOLS, parts=True), head
        for id in tokenizer.encode(head):
            constraint.advance(id)
        while (allowed := constraint.allowed()) is not None and not allowed[[*tokenizer.stop_ids]].any():
            some = allowed & printable if (allowed & printable).any() and draw.random() < 0.9 else allowed
            id = draw.choice(some.nonzero().flatten().tolist())
            constraint.advance(id)
            text += tokenizer.decode([id])
        (*_, (name, arguments)) = joined(stream.feed(text + ("]" if "[{" in head else "")))
        assert name == "animal"
        jsonschema.validate(json.loads(arguments), SCHEMA)
        assert stream.called is None


def joined(events: list[Any]) -> list[tuple[str, str]]:
    """The names of calls, and the JSON text of their arguments."""
    calls: list[tuple[str, str]] = []
    for event in events:
        if "function" in event:
            calls.append((event["function"]["name"], json.dumps(event["function"]["arguments"])))
        elif "name" in event:
            calls.append((event["name"], ""))
        elif isinstance(event, dict):
            calls[-1] = (calls[-1][0], calls[-1][1] + event["arguments"])
    return calls


@pytest.mark.parametrize(
    "text", ["{", '{"name": "animal2", ', '```json\n{"name": "animal2",', "animal[ARGS]{", '{"animal": ', "<tool_call>"]
)
def test_text_without_a_declared_call_is_free(tiny_llm: Llama, text: str) -> None:
    """Every id is allowed after every prefix, also inside characters."""
    tokenizer = tiny_llm.tokenizer
    constraint = CallConstraint(tokenizer, TOOLS)
    for id in [*tokenizer.encode(f"{text} \U0001d11e"), *range(tokenizer.n_vocab)]:
        assert constraint.allowed() is None
        constraint.advance(id)


def test_a_call_in_a_thought_is_free_and_one_after_it_is_limited(tiny_llm: Llama) -> None:
    tokenizer, call = tiny_llm.tokenizer, '<tool_call>{"name": "animal", "arguments": {'
    constraint = CallConstraint(tokenizer, TOOLS, Thoughts("<think>", "</think>", "open"))
    for id in tokenizer.encode(f"{call} hm</think>\n"):
        assert constraint.allowed() is None
        constraint.advance(id)
    for id in tokenizer.encode(call):
        constraint.advance(id)
    allowed = constraint.allowed()
    assert allowed is not None
    assert not allowed[[*tokenizer.stop_ids]].any()


def test_greedy_answers_without_calls_are_unchanged_by_tools(tiny_llm: Llama) -> None:
    for seed in range(2):
        options: dict[str, Any] = {"max_new_tokens": 20, "temperature": 1.5, "seed": seed}
        ids = tiny_llm.tokenizer.encode(f"text {seed}")
        both = [tiny_llm.prepare(ids, {**options, **more})[0] for more in ({}, {"calls": TOOLS})]
        found = [
            piece.completion for _, piece in tiny_llm.answers(both) if isinstance(piece, Piece) and piece.completion
        ]
        assert found[0].tokens == found[1].tokens


def test_a_schema_that_is_refused_leaves_its_calls_free(tiny_llm: Llama, caplog: pytest.LogCaptureFixture) -> None:
    refused = {"name": "refused", "parameters": {"properties": {"x": {"not": {"type": "string"}}}, "required": ["x"]}}
    warn_once.cache_clear()
    for _ in range(2):
        constraint = CallConstraint(tiny_llm.tokenizer, [refused, *TOOLS])
    assert [record.getMessage()[:45] for record in caplog.records] == ["calls are not limited to a function's schema:"]
    for name, free in (("refused", True), ("animal", False)):
        constraint = CallConstraint(tiny_llm.tokenizer, [refused, *TOOLS])
        for id in tiny_llm.tokenizer.encode(f'{{"name": "{name}", "arguments": {{'):
            constraint.advance(id)
        assert (constraint.allowed() is None) == free
    with pytest.raises(UsageError, match="can't be used"):
        tiny_llm.chat("x", tools=[refused], tool_choice="required")


# ------------------------------------------------------------------------------------------------------ command line
def test_the_commands_options(tiny_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema, lark = tmp_path / "schema.json", tmp_path / "list.lark"
    schema.write_text(json.dumps(SCHEMA))
    lark.write_text('start: "<" /[0-9]/ ("," /[0-9]/)? ">"')
    base = ["generate", "-m", str(tiny_gguf), "-q", "-n", "200"]
    assert cli.main([*base, "--json-schema", str(schema), "An animal"]) == 0
    jsonschema.validate(json.loads(capsys.readouterr().out), SCHEMA)
    assert cli.main([*base, "--grammar", str(lark), "--raw", "--temperature", "2", "Numbers"]) == 0
    out = capsys.readouterr().out.strip()
    assert (out[0], out[-1]) == ("<", ">")
    assert cli.main([*base, "--regex", "[ab]{3}", "x"]) == 0
    assert set(capsys.readouterr().out.strip()) <= set("ab")
    with pytest.raises(SystemExit, match="2"):
        cli.main([*base, "--regex", "a", "--grammar", str(lark), "x"])
    assert cli.main([*base, "--json-schema", str(lark), "x"]) == 2
    assert "schema" in capsys.readouterr().err


def test_a_file_of_prompts_may_have_a_grammar_for_each_line(
    tiny_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        {"prompt": "a"},
        {"prompt": "a", "schema": {"enum": [17, True]}},
        {"prompt": "a", "grammar": 'start: "x" "y"?'},
        {"prompt": "a", "regex": "["},
        {"prompt": "a", "logit_bias": {"5": -100}, "presence_penalty": 0.5},
    ]
    source = tmp_path / "in"
    source.write_text("\n".join(map(json.dumps, lines)))
    command = ["generate", "-m", str(tiny_gguf), "-q", "-n", "9", "--prompts", str(source), "--regex", "[01]{2}"]
    assert cli.main(command) == 1
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert set(found[0]["text"]) <= set("01")
    assert found[1]["text"] in ("17", "true")
    assert found[2]["text"] in ("x", "xy")
    assert "regular expression" in found[3]["error"]
    assert len(found[4]["text"]) == 2
    assert list(itertools.islice((one["id"] for one in found), 5)) == [1, 2, 3, 4, 5]
    source.write_text('{"prompt": "a", "schema": {}, "regex": "a"}')
    assert cli.main(command) == 1
