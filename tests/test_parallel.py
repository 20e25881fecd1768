"""One model in several processes: the same logits and tokens as in one process, for every file format."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from llama.checkpoint import open_checkpoint
from llama.checkpoint.gguf import NAMES
from llama.config import ModelConfig
from llama.engine import parallel
from llama.engine.sharding import Rank, ShardedCheckpoint, check_world, fits, stages
from llama.errors import UsageError
from llama.quant.blocks import READERS
from llama.tools.convert import convert
from llama.tools.quantize import quantize
from llama.weights import expected_shapes, sample_hash

from . import ranks, tiny

pytestmark = pytest.mark.usefixtures("one_thread")

SLOW = pytest.mark.slow
CONFIG = ModelConfig(
    dim=64, n_layers=3, n_heads=8, n_kv_heads=4, head_dim=16, hidden_dim=96, vocab_size=323, max_seq_len=2048
)
CONFIGS = {
    "grouped heads": CONFIG,
    "all heads": dataclasses.replace(CONFIG, n_kv_heads=8),
    "two key/value heads": dataclasses.replace(CONFIG, n_kv_heads=2),  # with 4 ranks, two ranks have the same head
    "one key/value head": dataclasses.replace(CONFIG, n_kv_heads=1),
    "tied": dataclasses.replace(CONFIG, tie_embeddings=True),
    "biases": dataclasses.replace(CONFIG, attention_bias=True, mlp_bias=True, n_kv_heads=2),
    "biases of q, k, v": dataclasses.replace(CONFIG, qkv_bias=True),
}
# Wide enough for complete quantization groups in a quarter of the inputs, and for 8 shards.
WIDE = ModelConfig(
    dim=256, n_layers=2, n_heads=8, n_kv_heads=8, head_dim=32, hidden_dim=512, vocab_size=328, max_seq_len=2048
)


@pytest.fixture(scope="module")
def world() -> Iterator[ranks.Ranks]:
    server = ranks.Ranks()
    yield server
    server.close()


def write(folder: Path, config: ModelConfig, form: str = "hf", **options: Any) -> Path:
    """Write a random model to a file or folder; return its path."""
    source = folder / "source.gguf"
    if not source.exists():
        metadata = {"llama.vocab_size": config.vocab_size}
        tiny.write_gguf(source, config, metadata=metadata)
    if form == "gguf":
        return source
    target = folder / (form + "".join(map(str, options.values())))
    if form == "meta":
        return tiny.write_meta(target, config, **options)
    convert(source, target, form, **options)
    return target


def check(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-4) -> None:
    """Check that ids are equal and logits close."""
    assert expected
    for name, value in expected.items():
        if value.is_floating_point():
            assert float((found[name] - value).abs().max()) < tolerance, name
            assert float(value.abs().max()) > 0.1, name
        else:
            assert found[name].tolist() == value.tolist(), name


def test_results_of_several_ranks_equal_those_of_one_process(world: ranks.Ranks, tmp_path: Path) -> None:
    path = str(write(tmp_path, CONFIG))
    expected = ranks.answers(ranks.build(path))
    drafted, accepted = expected["drafted, accepted"].tolist()
    assert 0 < accepted < drafted
    for tensor, pipeline in ((2, 1), (2, 2)):
        found, *others = world.run(tensor, pipeline, "ask", path=path)
        check(found, expected)
        for other in others:  # a cache that rank 0 deletes is deleted on every rank
            assert int(other["most caches alive"]) <= 5 < int(other["caches created"])


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_results_are_the_same_for_every_number_of_ranks(name: str, world: ranks.Ranks, tmp_path: Path) -> None:
    path = str(write(tmp_path, CONFIGS[name]))
    for kv_cache in ("model", "int8"):
        expected = ranks.answers(ranks.build(path, kv_cache=kv_cache))
        for tensor, pipeline in ((2, 1), (4, 1), (8, 1), (1, 3), (2, 2), (4, 2)):
            found, *_ = world.run(tensor, pipeline, "ask", path=path, kv_cache=kv_cache)
            check(found, expected, 1e-4 if kv_cache == "model" else 1e-2)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_the_same_for_every_architecture(name: str, world: ranks.Ranks, tmp_path: Path) -> None:
    path = str(write(tmp_path, CONFIGS[name]))
    expected = ranks.logits(ranks.build(path))
    found, *_ = world.run(4, 1, "ask", path=path, what="logits")
    check(found, expected)


def test_rejected_calls_leave_the_ranks_in_step(world: ranks.Ranks, tmp_path: Path) -> None:
    path = str(write(tmp_path, CONFIG, "gguf"))
    found, *_ = world.run(2, 1, "ask", path=path, what="refusals")
    check(found, ranks.refusals(ranks.build(path)))


@pytest.mark.parametrize("kv_cache", ["model", "int8"])
def test_a_batch_gets_the_tokens_of_one_process(kv_cache: str, world: ranks.Ranks, tmp_path: Path) -> None:
    path = str(write(tmp_path, CONFIG))
    expected = ranks.many(ranks.build(path, kv_cache=kv_cache))
    assert sum(-ids[0] for ids in expected.values() if len(ids)) >= 40  # tokens copied from other rows
    for tensor, pipeline in ((2, 1), (2, 2)):
        found, *_ = world.run(tensor, pipeline, "ask", path=path, what="many", kv_cache=kv_cache)
        check(found, expected)


@pytest.mark.parametrize("form", ["real", "half"])
def test_logits_are_the_same_for_forms_of_rope_and_an_8_bit_cache(
    form: str, world: ranks.Ranks, tmp_path: Path
) -> None:
    path = str(write(tmp_path, CONFIG, "hf" if form == "real" else "gguf"))
    options: dict[str, Any] = {
        "rope": form,
        "kv_cache": "int8",
        "rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
    }
    expected = ranks.logits(ranks.build(path, **options))
    found, *_ = world.run(2, 1, "ask", path=path, what="logits", **options)
    check(found, expected)


def test_ranks_with_different_weights_are_rejected(world: ranks.Ranks, tmp_path: Path) -> None:
    """The architecture is the same; in one pair only one matrix differs, as after merging an adapter."""
    plain = tiny.weights(tiny.CONFIG)
    merged = dict(plain)
    merged["layers.0.attention.wv.weight"] = plain["layers.0.attention.wv.weight"] * 1.01
    for name, state in {"plain": plain, "other": tiny.weights(tiny.CONFIG, seed=1), "merged": merged}.items():
        tiny.write_gguf(tmp_path / f"{name}.gguf", tiny.CONFIG, state)
    for other in ("other", "merged"):
        paths = [str(tmp_path / f"{name}.gguf") for name in ("plain", other)]
        for message in world.run(2, 1, "differ", paths=paths):
            assert "rank 1 has weights with sample hash" in message
    hashes = []
    convert(tmp_path / "plain.gguf", tmp_path / "hf", "hf")
    tiny.write_meta(tmp_path / "meta", state=plain)
    for form in ("hf", "meta"):  # the hash does not depend on the format
        hashes.append(sample_hash(open_checkpoint(tmp_path / form)))
    assert set(hashes) == {sample_hash(open_checkpoint(tmp_path / "plain.gguf"))}


def test_ranks_with_different_models_are_rejected(world: ranks.Ranks, tmp_path: Path) -> None:
    paths = [
        str(tiny.write_gguf(tmp_path / f"{theta}.gguf", tiny.CONFIG, metadata={"llama.rope.freq_base": theta}))
        for theta in (1e4, 2e4)
    ]
    for message in world.run(2, 1, "differ", paths=paths):
        assert message.startswith("rank 1 has ModelConfig(")
        assert "20000.0" in message
    for message in world.run(2, 1, "differ", paths=[paths[0], str(tmp_path / "none.gguf")]):
        assert "none.gguf is missing" in message


# ----------------------------------------------------------------------------------------------- reading checkpoints
@pytest.mark.parametrize("shards", [1, pytest.param(2, marks=SLOW), pytest.param(4, marks=SLOW), 8])
def test_any_number_of_meta_shards_loads_on_any_number_of_ranks(
    shards: int, world: ranks.Ranks, tmp_path: Path
) -> None:
    for config in (WIDE, dataclasses.replace(WIDE, n_kv_heads=2)):
        if config is not WIDE and shards < 4:  # with more shards, key/value heads are stored several times
            continue
        folder = tmp_path / str(config.n_kv_heads)
        folder.mkdir()
        path = str(write(folder, config, "meta", shards=shards))
        expected = ranks.logits(ranks.build(str(folder / "source.gguf")))
        for tensor in (2, 4) if config is WIDE else (4,):
            found, *_ = world.run(tensor, 1, "ask", path=path, what="logits")
            check(found, expected)


# plain: dequantized weights are compared, since the kernels also round activations.
SOURCES: dict[str, tuple[str, dict[str, Any]]] = {
    "quantized to int8": ("hf", {"quantize": "int8", "plain": True}),
    "quantized to int4": ("meta", {"quantize": "int4", "plain": True}),
    "saved in int4": ("int4", {"plain": True, "dtype": "bfloat16"}),
    "saved in int8, dequantized": ("int8", {}),
    "Q8_0": ("Q8_0", {"plain": True, "dtype": "bfloat16"}),
    "Q4_0": ("Q4_0", {"plain": True, "dtype": "bfloat16"}),
    "Q4_1, dequantized": ("Q4_1", {}),
    "bfloat16": ("hf", {"plain": True, "dtype": "bfloat16"}),
}


def source(folder: Path, form: str, config: ModelConfig = WIDE) -> str:
    """Write a random model in a format, a quantization scheme or a GGUF type; return its path."""
    if form.startswith("Q"):
        metadata = {"llama.vocab_size": config.vocab_size}
        return str(tiny.write_gguf(folder / f"{form}.gguf", config, quantization=form, metadata=metadata))
    if form.startswith("int"):
        quantize(write(folder, config), folder / form, form)
        return str(folder / form)
    return str(write(folder, config, form))


CASES = [(name, tied) for name in SOURCES for tied in (False, True)]
FAST = CASES[::4] + CASES[3::4]  # each source once


@pytest.mark.parametrize(
    ("name", "tied"), [c if c in FAST else pytest.param(*c, marks=pytest.mark.slow) for c in CASES]
)
def test_logits_are_the_same_for_quantized_weights_and_every_format(
    name: str, tied: bool, world: ranks.Ranks, tmp_path: Path
) -> None:
    form, options = SOURCES[name]
    config = dataclasses.replace(WIDE, tie_embeddings=tied, n_kv_heads=2 if tied else 8)
    path = source(tmp_path, form, config)
    expected = ranks.logits(ranks.build(path, **options))
    found, *_ = world.run(4 if tied else 2, 1, "ask", path=path, what="logits", **options)
    check(found, expected)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_logits_of_the_quantized_kernels_are_close(quantize: str, world: ranks.Ranks, tmp_path: Path) -> None:
    path = str(write(tmp_path, WIDE))
    expected = ranks.logits(ranks.build(path, quantize=quantize))
    found, *_ = world.run(2, 1, "ask", path=path, what="logits", quantize=quantize)
    check(found, expected, 5e-2)  # sums in another order change the rounding of activations to 8 bits


def test_a_division_of_a_quantization_group_is_rejected(tmp_path: Path) -> None:
    narrow = dataclasses.replace(WIDE, hidden_dim=4 * 48)
    checkpoint = open_checkpoint(source(tmp_path, "Q8_0", narrow))
    ShardedCheckpoint(checkpoint, Rank(0, 2)).check_groups()
    with pytest.raises(UsageError, match=r"parts of 48 inputs, .* groups have 32 inputs"):
        ShardedCheckpoint(checkpoint, Rank(1, 4)).check_groups()
    ShardedCheckpoint(checkpoint, Rank(1, 4)).check_groups(group=16)


TYPES = ["F32", "F16", "BF16", *READERS]


@pytest.mark.parametrize("type", TYPES)
def test_a_piece_of_a_weight_equals_the_slice_of_the_weight(type: str, tmp_path: Path) -> None:
    config = dataclasses.replace(WIDE, dim=512, hidden_dim=1024, n_heads=8, head_dim=64, vocab_size=48, n_layers=1)
    kind = gguf.GGMLQuantizationType[type]
    width, size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(3)
    writer = gguf.GGUFWriter(str(tmp_path / "x.gguf"), "llama")
    for key, value in tiny.architecture(config).items():
        (writer.add_float32 if key in tiny.FLOATS else writer.add_uint32)(key, value)
    file_names = {ours: name for name, ours in NAMES.items()}
    for name, shape in expected_shapes(config).items():
        inner = name.removesuffix(".weight").removeprefix("layers.0.")
        file_name = ("blk.0." if name.startswith("layers") else "") + file_names[inner] + ".weight"
        if len(shape) == 1:
            writer.add_tensor(file_name, generator.standard_normal(shape, dtype=np.float32))
            continue
        # Bytes below 60, so that the scales are finite.
        raw = generator.integers(0, 60, (shape[0], shape[1] // width * size), dtype=np.uint8)
        writer.add_tensor(file_name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = open_checkpoint(tmp_path / "x.gguf")
    for name in ("output.weight", "layers.0.feed_forward.w_down.weight", "norm.weight"):
        weight = checkpoint.tensor(name).float()
        for rows, columns in (
            (slice(16, 32), slice(None)),
            (slice(None), slice(128, 320)),
            (slice(3, 9), slice(32, 64)),
        ):
            cut = weight[rows] if weight.dim() == 1 else weight[rows, columns]
            assert torch.equal(checkpoint.piece(name, rows, columns).float(), cut)
            blocks = checkpoint.blocks(name, rows, columns) if weight.dim() == 2 else None
            assert (blocks is None) == (weight.dim() == 1 or type not in READERS)
            if blocks is not None:
                torch.testing.assert_close(blocks.weight, cut)


def test_each_rank_has_only_its_part_of_the_weights(world: ranks.Ranks, tmp_path: Path) -> None:
    path = str(write(tmp_path, WIDE))
    sizes = {name: tensor.numel() for name, tensor in ranks.build(path).state_dict().items()}
    total = sum(sizes.values())
    for tensor, pipeline in ((4, 1), (2, 2)):
        loaded = [
            sum(int(shape.prod()) for name, shape in rank.items() if "." in name)
            for rank in world.run(tensor, pipeline, "ask", path=path, what="logits")
        ]
        norms = sum(count for name, count in sizes.items() if "norm" in name)
        assert total <= sum(loaded) <= total + norms * tensor * pipeline
        if pipeline == 1:
            assert max(loaded) <= total / tensor + norms + 16 * WIDE.dim * 2  # one tile of the vocabulary more


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("form", "options"),
    [
        ("hf", {"dtype": "bfloat16"}),
        ("hf", {"dtype": "bfloat16", "quantize": "int8"}),
        ("meta", {"dtype": "bfloat16", "rope": "half"}),
        ("gguf", {"dtype": "float32"}),
        ("Q8_0", {"dtype": "bfloat16"}),
    ],
)
def test_loading_a_rank_needs_memory_for_its_part_and_one_tensor(
    form: str, options: dict[str, Any], world: ranks.Ranks, tmp_path: Path
) -> None:
    config = ModelConfig(
        dim=2048, n_layers=2, n_heads=16, n_kv_heads=16, head_dim=128, hidden_dim=8192, vocab_size=4096, max_seq_len=256
    )
    if form == "meta":
        state = {name: weight.bfloat16() for name, weight in tiny.weights(config).items()}
        path = str(tiny.write_meta(tmp_path / form, config, state))
    elif form == "hf":
        convert(tiny.write_gguf(tmp_path / "source.gguf", config), tmp_path / form, form, dtype=torch.bfloat16)
        path = str(tmp_path / form)
    else:
        path = source(tmp_path, form, config)
    used = {n: world.run(n, 1, "memory", path=path, **options) for n in (1, 4)}
    bits = 32 if form == "gguf" else 8.5 if form == "Q8_0" or "quantize" in options else 16
    size = config.n_params * bits / 8
    assert size > 130e6
    tensor = 4 * config.hidden_dim * config.dim  # bytes of the largest tensor in float32
    # Linux may map a file in huge pages; those at the ends of a part contain other parts.
    pages = 2**21 * 7 * config.n_layers
    assert 0.9 * size < used[1][0]["run"]
    for rank in used[4]:
        assert 0.9 * size / 4 < rank["run"] < size / 4 + tensor + pages + 20e6, used


# ------------------------------------------------------------------------------------------- division among the ranks
@given(
    st.integers(1, 8), st.integers(1, 8), st.integers(1, 40), st.integers(1, 600), st.integers(1, 9), st.integers(1, 9)
)
def test_the_parts_of_all_ranks_cover_the_model_once(
    groups: int, shared: int, layers: int, vocab: int, tensor: int, pipeline: int
) -> None:
    config = ModelConfig(
        dim=8, n_layers=layers, n_heads=groups * shared, n_kv_heads=groups, head_dim=2, hidden_dim=72, vocab_size=vocab
    )
    if not fits(config, tensor) or pipeline > layers:
        with pytest.raises(UsageError, match="sizes that work: 1"):
            check_world(config, tensor, pipeline)
        return
    check_world(config, tensor, pipeline)
    all_ranks = [Rank(number, tensor, pipeline) for number in range(tensor * pipeline)]
    assert [i for rank in all_ranks[::tensor] for i in rank.layers(config)] == list(range(layers))
    assert all(len(rank.layers(config)) > 0 for rank in all_ranks)
    for name, shape in expected_shapes(config).items():
        seen = torch.zeros(shape)
        for rank in all_ranks[:tensor]:
            rows, columns = rank.cut(name, config)
            seen[(rows, columns)[: len(shape)]] += 1
        copies = tensor if "norm" in name else max(1, tensor // groups) if ".wk." in name or ".wv." in name else 1
        assert bool((seen == copies).all()), name
    for rank in all_ranks[:tensor]:  # each query head uses the key/value head that it uses in the complete model
        own = rank.config(config)
        first, first_kv = (rank.cut(f"layers.0.attention.{w}.weight", config)[0].start or 0 for w in ("wq", "wk"))
        for head in range(own.n_heads):
            used = first_kv // 2 + head // (own.n_heads // own.n_kv_heads)
            assert used == (first // 2 + head) // shared


def test_an_unsupported_number_of_processes_is_rejected_with_the_supported_ones() -> None:
    config = dataclasses.replace(CONFIG, n_kv_heads=2)
    with pytest.raises(UsageError, match=r"over 3 processes .* 8 heads, 2 key/value heads .*: 1, 2, 4, 8$"):
        check_world(config, 3, 1)
    with pytest.raises(UsageError, match=r"5 stages .* 3 layers; sizes that work: 1 to 3$"):
        check_world(config, 2, 5)


def test_stages_have_about_equal_sizes() -> None:
    official = ModelConfig(
        dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, head_dim=128, hidden_dim=14336, vocab_size=128256
    )
    assert stages(official, 2) == [14, 18]  # the embeddings are as large as five layers
    assert stages(dataclasses.replace(official, vocab_size=100), 4) == [8, 8, 8, 8]
    assert stages(dataclasses.replace(official, n_layers=3), 3) == [1, 1, 1]


@pytest.mark.parametrize("value", ["x", "", "nan", "-1", "0", "inf"])
def test_the_time_limit_for_joining_must_be_a_positive_number(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEARLLAMA_JOIN_SECONDS", value)
    with pytest.raises(UsageError, match=r"CLEARLLAMA_JOIN_SECONDS is .*expected a number"):
        parallel.join_seconds()
    monkeypatch.setenv("CLEARLLAMA_JOIN_SECONDS", "2.5")
    assert parallel.join_seconds() == 2.5


# ------------------------------------------------------------------------------------------------- errors and threads
@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_nonfinite_logits_are_an_error_and_leave_the_ranks_in_step(
    world: ranks.Ranks, tmp_path: Path, tensor: int, pipeline: int
) -> None:
    """There is no second pass to locate the layer, since the other ranks would not take part in it."""
    state = tiny.weights()
    state["layers.1.attention.wv.weight"][4, 7] = torch.nan
    path = str(tiny.write_gguf(tmp_path / "x.gguf", state=state))
    found, *_ = world.run(tensor, pipeline, "ask", path=path, what="not_finite")
    message = bytes(found["message"].tolist()).decode()
    assert "logits of new token 1 are not finite" in message
    assert "overflow in float32" in message


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_two_threads_of_rank_0_get_the_answers_of_one_thread(
    world: ranks.Ranks, tmp_path: Path, tensor: int, pipeline: int
) -> None:
    path = str(tiny.write_gguf(tmp_path / "x.gguf"))
    found, *_ = world.run(tensor, pipeline, "ask", path=path, what="threads")
    assert torch.equal(found["concurrent"], found["serial"])
