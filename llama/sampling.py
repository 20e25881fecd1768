"""From logits to a token: filters, in the order of `stages`, then probabilities, then one draw. Pure functions.

Importing this module does not import torch, since the command line reads the options before it does.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from . import checks
from .errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LARGEST_SEED = 2**63 - 1
# Below this value, neither a penalty nor a low temperature can make a logit infinite.
LARGEST_LOGIT = 1e30

# processor(ids (N,) int64 of prompt and answer so far, logits (V,) float32) -> logits (V,)
Processor: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"
Filter: TypeAlias = "Callable[[Tensor, Any], Tensor]"


# ------------------------------------------------------------------------------------------------------ filters
def repetition_penalty(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Make the ids in `seen` (.., N) less probable (arXiv:1909.05858). logits (.., V)."""
    before = logits.gather(-1, seen)  # (.., N)
    return logits.scatter(-1, seen, (before / penalty).where(before > 0, before * penalty))


def count_penalties(logits: Tensor, answer: Tensor, presence: float, frequency: float) -> Tensor:
    """For ids in `answer` (.., N), subtract `presence` once and `frequency` per occurrence from logits (.., V).

    The formula is OpenAI's: logit[j] - count[j] * frequency - (count[j] > 0) * presence.
    """
    count = logits.new_zeros(logits.shape).scatter_add(-1, answer, answer.new_ones(answer.shape).to(logits))  # (.., V)
    return logits - count * frequency - (count > 0) * presence


def add_bias(logits: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    """Add `values` (N,) to the logits (.., V) of `ids` (N,). Ids without a logit are never chosen anyway."""
    known = ids < logits.shape[-1]
    added = values[known].to(logits).expand(*logits.shape[:-1], -1)  # (.., N)
    return logits.index_add(-1, ids[known].to(logits.device), added)  # (.., V)


def process(logits: Tensor, ids: Tensor, processors: Sequence[Processor]) -> Tensor:
    """Apply the user's functions to logits (V,). Raises UsageError unless each returns logits with a finite maximum."""
    from torch import Tensor

    for processor in processors:
        found = processor(ids.clone(), logits.clone())  # it may change them in place; the log-probabilities need these
        floats = isinstance(found, Tensor) and found.is_floating_point()
        if not floats or (found.shape, found.device) != (logits.shape, logits.device):
            needed = f"floating-point logits {tuple(logits.shape)} on {logits.device}"
            raise UsageError(f"a processor must return {needed}, got {found!r:.80}")
        found = found.float()
        top = float(found.amax())
        if not math.isfinite(top) and math.isfinite(float(logits.amax())):
            raise UsageError(f"a processor must return logits with a finite maximum, got {top}")
        logits = found.clamp(max=LARGEST_LOGIT)  # dividing float32's largest number by a temperature would give inf
    return logits


def top_k(logits: Tensor, k: int) -> Tensor:
    """Mask all but the k largest logits; ties with the k-th stay."""
    k = min(k, logits.shape[-1])
    kth = logits.topk(k).values[..., -1:]  # (.., 1)
    return logits.masked_fill(logits < kth, -math.inf)


def top_p(logits: Tensor, p: float) -> Tensor:
    """Mask the tokens outside the smallest set whose probability reaches p. At least one token stays."""
    ordered, index = logits.sort(descending=True, stable=True)  # (.., V) each
    probability = ordered.softmax(-1)  # (.., V), the largest first, as in the next two lines
    before = probability.cumsum(-1) - probability  # total probability of all more probable tokens
    outside = before >= p
    outside[..., 0] = False
    outside = outside.scatter(-1, index, outside)  # (.., V) in the order of the ids
    return logits.masked_fill(outside, -math.inf)


def min_p(logits: Tensor, p: float) -> Tensor:
    """Mask tokens less probable than p times the most probable one (arXiv:2407.01082)."""
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(p), -math.inf)


KEEP_BEST = top_k, top_p, min_p  # filters that never exclude the most probable token


# ------------------------------------------------------------------------------------------------------ options
def option(default: float, low: float, high: float, about: str, filter: Filter | None = None) -> Any:
    """A numeric field of SamplingParams, which is also an option of the commands and of the server.

    about   the help, where X is the value, or N if it is an integer
    filter  filter(logits (.., V), value) -> logits with -inf for excluded tokens, applied unless value is the default;
            to a greedy choice, too, unless it is in KEEP_BEST
    """
    return dataclasses.field(default=default, metadata={"range": (low, high), "about": about, "filter": filter})


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. Construction raises UsageError if a value is out of range.

    max_new_tokens      maximum number of new tokens; 0 gives an empty answer
    logit_bias          {id: value added to its logit}; -100 practically excludes an id
    processors          functions f(ids, logits) -> logits, called in order: ids (N,) of prompt and answer, logits (V,)
    seed                seed of the draws; None: a random one
    """

    max_new_tokens: int = 256
    temperature: float = option(0.0, 0, 1e6, "divide logits by X; 0 takes the most probable token")
    top_k: int = option(0, 0, 2**31, "keep the N most probable tokens; 0 is off", top_k)
    top_p: float = option(1.0, 0, 1, "keep the fewest tokens whose probabilities sum to X; 1 is off", top_p)
    min_p: float = option(0.0, 0, 1, "keep tokens with at least X times the highest probability; 0 is off", min_p)
    repetition_penalty: float = option(1.0, 0.01, 100, "above 1, make tokens of the text less probable; 1 is off")
    presence_penalty: float = option(0.0, -100, 100, "subtract X from the logit of each token in the answer; 0 is off")
    frequency_penalty: float = option(0.0, -100, 100, "subtract X for each use of a token in the answer; 0 is off")
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    processors: Sequence[Processor] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        checks.integer("max_new_tokens", self.max_new_tokens, 0, 2**31)
        for name, field in OPTIONS.items():
            check = checks.integer if isinstance(field.default, int) else checks.number
            check(name, getattr(self, name), *field.metadata["range"])
        checks.instance("logit_bias", self.logit_bias, Mapping, "a mapping from ids to numbers")
        for id, bias in self.logit_bias.items():
            checks.integer("an id of logit_bias", id, 0)
            checks.number(f"logit_bias of id {id}", bias, -1000.0, 1000.0)
        if not isinstance(self.processors, Sequence) or not all(map(callable, self.processors)):
            raise UsageError(f"processors must be a list of functions, got {checks.shown(self.processors)}")
        if self.seed is not None:
            checks.integer("seed", self.seed, 0, LARGEST_SEED)

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always chosen; of equal ones, that with the lowest id."""
        return self.temperature < 1e-5 or self.top_k == 1

    @property
    def plain(self) -> bool:
        """Whether the logits are used as they are, apart from temperature and the filters after it."""
        penalties = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return not (penalties or self.logit_bias or self.processors)

    @property
    def filters(self) -> dict[str, Filter]:
        """The filters in use by name. A greedy choice does not depend on those that keep the most probable token."""
        used = {name: f.metadata["filter"] for name, f in OPTIONS.items() if getattr(self, name) != f.default}
        return {name: mask for name, mask in used.items() if mask and not (self.greedy and mask in KEEP_BEST)}

    @functools.cached_property
    def bias(self) -> tuple[Tensor, Tensor]:
        """The ids (N,) of logit_bias and what is added to their logits (N,), once for all tokens: N may be V."""
        import torch

        return torch.tensor([*self.logit_bias], dtype=torch.long), torch.tensor([*self.logit_bias.values()])


# The numeric options by name, filters in the order in which they are applied
OPTIONS = {field.name: field for field in dataclasses.fields(SamplingParams) if field.metadata}
SamplingParams.__doc__ = (SamplingParams.__doc__ or "") + "".join(
    f"    {name:18}  {field.metadata['about']}\n" for name, field in OPTIONS.items()
)


class History(NamedTuple):
    """The text so far: ids (.., N) int64 on the device of the logits. The answer begins at `start`."""

    ids: Tensor
    start: int


class Constraint(Protocol):
    """Limits the tokens of one answer, for example to a grammar (generation/structured.py)."""

    def allowed(self) -> Tensor:
        """Which tokens may come next: (V,) bool on the CPU. At least one is allowed."""

    def advance(self, id: int) -> None:
        """Append a token to the answer. After a stop id, further calls have no effect."""


# ------------------------------------------------------------------------------------- probabilities and the draw
def extreme(logits: Tensor) -> Tensor:
    """The largest of the logits (.., V) -> (..), or the smallest if that is NaN or below -LARGEST_LOGIT.

    This one number shows whether all logits are finite, since a minimum or maximum that includes NaN is NaN.
    """
    low, top = logits.aminmax(dim=-1)
    return top.where(low > -LARGEST_LOGIT, low)


def stages(
    logits: Tensor, params: SamplingParams, text: History | None = None, allowed: Tensor | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield "model" and the logits (.., V), float32, then the name of each stage in use and the logits after it.

    Excluded tokens have -inf. Raises UsageError if `text` is needed, or if processors, `allowed` and filters leave no
    token.
    """
    yield "model", (logits := logits.float())
    if not params.plain:
        if text is None:
            raise UsageError("penalties, logit_bias and processors need the text so far: pass text=History(ids, start)")
        if params.repetition_penalty != 1:
            logits = repetition_penalty(logits, text.ids, params.repetition_penalty)
        if params.presence_penalty != 0 or params.frequency_penalty != 0:
            counted = text.ids[..., text.start :], params.presence_penalty, params.frequency_penalty
            logits = count_penalties(logits, *counted)
        yield "penalties", logits
        if params.logit_bias:
            yield "logit_bias", (logits := add_bias(logits, *params.bias))
        yield "processors", (logits := process(logits, text.ids, params.processors))
    if allowed is not None:
        logits = logits.masked_fill(~allowed[: logits.shape[-1]].to(logits.device), -math.inf)
        if params.processors and bool(logits.amax() == -math.inf):
            raise UsageError("the processors exclude every token that the grammar allows")
        yield "grammar", logits
    if not params.greedy:
        yield "temperature", (logits := logits / params.temperature)
    for name, mask in params.filters.items():
        logits = mask(logits, getattr(params, name))
        if mask not in KEEP_BEST and bool((logits.amax(-1) == -math.inf).any()):
            raise UsageError(f"{name} ({getattr(params, name)}) excludes every token that the filters before it keep")
        yield name, logits


def probs(logits: Tensor, params: SamplingParams, text: History | None = None, allowed: Tensor | None = None) -> Tensor:
    """The distribution of the next token: logits (.., V) -> probabilities (.., V), float32.

    text is needed unless params.plain; allowed (V,) bool is a mask; processors see one row. Greedy parameters give a
    one-hot distribution; of equal logits, the lowest id is chosen.
    """
    *_, (_, logits) = stages(logits, params, text, allowed)
    if params.greedy:
        return logits.new_zeros(logits.shape).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
    return logits.softmax(-1)


def sample(probabilities: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One draw from each distribution: (.., V) -> (..) int64. Does not wait for the device, as torch.multinomial does.

    Of exponential variables with rates p, the smallest is at x with probability p(x) (the Gumbel-max trick), and E / p
    has rate p if E has rate 1. E may be 0: the bounds exclude 0 / 0, which is NaN, and change nothing else.
    """
    noise = probabilities.float().new_empty(probabilities.shape).exponential_(1, generator=generator)  # (.., V)
    return (probabilities / noise.clamp_(1e-20, 1e20)).argmax(-1)  # (..)


def choose(
    logits: Tensor,
    params: SamplingParams,
    text: History | None = None,
    generator: torch.Generator | None = None,
    logprobs: bool = False,
    allowed: Tensor | None = None,
    report: Callable[[str, Tensor], object] = lambda stage, logits: None,
) -> tuple[Tensor, ...]:
    """The next id (1,) from logits (V,), `extreme` of the logits (1,), and the id's log-probability (1,) if requested.

    text and allowed are those of `probs`; report gets each of `stages`. Only a bias, a processor or `allowed` may make
    this function wait for the device. NaN chooses an arbitrary id; the extreme reveals it (`generate.check_extreme`).
    """
    for stage, edited in stages(logits, params, text, allowed):
        report(stage, edited)
    next_id = edited.argmax(keepdim=True) if params.greedy else sample(edited.softmax(-1)[None], generator)  # (1,)
    top = extreme(logits)[None]  # (1,)
    return (next_id, top, logits.log_softmax(-1)[next_id]) if logprobs else (next_id, top)


def logprob_of(logits: Tensor, ids: Tensor) -> Tensor:
    """log p of ids (..) int64 under logits (.., V), where log_softmax adds up less exactly: (..) in the same dtype."""
    return logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)
