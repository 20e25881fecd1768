"""The GGUF models of a repository or folder, and which of them a name such as ORG/NAME:Q4_K_M means."""

from __future__ import annotations

import re
from collections.abc import Collection

from ..errors import CheckpointError

DEFAULT = "Q4_K_M"
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.\w+)")
OTHER = re.compile(r"(?i)(^|[-_.])(mmproj|imatrix)")  # GGUF files that accompany a model but are not one


def choose(names: Collection[str], quant: str, where: str) -> list[str]:
    """All files of the GGUF model whose path names a quantization; empty if there is no model and `quant` is empty.

    quant  "": the only model, or DEFAULT

    Raises CheckpointError if no model or more than one has this quantization.
    """
    first = {PART.sub(r"\1", path): path for path in sorted(names, reverse=True) if path.endswith(".gguf")}
    models = sorted(path for path in first.values() if not OTHER.search(path.rpartition("/")[2]))
    wanted = quant or DEFAULT
    found = [path for path in models if re.search(rf"(?i)(?<![A-Z0-9]){wanted}(?![A-Z0-9_])", path)]
    if not quant and len(models) < 2:
        found = models
    elif len(found) != 1:
        listed = ", ".join(models[:12]) + ", ..." * (len(models) > 12)
        raise CheckpointError(
            f"{where} has no single GGUF model of type {wanted}; choose one, as in {where}:TYPE or {where}/FILE.gguf:"
            f" {listed or 'it has none'}"
        )
    return with_all_parts(found)


def with_all_parts(names: Collection[str]) -> list[str]:
    """The names, and all parts of a name such as NAME-00002-of-00003.gguf."""
    found = dict.fromkeys(names)
    for match in filter(None, map(PART.fullmatch, names)):
        count = min(int(match[3]), 9999)
        found |= dict.fromkeys(f"{match[1]}-{i + 1:05d}-of-{match[3]}{match[4]}" for i in range(count))
    return list(found)
