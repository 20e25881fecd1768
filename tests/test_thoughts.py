"""The thought before an answer: six templates, streams, schemas, calls, prefills, budgets, stop strings, the server."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from torch import Tensor

from llama.chat import parse_tool_calls
from llama.chat.thoughts import PAIRS, Thoughts, ThoughtStream, find_thoughts
from llama.errors import UsageError
from llama.generation.answer import Completion, Piece
from llama.text import Llama
from llama.tokenizer import Named, Tokenizer, open_tokenizer
from llama.tokenizer.common import BYTE_OF

from . import tiny
from .server.serving import running

pytestmark = pytest.mark.usefixtures("one_thread")

# ------------------------------------------------- templates with the structure of published ones, in few words
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n"
TEMPLATES = {
    "DeepSeek-R1-Distill": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% endif %}"
    "{% if m.role == 'assistant' %}{% set c = m.content %}{% if '</think>' in c %}{% set c = c.split('</think>')[-1] %}"
    "{% endif %}<|Assistant|>{{ c }}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}",
    "QwQ": CHATML + "{% set c = m.content %}{% if m.role == 'assistant' and not loop.last %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ c }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}",
    "Qwen3": CHATML + "{% set c = m.content %}{% if m.role == 'assistant' %}{% set r = m.reasoning_content or '' %}"
    "{% if not r and '</think>' in c %}{% set r = c.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.last or r %}<think>\n{{ r.strip('\n') }}\n</think>\n\n{% endif %}{% endif %}{{ c }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}",
    "SmolLM3": "{% set mode = '/no_think' if enable_thinking is false or '/no_think' in messages[0].content else '/think' %}"
    "<|im_start|>system\nReasoning Mode: {{ mode }}\n{% if mode == '/think' %}Write <think> Thought </think> Solution."
    "{% endif %}<|im_end|>\n" + CHATML + "{% if m.role == 'assistant' and mode == '/no_think' %}<think>\n\n</think>\n"
    "{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if mode == '/no_think' %}<think>\n\n</think>\n{% endif %}{% endif %}",
    "Granite 4.2": CHATML + "{% if m.role == 'assistant' %}<think>{% if m.reasoning_content %}\n{{ m.reasoning_content }}\n"
    "{% endif %}</think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}"
    "<|im_start|>assistant\n{{ '<think></think>' if enable_thinking is false else '<think>\n' }}{% endif %}",
    "unknown": CHATML + "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
}  # fmt: skip
BEGINS = {
    "DeepSeek-R1-Distill": "open",
    "QwQ": "open",
    "Qwen3": "free",
    "SmolLM3": "free",
    "Granite 4.2": "open",
    "unknown": "closed",
}
THINKERS = [name for name in TEMPLATES if name != "unknown"]
OFF = {"enable_thinking": False}
TURNS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|User|>", "<|Assistant|>")
# How a vocabulary has the marks: as control tokens, which have no text; as added tokens; not at all
KINDS = ("special", "added", "spelled")
USER: list[dict[str, Any]] = [{"role": "user", "content": "What is <think>?"}]


def build(folder: Path, name: str, kind: str) -> tuple[Llama, Any]:
    """A tiny model with a template, and transformers' tokenizer of the same files."""
    from transformers import PreTrainedTokenizerFast

    merges = [(">", "Ċ"), (">", "a")] if kind == "merged" else []
    backend = Backend(models.BPE({c: id for id, c in enumerate([*BYTE_OF, *map("".join, merges)])}, merges))
    backend.pre_tokenizer, backend.decoder = (
        pre_tokenizers.ByteLevel(False, use_regex=kind != "merged"),
        decoders.ByteLevel(),
    )
    backend.add_special_tokens(list(TURNS))
    marks = [] if kind in ("spelled", "merged") else ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    backend.add_tokens([AddedToken(one, special=kind == "special", normalized=False) for one in marks])
    file = folder / f"{kind}.json"
    backend.save(str(file))
    template = TEMPLATES[name]
    stop = backend.token_to_id("<|im_end|>")
    ours = open_tokenizer(file, {"bos_token": "<|endoftext|>"}, Named(template=template, stop_ids=[stop]))
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(file), bos_token="<|endoftext|>", eos_token="<|im_end|>")
    theirs.chat_template = template
    config = dataclasses.replace(tiny.CONFIG, n_layers=1, vocab_size=ours.n_vocab, max_seq_len=512)
    return Llama(tiny.model(config), ours, template), theirs


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder, kept = tmp_path_factory.mktemp("thoughts"), dict[tuple[str, str], tuple[Llama, Any]]()

    def get(name: str, kind: str = "added") -> tuple[Llama, Any]:
        return kept.setdefault((name, kind), kept.get((name, kind)) or build(folder, name, kind))

    return get


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of what a model writes: marks as their tokens, if there are any."""
    return tokenizer.encode(text, parse_special=True)


class Script:
    """A processor with which a model writes a text. After a closing mark, it goes on after the mark in the text."""

    def __init__(self, llm: Llama, text: str, messages: Any = USER, tools: Any = None, **variables: Any):
        self.tokenizer, self.ids = llm.tokenizer, encode(llm.tokenizer, text)
        self.start = len(llm.encode_chat(messages, tools, variables))
        self.mark = encode(llm.tokenizer, "</think>")

    def __call__(self, ids: Tensor, logits: Tensor) -> Tensor:
        written = ids[self.start :].tolist()
        ahead = (after(written, self.mark), after(self.ids, self.mark))
        place = len(written) if None in ahead else len(written) - ahead[0] + ahead[1]
        next_id = self.ids[place] if place < len(self.ids) else min(self.tokenizer.stop_ids)
        return logits.clamp(-50, 50).index_add(0, torch.tensor([next_id]), torch.tensor([1e4]))


def after(ids: Sequence[int], mark: Sequence[int]) -> int | None:
    """Where a mark ends in ids."""
    return next((i + len(mark) for i in range(len(ids)) if ids[i : i + len(mark)] == mark), None)


WAYS = ("stream", "whole", "batch", "draft")


def answer(llm: Llama, way: str, text: str, messages: Any = USER, **options: Any) -> tuple[Completion, list[Piece]]:
    """What the model answers in a script, and its pieces."""
    variables = options.get("template_options", {})
    options = {"max_new_tokens": 200, **options, "processors": [Script(llm, text, messages, **variables)]}
    if way == "batch":
        ids = llm.encode_chat(messages, options.pop("tools", None), options.pop("template_options", None))
        jobs = llm.prepare(ids, {"continues": False, "thoughts": llm.thoughts(ids), **options}, n=2)
        found: list[Any] = [piece for job, piece in llm.answers(jobs) if job is jobs[1]]
    else:
        found = list(llm.stream_chat(messages, **options, **({"draft": "ngram"} if way == "draft" else {})))
    done = found[-1].completion
    assert "".join(piece.text for piece in found) == done.text
    assert "".join(piece.reasoning or "" for piece in found) == (done.reasoning or "")
    assert "".join(llm.tokenizer.shown(id) for id in done.tokens) == text or options.keys() & {
        "thinking_budget",
        "stop",
    }
    return done, found


def written(name: str, thought: str, text: str) -> str:
    """What a model with a template writes after its prompt: it opens the thought if the prompt has not."""
    return f"{'' if BEGINS[name] == 'open' else '<think>'}\n{thought}\n</think>\n\n{text}"


# ------------------------------------------------------------------------------------------------------- prompts, ids
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_prompts_have_the_ids_of_transformers_and_say_how_the_answer_begins(built: Any, name: str, kind: str) -> None:
    llm, theirs = built(name, kind)
    turn = {"role": "assistant", "content": "Hi.", "reasoning_content": "I greet."}
    off = "open" if BEGINS[name] == "open" and name != "Granite 4.2" else "closed"  # R1 and QwQ always think
    for messages, variables, state in (
        (USER, {}, BEGINS[name]),
        (USER, OFF, off),
        ([*USER, turn, *USER], {}, BEGINS[name]),
        ([{"role": "user", "content": "Is it <think>"}], {}, BEGINS[name]),
    ):
        ids = llm.encode_chat(messages, template_options=variables)
        expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **variables)
        if kind == "spelled" or "<think>" not in messages[-1]["content"]:
            assert ids == expected
        assert len(ids) >= len(expected)  # with the token, a user can't write the mark
        assert llm.thoughts(ids, messages).state == state
        assert bool(llm.thoughts(ids).closing) == (name != "unknown")


# A prefill -> how the answer begins with templates that write it as it is; "": as without a prefill
PREFILLS = {
    "Paris is": "closed",
    "<think>\nLet me": "open",
    "<think>\nyes</think>\n\nPar": "closed",
    "  <think>a": "open",
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prefill_has_the_ids_of_transformers_and_may_be_a_thought(built: Any, name: str, kind: str) -> None:
    llm, theirs = built(name, kind)
    for prefill, state in PREFILLS.items():
        messages = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": prefill}]
        for variables in ({}, OFF):
            ids = llm.encode_chat(messages, template_options=variables)
            try:
                theirs_ids = theirs.apply_chat_template(
                    messages, continue_final_message=True, return_dict=False, **variables
                )
            except ValueError:  # the template moved the text, and transformers looks for it as it was
                assert name in ("DeepSeek-R1-Distill", "Qwen3")
                assert "</think>" in prefill
            else:
                assert ids == theirs_ids
            assert llm.thoughts(ids, messages).state == (state if name != "unknown" else "closed")
    begun = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "<think>\nLet me"}]
    done = llm.chat(begun, processors=[Script(llm, " see.\n</think>\n\nIn Rome.", begun)], max_new_tokens=80)
    mark = "" if kind == "special" else "</think>"  # a control token that no table knows has no text
    expected = (None, f" see.\n{mark}\n\nIn Rome.") if name == "unknown" else ("see.", "In Rome.")
    assert (done.reasoning, done.text) == expected


def test_every_mark_of_the_table_is_found_in_a_template_and_at_the_end_of_a_prompt(built: Any) -> None:
    tokenizer = built("Qwen3", "spelled")[0].tokenizer
    for opening, closing in PAIRS:
        source = {"default": "{{ messages }}", "tool_use": f"{opening}…{closing}"}
        for end, state in (
            (opening, "open"),
            (f"{opening}\n", "open"),
            (f"{opening}\n{closing}\n", "closed"),
            ("\n", "free"),
        ):
            found = find_thoughts(tokenizer, source, encode(tokenizer, f"x {opening} y {end}"))
            assert found == (opening, closing, state)
        assert find_thoughts(tokenizer, source, encode(tokenizer, f"{opening}\nLet é"), "Let é ").state == "open"
        assert closing.count(closing[0]) == 1 or closing.find(closing[0], 1) == -1
    assert find_thoughts(tokenizer, None, [1]) == find_thoughts(tokenizer, TEMPLATES["unknown"], [1]) == Thoughts()


# --------------------------------------------------------------------------------------------------------- the stream
PARTS = ["<think>", "</think>", "<", "</", "think>", " ", "\n", "a", "é", "<tool_call>", "Hello", "</thin"]
SPACE = r"[\s\x1c-\x1f]*"
SPLIT = {  # of a whole answer: (thought, text)
    "free": rf"(?s:{SPACE}<think>(?:(?P<thought>.*?)</think>{SPACE}(?P<text>.*)|(?P<rest>.*)))",
    "open": rf"(?s:(?:{SPACE}<think>)?(?:(?P<thought>.*?)</think>{SPACE}(?P<text>.*)|(?P<rest>.*)))",
}


@pytest.mark.parametrize("kind", [*KINDS, "merged"])  # merged: the end of a mark may be a token with what follows
@pytest.mark.parametrize("state", ["open", "free", "closed"])
@given(parts=st.lists(st.sampled_from(PARTS), max_size=9), as_text=st.booleans())
@settings(max_examples=80)
def test_a_stream_splits_every_answer_as_one_expression_does(
    built: Any, kind: str, state: Any, parts: list[str], as_text: bool
) -> None:
    """Whether the marks are tokens or are spelled, and however the text is divided."""
    tokenizer = built("Qwen3", kind)[0].tokenizer
    text = "".join(part for part in parts if part != "<tool_call>" or kind != "special")
    match = re.fullmatch(SPLIT[state], text) if state != "closed" else None
    expected = ("", text)
    if match:
        thought = match["rest"] if match["thought"] is None else match["thought"]
        expected = (thought.strip(), match["text"] or "")
    ids = tokenizer.encode(text) if as_text else encode(tokenizer, text)
    stream = ThoughtStream(tokenizer, Thoughts("<think>", "</think>", state))
    pieces = [stream.feed(id) for id in ids]
    inside = [thought is not None for thought, _ in pieces]
    assert inside == sorted(inside, reverse=True) or not inside[0]
    pieces.append(stream.end())
    assert ("".join(thought or "" for thought, _ in pieces), "".join(text for _, text in pieces)) == expected
    if match and match["thought"] is not None:  # the count ends with the mark
        until = text[: match.end("thought")] + "</think>"
        assert stream.count == len(tokenizer.encode(until) if as_text else encode(tokenizer, until))
    else:
        assert stream.count == (len(ids) if match and (state == "open" or ids) else 0)


# -------------------------------------------------------------------------------------------------------- six templates
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_thought_is_apart_from_the_text(built: Any, name: str) -> None:
    for way, kind in zip(WAYS, ("added", *KINDS[::-1]), strict=True):
        llm, _ = built(name, kind)
        if name == "unknown":
            text = written("Qwen3", "a", "b") if kind != "special" else "b"
            done, pieces = answer(llm, way, text)
            assert (done.reasoning, done.text, done.stats.reasoning_tokens) == (None, text, 0)
            assert all(piece.reasoning is None for piece in pieces)
            continue
        done, _ = answer(llm, way, written(name, "Is it 2 < 3?\n\nYes.", "It is. \n"))
        assert (done.reasoning, done.text) == ("Is it 2 < 3?\n\nYes.", "It is. \n")
        assert done.stats.reasoning_tokens == after(done.tokens, encode(llm.tokenizer, "</think>"))
        plain, _ = answer(llm, way, "Hello" if BEGINS[name] == "free" else "</think>Hello")
        assert (plain.reasoning, plain.text) == (None, "Hello")
        cut, _ = answer(
            llm, way, written(name, "Hm", "x"), max_new_tokens=3 + 6 * (kind == "spelled"), thinking_budget=99
        )
        assert (cut.text, cut.finish_reason) == ("", "length")
        assert cut.stats.reasoning_tokens == len(cut.tokens)


@pytest.mark.parametrize("name", THINKERS)
def test_text_with_marks_after_the_start_is_text(built: Any, name: str) -> None:
    llm, _ = built(name)
    text = "Write <think>a</think>."
    if BEGINS[name] == "free":
        assert answer(llm, "whole", text)[0].text == text
    done, _ = answer(llm, "whole", written(name, "a", text))
    assert (done.reasoning, done.text) == ("a", text)
    if name not in ("DeepSeek-R1-Distill", "QwQ"):  # thinking is off
        done, _ = answer(llm, "whole", "<think>a</think>b", template_options=OFF)
        assert (done.reasoning, done.text) == (None, "<think>a</think>b")


# -------------------------------------------------------------------------------------------------- schemas and calls
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99, "minimum": 0}}, "required": ["n"],
          "additionalProperties": False}  # fmt: skip
TOOLS: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]


CASES = [  # every template and every kind of token
    pytest.param(name, kind, marks=() if kind == "special" or name == "Qwen3" else pytest.mark.slow)
    for name in TEMPLATES
    for kind in KINDS
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_grammar_begins_after_the_thought(built: Any, name: str, kind: str) -> None:
    llm, _ = built(name, kind)
    if name != "unknown":
        done, _ = answer(llm, "whole", written(name, 'Maybe {"n": 7} <|x|>', '{"n": 42}'), schema=SCHEMA)
        assert (done.reasoning, done.text) == ('Maybe {"n": 7} <|x|>', '{"n": 42}')
    for way in WAYS[KINDS.index(kind) :][:2]:  # a random model would end the thought at a stop id
        done = free(llm, way, schema=SCHEMA, thinking_budget=None if name == "unknown" else 10)
        assert done.finish_reason == "stop"
        assert 0 <= json.loads(done.text)["n"] <= 99
        if BEGINS[name] != "free":  # there, a random model may write the mark
            assert (done.reasoning is not None) == (BEGINS[name] == "open")
    if name in ("Qwen3", "SmolLM3", "Granite 4.2"):
        off = free(llm, "whole", schema=SCHEMA, template_options=OFF)
        assert (off.reasoning, off.stats.reasoning_tokens) == (None, 0)
        json.loads(off.text)


def free(llm: Llama, way: str, **options: Any) -> Completion:
    """What the model answers by itself."""
    options = {"max_new_tokens": 150, "temperature": 1.5, "seed": 1, **options}
    if way == "batch":
        ids = llm.encode_chat(USER, template_options=options.pop("template_options", None))
        (job,) = llm.prepare(ids, {"continues": False, "thoughts": llm.thoughts(ids), **options})
        (done,) = (piece.completion for _, piece in llm.answers([job]) if isinstance(piece, Piece) and piece.completion)
        return done
    return llm.chat(USER, **options, **({"draft": "ngram"} if way == "draft" else {}))


def test_a_grammar_admits_no_answer_that_ends_in_the_thought(built: Any) -> None:
    """The masks of a wrapped grammar are those of a text up to the mark, then those of the grammar."""
    for kind, as_text in (*((kind, False) for kind in KINDS), ("special", True)):
        llm, _ = built("QwQ", kind)
        tokenizer, ids = llm.tokenizer, llm.encode_chat(USER)
        (job,) = llm.prepare(ids, {"schema": SCHEMA, "continues": False, "thoughts": llm.thoughts(ids)})
        (plain,) = llm.prepare(ids, {"schema": SCHEMA, "continues": False})
        assert job.constraint is not None
        assert plain.constraint is not None
        text = [tokenizer.token_bytes(id) for id in range(tokenizer.n_vocab)]
        letters = [id for id in range(tokenizer.n_vocab) if text[id].isascii() and len(text[id]) == 1]
        for id in encode(tokenizer, 'a {"n": 1}\n</think'[: None if kind == "spelled" or as_text else 11]):
            allowed = job.constraint.allowed()
            assert bool(allowed[letters].all())
            assert not any(bool(allowed[id]) for id in tokenizer.stop_ids)
            job.constraint.advance(id)
        for id in encode(tokenizer, ">" if kind == "spelled" or as_text else "</think>"):
            job.constraint.advance(id)
        begun = plain.constraint.allowed() | torch.tensor([one in (b" ", b"\n", b"\r", b"\t") for one in text])
        assert job.constraint.allowed().equal(begun)


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_are_read_only_after_the_thought(built: Any, name: str) -> None:
    call = '<tool_call>{"name": "f", "arguments": {"n": 1}}</tool_call>'
    llm, _ = built(name, "added")
    text = written(name, f"I may {call}", f"Now.\n{call}") if name != "unknown" else f"Now.\n{call}"
    done, _ = answer(llm, "stream", text)
    content, calls = parse_tool_calls(done.text, TOOLS)
    assert (content, len(calls)) == ("Now.", 1)
    budget = None if name == "unknown" else 5
    forced = free(llm, "whole", tools=TOOLS, tool_choice="required", thinking_budget=budget)
    assert [one["function"]["name"] for one in parse_tool_calls(forced.text, TOOLS)[1]] == ["f"]


# ------------------------------------------------------------------------------------------------- budgets and stops
@pytest.mark.parametrize(("name", "kind"), [case for case in CASES if case.values[0] != "unknown"])
def test_a_budget_closes_the_thought_after_that_many_tokens(built: Any, name: str, kind: str) -> None:
    llm, _ = built(name, kind)
    mark, opening = (
        encode(llm.tokenizer, "</think>"),
        [] if BEGINS[name] == "open" else encode(llm.tokenizer, "<think>"),
    )
    text = written(name, "a thought that is longer", "Yes.")
    whole = encode(llm.tokenizer, text)
    for way, most in zip(WAYS, (0, 1, 7, 500), strict=True):
        done, _ = answer(llm, way, text, thinking_budget=most)
        thought = whole[len(opening) : after(whole, mark)]
        kept = thought if most == 500 else [*thought[:most], *mark]
        assert done.tokens == [*opening, *kept, *whole[after(whole, mark) :]]
        assert done.text == "Yes."
        assert (done.reasoning or "") == "a thought that is longer"[: max(0, most - 1)].strip()
    llm.thinking_budget = 3
    try:
        assert answer(llm, "whole", text, stop=["x"])[0].reasoning == "a"
        assert answer(llm, "whole", text, thinking_budget=500)[0].reasoning == "a thought that is longer"
    finally:
        llm.thinking_budget = None


def test_a_budget_waits_for_the_end_of_a_character_and_needs_a_model_that_thinks(built: Any) -> None:
    llm, _ = built("QwQ")
    for most in (1, 2, 3):
        done, _ = answer(llm, "whole", "€uro</think>x", thinking_budget=most)
        assert (done.reasoning, done.text) == ("€", "x")
    for model in (built("unknown")[0], llm):
        with pytest.raises(UsageError, match="thinking_budget needs a chat whose template"):
            model.chat(USER, thinking_budget=3) if model is not llm else model.generate("Hello", thinking_budget=3)
    with pytest.raises(UsageError, match="thinking_budget must be an integer from 0"):
        llm.chat(USER, thinking_budget=-1)


@pytest.mark.parametrize("name", THINKERS)
def test_a_stop_string_does_not_end_a_thought(built: Any, name: str) -> None:
    for way, kind in zip(WAYS, (*KINDS, "added"), strict=True):
        llm, _ = built(name, kind)
        done, _ = answer(
            llm, way, written(name, "Question: <|User|>END\n\nno", "Yes.END of it"), stop=["END", "\n\n", "<|User|>"]
        )
        assert (done.reasoning, done.text, done.finish_reason) == ("Question: END\n\nno", "Yes.", "stop")


# ---------------------------------------------------------------------------------------------------------- the server
QUICK = ("DeepSeek-R1-Distill", "Qwen3", "unknown")  # one of each value in BEGINS


@pytest.mark.parametrize("name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in TEMPLATES])
def test_the_official_client_reads_the_thought(built: Any, name: str) -> None:
    """The marks have no text here. Those of a call in the thought do not get into the text, and those after it do."""
    thinks = name != "unknown"
    plain, _ = built(name, "special")
    llm = Llama(plain.model, plain.tokenizer, plain.chat_template)
    call = '{"name": "f", "arguments": {"n": 1}}'
    marked = f"<tool_call>{call}</tool_call>"
    text = written(name, f"Hm: {marked}", f"Now {marked}") if thinks else f"Now {marked}"
    llm.sampling = {"processors": [Script(llm, text, tools=TOOLS)]}
    with running(llm) as server:
        client = server.client()
        asked: dict[str, Any] = {"model": "tiny", "messages": USER, "tools": TOOLS, "logprobs": True, "n": 2}
        done = client.chat.completions.create(**asked)
        chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
        ids = encode(llm.tokenizer, text)
        count = (after(ids, encode(llm.tokenizer, "</think>")) or 0) if thinks else 0
        for found in (done, chunks[-1]):
            assert found.usage is not None
            assert found.usage.completion_tokens_details is not None
            assert found.usage.completion_tokens_details.reasoning_tokens == 2 * count
            assert found.usage.completion_tokens == 2 * len(ids)
        for i, choice in enumerate(done.choices):
            assert (choice.message.model_extra or {}).get("reasoning_content") == (f"Hm: {call}" if thinks else None)
            assert (choice.message.content, choice.finish_reason) == ("Now", "tool_calls")
            assert choice.message.tool_calls is not None
            assert choice.logprobs is not None
            assert choice.logprobs.content is not None
            assert len(choice.logprobs.content) == len(ids)
            deltas = [part.delta for chunk in chunks for part in chunk.choices if part.index == i]
            streamed = "".join((delta.model_extra or {}).get("reasoning_content") or "" for delta in deltas)
            assert streamed == (f"Hm: {call}" if thinks else "")
            assert "".join(delta.content or "" for delta in deltas) == "Now"
            assert [one.function.arguments for delta in deltas for one in delta.tool_calls or [] if one.function] != []
        again = [*USER, done.choices[0].message.model_dump(exclude_none=True), {"role": "tool", "content": "3"}]
        assert client.chat.completions.create(model="tiny", messages=again, max_tokens=1).choices
        if thinks:
            limited = client.chat.completions.create(
                model="tiny", messages=USER, tools=TOOLS, tool_choice="auto", extra_body={"thinking_budget": 4}
            )
            assert (limited.choices[0].message.model_extra or {})["reasoning_content"] == "Hm:"
            assert limited.choices[0].message.tool_calls
        body = {"prompt": "Hello", "max_tokens": 2, "model": "tiny"}
        assert client.completions.create(**body).choices
