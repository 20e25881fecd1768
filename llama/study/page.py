"""The page about RoPE: one HTML file with controls and five pictures, which needs no network and no installation.

Its parts are in page/: rope.js computes the numbers, view.js draws, page.css, page.html. It draws with the files that
the page of a trace also uses, and has a content security policy like that page. The file also contains the library's
results at some settings. When the page opens, it compares its own numbers with them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np

from .. import __version__
from ..inside import trace_page
from ..rope_scaling import inverse_frequencies
from .measures import stretching

METHODS = ("default", "linear", "ntk", "dynamic", "yarn", "llama3")
# settings of the page's self-check: head_dim, base, trained length, stretch; the first three rows are Llama 1 to 3.1
CHECKED = (
    (128, 10000.0, 2048, 4.0),
    (128, 10000.0, 4096, 8.0),
    (128, 500000.0, 8192, 8.0),
    (64, 500000.0, 8192, 32.0),
    (64, 10000.0, 1024, 1.0),
    (8, 1000.0, 128, 1.5),
    (80, 31415.9, 3000, 2.7),
    (16, 10000000.0, 131072, 32.0),
)
WIDEST = 256  # length of the page's fixed query and key; a smaller head uses their first entries


def html() -> str:
    """The page as text. The same version of the library produces the same text."""
    data = json.dumps({"reference": reference(), **vectors()}, separators=(",", ":"), allow_nan=False)
    shared = {kind: trace_page.read(f"shared.{kind}") + trace_page.read(f"tokens.{kind}") for kind in ("css", "js")}
    parts = {"page.css": shared["css"] + part("page.css"), "page.js": part("rope.js") + shared["js"] + part("view.js")}
    parts |= {f"hash of {name}": trace_page.hashed(text) for name, text in parts.items()}
    parts |= {"data": data.replace("<", "\\u003c"), "version": __version__}  # no "</script>" in the data
    return re.sub(r"\{\{(.+?)\}\}", lambda match: parts[match[1]], part("page.html"))


def part(name: str) -> str:
    """The text of a file in page/."""
    return (Path(__file__).parent / "page" / name).read_text(encoding="utf-8")


def scaling_of(method: str, stretch: float, trained: int) -> dict[str, Any] | None:
    """The scaling of a method of the page. dynamic has factor 1, so that it stretches by exactly length / trained."""
    if method == "default":
        return None
    scaling = stretching(method, 1.0 if method == "dynamic" else stretch)
    return scaling | ({"original_max_position_embeddings": trained} if method in ("yarn", "llama3") else {})


def reference() -> list[dict[str, Any]]:
    """The library's results for every method at CHECKED, one row per setting; invFreq (D/2) has float32 precision."""
    rows = []
    for dim, base, trained, stretch in CHECKED:
        length = round(trained * stretch)
        setting = {"dim": dim, "base": base, "trained": trained, "stretch": stretch, "length": length}
        for method in METHODS:
            scaling = scaling_of(method, stretch, trained)
            inv_freq, factor = inverse_frequencies(dim, base, scaling, seq_len=length, max_seq_len=trained)
            shortest = [float(str(w)) for w in inv_freq.numpy()]  # the shortest digits that identify a float32
            rows.append(setting | {"method": method, "factor": factor, "invFreq": shortest})
    return rows


def vectors() -> dict[str, list[float]]:
    """One query and one key (256,) of normal random numbers with a fixed seed, to three decimals."""
    q, k = np.random.default_rng(0).standard_normal((2, WIDEST)).round(3).tolist()
    return {"q": q, "k": k}
