"""The local store keeps the store contract, also when the file system fails."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from holdfast.checkpoint.store import ObjectInfo, Store, direct_io
from holdfast.checkpoint.store.local import LocalStore
from holdfast.errors import Corrupt, Denied, InvalidInput, RetryLater, Unsupported
from holdfast.testing import StoreSuite
from small_disk import small_disk

DIRECT = (4 << 20) + 4097  # large enough for direct I/O, with an odd tail
POINTS = ("store.written", "store.synced", "store.linked")
SMALL_DISK_BYTES = 4 << 20


class TestLocalStore(StoreSuite):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return LocalStore(tmp_path / "made" / "when" / "needed")


class TestLocalStoreWithoutDirectIo(StoreSuite):
    """The same on a file system that refuses O_DIRECT."""

    @pytest.fixture
    def store(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
        refusals = _refuse_direct(monkeypatch)
        store = LocalStore(tmp_path / "home")
        store.put("probe", bytes(DIRECT))
        store.delete("probe")
        assert refusals
        return store


def _failing(number: int) -> Callable[..., NoReturn]:
    """A function of `os` that fails with an error number."""

    def fail(*_: object, **__: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return fail


def _refuse_direct(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Simulate a kernel that refuses O_DIRECT; return the refused descriptors, as they come."""
    real, refusals = fcntl.fcntl, []

    def fake(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            refusals.append(fd)
            _failing(errno.EINVAL)()
        return real(fd, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", fake)
    return refusals


def _page_aligned(data: bytes) -> memoryview:
    held = memoryview(mmap.mmap(-1, len(data)))
    held[:] = data
    return held


def _files(root: Path) -> set[str]:
    """Return every file below a directory, listed by the store or not."""
    return {str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir()}


# Direct I/O


@pytest.mark.parametrize("method", ["pwrite", "preadv"])
def test_a_file_system_that_refuses_only_when_it_is_used_is_read_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Some file systems accept the O_DIRECT flag and refuse the first, or a later, transfer with EINVAL."""
    real, calls = getattr(os, method), []

    def fake(fd: int, data: object, offset: int) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            calls.append(offset)
            if len(calls) == 2:
                _failing(errno.EINVAL)()
        return real(fd, data, offset)

    data = os.urandom((33 << 20) + 4097)  # three slices
    store, room = LocalStore(tmp_path), _page_aligned(bytes(len(data)))
    monkeypatch.setattr(os, method, fake)
    store.put("a", _page_aligned(data))
    store.read_into("a", 0, room)
    if not calls:
        pytest.skip("the file system under the temporary directory has no direct I/O")
    assert len(calls) == 2
    assert room == data


def test_large_aligned_puts_do_not_fill_the_page_cache(tmp_path: Path) -> None:
    """A put of an arena leaves the page cache to the training data; the tail and small objects may use it."""
    store = LocalStore(tmp_path)
    store.put("a", _page_aligned(os.urandom(DIRECT)))
    fd = os.open(store.path("a"), os.O_RDONLY)
    try:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        except OSError:
            pytest.skip("the file system under the temporary directory has no direct I/O")
        assert not direct_io._cached(fd, 0, 1 << 20)
    finally:
        os.close(fd)


def test_cached_data_is_read_from_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = os.urandom(DIRECT)
    store, room = LocalStore(tmp_path), _page_aligned(bytes(DIRECT))
    store.path("a").write_bytes(data)
    fd = os.open(store.path("a"), os.O_RDONLY)
    known = direct_io._cached(fd, 0, DIRECT - DIRECT % 4096)
    os.close(fd)
    if not known:
        pytest.skip("this kernel does not report cached pages (cachestat, Linux 6.5)")
    refusals = _refuse_direct(monkeypatch)
    store.read_into("a", 0, room)
    assert room == data
    assert refusals == []


def test_a_file_that_another_program_truncated_is_corrupt(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a", _page_aligned(os.urandom(DIRECT)))
    os.truncate(store.path("a"), DIRECT - 8192)
    with pytest.raises(Corrupt, match=f"ends at byte {DIRECT - 8192}"):
        store.read_into("a", 0, _page_aligned(bytes(DIRECT)))


# Disks that are full, read-only or gone


@pytest.mark.parametrize("num_bytes", [SMALL_DISK_BYTES // 2 + 1, SMALL_DISK_BYTES * 2])
@pytest.mark.parametrize("if_absent", [False, True])
def test_a_full_disk_keeps_the_old_object(tmp_path: Path, num_bytes: int, if_absent: bool) -> None:
    """The error names the required and the free space. Nothing is left behind, and a later put works."""
    with small_disk(tmp_path, str(SMALL_DISK_BYTES)) as disk:
        store = LocalStore(disk)
        old = os.urandom(SMALL_DISK_BYTES // 2)
        store.put("d/a", old)
        name = "d/b" if if_absent else "d/a"
        match = rf"\({num_bytes} bytes\).*No space left.*\d+ bytes free"
        with pytest.raises(RetryLater, match=match) as caught:
            store.put(name, _page_aligned(os.urandom(num_bytes)), if_absent=if_absent)
        assert isinstance(caught.value.__cause__, OSError)
        assert str(store.path(name)) in str(caught.value)
        assert store.get("d/a") == old
        assert _files(disk) == {"d/a"}
        store.put("d/c", b"small")
        assert store.get("d/c") == b"small"
        if not if_absent:
            store.delete("d/a")
            store.put("d/a", bytes(SMALL_DISK_BYTES // 2 + 1))


def test_a_full_disk_does_not_stop_the_log_reader(tmp_path: Path) -> None:
    with small_disk(tmp_path, "64k") as disk:
        store = LocalStore(disk)
        store.append("log", b"first\n")
        with pytest.raises(RetryLater, match="No space left"):
            store.append("log", bytes(128 << 10))
        assert store.get("log").startswith(b"first\n")


def test_a_read_only_disk_is_read_and_refuses_to_be_written(tmp_path: Path) -> None:
    with small_disk(tmp_path, "64k") as disk:
        store = LocalStore(disk)
        store.put("d/a", b"old")
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        for change in (
            lambda: store.put("d/a", b"new"),
            lambda: store.put("new/a", b"new", if_absent=True),
            lambda: store.append("log", b"x"),
            lambda: store.delete("d/a"),
        ):
            with pytest.raises(Denied, match="Read-only file system"):
                change()
        assert store.get("d/a") == b"old"
        assert [entry.name for entry in store.list()] == ["d/a"]


def test_the_error_for_a_directory_without_permission_is_clear() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to other users
        home = Path(folder) / "home"
        LocalStore(home).put("d/a", b"old")
        Path(folder).chmod(0o755)
        for directory in (home, home / "d"):
            directory.chmod(0o555)
        said = _go_on(
            _start(f"""
import os
from holdfast.errors import Denied
from holdfast.checkpoint.store import open_store
if os.getuid() == 0:  # to whom permissions do not apply
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
store = open_store({str(home)!r})
assert store.get("d/a") == b"old"
store.sweep()
put, delete = store.put, store.delete
for change in (lambda: put("d/a", b"new"), lambda: put("e/a", b"new"), lambda: delete("d/a")):
    try:
        change()
    except Denied as error:
        print(error)
""")
        )
        for directory in (home, home / "d"):
            directory.chmod(0o755)
        assert said.count("Permission denied") == 3, said
        assert LocalStore(home).get("d/a") == b"old"


def test_a_deleted_home_is_not_created_again(tmp_path: Path) -> None:
    """After the root has vanished, writes fail and no object is reported as absent, until it is back."""
    home = tmp_path / "home"
    home.mkdir()
    store = LocalStore(home)
    store.put("d/a", b"x")
    home.rename(tmp_path / "away")
    for call in (
        lambda: store.put("d/a", b"y"),
        lambda: store.append("log", b"y"),
        lambda: store.get("d/a"),
        lambda: store.read_into("d/a", 0, memoryview(bytearray(1))),
        lambda: store.size("d/a"),
        lambda: list(store.list()),
        lambda: store.delete("d/a"),
        lambda: store.sweep(),
    ):
        with pytest.raises(RetryLater, match="vanished"):
            call()
    assert not home.exists()
    (tmp_path / "away").rename(home)
    assert store.get("d/a") == b"x"


def test_a_home_created_by_the_first_put_is_not_created_again(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "new" / "home")
    store.put("a", b"x")
    shutil.rmtree(tmp_path / "new")
    with pytest.raises(RetryLater, match="vanished"):
        store.put("a", b"x")
    assert _files(tmp_path) == set()


def test_an_unmounted_disk_is_not_written_through_its_mount_point(tmp_path: Path) -> None:
    """The empty directory under a mount is on another file system: a put there would fill the wrong disk."""
    with small_disk(tmp_path, "64k") as disk:
        store = LocalStore(disk)
        store.put("a", b"x")
        subprocess.run(["umount", str(disk)], check=True)
        with pytest.raises(RetryLater, match="another file system"):
            store.put("a", b"y")
        assert _files(disk) == set()
        with small_disk(tmp_path, "64k"):
            store.put("a", b"z")
            assert store.get("a") == b"z"


def test_a_directory_deleted_by_hand_is_made_again(tmp_path: Path) -> None:
    """Only the root is protected: everything below belongs to the store."""
    store = LocalStore(tmp_path)
    store.put("d/e/a", b"x")
    shutil.rmtree(tmp_path / "d")
    store.put("d/e/a", b"y")
    assert store.get("d/e/a") == b"y"


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InvalidInput, match="is a file"):
        LocalStore(tmp_path / "file")


def test_a_name_below_an_object_and_a_directory_name_are_refused(tmp_path: Path) -> None:
    """A file cannot be a directory too; the message names the conflicting path."""
    store = LocalStore(tmp_path)
    store.put("d/a", b"x")
    for name in ("d/a/b", "d"):
        with pytest.raises(InvalidInput, match="belongs to a directory, or a part of the path is a file"):
            store.put(name, b"y")
    with pytest.raises(InvalidInput, match="unfinished"):
        store.put("d/.unfinished-1-2", b"x")
    assert _files(tmp_path) == {"d/a"}


def test_a_link_shares_the_bytes_on_the_disk(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a/one", b"old")
    store.link("a/one", "b/two")
    assert (tmp_path / "a/one").samefile(tmp_path / "b/two")
    store.put("a/one", b"new")
    assert store.get("b/two") == b"old", "an object is replaced, never changed in place"


@pytest.mark.parametrize("number", [errno.EPERM, errno.EMLINK])
def test_names_that_the_file_system_cannot_link_raise_unsupported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The file system has no hard links, or the file has reached its limit of them."""
    store = LocalStore(tmp_path)
    store.put("a/one", b"first")
    store.put("b/two", b"second")
    monkeypatch.setattr(os, "link", _failing(number))
    for change in (lambda: store.link("a/one", "b/two"), lambda: store.put("c", b"x", if_absent=True)):
        with pytest.raises(Unsupported, match="does not support hard links"):
            change()
    assert store.get("b/two") == b"second"
    assert _files(tmp_path) == {"a/one", "b/two"}
    store.put("c", b"x")


@pytest.mark.parametrize("failing", ["pwrite", "fsync", "replace", "link"])
@pytest.mark.parametrize("size", [10, DIRECT])
def test_an_io_error_at_any_step_keeps_the_old_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, size: int
) -> None:
    store = LocalStore(tmp_path)
    store.put("d/a", b"old")
    monkeypatch.setattr(os, failing, _failing(errno.EIO))
    name = "d/b" if failing == "link" else "d/a"
    with pytest.raises(RetryLater, match="Input/output error"):
        store.put(name, bytes(size), if_absent=failing == "link")
    monkeypatch.undo()
    assert store.get("d/a") == b"old"
    assert _files(tmp_path) == {"d/a"}


def test_file_and_folders_are_synced_before_put_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data before the name, then every directory up to and above the root."""
    synced, real_fsync, real_replace = [], os.fsync, os.replace

    def fsync(fd: int) -> None:
        synced.append(Path(f"/proc/self/fd/{fd}").readlink())
        real_fsync(fd)

    def replace(*args: str, **options: int) -> None:
        synced.append("replace")
        real_replace(*args, **options)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    root = tmp_path / "runs" / "home"
    LocalStore(root).put("d/e/a", b"x")
    at = synced.index("replace")
    assert synced[at - 1].name.startswith(".unfinished-")
    assert {root / "d" / "e", root / "d", root, root.parent} <= set(synced[at + 1 :])
    assert tmp_path in synced[:at]


# Listing


def test_deleting_the_last_object_removes_its_directories_but_never_the_root(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "home")
    store.put("d/e/a", b"x")
    store.put("d/b", b"x")
    store.delete("d/e/a")
    assert [path.name for path in (tmp_path / "home" / "d").iterdir()] == ["b"]
    store.delete("d/b")
    assert list((tmp_path / "home").iterdir()) == []


# Processes that are killed


def _start(script: str, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    paths = [str(Path(__file__).parents[2] / "src"), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **environment},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def _go_on(child: subprocess.Popen[str], line: str = "") -> str:
    """Send a line to a process that waits for it; return all further output."""
    output = child.communicate(line)[0]
    assert child.returncode == 0, output
    return output


def _line_of(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline()


def _put_killed(home: Path, point: str, *, if_absent: bool, name: str = "d/a") -> None:
    """Start a process that is killed at a failpoint while it puts bytes of value 1 under `name`."""
    child = _start(
        f"""
import mmap
from holdfast.checkpoint.store import open_store
data = memoryview(mmap.mmap(-1, {DIRECT}))
data[:] = b"\\1" * {DIRECT}
open_store({str(home)!r}).put({name!r}, data, if_absent={if_absent})
""",
        HOLDFAST_KILL_AT=point,
    )
    output = child.communicate()[0]
    assert child.returncode == -signal.SIGKILL, output


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("existing", [False, True])
def test_a_killed_put_leaves_the_old_or_the_new_object(tmp_path: Path, point: str, existing: bool) -> None:
    old, new = b"\0" * 1000, b"\1" * DIRECT
    store = LocalStore(tmp_path / "home")
    store.put("other", b"x")
    if existing:
        store.put("d/a", old)
    _put_killed(tmp_path / "home", point, if_absent=not existing)
    expected = new if point == "store.linked" else old if existing else None
    size = None if expected is None else len(expected)
    assert store.size("d/a") == size
    assert {e for e in store.list("d") if e.name != "other"} == ({ObjectInfo("d/a", size)} if size else set())
    if expected is not None:
        assert store.get("d/a") == expected
    left = {name for name in _files(tmp_path / "home") if ".unfinished-" in name}
    assert len(left) == (0 if existing and point == "store.linked" else 1)
    store.sweep("elsewhere")
    assert left <= _files(tmp_path / "home")
    store.sweep("d/")
    assert _files(tmp_path / "home") == {"other"} | ({"d/a"} if expected else set())
    assert (tmp_path / "home" / "d").exists() == bool(expected)
    store.put("d/a", b"after")
    assert store.get("d/a") == b"after"


def test_sweep_leaves_the_unfinished_file_of_a_live_process(tmp_path: Path) -> None:
    script = f"""
import sys
from holdfast.checkpoint.store import local
from holdfast.checkpoint.store.local import LocalStore
def wait(point):
    if point == "store.synced":
        print(point, flush=True)
        sys.stdin.readline()
local.failpoint = wait
LocalStore({str(tmp_path)!r}).put("d/a", b"x" * 5000)
"""
    child = _start(script)
    assert _line_of(child) == "store.synced\n"
    store = LocalStore(tmp_path)
    _put_killed(tmp_path, "store.written", if_absent=False, name="d/b")
    assert len(_files(tmp_path)) == 2
    store.sweep()
    assert len(_files(tmp_path)) == 1
    assert list(store.list()) == []
    _go_on(child, "\n")
    assert store.get("d/a") == b"x" * 5000
    assert _files(tmp_path) == {"d/a"}


def test_a_put_that_a_sweep_overtook_starts_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between creating and locking its file, a put looks dead. It detects that the file was removed."""
    store, other, real = LocalStore(tmp_path), LocalStore(tmp_path), fcntl.flock
    swept = []

    def flock(fd: int, operation: int) -> None:
        if operation == fcntl.LOCK_EX and not swept:
            swept.extend(_files(tmp_path))
            other.sweep()
        real(fd, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    store.put("d/a", b"x")
    assert len(swept) == 1
    assert _files(tmp_path) == {"d/a"}
    assert store.get("d/a") == b"x"


def test_many_processes_race_for_one_name(tmp_path: Path) -> None:
    script = f"""
import sys
from holdfast.errors import Conflict
from holdfast.checkpoint.store import open_store
store = open_store({str(tmp_path)!r})
print("ready", flush=True)
sys.stdin.readline()
try:
    store.put("d/a", sys.argv[1].encode() * 100_000, if_absent=True)
    print("won")
except Conflict:
    print("lost")
"""
    children = [_start(script, str(number)) for number in range(4)]
    assert [_line_of(child) for child in children] == ["ready\n"] * 4
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    said = [_go_on(child).strip() for child in children]
    assert sorted(said) == ["lost"] * 3 + ["won"]
    assert LocalStore(tmp_path).get("d/a") == b"%d" % said.index("won") * 100_000
    assert _files(tmp_path) == {"d/a"}
