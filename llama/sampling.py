"""From logits to a token: filters, then probabilities, then one draw. Pure functions over (.., V).

`probs` is separate from `sample`, so that code that needs the distribution (speculative decoding, for one) uses the
same one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from . import checks

ORDER = "repetition penalty, temperature, top-k, top-p, min-p"
LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. Construction raises UsageError if a value is out of range.

    max_new_tokens      maximum number of new tokens; 0 gives an empty answer
    temperature         divides the logits; 0 (or below 1e-5) is greedy: always the most probable token
    top_k               keep the k most probable tokens; 0 is off
    top_p               keep the smallest set of tokens whose probability reaches this value; 1 is off
    min_p               keep tokens at least this fraction as probable as the most probable one; 0 is off
    repetition_penalty  divide positive (multiply negative) logits of tokens in the text, prompt included; 1 is off
                        (arXiv:1909.05858)
    seed                seed of the draws; None: a random one
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        checks.integer("max_new_tokens", self.max_new_tokens, 0, 2**31)
        checks.number("temperature", self.temperature, 0.0, 1e6)
        checks.integer("top_k", self.top_k, 0, 2**31)
        checks.number("top_p", self.top_p, 0.0, 1.0)
        checks.number("min_p", self.min_p, 0.0, 1.0)
        checks.number("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        if self.seed is not None:
            checks.integer("seed", self.seed, 0, LARGEST_SEED)

    @property
    def greedy(self) -> bool:
        return self.temperature < 1e-5 or self.top_k == 1


# ------------------------------------------------------------------------------------------------------ filters
def repetition_penalty(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make the ids in `seen` (.., N) less probable. logits (.., V)."""
    before = logits.gather(-1, seen)  # (.., N)
    return logits.scatter(-1, seen, torch.where(before > 0, before / penalty, before * penalty))


def top_k(logits: Tensor, k: int) -> Tensor:
    """Mask all but the k largest logits; ties with the k-th stay."""
    k = min(k, logits.shape[-1])
    return logits.masked_fill(logits < logits.topk(k).values[..., -1:], -torch.inf)


def top_p(logits: Tensor, p: float) -> Tensor:
    """Mask the tokens outside the smallest set whose probability reaches p. At least one token stays."""
    ordered, index = logits.sort(descending=True, stable=True)
    probability = ordered.softmax(-1)
    before = probability.cumsum(-1) - probability  # total probability of all more probable tokens
    outside = before >= p
    outside[..., 0] = False
    return logits.masked_fill(outside.scatter(-1, index, outside), -torch.inf)


def min_p(logits: Tensor, p: float) -> Tensor:
    """Mask tokens less probable than p times the most probable one (arXiv:2407.01082)."""
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(p), -torch.inf)


# (filter, whether the parameters enable it), applied in this order
FILTERS: list[tuple[Callable[[Tensor, SamplingParams], Tensor], Callable[[SamplingParams], bool]]] = [
    (lambda logits, params: logits / params.temperature, lambda params: params.temperature != 1),
    (lambda logits, params: top_k(logits, params.top_k), lambda params: params.top_k > 0),
    (lambda logits, params: top_p(logits, params.top_p), lambda params: params.top_p < 1),
    (lambda logits, params: min_p(logits, params.min_p), lambda params: params.min_p > 0),
]


# ------------------------------------------------------------------------------------- probabilities and the draw
# Below this value, neither a penalty nor a low temperature can make a logit infinite.
LARGEST_LOGIT = 1e30


def extreme(logits: Tensor) -> Tensor:
    """The largest of the logits (.., V) -> (..), or the smallest if that is NaN or below -LARGEST_LOGIT.

    This one number shows whether all logits are finite, since a minimum or maximum that includes NaN is NaN.
    """
    low, top = logits.aminmax(dim=-1)
    return torch.where(low > -LARGEST_LOGIT, top, low)


def probs(logits: Tensor, params: SamplingParams, seen: Tensor | None = None) -> Tensor:
    """The distribution of the next token: logits (.., V) -> probabilities (.., V), float32.

    seen (.., N) are the ids for the repetition penalty. Greedy parameters give a one-hot distribution; of equal
    logits, the lowest id is chosen.
    """
    logits = logits.float()
    if seen is not None and params.repetition_penalty != 1:
        logits = repetition_penalty(logits, seen, params.repetition_penalty)
    if params.greedy:
        return torch.zeros_like(logits).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
    for apply, enabled in FILTERS:
        if enabled(params):
            logits = apply(logits, params)
    return logits.softmax(-1)


def sample(probabilities: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One draw from each distribution: (.., V) -> (..) int64."""
    flat = probabilities.flatten(0, -2) if probabilities.dim() > 1 else probabilities[None]  # (N, V)
    return torch.multinomial(flat, 1, generator=generator).view(probabilities.shape[:-1])


def draw(probabilities: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """The same draws as `sample` from the same generator, without waiting for the device as torch.multinomial does.

    Of exponential variables with rates p, the smallest is at x with probability p(x) (the Gumbel-max trick), and E / p
    has rate p if E has rate 1.
    """
    noise = torch.empty_like(probabilities).exponential_(1, generator=generator)
    return (probabilities / noise).argmax(-1)


def choose(
    logits: Tensor,
    params: SamplingParams,
    seen: Tensor | None = None,
    generator: torch.Generator | None = None,
    logprobs: bool = False,
) -> tuple[Tensor, ...]:
    """The next id (1,) from logits (V,), `extreme` of the logits (1,), and the id's log-probability (1,) if requested.

    Nothing waits for the device: NaN chooses an arbitrary id, which the extreme reveals (`generate.check_extreme`).
    """
    if params.greedy and seen is None:
        next_id = logits.argmax(keepdim=True)  # (1,)
    else:
        next_id = draw(probs(logits, params, seen)[None], generator)  # (1,)
    top = extreme(logits)[None]  # (1,)
    return (next_id, top, logits.log_softmax(-1)[next_id]) if logprobs else (next_id, top)
