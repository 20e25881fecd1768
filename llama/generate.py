"""Token generation, from prompt ids to new ids: the prompt is prefilled in chunks, then tokens are decoded one by one.

The KV cache keeps the keys and values of all of them. text.py does the same from text to text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor

from . import checks
from .cache import KVCache
from .errors import ContextLengthError, NumericalError, UsageError
from .model import Transformer
from .sampling import LARGEST_LOGIT, SamplingParams, choose, extreme

# Explains, given the ids of a text, where its numbers stop being finite. engine/nonfinite.py has one.
Diagnosis = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Token:
    """One new token. `logprob` is its log-probability in the model's own distribution, before any filter.

    A stop id is yielded too, as the last token, with stop=True.
    """

    id: int
    logprob: float | None
    stop: bool


@torch.inference_mode()
def prefill(model: Transformer, tokens: Sequence[int], cache: KVCache, chunk: int | None = None) -> Tensor:
    """Feed ids into the model, `chunk` at a time to bound the memory; return the logits (V,) after the last id.

    chunk is 256 by default, and 2,048 on CUDA, where fewer tokens do not keep the device busy. Each chunk is passed the
    length of the complete text, so that a RoPE that depends on the length uses the same frequencies for all of it.
    """
    chunk = (2048 if cache.device.type == "cuda" else 256) if chunk is None else checks.integer("prefill chunk", chunk)
    if not tokens:
        raise UsageError("prefill needs at least one token")
    length = cache.length + len(tokens)
    cache.reserve(length)  # at once, so that the cache does not grow, and copy, in between
    for start in range(0, len(tokens), chunk):
        part = torch.tensor([tokens[start : start + chunk]], device=cache.device)  # (1, T)
        h = model.hidden(part, cache=cache, length=length)  # (1, T, C)
    return model.output(h[:, -1])[0].float()  # (V,): only the last token needs logits


@torch.inference_mode()
def generate(
    model: Transformer,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    stop_ids: Collection[int] = (),
    n_vocab: int | None = None,
    cache: KVCache | None = None,
    logprobs: bool = False,
    chunk: int | None = None,
    diagnose: Diagnosis | None = None,
) -> Iterator[Token]:
    """Yield new tokens until a stop id, max_new_tokens, or the end of the context.

    prompt    ids; at least one. The first cache.length of them are in the cache and are not fed again
    n_vocab   ids from here on are never chosen: rows of the embedding without a token in the vocabulary
    cache     the KV cache to use and to leave filled; default: a new one
    diagnose  explains logits that are not finite, for the error message

    Raises ContextLengthError if the prompt leaves no room for one new token, NumericalError if a logit is not finite.
    """
    text = list(prompt)
    room = room_for(model, text, params, cache)
    if room == 0:
        return
    if cache is None:
        cache = model.new_cache(len(text) + room)
    generator = random_generator(params, cache.device)
    seen = seen_ids(text, params, n_vocab, cache.device)  # (N,)

    def pick(logits: Tensor) -> tuple[Tensor, ...]:  # (V,) -> id (1,), extreme (1,), log-probability (1,) if requested
        nonlocal seen
        choice = choose(logits[:n_vocab], params, seen, generator, logprobs)
        seen = None if seen is None else torch.cat((seen, choice[0]))
        return choice

    logits = prefill(model, text[cache.length :], cache, chunk)  # (V,)
    with closing(model.runner.decode(model, logits, cache, room, pick)) as steps:
        for step, (id, top, *logprob) in enumerate(steps):
            check_extreme(top, f"new token {step + 1}", text, diagnose)
            text.append(id)
            yield Token(id, logprob[0] if logprob else None, id in stop_ids)
            if id in stop_ids:
                return


def room_for(model: Transformer, prompt: Sequence[int], params: SamplingParams, cache: KVCache | None) -> int:
    """The number of new tokens that fit after a prompt. Raises the errors of `generate` about prompt and cache."""
    if not prompt:
        raise UsageError("the prompt has no tokens and the model has no begin-of-text id to start from; pass some text")
    context = model.max_seq_len if cache is None else min(model.max_seq_len, cache.max_len)
    if len(prompt) >= context:
        raise ContextLengthError(
            f"the prompt has {len(prompt)} tokens and the context holds {context}, the answer included;"
            f" shorten the prompt or raise --max-seq-len"
        )
    vocab_size = model.config.vocab_size
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise UsageError(f"prompt ids must lie between 0 and {vocab_size - 1}, got {min(prompt)} to {max(prompt)}")
    room = min(params.max_new_tokens, context - len(prompt))
    if room and cache is not None and cache.length >= len(prompt):
        raise UsageError(f"the cache holds {cache.length} tokens, so none of the {len(prompt)} prompt tokens is new")
    return room


def random_generator(params: SamplingParams, device: torch.device) -> torch.Generator:
    """The random generator of one answer, seeded with params.seed or at random."""
    generator = torch.Generator(device)
    if params.seed is not None:
        generator.manual_seed(params.seed)
    else:
        generator.seed()
    return generator


def seen_ids(text: Sequence[int], params: SamplingParams, n_vocab: int | None, device: torch.device) -> Tensor | None:
    """The ids (N,) that the repetition penalty applies to; None if there is no penalty."""
    if params.repetition_penalty == 1:
        return None
    return torch.tensor([id for id in text if n_vocab is None or id < n_vocab], device=device, dtype=torch.long)


def check_finite(logits: Tensor, name: str, text: Sequence[int] = (), diagnose: Diagnosis | None = None) -> None:
    """Raise NumericalError if one of the logits (V,) is not finite. `name` is the token they predict, after `text`."""
    check_extreme(float(extreme(logits)), name, text, diagnose)


def check_extreme(top: float, name: str, text: Sequence[int] = (), diagnose: Diagnosis | None = None) -> None:
    """`check_finite` for the value of `sampling.extreme`: NaN or infinity would choose an arbitrary token."""
    if not -LARGEST_LOGIT < top < LARGEST_LOGIT:
        found = f"not finite (one is {top})" if not math.isfinite(top) else f"as large as {top:.3g}"
        cause = "the weights hold NaN or infinity, or overflow in this dtype: try --dtype float32"
        raise NumericalError(f"the logits of {name} are {found}; {cause if diagnose is None else diagnose(text)}")
