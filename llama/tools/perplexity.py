"""Log-probabilities of a text's tokens under a model, and perplexity.

Letters: B batch, T tokens, C model dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..engine.nonfinite import locate
from ..errors import NumericalError, UsageError
from ..generate import Progress, prompt_chunk
from ..model import Transformer
from ..sampling import logprob_of
from ..tokenizer import Tokenizer


@torch.inference_mode()
def nats(
    model: Transformer,
    windows: Sequence[Tensor],
    chunk: int | None = None,
    progress: Progress = lambda done, total: None,
) -> list[Tensor]:
    """-log p(token t + 1 | tokens 0 .. t) for each batch of windows: (B, T) int64 -> (B, T - 1) float32, with T >= 2.

    A window is fed `chunk` tokens at a time (default: `prompt_chunk`). This bounds the memory, which holds the logits
    of one chunk and the keys and values of all tokens. If the RoPE frequencies depend on the length
    (rope_scaling.BY_LENGTH), each chunk is rotated by the frequencies of the length up to its end. As in decoding,
    earlier keys are not rotated again. With chunk=T, all tokens are rotated by the frequencies of the full length.

    Raises ContextLengthError if a window is longer than model.max_seq_len, NumericalError if a result is NaN.
    """
    device = model.norm.weight.device
    chunk = prompt_chunk(device) if chunk is None else chunk
    found, done, total = [], 0, sum(tokens[:, 1:].numel() for tokens in windows)
    for tokens in windows:
        B, T = tokens.shape
        if T < 2 or chunk < 1:
            raise UsageError(f"perplexity needs at least 2 tokens and a chunk of at least 1, got {T} and {chunk}")
        tokens, cache, parts = tokens.to(device), model.new_cache(T - 1, batch=B), []
        for fed, following in zip(tokens[:, :-1].split(chunk, 1), tokens[:, 1:].split(chunk, 1), strict=True):
            parts.append(-next_logprobs(model, model.hidden(fed, cache=cache), following))  # (B, t)
            done += fed.numel()
            progress(done, total)
        values = torch.cat(parts, dim=1)  # (B, T - 1)
        if bool(values.isnan().any()):
            row, place = values.isnan().nonzero()[0].tolist()
            raise NumericalError(
                f"the logits of token {place + 1} are not finite; {locate(model, tokens[row, : place + 1].tolist())}"
            )
        found.append(values)
    return found


def next_logprobs(model: Transformer, h: Tensor, ids: Tensor) -> Tensor:
    """The log-probability of each id after its hidden state: (B, T, C) and ids (B, T) -> (B, T) float32."""
    rows = zip(h.flatten(0, 1).split(256), ids.flatten().split(256), strict=True)  # in parts: a row has V logits
    found = [logprob_of(model.output(some[None])[0].float(), wanted) for some, wanted in rows]  # (n,) each
    return torch.cat(found).view_as(ids)


def start_ids(tokenizer: Tokenizer) -> list[int]:
    """The begin-of-text id, if the model expects it before every text."""
    return [tokenizer.bos_id] if tokenizer.add_bos and tokenizer.bos_id is not None else []


def windows(tokenizer: Tokenizer, text: str, window: int) -> tuple[int, list[Tensor]]:
    """Divide a text into consecutive windows (1, T) of at most `window` tokens. Returns (number of tokens, windows).

    Each window begins with `start_ids`. A last window of only one token is dropped, since it has no token to predict.
    """
    bos, ids = start_ids(tokenizer), tokenizer.encode(text)
    step = window - len(bos)
    parts = [torch.tensor([bos + ids[start : start + step]]) for start in range(0, len(ids), step)]
    return len(ids), [part for part in parts if part.shape[1] > 1]
