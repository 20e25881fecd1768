"""The command line on checkpoints of all formats."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest

import llama
import llama.tools.convert
from llama.tools import families

from .conftest import Run
from .scripts import make_tiny

FAST = ("-n", "4", "--seed", "1", "--device", "cpu")


@pytest.fixture(scope="module")
def meta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny.make(tmp_path_factory.mktemp("cli") / "llama3", "llama-3.1-8b", shards=2)


# --------------------------------------------------------------------------------------------------------- families
@pytest.mark.parametrize("name", make_tiny.names())
def test_every_official_architecture_is_recognized(name: str) -> None:
    config = make_tiny.real_config(name)
    same = [other for other in make_tiny.names() if make_tiny.real_config(other) == config]
    assert families.names_of(config) == same
    tweaked = dataclasses.replace(config, max_seq_len=999, norm_eps=3e-6)  # files may lack these values
    assert {*same} <= {*families.names_of(tweaked)}
    assert families.names_of(dataclasses.replace(config, hidden_dim=config.hidden_dim + 1)) == []


# ---------------------------------------------------------------------------------------------------------- inspect
def test_inspect_describes_a_folder_of_meta(clearllama: Run, meta: Path) -> None:
    result = clearllama("inspect", str(meta), "--json")
    assert result.returncode == 0
    facts = json.loads(result.stdout)
    assert facts["format"] == "Meta"
    assert list(facts["file_bytes"]) == ["consolidated.00.pth", "consolidated.01.pth"]
    assert facts["rope_scaling"]["factor"] == 8.0
    assert facts["chat_template"] is False
    assert facts["chat_format"] == "llama3"
    assert facts["stop_ids"] == {"513": "<|end_of_text|>", "520": "<|eom_id|>", "521": "<|eot_id|>"}
    assert clearllama("inspect", "-m", str(meta), "--json").stdout == result.stdout
    tokens = facts["max_seq_len"]
    assert facts["kv_cache_bytes"][f"bfloat16, {tokens} tokens"] == tokens * 2 * 2 * 2 * 8 * 16
    assert facts["mismatches"] == []
    assert any("factor" in line for line in facts["decided_here"])


SIZES = {"bytes": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}


def test_inspect_shows_the_numbers_of_the_json_with_units(clearllama: Run, meta: Path) -> None:
    facts = json.loads(clearllama("inspect", str(meta), "--json").stdout)
    text = clearllama("inspect", str(meta)).stdout.decode()
    shown = dict(zip(facts, re.split(r"\n(?! )", text), strict=False))
    assert re.split(r"\s{2,}", shown["max_seq_len"]) == ["max seq len", f"{facts['max_seq_len']:,} tokens"]
    assert shown["parameters"].endswith(f" {facts['parameters']:,}")
    assert shown["rope_theta"].endswith(" 500,000")
    for label in ("file_bytes", "stored_bytes", "weight_bytes", "kv_cache_bytes"):
        found = re.findall(r"([\d,.]+) (bytes|kB|MB|GB)", shown[label])
        sizes = [float(number.replace(",", "")) * SIZES[unit] for number, unit in found]
        assert sizes == [pytest.approx(size, rel=0.05) for size in facts[label].values()], shown[label]
        assert all(float(number.replace(",", "")) < 1000 for number, _ in found)


def test_inspect_lists_every_mismatch(clearllama: Run, meta: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    llama.tools.convert.convert(meta, tmp_path / "hf", "hf")
    state = load_file(tmp_path / "hf" / "model.safetensors")
    state["model.norm.weight"] = state["model.norm.weight"][:5].clone()
    state["model.layers.1.mlp.up_proj.weight"] = state["model.layers.1.mlp.up_proj.weight"][:7].clone()
    del state["lm_head.weight"]
    save_file(state, tmp_path / "hf" / "model.safetensors")
    result = clearllama("inspect", str(tmp_path / "hf"), "--json")
    assert result.returncode == 1
    found = " ".join(json.loads(result.stdout)["mismatches"])
    assert "lm_head.weight" in found
    assert "model.norm.weight has shape (5,)" in found
    assert "mlp.up_proj.weight has shape (7," in found
    result = clearllama("generate", "-m", str(tmp_path / "hf"), "x", *FAST)
    assert result.returncode == 1
    assert result.stderr.count(b"\n") == 1


def test_a_tokenizer_of_another_model_is_a_mismatch(clearllama: Run, tmp_path: Path) -> None:
    folder = make_tiny.make(tmp_path / "llama2", "llama-2-7b")
    (folder / "tokenizer.model").write_bytes(make_tiny.tiktoken_model(600))
    result = clearllama("inspect", str(folder), "--json")
    assert result.returncode == 1
    assert "856 tokens, but the embedding has 512 rows" in json.loads(result.stdout)["mismatches"][0]
    result = clearllama("generate", "-m", str(folder), "x", *FAST)
    assert result.returncode == 1
    assert b"tokens, but the embedding has" in result.stderr


# ------------------------------------------------------------------------------------------------- generate and chat
def test_generate_runs_a_folder_of_meta(clearllama: Run, meta: Path, tmp_path: Path) -> None:
    """Its name says whether the model was trained to chat; an option overrides that."""
    raw = clearllama("generate", "-m", str(meta), "The dog bites", "--json", *FAST)
    assert raw.returncode == 0, raw.stderr
    assert b"the model has no chat template; if it was trained to chat, add --chat-format llama3" in raw.stderr
    chat = clearllama("generate", "-m", str(meta), "The dog bites", "--json", "--chat-format", "llama3", *FAST)
    assert chat.returncode == 0, chat.stderr
    assert b"one user message in the format llama3" in chat.stderr
    assert json.loads(chat.stdout)["prompt_tokens"] > json.loads(raw.stdout)["prompt_tokens"]
    wrong = clearllama("generate", "-m", str(meta), "x", "--chat-format", "llama2", *FAST)
    assert wrong.returncode == 1
    assert wrong.stderr.splitlines()[-1].startswith(b"clearllama: error:")
    typed = clearllama("chat", "-m", str(meta), *FAST, stdin=b"hello\n")
    assert typed.returncode == 0, typed.stderr
    assert b"chat format: llama3" in typed.stderr
    instruct = tmp_path / "Meta-Llama-3-8B-Instruct"
    instruct.symlink_to(meta)
    empty = clearllama("generate", "-m", str(instruct), " ", *FAST)
    assert (empty.returncode, b"the prompt is empty" in empty.stderr) == (2, True)
    named = clearllama("generate", "-m", str(instruct), "The dog bites", "--json", *FAST)
    assert json.loads(named.stdout)["tokens"] == json.loads(chat.stdout)["tokens"]


def test_a_suffix_fills_in_the_middle(clearllama: Run, tmp_path: Path) -> None:
    folder = make_tiny.make(tmp_path / "code", "codellama-7b")
    result = clearllama("generate", "-m", str(folder), "def f(x):", "--suffix", "return y", "--json", *FAST)
    assert result.returncode == 0, result.stderr
    ids = llama.load_tokenizer(folder).encode_prompt("def f(x):", suffix="return y")
    assert json.loads(result.stdout)["prompt_tokens"] == len(ids)
    plain = make_tiny.make(tmp_path / "plain", "llama-2-7b")
    result = clearllama("generate", "-m", str(plain), "def f(x):", "--suffix", "return y", *FAST)
    assert result.returncode == 1
    assert b"infill" in result.stderr
    result = clearllama("generate", "-m", str(plain), "a", "--suffix", "b", "--system", "c", *FAST)
    assert result.returncode == 2


@pytest.mark.slow
def test_bench_needs_no_tokenizer(clearllama: Run, meta: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    shutil.copytree(meta, folder)
    (folder / "tokenizer.model").unlink()
    result = clearllama(
        "bench", "-m", str(folder), "--prompt-tokens", "8", "--new-tokens", "2", "--reps", "1", "--json"
    )
    assert result.returncode == 0, result.stderr
    result = clearllama("generate", "-m", str(folder), "x", *FAST)
    assert result.returncode == 1
    assert b"has no tokenizer.model" in result.stderr
