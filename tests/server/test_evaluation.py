"""Stock lm-eval, its client of completion APIs, against the server: the log-likelihoods of HFLM on the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI

from llama import loader
from llama.tools.convert import convert
from scripts import make_tiny
from tests.server.serving import Running, running

TEXT = " ".join(make_tiny.TEXT.split())


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
