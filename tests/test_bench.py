"""bench: which tokens are fed, which bytes are counted, what is printed. No test depends on the speed."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import signal
import statistics
from pathlib import Path

import pytest
import torch

from llama.checkpoint import open_checkpoint
from llama.cli import bench, main, perplexity, quality
from llama.config import ModelConfig
from llama.engine import kernels
from llama.errors import ContextLengthError
from llama.loader import build
from llama.quant.schemes import SCHEMES
from llama.study.perplexity import tiny_folder
from llama.tools import benchmark
from llama.tools.benchmark import Speed

from . import tiny

pytestmark = pytest.mark.usefixtures("one_thread")
needs_kernels = pytest.mark.skipif(not kernels.ready(), reason="needs the C++ kernels")
WIDE = ModelConfig(128, 2, 4, 2, 32, 256, 320, norm_eps=2**-17, max_seq_len=256)
OLD_KEYS = ["engine", "model", "dtype", "load_s", "prefill_tps", "decode_tps", "decode_tps_all", "peak_rss_mb"]
SIZES = ("--prompt-tokens", "20", "--new-tokens", "3", "--reps", "2")
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests need a bandwidth, but not an accurate one."""
    monkeypatch.setattr(benchmark, "buffer_bytes", lambda device: 2**20)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_gguf(tmp_path_factory.mktemp("bench") / "wide.gguf", WIDE)


# -------------------------------------------------------------------------------------------------------- counts
def weights_of(config: ModelConfig) -> tuple[int, int]:
    """(number of weights in the linear layers of all blocks, in the output layer)."""
    heads, kv = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    block = config.dim * (2 * heads + 2 * kv) + 3 * config.dim * config.hidden_dim
    return config.n_layers * block, config.dim * config.vocab_size


def keys_of(config: ModelConfig, size: int, tokens: int) -> int:
    return 2 * config.n_layers * config.n_kv_heads * config.head_dim * size * tokens


# Stored type -> bits per weight in the layers and in the output layer. A scale and an offset have 16 bits per 32 weights.
STORED = {"F32": (16, 16), "Q8_0": (8.5, 8.5), "Q4_0": (4.5, 4.5), "Q4_1": (5, 5), "Q5_1": (6, 6)}
QUANTIZED = {"int8": (9, 9), "int4": (5, 8.5)}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("stored", "bits"), STORED.items())
def test_a_step_reads_the_bytes_of_the_stored_weights(
    tmp_path: Path, stored: str, bits: tuple[float, float], tied: bool
) -> None:
    if stored.startswith("Q") and not kernels.ready():
        pytest.skip("needs the C++ kernels")
    config = dataclasses.replace(WIDE, tie_embeddings=tied)
    path = tiny.write_gguf(tmp_path / "x.gguf", config, quantization=stored)
    model = build(open_checkpoint(path), "cpu", "bfloat16", fast=True)
    layers, output = weights_of(config)
    assert benchmark.linear_bytes(model) == layers * bits[0] / 8 + output * bits[1] / 8
    assert benchmark.cache_bytes(model.new_cache(200), 77) == keys_of(config, 2, 77)


@needs_kernels
@pytest.mark.parametrize(("scheme", "bits"), QUANTIZED.items())
def test_a_step_reads_the_bytes_of_the_quantized_weights(file: Path, scheme: str, bits: tuple[float, float]) -> None:
    layers, output = weights_of(WIDE)
    model = build(open_checkpoint(file), "cpu", "bfloat16", fast=True, quantize=scheme)
    assert benchmark.linear_bytes(model) == layers * bits[0] / 8 + output * bits[1] / 8
    assert SCHEMES[scheme].bits_per_weight == bits[0]


def test_biases_are_counted() -> None:
    config = dataclasses.replace(tiny.CONFIG, attention_bias=True)
    biases = 4 * config.n_layers * (2 * 64 + 2 * 32)
    assert benchmark.linear_bytes(tiny.model(config)) == 4 * sum(weights_of(config)) + biases


def test_the_keys_and_values_of_every_row_are_counted() -> None:
    cache = tiny.model().new_cache(50, batch=3)
    assert benchmark.cache_bytes(cache, 20) == 3 * keys_of(tiny.CONFIG, 4, 20)


def test_rows_of_a_batch_share_the_weights() -> None:
    speed = Speed(4, 10, 5, (2.0, 1.0), (0.5, 0.25, 1.0), (100.0, 1000.0), 60, 7)
    assert speed.prefill_tps == [20, 40]
    assert speed.decode_tps == [40, 80, 20]
    assert speed.bytes_per_token == 15
    # 20 steps per second of 60 bytes each, at a bandwidth of 1000.
    assert speed.share == pytest.approx(1.2)
    assert speed.as_dict() == {
        "prefill_tps": 40, "decode_tps": 80, "decode_tps_all": [40, 80, 20], "peak_rss_mb": 7, "prefill_tps_median": 30,
        "decode_tps_median": 40, "bytes_per_token": 15, "bandwidth_gbs": 0, "share": 1.2,
    }  # fmt: skip


def test_the_bandwidth_is_that_of_the_fastest_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.accumulate([0, 2, 9, 0.5, 9, 0.25, 9, 1])  # every other step is the time of a sum
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: next(clock))
    assert benchmark.bandwidth(torch.ones(1000)) == 4000 / 0.25


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_peak_memory_lies_between_the_current_memory_and_ru_maxrss() -> None:
    import resource

    allocated = torch.ones(2**25)  # 128 MiB
    now = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
    peak = benchmark.peak_rss_mb()
    assert allocated.nbytes / 2**20 < now - 1 <= peak <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10 + 1


# ---------------------------------------------------------------------------------------------------------- decoding
@pytest.mark.parametrize("chunk", [1, 7, 256])
def test_a_batch_gives_the_ids_of_its_rows(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(benchmark, "CHUNK", chunk)
    model = tiny.model()
    rows = tiny.random_tokens(20, batch=3).tolist()
    cache = model.new_cache(24, batch=3)
    for _ in range(4):
        found = benchmark.feed(model, [row[cache.length :] for row in rows], cache)
        assert found == [int(model(torch.tensor([row]))[0, -1].argmax()) for row in rows]
        rows = [[*row, id] for row, id in zip(rows, found, strict=True)]


@pytest.mark.parametrize("length", [5, 246, 250])
def test_a_prompt_is_decoded_alike_alone_and_in_a_batch(length: int) -> None:
    model = tiny.model()
    row, other = tiny.random_tokens(length, batch=2).tolist()
    alone = [ids[0] for ids in benchmark.decode(model, [row], 6, length + 6)]
    assert alone == [ids[0] for ids in benchmark.decode(model, [row, other], 6, length + 6)]
    assert len(alone) == 7
    for id in alone:
        assert int(model(torch.tensor([row]))[0, -1].argmax()) == id
        row = [*row, id]


def test_more_tokens_than_the_context_are_refused() -> None:
    model, (row,) = tiny.model(), tiny.random_tokens(251).tolist()
    with pytest.raises(ContextLengthError):
        list(benchmark.decode(model, [row], 6, 257))


@pytest.mark.usefixtures("small_buffer")
@pytest.mark.parametrize("batch", [1, 3])
def test_the_timed_tokens_follow_a_warm_up(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    model = tiny.model()
    fed: list[tuple[int, int, int]] = []
    hidden = model.hidden

    def counted(tokens: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        fed.append((*tokens.shape, kwargs["cache"].length))
        return hidden(tokens, *args, **kwargs)

    monkeypatch.setattr(model, "hidden", counted)
    speed = benchmark.measure(model, 40, 5, batch, reps=2)
    warm_up = [(batch, 32, 0), (batch, 1, 32), (batch, 1, 33)]
    rep = [(batch, 40, 0), *((batch, 1, 40 + step) for step in range(5))]
    assert fed == warm_up + 2 * rep
    assert len(speed.prefill_s) == len(speed.decode_s) == len(speed.bandwidths) == 2
    layers, output = weights_of(tiny.CONFIG)
    assert speed.step_bytes == 4 * (layers + output) + batch * keys_of(tiny.CONFIG, 4, 40)


# ------------------------------------------------------------------------------------------------------- the JSON
@pytest.mark.usefixtures("small_buffer")
@pytest.mark.parametrize("batch", [1, 2])
def test_json_has_the_measurements_of_a_setting(file: Path, capsys: Capture, batch: int) -> None:
    options = ["--dtype", "float32", "--batch", str(batch), "--json", "-q"]
    assert main(["bench", "-m", str(file), *SIZES, *options]) == 0
    out, err = capsys.readouterr()
    (line,) = out.splitlines()
    result = json.loads(line)
    assert err == ""
    assert list(result)[:8] == OLD_KEYS
    setting = {"engine": "clearllama", "model": "wide.gguf", "dtype": "float32", "batch": batch, "context": 20}
    assert {**setting, "quantize": None, "compile": False}.items() <= result.items()
    assert len(result["decode_tps_all"]) == 2
    assert result["decode_tps"] == max(result["decode_tps_all"])
    assert result["decode_tps_median"] == pytest.approx(statistics.median(result["decode_tps_all"]), abs=0.02)
    assert result["prefill_tps"] >= result["prefill_tps_median"] > 0
    layers, output = weights_of(WIDE)
    assert result["bytes_per_token"] == round(4 * (layers + output) / batch + keys_of(WIDE, 4, 20))
    share = result["bytes_per_token"] * result["decode_tps"] / result["bandwidth_gbs"] / 1e9
    assert result["share"] == pytest.approx(share, rel=0.02, abs=1e-3)


@pytest.mark.usefixtures("small_buffer")
def test_lines_have_the_keys_of_the_json(file: Path, capsys: Capture) -> None:
    assert main(["bench", "-m", str(file), *SIZES, "--dtype", "float32"]) == 0
    out, err = capsys.readouterr()
    values = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert list(values)[:8] == OLD_KEYS
    assert values["context"] == "20"
    assert "0.38M parameters, float32" in err


@needs_kernels
@pytest.mark.usefixtures("small_buffer")
def test_a_scheme_is_applied_and_named(file: Path, capsys: Capture) -> None:
    assert main(["bench", "-m", str(file), *SIZES, "--quantize", "int8", "--json", "-q"]) == 0
    result = json.loads(capsys.readouterr().out)
    layers, output = weights_of(WIDE)
    size = getattr(torch, result["dtype"]).itemsize
    assert result["quantize"] == "int8"
    assert result["bytes_per_token"] == (layers + output) * 9 / 8 + keys_of(WIDE, size, 20)


# ---------------------------------------------------------------------------------------------------- many settings
def test_lists_of_options_give_all_combinations() -> None:
    args = argparse_of("--dtype", "auto,fp32", "--quantize", "none, int8", "--compile", "both", "--batch", "1,4")
    found = bench.settings(args)
    wanted = itertools.product(["auto", "fp32"], [None, "int8"], [False, True], [1, 4], [512])
    assert [dataclasses.astuple(setting) for setting in found] == list(wanted)
    assert len({str(setting) for setting in found}) == len(found)
    (one,) = bench.settings(argparse_of("--compile", "on", "--prompt-tokens", "7"))
    assert dataclasses.astuple(one) == ("auto", None, True, 1, 7)


def argparse_of(*options: str):
    from llama.cli import build_parser

    args = build_parser().parse_args(["bench", *options])
    for name, value in bench.SPEED.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


@pytest.mark.slow
def test_every_setting_runs_in_its_own_process_and_a_failure_ends_no_other(file: Path, capsys: Capture) -> None:
    contexts = ["--prompt-tokens", "254,20", "--new-tokens", "3", "--reps", "1"]
    assert main(["bench", "-m", str(file), *contexts, "--dtype", "float32", "--json", "-q"]) == 1
    out, err = capsys.readouterr()
    too_long, fits = json.loads(out)
    message = "--prompt-tokens 254 and --new-tokens 3 exceed the context of 256"
    same = {"engine": "clearllama", "model": "wide.gguf", "dtype": "float32", "compile": False, "batch": 1}
    assert {**same, "quantize": None, "context": 254}.items() <= too_long.items()
    assert message in too_long["error"]
    assert {**same, "context": 20}.items() <= fits.items()
    assert list(fits)[:8] == OLD_KEYS
    assert message in err.splitlines()[0]
    assert err.splitlines()[-1] == "clearllama: error: 1 of 2 settings could not be measured"


@pytest.mark.parametrize(
    ("end", "message"), [((os._exit, (7,)), "ended with code 7"), ((signal.raise_signal, (9,)), "signal 9")]
)
def test_a_process_that_dies_is_an_error_of_its_setting(end: tuple[object, ...], message: str) -> None:
    class Deadly:
        def __reduce__(self) -> tuple[object, ...]:
            return end  # the child runs this when it unpickles its arguments

    assert message in bench._in_a_process(argparse_of(), Deadly())["error"]


@pytest.mark.usefixtures("small_buffer")
def test_the_table_has_a_row_for_each_setting(
    file: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def here(args, setting):
        return {"error": "no"} if setting.batch == 2 else bench.measure(args, setting)

    monkeypatch.setattr(bench, "_in_a_process", here)
    options = ["--batch", "1,2,3", "--dtype", "float32", "--profile", str(tmp_path)]
    assert main(["bench", "-m", str(file), *SIZES, *options]) == 1
    out, err = capsys.readouterr()
    head, *rows = out.split("\n\n")[0].splitlines()
    assert [row.split()[:5] for row in rows] == [["float32", "none", "off", batch, "20"] for batch in "123"]
    assert rows[1].split()[5:] == ["failed"]
    layers, output = weights_of(WIDE)
    mb = [f"{(4 * (layers + output) / batch + keys_of(WIDE, 4, 20)) / 1e6:.1f}" for batch in (1, 3)]
    assert [row.split()[7] for row in (rows[0], rows[2])] == mb
    for column, (start, text) in {"batch": (3, "1"), "context": (4, "20")}.items():
        assert rows[0].split()[start] == text
        assert head.index(column) + len(column) == rows[0].index(text, head.index(column) - 3) + len(text)
    assert "error: float32-none-eager-batch2-context20: no" in err
    folders = {"float32-none-eager-batch1-context20", "float32-none-eager-batch3-context20"}
    assert {path.name for path in tmp_path.iterdir()} == folders
    assert out.count("slowest operators") == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dtype", "float32,int3"], "unknown dtype 'int3'"),
        (["--quantize", "int8,int9"], "unknown quantization scheme 'int9'"),
        (["--quantize", "int8,,int4"], "--quantize must be a comma-separated list"),
        (["--batch", "2,2"], "without repetitions, got '2,2'"),
        (["--batch", "0"], "--batch must be an integer of at least 1, got '0'"),
        (["--batch", "9" * 30], "--batch must be"),
        (["--prompt-tokens", "12,-1"], "--prompt-tokens must be an integer of at least 1, got '-1'"),
        (["--prompt-tokens", "many"], "got 'many'"),
        (["--compile", "maybe"], "--compile must be off, on or both, got 'maybe'"),
        (["--compile", ""], "--compile must be a comma-separated list without repetitions, got ''"),
        (["--new-tokens", "0"], "--new-tokens must be an integer of at least 1, got 0"),
        (["--reps", "0"], "--reps must be an integer of at least 1, got 0"),
        (["--window", "9"], "--window needs --quality"),
        (["--quality", "--reps", "3"], "--reps only affects speed"),
        (["--quality", "--compile"], "--compile only affects speed"),
        (["--quality", "--batch", "1"], "--batch only affects speed"),
        (["--quality", "--quantize", "int9"], "unknown quantization scheme 'int9'"),
        (["--quality", "--window", "1"], "--window must be an integer of at least 2"),
        (["--quality", "--window", "999"], "exceeds the context of 256"),
        (["--quality", "/nowhere"], "No such file"),
        (["--quality", os.devnull], "is a device"),
    ],
)
def test_usage_errors_are_one_line(file: Path, capsys: Capture, options: list[str], message: str) -> None:
    assert main(["bench", "-m", str(file), "-q", *options]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


# ------------------------------------------------------------------------------------------------------- the profile
@pytest.mark.parametrize("batch", [1, 2])
def test_the_profile_covers_the_prefill_and_each_step(tmp_path: Path, batch: int) -> None:
    model, new = tiny.model(), 5
    found = benchmark.profile(model, tmp_path / "new" / "folder", 40, new, batch, top=10**6)
    for phase, passes in (("prefill", 1), ("decode", new)):
        trace = json.loads((tmp_path / "new" / "folder" / f"{phase}.json").read_text())
        names = [event["name"] for event in trace["traceEvents"] if event.get("ph") == "X"]
        rows = {cost.operator: cost for cost in found[phase]}
        assert rows["aten::linear"].calls == passes * (7 * model.config.n_layers + 1)
        assert rows["aten::embedding"].calls == passes
        assert rows[phase].calls == 1
        assert names.count("aten::linear") == rows["aten::linear"].calls
        assert set(rows) <= set(names)
        assert sum(cost.share for cost in rows.values()) == pytest.approx(1)
        times = [cost.self_ms for cost in rows.values()]
        assert times == sorted(times, reverse=True)
        spans = [event["dur"] for event in trace["traceEvents"] if event.get("name") == phase and "dur" in event]
        assert sum(times) == pytest.approx(max(spans) / 1e3, rel=0.2)  # the self times add up to the total
    assert benchmark.profile(model, tmp_path, 40, 99)["decode"][0].share > 0
    trace = json.loads((tmp_path / "decode.json").read_text())
    assert sum(event["name"] == "aten::embedding" for event in trace["traceEvents"]) == benchmark.PROFILED


@pytest.mark.usefixtures("small_buffer")
def test_ten_operators_are_printed_and_in_the_json(file: Path, tmp_path: Path, capsys: Capture) -> None:
    options = [*SIZES, "--dtype", "float32", "--profile", str(tmp_path), "-q"]
    assert main(["bench", "-m", str(file), *options]) == 0
    _, *tables = capsys.readouterr().out.split("\n\n")
    assert main(["bench", "-m", str(file), *options, "--json"]) == 0
    profile = json.loads(capsys.readouterr().out)["profile"]
    for phase, shown in zip(("prefill", "decode"), tables, strict=True):
        lines = shown.splitlines()
        assert str(tmp_path / f"{phase}.json") in lines[0]
        assert len(lines) == 12
        assert len(profile[phase]) == 10
        assert "aten::mm" in {row["operator"] for row in profile[phase]} | {line.split()[-1] for line in lines}


def test_a_folder_that_cannot_be_made_is_refused(file: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "a").write_text("")
    assert main(["bench", "-m", str(file), *SIZES, "-q", "--profile", str(tmp_path / "a" / "b")]) == 2
    assert "expected a folder for the traces" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------------- the quality
def test_the_change_of_perplexity_and_its_standard_error() -> None:
    exact, other = [10.0, 20.0, 30.0], [11.0, 20.5, 30.0]
    found = quality.compare(exact, other, 15)
    assert found["perplexity"] == pytest.approx(math.exp(61.5 / 15))
    ratio = math.exp(61.5 / 15) / math.exp(60 / 15)
    assert found["change_percent"] == pytest.approx(100 * (ratio - 1))
    mean = 1.5 / 3
    spread = (sum((rise - mean) ** 2 for rise in (1, 0.5, 0)) / 2) ** 0.5  # of one window, estimated from three
    assert found["stderr_percent"] == pytest.approx(100 * ratio * spread * 3**0.5 / 15)
    assert quality.compare([10.0], [11.0], 5)["stderr_percent"] is None


@needs_kernels
@pytest.mark.parametrize("window", [[], ["--window", "50"]])
def test_quality_is_the_perplexity_of_each_scheme(
    file: Path, tmp_path: Path, capsys: Capture, window: list[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("hello, the other world: é 中 " * 60)

    def perplexity(*options: str) -> dict[str, object]:
        assert main([*options, "-m", str(file), "--json", "-q", *(window or ["--window", "256"])]) == 0
        return json.loads(capsys.readouterr().out)

    options = ["--quantize", "int8,int4,none", "--dtype", "float32"]
    assert main(["bench", "-m", str(file), "--quality", str(text), "--json", *options, *window]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    exact = perplexity("perplexity", str(text), "--dtype", "float32")
    assert found["float32"] == pytest.approx(exact["perplexity"], rel=1e-6)
    assert {key: found[key] for key in ("tokens", "predicted", "window")} == {
        key: exact[key] for key in ("tokens", "predicted", "window")
    }
    assert f"text.txt: {exact['tokens']:,} tokens" in err
    for row, name, goal in zip(found["schemes"], ("int8", "int4", None), (0.5, 6.0, None), strict=True):
        scheme = [] if name is None else ["--quantize", name]
        expected = perplexity("perplexity", str(text), "--dtype", "float32", *scheme)["perplexity"]
        assert (row["quantize"], row["dtype"], row["goal_percent"]) == (name, "float32", goal)
        assert row["perplexity"] == pytest.approx(expected, rel=1e-6)
        assert row["change_percent"] == pytest.approx(100 * (expected / exact["perplexity"] - 1), abs=1e-3)
        assert row["met"] is (None if goal is None else row["change_percent"] <= goal)
        assert row["change_percent"] == 0 or name is not None


@needs_kernels
def test_the_held_out_text_of_the_model_is_the_default(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_folder()
    tokens = len((model / "held-out.txt").read_bytes())  # this model's tokens are bytes
    rises = {"float32": 0.0, "int8": math.log(1.0049), "int4": math.log(1.061), "none": math.log(0.9)}

    def pretend(args, model, parts, what):
        assert sum(map(len, parts)) == tokens
        return [(len(part) - 1) * (1 + rises[what]) for part in parts]

    monkeypatch.setattr(perplexity, "nats", pretend)
    options = ["--max-seq-len", "600", "--quantize", "int8,int4,none"]
    assert main(["bench", "-m", str(model), "--quality", *options]) == 0
    out, err = capsys.readouterr()
    windows = -(-tokens // 512)
    assert f"4 models on held-out.txt: {tokens:,} tokens in {windows} windows of 512" in err
    _, *rows = (line.split() for line in out.splitlines())
    assert rows[0] == ["float32", "2.7183"]
    assert rows[1] == ["int8", "2.7316", "+0.49", "±", "0.00", "at", "most", "+0.5:", "met"]
    assert rows[2][:3] == ["int4", "2.8841", "+6.10"]
    assert rows[2][-4:] == ["at", "most", "+6:", "missed"]
    assert rows[3][:3] == ["none", "2.4465", "-10.00"]
    assert len(rows[3]) == 5
    assert main(["bench", "-m", str(model), "--quality", "--max-seq-len", "600", "--json", "-q"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["quantize"] for row in result["schemes"]] == ["int8", "int4"]
    assert [row["met"] for row in result["schemes"]] == [True, False]
