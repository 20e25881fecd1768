"""RoPE settings that override the checkpoint's, in Python and on the command line, and length-dependent scalings."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from llama.cli import main
from llama.errors import UsageError
from llama.loader import load, load_model, with_rope
from llama.model import Transformer
from llama.rope import Rope
from llama.rope_scaling import inverse_frequencies, reach
from llama.tools.perplexity import nats

from . import tiny
from .scripts import make_tiny

pytestmark = pytest.mark.usefixtures("one_thread")
TRAINED = 32
PAIRS = tiny.CONFIG.head_dim // 2
STRETCHES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "ntk", "factor": 4.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0},
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
]
BY_LENGTH: list[dict[str, Any]] = [
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "longrope", "factor": 8.0, "original_max_position_embeddings": TRAINED,
     "short_factor": [1.0] * PAIRS, "long_factor": [1.0 + i for i in range(PAIRS)]},
]  # fmt: skip


def model_with(scaling: dict[str, Any], **changes: Any) -> Transformer:
    config = dataclasses.replace(tiny.CONFIG, max_seq_len=TRAINED, rope_scaling=scaling, **changes)
    return tiny.model(config, max_seq_len=256)


# ------------------------------------------------------------------------- frequencies that change with the length
class EachAtItsOwnLength(Rope):
    """Reference: each token keeps the frequencies of the text length at which it entered the cache."""

    def __init__(self, scaling: dict[str, Any], prompt: int):
        super().__init__("complex", tiny.CONFIG.head_dim, 256, 10000.0, scaling, TRAINED)
        self.scaling, self.prompt = scaling, prompt

    def freqs_cis(self, positions: Tensor, end: int) -> Tensor:
        found = []
        for position in positions.tolist():
            length = max(self.prompt, position + 1)
            inv_freq, factor = inverse_frequencies(
                tiny.CONFIG.head_dim, 10000.0, self.scaling, seq_len=length, max_seq_len=TRAINED
            )
            angles = position * inv_freq.double().numpy()
            found.append(factor * (np.cos(angles) + 1j * np.sin(angles)))
        return torch.tensor(np.stack(found)).to(torch.complex64)  # (T, D/2)


@pytest.mark.parametrize("scaling", BY_LENGTH, ids=lambda scaling: scaling["rope_type"])
@pytest.mark.parametrize("prompt", [5, 31, 40])
def test_keys_in_the_cache_keep_the_frequencies_they_entered_with(scaling: dict[str, Any], prompt: int) -> None:
    model, length = model_with(scaling), 60
    tokens = tiny.random_tokens(length)
    cache = model.new_cache(length)
    one_by_one = [model(tokens[:, :prompt], cache=cache)[0, -1]]
    one_by_one += [model(tokens[:, t : t + 1], cache=cache)[0, -1] for t in range(prompt, length)]

    reference = model_with(scaling)
    reference.rope = EachAtItsOwnLength(scaling, prompt)
    expected = reference(tokens)[0, prompt - 1 :]  # one full pass, no cache
    torch.testing.assert_close(torch.stack(one_by_one), expected, rtol=0, atol=2e-5)

    at_end = model(tokens)[0, prompt - 1 :]  # without a cache, all tokens use the frequencies of the final length
    same = scaling["rope_type"] == "longrope" and prompt > TRAINED  # the long list applies from the start
    assert ((at_end - expected).abs().max() < 1e-4) == same


# --------------------------------------------------------------------------------------------------- with_rope, reach
def test_a_scaling_that_replaces_another_starts_from_the_original_context() -> None:
    config = make_tiny.real_config("llama-3.1-8b")
    assert reach(config) == 131072
    assert with_rope(config, {"rope_type": "yarn", "factor": 4.0}).max_seq_len == 8192
    plain = with_rope(config, {"rope_type": "default"})
    assert (plain.rope_scaling, plain.max_seq_len) == (None, 8192)
    both = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}  # the spelling of transformers 5
    assert with_rope(config, both) == with_rope(config, {"rope_type": "linear", "factor": 2.0}, 5e5)
    assert with_rope(config, both).rope_theta == 5e5
    assert with_rope(config, theta=5e5) == dataclasses.replace(config, rope_theta=5e5)
    assert with_rope(config) == config


@pytest.mark.parametrize(
    ("trained", "given", "expected"),
    [
        (8192, {"factor": 8.0, "original_max_position_embeddings": 8192}, 65536),
        (8192, {"factor": 8.0}, 65536),
        (4096, {"factor": 8.0, "original_max_position_embeddings": 8192}, 65536),  # as yarn
        (131072, {"factor": 32.0, "original_max_position_embeddings": 8192}, 131072),  # the file of Llama 3.2
    ],
)
def test_llama3_extends_a_context_that_is_not_extended_yet(
    trained: int, given: dict[str, Any], expected: int, tmp_path: Path
) -> None:
    scaling = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **given}
    config = dataclasses.replace(tiny.CONFIG, max_seq_len=trained)
    assert reach(with_rope(config, scaling)) == reach(dataclasses.replace(config, rope_scaling=scaling)) == expected
    if trained == 8192:
        path = tiny.write_gguf(tmp_path / "tiny.gguf", config)
        assert load_model(path, rope_scaling=scaling).max_seq_len == expected


@pytest.mark.parametrize(
    ("scaling", "theta"),
    [
        ({"rope_type": "yarn", "factor": -4.0}, None),
        ({"rope_type": "spiral"}, None),
        ({"rope_type": "longrope", "factor": 4.0}, None),
        *(
            ({**BY_LENGTH[1], "long_factor": [1.0] * (PAIRS - 1) + [wrong]}, None)
            for wrong in (0.0, -1.0, float("nan"))
        ),
        ({"rope_type": "yarn"}, None),  # would load with the context of the file
        ({}, None),
        ("yarn", None),
        ({"rope_type": "yarn", "factor": 4.0, "beta_fats": 16}, None),
        ({"rope_type": "yarn", "type": "linear", "factor": 4.0}, None),
        ({"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}, 1e4),
        (None, 0.0),
        (None, float("inf")),
    ],
)
def test_bad_scalings_are_usage_errors(scaling: Any, theta: float | None) -> None:
    with pytest.raises(UsageError):
        with_rope(tiny.CONFIG, scaling, theta)


# -------------------------------------------------------------------------------------------- loading, command line
@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_gguf(tmp_path_factory.mktemp("rope") / "tiny.gguf")


@pytest.mark.parametrize("scaling", STRETCHES, ids=lambda scaling: scaling["rope_type"])
def test_loading_with_a_scaling_equals_a_model_with_that_scaling(file: Path, scaling: dict[str, Any]) -> None:
    """Its context is longer by the factor."""
    model = load_model(file, dtype="float32", rope_scaling=scaling, rope_theta=5e4)
    expected = tiny.model(dataclasses.replace(tiny.CONFIG, rope_scaling=scaling, rope_theta=5e4))
    assert model.max_seq_len == reach(expected.config) == scaling["factor"] * tiny.CONFIG.max_seq_len
    tokens = tiny.random_tokens(300)
    assert torch.equal(model(tokens), expected(tokens))
    assert (model(tokens) - load_model(file, dtype="float32", max_seq_len=300)(tokens)).abs().max() > 1e-2


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main(args)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("words", [("yarn", "--rope-factor", "4"), ('{"rope_type": "yarn", "factor": 4}',)])
def test_the_command_line_extends_a_context(
    file: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = "hello " * 200  # longer than the context of the file, 256 tokens
    base = ("generate", "-m", str(file), "--raw", "--dtype", "float32", "-n", "8", "--json", prompt)
    code, _, err = run(capsys, *base)
    assert code == 1
    assert "the context of 256" in err
    code, out, err = run(capsys, *base, "--rope-scaling", *words, "--rope-theta", "20000")
    assert code == 0
    assert "RoPE override: rope_type yarn, factor 4" in err
    expected = load(file, dtype="float32", rope_scaling={"rope_type": "yarn", "factor": 4.0}, rope_theta=20000.0)
    assert json.loads(out)["tokens"] == expected.generate(prompt, max_new_tokens=8).tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--rope-factor", "4"], "add --rope-scaling"),
        (["--rope-scaling", "yarn"], "rope scaling yarn needs a factor"),
        (["--rope-scaling", '{"factor": 4}'], "has no rope_type"),
        (["--rope-scaling", "yarn", "--rope-factor", "0"], "from 1 to 10000, got 0"),
        (["--rope-scaling", '{"rope_type": "yarn", "factor": 4, "factor": 8}'], "a key occurs twice"),
        (["--rope-scaling", '{"rope_type": "yarn"', "--rope-factor", "4"], "not valid JSON"),
        (["--rope-theta", "-1"], "--rope-theta must be a number above 0"),
    ],
)
def test_errors_of_bad_options_are_one_line(
    file: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    code, out, err = run(capsys, "generate", "-m", str(file), "--raw", "hello", *options)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


# -------------------------------------------------------------------------------------------------------- perplexity
@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_log_probabilities_in_chunks_equal_one_full_pass(chunk: int) -> None:
    model, tokens = tiny.model(), tiny.random_tokens(65, batch=3)
    expected = model(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)  # (B, T - 1)
    (found,) = nats(model, [tokens], chunk=chunk)
    torch.testing.assert_close(-found, expected, rtol=0, atol=2e-5)


def test_a_text_longer_than_the_context_is_refused() -> None:
    with pytest.raises(Exception, match="outside the 256 positions"):
        nats(tiny.model(), [tiny.random_tokens(300)])
    with pytest.raises(UsageError, match="at least 2 tokens"):
        nats(tiny.model(), [tiny.random_tokens(1)])
