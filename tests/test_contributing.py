"""CONTRIBUTING.md: its recipes, applied to a copy of the package, work on the command line, in Python and in the server.

The added scaling equals the scaling `divisors` of the package as it is. The added filter at its limit leaves one token,
so that sampling equals greedy decoding. The added format holds the weights of the tiny model. The added kind of tokenizer
file has that model's tokens, the single bytes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import requests
from safetensors.torch import save_file

import llama
from llama.checkpoint.base import Checkpoint
from llama.study.perplexity import tiny_folder
from llama.tokenizer import Tokenizer

from .forked import Forked
from .patience import PATIENCE

Run = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).resolve().parents[1]
PAGE, NAME = (ROOT / "CONTRIBUTING.md").read_text(), r"`([A-Z]\w+)`"
RECIPES = PAGE.split("## Recipes")[1].split("\n## ")[0]
DIFFS = re.findall(r"```diff\n(.*?)```", RECIPES, re.DOTALL)
PROMPT, TOKENS, SCALING = "And God said", 60, {"rope_type": "alternate", "factor": 4.0}


def apply(diff: str, root: Path) -> None:
    """Make the changes of a recipe. The old lines of each place must be in the file exactly once."""
    for name, changes in re.findall(r"^--- (\S+)\n(.*?)(?=^---|\Z)", diff, re.DOTALL | re.MULTILINE):
        file = root / name
        text = file.read_text() if file.exists() else ""
        for place in changes.split("@@\n"):
            old, new = ("".join(line[1:] for line in place.splitlines(True) if line[0] != sign) for sign in "+-")
            assert text.count(old) == 1 or text == old == "", f"{name} does not have once:\n{old}"
            text = text.replace(old, new) if old else new
        file.write_text(text)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with all recipes, and the tiny model in the added format."""
    root = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "llama", root / "llama")
    shutil.copy(ROOT / "tests/data/own_format.py", root / "llama/checkpoint")
    shutil.copy(ROOT / "tests/data/own_tokenizer.py", root / "llama/tokenizer")
    for diff in DIFFS:
        apply(diff, root)
    model = llama.load_model(tiny_folder(), dtype="float32")
    (root / "model").mkdir()
    save_file(
        {name: weight.contiguous() for name, weight in model.state_dict().items()}, root / "model/state.safetensors"
    )
    sizes = {name: value for name, value in asdict(model.config).items() if value}
    (root / "model/sizes.json").write_text(json.dumps(sizes))
    shutil.copy(tiny_folder() / "tokenizer.json", root / "model")
    return root


@pytest.fixture(scope="module")
def expected() -> str:
    """The greedy continuation by the package as it is."""
    pairs = llama.load_model(tiny_folder()).config.head_dim // 2
    scaling = {"rope_type": "divisors", "divisors": [1.0, 4.0] * (pairs // 2)}
    text = llama.load(tiny_folder(), dtype="float32", rope_scaling=scaling).generate(PROMPT, max_new_tokens=TOKENS).text
    assert text != llama.load(tiny_folder(), dtype="float32").generate(PROMPT, max_new_tokens=TOKENS).text
    return text


@pytest.fixture(scope="module")
def run(copy: Path) -> Iterator[Run]:
    """Run a command or code with the copy of the package; return exit code, stdout and stderr."""
    forked = Forked(copy)

    def run(*args: str, **code: str) -> tuple[int, str, str]:
        done = forked.run(args, None, cwd=copy, **code)
        return done.returncode, done.stdout.decode(), done.stderr.decode()

    yield run
    forked.close()


@pytest.mark.parametrize("part", [part for part in re.split(r"\n\n|\n(?=\|)", PAGE) if "`llama/" in part])
def test_a_registry_or_class_is_in_the_file_that_the_page_names(part: str) -> None:
    paths = [ROOT / name for name in re.findall(r"`(llama/[\w./]+)`", part)]
    files = [file for path in paths for file in (path.glob("*.py") if path.is_dir() else [path])]
    code = "\n".join(file.read_text() for file in files)
    assert [name for name in re.findall(NAME, part) if not re.search(rf"^(class )?{name}\b", code, re.M)] == []


def test_a_recipe_has_at_most_ten_new_lines_and_those_of_classes_name_every_member() -> None:
    assert all(len(re.findall(r"^\+.", diff, re.MULTILINE)) <= 10 for diff in DIFFS)
    for base in (Checkpoint, Tokenizer):
        needed = base.__abstractmethods__ | (base.__annotations__.keys() - vars(base).keys())
        recipe = next(part for part in RECIPES.split("\n\n") if f"subclass of `{base.__name__}`" in part)
        assert needed <= {*re.findall(r"`(\w+)`", recipe)}


def test_python_and_the_command_without_a_model(run: Run, expected: str) -> None:
    options = f"max_new_tokens={TOKENS}, temperature=1.5, epsilon=1.0, seed=0"
    call = f"llama.load('model', dtype='float32', rope_scaling={SCALING}).generate({PROMPT!r}, {options})"
    command = f"llama.cli.main(['ids', 'model', {PROMPT!r}, '--json'])"
    code, text, errors = run(code=f"import llama, llama.cli; {command}; print({call}.text, end='')")
    assert (code, text) == (0, f"{[*PROMPT.encode()]}\n{expected}"), errors


def test_a_subcommand_is_like_the_others(run: Run) -> None:
    """Its help, --quiet and --debug, its errors in one line and their exit codes need no further line of code."""
    runs = {
        "--help": (0, "  ids         Print the token ids of a text.\n", ""),
        "ids --help": (0, "usage: clearllama ids PATH_OR_NAME TEXT\n\nPrint the token ids of a text.\n", ""),
        "ids --help-all": (0, "Print the token ids of a text. The tokenizer is that of the model.\n", ""),
        "ids model hi": (0, "[104, 105]\n", "clearllama: 2 tokens\n"),
        "ids model hi --quiet": (0, "[104, 105]\n", ""),
        "ids model hi --jsn": (2, "", "clearllama ids: error: unrecognized arguments: --jsn; did you mean --json?"),
        "ids model": (2, "", "the following arguments are required: TEXT (see clearllama ids --help)\n"),
        "ids nowhere hi": (1, "", "clearllama: error: there is no file or folder 'nowhere'"),
        "ids nowhere hi --debug": (1, "", "Traceback (most recent call last):\n"),
    }
    for words, (expected, text, line) in runs.items():
        code, out, errors = run(*words.split())
        assert code == expected, (words, errors)
        assert text in out, (words, out)
        assert line in errors, (words, errors)
        assert errors.count("\n") == (line != "") or "--debug" in words, errors


def test_command_line(run: Run, expected: str) -> None:
    options = ("--temperature", "1.5", "--epsilon", "1", "-n", str(TOKENS), "--dtype", "float32")
    scaling = ("--rope-scaling", "alternate", "--rope-factor", "4")
    code, text, errors = run("generate", "-m", "model", PROMPT, *options, *scaling, "--json")
    assert code == 0, errors
    assert json.loads(text)["text"] == expected


def test_tokenizer_file(copy: Path, run: Run, expected: str) -> None:
    """A tokenizer.model of the added kind: long tokens win, every text survives, and text is never a control token."""
    single, texts = [bytes([byte]) for byte in range(256)], ["God said", "<s>", "é\n\0 😀", ""]
    for name, tokens in (("bytes", single), ("words", [*single, b"God", b"God ", "é".encode()])):
        shutil.copytree(tiny_folder(), copy / name, ignore=shutil.ignore_patterns("tokenizer*", "*.txt"))
        lines = [token.hex() for token in tokens] + ["<s>", "</s>"]
        (copy / name / "tokenizer.model").write_text("\n".join(lines) + "\n")
    code = f"""
import json, llama
tokenizer = llama.load_tokenizer("words")
ids = [tokenizer.encode(text) for text in {texts!r}]
parsed = tokenizer.encode("<s>God</s>", parse_special=True), tokenizer.encode("", bos=True, eos=True)
print(json.dumps([ids, [tokenizer.decode(one) for one in ids], *parsed, tokenizer.decode(parsed[0])]))
options = dict(dtype="float32", rope_scaling={SCALING!r})
print(llama.load("bytes", **options).generate({PROMPT!r}, max_new_tokens={TOKENS}).text, end="")
"""
    exit_code, text, errors = run(code=code)
    assert exit_code == 0, errors
    first, answer = text.split("\n", 1)
    ids = [[257, *b"said"], [*b"<s>"], [258, *"\n\0 😀".encode()], []]
    assert json.loads(first) == [ids, texts, [259, 256, 260], [259, 260], "God"]
    assert answer == expected
    exit_code, _, errors = run("convert", "bytes", "written", "--to", "hf")
    assert "can't be written as GGUF or tokenizer.json" in errors
    assert exit_code == 1


def test_server(copy: Path, expected: str) -> None:
    """The added endpoint has the text of the usual one, at once and as a stream; its errors are objects, too."""
    command = [sys.executable, "-m", "llama", "serve", "-m", "model", "--port", "0", "--dtype", "float32"]
    scaling = ["--rope-scaling", "alternate", "--rope-factor", "4"]
    env = {**os.environ, "PYTHONPATH": str(copy)}
    process = subprocess.Popen(command + scaling, cwd=copy, env=env, text=True, stderr=subprocess.PIPE)
    url = next(match[0] for line in process.stderr or () if (match := re.search(r"http://\S+:\d+", line)))
    body = {"model": "model", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 1.5, "epsilon": 1, "seed": 0}

    def post(path: str, **more: object) -> str:
        return requests.post(url + path, json={**body, **more}, timeout=PATIENCE).text

    try:
        assert json.loads(post("/v1/completions"))["choices"][0]["text"] == expected
        assert json.loads(post("/completion")) == [{"index": 0, "content": expected, "stop": True}]
        both = json.loads(post("/completion", prompt=[PROMPT, PROMPT]))
        assert [one["index"] for one in both] == [0, 1]
        *begun, end = [json.loads(event[6:])[0] for event in post("/completion", stream=True).split("\n\n")[:-1]]
        assert "".join(part["content"] for part in [*begun, end]) == expected
        assert len(begun) > TOKENS / 2
        assert {part["stop"] for part in begun} == {not end["stop"]} == {False}
        assert "unknown key 'x'" in json.loads(post("/completion", x=1))["error"]["message"]
    finally:
        process.terminate()
        process.communicate(timeout=PATIENCE)
