"""One model in several processes: the same logits and tokens as in one process."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llama import loader
from llama.checkpoint import open_checkpoint
from llama.checkpoint.base import Checkpoint
from llama.config import ModelConfig
from llama.engine import cpu_runner, parallel
from llama.engine.compiled import GraphRunner
from llama.engine.parallel import RowParallel, ShardedCheckpoint, divides
from llama.errors import UsageError
from llama.tools.convert import convert, quantize
from llama.tools.families import official

from . import ranks, tiny

pytestmark = pytest.mark.usefixtures("one_thread")
SLOW = pytest.mark.slow
CONFIG = ModelConfig(
    dim=64, n_layers=3, n_heads=8, n_kv_heads=4, head_dim=16, hidden_dim=96, vocab_size=323, max_seq_len=2048
)
CONFIGS = {
    "grouped heads": CONFIG,
    "all heads": dataclasses.replace(CONFIG, n_kv_heads=8),
    "two key/value heads": dataclasses.replace(CONFIG, n_kv_heads=2),  # on 4 ranks, two have the same head
    "one key/value head": dataclasses.replace(CONFIG, n_kv_heads=1),
    "tied": dataclasses.replace(CONFIG, tie_embeddings=True),
    "biases": dataclasses.replace(CONFIG, attention_bias=True, mlp_bias=True, n_kv_heads=2),
    "biases of q, k, v": dataclasses.replace(CONFIG, qkv_bias=True),
    "norms of q and k": dataclasses.replace(CONFIG, qk_norm=True, n_kv_heads=2),
}
# Wide enough for complete quantization groups in a quarter of the inputs, and for 8 shards.
WIDE = ModelConfig(
    dim=256, n_layers=2, n_heads=8, n_kv_heads=8, head_dim=32, hidden_dim=512, vocab_size=328, max_seq_len=2048
)


def write(folder: Path, config: ModelConfig, form: str = "gguf") -> Path:
    """Write a random model; form is hf, meta with the number of shards, a type of GGUF or a quantization scheme."""
    if form.startswith("meta"):
        return tiny.write_meta(folder / form, config, shards=int(form[4:]))
    kind = form if form.startswith("Q") else "F32"
    size = {f"{tiny.gguf_name(config)}.vocab_size": config.vocab_size}
    source = tiny.write_gguf(folder / "x.gguf", config, quantization=kind, metadata=size)
    if form == "hf":
        convert(source, folder / form, form)
    elif form.startswith("int"):
        convert(source, folder / "hf", "hf")
        quantize(folder / "hf", folder / form, form)
    else:
        return source
    return folder / form


def check(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Check that ids are equal and logits close."""
    for name, value in expected.items():
        if value.is_floating_point():
            assert float((found[name] - value).abs().max()) < tolerance * max(1, float(value.abs().max())), name
        else:
            assert found[name].tolist() == value.tolist(), name


QUICK = [("grouped heads", 2, {}), ("two key/value heads", 4, {})]
CASES = [(name, size, {}) for name in CONFIGS for size in (2, 4, 8) if (name, size, {}) not in QUICK]
CASES += [("grouped heads", 4, {"rope": "half", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}})]
CASES += [("tied", 2, {"fast": False})]


@pytest.mark.parametrize(("name", "size", "options"), QUICK + [pytest.param(*case, marks=SLOW) for case in CASES])
def test_every_rank_has_the_logits_and_tokens_of_one_process(
    name: str, size: int, options: dict[str, Any], tmp_path: Path
) -> None:
    path = write(tmp_path, CONFIGS[name])
    expected = ranks.answers(None, path, options)
    for found in ranks.run(size, ranks.answers, path, options):
        check(found, expected)


ROUNDED: list[Any] = [("Q8_0", {"dtype": "bfloat16"}), ("int4", {"dtype": None}), ("hf", {"quantize": "int8"})]
ROUNDED = [("gguf", {"kv_cache": "int8"}), *(pytest.param(*case, marks=SLOW) for case in ROUNDED)]


@pytest.mark.parametrize(("form", "options"), ROUNDED)
def test_rounded_numbers_are_close_to_those_of_one_process(form: str, options: dict[str, Any], tmp_path: Path) -> None:
    """Sums in another order change how keys, or the inputs of quantized layers, round to 8 bits."""
    path = write(tmp_path, WIDE, form)
    expected = ranks.answers(None, path, options)
    floats = {name: value for name, value in expected.items() if value.is_floating_point()}
    for found in ranks.run(2, ranks.answers, path, options):
        check(found, floats, 5e-2)


def test_rank_0_picks_the_tokens_and_decides_for_all(tmp_path: Path) -> None:
    path = write(tmp_path, CONFIG)
    alone = ranks.sample(None, path)
    assert ranks.run(2, ranks.sample, path) == [alone, alone]
    assert ranks.run(2, ranks.decide) == [[0, "said"], [0, "said"]]


def test_ranks_with_different_weights_are_refused(tmp_path: Path) -> None:
    """The architecture is the same, and only one matrix differs, as after merging an adapter."""
    state = tiny.weights(tiny.CONFIG)
    name = "layers.0.attention.wv.weight"
    paths = [tiny.write_gguf(tmp_path / f"{n}.gguf", tiny.CONFIG, {**state, name: n * state[name]}) for n in (1, 2)]
    for message in ranks.run(2, ranks.differ, paths):
        assert message == ["rank 1 and rank 0 have different model files; start all ranks with the same model files"]


def test_a_fused_or_compiled_block_refuses_wrapped_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sums: list[Tensor] = []
    monkeypatch.setattr(parallel.dist, "all_reduce", lambda x, group: sums.append(x))
    options: dict[str, Any] = {"device": "cpu", "dtype": "bfloat16", "quantize": "int8", "fast": True}
    model = loader.build(open_checkpoint(write(tmp_path, WIDE)), **options, rope="real")
    if not isinstance(model.runner, cpu_runner.KernelRunner):
        pytest.skip("needs the C++ kernels")
    tokens, alone = tiny.random_tokens(9, WIDE), model.runner
    expected = model(tokens, cache=model.new_cache())
    for block in model.layers:
        block.set_submodule("feed_forward.w_down", RowParallel(block.feed_forward.w_down, None))
    model.runner = cpu_runner.KernelRunner(model)
    assert cpu_runner.supports(model)
    assert (alone.complete, model.runner.complete) == (True, False)
    torch.testing.assert_close(model(tokens, cache=model.new_cache()), expected, rtol=0.05, atol=0.05)
    assert len(sums) == WIDE.n_layers
    with pytest.raises(UsageError, match="w_down is wrapped in a RowParallel"):
        GraphRunner(model)


# ----------------------------------------------------------------------------------------------- reading checkpoints
def joined(name: str, parts: list[Tensor], config: ModelConfig) -> Tensor:
    """The whole of a weight from the parts that the ranks have."""
    layer = name.split(".")[-2]
    if layer in ("wo", "w_down"):
        return torch.cat(parts, 1) if name.endswith("weight") else sum(parts[1:], parts[0])
    if layer in ("wk", "wv"):
        return torch.cat(parts[:: max(1, len(parts) // config.n_kv_heads)])
    if layer in ("wq", "w_gate", "w_up") or (layer == "output" and not config.tie_embeddings):
        return torch.cat(parts)
    assert all(torch.equal(part, parts[0]) for part in parts)
    return parts[0]


COPIED = {"n_kv_heads": 2, "tie_embeddings": True}
SLICED = [(form, 4, kind) for form in ("hf", "meta1", "meta8", "Q8_0", "int4", "gguf") for kind in ({}, COPIED)]
SLICED += [("meta8", 2, {}), ("gguf", 4, {"attention_bias": True, "mlp_bias": True, "n_kv_heads": 1})]


@pytest.mark.parametrize(("form", "size", "kind"), SLICED)
def test_the_slices_of_all_ranks_are_the_whole(form: str, size: int, kind: dict[str, Any], tmp_path: Path) -> None:
    config = dataclasses.replace(WIDE, **kind)
    whole = open_checkpoint(write(tmp_path, config, form))
    parts: list[Checkpoint] = [ShardedCheckpoint(whole, rank, size) for rank in range(size)]
    for name in whole.shapes:
        expected = whole.weight(name).floats()
        found = [part.weight(name).floats() for part in parts]
        assert [tuple(tensor.shape) for tensor in found] == [part.shapes[name] for part in parts]
        assert torch.equal(joined(name, found, config), expected), name
        if parts[0].weight(name).format is not None:
            stored = [part.weight(name).groups().weight for part in parts]
            assert torch.equal(joined(name, stored, config), whole.weight(name).groups().weight)
            assert torch.equal(parts[1].weight(name)[1:2].groups().weight, stored[1][1:2])


def test_a_model_or_a_quantization_group_that_can_not_be_divided_is_refused(tmp_path: Path) -> None:
    config = dataclasses.replace(WIDE, hidden_dim=4 * 48)
    whole = open_checkpoint(write(tmp_path, config, "Q8_0"))
    assert ShardedCheckpoint(whole, 0, 2).weight("layers.0.feed_forward.w_down.weight").format is not None
    with pytest.raises(UsageError, match="columns 48 to 96 are not complete groups of 32; use fewer processes"):
        _ = ShardedCheckpoint(whole, 1, 4).weight("layers.0.feed_forward.w_down.weight").format
    with pytest.raises(UsageError, match=r"8 heads, 8 key/value heads and 192 features .* 3 processes.* 1, 2, 4, 8$"):
        ShardedCheckpoint(whole, 0, 3)
    sizes = {name: [n for n in range(1, 33) if divides(n, official()[name])] for name in official()}
    assert sizes["llama-3.1-405b"] == [1, 2, 4, 8, 16, 32]  # on 16, two ranks have the same head
    assert sizes["llama-2-7b"] == [1, 2, 4, 8, 16, 32]
    assert sizes["smollm2-135m-instruct"] == [1, 3]
