"""The documentation as a site and the generated reference: what stays fresh, complete and readable in both forms."""

from __future__ import annotations

import re
from pathlib import Path

import llama
from llama import inside

from . import reference, site_hooks

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


# --------------------------------------------------------------------------------------------------------- reference
def test_each_public_name_is_in_the_reference() -> None:
    page = reference.PYTHON.read_text()
    assert {name for name in (*llama.__all__, *inside.__all__) if not re.search(rf"\b{name}\b", page)} <= {
        "__version__",
        "LlamaError",
    }


# -------------------------------------------------------------------------------------------------------------- site
def translate(text: str) -> str:
    return site_hooks.translate(text, DOCS / "learn" / "page.md", DOCS)


def test_links_to_files_that_the_site_has_not_become_text_and_others_stay() -> None:
    assert translate("see [`a`\n[b]](../../llama/rope.py#L3) and [c](../../configs)") == "see `a`\n[b] and c"
    for same in (
        "[a](explain.md#top)",
        "[a](#top)",
        "[a](https://x.org/a)",
        "[a](../../no/such/file.py)",
        "![a](b.png)",
    ):
        assert translate(same) == same
