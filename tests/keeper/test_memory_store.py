"""Memory tier: arenas of keepers whose trainer died, offered over a socket and read without a copy."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.checkpoint.format import names
from holdfast.checkpoint.format.layout import FillTarget
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.home.documents import read_manifest
from holdfast.checkpoint.keeper import MemoryTierStore, free_memory_tier, memory_store, wait_for_orphans
from holdfast.checkpoint.keeper.lockfile import KeeperInfo, Lockfile, running_keepers, runtime_dir
from holdfast.checkpoint.keeper.memory_store import offer_images
from holdfast.checkpoint.keeper.messages import Image
from holdfast.checkpoint.restore.fill import fill
from holdfast.checkpoint.restore.parts import Parts
from holdfast.checkpoint.stage import Arena
from holdfast.checkpoint.store.memory import MemoryStore
from holdfast.checkpoint.store.tiered import TieredStore
from holdfast.errors import Corrupt, NotFound, Unsupported
from holdfast.system.linux.processes import start_time
from making import make_checkpoint, make_home
from nursery import shared

HOME = "/somewhere/run"
WAIT_S = 600.0


class Holder:
    """Keeper with an arena, and a thread that offers it."""

    def __init__(self, content: bytes, images: tuple[Image, ...], *, timeout_s: float = WAIT_S) -> None:
        self.fd = os.memfd_create("arena")
        os.write(self.fd, content)
        self.map = mmap.mmap(self.fd, len(content))
        dead_trainer = KeeperInfo(1, 0, os.getpid(), (start_time(os.getpid()) or 0) + 1, busy=True)
        self.lockfile = Lockfile.create(HOME, dead_trainer)
        self.thread = threading.Thread(target=self._offer, args=(images, timeout_s), daemon=True)
        self.thread.start()

    def _offer(self, images: tuple[Image, ...], timeout_s: float) -> None:
        offer_images(self.lockfile, lambda: {self.fd: images}, timeout_s=timeout_s)
        self.lockfile.remove()

    def wait_until_offered(self) -> None:
        while not any(info.held and path == self.lockfile.path for path, info in list(running_keepers(HOME))):
            self.thread.join(0.001)
            assert self.thread.is_alive()


@pytest.fixture
def hold() -> Iterator[Callable[..., Holder]]:
    holders: list[Holder] = []

    def make(content: bytes, images: tuple[Image, ...], *, timeout_s: float = WAIT_S) -> Holder:
        holders.append(Holder(content, images, timeout_s=timeout_s))
        if timeout_s == WAIT_S:
            holders[-1].wait_until_offered()
        return holders[-1]

    yield make
    free_memory_tier(HOME)
    for holder in holders:
        holder.thread.join(WAIT_S)
        assert not holder.thread.is_alive()


def test_the_offer_of_a_keeper_stays_when_it_gives_up_the_saves_that_a_lost_host_has_no_part_of(
    hold: Callable[..., Holder],
) -> None:
    """With peers it offers its memory before that, and a new host may come later."""
    holder = hold(b"abcdefgh", (Image("a", 0, 8),))
    before = holder.lockfile.info
    holder.lockfile.set_done()
    found, holder.lockfile.info = holder.lockfile.info, before
    holder.lockfile.set_done(held=before.held)  # so that the end of the test finds it
    assert found.held == before.held


def test_a_keeper_that_many_processes_ask_at_once_is_not_passed_over(
    hold: Callable[..., Holder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its queue of connections is full for a moment."""
    monkeypatch.setattr(memory_store, "_BACKLOG", 1)
    holder = hold(b"abcdefgh", (Image("a", 0, 8),))
    others: list[socket.socket] = []
    with memory_store._short_path(holder.lockfile.path.with_suffix(".sock")) as address:
        while True:
            others.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK))
            try:
                others[-1].connect(address)
            except BlockingIOError:
                break

    def leave() -> None:
        for one in others:
            one.close()

    class Socket(socket.socket):
        def connect(self, address: Any) -> None:
            threading.Thread(target=leave).start()
            super().connect(address)

    with monkeypatch.context() as patch:
        patch.setattr(socket, "socket", Socket)
        store = MemoryTierStore(HOME)
    assert store
    assert store.get("a") == b"abcdefgh"


def test_images_are_objects(hold: Callable[..., Holder]) -> None:
    hold(b"abcdefgh", (Image("a/b", 2, 4), Image("c", 6, 2)))
    store = MemoryTierStore(HOME)
    assert store
    assert sorted((entry.name, entry.num_bytes) for entry in store.list()) == [("a/b", 4), ("c", 2)]
    assert store.get("a/b") == b"cdef"
    assert store.size("c") == 2
    assert store.size("d") is None
    target = memoryview(bytearray(2))
    store.read_into("a/b", 1, target)
    assert target == b"de"
    assert store.read_view("a/b", 3, 1) == b"f"


def test_reading_a_missing_image_raises(hold: Callable[..., Holder]) -> None:
    hold(b"abcdefgh", (Image("a", 0, 4),))
    store = MemoryTierStore(HOME)
    with pytest.raises(NotFound):
        store.read_view("b", 0, 1)
    with pytest.raises(Corrupt, match="ends at 4"):
        store.read_view("a", 3, 2)
    for write in (lambda: store.put("a", b""), lambda: store.delete("a"), store.sweep):
        with pytest.raises(Unsupported):
            write()


def test_a_view_outlives_its_keeper(hold: Callable[..., Holder]) -> None:
    holder = hold(b"abcdefgh", (Image("a", 0, 8),))
    store = MemoryTierStore(HOME)
    view = store.read_view("a", 0, 8)
    store.close()
    free_memory_tier(HOME)
    holder.thread.join(WAIT_S)
    assert not holder.thread.is_alive()
    assert view == b"abcdefgh"
    assert not MemoryTierStore(HOME)
    assert not list(running_keepers(HOME))


def test_images_are_freed_after_the_time_limit(hold: Callable[..., Holder]) -> None:
    holder = hold(b"abcdefgh", (Image("a", 0, 8),), timeout_s=0.01)
    holder.thread.join(WAIT_S)
    assert not holder.thread.is_alive()


def test_a_lock_file_that_is_still_empty_is_ignored() -> None:
    """Ranks start their keepers at the same time: one finds the other's lock file locked, and still empty."""
    path = runtime_dir(HOME) / "a0001-r00000-new.lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert list(running_keepers(HOME)) == []
        assert not MemoryTierStore(HOME)
    assert path.exists(), "it is not deleted"


def test_a_keeper_that_only_offers_images_is_not_waited_for(hold: Callable[..., Holder]) -> None:
    hold(b"abcdefgh", (Image("a", 0, 8),))
    assert wait_for_orphans(HOME, timeout_s=0.0, notify=print)


def test_several_keepers_are_one_store(hold: Callable[..., Holder]) -> None:
    hold(b"abcd", (Image("a", 0, 4),))
    hold(b"efgh", (Image("b", 0, 4),))
    store = MemoryTierStore(HOME)
    while not store.size("b"):  # the second offer may not have started yet
        store = MemoryTierStore(HOME)
    assert (store.get("a"), store.get("b")) == (b"abcd", b"efgh")


def test_runtime_folders_may_have_long_names(
    hold: Callable[..., Holder], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket address has 107 bytes; folders of batch systems may be longer."""
    monkeypatch.setenv("HOLDFAST_RUNTIME_DIR", str(tmp_path / ("x" * 120)))
    hold(b"abcd", (Image("a", 0, 4),))
    assert MemoryTierStore(HOME).get("a") == b"abcd"


@pytest.mark.parametrize("is_overwritten", [False, True])
def test_a_restore_reads_good_chunks_from_memory_and_the_others_from_home(
    hold: Callable[..., Holder], *, is_overwritten: bool
) -> None:
    """Chunks that the next save has begun to overwrite do not match their hashes: home's do."""
    home = MemoryStore("home")
    make_home(home)
    saved = torch.arange(5_000_000, dtype=torch.float32)
    make_checkpoint(home, 7, 1, [{"w": saved}])
    name = names.data(7, 1, 0)
    content = home.get(name)
    holder = hold(content, (Image(name, 0, len(content)),))
    if is_overwritten:
        holder.map[5000:6000] = bytes(1000)
    target = torch.zeros(5_000_000)
    manifest = read_manifest(home, CheckpointId(attempt=1, step=7), None)
    stats = fill(Parts(TieredStore([MemoryTierStore(HOME), home]), manifest), {"w": [FillTarget(target)]}, 0)
    assert torch.equal(target, saved)
    assert set(stats.sources) == ({"memory", "memory://home"} if is_overwritten else {"memory"})
    assert len(stats.recovered_from) == is_overwritten
    assert sum(stats.sources.values()) == stats.num_bytes


@pytest.mark.parametrize("harm", ["truncated to nothing", "truncated", "freed"])
def test_an_arena_that_has_lost_its_memory_is_skipped(hold: Callable[..., Holder], harm: str) -> None:
    """The trainer freed it for a larger one, and was killed before it could notify its keeper."""
    holder = hold(b"a" * 8192, (Image("a", 0, 8192), Image("b", 4096, 4096)))
    hold(b"cccc", (Image("c", 0, 4),))
    if harm == "freed":
        arena = Arena(1, 8192)
        os.dup2(holder.fd, arena.fd)
        arena.free()
    else:
        os.ftruncate(holder.fd, 0 if "nothing" in harm else 5000)
    held = MemoryTierStore(HOME)
    assert {entry.name for entry in held.list()} == {"c"}
    assert held.get("c") == b"cccc"


def test_a_restart_after_the_state_has_grown_restores_from_the_next_tier(tmp_path: Path) -> None:
    """The save before was of a smaller state: its arena was freed before the trainer was killed."""
    script = """
import os, signal, sys, torch, holdfast
state = {"x": torch.arange(1000.0)}
ckpt = holdfast.Checkpointer(sys.argv[1], state, quiet=True, memory=holdfast.Memory("40MiB", keep_for="1m"))
ckpt.save(1).wait_durable()
state["x"] = torch.arange(8_000_000.0)
ckpt._components.pipeline.arenas.acquire(32_100_000)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = shared().run(["-c", script, str(tmp_path / "home")])
    assert done.returncode == -signal.SIGKILL, done.stderr
    state = {"x": torch.zeros(1000)}
    with holdfast.Checkpointer(tmp_path / "home", state, quiet=True) as ckpt:
        assert ckpt.restore() == 1
    assert torch.equal(state["x"], torch.arange(1000.0))
