"""The names of a model and of the server in requests, and the line of the log about a request."""

from __future__ import annotations

import http.client
import json
import logging
import re

import pytest

from llama.text import Llama

from .serving import Running, running

BODY = {"prompt": "hello", "max_tokens": 5, "temperature": 0, "ignore_eos": True}


def post(server: Running, model: str, host: str = "127.0.0.1") -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {"Content-Type": "application/json", "Host": host}
    connection.request("POST", "/v1/completions", json.dumps({**BODY, "model": model}), headers)
    response = connection.getresponse()
    response.read()
    return response.status


def test_a_model_has_several_names(tiny_llm: Llama) -> None:
    with running(tiny_llm) as server:
        server.server.aliases = ("gpt-4o", "default")
        assert [post(server, name) for name in ("tiny", "gpt-4o", "default", "other")] == [200, 200, 200, 404]
        client = server.client()
        assert [card.id for card in client.models.list()] == ["tiny", "gpt-4o", "default"]
        assert client.models.retrieve("default").id == "default"
        assert client.completions.create(model="default", prompt="a", max_tokens=1).model == "tiny"


def test_a_name_of_the_server_that_is_not_allowed_is_refused(tiny_llm: Llama) -> None:
    with running(tiny_llm, hosts=("llama.example.org",)) as server:
        hosts = ("127.0.0.1", "localhost", "llama.example.org", "example.org")
        assert [post(server, "tiny", host) for host in hosts] == [200, 200, 200, 400]


def test_the_log_has_the_tokens_and_the_speed(tiny_llm: Llama, caplog: pytest.LogCaptureFixture) -> None:
    with running(tiny_llm) as server, caplog.at_level(logging.INFO, "llama.server.app"):
        post(server, "tiny")
        post(server, "other")
    answered, refused = [record.getMessage() for record in caplog.records if "POST" in record.getMessage()]
    line = r"POST /v1/completions 200 (\d+\.\d\d) s, (\d+) prompt tokens, 5 new \((\d+\.\d) tok/s\)"
    assert (found := re.fullmatch(line, answered))
    assert int(found[2]) == len(tiny_llm.tokenizer.encode_prompt("hello"))
    assert 5 / (float(found[1]) + 0.01) <= float(found[3])
    assert re.fullmatch(r"POST /v1/completions 404 \d+\.\d\d s", refused)
