"""Models of the hub on first use: which file a name means, transfers that stop, wrong bytes. See hub_server.py."""

from __future__ import annotations

import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from llama import hub
from llama.errors import CheckpointError
from llama.hub import models as named, quants
from llama.hub.repository import hub_id
from llama.system.folders import cache_folder

from . import hub_server, tiny
from .conftest import Run
from .hub_server import Hub, error_of, path_of, resolve

BIG = random.Random(0).randbytes(1_500_000)  # of the quantization Q8_0; sent in 23 pieces
NEXT = "abcdef1234567890abcdef1234567890abcdef12"  # a later commit


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return tiny.write_gguf(tmp_path_factory.mktemp("model") / "a.gguf").read_bytes()


@pytest.fixture
def server(model: bytes) -> Iterator[Hub]:
    three = {"tiny-Q2_K.gguf": b"GGUF2", "tiny-Q4_K_M.gguf": model, "tiny-Q8_0.gguf": BIG}
    more = {"README.md": b"x", "mmproj-tiny-f16.gguf": b"x", "tokenizer.py": b"x", "modeling_tiny.py": b"x"}
    index = {"weight_map": {"a": "model-1.safetensors", "b": "evil.py"}}
    code = {"config.json": b"{}", "model.safetensors.index.json": json.dumps(index).encode(), "evil.py": b"x"}
    repos = {
        "org/three": {**three, **more},
        "org/far": {"far-Q2_K.gguf": b"GGUF2", "far-IQ4_XS.gguf": b"GGUF4", "far-Q8_0.gguf": b"GGUF8"},
        "org/code": {**code, **more, "model-1.safetensors": b"x", "tokenizer.json": b"[1]"},
    }
    with hub_server.running(repos) as server:
        yield server


@pytest.fixture
def env(server: Hub, tmp_path: Path) -> dict[str, str]:
    return hub_server.environment(server, tmp_path)


def blobs(env: dict[str, str], repo: str = "org--three") -> dict[str, int]:
    """The files that the cache stores of a repository, with their sizes."""
    folder = Path(env["HF_HUB_CACHE"], f"models--{repo}", "blobs")
    return {path.name: path.stat().st_size for path in folder.iterdir()} if folder.exists() else {}


def is_named(env: dict[str, str], repo: str = "org--three") -> bool:
    """Whether the cache has a revision of a repository that can be loaded."""
    return Path(env["HF_HUB_CACHE"], f"models--{repo}", "refs", "main").exists()


# ------------------------------------------------------------------------------------------- which file a name means
def test_three_quantizations(clearllama: Run, server: Hub, env: dict[str, str]) -> None:
    server.cards["org/three"] = {"license": "llama3.2"}
    env["CLEARLLAMA_CACHE"] = str(cache_folder())  # it has the compiled kernels
    result = clearllama("generate", "-m", "org/three", "-n", "2", "--raw", "Once", env=env)
    assert result.returncode == 0, result.stderr
    lines = result.stderr.decode().splitlines()
    assert lines[0] == "downloading org/three (tiny-Q4_K_M.gguf, 0 MB to download, licence llama3.2)"
    assert set(server.served) == {"tiny-Q4_K_M.gguf"}
    offline = {**env, "HF_HUB_OFFLINE": "1"}
    again = clearllama("inspect", "org/three", env=offline)
    assert (again.returncode, again.stderr) == (0, b"")
    assert resolve("org/three:q8_0", env).endswith("tiny-Q8_0.gguf")
    assert "HF_HUB_OFFLINE is set" in resolve("org/three:Q2_K", offline)
    assert (
        b"this command does not download models: first run clearllama pull org/far"
        in clearllama("plan", "-m", "org/far", "--gpus", "1xH100", env=env).stderr
    )
    assert "org/three has no GGUF file of type Q5_K_M; it has Q2_K, Q4_K_M, Q8_0: name one" in resolve(
        "org/three:Q5_K_M", env
    )


@pytest.mark.slow
def test_the_nearest_quantization_is_named(clearllama: Run, server: Hub, env: dict[str, str]) -> None:
    result = clearllama("pull", "org/far", env=env)
    assert path_of(result).name == "far-IQ4_XS.gguf"
    assert b"downloading org/far (far-IQ4_XS.gguf, the nearest to Q4_K_M, 0 MB" in result.stderr
    result = clearllama("inspect", "org/far", env={**env, "HF_HUB_OFFLINE": "1"})
    assert result.stderr.startswith(b"org/far: using far-IQ4_XS.gguf from the Hugging Face cache\n")


@pytest.mark.parametrize(
    ("names", "quant", "chosen"),
    [
        (["m-Q4_0.gguf", "m-Q4_K_M.gguf", "m.gguf"], "", ["m-Q4_K_M.gguf"]),
        (["m.q5_k_s.gguf", "m.q4_k_s.gguf", "m.q8_0.gguf"], "", ["m.q4_k_s.gguf"]),
        (["m-Q3_K_S.gguf", "m-Q6_K.gguf"], "", ["m-Q3_K_S.gguf"]),
        (["m-f16.gguf", "m-Q8_0.gguf"], "", ["m-Q8_0.gguf"]),
        (["m-fp16.gguf", "m-Q8_0.gguf"], "F16", ["m-fp16.gguf"]),
        (["m-UD-Q4_K_XL.gguf", "m-Q2_K.gguf"], "", ["m-UD-Q4_K_XL.gguf"]),
        (["m-UD-Q4_K_XL.gguf", "m-Q4_K_XL.gguf"], "Q4_K_XL", ["m-Q4_K_XL.gguf"]),
        (["m-UD-Q4_K_XL.gguf"], "q4_k_xl", ["m-UD-Q4_K_XL.gguf"]),
        (["a.gguf"], "", ["a.gguf"]),
        (["a.gguf", "mmproj-F16.gguf", "a.imatrix.gguf"], "", ["a.gguf"]),
        (["Q4_K_M/m-Q4_K_M-00001-of-00002.gguf", "Q4_K_M/m-Q4_K_M-00002-of-00002.gguf", "m-Q8_0.gguf"], "",
         ["Q4_K_M/m-Q4_K_M-00001-of-00002.gguf", "Q4_K_M/m-Q4_K_M-00002-of-00002.gguf"]),
        (["BF16/m-00001-of-00002.gguf", "m-Q8_0.gguf"], "bf16", ["BF16/m-00001-of-00002.gguf", "BF16/m-00002-of-00002.gguf"]),
        ([], "", []),
    ],
)  # fmt: skip
def test_the_chosen_quantization(names: list[str], quant: str, chosen: list[str]) -> None:
    assert quants.choose(names, quant, "org/name") == chosen


@pytest.mark.parametrize(
    ("names", "quant", "message"),
    [
        (["7b-Q4_K_M.gguf", "13b-Q8_0.gguf"], "", r"has 2 GGUF models \(13b-Q8_0.gguf, 7b-Q4_K_M.gguf\); choose one"),
        (["7b-Q4_K_M.gguf", "13b-Q4_K_M.gguf"], "Q4_K_M", "choose one, as in org/name/FILE.gguf"),
        (["a.gguf", "b.gguf"], "", "choose one"),
        (["a-Q4_0.gguf"], "Q8_0", r"has no GGUF file of type Q8_0; it has Q4_0: name one, as in org/name:Q4_0$"),
        (["a.gguf"], "Q8_0", "has no GGUF file of type Q8_0$"),
    ],
)
def test_ambiguous_and_missing_quantizations_are_errors(names: list[str], quant: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        quants.choose(names, quant, "org/name")


def test_every_known_type_of_the_gguf_package_has_its_bits() -> None:
    """The label of a type is the type's name; its bits are those of its blocks, or more: files mix types."""
    import gguf

    for type, (count, size) in gguf.GGML_QUANT_SIZES.items():
        if type.name in quants.BITS:
            assert quants.label(f"model.{type.name.lower()}.gguf") == type.name
            assert 0.95 * 8 * size / count <= quants.BITS[type.name] <= 1.3 * 8 * size / count + 0.2


def test_names_with_a_quantization() -> None:
    id = hub_id("org/name/folder:Q4_K_M@v1")
    assert id is not None
    assert (id.repo, id.path, id.quant, id.revision) == ("org/name", "folder", "Q4_K_M", "v1")
    assert str(id) == "org/name/folder:Q4_K_M@v1"
    assert [hub_id(name) for name in ("a/b:", "a/b/c.gguf:Q8_0", "a/b:c/d", "a/b@../../c", "a/b:..")] == [None] * 5


def test_a_folder_wins_over_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named, "pull", lambda *_, **__: pytest.fail("the hub was asked"))
    monkeypatch.chdir(tmp_path)
    folder = Path("org", "name")
    folder.mkdir(parents=True)
    for quant in ("Q4_0", "Q8_0"):
        (folder / f"m-{quant}.gguf").touch()
    assert hub.resolve("org/name") == folder
    assert hub.resolve("org/name:Q8_0") == folder / "m-Q8_0.gguf"
    with pytest.raises(CheckpointError, match="org/name has no GGUF file of type Q2_K; it has Q4_0, Q8_0"):
        hub.resolve("org/name:Q2_K")


def test_code_of_a_repository_is_not_fetched(clearllama: Run, server: Hub, env: dict[str, str]) -> None:
    folder = path_of(clearllama("pull", "org/code", env=env))
    names = {"config.json", "model.safetensors.index.json", "model-1.safetensors", "tokenizer.json"}
    assert set(server.served) == {path.name for path in folder.iterdir()} == names


# -------------------------------------------------------------------------------------------------- the default model
def test_the_default_model_is_that_of_the_environment(
    clearllama: Run, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = clearllama("inspect", "--json", env={"CLEARLLAMA_MODEL": str(tiny_gguf)})
    assert json.loads(result.stdout)["path"] == str(tiny_gguf)
    assert b"tiny.gguf;" in clearllama("generate", "--help", env={"CLEARLLAMA_MODEL": "tiny.gguf"}).stdout
    monkeypatch.setenv("CLEARLLAMA_MODEL", str(tiny_gguf))
    assert hub.resolve() == tiny_gguf
    monkeypatch.setenv("CLEARLLAMA_MODEL", "")
    assert hub.default_model() == hub.DEFAULT


# --------------------------------------------------------------------------------------------------- interruptions
def start(name: str, env: dict[str, str]) -> subprocess.Popen[str]:
    """Fetch a model in a process that writes every 16 KB."""
    code = (
        "from huggingface_hub import constants; constants.DOWNLOAD_CHUNK_SIZE = 2**14\n"
        f"from llama import hub; print(hub.resolve({name!r}))"
    )
    command = [sys.executable, "-c", code]
    return subprocess.Popen(
        command, env={**os.environ, **env}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


@pytest.mark.row("F03")
def test_a_killed_transfer_is_resumed(server: Hub, env: dict[str, str]) -> None:
    server.pause = 0.01
    for moment in (0.3, 0.7):
        process = start("org/three:Q8_0", env)
        while process.poll() is None and max(blobs(env).values(), default=0) < moment * len(BIG):
            time.sleep(0.002)
        process.kill()
        process.communicate()
        assert not is_named(env)
        assert [name.endswith(".incomplete") for name in blobs(env) if not name.endswith(".lock")] == [True]
    done, _ = start("org/three:Q8_0", env).communicate(timeout=60)
    assert Path(done.strip()).read_bytes() == BIG
    starts = server.ranges["tiny-Q8_0.gguf"]
    assert starts == sorted(starts)
    assert [start >= moment * len(BIG) for start, moment in zip(starts, (0, 0.3, 0.7), strict=True)] == [True] * 3
    assert set(blobs(env)) == {hashlib.sha256(BIG).hexdigest()}


@pytest.mark.slow
@pytest.mark.row("F03")
@pytest.mark.parametrize("moment", range(20))
def test_a_transfer_killed_at_any_moment_leaves_all_or_nothing(server: Hub, env: dict[str, str], moment: int) -> None:
    server.pause = 0.03
    begun = time.perf_counter()
    process = start("org/three:Q8_0", env)
    while not server.ranges and process.poll() is None:
        if moment < 3 and time.perf_counter() - begun > 0.1 * moment:  # before the transfer
            break
        time.sleep(0.001)
    time.sleep(max(0, moment - 3) * 23 * 0.03 / 15)  # the last moments are after the transfer: links, then the name
    process.kill()
    process.communicate()
    before = len(server.ranges.get("tiny-Q8_0.gguf", []))
    if is_named(env):
        assert Path(resolve("org/three:Q8_0", {**env, "HF_HUB_OFFLINE": "1"})).read_bytes() == BIG
    else:
        assert "HF_HUB_OFFLINE is set" in resolve("org/three:Q8_0", {**env, "HF_HUB_OFFLINE": "1"})
    here = max(blobs(env).values(), default=0)
    server.pause = 0
    assert Path(resolve("org/three:Q8_0", env)).read_bytes() == BIG
    assert server.ranges["tiny-Q8_0.gguf"][before:] == [here] * (here < len(BIG)), "what arrived is not fetched again"
    assert set(blobs(env)) == {hashlib.sha256(BIG).hexdigest()}


@pytest.mark.slow
def test_two_processes_fetch_a_file_once(server: Hub, env: dict[str, str]) -> None:
    server.pause = 0.01
    both = [start("org/three:Q8_0", env) for _ in range(2)]
    paths = {process.communicate(timeout=60)[0].strip() for process in both}
    assert len(paths) == 1
    assert Path(paths.pop()).read_bytes() == BIG
    assert server.sent["tiny-Q8_0.gguf"] == len(BIG)


# ------------------------------------------------------------------------------------------------------- wrong bytes
def test_a_file_with_another_checksum_is_an_error_and_does_not_stay(
    clearllama: Run, server: Hub, env: dict[str, str]
) -> None:
    server.damaged = "tiny-Q8_0.gguf"
    line = error_of(clearllama("inspect", "org/three:Q8_0", env=env))
    expected = hashlib.sha256(BIG).hexdigest()[:16]
    assert f"tiny-Q8_0.gguf arrived damaged: expected checksum {expected}…" in line
    assert (blobs(env), is_named(env)) == ({}, False)
    server.damaged = "tokenizer.json"  # a small file, which has git's object id
    assert "tokenizer.json arrived damaged" in error_of(clearllama("pull", "org/code", env=env))
    server.damaged = ""
    assert path_of(clearllama("pull", "-q", "org/three:Q8_0", env=env)).read_bytes() == BIG


def test_a_damaged_partial_file_is_fetched_again(clearllama: Run, server: Hub, env: dict[str, str]) -> None:
    folder = Path(env["HF_HUB_CACHE"], "models--org--three", "blobs")
    folder.mkdir(parents=True)
    part, old = (folder / f"{name}{transfer.PARTIAL}" for name in (hashlib.sha256(BIG).hexdigest(), "0" * 64))
    part.write_bytes(bytes(1000))
    old.write_bytes(bytes(1000))
    assert path_of(clearllama("pull", "-q", "org/three:Q8_0", env=env)).read_bytes() == BIG
    assert server.ranges["tiny-Q8_0.gguf"] == [1000, 0]
    assert set(blobs(env)) == {hashlib.sha256(BIG).hexdigest()}, "partial files of other versions are removed"


@pytest.mark.slow
def test_pull_checks_the_files_of_other_programs(clearllama: Run, server: Hub, env: dict[str, str]) -> None:
    path = path_of(clearllama("pull", "-q", "org/three:Q8_0", env=env))
    path.resolve().write_bytes(bytes(len(BIG)))
    assert path_of(clearllama("pull", "-q", "org/three:Q8_0", env=env)).read_bytes() == BIG


def test_a_changed_file_is_fetched_by_pull_alone(clearllama: Run, server: Hub, env: dict[str, str]) -> None:
    first = path_of(clearllama("pull", "-q", "org/three:Q8_0", env=env))
    server.commit, changed = NEXT, bytes(reversed(BIG))
    server.repos["org/three"]["tiny-Q8_0.gguf"] = changed
    server.damaged = "tiny-Q8_0.gguf"  # an update that fails leaves the old version
    error_of(clearllama("pull", "-q", "org/three:Q8_0", env=env))
    assert resolve("org/three:Q8_0", env) == str(first)
    server.damaged = ""
    second = path_of(clearllama("pull", "-q", "org/three:Q8_0", env=env))
    assert NEXT in str(second)
    assert second.read_bytes() == changed


@pytest.mark.row("F01")
def test_a_disk_that_fills_up_keeps_what_arrived(server: Hub, env: dict[str, str]) -> None:
    code = (
        "import errno; from llama import hub; from llama.hub import transfer; write = transfer._Sink.write\n"
        "def full(self, data):\n"
        "    write(self, data[:1000]); raise OSError(errno.ENOSPC, 'No space left on device')\n"
        "transfer._Sink.write = full\n"
        "try: hub.resolve('org/three:Q8_0')\n"
        "except Exception as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, check=True
    )
    assert "is full; free some space or set HF_HOME to a folder on another disk, and try again" in done.stdout
    assert not is_named(env)
    assert Path(resolve("org/three:Q8_0", env)).read_bytes() == BIG
    assert server.ranges["tiny-Q8_0.gguf"] == [0, 1000]


def test_a_gated_repository_says_so_before_and_after(clearllama: Run, server: Hub, env: dict[str, str]) -> None:
    server.gated, server.cards["org/three"] = {"org/three"}, {"license": "other", "license_name": "tiny-licence"}
    result = clearllama("inspect", "org/three", env=env)
    first, last = result.stderr.decode().splitlines()
    assert first == (
        f"downloading org/three (tiny-Q4_K_M.gguf, 0 MB to download, licence tiny-licence, gated: accept the licence on"
        f" {server.url}/org/three)"
    )
    assert last.startswith("clearllama: error: there is no file or folder 'org/three'; org/three is gated: accept")
    assert resolve("org/three", {**env, "HF_TOKEN": "right"}).endswith("tiny-Q4_K_M.gguf")
