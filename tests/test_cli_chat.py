"""clearllama chat as a user sees it: at a terminal, which the tests simulate, and over a pipe."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import re
import signal
import stat
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pexpect.fdpexpect import fdspawn

from llama import loader
from llama.chat import encode_chat
from llama.cli.chat import HELP
from llama.cli.common import turns
from llama.generation.session import Session, open_session
from llama.text import Llama
from llama.tokenizer.common import BYTE_OF

from . import tiny
from .conftest import Run
from .forked import Forked
from .patience import PATIENCE, until

pytestmark = pytest.mark.usefixtures("one_thread")

GREEDY = ("--dtype", "float32", "--device", "cpu", "--temp", "0")
UP, ENTER = "\x1b[A", "\r"


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_letters(tmp_path_factory.mktemp("letters") / "letters.gguf")


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a template that opens a thought, which only a budget closes."""
    template = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}<think>\n{# </think> #}"
    path = tmp_path_factory.mktemp("thinker") / "thinker.gguf"
    return write_letters(path, {"tokenizer.chat_template": template})


def write_letters(path: Path, metadata: dict[str, Any] | None = None) -> Path:
    """A model that answers with the letter a, again and again, in a context of 8,000 tokens."""
    config = dataclasses.replace(tiny.CONFIG, max_seq_len=8000)
    state = tiny.weights(config)
    for name, tensor in state.items():  # only the embedding, all ones, reaches the output
        if name.endswith((".wo.weight", ".w2.weight")) or name == "output.weight":
            tensor.zero_()
    state["tok_embeddings.weight"].fill_(1)
    (letter,) = (letter for letter, byte in BYTE_OF.items() if byte == ord("a"))
    row = tiny.byte_vocabulary()["tokenizer.ggml.tokens"].index(letter)
    state["output.weight"][row] = state["norm.weight"].sign()
    return tiny.write_gguf(path, config, state, metadata=metadata)


class Terminal:
    """A chat at a pseudo-terminal. `end` waits for it and returns its exit code."""

    def __init__(self, forked: Forked, editor: str, state: Path, *args: str):
        self.forked, self.running = forked, True
        main, self.side = os.openpty()
        self.before = termios.tcgetattr(self.side)
        env = {"XDG_STATE_HOME": str(state), "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
        streams: dict[int, str | None] = dict.fromkeys(range(3), os.ttyname(self.side))
        missing = "import sys; sys.modules['prompt_toolkit'] = None" if editor == "readline" else ""
        self.pid = forked.start(("chat", *args), streams=streams, env=env, seconds=60, before=missing)
        self.child = fdspawn(main, encoding="utf-8", timeout=PATIENCE)
        self.prompt()

    def prompt(self, text: str = ">") -> str:
        """Wait for the prompt, and return what was written before it."""
        self.child.expect(r"[mh\r\n]" + re.escape(text))  # at the start of a line, after escape sequences
        while termios.tcgetattr(self.side)[3] & termios.ICANON:  # until the editor reads keys
            time.sleep(0.01)
        return str(self.child.before)

    def enter(self, line: str) -> str:
        """Enter a line, and return what was written before the next prompt."""
        self.child.send(line + ENTER)
        self.child.expect("finish: |clearllama: error|saved|started|removed|stopped")
        return str(self.child.before) + self.prompt()

    def end(self, last: str = "/exit" + ENTER) -> int:
        self.child.send(last)
        self.running = False
        return self.forked.finish().returncode

    def close(self) -> None:
        if self.running:
            self.forked.kill()
            self.forked.finish()
        if self.child.child_fd >= 0:
            self.hang_up()

    def hang_up(self) -> None:
        os.close(self.side)
        self.child.close()


Start = Callable[..., Terminal]


@pytest.fixture(params=["prompt_toolkit", "readline"])
def start(request: pytest.FixtureRequest, forked: Forked, tmp_path: Path) -> Iterator[Start]:
    pytest.importorskip(request.param)
    started: list[Terminal] = []

    def run(*args: object) -> Terminal:
        started.append(Terminal(forked, request.param, tmp_path / "state", *map(str, args)))
        return started[-1]

    yield run
    for one in started:
        one.close()


def questions(path: Path) -> list[str]:
    """The questions in a saved session."""
    return [message["content"] for message in open_session(path)[1]["messages"] if message["role"] == "user"]


# -------------------------------------------------------------------------------------------------------- a terminal
@pytest.mark.parametrize("start", ["prompt_toolkit"], indirect=True)
def test_a_pasted_text_is_one_turn_and_later_chats_remember_it(start: Start, letters: Path, tmp_path: Path) -> None:
    chat = start("-m", letters, *GREEDY, "-n", "3")
    chat.enter("\x1b[200~/one\r\ttwo\r\r  three\r\x1b[201~")
    for line in ('"""', "  the"):
        chat.child.send(line + ENTER)
        chat.prompt("...")
    assert "aaa" in chat.enter('"""')
    chat.enter("//slash")
    chat.child.send("/sa\t")
    chat.child.expect_exact("ve")  # completed
    chat.enter(f" {tmp_path / 'talk'}")
    assert chat.end() == 0
    assert questions(tmp_path / "talk") == ["/one\n\ttwo\n\n  three", "  the", "/slash"]
    assert stat.S_IMODE((tmp_path / "state" / "clearllama").stat().st_mode) == 0o700

    again = start("-m", letters, *GREEDY, "-n", "3")
    again.enter(UP * 3)
    again.enter(f"/save {tmp_path / 'again'}")
    assert again.end("\x04") == 0
    assert questions(tmp_path / "again") == ["/slash"]

    kept = {path: path.read_bytes() for path in (tmp_path / "state" / "clearllama").iterdir()}
    assert len(kept) == 1
    private = start("-m", letters, *GREEDY, "-n", "3", "--no-history")
    assert "aaa" in private.enter("secret")
    assert private.end() == 0
    assert kept == {path: path.read_bytes() for path in kept}


@pytest.mark.parametrize("fault", ["zeros", "a folder", "a broken link"])
def test_a_chat_runs_whatever_the_file_of_earlier_input_is(
    start: Start, letters: Path, tmp_path: Path, fault: str
) -> None:
    history = tmp_path / "state" / "clearllama" / "chat-history"
    history.parent.mkdir(0o700, parents=True)
    if fault == "zeros":
        history.write_bytes(bytes(5000))
    else:
        history.mkdir() if fault == "a folder" else history.symlink_to("/nonexistent/x")
    chat = start("-m", letters, *GREEDY, "-n", "3")
    assert "aaa" in chat.enter("x")
    assert chat.end() == 0


def test_ctrl_c_stops_the_answer_and_a_signal_restores_the_terminal(
    start: Start, letters: Path, tmp_path: Path
) -> None:
    chat = start("-m", letters, *GREEDY, "-n", "7000")
    chat.child.send("x")
    chat.child.expect_exact("x")
    os.kill(chat.pid, signal.SIGINT)
    chat.prompt()
    chat.child.send("go" + ENTER)
    chat.child.expect_exact("aaaa")
    hidden = [*chat.before]
    hidden[3] = hidden[3] & ~termios.ECHO | termios.NOFLSH
    assert termios.tcgetattr(chat.side) == hidden  # the shell's own settings during an answer, without an echo
    os.kill(chat.pid, signal.SIGINT)
    chat.child.expect_exact("clearllama: stopped")
    chat.prompt()
    chat.enter(f"/save {tmp_path / 'talk'}")
    assert questions(tmp_path / "talk") == ["go"]
    chat.child.send("x")
    chat.child.expect_exact("x")
    os.kill(chat.pid, signal.SIGTERM)
    assert chat.end("") == 143
    assert termios.tcgetattr(chat.side) == chat.before


def test_lines_typed_during_an_answer_are_turns_of_their_own(start: Start, letters: Path, tmp_path: Path) -> None:
    chat = start("-m", letters, *GREEDY, "-n", "300")
    chat.child.send("one" + ENTER)
    chat.child.expect_exact("aaaa")
    chat.child.send(f"two{ENTER}/undo{ENTER}three{ENTER}/save {tmp_path / 'talk'}{ENTER}")
    chat.child.expect_exact("finish: ")
    assert "two" not in str(chat.child.before)  # no echo in the answer
    chat.child.expect_exact("saved")
    chat.prompt()
    chat.child.send(f"/load {tmp_path / 'tal'}\t")
    chat.child.expect_exact("k")  # completed
    assert questions(tmp_path / "talk") == ["one", "three"]


def test_ctrl_c_keeps_the_lines_typed_during_an_answer(start: Start, letters: Path, tmp_path: Path) -> None:
    chat = start("-m", letters, *GREEDY, "-n", "7000")
    chat.child.send("one" + ENTER)
    chat.child.expect_exact("aaaa")
    chat.child.send(f"/save {tmp_path / 'talk'}\x03{ENTER}")  # at Ctrl-C, a terminal may discard its input
    until(lambda: fcntl.ioctl(chat.side, termios.FIONREAD, bytes(4)) != bytes(4))  # it has received all of this
    os.kill(chat.pid, signal.SIGINT)  # the terminal does not control the process, so Ctrl-C sends no signal
    chat.child.expect_exact("clearllama: stopped")
    chat.child.expect_exact("saved")


@pytest.mark.parametrize("start", ["readline"], indirect=True)
def test_a_thought_is_faint(start: Start, thinker: Path, tmp_path: Path) -> None:
    chat = start("-m", thinker, *GREEDY, "-n", "15", "--thinking-budget", "4")
    shown = chat.enter("hi").replace("\r\n", "\n")
    faint = re.findall(r"\x1b\[2m(.*?)\x1b\[22m", shown)
    assert "".join(faint) == "aaaa"
    assert shown.rpartition("\x1b[22m")[2].startswith("\n\naaa\n")
    chat.enter(f"/save {tmp_path / 'talk'}")
    message = {"role": "assistant", "content": "aaa", "reasoning_content": "aaaa"}
    assert open_session(tmp_path / "talk")[1]["messages"][1] == message


# ------------------------------------------------------------------------------------------------------------ a pipe
def test_a_pipe_gets_only_the_text_after_a_thought(
    clearllama: Run, thinker: Path, tiny_gguf: Path, tmp_path: Path
) -> None:
    options = ("-n", "15", "--thinking-budget", "4")
    done = talk(clearllama, thinker, "hi", args=options)
    assert done.stdout == b"aaa\n"
    assert b"15 new" in done.stderr
    assert b"12 of them in the thought" in done.stderr
    answer = json.loads(talk(clearllama, thinker, "hi", args=("--json", *options)).stdout)
    assert (answer["text"], answer["reasoning"], answer["stats"]["reasoning_tokens"]) == ("aaa", "aaaa", 12)
    once = clearllama("generate", "-m", str(thinker), "hi", "--json", *options, *GREEDY)
    assert {**json.loads(once.stdout), "stats": 0} == {**answer, "stats": 0}
    (tmp_path / "lines").write_text('{"prompt": "hi"}\n{"prompt": "hi", "thinking_budget": 0}\n')
    lines = clearllama("generate", "-m", str(thinker), "--prompts", str(tmp_path / "lines"), *options, *GREEDY)
    found = [json.loads(line) for line in lines.stdout.splitlines()]
    assert [(one["text"], one.get("reasoning")) for one in found] == [("aaa", "aaaa"), ("a" * 7, None)]
    for command in (
        ("generate", "-m", str(thinker), "--raw", "hi"),
        ("generate", "-m", str(tiny_gguf), "hi"),
        ("chat", "-m", str(tiny_gguf)),
        ("serve", "-m", str(tiny_gguf), "--port", "0"),
    ):
        wrong = clearllama(*command, "--thinking-budget", "4")
        assert wrong.returncode == 2
        assert b"--thinking-budget needs a chat whose template has marks" in wrong.stderr


def talk(clearllama: Run, model: Path, *lines: str, args: tuple[str, ...] = (), code: int = 0) -> Any:
    done = clearllama("chat", "-m", str(model), *GREEDY, *args, stdin="\n".join([*lines, ""]).encode())
    assert done.returncode == code, done.stderr
    return done


def test_a_chat_whose_terminal_is_gone_ends(start: Start, tiny_gguf: Path) -> None:
    chat = start("-m", tiny_gguf)
    chat.hang_up()
    chat.running = False
    assert chat.forked.finish().returncode in (0, 1)  # readline reads the end of the input


def test_a_full_context_drops_the_oldest_turns(clearllama: Run, tiny_gguf: Path, tmp_path: Path) -> None:
    saved = tmp_path / "talk"
    lines = (*(letter * 80 for letter in "bcd"), f"/save {saved}", f"/save {saved}")
    done = talk(clearllama, tiny_gguf, *lines, args=("-q", "-n", "4", "--system", "the"), code=1)
    assert b"dropped the 1 oldest turn, the context is full" in done.stderr
    assert b"File exists" in done.stderr
    assert open_session(saved)[1]["messages"][0] == {"role": "system", "content": "the"}
    assert questions(saved) == ["c" * 80, "d" * 80]


def test_answers_over_a_pipe_are_told_apart(clearllama: Run, tiny_gguf: Path, tiny_llm: Llama) -> None:
    lines = ("hello", '"""', "  the", "", "/clear", '"""', "//slash", "x" * 400, '"""one line"""')
    asked = ["hello", "  the\n\n/clear", "/slash", "x" * 400, "one line"]
    done = talk(clearllama, tiny_gguf, *lines, args=("-n", "6"), code=1)
    told = talk(clearllama, tiny_gguf, *lines, args=("-n", "6", "--json"), code=1)
    objects = [json.loads(line) for line in told.stdout.splitlines()]
    assert [answer["prompt"] for answer in objects] == asked
    messages, texts = [], []
    for answer in objects:
        if answer["prompt"] == "x" * 400:
            assert answer.keys() == {"prompt", "error"}
            assert f"clearllama: error: {answer['error']}" in done.stderr.decode().splitlines()
            continue
        messages.append({"role": "user", "content": answer["prompt"]})
        expected = tiny_llm.chat(messages, max_new_tokens=6)
        assert (answer["text"], answer["tokens"]) == (expected.text, expected.tokens)
        messages.append({"role": "assistant", "content": answer["text"]})
        texts.append(answer["text"])
    assert done.stdout.decode() == "\n".join(text + "\n" for text in texts)
    alone = clearllama("generate", "hello", "-m", str(tiny_gguf), *GREEDY, "-n", "6", "--json")
    assert {**json.loads(alone.stdout), "stats": 0} == {**objects[0], "stats": 0}


def test_a_block_without_an_end_and_wrong_commands_are_errors(clearllama: Run, tiny_gguf: Path) -> None:
    lines = (
        "/retr",
        "/clear now",
        "/save",
        "/undo",
        "/?",
        "/set top_p x",
        "/set seed -1",
        "/set",
        "/show",
        '"""hello',
        "the",
    )
    done = talk(clearllama, tiny_gguf, *lines, code=2)
    assert HELP in done.stderr.decode()
    errors = [line.split("error: ")[1] for line in done.stderr.decode().splitlines() if "error" in line]
    words = ("'/retr'", "'/clear now'", "/save needs a file", "there is no question yet")
    words += ("/set NAME NUMBER", "seed must be", "/set NAME NUMBER", "'/show'", "has no end")
    assert [word in error for word, error in zip(words, errors, strict=True)] == [True] * len(words)


@pytest.mark.parametrize("line", ["/set temperature 1.5", "/set parameter temp 1.50"])
def test_an_option_that_is_set_is_that_of_the_command(clearllama: Run, tiny_gguf: Path, line: str) -> None:
    args = ("-n", "6", "--seed", "1")
    both = talk(clearllama, tiny_gguf, "hello", line, "/set num_predict 9", "/clear", "hello", args=args)
    alone = talk(clearllama, tiny_gguf, "hello", args=("-n", "9", "--seed", "1", "--temp", "1.5"))
    assert both.stdout.split(b"\n\n")[1] == alone.stdout != both.stdout.split(b"\n\n")[0]


def test_undo_and_retry_leave_no_trace(clearllama: Run, tiny_gguf: Path, tmp_path: Path) -> None:
    """In the answers that follow, and in the saved cache: both are those of a conversation without it."""
    plain, undone = tmp_path / "plain", tmp_path / "undone"
    args = ("-n", "6", "--system", "the")
    short = talk(clearllama, tiny_gguf, "hello", f"/save {plain}", "the end", args=args)
    long = talk(clearllama, tiny_gguf, "hello", "secret", "/undo", f"/save {undone}", "the end", args=args)
    first, last = short.stdout.split(b"\n\n")[0], short.stdout.split(b"\n\n")[-1]
    assert long.stdout.startswith(first)
    assert long.stdout.endswith(last)
    assert open_session(plain)[1]["messages"] == (messages := open_session(undone)[1]["messages"])
    llm = loader.load(tiny_gguf, dtype="float32", device="cpu")
    tokens = Session.load(undone, llm.model).tokens
    assert tokens == encode_chat(llm.tokenizer, llm.chat_template, messages)[: len(tokens)]
    again = talk(clearllama, tiny_gguf, "hello", "/retry", "the end", args=args)
    assert again.stdout == first + b"\n\n" + short.stdout


def test_a_system_message_begins_a_conversation(clearllama: Run, tiny_gguf: Path, tmp_path: Path) -> None:
    at, system = str(tmp_path / "talk"), ("--system", "the")
    talk(clearllama, tiny_gguf, "hello", "/system be", "hello", f"/save {at}", args=("-n", "3", *system))
    refused = talk(clearllama, tiny_gguf, "hello", args=(*system, "--load-session", at), code=2)
    assert f"--system can't change the conversation in {at}" in refused.stderr.decode()

    def last(*lines: str, args: tuple[str, ...] = ()) -> list[int]:
        done = talk(clearllama, tiny_gguf, *lines, "hello", args=("-n", "3", "--json", *args))
        ids: list[int] = json.loads(done.stdout.splitlines()[-1])["tokens"]
        return ids

    plain = last(args=system)
    assert last("hello", "/clear", args=("--load-session", at)) == last(args=("--system", "be")) != plain
    assert last("/system the") == last("/set system the") == plain
    assert last("/system", args=system) == last() != plain


def test_a_loaded_conversation_continues_like_the_saved_one(clearllama: Run, tiny_gguf: Path, tmp_path: Path) -> None:
    at, ended, damaged = tmp_path / "talk", tmp_path / "ended", tmp_path / "damaged"
    args = ("-n", "6", "--json", "--system", "the")
    one = talk(clearllama, tiny_gguf, "hello", f"/save {at}", "the end", args=args)
    damaged.write_bytes(at.read_bytes()[:-1])
    two = talk(clearllama, tiny_gguf, "other", f"/load {at}", "the end", args=(*args, "--save-session", str(ended)))
    three = talk(clearllama, tiny_gguf, "the end", args=(*args[:3], "--load-session", str(at)))
    lost = talk(clearllama, tiny_gguf, "hello", f"/load {damaged}", "/load", "the end", args=args, code=1)
    answers = [json.loads(done.stdout.splitlines()[-1]) for done in (one, two, three, lost)]
    assert all(answer["tokens"] == answers[0]["tokens"] for answer in answers)
    assert answers[0]["stats"]["cached_tokens"] == answers[1]["stats"]["cached_tokens"] > 20
    assert re.search(rf"{at}: loaded \d+ tokens and 3 messages", two.stderr.decode())
    assert "continuing the conversation of 3 messages" in three.stderr.decode()
    assert questions(ended) == ["hello", "the end"]  # of the conversation that was loaded


# ------------------------------------------------------------------------------------------------------------- parts
@pytest.mark.parametrize(
    ("lines", "text", "command"),
    [
        (["/clear "], "/clear", True),
        (["\n\n  a\n\nb \n"], "  a\n\nb", False),
        (['"""a"""'], "a", False),
        (['"""', "", "  a", "", "/b ", "", '"""'], "  a\n\n/b", False),
        (['"""a', 'b"""  '], "a\nb", False),
        (['"""', 'say """x""" now', 'end"""'], 'say """x""" now\nend', False),
        (['"""doc"""\ndef f(): pass'], '"""doc"""\ndef f(): pass', False),
    ],
)
def test_what_a_turn_is(lines: list[str], text: str, command: bool) -> None:
    remaining = iter(lines)
    entered = turns.read_lines(lambda prompt: next(remaining))
    assert turns.parse_turn(entered) == (text, command)
    assert list(remaining) == []
    assert turns.is_complete(entered)
    assert not any(turns.is_complete("\n".join(lines[:n])) for n in range(1, len(lines)))
