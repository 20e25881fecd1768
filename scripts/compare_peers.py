"""Compare the speed of clearllama, llama.cpp, transformers and OpenVINO on the same weights and the same machine.

usage: python scripts/compare_peers.py --peers-python PYTHON [--model DIR_OR_NAME] [--rows int8,int4] [--busy 1]

Each engine of a row runs in its own process: it loads the model, warms up, and stays alive until the row is done. The
engines take turns. Every round has one turn per engine, in an order that is reversed each round; an engine sleeps
while the others work. A turn decodes --new-tokens after a prompt, but stops after --turn-seconds. The first
--prefill-rounds rounds also process the prompt; later rounds reuse its cache. OpenVINO's cache can't be trimmed, so its
later turns process the prompt again, untimed. One more turn per round measures the memory bandwidth by summing a large
array.

Ratios are computed within a round, between turns a few seconds apart, so that a slowdown of the machine affects all
engines alike. The table shows medians over the rounds. The share of bandwidth is the bytes read per token, times the
tokens per second, divided by the bandwidth of the same round.

With --busy N, a row's rounds run once more while N other processes each keep one core busy. The table shows these
speeds too, and divides them by the same engine's median without the busy processes. A prompt is always processed to its
end, however slow that is, but an engine whose turn took longer than three times --turn-seconds skips the remaining
rounds.

DIR_OR_NAME is one of

    a name or a GGUF file   row "file": clearllama and llama.cpp on that file, transformers on its weights in bfloat16
    a folder                hf/, bf16.gguf, q8_0.gguf, q4_0.gguf and, optionally, q4_k.gguf of one model. Rows "bf16",
                            "int8", "int4": clearllama on hf/, unchanged or with --quantize, and on the GGUF files;
                            llama.cpp on the GGUF files; transformers on hf/, in bfloat16; OpenVINO on hf/, in the
                            weights of the row. Row "q4_k": clearllama and llama.cpp on q4_k.gguf

OpenVINO computes in bfloat16. Its weights are bfloat16, 8 bits with one scale and zero point per row, or symmetric
4 bits in groups of 32 with embedding and output layer in 8 bits. They are converted from hf/ once, into openvino-bf16/,
openvino-int8/ and openvino-int4/ beside it, and again when a file of hf/ is newer. `clearllama convert` writes hf/ and
bf16.gguf, llama.cpp's llama-quantize the other GGUF files.

clearllama runs with and without --compile. All engines of a row must fit into memory together. Install the peers in
environments of their own; OpenVINO has its own, since optimum-intel, which converts the weights, does not accept the
newest transformers:

    python -m venv peers && peers/bin/pip install torch transformers accelerate gguf llama-cpp-python
    python -m venv openvino && openvino/bin/pip install torch openvino 'optimum-intel[openvino]'
    python scripts/compare_peers.py --peers-python peers/bin/python --openvino-python openvino/bin/python --model DIR
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import importlib
import importlib.metadata
import json
import math
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO


class Peer(NamedTuple):
    """The module to import, and the packages on PyPI whose versions are reported; the first one contains the module."""

    module: str
    packages: tuple[str, ...]


PEERS = {
    "llama.cpp": Peer("llama_cpp", ("llama-cpp-python",)),
    "transformers": Peer("transformers", ("transformers", "torch")),
    "OpenVINO": Peer("openvino", ("openvino",)),
}
FLAGS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16")
KEYS = ("decode_tps", "prefill_tps")
PAUSE = 0.1  # seconds between turns: the threads of the previous engine may still spin, waiting for work
TOO_LONG = 3  # times --turn-seconds: beside busy loops, an engine with such a turn skips the remaining rounds

Step = Callable[[list[int], int], int]  # ids, number of cached tokens before them -> the most likely next id


class Loaded(NamedTuple):
    """A model in an engine's process.

    read   bytes that are read to decode a token after the prompt; None if the engine does not report them
    trims  whether `step` accepts fewer cached tokens than the cache holds, and removes the others
    """

    step: Step
    vocabulary: int
    read: int | None = None
    trims: bool = True


@dataclass(frozen=True)
class Engine:
    """An engine of a row: clearllama with options for `loader.build`, or a peer (a key of PEERS), and its model."""

    name: str
    path: Path
    peer: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


MEMORY = Engine("memory", Path(), "memory")  # takes turns like an engine; measures the bandwidth
BUSY = Engine("busy loops", Path(), "busy")  # takes no turns; fails if a busy loop ends early


def rows_of(model: Path) -> dict[str, list[Engine]]:
    """Return row -> engines, clearllama's first. Raises FileNotFoundError that lists missing files."""
    if not model.is_dir():
        peers = [Engine("transformers, bfloat16", model, "transformers"), Engine("llama.cpp", model, "llama.cpp")]
        return {"file": [*_ours("clearllama", model), *peers]}
    files = {name: model / name for name in ("hf", "bf16.gguf", "q8_0.gguf", "q4_0.gguf")}
    missing = [name for name, path in files.items() if not path.exists()]
    if missing:
        raise FileNotFoundError(f"{model} has no {', '.join(missing)}; expected one model as {', '.join(files)}")
    hf = files["hf"]
    found = {
        "bf16": [
            *_ours("clearllama", hf, dtype="bfloat16"),
            Engine("transformers, bfloat16", hf, "transformers"),
            Engine("llama.cpp, BF16", files["bf16.gguf"], "llama.cpp"),
        ],
        "int8": [*_ours("clearllama --quantize int8", hf, quantize="int8"), *_gguf("Q8_0", files["q8_0.gguf"])],
        "int4": [*_ours("clearllama --quantize int4", hf, quantize="int4"), *_gguf("Q4_0", files["q4_0.gguf"])],
    }
    for row, engines in found.items():
        engines.append(Engine(f"OpenVINO, {row}", model / f"openvino-{row}", "OpenVINO", {"weights": row}))
    if (model / "q4_k.gguf").exists():
        found["q4_k"] = _gguf("Q4_K", model / "q4_k.gguf")
    return found


def _gguf(kind: str, path: Path) -> list[Engine]:
    """Return the engines that read this GGUF file as it is."""
    return [*_ours(f"clearllama, {kind}", path), Engine(f"llama.cpp, {kind}", path, "llama.cpp")]


def _ours(name: str, path: Path, **options: str) -> list[Engine]:
    """Return clearllama's engine without and with --compile."""
    compiled = {**options, "compile": True}
    return [Engine(name, path, None, dict(options)), Engine(f"{name} --compile", path, None, compiled)]


# ------------------------------------------------------------------------------------------------------ statistics
def median(values: Iterable[float | None]) -> float | None:
    """Return the median of the values that are not None; None if there are none."""
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None


def ratios(results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the speed ratio of each clearllama engine to each peer of its row: the median of the ratios per round.

    results  one {round, row, busy, engine, peer, decode_tps} per turn, with prefill_tps if the turn processed the
             prompt; busy is the number of busy loops beside it; peer is a key of PEERS or None

    -> [{row, engine, peer, rounds, decode_ratio, prefill_ratio}]. Turns beside busy loops and rounds that lack one of
    the two engines are skipped; a ratio is None if no round has both numbers.
    """
    found = []
    results = [result for result in results if not result["busy"]]
    for row in dict.fromkeys(result["row"] for result in results):
        of_row = [result for result in results if result["row"] == row]
        ours = dict.fromkeys(result["engine"] for result in of_row if result["peer"] is None)
        peers = dict.fromkeys((result["engine"], result["peer"]) for result in of_row if result["peer"] is not None)
        runs = {(result["round"], result["engine"]): result for result in of_row}
        rounds = sorted({result["round"] for result in of_row})
        for engine in ours:
            for their_engine, peer in peers:
                both = [
                    (runs[number, engine], runs[number, their_engine])
                    for number in rounds
                    if (number, engine) in runs and (number, their_engine) in runs
                ]
                if both:
                    medians = {
                        key: median(us[key] / them[key] for us, them in both if key in us and key in them)
                        for key in KEYS
                    }
                    named = {key.replace("_tps", "_ratio"): value for key, value in medians.items()}
                    found.append({"row": row, "engine": engine, "peer": peer, "rounds": len(both), **named})
    return found


def table(results: Sequence[dict[str, Any]], prompt: int) -> str:
    """Return a Markdown table: median speeds of every engine; for clearllama also bandwidth share and ratios.

    If there are turns beside busy loops: also their median speeds and, in brackets, the ratio to those without.
    """
    compared = {(ratio["row"], ratio["engine"], ratio["peer"]): ratio for ratio in ratios(results)}
    peers = [peer for peer in PEERS if any(key[2] == peer for key in compared)]
    busy = max(result["busy"] for result in results) if results else 0
    heads = ["weights", "engine", f"decode at {prompt}, tok/s", f"prefill {prompt}, tok/s", "share of bandwidth"]
    heads += [f"{what} beside {loops(busy)} (/ idle)" for what in ("decode", "prefill") if busy]
    heads += [f"{what} / {peer}" for peer in peers for what in ("decode", "prefill")]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for row, engine in dict.fromkeys((result["row"], result["engine"]) for result in results):
        runs = [result for result in results if (result["row"], result["engine"]) == (row, engine)]
        idle, beside = ([run for run in runs if bool(run["busy"]) is loaded] for loaded in (False, True))
        decode, prefill, share = (median(run.get(key) for run in idle) for key in (*KEYS, "share"))
        cells = [row, engine, shown(decode, ",.1f"), shown(prefill, ",.0f"), shown(share, ".2f")]
        for key, usual, form in zip(KEYS, (decode, prefill), (",.1f", ",.0f"), strict=True) if busy else ():
            speed = median(run.get(key) for run in beside)
            cells.append(f"{speed:{form}} ({speed / usual:.2f})" if speed and usual else "")
        for peer in peers:
            ratio = compared.get((row, engine, peer), {})
            cells += [shown(ratio.get(key), ".2f") for key in ("decode_ratio", "prefill_ratio")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def loops(busy: int) -> str:
    """Return '1 busy loop', '2 busy loops'."""
    return f"{busy} busy loop{'s' if busy > 1 else ''}"


def shown(value: float | None, form: str) -> str:
    """Format a table cell; empty for None."""
    return "" if value is None else format(value, form)


def machine(cpuinfo: str, meminfo: str) -> dict[str, Any]:
    """Return the processor, its flags among FLAGS, and the memory in GiB, as far as Linux's two files list them."""
    facts: dict[str, Any] = {}
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            facts["cpu"] = value.strip()
        if key.strip() == "flags":
            facts["flags"] = [flag for flag in FLAGS if flag in value.split()]
    for line in meminfo.splitlines():
        if line.startswith("MemTotal:"):
            facts["memory_gib"] = round(int(line.split()[1]) / 2**20, 1)
    return facts


def this_machine() -> dict[str, Any]:
    """Describe the machine that runs this."""
    texts = [path.read_text() if path.exists() else "" for path in (Path("/proc/cpuinfo"), Path("/proc/meminfo"))]
    return {
        "cpu": platform.processor() or platform.machine(),
        **machine(*texts),
        "cores": cores(),
        "os": platform.system(),
    }


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def footer(facts: dict[str, Any]) -> str:
    """Return a few lines that describe machine, versions and settings."""
    host = facts["machine"]
    parts = [f"{facts['date']}: {host['cores']} cores, {host['cpu']} ({', '.join(host.get('flags', []))})"]
    parts[0] += f", {host['memory_gib']} GiB" if "memory_gib" in host else ""
    bandwidth = facts["bandwidth_gbs"]
    if bandwidth is not None:
        parts[0] += f", reads {bandwidth:.0f} GB/s (median over the rounds)"
    parts.append(", ".join(f"{name} {version}" for name, version in facts["versions"].items()))
    settings = "{rounds} rounds ({prefill_rounds} with prefill), {prompt_tokens} prompt tokens, {new_tokens} new"
    settings += ", {threads} threads, model {model}"
    parts.append(settings.format(**facts["settings"]))
    parts[-1] += f"; then again beside {loops(facts['settings']['busy'])}" if facts["settings"]["busy"] else ""
    return "\n".join(parts) + "\n"


# ---------------------------------------------------------------------------------------- inside an engine's process
def worker(spec: dict[str, Any]) -> int:
    """Load an engine, print {"bytes_per_token": ..}, then answer each line of stdin with a line of JSON.

    It may run in a peer's environment, which has no clearllama.

    spec  engine (a key of WORKERS), path, options, prompt_tokens, new_tokens, turn_seconds, threads
    """
    answers = json_output()
    for answer in WORKERS[spec["engine"]](spec):
        print(json.dumps(answer), file=answers, flush=True)
    return 0


def json_output() -> TextIO:
    """Return a stream to the original stdout and redirect stdout to stderr, so that libraries can't print into it."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return output


def check(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Import a peer and yield the versions of its packages."""
    peer = PEERS[spec["peer"]]
    importlib.import_module(peer.module)
    yield {name: importlib.metadata.version(name) for name in peer.packages}


def keep_busy(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Keep a core busy until this process is killed or the one that started it has ended."""
    parent = os.getppid()
    yield {"busy": 1}
    while os.getppid() == parent:
        for _ in range(1_000_000):
            pass


def convert_to_openvino(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Convert the weights of spec["source"], a folder in Hugging Face's format, and write the folder spec["path"]."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # otherwise the folder's name is looked up on the hub
    try:
        from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
    except ImportError as error:
        raise SystemExit(f"{error}; install optimum-intel[openvino] there") from None
    forms = {"int8": {"bits": 8}, "int4": {"bits": 4, "sym": True, "group_size": 32, "ratio": 1.0}}
    form = forms.get(spec["options"]["weights"])
    # Without a configuration, weights of large models would become 8 bits.
    options = {"quantization_config": OVWeightQuantizationConfig(**form)} if form else {"load_in_8bit": False}
    model = OVModelForCausalLM.from_pretrained(
        spec["source"], export=True, compile=False, stateful=True, dtype="bfloat16", **options
    )
    model.save_pretrained(spec["path"])
    yield {"converted": 1}


def memory(spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Measure the read bandwidth in GB/s by summing a large array, once per line of stdin."""
    import torch

    from llama.tools import benchmark

    torch.set_num_threads(spec["threads"])
    buffer = torch.ones(benchmark.buffer_bytes(torch.device("cpu")) // 4)
    benchmark.bandwidth(buffer, 1)
    yield {"bytes_per_token": None}
    for _ in sys.stdin:
        speeds = [benchmark.bandwidth(buffer, 1) for _ in range(4)]
        yield {"bandwidth_gbs": statistics.harmonic_mean(speeds) / 1e9}  # over the total time, as in a turn


def engine_turns(load: Callable[[dict[str, Any]], Loaded], spec: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Load a model, warm up with a few tokens, then run a turn per line of stdin."""
    model = load(spec)
    prompt = random_prompt(model.vocabulary, spec["prompt_tokens"])
    list(turns(model, prompt[:32], min(2, spec["new_tokens"]), ["prefill"]))
    yield {"bytes_per_token": model.read}
    yield from turns(model, prompt, spec["new_tokens"], sys.stdin, spec["turn_seconds"])


def turns(
    model: Loaded, prompt: list[int], new: int, lines: Iterable[str], limit: float = math.inf
) -> Iterator[dict[str, float]]:
    """Run a turn per line: decode greedily after the prompt, yield {decode_tps, decoded}; prefill_tps for "prefill".

    A turn decodes `new` tokens, or fewer if they take longer than `limit` seconds. The first turn always processes the
    prompt, and so does every turn of a model that can't trim its cache, but only "prefill" includes its speed.
    """
    first = None
    for line in lines:
        timed = line.strip() == "prefill"
        started = time.perf_counter()
        if timed or first is None or not model.trims:
            first = model.step(prompt, 0)
        between = time.perf_counter()
        token, decoded, seconds = first, 0, 0.0
        while decoded < new and seconds < limit:
            token = model.step([token], len(prompt) + decoded)
            decoded, seconds = decoded + 1, time.perf_counter() - between
        prefill = {"prefill_tps": len(prompt) / (between - started)} if timed else {}
        yield {"decode_tps": decoded / seconds, "decoded": decoded, **prefill}


def load_clearllama(spec: dict[str, Any]) -> Loaded:
    """Load a model as `clearllama generate` does."""
    import torch

    from llama import loader
    from llama.checkpoint import open_checkpoint
    from llama.engine import kernels, runtime
    from llama.generate import prefill
    from llama.tools import benchmark

    runtime.set_threads(spec["threads"])
    model = loader.build(open_checkpoint(spec["path"]), device="cpu", fast=True, **spec["options"])
    prompt = spec["prompt_tokens"]
    cache = model.new_cache(prompt + spec["new_tokens"])
    read = benchmark.linear_bytes(model) + benchmark.cache_bytes(model.new_cache(prompt), prompt)

    @torch.inference_mode()
    def step(tokens: list[int], past: int) -> int:
        cache.trim(past)
        logits = prefill(model, tokens, cache)
        with kernels.own_threads():  # as in generation: PyTorch's threads must not take turns with the kernels'
            return int(logits.argmax())

    return Loaded(step, model.config.vocab_size, read)


def load_llama_cpp(spec: dict[str, Any]) -> Loaded:
    """Load a GGUF file with flash attention."""
    import llama_cpp
    import numpy as np

    model = llama_cpp.Llama(
        spec["path"],
        n_ctx=spec["prompt_tokens"] + spec["new_tokens"] + 8,
        n_threads=spec["threads"],
        n_threads_batch=spec["threads"],
        n_batch=512,
        n_ubatch=512,
        flash_attn=True,
        verbose=False,
    )
    vocabulary = model.n_vocab()

    def step(tokens: list[int], past: int) -> int:
        model.n_tokens = past  # eval removes later positions from the cache
        model.eval(tokens)
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(model.ctx, -1), shape=(vocabulary,))
        return int(logits.argmax())

    return Loaded(step, vocabulary)


def load_transformers(spec: dict[str, Any]) -> Loaded:
    """Load a folder or a GGUF file in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    torch.set_num_threads(spec["threads"])
    path = Path(spec["path"])
    options = {"gguf_file": path.name} if path.is_file() else {}
    source = path.parent if path.is_file() else path
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, **options).eval()
    cache = DynamicCache()

    @torch.inference_mode()
    def step(tokens: list[int], past: int) -> int:
        nonlocal cache
        excess = cache.get_seq_length() - past
        if past == 0:
            cache = DynamicCache()
        elif excess:
            cache.crop(-excess)
        out = model(input_ids=torch.tensor([tokens]), past_key_values=cache, use_cache=True, logits_to_keep=1)
        return int(out.logits[0, -1].argmax())

    return Loaded(step, model.config.vocab_size)


def load_openvino(spec: dict[str, Any]) -> Loaded:
    """Load a stateful model, which keeps its cache itself, and let it compute the logits of the last token only."""
    import numpy as np
    import openvino
    from openvino import opset13 as operations

    core = openvino.Core()
    model = core.read_model(Path(spec["path"]) / "openvino_model.xml")
    product = model.output("logits").node
    while product.get_type_name() != "MatMul":
        product = product.input_value(0).get_node()
    last = operations.slice(product.input_value(0), [-1], [np.iinfo(np.int64).max], [1], [1])  # (1, T, C) -> (1, 1, C)
    product.input(0).replace_source_output(last.output(0))
    model.validate_nodes_and_infer_types()
    settings = {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": spec["threads"]}
    request = core.compile_model(model, "CPU", {"PERFORMANCE_HINT": "LATENCY", **settings}).create_infer_request()
    cached = 0

    def step(tokens: list[int], past: int) -> int:
        nonlocal cached
        if past == 0:
            request.reset_state()
        elif past != cached:
            raise ValueError(f"OpenVINO's cache has {cached} tokens and can't be trimmed to {past}")
        cached = past + len(tokens)
        inputs = {
            "input_ids": np.array([tokens], dtype=np.int64),
            "attention_mask": np.ones((1, cached), dtype=np.int64),
            "position_ids": np.arange(past, cached, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
        return int(request.infer(inputs, share_inputs=True)["logits"][0, -1].argmax())

    return Loaded(step, model.output("logits").partial_shape[2].get_length(), trims=False)


def random_prompt(vocabulary: int, length: int) -> list[int]:
    """Return random ids, without the lowest ones, which are often control tokens."""
    rng = random.Random(0)
    return [rng.randrange(min(3, vocabulary - 1), vocabulary) for _ in range(length)]


WORKERS: dict[str, Callable[[dict[str, Any]], Iterator[dict[str, Any]]]] = {
    "check": check,
    "busy": keep_busy,
    "convert": convert_to_openvino,
    "memory": memory,
    "clearllama": functools.partial(engine_turns, load_clearllama),
    "llama.cpp": functools.partial(engine_turns, load_llama_cpp),
    "transformers": functools.partial(engine_turns, load_transformers),
    "OpenVINO": functools.partial(engine_turns, load_openvino),
}


# ----------------------------------------------------------------------------------------------------- running a row
class Worker:
    """A script in its own process and environment that answers with lines of JSON."""

    def __init__(self, python: str, spec: dict[str, Any], script: str = __file__):
        words = [python, script, "--worker", json.dumps(spec)]
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  closed in stop
        try:
            pipe = subprocess.PIPE
            self.process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=self.errors, encoding="utf-8")
        except OSError as error:
            self.errors.close()
            raise RuntimeError(f"{python}: {error.strerror or error}") from None

    def answer(self) -> dict[str, Any]:
        """Read the next line. Raises RuntimeError with the last line of stderr, or the exit code."""
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            self.errors.seek(0)
            errors = [line.strip() for line in self.errors.read().decode(errors="replace").splitlines() if line.strip()]
            raise RuntimeError(errors[-1] if errors else f"{self.process.args[0]} ended with code {code}")
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise RuntimeError(f"expected a line of JSON, got {line.strip()[:80]!r}")
        return found

    def turn(self, kind: str, keys: set[str]) -> dict[str, float]:
        """Run a turn, "prefill" or "decode". Returns positive numbers under these keys, else raises RuntimeError."""
        try:
            self.process.stdin.write(f"{kind}\n")
            self.process.stdin.flush()
        except OSError:
            pass  # the process has ended; answer() raises its last error
        found = self.answer()
        if set(found) != keys or not all(isinstance(value, int | float) and value > 0 for value in found.values()):
            raise RuntimeError(f"expected {', '.join(sorted(keys))} above 0, got {str(found)[:80]}")
        return found

    def stop(self) -> None:
        self.process.kill()
        self.process.communicate()  # waits, and closes both pipes
        self.errors.close()


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[list[Worker]]:
    """Keep `count` processes busy, from before the block until after it. Raises RuntimeError if one ended early."""
    with contextlib.ExitStack() as stack:
        processes = []
        for _ in range(count):
            processes.append(Worker(sys.executable, {"engine": "busy"}))
            stack.callback(processes[-1].stop)
            processes[-1].answer()
        yield processes
        if any(loop.process.poll() is not None for loop in processes):
            raise RuntimeError("a busy loop ended before the turns beside it; was it killed?")


class Row:
    """The engines of a row, each in its process, and what they answered."""

    def __init__(self, name: str, engines: list[Engine], args: argparse.Namespace) -> None:
        self.name, self.engines, self.args = name, engines, args
        self.live = [MEMORY, *engines]
        self.workers: dict[str, Worker] = {}
        self.read: dict[str, float | None] = {}
        self.results: list[dict[str, Any]] = []
        self.failures: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def attempt(self, engine: Engine, number: int = 0, busy: int = 0) -> Iterator[None]:
        """If the block raises a RuntimeError, record the failure and drop the engine; for BUSY, drop its results."""
        try:
            yield
        except RuntimeError as error:
            self.live = [other for other in self.live if other is not engine]
            if engine is BUSY:
                self.results = [result for result in self.results if result["busy"] != busy]
            about = {"round": number, "row": self.name, "busy": busy, "engine": engine.name, "peer": engine.peer}
            self.failures.append({**about, "error": str(error)})
            self.say(number, busy, engine, f"failed: {error}")

    def say(self, number: int, busy: int, engine: Engine, text: str) -> None:
        """Report a turn on stderr."""
        row = f"{self.name} beside {loops(busy)}" if busy else f"{self.name:<5}"
        print(f"round {number}  {row} {engine.name:<36} {text}", file=sys.stderr)

    def start(self, processes: contextlib.ExitStack) -> None:
        """Convert what OpenVINO lacks, then start a process per engine; `processes` ends them."""
        names = ("prompt_tokens", "new_tokens", "turn_seconds", "threads")
        sizes = {name: getattr(self.args, name) for name in names}
        for engine in self.engines:
            if engine.peer == "OpenVINO":
                with self.attempt(engine):
                    convert(engine, self.args.pythons["OpenVINO"])
        for engine in list(self.live):
            kind = {"engine": engine.peer or "clearllama", "path": str(engine.path), "options": engine.options}
            with self.attempt(engine):
                process = Worker(self.args.pythons.get(engine.peer, sys.executable), {**kind, **sizes})
                processes.callback(process.stop)
                self.workers[engine.name] = process
                self.read[engine.name] = process.answer().get("bytes_per_token")

    def turns(self, number: int, busy: int) -> None:
        """Run one turn per engine, and record the speeds."""
        kind = "prefill" if number <= self.args.prefill_rounds else "decode"
        keys = {"decode_tps", "decoded", *(["prefill_tps"] if kind == "prefill" else [])}
        answers = {}
        for engine in self.live[:: 1 if number % 2 else -1]:  # so that no engine is always last
            time.sleep(PAUSE)
            started = time.perf_counter()
            with self.attempt(engine, number, busy):
                expected = {"bandwidth_gbs"} if engine is MEMORY else keys
                answers[engine.name] = self.workers[engine.name].turn(kind, expected)
            seconds = time.perf_counter() - started
            if busy and engine in self.live and seconds > TOO_LONG * self.args.turn_seconds:
                self.live.remove(engine)
                self.say(number, busy, engine, f"skips the remaining rounds: a turn took {seconds:.0f} s")
        bandwidth = answers.pop(MEMORY.name, {})
        for engine in self.engines:
            if engine.name not in answers:
                continue
            answer, size = {**answers[engine.name], **bandwidth}, self.read[engine.name]
            if size and bandwidth:
                share = size * answer["decode_tps"] / (bandwidth["bandwidth_gbs"] * 1e9)
                answer |= {"bytes_per_token": size, "share": share}
            about = {"round": number, "row": self.name, "busy": busy, "engine": engine.name, "peer": engine.peer}
            self.results.append({**about, **answer})
            speeds = "  ".join(f"{key[:-4]} {answer[key]:8.1f}" for key in KEYS if key in answer)
            decoded, new = answer["decoded"], self.args.new_tokens
            self.say(number, busy, engine, speeds + (f"  ({decoded} of {new} tokens)" if decoded < new else ""))


def run_row(name: str, engines: list[Engine], args: argparse.Namespace) -> tuple[list[dict], list[dict]]:
    """Return the results and failures of a row. No process outlives this call."""
    row = Row(name, engines, args)
    with contextlib.ExitStack() as processes:
        row.start(processes)
        for busy in (0, args.busy) if args.busy else (0,):
            with row.attempt(BUSY, busy=busy), busy_loops(busy):
                for number in range(1, args.rounds + 1):
                    row.turns(number, busy)
    return row.results, row.failures


def convert(engine: Engine, python: str) -> None:
    """Convert hf/ into an engine's folder beside it, unless the folder is newer. Raises RuntimeError if that fails."""
    source = engine.path.with_name("hf")
    if engine.path.exists():
        if engine.path.stat().st_mtime >= max((path.stat().st_mtime for path in source.iterdir()), default=0):
            return
        shutil.rmtree(engine.path)
    print(f"{engine.name}: converting {source} into {engine.path}", file=sys.stderr)
    partial = engine.path.with_name(f"{engine.path.name}.partial")  # an interrupted conversion must not be used
    shutil.rmtree(partial, ignore_errors=True)
    spec = {"engine": "convert", "source": str(source), "path": str(partial), "options": engine.options}
    process = Worker(python, spec)
    try:
        process.answer()
        partial.rename(engine.path)
    except OSError as error:
        raise RuntimeError(f"{engine.path}: {error.strerror or error}") from None
    finally:
        process.stop()
        shutil.rmtree(partial, ignore_errors=True)


def versions_of(peer: str, python: str) -> dict[str, str]:
    """Return the versions of a peer's packages in that environment. Raises RuntimeError if the peer can't run."""
    process = Worker(python, {"engine": "check", "peer": peer})
    try:
        found = process.answer()
    finally:
        process.stop()
    return {f"{name} (peers)" if name == "torch" else name: version for name, version in found.items()}


# -------------------------------------------------------------------------------------------------------------- main
def main() -> int:
    """Measure all rows, then print the table, the machine and the settings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", metavar="DIR_OR_NAME", help="default: clearllama's default model")
    parser.add_argument("--peers-python", default=sys.executable, metavar="PYTHON", help="default: this one")
    parser.add_argument("--openvino-python", metavar="PYTHON", help="default: that of --peers-python")
    parser.add_argument("--peers", default=",".join(PEERS), metavar="LIST", help="default: %(default)s")
    parser.add_argument("--rows", metavar="LIST", help="comma-separated rows (default: all)")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="measure again beside N busy loops")
    parser.add_argument("--rounds", type=int, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument("--prefill-rounds", type=int, default=3, metavar="N", help="default: %(default)s")
    parser.add_argument("--prompt-tokens", type=int, default=512, metavar="N", help="default: %(default)s")
    parser.add_argument("--new-tokens", type=int, default=16, metavar="N", help="default: %(default)s")
    parser.add_argument("--turn-seconds", type=float, default=10.0, metavar="S", help="default: %(default)s")
    parser.add_argument(
        "--threads", type=int, default=cores(), metavar="N", help="of every engine (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all measurements and settings to FILE")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args.worker)
    if min(args.rounds, args.prompt_tokens, args.new_tokens, args.threads) < 1:
        parser.error("--rounds, --prompt-tokens, --new-tokens and --threads must be at least 1")
    if min(args.prefill_rounds, args.busy) < 0:
        parser.error("--prefill-rounds and --busy must be at least 0")
    if not args.turn_seconds > 0:
        parser.error("--turn-seconds must be above 0")
    peers = args.peers.split(",") if args.peers else []
    if unknown := set(peers) - set(PEERS):
        parser.error(f"unknown peer {min(unknown)!r}; known: {', '.join(PEERS)}")
    args.pythons = dict.fromkeys(PEERS, args.peers_python)
    args.pythons["OpenVINO"] = args.openvino_python or args.peers_python
    try:
        from llama import hub

        model = hub.resolve(args.model or hub.DEFAULT)
        rows = {
            row: [engine for engine in engines if engine.peer is None or engine.peer in peers]
            for row, engines in rows_of(model).items()
        }
    except Exception as error:
        raise SystemExit(f"compare_peers: {error}") from None
    chosen = list(rows) if args.rows is None else args.rows.split(",")
    unknown = [row for row in chosen if row not in rows]
    if unknown:
        parser.error(f"unknown row {unknown[0]!r}; {model} has {', '.join(rows)}")
    versions = {"python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in ("clearllama", "torch")}
    for peer in dict.fromkeys(engine.peer for row in chosen for engine in rows[row] if engine.peer):
        python, option = args.pythons[peer], "--openvino-python" if peer == "OpenVINO" else "--peers-python"
        try:
            versions |= versions_of(peer, python)
        except RuntimeError as error:
            raise SystemExit(
                f"compare_peers: {peer} can't run in {python}: {error}; install {PEERS[peer].packages[0]} there, pass"
                f" another environment to {option}, or leave {peer} out of --peers"
            ) from None

    results, failures = [], []
    for row in chosen:
        found_here, failed_here = run_row(row, rows[row], args)
        results += found_here
        failures += failed_here
    idle = [result for result in results if not result["busy"]]
    bandwidths = {(result["row"], result["round"]): result.get("bandwidth_gbs") for result in idle}
    facts = {
        "date": datetime.date.today().isoformat(),
        "machine": this_machine(),
        "versions": versions,
        "settings": {
            "model": args.model or hub.DEFAULT,
            "rounds": args.rounds,
            "prefill_rounds": min(args.prefill_rounds, args.rounds),
            "prompt_tokens": args.prompt_tokens,
            "new_tokens": args.new_tokens,
            "turn_seconds": args.turn_seconds,
            "busy": args.busy,
            "threads": args.threads,
        },
        "bandwidth_gbs": median(bandwidths.values()),
        "ratios": ratios(results),
        "results": results,
        "failures": failures,
    }
    if args.json:
        args.json.write_text(json.dumps(facts, indent=1) + "\n")
    print(table(results, args.prompt_tokens))
    print(footer(facts), end="")
    if failures:
        last = failures[-1]
        print(f"compare_peers: {len(failures)} failed, the last {last['engine']}: {last['error']}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
