"""The memory of a run: linear in its length, as predicted, and refused with a message if it does not fit."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from llama import cli, loader
from llama.cache import FIRST_SLOTS, LARGEST_STEP, KVCache
from llama.checkpoint.gguf import GGUFWeight
from llama.config import ModelConfig
from llama.engine import kernels
from llama.engine.placement import Placement
from llama.errors import ContextLengthError, MemoryLimitError
from llama.generate import prefill, prefill_chunks
from llama.model import Transformer
from llama.quant.gguf_types import block_of
from llama.system import memory, pages

from . import tiny

pytestmark = pytest.mark.usefixtures("one_thread")

TRAINED = 64


def long_model(**changes: Any) -> Transformer:
    return tiny.model(dataclasses.replace(tiny.CONFIG, max_seq_len=TRAINED, **changes), max_seq_len=8192)


# ------------------------------------------------------------------------------------------------ prefill in chunks
@pytest.mark.parametrize("length", [TRAINED - 1, TRAINED + 1, 300])
def test_a_prompt_in_chunks_gives_the_logits_and_keys_of_one_pass(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also under frequencies that depend on the length."""
    model = long_model(rope_scaling={"rope_type": "dynamic", "factor": 4.0})
    tokens = tiny.random_tokens(length)
    whole = model.new_cache(length)
    expected = model(tokens, cache=whole)[0, -1]
    for chunk in (7, 64, length):
        cache = model.new_cache(length)
        monkeypatch.setattr("llama.generate.prompt_chunk", lambda device, chunk=chunk: chunk)
        got = prefill(model, tokens[0].tolist(), cache)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)
        torch.testing.assert_close(tiny.contents(cache), tiny.contents(whole), rtol=0, atol=1e-4)


# --------------------------------------------------------------------------------------------------- the KV cache
def fill(cache: KVCache, end: int, step: int = 512) -> None:
    """Store keys and values for all positions up to `end` through the cache's own interface."""
    shape, dtype = cache.layers[0].buffers[0].shape, cache.layers[0].buffers[0].dtype
    while cache.length < end:
        count = min(step, end - cache.length)
        positions = cache.place(count)
        for layer in cache.layers:
            layer.update(*torch.ones(2, cache.batch, shape[1], count, shape[3], dtype=dtype), positions)
        cache.commit()


@pytest.mark.parametrize("kind", ["model", "int8"])
def test_a_cache_has_few_empty_slots_and_the_predicted_bytes(kind: str) -> None:
    cache = KVCache(tiny.CONFIG.n_layers, tiny.CONFIG.n_kv_heads, tiny.CONFIG.head_dim, 30_000, batch=3, kind=kind)
    for end in range(100, 30_001, 100):
        fill(cache, end)
        assert end <= cache.slots <= min(end + max(end, FIRST_SLOTS), end + LARGEST_STEP, 30_000)
    found = sum(buffer.nbytes for layer in cache.layers for buffer in layer.buffers)
    assert found == memory.cache_bytes(tiny.CONFIG, 30_000, 4, kind, 3)
    with pytest.raises(ContextLengthError, match=r"30000.*30001"):
        cache.reserve(30_001)


# ------------------------------------------------------------------------------------------------------ free memory
MEMINFO = "MemTotal:  8000 kB\nMemFree: 100 kB\nMemAvailable:    5000 kB\n"
V1, V2 = "9:cpu:/a\n4:memory:/docker/abc\n0::/\n", "0::/user.slice/run\n"
OLD = "memory/docker/abc/memory"
STAT = "anon 1900000\ninactive_file 400000\nactive_file 200000\n"
TOTALS = "cache 1\ntotal_inactive_file 40000\ntotal_active_file 2000\ninactive_file 7\n"


@pytest.mark.parametrize(
    ("meminfo", "group", "files", "free"),
    [
        ("MemTotal: 8000 kB\n", "", {}, None),
        (MEMINFO, "", {}, 5_120_000),
        # version 2: page cache, the parent's limit, a limit above the free memory, more used than allowed
        (MEMINFO, V2, {"user.slice/run/memory.max": "3000000", "user.slice/run/memory.current": "2500000",
                       "user.slice/run/memory.stat": STAT}, 1_100_000),
        (MEMINFO, V2, {"user.slice/run/memory.max": "3000000", "user.slice/run/memory.current": "1000",
                       "user.slice/memory.max": "4000000", "user.slice/memory.current": "3900000"}, 100_000),
        ("", V2, {"user.slice/memory.max": "10", "user.slice/memory.current": "30"}, 0),
        # a container with its own group at the mount and a path from outside
        (MEMINFO, "0::/../../x\n", {"memory.max": "50000", "memory.current": "20000"}, 30_000),
        # version 1: no limit, a limit with page cache
        (MEMINFO, V1, {f"{OLD}.limit_in_bytes": "2000000", f"{OLD}.usage_in_bytes": "1700000", f"{OLD}.stat": TOTALS},
         342_000),
        # malformed files are not a limit
        (MEMINFO, "nonsense\n\n0:\n", {"memory.max": "x", "memory.current": ""}, 5_120_000),
    ],
)  # fmt: skip
def test_the_lowest_of_all_limits_is_the_free_memory(
    tmp_path: Path, meminfo: str, group: str, files: dict[str, str], free: int | None
) -> None:
    texts = {"proc/meminfo": meminfo, "proc/self/cgroup": group}
    texts |= {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = memory.free_memory("cpu", tmp_path)
    assert (found.bytes if found else None) == free


# ------------------------------------------------------------------------------------------------------- the refusal
@pytest.mark.parametrize("ranks", [1, 2])
def test_too_much_is_refused_with_the_sizes_and_the_remedies(monkeypatch: pytest.MonkeyPatch, ranks: int) -> None:
    monkeypatch.setattr(memory, "RUNTIME", 2**20)
    need = 16 * 2**30, 4 * 2**30, 2**30 - 2**20
    small(monkeypatch, ranks * 21 * 2**30)
    memory.check("big.gguf", *need, torch.device("cpu"), ranks)
    small(monkeypatch, ranks * 21 * 2**30 - 1)
    with pytest.raises(MemoryLimitError) as caught:
        memory.check("big.gguf", *need, torch.device("cpu"), ranks)
    each = " in each of 2 processes" if ranks == 2 else ""
    assert str(caught.value).startswith(f"big.gguf needs 21.0 GiB of memory{each} (16.0 GiB weights, 4.0 GiB KV")


def small(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda *_: memory.Room(free, "are free on this machine"))


def test_the_requested_length_decides(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needs: list[tuple[int, int]] = []
    monkeypatch.setattr(memory, "check", lambda what, weights, cache, *_: needs.append((weights, cache)))
    for tokens in (10, 200, 10**9):
        loader.load(tiny_gguf, dtype="float32", tokens=tokens)
    one = tiny.CONFIG.kv_cache_bytes(1, 4)
    words = len(loader.load_tokenizer(tiny_gguf).encode("the"))
    assert cli.main(["generate", "--raw", "the", "-n", "7", "-m", str(tiny_gguf), "--dtype", "float32", "-q"]) == 0
    assert [cache for _, cache in needs] == [10 * one, 200 * one, 256 * one, (words + 7) * one]  # a context of 256
    assert {weights for weights, _ in needs} == {4 * tiny.CONFIG.n_params}


@pytest.mark.parametrize("layers", [("cpu", "cpu"), ("cuda", "cuda"), ("cpu", "cuda")])
def test_the_check_counts_the_chunks_that_a_prompt_is_fed_in(
    layers: tuple[str, str], tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs: list[int] = []
    monkeypatch.setattr(memory, "check", lambda what, weights, cache, activations, *_: needs.append(activations))
    options = loader.LoadOptions("cpu", "float32", max_seq_len=5000, tokens=5000)
    plan = loader.make_plan(loader.open_model(tiny_gguf), options)
    devices = tuple(map(torch.device, layers))
    loader.check_memory(dataclasses.replace(plan, placement=Placement(devices[0], devices, devices[1])))

    fed: list[int] = []
    model: Any = SimpleNamespace(hidden=lambda part, **_: fed.append(part.shape[1]))
    cache: Any = SimpleNamespace(device=devices[1], length=0, reserve=lambda length: None)
    real = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda data, device: real(data))  # this machine may have no GPU
    list(prefill_chunks(model, [[0] * 5000], cache))
    assert max(fed) == {"cpu": 256, "cuda": 2048}[layers[1]]
    part = dataclasses.replace(plan.config, n_layers=2 // len(set(layers)))
    assert set(needs) == {memory.activation_bytes(part, 5000, 4, "model", max(fed))}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quantization", ["F32", "Q8_0", "Q4_0"])
@pytest.mark.parametrize(
    "options", [{"dtype": "auto"}, {"dtype": "float32"}, {"quantize": "int8"}, {"quantize": "int4"}], ids=str
)
def test_the_bytes_of_the_weights_are_predicted(
    tmp_path: Path, tied: bool, quantization: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = dataclasses.replace(tiny.WIDE, tie_embeddings=tied)
    path = tiny.write_gguf(tmp_path / "m.gguf", config, tiny.weights(config), quantization=quantization)
    needs: list[int] = []
    monkeypatch.setattr(memory, "check", lambda what, weights, *_: needs.append(weights))
    llm = loader.load(path, device="cpu", **options)
    model = llm.model
    storages = {t.data_ptr(): t.nbytes for t in (*model.parameters(), *model.buffers())}
    assert needs[0] == pytest.approx(sum(storages.values()), rel=1e-6)
    dequantized = quantization != "F32" and options.get("dtype") == "float32" and kernels.ready()
    assert [
        "are dequantized to float32, which takes 0.0 GB; dtype=None (--dtype auto)" in warning
        for warning in llm.warnings
    ].count(True) == dequantized


def test_a_cache_is_checked_before_it_is_made_and_before_it_grows(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch, 0)
    memory.check_growth(memory.SMALL, 100, torch.device("cpu"))  # a small one is not checked
    monkeypatch.setattr(memory, "SMALL", 0)
    small(monkeypatch, 10**6)
    check = memory.check_growth
    with pytest.raises(MemoryLimitError, match="1,000 tokens needs"):
        KVCache(1, 2, 64, 1000, fixed=True, check_memory=check)  # 1.02 million bytes
    with pytest.raises(MemoryLimitError, match=r"--kv-cache int8.*--no-memory-check"):
        KVCache(4, 2, 64, 900, check_memory=check)
    KVCache(4, 2, 64, 900)  # without a check
    KVCache(4, 2, 64, 900, kind="int8", dtype=torch.bfloat16, check_memory=check)  # half of it, and the scales
    model = long_model()
    model.check_memory = check
    long = model.new_cache()
    prefill(model, [5] * 1000, long)
    small(monkeypatch, 1000)
    with pytest.raises(MemoryLimitError, match="KV cache"):
        prefill(model, [5] * 100, long)
    assert (long.length, long.slots) == (1000, FIRST_SLOTS)
    small(monkeypatch, 10**9)
    prefill(model, [5] * 100, long)  # the cache still works after the refusal
    assert long.length == 1100


@pytest.mark.skipif(not kernels.ready(), reason="requires the C++ kernels")
@pytest.mark.parametrize(("stored", "scheme", "grows"), [("Q4_0", "int4", True), ("Q8_0", "int4", False)])
def test_a_file_that_grows_when_it_is_quantized_again_is_reported(
    tmp_path: Path, stored: str, scheme: str, grows: bool
) -> None:
    path = tiny.write_gguf(tmp_path / "x.gguf", tiny.WIDE, quantization=stored)
    warnings = loader.load(path, device="cpu", quantize=scheme).warnings
    assert [("less accuracy" in warning, "these weights grow by" in warning) for warning in warnings] == [(True, grows)]


def test_the_command_refuses_unless_the_check_is_off(
    tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """No weight is read before."""
    small(monkeypatch, 2**20)
    command = ["generate", "--raw", "hello", "-n", "3", "-m", str(tiny_gguf)]
    with monkeypatch.context() as patch:
        patch.setattr(GGUFWeight, "raw", property(lambda _: pytest.fail("read")))
        assert cli.main(command) == 1
    out, err = capfd.readouterr()
    assert (out, len(err.splitlines())) == ("", 1)
    assert "1 MiB are free on this machine" in err
    assert cli.main([*command, "--no-memory-check"]) == 0


SMAPS, LARGE_PAGES = Path("/proc/self/smaps"), Path("/sys/kernel/mm/transparent_hugepage")


@pytest.mark.skipif(not (SMAPS.exists() and LARGE_PAGES.exists()), reason="this system has no large pages")
def test_a_large_tensor_begins_at_a_large_page_and_asks_for_such_pages() -> None:
    tensor = pages.empty_in_large_pages(5, 2**20)
    assert (tensor.shape, tensor.is_contiguous()) == ((5, 2**20), True)
    assert tensor.data_ptr() % pages.LARGE == 0
    found = re.findall(
        r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags: (.*?)$", Path("/proc/self/smaps").read_text(), re.M | re.S
    )
    (flags,) = (flags for start, end, flags in found if int(start, 16) <= tensor.data_ptr() < int(end, 16))
    assert "hg" in flags.split()


@pytest.mark.slow
@pytest.mark.skipif(not (SMAPS.exists() and kernels.ready()), reason="needs Linux and the C++ kernels")
@pytest.mark.parametrize("type", ["Q4_K", "Q5_0", "Q8_0"])
def test_loading_takes_no_more_memory_than_the_packed_weights(
    tmp_path: Path, type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook samples the memory of this process after each pack; afterwards no page of the file is mapped."""
    config = ModelConfig(1024, 4, 8, 4, 128, 4096, 4096, max_seq_len=64, tie_embeddings=False)

    def stored(array: np.ndarray, type: gguf.GGMLQuantizationType) -> np.ndarray:
        if type.name == "F32":
            return array.astype(np.float32)
        per_block, size = block_of(type.name)
        return np.ones((len(array), array.shape[1] // per_block * size), np.uint8)

    monkeypatch.setattr(gguf.quants, "quantize", stored)
    path = tiny.write_gguf(tmp_path / "x.gguf", config, tiny.weights(config), quantization=type)

    def used() -> dict[str, int]:
        found = re.findall(r"^(RssAnon|RssFile):\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.M)
        return {name: 1024 * int(size) for name, size in found}

    samples, pack = [], kernels.pack_blocks
    monkeypatch.setattr(kernels, "pack_blocks", lambda *args: (pack(*args), samples.append(used())))
    plan = loader.make_plan(loader.open_model(path), loader.LoadOptions(device="cpu", fast=True))
    model, before = loader.empty_model(plan), used()
    loader.build_plan(plan, model)
    samples.append(used())
    size = sum(planned.memory_footprint for planned in plan.weights.values())
    assert max(sample["RssAnon"] for sample in samples) - before["RssAnon"] < 1.1 * size
    assert max(sample["RssFile"] for sample in samples) - before["RssFile"] < 0.5 * path.stat().st_size
    assert samples[-1]["RssFile"] - before["RssFile"] < 0.05 * path.stat().st_size
