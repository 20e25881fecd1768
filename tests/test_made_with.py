"""What an artifact was made with: a change of anything it depends on is noticed, and no change is not.

An artifact is an output of --prompts, a session file, a library in the cache folder, a downloaded model, or a converted
folder. DEPENDS and the tables below say what each depends on.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from llama import cli, loader
from llama.engine import kernels
from llama.errors import CheckpointError, UsageError
from llama.generation.session import Session
from llama.tools.convert import convert

from . import tiny

pytestmark = pytest.mark.usefixtures("one_thread")
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
WIDE = tiny.WIDE  # int4 and int8 need wide matrices


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model, and models that differ from it in one thing."""
    folder, state = tmp_path_factory.mktemp("models"), tiny.weights(WIDE)
    norm = {**state, "layers.1.ffn_norm.weight": state["layers.1.ffn_norm.weight"].clone()}
    norm["layers.1.ffn_norm.weight"][5] += 1e-3
    merges = tiny.byte_vocabulary()["tokenizer.ggml.merges"]
    other: dict[str, tuple[Any, dict[str, Any]]] = {
        "plain": (state, {}),
        "other seed": (tiny.weights(WIDE, seed=1), {}),
        "one entry of a norm": (norm, {}),
        "theta": (state, {"llama.rope.freq_base": 20000.0}),
        "template": (state, {"tokenizer.chat_template": TEMPLATE}),
        "one merge": (state, {"tokenizer.ggml.merges": merges[:-1]}),
    }
    for name, (weights, metadata) in other.items():
        tiny.write_gguf(folder / f"{name}.gguf", WIDE, weights, metadata=metadata)
    return {name: folder / f"{name}.gguf" for name in other}


# --------------------------------------------------------------------------------------------- an output of --prompts
Batch = Callable[..., int]


@pytest.fixture
def batch(models: dict[str, Path], tmp_path: Path) -> Batch:
    """Run generate --prompts on two prompts. Returns the exit code."""
    (tmp_path / "in").write_text('{"prompt": "a"}\n{"prompt": "b", "top_k": 5}\n')

    def run(*args: str, model: str = "plain") -> int:
        fixed = ["--prompts", str(tmp_path / "in"), "--output", str(tmp_path / "out"), "-m", str(models[model]), "-q"]
        return cli.main(["generate", *fixed, "-n", "1", "--dtype", "float32", *args])

    return run


def state(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


REFUSED: dict[str, tuple[dict[str, str], list[str], str]] = {
    "other weights": ({"model": "other seed"}, [], "made with weights "),
    "one entry of a norm": ({"model": "one entry of a norm"}, [], "made with weights "),
    "the model's theta": ({"model": "theta"}, [], "made with rope_theta 10000.0; this run has 20000.0: "),
    "the chat template": ({"model": "template"}, [], "made with chat_template "),
    "the vocabulary": ({"model": "one merge"}, [], "made with tokenizer "),
    "--dtype": ({}, ["--dtype", "bfloat16"], 'made with dtype "float32"; this run has "bfloat16": '),
    "--quantize": ({}, ["--quantize", "int8"], 'made with quantization "none"; this run has '),
    "--kv-cache": ({}, ["--kv-cache", "int8"], 'made with kv_cache "model"; this run has "int8": '),
    "--system": ({}, ["--system", "x"], 'made with system none; this run has "x": '),
    "-n": ({}, ["-n", "2"], "made with max_new_tokens 1; this run has 2: "),
    "--stop": ({}, ["--stop", "e"], 'made with stop []; this run has ["e"]: '),
}  # fmt: skip
RESUMED = {
    "options without effect": ["--threads", "1", "--batch-size", "1", "--rope", "real", "--no-memory-check"],
    "a default that is written out": ["--temp", "0", "--top-p", "1", "--kv-cache", "model", "--device", "cpu"],
}


def test_an_output_is_resumed_only_with_what_it_was_made_with(
    batch: Batch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert batch() == 0
    one = (tmp_path / "out").read_bytes().partition(b"\n")[0] + b"\n"
    (tmp_path / "out").write_bytes(one + b'{"id": 2, ')  # killed in the second answer
    before = state(tmp_path)
    capsys.readouterr()
    for name, (model, args, message) in REFUSED.items():
        assert batch(*args, **model) == 2, name
        error = capsys.readouterr().err
        assert message in error, name
        assert error.count("\n") == 1
        assert state(tmp_path) == before, name
    for name, args in RESUMED.items():
        (tmp_path / "out").write_bytes(one)
        assert batch(*args) == 0, name
        assert (tmp_path / "out").read_bytes().startswith(one), name
        assert (tmp_path / "out").read_bytes().count(b"\n") == 2, name
        assert (tmp_path / "out.run.json").read_bytes() == before["out.run.json"], name


def test_settings_of_the_checkpoint_belong_to_what_an_output_was_made_with(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A checkpoint may state stop ids and sampling options outside of its tokenizer's files."""
    folder, prompts, output = tmp_path / "hf", tmp_path / "in", tmp_path / "out"
    convert(models["plain"], folder, "hf")
    prompts.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    run = ["generate", "--prompts", str(prompts), "--output", str(output), "-m", str(folder), "-q", "-n", "1"]
    assert cli.main(run) == 0
    for change, message in (
        ({"eos_token_id": [2, 9]}, "made with stop_ids [0, 2]"),
        ({"do_sample": True, "temperature": 0.5}, "made with temperature 0.0; this run has 0.5: "),
    ):
        (folder / "generation_config.json").write_text(json.dumps(change))
        assert cli.main(run) == 2
        assert message in capsys.readouterr().err


def test_own_options_of_an_answered_line_may_not_change_and_those_of_other_lines_may(
    batch: Batch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert batch() == 0
    one = (tmp_path / "out").read_bytes().partition(b"\n")[0] + b"\n"
    (tmp_path / "in").write_text('{"prompt": "a", "top_k": 5}\n{"prompt": "b", "top_k": 5}\n')
    assert batch() == 2
    assert "out was made with options of the line with id 1: none; this run has {" in capsys.readouterr().err
    (tmp_path / "out").write_bytes(one)
    (tmp_path / "in").write_text('{"prompt": "a"}\n{"prompt": "c", "top_k": 6}\n{"prompt": "d"}\n')
    assert batch() == 0
    assert json.loads((tmp_path / "out.run.json").read_text())["lines"] == {"2": {"top_k": 6}}


@pytest.mark.parametrize("record", [None, b"notes", b"[]", b'{"clearllama_run": "1"}'])
def test_an_output_without_its_record_is_not_changed(
    batch: Batch, tmp_path: Path, capsys: pytest.CaptureFixture[str], record: bytes | None
) -> None:
    """Nor is a file that has the name of the record."""
    (tmp_path / "out").write_bytes(b'{"id": 1, "prompt": "a", "text": "x"}\n')
    if record is not None:
        (tmp_path / "out.run.json").write_bytes(record)
    before = state(tmp_path)
    assert batch() == 2
    assert "out.run.json" in capsys.readouterr().err
    assert state(tmp_path) == before


# ------------------------------------------------------------------------------------------------------------ sessions


def test_a_session_in_memory_serves_only_the_model_that_it_was_made_with(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """Also before it is saved: a session saved with another model would carry the keys of the first."""
    llm = loader.load(models["plain"], dtype="float32", device="cpu")
    session = Session()
    first = [piece.text for piece in llm.stream("hello", session=session, max_new_tokens=2)]
    for name in ("theta", "plain"):  # an equal model is another model, too
        other = loader.load(models[name], dtype="float32", device="cpu")
        with pytest.raises(UsageError, match=r"holds the keys of another model.*; create a session for"):
            list(other.stream("hello", session=session, max_new_tokens=2))
        with pytest.raises(UsageError, match="this session holds the keys of another model"):
            session.save(tmp_path / "s", other.model)
        assert not session.busy
    assert [piece.text for piece in llm.stream("hello", session=session, max_new_tokens=2)] == first
    session.save(tmp_path / "s", llm.model)
    with pytest.raises(CheckpointError, match="was saved with"):  # half orders keys differently
        Session.load(tmp_path / "s", loader.load_model(models["plain"], dtype="float32", device="cpu", rope="half"))


# ----------------------------------------------------------------------------------------------------------- the cache
LIBRARY = [
    (kernels, "COMMON", kernels.COMMON + " -g"),
    (kernels, "FORMS", {"avx2": "-mavx2"}),
    (torch, "__version__", "0"),
]


def test_a_name_in_the_cache_contains_all_that_its_content_is_built_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CLEARLLAMA_CACHE", str(tmp_path / "cache"))
    names = {kernels._location("avx2")}
    for where, attribute, new in LIBRARY:
        with monkeypatch.context() as patch:
            patch.setattr(where, attribute, new)
            names.add(kernels._location("avx2"))
    assert len(names) == 1 + len(LIBRARY)


def test_the_name_in_the_cache_contains_the_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CLEARLLAMA_CACHE", str(tmp_path / "cache"))
    shutil.copytree(kernels.SOURCE.parent, tmp_path / "cpp")
    plain = kernels._location("avx2")
    monkeypatch.setattr(kernels, "SOURCE", tmp_path / "cpp" / kernels.SOURCE.name)
    assert kernels._location("avx2") == plain  # the content counts, not the place
    for path in sorted((tmp_path / "cpp").iterdir()):
        text = path.read_text()
        path.write_text(text + "\n")
        assert kernels._location("avx2") != plain, path
        path.write_text(text)
