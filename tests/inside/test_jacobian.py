"""The Jacobian lens is the mean of complete Jacobians; its files are the published ones, and hostile ones fail."""

from __future__ import annotations

import argparse
import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from llama import inside
from llama.cli import main
from llama.cli.common import loading
from llama.errors import CheckpointError, LlamaError, UsageError
from llama.hub.models import FILE, SIZE
from llama.inside.jacobian import SHIPPED, SKIPPED, JacobianLens, fit_jacobian_lens, summary
from llama.model import Transformer
from llama.text import Llama

from .. import tiny

pytestmark = pytest.mark.usefixtures("one_thread")
C = 32
DEEP = dataclasses.replace(tiny.CONFIG, n_layers=3, dim=C, n_heads=2, n_kv_heads=1)
TEXTS = [tiny.random_tokens(T)[0].tolist() for T in (20, 19)]


def rest_of(model: Transformer, layer: int, ids: list[int], h: Tensor) -> Tensor:
    """The output of the last block, if that of a layer is h: (1, T, C)."""
    last = f"resid_post.{model.config.n_layers - 1}"
    with inside.patch(model, {f"resid_post.{layer}": lambda x, at: h}), inside.activations(model, last) as seen:
        model.hidden(torch.tensor([ids]))
    return seen[last]


def complete(model: Transformer, layer: int, ids: list[int]) -> Tensor:
    """The matrix by definition, from the complete Jacobian (|V|, C, T, C) of the later layers."""
    with torch.no_grad(), inside.activations(model, f"resid_post.{layer}") as seen:
        model.hidden(torch.tensor([ids]))
    h = seen[f"resid_post.{layer}"]
    J: Any = torch.autograd.functional.jacobian(lambda x: rest_of(model, layer, ids, x)[0, 16:-1], h)[:, :, 0]
    total, used = torch.zeros(h.shape[-1], h.shape[-1]), range(16, len(ids) - 1)
    for source in used:
        for target in range(source, len(ids) - 1):
            total += J[target - 16, :, source]
    return total / len(used)


@pytest.fixture(scope="module")
def fitted() -> tuple[Transformer, JacobianLens]:
    model = tiny.model(DEEP)
    return model, [*fit_jacobian_lens(model, TEXTS)][-1]


def test_a_lens_is_the_mean_of_complete_jacobians(fitted: tuple[Transformer, JacobianLens]) -> None:
    model, lens = fitted
    assert lens.n_prompts == 2
    assert [*lens.matrices] == [0, 1]  # not the last one, whose matrix is the identity
    for layer, matrix in lens.matrices.items():
        expected = torch.stack([complete(model, layer, ids) for ids in TEXTS]).mean(0)
        torch.testing.assert_close(matrix, expected, rtol=0, atol=1e-5)
        assert float((expected - torch.eye(C)).abs().max()) > 0.1


def test_a_toy_of_a_known_jacobian() -> None:
    """Without attention, and with an MLP that returns A h, the Jacobian of each later layer is I + A."""
    model = tiny.model(DEEP)
    A = torch.randn(C, C, generator=torch.Generator().manual_seed(3)) / 16
    for layer in model.layers:
        layer.attention.wo.weight = torch.nn.Parameter(torch.zeros(C, C), False)
        layer.ffn_norm = torch.nn.Identity()
        layer.feed_forward.forward = lambda x: x @ A.T
    (lens,) = fit_jacobian_lens(model, TEXTS[:1])
    step = torch.eye(C) + A
    torch.testing.assert_close(lens.matrices[1], step, rtol=0, atol=1e-5)
    torch.testing.assert_close(lens.matrices[0], step @ step, rtol=0, atol=1e-5)


def test_a_fit_goes_on_from_a_lens(fitted: tuple[Transformer, JacobianLens]) -> None:
    model, both = fitted
    (first,) = fit_jacobian_lens(model, TEXTS[:1], layers=[1])
    (resumed,) = fit_jacobian_lens(model, TEXTS[1:], start=first)
    assert (resumed.n_prompts, [*resumed.matrices]) == (2, [1])
    torch.testing.assert_close(resumed.matrices[1], both.matrices[1], rtol=0, atol=1e-6)


def test_what_can_not_be_fitted_is_refused() -> None:
    with pytest.raises(UsageError, match="17 tokens is too short"):
        [*fit_jacobian_lens(tiny.model(), [[1] * (SKIPPED + 1)])]
    with pytest.raises(UsageError, match="float32"):
        [*fit_jacobian_lens(tiny.model().bfloat16(), TEXTS)]


def test_the_readout_and_the_direction_of_a_token(fitted: tuple[Transformer, JacobianLens]) -> None:
    model, lens = fitted
    h = torch.randn(5, C, generator=torch.Generator().manual_seed(4))
    found, token = lens.logits(model, {0: h, 1: 2 * h, 2: h}), 7
    direction = lens.direction(model, token)
    for row, layer in enumerate(lens.matrices):
        moved = (lens.matrices[layer].double() @ ((1 + row) * h).double().T).T  # J h, for each row
        scale = (moved.square().mean(-1, keepdim=True) + model.norm.eps).sqrt()
        expected = moved / scale * model.norm.weight.double() @ model.output.weight.double().T
        torch.testing.assert_close(found[row].double(), expected, rtol=0, atol=1e-4)
        product = ((1 + row) * h) @ direction.directions[layer] / scale[:, 0].float()
        torch.testing.assert_close(product, found[row, :, token], rtol=0, atol=1e-4)


def test_a_direction_steers_towards_its_token(fitted: tuple[Transformer, JacobianLens]) -> None:
    model, lens = fitted
    tokens = torch.tensor([TEXTS[0]])
    for token in (7, 100):
        with inside.steer(model, lens.direction(model, token), scale=4.0, layers=[1]):
            changed = model(tokens)[0, -1]
        assert changed.softmax(-1)[token] > 2 * model(tokens)[0, -1].softmax(-1)[token]


# --------------------------------------------------------------------------------------------------------------- files
def test_a_file_is_the_published_one(fitted: tuple[Transformer, JacobianLens], tmp_path: Path) -> None:
    model, lens = fitted
    path = tmp_path / "lens.pt"
    dataclasses.replace(lens, metadata={"model": "tiny"}).write(path)
    plain = torch.load(path, weights_only=True)
    assert {name: plain[name] for name in plain if name != "J"} == {
        "n_prompts": 2, "source_layers": [0, 1], "d_model": C, "metadata": {"model": "tiny"},
    }  # fmt: skip
    again = JacobianLens.read(path, model)
    assert (again.n_prompts, again.metadata) == (2, {"model": "tiny"})
    for layer, matrix in lens.matrices.items():
        assert plain["J"][layer].dtype == torch.float16
        assert torch.equal(plain["J"][layer], matrix.half())
        assert torch.equal(again.matrices[layer], matrix.half().float())
    torch.save({"J": {1: torch.eye(C).half()}, "n_prompts": 1000, "source_layers": [1], "d_model": C}, path)
    assert torch.equal(JacobianLens.read(path, model).matrices[1], torch.eye(C))


def test_a_packed_lens_is_as_close_as_a_byte(fitted: tuple[Transformer, JacobianLens], tmp_path: Path) -> None:
    model, lens = fitted
    dataclasses.replace(lens, metadata={"texts": "of the test"}).pack(tmp_path / "lens.safetensors")
    packed = JacobianLens.unpack(tmp_path / "lens.safetensors")
    assert (packed.n_prompts, packed.metadata) == (2, {"texts": "of the test"})
    for layer, matrix in lens.matrices.items():
        step = matrix.abs().amax(1, keepdim=True) / 127
        assert bool(((packed.matrices[layer] - matrix).abs() <= 0.6 * step).all())
    h = torch.randn(40, C, generator=torch.Generator().manual_seed(4))
    found, expected = (one.logits(model, {0: h, 1: h}) for one in (packed, lens))
    assert float((found - expected).norm() / expected.norm()) < 0.02


class Evil:
    def __reduce__(self) -> Any:
        return print, ("owned",)


HALF = torch.zeros(C, C, dtype=torch.float16)
LOOP: dict[str, Any] = {"J": {0: HALF}, "n_prompts": 1}
LOOP["loop"] = LOOP
HOSTILE: dict[str, tuple[Any, str]] = {
    "code": ({"J": {0: HALF}, "n_prompts": 1, "metadata": Evil()}, "more than tensors"),
    "a tuple": ({"J": {0: HALF}, "n_prompts": 1, "metadata": (1,)}, "has a tuple"),
    "a set": ({"J": {0: HALF}, "n_prompts": {1}}, "more than tensors"),
    "a list": ([HALF], "holds a list"),
    "weights": ({"norm.weight": HALF}, "not a Jacobian lens"),
    "no number": ({"J": {0: HALF}, "n_prompts": True}, "not a Jacobian lens"),
    "a number of 600 digits": ({"J": {0: HALF}, "n_prompts": 10**600}, "not a Jacobian lens"),
    "a layer of 600 digits": ({"J": {10**600: HALF}, "n_prompts": 1}, "lens of another model"),
    "a layer too many": ({"J": {3: HALF}, "n_prompts": 1}, "layers 0 to 2"),
    "a layer by name": ({"J": {"0": HALF}, "n_prompts": 1}, "lens of another model"),
    "another width": ({"J": {0: HALF}, "n_prompts": 1, "d_model": 33}, "expected d_model 32"),
    "another shape": ({"J": {0: HALF[:31].clone()}, "n_prompts": 1}, "layer 0 is not a finite matrix"),
    "a number for a matrix": ({"J": {0: 1}, "n_prompts": 1}, "layer 0 is not a finite matrix"),
    "not finite": ({"J": {0: HALF / 0}, "n_prompts": 1}, "layer 0 is not a finite matrix"),
    "strides of 0": ({"J": {0: HALF[:1, :1].clone().expand(C, C)}, "n_prompts": 1}, "stored entries"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_is_no_lens_is_refused_in_one_line(tmp_path: Path, capfd: Any, name: str) -> None:
    state, words = HOSTILE[name]
    torch.save(state, tmp_path / "lens.pt")
    with pytest.raises(CheckpointError, match=words) as caught:
        JacobianLens.read(tmp_path / "lens.pt", tiny.model(DEEP))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    assert "owned" not in capfd.readouterr().out


def test_repeated_and_endless_parts_take_no_time(tmp_path: Path) -> None:
    many: Any = "x"
    for _ in range(200):  # 2 ** 200 leaves
        many = [many, many]
    torch.save({**LOOP, "metadata": {"many": many}}, tmp_path / "lens.pt")
    assert JacobianLens.read(tmp_path / "lens.pt", tiny.model(DEEP)).n_prompts == 1


def test_a_plain_pickle_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    (tmp_path / "lens.pt").write_bytes(pickle.dumps(LOOP))
    for path, words in ((tmp_path / "lens.pt", "torch 1.6"), (tmp_path / "none.pt", "none.pt")):
        with pytest.raises(LlamaError, match=words):
            JacobianLens.read(path, tiny.model(DEEP))


# --------------------------------------------------------------------------------------------------------- the command
def test_the_command_fits_resumes_and_shows_a_lens(
    tiny_gguf: Path, tiny_llm: Llama, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, text = tmp_path / "lens.pt", tmp_path / "text.txt"
    text.write_text("".join(chr(97 + i * i % 26) for i in range(270)))
    begin = tiny_llm.tokenizer.encode_prompt("")
    ids, size = tiny_llm.tokenizer.encode_prompt(text.read_text())[len(begin) :], 128 - len(begin)
    parts = [begin + ids[:size], begin + ids[size : 2 * size]]
    command = ["trace", "-m", str(tiny_gguf), "-f", str(text), "--fit-lens", str(path)]
    assert main(command) == 0
    fitted = JacobianLens.read(path, tiny_llm)
    one, both = fit_jacobian_lens(tiny_llm, parts)
    assert fitted.n_prompts == 2
    assert "fitted to 2 of 2 parts" in capsys.readouterr().err
    torch.testing.assert_close(fitted.matrices[0], both.matrices[0], rtol=1e-3, atol=1e-4)
    dataclasses.replace(one, metadata=fitted.metadata).write(path)
    assert main(command) == 0
    torch.testing.assert_close(JacobianLens.read(path, tiny_llm).matrices[0], both.matrices[0], rtol=2e-3, atol=2e-3)
    assert "fitted to 1 of 2" not in capsys.readouterr().err
    assert main([*command[:3], "-p", "another text " * 20, *command[5:]]) == 2
    assert "fitted to another text or model" in capsys.readouterr().err
    assert main(["trace", "-m", str(tiny_gguf), "abc", "--lens", str(path)]) == 0
    ids = tiny_llm.tokenizer.encode_prompt("abc")
    assert summary(JacobianLens.read(path, tiny_llm), tiny_llm, ids) in capsys.readouterr().out


def test_only_the_default_model_has_a_lens_of_its_own(tmp_path: Path, tiny_gguf: Path) -> None:
    args = argparse.Namespace(lens=None, model=str(tiny_gguf), adapter=[], rope_scaling=None, rope_theta=None)
    assert loading.read_lens(args, tiny.model()) is None
    args.model = str(tmp_path / FILE)
    with open(args.model, "wb") as file:
        file.truncate(SIZE)
    lens = loading.read_lens(args, tiny.model())
    assert lens is not None
    assert {matrix.shape for matrix in lens.matrices.values()} == {(576, 576)}
    assert SHIPPED.stat().st_size < 4e6
    for option, value in (("adapter", ["x"]), ("rope_theta", 1e5), ("rope_scaling", {"rope_type": "ntk"})):
        changed = argparse.Namespace(**{**vars(args), option: value})
        assert loading.read_lens(changed, tiny.model()) is None


def test_a_lens_of_the_hub_is_fetched_by_its_repository_and_path(
    fitted: tuple[Transformer, JacobianLens], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, lens = fitted
    asked = []

    def fetch(repo: str, file: str) -> str:
        asked.append((repo, file))
        if "none" in file:
            raise OSError("no such file")
        lens.write(tmp_path / "lens.pt")
        return str(tmp_path / "lens.pt")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fetch)
    found = loading.read_lens(argparse.Namespace(lens="org/lenses/a/b.pt"), model)
    assert asked == [("org/lenses", "a/b.pt")]
    assert found is not None
    assert found.n_prompts == 2
    with pytest.raises(CheckpointError, match="downloading org/lenses/none"):
        loading.read_lens(argparse.Namespace(lens="org/lenses/none.pt"), model)
