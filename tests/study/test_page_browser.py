"""The page in a browser: pictures follow the controls, and the numbers equal the library's at every setting.

Needs Chromium, which pip does not install; without it these tests are skipped, or fail if CI is set.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from playwright.sync_api import Page

import llama
from llama.study import measures, page

PICTURES = ("clock", "waves", "divisors", "arcs", "scores")
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 360, "height": 740}
Open = Callable[..., Page]
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "rope.html"
    path.write_text(page.html(), encoding="utf-8")
    return path


@pytest.fixture
def show(open_page: Open, file: Path) -> Open:
    return lambda address="", viewport=WIDE, keep=True, **how: open_page(
        file.as_uri() + address, viewport=viewport, keep=keep, **how
    )


def settle(tab: Page) -> None:
    """Wait until the page is drawn."""
    tab.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


def until(tab: Page, condition: str) -> None:
    """Wait for a condition in JavaScript. Playwright's own wait needs eval, which the page forbids."""
    for _ in range(200):
        if tab.evaluate(condition):
            return
        tab.wait_for_timeout(25)
    pytest.fail(f"never came true: {condition}")


def drawn(tab: Page) -> dict[str, str]:
    return {name: tab.inner_html(f"#{name} .plot") for name in PICTURES}


def state_of(tab: Page) -> dict[str, Any]:
    """The setting in the controls."""
    state = {name: float(tab.input_value(f"#{name}")) for name in ("base", "stretch")}
    state |= {
        name: int(tab.input_value(f"#{name}")) for name in ("dim", "trained", "length", "m", "n", "pair", "shift")
    }
    return {**state, "method": tab.input_value("input[name=method]:checked")}


def table(tab: Page) -> list[list[str]]:
    """The cells of the page's table of numbers, which is opened if necessary."""
    if not tab.evaluate("document.getElementById('numbers').open"):
        tab.evaluate("document.getElementById('numbers').open = true")
        settle(tab)  # the event is asynchronous
    settle(tab)
    rows: list[list[str]] = tab.eval_on_selector_all(
        "#numbers tbody tr", "(rows) => rows.map((row) => [...row.cells].map((cell) => cell.textContent))"
    )
    return rows


def assert_the_librarys_numbers(tab: Page) -> None:
    state = state_of(tab)
    scaling = page.scaling_of(state["method"], state["stretch"], state["trained"])
    lengths = {"seq_len": state["length"], "max_seq_len": state["trained"]}
    before = llama.inverse_frequencies(state["dim"], state["base"])[0].double()
    after = llama.inverse_frequencies(state["dim"], state["base"], scaling, **lengths)[0].double()
    target = max(state["trained"], int(state["trained"] * state["stretch"] + 0.5))
    end = max(state["length"], state["trained"]) if state["method"] == "dynamic" else target
    columns = [
        range(state["dim"] // 2),
        before,
        after,
        before / after,
        measures.wavelengths(before),
        measures.wavelengths(after),
        measures.turns(before, state["trained"] - 1),
        measures.turns(after, end - 1),
    ]
    rows = table(tab)
    assert len(rows) == state["dim"] // 2
    for number, column in enumerate(columns):
        shown = [float(row[number]) for row in rows]
        assert shown == pytest.approx([float(x) for x in column], rel=1e-6, abs=1e-12), (number, state)


# --------------------------------------------------------------------------------------------------------- the numbers
def test_the_page_opens_and_agrees_with_the_library(show: Open) -> None:
    tab = show()
    verdict = tab.inner_text("#check")
    pattern = r"numbers agree with the library \(48 settings, largest relative difference [3-6]\.\de-8"
    assert re.match(pattern, verdict), verdict
    assert tab.get_attribute("#check", "class") == "check"
    assert_the_librarys_numbers(tab)


# slider -> pictures that must change with it under YaRN, which uses every setting
MOVES = {
    "base": PICTURES,
    "dim": PICTURES,
    "trained": PICTURES,
    "stretch": PICTURES,
    "m": ("clock", "scores"),
    "n": ("clock", "scores"),
    "pair": ("clock", "waves", "divisors", "arcs"),
    "length": PICTURES,  # under dynamic
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name == "pair" else SLOW) for name in MOVES])
def test_every_slider_moves_by_keyboard_and_changes_its_pictures(show: Open, name: str) -> None:
    tab = show("#method=dynamic&length=5000" if name == "length" else "#method=yarn")
    before, state = drawn(tab), state_of(tab)
    labels = {p: tab.get_attribute(f"#{p} svg", "aria-label") for p in PICTURES}
    tab.focus(f"#{name}-slider")
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "ArrowRight"):
        tab.keyboard.press(key)
    settle(tab)
    after = drawn(tab)
    assert state_of(tab)[name] > state[name]
    for picture in MOVES[name]:
        assert after[picture] != before[picture], picture
    for picture in set(PICTURES) - set(MOVES[name]):
        assert after[picture] == before[picture], picture
    assert_the_librarys_numbers(tab)
    for key in ("End", "Home"):
        tab.focus(f"#{name}-slider")
        tab.keyboard.press(key)
        settle(tab)
        assert_the_librarys_numbers(tab)
        for picture in MOVES[name]:  # the description for screen readers must change too
            assert tab.get_attribute(f"#{picture} svg", "aria-label") != labels[picture], picture


def test_every_method_is_reached_by_keyboard(show: Open) -> None:
    tab = show("#method=default")
    tab.focus("input[name=method]:checked")
    seen = {"default": drawn(tab)["divisors"]}
    for _ in range(5):
        tab.keyboard.press("ArrowDown")
        settle(tab)
        seen[state_of(tab)["method"]] = drawn(tab)["divisors"]
        assert_the_librarys_numbers(tab)
        assert tab.is_visible('[data-field="length"]') == (state_of(tab)["method"] == "dynamic")
    assert list(seen) == ["default", "linear", "ntk", "dynamic", "yarn", "llama3"]
    assert len(set(seen.values())) == 6
    explanation = tab.inner_text("#explanation")
    assert explanation.startswith("Pairs that turn more than 4 times within L are unchanged")


@pytest.mark.parametrize(
    "address",
    [
        "#method=yarn&dim=64&pair=20&m=777",
        *(pytest.param(f"#method={method}", marks=SLOW) for method in ("ntk", "llama3&stretch=8")),
    ],
)
def test_the_drawn_coordinates_match_the_numbers(show: Open, address: str) -> None:
    tab = show(address)
    state = state_of(tab)
    scaling = page.scaling_of(state["method"], state["stretch"], state["trained"])
    before = llama.inverse_frequencies(state["dim"], state["base"])[0].double()
    after = llama.inverse_frequencies(state["dim"], state["base"], scaling)[0].double()

    shown = [int(word.split()[1]) for word in texts(tab, "clock") if re.fullmatch(r"pair \d+", word)]
    assert len(shown) == 6
    for arrow, position in (("q", state["m"]), ("k", state["n"])):
        for pair, angle in zip(shown, angles(tab, arrow), strict=True):
            assert math.cos(angle - position * float(after[pair])) > 0.9995, (arrow, pair)
    cosines = torch.cos((state["m"] - state["n"]) * after)  # (D/2,)
    rounding = 1e-7 * max(10, state["m"] - state["n"])  # the library's frequencies are float32
    height = axis(tab, "clock", "−1", "1", float)
    bars = tab.eval_on_selector_all(
        "#clock rect.bar", "(all) => all.map((b) => [b.y.baseVal.value, b.height.baseVal.value, b.textContent])"
    )
    for (top, tall, value), cosine in zip(bars, cosines.tolist(), strict=True):
        assert number(value.split(": ")[1]) == pytest.approx(cosine, abs=rounding + 1e-6)
        assert sorted((top, top + tall)) == pytest.approx(sorted((height(0), height(cosine))), abs=0.2)
    factor = llama.inverse_frequencies(state["dim"], state["base"], scaling)[1]
    total = factor**2 * state["dim"] / 2 * float(measures.mean_cosine(after, torch.tensor([state["m"] - state["n"]])))
    assert number(tab.inner_text("#clock .sum").split()[-1]) == pytest.approx(total, abs=1e-3 + rounding * len(cosines))

    height = axis(tab, "divisors", "1", str(round(state["stretch"])), math.log)
    points = curve(tab, "#divisors path.new")
    assert len(points) == state["dim"] // 2
    for (_, y), divisor in zip(points, (before / after).tolist(), strict=True):
        assert y == pytest.approx(height(divisor), abs=0.2)

    height = axis(tab, "waves", "10", "1k", math.log)
    for kind, inv_freq in (("old", before), ("new", after)):
        for (_, y), wave in zip(
            curve(tab, f"#waves path.{kind}"), measures.wavelengths(inv_freq).tolist(), strict=True
        ):
            assert y == pytest.approx(height(wave), abs=0.2)

    height = axis(tab, "arcs", "½", "1", float)
    end = round(state["trained"] * state["stretch"])
    outline = tab.locator("#arcs path.new").last.get_attribute("d")  # the stairs, two points a pair
    stairs = [float(y) for _, y in re.findall(r"([\d.]+) ([\d.]+)", outline or "")]
    for y, met in zip(stairs[::2], measures.seen_arc(after, end).tolist(), strict=True):
        assert y == pytest.approx(height(met / (2 * math.pi)), abs=0.2)


def angles(tab: Page, arrow: str) -> list[float]:
    """The angles of the arrows "q" or "k", one per dial, in radians, counter-clockwise from the right."""
    found: list[float] = tab.eval_on_selector_all(
        f"#clock line.arrow-{arrow}",
        "(lines) => lines.map(({x1, y1, x2, y2}) =>"
        " Math.atan2(y1.baseVal.value - y2.baseVal.value, x2.baseVal.value - x1.baseVal.value))",
    )
    return found


def number(text: str) -> float:
    return float(text.replace("−", "-"))


def texts(tab: Page, picture: str) -> list[str]:
    words: list[str] = tab.eval_on_selector_all(f"#{picture} svg text", "(x) => x.map((e) => e.textContent)")
    return words


def curve(tab: Page, selector: str) -> list[tuple[float, float]]:
    drawn = tab.locator(selector).get_attribute("d") or ""
    return [(float(x), float(y)) for x, y in re.findall(r"([\d.]+) ([\d.]+)", drawn)]


def axis(tab: Page, picture: str, low: str, high: str, scale: Callable[[float], float]) -> Callable[[float], float]:
    """The axis of a picture, from two of its tick labels: value -> y on the page."""
    at = {
        word: tab.eval_on_selector_all(
            f"#{picture} svg text[text-anchor=end]",
            f"(x) => x.filter((e) => e.textContent === '{word}').map((e) => e.y.baseVal[0].value - 4)[0]",
        )
        for word in (low, high)
    }
    value = {"1": 1.0, "½": 0.5, "1k": 1000.0, "−1": -1.0}
    a, b = (scale(value.get(word) or float(word)) for word in (low, high))
    return lambda x: at[low] + (at[high] - at[low]) * (scale(x) - a) / (b - a)


def test_the_score_is_unchanged_when_both_positions_shift(show: Open) -> None:
    tab = show("#method=yarn&m=300&n=100")
    here = tab.inner_text("#score-here")
    by_distance = tab.inner_text("#scores .readout tr:last-child td:last-child")  # from the distance; here: turned
    assert number(by_distance) == pytest.approx(number(here), abs=6e-6)
    for shift in ("0", "1", "777", "8191"):
        tab.fill("#shift", shift)
        settle(tab)
        assert tab.inner_text("#score-here") == tab.inner_text("#score-there") == here
    clock = drawn(tab)["clock"]
    tab.fill("#m", "1300")
    tab.fill("#n", "1100")
    settle(tab)
    assert drawn(tab)["clock"] != clock
    assert tab.inner_text("#score-here") == here
    tab.fill("#n", "1101")
    settle(tab)
    assert tab.inner_text("#score-here") != here


# ------------------------------------------------------------------------------------------------ addresses, the path
def test_an_address_restores_the_setting(show: Open) -> None:
    tab = show("#base=500000&dim=64&trained=8192&stretch=8&method=llama3&m=40000&n=39000&pair=20&shift=5")
    tab.focus("#stretch-slider")
    tab.keyboard.press("ArrowRight")
    until(tab, "location.hash.includes('stretch=8.72')")
    again = show(tab.evaluate("location.hash"), keep=False)
    assert state_of(again) == state_of(tab)
    assert drawn(again) == drawn(tab)
    tab.evaluate("location.hash = '#method=linear&dim=16'")
    until(tab, "document.getElementById('dim').value === '16'")
    assert state_of(tab)["method"] == "linear"


# ----------------------------------------------------------------------------------------------------------- security
@pytest.mark.slow
def test_no_script_or_style_but_the_pages_own_runs(open_page: Open, tmp_path: Path) -> None:
    planted = '<script>planted = 1</script><p id="p" style="color: red" onclick="planted = 2">text</p>'
    (tmp_path / "rope.html").write_text(page.html().replace("</body>", planted + "</body>"), encoding="utf-8")
    tab = open_page((tmp_path / "rope.html").as_uri(), expected="Content Security Policy|TrustedHTML")
    tab.dispatch_event("#p", "click")
    assert tab.evaluate("[typeof planted, document.getElementById('p').style.color]") == ["undefined", ""]
    assert tab.evaluate("(() => { try { document.body.innerHTML = '' } catch (error) { return error.name } })()")
    tab.focus("#pair-slider")
    tab.keyboard.press("ArrowRight")
    settle(tab)
    assert all("<svg" in picture for picture in drawn(tab).values())
    assert_the_librarys_numbers(tab)


# -------------------------------------------------------------------------------------------------------- accessibility
# The smallest contrast ratio of a text and its background (WCAG 2), and the text.
CONTRAST = """() => {
  const rgba = (text) => { const x = text.match(/[\\d.]+/g).map(Number); return [x[0], x[1], x[2], x[3] ?? 1]; };
  const over = (top, below, opacity = 1) => {
    const a = top[3] * opacity; return [0, 1, 2].map((i) => top[i] * a + below[i] * (1 - a)).concat(1);
  };
  const luminance = (c) => {
    const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = c.slice(0, 3).map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (a, b) => {
    const [x, y] = [luminance(a), luminance(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05);
  };
  const background = (element) => {
    const layers = [];
    for (let e = element; e; e = e.parentElement) layers.push(rgba(getComputedStyle(e).backgroundColor));
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255, 1]);
  };
  let worst = { ratio: 99, count: 0 };
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.textContent.trim() || element.closest("script, style, noscript, button:disabled")) continue;
    if (!element.checkVisibility({ visibilityProperty: true, opacityProperty: true })) continue;
    const style = getComputedStyle(element);
    let below = background(element);
    const svg = element.closest("svg");
    if (svg) { // shapes drawn before the text, at its centre
      const box = element.getBoundingClientRect();
      const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
      for (const shape of svg.querySelectorAll("path.seen, rect.seen")) {
        const place = new DOMPoint(x, y).matrixTransform(shape.getScreenCTM().inverse());
        if (!element.classList.contains("halo") && shape.isPointInFill(place)) {
          const paint = getComputedStyle(shape);
          below = over(rgba(paint.fill), below, Number(paint.opacity));
        }
      }
    }
    const found = ratio(over(rgba(svg ? style.fill : style.color), below), below);
    worst.count += 1;
    if (found < worst.ratio) worst = { ...worst, ratio: found, text: node.textContent.trim().slice(0, 40) };
  }
  return worst;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [WIDE, pytest.param(PHONE, marks=SLOW)], ids=["wide", "phone"])
def test_every_text_has_contrast(show: Open, scheme: str, viewport: Any) -> None:
    tab = show("#method=ntk&dim=12345", viewport)
    tab.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    tab.evaluate("document.querySelector('.path button').click()")
    table(tab)
    tab.evaluate("document.getElementById('panel').open = true")
    tab.fill("#dim", "7")  # errors are text too
    settle(tab)
    ground = tab.eval_on_selector("body", "(x) => getComputedStyle(x).backgroundColor")
    assert (int(re.findall(r"\d+", ground)[0]) < 60) == (scheme == "dark")
    worst = tab.evaluate(CONTRAST)
    assert worst["count"] > 300
    assert worst["ratio"] >= 4.5, worst


@pytest.mark.parametrize("methods", [["dynamic"], pytest.param(page.METHODS, marks=SLOW)], ids=["dynamic", "all"])
def test_a_phone_needs_no_sideways_scroll(show: Open, methods: list[str]) -> None:
    tab = show("", PHONE, has_touch=True)
    for method in methods:
        tab.evaluate(f"location.hash = '#method={method}&stretch=32&trained=131072&base=10000000&m=4000000&n=3'")
        until(tab, f"document.querySelector('input[name=method]:checked').value === '{method}'")
        for opened in (False, True):
            assert tab.evaluate("document.getElementById('panel').open") == opened
            assert tab.evaluate("document.documentElement.scrollWidth") <= 360
            outside = tab.evaluate(
                "[...document.querySelectorAll('body *')].filter((e) => !e.closest('.table, .defs, #summary') &&"
                " e.getBoundingClientRect().right > 360.5 && e.checkVisibility()).map((e) => e.outerHTML.slice(0, 90))"
            )
            assert outside == []
            tab.evaluate("scrollTo(0, document.body.scrollHeight / 2)")
            box = tab.locator(".side summary").bounding_box()  # the controls are reachable at every scroll position
            assert box is not None
            assert 0 <= box["y"] <= box["y"] + box["height"] <= 740.5
            tab.tap(".side summary")
            settle(tab)


def test_with_reduced_motion_nothing_is_animated(show: Open) -> None:
    tab = show("#m=5&n=0")
    tab.click(".path li:nth-child(5) button")
    settle(tab)
    assert state_of(tab)["base"] == 500000  # at once
    tab.click("#note [data-go='0']")
    start = state_of(tab)
    tab.click("[data-play=both]")
    tab.wait_for_timeout(400)
    assert (state_of(tab)["m"], state_of(tab)["n"]) == (start["m"] + 1, start["n"] + 1)
    tab.click("[data-play=q]")
    settle(tab)
    assert (state_of(tab)["m"], state_of(tab)["n"]) == (start["m"] + 2, start["n"] + 1)
    inv_freq = llama.inverse_frequencies(128, 500000.0, page.scaling_of("llama3", 8.0, 8192))[0]
    at_once = (start["m"] + 2) * float(inv_freq[0])
    assert math.cos(angles(tab, "q")[0] - at_once) > 0.9995
    assert tab.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == "auto"


def test_without_javascript_the_explanation_is_shown(show: Open) -> None:
    tab = show(java_script_enabled=False)
    text = tab.inner_text("body")
    assert "need JavaScript, which is off" in text
    assert "The six methods" in text
    assert not tab.is_visible("#panel")
