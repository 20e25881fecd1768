"""Meta's files: for every family and shard count the results of Meta's own code, for every fault a clear error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import llama
from llama import loader
from llama.checkpoint import open_checkpoint
from llama.errors import LlamaError

from . import meta_code
from .scripts import make_tiny

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = torch.randint(500, (1, 300), generator=torch.Generator().manual_seed(0))

WQ = "layers.1.attention.wq.weight"

# Parameters of the official models, from public counts and the bytes of published shards
PARAMETERS = {
    "llama-1-7b": 6_738_415_616, "llama-1-13b": 13_015_864_320, "llama-1-33b": 32_528_943_616,
    "llama-1-65b": 65_285_660_672, "llama-2-7b": 6_738_415_616, "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192, "codellama-7b": 6_738_546_688, "codellama-7b-python": 6_738_415_616,
    "codellama-13b": 13_016_028_160, "codellama-13b-python": 13_015_864_320, "codellama-34b": 33_743_970_304,
    "codellama-70b": 68_976_910_336, "codellama-70b-python": 68_976_910_336, "codellama-70b-instruct": 68_976_910_336,
    "llama-3-8b": 8_030_261_248, "llama-3-70b": 70_553_706_496, "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496, "llama-3.1-405b": 405_853_388_800, "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824, "llama-3.3-70b": 70_553_706_496,
}  # fmt: skip


def test_official_models_have_their_published_parameter_counts() -> None:
    counts = {like: make_tiny.real_config(like).n_params for like in make_tiny.names()}
    assert counts == PARAMETERS


# ---------------------------------------------------------------------------------------------------------- parity
@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, torch.Tensor]]:
    """A miniature of every official model in one shard, and its logits by Meta's own code."""
    root = tmp_path_factory.mktemp("families")
    folders, jobs = {}, []
    for like in PARAMETERS:
        folders[like] = make_tiny.make(root / like, like)
        config = make_tiny.tiny_config(like)
        scaling = config.rope_scaling
        code, factor = ("llama-models", scaling["factor"]) if scaling else ("llama3", 8)
        jobs.append(meta_code.job(folders[like], TOKENS, code, config.vocab_size, factor))
    return {like: (folders[like], logits) for like, logits in zip(folders, meta_code.run(jobs), strict=True)}


@pytest.mark.parametrize("like", PARAMETERS)
def test_logits_equal_those_of_metas_code(families: dict[str, tuple[Path, torch.Tensor]], like: str) -> None:
    folder, expected = families[like]
    model = llama.load_model(folder, dtype="float32", device="cpu")
    assert model.config == make_tiny.tiny_config(like)
    logits = model(TOKENS)
    assert float(expected.std()) > 0.5
    assert float((logits - expected).abs().max()) < 2e-4


@pytest.mark.parametrize("like", ["llama-1-65b", "llama-2-70b", "codellama-34b", "llama-3.1-405b", "llama-3.2-1b"])
def test_logits_do_not_depend_on_the_number_of_shards(tmp_path: Path, like: str) -> None:
    config = make_tiny.tiny_config(like, 16)
    dtype = torch.float16 if like.startswith("llama-1") else torch.bfloat16
    state = make_tiny.weights(config, dtype=dtype)
    logits = []
    for shards in (1, 2, 4, 8, 16):
        folder = make_tiny.write_meta(tmp_path / str(shards), like, config, state, shards, None)
        model = llama.load_model(folder, dtype="float32", device="cpu")
        assert model.config == config
        logits.append(model(TOKENS[:, :50]))
    assert all(torch.equal(logits[0], other) for other in logits[1:])


def test_repeated_heads_must_be_equal(tmp_path: Path) -> None:
    folder = make_tiny.make(tmp_path, "llama-3.1-405b", shards=16)
    save(folder, lambda state: state["layers.1.attention.wk.weight"][0, 0].add_(1), 3)
    with pytest.raises(LlamaError, match=r"copies of the key/value heads in layers\.1\.attention\.wk\.weight differ"):
        loader.load_model(folder)


@pytest.mark.parametrize("like", ["llama-2-7b", "llama-3-8b"])  # the embedding split by columns, and by rows
@pytest.mark.parametrize("equal", [1, 100, 512])
def test_embeddings_are_tied_only_if_all_rows_are_equal(tmp_path: Path, like: str, equal: int) -> None:
    config = make_tiny.tiny_config(like, 2)
    state = make_tiny.weights(config)
    count = config.vocab_size if equal == 512 else equal
    state["output.weight"][:count] = state["tok_embeddings.weight"][:count]
    checkpoint = open_checkpoint(make_tiny.write_meta(tmp_path, like, config, state, 2, None))
    assert checkpoint.config.tie_embeddings == (equal == 512)


@pytest.mark.parametrize(
    ("quantization", "change", "words"),
    [
        ("qlora", lambda s: s.pop("layers.0.attention.wq.adaptor.A.weight"), "wq or one of its two adaptors are miss"),
        ("qlora", lambda s: s.update({"layers.0.attention.wq.adaptor.A.weight": torch.ones(3, 5)}), "do not match"),
        ("qlora", lambda s: s.update({WQ: s[WQ].bfloat16()}), "which no LLaMA has"),
        ("fp8", lambda s: s.update({"output.weight": s["output.weight"].to(torch.float8_e4m3fn)}), "rows of output"),
        ("fp8", lambda s: s.update({WQ: s[WQ].float().to(torch.float8_e5m2)}), "is torch.float8_e5m2"),
    ],
)
def test_parts_of_a_quantized_weight_that_do_not_fit_are_an_error(
    tmp_path: Path, quantization: str, change: Callable[[dict[str, torch.Tensor]], None], words: str
) -> None:
    like, shards = ("llama-3.1-405b", 8) if quantization == "fp8" else ("llama-3.2-1b", 1)
    folder = make_tiny.make(tmp_path, like, shards=shards, quantization=quantization)
    for rank in range(shards):
        save(folder, change, rank)
    with pytest.raises(LlamaError, match=words):
        loader.load_model(folder, device="cpu")


def test_float8_weights_are_multiplied_by_their_row_scales(tmp_path: Path) -> None:
    state = make_tiny.weights(make_tiny.tiny_config("llama-3.1-405b", 8, n_layers=4))
    checkpoint = open_checkpoint(make_tiny.make(tmp_path, "llama-3.1-405b", shards=8, quantization="fp8"))
    files, scales = (
        [torch.load(tmp_path / name.format(i)) for i in range(8)]
        for name in ("consolidated.0{}.pth", "fp8_scales_{}.pt")
    )
    for ours, meta, axis in (("w_gate", "w1", 0), ("w_up", "w3", 0), ("w_down", "w2", 1)):
        parts = [
            files[i][f"layers.1.feed_forward.{meta}.weight"].float() * scales[i][f"1_feed_forward.{meta}_{i}"][:, None]
            for i in range(8)
        ]  # in float32, without rounding
        assert torch.equal(checkpoint.weight(f"layers.1.feed_forward.{ours}.weight").floats(), torch.cat(parts, axis))
        assert torch.equal(
            checkpoint.weight(f"layers.0.feed_forward.{ours}.weight").floats(),
            state[f"layers.0.feed_forward.{meta}.weight"],
        )
    assert torch.equal(checkpoint.weight(WQ).floats(), state[WQ])


@pytest.mark.parametrize("kind", ["qlora", "spinquant"])
def test_four_bit_weights_follow_the_formula(tmp_path: Path, kind: str) -> None:
    folder = make_tiny.make(tmp_path, "llama-3.2-1b", quantization=kind)
    base = "layers.1.feed_forward.w2"
    file = torch.load(folder / "consolidated.00.pth", weights_only=True)
    checkpoint = open_checkpoint(folder)
    x = torch.randn(5, checkpoint.config.hidden_dim, generator=torch.Generator().manual_seed(0))
    expected = torch.zeros(5, checkpoint.config.dim)  # the output of the layer, computed group by group
    inputs = x @ sylvester(x.shape[1]) if kind == "spinquant" else x
    for row in range(checkpoint.config.dim):
        for group in range(x.shape[1] // 32):
            part = slice(32 * group, 32 * group + 32)
            scale = file[f"{base}.scales"][row, group]
            expected[:, row] += inputs[:, part] @ (file[f"{base}.weight"][row, part].float() * scale)
    if kind == "qlora":
        expected += 2.0 * (x @ file[f"{base}.adaptor.A.weight"].T) @ file[f"{base}.adaptor.B.weight"].T
    weight = checkpoint.weight("layers.1.feed_forward.w_down.weight").floats()
    torch.testing.assert_close(x @ weight.T, expected, rtol=1e-4, atol=1e-4)
    embedding = checkpoint.weight("tok_embeddings.weight").floats()
    torch.testing.assert_close(
        embedding, file["tok_embeddings.weight"].float() * file["tok_embeddings.scales"].reshape(-1, 1)
    )
    assert checkpoint.config.tie_embeddings


def sylvester(n: int) -> torch.Tensor:
    """Sylvester's Hadamard matrix by its definition, orthonormal."""
    h = torch.ones(1, 1)
    while len(h) < n:
        h = torch.cat((torch.cat((h, h), 1), torch.cat((h, -h), 1)))
    return h / n**0.5


# --------------------------------------------------------------------------------------------- decisions and notes


def edit_params(folder: Path, **changes: object) -> None:
    file = folder / "params.json"
    document = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in document.items() if value != "remove"}))


def test_what_params_json_does_not_state_is_noted(tmp_path: Path) -> None:
    folder = make_tiny.make(tmp_path, "llama-3.2-3b")
    assert len(open_checkpoint(folder).notes) == 2
    assert "factor 32" in " ".join(open_checkpoint(folder).notes)
    edit_params(folder, model_family="new")
    checkpoint = open_checkpoint(folder)
    assert list(checkpoint.warnings) == ["params.json has unknown keys, which have no effect: model_family"]
    (folder / "params.json").write_text(json.dumps({"model": json.loads((folder / "params.json").read_text())}))
    assert open_checkpoint(folder).config == checkpoint.config


# ------------------------------------------------------------------------------------------------------------ faults
def save(folder: Path, change: Callable[[dict[str, torch.Tensor]], None], rank: int = 0) -> None:
    file = folder / f"consolidated.{rank:02d}.pth"
    state = torch.load(file, weights_only=True)
    change(state)
    torch.save(state, file)


def put(name: str, tensor: object) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda state: state.__setitem__(name, tensor)  # type: ignore[arg-type]


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "gap": (lambda d: (d / "consolidated.00.pth").unlink(), r"consolidated\.00\.pth is missing"),
    "last missing": (lambda d: (d / "consolidated.01.pth").unlink(), "1 shards have 128 of 256 rows of wq; download"),
    "copy": (lambda d: shutil.copy(d / "consolidated.00.pth", d / "consolidated.01.pth"), "the same weights"),
    "only in shard 1": (lambda d: save(d, put("layers.1.extra.weight", torch.zeros(1)), 1), "01.pth and .* differ"),
    "no norm": (lambda d: save(d, lambda s: s.pop("norm.weight")), "norm.weight is missing; the file is damaged"),
    "other model": (lambda d: save(d, lambda s: s["norm.weight"].mul_(2), 1), "not shards of one model"),
    "small norm": (
        lambda d: [save(d, put("norm.weight", torch.full((256,), 0.001 + 0.01 * rank)), rank) for rank in (0, 1)],
        "not shards of one model",
    ),
    "int8": (lambda d: both(d, put(WQ, torch.zeros(128, 256, dtype=torch.int8))), "layers.1.attention.wq is int8"),
    "float8": (lambda d: both(d, put(WQ, torch.zeros(128, 256).to(torch.float8_e4m3fn))), r"fp8_scales_0\.pt is missing"),
    "heads": (lambda d: edit_params(d, n_heads=7), "has shape|head"),
    "fewer tokens": (lambda d: cut_line(d / "tokenizer.model"), "767 tokens, but the embedding has 768 rows"),
}  # fmt: skip


def both(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    for rank in (0, 1):
        save(folder, change, rank)


def cut_line(file: Path) -> None:
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[:-1]))


@pytest.fixture(scope="module")
def two_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny.make(tmp_path_factory.mktemp("two"), "llama-3-8b", shards=2)


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_a_one_line_error(two_shards: Path, tmp_path: Path, fault: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(two_shards, folder)
    damage, says = FAULTS[fault]
    damage(folder)
    with pytest.raises(LlamaError, match=says) as caught:
        loader.load(folder, device="cpu", dtype="float32")
    assert str(tmp_path) in str(caught.value)
