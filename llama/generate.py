"""Token generation, from prompt ids to new ids: the prompt is prefilled in chunks, then tokens are decoded one by one.

The KV cache keeps the keys and values of all of them. text.py does the same from text to text.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import checks
from .cache import KVCache
from .errors import ContextLengthError, NumericalError, UsageError
from .model import Transformer
from .sampling import LARGEST_LOGIT, Constraint, History, SamplingParams, choose

# Explains, given the ids of a text, where its numbers stop being finite. engine/nonfinite.py has one.
Diagnosis = Callable[[Sequence[int]], str]
# Called after each chunk of a prompt with the number of tokens fed so far, and the number of all tokens to feed.
Progress = Callable[[int, int], object]


@dataclass(frozen=True)
class Token:
    """One new token. `logprob` is its log-probability in the model's own distribution, before any filter.

    top is {id: log-probability} of the most probable tokens, most probable first, as many as were requested. A stop id
    is yielded too, as the last token, with stop=True.
    """

    id: int
    logprob: float | None
    stop: bool
    top: Mapping[int, float] = field(default_factory=dict)


def prompt_chunk(device: torch.device | str) -> int:
    """The most tokens of a prompt in one pass on a device: fewer do not keep a GPU busy, more take more memory."""
    return 2048 if torch.device(device).type == "cuda" else 256


@torch.inference_mode()
def prefill(
    model: Transformer,
    tokens: Sequence[int],
    cache: KVCache,
    chunk: int | None = None,
    progress: Progress | None = None,
) -> Tensor:
    """Feed ids into the model, `chunk` at a time to bound the memory; return the logits (V,) after the last id.

    chunk is `prompt_chunk` by default. Each chunk is passed the length of the complete text, so that a RoPE that
    depends on the length uses the same frequencies for all of it.
    """
    if not tokens:
        raise UsageError("prefill needs at least one token")
    done = 0
    for hidden in prefill_chunks(model, tokens, cache, chunk):  # (1, T, C)
        last = hidden[:, -1]  # (1, C): only the last token needs logits
        done += hidden.shape[1]
        if progress is not None:
            progress(done, len(tokens))
    return model.output(last)[0].float()  # (V,)


@torch.inference_mode()
def prefill_chunks(
    model: Transformer, tokens: Sequence[int], cache: KVCache, chunk: int | None = None
) -> Iterator[Tensor]:
    """Feed the chunks of `prefill`. Yields the hidden states (1, T, C) of each chunk after it is in the cache."""
    chunk = prompt_chunk(cache.device) if chunk is None else checks.integer("prefill chunk", chunk)
    length = cache.length + len(tokens)
    cache.reserve(length)  # at once, so that the cache does not grow, and copy, in between
    for start in range(0, len(tokens), chunk):
        part = torch.tensor([tokens[start : start + chunk]], device=cache.device)  # (1, T)
        yield model.hidden(part, cache=cache, length=length)  # (1, T, C)


@torch.inference_mode()
def generate(  # many parameters, since an answer has no other state
    model: Transformer,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    stop_ids: Collection[int] = (),
    n_vocab: int | None = None,
    cache: KVCache | None = None,
    logprobs: bool = False,
    top_logprobs: int = 0,
    constraint: Constraint | None = None,
    chunk: int | None = None,
    diagnose: Diagnosis | None = None,
    progress: Progress | None = None,
) -> Iterator[Token]:
    """Yield new tokens until a stop id, max_new_tokens, or the end of the context.

    prompt    ids; at least one. The first cache.length of them are in the cache and are not fed again
    n_vocab   ids from here on are never chosen: rows of the embedding without a token in the vocabulary
    cache     the KV cache to use and to leave filled; default: a new one
    top_logprobs  the number of most probable tokens in Token.top
    constraint    limits the tokens; usable for one answer only
    diagnose      explains logits that are not finite, for the error message
    progress      see `Progress`

    Raises ContextLengthError if the prompt leaves no room for one new token, NumericalError if a logit is not finite.
    """
    text = list(prompt)
    room = room_for(model, text, params, cache)
    if room == 0:
        return
    if cache is None:
        cache = model.new_cache(len(text) + room)
    generator = random_generator(params, cache.device)
    history = history_of(text, len(text), params, n_vocab, cache.device)
    tops: deque[tuple[Tensor, Tensor]] = deque()  # (k,) log-probabilities and ids of each token, until it is yielded

    def pick(logits: Tensor) -> tuple[Tensor, ...]:  # (V,) -> id (1,), extreme (1,), log-probability (1,) if requested
        nonlocal history
        logits = logits[:n_vocab]
        allowed = None if constraint is None else constraint.allowed()
        choice = agree(model, choose(logits, params, history, generator, logprobs, allowed))
        if history is not None:
            history = History(torch.cat((history.ids, choice[0])), history.start)
        if top_logprobs:
            tops.append(most_probable(logits, top_logprobs))
        if constraint is not None:
            constraint.advance(int(choice[0]))
        return choice

    logits = prefill(model, text[cache.length :], cache, chunk, progress)  # (V,)
    with closing(model.runner.decode(model, logits, cache, room, pick)) as steps:
        for step, (id, top, *logprob) in enumerate(steps):
            check_extreme(top, f"new token {step + 1}", text, diagnose)
            text.append(id)
            yield Token(id, logprob[0] if logprob else None, id in stop_ids, top_of(tops.popleft()) if tops else {})
            if id in stop_ids:
                return


def agree(model: Transformer, choice: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A choice from logits; the first process's, if several share the model, since others may round differently."""
    agreed: tuple[Tensor, ...] = choice if model.runner.world is None else model.runner.world.agree(choice)
    return agreed


def room_for(model: Transformer, prompt: Sequence[int], params: SamplingParams, cache: KVCache | None) -> int:
    """The number of new tokens that fit after a prompt. Raises the errors of `generate` about prompt and cache."""
    if not prompt:
        raise UsageError("the prompt has no tokens and the model has no begin-of-text id to start from; pass some text")
    context = model.max_seq_len if cache is None else min(model.max_seq_len, cache.max_len)
    if len(prompt) >= context:
        raise ContextLengthError(
            f"the prompt has {len(prompt)} tokens, but the context of {context} must hold prompt and answer;"
            f" shorten the prompt or raise max_seq_len (--max-seq-len)"
        )
    checks.known_ids(prompt, model.config.vocab_size)
    checks.known_ids(params.logit_bias, model.config.vocab_size)
    room = min(params.max_new_tokens, context - len(prompt))
    if room and cache is not None and cache.length >= len(prompt):
        raise UsageError(
            f"the cache holds the beginning of the prompt, so the prompt must be longer; got {len(prompt)} prompt"
            f" tokens and {cache.length} cached: trim the cache, or use a new one"
        )
    return room


def random_generator(params: SamplingParams, device: torch.device) -> torch.Generator:
    """The random generator of one answer, seeded with params.seed or at random."""
    generator = torch.Generator(device)
    return generator.manual_seed(generator.seed() if params.seed is None else params.seed)


def history_of(
    text: Sequence[int], start: int, params: SamplingParams, n_vocab: int | None, device: torch.device
) -> History | None:
    """The text as `sampling.probs` needs it, without ids beyond n_vocab; None if the parameters do not depend on it."""
    if params.plain:
        return None
    known = [id for id in text if n_vocab is None or id < n_vocab]
    start = sum(n_vocab is None or id < n_vocab for id in text[:start])
    return History(torch.tensor(known, device=device, dtype=torch.long), start)


def most_probable(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest log-probabilities of logits (.., V), and their ids: (.., k) each."""
    values, ids = logits.float().log_softmax(-1).topk(min(k, logits.shape[-1]))  # (.., k) each
    return values, ids


def top_of(found: tuple[Tensor, Tensor]) -> dict[int, float]:
    """{id: log-probability} from `most_probable` of logits (V,)."""
    return dict(zip(found[1].tolist(), found[0].tolist(), strict=True))


def check_extreme(top: float, name: str, text: Sequence[int] = (), diagnose: Diagnosis | None = None) -> None:
    """Raise NumericalError if the `sampling.extreme` of logits is not finite or too large for a meaningful choice.

    name is the token that the logits predict, after `text`.
    """
    if not -LARGEST_LOGIT < top < LARGEST_LOGIT:
        found = f"not finite (one is {top})" if not math.isfinite(top) else f"as large as {top:.3g}"
        cause = "the weights hold NaN or infinity, or overflow in this dtype: try dtype='float32' (--dtype float32)"
        raise NumericalError(f"the logits of {name} are {found}; {cause if diagnose is None else diagnose(text)}")
