"""Session files: a loaded session continues like the saved one, and any other file or model is rejected."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from llama import cli, inside, loader
from llama.cli.common import terminal
from llama.errors import CheckpointError, ContextLengthError, UsageError
from llama.generate import generate, prefill
from llama.generation.session import Session, _checksum, sample
from llama.model import Transformer
from llama.sampling import SamplingParams
from llama.text import Llama

from . import tiny
from .conftest import Run

pytestmark = pytest.mark.usefixtures("one_thread")

LONG = dataclasses.replace(tiny.CONFIG, max_seq_len=4000)
TEXT = tiny.random_tokens(1500)[0].tolist()


def filled(model: Transformer, tokens: list[int]) -> Session:
    """Return a session that holds tokens of a model."""
    session = Session(model.new_cache(), list(tokens))
    prefill(model, tokens, session.cache)  # type: ignore[arg-type]
    return session


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A session of 40 tokens of the model tiny.model(LONG)."""
    model = tiny.model(LONG)
    session = filled(model, TEXT[:40])
    session.messages = [{"role": "user", "content": "<|im_end|> hello"}]
    session.save(tmp_path / "s", model)
    return tmp_path / "s"


def rewrite(path: Path, change: Callable[[dict[str, Any], dict[str, str]], object]) -> None:
    """Change a session file, with a valid header. change: called with the tensors and the metadata."""
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata())
    tensors = load_file(path)
    change(tensors, metadata)
    save_file(tensors, path, metadata)


# ---------------------------------------------------------------------------------------------------- save and load
@pytest.mark.parametrize("kind", ["model", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("length", "fixed"), [(1, False), (1500, False), (700, True)])
def test_a_loaded_session_gives_the_logits_of_the_saved_session(
    tmp_path: Path, kind: str, dtype: torch.dtype, length: int, fixed: bool
) -> None:
    model = tiny.model(LONG).to(dtype)
    model.cache_kind, model.make_cache = kind, tiny.cache_maker(fixed)
    ours = filled(model, TEXT[:length])
    assert ours.save(tmp_path / "s", model) == (tmp_path / "s").stat().st_size
    theirs = Session.load(tmp_path / "s", model)
    assert (theirs.tokens, theirs.messages) == (ours.tokens, [])
    assert ours.cache is not None
    assert theirs.cache is not None
    for part in ([7], [5, 6, 7]):
        assert torch.equal(prefill(model, part, ours.cache), prefill(model, part, theirs.cache))
    torch.testing.assert_close(*(tiny.contents(one.cache, length + 4) for one in (ours, theirs)), rtol=0, atol=0)


def test_a_session_from_a_file_continues_as_in_one_process_and_reuses_the_prefix(
    tiny_llm: Llama, tiny_gguf: Path, tmp_path: Path
) -> None:
    first, second = TEXT[:90], TEXT[:90] + TEXT[500:520]

    def answer(llm: Llama, prompt: list[int], session: Session) -> Any:
        return list(llm.stream_ids(prompt, session=session, max_new_tokens=9, logprobs=True))[-1].completion

    one, two = Session(), Session()
    answer(tiny_llm, first, one)
    expected = answer(tiny_llm, second, one)
    answer(tiny_llm, first, two)
    two.save(tmp_path / "s", tiny_llm.model)
    again = loader.load(tiny_gguf, dtype="float32", device="cpu")  # as another process would
    got = answer(again, second, Session.load(tmp_path / "s", again.model))
    assert (got.tokens, got.logprobs) == (expected.tokens, expected.logprobs)
    assert got.stats.cached_tokens == 90
    params = SamplingParams(max_new_tokens=9, temperature=0.0)
    tokenizer = tiny_llm.tokenizer
    alone = generate(tiny_llm.model, second, params, stop_ids=tokenizer.stop_ids, n_vocab=tokenizer.n_vocab)
    assert got.tokens == [token.id for token in alone if not token.stop]


def test_the_file_contains_the_keys_and_values_of_a_full_pass_and_no_empty_slots(saved: Path) -> None:
    model = tiny.model(LONG)
    cache = model.new_cache(40)
    model(torch.tensor([TEXT[:40]]), cache=cache)
    tensors = load_file(saved)
    assert tensors.pop("tokens").tolist() == TEXT[:40]
    assert set(tensors) == {f"layers.{i}.{kind}" for i in range(2) for kind in "kv"}
    found = [tensors[f"layers.{i}.{kind}"] for i in range(2) for kind in "kv"]
    torch.testing.assert_close(found, tiny.contents(cache), rtol=0, atol=1e-6)


def test_a_large_header_is_rejected_before_it_is_read(tmp_path: Path) -> None:
    size = 2**24 + 1
    (tmp_path / "s").write_bytes(size.to_bytes(8, "little") + b"{" + b" " * (size - 2) + b"}")
    with pytest.raises(CheckpointError, match="s is not a session file; pass"):
        Session.load(tmp_path / "s", tiny.model(LONG))


# ------------------------------------------------------------------------------------ which model can continue it
SCALED = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_theta": 500000.0}, "saved with rope_theta 10000.0 instead of 500000.0"),
        ({"rope_scaling": SCALED}, "saved with rope_scaling None instead of .*yarn"),
        ({"norm_eps": 1e-6}, "norm_eps 1e-05 instead of 1e-06"),
        ({"n_layers": 3}, "n_layers 2 instead of 3"),
        ({"n_kv_heads": 4}, "n_kv_heads 2 instead of 4"),
        ({"max_seq_len": 4096, "n_heads": 8}, "max_seq_len 4000 instead of 4096, n_heads 4 instead of 8"),
    ],
)
def test_a_session_of_another_architecture_is_rejected_with_the_difference(
    saved: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        Session.load(saved, tiny.model(dataclasses.replace(LONG, **change)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("norm.weight", 31),
        ("layers.1.ffn_norm.weight", -1),
        ("layers.0.attention.wq.weight", 0),
        ("layers.1.feed_forward.w_down.weight", -1),
        ("tok_embeddings.weight", 255),
        ("output.weight", -256),
    ],
)
def test_other_weights_of_the_same_shape_are_rejected(saved: Path, name: str, entry: int) -> None:
    model = tiny.model(LONG)
    model.get_parameter(name).view(-1)[entry] += 1e-3
    with pytest.raises(CheckpointError, match=r"saved with weights [0-9a-f]{16} instead of"):
        Session.load(saved, model)


def test_the_sample_covers_the_ends_of_matrices_and_every_entry_of_norms() -> None:
    model = tiny.model()
    before = sample(model)
    model.output.weight[160, 0] += 1  # the middle of a matrix is not read, as the docstring states
    assert sample(model) == before
    model.norm.weight[32] += 1
    assert sample(model) != before


def test_the_context_may_differ_if_the_tokens_fit(saved: Path) -> None:
    assert len(Session.load(saved, tiny.model(LONG, max_seq_len=40)).tokens) == 40
    with pytest.raises(ContextLengthError, match="room for 39 tokens, not 40"):
        Session.load(saved, tiny.model(LONG, max_seq_len=39))


def test_a_session_loads_with_another_form_of_the_rotation(saved: Path) -> None:
    assert Session.load(saved, tiny.model(LONG, rope="real")).tokens == TEXT[:40]


def test_frequencies_that_depend_on_the_length_do_not_support_sessions(saved: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(LONG, max_seq_len=64, rope_scaling={"rope_type": "dynamic", "factor": 4.0})
    model = tiny.model(config)
    with pytest.raises(UsageError, match="depend on the length"):
        filled(model, TEXT[:40]).save(tmp_path / "t", model)
    with pytest.raises(UsageError, match="depend on the length"):
        Session.load(saved, model)


# ------------------------------------------------------------------------------------------- damaged or other files
def test_a_truncated_file_is_refused(saved: Path) -> None:
    original = saved.read_bytes()
    for size in (0, 7, 100, 1000, len(original) - 1):
        saved.write_bytes(original[:size])
        with pytest.raises(CheckpointError, match=str(saved)):
            Session.load(saved, tiny.model(LONG))


def about(metadata: dict[str, str], **changes: Any) -> None:
    """Change entries of the JSON in the metadata."""
    metadata["about"] = json.dumps(json.loads(metadata["about"]) | changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, m: m.update(clearllama_session="1"), "not a session file of this version"),
        (lambda t, m: m.update(about="{"), "is not valid JSON"),
        (lambda t, m: m.update(about="[" * 100_000), "recursion|damaged"),
        (lambda t, m: about(m, settings=None), "lacks the settings"),
        (lambda t, m: about(m, settings={}), "saved with"),
        (lambda t, m: t.pop("tokens"), "must have a list of token ids"),
        (lambda t, m: t.update(tokens=t["tokens"].view(2, 20)), "must have a list of token ids"),
        (lambda t, m: t.update(tokens=t["tokens"].float()), "must have a list of token ids"),
        (lambda t, m: t.update(tokens=t["tokens"] - 320), "token ids below 320"),
        (lambda t, m: t.update(tokens=t["tokens"][:39].clone()), "tensors are not those"),
        (lambda t, m: t.pop("layers.1.v"), "tensors are not those"),
        (lambda t, m: t.update({"layers.1.v": t["layers.1.v"].half()}), "tensors are not those"),
    ],
)
def test_a_modified_file_is_rejected(saved: Path, change: Any, message: str) -> None:
    """Also if its checksum is right."""

    def sealed(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
        change(tensors, metadata)
        metadata["sha256"] = _checksum(metadata["about"], tensors)

    rewrite(saved, sealed)
    with pytest.raises(CheckpointError, match=message):
        Session.load(saved, tiny.model(LONG))


@pytest.mark.parametrize(
    "change",
    [
        lambda t, m: t["layers.1.v"].view(torch.int32)[0, 0, 0, :1].bitwise_xor_(1),
        lambda t, m: t["tokens"].add_(1).remainder_(320),
        lambda t, m: about(m, messages=[{"role": "user", "content": "other"}]),
        lambda t, m: m.pop("sha256"),
    ],
)
def test_a_flipped_bit_is_found(saved: Path, change: Any) -> None:
    rewrite(saved, change)
    with pytest.raises(CheckpointError, match="checksum does not match"):
        Session.load(saved, tiny.model(LONG))


def test_other_files_are_rejected(tmp_path: Path, tiny_gguf: Path) -> None:
    model = tiny.model(LONG)
    (tmp_path / "text").write_text("hello")
    save_file({"x": torch.ones(3)}, tmp_path / "other")
    os.mkfifo(tmp_path / "pipe")
    for path in (
        tmp_path / "text",
        tmp_path / "other",
        tmp_path / "pipe",
        tmp_path / "missing",
        tmp_path,
        tiny_gguf,
        Path("/dev/null"),
    ):
        with pytest.raises(CheckpointError, match=str(path)):
            Session.load(path, model)


# ---------------------------------------------------------------------------------------------------------- saving
def test_only_a_session_is_replaced(saved: Path, tmp_path: Path) -> None:
    model = tiny.model(LONG)
    session = filled(model, TEXT[:50])
    (tmp_path / "text").write_text("mine")
    with pytest.raises(UsageError, match=r"not a session file.*not overwritten"):
        session.save(tmp_path / "text", model)
    with pytest.raises(UsageError, match="not a file"):
        session.save(tmp_path, model)
    with pytest.raises(UsageError, match="No such file"):
        session.save(tmp_path / "no" / "s", model)
    link = tmp_path / "link"
    link.symlink_to(saved)
    session.save(link, model)
    assert link.is_symlink()
    assert Session.load(saved, model).tokens == TEXT[:50]
    assert (tmp_path / "text").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "s", "text"]


def test_a_full_disk_leaves_the_old_session_unchanged(saved: Path) -> None:
    model = tiny.model(LONG)
    session = filled(model, TEXT)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="File too large; the session was not saved"):
            session.save(saved, model)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)
    assert Session.load(saved, model).tokens == TEXT[:40]
    assert [path.name for path in saved.parent.iterdir()] == ["s"]


def test_an_empty_session_or_one_in_use_is_not_saved(tiny_llm: Llama, tmp_path: Path) -> None:
    session = Session()
    with pytest.raises(UsageError, match="no tokens yet"):
        session.save(tmp_path / "s", tiny_llm.model)
    stream = tiny_llm.stream_ids(TEXT[:9], session=session, max_new_tokens=30)
    next(stream)
    for call in (lambda: session.save(tmp_path / "s", tiny_llm.model), session.forget):
        with pytest.raises(UsageError, match="in use by another stream"):
            call()
    stream.close()
    session.save(tmp_path / "s", tiny_llm.model)
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o600


# ------------------------------------------------------------------------------------------------------ the command
WORDS = "hello the hello " * 5


def test_session_options_are_checked_before_the_model(clearllama: Run, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("mine")
    for command in (["generate", "hello"], ["chat"]):
        for option, code, message in (
            ("--save-session", 2, "not a session file"),
            ("--load-session", 1, "not a session file"),
        ):
            done = clearllama(*command, "-m", "no-such-model", option, str(tmp_path / "text"))
            assert done.returncode == code
            assert message in done.stderr.decode()
            assert len(done.stderr.splitlines()) == 1


def test_a_session_named_by_both_options_is_created_and_then_continued(
    clearllama: Run, tiny_gguf: Path, tmp_path: Path
) -> None:
    model = ("generate", "-m", str(tiny_gguf), "--dtype", "float32", "--raw", "-n", "6", "--json")
    at, same = tmp_path / "s", tmp_path / "x" / ".." / "s"
    (tmp_path / "x").mkdir()
    both = ("--load-session", str(at), "--save-session", str(same))
    first, second = (clearllama(*model, WORDS, *both) for _ in range(2))
    new = f"{at} does not exist: starting a new session"
    assert (new in first.stderr.decode(), new in second.stderr.decode()) == (True, False)
    a, b = (json.loads(done.stdout) for done in (first, second))
    assert a["tokens"] == b["tokens"] == json.loads(clearllama(*model, WORDS).stdout)["tokens"]
    assert (a["stats"]["cached_tokens"], b["stats"]["cached_tokens"]) == (0, b["prompt_tokens"] - 1)
    for options in (("--load-session", "s"), ("--load-session", "s", "--save-session", "t")):
        missing = clearllama(*model, WORDS, *options, cwd=tmp_path / "x")
        assert (missing.returncode, missing.stdout) == (1, b"")
        assert missing.stderr.decode() == "clearllama: error: s is not a session file (No such file or directory)\n"
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    dangling = clearllama(
        *model, WORDS, "--load-session", str(tmp_path / "link"), "--save-session", str(tmp_path / "link")
    )
    assert (dangling.returncode, b"No such file" in dangling.stderr) == (1, True)


def test_an_interrupted_answer_is_saved(
    tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written: list[str] = []

    def write(text: str) -> None:
        written.append(text)
        if len(written) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(terminal, "write", write)
    at = tmp_path / "s"
    options = ["-m", str(tiny_gguf), "--dtype", "float32", "--device", "cpu"]
    code = cli.main(["generate", "--raw", WORDS, "-n", "100", *options, "--save-session", str(at)])
    assert code == 130
    llm = loader.load(tiny_gguf, dtype="float32", device="cpu")
    prompt = llm.tokenizer.encode_prompt(WORDS)
    complete = list(llm.stream_ids(prompt, max_new_tokens=100))[-1].completion
    session = Session.load(at, llm.model)
    assert session.tokens == (prompt + (complete.tokens if complete else []))[: len(session.tokens)]
    assert len(prompt) + 3 <= len(session.tokens) < len(prompt) + 100


def test_a_conversation_continues_in_another_process(clearllama: Run, tiny_gguf: Path, tmp_path: Path) -> None:
    at = str(tmp_path / "s")
    options = ["-m", str(tiny_gguf), "--dtype", "float32", "-n", "12", "--temp", "0"]
    both = clearllama("chat", *options, "--system", "the", stdin=b"hello\nthe hello\n")
    first = clearllama("chat", *options, "--system", "the", "--save-session", at, stdin=b"hello\n")
    second = clearllama("chat", *options, "--load-session", at, "--save-session", at, stdin=b"the hello\n")
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert both.stdout == first.stdout + b"\n" + second.stdout  # an empty line separates answers
    assert "continuing the conversation of 3 messages" in second.stderr.decode()
    assert "of them from the session" in second.stderr.decode()
    llm = loader.load(tiny_gguf, dtype="float32", device="cpu")
    assert [m["role"] for m in Session.load(at, llm.model).messages] == ["system", *["user", "assistant"] * 2]
    refused = clearllama("chat", *options, "--load-session", at, "--system", "other", stdin=b"hello\n")
    assert refused.returncode == 2
    assert f"--system can't change the conversation in {at}; leave --system out" in refused.stderr.decode()


def test_a_cleared_conversation_is_not_in_the_file(clearllama: Run, tiny_gguf: Path, tmp_path: Path) -> None:
    at = str(tmp_path / "s")
    options = ["-m", str(tiny_gguf), "--dtype", "float32", "-n", "5", "--temp", "0", "--save-session", at]
    done = clearllama("chat", *options, stdin=b"hello hello\n/clear\n")
    assert "the session is empty" in done.stderr.decode()
    assert not Path(at).exists()
    clearllama("chat", *options, stdin=b"hello hello\n/clear\nthe\n")
    llm = loader.load(tiny_gguf, dtype="float32", device="cpu")
    session = Session.load(at, llm.model)
    assert [m["content"] for m in session.messages[:1]] == ["the"]
    assert "hello hello" not in llm.tokenizer.decode(session.tokens)


# -------------------------------------------------------------------------------------------------- empty sessions
def test_an_empty_session_belongs_to_no_model(tiny_llm: Llama) -> None:
    def interrupt(x: torch.Tensor, at: object) -> torch.Tensor:
        raise KeyboardInterrupt

    session = Session()
    with inside.patch(tiny_llm, {"z.0": interrupt}), pytest.raises(KeyboardInterrupt):
        tiny_llm.generate("abc", session=session)
    assert not session.tokens
    assert tiny_llm.generate("abc", session=session, max_new_tokens=2).tokens
    with inside.patch(tiny_llm, {"z.0": lambda x, at: x}):
        session.forget()
        assert tiny_llm.generate("abc", session=session, max_new_tokens=2).tokens


def test_tokens_beyond_an_empty_cache_are_computed(tiny_llm: Llama) -> None:
    prompt = tiny_llm.tokenizer.encode_prompt("hello")
    for session in (Session(tokens=prompt), Session(tiny_llm.model.new_cache(), prompt)):
        *_, last = tiny_llm.stream_ids(prompt, session=session, max_new_tokens=3)
        assert last.completion is not None
        assert last.completion.stats.cached_tokens == 0
        assert last.completion.tokens == tiny_llm.generate("hello", max_new_tokens=3).tokens
