"""Text from ids: complete characters, stop strings, sessions."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaForCausalLM
from transformers.utils import get_json_schema

import llama
from llama.chat.functions import schema_of
from llama.cli.common.batch import parse as parse_line
from llama.errors import LlamaError, UsageError
from llama.sampling import OPTIONS as ANSWER_OPTIONS
from llama.server.requests import parse_chat, parse_text
from llama.text import Llama, Session, StopText
from llama.tokenizer import Decoder
from llama.tokenizer.gguf import from_metadata

from . import tiny

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = {"temperature": 3.0, "seed": 5, "max_new_tokens": 60}


def test_a_suffix_makes_the_prompt_of_infilling(tiny_llm: Llama) -> None:
    metadata = tiny.byte_vocabulary()
    last = len(metadata["tokenizer.ggml.tokens"]) - 1
    fim = {f"tokenizer.ggml.fim_{part}_token_id": last - i for i, part in enumerate(("pre", "suf", "mid"))}
    tokenizer = from_metadata({**metadata, **fim}, "x")
    llm = Llama(tiny_llm.model, tokenizer)
    ids = [last, *tokenizer.encode("ab"), last - 1, *tokenizer.encode("c"), last - 2]
    (*_, piece) = llm.stream_ids(ids, **OPTIONS)
    assert piece.completion is not None
    assert llm.generate("ab", suffix="c", **OPTIONS).tokens == piece.completion.tokens
    assert [one.tokens for one in llm.generate(["ab"], suffix="c", **OPTIONS)] == [piece.completion.tokens]
    body = {"prompt": "ab", "suffix": "c", "max_tokens": 5}
    assert [job.ids for job in parse_text(body, llm, "x").jobs] == [ids]
    with pytest.raises(LlamaError, match="the vocabulary has no infill ids"):
        tiny_llm.generate("ab", suffix="c")


def test_joined_pieces_are_the_text_and_the_decoded_ids(tiny_llm: Llama) -> None:
    for seed in range(10):
        pieces = list(tiny_llm.stream("hello", **{**OPTIONS, "seed": seed}))
        completion = pieces[-1].completion
        assert completion is not None
        assert all(piece.completion is None for piece in pieces[:-1])
        assert "".join(map(str, pieces)) == str(completion) == completion.text
        assert completion.text == tiny_llm.tokenizer.decode(completion.tokens)


@given(st.lists(st.integers(0, 265), max_size=40))
def test_decoding_one_id_at_a_time_equals_decoding_all_bytes(ids: list[int]) -> None:
    from llama.tokenizer.gguf import from_metadata

    tokenizer = from_metadata(tiny.byte_vocabulary(), "tiny")
    decoder = Decoder(tokenizer)
    streamed = "".join([decoder.feed(id) for id in ids]) + decoder.end()
    assert streamed == b"".join(tokenizer.token_bytes(id) for id in ids).decode("utf-8", "replace")


# --------------------------------------------------------------------------------------------------- stop strings
def cut(pieces: list[str], stops: list[str]) -> tuple[str, bool, list[str]]:
    """Return the text before the first stop string, whether one was found, and the text returned for each piece."""
    stop = StopText(stops)
    returned = []
    for piece in pieces:
        returned.append(stop.feed(piece))
        if stop.found:
            break
    if not stop.found:
        returned.append(stop.end())  # may end at a stop string that waited for an earlier, longer one
    return "".join(returned), stop.found, returned


@given(
    st.text("ab🙂\n", max_size=30),
    st.lists(st.text("ab🙂\n", min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(0, 30), max_size=8),
)
def test_text_is_cut_at_the_first_stop_string_for_any_division_into_pieces(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    edges = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges)]
    before, found, _ = cut(pieces, stops)
    first = min((text.find(stop) for stop in stops if stop in text), default=len(text))
    assert before == text[:first]
    assert found == any(stop in text for stop in stops)


def test_only_the_possible_beginning_of_a_stop_string_is_delayed() -> None:
    _, found, returned = cut(["one E", "N", "x two EN", "D three"], ["END"])
    assert returned == ["one ", "", "ENx two ", ""]
    assert found


def test_a_stop_string_may_span_tokens(tiny_llm: Llama) -> None:
    complete = tiny_llm.generate("hello", **OPTIONS)
    middle = complete.text[10:14]
    stopped = tiny_llm.generate("hello", **OPTIONS, stop=[middle])
    assert stopped.text == complete.text[: complete.text.index(middle)]
    assert stopped.finish_reason == "stop"
    assert stopped.tokens == complete.tokens[: len(stopped.tokens)]


def test_a_stop_string_that_names_a_control_token_stops_at_its_id(tiny_llm: Llama) -> None:
    name, id = next(
        (name, id) for name, id in tiny_llm.tokenizer.control.items() if id not in tiny_llm.tokenizer.stop_ids
    )
    options: dict[str, object] = {"max_new_tokens": 3, "logit_bias": {id: 1000.0}}
    assert tiny_llm.generate("x", **options).tokens == [id] * 3
    for answer in (tiny_llm.generate("x", stop=name, **options), tiny_llm.generate(["x"], stop=name, **options)[0]):
        assert (answer.tokens, answer.text, answer.finish_reason) == ([], "", "stop")


# -------------------------------------------------------------------------------------------------------- the API


@pytest.mark.parametrize("options", [{}, {"temperature": 0.02, "seed": 1}])
def test_an_answer_has_at_least_min_tokens_and_ends_at_its_own_stop_ids(
    tiny_llm: Llama, options: dict[str, Any]
) -> None:
    """Before min_tokens, each token is the choice among all ids that do not end the answer."""
    free = tiny_llm.generate("hello", max_new_tokens=12, ignore_eos=True, **options)
    assert len(free.tokens) == 12
    assert not tiny_llm.tokenizer.stop_ids & {*free.tokens}
    first = max(map(free.tokens.index, free.tokens[:8]))
    last = free.tokens[first]
    stopped = tiny_llm.generate("hello", max_new_tokens=12, ignore_eos=True, **options, stop_token_ids=[10**6])
    assert stopped.tokens == free.tokens
    ended = tiny_llm.generate("hello", max_new_tokens=12, stop_token_ids=[last], **options)
    assert ended.tokens == free.tokens[:first]
    assert ended.finish_reason == "stop"
    again = tiny_llm.generate("hello", max_new_tokens=12, stop_token_ids=[last], min_tokens=first, **options)
    assert again.tokens == ended.tokens
    longer = tiny_llm.generate("hello", max_new_tokens=12, stop_token_ids=[last], min_tokens=first + 2, **options)
    assert longer.tokens[:first] == free.tokens[:first]
    assert len(longer.tokens) >= first + 2
    assert last not in longer.tokens[: first + 2]
    several = tiny_llm.generate(["hello", "the"], max_new_tokens=12, ignore_eos=True, **options)
    assert several[0].tokens == free.tokens
    found = tiny_llm.generate("hello", max_new_tokens=12, min_tokens=5, regex="a+", **options)
    assert len(found.tokens) >= 5
    assert set(found.text) == {"a"}


def test_a_random_seed_is_reported_and_reproduces_the_answer(tiny_llm: Llama) -> None:
    first = tiny_llm.generate("hello", temperature=2.0, max_new_tokens=10)
    again = tiny_llm.generate("hello", temperature=2.0, max_new_tokens=10, seed=first.stats.seed)
    assert first.tokens == again.tokens


# ------------------------------------------------------------------------------------------------------- sessions


def test_a_session_can_be_continued_after_its_stream_is_closed(tiny_llm: Llama) -> None:
    session = Session()
    messages = [{"role": "user", "content": "hello"}]
    stream = tiny_llm.stream_chat(messages, session=session, max_new_tokens=30, temperature=3.0, seed=1)
    next(stream)
    stream.close()
    messages = [{"role": "user", "content": "hell"}]
    resumed = list(tiny_llm.stream_chat(messages, session=session, max_new_tokens=8))[-1].completion
    assert resumed is not None
    assert resumed.stats.cached_tokens > 0
    assert resumed.tokens == tiny_llm.chat(messages, max_new_tokens=8).tokens


def test_stop_strings_are_limited_since_each_token_is_compared_with_them(tiny_llm: Llama) -> None:
    for stop in (["x" * 1001], ["x"] * 257, "", ["a", ""], [5], 5):
        with pytest.raises(UsageError, match="at most 64 stop strings of 1 to 1000 characters"):
            tiny_llm.generate("a", max_new_tokens=1, stop=stop)


def test_an_unknown_option_is_an_error_that_names_it(tiny_llm: Llama) -> None:
    for name in ("max_tokens", "tools"):
        with pytest.raises(UsageError, match=f"^unknown option '{name}'"):
            tiny_llm.generate("a", **{name: 1})
    with pytest.raises(UsageError, match="schema and regex can't be combined"):  # at the call, not at the first piece
        tiny_llm.stream("a", regex="a", schema={})
    for function in (llama.load, llama.load_model):  # before the path is looked at
        with pytest.raises(UsageError, match=r"^unknown option 'quantise'; did you mean 'quantize'\?"):
            function("nowhere", quantise="int8")


# Each option of an answer with a value that is not its default
VALUES: dict[str, Any] = {
    **{"max_new_tokens": 3, "temperature": 0.5, "top_k": 5, "top_p": 0.5, "min_p": 0.25, "repetition_penalty": 1.5},
    **{"presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {5: -100.0}, "seed": 7, "stop": ("a",)},
    **{"processors": [lambda ids, logits: logits], "stop_token_ids": (5,), "min_tokens": 2, "ignore_eos": True},
    **{"schema": {"type": "integer"}, "regex": "[0-9]", "grammar": 'start: "a"', "thinking_budget": 4},
    **{"logprobs": True, "top_logprobs": 2, "prompt_logprobs": True},
}
FUNCTIONS = "a function is not JSON"
KEYS = "all answers of a file have the same keys: --logprobs"
NOT_IN_A_LINE = {"processors": FUNCTIONS, "logprobs": KEYS, "top_logprobs": KEYS, "prompt_logprobs": KEYS}
NOT_IN_A_BODY = dict.fromkeys(("regex", "grammar"), "OpenAI's API has only JSON schemas") | {"processors": FUNCTIONS}
# What OpenAI's API has in place of an option
IN_A_BODY: dict[str, dict[str, Any]] = {
    "max_new_tokens": {"max_tokens": 3},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"schema": VALUES["schema"]}}},
    "logprobs": {"logprobs": True},
    "top_logprobs": {"logprobs": True, "top_logprobs": 2},
    "prompt_logprobs": {"logprobs": 0, "echo": True},
}


@pytest.mark.parametrize("name", ANSWER_OPTIONS)
def test_an_option_is_the_same_in_python_in_a_line_of_a_batch_and_in_a_body(name: str, tiny_llm: Llama) -> None:
    """Each interface has each option of SamplingParams, unless a table states the reason."""
    value, llm = VALUES[name], Llama(tiny_llm.model, tiny_llm.tokenizer, f"{tiny_llm.chat_template}{{# </think> #}}")

    def is_set(ids: list[int], options: dict[str, Any]) -> bool:
        (prepared,) = llm.prepare(ids, {"thoughts": llm.thoughts(ids), **options})
        return bool(getattr(prepared.params, name) == value)

    assert is_set([5], {name: value})
    assert not is_set([5], {"temperature": 0.75, "seed": 1})
    line = json.loads(json.dumps({"prompt": "a", name: None if name in NOT_IN_A_LINE else value}))
    if name in NOT_IN_A_LINE:
        with pytest.raises(UsageError, match=f"^unknown key '{name}'"):
            parse_line(line, 1, None)
    else:
        assert is_set([5], parse_line(line, 1, None).options({"temperature": 0.75, "seed": 1}, raw=True))
    text: dict[str, Any]
    parse_body, text = parse_chat, {"messages": [{"role": "user", "content": "a"}]}
    if name == "prompt_logprobs":
        parse_body, text = parse_text, {"prompt": "a"}
    body = json.loads(json.dumps({**text, **IN_A_BODY.get(name, {name: None if name in NOT_IN_A_BODY else value})}))
    if name in NOT_IN_A_BODY:
        with pytest.raises(UsageError, match=f"^unknown key '{name}'"):
            parse_body(body, llm, "tiny")
    else:
        assert getattr(parse_body(body, llm, "tiny").jobs[0].params, name) == value


FREQS, HEADS = llama.precompute_freqs_cis(16, 5), torch.ones(2, 5, 4, 16)
TENSOR = "must be a tensor of int64, as torch"
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0}
# A call with a wrong argument -> what its message says
WRONG: dict[str, tuple[Callable[[Llama], object], str]] = {
    "tokens as a list": (lambda llm: llm.model([1, 2]), TENSOR),
    "tokens as text": (lambda llm: llm.model("hello"), TENSOR),
    "tokens as floats": (lambda llm: llm.model(torch.ones(1, 2)), TENSOR),
    "tokens as booleans": (lambda llm: llm.model(torch.ones(1, 2).bool()), TENSOR),
    "tokens in 16 bits": (lambda llm: llm.model(torch.ones(1, 2).short()), TENSOR),
    "tokens of numpy": (lambda llm: llm.model(torch.ones(1, 2).long().numpy()), TENSOR),
    "tokens without a batch": (lambda llm: llm.model(torch.tensor([1, 2])), "tokens must be .B, T., got .2,"),
    "positions as a list": (lambda llm: llm.model(torch.tensor([[1, 2]]), [0, 1]), f"positions {TENSOR}"),
    "positions as an integer": (lambda llm: llm.model(torch.tensor([[1]]), 0), f"positions {TENSOR}"),
    "a cache of transformers": (
        lambda llm: llm.model(torch.tensor([[1]]), cache={}),
        "cache must be a KVCache, got {}",
    ),
    "the length of a cache": (lambda llm: llm.model.new_cache("5"), "max_len of a KV cache must be an integer"),
    "fixed": (lambda llm: llm.model.new_cache(5, fixed="no"), "fixed must be true or false, got 'no'"),
    "processors": (lambda llm: llm.generate("a", processors=None, min_tokens=2), "processors must be a list of functi"),
    "processor": (lambda llm: llm.generate("a", processors=print, min_tokens=2), "processors must be a list of functi"),
    "stop_token_ids": (lambda llm: llm.generate("a", stop_token_ids=0), "stop_token_ids must be a list of token ids"),
    "logit_bias": (lambda llm: llm.generate("a", logit_bias=[1]), "logit_bias must be a mapping from ids to numbers"),
    "progress": (lambda llm: llm.generate("a", progress=3), "progress must be a function, got 3"),
    "progress of a list": (lambda llm: llm.generate(["a"], progress=3), "progress must be a function, got 3"),
    "parse_special": (lambda llm: llm.generate("a", parse_special="no"), "parse_special must be true or false"),
    "session": (lambda llm: llm.generate("a", session={}), "session must be a Session, got {}"),
    "ids": (lambda llm: llm.stream_ids(None), "token ids must be a list of integers, got None"),
    "template options": (lambda llm: llm.chat("a", template_options="x"), "template_options must be a mapping"),
    "a template option": (lambda llm: llm.chat("a", template_options={5: 1}), "5 is no name"),
    "an id to decode": (lambda llm: llm.tokenizer.decode(5), "token ids must be a list of integers, got 5"),
    "no ids to decode": (lambda llm: llm.tokenizer.decode(None), "token ids must be a list of integers, got None"),
    "bos": (lambda llm: llm.tokenizer.encode("a", bos="no"), "bos must be true or false, got 'no'"),
    "eos": (lambda llm: llm.tokenizer.encode("a", eos=None), "eos must be true or false, got None"),
    "a scaling by name": (lambda llm: llama.inverse_frequencies(16, scaling="yarn"), "a mapping with a rope_type"),
    "seq_len": (lambda llm: llama.inverse_frequencies(16, scaling=DYNAMIC, seq_len="5"), "seq_len must be an integer"),
    "max_seq_len": (lambda llm: llama.inverse_frequencies(16, max_seq_len=0), "max_seq_len must be an integer of at"),
    "no positions": (lambda llm: llama.precompute_freqs_cis(16, -5), "number of positions, must be an integer"),
    "half a position": (lambda llm: llama.precompute_freqs_cis(16, 5.5), "number of positions, must be an integer"),
    "q as a list": (lambda llm: llama.apply_rotary_emb([1], HEADS, FREQS), "expected float numbers, got .1."),
    "q as integers": (lambda llm: llama.apply_rotary_emb(HEADS.long(), HEADS, FREQS), "expected float numbers"),
    "no k": (lambda llm: llama.apply_rotary_emb(HEADS, None, FREQS), "expected float numbers, got None"),
    "no batch": (lambda llm: llama.apply_rotary_emb(HEADS[0], HEADS[0], FREQS), "expected q"),
    "real freqs_cis": (lambda llm: llama.apply_rotary_emb(HEADS, HEADS, FREQS.real), "expected complex numbers"),
    "no freqs_cis": (lambda llm: llama.apply_rotary_emb(HEADS, HEADS, None), "expected complex numbers, got None"),
    "freqs_cis of 3 rows": (lambda llm: llama.apply_rotary_emb(HEADS, HEADS, FREQS.expand(3, 5, 8)), "a row of 8"),
    "sin": (lambda llm: llama.apply_rotary_emb_real(HEADS, HEADS, FREQS.real, FREQS.imag[:3]), "a row of 8 for each"),
    "cos": (lambda llm: llama.apply_rotary_pos_emb(HEADS, HEADS, 1, 2), "expected float numbers, got 1"),
    "unsqueeze_dim": (lambda llm: llama.apply_rotary_pos_emb(HEADS, HEADS, HEADS, HEADS, 3), "unsqueeze_dim must be"),
    "an odd dimension": (lambda llm: llama.rotate_half(torch.ones(3)), "an even D, got Tensor .3,"),
    "half of a list": (lambda llm: llama.rotate_half([1, 2]), "an even D, got .1, 2."),
    "messages": (lambda llm: llm.stream([{"role": "user"}]), "must be a string .chat and stream_chat take messages."),
    "check_memory": (lambda llm: llama.load("nowhere", check_memory="no"), "check_memory must be true or false"),
    "fast": (lambda llm: llama.load_model("nowhere", fast=None), "fast must be true or false, got None"),
    "adapters": (lambda llm: llama.load("nowhere", adapters=5), "adapters must be a path, "),
    "no adapters": (lambda llm: llama.load_model("nowhere", adapters=None), "adapters must be a path, "),
    "tokenizer": (lambda llm: llama.load("nowhere", tokenizer=5), "tokenizer must be a path, got 5"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_an_error_that_names_it(name: str, tiny_llm: Llama) -> None:
    call, message = WRONG[name]
    with pytest.raises(LlamaError, match=message):
        call(tiny_llm)


def test_wrong_options_of_a_load_are_errors_before_a_weight_is_read(tiny_gguf: Path) -> None:
    wrong: dict[str, tuple[Any, str]] = {
        "dtype": (["float32"], "unknown dtype"),
        "device": ([], "unknown device ''"),
        "tokens": ("3", "tokens must be an integer of at least 1, got '3'"),
        "rope_scaling": ("yarn", "rope scaling 'yarn'"),
    }
    for name, (value, message) in wrong.items():
        with pytest.raises(UsageError, match=message):
            llama.load(tiny_gguf, **{name: value})


def test_float16_on_a_cpu_is_loaded_with_a_warning(tiny_gguf: Path, caplog: pytest.LogCaptureFixture) -> None:
    for dtype in ("bfloat16", "float32", "float16"):
        assert not caplog.records, dtype
        llama.load(tiny_gguf, device="cpu", dtype=dtype)
    (record,) = caplog.records
    assert record.getMessage().endswith("float16 is slow on a CPU; use dtype='bfloat16' (--dtype bfloat16)")


# ------------------------------------------------------------------------------------------- as a person would try it
def test_a_saved_model_has_equal_logits_here_and_in_transformers(tiny_gguf: Path, tmp_path: Path) -> None:
    llm, tokens = llama.load(tiny_gguf, dtype="float32", rope="half"), torch.tensor([[5, 6, 7, 8]])
    llm.model.norm.weight[3] += 1
    llm.save(tmp_path / "saved")
    again, theirs = (
        llama.load(tmp_path / "saved", dtype="float32"),
        LlamaForCausalLM.from_pretrained(tmp_path / "saved"),
    )
    torch.testing.assert_close(again.model(tokens), llm.model(tokens), rtol=0, atol=1e-5)
    torch.testing.assert_close(theirs(tokens).logits, llm.model(tokens), rtol=0, atol=1e-4)
    assert again.tokenizer.encode("hello the") == llm.tokenizer.encode("hello the")
    assert again.chat("hello", max_new_tokens=5).tokens == llm.chat("hello", max_new_tokens=5).tokens
    with pytest.raises(UsageError, match="does not exist yet"):
        llm.save(tmp_path / "saved")


def test_a_text_is_a_message_and_a_list_reports_its_progress(tiny_llm: Llama) -> None:
    assert (
        tiny_llm.chat("hello", **OPTIONS).tokens
        == tiny_llm.chat([{"role": "user", "content": "hello"}], **OPTIONS).tokens
    )
    calls: list[tuple[int, int]] = []
    tiny_llm.generate(["a", "b", "c"], max_new_tokens=2, progress=lambda *call: calls.append(call))
    assert calls == [(1, 3), (2, 3), (3, 3)]


def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C", at: list[float] | None = None) -> str:
    """Forecast the weather.

    Args:
        city: the name of the city
        days: number of days
        unit: of the temperature
        at: hours
    """
    return f"{city} {days} {unit} {at}"


def convert(unit: Literal["C", "F"]) -> None:
    """Convert to a unit."""


def test_a_function_is_a_tool_with_the_schema_of_transformers(tiny_llm: Llama) -> None:
    expected = get_json_schema(weather)
    expected["function"].pop("return", None)
    expected["function"]["parameters"]["additionalProperties"] = False
    assert schema_of(weather) == expected
    named = {"type": "function", "function": {"name": "convert"}}
    for choice, tools in (("required", [convert]), ("convert", [weather, convert]), (named, [weather, convert])):
        call = json.loads(tiny_llm.chat("hello", tools=tools, tool_choice=choice).text)
        assert call["name"] == "convert"
        assert call["parameters"]["unit"] in ("C", "F")
    free = tiny_llm.chat("hello", max_new_tokens=5)
    assert tiny_llm.chat("hello", tools=[weather], tool_choice="none", max_new_tokens=5).tokens == free.tokens
    with pytest.raises(UsageError, match="tool_choice must be"):
        tiny_llm.chat("hello", tools=[weather], tool_choice="other")
    with pytest.raises(UsageError, match="has no JSON schema"):
        tiny_llm.chat("hello", tools=[lambda x: x, test_a_function_is_a_tool_with_the_schema_of_transformers])
