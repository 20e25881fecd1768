"""Checks of arguments. Each returns the value if it is valid, and raises a one-line error if it is not."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, TypeGuard

from .errors import LlamaError, UsageError

if TYPE_CHECKING:
    from torch import Tensor


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a value is an int, and neither True nor False, which Python also counts as ints."""
    return isinstance(value, int) and not isinstance(value, bool)


def integer(
    name: str, value: object, low: int = 1, high: int | None = None, error: type[LlamaError] = UsageError
) -> int:
    """An int from low to high, both included."""
    if not is_integer(value) or value < low or (high is not None and value > high):
        span = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise error(f"{name} must be an integer {span}, got {shown(value)}")
    return value


def number(
    name: str, value: object, low: float, high: float, error: type[LlamaError] = UsageError, *, above: bool = False
) -> float:
    """An int or a float from low to high, both included, as a float. above=True excludes low. NaN is refused."""
    try:
        found = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:  # an int of hundreds of digits
        found = math.nan
    if not low <= found <= high or (above and found == low):  # NaN fails the first comparison
        span = f"above {low:g} and at most {high:g}" if above else f"from {low:g} to {high:g}"
        raise error(f"{name} must be a number {span}, got {shown(value)}")
    return found


def boolean(name: str, value: object, error: type[LlamaError] = UsageError) -> bool:
    """True or False."""
    return bool(instance(name, value, bool, "true or false", error))


def choice(name: str, value: object, known: Collection[str]) -> str:
    """One of the names in `known`."""
    if not isinstance(value, str) or value not in known:
        raise UsageError(f"unknown {name} {shown(value)}; known: {', '.join(known)}")
    return value


def instance(name: str, value: Any, kind: Any, expected: str, error: type[LlamaError] = UsageError) -> Any:
    """A value that isinstance accepts for `kind`. `expected` describes the kind in the message."""
    if not isinstance(value, kind):
        raise error(f"{name} must be {expected}, got {shown(value)}")
    return value


def known_options(given: Iterable[object], options: Any, where: str) -> None:
    """Raise UsageError for a name that is not a field of `options`; suggest the most similar field, and help(where)."""
    known = options.__dataclass_fields__
    for name in sorted({*given} - {*known}, key=str):
        similar = "".join(f"did you mean {other!r}? " for other in difflib.get_close_matches(str(name), known, 1))
        raise UsageError(f"unknown option {name!r:.80}; {similar}`help({where})` lists the options")


def known_ids(ids: Iterable[int], size: int) -> None:
    """Raise UsageError for the first id that is not in a vocabulary of `size` ids."""
    if (unknown := next((id for id in ids if not 0 <= id < size), None)) is not None:
        raise UsageError(f"token id {unknown} is not in the vocabulary; expected 0 to {size - 1}")


def known_tokens(tokens: Tensor, size: int) -> None:
    """`known_ids` for a tensor (B, T), if its values can be read."""
    import torch  # not above, since the command line uses this module before it imports torch

    # Tensors on "meta", in a graph that is being compiled, and of subclasses such as FakeTensor may have no values.
    if type(tokens) is torch.Tensor and tokens.numel() and not (tokens.is_meta or torch.compiler.is_compiling()):
        known_ids((int(tokens.min()), int(tokens.max())), size)


def positions_of(tokens: Tensor, positions: Tensor | None) -> Tensor | None:
    """The positions (T,) or (B, T) int64 of tokens (B, T); None stays None. Positions (1, T) apply to each row.

    Raises UsageError unless both are integers of these shapes, and positions are at least 0 and distinct in each row.
    """
    import torch

    for name, ids in (("tokens", tokens), ("positions", tokens if positions is None else positions)):
        if not isinstance(ids, torch.Tensor) or ids.dtype not in (torch.int64, torch.int32):  # casts truncate floats
            raise UsageError(f"{name} must be a tensor of int64, as torch.tensor([[1, 2]]), got {shown(ids)}")
    if tokens.dim() != 2:
        raise UsageError(f"tokens must be (B, T), got {tuple(tokens.shape)}")
    B, T = tokens.shape
    if positions is None:
        return None
    if positions.shape not in ((T,), (1, T), (B, T)):
        raise UsageError(f"positions must be (T,) or (B, T), got {tuple(positions.shape)} for tokens {(B, T)}")
    if bool((positions < 0).any()):
        raise UsageError(f"positions must not be negative, got {int(positions.min())}")
    if bool((positions.sort().values.diff() == 0).any()):
        raise UsageError(f"positions must be distinct in each row, got {shown(positions.tolist())}")
    return positions.long() if positions.dim() == 1 else positions.long().expand(B, T).contiguous()


def shown(value: object) -> str:
    """A value as Python writes it, cut to 80 characters; for a tensor, its shape and dtype."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{type(value).__name__} {tuple(value.shape)} {value.dtype}"
    return f"{value!r:.80}"


def dtype_name(dtype: object) -> str:
    """The name of a dtype without its module: 'bfloat16'."""
    return str(dtype).removeprefix("torch.")
