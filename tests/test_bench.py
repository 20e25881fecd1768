"""bench: which tokens are fed, and what is printed. No test depends on the speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from llama.cli import main
from llama.config import ModelConfig
from llama.engine import kernels
from llama.errors import ContextLengthError
from llama.tools import benchmark

from . import tiny

pytestmark = pytest.mark.usefixtures("one_thread")
needs_kernels = pytest.mark.skipif(not kernels.ready(), reason="needs the C++ kernels")
WIDE = ModelConfig(128, 2, 4, 2, 32, 256, 320, norm_eps=2**-17, max_seq_len=256)
SIZES = ("--prompt-tokens", "20", "--new-tokens", "3", "--reps", "2")
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_gguf(tmp_path_factory.mktemp("bench") / "wide.gguf", WIDE)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_peak_memory_lies_between_the_current_memory_and_ru_maxrss() -> None:
    import resource

    allocated = torch.ones(2**25)  # 128 MiB
    now = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20
    peak = benchmark.peak_rss_mb()
    assert peak is not None
    assert allocated.nbytes / 2**20 < now - 1 <= peak <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10 + 1


# ---------------------------------------------------------------------------------------------------------- decoding
@pytest.mark.parametrize("length", [5, 246, 250])
@pytest.mark.parametrize("chunk", [7, 256])
def test_prompts_are_decoded_alike_alone_and_in_a_batch(
    monkeypatch: pytest.MonkeyPatch, length: int, chunk: int
) -> None:
    monkeypatch.setattr("llama.generate.prompt_chunk", lambda device: chunk)
    model, rows = tiny.model(), tiny.random_tokens(length, batch=3).tolist()
    found = list(benchmark.decode(model, rows, 6, length + 6))
    for i, row in enumerate(rows):
        assert [ids[0] for ids in benchmark.decode(model, [row], 6, length + 6)] == [ids[i] for ids in found]
        full = [*row, *(ids[i] for ids in found)]
        assert model(torch.tensor([full[:-1]]))[0, length - 1 :].argmax(-1).tolist() == full[length:]
    with pytest.raises(ContextLengthError):
        list(benchmark.decode(model, rows, 260 - length, 260))


@pytest.mark.parametrize("batch", [1, 3])
def test_the_timed_tokens_follow_a_warm_up(monkeypatch: pytest.MonkeyPatch, batch: int) -> None:
    model = tiny.model()
    fed: list[tuple[int, int, int]] = []
    hidden = model.hidden

    def counted(tokens: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        fed.append((*tokens.shape, kwargs["cache"].length))
        return hidden(tokens, *args, **kwargs)

    monkeypatch.setattr(model, "hidden", counted)
    benchmark.measure(model, 40, 5, batch, reps=2)
    warm_up = [(batch, 32, 0), (batch, 1, 32), (batch, 1, 33)]
    rep = [(batch, 40, 0), *((batch, 1, 40 + step) for step in range(5))]
    assert fed == warm_up + 2 * rep


def test_the_speeds_are_those_of_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([(0.0, 0.0), (2.0, 0.5), (1.0, 0.25), (1.0, 1.0)])  # of the warm-up, then prefill and 5 steps
    monkeypatch.setattr(benchmark, "run", lambda *_, **__: next(seconds))
    found = benchmark.measure(tiny.model(), 10, 5, batch=4, reps=3)
    assert found.pop("peak_rss_mb") > 0
    assert found == {
        "prefill_tps": 40, "decode_tps": 80, "decode_tps_all": [40, 80, 20], "prefill_tps_median": 40,
        "decode_tps_median": 40,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------- the command
@pytest.mark.parametrize("options", [["--dtype", "float32"], ["--batch", "2", "--quantize", "int8"]], ids=str)
def test_json_has_the_measurements_and_lines_have_the_keys_of_the_json(
    file: Path, capsys: Capture, options: list[str]
) -> None:
    assert main(["bench", "-m", str(file), *SIZES, *options, "--json", "-q"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert err == ""
    batch, quantized = (2, "int8") if "--batch" in options else (1, None)
    setting = {"engine": "clearllama", "model": "wide.gguf", "quantize": quantized, "compile": False, "context": 20}
    assert {**setting, "batch": batch}.items() <= result.items()
    assert main(["bench", "-m", str(file), *SIZES, *options]) == 0
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()] == list(result)
    assert "0.38M parameters" in err
