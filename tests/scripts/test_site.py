"""The documentation as a site: what GitHub and the site show differently is translated."""

from __future__ import annotations

import re
from pathlib import Path

from . import site_hooks

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def read(file: Path) -> str:
    return file.read_text()


# -------------------------------------------------------------------------------------------------------------- site
def translate(text: str) -> str:
    return site_hooks.translate(text, DOCS / "learn" / "page.md", DOCS, "https://example.org/r")


def test_links_to_the_repository_leave_the_site_and_others_stay() -> None:
    assert translate("[a](../../llama/rope.py#L3)") == "[a](https://example.org/r/blob/main/llama/rope.py#L3)"
    assert translate("[a](../../configs)") == "[a](https://example.org/r/tree/main/configs)"
    for same in ("[a](explain.md#top)", "[a](#top)", "[a](https://x.org/a)", "[a](../../no/such/file.py)"):
        assert translate(same) == same


def test_code_blocks_stay_as_they_are() -> None:
    block = "```text\n[a](../../llama/rope.py)\n<details>\n- b\n```\n"
    assert (
        translate(f"{block}[a](../../README.md)\n{block}")
        == f"{block}[a](https://example.org/r/blob/main/README.md)\n{block}"
    )
    assert translate("```python solution\nx\n```") == "```python\nx\n```"


def test_a_figure_becomes_one_image_for_each_palette() -> None:
    lesson = read(DOCS / "learn" / "04-rope-from-one-demand.md")
    made = translate(lesson)
    names = re.findall(r'src="figures/(\w+)-light\.svg"', lesson)
    assert names == re.findall(r"\(figures/(\w+)-light\.svg#only-light\)", made)
    assert names == re.findall(r"\(figures/(\w+)-dark\.svg#only-dark\)", made)
    assert "<picture>" not in made


def test_a_list_directly_below_a_paragraph_and_pipes_in_a_table() -> None:
    assert translate("Words:\n- a\n- b\n") == "Words:\n\n- a\n- b\n"
    assert translate("- a\n  more\n- b\n") == "- a\n  more\n- b\n"
    assert translate("| `a\\|b` | c |\n") == "| `a|b` | c |\n"


def test_pages_of_a_section_come_in_the_order_of_its_index() -> None:
    pages = [file.relative_to(DOCS).as_posix() for file in DOCS.rglob("*.md")]
    found = site_hooks.ordered(DOCS, sorted(pages))
    assert sorted(found) == sorted(pages)
    sections = [page.split("/")[0] for page in found if "/" in page]
    assert list(dict.fromkeys(sections)) == [name for name in site_hooks.SECTIONS if name in sections]
    lessons = [page for page in found if page.startswith("learn/")]
    assert lessons[0] == "learn/README.md"
    assert lessons[1:14] == sorted(page for page in lessons if re.match(r"learn/\d", page))


def test_nested_lists_are_indented_by_the_width_that_both_renderers_read() -> None:
    """Python-Markdown, the site's renderer, needs four spaces; GitHub accepts two."""
    for file in DOCS.rglob("*.md"):
        text = site_hooks.FENCE.sub("", read(file))
        assert not re.search(r"^ {1,3}(?:[-*+]|\d+\.) ", text, re.MULTILINE), file


def test_the_site_links_the_repository_that_the_lessons_link() -> None:
    (repository,) = re.findall(r'^REPOSITORY = "(.*)"', read(ROOT / "scripts" / "render_lessons.py"), re.MULTILINE)
    assert f"https://github.com/{repository} " in read(ROOT / "mkdocs.yml")


def test_the_rope_page_has_its_place() -> None:
    assert read(DOCS / "learn" / "explore.md").count(site_hooks.MARK) == 1
    translated = translate(read(DOCS / "learn" / "explore.md"))
    assert f'src="{Path(site_hooks.PAGE).name}"' in translated
    assert "rope-page-light.png" not in translated  # the page itself is there
