"""The GGUF models in a folder: their quantizations, and which of them a name such as ORG/NAME:Q4_K_M means."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

from ..errors import CheckpointError

DEFAULT = "Q4_K_M"
# Bits per weight of Llama 3.1 8B, from llama.cpp's tools/quantize/README.md; MXFP4 and NVFP4 from their blocks
BITS: Mapping[str, float] = MappingProxyType(
    {
        "IQ1_S": 2.0, "IQ1_M": 2.15, "TQ1_0": 1.69, "TQ2_0": 2.06, "IQ2_XXS": 2.38, "IQ2_XS": 2.59, "IQ2_S": 2.74,
        "IQ2_M": 2.93, "Q2_K_S": 2.97, "Q2_K": 3.16, "IQ3_XXS": 3.25, "IQ3_XS": 3.5, "IQ3_S": 3.66, "IQ3_M": 3.76,
        "Q3_K_S": 3.64, "Q3_K_M": 4.0, "Q3_K": 4.0, "Q3_K_L": 4.3, "IQ4_XS": 4.46, "IQ4_NL": 4.68, "MXFP4": 4.25,
        "NVFP4": 4.5, "Q4_0": 4.66, "Q4_1": 5.15, "Q4_K_S": 4.67, "Q4_K_M": 4.89, "Q4_K": 4.89, "Q5_0": 5.59,
        "Q5_1": 6.06, "Q5_K_S": 5.57, "Q5_K_M": 5.7, "Q5_K": 5.7, "Q6_K": 6.56, "Q8_0": 8.5, "BF16": 16, "F16": 16,
        "F32": 32,
    }
)  # fmt: skip
PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.\w+)")
LABEL = re.compile(
    r"(?<![A-Z0-9])((?:UD-)?(?:I?Q|TQ)\d(?:_[A-Z0-9]+)*|BF16|FP?16|FP?32|MXFP4(?:_MOE)?|NVFP4)(?![A-Z0-9_])",
    re.IGNORECASE,
)
OTHER = re.compile(r"(?i)(^|[-_.])(mmproj|imatrix)")  # GGUF files that accompany a model but are not one


def models(names: Iterable[str]) -> list[str]:
    """The GGUF models among the paths of files, each represented by its first file; other files are left out."""
    found: dict[str, str] = {}
    for path in sorted(names):
        name = path.rpartition("/")[2]
        if name.endswith(".gguf") and not OTHER.search(name):
            found.setdefault(match[1] if (match := PART.fullmatch(path)) else path, path)
    return list(found.values())


def label(path: str) -> str:
    """The quantization that the path of a GGUF file names, such as "Q4_K_M" or "UD-Q4_K_XL"; "" if it names none."""
    for part in reversed(_stem(path).split("/")):
        if found := LABEL.findall(part):
            return re.sub(r"^FP(16|32)$", r"F\1", str(found[-1]).upper())
    return ""


def named(names: Iterable[str], quant: str) -> list[str]:
    """The models of a quantization. UD-Q4_K_XL also answers to Q4_K_XL, if nothing else does."""
    every = {path: label(path) for path in models(names)}
    exact = [path for path, own in every.items() if own == quant.upper()]
    return exact or [path for path, own in every.items() if own.removeprefix("UD-") == quant.upper()]


def choose(names: Collection[str], quant: str, where: str) -> list[str]:
    """All files of the chosen model; empty if there is no model and `quant` is empty.

    quant  a quantization; "": DEFAULT, else the one with the nearest number of bits per weight

    Raises CheckpointError if no model has this quantization, or if there are different models to choose from.
    """
    every = models(names)
    if quant:
        found = named(names, quant)
        if not found:
            there = sorted({own for path in every if (own := label(path))})
            expected = f"; it has {', '.join(there)}: name one, as in {where}:{there[0]}" if there else ""
            raise CheckpointError(f"{where} has no GGUF file of type {quant}{expected}")
    else:
        labelled = [path for path in every if label(path)]
        found = every if len(every) < 2 else labelled or every
        if len({_model(path) for path in found}) == 1:
            nearest = min(map(_distance, found))
            found = [path for path in found if _distance(path) == nearest]
    if len(found) > 1:
        sizes = ", ".join(found[:6]) + ", ..." * (len(found) > 6)
        raise CheckpointError(f"{where} has {len(found)} GGUF models ({sizes}); choose one, as in {where}/FILE.gguf")
    return with_all_parts(found)


def with_all_parts(names: Iterable[str]) -> list[str]:
    """The names, and all parts of a name such as NAME-00002-of-00003.gguf."""
    found = dict.fromkeys(names)
    for name in list(found):
        if match := PART.fullmatch(name):
            count = min(int(match[3]), 9999)
            found |= dict.fromkeys(f"{match[1]}-{i + 1:05d}-of-{match[3]}{match[4]}" for i in range(count))
    return list(found)


def _stem(path: str) -> str:
    return match[1] if (match := PART.fullmatch(path)) else path.removesuffix(".gguf")


def _model(path: str) -> str:
    """The name of a file without its quantization and punctuation: equal for quantizations of one model."""
    name = _stem(path).rpartition("/")[2]
    return re.sub(r"[\W_]", "", LABEL.sub("", name)).lower()


def _distance(path: str) -> tuple[float | str, ...]:
    """Sort key: distance from DEFAULT in bits per weight. On a tie the larger is first; unknown ones are last."""
    own = label(path)
    known = own.removeprefix("UD-")
    while known and known not in BITS:
        known = known.rpartition("_")[0]
    bits = BITS.get(known, float("inf"))
    return abs(bits - BITS[DEFAULT]), own != DEFAULT, -bits, own != known, own
