"""A trace compared with the untraced model, with transformers, and with sums written out in numpy."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import hashlib
import html.parser
import io
import json
import math
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from py_mini_racer import MiniRacer
from torch import Tensor

from llama.cli import main
from llama.inside import trace as tracing
from llama.inside import trace_page
from llama.inside.hooks import activations
from llama.inside.intervene import Intervention, ablated
from llama.loader import load_model
from llama.model import Transformer
from llama.rope import to_layout
from llama.study.perplexity import tiny_folder
from llama.text import Llama

from .. import tiny

pytestmark = pytest.mark.usefixtures("one_thread")

TEXT = (tiny_folder() / "held-out.txt").read_text()[:200]
IDS = tiny.random_tokens(11)[0].tolist()
ABOUT = {
    **{"model": "tiny", "prompt": "x", "dtype": "float32"},
    **{"n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16},
}
NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)>{{data}}&amp;<!--\u2028"


def fingerprint(model: Transformer) -> list[Any]:
    """Identities of everything that recording and interventions change."""
    parts: list[Any] = [model.rope, model.config, model.layers, *model.layers]
    for block in model.layers:
        parts += [block.attention.attend, block.attention.apply_rotary_emb]
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    return [*map(id, parts), hooks]


# ------------------------------------------------------------------------------------------------------- recording
@pytest.mark.parametrize("attention", ["reference", "sdpa"])
@pytest.mark.parametrize("rope", ["complex", "real", "half"])
def test_tracing_leaves_the_logits_and_the_model_unchanged(attention: str, rope: str) -> None:
    model = tiny.model(attention=attention, rope=rope)
    before, expected = fingerprint(model), model(torch.tensor([IDS]))[0]
    traced = tracing.trace(model, IDS)
    assert torch.equal(traced.logits, expected)
    assert fingerprint(model) == before
    assert torch.equal(model(torch.tensor([IDS]))[0], expected)


def test_weights_are_causal_distributions_and_equal_in_all_forms_of_rope() -> None:
    traced = tracing.trace(tiny.model(), IDS)
    assert traced.weights.shape == (2, 4, 11, 11)
    torch.testing.assert_close(traced.weights.sum(-1), torch.ones(2, 4, 11), rtol=0, atol=1e-6)
    assert bool((traced.weights.triu(1) == 0).all())
    half = tiny.model(rope="half")
    state = tiny.weights()
    half.load_state_dict({name: to_layout(name, tensor, 16, "interleaved", "half") for name, tensor in state.items()})
    other = tracing.trace(half, IDS)
    torch.testing.assert_close(other.weights, traced.weights, rtol=0, atol=1e-6)
    torch.testing.assert_close(other.pair_norms, traced.pair_norms, rtol=1e-5, atol=0)


# ------------------------------------------------------------------------------------------------- derived quantities
def test_a_row_of_the_lens_equals_a_model_that_ends_after_that_layer() -> None:
    model = tiny.model(attention="reference")
    tokens = torch.tensor([IDS])
    with tracing.recording(model) as seen:
        logits = model(tokens)[0]
    assert torch.equal(model.output(model.norm(seen.hidden[-1][None]))[0], logits)
    lens = tracing.logit_lens(model, seen.hidden, logits, top=5)
    assert lens.top_ids.shape == (3, 11, 5)
    shorter = tiny.model(attention="reference")
    shorter.layers = shorter.layers[:1]
    for row, expected in ((1, shorter(tokens)[0]), (2, logits)):
        p = np.exp(tiny.as_numpy(expected))
        p /= p.sum(-1, keepdims=True)
        final = np.exp(tiny.as_numpy(logits))
        final /= final.sum(-1, keepdims=True)
        order = np.argsort(-p, axis=-1)[:, :5]
        assert np.array_equal(lens.top_ids[row].numpy(), order)
        assert np.abs(lens.top_p[row].numpy() - np.take_along_axis(p, order, -1)).max() < 1e-6
        rank = [1 + int((p[t] > p[t, final[t].argmax()]).sum()) for t in range(11)]
        assert lens.rank[row].tolist() == rank
        kl = (final * np.log(final / p)).sum(-1)
        assert np.abs(lens.kl[row].numpy() - kl).max() < 1e-5
    assert lens.rank[2].tolist() == [1] * 11
    assert float(lens.kl[2].max()) == 0


def test_surprisal_is_the_cross_entropy_of_each_token() -> None:
    model = tiny.model()
    logits = model(torch.tensor([IDS]))[0]
    expected = F.cross_entropy(logits[:-1].double(), torch.tensor(IDS[1:]), reduction="none")
    torch.testing.assert_close(tracing.surprisal(logits, torch.tensor(IDS)), expected, rtol=0, atol=1e-12)


def softmaxed(seed: int, *shape: int) -> Tensor:
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return scores.masked_fill(torch.ones(shape[-2:]).triu(1).bool(), -torch.inf).softmax(-1)


@pytest.mark.parametrize("length", [1, 2, 9])
def test_measures_of_heads_equal_loops(length: int) -> None:
    weights = softmaxed(0, 2, 3, length, length)
    profile, rest = tracing.distance_profile(weights), tracing.distance_profile(weights, skip_first=True)
    assert profile.shape == (2, 3, length)
    assert rest.shape == (2, 3, length - 1)
    w = tiny.as_numpy(weights)
    for head in np.ndindex(2, 3):
        for d in range(length):
            all_keys = [w[head][t, t - d] for t in range(length) if t - d >= 0]
            assert float(profile[head][d]) == pytest.approx(sum(all_keys) / len(all_keys), abs=1e-6)
            later = [w[head][t, t - d] for t in range(length) if t - d >= 1]
            if later:
                assert float(rest[head][d]) == pytest.approx(sum(later) / len(later), abs=1e-6)
        able = [w[head][t, 0] for t in range(length) if t > 0] or [1.0]
        assert float(tracing.sink(weights)[head]) == pytest.approx(sum(able) / len(able), abs=1e-6)
        entropies = [-sum(p * math.log(p) for p in w[head][t] if p > 0) for t in range(length)]
        assert float(tracing.spread(weights)[head]) == pytest.approx(np.exp(entropies).mean(), abs=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_the_effects_of_heads_are_their_terms_of_the_answers_logit_minus_that_of_the_second(bias: bool) -> None:
    """The last hidden state is a sum of terms; with the norm's scale fixed, so is a difference of two logits.

    A direction added to all rows of the output matrix, which changes no probability, changes no effect.
    """
    config = dataclasses.replace(tiny.CONFIG, attention_bias=bias)
    model = tiny.model(config, attention="reference")
    generator = torch.Generator().manual_seed(3)
    model.norm.weight.data = torch.rand(model.norm.weight.shape, generator=generator) + 0.5
    if bias:
        for block in model.layers:
            block.attention.wo.bias.data = torch.randn(config.dim, generator=generator)
    terms: list[Tensor] = []
    inputs: list[Tensor] = []
    hooks = [model.tok_embeddings.register_forward_hook(lambda *a: terms.append(a[2][0, -1]))]
    for block in model.layers:
        hooks.append(block.attention.register_forward_hook(lambda *a: terms.append(a[2][0, -1])))
        hooks.append(block.attention.wo.register_forward_hook(lambda *a: inputs.append(a[1][0][0, -1])))
        hooks.append(block.feed_forward.register_forward_hook(lambda *a: terms.append(a[2][0, -1])))
    logits = model(torch.tensor([IDS]))[0, -1]
    for hook in hooks:
        hook.remove()
    second, answer = logits.argsort()[-2:].tolist()
    total = np.sum([tiny.as_numpy(term) for term in terms], axis=0)
    row = tiny.as_numpy(model.output.weight[answer] - model.output.weight[second])
    readout = tiny.as_numpy(model.norm.weight) * row / np.sqrt((total**2).mean() + config.norm_eps)
    assert float(total @ readout) == pytest.approx(float(logits[answer] - logits[second]), abs=1e-4)

    effects = tracing.trace(model, IDS).effects
    assert effects.shape == (2, 4)
    model.output.weight.data = model.output.weight + torch.randn(config.dim, generator=generator)
    assert torch.allclose(tracing.trace(model, IDS).effects, effects, atol=1e-4)
    for layer, block in enumerate(model.layers):
        wo = tiny.as_numpy(block.attention.wo.weight)  # (C, H * D)
        for head in range(4):
            part = slice(16 * head, 16 * (head + 1))
            alone = wo[:, part] @ tiny.as_numpy(inputs[layer])[part]
            assert float(effects[layer, head]) == pytest.approx(float(alone @ readout), abs=1e-4)
        whole = tiny.as_numpy(terms[1 + 2 * layer])
        if bias:
            whole = whole - tiny.as_numpy(block.attention.wo.bias)
        assert float(effects[layer].sum()) == pytest.approx(float(whole @ readout), abs=1e-4)


@pytest.mark.parametrize("off", [(), ((1, 2),)])
def test_source_effects_are_what_an_answer_loses_without_a_value(off: tuple[tuple[int, int], ...]) -> None:
    """Their sums are the heads' effects. Each is found again by setting one value to zero in one head of the layer."""
    model = tiny.model()
    with torch.no_grad(), ablated(model, off), activations(model, "v.*") as values, tracing.recording(model) as seen:
        answer = int(model(torch.tensor([IDS]))[0, -1].argmax())
        direction = tracing.readout(model, seen, answer)
        stacked = [values[f"v.{layer}"][0].transpose(0, 1) for layer in range(2)]  # (KV, T, D) each
        found = tracing.source_effects(model, seen, direction, stacked)  # (L, H, T)
        assert torch.allclose(found.sum(-1), tracing.direct_effects(model, seen, direction), atol=1e-5)
        assert [int(row.abs().sum() == 0) for row in found.flatten(0, 1)] == [
            int(divmod(i, 4) in off) for i in range(8)
        ]
        for layer, head, source in ((0, 0, 0), (0, 3, 2), (1, 1, len(IDS) - 1)):
            wo = model.layers[layer].attention.wo.weight[:, 16 * head : 16 * (head + 1)]  # (C, D)
            weight = seen.weights[layer][head, -1, source]
            added = wo @ (weight * stacked[layer][head // 2, source])  # (C,)
            assert float(found[layer, head, source]) == pytest.approx(float(added @ direction), abs=1e-5)


def test_pair_norms_are_means_over_all_queries_and_visible_keys() -> None:
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(5, 4, 6, generator=generator), torch.randn(5, 2, 6, generator=generator)
    expected = np.zeros((4, 3))
    for head in range(4):
        for pair in range(3):
            products = [
                math.hypot(*q[m, head, 2 * pair : 2 * pair + 2].tolist())
                * math.hypot(*k[n, head // 2, 2 * pair : 2 * pair + 2].tolist())
                for m in range(5)
                for n in range(m + 1)
            ]
            expected[head, pair] = sum(products) / len(products)
    assert np.abs(tracing.pair_norms(q, k).numpy() - expected).max() < 1e-12


@pytest.mark.parametrize("rope", ["complex", "real", "half"])
def test_the_traced_frequencies_are_those_of_the_rotation(rope: str) -> None:
    model = tiny.model(rope=rope)
    traced = tracing.trace(model, IDS)
    ones = torch.zeros(1, 11, 1, 16)
    ones[..., slice(0, 8) if rope == "half" else slice(0, 16, 2)] = 1  # every pair is (1, 0)
    turned, _ = tiny.rotate(model.rope, ones, ones, torch.arange(11), 11)
    points = torch.view_as_complex(turned[0, :, 0].unflatten(-1, (-1, 2)).contiguous())  # (T, D/2)
    expected = torch.polar(torch.ones(11, 8), torch.arange(11.0)[:, None] * traced.inv_freq)
    torch.testing.assert_close(points, expected, rtol=0, atol=1e-6)


def facts(model: Transformer, llm: Llama, ids: list[int], intervention: Intervention | None = None) -> dict[str, Any]:
    return tracing.facts(tracing.trace(model, ids, intervention), llm.tokenizer, ABOUT)


def test_facts_are_json_with_the_documented_shapes(tiny_llm: Llama) -> None:
    found = json.loads(json.dumps(facts(tiny_llm.model, tiny_llm, IDS), allow_nan=False))
    assert np.array(found["lens"]["kl"]).shape == (3, 11)
    assert np.array(found["lens"]["top_p"]).shape == (3, 11, 3)
    assert np.array(found["heads"]["profile"]).shape == (2, 4, 11)
    assert np.array(found["heads"]["pair_norms"]).shape == (2, 4, 8)
    assert np.array(found["tokens"]["next_p"]).shape == (11, 8)
    assert found["tokens"]["surprisal"][0] is None
    assert found["change"] is None
    named = {str(id) for id in [*IDS, *np.array(found["lens"]["top_ids"]).flatten().tolist()]}
    assert named <= found["texts"].keys()
    turns = [10 * 10000 ** (-2 * i / 16) / (2 * math.pi) for i in range(8)]
    assert found["rope"]["turns"] == pytest.approx(turns, rel=1e-5)
    for t in range(10):  # rank and surprisal agree with the list of predictions
        rank = found["tokens"]["rank"][t + 1]
        if rank <= 8:
            assert found["tokens"]["next_ids"][t][rank - 1] == IDS[t + 1]
            assert found["tokens"]["next_p"][t][rank - 1] == pytest.approx(
                math.exp(-found["tokens"]["surprisal"][t + 1]), rel=1e-4
            )


def test_a_change_has_the_numbers_of_both_models(tiny_llm: Llama) -> None:
    model = tiny_llm.model
    original = facts(model, tiny_llm, IDS)
    change = facts(model, tiny_llm, IDS, Intervention(heads=((1, 2),)))["change"]
    assert change["told"] == ["head 1.2 ablated"]
    assert change["before"] == original["tokens"]
    assert change["after"] != change["before"]
    p = model(torch.tensor([IDS]))[0].double().softmax(-1)
    with Intervention(heads=((1, 2),)).on(model):
        q = model(torch.tensor([IDS]))[0].double().softmax(-1)
    assert change["kl"] == pytest.approx(F.kl_div(q.log(), p, reduction="none").sum(-1).tolist(), rel=1e-4)
    assert min(change["kl"]) >= 0
    assert max(change["kl"]) > 1e-3


def test_the_lens_says_from_which_layer_on_the_answer_stays(tiny_llm: Llama) -> None:
    found = facts(tiny_llm.model, tiny_llm, IDS)
    where = {(1, 1, 1): "already in the embedding", (3, 1, 1): "from layer 0", (1, 2, 1): "from layer 1"}
    for ranks, expected in where.items():
        found["lens"]["rank"] = [[rank] for rank in ranks]  # of the last token, after the embedding and each layer
        assert f"is the most probable {expected}" in tracing.summary(found)


# ---------------------------------------------------------------------------------------------------------- the page
def test_attention_rows_are_the_weights_that_may_be_above_0() -> None:
    weights = softmaxed(3, 2, 3, 7, 7)
    assert tracing.attention_rows(weights)[1][2][4] == pytest.approx(weights[1, 2, 4, :5].tolist(), rel=1e-4)


class Elements(html.parser.HTMLParser):
    """The elements of a page, and the text of its scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, list[str]] = {"script": [], "style": []}
        self.open = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.open = tag
        if tag in self.inside:
            self.inside[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        self.open = ""

    def handle_data(self, data: str) -> None:
        if self.open in self.inside:
            self.inside[self.open][-1] += data  # the parser may split the text


@pytest.fixture(scope="module")
def nasty(tiny_llm: Llama) -> tuple[str, dict[str, Any]]:
    ids = tiny_llm.tokenizer.encode_prompt(NASTY)
    traced = tracing.trace(tiny_llm.model, ids)
    found = tracing.facts(traced, tiny_llm.tokenizer, {**ABOUT, "prompt": NASTY, "model": "</title><script>alert(3)"})
    return trace_page.render(found, tracing.packed_maps(traced.weights)), found


def test_no_text_becomes_markup(nasty: tuple[str, dict[str, Any]]) -> None:
    page, found = nasty
    elements = Elements(page)
    scripts = [attributes for tag, attributes in elements.tags if tag == "script"]
    assert scripts == [{"type": "text/plain", "id": "data"}, {"type": "text/plain", "id": "maps"}, {}]
    assert not any(tag == "img" for tag, _ in elements.tags)
    data, maps, _ = elements.inside["script"]
    assert json.loads(zlib.decompress(base64.b64decode(data))) == json.loads(json.dumps(found))
    assert re.fullmatch("[A-Za-z0-9+/=]+", data + maps)
    assert "alert(" not in page


def test_only_the_script_of_the_page_can_run_and_nothing_is_fetched(nasty: tuple[str, dict[str, Any]]) -> None:
    page, _ = nasty
    elements = Elements(page)
    policy = next(a["content"] for tag, a in elements.tags if tag == "meta" and a.get("http-equiv"))
    for kind, text in (("script", elements.inside["script"][2]), ("style", elements.inside["style"][0])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    for tag, attributes in elements.tags:
        assert tag not in ("link", "iframe", "object", "base"), tag
        assert not {"src", "href", "style"} & attributes.keys()
        assert not any(name.startswith("on") for name in attributes)
    for name in ("page.js", "style.css"):
        source = (Path(trace_page.__file__).parent / name).read_text()
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|@import|url\(|fetch\(", source)
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", source)
    assert "{{" not in page


@pytest.fixture(scope="module")
def v8() -> Iterator[MiniRacer]:
    """The page's script in V8 without a document."""
    context = MiniRacer()
    context.eval("".join(map(trace_page.read, ("shared.js", "tokens.js", "page.js"))))
    yield context
    context.close()


def test_a_stored_weight_has_two_decimals_or_is_one_of_eight_steps(v8: MiniRacer) -> None:
    weights = softmaxed(4, 2, 3, 5, 5)
    v8.eval(f"const bytes = {[*tracing.packed_maps(weights)]}")
    for index in np.ndindex(2, 3, 5, 5):
        found, w = v8.eval(f"root(bytes, 5, 3, {', '.join(map(str, index))})"), float(weights[index])
        shown = v8.eval(f"weight({found})")
        if w >= 0.0995:
            assert shown == f"{w:.2f}"
        elif w > 0:
            assert found == pytest.approx(math.sqrt(w), abs=0.5 / 26 + 1e-6)
            assert shown[0] == "≈"


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        ("[share(0.98), share(0.0123), share(0), share(0.00004)].join()", "0.98,0.012,0,4e−5"),
        ("[figures(12345.6), figures(0.1234), figures(0.00001)].join(' ')", "12,346 0.123 1.00e−5"),
        ("JSON.stringify(niceTicks(0, 0.83, 4, true))", "[0,0.5,1]"),
        ("JSON.stringify(niceTicks(0, 63, 8))", "[0,10,20,30,40,50,60]"),
        ("[visible(' a\\n'), visible(''), visible('\\u202eab'), visible('猫')].join()", "␣a⏎,∅,U+202Eab,猫"),
        ("headline('The capital of France is', ' Paris').join(' → ')", "The capital of France is → Paris"),
        ("headline('word '.repeat(99), ' x')[0]", "… " + "word " * 13 + "word"),
        ("JSON.stringify(largest([[-3, -1], [-2, -5]]))", "[0,1]"),
        ("JSON.stringify(runningMean([9, 1, 3, 8], 2))", "[0,1,2,5.5]"),
    ],
)  # fmt: skip
def test_the_script_formats_numbers_and_tokens(v8: MiniRacer, call: str, expected: str) -> None:
    assert v8.eval(call) == expected


# ------------------------------------------------------------------------------------------------------- the command
def run(*args: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["trace", *args])
    return code, out.getvalue(), err.getvalue()


def test_the_command_writes_page_numbers_and_a_summary(tiny_gguf: Path, tiny_llm: Llama, tmp_path: Path) -> None:
    page, words = tmp_path / "t.html", ("hello the", "-m", str(tiny_gguf), "-q")
    code, out, _ = run(*words, "--html", str(page))
    assert code == 0
    ids = tiny_llm.tokenizer.encode_prompt("hello the")
    assert out.startswith(f"{len(ids)} tokens through layers 0 to 1 of tiny.gguf")
    found = json.loads(run(*words, "--json")[1])
    assert found["dtype"] == "float32"
    assert found["tokens"]["ids"] == ids
    expected = tracing.trace(tiny_llm.model, ids)
    bits = tracing.surprisal(expected.logits, expected.ids)[0].item() / math.log(2)
    assert f"{bits:.2f}" in out
    for t, row in enumerate(found["attention"][1][3]):
        assert row == pytest.approx(expected.weights[1, 3, t, : t + 1].tolist(), rel=1e-4, abs=1e-9)
    assert 'id="data"' in page.read_text()


def test_the_command_describes_an_intervention(tiny_gguf: Path) -> None:
    args = ("--ablate-head", "0.1", "--ablate-head", "1.3", "--layers", "0:2", "--rope-theta", "500")
    scaling = ("--rope-scaling", "linear", "--rope-factor", "2")
    words = ("hello", "-m", str(tiny_gguf), "-q")
    code, out, _ = run(*words, *args, *scaling)
    assert code == 0
    descriptions = [
        "head 0.1 ablated",
        "head 1.3 ablated",
        "only layers 0 to 1 run",
        "rope theta 500",
        "rope scaling linear, factor 2.0",
    ]
    assert "changed: " + "; ".join(descriptions) in out
    assert "KL(before || after)" in out
    found = json.loads(run(*words, *args, *scaling, "--json")[1])
    assert found["change"]["told"] == descriptions
    assert found["rope"]["theta"] == 500
    assert found["rope"]["inv_freq"] == pytest.approx([500 ** (-2 * i / 16) / 2 for i in range(8)], rel=1e-6)
    assert json.loads(run(*words, "--json")[1])["tokens"] == found["change"]["before"]  # the model was loaded unchanged


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("hello h", "--max-tokens", "2"), "has 3 tokens, more than --max-tokens 2"),
        (("hello", "--ablate-head", "2.0"), "layers are 0 to 1 and heads 0 to 3"),
        (("hello", "--layers", "0:3"), "END at most 2"),
        (("hello", "--no-rope", "--rope-theta", "5"), "--no-rope"),
        (("hello h", "--patch-from", "h"), "tokens, like the prompt"),
    ],
)
def test_errors_are_one_line_and_exit_2(tiny_gguf: Path, args: tuple[str, ...], message: str) -> None:
    code, out, err = run(*args, "-m", str(tiny_gguf), "-q")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert message in err


def test_a_text_beyond_the_context_is_traced_with_and_without_a_scaling(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_folder())
    options = ["--rope-scaling", "yarn", "--rope-factor", "4", "--json", "-q"]
    assert main(["trace", TEXT, "-m", ".", *options]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["model"] == "tiny-kjv"
    tokens = torch.tensor([list(TEXT.encode())])
    for name, scaling in (("after", {"rope_type": "yarn", "factor": 4.0}), ("before", {"rope_type": "default"})):
        model = load_model(tiny_folder(), dtype="float32", max_seq_len=200, rope_scaling=scaling)
        logprobs = model(tokens).log_softmax(-1)[0, :-1].gather(-1, tokens[0, 1:, None])[:, 0]
        assert facts["change"][name]["surprisal"][1:] == pytest.approx((-logprobs).tolist(), abs=1e-3)


# ------------------------------------------------------------------------------------------------- the default model
def test_the_default_model_under_trace(default_llm: Llama) -> None:
    prompt = "The capital of France is Paris, and the capital of Italy is"
    ids = default_llm.tokenizer.encode_prompt(prompt)
    expected = default_llm.model(torch.tensor([ids]))[0]
    traced = tracing.trace(default_llm.model, ids)
    assert torch.equal(traced.logits, expected)
    found = tracing.facts(traced, default_llm.tokenizer, ABOUT)
    assert found["texts"][str(found["lens"]["top_ids"][-1][-1][0])] == " Rome"
    assert np.mean(found["heads"]["sink"]) > 0.4  # token 0 is an attention sink
    assert "logit lens" in tracing.summary(found)
