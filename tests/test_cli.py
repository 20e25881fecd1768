"""The command line as a user sees it: processes, pipes, exit codes, one line per error."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from llama import cli, loader
from llama.checkpoint import open_checkpoint
from llama.cli.common import terminal
from llama.errors import LlamaError
from llama.inside.steering import ControlVector
from llama.text import Llama

from . import tiny
from .conftest import Run
from .patience import PATIENCE

FAST = ("-n", "5", "--temp", "2", "--seed", "1")


def error_line(result: subprocess.CompletedProcess[bytes]) -> str:
    """The only line on stderr. Nothing may be on stdout."""
    lines = result.stderr.decode().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("clearllama")
    assert result.stdout in (b"", None)
    return lines[0]


def imported(*command: str) -> tuple[set[str], int, list[str]]:
    """Run a command. Return the modules that it imported, how many objects the garbage collector ignores, and stderr."""
    code = (
        "import atexit, gc, sys; from llama.__main__ import main;"
        "atexit.register(lambda: print(gc.get_freeze_count(), *sys.modules, file=sys.stderr)); main()"
    )
    env = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    env["OMP_DISPLAY_ENV"] = "verbose"  # OpenMP writes its settings to stderr
    done = subprocess.run([sys.executable, "-c", code, *command], env=env, capture_output=True, check=True, text=True)
    *lines, last = done.stderr.splitlines()
    count, *modules = last.split()
    return set(modules), int(count), lines


def test_the_first_word_needs_few_imports(tiny_gguf: Path) -> None:
    """Importing torch._dynamo takes as long as loading the default model, Triton 0.15 s, the others up to 0.1 s.

    Jinja is imported by the child process that renders the template. The garbage collector ignores what torch's import
    made; without that, visiting these objects takes 0.3 s.
    """
    modules, frozen, lines = imported("generate", "a", "-m", str(tiny_gguf), "-n", "1")
    assert {"torch", "tokenizers", "llama.chat.template"} <= modules
    assert not modules & {"torch._dynamo", "torch._inductor", "torch.distributed.tensor", "triton", "transformers"}
    assert not modules & {"jinja2", "huggingface_hub", "tiktoken", "safetensors", "matplotlib"}
    assert frozen > 100_000
    if any("_OPENMP = " in line for line in lines):  # GNU's OpenMP
        assert any(line.strip().endswith(f"GOMP_SPINCOUNT = '{cli.SPIN_COUNT}'") for line in lines)


def test_generate_json_has_the_documented_keys(clearllama: Run, tiny_gguf: Path, tiny_llm: Llama) -> None:
    result = clearllama("generate", "-m", str(tiny_gguf), "hello", "--json", "--logprobs", "--dtype", "fp32", *FAST)
    assert result.returncode == 0
    answer = json.loads(result.stdout)
    assert list(answer) == ["prompt", "text", "tokens", "prompt_tokens", "finish_reason", "logprobs", "stats"]
    expected = tiny_llm.chat(
        [{"role": "user", "content": "hello"}], max_new_tokens=5, temperature=2.0, seed=1, logprobs=True
    )
    assert answer["prompt"] == "hello"
    assert answer["tokens"] == expected.tokens
    assert answer["text"] == expected.text
    assert answer["prompt_tokens"] == expected.stats.prompt_tokens > len("hello")
    assert answer["logprobs"] == pytest.approx(expected.logprobs, abs=1e-4)
    assert answer["stats"]["seed"] == 1


def test_raw_and_chat_prompts_differ(clearllama: Run, tiny_gguf: Path, tmp_path: Path) -> None:
    chat = clearllama("generate", "-m", str(tiny_gguf), "hello", *FAST)
    raw = clearllama("generate", "-m", str(tiny_gguf), "hello", "--raw", *FAST)
    assert b"one user message" in chat.stderr
    assert b"continued as plain text (--raw)" in raw.stderr
    assert chat.stdout != raw.stdout
    base = tiny.write_gguf(tmp_path / "base.gguf", metadata={"tokenizer.chat_template": None})
    result = clearllama("generate", "-m", str(base), "hello", *FAST)
    assert b"the model has no chat template" in result.stderr
    assert result.stdout == raw.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("generate", "--temperature", "nan", "x"), "temperature"),
        (("generate", "--top-k", "-1", "x"), "--top-k"),
        (("generate", "-n", "-3", "x"), "--max-new-tokens"),
        (("generate", "--rope", "spiral", "x"), "--rope"),
        (("generate", "--logprobs", "x"), "--json"),
        (("generate",), "empty"),
        (("generate", "--device", "cuda:99", "x"), "available here: "),
        (("generate", "--dtype", "int3", "x"), "int3"),
        (("generate", "--threads", "0", "x"), "threads"),
        (("pull", "gpt-5"), "or smollm2-135m-instruct"),
        (("generate", "--raw", "--system", "x", "x"), "--system needs a chat"),
        (("generate", "--draft-tokens", "3", "x"), "needs a draft"),
        (("quantize", ".", "x.gguf"), "would be a folder"),
        (("inspect", "x", "-m", "y"), "not allowed with"),
        (("trace", "--html", "-", "x"), "--html -: expected a file"),
        (("trace", "--compile", "x"), "--compile"),
        (("study", "bugs", "step", "--figure", "x.png"), "without --figure"),
        (("steer", "--positive", "x", "--negative", "x", "-o", "x"), "are the same"),
    ],
)
def test_usage_errors_are_one_line_and_exit_2(
    clearllama: Run, tiny_gguf: Path, args: tuple[str, ...], message: str
) -> None:
    model = ("-m", str(tiny_gguf)) if args[0] == "generate" else ()
    result = clearllama(*args, *model, stdin=b"")
    assert result.returncode == 2
    assert message in error_line(result)


NEED_NO_WEIGHTS = {  # a command -> what it says
    "generate hi --regex [": "the regular expression can't be used: invalid regex",
    "generate hi --json-schema SCHEMA": "the JSON schema can't be used: Invalid type: foo",
    "generate hi --logit-bias 320=1": "token id 320 is not in the vocabulary",
    "generate hi --stop=": "stop must be",
    "generate hi --min-tokens -1": "min-tokens must be",
    "generate --prompt=": "the prompt is empty",
    "generate HELLO --max-seq-len 8": "the prompt has",
    "generate hi --draft /nowhere": "no file or folder '/nowhere'",
    "generate hi --draft ngram --draft-tokens 0": "--draft-tokens must be",
    "generate hi --draft ngram --rope-scaling dynamic --rope-factor 2": "a draft needs RoPE frequencies",
    "generate hi --save-session OUT --rope-scaling dynamic --rope-factor 2": "a session can't be saved",
    "generate hi --steer VECTOR": "the vector was made for another model",
    "generate hi --steer VECTOR --steer-layers 5:9": "expected layers as FIRST:END",
    "generate --prompts PROMPTS --regex [": "the regular expression can't be used",
    "chat --regex [": "the regular expression can't be used",
    "trace hi --ablate-head 99.1": "head 99.1 does not exist",
    "trace hi --layers 5:99": "expected layers as FIRST:END",
    "trace hi --patch-from hello": "--patch-from must have",
    "trace HELLO --max-seq-len 8": "outside the 8 positions",
    "explain --layer 99": "--layer must be from 0 to 1",
    "explain --text hi --token 9": "--token must be from 0 to",
    "perplexity PROMPTS --window 1": "--window must be",
    "steer --raw --positive HELLO --negative x -o OUT --max-seq-len 8": "the prompt has",
}


@pytest.mark.parametrize("words", NEED_NO_WEIGHTS)
def test_what_needs_no_weights_is_checked_before_they_are_read(
    words: str,
    tiny_gguf: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(loader, "fill", lambda *_: pytest.fail("read"))
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    (tmp_path / "SCHEMA").write_text('{"type": "foo"}')
    (tmp_path / "PROMPTS").write_text('{"prompt": "hi"}\n')
    ControlVector({1: torch.zeros(3)}).write(tmp_path / "VECTOR.gguf")
    (tmp_path / "VECTOR.gguf").rename(tmp_path / "VECTOR")
    names = {name: str(tmp_path / name) for name in ("SCHEMA", "PROMPTS", "VECTOR", "OUT")}
    command = [names.get(word, "abcdefghijkl" if word == "HELLO" else word) for word in words.split()]
    assert cli.main([*command, "-m", str(tiny_gguf), "--device", "cpu"]) in (1, 2)
    (line,) = capsys.readouterr().err.splitlines()
    assert NEED_NO_WEIGHTS[words] in line
    assert "%llguidance" not in line


def test_a_prompt_that_is_not_utf8_is_refused(clearllama: Run, tiny_gguf: Path) -> None:
    command = ("generate", "-q", "-m", str(tiny_gguf))
    for result in (clearllama(*command, stdin=b"abc\xff"), clearllama(*command, os.fsdecode(b"abc\xff"))):
        assert result.returncode == 2
        assert "byte 3 is 0xff" in error_line(result)


def test_zero_new_tokens_give_an_empty_answer(clearllama: Run, tiny_gguf: Path) -> None:
    result = clearllama("generate", "-q", "-m", str(tiny_gguf), "hello", "-n", "0")
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")


def test_tokenize_shows_ids_and_pieces(tiny_gguf: Path, tiny_llm: Llama, monkeypatch, capsys) -> None:
    tokenizer = tiny_llm.tokenizer
    monkeypatch.setattr("sys.stdin", None)
    text = "caf\u00e9 <|im_end|>"
    assert cli.main(["tokenize", text, "-m", str(tiny_gguf), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {**found, "prompt": text, "tokens": tokenizer.encode_prompt(text)}
    assert tokenizer.decode(found["tokens"]) == text
    assert len(found["pieces"]) == len(found["tokens"])
    assert cli.main(["tokenize", text, "-m", str(tiny_gguf), "--parse-special"]) == 0
    out, err = capsys.readouterr()
    ids = tokenizer.encode_prompt(text, parse_special=True)
    assert [int(line.split()[0]) for line in out.splitlines()] == ids
    assert out.splitlines()[-1].split()[1] == "'<|im_end|>'"
    assert err == f"clearllama: {len(ids)} tokens\n"
    assert len(ids) < len(found["tokens"])


@pytest.mark.parametrize(("target", "format"), [("x.gguf", "gguf"), ("Llama-3.1-8B", "hf"), ("x.gguf --to hf", "")])
def test_the_format_of_a_conversion_is_that_of_the_name(
    tiny_gguf: Path, tmp_path: Path, monkeypatch, target: str, format: str, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["convert", str(tiny_gguf), *target.split()]) == (0 if format else 2)
    if format:
        assert open_checkpoint(tmp_path / target).format.lower().startswith({"hf": "hugging"}.get(format, format))
    else:
        assert "x.gguf would be a folder" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ pipes and signals
def test_a_closed_or_full_stderr_does_not_change_stdout(clearllama: Run, tiny_gguf: Path) -> None:
    args = ("generate", "-m", str(tiny_gguf), "hello", *FAST)
    closed = clearllama(*args, streams={2: None})
    assert closed.returncode == 0
    assert closed.stdout == clearllama(*args).stdout
    full = clearllama(*args, streams={2: "/dev/full"})
    assert full.stdout == closed.stdout


# Python imports this before the command: it interrupts the process at the same moment however busy the machine is
INTERRUPT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
moments = [os.environ.pop("MOMENT")]
def interrupt(event, args):
    if moments and [event, str(args[0])] == moments[0].split(" ", 1):
        moments.clear()
        os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(interrupt)
"""


@pytest.mark.parametrize(
    "moment",
    ["import llama.cli", "import torch", pytest.param("import llama.model", marks=pytest.mark.slow), "open MODEL"],
)
def test_an_interrupt_while_loading_ends_the_command(tiny_gguf: Path, tmp_path: Path, moment: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPT)
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parent.parent)])
    env = {**os.environ, "PYTHONPATH": path, "MOMENT": moment.replace("MODEL", str(tiny_gguf))}
    command = [sys.executable, "-m", "llama", "generate", "-m", str(tiny_gguf), "--raw", "Once", "-n", "4000"]
    done = subprocess.run(command, env=env, capture_output=True, timeout=PATIENCE, check=False)
    # -2: a shell reports it as 130, too
    assert (done.returncode, done.stderr) in ((130, b"\nclearllama: interrupted\n"), (-signal.SIGINT, b""))
    assert done.stdout == b""


@pytest.mark.slow
def test_nohup_keeps_the_command_running(tmp_path: Path) -> None:
    path = tiny.write_gguf(tmp_path / "x.gguf", metadata={"llama.context_length": 2**20})
    args = [sys.executable, "-m", "llama", "generate", "-q", "-m", str(path), "--raw", "hello", "-n", "1000000"]
    process = subprocess.Popen(
        ["nohup", *args, "--temp", "3", "--ignore-eos"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    assert process.stdout.read(1)
    process.send_signal(signal.SIGHUP)
    assert process.stdout.read(200)  # still generating
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == 143


# ------------------------------------------------------------------------------------------------------------ chat
def test_chat_continues_after_a_file_name_that_cannot_be_written(clearllama: Run, tiny_gguf: Path) -> None:
    names = ("~nosuchuser/x", "a\0b", "/no/such/folder/x", "x" * 300)
    lines = "\n".join(["hello", *(f"/save {name}" for name in names), "/load " + "x" * 300, "hello", ""])
    result = clearllama("chat", "-m", str(tiny_gguf), "-n", "5", stdin=lines.encode())
    assert result.returncode == 1
    assert result.stderr.count(b": error: ") == 5
    assert result.stderr.count(b"File name too long") == 2
    assert result.stderr.count(b"prompt tokens") == 2


def test_a_long_context_needs_no_memory_until_it_is_filled(clearllama: Run, tmp_path: Path) -> None:
    path = tiny.write_gguf(tmp_path / "x.gguf", metadata={"llama.context_length": 2**31})
    result = clearllama("chat", "-m", str(path), "-n", "5", stdin=b"hello\n")
    assert result.returncode == 0
    assert b"prompt tokens" in result.stderr


CONTROLS = [  # characters that a terminal acts upon
    *map(chr, range(32)),
    "\x7f",
    *map(chr, range(0x80, 0xA0)),
    *"\u202a\u202b\u202c\u202d\u202e",
    *"\u2066\u2067\u2068\u2069",
]


def test_control_characters_are_escaped_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch) -> None:
    """C0 except newline and tab, DEL, C1 and bidirectional controls are escaped; a pipe gets them unchanged.

    Right-to-left text, its marks, combining characters and joined emoji are not changed.
    """
    text = "a".join(CONTROLS)
    harmless = "שלום\u200f العربية e\u0301 👨‍👩‍👧 \ufeff\n\t"
    terminal.write(text + harmless)
    assert capsys.readouterr().out == text + harmless
    terminal.write_json(text)
    assert json.loads(capsys.readouterr().out) == text
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for character in CONTROLS:
        terminal.write(f"a{character}b")
        shown = capsys.readouterr().out
        code = f"\\x{ord(character):02x}" if ord(character) < 256 else f"\\u{ord(character):04x}"
        assert shown == f"a{character}b" if character in "\n\t" else shown in (f"a{code}b", "a\\rb")
        terminal.write_json(character)
        line = capsys.readouterr().out
        assert line[:-1].isprintable()
        assert json.loads(line) == character
    terminal.write(harmless)
    assert capsys.readouterr().out == harmless


def test_the_bare_command_greets_with_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    examples = [line.split()[1:] for line in lines if line.startswith("  clearllama ")]
    assert len(lines) <= 8
    assert len(examples) == 3
    assert {words[0] for words in examples} <= {*cli.COMMANDS}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("gpu_layers 9 requires a GPU; leave gpu_layers out", "--gpu-layers 9 requires a GPU; leave --gpu-layers out"),
        ("compile (--compile) runs on one device; leave out gpu_layers and name one device (--device)",
         "--compile runs on one device; leave out --gpu-layers and name one --device"),
        ("seed must be an integer, got seed", "--seed must be an integer, got seed"),
        ("raise max_seq_len (--max-seq-len)", "raise --max-seq-len"),
        ("top_p must be at most 1, got '/top_p'", "--top-p must be at most 1, got '/top_p'"),
        ("x.jsonl line 2: top_p must be at most 1", "x.jsonl line 2: top_p must be at most 1"),
        ("quantize the weights (--quantize int4)", "quantize the weights (--quantize int4)"),
        ("try dtype='float32' (--dtype float32)", "try --dtype float32"),
        ("use llm.generate(text) (--raw); or llm.chat_format = 'llama3' (--chat-format llama3)",
         "use --raw; or --chat-format llama3"),
        ("seed and top_p are fixed", "seed and top_p are fixed"),
    ],
)  # fmt: skip
def test_a_message_names_options_and_not_parameters_too(message: str, expected: str) -> None:
    assert cli.with_options(terminal.describe(LlamaError(message)), cli.parse(["generate", "hi"])) == expected


def test_help_is_one_screen_and_help_all_the_rest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Abbreviations of options are not accepted."""
    monkeypatch.setenv("COLUMNS", "80")
    parsers = cli.build_parser().commands
    for command in (*cli.COMMANDS, ""):
        for option, code in (("--help", 0), ("--help-all", 0 if command else 2), ("--hel", 2)):
            with pytest.raises(SystemExit) as ended:
                cli.parse([*command.split(), option])
            out = capsys.readouterr().out
            assert (ended.value.code, f"usage: clearllama {command}" in out) == (code, code == 0), command
            if option == "--help":
                assert out.count("\n") <= 24, command
                assert "..." not in out.removeprefix("usage: clearllama COMMAND ..."), "a text is cut"
                listed = out.split("\n\n", 2)[2]
                assert not any(re.search(rf"^  \S.*{name}\b", listed, re.M) for name in RARE), command
            elif code == 0:
                assert all(name in out for action in parsers[command]._actions for name in action.option_strings)


RARE = (
    "--debug",
    "--compile",
    "--rope-factor",
    "--top-k",
    "--regex",
    "--draft",
    "--steer",
    "--parse-special",
    "--chat-format",
)


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_what_every_command_has(command: str) -> None:
    """--quiet, --debug and --help-all; a first sentence for the list of commands; each default in the help."""
    parser = cli.build_parser([command])
    listed, options = parser.format_help(), parser.commands[command]
    assert {"-q", "--quiet", "--debug", "--help-all"} <= options._option_string_actions.keys()
    assert f"  {command}  " in listed
    assert " ".join((options.description or "").split()).split(". ")[0].rstrip(".") + "." in listed
    for action in options._actions:
        if action.default not in (None, False, [], argparse.SUPPRESS):
            assert re.search(r"\(default[: ]", action.help or ""), action


def test_help_imports_one_command_and_nothing_large() -> None:
    """Each of these packages takes at least a tenth of the time of the help."""
    modules, _, _ = imported("generate", "--help")
    assert {name for name in cli.COMMANDS if f"llama.cli.{name}" in modules} == {"generate"}
    assert not modules & {"torch", "numpy", "tokenizers", "multiprocessing", "importlib.metadata", "email"}
