"""A save is reported durable once a power cut would leave it: modelled from the fsyncs of real stores."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoint.format import names
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.home.commit import commit, recover_commit
from holdfast.checkpoint.home.listing import list_home
from holdfast.checkpoint.keeper.committer import Committed, Committer, PendingSave
from holdfast.checkpoint.store import local
from holdfast.checkpoint.store.local import LocalStore
from keeper.test_commit import make_config, put_part
from making import make_components


class Disk:
    """The names that a power cut would leave below a folder: those in directories that were fsynced since.

    A name is durable when its directory was fsynced after it was made, and the directory's own name is.
    """

    def __init__(self, top: Path) -> None:
        self.top = top
        self.names: dict[str, set[tuple[str, int]]] = {}  # directory -> durable (name, inode)
        self._fsync = os.fsync

    def fsync(self, fd: int) -> None:
        self._fsync(fd)
        path = Path(f"/proc/self/fd/{fd}").readlink()
        if path.is_dir():
            self.names[str(path)] = {(entry.name, entry.inode()) for entry in os.scandir(path)}

    def has(self, path: Path) -> bool:
        """Whether a power cut now would leave this file."""
        levels = [path, *path.parents]
        below = levels[: levels.index(self.top)]
        return path.exists() and all(
            (level.name, level.stat().st_ino) in self.names.get(str(level.parent), set()) for level in below
        )

    def lacks(self, home: Path, step: int) -> list[str]:
        """The files of a step that a power cut would take."""
        names_there = sorted((home / names.step_dir(step)).iterdir())
        return [path.name for path in names_there if path.name[0] != "." and not self.has(path)]


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Disk:
    found = Disk(tmp_path)
    monkeypatch.setattr(os, "fsync", found.fsync)
    return found


@pytest.fixture
def stopped(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], object]], threading.Thread]]:
    """Run a function in a thread until a name is visible, and stop it before the fsync of the name."""
    visible, goes_on = threading.Event(), threading.Event()
    slow: set[threading.Thread] = set()
    threads: list[threading.Thread] = []

    def failpoint(name: str) -> None:
        if name == "store.linked" and threading.current_thread() in slow:
            slow.discard(threading.current_thread())
            visible.set()
            goes_on.wait(600)

    monkeypatch.setattr(local, "failpoint", failpoint)

    def run(act: Callable[[], object]) -> threading.Thread:
        thread = threading.Thread(target=act)
        slow.add(thread)
        threads.append(thread)
        thread.start()
        assert visible.wait(600)
        return thread

    yield run
    goes_on.set()
    for thread in threads:
        thread.join(600)


def make_committer(home: Path, rank: int, world_size: int) -> Committer:
    return Committer(make_components(LocalStore(home), make_config(str(home), rank, world_size)))


def test_a_rank_that_finds_a_manifest_makes_it_durable_before_it_reports(
    tmp_path: Path, disk: Disk, stopped: Callable[[Callable[[], object]], threading.Thread]
) -> None:
    home = tmp_path / "runs" / "one"
    for rank in range(3):
        put_part(LocalStore(home), rank, world_size=3)
    stopped(lambda: commit(LocalStore(home), make_config(str(home), 0, 3).writer, 5))  # its fsync is slow
    assert disk.lacks(home, 5) == ["manifest-a0001.json"], "the model sees what is not durable yet"
    assert isinstance(make_committer(home, 1, 3).try_commit(PendingSave(5), 20.0), Committed)
    assert disk.lacks(home, 5) == []


def test_a_manifest_becomes_visible_when_all_its_files_are_durable(
    tmp_path: Path,
    disk: Disk,
    stopped: Callable[[Callable[[], object]], threading.Thread],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    home = tmp_path / "runs" / "one"
    for rank in range(2):
        put_part(LocalStore(home), rank, world_size=3)
    stopped(lambda: put_part(LocalStore(home), 2, world_size=3))  # its data file's name is not yet durable
    store = LocalStore(home)
    data, part = (home / kind(5, 1, 2) for kind in (names.data, names.part))
    part.write_bytes((home / names.part(5, 1, 1)).read_bytes())  # stands for a part that came as quickly
    assert {data.name, part.name} <= set(disk.lacks(home, 5))
    lacking: list[str] = []
    link = os.link

    def watched(source: str, target: str, **more: Any) -> None:
        if target.startswith("manifest"):
            lacking.extend(disk.lacks(home, 5))
        link(source, target, **more)

    monkeypatch.setattr(os, "link", watched)
    monkeypatch.setattr("holdfast.checkpoint.home.commit.merge_parts", lambda *_, **__: None)
    monkeypatch.setattr("holdfast.checkpoint.format.manifest.document", lambda _: b"manifest")
    commit(store, make_config(str(home), 0, 3).writer, 5)
    assert lacking == []
    assert disk.lacks(home, 5) == []


def test_a_save_that_is_committed_at_the_next_start_is_durable(
    tmp_path: Path, disk: Disk, stopped: Callable[[Callable[[], object]], threading.Thread]
) -> None:
    home = tmp_path / "one"
    store = LocalStore(home)
    put_part(store, 0, world_size=1)
    stopped(lambda: commit(LocalStore(home), make_config(str(home), 0, 1).writer, 5))
    home_listing = list_home(store)
    home_listing.saved[
        CheckpointId(attempt=1, step=5)
    ].manifest_bytes = None  # the listing was a moment older
    assert recover_commit(store, home_listing.saved[CheckpointId(attempt=1, step=5)], None)
    assert disk.lacks(home, 5) == []


def test_folders_that_another_process_has_created_above_home_are_durable(tmp_path: Path, disk: Disk) -> None:
    home = tmp_path / "a" / "b" / "home"
    home.parent.mkdir(parents=True)  # by somebody who has not come to an fsync
    put_part(LocalStore(home), 0)
    assert disk.lacks(home, 5) == []


def test_a_step_folder_that_was_created_again_is_durable_again(tmp_path: Path, disk: Disk) -> None:
    """Its inode may be the same as before, so the inode does not prove that the name is durable."""
    home, store = tmp_path / "home", LocalStore(tmp_path / "home")
    put_part(store, 0)
    folder = home / names.step_dir(5)
    before = folder.stat().st_ino
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    disk.names[str(home)] = set()
    folder.mkdir()
    (folder / "part").write_bytes(b"")
    store._names._durable[names.step_dir(5)] = (folder.stat().st_dev, folder.stat().st_ino)
    assert before
    store.sync(names.step_dir(5))
    assert disk.lacks(home, 5) == []
