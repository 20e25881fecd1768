"""Functions that run in several ranks, each a process that is forked off one that has imported torch."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from llama import loader
from llama.checkpoint import open_checkpoint
from llama.engine import parallel
from llama.generate import generate, prefill
from llama.generation.batch import Batch, Request, TokenEvent
from llama.model import Transformer
from llama.sampling import SamplingParams


def run(size: int, case: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call case(world, *arguments) on each rank; return the results, or raise what a rank could not handle."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank, args=(folder, r, size, case, arguments)) for r in range(size)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(60)
            rank.kill()
        found = [torch.load(Path(folder, str(rank)), weights_only=False) for rank in range(size)]
    assert not (failed := [text for text in found if isinstance(text, str)]), failed
    return found


def _rank(folder: str, rank: int, size: int, case: Callable[..., Any], arguments: Any) -> None:
    torch.set_num_threads(1)
    try:
        world = parallel.join(dist.FileStore(f"{folder}/store", size), rank, size, "cpu")
        torch.save(case(world, *arguments), Path(folder, str(rank)))
        world.leave()
    except Exception:
        torch.save(traceback.format_exc(), Path(folder, str(rank)))


def build(world: parallel.World | None, path: Path, **options: Any) -> Transformer:
    options = {"dtype": "float32", "fast": True, **options}
    return loader.build(open_checkpoint(path), device="cpu", world=world, **options)


@torch.inference_mode()
def answers(world: parallel.World | None, path: Path, options: dict[str, Any]) -> dict[str, Tensor]:
    """Logits and tokens from every way in which the commands run a model."""
    model = build(world, path, **options)
    ids = torch.randint(model.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(1))  # (B, T)
    row, cache, both = ids[0].tolist(), model.new_cache(), model.new_cache(30, batch=2)
    out = {"all positions": model(ids), "prefill": prefill(model, row[:20], cache)}
    out["decode"] = prefill(model, row[20:21], cache)
    cache.trim(11)
    out["trimmed"] = prefill(model, ids[1, 11:18].tolist(), cache)
    model(ids[:, :12], cache=both)
    out["ragged"] = model(ids[:, 12:15], torch.stack((torch.arange(12, 15), torch.arange(10, 13))), both)
    out["greedy"] = torch.tensor([token.id for token in generate(model, row, SamplingParams(max_new_tokens=10))])
    requests = [
        Request(row[: 3 + 4 * i], SamplingParams(max_new_tokens=3 + 2 * i, temperature=i % 2, seed=i)) for i in range(5)
    ]
    events = [event for event in Batch(model, requests, slots=3) if isinstance(event, TokenEvent)]
    out["batch"] = torch.tensor([(event.number, event.token.id) for event in events])
    return out


def sample(world: parallel.World | None, path: Path) -> list[int]:
    """Tokens that each rank draws with a seed of its own, from logits of its own."""
    model, rank = build(world, path), 0 if world is None else world.rank
    model.output.register_forward_hook(lambda module, inputs, logits: logits + 3 * rank * torch.rand_like(logits))
    params = SamplingParams(max_new_tokens=20, temperature=1.5, seed=rank)
    tokens = [token.id for token in generate(model, [1, 2, 3], params)]
    for event in Batch(model, [Request([1, 2, 3], params), Request([4, 5], SamplingParams(max_new_tokens=9))], slots=2):
        tokens += [event.token.id] if isinstance(event, TokenEvent) else []
    return tokens


def decide(world: parallel.World) -> list[Any]:
    """What `first` gives to each rank: a value, and the error of rank 0."""
    with pytest.raises(ZeroDivisionError, match="by zero"):
        world.first(lambda: 1 // world.rank)
    return world.first(lambda: [world.rank, "said"])


def differ(world: parallel.World, paths: list[Path]) -> list[str]:
    """The message of each rank if they load different models."""
    with pytest.raises(ValueError) as error:  # noqa: PT011
        build(world, paths[world.rank])
    return [str(error.value)]
