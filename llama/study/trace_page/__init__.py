"""The page of a trace: one HTML file with index.html, style.css and page.js from this folder, shared.css, shared.js
and tokens.js from page/, and the data.

The page uses no network. Its content security policy allows one script and one style, by their hashes, so that no
traced text can run as code. The data are JSON in which no tag can begin.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from ..page import part


def render(facts: Mapping[str, Any], maps: str) -> str:
    """The page as text; facts and maps are the results of `trace.facts` and `trace.packed_maps`."""
    parts = {
        "style.css": part("shared.css") + _read("style.css"),
        "page.js": part("shared.js") + part("tokens.js") + _read("page.js"),
    }
    parts |= {f"hash of {name}": _hash(text) for name, text in parts.items()}
    parts["data"] = embedded({**facts, "maps": maps})
    # One pass, so that a placeholder in an inserted text is not replaced.
    return re.sub(r"\{\{(.+?)\}\}", lambda match: parts[match[1]], _read("index.html"))


def _read(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def embedded(value: Any) -> str:
    """JSON that is safe in a <script> element: without <, >, & and the line separators of JavaScript."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&\u2028\u2029]", lambda c: f"\\u{ord(c[0]):04x}", text)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
