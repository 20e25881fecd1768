"""Log-probabilities of a text's tokens under a model, and perplexity.

Letters: B batch, T tokens, C model dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..engine.nonfinite import locate
from ..errors import ContextLengthError, NumericalError, UsageError
from ..model import Transformer
from ..tokenizer import Tokenizer


@torch.inference_mode()
def token_logprobs(
    model: Transformer, tokens: Tensor, chunk: int = 256, progress: Callable[[int], object] | None = None
) -> Tensor:
    """log p(token t + 1 | tokens 0 .. t) for tokens (B, T) int64, T >= 2: (B, T - 1) float32, natural logarithm.

    The text is fed `chunk` tokens at a time, as a prompt is, which bounds the memory: logits of one chunk, keys and
    values of all tokens. If the RoPE frequencies depend on the length (rope_scaling.BY_LENGTH), a chunk is rotated by
    those of the length it reaches and earlier keys are not rotated again, as in decoding; with chunk=T all tokens are
    rotated by the frequencies of the full length. progress is called with the number of tokens of each chunk.

    Raises ContextLengthError if the text is longer than model.max_seq_len.
    """
    B, T = tokens.shape
    if T < 2 or chunk < 1:
        raise UsageError(f"perplexity needs at least 2 tokens and a chunk of at least 1, got {T} and {chunk}")
    if model.max_seq_len < T - 1:
        raise ContextLengthError(
            f"the text has {T} tokens, but the context of the model is {model.max_seq_len}; use shorter windows, or"
            " extend the context with rope_scaling (--rope-scaling)"
        )
    cache = model.new_cache(T - 1, batch=B)
    found = []
    for start in range(0, T - 1, chunk):
        end = min(start + chunk, T - 1)
        h = model.hidden(tokens[:, start:end], cache=cache)  # (B, t, C)
        for row in range(0, end - start, 256):  # in parts, since the logits of a chunk are large: V for each token
            logits = model.output(h[:, row : row + 256]).float()  # (B, t', V)
            wanted = tokens[:, start + row + 1 : start + row + 1 + logits.shape[1], None]  # (B, t', 1)
            found.append(logits.gather(-1, wanted).squeeze(-1) - logits.logsumexp(-1))  # (B, t')
        if progress is not None:
            progress(end - start)
    return torch.cat(found, dim=1)  # (B, T - 1)


def perplexity(logprobs: Tensor) -> float:
    """exp of the mean negative log-probability of all tokens."""
    return float(torch.exp(-logprobs.double().mean()))


def windows(tokenizer: Tokenizer, text: str, window: int) -> tuple[int, list[list[int]]]:
    """(number of tokens in a text, its ids split into consecutive windows of `window` tokens).

    Each window begins with the begin-of-text id if the model expects one. A last window of one token is dropped, since
    no token in it can be predicted.
    """
    bos = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    ids = tokenizer.encode(text)
    step = window - len(bos)
    parts = [bos + ids[start : start + step] for start in range(0, len(ids), step)]
    return len(ids), [part for part in parts if len(part) > 1]


def nats(
    model: Transformer, parts: Sequence[Sequence[int]], progress: Callable[[int], object] | None = None
) -> list[float]:
    """-log p of each window, summed over its tokens except the first, which nothing predicts.

    Raises NumericalError if a log-probability is NaN.
    """
    device = model.norm.weight.device
    found = []
    for part in parts:
        logprobs = token_logprobs(model, torch.tensor([part], device=device), progress=progress)
        if bool(logprobs.isnan().any()):
            at = int(logprobs[0].isnan().nonzero()[0]) + 1
            raise NumericalError(f"the logits of token {at} are not finite; {locate(model, part[:at])}")
        found.append(-float(logprobs.double().sum()))
    return found
