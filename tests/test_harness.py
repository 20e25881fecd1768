"""`clearllama evaluate` against lm-eval's own class for Hugging Face models, HFLM, with the same weights."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")  # read when `datasets` is imported
pytest.importorskip("lm_eval")

import datasets
from lm_eval.api.instance import Instance
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoTokenizer

from llama import loader
from llama.cli import main
from llama.errors import ContextLengthError, LlamaError, TemplateError, UsageError
from llama.study.perplexity import tiny_folder
from llama.text import Llama
from llama.tools import harness
from llama.tools.convert import convert
from scripts import make_tiny

from . import tiny

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOW = 64
KINDS = ("llama-2-7b", "llama-3.1-8b", "chatml")
TEXT = " ".join(make_tiny.TEXT.split())
BATCH_SIZES = (1, 3, 16)


class Model(NamedTuple):
    """One set of random weights, as this package and as transformers load it."""

    llm: Llama
    oracle: Any  # HFLM


@pytest.fixture(scope="module", params=KINDS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """SentencePiece and tiktoken in Meta's files, which add begin of text, and a GGUF file that does not."""
    root = tmp_path_factory.mktemp("harness")
    if request.param == "chatml":  # no id without a token: transformers would choose it, this package does not
        size = len(tiny.byte_vocabulary()["tokenizer.ggml.tokens"])
        source = tiny.write_gguf(root / "tiny.gguf", dataclasses.replace(tiny.CONFIG, vocab_size=size))
    else:
        source = make_tiny.make(root / "meta", request.param)
    convert(source, root / "hf", "hf")
    llm = loader.load(source, dtype="float32", device="cpu", max_seq_len=WINDOW)
    # Its cache of logits confuses requests of one text that begin at different ids.
    options: dict[str, Any] = {"batch_size": 3, "max_length": WINDOW, "logits_cache": False}
    return Model(llm, HFLM(pretrained=str(root / "hf"), dtype="float32", device="cpu", **options))


@pytest.fixture(autouse=True)
def _own_data_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")


def instances(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=one, idx=0) for one in arguments]


def controls(llm: Llama) -> tuple[str, str]:
    """The strings of begin of text and of another control token."""
    names = {id: name for name, id in llm.tokenizer.control.items()}
    return names[llm.tokenizer.bos_id or 0], names[max(llm.tokenizer.stop_ids)]


def texts(llm: Llama) -> list[str]:
    bos, end = controls(llm)
    return [
        *("", " ", "the dog", " the dog", "the dog ", "a\n\n b", "über 😀", f"{bos}the dog", f" {bos} the"),
        *(f"the{end}dog", f"{end}", f"the {end} dog{end}{bos}", "<|nothing|> [INST]", TEXT),
    ]


def pairs(llm: Llama) -> list[tuple[str, str]]:
    """Contexts and continuations with everything that HFLM has a rule for."""
    bos, end = controls(llm)
    found = [(TEXT[7 * i : 7 * i + n], choice) for i, n in ((1, 9), (2, 30), (3, 60), (4, 300))
             for choice in (" the", " a", " dog and man", " x")]  # fmt: skip
    return [
        *found,
        *(("", " the dog"), ("", "the"), ("", f"{bos}a dog"), (f"{bos}the", " dog"), (f"the{end} dog", f" man{end}")),
        *(("the dog  ", " bites"), ("the dog ", "bites"), ("the dog\n \n", "bites"), ("the dog", "  "), ("  x", "\n")),
        ("the dog ", ""),
    ]


# ------------------------------------------------------------------------------------------------------ per request
def test_ids_are_those_of_transformers(model: Model) -> None:
    ours, oracle = harness.LanguageModel(model.llm, 1), model.oracle
    assert ours.prefix_token_id == oracle.prefix_token_id
    assert ours.eot_token_id == oracle.eot_token_id
    for text in texts(model.llm):
        for special in (None, False, True):
            assert ours.tok_encode(text, special) == oracle.tok_encode(text, special), (text, special)


def test_a_text_without_context_needs_a_token(tmp_path: Path, tiny_gguf: Path) -> None:
    """As in Qwen2's folders, config.json names an id of begin of text, and tokenizer_config.json has none."""
    convert(tiny_gguf, tmp_path / "hf", "hf")
    file = tmp_path / "hf" / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "bos_token": None}))
    llm, theirs = loader.load(tmp_path / "hf", device="cpu"), AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert (llm.tokenizer.bos_id, theirs.bos_token_id) == (1, None)
    assert harness.LanguageModel(llm, 1).prefix_token_id == theirs.eos_token_id == 2
    ours = harness.LanguageModel(loader.load(tiny_folder(), dtype="float32", device="cpu"), 2)
    assert len(ours.loglikelihood(instances("loglikelihood", ("In the", " beginning")))) == 1
    with pytest.raises(UsageError, match="needs a begin-of-text or end-of-text token"):
        ours.loglikelihood(instances("loglikelihood", ("", "In the")))


def test_log_likelihoods(model: Model) -> None:
    requests = instances("loglikelihood", *pairs(model.llm))
    expected = model.oracle.loglikelihood(requests, disable_tqdm=True)
    for batch_size in BATCH_SIZES:
        ours = harness.LanguageModel(model.llm, batch_size)
        found = ours.loglikelihood(requests)
        assert [one[1] for one in found] == [one[1] for one in expected]
        assert [one[0] for one in found] == pytest.approx([one[0] for one in expected], abs=5e-5)
        assert ours.truncated >= 4


def test_rolling_log_likelihoods(model: Model) -> None:
    requests = instances("loglikelihood_rolling", *((text,) for text in (*texts(model.llm), TEXT[:60], TEXT * 2)))
    expected = model.oracle.loglikelihood_rolling(requests, disable_tqdm=True)
    for batch_size in BATCH_SIZES:
        found = harness.LanguageModel(model.llm, batch_size).loglikelihood_rolling(requests)
        assert found == pytest.approx(expected, abs=1e-3, rel=1e-7)


def test_generated_texts(model: Model) -> None:
    if "SentencePiece" in model.llm.tokenizer.kind:
        pytest.skip("random weights produce bytes that are not UTF-8, which the two packages decode differently")
    free = model.oracle.generate_until(
        instances("generate_until", *((TEXT[9 * i :][:40], {"until": [], "max_gen_toks": 20}) for i in range(3)))
    )
    assert all(len(text) > 8 for text in free)
    requests = instances(
        "generate_until",
        *((TEXT[9 * i :][:40], {"until": [text[5:7]], "max_gen_toks": 20}) for i, text in enumerate(free)),
        (TEXT[:40], {"until": free[0][4], "do_sample": False, "max_tokens": 20}),
        (TEXT, {"until": ["\n\n"], "max_gen_toks": 24, "temperature": 0.0}),
        (TEXT[:50], {"until": ["\n\n", *controls(model.llm)], "max_gen_toks": 30, "repetition_penalty": 1.3}),
    )
    expected = model.oracle.generate_until(requests)
    assert expected[0] == free[0].split(free[0][5:7])[0]
    for batch_size in BATCH_SIZES:
        assert harness.LanguageModel(model.llm, batch_size).generate_until(requests) == expected


def test_chat_prompts(model: Model) -> None:
    oracle, ours = model.oracle, harness.LanguageModel(model.llm, 1)
    if model.llm.chat_template is None:  # Meta's files have none, so the one of the built-in format is used
        oracle.tokenizer.chat_template = ours.chat_template(True)
    turns = {"system": "Be brief.", "user": "the dog ", "assistant": "bites "}
    history = [{"role": role, "content": content} for role, content in turns.items()]
    for messages, question in ((history, False), (history[:2], True), (history[1:2], True)):
        text = ours.apply_chat_template(messages, question)
        assert text == oracle.apply_chat_template(messages, question)
        assert ours.tok_encode(text) == oracle.tok_encode(text)


# ---------------------------------------------------------------------------------------------------- whole tasks
MEAN = {"aggregation": "mean", "higher_is_better": True}
BITS = {"metric": "bits_per_byte", "aggregation": "bits_per_byte", "higher_is_better": False}
TASKS: dict[str, dict[str, Any]] = {
    "choice": {
        "output_type": "multiple_choice", "doc_to_text": "{{q}}", "doc_to_choice": "{{choices}}",
        "doc_to_target": "answer", "num_fewshot": 1, "fewshot_split": "test",
        "metric_list": [{"metric": "acc", **MEAN}, {"metric": "acc_norm", **MEAN}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}", "metric_list": [BITS],
    },
    "until": {
        "output_type": "generate_until", "doc_to_text": "{{q}}", "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 6, "do_sample": False},
        "metric_list": [{"metric": "exact_match", **MEAN}],
    },
}  # fmt: skip


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder with a multiple-choice task, a perplexity task and a generation task, and their data."""
    folder, words = tmp_path / "tasks", TEXT.split()
    folder.mkdir()
    choices: list[dict[str, Any]] = [
        {"q": " ".join(words[i : i + 6 + i]), "choices": [words[i + 6 + i], words[i], "x y"], "answer": i % 3}
        for i in range(8)
    ]
    for name, config in TASKS.items():
        rows = [{"text": TEXT[:n]} for n in (40, 200, 700)] if name == "rolling" else choices
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **config, **source}))
    return folder


@pytest.mark.parametrize("model", ["chatml"], indirect=True)
@pytest.mark.parametrize("chat", [False, True])
def test_the_scores_of_tasks(model: Model, tasks: Path, chat: bool) -> None:
    options: dict[str, Any] = {"apply_chat_template": chat, "bootstrap_iters": 20}
    files = [str(tasks / f"{name}.yaml") for name in ("choice", "rolling", "until")]
    found = harness.evaluate(model.llm, harness.load_tasks(files), batch_size=4, **options)
    manager = TaskManager(include_defaults=False)
    expected = simple_evaluate(model=model.oracle, tasks=harness.load_tasks(files), task_manager=manager, **options)
    assert expected is not None
    for task, scores in expected["results"].items():
        ours = found["results"][task]
        assert ours.keys() == scores.keys()
        for name, score in scores.items():
            assert ours[name] == (pytest.approx(score, rel=1e-5) if isinstance(score, float) else score), (task, name)
        for one, other in zip(found["samples"][task], expected["samples"][task], strict=True):
            assert one["prompt_hash"] == other["prompt_hash"]


def test_tasks_are_named_by_files_and_folders_and_a_wrong_one_is_one_error(
    tiny_llm: Llama, tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = harness.load_tasks([str(tasks)])
    assert {one.task_name for one in found} == {"choice", "rolling", "until"}
    with pytest.raises(TemplateError, match="no chat template"):
        harness.evaluate(Llama(tiny_llm.model, tiny_llm.tokenizer), found, batch_size=1, apply_chat_template=True)
    with pytest.raises(UsageError, match="--tasks arc_esy: found no task"):
        harness.load_tasks([str(tasks), "arc_esy"])
    for content in ("- a", "a: [", "b: 1"):
        (tasks / "bad.yaml").write_text(content)
        with pytest.raises(LlamaError, match="lm-eval: "):
            harness.load_tasks([str(tasks / "bad.yaml")])
    capsys.readouterr()
    for option in ("--limit=1.5", "--log-samples"):
        assert main(["evaluate", "--tasks", "arc_easy", option]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n"), option.split("=")[0] in err) == ("", 1, True)


def test_the_command(tiny_gguf: Path, tasks: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output, model = tmp_path / "results.json", ("-m", str(tiny_gguf), "--dtype", "float32", "--max-seq-len", "64")
    command = ["evaluate", "--tasks", f"{tasks / 'choice.yaml'},{tasks / 'until.yaml'}", "--limit", "4", *model]
    assert main([*command, "--output", str(output), "--log-samples", "--json"]) == 0
    out, err = capfd.readouterr()
    results = json.loads(out)
    assert results == json.loads(output.read_text())
    assert results["n-samples"]["choice"] == {"original": 8, "effective": 4}
    assert results["config"]["model_args"]["model"] == str(tiny_gguf)
    assert "requests were longer than the context of 64" in err
    lines = (tmp_path / "samples_choice_results.jsonl").read_text().splitlines()
    assert [json.loads(line)["doc_id"] for line in lines] == [0, 1, 2, 3]
    assert main([*command, "-q"]) == 0
    out, err = capfd.readouterr()
    assert out.startswith("|Tasks |")
    assert err == ""


# ------------------------------------------------------------------------------------- what HFLM ends in an assertion
@pytest.mark.parametrize("model", ["chatml"], indirect=True)
def test_requests_that_end_hflm(model: Model) -> None:
    ours = harness.LanguageModel(model.llm, 4)
    space, expected = ours.loglikelihood(instances("loglikelihood", (" ", "dog"), ("", " dog")))
    assert space == expected
    for pair, message in ((("the", ""), "adds no token"), (("h", "e"), "adds no token"), (("a", TEXT), "continuation")):
        with pytest.raises((UsageError, ContextLengthError), match=message):
            ours.loglikelihood(instances("loglikelihood", pair))
    for settings, message in (({"max_gen_toks": 64}, "no room in the context of 64"), ({"num_beams": 10}, "num_beams")):
        with pytest.raises(UsageError, match=message):
            ours.generate_until(instances("generate_until", ("the", {"until": [], "max_gen_toks": 9, **settings})))
