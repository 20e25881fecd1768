"""Logits that are not finite: the step, the layer and the part of it where that began, and the weight that holds it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from llama.engine import kernels, nonfinite
from llama.engine.linears import BlockLinear, TileLinear, quantize_
from llama.errors import CheckpointError, NumericalError
from llama.generate import generate
from llama.generation.batch import Batch, Ended, Request
from llama.generation.session import Session
from llama.generation.speculative import ModelDraft, NGramDraft, speculate
from llama.model import Transformer
from llama.quant.rounding import quantize
from llama.quant.schemes import pick_scheme
from llama.quant.tiles import pack
from llama.sampling import SamplingParams
from llama.text import Llama
from llama.tools.evaluate import nats

from .. import tiny
from .conftest import Try

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.row("G10")]
PROMPT, BIASED = [3, 1, 4, 1, 5], dataclasses.replace(tiny.CONFIG, attention_bias=True, mlp_bias=True)
needs_kernels = pytest.mark.skipif(not kernels.ready(), reason="packed weights want the C++ kernels")


def told(net: Transformer, prompt: list[int] = PROMPT, **params: Any) -> str:
    with pytest.raises(NumericalError) as error:
        list(generate(net, prompt, SamplingParams(**params), diagnose=partial(nonfinite.locate, net)))
    message = str(error.value)
    assert "\n" not in message
    return message


def spoil(net: Transformer, name: str, bad: float) -> list[int]:
    """Put `bad` at one place of a parameter, in the row of a token of the prompt; returns the place."""
    weight = net.get_parameter(name)
    place = [4, 7][: weight.dim()] if weight.dim() == 2 else [9]
    weight[tuple(place)] = bad
    return place


def part_of(name: str) -> str:
    if not name.startswith("layers."):
        first = name.split(".")[0]
        places = {"tok_embeddings": "in the embedding", "norm": "in the norm after the last layer"}
        return places.get(first, "in output")
    _, number, *rest = name.split(".")
    part = "attention" if rest[0].startswith("attention") else "feed-forward"
    leaf = rest[0] if rest[0].endswith("_norm") else rest[1]
    return f"in layer {number} (of 0 to 1), in its {part}, at the output of {leaf}"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", [name for name, _ in tiny.model(BIASED).named_parameters()])
def test_one_number_of_a_weight_is_found_by_its_name(name: str, bad: float) -> None:
    net = tiny.model(BIASED)
    place = spoil(net, name, bad)
    message = told(net)
    # Infinite scores can be all -inf, and then that query sees nothing; it shows as soon as one of them is +inf.
    late = math.isinf(bad) and name.split(".")[-2] in ("wq", "wk")
    assert "are not finite" in message
    assert late or "logits of new token 1 are" in message
    assert part_of(name) in message
    kind = "1 NaN" if math.isnan(bad) else "1 infinite"
    assert f"; {name} holds {kind} of {net.get_parameter(name).numel():,} numbers, the first at {place}: " in message


def test_the_first_of_several_is_told() -> None:
    net = tiny.model()
    for name in ("layers.1.attention.wq.weight", "layers.0.feed_forward.w_down.weight", "output.weight"):
        spoil(net, name, math.nan)
    assert "layers.0.feed_forward.w_down.weight holds 1 NaN" in told(net)


def test_a_token_that_is_said_later_is_named_with_its_step() -> None:
    net = tiny.model()
    said = [token.id for token in generate(net, PROMPT, SamplingParams(max_new_tokens=20))]
    at = next(i for i, id in enumerate(said) if i >= 3 and id not in [*PROMPT, *said[:i]])
    net.tok_embeddings.weight[said[at], 5] = math.nan
    message = told(net, max_new_tokens=20)
    assert f"logits of new token {at + 2} are" in message
    assert f"the first at [{said[at]}, 5]" in message


# The place where numbers of float16 overflow, and the weights that are made larger for it, by how much.
OVERFLOWS: dict[str, dict[str, float]] = {
    "in its feed-forward, at the output of w_up": {"layers.1.feed_forward.w_up.weight": 3e5},
    "in its feed-forward, in silu(w_gate x) * w_up x": {
        "layers.1.feed_forward.w_up.weight": 5e3, "layers.1.feed_forward.w_gate.weight": 5e3,
    },
    "in its feed-forward, at the output of w_down": {
        "layers.1.feed_forward.w_up.weight": 3e3, "layers.1.feed_forward.w_down.weight": 3e3,
    },
    "in its attention, at the output of wo": {
        "layers.1.attention.wv.weight": 3e3, "layers.1.attention.wo.weight": 3e3,
    },
    "in its attention, at the output of wv": {"layers.1.attention.wv.weight": 3e5},
}  # fmt: skip


@pytest.mark.parametrize("place", OVERFLOWS)
def test_an_overflow_of_float16_is_told_from_damage(place: str) -> None:
    net = tiny.model()
    for name, factor in OVERFLOWS[place].items():
        weight = net.get_parameter(name)
        weight.copy_((weight * factor).clamp(-6e4, 6e4))
    assert list(generate(net, PROMPT, SamplingParams(max_new_tokens=2)))  # float32 holds it
    message = told(net.half())
    assert f"in layer 1 (of 0 to 1), {place}; no weight there is NaN or infinite" in message
    assert "the numbers overflow in float16: try --dtype float32" in message


@pytest.mark.parametrize("sublayer", ["attention", "feed_forward"])
def test_an_overflow_of_the_hidden_state_itself(sublayer: str) -> None:
    """Both summands are finite, and their sum is not."""
    net = tiny.model().half()
    net.tok_embeddings.weight[:, 0] = 6e4
    layer = net.layers[0].attention.wo if sublayer == "attention" else net.layers[0].feed_forward.w_down
    if sublayer == "feed_forward":
        net.layers[0].attention.wo.weight[0] = 0
    layer.weight[0] = 0
    layer.bias = torch.nn.Parameter(torch.zeros(64, dtype=torch.float16), requires_grad=False)
    layer.bias[0] = 6e4
    part = "attention" if sublayer == "attention" else "feed-forward"
    assert f"layer 0 (of 0 to 1), in its {part}, where its result is added to the hidden state; no weight" in told(net)


def test_float32_that_overflows_is_not_told_to_be_float32() -> None:
    net = tiny.model()
    net.layers[0].feed_forward.w_up.weight.mul_(1e30)
    net.layers[0].feed_forward.w_gate.weight.mul_(1e30)
    message = told(net)
    assert "in layer 0 (of 0 to 1), in its feed-forward, in silu(w_gate x) * w_up x" in message
    assert "far too large" in message
    assert "--dtype" not in message


def test_logits_that_are_finite_but_absurd_are_refused() -> None:
    net = tiny.model()
    net.output.weight.mul_(1e35)
    assert "logits of new token 1 are as large as" in told(net)


# ------------------------------------------------------------------------------------------------- weights of few bits
def tile(scheme: str) -> Callable[[torch.nn.Linear], torch.nn.Module]:
    def make(linear: torch.nn.Linear) -> torch.nn.Module:
        chosen = pick_scheme(scheme)
        blocks = quantize(linear.weight, chosen)
        blocks.scale[4, 0] = math.nan
        shape = linear.out_features, linear.in_features
        return TileLinear(pack(blocks), shape, chosen.bits, chosen.group, chosen.offset, None)

    return make


def block(linear: torch.nn.Linear) -> torch.nn.Module:
    layer = BlockLinear(quantize(linear.weight, pick_scheme("int8")))
    layer.scale[4, 0] = math.inf
    return layer


FEW_BITS: dict[str, Any] = {
    "int8 tiles": pytest.param(tile("int8"), marks=needs_kernels),
    "int8-sym tiles": pytest.param(tile("int8-sym"), marks=needs_kernels),
    "int4 tiles": pytest.param(tile("int4"), marks=needs_kernels),
    "blocks": block,
}


@pytest.mark.parametrize("make", list(FEW_BITS.values()), ids=list(FEW_BITS))
def test_a_scale_of_a_quantized_weight_is_found(make: Callable[[torch.nn.Linear], torch.nn.Module]) -> None:
    net = tiny.model(tiny.WIDE)
    linear: Any = net.layers[1].feed_forward.w_up
    net.layers[1].feed_forward.w_up = make(linear)
    message = told(net)
    assert "in layer 1 (of 0 to 1), in its feed-forward, at the output of w_up" in message
    assert "layers.1.feed_forward.w_up.weight, in its quantization scales, holds 1 " in message


def test_a_scale_in_a_file_is_found_by_the_command(tmp_path: Path, attempt: Try) -> None:
    """From the bytes of a GGUF file to the line on the terminal."""
    path = tiny.write_gguf(tmp_path / "x.gguf", tiny.WIDE, quantization="Q8_0")
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.1.ffn_up.weight")
    with open(path, "r+b") as file:
        file.seek(tensor.data_offset + 34 * 3)  # a block is 2 bytes of scale and 32 integers
        file.write(b"\x00\x7e")  # NaN in float16
    args = ("generate", "-q", "--raw", "a", "-n", "3", "--device", "cpu", "-m", path)
    for options in ((), ("--dtype", "float32")):
        attempt(*args, *options).refused("new token 1 ", "layers.1.feed_forward.w_up.weight", "NaN", "verify --tensors")


# ----------------------------------------------------------------------------------------------------- every way to run
@pytest.fixture
def broken() -> Transformer:
    net = tiny.model()
    spoil(net, "layers.1.attention.wv.weight", math.nan)
    return net


WORDS = r"layer 1 \(of 0 to 1\), in its attention, at the output of wv; layers\.1\.attention\.wv\.weight holds 1 NaN"


def test_rows_of_a_batch_say_where(broken: Transformer) -> None:
    requests = [Request([i + 1, 2, 3], SamplingParams(max_new_tokens=4, temperature=i / 2)) for i in range(3)]
    errors = [event.error for event in Batch(broken, requests, slots=2) if isinstance(event, Ended)]
    for error in errors:
        with pytest.raises(NumericalError, match=WORDS):
            raise error or AssertionError("no error")
    with pytest.raises(NumericalError, match=rf"^prompt 1 of 2: the logits of new token 1 .*{WORDS}"):
        Llama(broken, _tokenizer()).generate(["a", "b"], max_new_tokens=4)


def _tokenizer() -> Any:
    from llama.tokenizer.gguf import from_metadata

    return from_metadata(tiny.byte_vocabulary(), "tiny")


def test_a_failure_that_does_not_come_again_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    net, real, calls = tiny.model(), Transformer.hidden, [0]

    def once(*args: Any, **options: Any) -> torch.Tensor:
        h: torch.Tensor = real(*args, **options)
        calls[0] += 1
        return h.fill_(math.nan) if calls[0] == 3 else h

    monkeypatch.setattr(Transformer, "hidden", once)
    message = told(net)
    assert "logits of new token 3 " in message
    assert "a second pass over the same tokens stayed finite" in message


def test_drafts_say_where_and_whose(broken: Transformer) -> None:
    with pytest.raises(NumericalError, match=f"logits of new token 1 .*{WORDS}"):
        list(speculate(broken, PROMPT, SamplingParams(), NGramDraft()))
    draft = ModelDraft(broken)
    with pytest.raises(NumericalError, match=f"logits of the draft model for new token 2 .*{WORDS}"):
        list(speculate(tiny.model(), PROMPT, SamplingParams(), draft))
    assert not draft.busy


def test_perplexity_says_where_and_is_no_nan(broken: Transformer) -> None:
    with pytest.raises(NumericalError, match=f"logits of token 1 .*{WORDS}"):
        nats(broken, [PROMPT])


@pytest.mark.slow  # a library to build
@needs_kernels
def test_a_compiled_model_says_where() -> None:
    """Compiled code has no layers to look at; the second pass runs the model as it is written."""
    config = dataclasses.replace(tiny.CONFIG, n_layers=1, max_seq_len=200)
    net = tiny.model(config, rope="real", attention="kernel")
    fast = tiny.compiled(net)
    said = [token.id for token in generate(fast, PROMPT, SamplingParams(max_new_tokens=9))]
    at = next(i for i, id in enumerate(said) if i >= 1 and id not in [*PROMPT, *said[:i]])
    fast.tok_embeddings.weight[said[at], 5] = math.nan
    message = told(fast, max_new_tokens=9)
    assert f"new token {at + 2} " in message
    assert f"tok_embeddings.weight holds 1 NaN of 20,480 numbers, the first at [{said[at]}, 5]" in message


def test_what_stands_in_the_way_of_the_search_is_said(broken: Transformer, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **options: Any) -> Any:
        raise RuntimeError("can't allocate memory:\nyou tried 1 TB")

    monkeypatch.setattr(nonfinite, "_pass", full)
    assert "the layer where that begins could not be found (can't allocate memory: you tried 1 TB)" in told(broken)


def test_the_search_leaves_nothing_behind(broken: Transformer) -> None:
    told(broken)
    assert not any(module._forward_hooks for module in broken.modules())
    broken.layers[1].attention.wv.weight[4, 7] = 0.1
    assert list(generate(broken, PROMPT, SamplingParams(max_new_tokens=2)))


# ------------------------------------------------------------------------------------------------------- what follows
@pytest.mark.row("G18")
@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "reference"])
def test_a_session_that_met_nan_answers_the_next_prompt_as_if_it_had_not(attention: str, fixed: bool) -> None:
    """What lies behind a mask has weight 0, and 0 times NaN is NaN: it must be gone from the cache."""
    net = tiny.model(attention=attention)
    net.runner.fixed_cache = fixed
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


@pytest.mark.row("G18")
def test_a_draft_that_met_nan_goes_on_where_it_can() -> None:
    small = tiny.model()
    small.runner.fixed_cache = True
    small.tok_embeddings.weight[200] = math.nan
    net, draft = tiny.model(seed=1), ModelDraft(small)
    with pytest.raises(NumericalError, match="draft model"):
        list(speculate(net, [5, 6, 200, 7], SamplingParams(max_new_tokens=5), draft))
    got = [token.id for token in speculate(net, [5, 6, 7], SamplingParams(max_new_tokens=12), draft)]
    assert got == [token.id for token in generate(net, [5, 6, 7], SamplingParams(max_new_tokens=12))]


def test_quantizing_what_is_not_finite_is_refused_before() -> None:
    net = tiny.model(tiny.WIDE)
    spoil(net, "layers.0.attention.wq.weight", math.nan)
    with pytest.raises(CheckpointError, match="not finite"):
        quantize_(net, "int8")
