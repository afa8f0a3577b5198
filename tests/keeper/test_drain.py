"""The drain: verified on the way, nothing twice, newest first, paced, and fenced."""

from __future__ import annotations

import queue
import threading
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.errors import Conflict, Corrupt, Internal, InvalidInput, RetryLater
from holdfast.format import names
from holdfast.keeper.drain import BLOCK_BYTES, Drain, Drained, paced, verified_blocks
from holdfast.keeper.history import History
from holdfast.keeper.terms import Terms
from holdfast.restore.find import candidates, list_home, read_manifest, read_part
from holdfast.store.local import LocalStore
from holdfast.store.memory import MemoryStore
from holdfast.testing import FaultyStore
from making import make_checkpoint, make_home

WAIT_S = 60.0


class Bench:
    """A near tier with checkpoints, a home that can be told to fail, and a drain between them."""

    def __init__(self, steps: tuple[int, ...], *, patience_s: float = WAIT_S, world_size: int = 1) -> None:
        self.near, self.home = FaultyStore(MemoryStore("near")), FaultyStore(MemoryStore("home"))
        for store in (self.near, self.home):
            make_home(store)
        for step in steps:
            shared = {"w": torch.full((4000,), float(step))}
            make_checkpoint(self.near, step, 1, [shared, *({} for _ in range(world_size - 1))])
        self.told: queue.Queue[Drained] = queue.Queue()
        self.terms = Terms(
            "home", "run-one", 1, 0, world_size, True, 3, None, 5.0, 5.0, local="near", patience_s=patience_s
        )
        self.drain = self.make(self.terms)

    def make(self, terms: Terms) -> Drain:
        return Drain(self.near, self.home, terms, History(self.near, terms), self.told.put)

    def next_told(self) -> Drained:
        return self.told.get(timeout=WAIT_S)

    def in_home(self) -> list[tuple[int, int]]:
        return candidates(list_home(self.home))


def same_objects(near: FaultyStore, home: FaultyStore, step: int) -> bool:
    prefix = names.step_dir(step) + "/"
    found = {entry.name: near.get(entry.name) for entry in near.list(prefix)}
    return found == {entry.name: home.get(entry.name) for entry in home.list(prefix)}


def test_a_checkpoint_comes_home_byte_for_byte() -> None:
    bench = Bench((10,))
    bench.drain.submit(1, 10)
    told = bench.next_told()
    assert told.error is None
    assert told.num_bytes > 16_000
    assert same_objects(bench.near, bench.home, 10)
    assert holdfast.open(bench.home).verify().is_good


def test_the_manifest_is_the_last_to_come() -> None:
    bench = Bench((10,))
    bench.drain.submit(1, 10)
    bench.next_told()
    puts = [call.name for call in bench.home.calls("put") if call.name.startswith("step-")]
    assert puts[-1] == names.manifest(10, 1)
    assert len(puts) == 3


def test_what_is_there_is_not_sent_again() -> None:
    bench = Bench((10,))
    bench.drain.submit(1, 10)
    bench.next_told()
    bench.drain.submit(1, 10)
    assert bench.next_told().num_bytes == 0


def test_the_newest_comes_first_and_older_ones_are_forgotten() -> None:
    bench = Bench((10, 20, 30))
    gate = bench.near.hold("get")
    bench.drain.submit(1, 10)
    assert gate.reached.wait(WAIT_S)
    bench.drain.submit(1, 20)
    bench.drain.submit(1, 30)
    gate.opened.set()
    assert [bench.next_told().step, bench.next_told().step] == [10, 30]
    bench.drain.close()
    assert bench.in_home() == [(1, 30), (1, 10)]


def test_close_waits_for_what_is_due() -> None:
    bench = Bench((10,))
    bench.drain.submit(1, 10)
    bench.drain.close()
    assert bench.in_home() == [(1, 10)]


def test_a_home_that_fails_is_tried_again_until_it_works() -> None:
    bench = Bench((10,))
    bench.home.fail("put", RetryLater("503"), times=3, matching="step-")
    bench.drain.submit(1, 10)
    told = [bench.next_told() for _ in range(4)]
    assert [(one.error is None, one.is_over) for one in told] == [(False, False)] * 3 + [(True, True)]
    assert same_objects(bench.near, bench.home, 10)


def test_a_home_that_fails_for_too_long_is_given_up_and_what_is_near_stays() -> None:
    bench = Bench((10,), patience_s=0.0)
    bench.home.fail("put", RetryLater("503"), times=None, matching="step-")
    bench.drain.submit(1, 10)
    told = bench.next_told()
    assert isinstance(told.error, RetryLater)
    assert told.is_over
    assert candidates(list_home(bench.near)) == [(1, 10)]
    bench.drain.close()


def test_a_damaged_copy_is_not_spread() -> None:
    bench = Bench((10,))
    name = names.data(10, 1, 0)
    content = bytearray(bench.near.get(name))
    content[-5] ^= 1
    bench.near.put(name, content)
    bench.drain.submit(1, 10)
    told = bench.next_told()
    assert isinstance(told.error, Corrupt)
    assert "damaged in chunk" in str(told.error)
    assert bench.in_home() == []
    assert bench.home.size(name) is None


@pytest.mark.parametrize("error", [InvalidInput("no such name"), ZeroDivisionError("a bug")])
def test_no_failure_ends_the_drain_in_silence(error: Exception) -> None:
    """Whoever waits for a checkpoint in home hears why it does not come, and the next one is drained."""
    bench = Bench((10, 20))
    bench.home.fail("put", error, matching="step-")
    bench.drain.submit(1, 10)
    told = bench.next_told()
    assert told.is_over
    assert isinstance(told.error, InvalidInput if isinstance(error, InvalidInput) else Internal)
    bench.drain.submit(1, 20)
    assert bench.next_told().error is None
    assert bench.in_home() == [(1, 20)]


def test_a_fenced_attempt_brings_nothing_home() -> None:
    bench = Bench((10,))
    make_home(bench.home, attempts=(1, 2))
    bench.drain.submit(1, 10)
    assert isinstance(bench.next_told().error, Conflict)
    assert bench.in_home() == []
    bench.drain.close()


def test_the_next_attempt_brings_home_what_an_older_one_left(tmp_path: Path) -> None:
    bench = Bench((10,))
    make_home(bench.home, attempts=(1, 2))
    terms = Terms("home", "run-one", 2, 0, 1, True, 3, None, 5.0, 5.0, local="near")
    bench.make(terms).submit(1, 10)
    assert bench.next_told().error is None
    assert bench.in_home() == [(1, 10)]


def test_rank_0_waits_for_the_files_of_the_others() -> None:
    bench = Bench((10,), world_size=2)
    gate = bench.home.hold("list", nth=3)
    bench.drain.submit(1, 10)
    assert gate.reached.wait(WAIT_S)
    assert bench.in_home() == []
    for name in (names.data(10, 1, 1), names.part(10, 1, 1)):
        bench.home.put(name, bench.near.get(name))
    gate.opened.set()
    assert bench.next_told().error is None
    assert bench.in_home() == [(1, 10)]


def test_blocks_are_checked_and_in_order(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    make_home(store)
    manifest = make_checkpoint(store, 5, 1, [{"w": torch.arange(3 << 20, dtype=torch.float32)}])
    file = read_part(store, read_manifest(store, 5, 1, None), 0).file
    assert file.num_bytes > BLOCK_BYTES
    blocks = [bytes(block) for block in verified_blocks(store, names.data(5, 1, 0), file)]
    assert b"".join(blocks) == store.get(names.data(5, 1, 0))
    assert manifest.parts[0].data_bytes == sum(map(len, blocks))


def test_a_pace_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock of its own: 4 blocks of 100 bytes at 50 bytes a second take 8 seconds."""
    now_s = [0.0]
    lock = threading.Lock()

    def sleep(seconds: float) -> None:
        with lock:
            now_s[0] += seconds

    monkeypatch.setattr("holdfast.keeper.drain.time.monotonic", lambda: now_s[0])
    monkeypatch.setattr("holdfast.keeper.drain.time.sleep", sleep)
    assert len(list(paced([memoryview(bytes(100))] * 4, 50.0))) == 4
    assert now_s[0] == pytest.approx(8.0)
