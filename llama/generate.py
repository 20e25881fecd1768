"""The token generator: prompt ids in, new ids out, one at a time. It knows ids, never text.

It reads like what happens: the prompt goes through the model in chunks (prefill), then each new token goes in alone
(decode), and the keys and values of all of them stay in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from .cache import KVCache
from .engine import cuda_graphs as decoding
from .engine.nonfinite import locate
from .errors import ContextLengthError, NumericalError, UsageError
from .model import Transformer
from .sampling import LARGEST_LOGIT, SamplingParams, extreme, probs, sample


@dataclass(frozen=True)
class Token:
    """One new token. `logprob` is its log-probability in the model's own distribution, before any filter.

    A stop id is yielded too, as the last one with stop=True, so that nothing the model said is hidden.
    """

    id: int
    logprob: float | None
    stop: bool


@torch.inference_mode()
def prefill(model: Transformer, tokens: Sequence[int], cache: KVCache, chunk: int | None = None) -> Tensor:
    """Feed ids into the model, `chunk` at a time so that memory stays bounded: logits (V,) after the last of them.

    chunk is 256 by default, and on CUDA 2,048: there it takes more to keep the device busy. Every chunk knows how long
    the whole will be, so also a RoPE that depends on the length turns all of it alike.
    """
    chunk = (2048 if cache.device.type == "cuda" else 256) if chunk is None else chunk
    if chunk < 1:
        raise UsageError(f"the prefill chunk must be at least 1 token, got {chunk}")
    if not tokens:
        raise UsageError("prefill needs at least one token")
    device = cache.device
    length = cache.length + len(tokens)
    cache.reserve(length)  # at once, so that nothing is copied on the way
    for start in range(0, len(tokens), chunk):
        part = torch.tensor([tokens[start : start + chunk]], device=device)  # (1, T)
        h = model.hidden(part, cache=cache, length=length)  # (1, T, C)
    return model.output(h[:, -1])[0].float()  # (V,): only the last token needs logits


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
) -> Iterator[Token]:
    """Yield new tokens until a stop id, max_new_tokens, or the end of the context.

    prompt   ids; at least one. Those the cache already holds (the first cache.length) are not fed again
    n_vocab  ids from here on are never chosen: rows of the embedding that the tokenizer has no token for
    cache    the KV cache to use and to leave filled; a fresh one by default

    Raises ContextLengthError when the prompt leaves no room for one new token, NumericalError when a logit is
    not finite, naming the step and the layer where that began.
    """
    prompt = list(prompt)
    room = room_for(model, prompt, params, cache)
    if room == 0:
        return
    if cache is None:
        cache = model.new_cache(len(prompt) + room)
    device = cache.device
    generator = random_generator(params, device)
    seen = None  # (N,) ids for the repetition penalty
    if params.repetition_penalty != 1:
        seen = torch.tensor([id for id in prompt if n_vocab is None or id < n_vocab], device=device, dtype=torch.long)

    text = list(prompt)  # and what is said
    where = partial(locate, model, text)
    logits = prefill(model, prompt[cache.length :], cache, chunk)  # (V,)
    if decoding.fits(model, cache):
        steps = decoding.decode(
            model, logits, cache, params, room, n_vocab=n_vocab, seen=seen, generator=generator, logprobs=logprobs
        )
        with closing(steps):
            for step, choice in enumerate(steps):
                check_top(choice.top, f"new token {step + 1}", where)
                text.append(choice.id)
                yield Token(choice.id, choice.logprob, choice.id in stop_ids)
                if choice.id in stop_ids:
                    return
        return
    for step in range(room):
        logits = logits[:n_vocab]
        next_id = choose(logits, params, seen, generator, step, where)
        text.append(next_id)
        logprob = float(logits.log_softmax(-1)[next_id]) if logprobs else None
        stop = next_id in stop_ids
        yield Token(next_id, logprob, stop)
        if stop or step + 1 == room:
            return
        if seen is not None:
            seen = torch.cat((seen, torch.tensor([next_id], device=device)))
        logits = prefill(model, [next_id], cache)


def room_for(model: Transformer, prompt: Sequence[int], params: SamplingParams, cache: KVCache | None) -> int:
    """How many new tokens there is room for behind a prompt. Raises what `generate` says of prompt and cache."""
    if not prompt:
        raise UsageError("the prompt has no tokens and the model has no begin-of-text id to start from; give some text")
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
        raise UsageError(f"the cache holds {cache.length} tokens, which leaves none of the {len(prompt)} to be fed")
    return room


def random_generator(params: SamplingParams, device: torch.device) -> torch.Generator:
    """Where the draws of one answer come from."""
    generator = torch.Generator(device)
    if params.seed is not None:
        generator.manual_seed(params.seed)
    else:
        generator.seed()
    return generator


def choose(
    logits: Tensor,
    params: SamplingParams,
    seen: Tensor | None,
    generator: torch.Generator,
    step: int,
    where: Callable[[], str] | None = None,
) -> int:
    """One id from logits (V,). A NaN or +inf would pick some token without a word, so it is an error."""
    check_finite(logits, f"new token {step + 1}", where)
    if params.greedy and seen is None:
        return int(logits.argmax())
    return int(sample(probs(logits, params, seen), generator))


def check_finite(logits: Tensor, what: str, where: Callable[[], str] | None = None) -> None:
    """Raise NumericalError, naming what was to be chosen, where one of the logits (V,) is no finite number.

    where  what tells the layer it began in, asked only then (nonfinite.py)
    """
    check_top(float(extreme(logits)), what, where)


def check_top(top: float, what: str, where: Callable[[], str] | None = None) -> None:
    """`check_finite` for what `sampling.extreme` says of the logits."""
    if not -LARGEST_LOGIT < top < LARGEST_LOGIT:
        told = f"not finite (one is {top})" if not math.isfinite(top) else f"as large as {top:.3g}"
        why = "the weights hold NaN or infinity, or overflow in this dtype: try --dtype float32"
        raise NumericalError(f"the logits of {what} are {told}; {why if where is None else where()}")
