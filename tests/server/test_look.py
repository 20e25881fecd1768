"""Looks into answers: each number equals one that is computed another way, and other clients notice nothing."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import torch

from llama import loader
from llama.generate import generate
from llama.generation import batch
from llama.generation.batch import Batch
from llama.generation.structured import compile_grammar
from llama.inside.hooks import Function, Place, activations, patch
from llama.inside.intervene import ablated
from llama.inside.jacobian import JacobianLens
from llama.inside.patching import patching_grid
from llama.sampling import SamplingParams, choose, random_generator
from llama.server.app import PAGE
from llama.server.engine import Look
from llama.server.look import Looks
from llama.system.memory import Room
from llama.text import Llama
from tests.server.serving import Running, running

from ..patience import PATIENCE

pytestmark = pytest.mark.usefixtures("one_thread")
MESSAGES: list[Any] = [{"role": "user", "content": "What is a llama?"}]
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 27]}}, "required": ["n"], "additionalProperties": False}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def server(tiny_llm: Llama) -> Iterator[Running]:
    with running(tiny_llm) as found:
        yield found


def post(server: Running, path: str, **body: Any) -> requests.Response:
    return requests.post(server.url + path, json=body, timeout=PATIENCE)


def answer(server: Running, **body: Any) -> tuple[list[int], list[dict[str, Any]], Any]:
    """The ids of the prompt, the tokens, and how the answer ended."""
    response = post(server, "/look/answer", **body)
    assert response.status_code == 200, response.text
    events = [json.loads(line[6:]) for line in response.text.split("\n\n") if line]
    (prompt,) = [[one["id"] for one in event["prompt"]] for event in events if "prompt" in event]
    return prompt, [event for event in events if "top" in event], events[-1].get("end", events[-1])


def ids_of(tokens: list[dict[str, Any]]) -> list[int]:
    return [one["id"] for one in tokens]


def next_logits(llm: Llama, ids: list[int]) -> np.ndarray[Any, Any]:
    return llm.model(torch.tensor([ids]))[0, -1, : llm.tokenizer.n_vocab].double().numpy()


def softmax(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    e: np.ndarray[Any, Any] = np.exp(x - x.max())
    return e / e.sum()


# ------------------------------------------------------------------------------------------------------------- answers
@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.8, "presence_penalty": 0.5}])
def test_an_answer_is_that_of_the_library(server: Running, tiny_llm: Llama, options: dict[str, Any]) -> None:
    prompt, tokens, end = answer(server, messages=MESSAGES, seed=5, max_tokens=20, **options)
    expected = tiny_llm.chat(MESSAGES, max_new_tokens=20, seed=5, **options)
    assert prompt == tiny_llm.encode_chat(MESSAGES)
    assert ids_of(tokens)[: len(expected.tokens)] == expected.tokens
    assert end == expected.finish_reason


def test_the_probabilities_are_those_of_completions(server: Running) -> None:
    prompt, tokens, _ = answer(server, messages=MESSAGES, seed=5, max_tokens=12, temperature=1.0)
    body: dict[str, Any] = {"prompt": [prompt + ids_of(tokens)], "echo": True, "logprobs": 20, "max_tokens": 0}
    (choice,) = post(server, "/v1/completions", **body).json()["choices"]
    expected = choice["logprobs"]["token_logprobs"][len(prompt) :]
    assert [one["p"] for one in tokens] == pytest.approx(np.exp(expected).tolist(), abs=1e-5)
    for one, top in zip(tokens, choice["logprobs"]["top_logprobs"][len(prompt) :], strict=True):
        best = sorted((other["p"] for other in one["top"]), reverse=True)[:10]
        assert best == pytest.approx(np.sort(np.exp([*top.values()]))[::-1][:10].tolist(), abs=1e-5)


FILTERS = [{"top_k": 4}, {"top_p": 0.4}, {"min_p": 0.5}, {"top_k": 8, "top_p": 0.7, "min_p": 0.3}, {"temperature": 0.0}]
PENALTIES = {"repetition_penalty": 1.5, "presence_penalty": 0.7, "frequency_penalty": 0.4}
FILTERS += [
    {**PENALTIES, "logit_bias": {"9": 4.0, "30": -6.0}, **more} for more in ({"top_p": 0.6}, {"temperature": 0})
]


@pytest.mark.parametrize("grammar", [False, True])
@pytest.mark.parametrize("filters", FILTERS)
def test_the_stage_that_cut_a_token_is_the_first_that_excludes_it(
    server: Running, tiny_llm: Llama, filters: dict[str, Any], grammar: bool
) -> None:
    options = {"temperature": 1.3, **filters}
    more = {"response_format": FORMAT} if grammar else {}
    prompt, tokens, _ = answer(server, messages=MESSAGES, seed=3, max_tokens=6, top=20, **options, **more)
    constraint = compile_grammar(tiny_llm.tokenizer, "schema", SCHEMA).constraint()
    text = list(prompt)
    for one in tokens:
        logits = next_logits(tiny_llm, text)
        if "logit_bias" in options:
            seen, counts = sorted({*text}), np.bincount(text[len(prompt) :], minlength=len(logits))
            divided = np.where(
                logits > 0, logits / options["repetition_penalty"], logits * options["repetition_penalty"]
            )
            logits[seen] = divided[seen]
            logits -= options["presence_penalty"] * (counts > 0) + options["frequency_penalty"] * counts
            for id, bias in options["logit_bias"].items():
                logits[int(id)] += bias
        left, cut = np.ones(len(logits), bool), dict[int, str]()

        def keep(stage: str, kept: np.ndarray[Any, Any], left: Any = left, cut: Any = cut) -> None:
            cut.update(dict.fromkeys(np.flatnonzero(left & ~kept).tolist(), stage))
            left &= kept

        if grammar:
            keep("grammar", constraint.allowed().numpy())
            constraint.advance(one["id"])
        if options["temperature"] == 0:
            keep("greedy", np.arange(len(logits)) == np.where(left, logits, -np.inf).argmax())
            q = left.astype(float)
        else:
            x = logits / options["temperature"]
            assert one["warm"] == pytest.approx(softmax(np.where(left, x, -np.inf)).max(), abs=1e-5)
            if "top_k" in options:
                order = np.argsort(-np.where(left, x, -np.inf), kind="stable")
                keep("top_k", np.isin(np.arange(len(x)), order[: options["top_k"]]))
            if "top_p" in options:
                p = softmax(np.where(left, x, -np.inf))
                order = np.argsort(-p, kind="stable")
                inside = np.cumsum(p[order]) - p[order] < options["top_p"]
                keep("top_p", np.isin(np.arange(len(x)), order[inside]))
            if "min_p" in options:
                p = softmax(np.where(left, x, -np.inf))
                keep("min_p", p >= options["min_p"] * p.max())
            q = softmax(np.where(left, x, -np.inf))
        removed = [[*cut.values()].count(stage) for stage in one["left"]]
        assert [*one["left"].values()] == (len(logits) - np.cumsum(removed)).tolist()
        for other in one["top"]:
            assert other.get("cut") == cut.get(other["id"]), other
            assert other.get("q", 0.0) == pytest.approx(q[other["id"]], abs=1e-5)
        text.append(one["id"])


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.8}])
def test_words_of_ones_own_are_taken_and_looked_into_like_drawn_ones(
    server: Running, tiny_llm: Llama, options: dict[str, Any]
) -> None:
    """What follows is what the library draws after them, and their probabilities are those of the text with them."""
    text = {"messages": MESSAGES, "seed": 5, "max_tokens": 8, **options}
    prompt, tokens, _ = answer(server, **text)
    begun, own = ids_of(tokens[:2]), tiny_llm.tokenizer.encode(" Zebra")
    _, found, end = answer(server, **text, answer=begun, own=" Zebra")
    expected = generate(
        tiny_llm.model,
        prompt + begun + own,
        SamplingParams(max_new_tokens=8, seed=5, **options),
        stop_ids=tiny_llm.tokenizer.stop_ids,
        n_vocab=tiny_llm.tokenizer.n_vocab,
    )
    assert ids_of(found) == own + [token.id for token in expected]
    assert [one.get("forced", False) for one in found] == [i < len(own) for i in range(len(found))]
    for i, one in enumerate(found[: len(own)]):
        p = softmax(next_logits(tiny_llm, prompt + begun + own[:i]))
        assert one["p"] == pytest.approx(p[one["id"]], abs=1e-5)
        best = [other["id"] for other in one["top"] if "cut" not in other]
        if options["temperature"] == 0:
            assert best == [int(p.argmax())]
    assert end in ("length", "stop")


def test_a_text_continues_ids(server: Running, tiny_llm: Llama) -> None:
    ids = [5, 9, 30]
    prompt, *_ = answer(server, ids=ids, prompt=" and a text", max_tokens=1)
    assert prompt == ids + tiny_llm.tokenizer.encode(" and a text")


def test_a_token_that_a_processor_excludes_is_cut_by_it(tiny_llm: Llama) -> None:
    """Processors are functions, so no request has them."""
    ids, odd = tiny_llm.encode_chat(MESSAGES), torch.arange(tiny_llm.tokenizer.n_vocab) % 2 == 1
    options = {"processors": [lambda ids, logits: logits.masked_fill(odd, -torch.inf)], "temperature": 1.0, "seed": 4}
    (prompt,) = tiny_llm.prepare(ids, {**options, "max_new_tokens": 5})
    events = [event for event in Looks(tiny_llm, "tiny").answer(prompt, [], (), 20) if "top" in event]
    stops, n_vocab = tiny_llm.tokenizer.stop_ids, tiny_llm.tokenizer.n_vocab
    expected = generate(tiny_llm.model, ids, prompt.params, stop_ids=stops, n_vocab=n_vocab)
    assert ids_of(events) == [token.id for token in expected]
    text = list(ids)
    for event in events:
        p = softmax(np.where(odd, -np.inf, next_logits(tiny_llm, text)))
        for one in event["top"]:
            assert one.get("cut") == ("processors" if odd[one["id"]] else None)
            assert one.get("q", 0.0) == pytest.approx(p[one["id"]], abs=1e-5)
        text.append(event["id"])


def test_a_branch_is_the_answer_after_its_ids(server: Running, tiny_llm: Llama) -> None:
    prompt, tokens, _ = answer(server, messages=MESSAGES, seed=5, max_tokens=12, temperature=1.0)
    other = next(one["id"] for one in tokens[4]["top"] if one["id"] != tokens[4]["id"] and "control" not in one)
    begun = [*ids_of(tokens[:4]), other]
    again, more, _ = answer(server, ids=prompt, answer=begun, seed=8, max_tokens=9, temperature=1.0)
    assert again == prompt
    params = SamplingParams(max_new_tokens=9, temperature=1.0, seed=8)
    stops, n_vocab = tiny_llm.tokenizer.stop_ids, tiny_llm.tokenizer.n_vocab
    expected = generate(tiny_llm.model, [*prompt, *begun], params, stop_ids=stops, n_vocab=n_vocab)
    assert ids_of(more) == [token.id for token in expected]
    stop = min(stops)
    assert answer(server, ids=prompt, answer=[stop])[1:] == ([], "stop")


def test_a_branch_of_a_structured_answer_stays_in_its_grammar(server: Running, tiny_llm: Llama) -> None:
    options: dict[str, Any] = {"response_format": FORMAT, "temperature": 1.0, "seed": 1}
    prompt, tokens, end = answer(server, messages=MESSAGES, **options)
    assert end == "stop"
    _, rest, end = answer(server, ids=prompt, answer=ids_of(tokens[:4]), **options)
    assert json.loads(tiny_llm.tokenizer.decode(ids_of(tokens[:4] + rest)))["n"] in (1, 27)
    assert post(server, "/look/answer", ids=prompt, answer=[5], **options).text.count('"error"') == 1


def test_an_answer_with_a_head_off_is_that_of_the_ablated_model(server: Running, tiny_llm: Llama) -> None:
    plain = answer(server, messages=MESSAGES, seed=5, max_tokens=20, temperature=1.0)
    _, tokens, _ = answer(server, messages=MESSAGES, off=[[1, 2], [0, 3]], seed=5, max_tokens=20, temperature=1.0)
    with ablated(tiny_llm.model, [(1, 2), (0, 3)]):
        expected = tiny_llm.chat(MESSAGES, seed=5, max_new_tokens=20, temperature=1.0)
    assert ids_of(tokens)[: len(expected.tokens)] == expected.tokens != ids_of(plain[1])
    assert answer(server, messages=MESSAGES, seed=5, max_tokens=20, temperature=1.0) == plain


# ---------------------------------------------------------------------------------------------------------- two prompts
def other_ids(llm: Llama) -> list[int]:
    """MESSAGES with another word in the place of one token."""
    ids = llm.encode_chat(MESSAGES)
    return [*ids[:-9], ids[-9] ^ 3, *ids[-8:]]


def putting(row: torch.Tensor, t: int) -> Function:
    """Replace the vector of the token at position t, if it is among the new ones."""

    def put(h: torch.Tensor, at: Place) -> torch.Tensor:
        for i, position in enumerate([] if at.positions is None else at.positions.tolist()):
            if position == t:
                h[:, i] = row
        return h

    return put


def test_the_patching_grid_is_that_of_the_library(server: Running, tiny_llm: Llama) -> None:
    ids, other = tiny_llm.encode_chat(MESSAGES), other_ids(tiny_llm)
    token, against = np.argsort(-next_logits(tiny_llm, ids))[[0, 2]].tolist()
    response = post(server, "/look/patch", ids=ids, other=other, token=token, against=against)
    *progress, found = [json.loads(line[6:]) for line in response.text.split("\n\n") if line]
    assert progress == [{"done": i + 1, "of": len(progress)} for i in range(len(progress))]
    assert [ids_of(found[name]) for name in ("source", "target", "answers")] == [other, ids, [against, token]]
    target, source = (next_logits(tiny_llm, one)[against] - next_logits(tiny_llm, one)[token] for one in (ids, other))
    assert found["differences"] == pytest.approx([source, target], abs=1e-4)
    restored = np.array(found["restored"])
    assert restored.shape == (2, len(ids))
    with activations(tiny_llm, "resid_pre.*") as seen:
        tiny_llm.model(torch.tensor([other]))
    for layer, t in ((0, len(ids) - 9), (1, len(ids) - 1), (1, len(ids) - 6), (1, 3)):
        with patch(tiny_llm, {f"resid_pre.{layer}": putting(seen[f"resid_pre.{layer}"][0, t], t)}):
            logits = next_logits(tiny_llm, ids)
        expected = (logits[against] - logits[token] - target) / (source - target)
        assert restored[layer, t] == pytest.approx(expected, abs=1e-3)
    most = next_logits(tiny_llm, ids).argmax()
    other = next(one for c in range(20, 60) if next_logits(tiny_llm, one := [*ids[:-1], c]).argmax() != most)
    *progress, last = post(server, "/look/patch", ids=ids, other=other).text.split("data: ")
    assert len(progress) == 1 + 2 + 1  # a blank, and the layers from the patched one on: 2, then 1
    grid = patching_grid(tiny_llm, other, ids)
    assert json.loads(last)["restored"] == [pytest.approx(row, abs=1e-6) for row in grid.restored.tolist()]


@pytest.mark.parametrize("off", [[], [[1, 2]]])
def test_a_patched_answer_is_that_of_the_patched_model(server: Running, tiny_llm: Llama, off: list[Any]) -> None:
    ids, other, t = tiny_llm.encode_chat(MESSAGES), other_ids(tiny_llm), len(tiny_llm.encode_chat(MESSAGES)) - 1
    body: dict[str, Any] = {"messages": MESSAGES, "off": off, "seed": 5, "max_tokens": 20, "temperature": 1.0}
    plain = answer(server, **body)
    _, tokens, _ = answer(server, **body, patch={"other": other, "layer": 1, "position": t})
    heads = [tuple(head) for head in off]
    with ablated(tiny_llm.model, heads), activations(tiny_llm, "resid_pre.1") as seen:
        tiny_llm.model(torch.tensor([other]))

    params = SamplingParams(max_new_tokens=20, temperature=1.0, seed=5)
    stops, n_vocab = tiny_llm.tokenizer.stop_ids, tiny_llm.tokenizer.n_vocab
    with ablated(tiny_llm.model, heads), patch(tiny_llm, {"resid_pre.1": putting(seen["resid_pre.1"][0, t], t)}):
        expected = [*generate(tiny_llm.model, ids, params, stop_ids=stops, n_vocab=n_vocab)]
        p = softmax(next_logits(tiny_llm, ids))
    assert ids_of(tokens) == [token.id for token in expected]
    assert tokens[0]["p"] == pytest.approx(p[tokens[0]["id"]], abs=1e-5)
    assert tokens[0]["top"] != plain[1][0]["top"]
    _, again, _ = answer(server, **body)
    assert ids_of(again) == ids_of(plain[1])
    assert [one["p"] for one in again] == pytest.approx([one["p"] for one in plain[1]], abs=1e-5)


# ----------------------------------------------------------------------------------------------------------- precision
@pytest.fixture(scope="module")
def half_llm(tiny_gguf: Path) -> Llama:
    return loader.load(tiny_gguf, dtype="bfloat16", device="cpu")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_in_bfloat16_draws_from_logits_in_float32(half_llm: Llama, temperature: float) -> None:
    """Its own logits have ties. Those here are a product in float64 of the same states with the same weights."""
    model, n_vocab = half_llm.model, half_llm.tokenizer.n_vocab
    (job,) = half_llm.prepare(
        half_llm.encode_chat(MESSAGES), {"temperature": temperature, "seed": 4, "max_new_tokens": 12}
    )
    events = [event for event in Looks(half_llm, "tiny").answer(job, [], (), 20) if "top" in event]
    cache, new, ties = model.new_cache(256), job.ids, 0
    random = random_generator(job.params, torch.device("cpu"))
    weight = model.output.weight.double().numpy()
    for event in events:
        h = model.hidden(torch.tensor([new]), cache=cache)[0, -1]  # (C,)
        logits = (weight @ h.double().numpy())[:n_vocab]
        p = softmax(logits)
        assert [one["p"] for one in event["top"]] == pytest.approx([p[one["id"]] for one in event["top"]], abs=1e-6)
        assert len({one["p"] for one in event["top"]}) == len(event["top"])
        rounded = model.output(h)[[one["id"] for one in event["top"]]].tolist()
        ties += len(rounded) - len({*rounded})
        drawn, _ = choose(torch.tensor(logits).float(), job.params, [random], None, None)
        assert event["id"] == int(drawn)
        new = [event["id"]]
    assert ties > 0


def test_looks_inside_are_in_float32(half_llm: Llama, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, llm = half_llm.encode_chat(MESSAGES), loader.load(tiny_gguf, dtype="bfloat16", fast=False, device="cpu")
    llm.model.float()
    logits = next_logits(llm, ids)
    token, against = np.argsort(-logits)[[0, 3]].tolist()
    chosen = {"token": token, "against": against}
    looks = Looks(half_llm, "tiny")
    *_, found = looks.inside(ids, **chosen)
    *_, grid = looks.grid(ids, **chosen)
    for one in (found, grid):
        assert one["difference"] == pytest.approx(logits[token] - logits[against], abs=1e-4)
    assert found["p"] == pytest.approx(softmax(logits)[token], abs=1e-5)
    assert sum(found["effects"].values()) == pytest.approx(found["difference"], abs=1e-3)
    assert (looks.meta()["exact"], looks.meta()["rounding"]) == (True, 0.06)
    with monkeypatch.context() as full:
        full.setattr("llama.inside.exact.free_memory", lambda device: Room(6 * llm.model.config.n_params, "are free"))
        looks = Looks(half_llm, "tiny")
    *_, rough = looks.inside(ids, **chosen)
    assert not looks.meta()["exact"]
    assert rough["difference"] != found["difference"]
    assert Looks(llm, "tiny").meta()["rounding"] == 0


@pytest.mark.slow
def test_looks_into_the_default_model_are_in_float32(default_gguf: Path, default_llm: Llama) -> None:
    """Its packed weights round their inputs; the other model has the same weights, dequantized."""
    llm = loader.load(default_gguf, device="cpu")
    ids = llm.encode_chat([{"role": "user", "content": "What is the capital of Japan?"}])
    logits = next_logits(default_llm, ids)
    token, against = np.argsort(-logits)[[0, 1]].tolist()
    looks = Looks(llm, "default")
    *_, found = looks.inside(ids, token=token, against=against)
    assert found["p"] == pytest.approx(softmax(logits)[token], abs=5e-5)
    assert found["difference"] == pytest.approx(logits[token] - logits[against], abs=5e-4)
    assert abs(softmax(next_logits(llm, ids))[token] - found["p"]) < looks.meta()["rounding"]


# ----------------------------------------------------------------------------------------------------------- the inside
def test_lens_and_effects_add_up_to_the_models_own_logits(server: Running, tiny_llm: Llama) -> None:
    ids = tiny_llm.encode_chat(MESSAGES)
    logits = next_logits(tiny_llm, ids)
    token, against = np.argsort(-logits)[[0, 3]].tolist()
    found = post(server, "/look/inside", ids=ids, token=token, against=against).json()
    assert len(found["lens"]) == tiny_llm.model.config.n_layers + 1
    last = found["lens"][-1]
    assert (last["top"][0]["id"], last["rank"]) == (token, 1)
    assert last["p"] == found["p"] == pytest.approx(softmax(logits)[token], abs=1e-5)
    assert found["difference"] == pytest.approx(logits[token] - logits[against], abs=1e-3)
    assert sum(found["effects"].values()) == pytest.approx(found["difference"], abs=1e-3)
    assert sum(one["effect"] for one in found["heads"]) == pytest.approx(found["effects"]["heads"], abs=1e-4)  # all 8
    assert sum(found["layers"]) == pytest.approx(found["effects"]["mlps"], abs=1e-4)
    assert sum(found["by_token"]) == pytest.approx(found["effects"]["heads"], abs=1e-4)
    best = max(found["heads"], key=lambda one: one["effect"])
    assert found["head"]["head"] == best["head"] == found["heads"][0]["head"]
    weights = found["head"]["weights"]
    assert weights[best["position"]] == best["weight"] == max(weights)
    off = post(server, "/look/inside", ids=ids, token=token, off=[found["heads"][0]["head"]]).json()
    with ablated(tiny_llm.model, [tuple(found["heads"][0]["head"])]):
        assert off["p"] == pytest.approx(softmax(next_logits(tiny_llm, ids))[token], abs=1e-5)


def test_both_lenses_are_the_readouts_of_the_layers(tiny_llm: Llama) -> None:
    model, ids, n_vocab = tiny_llm.model, tiny_llm.encode_chat(MESSAGES), tiny_llm.tokenizer.n_vocab
    J = torch.randn(64, 64, generator=torch.Generator().manual_seed(6))
    looks = Looks(tiny_llm, "tiny", JacobianLens({0: J}, 3))
    token = int(np.argsort(-next_logits(tiny_llm, ids))[40])
    *_, found = looks.inside(ids, token=token)
    assert (looks.meta()["lens"], looks.meta()["tied"]) == (3, False)
    with activations(model, "resid_post.0") as seen:
        model(torch.tensor([ids]))
    h = seen["resid_post.0"][0, -1].double()
    words = [*np.argsort(-next_logits(tiny_llm, ids))[:5], token]
    assert [word["id"] for word in found["words"]] == words
    assert [one["layer"] for one in found["jacobian"]] == [0]
    for moved, row in ((h, found["lens"][1]), (J.double() @ h, found["jacobian"][0])):
        moved = moved / (moved.square().mean() + model.norm.eps).sqrt() * model.norm.weight
        logits = (model.output.weight.double() @ moved)[:n_vocab].detach().numpy()
        p, order = softmax(logits), np.argsort(-logits)
        assert [one["id"] for one in row["top"]] == order[:3].tolist()
        assert [one["p"] for one in row["top"]] == pytest.approx(p[order[:3]].tolist(), abs=1e-5)
        assert row["p"] == pytest.approx(p[token], abs=1e-5)
        assert row["rank"] == row["ranks"][-1] == 1 + order.tolist().index(token)
        assert row["ranks"] == [1 + order.tolist().index(word) for word in words]


@pytest.mark.parametrize("off", [[], [[0, 1], [1, 4]]])  # 4 is the MLP layer
def test_contributions_by_source_are_those_of_the_weights_and_sum_to_the_difference(
    server: Running, tiny_llm: Llama, off: list[list[int]]
) -> None:
    ids, model = tiny_llm.encode_chat(MESSAGES), tiny_llm.model
    token, against = np.argsort(-next_logits(tiny_llm, ids))[[0, 3]].tolist()

    def zeroed(x: torch.Tensor, at: Place) -> torch.Tensor:
        return x * 0 if at.name == "mlp_out.1" else x * torch.tensor([1, 0, 1, 1])[:, None]

    changes = {"mlp_out.1": zeroed, "z.0": zeroed} if off else {}
    with patch(model, changes), activations(model, ["embed", "pattern.*", "v.*", "mlp_out.*", "resid_post.1"]) as seen:
        logits = model(torch.tensor([ids]))[0, -1].double()
    last = {name: tensor[0, -1].double() for name, tensor in seen.items()}
    scale = (last["resid_post.1"].square().mean() + model.norm.eps) ** -0.5
    rows = model.output.weight.double()
    direction = (rows[token] - rows[against]) * model.norm.weight.double() * scale  # (C,)
    sources = []
    for layer, block in enumerate(model.layers):
        wo: Any = block.get_parameter("attention.wo.weight").double().unflatten(1, (4, -1))  # (C, H, D)
        values = seen[f"v.{layer}"][0].double().repeat_interleave(2, 1)  # (S, H, D): 2 heads share a value
        weights = seen[f"pattern.{layer}"][0, :, -1].double()  # (H, S)
        sources.append(torch.einsum("hs,shd,chd,c->hs", weights, values, wo, direction))
    effects = torch.stack(sources)  # (L, H, S)
    if off:
        effects[0, 1] = 0
    layers = [float(last[f"mlp_out.{layer}"] @ direction) for layer in range(2)]
    found = post(server, "/look/inside", ids=ids, token=token, against=against, off=off).json()
    assert found["by_token"] == pytest.approx(effects.sum((0, 1)).tolist(), abs=1e-4)
    assert found["layers"] == pytest.approx(layers, abs=1e-4)
    for one in found["heads"]:
        own = effects[tuple(one["head"])]
        assert one["effect"] == pytest.approx(float(own.sum()), abs=1e-4)
        assert sorted((abs(x) for _, x in one["sources"]), reverse=True) == pytest.approx(
            own.abs().topk(3).values.tolist(), abs=1e-4
        )
        assert [x for _, x in one["sources"]] == pytest.approx([float(own[s]) for s, _ in one["sources"]], abs=1e-4)
    parts = sum(found["by_token"]) + sum(found["layers"]) + float(last["embed"] @ direction)
    assert parts == pytest.approx(found["difference"], abs=1e-4)
    assert found["difference"] == pytest.approx(float(logits[token] - logits[against]), abs=1e-4)


def test_a_head_that_is_asked_for_is_listed_and_that_of_the_more_probable_token_is_the_first(
    tiny_llm: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llama.server.look.SHOWN_HEADS", 2)
    ids = tiny_llm.encode_chat(MESSAGES)
    more, less = np.argsort(-next_logits(tiny_llm, ids))[[0, 3]].tolist()
    looks, effects = Looks(tiny_llm, "tiny"), dict[tuple[int, int], float]()
    for layer, head in np.ndindex(2, 4):
        *_, found = looks.inside(ids, token=more, against=less, head=(layer, head))
        (effects[layer, head],) = [one["effect"] for one in found["heads"] if one["head"] == [layer, head]]
    best = max(effects, key=lambda at: effects[at])
    for token, against in ((more, less), (less, more)):
        *_, found = looks.inside(ids, token=token, against=against)
        assert found["heads"][0]["head"] == found["head"]["head"] == [*best]


@pytest.mark.parametrize("sign", [1, -1])
def test_the_head_in_detail_adds_most_or_has_the_largest_effect_and_is_listed(
    tiny_llm: Llama, monkeypatch: pytest.MonkeyPatch, sign: int
) -> None:
    effects = torch.tensor([[sign * 0.1, sign * 0.2, sign * 0.3, 0.0], [-0.9, -0.8, -0.7, -0.6]])
    monkeypatch.setattr("llama.server.look.SHOWN_HEADS", 3)
    monkeypatch.setattr("llama.inside.trace.direct_effects", lambda *_: effects)
    *_, found = Looks(tiny_llm, "tiny").inside(tiny_llm.encode_chat(MESSAGES))
    listed = [one["head"] for one in found["heads"]]
    assert listed == ([[0, 2], [1, 0], [1, 1]] if sign > 0 else [[1, 0], [1, 1], [1, 2]])
    assert found["head"]["head"] == listed[0]


def test_the_grid_is_ablation_one_by_one_beside_other_heads_that_are_off(
    server: Running, tiny_llm: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = tiny_llm.encode_chat(MESSAGES)
    token, against = np.argsort(-next_logits(tiny_llm, ids))[[0, 3]].tolist()
    response = post(server, "/look/grid", ids=ids, token=token, against=against, off=[[0, 1]])
    *progress, found = [json.loads(line[6:]) for line in response.text.split("\n\n") if line]
    assert progress == [{"done": i + 1, "of": len(progress)} for i in range(len(progress))]
    for layer, head in ((0, 0), (0, 1), (1, 3)):
        with ablated(tiny_llm.model, {(0, 1), (layer, head)}):
            logits = next_logits(tiny_llm, ids)
        lost = found["difference"] - (logits[token] - logits[against])
        assert found["total"][layer][head] == pytest.approx(lost, abs=1e-4)
    assert found["total"][0][1] == pytest.approx(0, abs=1e-5)
    with monkeypatch.context() as short:
        short.setattr("llama.server.requests.LONGEST_GRID", 9)
        for body, wrong in (
            ({"ids": [5]}, "token is missing"),
            ({"token": 1, "against": 2, "ids": [5] * 10}, "at most 9"),
        ):
            refused = post(server, "/look/grid", **{"ids": ids, **body})
            assert refused.status_code == 400
            assert wrong in refused.json()["error"]["message"]


def test_without_a_source_the_last_token_reads_nothing_from_it(
    server: Running, tiny_llm: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several passes, beside a head that is off, against a complete pass with changed weights for each source."""
    monkeypatch.setattr("llama.inside.ablation.ROWS", 200)
    ids = tiny_llm.encode_chat(MESSAGES)
    body = {"ids": ids, "token": 7, "against": 8, "off": [[0, 1]]}
    found = post(server, "/look/sources", **body).json()["without"]
    for source, difference in enumerate(found):
        with ablated(tiny_llm.model, {(0, 1)}), patch(tiny_llm, {"pattern.*": partial(_blind, source=source)}):
            logits = tiny_llm.model(torch.tensor([ids]))[0, -1]
        assert difference == pytest.approx(float(logits[7] - logits[8]), abs=1e-4)
    assert max(found) - min(found) > 0.1
    assert post(server, "/look/sources", ids=ids).status_code == 400


def _blind(weights: torch.Tensor, place: Place, source: int) -> torch.Tensor:
    weights = weights.clone()
    weights[..., -1, source] = 0
    return weights


def test_the_pairs_of_a_head_add_up_to_its_score(server: Running, tiny_llm: Llama) -> None:
    ids = tiny_llm.encode_chat(MESSAGES)
    with activations(tiny_llm, ["pattern.*", "q.*", "k.*"]) as whole:
        tiny_llm.model(torch.tensor([ids]))
    for layer, head, key in ((0, 1, 2), (1, 3, 0), (1, 0, len(ids) - 1)):
        found = post(server, "/look/inside", ids=ids, head=[layer, head], key=key).json()["head"]
        scores, weights = np.array(found["scores"]), np.array(found["weights"])
        assert (found["head"], found["key"], len(scores)) == ([layer, head], key, len(ids))
        assert weights.tolist() == pytest.approx(whole[f"pattern.{layer}"][0, head, -1].tolist(), abs=1e-5)
        assert softmax(scores) == pytest.approx(weights, abs=1e-5)
        q, k = (np.array(found[name]).reshape(-1, 2) @ [1, 1j] for name in "qk")
        before = (whole[f"q.{layer}"][0, -1, head], whole[f"k.{layer}"][0, key, head // 2])  # 2 heads share a key
        for distance in (len(ids) - 1 - key, 3, 40):
            turned = np.exp(1j * (distance - (len(ids) - 1 - key)) * np.array(found["frequencies"]))
            score = (q * k.conj() * turned).real.sum() / len(found["q"]) ** 0.5
            (one, other), i = (x.double().numpy().reshape(-1, 2) @ [1, 1j] for x in before), np.arange(8)
            expected = (one * other.conj() * np.exp(1j * distance * 10000.0 ** (-i / 8))).real.sum() / 4
            assert score == pytest.approx(expected, abs=1e-4)
            assert distance != len(ids) - 1 - key or score == pytest.approx(scores[key], abs=1e-4)


# ------------------------------------------------------------------------------------------------------- other clients
def test_other_clients_get_the_answers_they_get_alone(server: Running, tiny_llm: Llama) -> None:
    check_other_clients(server, tiny_llm)


def check_other_clients(server: Running, llm: Llama, at_once: int = 4) -> None:
    """Looks have hooks in the model, and an answer has heads off, while four clients are answered, so many at once."""
    ids = llm.encode_chat(MESSAGES)
    options: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True, "max_tokens": 60}

    def complete(first: int, found: dict[int, Any]) -> None:
        for seed in range(first, 4, at_once):
            body: dict[str, Any] = {"prompt": [ids[seed:]], "seed": seed, "logprobs": 1, **options}
            found[seed] = post(server, "/v1/completions", **body).json()["choices"][0]["logprobs"]["tokens"]

    def clients(found: dict[int, Any]) -> list[threading.Thread]:
        threads = [threading.Thread(target=complete, args=(first, found)) for first in range(at_once)]
        for thread in threads:
            thread.start()
        return threads

    alone, together = dict[int, Any](), dict[int, Any]()
    for _ in range(2):  # the second time, as later, the keys of most of a prompt are in the cache
        for thread in clients(alone):
            thread.join()
    threads = clients(together)
    answer(server, ids=ids, off=[[0, 0], [1, 1]], seed=1, max_tokens=20)
    answer(server, ids=ids, patch={"other": ids[::-1], "layer": 1, "position": 3}, seed=1, max_tokens=20)
    looks = [post(server, "/look/inside", ids=ids[: 2 + i % len(ids)], off=[[0, 0]] * (i % 2)) for i in range(20)]
    for thread in threads:
        thread.join()
    assert {look.status_code for look in looks} == {200}
    assert together == alone
    assert not [module for module in llm.model.modules() if module._forward_hooks or module._forward_pre_hooks]


def test_a_look_runs_between_the_chunks_of_a_prompt(tiny_llm: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = (tiny_llm.encode_chat(MESSAGES) * 9)[:220]
    expected = [*tiny_llm.stream_ids(ids, max_new_tokens=9, temperature=1.0, seed=5, ignore_eos=True)][-1].completion
    found, left, begun = list[requests.Response](), list[int](), threading.Event()
    monkeypatch.setattr(batch, "prompt_chunk", lambda device: 40)
    with running(tiny_llm) as server:
        real = Batch._feed

        def waiting(*given: Any) -> Iterator[Any]:
            begun.set()
            while not left and not server.engine.looks:
                time.sleep(0.01)
            left.append(len(server.engine.looks))
            yield from real(*given)

        monkeypatch.setattr(Batch, "_feed", waiting)
        body = {"prompt": [ids], "max_tokens": 9, "temperature": 1.0, "seed": 5, "ignore_eos": True}
        client = threading.Thread(target=lambda: found.append(post(server, "/v1/completions", **body)))
        client.start()
        assert begun.wait(PATIENCE)
        assert post(server, "/look/inside", ids=ids[:50], off=[[0, 0]]).status_code == 200
        client.join()
    assert (left[0], left[-1], len(left)) == (1, 0, 7)  # looks that wait or run, before each chunk
    assert expected is not None
    assert found[0].json()["choices"][0]["text"] == expected.text


def test_one_look_runs_eight_wait_and_a_client_that_goes_away_makes_room(
    tiny_llm: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tiny_llm) as server:
        step, free = Look.step, threading.Event()
        monkeypatch.setattr(Look, "step", lambda look: free.wait() and step(look))
        with pytest.raises(requests.ReadTimeout):
            requests.post(server.url + "/look/inside", json={"ids": [5, 6]}, timeout=0.5)
        codes: list[int] = []
        body = {"ids": [5, 6, 7]}
        threads = [
            threading.Thread(target=lambda: codes.append(post(server, "/look/inside", **body).status_code))
            for _ in range(9)
        ]
        for thread in threads:
            thread.start()
        looks = server.engine.looks
        while sum(not look.cancelled.is_set() for look in looks) < 9:
            time.sleep(0.01)
        refused = post(server, "/look/inside", **body)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "2")
        free.set()
        for thread in threads:
            thread.join()
        assert codes == [200] * 9
        while looks:  # the last one ends after its result
            time.sleep(0.01)


@pytest.mark.slow
def test_other_clients_of_the_default_model_notice_nothing(default_llm: Llama) -> None:
    """One client at a time: its kernels round differently for other numbers of rows, which depend on the timing."""
    with running(default_llm) as server:
        check_other_clients(server, default_llm, at_once=1)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("inside", {"ids": []}, "ids must be a list of token ids"),
        ("inside", {"ids": [5], "token": 320}, "token must be"),
        ("inside", {"ids": [5], "head": [2, 0]}, "a layer must be"),
        ("inside", {"ids": [5], "key": 1}, "key must be"),
        ("inside", {"ids": [5], "off": [[0]]}, "off must hold pairs"),
        ("inside", {"ids": [5], "off": [[0, 5]]}, "a head must be"),
        ("inside", {"ids": [5], "head": [0, 4]}, "a head must be"),
        ("inside", {"ids": [5] * 300}, "the prompt has 300 tokens"),
        ("answer", {"ids": [5] * 250, "answer": [5] * 6}, "256"),
        ("answer", {"ids": [5], "messages": MESSAGES}, "one of messages, prompt and ids"),
        ("answer", {"ids": [5], "stop": "a"}, "unknown key 'stop'"),
        ("answer", {"ids": [5], "own": 7}, "own must be"),
        (
            "answer",
            {"ids": [5], "patch": {"other": [5, 6], "layer": 0, "position": 0}},
            "patch.other has 2 tokens; expected at most 1",
        ),
        ("answer", {"ids": [5], "patch": {"other": [6], "layer": 2, "position": 0}}, "layer must be"),
        ("answer", {"ids": [5], "patch": {"other": [6], "layer": 0, "position": 1}}, "position must be"),
        ("patch", {"ids": [5], "other": [5, 6]}, "expected equally many tokens, got 2 and 1"),
        ("patch", {"ids": [5], "other": [999]}, "a token id of other must be"),
        ("patch", {"ids": [5], "other": [5], "token": 1, "against": 2}, "nothing can move it"),
        ("answer", {"ids": [5], "own": "z9" * 150}, "its inside can be shown for at most 255"),
        ("answer", {"ids": [5], "prompt": ["a"]}, "prompt must be"),
        ("page", {"ids": [5, 999]}, "a token id of ids must be"),
        ("activations", {"ids": [5], "off": [[0, 0]]}, "unknown key 'off'"),
    ],
)
def test_invalid_looks_are_refused_by_name(server: Running, path: str, body: dict[str, Any], message: str) -> None:
    response = post(server, f"/look/{path}", **body)
    error = response.json() if response.status_code == 400 else json.loads(response.text.split("data: ")[-1])
    assert message in error["error"]["message"]


def test_a_look_has_a_largest_length(tiny_llm: Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama.server.requests.LONGEST_LOOK", 8)
    with running(tiny_llm) as server:
        refused = post(server, "/look/inside", ids=[5] * 9)
        assert (refused.status_code, "at most 8" in refused.text) == (400, True)


def test_the_page_needs_no_key_and_its_looks_do(tiny_llm: Llama) -> None:
    with running(tiny_llm, key="secret") as server:
        page = requests.get(server.url, timeout=PATIENCE)
        assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        for name in set(PAGE) - {"/"}:
            assert name[1:] in page.text
            assert requests.get(f"{server.url}{name}", timeout=PATIENCE).status_code == 200
        for path in ("answer", "inside", "page", "activations"):
            assert post(server, f"/look/{path}", ids=[5, 6]).status_code == 401
        assert requests.get(server.url, headers={"Host": "evil.example"}, timeout=PATIENCE).status_code == 400
        form = requests.post(
            f"{server.url}/look/inside", b"{}", headers={"Authorization": "Bearer secret"}, timeout=PATIENCE
        )
        assert form.status_code == 415


def test_the_trace_of_a_text_is_that_of_the_command(server: Running, tiny_llm: Llama) -> None:
    from llama.inside import trace, trace_page

    ids = tiny_llm.encode_chat(MESSAGES)[:12]
    page = post(server, "/look/page", ids=ids).text
    traced = trace.trace(tiny_llm.model, ids)
    assert trace_page.packed(trace.packed_maps(traced.weights)) in page


def test_the_activations_of_a_text_have_the_names_and_the_layout_of_transformerlens(
    server: Running, tiny_llm: Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, config = tiny_llm.encode_chat(MESSAGES), tiny_llm.model.config
    found = np.load(io.BytesIO(post(server, "/look/activations", ids=ids).content))
    with activations(tiny_llm, ["embed", "*.*"]) as seen:
        tiny_llm.model(torch.tensor([ids]))
    assert found["tokens"].tolist() == [ids]
    size = 4 * sum(x.size for name, x in found.items() if name != "tokens")
    assert len(found) == 2 + 11 * config.n_layers
    names = {"embed": "hook_embed", "resid_pre.1": "blocks.1.hook_resid_pre", "pattern.0": "blocks.0.attn.hook_pattern"}
    names |= {"v.1": "blocks.1.attn.hook_v", "z.1": "blocks.1.attn.hook_z", "attn_out.0": "blocks.0.hook_attn_out"}
    names |= {"resid_mid.1": "blocks.1.hook_resid_mid", "mlp_hidden.0": "blocks.0.mlp.hook_post"}
    names |= {"mlp_out.1": "blocks.1.hook_mlp_out", "resid_post.0": "blocks.0.hook_resid_post"}
    for own, name in names.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], seen[own], err_msg=name)
    for letter in "qk":  # rotated as there: entry i of a head with entry i + D/2
        D, x = config.head_dim, seen[f"{letter}.1"][0].numpy()  # (T, heads, D)
        i = np.argsort([*range(0, D, 2), *range(1, D, 2)]) if tiny_llm.model.rope.layout == "half" else np.arange(D)
        z = x[..., i].reshape(*x.shape[:2], -1, 2) @ [1, 1j]  # (T, heads, D/2)
        turned = z * np.exp(1j * np.arange(len(ids))[:, None, None] * 10000.0 ** (-np.arange(D // 2) * 2 / D))
        expected = np.concatenate((turned.real, turned.imag), -1)
        np.testing.assert_allclose(found[f"blocks.1.attn.hook_rot_{letter}"][0], expected, atol=1e-5)
    with monkeypatch.context() as small:
        small.setattr("llama.server.look.LARGEST_FILE", size)
        assert post(server, "/look/activations", ids=ids).status_code == 200
        small.setattr("llama.server.look.LARGEST_FILE", 50_000)
        small.setattr(type(tiny_llm.model), "forward", None)  # refused before it is computed
        refused = post(server, "/look/activations", ids=ids)
        assert refused.status_code == 400
        assert (
            f"the activations of {len(ids)} tokens have {size >> 20} MiB; the limit is 0 MiB"
            in refused.json()["error"]["message"]
        )
        small.setattr("llama.server.requests.LONGEST_PAGE", 9)
        assert "at most 9" in post(server, "/look/activations", ids=ids).json()["error"]["message"]
