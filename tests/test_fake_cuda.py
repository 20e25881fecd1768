"""The CUDA path without CUDA: fake tensors in the real code check devices, waits and launches, but no values."""

from __future__ import annotations

import ast
import logging
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import llama
from llama import generate as generate_module
from llama.engine import kernels, linears, quantized_weight, triton_kernels
from llama.engine.cuda_graphs import GraphRunner
from llama.engine.fused import FusedRunner
from llama.engine.linears import BlockLinear, make_linear
from llama.engine.placement import PlacedRunner, spread
from llama.engine.quantized_weight import QuantizedWeight
from llama.engine.runtime import no_cudnn_attention
from llama.generate import generate, prefill
from llama.generation.batch import Batch, Request, TokenEvent
from llama.generation.speculative import NGramDraft, speculate
from llama.model import RotaryEmb, Transformer
from llama.quant import rounding
from llama.quant.blocks import BlockFormat, Blocks
from llama.quant.rounding import quantize
from llama.quant.schemes import SCHEMES, scheme_for
from llama.sampling import SamplingParams, choose
from llama.study.inside import activations

from . import tiny
from .fake_cuda import CUDA, FakeKernel, FakeRuntime, WaitError, Watch, fake_mode, to_fake

pytestmark = [
    pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor"),
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(torch.version.cuda is None and kernels.compiler() is None, reason="needs a C++ compiler"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="replaces torch.cuda"),
]
SECOND = torch.device("cuda", 1)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
Kernels = list[tuple[str, torch.device]]


@pytest.fixture
def mode() -> Iterator[FakeTensorMode]:
    with fake_mode() as mode:
        yield mode


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    runtime = FakeRuntime()
    for name, value in runtime.stand_ins().items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(generate_module, "random_generator", lambda params, device: None)  # needs a real device
    monkeypatch.setattr("llama.generation.batch.random_generator", lambda params, device: None)
    monkeypatch.setattr("llama.generation.speculative.random_generator", lambda params, device: None)
    return runtime


@pytest.fixture
def launches(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch) -> Kernels:
    """The launches of Triton kernels, in order; no kernel runs."""
    calls: Kernels = []
    monkeypatch.setattr(triton_kernels, "ready", lambda: True)
    monkeypatch.setattr(triton_kernels, "kernel", lambda name: FakeKernel(name, calls))
    return calls


@contextmanager
def watched(mode: FakeTensorMode, answers: Callable[[torch.dtype], float] | None = None) -> Iterator[Watch]:
    with mode, Watch(answers) as watch, torch.inference_mode():
        yield watch


def a_model(mode: FakeTensorMode, form: str = "real", scheme: str | None = None, **options: Any) -> Transformer:
    """Return a model of fake tensors, by default on cuda:0, with the layers and the runner of the loader."""
    config = tiny.WIDE if scheme else tiny.CONFIG
    model = tiny.model(config, rope=form, attention="sdpa").bfloat16()
    if scheme:
        for name, linear in [(n, m) for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]:
            format = scheme_for(name, SCHEMES[scheme]).format
            model.set_submodule(name, BlockLinear(quantize(linear.weight, format), linear.bias))
    to_fake(model, mode, **options)
    model.runner = GraphRunner()
    return model


def tokens(count: int) -> Tensor:
    return torch.zeros(1, count, dtype=torch.long, device=CUDA)


# ----------------------------------------------------------------------------------- waits for the device, devices
@pytest.mark.parametrize("kind", ["model", "int8"])
@pytest.mark.parametrize("form", ["complex", "real", "half"])
def test_prefill_and_decoding_steps_do_not_wait_for_the_device(
    mode: FakeTensorMode, form: str, kind: str, runtime: FakeRuntime
) -> None:
    model = a_model(mode, form)
    model.runner.cache_kind = kind
    with watched(mode):
        cache = model.new_cache(100)
        logits = prefill(model, PROMPT, cache, chunk=3)
        assert (logits.device, logits.dtype, logits.shape) == (CUDA, torch.float32, (model.config.vocab_size,))
        for _ in range(3):
            assert model(tokens(1), cache=cache).device == CUDA
        assert cache.length == len(PROMPT) + 3


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_quantized_layers_do_not_wait_and_dequantize_in_one_kernel(
    mode: FakeTensorMode, scheme: str, launches: Kernels
) -> None:
    model = a_model(mode, scheme=scheme)
    products = sum(isinstance(module, BlockLinear) for module in model.modules())
    with watched(mode) as watch:
        cache = model.new_cache(100)
        model(tokens(8), cache=cache)
        assert launches == [("_unpack", CUDA)] * products
        launches.clear()
        model(tokens(1), cache=cache)
        assert launches == [("_linear", CUDA)] * products
        assert not {"aten::bitwise_and", "aten::__rshift__"} & set(watch.operations)  # no unpacking by PyTorch


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.8, "top_p": 0.9, "top_k": 5, "min_p": 0.1}, {"repetition_penalty": 1.2}],
    ids=["greedy", "sampled", "penalty"],
)
def test_decoding_waits_only_for_tokens_of_earlier_steps(
    mode: FakeTensorMode, options: dict[str, Any], runtime: FakeRuntime
) -> None:
    model = a_model(mode)
    params = SamplingParams(max_new_tokens=21, **options)
    with watched(mode, lambda dtype: 1.0) as watch:  # the values of ids and extremes on the host
        found = list(generate(model, PROMPT, params, logprobs=True))
    assert (len(found), watch.reads, watch.copies) == (21, 0, 0)  # neither a direct read nor a blocking copy
    assert (runtime.graphs, runtime.replays) == (1, 20)
    assert runtime.waits == 6  # for the first token and for five groups of four


def test_replaying_a_step_launches_no_other_operation(mode: FakeTensorMode, runtime: FakeRuntime) -> None:
    """Between two replays the host launches only the choice of the token: no allocation, no copy from the host."""
    model = a_model(mode)
    with watched(mode) as watch:
        cache = model.new_cache(100)
        prefill(model, PROMPT, cache)
        step = model.runner.step_for(cache, torch.full((1,), cache.length, device=CUDA))
        cache.place_next()
        logits = step.next_logits(model, cache)
        watch.operations.clear()
        for _ in range(3):
            step.next_logits(model, cache)
        assert watch.operations == []
        step.tokens.copy_(choose(logits[0], SamplingParams())[0][None])
        assert len(watch.operations) < 20


def test_a_batch_step_replays_a_graph_and_waits_once(mode: FakeTensorMode, runtime: FakeRuntime) -> None:
    model = a_model(mode)
    requests = [Request(PROMPT[: 3 + i], SamplingParams(max_new_tokens=9)) for i in range(4)]
    with watched(mode, lambda dtype: 1.0) as watch:
        events = [event for event in Batch(model, requests, slots=4) if isinstance(event, TokenEvent)]
    assert len(events) == 36
    assert (runtime.graphs, runtime.replays, runtime.waits) == (1, 8, 8)
    assert watch.reads == 8  # the first token and its extreme, for each request


def test_a_speculative_round_is_one_pass(mode: FakeTensorMode, runtime: FakeRuntime) -> None:
    model = a_model(mode)
    passes: list[int] = []
    model.tok_embeddings.register_forward_pre_hook(lambda module, args: passes.append(args[0].shape[1]))
    draft = NGramDraft()
    values = random.Random(0)  # for draws and probabilities; ids become 0
    with watched(mode, lambda dtype: values.random()) as watch:
        params = SamplingParams(max_new_tokens=12, temperature=1.0)
        assert len(list(speculate(model, [0] * 8, params, draft))) == 12
    assert 0 < draft.accepted < draft.drafted  # both outcomes occurred
    assert len(passes) == 1 + 12 - draft.accepted or len(passes) == 12 - draft.accepted
    assert watch.reads <= 4 * (12 + draft.drafted)


@pytest.mark.parametrize("fused", [False, True])
def test_hooks_run_in_every_step_and_no_graph_is_replayed(
    mode: FakeTensorMode, runtime: FakeRuntime, launches: Kernels, caplog: pytest.LogCaptureFixture, fused: bool
) -> None:
    caplog.set_level(logging.INFO)
    model = a_model(mode)
    with watched(mode, lambda dtype: 1.0):
        if fused:
            model.runner = FusedRunner(model)
        cache = model.new_cache(100)
        launches.clear()
        with activations(model, ["resid_post.1", "final_norm"]) as seen:
            assert len(list(generate(model, PROMPT, SamplingParams(max_new_tokens=9), cache=cache))) == 9
        assert [x.shape[1] for x in seen.calls["resid_post.1"]] == [len(PROMPT)] + [1] * 8
        assert len(seen.calls["final_norm"]) == 9
        assert (runtime.graphs, runtime.replays, launches) == (0, 0, [])
        requests = [Request(PROMPT[: 3 + i], SamplingParams(max_new_tokens=5)) for i in range(4)]
        with activations(model, "layers.0") as seen:
            list(Batch(model, requests, slots=4))
        assert [x.shape[:2] for x in seen.calls["layers.0"]][-4:] == [(4, 1)] * 4
        assert (runtime.graphs, runtime.replays, launches) == (0, 0, [])
        cache = model.new_cache(100)
        list(generate(model, PROMPT, SamplingParams(max_new_tokens=9), cache=cache))
        assert runtime.replays == 8  # without hooks, the graphs are used again
    lines = [record for record in caplog.records if "hooks" in record.getMessage()]
    assert [record.levelno for record in lines] == [logging.WARNING if fused else logging.INFO]


@pytest.mark.parametrize("devices", [["cpu", "cuda:0"], ["cuda:0", "cuda:1"]])
def test_layers_on_two_devices(mode: FakeTensorMode, devices: list[str], runtime: FakeRuntime) -> None:
    model = tiny.model(rope="real", attention="sdpa")
    placement = spread(tiny.CONFIG, [torch.device(name) for name in devices])
    to_fake(model, mode, placement)
    model.runner = PlacedRunner(placement)
    with watched(mode, lambda dtype: 0.0) as watch:
        cache = model.new_cache(100)
        assert [layer.k.device for layer in cache.layers] == list(placement.layers)
        for length in (5, 1):
            ids = torch.zeros(1, length, dtype=torch.long, device=cache.device)
            assert model(ids, cache=cache).device == torch.device(devices[-1])
    # ids, positions, mask and rotations come from the last device: a prompt copies five tensors, a step four
    assert (watch.reads, watch.copies) == (0, 9 if "cpu" in devices else 0)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_weights_are_quantized_on_the_device(
    mode: FakeTensorMode, scheme: str, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounding, "check_scales", lambda *scales: None)  # would read a value for each piece
    monkeypatch.setattr(linears, "_narrow", lambda scales: scales.half())  # would compare values
    devices: list[torch.device] = []

    def recorded(weight: Tensor, format: BlockFormat) -> Blocks:
        devices.append(weight.device)
        return quantize(weight, format)

    monkeypatch.setattr(quantized_weight, "quantize", recorded)
    with watched(mode, lambda dtype: 1.0) as watch:
        weight = torch.empty(64, 256, dtype=torch.bfloat16)
        quantized = QuantizedWeight.from_tensor(weight, SCHEMES[scheme].format)
        assert make_linear(quantized, CUDA).quants.device == CUDA
        assert devices == [CUDA]  # in one piece
        assert watch.operations.count("aten::_to_copy") < 20


# ------------------------------------------------------------------------------------------------ the fused decoder
@pytest.mark.parametrize("scheme", [None, "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_fused_decoder_launches_its_kernels(
    mode: FakeTensorMode, scheme: str | None, dtype: torch.dtype, launches: Kernels
) -> None:
    model = a_model(mode, scheme=scheme)
    with watched(mode) as watch:
        if scheme is None:
            to_dtype(model, dtype)
        model.runner = FusedRunner(model)
        flash = model.norm.weight.dtype == torch.bfloat16
        cache = model.new_cache(100)
        launches.clear()
        assert prefill(model, PROMPT, cache).device == CUDA
        of_prompt = [name for name, _ in launches]
        assert of_prompt.count("_rotate") == of_prompt.count("_swiglu") == model.config.n_layers
        assert ("aten::_scaled_dot_product_flash_attention" in watch.operations) == flash
        assert ("aten::le" in watch.operations) != flash  # the mask
        launches.clear()
        model(tokens(1), cache=cache)
        layers = ["_qkv", "_attend", "_combine", "_linear", "_linear", "_linear"] * model.config.n_layers
        assert [name for name, _ in launches if name != "_unpack"][: len(layers)] == layers


def test_modules_of_a_fused_quantized_model_use_the_kernel_for_one_row(mode: FakeTensorMode, launches: Kernels) -> None:
    """With a cache in 8 bits, each module multiplies its own part of the joined weights."""
    model = a_model(mode, scheme="int4")
    with watched(mode):
        model.runner = FusedRunner(model, cache_kind="int8")
        cache = model.new_cache(100)
        model(tokens(4), cache=cache)
        launches.clear()
        model(tokens(1), cache=cache)
        kinds = [name for name, _ in launches]
        assert kinds.count("_linear") == sum(isinstance(module, BlockLinear) for module in model.modules())
        assert "_unpack" not in kinds


def to_dtype(model: Transformer, dtype: torch.dtype) -> None:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(parameter.to(dtype), requires_grad=False)


@pytest.mark.parametrize("way", ["plain", "fused"])
def test_everything_runs_on_the_device_of_the_model(
    mode: FakeTensorMode, way: str, launches: Kernels, runtime: FakeRuntime
) -> None:
    """Kernels, captures, replays and events use cuda:1 while cuda:0 is the current device."""
    placement = spread(tiny.CONFIG, [SECOND])
    model = a_model(mode, placement=placement)
    with watched(mode, lambda dtype: 1.0):
        if way == "fused":
            model.runner = FusedRunner(model)
        found = list(generate(model, PROMPT, SamplingParams(max_new_tokens=9)))
        assert len(found) == 9
    assert runtime.replays == 8
    assert runtime.device == 0
    assert set(runtime.events) == {SECOND}
    assert {device for _, device in launches} == ({SECOND} if way == "fused" else set())


def test_cudnn_is_excluded_from_attention() -> None:
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        no_cudnn_attention()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


# ------------------------------------------------------------------------------------------------ threads and streams
def test_a_pass_waits_for_the_previous_pass_on_any_stream(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass waits for the previous one, which may be on another stream. It must not wait during a capture."""
    events: list[str] = []
    runner = GraphRunner()
    monkeypatch.setattr(runtime.Stream, "wait_event", lambda self, event: events.append(f"wait for {event.recorded}"))
    with runner.turn(CUDA):
        events.append("first")
        runtime.capturing = True
        with runner.turn(CUDA):
            events.append("captured")
        runtime.capturing = False
    with pytest.raises(KeyError), runner.turn(CUDA):
        raise KeyError
    with runner.turn(CUDA):
        events.append("last")
    assert events == ["first", "captured", "wait for cuda:0", "wait for cuda:0", "last"]


def test_one_thread_at_a_time_has_the_turn() -> None:
    runner, inside, most = GraphRunner(), [0], [0]

    def work(_: int) -> None:
        for _ in range(20):
            with runner.turn(torch.device("cpu")):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                time.sleep(0.0005)
                inside[0] -= 1

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert most == [1]


# ------------------------------------------------------------------------------- lines that run only on a CUDA device
# function -> the tests that run its CUDA code on fake tensors or compile it (here: in this file), or why there is none
CUDA_LINES = {
    "attention.sdpa": "here",
    "engine/cuda_graphs.GraphRunner.__init__": "here",
    "engine/cuda_graphs.GraphRunner.turn": "here",
    "engine/cuda_graphs.PendingTokens.__init__": "here",
    "engine/cuda_graphs.GraphStep.__init__": "here",
    "engine/cuda_graphs.capture": "here, with replacements for torch.cuda's graph and stream",
    "engine/fused.has_flash": "here",
    "engine/linears.BlockLinear.forward": "here",
    "engine/linears.kept_format": "test_gpu_blocks.py",
    "loader.resolve_options": "test_gpu_blocks.py, the functions that decide it",
    "engine/runtime.no_cudnn_attention": "here",
    "engine/triton_kernels.launch": "here; the kernels in test_triton_kernels.py and test_triton_compile.py",
    "generate.prefill_chunks": "here",
    "loader.attach_runner": "not run: loading needs the device; the runner is chosen by one expression",
    "engine/runtime.pick_device": "not run: asks the driver",
    "engine/runtime.pick_dtype": "not run: asks the driver",
    "engine/parallel.join": "not run: needs several GPUs and nccl; the same code runs with gloo in test_parallel.py",
    "cli/ranks.start": "not run: counts the GPUs",
    "system/memory.rooms": "not run: asks the driver",
    "tools/benchmark.profile": "not run: the profiler needs CUPTI",
    "tools/facts.devices": "not run: asks the driver",
    "tools/facts._cuda": "not run: asks the driver",
    "tools/facts.kernels_and_compiler": "not run: asks whether Triton is needed",
}


def test_every_function_with_a_line_for_cuda_is_listed() -> None:
    package = Path(llama.__file__).parent
    found = set()

    def visit(node: ast.AST, name: str) -> None:
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.FunctionDef(name=own) | ast.ClassDef(name=own):
                    visit(child, f"{name}.{own}")
                    continue
                case ast.Attribute(attr="is_cuda" | "cuda") | ast.Constant(value="cuda" | "cuda:"):
                    found.add(name)
            visit(child, name)

    for file in package.rglob("*.py"):
        visit(ast.parse(file.read_text()), str(file.relative_to(package).with_suffix("")))
    assert found == CUDA_LINES.keys()


# ------------------------------------------------------------------------------------------------- planted defects
def test_reading_a_value_in_a_step_is_detected(
    mode: FakeTensorMode, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = a_model(mode)
    model.layers[0].ffn_norm.register_forward_hook(lambda module, args, out: float(out.sum()))
    with watched(mode), pytest.raises(WaitError, match="is read"):
        model(tokens(1))


def test_a_blocking_copy_to_the_host_is_detected(mode: FakeTensorMode, runtime: FakeRuntime) -> None:
    with watched(mode):
        for copy in (lambda x: x.cpu(), lambda x: x.to("cpu"), lambda x: torch.empty(3).copy_(x)):
            with pytest.raises(WaitError, match="copied"):
                copy(torch.zeros(3, device=CUDA))
        torch.empty(3).copy_(torch.zeros(3, device=CUDA), non_blocking=True)


def test_a_cpu_tensor_in_the_rotation_is_detected(
    mode: FakeTensorMode, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = a_model(mode)
    real = RotaryEmb.forward
    monkeypatch.setattr(
        RotaryEmb, "forward", lambda self, q, k, cis: real(self, q, k, tuple(torch.zeros(x.shape) for x in cis))
    )
    with watched(mode), pytest.raises(RuntimeError, match="same device"):
        model(tokens(3))


def test_a_launch_on_another_device_than_the_tensors_is_detected(
    mode: FakeTensorMode, launches: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        triton_kernels, "launch", lambda name, grid, *args, **_: triton_kernels.kernel(name)[grid](*args)
    )
    with watched(mode), pytest.raises(AssertionError, match="another device"):
        triton_kernels.rms_norm(torch.zeros(2, 64, device=SECOND), torch.zeros(64, device=SECOND), 1e-5)
