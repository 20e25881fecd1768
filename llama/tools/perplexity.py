"""Log-probabilities of a text's tokens under a model, and perplexity.

Letters: B batch, T tokens, C model dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..engine.nonfinite import locate
from ..errors import NumericalError, UsageError
from ..generate import prompt_chunk
from ..model import Transformer
from ..tokenizer import Tokenizer

Progress = Callable[[int, int], object]  # (number of tokens done, number of tokens)


@torch.inference_mode()
def token_logprobs(
    model: Transformer, tokens: Tensor, chunk: int | None = None, progress: Progress = lambda done, total: None
) -> Tensor:
    """log p(token t + 1 | tokens 0 .. t) for tokens (B, T) int64, T >= 2: (B, T - 1) float32, natural logarithm.

    The text is fed `chunk` tokens at a time (default: `prompt_chunk`), which bounds the memory: logits of one chunk,
    keys and values of all tokens. If the RoPE frequencies depend on the length (rope_scaling.BY_LENGTH), a chunk is
    rotated by those of the length it reaches and earlier keys are not rotated again, as in decoding; with chunk=T all
    tokens are rotated by the frequencies of the full length.

    Raises ContextLengthError if the text is longer than model.max_seq_len, NumericalError if a result is NaN.
    """
    B, T = tokens.shape
    chunk = prompt_chunk(tokens.device) if chunk is None else chunk
    if T < 2 or chunk < 1:
        raise UsageError(f"perplexity needs at least 2 tokens and a chunk of at least 1, got {T} and {chunk}")
    cache = model.new_cache(T - 1, batch=B)
    found = []
    for start in range(0, T - 1, chunk):
        end = min(start + chunk, T - 1)
        h = model.hidden(tokens[:, start:end], cache=cache)  # (B, t, C)
        values = _logprobs(model, h.flatten(0, 1), tokens[:, start + 1 : end + 1].flatten())
        found.append(values.reshape(B, -1))  # (B, t)
        progress(end + 1, T)  # with the first token, which nothing predicts
    logprobs = torch.cat(found, dim=1)  # (B, T - 1)
    if bool(logprobs.isnan().any()):
        row, place = logprobs.isnan().nonzero()[0].tolist()
        raise NumericalError(
            f"the logits of token {place + 1} are not finite; {locate(model, tokens[row, : place + 1].tolist())}"
        )
    return logprobs


def _logprobs(model: Transformer, h: Tensor, ids: Tensor) -> Tensor:
    """log p of ids (N,) after hidden states (N, C): (N,) float32."""
    found = []
    for some, wanted in zip(h.split(256), ids.split(256), strict=True):  # in parts: the logits have V numbers for each
        logits = model.output(some[None])[0].float()  # (n, V)
        found.append(logits.gather(-1, wanted[:, None])[:, 0] - logits.logsumexp(-1))  # (n,)
    return torch.cat(found)


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
    model: Transformer, parts: Sequence[Sequence[int]], progress: Progress = lambda done, total: None
) -> list[float]:
    """-log p of each window, summed over its tokens except the first, which nothing predicts."""
    found, before, total = [], 0, sum(map(len, parts))
    for part in parts:
        tokens = torch.tensor([part], device=model.norm.weight.device)  # (1, T)

        def advance(done: int, _: int, before: int = before) -> None:
            progress(before + done, total)

        found.append(-float(token_logprobs(model, tokens, progress=advance).double().sum()))
        before += len(part)
    return found
