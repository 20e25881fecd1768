"""The official openai client against the server: each answer is the one that `Llama` gives."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from typing import Any, cast

import openai
import pytest
import torch
from starlette.testclient import TestClient

from llama.chat import encode_chat
from llama.server.app import Server
from llama.server.connections import Limits
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


def test_a_chat_answer_is_that_of_the_library(client: openai.OpenAI, tiny_llm: Llama) -> None:
    options: dict[str, Any] = {"temperature": 0.9, "top_p": 0.8, "seed": 5}
    found = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=20, **options)
    expected = tiny_llm.chat(MESSAGES, max_new_tokens=20, **options)
    assert found.choices[0].message.content == expected.text
    assert found.choices[0].message.role == "assistant"
    assert found.choices[0].finish_reason == expected.finish_reason
    assert found.object == "chat.completion"
    assert found.usage is not None
    assert found.usage.completion_tokens == len(expected.tokens)
    assert found.usage.prompt_tokens == expected.stats.prompt_tokens


@pytest.mark.parametrize("n", [1, 3])
def test_the_parts_of_a_stream_joined_are_the_answer(client: openai.OpenAI, tiny_llm: Llama, n: int) -> None:
    options: dict[str, Any] = {"temperature": 1.2, "seed": 7}
    stream = client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=25,
        n=n,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=2,
        **options,
    )
    texts, reasons, scores, usage = [""] * n, [None] * n, [[] for _ in range(n)], None  # type: ignore[var-annotated]
    for chunk in stream:
        if not chunk.choices:
            usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]  # type: ignore[call-overload]
            scores[choice.index] += (choice.logprobs and choice.logprobs.content) or []
    expected = tiny_llm.chat(MESSAGES, max_new_tokens=25, n=n, top_logprobs=2, **options)
    assert texts == [one.text for one in expected]
    assert reasons == [one.finish_reason for one in expected]
    for found, one in zip(scores, expected, strict=True):
        assert [entry.logprob for entry in found] == pytest.approx(one.logprobs, abs=1e-4)
        for entry, top in zip(found, one.top_logprobs or [], strict=True):
            assert [alternative.logprob for alternative in entry.top_logprobs] == pytest.approx(
                list(top.values()), abs=1e-4
            )
            assert bytes(entry.bytes).decode(errors="replace") == entry.token or entry.token.startswith("bytes:")
    assert usage is not None
    assert usage.completion_tokens == sum(len(one.tokens) for one in expected)
    assert usage.prompt_tokens == expected[0].stats.prompt_tokens


def test_completions_take_texts_and_ids(client: openai.OpenAI, tiny_llm: Llama) -> None:
    ids = tiny_llm.tokenizer.encode_prompt("Once upon")
    for prompt in ("Once upon", ids, ["Once upon", "a time"], [ids, ids]):
        found = client.completions.create(model="tiny", prompt=prompt, max_tokens=9, temperature=0)  # type: ignore[arg-type]
        texts = prompt if isinstance(prompt, list) and isinstance(prompt[0], str) else ["Once upon"]
        texts = texts * 2 if prompt == [ids, ids] else texts
        assert [choice.text for choice in found.choices] == [
            tiny_llm.generate(text, max_new_tokens=9).text  # type: ignore[call-overload]
            for text in texts
        ]
        assert [choice.index for choice in found.choices] == list(range(len(texts)))


def test_stop_bias_and_penalties_reach_the_model(client: openai.OpenAI, tiny_llm: Llama) -> None:
    free = tiny_llm.generate("abc", max_new_tokens=20)
    stop = free.text[4:6]
    found = client.completions.create(model="tiny", prompt="abc", max_tokens=20, temperature=0, stop=[stop])
    assert found.choices[0].text == free.text[: free.text.index(stop)]
    assert found.choices[0].finish_reason == "stop"
    options: dict[str, Any] = {"presence_penalty": 1.5, "frequency_penalty": 1.0}
    bias = {tiny_llm.tokenizer.encode("z")[-1]: 3.0}
    found = client.completions.create(
        model="tiny",
        prompt="abc",
        max_tokens=20,
        temperature=0,
        logit_bias={str(id): value for id, value in bias.items()},  # type: ignore[dict-item, arg-type, misc]
        extra_body={"repetition_penalty": 1.1},
        **options,
    )
    expected = tiny_llm.generate("abc", max_new_tokens=20, repetition_penalty=1.1, logit_bias=bias, **options)
    assert found.choices[0].text == expected.text != free.text


def test_echo_gives_the_log_probabilities_of_one_pass(client: openai.OpenAI, tiny_llm: Llama) -> None:
    ids = tiny_llm.tokenizer.encode_prompt("The quick brown fox jumps over é")
    found = client.completions.create(
        model="tiny", prompt=ids, max_tokens=1, temperature=0, echo=True, logprobs=1
    ).choices[0]
    expected = tiny_llm.model(torch.tensor([ids]))[0, :, : tiny_llm.tokenizer.n_vocab].log_softmax(-1)
    assert found.logprobs is not None
    assert found.logprobs.token_logprobs is not None
    assert found.logprobs.top_logprobs is not None
    assert found.logprobs.token_logprobs[0] is None
    assert found.logprobs.token_logprobs[1 : len(ids)] == pytest.approx(
        [float(expected[at, id]) for at, id in enumerate(ids[1:])], abs=1e-4
    )
    assert len(found.logprobs.token_logprobs) == len(ids) + 1
    for at, top in enumerate(found.logprobs.top_logprobs[1 : len(ids)]):
        assert max(top.values()) == pytest.approx(float(expected[at].max()), abs=1e-4)
    assert found.text.startswith(tiny_llm.tokenizer.decode(ids))


def test_sixteen_clients_at_once_get_the_answers_they_get_alone(server: Running, tiny_llm: Llama) -> None:
    rng, found, jobs = random.Random(3), {}, []
    for i in range(16):
        messages = [
            *MESSAGES,
            {"role": "assistant", "content": "x" * i},
            {"role": "user", "content": "more " * (i % 5 + 1)},
        ]
        options: dict[str, Any] = rng.choice([{"temperature": 0}, {"temperature": 1.3, "seed": i}])
        jobs.append((i, messages, options, rng.randint(1, 40)))

    def ask(number: int, messages: list[Any], options: dict[str, Any], limit: int) -> None:
        client = server.client()
        if number % 2:
            stream = client.chat.completions.create(
                model="tiny", messages=messages, max_tokens=limit, stream=True, **options
            )
            found[number] = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        else:
            done = client.chat.completions.create(model="tiny", messages=messages, max_tokens=limit, **options)
            found[number] = done.choices[0].message.content

    threads = [threading.Thread(target=ask, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, messages, options, limit in jobs:
        assert found[number] == tiny_llm.chat(messages, max_new_tokens=limit, **options).text


def test_the_asynchronous_client(server: Running, tiny_llm: Llama) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:

            async def one(limit: int) -> str:
                stream = await client.chat.completions.create(
                    model="tiny", messages=MESSAGES, max_tokens=limit, temperature=0, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            return await asyncio.gather(*(one(limit) for limit in (3, 9, 30)))

    assert asyncio.run(ask()) == [tiny_llm.chat(MESSAGES, max_new_tokens=limit).text for limit in (3, 9, 30)]


def test_the_default_length_of_a_chat_answer_is_the_context(client: openai.OpenAI, tiny_llm: Llama) -> None:
    found = client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0)
    prompt = encode_chat(tiny_llm.tokenizer, tiny_llm.chat_template, MESSAGES)
    assert found.usage is not None
    ended = found.choices[0].finish_reason == "stop"
    assert ended or found.usage.total_tokens == tiny_llm.model.max_seq_len
    assert found.usage.prompt_tokens == len(prompt)


def test_parts_of_content_and_nulls_are_read(client: openai.OpenAI, tiny_llm: Llama) -> None:
    parts: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "a llama?"}]}
    ]
    found = client.chat.completions.create(model="tiny", messages=parts, max_tokens=8, temperature=0)
    plain = [{"role": "user", "content": "What is a llama?"}]
    assert found.choices[0].message.content == tiny_llm.chat(plain, max_new_tokens=8).text
    again = [*plain, found.choices[0].message, {"role": "user", "content": "And?"}]
    client.chat.completions.create(model="tiny", messages=again, max_tokens=2)  # type: ignore[arg-type]


def test_models_and_errors_are_what_the_client_expects(server: Running, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="unknown model"):
        client.models.retrieve("org/other")
    with pytest.raises(openai.NotFoundError, match="unknown model"):
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="must hold prompt and answer"):
        client.completions.create(model="tiny", prompt=[5] * 5000)


def test_a_key_is_required_if_there_is_one(tiny_llm: Llama) -> None:
    with running(tiny_llm, key="s3cret") as server:
        with pytest.raises(openai.AuthenticationError):
            server.client("wrong").models.list()
        assert server.client("s3cret").models.list().data[0].id == "tiny"


def test_a_full_queue_is_429_with_retry_after(tiny_llm: Llama) -> None:
    slow = tiny_llm.model.layers[0].register_forward_pre_hook(lambda *_: time.sleep(0.01))
    with running(tiny_llm, slots=1, waiting=2) as server:
        client = server.client()
        endless: Any = {"ignore_eos": True}
        stream = client.completions.create(model="tiny", prompt="abc", max_tokens=200, stream=True, extra_body=endless)
        next(iter(stream))
        waiting = client.completions.create(model="tiny", prompt="abc", n=2, stream=True)
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model="tiny", prompt="abc")
        assert int(refused.value.response.headers["Retry-After"]) > 0
        stream.close()
        waiting.close()
        slow.remove()
        with pytest.raises(openai.BadRequestError, match="at most 2"):
            client.completions.create(model="tiny", prompt="abc", n=3)
        assert client.completions.create(model="tiny", prompt="abc", n=2, max_tokens=1).choices[1].index == 1


def test_fields_that_other_servers_have(client: openai.OpenAI, tiny_llm: Llama) -> None:
    """Each has the effect of the library's option."""
    begun: list[Any] = [*MESSAGES, {"role": "assistant", "content": " the"}]
    options: dict[str, Any] = {"ignore_eos": True, "stop_token_ids": [5], "min_tokens": 2}
    for messages in (MESSAGES, begun):
        found = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=8, temperature=0, extra_body=options
        )
        expected = tiny_llm.chat(messages, max_new_tokens=8, temperature=0, **options)
        assert found.choices[0].message.content == expected.text
    with pytest.raises(openai.BadRequestError, match="is no name"):
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, extra_body={"chat_template_kwargs": {"messages": []}}
        )


@pytest.mark.parametrize("origins", [[], ["https://a.example"]])
def test_web_pages_of_the_allowed_origins_may_read_the_answers(tiny_llm: Llama, origins: list[str]) -> None:
    server = Server(tiny_llm, cast(Any, None), "tiny", None, Limits())
    asks = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "content-type"}  # fmt: skip
    pages = TestClient(server.app(["testserver"], origins))
    answer = pages.options("/v1/chat/completions", headers=asks)
    assert answer.headers.get("access-control-allow-origin") == (origins[0] if origins else None)
    other = pages.options("/v1/chat/completions", headers={**asks, "Origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers
