"""From logits to a token: filters, then probabilities, then one draw. Pure functions over (.., V).

`probs` is apart from `sample`, so that whoever needs the distribution itself (speculative decoding, a study of it)
uses the very same one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import UsageError

ORDER = "repetition penalty, temperature, top-k, top-p, min-p"
LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. Validated at birth; UsageError names the range.

    max_new_tokens      most new tokens; 0 gives an empty answer
    temperature         divides the logits; 0 (or below 1e-5) is greedy: always the likeliest token
    top_k               keep the k likeliest tokens; 0 is off
    top_p               keep the likeliest tokens that together reach this probability; 1 is off
    min_p               keep tokens at least this fraction as likely as the likeliest; 0 is off
    repetition_penalty  divide positive (multiply negative) logits of tokens seen, prompt included; 1 is off
                        (arXiv:1909.05858)
    seed                of the draws; None takes a fresh one, which the result reports
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        _whole("max_new_tokens", self.max_new_tokens, 0, 2**31)
        _real("temperature", self.temperature, 0.0, 1e6)
        _whole("top_k", self.top_k, 0, 2**31)
        _real("top_p", self.top_p, 0.0, 1.0)
        _real("min_p", self.min_p, 0.0, 1.0)
        _real("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        if self.seed is not None:
            _whole("seed", self.seed, 0, LARGEST_SEED)

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5 or self.top_k == 1


def _whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UsageError(f"{name} must be a whole number from {low} to {high}, got {value!r:.80}")


def _real(name: str, value: object, low: float, high: float) -> None:
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:  # a whole number of hundreds of digits
        number = math.nan
    if not low <= number <= high:  # also false for NaN
        raise UsageError(f"{name} must be a number from {low:g} to {high:g}, got {value!r:.80}")


# ------------------------------------------------------------------------------------------------------ filters
def repetition_penalty(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make the ids in `seen` (.., N) less likely. logits (.., V)."""
    taken = logits.gather(-1, seen)  # (.., N)
    return logits.scatter(-1, seen, torch.where(taken > 0, taken / penalty, taken * penalty))


def top_k(logits: Tensor, k: int) -> Tensor:
    """Forbid all but the k largest; ties with the k-th stay."""
    k = min(k, logits.shape[-1])
    return logits.masked_fill(logits < logits.topk(k).values[..., -1:], -torch.inf)


def top_p(logits: Tensor, p: float) -> Tensor:
    """Forbid all tokens outside the smallest set of likeliest ones that reaches probability p. One always stays."""
    ordered, index = logits.sort(descending=True, stable=True)
    probability = ordered.softmax(-1)
    before = probability.cumsum(-1) - probability  # probability of all likelier tokens
    outside = before >= p
    outside[..., 0] = False
    return logits.masked_fill(outside.scatter(-1, index, outside), -torch.inf)


def min_p(logits: Tensor, p: float) -> Tensor:
    """Forbid tokens less likely than p times the likeliest (arXiv:2407.01082)."""
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(p), -torch.inf)


# (the filter, whether the parameters switch it on): applied in this order
FILTERS: list[tuple[Callable[[Tensor, SamplingParams], Tensor], Callable[[SamplingParams], bool]]] = [
    (lambda logits, params: logits / params.temperature, lambda params: params.temperature != 1),
    (lambda logits, params: top_k(logits, params.top_k), lambda params: params.top_k > 0),
    (lambda logits, params: top_p(logits, params.top_p), lambda params: params.top_p < 1),
    (lambda logits, params: min_p(logits, params.min_p), lambda params: params.min_p > 0),
]


# ------------------------------------------------------------------------------------- probabilities and the draw
# Below this neither a penalty nor a low temperature can make a logit infinite, and probabilities with it.
LARGEST_LOGIT = 1e30


def extreme(logits: Tensor) -> Tensor:
    """The largest of the logits (.., V) -> (..), or the smallest where that is NaN or beyond -LARGEST_LOGIT.

    One number that tells whether all are finite: NaN wins every minimum and maximum.
    """
    low, top = logits.aminmax(dim=-1)
    return torch.where(low > -LARGEST_LOGIT, top, low)


def probs(logits: Tensor, params: SamplingParams, seen: Tensor | None = None) -> Tensor:
    """The distribution the next token is drawn from: logits (.., V) -> probabilities (.., V), float32.

    seen (.., N) are the ids for the repetition penalty. Greedy parameters give a one-hot distribution; of equal
    logits the lowest id wins.
    """
    logits = logits.float()
    if seen is not None and params.repetition_penalty != 1:
        logits = repetition_penalty(logits, seen, params.repetition_penalty)
    if params.greedy:
        return torch.zeros_like(logits).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
    for apply, wanted in FILTERS:
        if wanted(params):
            logits = apply(logits, params)
    return logits.softmax(-1)


def sample(probabilities: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One draw from each distribution: (.., V) -> (..) int64."""
    flat = probabilities.flatten(0, -2) if probabilities.dim() > 1 else probabilities[None]  # (N, V)
    return torch.multinomial(flat, 1, generator=generator).view(probabilities.shape[:-1])


def draw(probabilities: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """`sample` where nothing waits for the device: torch.multinomial looks at what it is given first.

    Of exponential variables with the rates p, the one at x is the least with probability p(x) (Gumbel-max, in other
    words), and E / p is such a variable for E of rate 1. The draws are those of `sample` from the same generator.
    """
    noise = torch.empty_like(probabilities).exponential_(1, generator=generator)
    return (probabilities / noise).argmax(-1)
