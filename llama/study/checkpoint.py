"""The settings of a topic on frequencies, taken from a checkpoint with `model`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from ..checkpoint import open_checkpoint
from ..config import ModelConfig
from ..errors import UsageError
from ..hub import resolve
from ..rope_scaling import BY_LENGTH, inverse_frequencies, kind_of, reach, trained_length
from .perplexity import TINY, tiny_folder

Result = TypeVar("Result")
OPTIONS = {"head_dim": "--head-dim", "theta": "--rope-theta", "context": "--context"}


@dataclass(frozen=True)
class Own:
    """A checkpoint's name, its configuration, and the frequencies that the library uses for it."""

    name: str
    config: ModelConfig

    @property
    def kind(self) -> str:
        """The kind of its scaling, "default" if it has none."""
        return kind_of(self.config.rope_scaling)

    @property
    def context(self) -> int:
        """Tokens that its unscaled frequencies were trained for."""
        return int(trained_length(self.config))

    def scaled(self) -> tuple[Tensor, float]:
        """Its frequencies at its full context (D/2,) float64, radians per position, and the factor of cos and sin."""
        config, full = self.config, reach(self.config)
        inv_freq, factor = inverse_frequencies(
            config.head_dim,
            config.rope_theta,
            config.rope_scaling,
            seq_len=full if self.kind in BY_LENGTH else None,
            max_seq_len=config.max_seq_len,
        )
        return inv_freq.double(), factor

    @property
    def says(self) -> str:
        """One sentence on its settings."""
        scaling = "no scaling" if self.kind == "default" else f"the scaling {self.kind}"
        return (
            f"{self.name}: heads of {self.config.head_dim} entries, base θ = {self.config.rope_theta:g}, trained for"
            f" {self.context:,} tokens, {scaling}; it can use {reach(self.config):,} tokens."
        )


def own(model: str) -> Own:
    """Read a checkpoint's configuration. Raises CheckpointError if it is missing."""
    folder = tiny_folder() if model == TINY else resolve(model)
    return Own(model, open_checkpoint(folder).config)


def with_model(function: Callable[..., Result]) -> Callable[..., Result]:
    """Add the argument `model`: the settings then come from that checkpoint, and `own` is passed.

    The factor is the checkpoint's own if it has a scaling with one, and may be overridden.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def wrapped(*args: Any, model: str | None = None, **options: Any) -> Result:
        if model is None:
            return function(*args, **options)
        for name in OPTIONS:
            if name in options:
                raise UsageError(
                    f"{OPTIONS[name]} is set by the checkpoint of --model; leave {OPTIONS[name]} or --model out"
                )
        found = own(model)
        settings = {"head_dim": found.config.head_dim, "theta": found.config.rope_theta, "context": found.context}
        factor = (found.config.rope_scaling or {}).get("factor")
        if isinstance(factor, int | float) and factor > 1:
            settings["factor"] = float(factor)
        known = {name: value for name, value in settings.items() if name in signature.parameters}
        return function(*args, **{**known, **options}, own=found)

    parameters = [parameter for name, parameter in signature.parameters.items() if name != "own"]
    model = inspect.Parameter("model", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="str | None")
    wrapped.__signature__ = signature.replace(parameters=[*parameters, model])  # type: ignore[attr-defined]
    return wrapped
