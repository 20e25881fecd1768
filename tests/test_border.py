"""No argument of a C++ operator is read as what it is not: weights that were replaced are used right or refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llama.checkpoint.weight import MemoryWeight
from llama.engine import kernels
from llama.engine.cpu_runner import KernelRunner
from llama.engine.linears import make_linear
from llama.model import Runner, Transformer

from . import tiny

pytestmark = pytest.mark.skipif(not kernels.ready(), reason="needs the C++ kernels")
ops: Any = torch.ops.clearllama
B, T, H, KV, D, S, C, F = 2, 3, 4, 2, 16, 8, 64, 96


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def packed(rows: int, columns: int) -> Tensor:
    return kernels.quantize_to_tiles(noise(rows, columns), [1.0], 8, 32, True)


def rotation() -> list[Any]:
    angles, positions = noise(B, T, D // 2), torch.arange(T).expand(B, T).contiguous()
    return [angles, angles.clone(), positions]


def caches() -> list[Any]:
    return [torch.zeros(B, KV, S, D), torch.zeros(B, KV, S, D)]


SHAPES = [(H * D, C), (KV * D, C), (KV * D, C), (C, H * D), (F, C), (F, C), (C, F)]  # wq wk wv wo w_gate w_up w_down
# Arguments that each operator accepts. Those of the last two are changed in the lists of tensors, too.
GOOD: dict[str, Callable[[], list[Any]]] = {
    "linear_tiles": lambda: [noise(T, C), packed(F, C), 8, 32, True, F, False, False],
    "quantize_to_tiles": lambda: [noise(F, C), torch.ones(2), 4, 32, True],
    "pack_blocks": lambda: [
        torch.zeros(40, 2 * 144, dtype=torch.uint8), "Q4_K", torch.arange(17), torch.zeros(2, 2 * 2368, dtype=torch.uint8)
    ],
    "linear_bf16": lambda: [noise(*shape, dtype=torch.bfloat16) for shape in ((T, C), (F, C), (F,))],
    "attend": lambda: [
        noise(B, H, T, D), *caches(), torch.ones(B, 1, T, S, dtype=torch.bool), None, None
    ],
    "attend int8": lambda: [
        noise(B, H, T, D), *(cache.to(torch.int8) for cache in caches()), None, noise(B, KV, S), noise(B, KV, S)
    ],
    "rows_of_tiles": lambda: [packed(F, C), torch.tensor([0, F - 1]), 8, 32, True, F, C, False, False],
    "layers": lambda: [
        noise(B * T, C), [packed(*shape) for shape in SHAPES],
        torch.tensor([[[8, 32, 1, 0, 0, rows] for rows, _ in SHAPES]]), [noise(rows) for rows, _ in SHAPES],
        [noise(C), noise(C)], [noise(D), noise(D)], 1e-5, [1], *rotation(), torch.ones(B, 1, T, S, dtype=torch.bool),
        *([cache] for cache in caches()), [], [], S,
    ],
    "layers int8": lambda: [
        *GOOD["layers"]()[:12], *([cache.to(torch.int8)] for cache in caches()), [noise(B, KV, S), noise(B, KV, S)],
        [noise(KV, 1, D)], S,
    ],
}  # fmt: skip
DAMAGE: dict[str, Callable[[Tensor], Tensor]] = {
    "dtype": lambda x: x.to(torch.float64 if x.is_floating_point() else torch.int16),
    "strides": lambda x: torch.stack([x, x], -1)[..., 0],
    "size": lambda x: x[..., :-1].contiguous(),
    "axes": lambda x: x[None],
}
HARMLESS = {  # a smaller weight, fewer clips, 63 inputs for padded groups, fewer ids
    *((name, i, "size") for name, i in (("quantize_to_tiles", 0), ("quantize_to_tiles", 1), ("linear_tiles", 0))),
    ("rows_of_tiles", 1, "size"),
}


def places(arguments: list[Any]) -> list[tuple[int, int | None]]:
    """Where the tensors are: number of an argument, and number within a list."""
    inside = [(i, j) for i, given in enumerate(arguments) if isinstance(given, list) for j in range(len(given))]
    return [(i, None) for i, given in enumerate(arguments) if isinstance(given, Tensor)] + [
        (i, j) for i, j in inside if isinstance(arguments[i][j], Tensor)
    ]


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("case", GOOD)
def test_an_operator_refuses_a_tensor_of_another_dtype_size_or_layout(case: str, how: str) -> None:
    operator = getattr(ops, case.split()[0])
    operator(*GOOD[case]())
    for i, j in places(GOOD[case]()):
        arguments = GOOD[case]()
        if j is None:
            arguments[i] = DAMAGE[how](arguments[i])
        else:
            arguments[i][j] = DAMAGE[how](arguments[i][j])
        if (case, i, how) not in HARMLESS:
            with pytest.raises(ValueError, match=r"the C\+\+ kernels expect "):
                operator(*arguments)


@pytest.mark.parametrize(("case", "i", "value"), [
    ("linear_tiles", 2, 7), ("linear_tiles", 3, 48), ("linear_tiles", 5, F + 16), ("linear_tiles", 6, True),
    ("rows_of_tiles", 2, 7), ("rows_of_tiles", 5, F + 16), ("rows_of_tiles", 2, 16),
    ("pack_blocks", 1, "Q4_0"), ("pack_blocks", 1, "Q1_0"), ("pack_blocks", 2, None),
    ("pack_blocks", 2, torch.tensor([*range(16), 40])), ("pack_blocks", 2, torch.tensor([*range(16), -1])),
    ("quantize_to_tiles", 2, 5), ("quantize_to_tiles", 3, 256), ("layers", 1, []), ("layers", 4, []), ("layers", 7, []),
    ("layers", 12, []), ("layers", 16, S + 1), ("layers", 16, -1),
])  # fmt: skip
def test_an_operator_refuses_a_format_or_a_number_that_does_not_fit(case: str, i: int, value: object) -> None:
    arguments = GOOD[case]()
    arguments[i] = value
    with pytest.raises(ValueError, match=r"the C\+\+ kernels expect "):
        getattr(ops, case)(*arguments)


# ---------------------------------------------------------------------------------------------------- whole models
@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_an_embedding_may_have_gaps(scheme: str, dtype: torch.dtype) -> None:
    """A packed row of 72 numbers is padded to 96; in float32, the rows of the tied embedding are not copied."""
    config = dataclasses.replace(tiny.CONFIG, dim=72, tie_embeddings=True)
    model = tiny.quantized(tiny.model(config, rope="real", attention="kernel").to(dtype), scheme)
    ids = tiny.random_tokens(9, config)
    expected = model(ids)
    model.runner = KernelRunner(model)
    cache = model.new_cache(16)
    found = torch.cat([model(part, cache=cache) for part in ids.split([4, 1, 1, 1, 2], 1)], 1)
    assert float((found - expected).norm() / expected.norm()) < 0.03


def transposed(weight: Tensor) -> Tensor:
    """The same numbers in another order of memory."""
    return weight.T.contiguous().T


REPLACED: dict[str, Callable[[Transformer], None]] = {
    "a norm in float32": lambda net: setattr(net.layers[0].ffn_norm, "weight", nn.Parameter(2 * noise(64), False)),
    "the data of a norm": lambda net: setattr(net.layers[0].ffn_norm.weight, "data", noise(64)),
    "a transposed weight": lambda net: setattr(
        net.layers[1].attention.wo, "weight", nn.Parameter(transposed(noise(64, 64).bfloat16()), False)
    ),
    "the data of a transposed weight": lambda net: setattr(
        net.layers[1].attention.wo.weight, "data", transposed(noise(64, 64).bfloat16())
    ),
    "another embedding": lambda net: net.set_submodule("tok_embeddings", nn.Embedding(320, 64, dtype=torch.float32)),
}


@pytest.mark.parametrize("how", REPLACED)
@pytest.mark.parametrize("length", [1, 4])
@torch.no_grad()
def test_a_weight_that_was_replaced_is_used_or_refused(how: str, length: int) -> None:
    model = tiny.model(tiny.CONFIG, attention="kernel").to(torch.bfloat16)
    for name, linear in [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear)]:
        model.set_submodule(
            name, make_linear(MemoryWeight(linear.weight.detach()), torch.device("cpu"), linear.weight.dtype)
        )
    model.runner = KernelRunner(model)
    ids = tiny.random_tokens(length)
    REPLACED[how](model)
    try:
        found = model(ids)
    except (ValueError, RuntimeError) as error:  # of a kernel, or of PyTorch
        assert "expect" in str(error)  # noqa: PT017 (either is right)
        return
    model.runner = Runner()
    expected = model(ids)
    assert float((found - expected).norm() / expected.norm()) < 0.03
