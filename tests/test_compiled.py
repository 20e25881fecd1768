"""The compiled step computes what the block computes, with one library for all layers and lengths."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from llama.config import ModelConfig
from llama.engine import compiled, kernels
from llama.engine.cpu_runner import FusedBlock
from llama.errors import UsageError
from llama.generate import generate, prefill
from llama.loader import load
from llama.model import Transformer
from llama.sampling import SamplingParams

from . import tiny

CONFIG = ModelConfig(64, 3, 4, 2, 16, 128, 320, norm_eps=1e-5, max_seq_len=512)


PACKED = {"scheme": "int4", "attention": "kernel"}
PACKED_TOLERANCE = 0.03  # a difference in the last bit of x can change x by one step when it is quantized to 8 bits
needs_kernels = pytest.mark.skipif(not kernels.ready(), reason="packed weights require the C++ kernels")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder for this file, so that it contains only libraries built here. The kernels are built before."""
    kernels.ready()
    with pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("cache")
        patch.setenv("CLEARLLAMA_CACHE", str(cache))
        yield cache


def model(scheme: str | None = None, dtype: torch.dtype = torch.float32, **settings: str) -> Transformer:
    """Return the same random model each time."""
    made = tiny.model(CONFIG, rope=settings.pop("rope", "real"), **settings).to(dtype)
    return tiny.quantized(made, scheme) if scheme else made


def step_by_step(net: Transformer, ids: list[int], prompt: int, slots: int) -> torch.Tensor:
    """Return the logits (T, V) of decoding ids one by one after a prompt."""
    cache = net.new_cache(slots)
    rows = [prefill(net, ids[:prompt], cache)]
    return torch.stack(rows + [prefill(net, [token], cache) for token in ids[prompt:]])


def ids_of(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, CONFIG.vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        pytest.param({}, 1e-4, marks=pytest.mark.slow),  # builds another library
        pytest.param(PACKED, PACKED_TOLERANCE, marks=needs_kernels),
    ],
    ids=["plain", "int4"],
)
@pytest.mark.slow
def test_compiled_and_eager_logits_agree_at_any_length_with_one_build(
    folder: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str], tolerance: float
) -> None:
    builds: list[Path] = []
    build = compiled.build
    monkeypatch.setattr(compiled, "build", lambda *given: (builds.append(given[2]), build(*given)))
    graphs = dict(torch._dynamo.utils.counters["stats"])
    eager, fast = model(**settings), tiny.compiled(model(**settings))
    again = tiny.compiled(model(**settings))
    assert len(builds) == 1  # for three layers and two models
    ids = ids_of(40)
    for prompt, slots in ((1, 40), (5, 64), (30, 333)):
        expected, got = step_by_step(eager, ids, prompt, slots), step_by_step(fast, ids, prompt, slots)
        torch.testing.assert_close(got, expected, rtol=0, atol=tolerance * float(expected.abs().max()))
    assert torch.equal(step_by_step(again, ids, 5, 64), step_by_step(fast, ids, 5, 64))
    params = SamplingParams(max_new_tokens=60)
    assert "scheme" in settings or [t.id for t in generate(fast, ids[:7], params)] == [
        t.id for t in generate(eager, ids[:7], params)
    ]
    assert len(builds) == 1
    assert dict(torch._dynamo.utils.counters["stats"]) == graphs  # nothing was compiled while decoding


@pytest.mark.slow
@needs_kernels
def test_every_layer_decodes_with_the_compiled_step(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fallback to the block's own code would compute the same tokens, so other tests would not notice it."""
    library_step, steps = compiled.library_step, []

    def counted(*args: object, **options: object) -> compiled.Step:
        step = library_step(*args, **options)
        return lambda *inputs: (steps.append(len(inputs)), step(*inputs))[1]

    monkeypatch.setattr(compiled, "library_step", counted)
    fast = tiny.compiled(model(**PACKED))
    cache = fast.new_cache(40)
    prefill(fast, ids_of(9), cache)
    assert steps == []  # a prompt runs uncompiled
    for count, token in enumerate(ids_of(12, 1), 1):
        prefill(fast, [token], cache)
        assert len(steps) == count * CONFIG.n_layers


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("first", [(0,), (1, 2), (0, 1, 2)])
def test_layers_without_rope_and_biases_of_q_k_v_use_the_same_library(folder: Path, first: tuple[int, ...]) -> None:
    """The first block may be one without RoPE; the library is made for a block that rotates, if there is one."""
    config = dataclasses.replace(CONFIG, qkv_bias=True, no_rope_layers=first)
    eager, fast = (tiny.quantized(tiny.model(config, rope="real", attention="kernel"), "int4") for _ in range(2))
    fast = tiny.compiled(fast)
    ids = ids_of(24)
    expected, got = step_by_step(eager, ids, 5, 64), step_by_step(fast, ids, 5, 64)
    torch.testing.assert_close(got, expected, rtol=0, atol=PACKED_TOLERANCE * float(expected.abs().max()))
    all_rotate = tiny.model(dataclasses.replace(config, no_rope_layers=()), rope="real", attention="kernel")
    rotated = step_by_step(tiny.quantized(all_rotate, "int4"), ids, 5, 64)
    assert float((rotated - expected).abs().max()) > 0.2 * float(expected.abs().max())


@needs_kernels
def test_layers_that_read_the_same_input_are_joined_without_a_second_copy() -> None:
    net = model("int4")
    block = net.layers[0]
    before = {name: block.get_submodule(name).weight.clone() for name in ("attention.wk", "feed_forward.w_up")}
    x = torch.randn(1, 1, CONFIG.dim)
    separate = [getattr(block.attention, name)(x) for name in ("wq", "wk", "wv")]
    traced = compiled.traceable(FusedBlock.of(block, join=True))
    for name, weight in before.items():
        assert torch.equal(block.get_submodule(name).weight, weight)
    parts = [getattr(traced.attention, name) for name in ("wq", "wk", "wv")]
    assert all(torch.equal(part(x), alone) for part, alone in zip(parts, separate, strict=True))
    joined = parts[0].linear.tiles
    assert block.attention.wv.tiles.untyped_storage().data_ptr() == joined.untyped_storage().data_ptr()
    assert [name for name, _ in compiled.tensors(traced)].count("attention.wq.linear.tiles") == 1


def test_the_name_of_a_library_contains_all_that_it_depends_on() -> None:
    def name(net: Transformer, cache_kind: str = "model") -> str:
        return compiled.fingerprint(net, compiled.traceable(FusedBlock.of(net.layers[0], join=True)), cache_kind)

    names = [name(model()), name(model(rope="half")), name(model(dtype=torch.bfloat16)), name(model(), "int8")]
    assert len(set(names)) == 4
    assert name(model()) == names[0]


def test_the_complex_form_and_opaque_layers_are_rejected() -> None:
    with pytest.raises(UsageError, match="rope='real'"):
        tiny.compiled(model(rope="complex"))
    net = model()
    net.set_submodule("layers.0.attention.wo", torch.nn.Identity())
    with pytest.raises(UsageError, match=r"can't run attention\.wo, a Identity"):
        tiny.compiled(net)


@needs_kernels
def test_layers_of_different_formats_are_rejected_before_anything_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Q4_K_M files have two formats: the library of the first layer would read the others wrongly."""
    monkeypatch.setattr(compiled, "load_package", lambda *_: pytest.fail("compiled"))
    net = model(attention="kernel")
    tiny.quantized(net.layers[1].feed_forward, "int8")  # type: ignore[arg-type]
    tiny.quantized(net, "int4")
    with pytest.raises(UsageError, match="the same formats in all layers"):
        compiled.CompiledRunner(net)
    monkeypatch.setattr(compiled, "load_package", lambda *_: None)
    compiled.CompiledRunner(model("int4", attention="kernel"))


def test_compile_must_be_a_boolean(tiny_gguf: Path) -> None:
    with pytest.raises(UsageError, match="compile must be true or false, got 'no'"):
        load(tiny_gguf, compile="no")


@needs_kernels
@pytest.mark.slow
def test_prompts_batches_and_given_positions_run_uncompiled(folder: Path) -> None:
    eager, fast = model(**PACKED), tiny.compiled(model(**PACKED))
    tokens = torch.tensor([ids_of(6), ids_of(6, 1)])  # (B, T)
    caches = [net.new_cache(32, batch=2) for net in (eager, fast)]
    for part in (tokens[:, :4], tokens[:, 4:5], tokens[:, 5:]):
        expected, got = (net(part, cache=cache) for net, cache in zip((eager, fast), caches, strict=True))
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)  # the same code
    torch.testing.assert_close(fast(tokens), eager(tokens), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("mode", "kept"), [(0o755, True), (0o777, False)])
def test_code_is_compiled_in_a_folder_of_this_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, kept: bool
) -> None:
    folder, work = tmp_path / "inductor", tmp_path / "work"
    folder.mkdir()
    folder.chmod(mode)
    work.mkdir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    with compiled._inductor_cache(work):
        used = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        assert (used == folder, used.parent == work) == (kept, not kept)


def test_a_package_that_does_not_load_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEARLLAMA_CACHE", str(tmp_path))
    monkeypatch.setattr(compiled, "build", lambda model, block, path, *rest: path.write_bytes(b"junk"))
    with pytest.raises(UsageError, match=r"the compiled step can't be loaded here: .*leave compile \(--compile\) out"):
        tiny.compiled(model())
    assert list((tmp_path / "compiled").iterdir()) == []
