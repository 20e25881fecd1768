"""The page of a trace in a browser: selection by pointer and keys, and the texts.

Needs Chromium, which pip does not install; without it these tests are skipped, or fail if CI is set.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from llama.inside import trace as tracing
from llama.inside import trace_page
from llama.text import Llama

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = "the cat\n\x1b[1m \u202esat"


@pytest.fixture(scope="module")
def file(tiny_llm: Llama, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a model with two layers and random weights."""
    traced = tracing.trace(tiny_llm.model, tiny_llm.tokenizer.encode_prompt("the cat sat"))
    config = tiny_llm.model.config
    about = {
        "model": "tiny",
        "n_layers": config.n_layers,
        "n_heads": config.n_heads,
        "n_kv_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "dtype": "float32",
        "prompt": PROMPT,
    }
    path = tmp_path_factory.mktemp("trace") / "trace.html"
    facts = tracing.facts(traced, tiny_llm.tokenizer, about)
    path.write_text(trace_page.render(facts, tracing.packed_maps(traced.weights)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def found(file: Path) -> dict[str, Any]:
    """The data of the page."""
    packed = file.read_text(encoding="utf-8").split('id="data">')[1].split("</script>")[0]
    data: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(packed)))
    return data


@pytest.fixture
def tab(open_page: Callable[..., Page], file: Path) -> Page:
    return open_page(file.as_uri(), viewport={"width": 1280, "height": 900}, keep=True)


def setting(tab: Page) -> tuple[int, int, int]:
    """Token, layer and head in the controls."""
    token, layer, head = (int(tab.input_value(f"#{name}")) for name in ("token", "layer", "head"))
    return token, layer, head


def focused(tab: Page) -> str:
    found: str = tab.evaluate("document.activeElement.id || document.activeElement.parentElement.id")
    return found


def marked_row(tab: Page) -> list[str]:
    """Names of the marked rows of the lens table."""
    found: list[str] = tab.eval_on_selector_all(
        '#lens-table tr[aria-current="true"]', "(rows) => rows.map((row) => row.cells[0].textContent)"
    )
    return found


def test_the_embedding_can_be_selected_in_the_lens(tab: Page) -> None:
    tab.select_option("#layer", "1")
    assert marked_row(tab) == ["1"]
    box = tab.locator("#lens").bounding_box()
    assert box
    tab.locator("#lens").click(position={"x": box["width"] - 10, "y": 30})  # the first row, the last token
    assert marked_row(tab) == ["emb"]
    tab.mouse.move(0, 0)
    assert tab.inner_text("#lens-readout").startswith("embedding, before any layer")
    last = setting(tab)[0]
    assert setting(tab)[1] == 1  # the embedding has no heads, so the layer of the heads is unchanged
    tab.focus("#lens")
    for key, row in (("ArrowDown", "0"), ("ArrowDown", "1"), ("ArrowUp", "0"), ("ArrowUp", "emb"), ("ArrowUp", "emb")):
        tab.keyboard.press(key)
        assert marked_row(tab) == [row]
        assert row == "emb" or setting(tab)[1] == int(row)
    tab.keyboard.press("ArrowLeft")
    assert (setting(tab)[0], marked_row(tab)) == (last - 1, ["emb"])
    tab.keyboard.press("Shift+ArrowDown")
    assert marked_row(tab) == [str(setting(tab)[1])]
    tab.click("#lens-table tbody tr:first-child")
    assert marked_row(tab) == ["emb"]
    row = tab.locator("#lens-table tbody tr:first-child td").all_inner_texts()
    assert f"has rank {row[3]}; KL from the last row {row[4]} nats" in tab.inner_text("#lens-readout")


def test_keys_change_the_selection_and_not_in_fields(tab: Page) -> None:
    assert "in a focused picture, the arrow keys move within it" in tab.inner_text(".keys")
    for name in ("token", "layer", "head"):
        tab.select_option(f"#{name}", "1")
    tab.evaluate("document.activeElement.blur()")
    for key, expected in (
        ("ArrowLeft", (0, 1, 1)),
        ("Shift+ArrowUp", (0, 0, 1)),
        ("Shift+ArrowLeft", (0, 0, 0)),
        ("Shift+ArrowRight", (0, 0, 1)),
    ):
        tab.keyboard.press(key)
        assert setting(tab) == expected
    tab.focus("#heads")
    tab.keyboard.press("ArrowRight")
    assert setting(tab) == (0, 1, 1)
    tab.keyboard.type("what was said, and done?")  # WCAG 2.1.4: no character is a key of the page
    assert setting(tab) == (0, 1, 1)
    tab.evaluate("document.querySelector('main').append(document.createElement('input'))")
    tab.focus("main > input")
    tab.keyboard.type("wasd")
    tab.keyboard.press("ArrowLeft")
    assert tab.input_value("main > input") == "wasd"
    assert setting(tab) == (0, 1, 1)


@pytest.mark.slow
def test_a_redraw_shows_what_a_complete_drawing_shows(tab: Page) -> None:
    drawn = """() => document.querySelector("main").innerHTML
      + [...document.querySelectorAll("canvas")].map((canvas) => canvas.toDataURL())
      + [...document.querySelectorAll("select")].map((field) => field.value)"""
    complete = """() => new Promise((done) => {
      dispatchEvent(new Event("resize"));
      requestAnimationFrame(() => requestAnimationFrame(done));
    })"""
    seen = set()
    for key in ("ArrowLeft", "Shift+ArrowUp", "Shift+ArrowDown", "Shift+ArrowRight", "ArrowRight", "ArrowLeft"):
        tab.keyboard.press(key)
        redrawn = tab.evaluate(drawn)
        tab.evaluate(complete)
        assert tab.evaluate(drawn) == redrawn, key
        seen.add(redrawn)
    for button in ("rank of the answer", "spread", "top token"):
        tab.click(f"button:text('{button}')")
        redrawn = tab.evaluate(drawn)
        tab.evaluate(complete)
        assert tab.evaluate(drawn) == redrawn, button
        seen.add(redrawn)
    assert len(seen) > 6


def test_the_title_shows_the_text_and_the_prediction(tab: Page, found: dict[str, Any]) -> None:
    answer = found["texts"][str(found["tokens"]["next_ids"][-1][0])]
    shown = tab.evaluate("document.getElementById('title').textContent")
    assert shown.startswith("the cat U+001B[1m U+202Esat → ")
    assert tab.evaluate("visible(" + json.dumps(answer) + ")").strip("␣") in shown
    assert tab.title() == f"{shown} · clearllama trace"


def test_the_page_opens_on_the_head_with_the_largest_effect_and_says_so(tab: Page, found: dict[str, Any]) -> None:
    effects = found["heads"]["effects"]
    most = max(max(row) for row in effects)
    token, layer, head = setting(tab)
    assert effects[layer][head] == most
    assert token == len(found["tokens"]["ids"]) - 1
    words = tab.inner_text("#opened")
    assert words.startswith(f"The page opens on head {layer}.{head}: of all 8 heads it has the largest direct effect")
    assert f"+{most:.3g}" in words
    tab.click("text=effect on the answer")
    assert tab.get_attribute("#heads-choices [aria-pressed=true]", "type") == "button"
    assert f"adds +{most:.3g} to the logit" in tab.inner_text("#heads-readout")


def test_a_phone_needs_no_sideways_scroll(open_page: Callable[..., Page], file: Path) -> None:
    tab = open_page(file.as_uri(), viewport={"width": 390, "height": 844})
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    for name in ("token", "layer", "head"):
        box = tab.locator(f"#{name}").bounding_box()
        assert box is not None
        assert 0 <= box["x"] <= box["x"] + box["width"] <= 390
    names = tab.eval_on_selector_all(
        "button, select, canvas", "(all) => all.map((e) => e.ariaLabel || e.labels?.[0]?.textContent || e.textContent)"
    )
    assert all(name.strip() for name in names)
