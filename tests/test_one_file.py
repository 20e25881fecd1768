"""scripts/one_file.py: the tokens and logits of the package, in a file that fits on a few pages."""

from __future__ import annotations

import ast
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

import llama
from llama.generate import generate
from llama.rope import precompute_freqs_cis
from llama.sampling import SamplingParams, probs
from llama.system.folders import cache_folder
from llama.text import Llama

from . import tiny
from .scripts import one_file

FILE = Path(one_file.__file__)
QUESTIONS = [
    "What is the capital of Japan?",
    "Why is the sky blue?",
    "2 + 2 = ? Answer with digits, as in 1234567.",
    "日本の首都はどこですか？",
    "Name three 👩🏽‍🚀 astronauts.",
    "def f(x):\n\treturn x  # what does it do?",
    "  leading spaces\n\n and lines  ",
    "Translate 'good morning' to French.",
    "Write a haiku about the sea.",
    "",
]
NEW = 6  # tokens of an answer


@pytest.fixture(scope="module")
def opened(default_gguf: Path) -> tuple[Any, Any]:
    """The script's model and tokenizer."""
    file = gguf.GGUFReader(default_gguf)
    metadata = {name: field.contents() for name, field in file.fields.items()}
    return one_file.read_model(file, metadata), one_file.read_tokenizer(metadata)


@pytest.fixture(scope="module")
def plain_llm(default_gguf: Path) -> Llama:
    return llama.load(default_gguf, dtype="float32", device="cpu", fast=False)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [str(FILE), *arguments])
    runpy.run_path(str(FILE), run_name="__main__")


# ---------------------------------------------------------------------------------------------- the same numbers
@pytest.mark.parametrize("question", QUESTIONS)
def test_greedy_tokens_and_logits_are_the_packages(opened: tuple[Any, Any], plain_llm: Llama, question: str) -> None:
    """The package computes all logits in one pass, so the script's cache is compared with no cache.

    If each token is the package's best one after the tokens before it, its greedy answer is the same.
    """
    model, tokenizer = opened
    prompt = tokenizer.encode(one_file.chat_prompt(question)).ids
    assert prompt == plain_llm.encode_chat([{"role": "user", "content": question}])
    logits = []
    with pytest.MonkeyPatch.context() as patch:
        forward = one_file.forward
        patch.setattr(one_file, "forward", lambda *given: logits.append(forward(*given)) or logits[-1])
        tokens = list(one_file.generate(model, prompt, NEW, 0.0, 1.0))
    expected = plain_llm.model(torch.tensor([prompt + tokens[:-1]]))[0, len(prompt) - 1 :]  # (NEW, V)
    assert tokens == expected.argmax(-1).tolist()
    torch.testing.assert_close(torch.stack(logits), expected, rtol=0, atol=1e-4)


def test_a_seed_draws_the_packages_tokens(opened: tuple[Any, Any], plain_llm: Llama) -> None:
    model, tokenizer = opened
    prompt = tokenizer.encode(one_file.chat_prompt(QUESTIONS[1])).ids
    torch.manual_seed(7)
    ours = list(one_file.generate(model, prompt, 8, 0.9, 0.8))
    params = SamplingParams(max_new_tokens=8, temperature=0.9, top_p=0.8, seed=7)
    assert ours == [token.id for token in generate(plain_llm.model, prompt, params)]


@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.5, 0.9, 1.0])
def test_top_p_keeps_the_packages_tokens(monkeypatch: pytest.MonkeyPatch, top_p: float) -> None:
    """Also where equal tokens compete, and where the sum reaches top_p exactly."""
    drawn: list[torch.Tensor] = []
    monkeypatch.setattr(torch, "multinomial", lambda probabilities, count: drawn.append(probabilities) or torch.zeros(1))
    for logits in (torch.randn(500) * 3, torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.25] * 4).log()):
        one_file.choose(logits, 1.3, top_p)
        expected = probs(logits, SamplingParams(temperature=1.3, top_p=top_p))  # (V,)
        assert torch.equal(drawn[-1] > 0, expected > 0)
        torch.testing.assert_close(drawn[-1] / drawn[-1].sum(), expected)


def test_rotations_are_the_packages() -> None:
    """The package rounds the frequencies to float32, which is 8192 * 2^-24 radians at the last position."""
    expected = precompute_freqs_cis(64, 8192, 100000.0)
    torch.testing.assert_close(one_file.precompute_freqs_cis(64, 8192, 100000.0), expected, rtol=0, atol=8192 * 2**-24)


@pytest.mark.parametrize("tied", [True, False])
def test_another_model_of_this_kind(tmp_path: Path, tied: bool) -> None:
    """Other sizes, and an output matrix of its own: the sizes come from the file."""
