"""Group H: hostile templates and conversations, by the command."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llama.chat import render
from llama.chat import template as template_module
from llama.chat.template import SECONDS
from llama.errors import TemplateError
from llama.system.child import Child
from llama.tokenizer.gguf import from_metadata

from .. import tiny
from ..scripts import make_tiny
from .conftest import Try

RUN = ("-n", "1", "--device", "cpu", "--dtype", "float32")
TINY = from_metadata(tiny.byte_vocabulary(), "tiny")
MESSAGES = [{"role": "user", "content": "x"}]
CANARY = "{{ cycler.__init__.__globals__.os.system('touch $CANARY') }}"


def with_template(path: Path, template: str | None) -> Path:
    return tiny.write_gguf(path, metadata={"tokenizer.chat_template": template})


# ------------------------------------------------------------------------------------------------------------ H01: code
@pytest.mark.parametrize("form", ["gguf", "hf"])
def test_a_template_can_not_run_code(tmp_path: Path, attempt: Try, form: str) -> None:
    """`attempt` checks that the canary file does not exist."""
    model = with_template(tmp_path / "t.gguf", CANARY)
    if form == "hf":
        model = make_tiny.make(tmp_path / "hf", "llama-3-8b", format="hf")
        (model / "chat_template.jinja").write_text(CANARY)
    attempt("generate", "x", *RUN, "-m", model).refused("chat template failed", "unsafe", "--raw")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ('{0.__class__.__init__.__globals__}'|attr('format'))(cycler) }}",
        "{{ '{x.__globals__}'.format_map({'x': raise_exception}) }}",
        "{{ (messages|map('lower')).gi_frame.f_globals }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_the_sandbox_blocks_every_escape(template: str) -> None:
    """It is an error, or the attribute counts as undefined."""
    with contextlib.suppress(TemplateError):
        assert render(template, MESSAGES, TINY) == ""


# ---------------------------------------------------------------------------------------------------------- H02: limits
TUPLES = "{% set n.x = (n.x,) %}{% set n.y = (n.y,) %}" * 50
POWERS = "{% set n = namespace(x=3) %}{% for i in range(23) %}{% set n.x = n.x * n.x %}{% endfor %}"
HOSTILE = {
    "an endless loop": "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "600 MB": "{% for i in range(600) %}{{ 'a' * 1000000 }}{% endfor %}",
    "tuples nested deeply": "{% set n = namespace(x=(), y=()) %}{% for i in range(4000) %}" + TUPLES
    + "{% endfor %}{{ n.x == n.y }}",
    "macro that calls itself": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "lists in lists": "{% set x = [1] %}" + "{% set x = [x, x] %}" * 60 + "{{ x }}",
    "divisible": POWERS + "{{ (n.x * n.x) is divisibleby(n.x + 1) }}",
    "an exception": "{{ raise_exception('it wrote\n two lines \x1b[31m') }}",
}  # fmt: skip
ENDS = r"more than|recursion|nested|digits|it wrote|crashed|Too many open files|unknown encoding"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A part of the limits, so that the tests are fast."""
    child = Child(template_module.CHILD.worker, template_module.CHILD.packages, SECONDS / 20, 2**26)
    monkeypatch.setattr(template_module, "CHILD", child)
    yield
    child.stop()


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_ends_within_the_limits(name: str) -> None:
    """This process spends no time on it."""
    used = time.thread_time()
    with pytest.raises(TemplateError, match=rf"^[^\n]*({ENDS})[^\n]*--raw"):
        render(HOSTILE[name], MESSAGES, TINY)
    assert time.thread_time() - used < 0.2


# ------------------------------------------------------------------------------------------- H03, H04, H06, H07: broken


def test_a_question_longer_than_the_context_is_an_error(tiny_gguf: Path, attempt: Try) -> None:
    """The conversation is as before it; the chat continues, and the exit code is 1."""
    lines = b"hello\n" + b"x" * 400 + b"\nhello\n"
    outcome = attempt("chat", "--system", "Be brief.", *RUN, "-m", tiny_gguf, stdin=lines)
    assert outcome.code == 1
    assert outcome.error.count("context of 256 must hold") == 1
    assert outcome.error.count("1 new") == 2
    assert "dropped" not in outcome.error
