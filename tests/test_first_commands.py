"""The first commands of people who know another program: each acts as the same in our words, or is answered by them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from llama import __version__, cli
from llama.cli.common import arguments
from llama.sampling import OPTIONS
from llama.tools.families import official

# A first command -> the same in the words of this program
ACTS = {
    # llama.cpp
    "generate -m m -p hi -n 3": "generate hi --model m --max-new-tokens 3",
    "generate hi -hf org/x:Q4_0 -ngl 99": "generate hi --model org/x:Q4_0 --gpu-layers 99",
    "generate hi --hf-repo=org/x --n-gpu-layers=99": "generate hi --model=org/x --gpu-layers=99",
    "generate hi -c 512 -t 2 -s 3 -n 4": "generate hi --max-seq-len 512 --threads 2 --seed 3 --max-new-tokens 4",
    "generate hi -c512 -t2 -n4": "generate hi --max-seq-len 512 --threads 2 --max-new-tokens 4",
    "generate hi -n -1": f"generate hi --max-new-tokens {OPTIONS['max_new_tokens'].metadata['range'][1]}",
    "generate hi -n -2": "generate hi --max-new-tokens -1",
    "generate hi --ctx-size 512 --n-predict 4": "generate hi --max-seq-len 512 --max-new-tokens 4",
    "generate hi --predict 4 -r stop": "generate hi --max-new-tokens 4 --stop stop",
    "generate hi --repeat-penalty 1.1 --temp 0 --top-k 40": "generate hi --repetition-penalty 1.1 --temperature 0 --top-k 40",
    "generate hi --lora a -md d --grammar-file g": "generate hi --adapter a --draft d --grammar g",
    "generate hi -sys x -dev cpu": "generate hi --system x --device cpu",
    "generate -f a.txt": "generate --file a.txt",
    "generate hi -temp 0 -top-k=3 -model m": "generate hi --temperature 0 --top-k 3 --model m",
    "generate hi --rope-scale 4": "generate hi --rope-factor 4",
    "bench m -p 8 -n 2 -r 1": "bench m --prompt-tokens 8 --new-tokens 2 --reps 1",
    "convert a b.gguf --quantize Q4_K_M": "convert a b.gguf --quantize q4_k",
    "serve -m m -c 512 -np 4 -a x --port 80": "serve m --max-seq-len 512 --parallel 4 --alias x --port 80",
    # Ollama
    "run m": "chat -m m",
    "run m hi": "generate -m m hi",
    "run m hi -n 5": "generate -m m hi -n 5",
    "run": "chat",
    "run hf.co/org/x:Q4_0 -sys x": "chat hf.co/org/x:Q4_0 --system x",
    "ls": "list",
    "show m": "inspect m",
    "info m": "inspect m",
    "generate hi --num-ctx 512": "generate hi --max-seq-len 512",
    # vLLM
    "serve --model m --max-model-len 512 --served-model-name x": "serve -m m --max-seq-len 512 --name x",
    "serve m --api-key k --host 0.0.0.0": "serve -m m --api-key k --host 0.0.0.0",
    "complete hi --tensor-parallel-size 2": "generate hi --tensor-parallel 2",
    "bench m": "bench -m m",
    # llm
    "prompt hi -m m --system x": "generate hi --model m --system x",
    "models": "list",
    "chat -m m": "chat m",
    # transformers and the hub's tool
    "download org/x": "pull org/x",
    "generate hi --max_new_tokens 4 --top_p 0.9": "generate hi --max-new-tokens 4 --top-p 0.9",
    "chat m --max_new_tokens=4": "chat -m m --max-new-tokens 4",
    # OpenAI's names
    "generate hi --max_tokens 3 --frequency_penalty 1": "generate hi --max-new-tokens 3 --frequency-penalty 1",
    "generate hi --stop END --seed 1": "generate hi --stop=END --seed=1",
    "serve --max-tokens 5 -ngl 1": "serve --max-tokens 5 --gpu-layers 1",  # an option of its own
}
# A first command -> the words that its one line of error must have
NAMED = {
    # llama.cpp
    "-m m -p hi": "expected a command first, as in clearllama generate TEXT, got '-m'",
    "-hf x/y": "expected a command first, as in clearllama generate TEXT, got '-hf' (see",
    "generate hi -fa on": "unrecognized arguments: -fa; not needed here; leave this out",
    "generate hi -fa on -cnv --mlock": "unrecognized arguments: -fa, --mlock; not needed here; leave this out",
    "generate hi -b5 --no-mmap": "-b, --no-mmap; not needed here",
    "generate hi --jinja --color": "not needed here",
    "generate hi -cnv": "use clearllama chat",
    "generate hi -i": "use clearllama chat",
    "chat -st": "use clearllama generate",
    "generate hi -no-cnv": "use --raw",
    "generate hi -ctk q8_0": "use --kv-cache int8",
    "generate hi -j {}": "use --json-schema FILE",
    "generate hi -hff x.gguf": "use --model ORG/NAME/FILE.gguf",
    "generate hi -ts 3,1": "use --device cuda:0,cuda:1",
    "generate hi --mmproj x": "images are not supported",
    "perplexity -f a.txt": "give the file as an argument",
    "doctor -ngl 99": "-ngl; other commands call it --gpu-layers, but doctor does not have it",
    # Ollama
    "ps": "ps: no model stays loaded between commands; clearllama serve",
    "stop m": "clearllama serve",
    "create m": "use clearllama convert or quantize; a system message is --system",
    "push m": "hf upload",
    "cp a b": "name it with -m",
    "run m hi you": 'put the prompt in quotes: "hi you"',
    "generate hi --format json": "use --json-schema FILE",
    "generate hi --think=false": "use --template-option NAME=VALUE",
    "generate hi --verbose": "not needed here",
    # vLLM
    "serve m --tensor-parallel-size 2": "other commands call it --tensor-parallel, but serve does not have it",
    "serve m --gpu-memory-utilization 0.9": "not needed here",
    "serve m --trust-remote-code": "not needed here",
    # llm
    "hi": "expected a command first, as in clearllama generate TEXT, got 'hi'",
    "templates": "use --chat-format",
    "embed -c hi": "llama.load_model(PATH).hidden(tokens)",
    "generate hi -o temperature 0": "use options, such as --temperature",
    # the hub's tool
    "login": "hf auth login",
    "upload x": "hf upload",
    # slips
    "genrate hi": "got 'genrate'; did you mean generate?",
    "frobnicate": "got 'frobnicate' (see clearllama --help)",
    "generate hi --topp 0.9": "unrecognized arguments: --topp; did you mean --top-p?",
    "generate hi --max-new-token 5": "did you mean --max-new-tokens?",
    "generate hi -hello": "unrecognized arguments: -hello (see",
    "generate hi -mtiny.gguf": "unrecognized arguments: -mtiny.gguf (see",
    "generate hi -qn 5": "unrecognized arguments: -qn; did you mean -q?",
    "generate What is RoPE": 'unrecognized arguments: is RoPE; put the prompt in quotes: "What is RoPE"',
    "generate a -p b": "argument -p/--prompt: not allowed with argument PROMPT",
    "generate hello README.md": "unrecognized arguments: README.md; to use a model, add -m: -m README.md",
    "generate -m x hello README.md": 'README.md; put the prompt in quotes: "hello README.md"',
    "chat m Hello": "unrecognized arguments: Hello; type messages in the chat, or use clearllama generate TEXT -m MODEL",
}


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("words", ACTS)
def test_a_command_of_another_program_acts(words: str) -> None:
    assert cli.parse(words.split()) == cli.parse(ACTS[words].split())


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("words", NAMED)
def test_a_command_of_another_program_is_answered(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(words.split())
    out, err = capsys.readouterr()
    assert (left.value.code, out, err.count("\n")) == (2, "", 1)
    assert NAMED[words] in err


def test_an_answer_names_what_exists() -> None:
    """Every option and command in an answer is one of this program, and a synonym is never an option of its own."""
    commands = cli.build_parser().commands
    options = {option for command in commands.values() for option in command._option_string_actions}
    for answer in arguments.ANSWERS:
        assert {*re.findall(r"(?<!\w)--?[a-z][\w-]*", answer)} <= options, answer
        assert {*re.findall(r"clearllama (\w+)", answer)} <= commands.keys(), answer
    assert arguments.FIELD.keys() <= options | commands.keys() | {"--version"}
    assert not arguments.SYNONYMS.keys() & arguments.ANSWER.keys() - {"-v"}
    assert not arguments.SYNONYMS.keys() & commands.keys()


@pytest.mark.parametrize("words", ["run m", "run -m m", "run m hi"])
def test_a_pipe_is_one_prompt_of_run(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    own = words.replace("run m", "run --model m").replace("run", "generate")
    assert cli.parse(words.split()) == cli.parse(own.split())


@pytest.mark.parametrize("words", ["x -m tiny.gguf", "-n5 x", "-m./x x", "x --stop=-ngl", "-5", "-p x", "-- -ngl"])
def test_right_options_pass(words: str) -> None:
    assert cli.parse(["generate", *words.split()]).command == "generate"


@pytest.mark.parametrize("text", ["-x marks the spot", "--foo-bar baz", "- a list"])
def test_a_text_that_begins_with_a_dash_is_a_prompt(text: str) -> None:
    assert cli.parse(["generate", text]).prompt == text


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("words", ["help", "help generate", "generate -h", "run --help", "-h", "-v", "--version"])
def test_help_and_version_are_found(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.parse(words.split())
    expected = {
        "help": "usage: clearllama COMMAND",
        "-h": "usage: clearllama COMMAND",
        "run --help": "usage: clearllama chat",
    }
    usage = expected.get(words, "usage: clearllama generate" if "generate" in words else f"clearllama {__version__}")
    assert (left.value.code, usage in capsys.readouterr().out) == (0, True)


def test_a_name_in_configs_can_be_inspected(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inspect", "llama-3.2-1b", "--json"]) == 0
    facts, config = json.loads(capsys.readouterr().out), official()["llama-3.2-1b"]
    assert {name: facts[name] for name in ("dim", "n_layers", "vocab_size")} == {
        "dim": config.dim, "n_layers": config.n_layers, "vocab_size": config.vocab_size
    }  # fmt: skip
    parts, layers = facts["parameters_of"], config.n_layers
    assert sum(parts.values()) == facts["parameters"] == config.n_params
    assert parts["embedding"] == config.vocab_size * config.dim
    assert parts["MLP"] == layers * 3 * config.dim * config.hidden_dim
    assert parts["attention"] == layers * 2 * config.dim * config.head_dim * (config.n_heads + config.n_kv_heads)
    assert parts["norms"] == (2 * layers + 1) * config.dim
    assert cli.main(["study", "scale", "-m", "llama-3.2-1b", "--json"]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert settings == {"head_dim": 64, "theta": 500000.0, "context": 8192, "factor": 32.0}


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
def test_bash_completes_commands_options_choices_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert cli.main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    (tmp_path / "model.gguf").touch()
    script += """
for line in "ge" "generate --max-s" "convert a b --to g" "inspect mod" "chat -m mod"; do
    COMP_WORDS=(clearllama $line) COMP_CWORD=$(set -- $line; echo $#) COMPREPLY=()
    _shtab_clearllama clearllama
    echo "${COMPREPLY[*]}"
done 2> /dev/null"""
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["generate", "--max-seq-len", "gguf", "model.gguf", "model.gguf"]
    assert cli.main(["completion", "ksh"]) == 2
    assert "known: bash, zsh" in capsys.readouterr().err
