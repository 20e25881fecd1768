"""The page's numbers, computed in V8 without a browser and compared with the library and numpy; and the file."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from py_mini_racer import MiniRacer

import llama
from llama.errors import UsageError
from llama.study import measures, page

PAGE = page.html()
METHODS = ("default", "linear", "ntk", "dynamic", "yarn", "llama3")


class Engine:
    """V8 with rope.js; arguments and results are passed as JSON, where numbers that are not finite become null."""

    def __init__(self) -> None:
        self.context = MiniRacer()
        self.context.eval(page.part("rope.js"))

    def __call__(self, expression: str, *arguments: Any) -> Any:
        """Evaluate `expression` with arguments $0, $1, ...; a RangeError in it becomes a ValueError."""
        for number, argument in enumerate(arguments):
            expression = expression.replace(f"${number}", json.dumps(argument))
        result = json.loads(
            self.context.eval(
                f"(() => {{ try {{ return JSON.stringify({{value: ({expression})}}); }}"
                " catch (e) { if (e instanceof RangeError) return JSON.stringify({error: e.message}); throw e; } })()"
            )
        )
        if "error" in result:
            raise ValueError(result["error"])
        return result.get("value")


@pytest.fixture(scope="module")
def js() -> Iterator[Engine]:
    engine = Engine()
    yield engine
    engine.context.close()  # otherwise its threads keep the process from ending


@st.composite
def setting(draw: st.DrawFn) -> dict[str, Any]:
    """A state of the page."""
    trained = draw(st.integers(128, 131072))
    stretch = draw(st.one_of(st.sampled_from([1.0, 2.0, 4.0, 8.0, 32.0]), st.floats(1, 32)))
    end = max(trained, math.floor(stretch * trained + 0.5))
    dim = 2 * draw(st.integers(4, 128))
    m = draw(st.integers(0, end - 1))
    length = draw(st.integers(m + 1, end))
    return {
        "base": draw(st.one_of(st.sampled_from([1e3, 1e4, 5e5, 1e6, 1e7]), st.floats(1e3, 1e7))),
        "dim": dim,
        "trained": trained,
        "stretch": stretch,
        "method": draw(st.sampled_from(METHODS)),
        "m": m,
        "n": draw(st.integers(0, m)),
        "pair": draw(st.integers(0, dim // 2 - 1)),
        "shift": draw(st.integers(0, end - 1)),
        "length": length,
    }


def by_library(state: dict[str, Any], method: str | None = None) -> tuple[torch.Tensor, float]:
    scaling = page.scaling_of(method or state["method"], state["stretch"], state["trained"])
    lengths = {"seq_len": state["length"], "max_seq_len": state["trained"]}
    return llama.inverse_frequencies(state["dim"], state["base"], scaling, **lengths)


def on_an_edge(state: dict[str, Any]) -> bool:
    """Whether YaRN's ramp begins or ends so near to a pair that rounding decides its index."""
    dim, base, trained = state["dim"], state["base"], state["trained"]
    ends = [dim / 2 * math.log(trained / (2 * math.pi * beta)) / math.log(base) for beta in (32, 1)]
    return any(abs(x - round(x)) < 1e-9 for x in ends)


START = {
    **{"base": 1e4, "dim": 128, "trained": 2048, "stretch": 4.0, "method": "default"},
    **{"m": 100, "n": 88, "pair": 41, "shift": 1000, "length": 8192},
}


# ------------------------------------------------------------------------------------------------------- the numbers
@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=30)
@given(state=setting())
@example(state=START)
@example(state={**START, "base": 5e5, "trained": 8192, "stretch": 8.0, "length": 65536})
@example(state={**START, "dim": 8, "trained": 128, "stretch": 1.0, "length": 128})
@example(state={**START, "dim": 256, "trained": 131072, "stretch": 31.7, "length": 1000000, "base": 1e7})
def test_every_number_of_every_method_equals_the_librarys(js: Engine, method: str, state: dict[str, Any]) -> None:
    state = {**state, "method": method}
    assume(not on_an_edge(state))
    ours = js("Rope.pairs($0)", state)
    inv_freq, library_factor = by_library(state)
    trained = state["trained"]
    end = max(state["length"], trained) if method == "dynamic" else js("Rope.target($0)", state)
    assert ours["end"] == end

    unscaled = by_library(state, "default")[0].double()
    single = {
        "before": unscaled,
        "invFreq": inv_freq.double(),
        "waves": measures.wavelengths(unscaled),
        "wavesAfter": measures.wavelengths(inv_freq),
        "divisors": unscaled / inv_freq.double(),
        "seen": measures.seen_arc(unscaled, trained),
        "met": measures.seen_arc(inv_freq, end),
        "turnsSeen": measures.turns(unscaled, trained - 1),
        "turnsMet": measures.turns(inv_freq, end - 1),
    }
    for name, expected in single.items():
        np.testing.assert_allclose(ours[name], expected.numpy(), rtol=1e-6, err_msg=name)
    assert ours["attentionFactor"] == pytest.approx(library_factor, rel=1e-12)


positions = st.integers(0, 400)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=20)
@given(state=setting(), m=positions, n=positions, shift=positions, factor=st.floats(0.5, 2))
def test_scores_equal_numpys_and_depend_only_on_the_distance(
    js: Engine, method: str, state: dict[str, Any], m: int, n: int, shift: int, factor: float
) -> None:
    assume(not on_an_edge(state))
    dim = state["dim"]
    q, k = (np.array(page.vectors()[name][:dim]) for name in "qk")
    inv_freq = by_library(state, method)[0].double().numpy()
    a, b = q[0::2] + 1j * q[1::2], k[0::2] + 1j * k[1::2]  # (D/2,) complex
    expected = factor**2 * float((a * b.conj() * np.exp(1j * (m - n) * inv_freq)).real.sum()) / math.sqrt(dim)
    scale = factor**2 * float((np.abs(a) * np.abs(b)).sum()) / math.sqrt(dim)

    frequencies = inv_freq.tolist()
    direct = js("Rope.score($0, $1, $2, $3, $4, $5)", q.tolist(), k.tolist(), m, n, frequencies, factor)
    assert abs(direct - expected) < 1e-12 * scale
    shifted = js(
        "Rope.score($0, $1, $2, $3, $4, $5)", q.tolist(), k.tolist(), m + shift, n + shift, frequencies, factor
    )
    assert abs(shifted - direct) < 1e-12 * scale
    mean, by_distance = js(
        "Rope.scoresAt($2, $3, Rope.scoreParts($0, $1, $3.length, $4), [0, 0])",
        q.tolist(),
        k.tolist(),
        m - n,
        frequencies,
        factor,
    )
    assert abs(by_distance - expected) < 1e-12 * scale
    assert mean == pytest.approx(np.cos((m - n) * inv_freq).mean(), abs=1e-12)
    theirs = measures.mean_cosine(torch.tensor(inv_freq), torch.tensor([m - n]))
    assert mean == pytest.approx(float(theirs), abs=1e-12)


@given(
    m=st.integers(0, 500), n=st.integers(0, 500), angle=st.floats(-99, 99), w=st.floats(1e-4, 1),
    arrow=st.sampled_from(["q", "k", "both"]),
)  # fmt: skip
def test_a_turned_arrow_moves_its_token_by_the_angle(
    js: Engine, m: int, n: int, angle: float, w: float, arrow: str
) -> None:
    n, m = sorted((m, n))
    last, tokens = 600, math.floor(angle / w + 0.5)
    found = js("Rope.turned({m: $0, n: $1}, $2, $3, $4, $5)", m, n, arrow, angle, w, last)
    expected = {
        "q": lambda: (x := min(max(m + tokens, 0), last), min(n, x)),
        "k": lambda: (max(m, x := min(max(n + tokens, 0), last)), x),
        "both": lambda: (m + (x := min(max(tokens, -n), last - m)), n + x),
    }[arrow]()
    assert (found["m"], found["n"]) == expected


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("base", "trained"), [(1e4, 2048), (1e4, 4096), (5e5, 8192)])
@pytest.mark.parametrize("times", [1, 4])
def test_which_pairs_meet_angles_that_did_not_occur_in_training(
    js: Engine, method: str, base: float, trained: int, times: int
) -> None:
    changes = {"method": method, "base": base, "trained": trained, "stretch": float(times), "length": times * trained}
    ours = js("Rope.pairs($0)", {**START, **changes})
    plain, scaled = (by_library({**START, **changes}, name)[0].double() for name in ("default", method))
    unfinished = 2 * math.pi / plain > trained
    assert ours["unfinished"] == unfinished.tolist()
    reached = (times * trained - 1) * scaled / plain  # in trained positions
    assert ours["beyond"] == (unfinished & (reached > trained * (1 + 1e-6))).tolist()


# ---------------------------------------------------------------------------------------------------------- bad input


def valid(js: Engine, state: dict[str, Any]) -> None:
    assert state["method"] in METHODS
    assert 0 <= state["n"] <= state["m"]
    for name in ("base", "dim", "trained", "stretch", "m", "n", "pair", "shift", "length"):
        assert js("Rope.read($0, String($1), $2)", name, state[name], state) == {"value": state[name]}


@settings(max_examples=60)
@given(setting())
def test_an_address_stores_a_setting(js: Engine, state: dict[str, Any]) -> None:
    back = js("Rope.fromHash('#' + Rope.toHash($0))", state)
    assert back == {"state": state, "ignored": []}
    valid(js, back["state"])


@settings(max_examples=30)
@given(st.text(max_size=40))
@example("#base=NaN&dim=7&trained=&stretch=1e99&method=none&m=-1&n=x&pair=999&nonsense=1")
@example("#__proto__=1&constructor=2&method=constructor&base")
@example("#m=5&n=9")
@example("#dim=8&pair=4")
def test_no_address_breaks_the_page(js: Engine, address: str) -> None:
    answer = js("Rope.fromHash($0)", address)
    valid(js, answer["state"])


@settings(max_examples=80)
@given(setting(), setting(), st.sampled_from(sorted(START)))
def test_after_any_change_the_setting_is_valid(
    js: Engine, state: dict[str, Any], other: dict[str, Any], name: str
) -> None:
    if name != "method" and "error" in js("Rope.read($0, String($1), $2)", name, other[name], state):
        return  # a control only sets values in range
    valid(js, js("Rope.change($0, $1)", state, {name: other[name]}))


# ----------------------------------------------------------------------------------------------------- the self-check
def data() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(PAGE.split('id="data">')[1].split("</script>")[0])
    return found


def test_the_self_check_agrees_with_the_library(js: Engine) -> None:
    result = js("Rope.selfCheck($0)", data()["reference"])
    assert result["agrees"] is True
    assert result["settings"] == len(page.CHECKED) * len(METHODS)
    assert 1e-9 < result["worst"] < 2**-24 * 1.01  # half a unit in the last place of float32


def test_python_and_the_page_have_the_same_methods(js: Engine) -> None:
    assert tuple(js("Rope.METHODS")) == page.METHODS == METHODS
    assert js("Rope.START") == START


# --------------------------------------------------------------------------------------------------------- the file


def test_the_page_fetches_nothing() -> None:
    names = r"https?:|//[a-z]+\.|@import|\bfetch\s*\(|XMLHttpRequest|WebSocket|sendBeacon|import\s*\("
    assert not re.search(names, PAGE.replace("http://www.w3.org/2000/svg", ""))  # the name of a kind of element
    assert set(re.findall(r"url\(([^)]*)\)", PAGE)) == {"#hatch"}
    assert not re.search(r"<[^>]*\bsrc=|<(iframe|object|embed|base|img)\b", PAGE)
    policy = re.findall('Policy" content="([^"]+)"', PAGE)[0]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    ids = re.findall(r'\bid="([^"]+)"', PAGE)
    assert len(ids) == len(set(ids))


def test_the_command_writes_the_page_and_reports_it_in_one_line(clearllama: Any, tmp_path: Path) -> None:
    result = clearllama("study", "--html", str(tmp_path / "rope.html"))
    assert (result.returncode, result.stdout) == (0, b"")
    assert (
        result.stderr.decode()
        == f"clearllama: {tmp_path / 'rope.html'}: {len(PAGE.encode()) / 1000:.0f} kB; open it in a browser\n"
    )
    assert (tmp_path / "rope.html").read_text(encoding="utf-8") == PAGE
    result = clearllama("study", "--html", str(tmp_path / "missing" / "rope.html"))
    assert result.returncode == 2
    assert result.stderr.decode().count("\n") == 1


@pytest.mark.parametrize("extra", [["example"], ["--json"], ["--head-dim", "64"], ["--figure", "a.png"]])
def test_the_command_rejects_options_that_it_would_ignore(extra: list[str], tmp_path: Path) -> None:
    from llama.cli import build_parser

    args = build_parser().parse_args(["study", "--html", str(tmp_path / "rope.html"), *extra])
    with pytest.raises(UsageError, match="leave TOPIC and all other options out"):
        args.run(args)
    assert not (tmp_path / "rope.html").exists()
