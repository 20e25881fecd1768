"""Token generation, from prompt ids to new ids: the prompt is prefilled in chunks, then tokens are decoded one by one.

The KV cache keeps the keys and values of the prompt and of the new tokens. text.py does the same for strings.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from . import checks
from .cache import KVCache
from .errors import ContextLengthError, UsageError
from .model import Transformer
from .sampling import Chooser, Constraint, Diagnosis, SamplingParams, Token

# Called after each chunk of a prompt with the number of tokens processed so far, and the total to process.
Progress = Callable[[int, int], object]


def prompt_chunk(device: torch.device | str) -> int:
    """The maximum of prompt tokens in one pass. Smaller chunks leave a GPU idle, larger ones take more memory."""
    return 2048 if torch.device(device).type == "cuda" else 256


@torch.inference_mode()
def prefill(model: Transformer, tokens: Sequence[int], cache: KVCache, progress: Progress | None = None) -> Tensor:
    """Feed ids into the model, in chunks; return the logits (V,) after the last id."""
    if not tokens:
        raise UsageError("prefill needs at least one token")
    done = 0
    for hidden in prefill_chunks(model, [tokens], cache):  # (1, T, C)
        last = hidden[:, -1]  # (1, C): only the last token needs logits
        done += hidden.shape[1]
        if progress is not None:
            progress(done, len(tokens))
    return model.output(last)[0].float()  # (1, V), then (V,)


@torch.inference_mode()
def prefill_chunks(model: Transformer, rows: Sequence[Sequence[int]], cache: KVCache) -> Iterator[Tensor]:
    """Feed ids (B, T), `prompt_chunk` at a time to bound the memory.

    Yields the hidden states (B, T, C) of each chunk after it is in the cache. Each chunk is passed the length of the
    complete text, so that a RoPE that depends on the length uses the same frequencies for all of it.
    """
    tokens = torch.tensor(rows, device=cache.device)  # (B, T)
    length = cache.length + tokens.shape[1]
    cache.reserve(length)  # at once, so that the cache is not copied to grow between chunks
    for start in range(0, tokens.shape[1], chunk := prompt_chunk(cache.device)):
        yield model.hidden(tokens[:, start : start + chunk], cache=cache, length=length)  # (B, t, C)


@torch.inference_mode()
def generate(
    model: Transformer,
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    stop_ids: Collection[int] = (),
    n_vocab: int | None = None,
    cache: KVCache | None = None,
    constraint: Constraint | None = None,
    diagnose: Diagnosis | None = None,
    progress: Progress | None = None,
) -> Iterator[Token]:
    """Yield new tokens until a stop id, max_new_tokens, or the end of the context.

    prompt    ids; at least one. The first cache.length of them are in the cache and are not fed again
    cache     the KV cache to use and to leave filled; default: a new one
    progress  see `Progress`
    The other arguments are those of `Chooser`.

    Raises UsageError for an empty prompt, an unknown id, or a cache that holds the complete prompt; ContextLengthError
    if the prompt leaves no room for one new token; NumericalError if a logit is not finite.
    """
    end = len(prompt) + room_for(model, prompt, params, cache)
    if end == len(prompt):
        return
    if cache is None:
        cache = model.new_cache(end)
    chooser = Chooser(prompt, params, cache.device, stop_ids, n_vocab, constraint, model.world, diagnose)
    logits = prefill(model, chooser.text[cache.length :], cache, progress)  # (V,)
    while True:
        with model.runner.threads(1):  # the C++ kernels keep their threads between two passes
            token = chooser.choose(logits)
        yield token
        if token.stop or len(chooser.text) == end:
            return
        logits = next_logits(model, chooser.text, cache)  # (V,)


def next_logits(model: Transformer, text: Sequence[int], cache: KVCache) -> Tensor:
    """Feed the last id of a text, which is not in the cache yet; return the logits (V,) of the next token."""
    if model.rope.restarts(cache.length):
        cache.trim(0)
    with model.runner.threads(len(text) - cache.length):
        return prefill(model, text[cache.length :], cache)


def room_for(model: Transformer, prompt: Sequence[int], params: SamplingParams, cache: KVCache | None) -> int:
    """How many tokens to generate: max_new_tokens, or fewer if the context ends. Checks the prompt and the cache."""
    if not prompt:
        raise UsageError("the prompt has no tokens and the model has no begin-of-text id to start from; pass some text")
    context = model.max_seq_len if cache is None else min(model.max_seq_len, cache.max_len)
    if len(prompt) >= context:
        raise ContextLengthError(
            f"the prompt has {len(prompt)} tokens, but the context of {context} must hold prompt and answer;"
            " shorten the prompt, or raise max_seq_len (--max-seq-len; beyond the trained length with --rope-scaling)"
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
