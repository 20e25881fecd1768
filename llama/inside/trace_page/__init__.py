"""The page of a trace: one HTML file with the files of this folder and the data.

The server's page and the RoPE page also use shared.css, shared.js, tokens.css and tokens.js.

The page uses no network. Its content security policy allows one script and one style, by their hashes, so that no
traced text can run as code. The data (JSON and attention maps) is deflated and written as base64.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Mapping
from importlib.resources import files
from typing import Any


def render(facts: Mapping[str, Any], maps: bytes) -> str:
    """The text of the page. `facts` and `maps` are the results of `trace.facts` and `trace.packed_maps`."""
    parts = {
        "style.css": read("shared.css") + read("tokens.css") + read("style.css"),
        "page.js": read("shared.js") + read("tokens.js") + read("page.js"),
    }
    parts |= {f"hash of {name}": hashed(text) for name, text in parts.items()}
    data = json.dumps(facts, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    parts |= {"data": packed(data), "maps": packed(maps)}
    # one call replaces all placeholders, so that a placeholder in an inserted text is not replaced
    return re.sub(r"\{\{(.+?)\}\}", lambda match: parts[match[1]], read("index.html"))


def read(name: str) -> str:
    """The text of a file of this folder."""
    return (files(__package__) / name).read_text(encoding="utf-8")


def packed(data: bytes) -> str:
    """Base64 of a zlib stream, which the browser's DecompressionStream reads."""
    return base64.b64encode(zlib.compress(data, 4)).decode()  # level 6 is 6 % smaller, but takes four times as long


def hashed(text: str) -> str:
    """A text as a source in a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
