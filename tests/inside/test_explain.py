"""Every step passes on models of many kinds, shows the model's own numbers, and fails if the model computes another."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from llama import attention, model, rope
from llama.cli import main
from llama.errors import UsageError
from llama.inside import explain
from llama.model import Transformer
from llama.rope import to_layout
from llama.text import Llama

from .. import tiny
from .test_trace import fingerprint

pytestmark = pytest.mark.usefixtures("one_thread")

ROOT = Path(__file__).parents[2]
IDS = list(b"The cat")
STEPS = [
    "embedding", "RMSNorm", "projections", "RoPE", "scores", "softmax", "weighted sum", "output projection",
    "residual", "second RMSNorm", "SwiGLU", "second residual",
]  # fmt: skip


@pytest.mark.parametrize("form", rope.FORMS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_bias": True, "mlp_bias": True, "head_dim": 24},
        {"qkv_bias": True, "no_rope_layers": (1,)},
        {"qkv_bias": True, "qk_norm": True, "norm_eps": 1e-2},
        {"n_kv_heads": 1, "rope_theta": 500.0, "norm_eps": 1e-2},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_seq_len": 4},
    ],
)
def test_every_step_passes_with_the_same_numbers_in_every_form(changes: dict[str, Any], form: str) -> None:
    config = dataclasses.replace(tiny.CONFIG, **changes)
    net = Transformer(config, rope=form).requires_grad_(False).eval()
    weights, D = tiny.weights(config), config.head_dim
    net.load_state_dict({k: to_layout(k, t, D, "interleaved", net.rope.layout) for k, t in weights.items()})
    before = fingerprint(net)
    for layer in range(2):
        found, same = explain.explain(net, IDS, layer=layer), explain.explain(tiny.model(config), IDS, layer=layer)
        assert [step["name"] for step in found["steps"]] == STEPS
        assert found["passed"]
        assert any("in Meta's layout" in note for note in found["says"]) == (form == "half")
        for source in (source for step in found["steps"] for source in step["sources"]):
            assert source is not None
            assert (ROOT / source["file"]).read_text().splitlines()[source["line"] - 1].strip() == source["text"]
        for a, b in zip(found["steps"], same["steps"], strict=True):
            for x, y in zip(a["values"], b["values"], strict=True):
                assert x["numbers"] == pytest.approx(y["numbers"], abs=1e-4)
    assert fingerprint(net) == before


def test_the_default_model_passes_in_its_last_layer(default_llm: Llama) -> None:
    ids = default_llm.tokenizer.encode_prompt("The cat sat on the mat because it was warm.")
    assert explain.explain(default_llm.model.float(), ids, layer=29)["passed"]


@pytest.mark.parametrize("seed", range(5))
def test_a_model_with_scores_of_thousands_passes_in_every_layer(seed: int) -> None:
    """Qwen2's biases of q and k are as large; softmax turns one ulp of a score of 8,000 into an error of 1e-3."""
    config = dataclasses.replace(tiny.CONFIG, qkv_bias=True)
    net = tiny.model(config, seed)
    for layer in range(2):
        for name in ("wq", "wk"):
            bias = net.get_submodule(f"layers.{layer}.attention.{name}").bias
            bias.copy_(150 * torch.randn(bias.shape, generator=torch.Generator().manual_seed(seed)).clamp(-1, 1))
        ids = list(range(seed, 250, 1 + 9 * layer))
        found = explain.explain(net, ids, layer=layer)
        assert found["passed"], [(step["name"], step["difference"]) for step in found["steps"] if not step["passed"]]
    values = {value["letter"]: value["numbers"] for step in found["steps"] for value in step["values"]}
    assert max(map(abs, values["s"])) > 1000


def test_a_query_that_is_orthogonal_to_its_key_passes() -> None:
    """The score is the small difference of large products, so its error is large in relation to the score."""
    config = dataclasses.replace(tiny.CONFIG, n_heads=1, n_kv_heads=1, head_dim=2, no_rope_layers=(0, 1), qkv_bias=True)
    net = tiny.model(config)
    for name, bias in (("wq", [150.0, 149.0]), ("wk", [149.0, -150.0])):
        net.get_submodule(f"layers.0.attention.{name}").bias.copy_(torch.tensor(bias))
        net.get_submodule(f"layers.0.attention.{name}").weight.mul_(1e-3)
    assert explain.explain(net, [5])["passed"]


def other_mask(q: Any, k: Any, mask: Any) -> torch.Tensor:
    return (q.float() @ k.float().repeat_interleave(2, 1).transpose(-2, -1)) / q.shape[-1] ** 0.5


def cold_softmax(q: Any, k: Any, mask: Any) -> torch.Tensor:
    scores = (q.float() @ k.float().repeat_interleave(2, 1).transpose(-2, -1)) / q.shape[-1] ** 0.5
    return 1.0001 * scores.masked_fill(~mask, -torch.inf).softmax(dim=-1)


def swiglu(wrong: Any) -> Any:
    return lambda self, x: self.w_down(wrong(self.w_gate(x)) * self.w_up(x))


@pytest.mark.parametrize(
    ("place", "name", "wrong", "steps"),
    [
        (attention, "reference_scores", other_mask, ["scores"]),
        (attention, "reference_weights", cold_softmax, ["weighted sum"]),  # the softmax itself is right
        (model.FeedForward, "forward", swiglu(F.gelu), ["SwiGLU"]),
        (model.FeedForward, "forward", swiglu(lambda x: 0.999 * F.silu(x)), ["SwiGLU"]),
        (model.RMSNorm, "forward", lambda self, x: F.layer_norm(x, x.shape[-1:]) * self.weight,
         ["RMSNorm", "second RMSNorm"]),
    ],
)  # fmt: skip
def test_only_the_wrong_steps_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], place: Any, name: str, wrong: Any, steps: Any
) -> None:
    monkeypatch.setattr(place, name, wrong)
    assert main(["explain", "-q"]) == 1
    verdicts = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("   PASS", "   FAIL"))]
    assert [step for step, verdict in zip(STEPS, verdicts, strict=True) if "FAIL" in verdict] == steps


def test_the_numbers_are_those_of_the_selected_token() -> None:
    net = explain.random_model()
    found = {value["letter"]: value for step in explain.explain(net, IDS, token=2)["steps"] for value in step["values"]}
    embedded = net.tok_embeddings(torch.tensor([IDS]))
    x = net.layers[0].attention_norm(embedded)
    assert found["e"]["numbers"] == found["h"]["numbers"] == embedded[0, 2].tolist()
    assert found["x"]["numbers"] == pytest.approx(x[0, 2].tolist(), abs=1e-6)
    assert found["q"]["numbers"] == pytest.approx(net.layers[0].attention.wq(x)[0, 2, :4].tolist(), abs=1e-6)
    assert (found["q"]["shape"], found["k"]["shape"]) == ((2, 7, 4), (1, 7, 4))
    assert len(found["s"]["numbers"]) == len(found["p"]["numbers"]) == 3  # the tokens that token 2 sees
    assert sum(found["p"]["numbers"]) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token": 7}, "from 0 to 6, .* got 7"),
        ({"layer": -1}, "from 0 to 1"),
        ({"ids": []}, "1 to 256 tokens, got 0"),
        ({"ids": [1] * 257}, "got 257"),
    ],
)
def test_errors_name_the_valid_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        explain.explain(explain.random_model(), **{"ids": IDS, **options})


def test_the_command_writes_json_about_a_model_and_a_scaling(
    capsys: pytest.CaptureFixture[str], tiny_gguf: Path
) -> None:
    args = ["explain", "-m", str(tiny_gguf), "--text", "hello", "--token", "0", "--layer", "1", "--json", "-q"]
    assert main([*args, "--rope-scaling", "yarn", "--rope-factor", "4"]) == 0
    found = json.loads(capsys.readouterr().out)
    keys = ["settings", "says", "passed", "steps"]
    assert (list(found), found["passed"], found["settings"]["text"]) == (keys, True, "hello")
    assert [step["name"] for step in found["steps"]] == STEPS
    step = found["steps"][3]
    assert list(step) == ["name", "equation", "values", "sources", "difference", "passed"]
    assert "scaled by yarn" in step["equation"]
    assert list(step["sources"][0]) == ["file", "line", "text"]


def test_options_of_a_model_need_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--quantize", "int8", "-q"]) == 2
    assert "the tiny random model runs in float32" in capsys.readouterr().err
