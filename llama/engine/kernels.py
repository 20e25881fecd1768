"""The C++ kernels in cpp/: compiled once for this processor, stored in the cache folder, loaded as torch operators.

    linear_tiles       multiply x by a packed weight in 2 to 8 bits
    rows_of_tiles      dequantize some rows of a packed weight
    quantize_to_tiles  quantize a weight to 4 or 8 bits and pack it
    pack_blocks        pack the blocks of a GGUF file
    linear_bf16        multiply x by a weight in 16 bits: a few rows; with AMX, or if the kernels widen, any number
    attend             attention
    layers             all layers of a model (cpu_runner.py)

The sources include only the stable headers of torch, and several cores compile them, in ten to twenty seconds. Without
a compiler, or on a machine without a form, `ready` logs the reason once and the callers use PyTorch's operators.
CLEARLLAMA_KERNELS overrides the form: off, or one of FORMS.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..errors import UsageError
from ..quant.groups import GroupFormat
from ..system.folders import cache_folder, load_code
from ..system.memory import read
from .runtime import end_openmp_threads

LOG = logging.getLogger(__name__)
SOURCE = Path(__file__).parent / "cpp" / "kernels.cpp"  # compiled with the other .cpp files in its folder

# Form of the kernels -> compiler flags.
AVX512 = (
    "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx512bf16 -mavx2 -mfma -mf16c -mprefer-vector-width=512"
)
FORMS = {
    "amx": f"{AVX512} -mamx-tile -mamx-bf16",
    "avx512": AVX512,
    "avx2": "-mavx2 -mfma -mf16c",
    "neon_bf16": "-march=armv8.2-a+dotprod+i8mm+bf16",
    "neon": "-march=armv8.2-a+dotprod",
}
WIDENING = ("avx2", "neon")  # forms without instructions for bfloat16
CPUINFO = Path("/proc/cpuinfo")
OPERATORS = ("linear_tiles", "rows_of_tiles", "quantize_to_tiles", "pack_blocks", "linear_bf16", "attend", "layers")
COMMON = "-std=c++20 -O3 -fno-math-errno -fPIC -fvisibility=hidden -pthread -w"


def pick_form() -> str | None:
    """The form for this processor, None if there is none. CLEARLLAMA_KERNELS overrides it."""
    wanted = os.environ.get("CLEARLLAMA_KERNELS", "auto")
    if wanted not in ("auto", "off", *FORMS):
        raise UsageError(f"CLEARLLAMA_KERNELS is {wanted!r}; expected auto, off, {', '.join(FORMS)}")
    if wanted == "amx":
        torch.cpu._init_amx()
    if wanted != "auto":
        return None if wanted == "off" else wanted
    if platform.system() != "Linux":
        return None
    if platform.machine() == "aarch64":
        found = arm_features()
        return None if not found["dotprod"] else "neon_bf16" if found["i8mm"] and found["bf16"] else "neon"
    cpu = torch.cpu
    if platform.machine() != "x86_64" or not cpu._is_avx2_supported():
        return None
    if cpu._is_avx512_supported() and cpu._is_vnni_supported() and cpu._is_avx512_bf16_supported():
        # _init_amx asks Linux for the tile registers, which a process has only on request.
        return "amx" if cpu._is_amx_tile_supported() and cpu._init_amx() else "avx512"
    return "avx2"


def arm_features() -> dict[str, bool]:
    """The instructions of ARM processors that the kernels use, and whether Linux lists them."""
    lines = read(CPUINFO).splitlines()
    listed = next((line.partition(":")[2].split() for line in lines if line.startswith("Features")), [])
    return {name: flag in listed for name, flag in (("dotprod", "asimddp"), ("i8mm", "i8mm"), ("bf16", "bf16"))}


def why_none() -> str:
    """Why `pick_form` finds no form for this machine."""
    system, machine = platform.system(), platform.machine()
    if system != "Linux":
        return f"they need Linux, and this is {'macOS' if system == 'Darwin' else system}"
    needed = {"x86_64": "AVX2", "aarch64": "the dot product instructions (asimddp)"}.get(machine)
    if needed is None:
        return f"they need an x86_64 or aarch64 processor, and this one is {machine}"
    return f"they need {needed}, which this processor does not have"


def ready() -> bool:
    """Whether the kernels can be called. The first call builds them, and logs the reason if that fails."""
    return _library() is not None


def has_tiles() -> bool:
    """Whether the kernels use the tile registers of AMX: then they multiply many rows by a bfloat16 weight as well."""
    return ready() and pick_form() == "amx"


def widen() -> bool:
    """Whether the kernels widen 16-bit weights to float32 as they read them: on processors without bfloat16.

    Then they multiply any number of rows, in any dtype, by a weight in bfloat16 or float16.
    """
    return ready() and pick_form() in WIDENING


def _library() -> ctypes.CDLL | None:
    with _LOCK:  # several threads create layers
        return _load()


_LOCK = threading.RLock()
if hasattr(os, "register_at_fork"):  # a child could wait for ever for a thread that is loading the kernels
    os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)


@functools.cache
def _load() -> ctypes.CDLL | None:
    form = pick_form()
    if form is None:
        if os.environ.get("CLEARLLAMA_KERNELS") != "off":
            _warn(why_none())
        return None
    try:
        library = load(form)
    except (OSError, RuntimeError, UsageError, ImportError, subprocess.SubprocessError) as error:
        _warn(str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__)
        return None
    library.clearllama_choose_threads.argtypes = ctypes.c_int64, ctypes.c_int64
    library.clearllama_threads.restype = ctypes.c_int64
    return library


def sources() -> str:
    """The text of all C++ files."""
    return "\n".join(path.read_text() for path in sorted(SOURCE.parent.iterdir()))


def compiler() -> str | None:
    """The command of this machine's C++ compiler, None if there is none. CXX overrides it."""
    return os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)


def built(form: str) -> Path | None:
    """The library for a form if the cache folder has it, otherwise None."""
    path = _location(form)
    return path if path.is_file() else None


def _location(form: str) -> Path:
    """The path of the library for a form. The name contains a hash of everything it is built from."""
    parts = "\0".join((sources(), *_flags(form), torch.__version__))
    return cache_folder() / "kernels" / f"{form}-{hashlib.sha256(parts.encode()).hexdigest()[:16]}.so"


def _flags(form: str) -> list[str]:
    return [*COMMON.split(), *FORMS[form].split()]


@functools.cache
def load(form: str) -> ctypes.CDLL:
    """Load the library for a form. It is compiled if the cache folder does not have it.

    Raises OSError, RuntimeError, UsageError or SubprocessError on failure.
    """
    return load_code(_location(form), functools.partial(_build, form), _load_library)


def _build(form: str, library: Path) -> None:
    """Compile the library for a form. Raises OSError, RuntimeError or SubprocessError on failure."""
    root, command = Path(torch.__file__).parent, compiler()
    if command is None:
        raise RuntimeError("no C++ compiler found (c++, g++, clang++); install one, or set CXX to its command")
    LOG.info("clearllama: compiling the C++ kernels, which can take a minute; later runs reuse them")
    flags, link = [*command.split(), *_flags(form)], [f"-L{root / 'lib'}", "-ltorch_cpu", f"-Wl,-rpath,{root / 'lib'}"]
    objects = [library.with_name(f"{source.stem}.o") for source in sorted(SOURCE.parent.glob("*.cpp"), reverse=True)]
    # When this process leaves `with` or dies, the pipe closes, and the shell kills the compilers and their children
    script = "exec 3<&0; { read end <&3; kill -KILL 0; } 2> /dev/null &\n"
    for i, made in enumerate(objects):  # one shell runs the compilers, each on its own core
        compile = [*flags, f"-I{root / 'include'}", "-c", f"{SOURCE.parent / made.stem}.cpp", "-o", str(made)]
        script += f"{shlex.join(compile)} & p{i}=$!\n"
    script += "".join(f"wait $p{i} && " for i in range(len(objects)))
    script += shlex.join([*flags, "-shared", *map(str, objects), "-o", str(library), *link])
    alive, ours = map(os.fdopen, os.pipe(), "rw")
    process = subprocess.Popen(
        ["sh", "-c", script],
        stdin=alive,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        errors="replace",
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(library.parent)},  # a killed compiler leaves its files
    )
    with alive, process, ours:
        _, output = process.communicate(timeout=300)
    if process.returncode or not library.is_file():
        reason = next((line for line in output.splitlines() if "error" in line), f"exit code {process.returncode}")
        raise RuntimeError(f"{command} could not build {SOURCE.name}: {reason.strip()}")


def _load_library(path: str) -> ctypes.CDLL:
    """Load a library, which registers the operators. Raises OSError if it does not register them.

    torch.ops.load_library is not used: it would resolve the path to a name that may now refer to another file.
    """
    try:
        library = ctypes.CDLL(path)
    except OSError as error:
        raise OSError(f"the compiled library can't be loaded: {error}") from error
    if missing := [name for name in OPERATORS if not hasattr(torch.ops.clearllama, name)]:
        raise OSError(
            f"the compiled library lacks {', '.join(missing)}; set CXX to a C++ compiler, if {compiler()} is not one"
        )
    return library


def _warn(reason: str) -> None:
    LOG.warning("clearllama: the C++ kernels are not available, so PyTorch's slower operators run: %s", reason)


# ----------------------------------------------------------------------------------------------------- the threads
@contextlib.contextmanager
def own_threads() -> Iterator[None]:
    """Within this context, the kernels use all of PyTorch's threads, and PyTorch's own operators use one.

    PyTorch's threads wait for work by spinning, so they would take the cores from the kernels' threads; threads that
    still spin are ended. Both numbers of threads belong to the calling thread. The context changes nothing without the
    kernels, or inside another such context.
    """
    threads = torch.get_num_threads()
    library = None if threads == 1 else _library()
    if library is None:
        yield
        return
    choose = library.clearllama_choose_threads  # both numbers in one call, which a signal can't interrupt
    try:
        choose(threads, 1)
        end_openmp_threads()  # takes 0.1 ms if there are such threads, otherwise 1 us
        yield
    finally:
        choose(0, threads)


@contextlib.contextmanager
def all_threads() -> Iterator[None]:
    """Within `own_threads`, a context for one of PyTorch's own operators: it uses all threads again."""
    library = _library()
    threads = 1 if library is None or torch.get_num_threads() > 1 else int(library.clearllama_threads())
    if library is None or threads == 1:
        yield
        return
    try:
        library.clearllama_choose_threads(threads, threads)
        yield
    finally:
        library.clearllama_choose_threads(threads, 1)
        end_openmp_threads()


# --------------------------------------------------------------------------------------------------- the operators
def linear_tiles(x: Tensor, tiles: Tensor, format: GroupFormat, out_features: int) -> Tensor:
    """Multiply x (.., K) by a weight (N, K) packed by tiles.pack: (.., N), in x's dtype.

    x is quantized to 8 bits with a scale for each group of inputs; the relative error of the product is about 0.6 %.
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()  # (M, K)
    if x.dtype not in (torch.float32, torch.bfloat16):
        rows = rows.float()
    bits, group, offset, codebook, levels = format
    y: Tensor = torch.ops.clearllama.linear_tiles(rows, tiles, bits, group, offset, out_features, codebook, levels)
    return y.view(*x.shape[:-1], out_features).to(x.dtype)


def rows_of_tiles(tiles: Tensor, ids: Tensor, shape: tuple[int, int], format: GroupFormat) -> Tensor:
    """Rows `ids` (n,) of a packed weight (N, K), dequantized as tiles.unpack does: (n, K) float32."""
    bits, group, offset, *rest = format
    return torch.ops.clearllama.rows_of_tiles(tiles, ids.contiguous(), bits, group, offset, *shape, *rest)


def quantize_to_tiles(weight: Tensor, clips: Sequence[float], bits: int, group: int, offset: bool) -> Tensor:
    """Quantize a weight (N, K) as quant.schemes.quantize does, and pack it. A NaN makes the scale of its group NaN."""
    rows = weight.contiguous()
    if rows.dtype not in (torch.float32, torch.bfloat16):
        rows = rows.float()
    shares = torch.tensor(clips, dtype=torch.float32)
    return torch.ops.clearllama.quantize_to_tiles(rows, shares, bits, group, offset)


def pack_blocks(raw: Tensor, type: str, order: Tensor | None, out: Tensor) -> None:
    """Pack blocks of a GGUF type (rows, bytes) as tiles.pack does, into `out`; order (n,): the rows, None: all."""
    torch.ops.clearllama.pack_blocks(raw, type, order, out)


def linear_bf16(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear in bfloat16, without AMX for a few rows: (.., K), (N, K), (N,) -> (.., N).

    If the kernels widen weights (`widen`), x and bias may have another dtype, and the weight may be float16.
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()  # (M, K)
    if x.dtype == torch.float16:
        rows, bias = rows.float(), None if bias is None else bias.float()
    y: Tensor = torch.ops.clearllama.linear_bf16(rows, weight, bias)
    return y.view(*x.shape[:-1], weight.shape[0]).to(x.dtype)


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, k_scale: Tensor | None = None, v_scale: Tensor | None = None
) -> Tensor:
    """attention.sdpa: -> (B, H, T, D). k and v may be int8 with scales (B, KV, S).

    D must be a multiple of 16 up to 256. q, k and v may have any strides except on the last axis, which must be 1.
    """
    if mask is not None:
        mask = mask.contiguous()
    return torch.ops.clearllama.attend(q, k, v, mask, k_scale, v_scale).transpose(1, 2)  # from (B, T, H, D)
