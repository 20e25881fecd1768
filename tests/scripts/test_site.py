"""The documentation as a site and the generated reference: what stays fresh, complete and readable in both forms."""

from __future__ import annotations

import re
from pathlib import Path

import llama
from llama import study

from . import reference, site_hooks

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


# --------------------------------------------------------------------------------------------------------- reference
def test_each_public_name_is_in_the_reference() -> None:
    page = reference.PYTHON.read_text()
    assert {name for name in (*llama.__all__, *study.__all__) if not re.search(rf"\b{name}\b", page)} <= {
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


def test_a_figure_becomes_one_image_for_each_palette() -> None:
    lesson = (DOCS / "learn" / "04-rope-from-one-demand.md").read_text()
    made = translate(lesson)
    names = re.findall(r'src="figures/(\w+)-light\.svg"', lesson)
    assert names == re.findall(r"\(figures/(\w+)-light\.svg#only-light\)", made)
    assert names == re.findall(r"\(figures/(\w+)-dark\.svg#only-dark\)", made)
    assert "<picture>" not in made


def test_pages_of_a_section_come_in_the_order_of_its_index() -> None:
    pages = [file.relative_to(DOCS).as_posix() for file in DOCS.rglob("*.md")]
    found = site_hooks.ordered(DOCS, sorted(pages))
    assert sorted(found) == sorted(pages)
    sections = [page.split("/")[0] for page in found if "/" in page]
    assert list(dict.fromkeys(sections)) == [name for name in site_hooks.SECTIONS if name in sections]
    lessons = [page for page in found if page.startswith("learn/")]
    assert lessons[0] == "learn/README.md"
    assert lessons[1:11] == sorted(page for page in lessons if re.match(r"learn/\d", page))
