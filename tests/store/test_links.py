"""Hostile homes: links, FIFOs and devices inside a home are refused, and files outside stay untouched."""

from __future__ import annotations

import os
import signal
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from holdfast.checkpoint.store import ObjectInfo, Store
from holdfast.checkpoint.store.local import LocalStore
from holdfast.errors import Corrupt, HoldfastError, InvalidInput

SECRET = b"export TOKEN=not-for-you\n"
LIMIT_S = 600


@pytest.fixture(autouse=True)
def _alarm() -> Iterator[None]:
    """Fail a call that waits for a FIFO's other end, instead of blocking the suite."""

    def expired(*_: object) -> None:
        message = "the call hangs"
        raise TimeoutError(message)

    before = signal.signal(signal.SIGALRM, expired)
    signal.alarm(LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder beside the home with a file that must not be read or changed."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "bashrc").write_bytes(SECRET)
    return folder


@pytest.fixture
def home(tmp_path: Path) -> Path:
    place = tmp_path / "home"
    LocalStore(place).put("d/whole", b"whole")
    return place


def _snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_ino) for path in folder.iterdir()}


Act = Callable[[Store, str], object]
CHANGES = [
    pytest.param(lambda store, name: store.append(name, b"evil\n"), id="append"),
    pytest.param(lambda store, name: store.put(name, b"evil\n"), id="put"),
    pytest.param(lambda store, name: store.put(name, b"evil\n", if_absent=True), id="put if absent"),
    pytest.param(lambda store, name: store.put_parts(name, [b"evil\n"], 5), id="put parts"),
    pytest.param(lambda store, name: store.link("d/whole", name), id="link"),
    pytest.param(lambda store, name: store.delete(name), id="delete"),
]
READS = [
    pytest.param(lambda store, name: store.get(name), id="get"),
    pytest.param(lambda store, name: store.read_into(name, 0, memoryview(bytearray(5))), id="read_into"),
    pytest.param(lambda store, name: store.size(name), id="size"),
]


@pytest.mark.parametrize("change", CHANGES)
def test_the_target_folder_of_a_link_is_not_changed(home: Path, outside: Path, change: Act) -> None:
    (home / "step-00000001").symlink_to(outside)
    (home / "d" / "up").symlink_to("../../outside")
    before = _snapshot(outside)
    for name in ("step-00000001/bashrc", "step-00000001/new", "d/up/bashrc", "step-00000001/made/new"):
        with pytest.raises(InvalidInput, match="symbolic link"):
            change(LocalStore(home), name)
    assert _snapshot(outside) == before


@pytest.mark.parametrize("read", READS)
def test_nothing_is_read_through_a_link(home: Path, outside: Path, read: Act) -> None:
    (home / "file").symlink_to(outside / "bashrc")
    (home / "relative").symlink_to("../outside/bashrc")
    (home / "inside").symlink_to("d/whole")
    (home / "dangling").symlink_to(outside / "missing")
    (home / "loop").symlink_to("loop")
    (home / "folder").symlink_to(outside)
    for name in ("file", "relative", "inside", "dangling", "loop", "folder", "folder/bashrc"):
        with pytest.raises(Corrupt, match="symbolic link") as caught:
            read(LocalStore(home), name)
        assert str(home / name) in str(caught.value)
        assert "TOKEN" not in str(caught.value)


LOGS = {
    # A stranger's home had its next history file linked to ~/.bashrc.
    "a link": (lambda file, log: log.symlink_to(file), "symbolic link"),
    "a dangling link": (lambda file, log: log.symlink_to(file.with_name("made")), "symbolic link"),
    # A hard link needs no read permission, so the file may belong to anybody.
    "a second name": (os.link, "hard links"),
}


@pytest.mark.parametrize("kind", LOGS)
def test_a_log_that_is_another_file_is_not_appended_to(home: Path, outside: Path, kind: str) -> None:
    make, match = LOGS[kind]
    make(outside / "bashrc", home / "d" / "log")
    before = _snapshot(outside)
    with pytest.raises(InvalidInput, match=match):
        LocalStore(home).append("d/log", b"$(cmd)\n")
    assert _snapshot(outside) == before


def test_a_put_and_a_delete_replace_a_link_and_leave_its_target_alone(home: Path, outside: Path) -> None:
    for name in ("put", "deleted"):
        (home / name).symlink_to(outside / "bashrc")
    LocalStore(home).put("put", b"ours")
    assert LocalStore(home).get("put") == b"ours"
    LocalStore(home).delete("deleted")
    assert not (home / "deleted").is_symlink()
    assert (outside / "bashrc").read_bytes() == SECRET


def _make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


MAKERS: dict[str, Callable[[Path], None]] = {
    "fifo": os.mkfifo,
    "socket": _make_socket,
    "device": lambda path: os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5)),  # /dev/zero: endless
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_irregular_files_are_neither_read_nor_written(home: Path, make: Callable[[Path], None]) -> None:
    try:
        make(home / "odd")
    except PermissionError:
        pytest.skip("only root may make devices")
    store = LocalStore(home)
    for read in (lambda: store.get("odd"), lambda: store.size("odd")):
        with pytest.raises(Corrupt, match="not a regular file"):
            read()
    for change in (lambda: store.append("odd", b"x"), lambda: store.link("odd", "other")):
        with pytest.raises(InvalidInput, match="not a regular file"):
            change()
    assert ObjectInfo("odd", 0) in list(store.list())
    store.delete("odd")
    assert {entry.name for entry in store.list()} == {"d/whole"}


def test_a_fifo_with_a_reader_is_not_written(home: Path) -> None:
    os.mkfifo(home / "log")
    reader = os.open(home / "log", os.O_RDONLY | os.O_NONBLOCK)
    try:
        with pytest.raises(InvalidInput, match="not a regular file"):
            LocalStore(home).append("log", b"x")
        assert os.read(reader, 10) == b""
    finally:
        os.close(reader)


def test_foreign_unfinished_files_survive_a_sweep(home: Path, outside: Path) -> None:
    (home / ".unfinished-1-link").symlink_to(outside / "bashrc")
    os.mkfifo(home / ".unfinished-1-fifo")
    LocalStore(home).sweep()
    assert _snapshot(outside) == {"bashrc": (SECRET, (outside / "bashrc").stat().st_ino)}
    assert {entry.name for entry in LocalStore(home).list()} == {"d/whole"}


def test_linked_folders_are_not_walked(home: Path, outside: Path) -> None:
    (home / "d" / "up").symlink_to(outside)
    assert {entry.name for entry in LocalStore(home).list()} == {"d/whole", "d/up"}
    with pytest.raises(InvalidInput, match="symbolic link"):
        list(LocalStore(home).list("d/up/"))


def test_the_home_itself_may_be_reached_through_links(tmp_path: Path) -> None:
    """A user's own link to a large disk is allowed. It is resolved once, so that one run has one home."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    store = LocalStore(tmp_path / "runs" / "gpt")
    store.put("a", b"first")
    (tmp_path / "runs").unlink()
    (tmp_path / "other" / "gpt").mkdir(parents=True)
    (tmp_path / "runs").symlink_to(tmp_path / "other")
    store.put("b", b"second")
    assert {path.name for path in (tmp_path / "disk" / "gpt").iterdir()} == {"a", "b"}
    assert list((tmp_path / "other" / "gpt").iterdir()) == []


def test_a_folder_that_becomes_a_link_during_writes_is_not_followed(home: Path, outside: Path) -> None:
    """An attacker swaps a folder for a link and back while objects are written."""
    store, stop = LocalStore(home), threading.Event()

    def swap() -> None:
        place, kept = home / "t", home / "kept"
        while not stop.is_set():
            with suppress(OSError):
                place.rename(kept)
            with suppress(OSError):
                place.symlink_to(outside)
                place.unlink()
            with suppress(OSError):
                kept.rename(place)

    thread = threading.Thread(target=swap)
    thread.start()
    written = 0
    try:
        for number in range(300):
            with suppress(HoldfastError):
                store.append(f"t/log-{number}", b"x")
                written += 1
    finally:
        stop.set()
        thread.join()
    assert written
    assert {path.name for path in outside.iterdir()} == {"bashrc"}
    assert (outside / "bashrc").read_bytes() == SECRET
