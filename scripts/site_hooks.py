"""Hooks of mkdocs.yml: pages written for GitHub become pages of the site.

GitHub and the site show the same files. What they do differently is translated here, at build time: links to files
outside docs/ become plain text, since the site does not have these files; figures in two palettes, folded answers, the
order of the pages, and the RoPE page, which is built and shown inside docs/learn/rope-on-one-page.md.
"""

from __future__ import annotations

import html
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

SECTIONS = ("start", "guides", "learn", "reference", "evidence")
PAGE, MARK = "learn/rope.html", "<!-- the RoPE page -->\n"  # the RoPE page: its file, its place
FRAME = '[Open the page alone.]({0})\n\n<iframe class="page" src="{0}" title="The RoPE page"></iframe>'

FENCE = re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE)
PICTURE = re.compile(
    r'<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="([^"]+)">\s*'
    r'<img alt="([^"]*)" src="([^"]+)">\s*</picture>'
)
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)\s:#]+)(?:#[^)\s]*)?\)")  # the link's text, its file
LIST = re.compile(r"^((?![-*+>|#<\s]|\d+\. ).+\n)(?=(?:[-*+]|1\.) )", re.MULTILINE)  # a paragraph directly above a list
ROW, CODE = re.compile(r"^\|.*\|$", re.MULTILINE), re.compile(r"`[^`\n]*`")  # a row of a table, and code in a line


def on_files(files: Files, config: Any) -> Files:
    """Set the navigation, and add the RoPE page."""
    from mkdocs.structure.files import File
    from mkdocs.utils import nest_paths

    from llama.study import page

    config.nav = nest_paths(ordered(Path(config.docs_dir), [file.src_uri for file in files.documentation_pages()]))
    files.append(File.generated(config, PAGE, content=page.html()))
    return files


def ordered(docs: Path, pages: list[str]) -> list[str]:
    """The pages by section, and within a section in the order of the links in its index page or that of all pages."""
    linked: dict[str, int] = {}
    for index in sorted(docs.rglob("README.md"), key=lambda file: (-len(file.parts), file)):
        lines = sorted(index.read_text().splitlines(), key=lambda line: not line.startswith("|"))  # tables, then prose
        for match in LINK.finditer("\n".join(lines)):
            linked.setdefault(_inside(docs, index.parent, match[2]), len(linked))

    def place(page: str) -> tuple[int, int, int, str]:
        section, *rest = page.split("/")
        of_section = SECTIONS.index(section) if section in SECTIONS else len(SECTIONS) if rest else -1
        return (
            of_section,
            -1 if page.endswith("README.md") and len(rest) < 2 else linked.get(page, len(linked)),
            len(rest),
            page,
        )

    return sorted(pages, key=place)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Translate a page."""
    return translate(markdown, Path(page.file.abs_src_path), Path(config.docs_dir))


def translate(markdown: str, page: Path, docs: Path) -> str:
    """A page for GitHub as a page for the site. Code blocks stay as they are."""

    def link(match: re.Match[str]) -> str:
        target = _inside(docs, page.parent, match[2])
        outside = target.startswith("../") and (docs / target).exists()  # mkdocs reports what does not exist
        return match[1] if outside else match[0]

    def picture(match: re.Match[str]) -> str:
        dark, alt, light = match.groups()
        alt = re.sub(r"([\[\]\\*_`$])", r"\\\1", html.unescape(alt))
        return f"![{alt}]({light}#only-light)\n![{alt}]({dark}#only-dark)"

    def text(words: str) -> str:
        frame = FRAME.format(PAGE.rpartition("/")[2])
        words = re.sub(rf"{MARK}{PICTURE.pattern}", frame, words)  # instead of GitHub's picture of it
        words = re.sub(r"^<details>$", "<details markdown>", words, flags=re.MULTILINE)
        words = LIST.sub(r"\1\n", words)
        words = ROW.sub(lambda row: CODE.sub(lambda code: code[0].replace(r"\|", "|"), row[0]), words)
        return LINK.sub(link, PICTURE.sub(picture, words))

    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [text(markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, text(markdown[end:])])


def _inside(docs: Path, folder: Path, target: str) -> str:
    """A link of a page in `folder` as a path relative to docs/."""
    return Path(os.path.relpath(folder / target, docs)).as_posix()
