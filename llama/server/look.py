"""Looks: they show the tokens of an answer with their alternatives, and what the model computes before a token.

A look is a generator, and each of its steps is one pass of at most 256 tokens. The engine's thread runs these steps
between the steps of the batch (engine.py). Hooks change the model for every thread, so a step adds its hooks and
removes them before it yields; other answers never see them. Looks have their own caches and random generators.

Letters: S keys, H heads, D head_dim, C model dim, L layers, V vocabulary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from .. import __version__
from ..cache import KVCache
from ..chat.thoughts import ThoughtStream
from ..checks import dtype_name
from ..engine.linears import describe_quantization
from ..engine.nonfinite import locate
from ..engine.placement import describe_devices
from ..errors import LlamaError, UsageError
from ..generate import prefill_chunks, room_for
from ..generation.answer import Job
from ..generation.prefix import shared_prefix
from ..inside import trace, trace_page
from ..inside.ablation import ablation_steps, without_sources
from ..inside.exact import can_copy, float32_copy, float32_logits, rounding
from ..inside.hooks import Function, activations, patch
from ..inside.intervene import ablated
from ..inside.jacobian import JacobianLens
from ..inside.patching import patching_steps
from ..model import Transformer
from ..rope import interleaved_to_half
from ..sampling import Chooser, check_extreme, extreme
from ..text import Llama
from .engine import Steps
from .requests import LONGEST_GRID, LONGEST_LOOK, LONGEST_PAGE, Heads
from .spelling import Spelling

T = TypeVar("T")
Put = Mapping[str, Function]  # a change of the model, in the form of hooks.patch
SHOWN_HEADS, SHOWN_ROWS, SHOWN_WORDS = 8, 3, 5  # best heads, best tokens of a lens at a layer, words with a curve
SHOWN_TOP = 10  # alternatives for each token
LARGEST_FILE = 2**29  # limit of the bytes of activations in a response
# TransformerLens' names of our tensors. Its other hooks hold other values than ours: its q and k are taken before
# Qwen3's norms, and its results of norms before the multiplication by the norm's weight.
HOOKS = {name: f"hook_{name}" for name in ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")}
HOOKS |= {name: f"attn.hook_{name}" for name in ("v", "rot_q", "rot_k", "pattern", "z")} | {
    "mlp_hidden": "mlp.hook_post"
}


@dataclass
class Cached:
    """A cache and the ids whose keys it holds, computed with the heads in `off` switched off."""

    off: Heads
    cache: KVCache
    ids: list[int]


class Looks:
    """The looks at one model.

    Answers are drawn from the model as it is served; the inside is computed with a copy in float32, if memory allows a
    copy. Each of these two models has one cache with all heads on, and one with some heads switched off.
    """

    def __init__(self, llm: Llama, name: str, lens: JacobianLens | None = None):
        self.llm, self.model, self.name, self.lens = llm, llm.model, name, lens
        self.n_vocab = llm.tokenizer.n_vocab
        self.token = Spelling(llm.tokenizer).entry
        self.longest = min(LONGEST_LOOK, llm.model.max_seq_len)
        self.cached: dict[tuple[bool, bool], Cached] = {}  # (some heads are off, the float32 copy) -> its cache
        self.copied = rounding(llm.model) > 0 and can_copy(llm.model)
        if (watch := getattr(llm.model.runner, "watch", None)) is not None:
            watch.logged = True  # a user of the page can't act on this warning; the page shows the difference itself

    @cached_property
    @torch.inference_mode()
    def exact(self) -> Transformer:
        """The model that computes the inside. The first use copies the weights, which takes about a second."""
        return float32_copy(self.model) if self.copied else self.model

    def meta(self) -> dict[str, Any]:
        """What the page shows about the model."""
        config, dtype = self.model.config, dtype_name(self.model.norm.weight.dtype)
        weights = f"{bits} weights, {dtype} compute" if (bits := describe_quantization(self.model)) else dtype
        return {
            **{name: getattr(config, name) for name in ("n_layers", "n_heads", "n_kv_heads", "head_dim")},
            **{"context": self.longest, "vocab_size": self.n_vocab, "parameters": config.n_params, "dtype": dtype},
            **{"traced": LONGEST_PAGE, "gridded": LONGEST_GRID},
            **{"weights": f"{weights}, {describe_devices(self.model).replace('cpu', 'CPU')}"},
            **{"lens": self.lens and self.lens.n_prompts, "tied": config.tie_embeddings},
            "template": self.llm.chat_format is not None or self.llm.chat_template is not None,
            **{"rounding": rounding(self.model), "exact": self.copied or not rounding(self.model)},
            **{"version": __version__, "sampling": self.llm.sampling, "stop_ids": sorted(self.llm.tokenizer.stop_ids)},
        }

    @contextlib.contextmanager
    def _switched(self, off: Heads, model: Transformer | None = None, put: Put | None = None) -> Iterator[None]:
        model, nothing = model or self.model, contextlib.nullcontext()
        with ablated(model, off) if off else nothing, patch(model, put) if put else nothing:
            yield

    @contextlib.contextmanager
    def _checked(self) -> Iterator[None]:
        """A context for code that may raise on NaN: after an error, the caches may contain NaN."""
        try:
            yield
        except LlamaError:
            self.cached.clear()
            raise

    def _check(self, top: float, ids: Sequence[int]) -> None:
        with self._checked():
            check_extreme(top, f"token {len(ids) + 1}", ids, partial(locate, self.model))

    @torch.inference_mode()
    def _feed(
        self, ids: list[int], off: Heads, last: int = 0, model: Transformer | None = None, put: Put | None = None
    ) -> Generator[dict[str, Any], None, tuple[Cached, Any]]:
        """Feed all ids except the last `last` into the cache; those that it already holds are skipped.

        With `put`, the cache is a new one. Yields how many ids are in the cache after each chunk. Returns the cache
        and the hidden state (1, C) of the last id fed, if any was fed.
        """
        model = model or self.model
        key = bool(off), model is not self.model
        kept = None if put else self.cached.pop(key, None)  # an error leaves no cache: it may hold NaN
        if kept is None or kept.off != off or model.rope.by_length:
            kept = Cached(off, model.new_cache(self.longest), [])
        shared, hidden = shared_prefix(kept.ids, ids), None
        kept.cache.trim(shared)
        kept.ids = ids[:shared]
        chunks = prefill_chunks(model, [ids[shared : len(ids) - last]], kept.cache)
        while True:
            with self._switched(off, model, put):
                found = next(chunks, None)  # (1, T, C)
            if found is None:
                if not put:
                    self.cached[key] = kept
                return kept, hidden
            kept.ids, hidden = ids[: kept.cache.length], found[:, -1]
            yield {"read": len(kept.ids), "of": len(ids)}

    @torch.inference_mode()
    def answer(
        self,
        job: Job,
        answer: Sequence[int] = (),
        off: Heads = (),
        top: int = SHOWN_TOP,
        own: Sequence[int] = (),
        patch: Mapping[str, Any] | None = None,
    ) -> Steps:
        """Yield the events of an answer: the prompt, the progress of reading the prompt, each new token, the end.

        answer  ids with which the answer begins
        off     heads that are switched off
        top     number of alternatives for each token
        own     the first ids after `answer`, in place of drawn ones
        patch   the arguments other, layer and position of `_from_other`, which puts a vector of another text into this
        """
        model, tokenizer, start = self.model, self.llm.tokenizer, len(job.ids)
        params, constraint, ids = job.params, job.constraint, [*job.ids, *answer]
        room = min(room_for(model, ids, params, None) + len(own), self.longest - len(ids))
        yield {"prompt": [self.token(id) for id in ids[:start]], "seed": params.seed}
        if constraint is not None:
            for id in answer:  # one id a step: a grammar may take 20 ms for each, and other answers wait
                constraint.advance(id)
                yield {"read": 0, "of": len(ids)}
        if ids[-1] in tokenizer.stop_ids:
            yield {"end": "stop"}
            return
        put = (yield from self._from_other(off, **patch)) if patch else None
        kept, hidden = yield from self._feed(ids, off, put=put)
        stream = ThoughtStream(tokenizer, job.thoughts)
        for id in answer:
            stream.feed(id)
        common = tokenizer.stop_ids, self.n_vocab, constraint, None, partial(locate, model)
        chooser = Chooser(ids, params, kept.cache.device, *common, start)
        for step in range(room):
            with model.runner.threads(1), self._switched(off, put=put), self._checked():
                if step > 0:
                    if model.rope.restarts(kept.cache.length):
                        kept.cache.trim(0)
                    *_, states = prefill_chunks(model, [chooser.text[kept.cache.length :]], kept.cache)  # (1, T, C)
                    hidden = states[:, -1]  # (1, C)
                logits = float32_logits(model, hidden)[0]  # (V,)
                report = chooser.stages(logits)
                if forced := step < len(own):
                    chooser.check(float(extreme(logits)))
                token = chooser.append(own[step], logits) if forced else chooser.choose(logits)
            kept.ids = chooser.text[: kept.cache.length]
            thought, _ = stream.feed(token.id)
            more = {name: True for name, found in (("thought", thought is not None), ("forced", forced)) if found}
            yield self._drawn(token.id, report, top, greedy=params.greedy) | more
            if token.stop:
                yield {"end": "stop"}
                return
        yield {"end": "context" if len(chooser.text) >= self.longest else "length"}

    def _from_other(
        self, off: Heads, other: list[int], layer: int, position: int
    ) -> Generator[dict[str, Any], None, Put]:
        """A change that copies the residual stream of another text into this text, before a layer, at one position."""
        kept, _ = yield from self._feed(other[: position + 1], off, last=1)
        name, last = f"resid_pre.{layer}", torch.tensor([[other[position]]], device=kept.cache.device)  # (1, 1)
        with torch.inference_mode(), self._switched(off), activations(self.model, name) as seen:
            self.model.hidden(last, cache=kept.cache)
        kept.cache.trim(position)
        row = seen[name][0, 0]  # (C,)
        return {name: lambda h, at: torch.where((at.positions == position)[..., None], row, h)}  # (1, T, C)

    def _drawn(self, id: int, report: dict[str, Tensor], top: int, greedy: bool) -> dict[str, Any]:
        """A drawn token and its most probable alternatives.

        p     the probability of a token according to the model
        q     its probability in the distribution from which the token was drawn
        cut   the first stage that excluded the token; such a token has no q
        left  stage -> number of tokens left after it
        warm  the largest probability after the temperature, from which the filters start
        """
        if greedy:
            last = [*report.values()][-1]
            report["greedy"] = torch.full_like(last, -torch.inf).index_fill(-1, last.argmax(-1), 0)
        p, q = (report[stage].softmax(-1) for stage in ("model", [*report][-1]))  # (V,) each
        warm = {} if greedy else {"warm": _short(float(report["temperature"].softmax(-1).max()))}
        ids = p.topk(min(top, len(p))).indices.tolist()
        ids += [id] * (id not in ids)
        excluded = torch.stack([logits.isneginf() for logits in report.values()])  # (stages, V)
        left = dict(zip(report, (len(p) - excluded.sum(-1)).tolist(), strict=True))
        before, after = ([_short(x) for x in values] for values in torch.stack((p, q))[:, ids].tolist())
        cuts, rows = excluded[:, ids].T.tolist(), []
        for i, one in enumerate(ids):
            cut = next((stage for stage, found in zip(report, cuts[i], strict=True) if found), None)
            rows.append({**self.token(one), "p": before[i], **({"cut": cut} if cut else {"q": after[i]})})
        return {**rows[ids.index(id)], "top": rows, "left": left, **warm}

    @torch.inference_mode()
    def inside(
        self,
        ids: list[int],
        off: Heads = (),
        token: int | None = None,
        against: int | None = None,
        head: tuple[int, int] | None = None,
        key: int | None = None,
    ) -> Steps:
        """What the model computes at the last of `ids`: the lens, direct effects, the best heads, one head in detail.

        token    effects are on the logit of this token (default: the most probable one)
        against  if given, effects are on the logit of `token` minus the logit of `against`
        head     the head shown in detail (default: the best)
        key      the position whose key is shown (default: the largest weight of this head after the first token)
        """
        model = self.exact
        kept, _ = yield from self._feed(ids, off, last=1, model=model)
        last = torch.tensor([ids[-1:]], device=kept.cache.device)  # (1, 1)
        with self._switched(off, model), trace.recording(model) as seen:
            logits = float32_logits(model, model.hidden(last, cache=kept.cache)[0, -1])[: self.n_vocab]  # (V,)
        self._check(float(extreme(logits)), ids)
        token = int(logits.argmax()) if token is None else token
        rows = torch.stack([h[-1] for h in seen.hidden])  # (L + 1, C): the embedding, then each layer
        lens = float32_logits(model, model.norm(rows))[:, : self.n_vocab]  # (L + 1, V)
        direction = trace.readout(model, seen, token, against)  # (C,)
        values = [layer.floats()[1][0, :, : len(ids)] for layer in kept.cache.layers]  # (KV, S, D) for each layer
        sources = trace.source_effects(model, seen, direction, values)  # (L, H, S)
        heads = trace.direct_effects(model, seen, direction)  # (L, H)
        mlps = torch.stack([x[-1].float() @ direction for x in seen.rows("mlp_out")])  # (L,)
        sums = {"embedding": rows[0].float() @ direction, "heads": heads.sum(), "mlps": mlps.sum()}
        difference = logits[token] - (0 if against is None else logits[against])
        weights = [pattern[:, -1] for pattern in seen.weights]  # (H, S) for each layer
        strongest, size = [], heads.flatten().abs()
        favoured = -heads if against is not None and difference < 0 else heads  # (L, H) for the more probable token
        if favoured.max() > 0:
            size[favoured.argmax()] = torch.inf  # list the head that adds most to this token first
        listed = size.topk(min(SHOWN_HEADS, heads.numel())).indices.tolist()
        if head is not None and (at := head[0] * heads.shape[1] + head[1]) not in listed:
            listed.append(at)
        for at in listed:
            layer, number = divmod(at, heads.shape[1])
            weight, position = (float(x) for x in weights[layer][number].max(-1))
            own = sources[layer, number]  # (S,)
            best: dict[str, Any] = {"head": [layer, number], "effect": float(heads[layer, number])}
            best["sources"] = [
                [at, float(own[at])] for at in own.abs().topk(min(SHOWN_ROWS, len(own))).indices.tolist()
            ]
            strongest.append({**best, "position": int(position), "weight": _short(weight)})  # its largest weight
        p, (layer, number) = _short(float(logits.softmax(-1)[token])), head or strongest[0]["head"]
        found = {"token": self.token(token), "p": p, "difference": float(difference)}
        shown = {**dict.fromkeys(logits.topk(SHOWN_TOP).indices.tolist()), token: None}  # in order, each once
        found["top"] = [{**self.token(id), "p": _short(float(logits.softmax(-1)[id]))} for id in shown]
        found |= {"effects": {name: float(value) for name, value in sums.items()}, "heads": strongest}
        found |= {"layers": mlps.tolist(), "by_token": [_short(x) for x in sources.sum((0, 1)).tolist()]}
        words = [*dict.fromkeys([*lens[-1].topk(min(SHOWN_WORDS, self.n_vocab)).indices.tolist(), token])]
        found |= {"words": [self.token(id) for id in words], "lens": self._lens(lens, token, words)}
        if self.lens is not None:
            moved = self.lens.logits(model, dict(enumerate(rows[1:])))[:, : self.n_vocab]  # (N, V)
            layers = [{"layer": layer} for layer in self.lens.matrices]
            found["jacobian"] = [at | row for at, row in zip(layers, self._lens(moved, token, words), strict=True)]
        found |= {"head": self._head(layer, number, key, seen, weights, kept)}
        kept.cache.trim(len(ids) - 1)  # the hooks may have changed the rounding of the last key
        yield found

    def _lens(self, logits: Tensor, token: int, words: list[int]) -> list[dict[str, Any]]:
        """For each row of a lens (N, V): the best tokens, the probability and rank of `token`, the ranks of `words`."""
        p = logits.softmax(-1)  # (N, V)
        best, (rank, *ranks) = p.topk(SHOWN_ROWS), ((logits > logits[:, [id]]).sum(-1) + 1 for id in (token, *words))
        found = []
        for row, (values, ids) in enumerate(zip(*best, strict=True)):
            top = [{**self.token(id), "p": _short(x)} for id, x in zip(ids.tolist(), values.tolist(), strict=True)]
            own = {"p": _short(float(p[row, token])), "rank": int(rank[row])}
            found.append({"top": top, **own, "ranks": [int(word[row]) for word in ranks]})
        return found

    def _head(
        self, layer: int, head: int, key: int | None, seen: trace.Recording, weights: list[Tensor], kept: Cached
    ) -> dict[str, Any]:
        """One head at the last token: the weights (S,) and scores (S,), the rotated query q, and the rotated key k.

        If q and k were d apart, their score would be the sum over pairs j of
        Re(q_j conj(k_j) e^(i (d - distance) w_j)) / sqrt(D), where `distance` is the real one.
        """
        row, S = weights[layer][head], weights[layer].shape[-1]
        q = seen.rows("rot_q")[layer][-1, head].float()  # (D,)
        keys = kept.cache.layers[layer].floats()[0][0, :, :S].float()  # (KV, S, D)
        k = keys[head * len(keys) // weights[layer].shape[0]]  # (S, D): a group of heads shares its keys
        if key is None:
            key = int(row[1:].argmax()) + 1 if S > 1 else 0  # the first token is often a sink
        block: Any = self.model.layers[layer]
        frequencies = self.model.rope.frequencies(S)[0] * block.attention.apply_rotary_emb.rotates
        scores = k @ q / len(q) ** 0.5  # (S,)
        found = {"weights": [_short(x) for x in row.tolist()], "scores": [_short(x) for x in scores.tolist()]}
        found |= {"q": q.tolist(), "k": k[key].tolist(), "frequencies": frequencies.tolist()}
        return {"head": [layer, head], "key": key, **found}

    def sources(self, ids: list[int], token: int, against: int, off: Heads = ()) -> Steps:
        """Yield the progress, then the lead of `token` over `against` for each of `ids` that the last token can't read.

        The lead is the difference of their logits. Each value is computed with one of the ids unread.
        """
        kept, _ = yield from self._feed(ids, off, last=1, model=self.exact)
        passes = without_sources(self.exact, ids, kept.cache, range(len(ids)), token, against)
        found: list[float] = []
        while len(found) < len(ids):
            with self._switched(off, self.exact):
                found += next(passes).tolist()
            yield {"done": len(found), "of": len(ids)}
        yield {"without": [_short(x) for x in found]}

    def grid(self, ids: list[int], off: Heads = (), **options: Any) -> Steps:
        """Yield the progress of the ablation grid, then the grid. The options are those of `ablation_steps`."""
        grid = yield from self._progress(ablation_steps(self.exact, ids, **options), off)
        yield {name: x.tolist() if isinstance(x, Tensor) else x for name, x in dataclasses.asdict(grid).items()}

    def _progress(self, steps: Generator[tuple[int, int], None, T], off: Heads) -> Generator[dict[str, int], None, T]:
        while True:
            try:
                with self._switched(off, self.exact):
                    done, count = next(steps)
            except StopIteration as end:
                found: T = end.value
                return found
            yield {"done": done, "of": count}

    def patching(
        self,
        ids: list[int],
        other: list[int],
        off: Heads = (),
        token: int | None = None,
        against: int | None = None,
    ) -> Steps:
        """Yield the progress of the patching grid, then the grid.

        `token` is the answer to `ids`, `against` the answer to `other`.
        """
        grid = yield from self._progress(patching_steps(self.exact, other, ids, (against, token)), off)
        words = {name: [*map(self.token, getattr(grid, name))] for name in ("source", "target", "answers")}
        yield {**words, "differences": grid.differences, "layers": grid.layers, "restored": grid.restored.tolist()}

    @torch.inference_mode()
    def page(self, ids: list[int]) -> Steps:
        """Yield a function that renders the page of `clearllama trace` for a text; it takes seconds and no hooks."""
        with trace.recording(self.exact) as seen:
            logits = self.exact(torch.tensor([ids], device=self.exact.norm.weight.device))[0]  # (T, V)
        self._check(float(extreme(logits[-1])), ids)
        yield partial(self._render, ids, seen, logits)

    def _render(self, ids: list[int], seen: trace.Recording, logits: Tensor) -> str:
        traced, meta = trace.evaluate(self.exact, ids, seen, logits), self.meta()
        about = {name: meta[name] for name in ("n_layers", "n_heads", "n_kv_heads", "head_dim")}
        about |= {"dtype": dtype_name(self.exact.norm.weight.dtype), "model": self.name}
        about |= {"prompt": self.llm.tokenizer.decode(ids)}
        return trace_page.render(trace.facts(traced, self.llm.tokenizer, about), trace.packed_maps(traced.weights))

    @torch.inference_mode()
    def activations(self, ids: list[int]) -> Steps:
        """Yield a function that returns the tensors of a text as .npz, with TransformerLens' names and pair order."""
        c, T = self.model.config, len(ids)
        each = 5 * c.dim + 2 * (c.n_heads + c.n_kv_heads) * c.head_dim + c.n_heads * T + c.hidden_dim
        if (size := 4 * T * (c.dim + c.n_layers * each)) > LARGEST_FILE:
            most = f"the limit is {LARGEST_FILE >> 20} MiB"
            raise UsageError(f"the activations of {T} tokens have {size >> 20:,} MiB; {most}: send fewer tokens")
        names = {f"{own}.{i}": f"blocks.{i}.{hook}" for i in range(c.n_layers) for own, hook in HOOKS.items()}
        with activations(self.exact, names := {"embed": "hook_embed", **names}) as seen:
            logits = self.exact(torch.tensor([ids], device=self.model.norm.weight.device))  # (1, T, V)
        self._check(float(extreme(logits[0, -1])), ids)
        found = {hook: interleaved_to_half(seen[own]) if "rot_" in own else seen[own] for own, hook in names.items()}
        yield partial(_npz, {"tokens": torch.tensor([ids]), **{hook: x.float() for hook, x in found.items()}})


def _npz(tensors: Mapping[str, Tensor]) -> bytes:
    arrays: Any = {name: x.cpu().numpy() for name, x in tensors.items()}
    np.savez(file := io.BytesIO(), **arrays)
    return file.getvalue()


def _short(x: float) -> float:
    """A number with six digits: further ones are rounding."""
    return float(f"{x:.6g}")
