"""scripts/one_file.py: the tokens and logits of the package, in a file that fits on a few pages."""

from __future__ import annotations

import ast
import dataclasses
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

import llama
from llama import rope
from llama.hub import models
from llama.sampling import SamplingParams, probs
from llama.system.folders import cache_folder
from llama.text import Llama

from . import tiny
from .scripts import one_file

pytestmark = pytest.mark.usefixtures("one_thread")
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


def read(path: Path) -> tuple[Any, Any]:
    """The script's model and tokenizer."""
    file = gguf.GGUFReader(path)
    metadata = {name: field.contents() for name, field in file.fields.items()}
    return one_file.read_model(file, metadata), one_file.read_tokenizer(metadata)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> None:
    monkeypatch.setattr(sys, "argv", [str(FILE), *map(str, arguments)])
    runpy.run_path(str(FILE), run_name="__main__")


def check_answer(script: Any, llm: Llama, prompt: list[int]) -> None:
    """The script's greedy tokens and their logits are the package's.

    The package computes all logits in one pass, so the script's cache is compared with no cache. If each token is the
    package's best one after the tokens before it, the package's greedy answer is the same.
    """
    logits: list[torch.Tensor] = []
    forward = one_file.forward
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_file, "forward", lambda *given: logits.append(forward(*given)) or logits[-1])
        tokens = list(one_file.generate(script, prompt, NEW, 0.0, 1.0))
    expected = llm.model(torch.tensor([prompt + tokens[:-1]]))[0, len(prompt) - 1 :]  # (NEW, V)
    assert tokens == expected.argmax(-1).tolist()
    torch.testing.assert_close(torch.stack(logits), expected, rtol=0, atol=1e-4)


# --------------------------------------------------------------------------------------- the default model
@pytest.fixture(scope="module")
def default_script(default_gguf: Path) -> tuple[Any, Any]:
    return read(default_gguf)


@pytest.fixture(scope="module")
def plain_llm(default_gguf: Path) -> Llama:
    return llama.load(default_gguf, dtype="float32", device="cpu", fast=False)


@pytest.mark.parametrize(
    "question", [q if i in (0, 3) else pytest.param(q, marks=pytest.mark.slow) for i, q in enumerate(QUESTIONS)]
)
def test_greedy_answers_of_the_default_model(default_script: tuple[Any, Any], plain_llm: Llama, question: str) -> None:
    model, tokenizer = default_script
    prompt = tokenizer.encode(one_file.chat_prompt(question)).ids
    assert prompt == plain_llm.encode_chat([{"role": "user", "content": question}])
    check_answer(model, plain_llm, prompt)


@pytest.mark.slow
def test_it_answers_the_question(
    default_gguf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "--model", default_gguf, QUESTIONS[0])
    assert capsys.readouterr().out == "The capital of Japan is Tokyo.\n"


# -------------------------------------------------------------------------------------------- small models
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("n_kv_heads", [1, 2, 4])
def test_models_of_other_sizes(tmp_path: Path, tied: bool, n_kv_heads: int) -> None:
    """All sizes come from the file, and a seed repeats its draws."""
    config = dataclasses.replace(tiny.CONFIG, n_kv_heads=n_kv_heads, tie_embeddings=tied)
    path = tiny.write_gguf(tmp_path / "x.gguf", config, tiny.weights(config))
    (model, tokenizer), llm = read(path), llama.load(path, dtype="float32", device="cpu", fast=False)
    text = one_file.chat_prompt("In 1969 \u00bd of a caf\u00e9's\n\n guests...")
    prompt = tokenizer.encode(text).ids
    assert prompt == llm.tokenizer.encode(text, parse_special=True)
    check_answer(model, llm, prompt)
    drawn = []
    for _ in range(2):
        torch.manual_seed(7)
        drawn.append(list(one_file.generate(model, prompt, 8, 0.9, 0.8)))
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.5, 0.9, 1.0])
def test_top_p_keeps_the_packages_tokens(monkeypatch: pytest.MonkeyPatch, top_p: float) -> None:
    """Also where equal tokens compete, and where the sum reaches top_p exactly."""
    given: list[torch.Tensor] = []
    monkeypatch.setattr(
        torch, "multinomial", lambda probabilities, count: given.append(probabilities) or torch.zeros(1)
    )
    generator = torch.Generator().manual_seed(0)
    for logits in (torch.randn(500, generator=generator), torch.zeros(4), torch.tensor([0.5, 0.3, 0.2]).log()):
        one_file.choose(logits, 1.0, top_p)
        expected = probs(logits, SamplingParams(temperature=1.0, top_p=top_p))  # (V,)
        assert torch.equal(given[-1] > 0, expected > 0)
        torch.testing.assert_close(given[-1] / given[-1].sum(), expected)


def test_rotations_are_the_packages_up_to_the_last_position() -> None:
    """The package rounds angles to float32: the largest by up to 8192 * 2^-24 radians."""
    ours, theirs = (module.precompute_freqs_cis(64, 8192, 100000.0) for module in (one_file, rope))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=8192 * 2**-24)


# --------------------------------------------------------------------------------------------- the command
@pytest.fixture
def printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What the script prints with a model in the cache folder whose logits are all equal, and `first` as its id 0."""
    state = {**tiny.weights(), "norm.weight": torch.zeros(tiny.CONFIG.dim)}
    vocabulary = tiny.byte_vocabulary()
    tokens, types = vocabulary["tokenizer.ggml.tokens"], vocabulary["tokenizer.ggml.token_type"]

    def answer(first: str, *arguments: str) -> str:
        at = tokens.index(first)
        for values in (tokens, types):
            values[0], values[at] = values[at], values[0]
        tiny.write_gguf(tmp_path / models.FILE, state=state, metadata=vocabulary)
        monkeypatch.setenv("CLEARLLAMA_CACHE", str(tmp_path))
        run(monkeypatch, "Hello?", *arguments)
        return capsys.readouterr().out

    return answer


@pytest.mark.parametrize(
    ("first", "expected"), [("h", "hhh\n"), ("<|im_end|>", "\n"), ("<|endoftext|>", "\n"), ("<|im_start|>", "\n")]
)
def test_it_prints_the_answer_without_control_tokens(printed: Callable[..., str], first: str, expected: str) -> None:
    assert printed(first, "--max-new-tokens", "3") == expected


def test_a_seed_repeats_an_answer(printed: Callable[..., str]) -> None:
    """top_p keeps the ids 0 and 1, h and <|im_start|>; one of them is drawn 30 times, and h is printed."""
    options = "--temperature", "1", "--top-p", str(1.5 / tiny.CONFIG.vocab_size), "--max-new-tokens", "30", "--seed"
    answers = [printed("h", *options, seed) for seed in ("1", "1", "2")]
    assert answers[0] == answers[1] != answers[2]
    assert 0 < answers[0].count("h") < 30


@pytest.mark.parametrize("variables", [{}, {"XDG_CACHE_HOME": "/nowhere/x"}, {"CLEARLLAMA_CACHE": "~/nowhere"}])
def test_without_the_file_it_says_where_it_was_expected(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variables: dict[str, str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_CACHE_HOME", "CLEARLLAMA_CACHE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as error:
        run(monkeypatch, "Hello?")
    path = cache_folder() / models.FILE
    assert error.value.code == f"there is no file {path}; run clearllama pull, or pass --model FILE"


@pytest.mark.parametrize(("architecture", "pre"), [("llama", "llama-bpe"), ("qwen2", "smollm"), ("llama", None)])
def test_another_family_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, architecture: str, pre: str | None
) -> None:
    metadata = {"general.architecture": architecture, "tokenizer.ggml.pre": pre}
    path = tiny.write_gguf(tmp_path / "x.gguf", metadata=metadata)
    with pytest.raises(SystemExit) as error:
        run(monkeypatch, "--model", path, "Hello?")
    expected = "expected architecture llama with the tokenizer smollm"
    assert error.value.code == f"{expected}, found {architecture} with {pre}"


def test_it_fits_on_paper_and_stands_alone() -> None:
    lines = FILE.read_text().splitlines()
    assert len(lines) <= 200
    assert max(map(len, lines)) <= 100
    names: set[str] = set()
    for node in ast.walk(ast.parse(FILE.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").split(".")[0])
    assert names - sys.stdlib_module_names == {"torch", "gguf", "tokenizers"}
