"""Stock lm-eval, its client of completion APIs, against the server: the log-likelihoods of HFLM on the same weights.

The tasks and the arguments are those of docs/guides/evaluate.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_UPDATE_DOWNLOAD_COUNTS", "0")  # read when `datasets` is imported

import datasets
from lm_eval.api.instance import Instance
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table

from llama import loader
from llama.hub import resolve
from llama.tools.convert import convert
from llama.tools.perplexity import nats
from scripts import make_tiny
from tests.server.serving import Running, running

TEXT = " ".join(make_tiny.TEXT.split())
PAGE = (Path(__file__).parents[2] / "docs/guides/evaluate.md").read_text()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("evaluation")
    source = make_tiny.make(root / "meta", "llama-3.1-8b")
    convert(source, root / "hf", "hf")
    return root / "hf"


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    with running(loader.load(folder, dtype="float32", device="cpu"), slots=4) as found:
        yield found


@pytest.mark.parametrize("batch_size", [1, 3])
def test_likelihoods_through_the_server_are_those_of_hflm(folder: Path, server: Running, batch_size: int) -> None:
    requests = [
        Instance(request_type="loglikelihood", doc={}, arguments=(TEXT[5 * i : 5 * i + 40], choice), idx=0)
        for i in range(4)
        for choice in (" the", " dog and man", " a")
    ]
    oracle = HFLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=3)
    client: Any = LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions",
        model="tiny",
        tokenizer=str(folder),
        tokenizer_backend="huggingface",
        add_bos_token=True,  # HFLM does what the tokenizer does by default, and this class does not
        batch_size=batch_size,
        max_length=oracle.max_length,
    )
    expected = oracle.loglikelihood(requests, disable_tqdm=True)
    found = client.loglikelihood(requests, disable_tqdm=True)
    assert [one[0] for one in found] == pytest.approx([one[0] for one in expected], abs=1e-3)
    assert [one[1] for one in found] == [one[1] for one in expected]
    generate = Instance(
        request_type="generate_until", doc={}, arguments=(TEXT[:40], {"until": ["."], "max_gen_toks": 12}), idx=0
    )
    assert client.generate_until([generate], disable_tqdm=True) == oracle.generate_until([generate], disable_tqdm=True)
    open_ends = [
        Instance(
            request_type="generate_until", doc={}, arguments=(TEXT[:40], {"until": until, "max_gen_toks": 12}), idx=0
        )
        for until in ([""], [])
    ]
    (found, expected) = client.generate_until(open_ends, disable_tqdm=True)
    assert found == expected != ""


@pytest.mark.parametrize("which", ["tiny", pytest.param("default", marks=pytest.mark.slow)])
def test_the_scores_of_a_task_are_those_of_direct_passes(
    which: str, folder: Path, server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default model is a GGUF file in 4 bits; the tokenizer of both models is in a folder that we wrote."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    (yaml,), (data,) = (re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL) for kind in ("yaml", "json"))
    (tmp_path / "capitals.jsonl").write_text(data)
    (tmp_path / "capitals.yaml").write_text(yaml.replace("/path/to", str(tmp_path)))
    ((arguments, shown),) = re.findall(r"--model_args (\S+)\n(\| Tasks .*?)```", PAGE, re.DOTALL)
    if which == "tiny":
        llm, found = server.server.llm, evaluate(server, arguments, folder, tmp_path)
    else:
        llm, tokenizer = loader.load(device="cpu"), convert(resolve(), tmp_path / "hf", "hf", dtype=torch.bfloat16).path
        with running(llm) as other:
            found = evaluate(other, arguments, tokenizer, tmp_path)
        assert make_table(found) == shown
    samples = found["samples"]["capitals"]
    assert len(samples) == 4
    for sample in samples:
        for request, ((logprob, _),) in zip(sample["arguments"], sample["resps"], strict=True):
            context, both = (llm.tokenizer.encode(text) for text in (request[0], "".join(request)))
            whole, part = (float(nats(llm.model, [torch.tensor([ids])])[0].sum()) for ids in (both, context))
            assert logprob == pytest.approx(part - whole, abs=1e-4), request
        scores = [logprob for ((logprob, _),) in sample["resps"]]
        assert sample["acc"] == (scores.index(max(scores)) == sample["target"])


def evaluate(server: Running, arguments: str, tokenizer: Path, tasks: Path) -> dict[str, Any]:
    """What the command lm_eval of the page computes, with the address, model and tokenizer of this server."""
    arguments = arguments.replace("http://127.0.0.1:8000", server.url).replace("smollm2-135m-instruct", "tiny")
    return simple_evaluate(  # type: ignore[no-any-return]
        model="local-completions",
        model_args=re.sub("tokenizer=.*", f"tokenizer={tokenizer}", arguments),
        tasks=[str(tasks / "capitals.yaml")],
        task_manager=TaskManager(include_defaults=False),  # the default reads all 14,000 task files
    )
