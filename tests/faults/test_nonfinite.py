"""Logits that are not finite: the error names the step, the layer where NaN or infinity begins, and the weight."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event as Flag
from typing import Any

import gguf
import pytest
import torch

from llama import inside
from llama.engine import kernels, nonfinite
from llama.engine.linears import GroupedLinear, TileLinear
from llama.errors import CheckpointError, NumericalError
from llama.generate import generate
from llama.generation.batch import Batch, Ended, Request, TokenEvent
from llama.generation.session import Session
from llama.generation.speculative import ModelDraft, NGramDraft, speculate
from llama.model import Runner, Transformer
from llama.quant.schemes import pick_scheme, quantize
from llama.quant.tiles import pack
from llama.sampling import SamplingParams
from llama.text import Llama
from llama.tools.perplexity import nats

from .. import tiny
from .conftest import Try

pytestmark = [pytest.mark.usefixtures("one_thread")]
PROMPT, BIASED = [3, 1, 4, 1, 5], dataclasses.replace(tiny.CONFIG, attention_bias=True, mlp_bias=True)
needs_kernels = pytest.mark.skipif(not kernels.ready(), reason="packed weights need the C++ kernels")


def failure(net: Transformer, prompt: list[int] = PROMPT, **params: Any) -> str:
    """Return the error message of generating with a model."""
    with pytest.raises(NumericalError) as error:
        list(generate(net, prompt, SamplingParams(**params), diagnose=partial(nonfinite.locate, net)))
    message = str(error.value)
    assert "\n" not in message
    return message


def damage(net: Transformer, name: str, bad: float) -> list[int]:
    """Set one entry of a parameter, in the row of a token of the prompt; return its index."""
    weight = net.get_parameter(name)
    index = [4, 7] if weight.dim() == 2 else [9]
    weight[tuple(index)] = bad
    return index


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", [name for name, _ in tiny.model(BIASED).named_parameters()])
def test_one_bad_entry_of_a_weight_is_located(name: str, bad: float) -> None:
    net = tiny.model(BIASED)
    index = damage(net, name, bad)
    message = failure(net)
    # Scores of -inf mask all keys of a query without an error; the first score of +inf is reported.
    late = math.isinf(bad) and name.split(".")[-2] in ("wq", "wk")
    assert "are not finite" in message
    assert late or "logits of new token 1 are" in message
    assert f"at the output of {name.rpartition('.')[0]}; " in message
    assert (
        f"; NaN or infinity stands in 1 of {net.get_parameter(name).numel():,} numbers of {name}, first at" in message
    )
    assert str(index) in message


def test_damage_that_shows_later_is_reported_with_its_step() -> None:
    net = tiny.model()
    answer = [token.id for token in generate(net, PROMPT, SamplingParams(max_new_tokens=20))]
    at = next(i for i, id in enumerate(answer) if i >= 3 and id not in [*PROMPT, *answer[:i]])
    net.tok_embeddings.weight[answer[at], 5] = math.nan
    message = failure(net, max_new_tokens=20)
    assert f"logits of new token {at + 2} are" in message
    assert f"first at [{answer[at]}, 5]" in message


# Where float16 overflows -> the factors of the weights that cause it.
OVERFLOWS: dict[str, dict[str, float]] = {
    "output of layers.1.feed_forward.w_up": {"layers.1.feed_forward.w_up.weight": 3e5},
    "input of layers.1.feed_forward.w_down": {
        "layers.1.feed_forward.w_up.weight": 5e3, "layers.1.feed_forward.w_gate.weight": 5e3,
    },
    "output of layers.1.feed_forward.w_down": {
        "layers.1.feed_forward.w_up.weight": 3e3, "layers.1.feed_forward.w_down.weight": 3e3,
    },
    "output of layers.1.attention.wo": {
        "layers.1.attention.wv.weight": 3e3, "layers.1.attention.wo.weight": 3e3,
    },
    "output of layers.1.attention.wv": {"layers.1.attention.wv.weight": 3e5},
}  # fmt: skip


@pytest.mark.parametrize("where", OVERFLOWS)
def test_an_overflow_of_float16_is_distinguished_from_damage(where: str) -> None:
    net = tiny.model()
    for name, factor in OVERFLOWS[where].items():
        weight = net.get_parameter(name)
        weight.copy_((weight * factor).clamp(-6e4, 6e4))
    assert list(generate(net, PROMPT, SamplingParams(max_new_tokens=2)))  # does not overflow in float32
    message = failure(net.half())
    assert f"non-finite numbers begin at the {where}, where all weights are finite" in message
    assert "the numbers overflow in float16: try dtype='float32' (--dtype float32)" in message


@pytest.mark.parametrize("sublayer", ["attention", "feed_forward"])
def test_an_overflow_of_the_hidden_state_is_located(sublayer: str) -> None:
    """Both summands are finite, but their sum is not."""
    net = tiny.model().half()
    net.tok_embeddings.weight[:, 0] = 6e4
    layer = net.layers[0].attention.wo if sublayer == "attention" else net.layers[0].feed_forward.w_down
    if sublayer == "feed_forward":
        net.layers[0].attention.wo.weight[0] = 0
    layer.weight[0] = 0
    layer.bias = torch.nn.Parameter(torch.zeros(64, dtype=torch.float16), requires_grad=False)
    layer.bias[0] = 6e4
    reader = "layers.0.ffn_norm" if sublayer == "attention" else "layers.1.attention_norm"
    assert f"begin at the input of {reader}, where all weights are finite" in failure(net)


def test_an_overflow_of_float32_does_not_suggest_float32() -> None:
    net = tiny.model()
    net.layers[0].feed_forward.w_up.weight.mul_(1e30)
    net.layers[0].feed_forward.w_gate.weight.mul_(1e30)
    message = failure(net)
    assert "at the input of layers.0.feed_forward.w_down" in message
    assert "far too large" in message
    assert "--dtype" not in message


def test_extremely_large_finite_logits_are_errors() -> None:
    net = tiny.model()
    net.output.weight.mul_(1e35)
    assert "logits of new token 1 are as large as" in failure(net)


# --------------------------------------------------------------------------------------------------- quantized weights
def tile(scheme: str) -> Callable[[torch.nn.Linear], torch.nn.Module]:
    """Return a function that makes a TileLinear with a damaged scale from a linear layer."""

    def make(linear: torch.nn.Linear) -> torch.nn.Module:
        chosen = pick_scheme(scheme).format
        blocks = quantize(linear.weight, chosen)
        blocks.scale[4, 0] = math.nan
        shape = linear.out_features, linear.in_features
        return TileLinear(pack(blocks), shape, blocks.format, None)

    return make


def block(linear: torch.nn.Linear) -> torch.nn.Module:
    """Return a GroupedLinear with a damaged scale."""
    layer = GroupedLinear(quantize(linear.weight, pick_scheme("int8").format))
    layer.scale[4, 0] = math.inf
    return layer


QUANTIZED: dict[str, Any] = {
    "int8 tiles": pytest.param(tile("int8"), marks=needs_kernels),
    "int4 tiles": pytest.param(tile("int4"), marks=needs_kernels),
    "blocks": block,
}


@pytest.mark.parametrize("make", list(QUANTIZED.values()), ids=list(QUANTIZED))
def test_a_bad_scale_of_a_quantized_weight_is_located(make: Callable[[torch.nn.Linear], torch.nn.Module]) -> None:
    net = tiny.model(tiny.WIDE)
    linear: Any = net.layers[1].feed_forward.w_up
    net.layers[1].feed_forward.w_up = make(linear)
    message = failure(net)
    assert "at the output of layers.1.feed_forward.w_up" in message
    assert "NaN or infinity stands in 1 of" in message
    assert "numbers of layers.1.feed_forward.w_up.scale, first at [4, 0]" in message


def test_the_command_reports_a_bad_scale_in_a_file(tmp_path: Path, attempt: Try) -> None:
    path = tiny.write_gguf(tmp_path / "x.gguf", tiny.WIDE, quantization="Q8_0")
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.ffn_up.weight")
    with open(path, "r+b") as file:
        file.seek(tensor.data_offset + 34 * 3)  # a block is a scale of 2 bytes and 32 integers
        file.write(b"\x00\x7e")  # NaN in float16
    args = ("generate", "-q", "--raw", "a", "-n", "3", "--device", "cpu", "-m", path)
    for options in ((), ("--dtype", "float32")):
        attempt(*args, *options).refused("new token 1 ", "layers.1.feed_forward.w_up", "NaN", "verify compares")


# --------------------------------------------------------------------------------------------- every kind of decoding
@pytest.fixture
def broken() -> Transformer:
    net = tiny.model()
    damage(net, "layers.1.attention.wv.weight", math.nan)
    return net


WORDS = r"at the output of layers\.1\.attention\.wv; NaN or infinity .* of layers\.1\.attention\.wv\.weight"


def test_errors_of_a_batch_name_the_layer(broken: Transformer) -> None:
    requests = [Request([i + 1, 2, 3], SamplingParams(max_new_tokens=4, temperature=i / 2)) for i in range(3)]
    errors = [event.error for event in Batch(broken, requests, slots=2) if isinstance(event, Ended)]
    for error in errors:
        with pytest.raises(NumericalError, match=WORDS):
            raise error or AssertionError("no error")
    with pytest.raises(NumericalError, match=rf"^prompt 1 of 2: the logits of new token 1 .*{WORDS}"):
        Llama(broken, _tokenizer()).generate(["a", "b"], max_new_tokens=4)


@pytest.mark.parametrize("prompt", [[5, 6, 7], [5, 200, 7]], ids=["in an answer", "in a prompt"])
def test_a_cancelled_request_leaves_no_nan_to_the_next_one(monkeypatch: pytest.MonkeyPatch, prompt: list[int]) -> None:
    """It is cancelled in the pass that computes the NaN, so that nobody sees its logits."""
    net, flag, real = tiny.model(), Flag(), Runner.layers
    net.tok_embeddings.weight[200] = math.nan

    def run(*args: Any, **options: Any) -> torch.Tensor:
        h: torch.Tensor = real(*args, **options)
        if bool(h.isnan().any()):
            flag.set()
        return h

    monkeypatch.setattr(Runner, "layers", run)
    bad = Request(prompt, SamplingParams(max_new_tokens=9, logit_bias={200: 1e3}), cancelled=flag)
    good = Request([20, 21], SamplingParams(max_new_tokens=5))
    events = list(Batch(net, iter([bad, good]), slots=1))
    assert flag.is_set()
    assert [event.error for event in events if isinstance(event, Ended)] == [None, None]
    answer = [event.token.id for event in events if isinstance(event, TokenEvent) and event.number == 1]
    assert answer == [token.id for token in generate(net, good.ids, good.params)]


def _tokenizer() -> Any:
    from llama.tokenizer.gguf import from_metadata

    return from_metadata(tiny.byte_vocabulary(), "tiny")


def test_a_failure_that_does_not_recur_is_reported_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    net, real, calls = tiny.model(), Transformer.hidden, [0]

    def once(*args: Any, **options: Any) -> torch.Tensor:
        h: torch.Tensor = real(*args, **options)
        calls[0] += 1
        return h.fill_(math.nan) if calls[0] == 3 else h

    monkeypatch.setattr(Transformer, "hidden", once)
    message = failure(net)
    assert "logits of new token 3 " in message
    assert "a second pass over the same tokens was finite" in message


def test_errors_of_speculative_decoding_name_the_model_and_the_layer(broken: Transformer) -> None:
    with pytest.raises(NumericalError, match=f"logits of new token 1 .*{WORDS}"):
        list(speculate(broken, PROMPT, SamplingParams(), NGramDraft()))
    draft = ModelDraft(broken)
    with pytest.raises(NumericalError, match=f"logits of the draft model for new token 2 .*{WORDS}"):
        list(speculate(tiny.model(), PROMPT, SamplingParams(), draft))
    assert not draft.busy


def test_errors_of_perplexity_name_the_layer(broken: Transformer) -> None:
    with pytest.raises(NumericalError, match=f"logits of token 1 .*{WORDS}"):
        nats(broken, [torch.tensor([PROMPT])])


def test_a_failure_of_the_second_pass_is_reported(broken: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **options: Any) -> Any:
        raise RuntimeError("can't allocate memory:\nyou tried 1 TB")

    monkeypatch.setattr(nonfinite, "_pass", full)
    assert (
        "the layer where non-finite numbers begin could not be found (can't allocate memory: you tried 1 TB)"
        in failure(broken)
    )


def test_the_second_pass_removes_its_hooks(broken: Transformer) -> None:
    failure(broken)
    assert not any(module._forward_hooks for module in broken.modules())
    broken.layers[1].attention.wv.weight[4, 7] = 0.1
    assert list(generate(broken, PROMPT, SamplingParams(max_new_tokens=2)))


# ----------------------------------------------------------------------------------------------------- after an error
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "reference"])
def test_a_session_works_after_nan(attention: str, fixed: bool) -> None:
    """The cache must not keep NaN: a masked key has weight 0, but 0 times NaN is NaN."""
    net = tiny.model(attention=attention)
    net.make_cache = tiny.cache_maker(fixed)
    llm, session = Llama(net, _tokenizer()), Session()
    poison = [5, 6, 7, 200, 9]
    net.tok_embeddings.weight[200] = math.nan
    with pytest.raises(NumericalError):
        list(llm.stream_ids(poison, session=session, max_new_tokens=5))
    options: dict[str, Any] = {"max_new_tokens": 6}
    for prompt in ([5, 6, 7, 8], [5, 6, 7, 8, 9, 10]):
        *_, last = llm.stream_ids(prompt, session=session, **options)
        *_, fresh = Llama(net, _tokenizer()).stream_ids(prompt, **options)
        assert last.completion is not None
        assert fresh.completion is not None
        assert last.completion.tokens == fresh.completion.tokens


def test_a_draft_works_after_nan() -> None:
    small = tiny.model()
    small.make_cache = tiny.cache_maker(True)
    small.tok_embeddings.weight[200] = math.nan
    net, draft = tiny.model(seed=1), ModelDraft(small)
    with pytest.raises(NumericalError, match="draft model"):
        list(speculate(net, [5, 6, 200, 7], SamplingParams(max_new_tokens=5), draft))
    got = [token.id for token in speculate(net, [5, 6, 7], SamplingParams(max_new_tokens=12), draft)]
    assert got == [token.id for token in generate(net, [5, 6, 7], SamplingParams(max_new_tokens=12))]


def test_quantizing_nonfinite_weights_is_an_error() -> None:
    net = tiny.model(tiny.WIDE)
    damage(net, "layers.0.attention.wq.weight", math.nan)
    with pytest.raises(CheckpointError, match="not finite"):
        tiny.quantized(net, "int8")


# --------------------------------------------------------------------------------------------------- hooks and patches
@pytest.mark.parametrize("name", ["q.1", "z.1", "mlp_in.1", "resid_post.0"])
def test_a_patch_that_returns_nan_is_named_as_the_cause(name: str) -> None:
    net = tiny.model()
    llm, session = Llama(net, _tokenizer()), Session()
    with inside.patch(net, {name: lambda x, at: x * math.nan}), pytest.raises(NumericalError) as error:
        llm.generate("abc", session=session)
    assert f"put of layers.{name[-1]}." in str(error.value) or name == "resid_post.0"
    assert "check the tensors that the model's hooks or patches return" in str(error.value)


def test_a_session_drops_its_cache_after_an_error_that_is_not_of_this_package() -> None:
    llm, session = Llama(tiny.model(), _tokenizer()), Session()
    hook = llm.model.output.register_forward_hook(lambda *_: {}["missing"])
    with pytest.raises(KeyError):
        llm.generate("abc", session=session)
    hook.remove()
    assert session.cache is None
