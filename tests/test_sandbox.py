"""The process that renders chat templates: each of its limits is needed, and no call that a template can make passes them."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import os
import re
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama.chat import encode_chat, render, sandbox, template
from llama.errors import TemplateError, UsageError
from llama.tokenizer.gguf import from_metadata

from . import tiny

TOKENIZER = from_metadata(tiny.byte_vocabulary(), "tiny")
MESSAGES = [{"role": "user", "content": "x"}]


def rendered(source: str) -> str:
    return render(source, MESSAGES, TOKENIZER)


@pytest.fixture(autouse=True)
def new_process() -> Iterator[None]:
    """No test uses the process of another one."""
    template._CHILD.stop()
    yield
    template._CHILD.stop()


# ---------------------------------------------------------------------------------------------------------- the limits
ESCAPED = [  # what makes a template able to reach Python, as a bug in Jinja's sandbox would
    ("class Environment(ImmutableSandboxedEnvironment)", "class Environment(jinja2.Environment)"),
    ('environment.filters["tojson"] = to_json', 'environment.globals["open"] = open'),
]


def change(monkeypatch: pytest.MonkeyPatch, folder: Path, *edits: tuple[str, str]) -> None:
    """Use a changed copy of sandbox.py. Each edit replaces a text that occurs once."""
    source = Path(sandbox.__file__).read_text()
    for old, new in edits:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    copy = folder / "sandbox.py"
    copy.write_text(source)
    monkeypatch.setattr(sandbox, "__file__", str(copy))
    template._CHILD.stop()


ENDLESS = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
LARGE = "{{ ('a' * 99999999)|length }}"
WRITTEN = "{{ 'a' * 9999999 }}"


def seconds(call: Callable[[], object]) -> tuple[float, str]:
    """Real time of a call, and the message of its TemplateError."""
    start = time.perf_counter()
    try:
        call()
        message = ""
    except TemplateError as error:
        message = str(error)
    return time.perf_counter() - start, message


def test_without_the_timer_a_template_runs_until_it_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "SECONDS", 0.1)
    spent, message = seconds(lambda: rendered(ENDLESS))
    assert "0.1 seconds" in message
    monkeypatch.setattr(template, "WAIT", 0.6)
    change(monkeypatch, tmp_path, ("signal.setitimer(signal.ITIMER_PROF, seconds)", "pass"))
    spent, message = seconds(lambda: rendered(ENDLESS))
    assert spent > 0.6
    assert "took more than 0.6 seconds" in message


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="only Linux limits the address space")
def test_without_the_limit_on_memory_a_template_takes_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "SPACE", 2**25)
    with pytest.raises(TemplateError, match="more than 32 MiB"):
        rendered(LARGE)
    change(monkeypatch, tmp_path, ("resource.setrlimit(resource.RLIMIT_AS, (memory", "(lambda *_: 0)(0, (memory"))
    assert rendered(LARGE) == "99999999"


def test_without_the_limit_on_output_this_process_would_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TemplateError, match="it wrote 10,0"):
        rendered(WRITTEN)
    monkeypatch.setattr(template, "OUTPUT", 2**24)
    assert len(rendered(WRITTEN)) == 9999999


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such limits")
@pytest.mark.parametrize("allowed", [False, True])
def test_a_template_that_leaves_jinjas_sandbox_opens_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: bool
) -> None:
    """With the limit removed it does open one, so the limit is what prevents it."""
    secret = tmp_path / "secret"
    secret.write_text("secret")
    edits = [("resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))", "pass")] * allowed
    change(monkeypatch, tmp_path, *ESCAPED, *edits)
    read = f"{{{{ open('{secret}').read() }}}}"
    _, message = seconds(lambda: rendered(read))
    assert message == "" if allowed else "may not open" in message


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such limits")
@pytest.mark.parametrize("allowed", [False, True])
def test_a_template_that_leaves_jinjas_sandbox_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: bool
) -> None:
    """Not even to a file that an earlier defect might have left open."""
    target = tmp_path / "target"
    opened = ("requests, answers =", f"leak = open({str(target)!r}, 'wb', 0); requests, answers =")
    edits = [("resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))", "pass")] * allowed
    change(monkeypatch, tmp_path, *ESCAPED, opened, *edits)
    seconds(lambda: rendered("{% for fd in range(3, 9) %}{{ open(fd, 'wb', 0).write('x'.encode()) }}{% endfor %}"))
    assert bool(target.read_bytes()) == allowed


def test_a_started_process_renders_the_first_template(monkeypatch: pytest.MonkeyPatch) -> None:
    template.start()
    process = template._CHILD._process
    template.start()
    assert rendered("{{ 1 }}") == "1"
    assert template._CHILD._process is process
    template._CHILD.stop()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    template.start()  # the first rendering reports the failure
    with pytest.raises(TemplateError, match="jinja2, which is not installed"):
        rendered("{{ 1 }}")


def test_the_process_sees_neither_the_environment_nor_the_module_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jinja2.py").write_text("raise SystemExit('imported from the current folder')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("SECRET", "1")
    assert rendered("{{ 1 }}") == "1"
    environment = Path(f"/proc/{template._CHILD._process.pid}/environ")  # type: ignore[union-attr]
    if environment.exists():
        assert b"SECRET" not in environment.read_bytes()


# ------------------------------------------------------------------------------------------- every call of a template
BIG = (
    "n.s", "n.s.encode()", "n.i", "-n.i", "n.l", "n.t", "n.f", "[n.s] * n.k", "{n.s: n.l}", "'%999999999d'", "'a'",
    "(n.s ~ n.s, ':')", "'\\u4e00' * n.k", "1.5", "none", "range(9999)",
)  # fmt: skip
SET = (  # not constants, which Jinja would compute and compile as one long expression
    "{% set k = 999 %}{% set n = namespace(s='aB ' * (99 * k), i=k ** 3, k=9 * k, l=[[1]] * k, t=(), f='%d' * k) %}"
    "{% for i in range(99) %}{% set n.t = (n.t, n.t) %}{% endfor %}"
)


def calls() -> Iterator[str]:
    """Every filter, test, method and global that a template can name, with large values at each position."""
    import jinja2.sandbox
    from jinja2 import filters, tests

    for name, value in itertools.product(sorted(filters.FILTERS), BIG):
        for arguments in ("", *(f"({a})" for a in BIG), *(f"({a}, {b})" for a, b in zip(BIG, BIG[3:], strict=False))):
            yield f"{{{{ ({value})|{name}{arguments}|string|length }}}}"
    for name, value in itertools.product(sorted(tests.TESTS), BIG):
        if re.fullmatch(r"\w+", name):
            yield from (f"{{{{ ({value}) is {name}{argument} }}}}" for argument in ("", *(f"({a})" for a in BIG)))
    for value in ("n.s", "n.s.encode()", "n.i", "n.l", "n.t", "{n.s: 1}", "1.5"):
        kind = type({"n.s": "", "n.s.encode()": b"", "n.i": 1, "n.l": [], "n.t": (), "1.5": 1.5}.get(value, {}))
        for name in (name for name in dir(kind) if not name.startswith("_")):
            for arguments in ("", *BIG, *(f"{a}, {b}" for a, b in itertools.product(BIG, BIG[:6]))):
                yield f"{{{{ ({value}).{name}({arguments})|string|length }}}}"
    for name in ("range", "dict", "lipsum", "cycler", "joiner", "namespace", "raise_exception", "strftime_now"):
        yield from (f"{{{{ {name}({a})|string|length }}}}" for a in ("", *BIG))
    for operator in ("+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "in"):
        yield from (f"{{{{ ({a} {operator} {b})|string|length }}}}" for a, b in itertools.product(BIG, BIG))
    assert jinja2.sandbox.MAX_RANGE <= 100_000


def check_calls(sources: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Each call gives a text or a TemplateError within small limits. Returns the number of texts."""
    monkeypatch.setattr(template, "SECONDS", 0.1)
    monkeypatch.setattr(template, "SPACE", 2**26)
    monkeypatch.setattr(template, "WAIT", 20.0)
    texts = 0
    for source in sources:
        used = time.thread_time()
        _, message = seconds(lambda source=source: rendered(SET + source))  # type: ignore[misc]
        assert time.thread_time() - used < 0.1, source
        assert "did not end" not in message, source
        assert message.isprintable(), source
        process = template._CHILD._process
        if process is not None and os.path.exists(f"/proc/{process.pid}/status"):
            peak = int(Path(f"/proc/{process.pid}/status").read_text().split("VmPeak:")[1].split()[0]) * 1024
            assert peak < 2**26 + 2**27, source  # the limit, and the interpreter with its libraries
        texts += not message
    return texts


def test_a_sample_of_all_calls_ends_within_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = list(calls())
    assert len(everything) > 10_000
    assert check_calls(everything[:: len(everything) // 60], monkeypatch) > 5


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_call_ends_within_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_calls(list(calls())[::4], monkeypatch) > 1000


# --------------------------------------------------------------------------------------------------------- the process
def test_a_rendering_takes_at_most_three_milliseconds() -> None:
    """A conversation of twenty messages, rendered twice."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": "word " * 20} for i in range(20)]
    encode_chat(TOKENIZER, tiny.CHATML, messages)
    texts = sum(len(message["content"]) for message in messages)
    start = time.perf_counter()
    TOKENIZER.encode("word " * (texts // 5))
    encoding, times = time.perf_counter() - start, []
    for _ in range(30):
        start = time.perf_counter()
        encode_chat(TOKENIZER, tiny.CHATML, messages)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.003 + encoding, statistics.median(times)


def test_after_a_crash_the_next_template_gets_a_new_process() -> None:
    assert rendered("{{ 1 }}") == "1"
    process = template._CHILD._process
    assert process is not None
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert rendered("{{ 2 }}") == "2"
    assert template._CHILD._process is not process


def test_an_interrupted_rendering_leaves_no_answer_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(KeyboardInterrupt):
            rendered(ENDLESS)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert rendered("{{ 3 }}") == "3"


def test_threads_get_their_own_answers() -> None:
    results: dict[int, list[str]] = {}

    def work(number: int) -> None:
        results[number] = [rendered(f"{{{{ {number} * {i} }}}}") for i in range(20)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: [str(n * i) for i in range(20)] for n in range(4)}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_starts_its_own() -> None:
    assert rendered("{{ 1 }}") == "1"
    read, write = os.pipe()
    pid = os.fork()
    if not pid:  # no exception may leave this branch
        try:
            os.write(write, rendered("{{ 'forked' }}").encode())
            template._CHILD.stop()
        finally:
            os._exit(0)
    os.close(write)
    assert rendered("{{ 'parent' }}") == "parent"
    os.waitpid(pid, 0)
    assert os.read(read, 100) == b"forked"
    os.close(read)


@pytest.mark.parametrize(
    "answer", [b"[]", b"{", b'{"pieces": 1}', b'{"pieces": [["a"]]}', b'{"pieces": [[1, true]]}', b"[" * 99999]
)
def test_an_invalid_answer_is_an_error(monkeypatch: pytest.MonkeyPatch, answer: bytes) -> None:
    """As a template could send that has left the sandbox."""
    monkeypatch.setattr(template._CHILD, "ask", lambda request: answer)
    with pytest.raises(TemplateError, match="left the sandbox"):
        encode_chat(TOKENIZER, tiny.CHATML, MESSAGES)


def test_without_a_process_there_is_an_error_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nonexistent")
    with pytest.raises(TemplateError, match=r"could not be started .*--raw"):
        rendered("x")


@given(
    st.lists(st.text("<s|>/[ab]^-\\", min_size=1, max_size=4), min_size=1, max_size=9, unique=True),
    st.text("<s|>/[ab]^-\\x", max_size=30),
)
def test_control_strings_are_found_as_by_a_regular_expression(controls: list[str], text: str) -> None:
    alternatives = "|".join(map(re.escape, sorted(controls, key=len, reverse=True)))
    found = sandbox.Controls(controls)
    assert found.split(text) == [piece for piece in re.split(f"({alternatives})", text) if piece]
    marked = found.mark(text, "\ufdd0")
    assert marked.replace("\ufdd0", "") == text
    assert not any(control in marked for control in controls if len(control) > 1)


def test_many_control_strings_and_a_long_text_take_linear_time() -> None:
    controls = ["<s>", "</s>", "[INST]", "[/INST]", *(f"<SPECIAL_{i}>" for i in range(1000))]
    text = "<td><b>x1</b></td>\n" * 20_000
    start = time.process_time()
    marked = sandbox.Controls(controls).mark(text, "\ufdd0")
    assert time.process_time() - start < 0.5
    assert marked == text


def test_an_ignored_signal_of_the_parent_does_not_disable_the_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "SECONDS", 0.1)
    before = signal.signal(signal.SIGPROF, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPROF])
    try:
        with pytest.raises(TemplateError, match=r"more than 0\.1 seconds"):
            rendered(ENDLESS)
    finally:
        signal.signal(signal.SIGPROF, before)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])


def test_what_is_not_json_is_an_error_of_the_caller() -> None:
    with pytest.raises(UsageError, match="JSON-serializable"):
        render("x", MESSAGES, TOKENIZER, tools=[{"a": {1, 2}}])


def test_the_sandbox_imports_nothing_of_the_package() -> None:
    source = inspect.getsource(sandbox)
    assert not re.search(r"^\s*from \.|^\s*(from|import) llama", source, re.MULTILINE)
