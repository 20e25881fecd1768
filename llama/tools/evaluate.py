"""How well a model predicts a text: log-probabilities of its tokens, and perplexity.

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

    The text goes in `chunk` tokens at a time, as a prompt does, so that memory stays bounded: logits of one chunk and
    the keys and values of all. Under a scaling whose frequencies depend on the length (rope_scaling.BY_LENGTH) a chunk
    is turned by those of the length it reaches, and earlier keys keep theirs, as in decoding; chunk=T gives the whole
    text those of its full length. progress is called with the number of tokens done.

    Raises ContextLengthError when the text is longer than model.max_seq_len.
    """
    B, T = tokens.shape
    if T < 2 or chunk < 1:
        raise UsageError(f"perplexity needs at least 2 tokens and a chunk of at least 1, got {T} and {chunk}")
    if model.max_seq_len < T - 1:
        raise ContextLengthError(
            f"the text has {T} tokens and the model's context {model.max_seq_len}; take shorter windows, or stretch"
            f" the context (--rope-scaling)"
        )
    cache = model.new_cache(T - 1, batch=B)
    found = []
    for start in range(0, T - 1, chunk):
        end = min(start + chunk, T - 1)
        h = model.hidden(tokens[:, start:end], cache=cache)  # (B, t, C)
        for row in range(0, end - start, 256):  # a chunk's logits are large: V numbers a token
            logits = model.output(h[:, row : row + 256]).float()  # (B, t', V)
            wanted = tokens[:, start + row + 1 : start + row + 1 + logits.shape[1], None]  # (B, t', 1)
            found.append(logits.gather(-1, wanted).squeeze(-1) - logits.logsumexp(-1))  # (B, t')
        if progress is not None:
            progress(end - start)
    return torch.cat(found, dim=1)  # (B, T - 1)


def perplexity(logprobs: Tensor) -> float:
    """exp of the mean negative log-probability, over all tokens given."""
    return float(torch.exp(-logprobs.double().mean()))


def windows(tokenizer: Tokenizer, text: str, window: int) -> tuple[int, list[list[int]]]:
    """How many tokens a text has, and the text as windows of `window` tokens that follow each other without overlap.

    Each begins with the begin-of-text id where the model wants one. A last window of one token is left out: nothing
    in it can be predicted.
    """
    bos = [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []
    ids = tokenizer.encode(text)
    step = window - len(bos)
    parts = [bos + ids[start : start + step] for start in range(0, len(ids), step)]
    return len(ids), [part for part in parts if len(part) > 1]


def nats(
    model: Transformer, parts: Sequence[Sequence[int]], progress: Callable[[int], object] | None = None
) -> list[float]:
    """-log p of each window, summed over all of its tokens but the first, from which the others are predicted.

    Raises NumericalError where a log-probability is no number.
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
