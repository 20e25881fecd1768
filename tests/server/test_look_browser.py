"""The page of the server in a browser: what it shows is what the library computes, and nothing gets lost.

Needs Chromium, which pip does not install; without it these tests are skipped, or fail if CI is set.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import re
import shlex
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import torch
from playwright.sync_api import Browser, Page

from llama import loader
from llama.generate import generate
from llama.inside.hooks import Place, activations, patch
from llama.inside.intervene import ablated
from llama.inside.patching import patching_grid
from llama.sampling import SamplingParams
from llama.server.look import Looks
from llama.text import Llama
from tests.server.serving import Running, running

from ..patience import PATIENCE

pytestmark = pytest.mark.usefixtures("one_thread")
SLOW = pytest.mark.slow
WIDE, PHONE = {"width": 1280, "height": 860}, {"width": 390, "height": 844}
SAMPLING: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95, "min_p": 0.05}
KJV = Path(__file__).parents[2] / "checkpoints" / "tiny-kjv"
NASTY = "<img src=x onerror=document.title='owned'> \u202egnp.exe"
Open = Callable[..., Page]


@pytest.fixture(scope="module")
def server(tiny_llm: Llama) -> Iterator[Running]:
    """The server sends a comment each millisecond, which the page skips."""
    with running(tiny_llm, pause=0.001) as found:
        yield found


@pytest.fixture
def show(open_page: Open, server: Running) -> Open:
    return lambda url=server.url, **how: open_page(url, **{"viewport": WIDE, **how})


def configure(tab: Page, schema: str = "", **fields: Any) -> None:
    tab.click("#open-settings")
    for name, value in fields.items():
        tab.fill(f"#set-{name}", str(value))
    tab.fill("#schema", schema)
    tab.click("#apply")


def until(tab: Page, expression: str) -> None:
    """Wait until an expression is true. `wait_for_function` needs eval in the page, which its policy blocks."""
    end = time.monotonic() + 180
    while not tab.evaluate(expression):
        assert time.monotonic() < end, expression
        tab.wait_for_timeout(20)


def settle(tab: Page) -> dict[str, Any]:
    """Wait for the end of the answer, and for the inside of the open token. Returns the last turn that is shown."""
    until(tab, "!running && (!chosen || (inside && !request))")
    turn: dict[str, Any] = tab.evaluate("path().at(-1)")
    return turn


def ask(tab: Page, question: str, **fields: Any) -> dict[str, Any]:
    configure(tab, **{"max_tokens": 24, "seed": 5, **fields})
    tab.fill("#question", question)
    tab.press("#question", "Enter")
    until(tab, "path().length && path().at(-1).question !== undefined")
    return settle(tab)


def ids_of(tokens: list[dict[str, Any]]) -> list[int]:
    return [one["id"] for one in tokens]


def answer_ids(turn: dict[str, Any]) -> list[int]:
    """The ids of an answer without the stop id, as in `Completion.tokens`."""
    return ids_of(turn["tokens"][:-1] if turn["end"] == "stop" else turn["tokens"])


def share(p: float) -> str:
    if p >= 0.0995:
        return f"{p:.2f}"
    return f"{p:.3f}" if p >= 0.00095 else "0" if p == 0 else f"{p:.0e}".replace("e-0", "e−").replace("e-", "e−")


def percent(p: float) -> str:
    return f"{99.9 if 0.999 < p < 1 else 100 * p:.{3 if p > 0.99 else 2}g} %"


def chat(llm: Llama, question: str, **options: Any) -> list[int]:
    return llm.chat([{"role": "user", "content": question}], **{**SAMPLING, **options}).tokens


def body_of(tab: Page, act: Callable[[], object]) -> dict[str, Any]:
    """The body of the request for an answer that `act` causes."""
    with tab.expect_request("**/look/answer") as sent:
        act()
    body: dict[str, Any] = json.loads(sent.value.post_data or "")
    return body


def open_token(tab: Page, turn: dict[str, Any], i: int) -> None:
    tab.evaluate(f"select({turn['n']}, {i})")
    settle(tab)


# ---------------------------------------------------------------------------------------------------- the default run
def test_a_first_minute(show: Open, tiny_llm: Llama) -> None:
    """Ask, open a word, see its alternatives, take one, switch off the head that adds most."""
    tab = show()
    configure(tab, seed=5, max_tokens=24)
    tab.click("#samples button >> nth=0")
    turn = settle(tab)
    question = turn["question"]
    assert answer_ids(turn) == chat(tiny_llm, question, seed=5, max_new_tokens=24)

    tab.click(f"#t{turn['n']}-3 .w")
    settle(tab)
    one, prompt = turn["tokens"][3], ids_of(turn["prompt"])
    logits = tiny_llm.model(torch.tensor([prompt + ids_of(turn["tokens"][:3])]))[0, -1, : tiny_llm.tokenizer.n_vocab]
    p = logits.softmax(-1)
    rows = tab.locator("#alternatives .row")
    for k, other in enumerate(one["top"]):
        shown = rows.nth(k).locator(".p").all_inner_texts()
        assert float(shown[0].replace("−", "-")) == pytest.approx(float(p[other["id"]]), rel=0.06, abs=1e-6)
        assert shown == [share(other["p"]), *([share(other["q"])] if "q" in other else [])]
        assert rows.nth(k).locator(".cut").count() == ("cut" in other)
    tab.click("#more")
    check_bars(tab, one)
    tab.click("#left")
    check_box(tab, "2 of them please")  # a pointer opened the word, so characters are text
    tab.click(f"#t{turn['n']}-3 .w")
    for key in ("ArrowRight", "ArrowLeft"):
        tab.keyboard.press(key)
    settle(tab)
    left, warm = one["left"], (logits / SAMPLING["temperature"]).softmax(-1)
    least, largest = SAMPLING["min_p"], float(warm.max())
    for text, *parts in zip(
        tab.locator("#kept li").all_inner_texts(),
        ("temperature ", "top-p ", "min-p "),
        (share(largest), f"{left['top_p']} of {len(p)} ", f"{least} × {share(largest)} = {share(least * largest)}"),
        (str(SAMPLING["temperature"]), str(SAMPLING["top_p"]), f"{left['min_p']} of {left['top_p']} "),
        strict=True,
    ):
        assert all(part in text for part in parts), text

    k = next(k for k, other in enumerate(one["top"]) if other["id"] != one["id"] and "control" not in other)
    begun = [*ids_of(turn["tokens"][:3]), one["top"][k]["id"]]
    body = body_of(tab, lambda: tab.keyboard.press(str(k + 1)))
    assert (body["ids"], body["answer"]) == (prompt, begun)
    branch = settle(tab)
    params = SamplingParams(max_new_tokens=24, seed=5, **SAMPLING)
    stops, n_vocab = tiny_llm.tokenizer.stop_ids, tiny_llm.tokenizer.n_vocab
    expected = generate(tiny_llm.model, prompt + begun, params, stop_ids=stops, n_vocab=n_vocab)
    assert ids_of(branch["tokens"]) == begun + [token.id for token in expected]
    assert tab.inner_text(".place") == "2/2"
    assert int(tab.input_value("#against")) == one["id"]  # the word that it replaced
    assert tab.inner_text("#sentence").startswith("You chose ")
    assert f" gave it {percent(one['top'][k]['p'])}. " in tab.inner_text("#sentence")

    head = tab.evaluate("inside.head.head")
    body = body_of(tab, lambda: tab.keyboard.press("o"))
    assert body["off"] == [head]
    off = settle(tab)
    with ablated(tiny_llm.model, [tuple(head)]):
        assert answer_ids(off) == chat(tiny_llm, question, seed=5, max_new_tokens=24)
    assert tab.inner_text(".place") == "3/3"
    first = next(i for i, (a, b) in enumerate(zip(off["tokens"], branch["tokens"], strict=False)) if a["id"] != b["id"])
    i = min(3, first)
    with ablated(tiny_llm.model, [tuple(head)]):
        logits = tiny_llm.model(torch.tensor([prompt + ids_of(off["tokens"][:i])]))[0, -1, : tiny_llm.tokenizer.n_vocab]
    before, after = branch["tokens"][i], share(float(logits.softmax(-1)[branch["tokens"][i]["id"]]))
    shown = after if before["id"] in ids_of(off["tokens"][i]["top"]) else "not among the ten"
    foot = tab.inner_text(".foot")
    assert f"without head {head[0]}.{head[1]}: " in foot
    assert f"{share(before['p'])} → {shown}" in foot
    assert tab.locator(".first").get_attribute("id") == f"t{off['n']}-{first}"
    assert "2/3" in tab.inner_text("#status")  # names its source until the user opens another answer
    tab.keyboard.press("[")
    settle(tab)
    assert tab.inner_text("#status") == ""
    tab.click("#close")
    assert not tab.locator("#hint").is_visible()


def check_box(tab: Page, sentence: str) -> None:
    """Type a sentence, and find it in the box and nothing else changed."""
    kept = "JSON.stringify([turns, chosen, [...seen.keys()], id('chat').textContent, id('panel').textContent])"
    before = tab.evaluate(kept)
    tab.keyboard.type(sentence)
    assert tab.input_value("#question") == sentence
    assert tab.evaluate(kept) == before, sentence
    tab.fill("#question", "")


SENTENCES = [
    *("or what about France?", "2 of them please", "0 is even. Why?", "r u sure?", "edit this text", "open it", "3 2"),
    *("[see above] explain", "] what is that?", "Really?", "explain it", "9 lives", "ok, and then?", "o", "e", "r"),
    *("1", "3.5 * 2", "one more", "rewrite: 'o no'", "4 example", "[o]", "10 reasons", "0", "[[]]", "Oh!"),
    *("earlier?", "5", "or 1?", "7 e r o 8"),
]


def test_typing_after_send_changes_nothing_but_the_box(show: Open) -> None:
    tab = show()
    configure(tab, seed=5, max_tokens=8)
    sent: list[str] = []
    tab.on("request", lambda request: sent.append(request.url))
    assert len(SENTENCES) == 30
    for i, send in enumerate((lambda: tab.press("#question", "Enter"), lambda: tab.click("#send"))):
        tab.fill("#question", "What is a llama?")
        send()
        settle(tab)
        assert tab.evaluate("document.activeElement.id") == "question"
        sent.clear()
        for sentence in SENTENCES[i::2]:
            check_box(tab, sentence)
        assert sent == []
    n = tab.evaluate("path().at(-1).n")
    for sentence in SENTENCES[1:6] + SENTENCES[7:9]:  # also where a pointer opened a word, or took one
        tab.click(f"#t{n}-2 .w")
        settle(tab)
        check_box(tab, sentence)
    tab.locator("#alternatives .row[aria-current=false]").first.click()
    settle(tab)
    check_box(tab, "2 of them please")


def check_bars(tab: Page, one: dict[str, Any]) -> None:
    """The bars of both columns have one scale, and each column adds up to 1 with the row of all other words."""
    bars = tab.eval_on_selector_all(
        "#words .track", "(all) => all.map((e) => [e.clientWidth, e.firstChild.getBoundingClientRect().width])"
    )
    columns = [[other[name] for other in one["top"] if name in other] for name in ("p", "q")]
    rest = [max(0.0, round(1 - sum(column), 4)) for column in columns]
    shown = [p for other in one["top"] for p in (other["p"], other.get("q", 0.0))] + rest
    assert [bar for _, bar in bars] == pytest.approx([max(1, bars[0][0] * p) for p in shown if p], abs=0.6)
    assert len({width for width, _ in bars}) == 1
    assert tab.locator("#alternatives .row:last-child .p").all_inner_texts() == [share(p) for p in rest]


def test_text_of_others_stays_text(show: Open) -> None:
    tab = show(expected="requires 'TrustedHTML'")
    turn = ask(tab, NASTY)
    data = {"turns": tab.evaluate("turns")}
    i = next(i for i, one in enumerate(turn["tokens"]) if re.fullmatch("[!-~]", one.get("text", "")))
    data["turns"][1]["tokens"][i] |= {"text": NASTY, "id": 7}
    tab.evaluate("async (text) => load(new File([text], 'x.json'))", json.dumps(data))
    open_token(tab, turn, i)
    assert tab.locator("img").count() == 0
    for name in (".question", f"#t{turn['n']}-{i}", "#chosen"):
        assert "U+202Egnp.exe" in tab.inner_text(name).replace("␣", " ")
    assert "<img" in tab.inner_text(".question")
    assert tab.title() == "tiny · clearllama"
    blocked = "() => { try { document.body.innerHTML = 'x'; return 'set'; } catch (error) { return error.name; } }"
    assert tab.evaluate(blocked) == "TypeError"


def test_a_phone_needs_no_sideways_scroll_and_all_text_has_contrast(show: Open) -> None:
    tab = show(viewport=PHONE, has_touch=True)
    check_looks(tab, "the empty page")
    turn = ask(tab, "a " * 12 + "x" * 90)
    check_looks(tab, "the answer")
    heights = "['.question', '.asked button'].map((name) => [...document.querySelector(name).childNodes][0])"
    lines = tab.evaluate(
        f"{heights}.map((text) => {{ const range = new Range(); range.selectNode(text);"
        " return range.getClientRects()[0].bottom; })"
    )
    assert lines[0] == pytest.approx(lines[1], abs=3)  # "edit" is on the first line of the question
    assert "tap" in tab.evaluate("getComputedStyle(document.querySelector('.click'), '::before').content")
    check_marks(tab, turn, ["none", "none", "double", "wavy"])
    i = next(i for i, one in enumerate(turn["tokens"]) if re.fullmatch("[!-~]", one.get("text", "")))
    tab.tap(f"#t{turn['n']}-{i} .w")
    settle(tab)
    assert tab.evaluate("chosen.i") == i
    check_sources(tab, turn, i)
    for name in ("words", "why", "head", "lens", "prompt"):
        tab.tap(f"#tabs [data-tab={name}]")
        check_looks(tab, name)
        assert tab.locator("#panel").bounding_box()["height"] <= 0.61 * PHONE["height"]  # type: ignore[index]
        shown = "[...document.querySelectorAll('button, select')].filter((one) => one.checkVisibility())"
        assert tab.evaluate(f"Math.min(...{shown}.map((one) => one.offsetHeight))") >= 40
    tab.tap("#tabs [data-tab=words]")
    tab.locator("#alternatives .row[aria-current=false]").first.tap()
    settle(tab)
    status, panel = (tab.locator(name).bounding_box() for name in ("#status", "#panel"))
    assert "return to answer 1/2" in tab.inner_text("#status")
    assert 0 < status["y"] + status["height"] <= panel["y"]  # type: ignore[index]


def number(text: str) -> float:
    return float(text.replace("−", "-"))


def check_sources(tab: Page, turn: dict[str, Any], i: int) -> None:
    """Each token before the open word says and shows what it contributes; the tokens after it have no mark."""
    losses = tab.evaluate("losses()")
    shown = tab.eval_on_selector_all(
        f"#turn-{turn['n']} :is([data-source], .answer .t)",
        """(all) => all.map((e) => [e.dataset.source, e.id, e.firstElementChild ?? e]).map(([source, id, e]) => [
            source ?? path().at(-1).prompt.length + Number(id.split("-")[1]), e.title, e.style.background,
            getComputedStyle(e).textDecorationStyle, e.closest("[aria-description]")?.getAttribute("aria-description")])
        """,
    )
    assert len(shown) == len(tab.evaluate("asked(openTurn())")) + len(turn["tokens"])
    most = max(map(abs, losses))
    for source, title, tint, line, told in shown:
        position = int(source)
        if position < len(losses):
            assert title == told
            assert number(title.split(" ")[0]) == pytest.approx(losses[position], abs=0.0051)
            if abs(losses[position]) > most / 20:
                assert (line, bool(tint)) == ("dashed" if losses[position] < 0 else "solid", True)
        elif position > len(losses):
            assert (told, tint) == (None, "")
    assert len(losses) == len(turn["prompt"]) + i


def check_marks(tab: Page, turn: dict[str, Any], marks: list[str]) -> None:
    """A word is marked by its probability: from .5 on, from .1, from .01, below."""
    shown = tab.eval_on_selector_all(
        ".t",
        """(all) => all.map((e) => [e.classList.contains("chip"), getComputedStyle(e.firstElementChild)])
            .map(([chip, { textDecorationLine: line, textDecorationStyle: style }]) => [chip, line, style])
        """,
    )
    for (chip, line, style), one in zip(shown, turn["tokens"], strict=True):
        mark = style if line == "underline" else line
        assert chip or mark == marks[sum(one["p"] < level for level in (0.5, 0.1, 0.01))]


CONTRAST = """() => {
  const number = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const linear = (c) => c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b) + 0.05;
  const faint = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
    if (!own || !node.checkVisibility({ visibilityProperty: true }) || node.closest("svg, option")) continue;
    let opacity = 1, back = null;
    for (let one = node; one; one = one.parentElement) {
      const style = getComputedStyle(one);
      opacity *= Number(style.opacity);
      const paint = number(style.backgroundColor);
      if (!back && (paint.length === 3 || paint[3] > 0)) back = paint;
    }
    back ??= number(getComputedStyle(document.body).backgroundColor);
    const ink = number(getComputedStyle(node).color).map((c, i) => i < 3 ? c * opacity + back[i] * (1 - opacity) : c);
    const [a, b] = [light(ink), light(back)], ratio = Math.max(a, b) / Math.min(a, b);
    if (ratio < 4.5) faint.push(`${node.className} ${node.textContent.slice(0, 20)} ${ratio.toFixed(1)}`);
  }
  return faint;
}"""


def check_looks(tab: Page, what: str) -> None:
    assert tab.evaluate("document.documentElement.scrollWidth") <= tab.viewport_size["width"], what  # type: ignore[index]
    assert tab.evaluate(
        "[...document.querySelectorAll('#scroll, #panel')].every((e) => e.scrollWidth <= e.clientWidth + 1)"
    ), what
    for scheme in ("light", "dark"):
        tab.emulate_media(color_scheme=scheme, reduced_motion="reduce")
        assert tab.evaluate(CONTRAST) == [], (what, scheme)


# --------------------------------------------------------------------------------------------------------- the long run
@SLOW
def test_shown_probabilities_and_cuts_are_the_servers(show: Open, server: Running) -> None:
    tab = show()
    schema = json.dumps({"type": "object", "properties": {"n": {"enum": [1, 27]}}, "required": ["n"]})
    names = {"grammar": "the JSON schema", "top_k": "top-k", "top_p": "top-p", "min_p": "min-p"}
    seen = set()
    cuts: list[dict[str, Any]] = [
        {"schema": schema},
        {"top_k": 6, "top_p": 0.7},
        {"top_k": 0, "top_p": 1, "min_p": 0.3},
    ]
    for options in cuts:
        turn = ask(tab, "Count.", max_tokens=8, temperature=1.2, **options)
        ids = [ids_of(turn["prompt"]) + ids_of(turn["tokens"])]
        completions = server.client().completions
        found: Any = completions.create(model="tiny", prompt=ids, echo=True, logprobs=0, max_tokens=0)
        logprobs = found.choices[0].logprobs.token_logprobs[len(turn["prompt"]) :]
        for i, one in enumerate(turn["tokens"]):
            open_token(tab, turn, i)
            rows = tab.locator("#alternatives .row")
            assert tab.locator("#alternatives [aria-current='true'] .p").first.inner_text() == share(
                round(math.exp(logprobs[i]), 6)
            )
            for k, other in enumerate(one["top"]):
                if "cut" in other:
                    seen.add(other["cut"])
                    assert rows.nth(k).locator(".cut").inner_text() == f"cut by {names[other['cut']]}"
    assert seen == {*names}


@SLOW
def test_a_character_that_is_split_over_tokens_appears_once(show: Open, tiny_llm: Llama) -> None:
    tab = show()
    turn = ask(tab, "Smile.")
    data = {"turns": tab.evaluate("turns")}
    top = turn["tokens"][0]["top"]
    spelled = [{"id": byte, "bytes": [byte], "p": 0.9, "top": top} for byte in "a😀b".encode()]
    data["turns"][1]["tokens"] = spelled
    tab.evaluate("async (text) => load(new File([text], 'x.json'))", json.dumps(data))
    until(tab, "document.querySelector('.t').innerText")  # the browser has drawn it
    assert tab.locator(".t").all_inner_texts() == ["a", "F0", "9F", "98", "😀", "b"]
    assert tab.evaluate("textOf(path()[0].tokens)") == "a😀b"
    for i in range(6):
        tab.click(f"#t{turn['n']}-{i} .w")
        assert tab.evaluate("chosen.i") == i
        settle(tab)
    data["turns"][1]["tokens"] = spelled[:3]
    tab.evaluate("async (text) => load(new File([text], 'x.json'))", json.dumps(data))
    assert tab.locator(".t").all_inner_texts() == ["a", "F0", "9F"]
    assert tab.locator(".t.chip").count() == 2


@SLOW
def test_a_thought_is_folded_above_its_answer_and_is_not_sent_again(show: Open, tiny_llm: Llama) -> None:
    prompt = tiny_llm.chat_template.replace(
        "'<|im_start|>assistant\n' }}{% endif", "'<|im_start|>assistant\n<think>' }}{% endif"
    )
    assert "<think>" in prompt
    llm = Llama(tiny_llm.model, tiny_llm.tokenizer, prompt + "{# </think> #}")
    llm.thinking_budget = 4
    with running(llm) as server:
        tab = show(server.url)
        turn = ask(tab, "Hi")
        mark = llm.tokenizer.encode("</think>")
        ids = chat(llm, "Hi", seed=5, max_new_tokens=24)
        assert answer_ids(turn) == ids
        assert ids[4 : 4 + len(mark)] == mark
        assert [bool(one.get("thought")) for one in turn["tokens"]] == [
            i < 4 + len(mark) for i in range(len(turn["tokens"]))
        ]
        assert tab.evaluate("document.querySelectorAll('.answer details .t').length") == 4 + len(mark)
        outside = tab.evaluate("document.querySelectorAll('.answer > .lines > .t').length")
        assert outside == len(turn["tokens"]) - 4 - len(mark)
        assert not tab.is_visible("#t1-0")
        tab.click("summary")
        tab.click("#t1-0")
        settle(tab)
        body = body_of(tab, lambda: ask(tab, "And?"))
        text = llm.tokenizer.decode(ids[4 + len(mark) :])
        assert [one["content"] for one in body["messages"]] == ["Hi", text.lstrip(), "And?"]


@SLOW
def test_stop_keeps_what_is_there_and_continue_goes_on(show: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    tab, drawn = show(), Looks._drawn
    slow = partial(time.sleep, 0.2)
    monkeypatch.setattr(Looks, "_drawn", lambda *arguments, **options: slow() or drawn(*arguments, **options))
    configure(tab, max_tokens=200, seed=5)
    tab.fill("#question", "Go on.")
    tab.press("#question", "Enter")
    tab.wait_for_selector(".t >> nth=3")
    tab.keyboard.press("Escape")
    turn = settle(tab)
    monkeypatch.undo()
    assert turn["end"] == "stopped"
    count = len(turn["tokens"])
    assert 4 <= count < 200
    assert tab.locator(".t").count() == count
    assert "stopped" in tab.inner_text(".foot")
    body = body_of(tab, lambda: tab.click("text=continue"))
    assert body["answer"] == ids_of(turn["tokens"])
    more = settle(tab)
    assert ids_of(more["tokens"])[:count] == ids_of(turn["tokens"])
    assert len(more["tokens"]) > count
    tab.click("#new")
    stop = ask(tab, "Again.", schema=json.dumps({"const": 1}))["tokens"][-1]
    assert stop["control"]
    assert share(stop["p"]) in tab.locator("article").last.locator(".t.chip").last.inner_text()


@SLOW
def test_editing_keeps_the_old_branch_and_brackets_walk_through_all(show: Open) -> None:
    tab = show()
    ask(tab, "One?")
    ask(tab, "Then?")
    tab.locator("text=edit").first.click()
    assert tab.input_value("#question") == "One?"
    tab.fill("#question", "Two?")
    tab.press("#question", "Enter")
    settle(tab)
    assert tab.locator(".question").all_inner_texts() == ["Two?"]
    tab.click("text=again")
    assert settle(tab)["seed"] == 5  # of the settings
    walked = []
    tab.keyboard.press("ArrowLeft")
    for _ in range(3):
        walked.append((tab.locator(".place").first.inner_text(), tab.locator(".question").all_inner_texts()))
        tab.evaluate("select(path()[0].n, 0)")
        tab.keyboard.press("]")
    assert walked == [("3/3", ["Two?"]), ("1/3", ["One?", "Then?"]), ("2/3", ["Two?"])]
    assert tab.locator(".place").first.inner_text() == "3/3"
    tab.keyboard.press("[")
    assert tab.locator(".place").first.inner_text() == "2/3"


@SLOW
def test_the_inside_that_is_shown_adds_up(show: Open, tiny_llm: Llama) -> None:
    tab = show()
    turn = ask(tab, "What is a llama?")
    open_token(tab, turn, 6)
    text = ids_of(turn["prompt"]) + ids_of(turn["tokens"][:6])
    logits = tiny_llm.model(torch.tensor([text]))[0, -1, : tiny_llm.tokenizer.n_vocab]
    against = int(tab.input_value("#against"))
    difference = float(logits[turn["tokens"][6]["id"]] - logits[against])
    side = 1 if difference >= 0 else -1  # effects are told for the word that the model prefers
    lead, *parts = map(number, re.findall(r"[+−]?\d+\.\d\d", tab.inner_text("#sums").split(" Computed again")[0]))
    assert lead == pytest.approx(abs(difference), abs=0.0051)
    assert sum(parts) == pytest.approx(lead, abs=0.021)
    rows = [number(text) for text in tab.locator("#parts .name > .p").all_inner_texts()]
    assert sum(rows) == pytest.approx(lead, abs=0.0051 * len(rows))
    words = [number(x) for x in re.findall(r"[+−]\d+\.\d\d", tab.inner_text("#by-word"))]
    assert sum(words) == pytest.approx(parts[0], abs=0.0051 * len(words))
    tab.click("#tabs [data-tab=lens]")
    last = tab.locator("#layers p").last
    assert last.locator("> span").first.inner_text() == "1"
    assert last.locator(".guess").first.inner_text().endswith(share(float(logits.softmax(-1).max())))
    tab.click("#tabs [data-tab=why]")
    for key in (0, 5, len(text) - 1):
        tab.click("#tabs [data-tab=head]")
        tab.click(f"#row [data-key='{key}']")
        until(tab, f"inside?.head.key === {key} && !request")
        found = tab.evaluate("inside.head")
        score, real = found["scores"][key], len(text) - 1 - key
        assert int(tab.input_value("#distance")) == real
        assert tab.evaluate(f"pairs(inside.head, {real}).reduce((a, b) => a + b)") == pytest.approx(score, abs=1e-4)
        scores = tab.evaluate("Array.from({ length: 65 }, (_, i) => pairs(inside.head, 4 * i).reduce((a, b) => a + b))")
        assert ("hardly cares" in tab.inner_text("#reach")) == (max(scores) - min(scores) < 1)
        for distance in (200, real):  # bars are those of the slider's distance, outlines those of the text
            tab.fill("#distance", str(distance))
            sentence = tab.inner_text("#apart").replace("−", "-")
            shown = {int(x): float(score) for x, score in re.findall(r"(\d+)(?: apart)?: (-?\d+\.\d+)", sentence)}
            assert shown == pytest.approx({real: score, distance: scores[50] if distance == 200 else score}, abs=0.0051)
            heights = tab.eval_on_selector_all(
                "#pairs rect", "(all) => all.map((e) => Number(e.getAttribute('height')))"
            )
            parts = [*tab.evaluate(f"pairs(inside.head, {distance})"), *tab.evaluate(f"pairs(inside.head, {real})")]
            assert heights == pytest.approx([abs(x) * max(heights) / max(map(abs, parts)) for x in parts], abs=0.01)
        assert torch.tensor(found["scores"]).softmax(-1).tolist() == pytest.approx(found["weights"], abs=1e-5)
    tab.click("#tabs [data-tab=why]")
    names = tab.locator("#parts .name > b").all_inner_texts()
    mlp = next(i for i, name in enumerate(names) if name.startswith("MLP"))
    head = next(i for i, name in enumerate(names) if "." in name)
    for i in (mlp, head):
        row = tab.locator("#parts .one").nth(i)
        row.locator(".name").click()
        settle(tab)
        row.locator("text=test").click()
        row.locator("b.p").wait_for()
        layer, number_ = (names[i][4:], tiny_llm.model.config.n_heads) if i == mlp else names[i].split(".")
        with ablated(tiny_llm.model, [(int(layer), int(number_))]):
            off = tiny_llm.model(torch.tensor([text]))[0, -1, : tiny_llm.tokenizer.n_vocab]
        one, p = turn["tokens"][6], off.softmax(-1)
        after = f"{share(one['p'])} → {share(float(p[one['id']]))}"
        assert row.locator("b.p").inner_text() == after
        direct, total = map(number, row.locator(".opened b").all_inner_texts())
        assert direct == number(row.locator(".name .p").inner_text())
        assert total == pytest.approx(side * (difference - float(off[one["id"]] - off[against])), abs=0.0051)
    for i in (5, 6):  # the measured probability stays
        open_token(tab, turn, i)
        assert (after in tab.locator("#parts b.p").all_inner_texts()) == (i == 6)


def test_an_opened_word_is_told_by_what_the_last_token_read(show: Open, tiny_llm: Llama) -> None:
    """The word that the sentence names is the one without which the difference changes most."""
    tab = show()
    turn = ask(tab, "What is a llama, and what is not?", max_tokens=12)
    named = 0
    for i in (5, 11):
        open_token(tab, turn, i)
        text, against = ids_of(turn["prompt"]) + ids_of(turn["tokens"][:i]), int(tab.input_value("#against"))
        one = turn["tokens"][i]["id"]

        def difference(position: int, text: list[int] = text, one: int = one, against: int = against) -> float:
            def unread(weights: torch.Tensor, at: Place) -> torch.Tensor:
                weights[:, :, -1, position] = 0
                return weights

            with patch(tiny_llm.model, {"pattern.*": unread}):
                logits = tiny_llm.model(torch.tensor([text]))[0, -1]
            return float(logits[one] - logits[against])

        logits = tiny_llm.model(torch.tensor([text]))[0, -1]
        real = float(logits[one] - logits[against])
        changes = [abs(real - difference(position)) for position in range(len(text))]
        groups = [group for group in tab.evaluate("words()") if tab.evaluate(f"CONTINUED.test(textAt({group[-1]}))")]
        best = max(groups, key=lambda group: max(changes[position] for position in group))
        found = re.search(
            r"Of the earlier words, .*? would be (−?\d+\.\d\d), not (\d+\.\d\d)", tab.inner_text("#sentence")
        )
        assert found
        assert int(tab.locator("#sentence sub").first.inner_text()) == best[0]
        side, worst = (1 if real >= 0 else -1), max(best, key=lambda position: changes[position])
        assert [number(x) for x in found.groups()] == pytest.approx([side * difference(worst), abs(real)], abs=0.0051)
        named += len(groups) > 1
    assert named


@SLOW
def test_the_grid_in_the_page_is_that_of_the_server(show: Open, tiny_llm: Llama) -> None:
    tab = show()
    turn = ask(tab, "One?", max_tokens=6)
    open_token(tab, turn, 4)
    sent = {"ids": ids_of(turn["prompt"]) + ids_of(turn["tokens"][:4]), "token": turn["tokens"][4]["id"]}
    sent |= {"against": int(tab.input_value("#against"))}
    L, H = tiny_llm.model.config.n_layers, tiny_llm.model.config.n_heads
    for mean in (False, True):
        tab.set_checked("#mean", mean)
        assert tab.locator("#grid button").count() == 0
        tab.click("#compute")
        tab.wait_for_selector("#grid button")
        response = requests.post(f"{tab.url}look/grid", json={**sent, "mean": mean}, timeout=PATIENCE)
        *_, grid = [json.loads(part[6:]) for part in response.text.split("\n\n") if part.startswith("data: ")]
        side = 1 if grid["difference"] >= 0 else -1
        for measure in ("direct", "total", "previous", "first"):
            tab.select_option("#measure", measure)
            shown = tab.eval_on_selector_all("#grid button", "(all) => all.map((e) => e.title)")
            effects = measure in ("direct", "total")
            values = [side * x if effects else x for row in grid[measure] for x in row]
            assert len(shown) == L * (H + effects)
            for text, value in zip(shown, values, strict=True):
                assert number(text.split(": ")[1]) == pytest.approx(value, abs=0.0051)
    check_looks(tab, "the grid")
    tab.click("#grid [aria-label^='head 1.2']")
    settle(tab)
    assert tab.inner_text("#head-title").startswith("Head 1.2 ")
    tab.click("#tabs [data-tab=why]")
    assert tab.locator("#parts [aria-expanded=true] b").inner_text() == "1.2"
    tab.route("**/look/grid", lambda route: None)
    tab.set_checked("#mean", False)
    tab.evaluate("seen.delete(gridBody()) && drawGrid()")
    tab.click("#compute")
    assert tab.is_visible("#gridded")
    tab.click("#stop-grid")
    tab.wait_for_selector("#compute")
    tab.evaluate("card.meta.gridded = 8; look(); 0")
    settle(tab)
    assert not tab.is_visible("#compute")
    assert "at most 8" in tab.inner_text("#too-long")


@SLOW
def test_parts_that_are_off_are_listed_inherited_and_switched_on_again(show: Open, tiny_llm: Llama) -> None:
    tab = show()
    turn = ask(tab, "One?", max_tokens=6)
    H = tiny_llm.model.config.n_heads
    open_token(tab, turn, 2)
    for part in ([1, 2], [0, H]):
        tab.evaluate(f"switchOff([{part[0]}, {part[1]}])")
        until(tab, "running || path().at(-1).end")
        settle(tab)
    expected = [(1, 2), (0, H)]
    with ablated(tiny_llm.model, expected):
        ids = chat(tiny_llm, "One?", seed=5, max_new_tokens=6)
    assert answer_ids(tab.evaluate("path().at(-1)")) == ids
    assert tab.locator("#without b").all_inner_texts() == ["head 1.2", "MLP 0"]
    body = body_of(tab, lambda: ask(tab, "Two?", max_tokens=4))
    assert body["off"] == [[1, 2], [0, H]]
    assert "without head 1.2, MLP 0" in tab.locator("article .foot").last.inner_text()
    body = body_of(tab, lambda: tab.locator("#without button").first.click())
    assert body["off"] == [[0, H]]
    settle(tab)
    assert tab.locator("#without b").all_inner_texts() == ["MLP 0"]


@SLOW
def test_tabs_are_tabs(show: Open) -> None:
    tab = show()
    open_token(tab, ask(tab, "One?", max_tokens=4), 1)
    tab.focus("#tabs [aria-selected=true]")
    seen = []
    for key in ("ArrowRight", "ArrowRight", "ArrowRight", "ArrowRight", "ArrowLeft"):
        tab.keyboard.press(key)
        seen.append(tab.evaluate("document.activeElement.dataset.tab"))
        panel = tab.get_by_role("tabpanel", name=tab.inner_text("[role=tab][aria-selected=true]"))
        assert (panel.get_attribute("id"), panel.is_visible()) == (seen[-1], True)
        assert tab.locator("[role=tab][tabindex='0']").count() == 1
    assert seen == ["lens", "head", "prompt", "prompt", "head"]
    assert tab.evaluate("chosen.i") == 1


@SLOW
def test_the_key_stays_in_the_tab(browser: Browser, show: Open, tiny_llm: Llama) -> None:
    with running(tiny_llm, key="secret") as server:
        context = browser.new_context()
        tab = context.new_page()
        tab.goto(server.url)
        for attempt in ("wrong", "secret"):
            tab.fill("#key-value", attempt)
            tab.press("#key-value", "Enter")
        tab.wait_for_selector("html[data-ready]")
        assert tab.locator("dialog[open]").count() == 0
        turn = ask(tab, "Open?")
        assert turn["tokens"]
        assert tab.evaluate("[localStorage.length, sessionStorage.getItem('clearllama-key')]") == [0, "secret"]
        assert "secret" not in tab.evaluate("settled(stored().getAll()).then(JSON.stringify)")
        context.close()


SLOWLY = """
import sys, time
from llama import cli
from llama.server.look import Looks
drawn = Looks._drawn
Looks._drawn = lambda *arguments, **options: time.sleep(0.03) or drawn(*arguments, **options)
sys.exit(cli.main(sys.argv[1:]))
"""


def serve(file: Path, port: int, name: str) -> subprocess.Popen[bytes]:
    """Start a server of a tiny model that takes 30 ms for a token, in a process that can be killed."""
    options = ["serve", "-m", str(file), "--port", str(port), "--name", name, "--dtype", "float32", "--quiet"]
    process = subprocess.Popen([sys.executable, "-c", SLOWLY, *options])
    while True:
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return process
        assert process.poll() is None
        time.sleep(0.1)


@SLOW
def test_a_server_that_goes_away_and_comes_back(show: Open, tiny_gguf: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = serve(tiny_gguf, port, "first")
    try:
        tab = show(f"http://127.0.0.1:{port}", expected="ERR_|Failed to load|net::")
        configure(tab, max_tokens=200, seed=5)
        tab.fill("#question", "Go on.")
        tab.press("#question", "Enter")
        tab.wait_for_selector(".t")
        process.kill()
        process.wait()
        tab.wait_for_selector("#banner")
        turn = tab.evaluate("path().at(-1)")
        assert turn["tokens"]
        assert tab.locator(".t").count() == len(turn["tokens"])
        process = serve(tiny_gguf, port, "first")
        tab.wait_for_selector("#banner", state="hidden")
        until(tab, f"path().at(-1).n !== {turn['n']}")
        resumed = settle(tab)
        count = len(turn["tokens"])
        assert 0 < count < len(resumed["tokens"])
        assert ids_of(resumed["tokens"])[:count] == ids_of(turn["tokens"])
        process.kill()
        process.wait()
        tab.evaluate("select(path()[0].n, 1)")
        tab.wait_for_selector("#banner")
        process = serve(tiny_gguf, port, "second")
        tab.wait_for_selector("#banner >> text=Another model")
        tab.evaluate("select(path()[0].n, 2)")
        assert "Another model" in tab.inner_text("#waiting")
        assert not tab.locator("#why").is_visible()
    finally:
        process.kill()
        process.wait()


@SLOW
def test_a_full_context_shows_its_numbers_and_sends_nothing(show: Open) -> None:
    tab = show()
    turn = ask(tab, "Go on.", max_tokens=500, schema="", temperature=3, min_p=0, top_p=1, seed="")
    while turn["end"] == "stop":
        tab.click("text=again")
        turn = settle(tab)
    assert turn["end"] == "context"
    sent: list[str] = []
    tab.on("request", lambda request: sent.append(request.url))
    tab.fill("#question", "And then?")
    tab.press("#question", "Enter")
    assert "256 of 256 tokens" in tab.inner_text("#status")
    assert sent == []
    assert tab.input_value("#question") == "And then?"
    assert tab.inner_text("#count") == "256 / 256 tokens"


@SLOW
def test_settings_survive_a_reload_and_can_be_reset(show: Open) -> None:
    tab = show()
    configure(tab, temperature=3, schema="{x")
    tab.wait_for_selector("#status >> text=not JSON")  # a dialog tells later that it is closed
    tab.reload()
    tab.wait_for_selector("html[data-ready]")
    assert (tab.input_value("#set-temperature"), tab.input_value("#schema")) == ("3", "")
    tab.click("#open-settings")
    tab.click("text=Defaults")
    tab.click("#apply")
    assert tab.input_value("#set-temperature") == "0.8"


@SLOW
def test_a_busy_server_is_asked_again_after_a_countdown(show: Open) -> None:
    tab = show(expected="429")
    refused = {"status": 429, "headers": {"Retry-After": "2"}, "json": {"error": {"message": "busy"}}}
    tab.route("**/look/answer", lambda route: route.fulfill(**refused), times=1)
    tab.evaluate(
        "window.heard = []; new MutationObserver(() => heard.push(id('status').textContent))"
        ".observe(id('status'), { childList: true })"
    )
    assert ask(tab, "Hello?")["tokens"]
    counted = [text for text in tab.evaluate("heard") if "again in" in text]
    assert [text[-4:] for text in counted] == ["2 s.", "1 s."]


@SLOW
def test_tabs_are_independent_and_a_conversation_survives(show: Open, tmp_path: Path) -> None:
    first = show()
    second = first.context.new_page()
    second.goto(first.url)
    second.wait_for_selector("html[data-ready]")
    ask(first, "One?")
    ask(second, "Two?")
    assert second.locator(".question").all_inner_texts() == ["Two?"]
    first.click("text=again")
    settle(first)
    turns, text = first.evaluate("turns"), first.text_content("#chat")
    first.reload()
    first.wait_for_selector("html[data-ready]")
    assert first.evaluate("turns") == turns
    assert first.text_content("#chat") == text
    first.click("#open-export")
    with first.expect_download() as saved:
        first.click("[data-export=json]")
    file = tmp_path / "chat.json"
    saved.value.save_as(file)
    for kind, part in (("md", "**One?**"), ("curl", "/v1/chat/completions"), ("html", "clearllama trace")):
        assert part in export(first, kind)
    with first.expect_download() as other:
        first.click("[data-export=npz]")
    tokens = np.load(other.value.path())["tokens"]
    assert tokens.tolist() == [ids_of(turns[1]["prompt"] + turns[-1]["tokens"])]
    second.click("#open-export")
    second.set_input_files("#import", file)
    until(second, "!id('export').open")
    assert second.evaluate("turns") == turns
    assert second.text_content("#chat") == text


@SLOW
def test_the_first_minute_by_keyboard(show: Open) -> None:
    tab = show()

    def press(*keys: str) -> None:
        for key in keys:
            tab.keyboard.press(key)
            outline = tab.evaluate(
                "[document.activeElement.tagName, getComputedStyle(document.activeElement).outlineStyle]"
            )
            assert outline[0] == "BODY" or outline[1] != "none", (key, outline)

    press(*["Tab"] * 6)  # Settings, Export, New, Chat, Text, the first sample
    assert tab.evaluate("document.activeElement.parentElement.id") == "samples"
    press("Enter")
    first = settle(tab)
    press("ArrowUp")  # from the empty box
    press("ArrowRight", "ArrowRight", "ArrowRight")
    assert tab.evaluate("chosen.i") == 2
    settle(tab)
    other = next(
        k
        for k, one in enumerate(first["tokens"][2]["top"])
        if one["id"] != first["tokens"][2]["id"] and "control" not in one
    )
    press(str(other + 1))
    second = settle(tab)
    assert second["tokens"][2]["id"] == first["tokens"][2]["top"][other]["id"]
    press("o")
    third = settle(tab)
    assert third["off"]
    press("[", "[", "]")
    assert tab.inner_text(".place") == "2/3"
    tab.evaluate("seen.clear()")
    press("ArrowRight", "Escape")  # the panel is closed before its numbers come
    assert not tab.locator("#panel").is_visible()
    tab.wait_for_timeout(500)
    assert tab.inner_text("#banner") == ""
    tab.focus("#question")
    tab.keyboard.type("r1[o")
    assert tab.input_value("#question") == "r1[o"
    assert len(tab.evaluate("turns")) == 4


@SLOW
def test_new_keeps_the_conversation_and_two_tabs_that_change_one_make_two(show: Open) -> None:
    tab = show()
    ask(tab, "One?")
    first = tab.evaluate("turns")
    tab.click("#new")
    tab.wait_for_selector("#stored button")
    assert tab.locator(".question").count() == 0
    ask(tab, "Two?")
    tab.close()
    tabs = [tab.context.new_page() for _ in range(2)]
    for other in tabs:
        other.goto(tab.url)
        other.wait_for_selector("#stored div >> nth=1")
        assert [text.split("\n")[0] for text in other.locator("#stored button:first-child").all_inner_texts()] == [
            "Two?",
            "One?",
        ]
    for other in tabs:
        other.click("#stored >> text=One?")
        other.wait_for_selector(".question")
        assert other.evaluate("turns") == first
    for i, other in enumerate(tabs):
        ask(other, f"And {i}?")
    reader = tab.context.new_page()
    reader.goto(tab.url)
    reader.wait_for_selector("#stored div >> nth=2")
    found = [[one["question"] for one in turns[1:]] for turns in reader.evaluate("settled(stored().getAll())")]
    assert found == [["Two?"], ["One?", "And 0?"], ["One?", "And 1?"]]
    reader.once("dialog", lambda dialog: dialog.accept())
    reader.click("#stored >> text=delete >> nth=0")
    reader.wait_for_selector("#stored div >> nth=2", state="detached")
    assert len(reader.evaluate("settled(stored().getAll())")) == 2
    tabs[1].reload()  # of a deleted conversation, nothing is left
    tabs[1].wait_for_selector("#stored div >> nth=1")
    assert tabs[1].locator(".question").count() == 0


@SLOW
def test_a_system_message_belongs_to_the_turn_that_it_was_sent_with(show: Open, tiny_llm: Llama) -> None:
    tab = show()
    first = ask(tab, "One?", max_tokens=6)
    tab.click("#open-settings")
    tab.fill("#system", "Be brief.")
    tab.click("#apply")
    second = ask(tab, "Two?", max_tokens=6)
    assert tab.locator(".system").all_inner_texts() == ["Be brief."]
    assert tab.locator("article").nth(1).locator(".system").count() == 1
    texts = [tab.evaluate(f"textOf(path()[{i}].tokens)") for i in range(2)]
    history: list[Any] = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": texts[0]},
        {"role": "user", "content": "Two?"},
    ]
    system = [{"role": "system", "content": "Be brief."}]
    assert ids_of(first["prompt"]) == tiny_llm.encode_chat(history[:1])
    assert ids_of(second["prompt"]) == tiny_llm.encode_chat(system + history)
    tab.click("#open-settings")
    tab.fill("#system", "")
    tab.click("#apply")
    assert tab.locator(".system").all_inner_texts() == ["Be brief."]  # what was sent does not change
    tab.click("#open-export")
    exported = {kind: export(tab, kind) for kind in ("md", "curl")}
    tab.keyboard.press("Escape")
    assert "_System: Be brief._\n\n**Two?**" in exported["md"]
    assert body_of_curl(exported["curl"])["messages"] == system + history
    third = ask(tab, "Three?", max_tokens=6)
    assert tab.locator(".system").all_inner_texts() == ["Be brief.", "(none)"]
    history += [{"role": "assistant", "content": texts[1]}, {"role": "user", "content": "Three?"}]
    assert ids_of(third["prompt"]) == tiny_llm.encode_chat(history)


def export(tab: Page, kind: str) -> str:
    with tab.expect_download() as saved:
        tab.click(f"[data-export={kind}]")
    return Path(saved.value.path()).read_text()


def body_of_curl(command: str) -> dict[str, Any]:
    """The body of an exported curl command, as a shell reads it."""
    words = shlex.split(command, comments=True)
    assert words[0] == "curl"
    body: dict[str, Any] = json.loads(words[words.index("-d") + 1])
    return body


def sent_by(command: str, **headers: str) -> str:
    """The text of the answer that an exported curl command gets. It is sent by another client."""
    words = shlex.split(command, comments=True)
    response = requests.post(words[1], json=body_of_curl(command), headers=headers, timeout=PATIENCE)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


@SLOW
def test_the_exported_curl_command_gets_the_same_answer(show: Open) -> None:
    """Also with given words, which it sends as text. What the API can't express is named."""
    tab = show()
    ask(tab, "It's one?")
    turn = ask(tab, "Two?")
    tab.click("#open-export")
    command = export(tab, "curl")
    assert command.startswith("curl http")
    assert sent_by(command) == tab.evaluate("textOf(path().at(-1).tokens)")
    tab.keyboard.press("Escape")
    open_token(tab, turn, 0)
    tab.fill("#own", "Zebra")
    tab.press("#own", "Enter")
    branch = settle(tab)
    tab.click("#open-export")
    command = export(tab, "curl")
    assert command.startswith("# Forced and earlier words are sent as text: their tokens may differ.\ncurl http")
    assert "Zebra" + sent_by(command) == tab.evaluate("textOf(path().at(-1).tokens)")
    tab.keyboard.press("Escape")
    open_token(tab, branch, 1)
    tab.click("#tabs [data-tab=head]")
    tab.click("#off")
    head = settle(tab)["off"][0]
    tab.click("#open-export")
    assert export(tab, "curl").startswith(f"# Not in this request: without head {head[0]}.{head[1]}.\ncurl http")


@SLOW
def test_a_text_of_a_base_model_continues_the_one_before(show: Open) -> None:
    kjv = loader.load(KJV, dtype="float32", device="cpu")
    with running(kjv) as server:
        tab = show(server.url)
        configure(tab, seed=5, max_tokens=12)
        tab.click("#samples button >> nth=0")
        first = settle(tab)
        second = ask(tab, " And then", max_tokens=8)
        text = ids_of(first["prompt"]) + ids_of(first["tokens"])
        assert ids_of(first["prompt"]) == kjv.tokenizer.encode_prompt(first["question"])
        assert ids_of(second["prompt"])[: len(text)] == text
        decode = kjv.tokenizer.decode
        assert decode(ids_of(second["prompt"])) == decode(text) + " And then"
        expected = generate(kjv.model, ids_of(second["prompt"]), SamplingParams(max_new_tokens=8, seed=5, **SAMPLING))
        assert ids_of(second["tokens"]) == [token.id for token in expected]
        tab.click("#open-export")
        command = export(tab, "curl")
        assert "/v1/completions " in command
        assert body_of_curl(command)["prompt"] == decode(ids_of(second["prompt"]))
        assert sent_by(command) == tab.evaluate("textOf(path().at(-1).tokens)")


DAMAGES: dict[str, Callable[[Any], object]] = {
    "not JSON": lambda turns: "{",
    "nothing": lambda turns: "null",
    "no turns": lambda turns: "{}",
    "a child that is missing": lambda turns: turns[0].update(children=[7]),
    "a cycle": lambda turns: turns[1].update(children=[1]),
    "a child of another": lambda turns: turns[2].update(parent=0),
    "an active child that is missing": lambda turns: turns[0].update(active=3),
    "a question that is a number": lambda turns: turns[1].update(question=5),
    "no prompt": lambda turns: turns[1].pop("prompt"),
    "a token without text": lambda turns: turns[1]["tokens"][0].pop("text"),
    "a token without alternatives": lambda turns: turns[1]["tokens"][0].update(top=None),
    "a probability that is a text": lambda turns: turns[1]["tokens"][0]["top"][0].update(p="1"),
    "an unknown filter": lambda turns: turns[1]["tokens"][0]["top"][0].update(cut="x", q=None),
    "no settings": lambda turns: turns[1].pop("sampling"),
    "a head without a layer": lambda turns: turns[1].update(off=[3]),
}


@SLOW
def test_a_damaged_file_changes_nothing(show: Open) -> None:
    tab = show()
    ask(tab, "One?", max_tokens=3)
    ask(tab, "Two?", max_tokens=3)
    turns, shown = tab.evaluate("turns"), tab.text_content("#chat")
    for name, damage in DAMAGES.items():
        found = json.loads(json.dumps(turns))
        text = damage(found)
        tab.evaluate("put('exported')")
        text = text if isinstance(text, str) and text in ("{", "null", "{}") else json.dumps({"turns": found})
        tab.evaluate("async (text) => load(new File([text], 'x.json'))", text)
        assert "x.json is not an export of this page: " in tab.evaluate("id('exported').textContent"), name
        assert (tab.evaluate("turns"), tab.text_content("#chat")) == (turns, shown), name
    tab.reload()
    tab.wait_for_selector("html[data-ready]")
    assert (tab.evaluate("turns"), tab.text_content("#chat")) == (turns, shown)


def link_of(tab: Page) -> str:
    tab.click("#open-export")
    tab.evaluate("put('exported')")
    tab.click("[data-link]")
    tab.wait_for_selector("#exported a")
    href: str = tab.evaluate("document.querySelector('#exported a').href")
    tab.keyboard.press("Escape")
    return href


SHOWN = """() => [...document.querySelectorAll("#chat, #panel header, #panel section, #waiting")]
    .filter((one) => one.checkVisibility()).map((one) => one.textContent)
    .concat([...document.querySelectorAll("#panel :is(select, input[type=range])")].map((one) => one.value))"""


@SLOW
def test_a_link_shows_the_same_view_in_another_browser(browser: Browser, show: Open, server: Running) -> None:
    tab = show()
    first = ask(tab, "What is a llama?", max_tokens=12)
    open_token(tab, first, 2)
    tab.locator("#alternatives .row[aria-current=false]").first.click()
    settle(tab)
    tab.click("#tabs [data-tab=head]")
    tab.click("#off")
    turn = settle(tab)
    open_token(tab, turn, 3)
    tab.evaluate("look({ head: [1, 2], key: 5 })")
    settle(tab)
    tab.evaluate("look({ against: openTurn().tokens[3].top.at(-1).id })")
    settle(tab)
    tab.click("#tabs [data-tab=lens]")
    tab.evaluate("put('status')")
    shown, href = tab.evaluate(SHOWN), link_of(tab)
    assert len(href.partition("#")[2]) <= 4096 + len("view=")
    sent: list[str] = []
    other = show(href)
    other.on("request", lambda request: sent.append(request.url))
    settle(other)
    expected = [text.replace("‹3/3›", "") for text in shown]  # the other branches are not in a link
    found = other.evaluate(SHOWN)
    found[0], expected[0] = (re.sub(r"(without head \d\.\d): .*? ·", r"\1 ·", text) for text in (found[0], expected[0]))
    assert found == expected
    assert re.search(r"[\d.]{4}", "".join(found[1:]))
    for name in ("why", "lens"):
        for one in (tab, other):
            one.click(f"#tabs [data-tab={name}]")
        assert other.evaluate(SHOWN)[1:] == tab.evaluate(SHOWN)[1:]
    assert not [url for url in sent if "view" in url]
    brief, whole = (one.evaluate("openTurn().tokens.map((one) => one.top.length)") for one in (other, tab))
    assert (brief[3], {*brief[:3], *brief[4:]}) == (whole[3], {2})
    open_token(other, other.evaluate("path().at(-1)"), 1)
    assert "Only for the word that was open does" in other.inner_text("#linked")
    rest = sum(one["p"] for one in other.evaluate("openTurn().tokens[1].top"))
    assert other.locator("#alternatives .row").last.locator(".p").first.inner_text() == share(round(1 - rest, 4))
    assert len(other.evaluate("settled(stored().getAll())")) == 0  # a view is stored when it is changed
    other.reload()
    other.wait_for_selector("html[data-ready]")
    settle(other)
    assert other.evaluate(SHOWN)[1:] == found[1:]
    other.click("text=again")
    settle(other)
    assert "#" not in other.url

    third = show()  # a link that comes into an open page, which keeps its own conversation
    ask(third, "Mine?", max_tokens=4)
    third.evaluate("(href) => location.assign(href)", href)
    until(third, "chosen?.i === 3")
    settle(third)
    assert third.evaluate(SHOWN)[1:] == found[1:]
    third.click("#new")
    third.wait_for_selector("#stored >> text=Mine?")


def packed(view: Any) -> str:
    json_ = view if isinstance(view, bytes) else json.dumps(view).encode()
    return base64.urlsafe_b64encode(zlib.compress(json_, 9, -15)).decode().rstrip("=")


OPEN: dict[str, list[Any]] = {"turn": [0, "__proto__", 9], "i": [-1, 1e300, "0"], "against": [1e9, 319]}
OPEN |= {"head": [[1], "12", [1, 1e300]], "key": [-1, {}], "found": [{"p": 0.5, "top": []}]}
HOSTILE: dict[str, Callable[[Any], object]] = {
    "not base64": lambda view: "%%%",
    "not deflated": lambda view: base64.urlsafe_b64encode(b"no deflate").decode(),
    "cut off": lambda view: packed(view)[:-9],
    "not JSON": lambda view: packed(b"{"),
    "null": lambda view: packed(None),
    "a bomb": lambda view: packed(b'{"turns":[' + b"0," * 1_500_000 + b"0]}"),
    "a small bomb": lambda view: view["turns"][1].update(question="a" * 250_000) or packed(view),
    "a deep one": lambda view: packed(b"[" * 100_000),
    "a long one": lambda view: packed(view) + "A" * 4096,
    "no turns": lambda view: packed({**view, "turns": []}),
    "a tab that is missing": lambda view: packed({**view, "tab": "constructor"}),
    "__proto__": lambda view: packed(json.dumps(view).encode().replace(b'"warm"', b'"__proto__"')),
    "nothing open": lambda view: packed({name: view[name] for name in ("turns", "tab")}),
    **{
        f"open {name}: {value}": partial(
            lambda name, value, view: packed({**view, "open": {**view["open"], name: value}}), name, value
        )
        for name, values in OPEN.items()
        for value in values
    },
}
BROKEN: dict[str, Callable[[Any], object]] = {
    "a huge probability": lambda turns: turns[1]["tokens"][0].update(p=1e300),
    "a huge id": lambda turns: turns[1]["tokens"][0].update(id=1e300),
    "an unknown stage": lambda turns: turns[2]["tokens"][1]["left"].update(constructor=3),
    "an unknown end": lambda turns: turns[1].update(end="constructor"),
    "settings that replace the text": lambda turns: turns[1]["sampling"].update(ids=[5]),
    "a setting that is missing": lambda turns: turns[1]["sampling"].pop("top_k"),
    "a head that is huge": lambda turns: turns[1].update(off=[[0, 1e300]]),
    "a mode that is a text": lambda turns: turns[1].update(raw="yes"),
    "earlier tokens that are missing": lambda turns: turns[1].update(earlier=1e3),
    "a model that is a number": lambda turns: turns[1].update(model=3),
}


@SLOW
def test_a_hostile_link_changes_nothing_and_gives_one_message(show: Open) -> None:
    tab = show()
    ask(tab, "One?", max_tokens=3)
    open_token(tab, ask(tab, "Two?", max_tokens=3), 1)
    view, shown, turns = tab.evaluate("view(true)"), tab.evaluate(SHOWN), tab.evaluate("turns")
    tab.evaluate(
        "window.heard = []; new MutationObserver(() => heard.push(id('status').textContent))"
        ".observe(id('status'), { childList: true })"
    )
    sent: list[str] = []
    tab.on("request", lambda request: sent.append(request.url))
    links = {name: make(json.loads(json.dumps(view))) for name, make in HOSTILE.items()}
    for name, damage in {**DAMAGES, **BROKEN}.items():
        found = json.loads(json.dumps(view))
        if not isinstance(damage(found["turns"]), str):
            links[name] = packed(found)
    for name, link in links.items():
        tab.evaluate("put('status')")
        tab.wait_for_timeout(20)
        tab.evaluate("heard.length = 0")
        tab.evaluate("(link) => { location.hash = `view=${link}`; }", link)
        until(tab, "heard.length")
        tab.wait_for_timeout(20)
        (text,) = tab.evaluate("heard")
        assert text.startswith("This link can't be opened: "), (name, text)
        assert (tab.evaluate(SHOWN), tab.evaluate("turns")) == (shown, turns), name
    assert (sent, tab.evaluate("({}).polluted === undefined && lost === false")) == ([], True)
    tab.evaluate("(link) => { location.hash = `view=${link}`; }", packed(view))
    until(tab, "!heard.at(-1)")
    settle(tab)
    assert tab.evaluate(SHOWN)[1:] == shown[1:]


@SLOW
def test_a_link_of_another_model_is_text_and_says_whose(browser: Browser, show: Open, tiny_llm: Llama) -> None:
    tab = show()
    open_token(tab, ask(tab, "One?", max_tokens=6), 1)
    view = tab.evaluate("view(true)")
    view["turns"][1]["model"] = view["turns"][1]["model"].replace("tiny ", "llama-9b ", 1)
    other = show(f"{tab.url}#view={packed(view)}")
    assert "Another model, llama-9b (float32, CPU), wrote answers" in other.inner_text("#banner")
    assert other.text_content(".answer") == tab.text_content(".answer")
    assert "Another model wrote this answer" in other.inner_text("#waiting")
    assert not other.locator("#why").is_visible()
    other.click("#new")
    assert other.inner_text("#banner") == ""


@SLOW
def test_a_view_that_is_too_long_for_a_link_is_offered_as_a_file(show: Open) -> None:
    tab = show()
    ask(tab, "Go on.", max_tokens=200, temperature=3, top_p=1, min_p=0)
    tab.click("#open-export")
    tab.click("[data-link]")
    tab.wait_for_selector("#exported >> text=too long")
    assert "holds the conversation" in tab.inner_text("#exported")
    assert tab.locator("#exported a").count() == 0


@SLOW
def test_a_chat_model_continues_texts_whose_words_open(show: Open, tiny_llm: Llama) -> None:
    tab = show()
    tab.click("text=Text")
    assert tab.get_attribute("#question", "placeholder") == "Begin a text to continue…"
    first = ask(tab, "In the beginning ", max_tokens=6)
    encode = tiny_llm.tokenizer.encode_prompt
    assert ids_of(first["prompt"]) == encode("In the beginning ")
    second = ask(tab, "and then", max_tokens=6)
    earlier = [id for id in ids_of(first["prompt"] + first["tokens"]) if id not in tiny_llm.tokenizer.stop_ids]
    own = ids_of(second["prompt"])[len(earlier) :]
    assert ids_of(second["prompt"])[: len(earlier)] == earlier
    assert tiny_llm.tokenizer.decode(own) == "and then"
    expected = generate(
        tiny_llm.model,
        ids_of(second["prompt"]),
        SamplingParams(max_new_tokens=6, seed=5, **SAMPLING),
        stop_ids=tiny_llm.tokenizer.stop_ids,
        n_vocab=tiny_llm.tokenizer.n_vocab,
    )
    assert ids_of(second["tokens"]) == [token.id for token in expected]
    assert tab.locator(f"#answer-{second['n']} .given").all_inner_texts() == [
        tiny_llm.tokenizer.decode([id]) for id in own
    ]

    tab.click(f"#answer-{second['n']} .given >> nth=2")
    settle(tab)
    place = len(earlier) + 2
    logits = tiny_llm.model(torch.tensor([ids_of(second["prompt"])[:place]]))[0, -1, : tiny_llm.tokenizer.n_vocab]
    p, rows = logits.softmax(-1), tab.locator("#alternatives .row")
    best = [float(x) for x in p.topk(10).values]
    shown = [rows.nth(k).locator(".p").all_inner_texts() for k in range(10)]
    assert [float(text.replace("−", "-")) for (text,) in shown] == pytest.approx(best, rel=0.06)
    assert rows.locator("b, .token").count()
    assert tab.locator("#alternatives [aria-current=true] .p").inner_text() == share(round(float(p[own[2]]), 6))
    against = int(tab.input_value("#against"))
    difference = tab.evaluate("inside.difference")
    assert difference == pytest.approx(float(logits[own[2]] - logits[against]), abs=1e-3)
    assert "A word of your text" in tab.inner_text("#linked")
    assert f"position {place}" in tab.inner_text("#chosen")
    assert not tab.locator("#take").is_visible()
    shown = tab.evaluate(SHOWN)
    other = show(link_of(tab))
    settle(other)
    assert other.evaluate(SHOWN)[1:] == shown[1:]
    sent: list[str] = []
    tab.on("request", lambda request: sent.append(request.url.rpartition("/")[2]))
    tab.evaluate("take(1)")  # an alternative of a given word is not taken
    tab.evaluate(f"select({second['n']}, -1)")
    settle(tab)
    tab.evaluate("moveBy(1)")
    settle(tab)
    assert tab.evaluate("chosen.i") == 0
    assert "answer" not in sent
    tab.evaluate(f"select({first['n']}, {-len(first['prompt'])})")
    assert "Nothing comes before the first token" in tab.inner_text("#waiting")

    tab.click("#open-export")
    command, exported = export(tab, "curl"), export(tab, "md")
    assert "/v1/completions " in command
    assert body_of_curl(command)["prompt"] == tiny_llm.tokenizer.decode(ids_of(second["prompt"]))
    assert f"**and then**{tab.evaluate('said(path().at(-1))')}" in exported
    tab.keyboard.press("Escape")
    tab.locator(".foot >> text=again").last.click()
    again = settle(tab)
    assert (again["raw"], again["prompt"], again["earlier"]) == (True, second["prompt"], len(earlier))
    tab.locator(".asked button").last.click()
    tab.fill("#question", " or so")
    body = body_of(tab, lambda: tab.press("#question", "Enter"))
    assert (body["ids"], body["prompt"]) == (earlier, " or so")
    settle(tab)
    tab.click("#new")
    tab.click("#mode >> text=Chat")
    chatted = ask(tab, "One?", max_tokens=3)
    assert ids_of(chatted["prompt"]) == tiny_llm.encode_chat([{"role": "user", "content": "One?"}])
    assert not chatted["raw"]


ENDING = "</script><!--<script><img src=x onerror=document.title='owned'>"


@SLOW
def test_the_file_of_a_view_shows_it_without_a_server(show: Open, tiny_llm: Llama, tmp_path: Path) -> None:
    with running(tiny_llm) as server:
        tab = show(server.url)
        ask(tab, ENDING, max_tokens=6)
        data = {"turns": tab.evaluate("turns")}
        data["turns"][1]["tokens"][2] |= {"text": ENDING}
        data["turns"][1]["tokens"][4]["top"][0] |= {"text": ENDING}
        tab.evaluate("async (text) => load(new File([text], 'x.json'))", json.dumps(data))
        turn = ask(tab, "And then?", max_tokens=6)
        open_token(tab, turn, 4)
        tab.locator("#parts >> text=test").first.click()
        tab.wait_for_selector("#parts b.p")
        tab.evaluate("look({ head: [1, 2], key: 5 })")
        settle(tab)
        tab.evaluate("put('status')")
        shown = tab.evaluate(SHOWN)
        tab.click("#open-export")
        with tab.expect_download() as found:
            tab.click("[data-export=view]")
        assert "holds the conversation" in tab.inner_text("#exported")
        found.value.save_as(tmp_path / "view.html")
        text = (tmp_path / "view.html").read_text("utf-8")
    sent: list[str] = []
    file = show((tmp_path / "view.html").as_uri(), expected="TrustedHTML")
    file.on("request", lambda request: sent.append(request.url))
    settle(file)
    assert file.evaluate(SHOWN) == shown
    for name in ("lens", "prompt", "why"):
        file.click(f"#tabs [data-tab={name}]")
    assert file.evaluate(SHOWN) == shown
    assert "saved" in file.inner_text("#banner")
    assert file.locator("#send:visible, #off:visible, .foot button:visible, .asked button:visible").count() == 0
    file.keyboard.press("Tab")
    for key in ("ArrowLeft", "ArrowRight"):  # another word has its alternatives, but its inside was not computed
        file.keyboard.press(key)
        shown_there = "document.getElementById('waiting').innerText.includes('without a server')"
        until(file, shown_there if key == "ArrowLeft" else f"!{shown_there}")
        assert file.locator("#alternatives .row").count() == len(turn["tokens"][file.evaluate("chosen.i")]["top"]) + 1
    settle(file)
    assert file.evaluate(SHOWN) == shown
    file.evaluate("again(current())")
    assert "without" in file.inner_text("#status")
    assert len(file.evaluate("turns")) == 3
    assert file.locator("img").count() == 0
    blocked = "() => { try { document.body.innerHTML = 'x'; return 'set'; } catch (error) { return error.name; } }"
    assert file.evaluate(blocked) == "TypeError"
    assert (sent, file.title()) == ([], "tiny · clearllama")
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', text)
    assert policy
    for tag in ("script", "style"):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy[1]
    assert len(re.findall("</script>", text)) == 2


@SLOW
def test_an_error_of_the_page_is_not_told_as_one_of_the_server(show: Open) -> None:
    tab = show(expected="planted")
    turn = ask(tab, "One?", max_tokens=4)
    sent: list[str] = []
    tab.on("request", lambda request: sent.append(request.url.rpartition("/")[2]))
    tab.evaluate("drawLens = () => { throw new TypeError('planted'); }; 0")
    tab.click(f"#t{turn['n']}-1 .w")
    tab.wait_for_selector("#waiting >> text=This page made an error; please report it: planted")
    tab.wait_for_timeout(100)
    assert (tab.inner_text("#banner"), sent) == ("", ["inside"])
    tab.evaluate("grow = receive = () => { throw new TypeError('planted'); }; 0")
    tab.click("text=again")
    until(tab, "!running")
    assert "please report it: planted" in tab.inner_text("#status")
    assert (tab.inner_text("#banner"), sent[-1]) == ("", "answer")


@SLOW
def test_only_the_last_looks_are_kept(show: Open) -> None:
    tab = show()
    turn = ask(tab, "One?", max_tokens=4)
    open_token(tab, turn, 1)
    for i in range(60):
        tab.evaluate(f"inspect(inspection({{ against: {i} }}), () => {{}}, say)")
    assert tab.evaluate("[seen.size, [...seen.keys()].map((one) => JSON.parse(one).against)]") == [50, [*range(10, 60)]]


@SLOW
def test_a_word_of_ones_own_and_the_tenth(show: Open, tiny_llm: Llama) -> None:
    tab = show()
    turn = ask(tab, "One?")
    tab.keyboard.press("ArrowUp")
    for _ in range(3):
        tab.keyboard.press("ArrowRight")
        settle(tab)
    tenth = turn["tokens"][2]["top"][9]
    prompt, before = ids_of(turn["prompt"]), ids_of(turn["tokens"][:2])
    body = body_of(tab, lambda: tab.keyboard.press("0"))
    assert body["answer"] == [*before, tenth["id"]]
    settle(tab)
    tab.keyboard.press("[")
    open_token(tab, turn, 2)
    tab.fill("#own", "Zebra")
    tab.press("#own", "Enter")
    branch = settle(tab)
    own = tiny_llm.tokenizer.encode_joined(" " * turn["tokens"][2].get("text", "").startswith(" ") + "Zebra")
    assert ids_of(branch["tokens"])[: 2 + len(own)] == before + own
    logits = tiny_llm.model(torch.tensor([prompt + before + own]))[0, :, : tiny_llm.tokenizer.n_vocab]
    p = logits[len(prompt) + 1 :].softmax(-1)
    for i, (one, id) in enumerate(zip(branch["tokens"][2:], own, strict=False)):
        assert one["forced"]
        assert one["p"] == pytest.approx(float(p[i, id]), abs=1e-5)
    params = SamplingParams(max_new_tokens=24, seed=5, **SAMPLING)
    stops, n_vocab = tiny_llm.tokenizer.stop_ids, tiny_llm.tokenizer.n_vocab
    expected = generate(tiny_llm.model, prompt + before + own, params, stop_ids=stops, n_vocab=n_vocab)
    assert ids_of(branch["tokens"])[2 + len(own) :] == [token.id for token in expected]
    assert tab.inner_text("#sentence").startswith("You chose ")


@SLOW
def test_the_next_question_keeps_the_heads_off_and_shows_it(show: Open) -> None:
    tab = show()
    turn = ask(tab, "One?", max_tokens=4)
    open_token(tab, turn, 1)
    head = tab.evaluate("inside.head.head")
    tab.click("#tabs [data-tab=head]")
    tab.click("#off")
    settle(tab)
    body = body_of(tab, lambda: ask(tab, "Two?", max_tokens=4))
    assert body["off"] == [head]
    assert f"without head {head[0]}.{head[1]}" in tab.locator("article .foot").last.inner_text()
    body = body_of(tab, lambda: tab.locator("article").last.locator("text=with all of the model").click())
    assert body["off"] == []
    settle(tab)
    assert "without head" not in tab.locator("article .foot").last.inner_text()


@SLOW
def test_a_long_answer_streams_without_long_tasks(show: Open, tiny_gguf: Path) -> None:
    llm = loader.load(tiny_gguf, dtype="float32", device="cpu", max_seq_len=2300)
    llm.tokenizer.stop_ids = frozenset()
    with running(llm) as server:
        tab = show(server.url)
        tab.evaluate(
            "window.tasks = []; new PerformanceObserver((list) => tasks.push(...list.getEntries()"
            ".map((one) => one.duration))).observe({ type: 'longtask' })"
        )
        longest = []
        while not longest or (min(longest) > 100 and len(longest) < 4):  # tasks are measured by the clock
            tab.evaluate("tasks.length = 0")
            tab.click("#new")
            turn = ask(tab, "Go on.", max_tokens=2000, temperature=1.5, top_p=1, min_p=0)
            assert len(turn["tokens"]) == 2000
            longest.append(max([0, *tab.evaluate("tasks")]))
        tab.click("#open-export")
        assert tab.inner_text("#trace") == "trace.html of the last 256 tokens"
        with tab.expect_request("**/look/page") as sent:
            assert "clearllama trace" in export(tab, "html")
        assert json.loads(sent.value.post_data or "")["ids"] == ids_of(turn["tokens"])[-256:]
        assert "last 256 tokens only" in tab.inner_text("#exported")
        busy = max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))
        assert min(longest) <= 100 * busy


@SLOW
def test_the_first_minute_on_the_default_model(show: Open, default_llm: Llama) -> None:
    with running(default_llm) as server:
        tab = show(server.url)
        configure(tab, seed=5)
        tab.click("#samples button >> nth=0")
        turn = settle(tab)
        i = next(i for i, one in enumerate(turn["tokens"]) if one.get("text") == " Tokyo")
        open_token(tab, turn, i)
        assert re.search(r"Tokyo, 9\d %\. .*Japan\d+ in", tab.inner_text("#sentence"))
        head = tab.locator("#parts .one", has_text="23.4")
        assert "from Japan" in head.inner_text()
        rival = turn["tokens"][i]["top"][tab.evaluate("id('against').selectedIndex") + 1]["text"]
        assert re.fullmatch(r" \w{3,}", rival)
        head.locator("text=test").click()
        tab.wait_for_selector("#parts b.p >> text=→")
        kyoto = next(k for k, other in enumerate(turn["tokens"][i]["top"]) if other.get("text") == " Kyoto")
        for pressed in ("ArrowRight", "ArrowLeft", str(kyoto + 1)):
            tab.keyboard.press(pressed)
        assert "Kyoto" in "".join(one.get("text", "") for one in settle(tab)["tokens"])
        assert tab.evaluate("id('against').selectedOptions[0].textContent") == "␣Tokyo"
        assert "The model preferred Tokyo" in tab.inner_text("#sentence")
        named = tab.inner_text("#parts [aria-expanded=true] b")
        tab.evaluate("tab('head')")
        assert tab.inner_text("#head-title").startswith(f"Head {named} ")
        tab.keyboard.press("[")
        settle(tab)
        assert tab.inner_text("#status") == ""
        tab.keyboard.press("o")  # Tokyo stays without head 23.4
        settle(tab)
        assert "the same as answer 1/3" in tab.inner_text("#status")


@SLOW
def test_a_vector_of_another_question_turns_the_answer(show: Open, tiny_llm: Llama) -> None:
    """Every cell of the grid is that of the library, and the answer that of the patched model."""

    def ids(question: str) -> list[int]:
        return tiny_llm.encode_chat([{"role": "user", "content": question}])

    tab = show()
    turn = ask(tab, "What is a llama?", temperature=0, max_tokens=8)
    prompt = ids_of(turn["prompt"])
    word = turn["tokens"][0]["id"]
    others = (f"What is {c} llama?" for c in "bcdwxyz0123456789")
    other = next(one for one in others if int(tiny_llm.model(torch.tensor([ids(one)]))[0, -1].argmax()) != word)
    grid = patching_grid(tiny_llm, ids(other), prompt)
    open_token(tab, turn, 0)

    def compare(question: str) -> None:
        tab.click("[data-compare]")
        tab.fill("#other-question", question)
        tab.click("[data-patch]")

    compare(other)
    until(tab, "comparing.found")
    labels = tab.eval_on_selector_all("#patches button", "(all) => all.map((one) => one.getAttribute('aria-label'))")
    shown = [int(label.rpartition(": ")[2].removesuffix(" %").replace("−", "-")) for label in labels]
    start = next(t for t, (a, b) in enumerate(zip(prompt, grid.source, strict=True)) if a != b)
    assert shown == pytest.approx((100 * grid.restored.T[start:].flatten()).tolist(), abs=0.51)
    check_looks(tab, "the grid")
    position = int(grid.restored[1].argmax())
    tab.click(f"[data-cell='1-{position}']")
    assert f"{position}" in tab.inner_text("#patched")
    body = body_of(tab, lambda: tab.click("#patched button"))
    assert body["patch"] == {"other": ids(other), "layer": 1, "position": position}
    until(tab, "!running && path().at(-1).patch")
    patched = tab.evaluate("path().at(-1)")
    with activations(tiny_llm, "resid_pre.1") as seen:
        tiny_llm.model(torch.tensor([ids(other)]))
    row = seen["resid_pre.1"][0, position]

    def put(h: torch.Tensor, at: Place) -> torch.Tensor:
        assert at.positions is not None
        h[:, at.positions == position] = row
        return h

    with patch(tiny_llm, {"resid_pre.1": put}):
        stops, n_vocab = tiny_llm.tokenizer.stop_ids, tiny_llm.tokenizer.n_vocab
        params = SamplingParams(max_new_tokens=8, temperature=0)
        expected = generate(tiny_llm.model, prompt, params, stop_ids=stops, n_vocab=n_vocab)
        assert ids_of(patched["tokens"]) == [token.id for token in expected]
    vector = f"with the vector before layer 1 at token {position} of the other question “{other}”"
    assert vector in tab.inner_text(".foot")
    tab.evaluate("step(path().at(-1), -1)")
    open_token(tab, turn, 0)
    compare("What is a llama then?")
    until(tab, "id('compare-status').textContent.includes('token by token')")
    assert str(len(ids("What is a llama then?"))) in tab.inner_text("#compare-status")
