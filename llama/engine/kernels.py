"""The C++ kernels of cpp/: built once for this processor, kept in the cache folder, loaded as torch operators.

    linear_blocks   x times a weight of 4 or 8 bits
    quantize_to_tiles  a weight, quantized to 4 or 8 bits and packed
    linear_bf16     a few rows of x times a bfloat16 weight
    attend          attention of a few queries

The source needs no header of torch but its stable interface, so a compiler is done in three seconds and the result
serves later versions of torch too. Without a compiler, or on a processor without AVX2, `ready` says so once and the
callers take torch's own operators. CLEARLLAMA_KERNELS=off does the same, =avx2 takes the form for older processors.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..errors import UsageError
from ..system.folders import cache_folder, keep, kept
from ..system.temporary import own_temporary

LOG = logging.getLogger(__name__)
SOURCE = Path(__file__).parent / "cpp" / "kernels.cpp"  # it includes its neighbours

# form -> what the compiler may use. "plain" runs anywhere but is for tests, so it is made quickly, not quick.
FORMS = {
    "avx512": "-mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx512bf16 -mavx2 -mfma -mf16c"
    " -mprefer-vector-width=512",
    "avx2": "-mavx2 -mfma -mf16c",
    "plain": "-O1",
}
COMMON = "-std=c++20 -O3 -fno-math-errno -fPIC -shared -w"


def pick_form() -> str | None:
    """The form this processor runs, or None; CLEARLLAMA_KERNELS overrides."""
    wanted = os.environ.get("CLEARLLAMA_KERNELS", "auto")
    if wanted not in ("auto", "off", *FORMS):
        raise UsageError(f"CLEARLLAMA_KERNELS is {wanted!r}; expected auto, off, {', '.join(FORMS)}")
    if wanted != "auto":
        return None if wanted == "off" else wanted
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "AMD64"):
        return None
    cpu = torch.cpu
    if cpu._is_avx512_supported() and cpu._is_vnni_supported() and cpu._is_avx512_bf16_supported():
        return "avx512"
    return "avx2" if cpu._is_avx2_supported() else None


def ready() -> bool:
    """Whether the kernels can be called; the first time this builds them. Why not is said on stderr, once."""
    with _ONE_AT_A_TIME:  # layers are made by several threads
        return _load()


_ONE_AT_A_TIME = threading.Lock()


@functools.cache
def _load() -> bool:
    form = pick_form()
    if form is None:
        if os.environ.get("CLEARLLAMA_KERNELS") != "off":
            _say(f"there is no form for this processor ({platform.machine()}, {platform.system()})")
        return False
    try:
        torch.ops.load_library(str(build(form)))
    except (OSError, RuntimeError, UsageError, subprocess.SubprocessError) as error:
        _say(str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__)
        return False
    for name, fake in (("linear_blocks", _fake_blocks), ("linear_bf16", _fake_bf16), ("attend", _fake_attend)):
        torch.library.register_fake(f"clearllama::{name}", fake)
    return True


def sources() -> str:
    """The text of all C++ files."""
    return "\n".join(path.read_text() for path in sorted(SOURCE.parent.iterdir()))


def compiler() -> str | None:
    """The C++ compiler of this machine as it is called; None where there is none. CXX overrides."""
    return os.environ.get("CXX") or next(filter(shutil.which, ("c++", "g++", "clang++")), None)


def built(form: str) -> Path | None:
    """The library for a form, if the cache folder has it."""
    return kept(*_place(form), ".so")


def _place(form: str) -> tuple[Path, str]:
    """The folder of the library for a form, and its name there, which tells what it was made of."""
    parts = "\0".join((sources(), *_flags(form), torch.__version__))
    return cache_folder() / "kernels", f"{form}-{hashlib.sha256(parts.encode()).hexdigest()[:16]}"


def _flags(form: str) -> list[str]:
    return [*COMMON.split(), *FORMS[form].split()]


def build(form: str) -> Path:
    """The library for a form, compiled unless the cache folder has it. OSError or RuntimeError say why not."""
    if found := built(form):
        return found
    root, command = Path(torch.__file__).parent, compiler()
    folder, name = _place(form)
    if command is None:
        raise RuntimeError("there is no C++ compiler (c++, g++, clang++); install one, or name it in CXX")
    folder.mkdir(parents=True, exist_ok=True)
    if sys.stderr is not None and sys.stderr.isatty():
        LOG.info("clearllama: building the C++ kernels, some seconds; they are kept for the next time")
    with own_temporary(folder, ".build") as work:
        made = work / f"{name}.so"
        words = [*command.split(), *_flags(form), f"-I{root / 'include'}", str(SOURCE), "-o", str(made)]
        words += [f"-L{root / 'lib'}", "-ltorch_cpu", f"-Wl,-rpath,{root / 'lib'}"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            why = next((line for line in done.stderr.splitlines() if "error" in line), f"exit code {done.returncode}")
            raise RuntimeError(f"{command} could not build {SOURCE.name}: {why.strip()}")
        return keep(made, folder, name)


def _say(why: str) -> None:
    LOG.warning("clearllama: running on torch's own operators, slower than its C++ kernels: %s", why)


# --------------------------------------------------------------------------------------------------- the operators
def linear_blocks(x: Tensor, tiles: Tensor, bits: int, group: int, offset: bool, out_features: int) -> Tensor:
    """(.., K) times a weight (N, K) packed by tiles.pack -> (.., N), computed in float32 and of x's dtype.

    x is rounded to 8 bits, with a scale for every group of inputs: relative error of the product about 0.6 %.
    """
    rows = x.reshape(-1, x.shape[-1]).contiguous()  # (M, K)
    if x.dtype not in (torch.float32, torch.bfloat16):
        rows = rows.float()
    y: Tensor = torch.ops.clearllama.linear_blocks(rows, tiles, bits, group, offset, out_features)
    return y.view(*x.shape[:-1], out_features).to(x.dtype)


def quantize_to_tiles(weight: Tensor, clips: Sequence[float], bits: int, group: int, offset: bool) -> Tensor:
    """The tiles of a weight (N, K), quantized as by quant.rounding.quantize. NaN in a weight makes its scale NaN."""
    rows = weight.contiguous()
    if rows.dtype not in (torch.float32, torch.bfloat16):
        rows = rows.float()
    tiles: Tensor = torch.ops.clearllama.round_to_tiles(rows, torch.tensor(clips), bits, group, offset)
    return tiles


def linear_bf16(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear for bfloat16 and few rows: (.., K), (N, K), (N,) -> (.., N)."""
    y: Tensor = torch.ops.clearllama.linear_bf16(x.reshape(-1, x.shape[-1]).contiguous(), weight, bias)
    return y.view(*x.shape[:-1], weight.shape[0])


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, k_scale: Tensor | None = None, v_scale: Tensor | None = None
) -> Tensor:
    """Attention of few queries, as attention.sdpa: (B, H, T, D); k and v may be int8 with scales (B, KV, S).

    D is a multiple of 16 up to 256. q, k and v may be views with any strides but the last axis'.
    """
    if mask is not None:
        mask = mask.contiguous()
    y: Tensor = torch.ops.clearllama.attend(q, k, v, mask, k_scale, v_scale)
    return y


def _fake_blocks(x: Tensor, tiles: Tensor, bits: int, group: int, offset: bool, out_features: int) -> Tensor:
    return x.new_empty(x.shape[0], out_features)


def _fake_bf16(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


def _fake_attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, k_scale: Tensor | None, v_scale: Tensor | None
) -> Tensor:
    return q.new_empty(q.shape)
