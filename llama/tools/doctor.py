"""What this machine has for the program, and whether the program computes rightly on it.

What needs no torch is found out here. The rest is asked of a child: a driver that hangs, a library that aborts, an
instruction that this processor lacks end the child, and that is a line of the report as any other. Each question is a
probe of its own; after one that ended the child, another child goes on with the next.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .. import __version__
from ..errors import LlamaError, UsageError
from ..system import limits
from ..system.folders import cache_folder

if TYPE_CHECKING:
    import torch

    from ..model import Transformer

Status = Literal["ok", "note", "fail"]
SECONDS = 10.0  # for all of the self-test
ANSWER = 60.0  # for a probe of the machine; the first one imports torch, which takes long from a cold disk
MIB, GIB = 2**20, 2**30
FILES = 20_000  # a folder with more is not counted to the end


@dataclasses.dataclass(frozen=True)
class Finding:
    """One line: what was looked at, what was found, and what to do about it if it is no good."""

    status: Status
    group: str
    item: str
    told: str
    remedy: str = ""


class NotRun(Exception):
    """A part of the self-test can't be done here, and why."""


class Wrong(Exception):
    """A part of the self-test gave other numbers than it should."""


Probe = Callable[[], Iterator[Finding]]


def examine(self_test: bool = True, seconds: float = SECONDS) -> Iterator[Finding]:
    """Every finding, as it comes. seconds: for the self-test. Nothing is written but into the cache folder."""
    for group, probe in ALONE.items():
        yield from guarded(group, probe)
    try:
        limits.check_import()
    except LlamaError as error:
        yield Finding("fail", "memory", "addresses", str(error).split("; ")[0], str(error).split("; ")[-1])
        return
    if importlib.util.find_spec("torch") is None:
        return  # which the versions have said
    yield from in_children([*PROBES, *(("build", *TESTS) if self_test else ())], seconds)


def guarded(group: str, probe: Probe) -> Iterator[Finding]:
    """What a probe finds; its own failure is a finding too."""
    try:
        yield from probe()
    except Exception as error:
        yield Finding("fail", group, "probe", f"could not be done: {type(error).__name__}: {_short(error)}")


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


# ------------------------------------------------------------------------------------------------------- versions
def versions() -> Iterator[Finding]:
    """This package, Python, and what it depends on, against the floors that the package names."""
    package = Path(__file__).resolve().parents[1]
    yield Finding("ok", "versions", "clearllama", f"{__version__} in {package}")
    wanted, needs = requirements(package.parent)
    yield _version("Python", platform.python_version(), wanted, "install a newer Python")
    if not needs:
        told = "not installed with pip, so what it depends on is not known"
        yield Finding("note", "versions", "dependencies", told, "pip install -e . in the checkout")
    for need in needs:
        name, bounds, extra = parse_requirement(need)
        if extra not in (None, "hub", "study"):
            continue
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if extra:
                told = f"not installed; {EXTRAS[extra]} needs it"
                yield Finding("note", "versions", name, told, f"pip install 'clearllama[{extra}]'")
            else:
                yield Finding("fail", "versions", name, f"not installed, expected {bounds}", f"pip install '{need}'")
            continue
        yield _version(name, found, bounds, f"pip install '{name}{bounds}'")


EXTRAS = {"hub": "fetching ORG/NAME", "study": "drawing the figures of the study"}


def requirements(checkout: Path) -> tuple[str, list[str]]:
    """What Python and which packages are wanted: from pyproject.toml in a checkout, else from the installed package."""
    try:
        import tomllib

        project = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        if project["name"] == "clearllama":
            extras = project["optional-dependencies"].items()
            more = [f'{need}; extra == "{extra}"' for extra, needs in extras for need in needs]
            return project["requires-python"], [*project["dependencies"], *more]
    except (OSError, KeyError, ValueError):
        pass
    try:
        metadata = importlib.metadata.metadata("clearllama")
        return metadata["Requires-Python"] or "", importlib.metadata.requires("clearllama") or []
    except importlib.metadata.PackageNotFoundError:
        return "", []


def parse_requirement(text: str) -> tuple[str, str, str | None]:
    """'torch<2.14,>=2.10; extra == "x"' -> ('torch', '<2.14,>=2.10', 'x')."""
    need, _, marker = text.partition(";")
    name = re.match(r"[\w.-]+", need.strip())
    extra = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", marker)
    return (name[0] if name else need), need.strip()[len(name[0]) if name else 0 :].strip(), extra[1] if extra else None


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version: '2.13.0+cpu' -> (2, 13)."""
    match = re.match(r"\d+(\.\d+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _version(name: str, found: str, bounds: str, remedy: str) -> Finding:
    """A version is held against '>=2.10,<2.14'."""
    for bound in filter(None, bounds.replace(" ", "").split(",")):
        if bound.startswith(">=") and release(found) < release(bound[2:]):
            return Finding("fail", "versions", name, f"{found} is below {bound[2:]}", remedy)
        if bound.startswith("<") and release(found) >= release(bound[1:]):
            told = f"{found} is newer than what is tested, below {bound[1:]}"
            return Finding("note", "versions", name, told, remedy)
    return Finding("ok", "versions", name, f"{found}, expected {bounds}" if bounds else found)


# -------------------------------------------------------------------------------------------------------- machine
def machine() -> Iterator[Finding]:
    """The system, the processor, the cores, and the variables that change what the program does."""
    yield Finding("ok", "machine", "system", platform.platform())
    yield Finding("ok", "machine", "processor", f"{processor()}, {platform.machine()}")
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding("ok", "machine", "cores", f"{os.cpu_count()}, {usable} of them for this process")
    names = [n for n in os.environ if n.startswith("CLEARLLAMA_") or n in SETTINGS]
    told = ", ".join(f"{name}={os.environ[name]}" for name in sorted(names))
    yield Finding("ok", "machine", "settings", told or "no environment variable changes what the program does")


SETTINGS = ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "HF_HUB_OFFLINE", "HF_HOME", "HF_HUB_CACHE", "CXX")


def processor() -> str:
    """The name of the processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model") and value.strip():
                return value.strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


# ---------------------------------------------------------------------------------------------------- cache folders
def caches() -> Iterator[Finding]:
    """The program's cache folder and that of the Hugging Face hub."""
    from ..hub.named import MODELS, find
    from ..hub.repository import has_library

    folder = cache_folder()
    status, told, remedy = folder_told(folder)
    yield Finding(status, "cache", "folder", told, remedy and f"{remedy}, or set CLEARLLAMA_CACHE to another folder")
    for name in MODELS:
        here = find(name)
        lacks = "not here; the first run fetches it"
        yield Finding("ok", "cache", name, lacks if here is None else f"{here}, {size_told(here.stat().st_size)}")
    if not has_library():
        told = "huggingface_hub is not installed, so ORG/NAME can't be pulled"
        yield Finding("note", "cache", "hub", told, "pip install 'clearllama[hub]'")
        return
    from huggingface_hub import constants

    theirs = Path(constants.HF_HUB_CACHE)
    status, told, remedy = folder_told(theirs)
    models = sorted(
        p.name.removeprefix("models--").replace("--", "/") for p in _entries(theirs) if "models--" in p.name
    )
    listed = f"; {len(models)} models: {', '.join(models[:20])}{', ...' * (len(models) > 20)}" if models else ""
    yield Finding(status, "cache", "hub", told + listed, remedy and f"{remedy}, or set HF_HOME to another folder")


def folder_told(folder: Path) -> tuple[Status, str, str]:
    """A folder's size and whether it can be written; no trace is left in it."""
    there = folder
    while not there.exists() and there != there.parent:
        there = there.parent
    writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    if folder.is_dir() and writable:
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError:
            writable = False
    size, whole = _size(folder)
    state = f"{size_told(size)}{'' if whole else ' and more'}" if folder.is_dir() else "not there yet"
    if not writable:
        return "note", f"{folder}: {state}, can't be written, so nothing is kept there", f"make {there} writable"
    free = shutil.disk_usage(there).free
    return "ok", f"{folder}: {state}, writable, {size_told(free)} free on its disk", ""


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _size(folder: Path) -> tuple[int, bool]:
    """Bytes below a folder, links not followed, and whether all of it was counted."""
    total = seen = 0
    for root, _, names in os.walk(folder):
        for name in names:
            seen += 1
            if seen > FILES:
                return total, False
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except OSError:
                continue
    return total, True


def size_told(size: int) -> str:
    """Bytes for people."""
    return f"{size / GIB:,.1f} GiB" if size >= GIB else f"{size / MIB:,.0f} MiB"


# ----------------------------------------------------------------------------------------------- what torch can tell
def memory() -> Iterator[Finding]:
    """What is free, and which limit says so."""
    from ..system.memory import free_memory, rooms

    found = sorted(rooms("cpu"), key=lambda room: room.bytes)
    if not found:
        yield Finding("note", "memory", "free", "this system does not tell what is free")
    for i, room in enumerate(found):
        binds = " (this limit binds)" if i == 0 and len(found) > 1 else ""
        yield Finding("ok", "memory", "free", f"{size_told(room.bytes)} {room.told}{binds}")
    least = free_memory("cpu")
    if least is not None and least < 256 * MIB:
        told = f"{size_told(least)} is less than the default model takes"
        yield Finding("note", "memory", "least", told, "end other programs, or raise the limit")


def devices() -> Iterator[Finding]:
    """What torch can compute on."""
    import torch

    dtype = "bfloat16" if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported() else "float32"
    yield Finding("ok", "devices", "cpu", f"{torch.get_num_threads()} threads, {dtype} unless asked otherwise")
    built, there = torch.version.cuda or torch.version.hip, torch.cuda.is_available()
    if there:
        for i in range(torch.cuda.device_count()):
            yield from guarded("devices", lambda i=i: _cuda(i))  # type: ignore[misc]
    elif built and _nvidia():
        told = f"this torch is made for CUDA {built} and sees no GPU, but a driver is there"
        yield Finding("note", "devices", "cuda", told, "look at nvidia-smi and CUDA_VISIBLE_DEVICES")
    elif _nvidia():
        told = "a driver for NVIDIA's GPUs is there, and this torch is made for CPUs only"
        yield Finding(
            "note", "devices", "cuda", told, "install torch for CUDA: https://pytorch.org/get-started/locally/"
        )
    else:
        yield Finding("ok", "devices", "cuda", f"none{f'; torch is made for CUDA {built}' if built else ''}")
    if torch.backends.mps.is_available():
        yield Finding("ok", "devices", "mps", "there")


def _nvidia() -> bool:
    return os.path.exists("/proc/driver/nvidia/version") or os.path.exists("/dev/nvidiactl")


def _cuda(i: int) -> Iterator[Finding]:
    import torch

    about = torch.cuda.get_device_properties(i)
    free, total = torch.cuda.mem_get_info(i)
    with torch.cuda.device(i):
        bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    told = (
        f"{about.name}, capability {about.major}.{about.minor}, {size_told(free)} of {size_told(total)} free,"
        f" {'bfloat16' if bf16 else 'no bfloat16, so float16 unless asked otherwise'}"
    )
    yield Finding("ok", "devices", f"cuda:{i}", told)


def instructions() -> dict[str, bool]:
    """Of the processor's extensions those that matter here, as torch sees them."""
    import torch

    names = {
        "AVX2": "_is_avx2_supported",
        "AVX-512": "_is_avx512_supported",
        "VNNI": "_is_vnni_supported",
        "BF16": "_is_avx512_bf16_supported",
        "AMX": "_is_amx_tile_supported",
    }
    return {name: bool(getattr(torch.cpu, ask, lambda: False)()) for name, ask in names.items()}


def kernels_and_compiler() -> Iterator[Finding]:
    """The processor's instructions, the C++ kernels, Triton, and the compiler that torch.compile takes."""
    import torch

    from ..engine import kernels

    told = ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in instructions().items())
    yield Finding("ok", "kernels", "processor", told)
    compiler = kernels.compiler()
    command = compiler.split()[0] if compiler else ""
    version = _first_line([command, "--version"]) if command else None
    form = kernels.pick_form()
    if os.environ.get("CLEARLLAMA_KERNELS") == "off":
        yield Finding("note", "kernels", "C++", "switched off by CLEARLLAMA_KERNELS=off", "unset it for speed")
    elif form is None:
        yield Finding("note", "kernels", "C++", "there is no form for this processor; torch's own operators run")
    elif (built := kernels.built(form)) is not None:
        yield Finding("ok", "kernels", "C++", f"{form}, built: {built}")
    elif version is None:
        told = f"{form}, not built, and there is no C++ compiler: torch's own operators run, which are slower"
        yield Finding("note", "kernels", "C++", told, NO_COMPILER)
    else:
        yield Finding("ok", "kernels", "C++", f"{form}, not built yet: the first run does it")
    if importlib.util.find_spec("triton"):
        yield Finding("ok", "kernels", "Triton", importlib.metadata.version("triton"))
    elif torch.cuda.is_available():
        told = "not installed; the kernels for CUDA need it"
        yield Finding("note", "kernels", "Triton", told, "pip install triton")
    else:
        yield Finding("ok", "kernels", "Triton", "not installed; only CUDA needs it")
    if version is None:
        told = f"{compiler} does not run" if compiler else "none of c++, g++, clang++ is there, so --compile can't work"
        yield Finding("note", "compiler", "C++", told, NO_COMPILER)
    else:
        yield Finding("ok", "compiler", "C++", f"{compiler}: {version}")


def build() -> Iterator[Finding]:
    """Build the C++ kernels where that has not been done: the self-test takes them, and its time is short."""
    from ..engine import kernels

    form, started = kernels.pick_form(), time.monotonic()
    if form is None or kernels.built(form) is not None or kernels.compiler() is None:
        return
    try:
        made = kernels.build(form)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        told = f"can't be built, so torch's own operators run, which are slower: {_short(error)}"
        yield Finding("note", "kernels", "build", told, "see what the compiler lacks, or set CLEARLLAMA_CACHE")
        return
    yield Finding("ok", "kernels", "build", f"built in {time.monotonic() - started:.0f} s: {made}")


NO_COMPILER = "install a C++ compiler (g++ or clang++), or name it in CXX"


def _first_line(command: Sequence[str]) -> str | None:
    """The first line that a program says; None where it does not run."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=10, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.decode(errors="replace").splitlines()
    return None if done.returncode else (lines[0] if lines else "no version")


# ------------------------------------------------------------------------------------------------------ the self-test
def tiny_model(rope: str = "complex", attention: str = "sdpa") -> Transformer:
    """A random model of 0.4 million parameters, the same each time, in float32."""
    import torch

    from ..config import ModelConfig
    from ..model import Transformer
    from ..weights import expected_shapes, to_layout

    config = ModelConfig(
        dim=128, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=256, vocab_size=320, max_seq_len=256
    )
    model = Transformer(config, rope, attention=attention).requires_grad_(False).eval()
    draw, state = torch.Generator().manual_seed(0), {}
    for name, shape in expected_shapes(config).items():
        noise = torch.randn(shape, generator=draw)
        weight = 1 + 0.2 * noise if len(shape) == 1 else noise / shape[-1] ** 0.5
        state[name] = to_layout(name, weight, config.head_dim, "interleaved", model.rope.layout)
    model.load_state_dict(state)
    return model


def _tokens(length: int) -> torch.Tensor:
    """(1, length) ids."""
    import torch

    return torch.randint(320, (1, length), generator=torch.Generator().manual_seed(1))


def _hold(what: str, got: torch.Tensor, expected: torch.Tensor, tolerance: float) -> float:
    """The largest difference, as a share of the largest number. Raises Wrong beyond the tolerance."""
    off = float((got.double() - expected.double()).abs().max() / expected.double().abs().max())
    if not off <= tolerance:  # NaN is above everything
        raise Wrong(f"{what} are off by {off:.1e} of the largest, expected at most {tolerance:.0e}")
    return off


def check_rope() -> str:
    """The five forms of the rotation in a model, and one of them against Python's complex numbers."""
    import cmath

    import torch

    from .. import rope

    x = torch.randn(1, 3, 2, 8, generator=torch.Generator().manual_seed(2))  # (B, T, H, D)
    positions = [0, 1, 200]
    turned, _ = rope.apply_rotary_emb(x, x, rope.precompute_freqs_cis(8, 201)[positions])
    for t, position in enumerate(positions):
        for pair in range(4):
            a, b = (float(v) for v in x[0, t, 1, 2 * pair : 2 * pair + 2])
            by_hand = complex(a, b) * cmath.exp(1j * position * 10000.0 ** (-2 * pair / 8))
            expected = torch.tensor([by_hand.real, by_hand.imag], dtype=torch.double)
            _hold("turned pairs", turned[0, t, 1, 2 * pair : 2 * pair + 2], expected, 1e-4)
    tokens = _tokens(40)
    expected = tiny_model("complex")(tokens)
    off = [_hold(f"logits of the form {form}", tiny_model(form)(tokens), expected, 1e-4) for form in rope.FORMS]
    return f"{len(off)} forms give the same logits, {f'within {max(off):.0e}' if max(off) else 'bit for bit'}"


def check_cache() -> str:
    """A text in one pass, against pieces behind a cache, down to single tokens."""
    import torch

    from ..engine.runtime import pick_attention

    model = tiny_model(attention=pick_attention(torch.device("cpu")))
    tokens = _tokens(48)
    cache = model.new_cache(64)
    cuts = [0, 20, 37, *range(38, 49)]
    parts = [model(tokens[:, a:b], cache=cache) for a, b in itertools.pairwise(cuts)]
    off = _hold("logits behind a cache", torch.cat(parts, 1), tiny_model()(tokens), 1e-4)
    return f"cached and uncached logits are the same, within {off:.0e}"


def check_integers() -> str:
    """Weights of 8 and 4 bits: the layer that computes with them against the numbers that they stand for."""
    import torch

    from ..engine import kernels
    from ..engine import linears as quant

    draw = torch.Generator().manual_seed(3)
    weight, off = torch.randn(64, 128, generator=draw), 0.0  # (N, K)
    ready, form = kernels.ready(), kernels.pick_form()
    if not ready and form is not None and kernels.built(form) is not None:
        raise Wrong("the C++ kernels are built and can't be loaded")
    schemes = ("int8", "int4") if ready else ("int8-row", "int4-all")
    ran = []
    for name in schemes:
        scheme = quant.pick_scheme(name)
        layer = quant.linear_of(quant.rounded(lambda rows: weight[rows], (64, 128), scheme), torch.device("cpu"))
        if layer is None:
            continue
        numbers = quant.quantize(weight, scheme).weight.double()
        _hold(f"weights in {name}", numbers, weight, 0.15 if scheme.bits == 4 else 0.02)
        for rows in (1, 7):
            x = torch.randn(rows, 128, generator=draw)
            off = max(off, _hold(f"products in {name}", layer(x), x.double() @ numbers.T, 0.03))
        ran.append(name)
    if not ran:
        raise NotRun("neither the C++ kernels nor torch have such layers on this processor")
    if ready:
        x = torch.randn(2, 128, generator=draw).bfloat16()
        plain = x.double() @ weight.bfloat16().double().T
        _hold("products in bfloat16", kernels.linear_bf16(x, weight.bfloat16(), None), plain, 0.02)
    return f"{', '.join(ran)} by {'the C++ kernels' if ready else 'torch'} as by plain arithmetic, within {off:.0e}"


def check_safetensors() -> str:
    """A checkpoint written by the safetensors library and read back by the loader: the same bits, the same logits."""
    import torch
    from safetensors.torch import save_file

    from .. import loader
    from ..checkpoint import open_checkpoint
    from ..checkpoint.base import to_file_name
    from ..checkpoint.huggingface import LAYERS, NAMES
    from ..rope import to_half_layout

    model = tiny_model()
    config = model.config
    state = {}
    for name, tensor in model.state_dict().items():
        turned = name.endswith(("wq.weight", "wk.weight"))
        stored = to_half_layout(tensor, config.head_dim) if turned else tensor
        state[to_file_name(name, NAMES, LAYERS)] = stored.contiguous()
    document = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.hidden_dim,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_seq_len,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }
    try:
        with tempfile.TemporaryDirectory(prefix="clearllama-doctor-") as work:
            (Path(work) / "config.json").write_text(json.dumps(document))
            save_file(state, Path(work) / "model.safetensors", metadata={"format": "pt"})
            read = loader.build(open_checkpoint(work), "cpu", "float32")
            theirs = read.state_dict()
            for name, tensor in model.state_dict().items():
                if not torch.equal(tensor, theirs[name]):
                    raise Wrong(f"{name} was read otherwise than it was written")
            _hold("logits of what was read", read(_tokens(20)), model(_tokens(20)), 0)
            del read, theirs
    except OSError as error:
        raise NotRun(f"there is no folder for temporary files ({_short(error)}); name one in TMPDIR") from None
    return f"{len(state)} tensors written and read back, bit for bit"


def check_devices() -> str:
    """The best device there is against the CPU."""
    from ..engine.runtime import pick_device

    device = pick_device()
    if device.type == "cpu":
        return "nothing to compare: the CPU is the only device"
    tokens = _tokens(40)
    off = _hold(f"logits on {device}", tiny_model().to(device)(tokens.to(device)).cpu(), tiny_model()(tokens), 1e-2)
    return f"{device} gives the CPU's logits, within {off:.0e}"


def check_compile() -> str:
    """The compiled decoding step against the block's own code."""
    import torch

    from ..engine import compiled, kernels

    if kernels.compiler() is None:
        raise NotRun("there is no C++ compiler")
    folder = cache_folder()
    if folder_told(folder)[0] != "ok":
        raise NotRun(f"what is compiled is kept in {folder}, which can't be written")
    kernels.ready()
    tokens, rows = _tokens(12), []
    try:
        eager, fast = tiny_model("real"), compiled.compile_(tiny_model("real"))
    except UsageError as error:  # no answer would be wrong, but with a compiler and a folder it ought to work
        raise Wrong(str(error)) from None
    for model in (eager, fast):
        cache = model.new_cache(32)
        steps = [model(tokens[:, :4], cache=cache), *(model(tokens[:, t : t + 1], cache=cache) for t in range(4, 12))]
        rows.append(torch.cat(steps, 1))
    off = _hold("logits of compiled steps", rows[1], rows[0], 1e-4)
    return f"compiled and eager logits are the same, within {off:.0e}"


def _as_probe(name: str, check: Callable[[], str]) -> Probe:
    def probe() -> Iterator[Finding]:
        import torch

        try:
            with torch.inference_mode():
                yield Finding("ok", "self-test", name, check())
        except NotRun as why:
            yield Finding("note", "self-test", name, f"not run: {why}")
        except Wrong as why:
            yield Finding("fail", "self-test", name, str(why), REPORT)
        except Exception as error:
            yield Finding("fail", "self-test", name, f"{type(error).__name__}: {_short(error)}", REPORT)

    return probe


REPORT = "don't trust what is generated here; reinstall torch and clearllama, try CLEARLLAMA_KERNELS=off, report it"
ALONE: dict[str, Probe] = {"versions": versions, "machine": machine, "cache": caches}
PROBES: dict[str, Probe] = {"memory": memory, "devices": devices, "kernels": kernels_and_compiler}
BUILD: dict[str, Probe] = {"build": build}
TESTS: dict[str, Probe] = {  # the one that takes longest last
    name: _as_probe(name, check)
    for name, check in (
        ("rope", check_rope),
        ("cache", check_cache),
        ("safetensors", check_safetensors),
        ("integers", check_integers),
        ("device", check_devices),
        ("compile", check_compile),
    )
}


# ------------------------------------------------------------------------------------------------------ the children
def serve(names: Sequence[str]) -> None:
    """The child: run probes and write a line for the beginning of each, and one for each finding."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is none of the answer
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # temporary files are cleared on the way out
    for name in names:
        print(json.dumps({"begin": name}), file=out, flush=True)
        for finding in guarded(name, (PROBES | BUILD | TESTS)[name]):
            print(json.dumps(dataclasses.asdict(finding)), file=out, flush=True)


SERVE = "from llama import doctor; doctor.serve(NAMES)"


class Child:
    """A process that serves probes, and what it says, line by line."""

    def __init__(self, names: Sequence[str]):
        paths = [os.path.abspath(path) for path in sys.path]
        code = f"import sys; sys.path[:] = {paths!r}; {SERVE.replace('NAMES', repr(list(names)))}"
        # Of its own session, so that the compiler that it may have started is ended with it.
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=hasattr(os, "setsid"),
        )
        self.lines: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.said: list[str] = []
        self.readers = [threading.Thread(target=read, daemon=True) for read in (self._read, self._read_errors)]
        for reader in self.readers:
            reader.start()

    def next(self, deadline: float) -> dict[str, Any] | None:
        """The next line; None at the end, or when it is too late for one."""
        try:
            return self.lines.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None

    def _read(self) -> None:
        for line in self.process.stdout or ():
            if line.startswith(b"{"):
                self.lines.put(json.loads(line))
        self.lines.put(None)

    def _read_errors(self) -> None:
        for line in self.process.stderr or ():
            self.said = [*self.said[-20:], line.decode(errors="replace").strip()]

    def end(self, grace: float = 0) -> int | None:
        """End it and all that it has started. grace: seconds in which it may end by itself. Returns its exit code."""
        for number in (0, signal.SIGTERM, getattr(signal, "SIGKILL", signal.SIGTERM)):
            if number:
                self._signal(number)
            try:
                self.process.wait(5 if number else grace)
                break
            except subprocess.TimeoutExpired:
                continue
        if hasattr(os, "killpg"):
            self._signal(signal.SIGKILL)  # a compiler that it has left
        for reader in self.readers:
            reader.join(2)
        return self.process.poll()

    def _signal(self, number: int) -> None:
        try:
            if hasattr(os, "killpg"):
                os.killpg(self.process.pid, number)
            else:
                self.process.send_signal(number)
        except OSError:
            pass

    def told(self, code: int | None) -> str:
        """How it ended, for people, with the last that it said."""
        how = "can't be ended" if code is None else f"exit code {code}"
        if code is not None and code < 0:
            how = f"ended by {signal.Signals(-code).name}"
        last = next((line for line in reversed(self.said) if line), "")
        return f"{how}{f' ({last[:200]})' * bool(last)}"


def in_children(names: Sequence[str], seconds: float) -> Iterator[Finding]:
    """What the probes of these names find, in a child each time one broke off; `seconds` for all of the self-test."""
    left, tests_end = list(names), None
    while left:
        started = time.monotonic()
        child, current, deadline = Child(left), None, started + ANSWER
        try:
            while (line := child.next(deadline)) is not None:
                if "begin" not in line:
                    yield Finding(**line)
                    continue
                if tests_end is not None and current is None:
                    tests_end += time.monotonic() - started  # importing torch once more is no part of the self-test
                current = str(line["begin"])
                left.remove(current)
                deadline = time.monotonic() + ANSWER
                if current in TESTS:
                    tests_end = tests_end or time.monotonic() + seconds
                    deadline = tests_end
            late = time.monotonic() > deadline
            code = child.end(grace=0 if late else 5)
        finally:
            child.end()
        if code == 0 and not late:
            return
        if late and current in TESTS:
            told = f"not run: not done within the {seconds:g} s of the self-test"
            for name in (current, *left):
                yield Finding("note", "self-test", name, told, "--seconds 60 gives it more; what is compiled is kept")
            return
        told = f"no answer within {ANSWER:g} s" if late else f"the process broke off: {child.told(code)}"
        test = current in TESTS
        yield Finding("fail", "self-test" if test else "torch", current or "import", told, REPORT if test else BROKEN)
        if current is None:
            return  # another child would fare no better


BROKEN = "see whether python -c 'import torch' works; if not, reinstall torch"
