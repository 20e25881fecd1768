"""From logits to the next token: the filters (`stages`), the probabilities, and one draw.

`probs` defines the distribution of the next token. `choose` draws from it, on a CPU without sorting the vocabulary.

Importing this module does not import torch, since the command line reads the options before it does.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

from . import checks
from .errors import NumericalError, UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

LARGEST_SEED = 2**63 - 1
MOST_TOP_LOGPROBS = 1024
MOST_STOPS, LONGEST_STOP = 64, 1000  # limits: the number of stop strings, and the characters in one
# Below this value, neither a penalty nor a low temperature can make a logit infinite.
LARGEST_LOGIT = 1e30
CANDIDATES = 1024  # top_p first sorts only this many of the most probable tokens
SPARE = 64  # `choose` looks at this many tokens beyond the k largest, since some may equal the k-th

# processor(ids (N,) int64 of prompt and answer so far, logits (V,) float32) -> logits (V,)
Processor: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"
Filter: TypeAlias = "Callable[[Tensor, Any], Tensor]"
# A function of the ids of a text that says where in the model the numbers stop being finite (engine/nonfinite.py).
Diagnosis: TypeAlias = Callable[[Sequence[int]], str]


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
    """Add `values` (N,) to the logits (.., V) of `ids` (N,). Ids without a logit are ignored."""
    known = ids < logits.shape[-1]
    added = values[known].to(logits).expand(*logits.shape[:-1], -1)  # (.., N)
    return logits.index_add(-1, ids[known].to(logits.device), added)  # (.., V)


def process(logits: Tensor, ids: Tensor, processors: Sequence[Processor]) -> Tensor:
    """Apply the user's functions to logits (V,). Raises UsageError unless each returns logits with a finite maximum."""
    from torch import Tensor

    for processor in processors:
        found = processor(ids.clone(), logits.clone())  # copies, since a processor may change its arguments
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
    """Mask all but the k largest logits; logits equal to the k-th stay."""
    k = min(k, logits.shape[-1])
    kth = logits.topk(k).values[..., -1:]  # (.., 1)
    return logits.where(logits >= kth, -math.inf)


def top_p(logits: Tensor, p: float) -> Tensor:
    """Mask all but the smallest set of most probable tokens, at least one, whose total probability reaches p.

    Of equally probable tokens, those with lower ids come first.
    """
    probability = logits.softmax(-1)  # (.., V)
    index = candidates(probability, p)  # (.., N)
    ordered, order = logits.gather(-1, index).sort(descending=True, stable=True)  # (.., N) each, the largest first
    index = index.gather(-1, order)  # (.., N)
    total, some = cumulative(probability)[..., -1:], probability.gather(-1, index)  # (.., 1), (.., N)
    outside = cumulative(some) - some >= p * total  # (.., N): True if the tokens before this one reach p
    outside[..., 0] = False
    none = logits.new_full(logits.shape, -math.inf)
    return none.scatter(-1, index, ordered.masked_fill(outside, -math.inf))  # (.., V)


def candidates(probability: Tensor, p: float) -> Tensor:
    """Ascending ids (.., N) that include all that `top_p` keeps: CANDIDATES ids if they suffice, otherwise all ids."""
    import torch

    if reads_are_free(probability):
        index, least = largest(probability, CANDIDATES)  # (.., N), (.., 1)
        some = probability.gather(-1, index)  # (.., N)
        if bool((some.where(some > least, 0).sum(-1) > p).all()):  # without `least`, which other ids may equal
            return index
    return torch.arange(probability.shape[-1], device=probability.device).expand(probability.shape)


def largest(values: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """The ids of the n largest values (.., V), ascending, and the least of these values: (.., n) and (.., 1)."""
    best, index = values.topk(min(n, values.shape[-1]))  # (.., n) each
    return index.sort().values, best[..., -1:]


def cumulative(weights: Tensor) -> Tensor:
    """The cumulative sums of weights (.., V), in float64 if the device has it. The shape stays."""
    import torch

    return weights.cumsum(-1, dtype=torch.float32 if weights.device.type == "mps" else torch.float64)


def reads_are_free(tensor: Tensor) -> bool:
    """Whether the program may look at a value without waiting for a device."""
    return tensor.device.type == "cpu"


def min_p(logits: Tensor, p: float) -> Tensor:
    """Mask tokens less probable than p times the most probable one (arXiv:2407.01082)."""
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(p), -math.inf)


KEEP_BEST = top_k, top_p, min_p  # filters that never exclude the most probable token


# ------------------------------------------------------------------------------------------------------ options
def option(default: Any, about: str, range: Any = None, filter: Filter | None = None, group: str = "number") -> Any:
    """A field of SamplingParams, which is also an option of the commands and of the server.

    about   the help text, in which X stands for the value, or N for an integer
    range   the lowest and the highest number allowed
    filter  a function (logits (.., V), value) -> logits with -inf for excluded tokens. It is applied if the value is
            not the default, and to a greedy choice only if it is not in KEEP_BEST
    group   "number": generation_config.json may set the option. "end": it affects when an answer ends. "grammar": only
            one of these may be given. "scores": not allowed in the lines of a batch, whose answers all have the same
            keys. "code": only in Python
    """
    factory = {"default_factory": dict} if default == {} else {"default": default}
    return dataclasses.field(metadata={"range": range, "about": about, "filter": filter, "group": group}, **factory)


@dataclass(frozen=True)
class SamplingParams:
    """All options of one answer. Construction raises UsageError if a value is out of range.

    Most options from `stop` on need the tokenizer: `Llama` turns them into arguments of `generate.generate`.
    """

    max_new_tokens: int = option(256, "maximum number of new tokens", (0, 2**31), group="")
    temperature: float = option(0.0, "divide logits by X; 0 takes the most probable token", (0, 1e6))
    top_k: int = option(0, "keep the N most probable tokens; 0 is off", (0, 2**31), top_k)
    top_p: float = option(1.0, "keep the fewest tokens of total probability X; 1 is off", (0, 1), top_p)
    min_p: float = option(0.0, "keep tokens with at least X times the highest probability; 0 is off", (0, 1), min_p)
    repetition_penalty: float = option(1.0, "above 1, make tokens in the text less probable; 1 is off", (0.01, 100))
    presence_penalty: float = option(
        0.0, "subtract X from the logit of each token in the answer; 0 is off", (-100, 100)
    )
    frequency_penalty: float = option(0.0, "subtract X for each use of a token in the answer; 0 is off", (-100, 100))
    logit_bias: Mapping[int, float] = option({}, "{id: value added to its logit}; -100 excludes an id", group="")
    processors: Sequence[Processor] = option((), "functions f(ids (N,) so far, logits (V,)) -> logits", group="code")
    seed: int | None = option(None, "make the answer repeatable (default: random)", (0, LARGEST_SEED), group="")

    stop: Sequence[str] = option((), "a string or list of strings; each ends the text", group="end")
    stop_token_ids: Sequence[int] = option((), "ids that end the answer", group="end")
    min_tokens: int = option(0, "do not end the answer before it has N tokens", (0, 2**31), group="end")
    ignore_eos: bool = option(False, "end the answer only at the maximum number of new tokens", group="end")
    thinking_budget: int | None = option(None, "close the thought after N tokens (chats)", (0, 2**31), group="end")
    schema: Mapping[str, Any] | str | bool | None = option(None, "a JSON schema, or a pydantic model", group="grammar")
    regex: str | None = option(None, "a regular expression that the whole answer matches", group="grammar")
    grammar: str | None = option(None, "a grammar in Lark syntax that the answer matches", group="grammar")
    logprobs: bool = option(False, "True: the log-probability of each new token", group="scores")
    top_logprobs: int = option(0, "also log-probabilities of the N best tokens", (0, MOST_TOP_LOGPROBS), group="scores")
    prompt_logprobs: bool = option(False, "True: also log-probabilities of the prompt; without a draft", group="scores")

    def __post_init__(self) -> None:
        for name, field in OPTIONS.items():
            value, range = getattr(self, name), field.metadata["range"]
            if isinstance(field.default, bool):
                checks.boolean(name, value)
            elif range and (value is not None or field.default is not None):
                (checks.number if isinstance(field.default, float) else checks.integer)(name, value, *range)
        checks.instance("logit_bias", self.logit_bias, Mapping, "a mapping from ids to numbers")
        for id, bias in self.logit_bias.items():
            checks.integer("an id of logit_bias", id, 0)
            checks.number(f"logit_bias of id {id}", bias, -1000.0, 1000.0)
        if not isinstance(self.processors, Sequence) or not all(map(callable, self.processors)):
            raise UsageError(f"processors must be a list of functions, got {checks.shown(self.processors)}")
        stops = (self.stop,) if not isinstance(self.stop, list | tuple | None) else tuple(self.stop or ())
        fits = all(isinstance(text, str) and 0 < len(text) <= LONGEST_STOP for text in stops)
        if not fits or len(stops) > MOST_STOPS:
            expected = f"at most {MOST_STOPS} stop strings of 1 to {LONGEST_STOP} characters"
            raise UsageError(f"stop must be a string or a list: {expected}, got {checks.shown(self.stop)}")
        if isinstance(self.stop_token_ids, str) or not isinstance(self.stop_token_ids, Sequence | None):
            raise UsageError(f"stop_token_ids must be a list of token ids, got {checks.shown(self.stop_token_ids)}")
        stop_ids = tuple(checks.integer("an id of stop_token_ids", id, 0) for id in self.stop_token_ids or ())
        vars(self).update(stop=stops, stop_token_ids=stop_ids)  # the fields are frozen for others
        if len(given := [name for name in option_names("grammar") if getattr(self, name) is not None]) > 1:
            raise UsageError(f"{' and '.join(given)} can't be combined: give one of them")

    @property
    def greedy(self) -> bool:
        """Whether the most probable token is always chosen (of equal ones, the one with the lowest id)."""
        return self.temperature < 1e-5 or self.top_k == 1

    @property
    def scored(self) -> bool:
        """Whether each token gets its log-probability."""
        return self.logprobs or self.top_logprobs > 0

    @property
    def plain(self) -> bool:
        """Whether no penalty, bias or processor is in use."""
        penalties = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return not (penalties or self.logit_bias or self.processors)

    @property
    def filters(self) -> dict[str, Filter]:
        """The filters in use, by name. A greedy choice leaves out those in KEEP_BEST, which can't change the choice."""
        used = {name: f.metadata["filter"] for name, f in OPTIONS.items() if getattr(self, name) != f.default}
        return {name: mask for name, mask in used.items() if mask and not (self.greedy and mask in KEEP_BEST)}

    @functools.cached_property
    def bias(self) -> tuple[Tensor, Tensor]:
        """The ids (N,) of logit_bias and the values (N,) added to their logits. Cached, since N may be V."""
        import torch

        return torch.tensor([*self.logit_bias], dtype=torch.long), torch.tensor([*self.logit_bias.values()])


# All options by name. The filters among them are applied in this order.
OPTIONS = {field.name: field for field in dataclasses.fields(SamplingParams)}
SamplingParams.__doc__ = f"{SamplingParams.__doc__}\n" + "".join(
    f"    {name:18}  {field.metadata['about']}\n" for name, field in OPTIONS.items()
)


def option_names(*groups: str) -> list[str]:
    """The names of the options in some groups (see `option`)."""
    return [name for name, field in OPTIONS.items() if field.metadata["group"] in groups]


class History(NamedTuple):
    """The text so far: ids (.., N) int64 on the device of the logits. The answer begins at `start`."""

    ids: Tensor
    start: int


class Constraint(Protocol):
    """Limits the tokens of one answer, for example to a grammar (generation/structured.py)."""

    def allowed(self) -> Tensor | None:
        """Which tokens may come next: (V,) bool on the CPU, with at least one True. None allows all."""

    def advance(self, id: int) -> None:
        """Append a token to the answer. After a stop id, further calls have no effect."""


# ------------------------------------------------------------------------------------- probabilities and the draw
def extreme(logits: Tensor) -> Tensor:
    """The largest logit, or the smallest one if the smallest is NaN or below -LARGEST_LOGIT: (.., V) -> (..).

    This one number shows whether all logits are finite, since a minimum or maximum that includes NaN is NaN.
    """
    low, top = logits.amin(-1), logits.amax(-1)  # aminmax with a dim takes ten times as long
    return top.where(low > -LARGEST_LOGIT, low)


def stages(
    logits: Tensor,
    params: SamplingParams,
    text: History | None = None,
    allowed: Tensor | None = None,
    without: Collection[str] = (),
) -> Iterator[tuple[str, Tensor]]:
    """Yield "model" and the logits (.., V), float32, then the name of each stage in use and the logits after it.

    Excluded tokens have -inf. The filters named in `without` are not applied. Raises UsageError if a
    needed `text` is missing, or if processors, `allowed` and filters leave no token.
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
        if name in without:
            continue
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


def sample(weights: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One draw from each distribution, in proportion to weights (.., V): (..) int64. Does not wait for the device.

    It is the first id at which the cumulative sum of weights reaches a uniform random number. As that number is not 0,
    an id with weight 0 is never drawn. If a weight is NaN, the id is arbitrary.
    """
    import torch

    sums = cumulative(weights)  # (.., V)
    shape = (*sums.shape[:-1], 1)
    uniform = 1 - torch.rand(shape, generator=generator, dtype=sums.dtype, device=sums.device)  # above 0, at most 1
    found = torch.searchsorted(sums, uniform * sums[..., -1:])  # (.., 1)
    return found.squeeze(-1).clamp_(max=sums.shape[-1] - 1)  # (..)


def choose(
    logits: Tensor,
    params: SamplingParams,
    generators: Sequence[torch.Generator | None],
    text: History | None = None,
    allowed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The next ids (..) from logits (.., V) of answers with equal options, and `extreme` of the logits (..).

    One generator for each row; text and allowed are those of `probs`. Only a bias, a processor or `allowed` may make
    this function wait for a GPU. If a logit is NaN, the id is arbitrary; `check_extreme` detects it.
    """
    simple = reads_are_free(logits) and {*params.filters.values()} <= {*KEEP_BEST}
    late = params.filters.keys() if simple else ()
    *_, (_, edited) = stages(logits, params, text, allowed, late)
    if params.greedy:
        return edited.argmax(-1), extreme(logits)
    if "top_k" not in late:
        return draw(edited, params, late, generators), extreme(logits)
    index, _ = largest(edited, params.top_k + SPARE)  # (.., N)
    some = top_k(edited.gather(-1, index), params.top_k)  # (.., N)
    if bool(some.amin(-1).isneginf().all()):  # `some` includes every token that equals the k-th
        ids = draw(some, params, late, generators)  # (..)
        return index.gather(-1, ids[..., None])[..., 0], extreme(logits)
    return draw(top_k(edited, params.top_k), params, late, generators), extreme(logits)


def draw(
    logits: Tensor, params: SamplingParams, late: Collection[str], generators: Sequence[torch.Generator | None]
) -> Tensor:
    """Apply top_p and min_p to logits (.., V) if `late` names them, and draw an id per row: (..) int64.

    Nothing is sorted. The first id is drawn from all ids. If a filter excludes that id, it also excludes every less
    probable id, so the next draw is among the more probable ids (`come_before`). The first id that no filter excludes
    has the filtered distribution.
    """
    import torch

    shape, logits = logits.shape[:-1], logits.reshape(-1, logits.shape[-1])  # (B, V)
    weights, ids = (logits - logits.amax(-1, keepdim=True)).exp_(), []  # (B, V)
    for values, row, generator in zip(logits, weights, generators, strict=True):  # (V,) each
        id = sample(row, generator)  # ()
        while late:
            earlier = come_before(values, id)  # (V,)
            in_top_p = "top_p" not in late or not bool(earlier @ row >= params.top_p * row.sum())
            in_min_p = "min_p" not in late or not bool(values[id] < values.amax() + math.log(params.min_p))
            if (in_top_p and in_min_p) or not bool(earlier.any()):
                break
            id = sample(row * earlier, generator)  # ()
        ids.append(id)
    return torch.stack(ids).view(shape)  # (..)


def come_before(logits: Tensor, id: Tensor) -> Tensor:
    """1.0 for each id that is more probable than `id` (), or as probable and lower; 0.0 for others. (V,) -> (V,)."""
    import torch

    found = torch.gt(logits, logits[id], out=torch.empty_like(logits))  # as float32: faster than making a bool
    torch.ge(logits[:id], logits[id], out=found[:id])
    return found


def logprob_of(logits: Tensor, ids: Tensor) -> Tensor:
    """log p of ids (..) int64 under logits (.., V), more precise than log_softmax: (..) in the same dtype."""
    return logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


def most_probable(logits: Tensor, k: int) -> dict[int, float]:
    """{id: log-probability} of the k most probable ids under logits (V,), most probable first."""
    values, ids = logits.topk(min(k, len(logits)))  # (k,) each
    return dict(zip(ids.tolist(), (values - logits.logsumexp(-1)).tolist(), strict=True))


def check_extreme(top: float, name: str, text: Sequence[int] = (), diagnose: Diagnosis | None = None) -> None:
    """Raise NumericalError if the `extreme` of logits is not finite or too large for a meaningful choice.

    In the message, `name` says which token the logits predict. `text` has the ids before that token.
    """
    if not -LARGEST_LOGIT < top < LARGEST_LOGIT:
        found = f"not finite (one is {top})" if not math.isfinite(top) else f"as large as {top:.3g}"
        cause = "the weights hold NaN or infinity, or overflow in this dtype: try dtype='float32' (--dtype float32)"
        raise NumericalError(f"the logits of {name} are {found}; {cause if diagnose is None else diagnose(text)}")


# --------------------------------------------------------------------------------------------- the tokens of one answer
@dataclass(frozen=True)
class Token:
    """One new token. `logprob` is its log-probability in the model's own distribution, before any filter.

    top is {id: log-probability} of the most probable tokens, most probable first, as many as were requested. A stop id
    also becomes a Token, the last one, with stop=True.
    """

    id: int
    logprob: float | None
    stop: bool
    top: Mapping[int, float] = dataclasses.field(default_factory=dict)


def random_generator(params: SamplingParams, device: torch.device) -> torch.Generator:
    """The random generator of one answer, seeded with params.seed or at random."""
    import torch

    generator = torch.Generator(device)
    return generator.manual_seed(generator.seed() if params.seed is None else params.seed)


def history_of(
    text: Sequence[int], start: int, params: SamplingParams, n_vocab: int | None, device: torch.device
) -> History | None:
    """The text as `probs` needs it, without ids beyond n_vocab; None if the parameters do not depend on it."""
    import torch

    if params.plain:
        return None
    known = [id for id in text if n_vocab is None or id < n_vocab]
    start = sum(n_vocab is None or id < n_vocab for id in text[:start])
    return History(torch.tensor(known, device=device, dtype=torch.long), start)


@dataclass(eq=False)
class Chooser:
    """Chooses the tokens of one answer, one after the other. `text` has the ids of the prompt and of the answer."""

    prompt: InitVar[Sequence[int]]
    params: SamplingParams
    device: torch.device  # of the logits
    stop_ids: Collection[int] = ()
    n_vocab: int | None = None  # ids from n_vocab on are never chosen: padding rows of the embedding
    constraint: Constraint | None = None  # usable for one answer only
    world: Any = None  # the processes that share the model: all use rank 0's choice, since rounding may differ
    diagnose: Diagnosis | None = None  # explains non-finite logits in the error message
    answer_start: int | None = None  # where the answer begins; None: after the prompt

    def __post_init__(self, prompt: Sequence[int]) -> None:
        self.text = list(prompt)
        self.start = len(self.text) if self.answer_start is None else self.answer_start
        self.generator = random_generator(self.params, self.device)
        self.history = history_of(self.text, self.start, self.params, self.n_vocab, self.device)

    def choose(self, logits: Tensor, choice: tuple[int, float] | None = None) -> Token:
        """The next token from logits (V,). Raises NumericalError if a logit is not finite.

        choice  the id that `choose_rows` chose, and the `extreme` of the logits; None: choose here
        """
        logits = logits[: self.n_vocab]
        if choice is None:
            found = choose(logits, self.params, [self.generator], self.history, self.allowed())  # () each
            id, top = found if self.world is None else self.world.agree(found)
            choice = int(id), float(top)
        self.check(choice[1])
        return self.append(choice[0], logits)

    @property
    def alike(self) -> Hashable:
        """A key: `choose` can draw answers with equal keys together. None if a choice needs more than the logits."""
        params = self.params
        if self.history is not None or self.constraint is not None or not {*params.filters.values()} <= {*KEEP_BEST}:
            return None
        values = [(name, getattr(params, name)) for name in params.filters]
        return 0 if params.greedy else params.temperature, *values

    def stages(self, logits: Tensor) -> dict[str, Tensor]:
        """{name of the stage: logits} of all `stages`, from the next token's logits (V,)."""
        return dict(stages(logits[: self.n_vocab], self.params, self.history, self.allowed()))

    def probs(self, logits: Tensor) -> Tensor:
        """The distribution of the next token from logits (V,): (V,). Raises NumericalError if a logit is not finite."""
        logits = logits[: self.n_vocab]
        self.check(float(extreme(logits)))
        return probs(logits, self.params, self.history, self.allowed())

    def append(self, id: int, logits: Tensor) -> Token:
        """Add a token, which was chosen from logits (V,), to the text."""
        import torch

        logits, k = logits[: self.n_vocab], self.params.top_logprobs  # (V,)
        self.text.append(id)
        if self.history is not None:
            self.history = self.history._replace(
                ids=torch.cat((self.history.ids, torch.tensor([id]).to(logits.device)))
            )
        if self.constraint is not None:
            self.constraint.advance(id)
        logprob = float(logprob_of(logits, torch.tensor(id, device=logits.device))) if self.params.scored else None
        return Token(id, logprob, id in self.stop_ids, most_probable(logits, k) if k else {})

    def allowed(self) -> Tensor | None:
        """Which tokens the constraint allows next: (V,) bool. None allows all."""
        return None if self.constraint is None else self.constraint.allowed()

    def check(self, top: float) -> None:
        """Raise NumericalError if the `extreme` of the next token's logits is not finite, or too large."""
        check_extreme(top, f"new token {len(self.text) - self.start + 1}", self.text, self.diagnose)


def choose_rows(choosers: Mapping[int, Chooser], logits: Tensor) -> dict[int, tuple[int, float]]:
    """{row: (id, extreme)} for logits (B, V), without the answers whose choice depends on more than the logits.

    Rows with equal options are drawn together, so the program waits for a GPU once for all of them.
    """
    groups: dict[Hashable, list[int]] = {}
    for row, chooser in choosers.items():
        if chooser.alike is not None:
            groups.setdefault(chooser.alike, []).append(row)
    choices: dict[int, tuple[int, float]] = {}
    for rows in groups.values():
        some = [choosers[row] for row in rows]
        found = choose(logits[rows], some[0].params, [chooser.generator for chooser in some])  # (b,) each
        world = some[0].world
        ids, tops = found if world is None else world.agree(found)
        choices |= zip(rows, zip(ids.tolist(), tops.tolist(), strict=True), strict=True)
    return choices
