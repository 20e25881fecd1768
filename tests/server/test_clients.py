"""The official openai client against the server: each answer is the one that `Llama` gives."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import openai
import pytest
import requests
import torch
from starlette.testclient import TestClient

from llama.server.app import Server
from llama.server.limits import Limits
from llama.text import Llama
from tests.server.serving import Running, running

MESSAGES: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a llama?"}]


@pytest.fixture(scope="module")
def server(tiny_llm: Llama) -> Iterator[Running]:
    with running(tiny_llm) as found:
        yield found


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return server.client()


@pytest.mark.parametrize("begun", [[], [{"role": "assistant", "content": " the"}]])
@pytest.mark.parametrize("limit", [20, None])
def test_a_chat_answer_is_that_of_the_library(
    client: openai.OpenAI, tiny_llm: Llama, limit: int | None, begun: list[Any]
) -> None:
    """Its length is limited by the context if the request has no limit."""
    options: dict[str, Any] = {"temperature": 0.9, "top_p": 0.8, "seed": 5}
    messages = MESSAGES + begun
    found = client.chat.completions.create(model="tiny", messages=messages, max_tokens=limit, **options)
    expected = tiny_llm.chat(messages, max_new_tokens=limit or tiny_llm.model.max_seq_len, **options)
    assert found.choices[0].message.content == expected.text
    assert found.choices[0].message.role == "assistant"
    assert found.choices[0].finish_reason == expected.finish_reason
    assert found.object == "chat.completion"
    assert found.usage.completion_tokens == len(expected.tokens)
    assert found.usage.prompt_tokens == expected.stats.prompt_tokens


@pytest.mark.parametrize("n", [1, 3])
def test_the_parts_of_a_stream_joined_are_the_answer(client: openai.OpenAI, tiny_llm: Llama, n: int) -> None:
    options: dict[str, Any] = {"temperature": 1.2, "top_logprobs": 2}
    more = {"stream_options": {"include_usage": True}, "logprobs": True, "n": n, "seed": 7, **options}
    stream = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, max_tokens=25, **more)
    *chunks, last = stream
    expected = [tiny_llm.chat(MESSAGES, max_new_tokens=25, **options, seed=7 + i) for i in range(n)]
    for index, one in enumerate(expected):
        parts = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert "".join(part.delta.content or "" for part in parts) == one.text
        assert parts[-1].finish_reason == one.finish_reason
        entries = [entry for part in parts if part.logprobs for entry in part.logprobs.content]
        assert [entry.logprob for entry in entries] == pytest.approx(one.logprobs, abs=1e-4)
        for entry, top in zip(entries, one.top_logprobs, strict=True):
            found = [alternative.logprob for alternative in entry.top_logprobs]
            assert found == pytest.approx(list(top.values()), abs=1e-4)
            control = entry.token in tiny_llm.tokenizer.control  # it has no text
            text = "" if control else entry.token
            assert bytes(entry.bytes).decode(errors="replace") == text or text.startswith("bytes:")
    assert last.usage.completion_tokens == sum(len(one.tokens) for one in expected)
    assert last.usage.prompt_tokens == expected[0].stats.prompt_tokens


def test_completions_take_texts_and_ids(client: openai.OpenAI, tiny_llm: Llama) -> None:
    ids, once = tiny_llm.tokenizer.encode_prompt("Once upon"), "Once upon"
    prompts: list[tuple[Any, list[str]]] = [
        (once, [once]), (ids, [once]), ([once, "a time"], [once, "a time"]), ([ids, ids], [once, once])
    ]  # fmt: skip
    for prompt, texts in prompts:
        found = client.completions.create(model="tiny", prompt=prompt, max_tokens=9, temperature=0)
        expected = tiny_llm.generate(texts, max_new_tokens=9)
        assert [(choice.index, choice.text) for choice in found.choices] == [*enumerate(one.text for one in expected)]


def test_each_field_has_the_effect_of_the_librarys_option(client: openai.OpenAI, tiny_llm: Llama) -> None:
    free, id = tiny_llm.generate("abc", max_new_tokens=20), tiny_llm.tokenizer.encode("z")[-1]
    penalties = {"presence_penalty": 1.5, "frequency_penalty": 1.0, "repetition_penalty": 1.1}
    for options in (
        {"stop": [free.text[4:6]]},
        {"stop_token_ids": [free.tokens[3]], "min_tokens": 2},
        {"logit_bias": {id: 3.0}, **penalties},
        {"temperature": 0.9, "top_k": 7, "min_p": 0.01, "seed": 5, "ignore_eos": True},
    ):
        bias = {str(id): value for id, value in options.get("logit_bias", {}).items()}
        fields = {"temperature": 0, **options, "logit_bias": bias}
        found = client.completions.create(model="tiny", prompt="abc", max_tokens=20, extra_body=fields).choices[0]
        expected = tiny_llm.generate("abc", max_new_tokens=20, **options)
        assert (found.text, found.finish_reason) == (expected.text, expected.finish_reason)
        assert expected.tokens != free.tokens


@pytest.mark.parametrize("stream", [False, True])
def test_each_token_of_an_answer_has_one_log_probability(client: openai.OpenAI, tiny_llm: Llama, stream: bool) -> None:
    """A stop id has none, as no part of the answer: that of a stop token, or of a control token in `stop`."""
    free = tiny_llm.generate("abc", max_new_tokens=12)
    id = free.tokens[7]
    (name, control), *_ = tiny_llm.tokenizer.control.items()
    ends: list[dict[str, Any]] = [
        {"stop_token_ids": [id]},
        {"stop": [name], "logit_bias": {str(control): 100}},
        {"stop": [free.text[4:6]]},
        {"stop_token_ids": [free.tokens[0]]},
        {},
    ]
    chat: dict[str, Any] = {"messages": [*MESSAGES, {"role": "assistant", "content": "abc"}], "logprobs": True}
    for end in ends:
        for path, asked in (("completions", {"prompt": "abc", "logprobs": 0}), ("chat/completions", chat)):
            body = {"model": "tiny", **asked, "max_tokens": 12, "temperature": 0, **end, "stream": stream}
            body |= {"stream_options": {"include_usage": True}} if stream else {}
            answer = requests.post(f"{client.base_url}{path}", json=body, timeout=60).text
            parts = [json.loads(part[6:]) for part in answer.split("\n\n")[:-2]] if stream else [json.loads(answer)]
            found = [choice["logprobs"] for part in parts for choice in part["choices"] if choice["logprobs"]]
            scores = [score for one in found for score in one.get("token_logprobs", one.get("content"))]
            assert len(scores) == parts[-1]["usage"]["completion_tokens"]
            if path == "completions":
                options = {**end, "logit_bias": {control: 100}} if "logit_bias" in end else end
                expected = tiny_llm.generate("abc", max_new_tokens=12, logprobs=True, **options)
                assert scores == pytest.approx(expected.logprobs, abs=1e-4)
                assert len(scores) < 12 or not end


def test_echo_gives_the_log_probabilities_of_one_pass(client: openai.OpenAI, tiny_llm: Llama) -> None:
    ids = tiny_llm.tokenizer.encode_prompt("The quick brown fox jumps over é")
    options: dict[str, Any] = {"max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1}
    found = client.completions.create(model="tiny", prompt=ids, **options).choices[0]
    expected = tiny_llm.model(torch.tensor([ids]))[0, :-1, : tiny_llm.tokenizer.n_vocab].log_softmax(-1)
    first, *scores = found.logprobs.token_logprobs
    assert (first, len(scores)) == (None, len(ids))
    assert scores[:-1] == pytest.approx(expected.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].tolist(), abs=1e-4)
    best = [max(top.values()) for top in found.logprobs.top_logprobs[1 : len(ids)]]
    assert best == pytest.approx(expected.max(-1).values.tolist(), abs=1e-4)
    assert found.text.startswith(tiny_llm.tokenizer.decode(ids))


def test_sixteen_clients_at_once_get_the_answers_they_get_alone(server: Running, tiny_llm: Llama) -> None:
    rng = random.Random(3)

    def ask(number: int, messages: list[Any], limit: int, options: dict[str, Any]) -> str | None:
        options = {"model": "tiny", "messages": messages, "max_tokens": limit, **options}
        if number % 2:
            stream = server.client().chat.completions.create(**options, stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        return server.client().chat.completions.create(**options).choices[0].message.content

    jobs: list[Any] = []
    for i in range(16):
        last = [{"role": "assistant", "content": "x" * i}, {"role": "user", "content": "more " * (i % 5 + 1)}]
        options = rng.choice([{"temperature": 0}, {"temperature": 1.3, "seed": i}])
        jobs.append((i, [*MESSAGES, *last], rng.randint(1, 40), options))
    with ThreadPoolExecutor(16) as pool:
        found = pool.map(lambda job: ask(*job), jobs)
    for text, (_, messages, limit, options) in zip(found, jobs, strict=True):
        assert text == tiny_llm.chat(messages, max_new_tokens=limit, **options).text


def test_models_and_errors_are_what_the_client_expects(server: Running, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    assert requests.get(f"{server.url}/v1/models/", timeout=60).json()["data"][0]["id"] == "tiny"
    for path in ("/api/tags", "/api/version", "/v1/embeddings"):  # Ollama's, and what this server has not
        error = requests.get(server.url + path, timeout=60).json()["error"]["message"]
        assert error.endswith(f"the API is OpenAI's, with the base URL {server.url}/v1")
    with pytest.raises(openai.NotFoundError, match="unknown model"):
        client.models.retrieve("org/other")
    with pytest.raises(openai.NotFoundError, match="unknown model"):
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="must hold prompt and answer"):
        client.completions.create(model="tiny", prompt=[5] * 5000)
    wrong = {"chat_template_kwargs": {"messages": []}}
    with pytest.raises(openai.BadRequestError, match="is no name"):
        client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body=wrong)


@pytest.mark.parametrize("origins", [[], ["https://a.example"]])
def test_web_pages_of_the_allowed_origins_may_read_the_answers(tiny_llm: Llama, origins: list[str]) -> None:
    server = Server(cast(Any, SimpleNamespace(llm=tiny_llm, limits=Limits())), "tiny", None)
    asks = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "content-type"}  # fmt: skip
    pages = TestClient(server.app(["testserver"], origins))
    answer = pages.options("/v1/chat/completions", headers=asks)
    assert answer.headers.get("access-control-allow-origin") == (origins[0] if origins else None)
    other = pages.options("/v1/chat/completions", headers={**asks, "Origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers
