"""A control vector equals a bias on every layer's output; its file is llama.cpp's and repeng's."""

from __future__ import annotations

import ctypes
import dataclasses
import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from llama import inside
from llama.cli import main
from llama.errors import CheckpointError, LlamaError, UsageError
from llama.generation.session import settings_of
from llama.loader import load
from llama.text import Llama
from llama.tools.convert import convert

from .. import tiny

pytestmark = pytest.mark.usefixtures("one_thread")

DEEP = dataclasses.replace(tiny.CONFIG, n_layers=4)
TOKENS = tiny.random_tokens(11)


def a_vector(layers: range = range(1, 4), dim: int = 64) -> inside.ControlVector:
    generator = torch.Generator().manual_seed(5)
    return inside.ControlVector({layer: torch.randn(dim, generator=generator) for layer in layers})


def foreign(path: Path, architecture: str = "controlvector", **tensors: np.ndarray) -> Path:
    """A file as repeng writes it, with the tensors direction.N for the keywords direction_N."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_string(f"{architecture}.model_hint", "mistral")
    writer.add_uint32(f"{architecture}.layer_count", len(tensors))
    for name, tensor in tensors.items():
        writer.add_tensor(name.replace("_", ".", 1), tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# -------------------------------------------------------------------------------------------------------------- model
@pytest.mark.parametrize("layers", [None, range(2, 4)])
def test_steering_equals_a_bias_of_the_last_matrix_of_each_layer(layers: range | None) -> None:
    model, biased = tiny.model(DEEP), tiny.model(DEEP)
    vector = a_vector()
    for layer in layers or range(1, 4):
        biased.layers[layer].feed_forward.w_down.bias = torch.nn.Parameter(-0.7 * vector.directions[layer], False)
    with inside.steer(model, vector, -0.7, layers) as steered:
        found = model(TOKENS)
    assert steered == [*(layers or range(1, 4))]
    torch.testing.assert_close(found, biased(TOKENS), rtol=0, atol=1e-4)
    assert float((found - model(TOKENS)).abs().max()) > 0.1


def test_the_vector_is_the_mean_difference_after_each_layer_at_the_last_token() -> None:
    model = tiny.model(DEEP)
    pairs = [([5, 6, 7], [8, 9]), ([1, 2], [3, 4, 5, 6])]
    vector = inside.control_vector(model, pairs)
    assert sorted(vector.directions) == [1, 2, 3]
    for layer in vector.directions:
        short = tiny.model(dataclasses.replace(DEEP, n_layers=layer + 1))
        short.load_state_dict({n: t for n, t in tiny.weights(DEEP).items() if n in short.state_dict()})
        short.set_submodule("norm", torch.nn.Identity())
        one, other = (torch.stack([short.hidden(torch.tensor([pair[i]]))[0, -1] for pair in pairs]) for i in (0, 1))
        torch.testing.assert_close(vector.directions[layer], (one - other).mean(0), rtol=0, atol=1e-5)


def test_the_same_steering_is_the_same_model_for_sessions() -> None:
    model = tiny.model(DEEP)

    def settings(scale: float, layers: list[int] | None = None) -> dict[str, Any]:
        with inside.steer(model, a_vector(), scale, layers):
            return settings_of(model)

    plain = settings_of(model)
    assert settings(1.0) == settings(1.0)
    assert len({json.dumps(each) for each in (plain, settings(1.0), settings(2.0), settings(1.0, [2]))}) == 4
    assert settings_of(model) == plain


@pytest.mark.parametrize(
    ("vector", "scale", "layers", "message"),
    [
        (a_vector(dim=32), 1.0, None, "direction.1 of the control vector has 32 numbers; expected 64 for"),
        (a_vector(range(3, 5)), 1.0, None, "direction.4 .*made for another model"),
        (a_vector(range(1, 3)), 1.0, [3], "no direction for these layers; it has layers 1 to 2"),
    ],
)
def test_a_vector_that_does_not_fit_is_refused(
    vector: inside.ControlVector, scale: float, layers: list[int] | None, message: str
) -> None:
    with pytest.raises(UsageError, match=message), inside.steer(tiny.model(DEEP), vector, scale, layers):
        pass


# --------------------------------------------------------------------------------------------------------------- file
def test_the_file_is_read_by_the_gguf_package_and_comes_back_equal(tmp_path: Path) -> None:
    path, vector = tmp_path / "v.gguf", a_vector()
    vector.write(path)
    found = gguf.GGUFReader(path)
    assert found.fields["general.architecture"].contents() == "controlvector"
    assert found.fields["controlvector.layer_count"].contents() == 3
    assert {t.name: (t.tensor_type.name, t.shape.tolist()) for t in found.tensors} == {
        f"direction.{layer}": ("F32", [64]) for layer in (1, 2, 3)
    }
    for tensor in found.tensors:
        assert np.array_equal(tensor.data, vector.directions[int(tensor.name.split(".")[1])].numpy())
    again = inside.ControlVector.read(path)
    assert again.digest() == vector.digest()
    assert all(torch.equal(again.directions[layer], vector.directions[layer]) for layer in (1, 2, 3))


ROW = np.ones(64, np.float32)


@pytest.mark.parametrize(
    ("tensors", "architecture", "message"),
    [
        ({"direction_1": ROW}, "llama", "not a control vector: general.architecture is 'llama'"),
        ({"direction_0": ROW}, "controlvector", "direction.0 of shape .* expected direction.N, N from 1"),
        ({"other_1": ROW}, "controlvector", "other.1"),
        ({"direction_1": ROW.astype(np.float16)}, "controlvector", "type F32"),
        ({"direction_1": ROW.reshape(8, 8)}, "controlvector", "one axis"),
        ({"direction_1": ROW * np.nan}, "controlvector", "not finite"),
        ({}, "controlvector", "no directions"),
    ],
)
def test_other_files_are_refused(
    tmp_path: Path, tensors: dict[str, np.ndarray], architecture: str, message: str
) -> None:
    path = foreign(tmp_path / "v.gguf", architecture, **tensors)
    with pytest.raises(CheckpointError, match=message):
        inside.ControlVector.read(path)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "v.gguf"
    a_vector().write(path)
    content = path.read_bytes()
    for part in (b"", content[:3], content[:100], content[:-8]):
        path.write_bytes(part)
        with pytest.raises(LlamaError):
            inside.ControlVector.read(path)
    with pytest.raises(CheckpointError, match="is missing"):
        inside.ControlVector.read(tmp_path / "none.gguf")


# ---------------------------------------------------------------------------------------------------------- llama.cpp
def logits_of_llama_cpp(model: Path, vector: Path, scale: float, ids: list[int]) -> torch.Tensor:
    """Logits after every token, (T, V), by llama.cpp with float32 keys and values; the gguf package reads the vector.

    llama.cpp takes the directions as one array of layers 1, 2, .. and a range of layers.
    """
    llama_cpp = pytest.importorskip("llama_cpp")
    directions = {int(t.name.split(".")[1]): t.data for t in gguf.GGUFReader(vector).tensors}
    last, dim = max(directions), len(directions[1])
    joined = scale * np.concatenate([directions.get(n, np.zeros(dim, np.float32)) for n in range(1, last + 1)])
    array = (ctypes.c_float * len(joined))(*joined.tolist())
    llm = llama_cpp.Llama(str(model), n_ctx=64, logits_all=True, verbose=False, n_threads=1, type_k=0, type_v=0)
    assert llama_cpp.llama_set_adapter_cvec(llm.ctx, array, len(joined), dim, 1, last) == 0
    llm.eval(ids)
    return torch.from_numpy(np.array(llm.scores[: len(ids)]))


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.0, 0.05, -0.3])
def test_llama_cpp_gives_the_same_logits(default_float32: Path, tmp_path: Path, scale: float) -> None:
    pytest.importorskip("llama_cpp")
    llm, path = load(default_float32, device="cpu", dtype="float32"), tmp_path / "happy.gguf"
    happy, sad, ids = map(
        llm.tokenizer.encode_prompt, ("I am so happy that", "I am so sad that", "Today I went to the")
    )
    vector = inside.control_vector(llm, [(happy, sad)])
    vector.write(path)
    with inside.steer(llm, vector, scale):
        found = llm.model(torch.tensor([ids]))[0]
    plain = llm.model(torch.tensor([ids]))[0]
    expected = logits_of_llama_cpp(default_float32, path, scale, ids)
    assert (float((found - plain).abs().max()) > 1) == (scale != 0)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-2)


@pytest.fixture(scope="module")
def default_float32(default_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model as a GGUF file in float32: llama.cpp rounds activations to 8 bits for quantized weights."""
    path = tmp_path_factory.mktemp("float32") / "model.gguf"
    convert(default_gguf, path, "gguf", dtype=torch.float32)
    return path


# ------------------------------------------------------------------------------------------------------------ command
def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = main(list(args))
    return code, *capsys.readouterr()


def test_the_command_makes_a_vector_and_generate_applies_it(
    tiny_gguf: Path, tiny_llm: Llama, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "v.gguf"
    model = ("-m", str(tiny_gguf), "--dtype", "float32", "--device", "cpu")
    made = run(capsys, "steer", "--positive", "hello", "--negative", "the", "-o", str(path), *model, "-q")
    assert made == (0, f"{path}: 1 directions of 64 numbers, for layers 1 to 1\n", "")
    one, other = (tiny_llm.tokenizer.encode_prompt(text) for text in ("hello", "the"))
    raw = tmp_path / "raw.gguf"
    assert run(capsys, "steer", "--raw", "--positive", "hello", "--negative", "the", "-o", str(raw), *model)[0] == 0
    expected = inside.control_vector(tiny_llm, [(one, other)])
    found = inside.ControlVector.read(raw).directions[1]
    torch.testing.assert_close(found, expected.directions[1], rtol=0, atol=1e-5)
    assert not torch.equal(inside.ControlVector.read(path).directions[1], found)
    greedy = ("--raw", "--temp", "0", "-n", "8", "--json")
    code, out, err = run(capsys, "generate", "hello", *model, *greedy, "--steer", str(raw), "--steer-scale", "-9")
    assert code == 0
    assert f"steering: {raw}, scale -9, layer 1" in err
    with inside.steer(tiny_llm, inside.ControlVector.read(raw), -9.0):
        expected_tokens = tiny_llm.generate("hello", max_new_tokens=8).tokens
    assert json.loads(out)["tokens"] == expected_tokens != tiny_llm.generate("hello", max_new_tokens=8).tokens


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("generate", "x", "--steer", "FILE", "--compile"), "leave --compile out"),
        (("generate", "x", "--steer-scale", "2"), "need --steer FILE"),
        (("generate", "x", "--steer", "FILE", "--steer-layers", "0:1"), "no direction for these layers"),
        (("generate", "x", "--steer", "FILE", "--steer-layers", "0:9"), "END at most 2"),
        (("steer", "--positive", "a", "--positive", "b", "--negative", "c", "-o", "NEW"), "got 2 --positive, but 1"),
        (("steer", "--positive", "a", "--negative", "c", "-o", "/nowhere/at.all"), "existing folder"),
    ],
)
def test_wrong_options_are_one_line_and_exit_2(
    tiny_gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], args: tuple[str, ...], message: str
) -> None:
    a_vector(range(1, 2)).write(tmp_path / "v.gguf")
    files = {"FILE": str(tmp_path / "v.gguf"), "NEW": str(tmp_path / "new.gguf")}
    code, out, err = run(capsys, *(files.get(word, word) for word in args), "-m", str(tiny_gguf), "-q")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert message in err
    assert not (tmp_path / "new.gguf").exists()
