"""The kernels' own threads: the same results for any number of them, and they respect the process that they belong to."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llama import loader
from llama.engine import kernels
from llama.engine.cpu_attention import kernel_attention
from llama.engine.cpu_runner import KernelRunner
from llama.engine.linears import FewRowsLinear
from llama.text import Llama

from . import tiny
from .forked import Forked
from .patience import PATIENCE
from .test_kernels import KINDS, PLAIN_KINDS, causal, heads, layer, normal, random_blocks

pytestmark = pytest.mark.skipif(not kernels.ready(), reason="the C++ kernels can't be built here")
needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
COUNTS = range(2, 8)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    kernels._library().clearllama_choose_threads(0, 0)


# ------------------------------------------------------------------------------------------------------- results
def tokens_in_8_bits() -> tuple[Tensor, ...]:
    _, k, v = heads(2, 6, 2, 5, 600, 64)
    scales = torch.rand(2, 2, 600, generator=torch.Generator().manual_seed(0)) / 30
    return *((x * 30).round().clamp(-127, 127).to(torch.int8) for x in (k, v)), scales


def attention(t: int, dtype: torch.dtype) -> list[Tensor]:
    q, k, v = (x.to(dtype) for x in heads(2, 6, 2, t, 600, 64))
    k8, v8, scales = tokens_in_8_bits()
    return [kernels.attend(q, k, v, causal(t, 600)), kernels.attend(q, k8, v8, None, scales, scales)]


def products(kind: tuple[int, int, bool]) -> list[Tensor]:
    linear = layer(random_blocks(250, 200, *kind))
    return [linear(normal(rows, 200).to(dtype)) for rows in (1, 17, 130) for dtype in (torch.float32, torch.bfloat16)]


def layers() -> list[Tensor]:
    """The logits of a model with packed weights, and what it writes to the cache."""
    net = tiny.quantized(tiny.model(tiny.WIDE, attention="kernel"), "int8")
    net.runner = KernelRunner(net)
    cache = net.new_cache(100)
    found = [net(part, cache=cache) for part in tiny.random_tokens(60, tiny.WIDE).split([40, 1, 19], 1)]
    return [*found, *(buffer for layer in cache.layers for buffer in layer.buffers)]


OPERATORS: dict[str, Callable[[], list[Tensor]]] = {
    **{f"linear_tiles {kind}": lambda kind=kind: products(kind) for kind in KINDS},  # type: ignore[misc]
    "linear_bf16": lambda: [
        kernels.linear_bf16(normal(m, 300).bfloat16(), normal(900, 300, seed=1).bfloat16(), None) for m in (1, 4, 17)
    ],
    "attend 1": lambda: attention(1, torch.bfloat16) + attention(1, torch.float32),
    "attend 5": lambda: attention(5, torch.bfloat16) + attention(5, torch.float32),
    "attend 40": lambda: attention(40, torch.bfloat16) + attention(40, torch.float32),
    "quantize_to_tiles": lambda: [
        kernels.quantize_to_tiles(normal(250, 200), (1.0, 0.9), *kind[:3]) for kind in PLAIN_KINDS
    ],
    "layers": layers,
}


def equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", OPERATORS)
def test_the_results_do_not_depend_on_the_number_of_threads(name: str) -> None:
    kernels._library().clearllama_choose_threads(1, 0)
    expected = OPERATORS[name]()
    for count in COUNTS:
        kernels._library().clearllama_choose_threads(count, 0)
        assert equal(OPERATORS[name](), expected), count


def passes(net: Any) -> list[Tensor]:
    """The logits of a prompt, of a few tokens after it, and of a batch."""
    cache = net.new_cache()
    out = [net(tiny.random_tokens(40, tiny.WIDE), cache=cache), net(torch.tensor([[7]]), cache=cache)]
    out.append(net(torch.tensor([[8, 9, 3]]), cache=cache))
    rows = net.new_cache(batch=6, fixed=True)
    positions = torch.arange(6)[:, None] * 3
    return [*out, tiny.next_logits(net, torch.arange(6)[:, None], positions, rows)]


@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_model_computes_the_same_with_any_number_of_threads(scheme: str, dtype: str, tmp_path: Path) -> None:
    path = tiny.write_gguf(tmp_path / "wide.gguf", tiny.WIDE)
    llm = loader.load(path, dtype=dtype, device="cpu", quantize=scheme)
    assert type(llm.model.runner) is KernelRunner
    torch.set_num_threads(1)
    expected = passes(llm.model)
    texts = [llm.generate(["hello", "the"], max_new_tokens=9)[i].tokens for i in range(2)]
    for count in COUNTS:
        torch.set_num_threads(count)
        assert equal(passes(llm.model), expected), count
    assert [llm.generate(text, max_new_tokens=9).tokens for text in ("hello", "the")] == texts


def test_threads_that_run_loops_at_the_same_time_get_their_own_results() -> None:
    """One of them gets the kernels' threads; the others run their loops alone."""
    weights = [normal(900, 300, seed=seed).bfloat16() for seed in range(3)]
    x = normal(5, 300).bfloat16()
    kernels._library().clearllama_choose_threads(1, 0)
    expected = [kernels.linear_bf16(x, weight, None) for weight in weights]
    start = threading.Barrier(3)

    def run(i: int) -> bool:
        kernels._library().clearllama_choose_threads(3, 0)
        start.wait(timeout=PATIENCE)
        return all(torch.equal(kernels.linear_bf16(x, weights[i], None), expected[i]) for _ in range(100))

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(run, range(3))) == [True] * 3


# -------------------------------------------------------------------------- PyTorch's operators within the kernels'
def packed_model(tmp_path: Path) -> Any:
    """A model whose blocks are packed and whose output layer is in bfloat16, as in files of GPTQ and AWQ."""
    net: Any = loader.load(tiny.write_gguf(tmp_path / "wide.gguf", tiny.WIDE), "cpu", "float32", "int8").model
    net.output = FewRowsLinear(normal(tiny.WIDE.vocab_size, tiny.WIDE.dim).bfloat16())
    net.runner = KernelRunner(net)
    return net


def threads_in(name: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets the number of PyTorch's threads at each call of a function of torch.nn.functional."""
    seen: list[int] = []
    plain = getattr(F, name)
    monkeypatch.setattr(
        F, name, lambda *args, **options: (seen.append(torch.get_num_threads()), plain(*args, **options))[1]
    )
    torch.set_num_threads(2)
    return seen


def test_the_output_layer_of_a_batch_runs_on_all_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("widen", "has_tiles"):  # as on a processor with AVX-512 and without AMX
        monkeypatch.setattr(kernels, name, lambda: False)
    net = packed_model(tmp_path)
    seen = threads_in("linear", monkeypatch)
    with net.runner.threads(6):
        tiny.next_logits(net, torch.arange(6)[:, None], torch.zeros(6, 1).long(), net.new_cache(batch=6, fixed=True))
    assert seen == [2]


def test_attention_that_the_kernels_lack_runs_on_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = threads_in("scaled_dot_product_attention", monkeypatch)
    q, k = normal(40, 20).view(1, 2, 20, 20), normal(40, 20, seed=1).view(1, 2, 20, 20)
    with kernels.own_threads():
        kernel_attention(q, k, k)  # a head_dim of 20
        assert torch.get_num_threads() == 1
    assert seen == [2]


# ---------------------------------------------------------------------------------------------------- own_threads
def numbers() -> tuple[int, int]:
    """The number of PyTorch's threads in this thread, and in one that starts now."""
    with ThreadPoolExecutor(1) as other:
        return torch.get_num_threads(), other.submit(torch.get_num_threads).result(timeout=PATIENCE)


def test_own_threads_changes_the_number_of_the_calling_thread_only() -> None:
    torch.set_num_threads(3)
    with ThreadPoolExecutor(1) as earlier:
        assert earlier.submit(torch.get_num_threads).result(timeout=PATIENCE) == 3
        with kernels.own_threads():
            assert numbers() == (1, 3)
            assert earlier.submit(torch.get_num_threads).result(timeout=PATIENCE) == 3
            with kernels.own_threads():
                assert numbers() == (1, 3)
            assert numbers() == (1, 3)
    assert numbers() == (3, 3)
    with pytest.raises(KeyboardInterrupt), kernels.own_threads():
        raise KeyboardInterrupt
    assert numbers() == (3, 3)


@needs_linux
def test_within_own_threads_pytorch_starts_no_threads(forked: Forked) -> None:
    """Neither OpenMP, which PyTorch's operators use, nor MKL, which has a number of its own."""
    code = """
torch.set_num_threads(3)
before = count()
with kernels.own_threads():
    square = torch.ones(700, 700)
    square @ square, square + square, square.exp().softmax(-1), square.bfloat16() @ square.bfloat16()
    assert count() == before
    product()
    assert count() == before + 2
square @ square
assert count() > before + 2
"""
    check(forked, code)


def test_a_stream_leaves_the_numbers_to_its_reader(tmp_path: Path) -> None:
    """Between two tokens, and whatever becomes of the stream, PyTorch's threads are those that the user has chosen."""
    path = tiny.write_gguf(tmp_path / "wide.gguf", tiny.WIDE)
    llm = loader.load(path, dtype="bfloat16", device="cpu", quantize="int8")
    seen, real = [], llm.model.runner.layers

    def run(*args: Any) -> Tensor:
        seen.append(torch.get_num_threads())
        return real(*args)

    llm.model.runner.layers = run  # type: ignore[method-assign]
    torch.set_num_threads(3)
    stream = llm.stream_ids([5, 6, 7], max_new_tokens=20)
    next(stream), next(stream)
    assert numbers() == (3, 3)
    torch.set_num_threads(2)  # by the user, between two tokens
    next(stream), next(stream)
    assert numbers() == (2, 2)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(lambda: (next(stream), torch.get_num_threads())[1]).result(timeout=PATIENCE) == 2
    assert seen[1:] == [1] * len(seen[1:])  # the prompt is first
    held = [llm.stream_ids([5, 6, 7], max_new_tokens=20) for _ in range(2)]
    for one in held:
        next(one), next(one)
    with ThreadPoolExecutor(1) as other:
        other.submit(held.pop().close).result(timeout=PATIENCE)  # type: ignore[attr-defined]
        other.submit(lambda: (held.clear(), gc.collect())).result(timeout=PATIENCE)
        assert other.submit(torch.get_num_threads).result(timeout=PATIENCE) == 2
    del one
    assert numbers() == (2, 2)

    def fail(*args: Any) -> Tensor:
        raise MemoryError

    llm.model.runner.layers = fail  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        llm.generate("hello", max_new_tokens=4)
    with pytest.raises(MemoryError):
        llm.generate(["hello", "the"], max_new_tokens=4)
    assert numbers() == (2, 2)


def test_products_that_are_pytorchs_work_use_all_its_threads(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, kernels that have no AMX and do not widen multiply few rows. More rows are PyTorch's work."""
    monkeypatch.setattr(kernels, "has_tiles", lambda: False)
    monkeypatch.setattr(kernels, "widen", lambda: False)
    llm: Llama = loader.load(tiny_gguf, dtype="bfloat16", device="cpu")
    torch.set_num_threads(3)
    real, seen = F.linear, set()

    def linear(x: Tensor, *args: Any) -> Tensor:
        seen.add((x.shape[:-1].numel(), torch.get_num_threads()))
        return real(x, *args)

    monkeypatch.setattr(F, "linear", linear)
    llm.generate(["hello there"] * 8, max_new_tokens=4)
    assert (8, 3) in seen
    assert {threads for _, threads in seen} == {3}


# ----------------------------------------------------------------------------------------------------- the process
CHILD = """
import ctypes, faulthandler, mmap, os, resource, signal, sys, tempfile, threading, time
import torch
from llama.engine import kernels

torch.set_grad_enabled(False)
assert kernels.ready()
x, weight = torch.randn(5, 512).bfloat16(), torch.randn(2048, 512).bfloat16()
operators = torch.ops.clearllama

def product():
    return kernels.linear_bf16(x, weight, None)

def tasks():
    return {task: open(f"/proc/self/task/{task}/status").read() for task in os.listdir("/proc/self/task")}

def count():
    return len(tasks())

def limit(more):  # bytes of address space, beyond what is in use
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more, resource.RLIM_INFINITY))

kernels._library().clearllama_choose_threads(1, 0)
expected = product()
kernels._library().clearllama_choose_threads(3, 0)
"""


def check(forked: Forked, code: str) -> None:
    """Run code after CHILD in a new process, which must end within 30 seconds of CPU time without an error."""
    done = forked.run((), None, 30, code=CHILD + code)
    assert done.stderr.decode() == ""
    assert done.returncode == 0


@needs_linux
def test_threads_have_the_niceness_of_the_process_and_leave_signals_to_it(forked: Forked) -> None:
    """The exception are the signals of a fault, which the thread itself must handle."""
    code = """
before = set(tasks())
os.nice(7)
product()
new = set(tasks()) - before
assert len(new) == 2
def blocked(task, number):
    return bool(int(tasks()[task].split("SigBlk:")[1].split()[0], 16) >> number - 1 & 1)
while any(os.getpriority(os.PRIO_PROCESS, int(task)) != 7 or blocked(task, signal.SIGSEGV) for task in new):
    time.sleep(0.01)  # a thread that starts blocks every signal at first
for task in new:
    for number in {*range(1, 32)} - {signal.SIGKILL, signal.SIGSTOP}:
        assert blocked(task, number) == (number not in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL))
assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
"""
    check(forked, code)


@needs_linux
def test_a_fault_in_a_thread_is_reported(forked: Forked) -> None:
    """The second half of a weight is in a file that is truncated. It belongs to the second thread."""
    code = """
faulthandler.enable(sys.stderr)
kernels._library().clearllama_choose_threads(2, 0)
product()
with tempfile.NamedTemporaryFile() as file:
    file.truncate(1 << 24)
    big = torch.from_file(file.name, True, 1 << 23, dtype=torch.bfloat16).view(-1, 512)
    file.truncate(1 << 23)
    kernels.linear_bf16(x[:1], big, None)
"""
    done = forked.run((), None, 30, code=CHILD + code)
    assert done.returncode == -7
    assert b"Fatal Python error: Bus error" in done.stderr


REFUSALS = {
    "address space": "limit(1 << 20)",
    "processes": "os.getuid() or os.setuid(65534); resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))",
}


@needs_linux
@pytest.mark.parametrize("reason", REFUSALS)
def test_loops_run_on_the_threads_that_the_system_allows(reason: str, forked: Forked) -> None:
    code = f"""
before = count()
{REFUSALS[reason]}
for _ in range(3):
    assert torch.equal(product(), expected)
assert count() == before
assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
"""
    check(forked, code)


@needs_linux
def test_an_error_in_a_loop_is_raised_in_the_caller(forked: Forked) -> None:
    """The memory suffices for the result but not for what the threads need; their number does not matter."""
    code = """
q, k = torch.randn(1, 512, 16, 256), torch.randn(1, 1, 600, 256)  # 8 MB for q, the result, each of 3 parts, and each thread
ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: freed memory of this size is returned to the system
for threads in (1, 3, 3):
    kernels._library().clearllama_choose_threads(threads, 0)
    product()
    limit(35 << 20)
    try:
        kernels.attend(q, k, k, None)
    except MemoryError as error:
        assert "bad_alloc" in str(error)
    else:
        raise AssertionError("there was enough memory")
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
    assert torch.equal(product(), expected)
kernels._library().clearllama_choose_threads(1, 0)
y = kernels.attend(q, k, k, None)
kernels._library().clearllama_choose_threads(3, 0)
assert torch.equal(kernels.attend(q, k, k, None), y)
"""
    check(forked, code)


@needs_linux
@pytest.mark.parametrize("when", ["while they sleep", "soon after a loop", "in the middle of loops"])
def test_a_process_ends_whatever_its_threads_do(when: str, forked: Forked) -> None:
    """`exit` destroys the static objects of all libraries before the threads end."""
    code = f"""
def loops():
    kernels._library().clearllama_choose_threads(3, 0)
    while True:
        product()

product()
if {when!r} == "in the middle of loops":
    threading.Thread(target=loops, daemon=True).start()
time.sleep({0.0 if when == "soon after a loop" else 0.05})
ctypes.PyDLL(None).exit(0)  # with the lock of Python's interpreter, like the end of the program
"""
    check(forked, code)


def test_an_operator_that_refuses_its_arguments_leaves_the_threads_usable() -> None:
    kernels._library().clearllama_choose_threads(3, 0)
    linear = layer(random_blocks(40, 64, *KINDS[0]))
    for id in (40, -1, 2**40):
        with pytest.raises(IndexError, match="an id is not between 0 and 39"):
            kernels.rows_of_tiles(linear.tiles, torch.tensor([0, id]), (40, 64), linear.format)
    assert equal(OPERATORS["linear_bf16"](), OPERATORS["linear_bf16"]())


@needs_linux
def test_threads_without_work_use_no_processor_time(forked: Forked) -> None:
    code = """
product()
used = 1.0
while used >= 0.005:  # until the threads rest; the limit of CPU time ends threads that spin
    start = time.process_time()
    time.sleep(0.3)
    used = time.process_time() - start
"""
    check(forked, code)


@needs_linux
def test_a_process_that_is_stopped_goes_on_where_it_was(forked: Forked, tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    code = f"{CHILD}\nwhile not os.path.exists({str(stop)!r}): assert torch.equal(product(), expected)\n"
    pid = forked.start((), None, 30, code=code)
    for _ in range(4):
        time.sleep(0.1)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.1)
        os.kill(pid, signal.SIGCONT)
    stop.touch()
    done = forked.finish()
    assert done.stderr.decode() == ""
    assert done.returncode == 0
