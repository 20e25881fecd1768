"""The self-test: small computations of the library on this machine, compared with independent results."""

from __future__ import annotations

import cmath
import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from .. import loader, rope
from ..attention import Attend
from ..checkpoint import huggingface_write, open_checkpoint
from ..checkpoint.write import Model
from ..config import ModelConfig
from ..engine import kernels
from ..engine.compiled import CompiledRunner
from ..engine.cpu_attention import pick_attention
from ..engine.linears import make_linear
from ..engine.quantized_weight import QuantizedWeight
from ..engine.runtime import pick_device
from ..errors import UsageError, one_line
from ..model import Transformer
from ..quant.schemes import pick_scheme, quantize
from ..system.folders import cache_folder
from ..weights import random_model
from .facts import REPORT, Finding, folder_state

CONFIG = ModelConfig(
    dim=128, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=32, hidden_dim=256, vocab_size=320, max_seq_len=256
)  # 0.4 million parameters


class NotRun(Exception):
    """A check can't run on this machine; the message says why."""


class Wrong(Exception):
    """A result is not the expected one."""


def run(name: str) -> Finding:
    """Run a check by its name. Its errors are findings too."""
    try:
        with torch.inference_mode():
            return Finding("ok", "self-test", name, CHECKS[name]())
    except NotRun as why:
        return Finding("note", "self-test", name, f"skipped: {why}")
    except Wrong as why:
        return Finding("fail", "self-test", name, str(why), REPORT)
    except Exception as error:
        return Finding("fail", "self-test", name, f"{type(error).__name__}: {one_line(str(error))[:300]}", REPORT)


def _model(form: str = "complex") -> Transformer:
    return random_model(CONFIG, form)


def _tokens(length: int) -> Tensor:
    """Random token ids, (1, length)."""
    return torch.randint(CONFIG.vocab_size, (1, length), generator=torch.Generator().manual_seed(1))


def check_close(what: str, got: Tensor, expected: Tensor, tolerance: float) -> float:
    """The largest difference, relative to the largest expected value. Raises Wrong if it exceeds the tolerance."""
    error = float((got.double() - expected.double()).abs().max() / expected.double().abs().max())
    if not error <= tolerance:  # also true for NaN
        raise Wrong(f"{what} differ by {error:.1e} of the largest value, expected at most {tolerance:.0e}")
    return error


def check_rope() -> str:
    """The logits with each form of RoPE; one form against Python's complex numbers."""
    x = torch.randn(1, 3, 2, 8, generator=torch.Generator().manual_seed(2))  # (B, T, H, D)
    positions = [0, 1, 200]
    rotated, _ = rope.apply_rotary_emb(x, x, rope.precompute_freqs_cis(8, 201)[positions])
    for t, position in enumerate(positions):
        for pair in range(4):
            a, b = (float(v) for v in x[0, t, 1, 2 * pair : 2 * pair + 2])
            product = complex(a, b) * cmath.exp(1j * position * 10000.0 ** (-2 * pair / 8))
            expected = torch.tensor([product.real, product.imag], dtype=torch.double)
            check_close("rotated pairs", rotated[0, t, 1, 2 * pair : 2 * pair + 2], expected, 1e-4)
    tokens = _tokens(40)
    expected = _model("complex")(tokens)
    errors = [check_close(f"logits of the form {form}", _model(form)(tokens), expected, 1e-4) for form in rope.FORMS]
    return f"{len(errors)} forms give the same logits, {f'within {max(errors):.0e}' if max(errors) else 'bit for bit'}"


def check_cache() -> str:
    """The logits of a text fed in parts to a cache, down to single tokens, against one pass."""
    tokens = _tokens(48)
    model = _model()
    for i in range(CONFIG.n_layers):
        model.set_submodule(f"layers.{i}.attention.attend", Attend(pick_attention(torch.device("cpu"))))
    cache = model.new_cache(64)
    cuts = [0, 20, 37, *range(38, 49)]
    parts = [model(tokens[:, start:end], cache=cache) for start, end in itertools.pairwise(cuts)]
    error = check_close("logits with a cache", torch.cat(parts, 1), _model()(tokens), 1e-4)
    return f"cached and uncached logits are the same, within {error:.0e}"


def check_quantized() -> str:
    """Linear layers with weights of 8 and 4 bits against products with the dequantized weights."""
    draw = torch.Generator().manual_seed(3)
    weight, error = torch.randn(64, 128, generator=draw), 0.0  # (N, K)
    ready, form = kernels.ready(), kernels.pick_form()
    if not ready and form is not None and kernels.built(form) is not None:
        raise Wrong("the C++ kernels were built but can't be loaded")
    if not ready:
        raise NotRun("quantized layers on a CPU require the C++ kernels")
    for name in ("int8", "int4"):
        format = pick_scheme(name).format
        layer = make_linear(QuantizedWeight.from_tensor(weight, format), torch.device("cpu"))
        dequantized = quantize(weight, format).weight.double()
        check_close(f"weights in {name}", dequantized, weight, 0.15 if format.bits == 4 else 0.02)
        for rows in (1, 7):
            x = torch.randn(rows, 128, generator=draw)
            error = max(error, check_close(f"products in {name}", layer(x), x.double() @ dequantized.T, 0.03))
    x, bf16 = torch.randn(2, 128, generator=draw).bfloat16(), weight.bfloat16()
    check_close("products in bfloat16", kernels.linear_bf16(x, bf16, None), x.double() @ bf16.double().T, 0.02)
    return f"int8 and int4 by the C++ kernels agree with plain arithmetic, within {error:.0e}"


def check_safetensors() -> str:
    """A checkpoint in Hugging Face's format, written and loaded: the same weights and the same logits."""
    model = _model()
    state = model.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    source = Model(CONFIG, shapes, dict.fromkeys(state, torch.float32), state.__getitem__)
    try:
        with tempfile.TemporaryDirectory(prefix="clearllama-doctor-") as work:
            huggingface_write.write(Path(work), source)
            loaded = loader.build(open_checkpoint(work), "cpu", "float32")
            for name, tensor in loaded.state_dict().items():
                if not torch.equal(tensor, state[name]):
                    raise Wrong(f"{name} was not read back as it was written")
            check_close("logits of the loaded model", loaded(_tokens(20)), model(_tokens(20)), 0)
            del loaded, tensor  # Windows can't remove a file that is mapped
    except OSError as error:
        raise NotRun(f"there is no folder for temporary files ({error}); name one in TMPDIR") from None
    return f"{len(state)} tensors written and read back, bit for bit"


def check_device() -> str:
    """The logits on the best device against those on the CPU."""
    device = pick_device()
    if device.type == "cpu":
        return "nothing to compare: the CPU is the only device"
    tokens = _tokens(40)
    logits = _model().to(device)(tokens.to(device)).cpu()
    error = check_close(f"logits on {device}", logits, _model()(tokens), 1e-2)
    return f"{device} gives the CPU's logits, within {error:.0e}"


def check_compile() -> str:
    """The logits of compiled decoding steps against those of the model's own code."""
    if kernels.compiler() is None:
        raise NotRun("there is no C++ compiler")
    folder = cache_folder()
    if folder_state(folder)[0] != "ok":
        raise NotRun(f"compiled code is cached in {folder}, which is not writable")
    kernels.ready()
    tokens, logits = _tokens(12), []
    try:
        eager, fast = _model("real"), _model("real")
        fast.runner = CompiledRunner(fast)
    except UsageError as why:  # not a usage error here: with a compiler and a folder, compiling should work
        raise Wrong(str(why)) from None
    for model in (eager, fast):
        cache = model.new_cache(32)
        steps = [model(tokens[:, :4], cache=cache), *(model(tokens[:, t : t + 1], cache=cache) for t in range(4, 12))]
        logits.append(torch.cat(steps, 1))
    error = check_close("logits of compiled steps", logits[1], logits[0], 1e-4)
    return f"compiled and eager logits are the same, within {error:.0e}"


CHECKS: dict[str, Callable[[], str]] = {
    "rope": check_rope,
    "cache": check_cache,
    "safetensors": check_safetensors,
    "quantized": check_quantized,
    "device": check_device,
    "compile": check_compile,
}
