"""Answers that meet a schema, an expression or a grammar: in Python, in batches, on the command line."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import jsonschema
import pydantic
import pytest
import torch

from llama import cli
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
    """All answers to a{1,2}b? by enumeration, against 600 draws: chi-square, p above 1e-4."""
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
    runs = 600
    prepared = tiny_llm.prepare(prompt, {"regex": "a{1,2}b?", "temperature": temperature, "seed": 0}, runs)
    ended = (piece.completion for _, piece in tiny_llm.answers(prepared, batch_size=128) if isinstance(piece, Piece))
    drawn = [tuple(completion.tokens) for completion in ended if completion is not None]
    assert set(drawn) <= set(chances)
    statistic = sum((drawn.count(ids) - runs * p) ** 2 / (runs * p) for ids, p in chances.items())
    freedom = (len(chances) - 1) / 2
    assert float(torch.special.gammaincc(torch.tensor(freedom), torch.tensor(statistic / 2))) > 1e-4


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
