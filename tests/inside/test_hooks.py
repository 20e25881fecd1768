"""Tensors read and changed by name equal those of plain hooks on transformers, in every way to run a model."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import llama
from llama import inside
from llama.engine.compiled import FixedCaches, GraphRunner
from llama.engine.cpu_runner import KernelRunner
from llama.errors import UsageError
from llama.generate import generate
from llama.generation.speculative import NGramDraft
from llama.inside.hooks import Function, tensors_of
from llama.inside.intervene import only_layers
from llama.loader import load
from llama.model import Transformer
from llama.rope import half_to_interleaved
from llama.sampling import SamplingParams
from llama.text import Llama, Session

from .. import tiny

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = tiny.random_tokens(9)[0].tolist()
PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "inside.md").read_text()
TOKENS = torch.tensor([IDS])
Pair = tuple[Transformer, Any]

# Our site -> the module of transformers' layer, and "input" or "output"
THEIRS = {
    "resid_pre": ("", "input"),
    "attn_in": ("input_layernorm", "output"),
    "q": ("self_attn.q_proj", "output"),
    "k": ("self_attn.k_proj", "output"),
    "v": ("self_attn.v_proj", "output"),
    "z": ("self_attn.o_proj", "input"),
    "attn_out": ("self_attn.o_proj", "output"),
    "resid_mid": ("post_attention_layernorm", "input"),
    "mlp_in": ("post_attention_layernorm", "output"),
    "mlp_hidden": ("mlp.down_proj", "input"),
    "mlp_out": ("mlp", "output"),
    "resid_post": ("", "output"),
}
OUTSIDE = {"embed": "model.embed_tokens", "final_norm": "model.norm", "logits": "lm_head"}


def their_module(theirs: Any, site: str, layer: int) -> Any:
    if site in OUTSIDE:
        return theirs.get_submodule(OUTSIDE[site])
    return theirs.model.layers[layer].get_submodule(THEIRS[site][0])


@contextlib.contextmanager
def hooked(theirs: Any, site: str, layer: int, change: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
    """A plain hook of PyTorch on transformers; `change` may return a new tensor."""
    module = their_module(theirs, site, layer)
    if THEIRS.get(site, ("", "output"))[1] == "input":

        def before(_: Any, args: Any, kwargs: Any) -> Any:
            new = change(args[0] if args else kwargs["hidden_states"])
            return None if new is None else ((new, *args[1:]), kwargs)

        handle = module.register_forward_pre_hook(before, with_kwargs=True)
    else:
        handle = module.register_forward_hook(lambda _, args, output: change(output))
    try:
        yield
    finally:
        handle.remove()


def in_our_order(site: str, x: Tensor) -> Tensor:
    """A tensor of transformers in our shape: heads apart, q and k interleaved."""
    x = x.unflatten(-1, (-1, 16)) if site in ("q", "k", "v", "z") else x
    return half_to_interleaved(x) if site in ("q", "k") else x


# ------------------------------------------------------------------------------------------------------------ reading
@pytest.mark.parametrize("site", [*THEIRS, *OUTSIDE])
def test_a_tensor_equals_the_one_of_a_plain_hook_on_transformers(both: Pair, site: str) -> None:
    ours, theirs = both
    for layer in range(2) if site in THEIRS else [None]:
        found: list[Tensor] = []
        with hooked(theirs, site, layer or 0, found.append):
            theirs(TOKENS)
        name = site if layer is None else f"{site}.{layer}"
        with inside.activations(ours, name) as seen:
            ours(TOKENS)
        expected = in_our_order(site, found[0])
        assert float(expected.std()) > 1e-2
        torch.testing.assert_close(seen[name], expected, rtol=0, atol=1e-4)


def test_rotated_queries_and_the_pattern_equal_transformers(both: Pair) -> None:
    ours, theirs = both
    expected = theirs(TOKENS, output_attentions=True).attentions
    cos, sin = theirs.model.rotary_emb(torch.zeros(1), torch.arange(len(IDS))[None])
    with inside.activations(ours, ["pattern.*", "q.*", "k.*", "rot_q.*", "rot_k.*"]) as seen:
        ours(TOKENS)
    for layer in range(2):
        torch.testing.assert_close(seen[f"pattern.{layer}"], expected[layer], rtol=0, atol=1e-4)
        found: list[Tensor] = []
        for name in "qk":
            with hooked(theirs, name, layer, found.append):
                theirs(TOKENS)
        q, k = (x.unflatten(-1, (-1, 16)).transpose(1, 2) for x in found)  # (B, H, T, D), (B, KV, T, D)
        for name, rotated in zip("qk", apply_rotary_pos_emb(q, k, cos, sin), strict=True):
            theirs_rotated = half_to_interleaved(rotated.transpose(1, 2))
            torch.testing.assert_close(seen[f"rot_{name}.{layer}"], theirs_rotated, rtol=0, atol=1e-4)


def test_every_name_has_its_documented_shape() -> None:
    model = tiny.model()
    c, T = model.config, len(IDS)
    sizes = {
        **{"B": 1, "T": T, "S": T, "C": c.dim, "H": c.n_heads, "KV": c.n_kv_heads, "D": c.head_dim},
        **{"F": c.hidden_dim, "V": c.vocab_size},
    }
    with inside.activations(model, tensors_of(model)) as seen:
        logits = model(TOKENS)
    assert set(seen) == set(tensors_of(model))
    for name, tensor in seen.items():
        site = inside.SITES.get(name.split(".")[0])
        if site is not None and name != "logits":
            letters = site.shape.removesuffix(" float32").strip("()").split(", ")
            assert tuple(tensor.shape) == tuple(sizes[letter] for letter in letters), name
    assert torch.equal(seen["logits"], logits)
    assert torch.equal(seen["layers.1.feed_forward"], seen["mlp_out.1"])
    assert [name for name in seen if name.startswith("resid_post")] == ["resid_post.0", "resid_post.1"]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_star_stands_for_one_part_of_a_name() -> None:
    model = tiny.model()
    for pattern, names in {
        "layers.*": ["layers.0", "layers.1"],
        "layers.*.attention.wq": ["layers.0.attention.wq", "layers.1.attention.wq"],
        "resid_p*.1": ["resid_pre.1", "resid_post.1"],
    }.items():
        with inside.activations(model, pattern) as seen:
            model(TOKENS)
        assert list(seen) == names
    with pytest.raises(UsageError, match="no tensor is named"), inside.activations(model, "*.attention.wq"):
        pass


# ----------------------------------------------------------------------------------------------------------- changing
@pytest.mark.parametrize("site", [site for site in [*THEIRS, *OUTSIDE] if site != "resid_mid"])
def test_a_patch_equals_the_same_change_by_plain_hooks_on_transformers(both: Pair, site: str) -> None:
    ours, theirs = both

    def change(x: Tensor, at: inside.Place | None = None) -> Tensor:
        return 0.3 * x if site in ("q", "k") else 0.3 * x + 0.1

    with hooked(theirs, site, 1, change):
        expected = theirs(TOKENS).logits
    names = [site] if site in OUTSIDE else [f"{site}.1"]
    names += [f"rot_{site}.1"] if site in ("q", "k") else []  # a factor is the same before and after the rotation
    for name in names:
        with inside.patch(ours, {name: change}):
            found = ours(TOKENS)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
        assert float((found - ours(TOKENS)).abs().max()) > 1e-2


@pytest.mark.parametrize("kind", ["model", "int8"])
def test_a_patched_pattern_weighs_the_values(kind: str) -> None:
    """With all weight on the token itself, a head's output is the token's own value, also with a cache."""
    model = tiny.model()

    def itself(weights: Tensor, at: inside.Place) -> Tensor:  # (B, H, T, S)
        keys = torch.arange(weights.shape[-1])
        return (keys == at.positions[:, None]).float().expand_as(weights)

    def values(z: Tensor, at: inside.Place) -> Tensor:
        return seen[f"v.{at.layer}"].repeat_interleave(2, dim=2)

    def logits(change: dict[str, Function]) -> Tensor:
        model.cache_kind = kind
        cache = model.new_cache(20)
        with inside.patch(model, change), inside.activations(model, "pattern.1") as after:
            first, last = model(TOKENS[:, :6], cache=cache), model(TOKENS[:, 6:], cache=cache)
        assert "z.*" in change or torch.equal(after["pattern.1"][0, 0].argmax(-1), torch.arange(6, len(IDS)))
        return torch.cat((first, last), 1)

    with inside.activations(model, "v.*") as seen:
        expected = logits({"z.*": values})
    torch.testing.assert_close(logits({"pattern.*": itself}), expected, rtol=0, atol=1e-4 if kind == "model" else 0.2)
    with inside.patch(model, {"pattern.*": lambda x, at: x.clone()}):
        torch.testing.assert_close(model(TOKENS), tiny.model()(TOKENS), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["resid_post.0", "q.1", "pattern.0", "z.0", "logits"])
def test_a_change_in_place_is_a_change_of_a_copy(name: str) -> None:
    model = tiny.model()
    with inside.activations(model, name) as before, inside.patch(model, {name: lambda x, at: x.mul_(2)}):
        found = model(TOKENS)
    with inside.patch(model, {name: lambda x, at: 2 * x}):
        assert torch.equal(found, model(TOKENS))
    with inside.activations(model, name) as plain:
        unchanged = model(TOKENS)
    assert torch.equal(before[name], plain[name])
    with inside.patch(model, {name: lambda x, at: x}):
        assert torch.equal(model(TOKENS), unchanged)


def test_a_function_is_told_the_name_the_layer_and_the_positions() -> None:
    model, places = tiny.model(), list[inside.Place]()
    cache = model.new_cache(20)

    def look(x: Tensor, at: inside.Place) -> Tensor:
        places.append(at)
        return x

    with inside.patch(model, {"mlp_out.1": look, "logits": look}):
        model(TOKENS[:, :4], cache=cache)
        model(TOKENS[:, 4:5], cache=cache)
    assert [(at.name, at.layer) for at in places] == [("mlp_out.1", 1), ("logits", None)] * 2
    assert [None if at.positions is None else at.positions.tolist() for at in places] == [[0, 1, 2, 3], None, [4], None]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"resid_mid.1": lambda x, at: x}, r"resid_mid.1 can only be read; patch attn_out.1"),
        ({"nothing.1": lambda x, at: x}, r"no tensor is named 'nothing.1'.*layer from 0 to 1"),
        ({"z.2": lambda x, at: x}, r"no tensor is named 'z.2'"),
        ({"layers.0.attention.apply_rotary_emb": lambda x, at: x}, "no tensor is named"),
        ({"z.1": lambda x, at: x[:, :1]}, r"must return a tensor of shape \(1, 9, 4, 16\), got shape \(1, 1, 4, 16\)"),
        ({"z.1": lambda x, at: None}, r"must return a tensor of shape \(1, 9, 4, 16\), got NoneType"),
    ],
)
def test_a_wrong_change_is_one_line_and_leaves_the_model_unchanged(changes: Any, message: str) -> None:
    model = tiny.model()
    with pytest.raises(UsageError, match=message), inside.patch(model, changes):
        model(TOKENS)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not hasattr(model, "patched")


def test_a_tensor_that_was_not_recorded_is_named() -> None:
    model = tiny.model()
    with inside.activations(model, "z.*") as seen:
        model(TOKENS)
    with pytest.raises(KeyError, match=r"q.0 was not recorded; recorded: z.0, z.1"):
        seen["q.0"]


def test_a_model_in_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.model()
    monkeypatch.setattr(model, "world", object())
    with pytest.raises(UsageError, match="several processes"), inside.activations(model, "embed"):
        pass


# ---------------------------------------------------------------------------------------------- every way of running
def add(x: Tensor, at: inside.Place) -> Tensor:
    return x + torch.linspace(-1, 1, x.shape[-1])


STEERED = {"resid_post.0": add}


def test_hooks_run_in_generate_batches_and_speculative_decoding(tiny_llm: Llama) -> None:
    model, prompts = tiny_llm.model, ["hello hello hello", "the", "ll he"]
    n_vocab = tiny_llm.tokenizer.n_vocab
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0.0, "logit_bias": {2: -100.0, 1: -100.0}}
    encoded = [tiny_llm.tokenizer.encode_prompt(prompt) for prompt in prompts]
    plain = [tiny_llm.generate(prompt, **options).tokens for prompt in prompts]
    draft = NGramDraft()
    with inside.patch(tiny_llm, STEERED):
        with inside.activations(tiny_llm, "resid_post.1") as one:
            alone = tiny_llm.generate(prompts[0], **options).tokens
        with inside.activations(tiny_llm, "resid_post.1") as many:
            together = [done.tokens for done in tiny_llm.generate(prompts, **options)]
        drafted = tiny_llm.generate(prompts[0], draft=draft, **options).tokens
        complete = []
        for ids in encoded:
            text = list(ids)
            for _ in range(12):
                logits = model(torch.tensor([text]))[0, -1][:n_vocab]
                logits[[1, 2]] = -torch.inf
                text.append(int(logits.argmax()))
            complete.append(text[len(ids) :])
        with inside.activations(model, "resid_post.1") as whole:
            model(torch.tensor([encoded[0] + alone[:-1]]))
    assert alone == drafted == complete[0] != plain[0]
    assert together == complete
    assert draft.drafted > 0
    assert [len(x[0]) for x in one.calls["resid_post.1"]] == [len(encoded[0])] + [1] * 11
    torch.testing.assert_close(torch.cat(one.calls["resid_post.1"], 1), whole["resid_post.1"], rtol=0, atol=1e-4)
    assert max(x.shape[0] for x in many.calls["resid_post.1"]) >= 3  # a row for each prompt
    assert [tiny_llm.generate(prompt, **options).tokens for prompt in prompts] == plain


def test_a_session_is_not_shared_across_a_patch(tiny_llm: Llama) -> None:
    def patched(change: bool) -> contextlib.AbstractContextManager[None]:
        return inside.patch(tiny_llm, STEERED) if change else contextlib.nullcontext()

    for before, after in [(False, True), (True, False), (True, True)]:
        session = Session()
        with patched(before):
            tiny_llm.generate("hello", session=session, max_new_tokens=2)
            tiny_llm.generate("hello there", session=session, max_new_tokens=2)
        with patched(after), pytest.raises(UsageError, match="patched"):
            tiny_llm.generate("hello there", session=session, max_new_tokens=2)


def lines(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    return [(record.levelno, record.getMessage()) for record in caplog.records if "hooks" in record.getMessage()]


def test_compiled_steps_are_switched_off_with_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    steps: list[int] = []
    monkeypatch.setattr(torch, "compile", lambda function, mode: lambda block, h, *inputs: steps.append(1) or h)
    model, plain = tiny.model(rope="real"), tiny.model(rope="real")
    model.runner, model.make_cache = GraphRunner(model), FixedCaches()

    def decoded(net: Transformer) -> list[int]:
        return [token.id for token in generate(net, IDS, SamplingParams(max_new_tokens=8))]

    decoded(model)
    assert len(steps) == 7 * 2  # each layer of each step
    steps.clear()
    with inside.patch(plain, STEERED):
        expected = decoded(plain)
    with inside.patch(model, STEERED):
        assert decoded(model) == expected != decoded(tiny.model(rope="real"))
    handle = model.layers[0].register_forward_hook(lambda module, inputs, output: None)  # somebody's own hook
    decoded(model)
    handle.remove()
    assert not steps
    assert [level for level, _ in lines(caplog)] == [logging.WARNING]
    assert "without the compiled step" in lines(caplog)[0][1]
    decoded(model)
    assert len(steps) == 7 * 2


def test_the_fused_kernels_are_switched_off_with_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    file = tiny.write_gguf(tmp_path / "m.gguf", tiny.WIDE, quantization="Q8_0")
    fast, exact = load(file, device="cpu").model, load(file, device="cpu", dtype="float32").model
    if not isinstance(fast.runner, KernelRunner):
        pytest.skip("the C++ kernels are not available")
    names = ["resid_post.*", "z.1", "mlp_hidden.0", "final_norm", "layers.0.attention.wv"]
    with inside.activations(fast, names) as seen, inside.activations(exact, names) as expected:
        fast(TOKENS)
        exact(TOKENS)
    for name in expected:
        gap = (seen[name].float() - expected[name]).norm() / expected[name].norm()
        assert float(gap) < 0.05, name
    for change in ({"final_norm": lambda x, at: 0 * x}, {"resid_post.1": lambda x, at: 0 * x}):
        with inside.patch(fast, change):
            assert not bool(fast(TOKENS).any())
    with only_layers(fast, [1]):  # replaces the list of layers, without a hook
        short = fast(TOKENS)
    assert float((short - fast(TOKENS)).norm() / short.norm()) > 0.1
    ((level, line),) = lines(caplog)  # `exact` has no fast code that could be switched off
    assert level == logging.WARNING
    assert "without the fused C++ kernels; its logits differ in rounding" in line


# ------------------------------------------------------------------------------------------------ overlapping patches
def test_patches_may_end_in_any_order() -> None:
    model = tiny.model()
    first, second = (inside.patch(model, {f"z.{layer}": lambda x, at: x}, "same") for layer in range(2))
    first.__enter__()
    alone = model.patched.clone()
    second.__enter__()
    assert not torch.equal(model.patched, alone)
    first.__exit__(None, None, None)
    assert torch.equal(model.patched, alone)
    second.__exit__(None, None, None)
    assert not hasattr(model, "patched")


# ---------------------------------------------------------------------------------------------------------- documents
def test_the_page_lists_every_name_with_its_shape() -> None:
    rows = re.findall(r"^\| `([a-z_]+)(\.N)?` \| ([^|]+) \|", PAGE.split("\n### ")[0], re.MULTILINE)
    outside = ("embed", "final_norm", "logits")
    assert rows == [(name, "" if name in outside else ".N", site.shape) for name, site in inside.SITES.items()]


def test_the_code_of_the_page_runs(tiny_llm: Llama, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(llama, "load", lambda dtype: tiny_llm)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {}
    exec("\n".join(block for block in blocks if "unpack()" not in block), names)  # this one needs the default model
    assert names["stream"].shape[1] >= names["tokens"].shape[1]
    assert (tmp_path / "happy.gguf").exists()


@pytest.mark.slow
def test_the_code_of_the_page_that_swaps_two_words_prints_what_the_page_says(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ((code, printed),) = re.findall(r"```python\n([^`]*unpack\(\)[^`]*)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)
    exec(code, {"inside": inside, "llm": llama.load(dtype="float32")})
    assert capsys.readouterr().out == printed
