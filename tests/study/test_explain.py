"""Every step passes on models of many kinds, and a wrong formula fails at its own step."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llama import attention, model, rope
from llama.checkpoint.write import to_layout
from llama.cli import main
from llama.errors import UsageError
from llama.model import Transformer
from llama.rope import FORMS, Rope
from llama.study import explain
from llama.text import Llama

from .. import tiny
from ..conftest import Run
from .test_trace import fingerprint

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = list(b"The cat")
STEPS = [
    "embedding", "RMSNorm", "projections", "RoPE", "scores", "softmax", "weighted sum", "output projection",
    "residual", "second RMSNorm", "SwiGLU", "second residual",
]  # fmt: skip


def verdicts(net: Transformer, ids: list[int] = IDS, **options: Any) -> dict[str, bool]:
    return {step.recipe.name: step.check.passed for step in explain.explain(net, ids, **options).steps}


# ------------------------------------------------------------------------------------------------- correct models
def test_every_step_of_the_tiny_model_passes() -> None:
    net = explain.tiny_model()
    before = fingerprint(net)
    found = explain.explain(net, IDS)
    assert [step.recipe.name for step in found.steps] == STEPS
    assert found.report.passed
    assert fingerprint(net) == before
    assert all(0 <= step.check.computed < 1e-6 for step in found.steps)


@pytest.mark.parametrize("form", list(FORMS))
def test_in_every_form_of_the_rotation(form: str) -> None:
    net = Transformer(tiny.CONFIG, rope=form).requires_grad_(False).eval()
    layout = net.rope.layout
    net.load_state_dict({k: to_layout(k, t, 16, "interleaved", layout) for k, t in tiny.weights().items()})
    found = explain.explain(net, IDS, layer=1)
    assert found.report.passed
    assert all(source is not None for step in found.steps for source in step.sources)
    same = explain.explain(tiny.model(), IDS, layer=1)
    for a, b in zip(found.steps, same.steps, strict=True):  # the numbers are in Meta's layout for every form
        for x, y in zip(a.values, b.values, strict=True):
            assert x.numbers == pytest.approx(y.numbers, abs=1e-4)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"qkv_bias": True, "no_rope_layers": (1,)},
        {"n_kv_heads": 1},
        {"n_kv_heads": 4},
        {"head_dim": 24},
        {"tie_embeddings": True},
        {"rope_theta": 500.0, "norm_eps": 1e-2},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}, "max_seq_len": 4},
    ],
)
@pytest.mark.parametrize("layer", [0, 1])
def test_on_other_architectures(changes: dict[str, Any], layer: int) -> None:
    net = tiny.model(dataclasses.replace(tiny.CONFIG, **changes))
    assert all(verdicts(net, layer=layer).values())


@pytest.mark.parametrize("form", FORMS)
def test_a_block_without_rope_is_explained_with_zero_angles(form: str) -> None:
    config = dataclasses.replace(tiny.CONFIG, no_rope_layers=(1,))
    net = Transformer(config, rope=form).requires_grad_(False).eval()
    layout = net.rope.layout
    net.load_state_dict({k: to_layout(k, t, 16, "interleaved", layout) for k, t in tiny.weights(config).items()})
    for layer, says in ((0, False), (1, True)):
        found = explain.explain(net, IDS, layer=layer)
        assert found.report.passed
        assert any("has no RoPE" in line for line in found.report.says) == says


@pytest.mark.parametrize("ids", [[5], list(range(200))])
def test_on_one_token_and_on_many(ids: list[int]) -> None:
    assert all(verdicts(tiny.model(), ids).values())


def test_the_default_model_passes_in_its_first_and_last_layer(default_llm: Llama) -> None:
    ids = default_llm.tokenizer.encode_prompt("The cat sat on the mat because it was warm.")
    for layer in (0, 29):
        found = explain.explain(default_llm.model, ids, layer=layer)
        assert found.report.passed, explain.text(found)


# -------------------------------------------------------------------------------------------------- wrong formulas
def plant_norm(monkeypatch: pytest.MonkeyPatch, net: Transformer) -> None:
    def forward(self: model.RMSNorm, x: Tensor) -> Tensor:  # subtracts the mean first, like LayerNorm
        y = x.float() - x.float().mean(-1, keepdim=True)
        return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps) * self.weight

    monkeypatch.setattr(model.RMSNorm, "forward", forward)


def plant_epsilon(monkeypatch: pytest.MonkeyPatch, net: Transformer) -> None:
    for block in net.layers:
        monkeypatch.setattr(block.attention_norm, "eps", 1e-3)


def plant_rope_sign(monkeypatch: pytest.MonkeyPatch, net: Transformer) -> None:
    def rotate(q: Tensor, k: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
        return rope.apply_rotary_emb(q, k, freqs_cis.conj())

    for block in net.layers:
        monkeypatch.setattr(block.attention.apply_rotary_emb, "rotate", rotate)


def plant_rope_positions(monkeypatch: pytest.MonkeyPatch, net: Transformer) -> None:
    freqs_cis = Rope.freqs_cis
    monkeypatch.setattr(Rope, "freqs_cis", lambda self, positions, end: freqs_cis(self, positions + 1, end + 1))


def plant_half(monkeypatch: pytest.MonkeyPatch, net: Transformer) -> None:
    def rotate(q: Tensor, k: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:  # half's pairs, interleaved weights
        cos, sin = (torch.cat((part, part), -1) for part in (freqs_cis.real, freqs_cis.imag))
        return rope.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)

    for block in net.layers:
        monkeypatch.setattr(block.attention.apply_rotary_emb, "rotate", rotate)


def plant_scale(monkeypatch: pytest.MonkeyPatch, net: Transformer) -> None:
    right = attention.reference_weights
    monkeypatch.setattr(attention, "reference_weights", lambda q, k, mask=None: right(q * q.shape[-1] ** 0.5, k, mask))


def plant_groups(monkeypatch: pytest.MonkeyPatch, net: Transformer) -> None:
    right = attention.reference_weights

    def tiled(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:  # head h reads key head h mod KV
        return right(q, k.repeat(1, q.shape[1] // k.shape[1], 1, 1), mask)

    monkeypatch.setattr(attention, "reference_weights", tiled)


def plant_mask(monkeypatch: pytest.MonkeyPatch, net: Transformer) -> None:
    monkeypatch.setattr(model, "causal_mask", lambda p, k: k.unsqueeze(-2) <= p.unsqueeze(-1) + 1)


def plant_softmax(monkeypatch: pytest.MonkeyPatch, net: Transformer) -> None:
    def weights(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scores = (q @ k.transpose(-2, -1)) / q.shape[-1] ** 0.5
        return scores.masked_fill(~mask, -torch.inf).softmax(dim=-2)  # over the queries

    monkeypatch.setattr(attention, "reference_weights", weights)


def plant_sum(monkeypatch: pytest.MonkeyPatch, net: Transformer) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        v = v.repeat(1, q.shape[1] // v.shape[1], 1, 1)  # correct for one key head, wrong for two
        return attention.reference_weights(q, k, mask) @ v

    monkeypatch.setattr(attention, "reference", attend)


def plant_heads_order(monkeypatch: pytest.MonkeyPatch, net: Transformer) -> None:
    for block in net.layers:
        wo = block.attention.wo
        monkeypatch.setattr(wo, "forward", lambda x, w=wo.weight: F.linear(x.unflatten(-1, (4, 16)).mT.flatten(-2), w))


def plant_residual(monkeypatch: pytest.MonkeyPatch, net: Transformer) -> None:
    def forward(self: model.TransformerBlock, h: Tensor, *rest: Any) -> Tensor:
        x = self.attention_norm(h)
        h = x + self.attention(x, *rest)  # the normed input is added instead of the input
        return h + self.feed_forward(self.ffn_norm(h))

    monkeypatch.setattr(model.TransformerBlock, "forward", forward)


def plant_second_norm(monkeypatch: pytest.MonkeyPatch, net: Transformer) -> None:
    for block in net.layers:
        monkeypatch.setattr(block.ffn_norm, "eps", 1e-3)


def plant_swiglu(monkeypatch: pytest.MonkeyPatch, net: Transformer) -> None:
    def forward(self: model.FeedForward, x: Tensor) -> Tensor:
        return self.w_down(self.w_gate(x) * F.silu(self.w_up(x)))

    monkeypatch.setattr(model.FeedForward, "forward", forward)


def plant_gelu(monkeypatch: pytest.MonkeyPatch, net: Transformer) -> None:
    monkeypatch.setattr(model.F, "silu", F.gelu)


def plant_last_residual(monkeypatch: pytest.MonkeyPatch, net: Transformer) -> None:
    def forward(self: model.TransformerBlock, h: Tensor, *rest: Any) -> Tensor:
        a = h + self.attention(self.attention_norm(h), *rest)
        return h + self.feed_forward(self.ffn_norm(a))

    monkeypatch.setattr(model.TransformerBlock, "forward", forward)


def plant_embedding(monkeypatch: pytest.MonkeyPatch, net: Transformer) -> None:
    right = net.tok_embeddings.forward
    monkeypatch.setattr(net.tok_embeddings, "forward", lambda ids: right(ids) * 8.0)  # the first Transformer's sqrt(d)


@pytest.mark.parametrize(
    ("plant", "step"),
    [
        (plant_embedding, "embedding"),
        (plant_norm, "RMSNorm"),
        (plant_epsilon, "RMSNorm"),
        (plant_rope_sign, "RoPE"),
        (plant_rope_positions, "RoPE"),
        (plant_half, "RoPE"),
        (plant_scale, "scores"),
        (plant_groups, "scores"),
        (plant_mask, "scores"),
        (plant_softmax, "softmax"),
        (plant_sum, "weighted sum"),
        (plant_heads_order, "output projection"),
        (plant_residual, "residual"),
        (plant_second_norm, "second RMSNorm"),
        (plant_swiglu, "SwiGLU"),
        (plant_gelu, "SwiGLU"),
        (plant_last_residual, "second residual"),
    ],
)
def test_a_wrong_formula_first_fails_at_its_own_step(
    plant: Callable[[pytest.MonkeyPatch, Transformer], None], step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = tiny.model()
    assert all(verdicts(net).values())
    plant(monkeypatch, net)
    found = verdicts(net)
    wrong = STEPS.index(step)
    passed = [found[name] for name in STEPS]
    assert passed[:wrong] == [True] * wrong
    if plant is plant_rope_positions:  # a common shift of all positions does not change the scores
        assert passed[wrong] is False
        assert all(passed[wrong + 1 :])
    elif plant is plant_embedding:  # a norm removes the factor, except for the effect of epsilon
        assert not passed[0]
        assert not all(passed[1:])
    else:
        assert passed[wrong:] == [False] * (len(STEPS) - wrong)


def test_a_step_that_was_not_recorded_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "reference", attention.sdpa)  # a fused kernel has no visible scores or weights
    net = tiny.model()
    found = explain.explain(net, IDS)
    failed = [step.recipe.name for step in found.steps if not step.check.passed]
    assert failed == ["scores", "softmax"]
    assert "not recorded" in explain.text(found)


def test_nan_fails() -> None:
    net = tiny.model()
    net.layers[0].feed_forward.w_down.weight[0, 0] = float("nan")
    found = verdicts(net)
    assert [name for name in STEPS if not found[name]] == ["SwiGLU", "second residual"]
    net.layers[0].attention.wv.weight[0, 0] = float("nan")  # q and k are correct, v is not
    found = verdicts(net)
    assert [name for name in STEPS if found[name]] == ["embedding", "RMSNorm", "RoPE", "scores", "softmax"]


# --------------------------------------------------------------------------------------------------- quoted lines
@pytest.mark.parametrize("form", list(FORMS))
def test_every_quoted_line_contains_its_expression(form: str) -> None:
    root = Path(model.__file__).parent.parent

    def bare(text: str) -> str:
        return re.sub(r"\s", "", text)

    for recipe in explain.recipes(form, FORMS[form].apply):
        for function, expression in recipe.code:
            source = explain.find_source(function, expression)
            assert source is not None, expression
            lines = (root / source.file).read_text().splitlines()
            assert lines[source.line - 1].strip() == source.text
            assert bare(expression) in bare(source.text)
            code = inspect.unwrap(function).__code__
            assert source.line in {line for _, _, line in code.co_lines()} | _inner_lines(code)


def _inner_lines(code: Any) -> set[int]:
    """Lines of the functions inside a function."""
    inner = [constant for constant in code.co_consts if inspect.iscode(constant)]
    return {line for c in inner for line in {n for _, _, n in c.co_lines()} | _inner_lines(c)}


def test_a_line_is_found_after_it_moved_and_none_is_returned_if_it_is_gone(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "moved.py").write_text(
        "# a comment\n\n\ndef f(x, y):\n    z = (\n        x\n        + y * 2\n    )\n    return z\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import moved  # type: ignore[import-not-found]

    found = explain.find_source(moved.f, "x + (y * 2)")
    assert found == explain.Source("moved.py", 6, "x")
    assert explain.find_source(moved.f, "y * 2") == explain.Source("moved.py", 7, "+ y * 2")
    assert explain.find_source(moved.f, "x * y") is None
    assert explain.find_source(len, "x * y") is None


def test_a_replaced_function_is_the_one_that_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    net = tiny.model()
    plant_swiglu(monkeypatch, net)
    plant_half(monkeypatch, net)
    found = {step.recipe.name: step for step in explain.explain(net, IDS).steps}
    assert found["SwiGLU"].sources == [None]
    assert found["RoPE"].sources[2] is None
    assert "line not found" in explain.text(explain.explain(net, IDS))


# ----------------------------------------------------------------------------------------------------------- numbers
def test_the_numbers_are_those_of_the_selected_token() -> None:
    net = explain.tiny_model()
    found = {value.letter: value for step in explain.explain(net, IDS, token=2).steps for value in step.values}
    embedded = net.tok_embeddings(torch.tensor([IDS]))
    assert found["e"].numbers == embedded[0, 2].tolist()
    assert found["h"].numbers == embedded[0, 2].tolist()
    x = net.layers[0].attention_norm(embedded)
    assert found["x"].numbers == pytest.approx(x[0, 2].tolist(), abs=1e-6)
    assert found["q"].numbers == pytest.approx(net.layers[0].attention.wq(x)[0, 2, :4].tolist(), abs=1e-6)
    assert found["q"].shape == (2, 7, 4)
    assert found["k"].shape == (1, 7, 4)
    assert len(found["s"].numbers) == len(found["p"].numbers) == 3  # the tokens that token 2 sees
    assert sum(found["p"].numbers) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"token": 7}, "from 0 to 6, .* got 7"),
        ({"token": -1}, "from 0 to 6"),
        ({"layer": 2}, "from 0 to 1, .* got 2"),
        ({"layer": -1}, "from 0 to 1"),
        ({"ids": []}, "1 to 256 tokens, got 0"),
        ({"ids": [1] * 257}, "got 257"),
    ],
)
def test_errors_name_the_valid_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        explain.explain(explain.tiny_model(), **{"ids": IDS, **options})


def test_other_dtypes_are_rejected() -> None:
    with pytest.raises(UsageError, match="float32"):
        explain.explain(tiny.model().to(torch.bfloat16), IDS)


# ------------------------------------------------------------------------------------------------------- the command
def run(*args: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["explain", *args])
    return code, out.getvalue(), err.getvalue()


def test_the_command_without_a_model_needs_no_weights(clearllama: Run, tmp_path: Path) -> None:
    before = os.times()
    result = clearllama("explain", env={"CLEARLLAMA_CACHE": str(tmp_path), "HF_HOME": str(tmp_path)})
    assert result.returncode == 0
    assert result.stderr == b""
    after = os.times()  # processor time, since other tests run at the same time; alone it is below 2 s
    assert after.children_user + after.children_system - before.children_user - before.children_system < 8
    assert not any(tmp_path.iterdir())
    out = result.stdout.decode()
    assert out.count("PASS  ") == 12
    assert out.endswith("PASS: 12 of 12\n")
    assert re.search(r"llama/model\.py:\d+  return self\.w_down\(F\.silu", out)


def test_the_command_on_a_model_as_json(tiny_gguf: Path, tiny_llm: Llama) -> None:
    code, out, _ = run("-m", str(tiny_gguf), "--text", "hello", "--token", "0", "--layer", "1", "--json", "-q")
    assert code == 0
    found = json.loads(out)
    assert found["passed"] is True
    assert [step["name"] for step in found["steps"]] == STEPS
    assert found["settings"]["layer"] == 1
    assert found["settings"]["text"] == "hello"
    assert all(step["sources"][0]["line"] > 0 and step["passed"] for step in found["steps"])
    assert found["steps"][2]["values"][1]["shape"] == [2, len(tiny_llm.tokenizer.encode_prompt("hello")), 16]


def test_a_failed_step_is_exit_1(monkeypatch: pytest.MonkeyPatch) -> None:
    plant_gelu(monkeypatch, tiny.model())
    code, out, _ = run()
    assert code == 1
    assert "FAIL: 10 of 12" in out


def turned(*options: str) -> dict[str, Any]:
    return next(step for step in json.loads(run("-q", "--json", *options)[1])["steps"] if step["name"] == "RoPE")


def test_every_form_has_the_same_numbers_and_a_scaling_other_ones() -> None:
    plain = turned()
    for form in rope.FORMS:
        for a, b in zip(turned("--rope", form)["values"], plain["values"], strict=True):
            assert a["numbers"] == pytest.approx(b["numbers"], abs=1e-5)
    scaled = turned("--rope-scaling", "yarn", "--rope-factor", "4", "--rope-theta", "500")
    assert scaled["values"][0]["numbers"] != pytest.approx(plain["values"][0]["numbers"], abs=1e-2)
    assert "scaled by yarn" in scaled["equation"]
    assert "scaled" not in plain["equation"]


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--token", "99"], 2, "token must be from 0 to"),
        (["--text", "a\n\x1b[31m", "--layer", "9"], 2, "layer must be from 0 to"),
        (["--device", "cuda"], 2, "the tiny random model runs in float32"),
        (["--quantize", "int8"], 2, "the tiny random model runs in float32"),
        (["--max-seq-len", "5"], 1, "outside the 5 positions"),
    ],
)
def test_errors_are_one_line(options: list[str], code: int, message: str) -> None:
    found, out, err = run("-q", *options)
    assert (found, out, err.count("\n")) == (code, "", 1)
    assert message in err
