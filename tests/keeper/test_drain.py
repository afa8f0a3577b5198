"""The drain: verified on the way, nothing twice, newest first, paced, and fenced."""

from __future__ import annotations

import dataclasses
import math
import queue
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from typing_extensions import override

import holdfast
from faulty_store import FaultyStore
from holdfast.checkpoint.format import names
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.home.documents import read_manifest, read_part
from holdfast.checkpoint.home.history import History
from holdfast.checkpoint.home.listing import candidates, list_home
from holdfast.checkpoint.home.metrics import SaveValues, read_metrics, write_metrics
from holdfast.checkpoint.keeper.committer import Committed, PendingSave
from holdfast.checkpoint.keeper.config import KeeperConfig
from holdfast.checkpoint.keeper.drain import Drain
from holdfast.checkpoint.keeper.messages import Stage
from holdfast.checkpoint.keeper.persist import BLOCK_BYTES, verified_blocks
from holdfast.checkpoint.keeper.reports import Problem, Reports
from holdfast.checkpoint.keeper.tiers import KeeperTiers
from holdfast.checkpoint.retention import Keep
from holdfast.checkpoint.store import Store
from holdfast.checkpoint.store.local import LocalStore
from holdfast.checkpoint.store.memory import MemoryStore
from holdfast.errors import Conflict, Corrupt, HoldfastError, Internal, InvalidInput, NotFound, RetryLater
from making import RecordingInbox, make_checkpoint, make_components, make_home

WAIT_S = 600.0


@dataclasses.dataclass(frozen=True)
class Told:
    """Outcome of a try to send a checkpoint home."""

    step: int
    error: HoldfastError | None = None
    num_bytes: int = 0
    is_over: bool = True


class RecordingReports(Reports):
    """Reports that keep the outcomes of a drain."""

    def __init__(self, store: Store, config: KeeperConfig, told: queue.Queue[Told]) -> None:
        super().__init__(History(store, config.writer), RecordingInbox(), "local", config.home)
        self._told = told

    @override
    def reached(self, step: int, stage: Stage, *, num_bytes: int = 0, **facts: Any) -> None:
        assert stage == "in home"
        self._told.put(Told(step, num_bytes=num_bytes))

    @override
    def failed(self, step: int, error: HoldfastError, *, in_home: bool = False) -> None:
        self._told.put(Told(step, error))

    @override
    def warn(self, problem: Problem, step: int, error: HoldfastError, *, tier: str = "home") -> None:
        if problem == "drain-delayed":
            self._told.put(Told(step, error, is_over=False))


def make_drain(near: Store, home: Store, config: KeeperConfig, told: queue.Queue[Told]) -> Drain:
    """A drain that sends each checkpoint of the near tier at once."""
    reports = RecordingReports(near, config, told)
    return Drain(replace(make_components(near, config), reports=reports), home, lambda _: True)


class Bench:
    """A near tier with checkpoints, a home that can be made to fail, and a drain between them."""

    def __init__(self, steps: tuple[int, ...], *, patience_s: float = WAIT_S, world_size: int = 1) -> None:
        self.near, self.home = FaultyStore(MemoryStore("near")), FaultyStore(MemoryStore("home"))
        for store in (self.near, self.home):
            make_home(store)
        for step in steps:
            shared = {"w": torch.full((4000,), float(step))}
            make_checkpoint(self.near, step, 1, [shared, *({} for _ in range(world_size - 1))])
        self.told: queue.Queue[Told] = queue.Queue()
        self.config = KeeperConfig(
            "home", "run-one", 1, 0, world_size, True, Keep(3), 5.0, 5.0, local="near", patience_s=patience_s
        )
        self.drain = self.make(self.config)

    def make(self, config: KeeperConfig) -> Drain:
        return make_drain(self.near, self.home, config, self.told)

    def next_told(self) -> Told:
        return self.told.get(timeout=WAIT_S)

    def in_home(self) -> list[CheckpointId]:
        return candidates(list_home(self.home))


def same_objects(near: FaultyStore, home: FaultyStore, step: int) -> bool:
    prefix = names.step_dir(step) + "/"
    found = {entry.name: near.get(entry.name) for entry in near.list(prefix)}
    return found == {entry.name: home.get(entry.name) for entry in home.list(prefix)}


def test_a_checkpoint_is_drained_once_byte_for_byte_and_its_manifest_last() -> None:
    bench = Bench((10,))
    bench.drain.request(CheckpointId(1, 10))
    told = bench.next_told()
    assert told.error is None
    assert told.num_bytes > 16_000
    assert same_objects(bench.near, bench.home, 10)
    assert holdfast.open(bench.home).verify().is_good
    puts = [call.name for call in bench.home.calls("put") if call.name.startswith("step-")]
    assert puts[-1] == names.manifest(10, 1)
    assert len(puts) == 3
    bench.drain.request(CheckpointId(1, 10))
    assert bench.next_told().num_bytes == 0


def test_the_newest_is_drained_first_and_older_ones_are_forgotten() -> None:
    bench = Bench((10, 20, 30))
    gate = bench.near.hold("get")
    bench.drain.request(CheckpointId(1, 10))
    assert gate.reached.wait(WAIT_S)
    bench.drain.request(CheckpointId(1, 20))
    bench.drain.request(CheckpointId(1, 30))
    gate.opened.set()
    assert [bench.next_told().step, bench.next_told().step] == [10, 30]
    bench.drain.close()
    assert bench.in_home() == [(1, 30), (1, 10)]


def test_a_local_checkpoint_that_was_kept_for_its_drain_is_deleted_after_it() -> None:
    """Retention runs after each save. As no other save may follow, it runs again after the drain."""
    bench = Bench(())
    config = replace(bench.config, keep_local=1)
    tiers = KeeperTiers(make_components(bench.near, config, bench.home), set)
    gate = bench.home.hold("put", matching=names.step_dir(10))
    for step in (10, 20):
        make_checkpoint(bench.near, step, 1, [{"w": torch.full((4000,), float(step))}])
        tiers.finish(PendingSave(step, to_home=step == 10), Committed(()), 0.0)
        assert gate.reached.wait(WAIT_S)
        tiers.join_retention()
    assert candidates(list_home(bench.near)) == [(1, 20), (1, 10)], "it is still needed"
    gate.opened.set()
    tiers.close(with_newest=False)
    assert bench.in_home() == [(1, 10)]
    assert candidates(list_home(bench.near)) == [(1, 20)]


def test_a_drain_is_retried_until_home_works() -> None:
    bench = Bench((10,))
    bench.home.fail("put", RetryLater("503"), times=3, matching="step-")
    bench.drain.request(CheckpointId(1, 10))
    told = [bench.next_told() for _ in range(2)]  # only the first of the failed tries
    assert [(one.error is None, one.is_over) for one in told] == [(False, False), (True, True)]
    assert same_objects(bench.near, bench.home, 10)


def test_a_drain_is_given_up_if_home_fails_for_too_long_and_local_checkpoints_stay() -> None:
    bench = Bench((10,), patience_s=0.0)
    bench.home.fail("put", RetryLater("503"), times=None, matching="step-")
    bench.drain.request(CheckpointId(1, 10))
    told = bench.next_told()
    assert isinstance(told.error, RetryLater)
    assert told.is_over
    assert candidates(list_home(bench.near)) == [(1, 10)]
    bench.drain.close()


def test_a_damaged_copy_is_not_drained() -> None:
    bench = Bench((10,))
    name = names.data(10, 1, 0)
    content = bytearray(bench.near.get(name))
    content[-5] ^= 1
    bench.near.put(name, content)
    bench.drain.request(CheckpointId(1, 10))
    told = bench.next_told()
    assert isinstance(told.error, Corrupt)
    assert "damaged in chunk" in str(told.error)
    assert bench.in_home() == []
    assert bench.home.size(name) is None


@pytest.mark.parametrize("error", [InvalidInput("no such name"), ZeroDivisionError("a bug")])
def test_every_failure_of_a_drain_is_reported(error: Exception) -> None:
    """A wait for the checkpoint in home raises the reason, and the next one is drained."""
    bench = Bench((10, 20))
    bench.home.fail("put", error, matching="step-")
    bench.drain.request(CheckpointId(1, 10))
    told = bench.next_told()
    assert told.is_over
    assert isinstance(told.error, InvalidInput if isinstance(error, InvalidInput) else Internal)
    bench.drain.request(CheckpointId(1, 20))
    assert bench.next_told().error is None
    assert bench.in_home() == [(1, 20)]


def test_a_fenced_attempt_drains_nothing() -> None:
    bench = Bench((10,))
    make_home(bench.home, attempts=(1, 2))
    bench.drain.request(CheckpointId(1, 10))
    assert isinstance(bench.next_told().error, Conflict)
    assert bench.in_home() == []
    bench.drain.close()


def test_the_next_attempt_drains_checkpoints_of_an_older_one(tmp_path: Path) -> None:
    bench = Bench((10,))
    make_home(bench.home, attempts=(1, 2))
    config = KeeperConfig("home", "run-one", 2, 0, 1, True, Keep(3), 5.0, 5.0, local="near")
    bench.make(config).request(CheckpointId(1, 10))
    assert bench.next_told().error is None
    assert bench.in_home() == [(1, 10)]


def test_histories_are_drained_including_those_of_killed_keepers_and_the_last_events() -> None:
    bench = Bench((10,))
    bench.near.append(names.history(1, 0), b"one\ntwo\n")
    bench.near.append(names.history(1, 1), b"of a rank that is no more\n")
    bench.home.put(names.history(1, 0), b"one\n")
    drain = bench.make(replace(bench.config, attempt=2))
    bench.near.append(names.history(2, 0), b"three\n")
    drain.request(CheckpointId(1, 10))
    assert bench.next_told().error is None
    bench.near.append(names.history(2, 0), b"four\n")
    drain.close()
    assert bench.home.get(names.history(1, 0)) == b"one\ntwo\n"
    assert bench.home.get(names.history(1, 1)) == b"of a rank that is no more\n"
    assert bench.home.get(names.history(2, 0)) == b"three\nfour\n"


def test_rank_0_waits_for_the_files_of_the_others() -> None:
    bench = Bench((10,), world_size=2)
    gate = bench.home.hold("list", nth=3)
    bench.drain.request(CheckpointId(1, 10))
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
    file = read_part(store, read_manifest(store, CheckpointId(1, 5), None), 0).file
    assert file.num_bytes > BLOCK_BYTES
    blocks = [bytes(block) for block in verified_blocks(store, names.data(5, 1, 0), file)]
    assert b"".join(blocks) == store.get(names.data(5, 1, 0))
    assert manifest.parts[0].data_bytes == sum(map(len, blocks))


class Apart:
    """A home, and two hosts whose folders have the files of one rank each, both with a drain."""

    def __init__(self, steps: tuple[int, ...], *, commit_timeout_s: float = WAIT_S) -> None:
        self.home = FaultyStore(MemoryStore("home"))
        make_home(self.home)
        self.near = [FaultyStore(MemoryStore(f"near-{rank}")) for rank in (0, 1)]
        self.whole = MemoryStore("whole")
        for step in steps:
            shared = {"w": torch.full((4000,), float(step))}
            make_checkpoint(self.whole, step, 1, [shared, {"b": torch.ones(9)}], commit=False)
        for rank, near in enumerate(self.near):
            make_home(near)
            for step in steps:
                for name in (names.data(step, 1, rank), names.part(step, 1, rank)):
                    near.put(name, self.whole.get(name))
        self.told: list[queue.Queue[Told]] = [queue.Queue(), queue.Queue()]
        self.commit_timeout_s = commit_timeout_s

    def drain(self, rank: int, attempt: int = 1) -> Drain:
        config = KeeperConfig(
            "home", "run-one", attempt, rank, 2, True, Keep(3), self.commit_timeout_s, 5.0,
            local="near", local_ranks=(rank,),
        )  # fmt: skip
        return make_drain(self.near[rank], self.home, config, self.told[rank])

    def drain_on_both(self, step: int) -> list[Drain]:
        """Drain a checkpoint on both hosts, and return their drains when it is in home."""
        drains = [self.drain(rank) for rank in (0, 1)]
        for drain in drains:
            drain.request(CheckpointId(1, step))
        assert [told.get(timeout=WAIT_S).step for told in self.told] == [step, step]
        return drains

    def in_home(self) -> list[CheckpointId]:
        return candidates(list_home(self.home))


@pytest.mark.parametrize("attempt", [1, 2])
def test_two_hosts_drain_their_files_and_rank_0_commits(attempt: int) -> None:
    """No folder has all files; the manifest is made of the parts in home, also by the next attempt."""
    apart = Apart((10,))
    make_home(apart.home, attempts=range(1, attempt + 1))
    for rank in (1, 0):
        apart.drain(rank, attempt).request(CheckpointId(1, 10))
    for told in apart.told:
        assert told.get(timeout=WAIT_S).error is None
    assert apart.in_home() == [(1, 10)]
    assert holdfast.open(apart.home).verify().is_good
    for name in (entry.name for entry in apart.whole.list("step-")):
        assert apart.home.get(name) == apart.whole.get(name)


def test_a_rank_waits_for_the_others_until_one_of_them_has_begun_a_newer_checkpoint() -> None:
    """If each drained its own newest, a slow home might never receive all files of any."""
    apart = Apart((10, 20))
    first, second = apart.drain(0), apart.drain(1)
    gate = apart.home.hold("list", nth=3)  # after the look for newer attempts, and that for what is there
    first.request(CheckpointId(1, 10))
    assert gate.reached.wait(WAIT_S)
    first.request(CheckpointId(1, 20))
    gate.opened.set()
    second.request(CheckpointId(1, 10))
    assert apart.told[0].get(timeout=WAIT_S).step == 10
    second.request(CheckpointId(1, 20))
    assert apart.told[0].get(timeout=WAIT_S).step == 20
    assert apart.in_home() == [(1, 20), (1, 10)]


@pytest.mark.parametrize("is_best", [False, True])
def test_a_rank_follows_another_that_has_begun_a_newer_checkpoint(is_best: bool) -> None:
    """The other host does not have step 10."""
    apart = Apart((10, 20))
    first, second = apart.drain(0), apart.drain(1)
    first.add_committed(CheckpointId(1, 10), is_due=True)
    for drain in (first, second):
        drain.set_best({CheckpointId(1, 20)}, is_due=True) if is_best else drain.request(CheckpointId(1, 20))
    assert apart.told[1].get(timeout=WAIT_S).step == 20
    assert apart.in_home() == [(1, 20)]


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_checkpoint_that_becomes_due_after_a_newer_one_is_not_drained(is_replaced: bool) -> None:
    """The other rank has drained the newer one first too, and would never send its files of the older one.

    A keeper that replaces a dead one has not drained the newer one itself, but it is complete in home.
    """
    apart = Apart((10, 20))
    _, second = apart.drain_on_both(20)
    late = apart.drain(1) if is_replaced else second
    late.add_committed(CheckpointId(1, 10), is_due=True)
    late.close()
    assert apart.told[1].empty()
    assert apart.in_home() == [(1, 20)]


def test_a_requested_checkpoint_is_drained_after_a_newer_one() -> None:
    bench = Bench((10, 20))
    bench.drain.request(CheckpointId(1, 20))
    assert bench.next_told().step == 20
    bench.drain.request(CheckpointId(1, 10))
    assert bench.next_told().step == 10


def test_one_of_the_best_whose_other_files_never_arrive_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer checkpoint in home does not replace it, so that its time limit counts."""
    monkeypatch.setattr("holdfast.checkpoint.keeper.drain._OVERTAKEN_S", 0.05)
    apart = Apart((10, 20))
    apart.drain_on_both(20)
    apart.commit_timeout_s = 0.3
    replacement = apart.drain(0)
    replacement.set_best({CheckpointId(1, 10)}, is_due=True)
    told = apart.told[0].get(timeout=WAIT_S)
    assert told.is_over
    assert isinstance(told.error, NotFound)
    replacement.close()


def test_files_that_never_arrive_are_given_up_and_the_next_checkpoint_is_drained() -> None:
    """The other host has failed to save it: home has not failed, and training may continue."""
    apart = Apart((10, 20), commit_timeout_s=0.05)
    drain = apart.drain(0)
    drain.request(CheckpointId(1, 10))
    told = apart.told[0].get(timeout=WAIT_S)
    assert told.is_over
    assert isinstance(told.error, NotFound)
    assert "rank-00001-a0001.json did not arrive" in str(told.error)
    for name in (names.data(20, 1, 1), names.part(20, 1, 1)):
        apart.home.put(name, apart.whole.get(name))
    drain.request(CheckpointId(1, 20))
    assert apart.told[0].get(timeout=WAIT_S).error is None
    assert apart.in_home() == [(1, 20)]


def test_a_part_without_its_whole_data_file_commits_nothing() -> None:
    apart = Apart((10,), commit_timeout_s=0.05)
    apart.home.put(names.part(10, 1, 1), apart.whole.get(names.part(10, 1, 1)))
    apart.home.put(names.data(10, 1, 1), b"half of it")
    apart.drain(0).request(CheckpointId(1, 10))
    assert isinstance(apart.told[0].get(timeout=WAIT_S).error, NotFound)
    assert apart.in_home() == []


def test_parts_that_do_not_fit_are_refused_and_both_hosts_raise_the_reason() -> None:
    apart = Apart((10,))
    other = MemoryStore()
    make_checkpoint(other, 10, 1, [{"x": torch.ones(3)}, {"y": torch.ones(3)}], commit=False)
    for name in (names.data(10, 1, 1), names.part(10, 1, 1)):
        apart.near[1].put(name, other.get(name))
    for rank in (0, 1):
        apart.drain(rank).request(CheckpointId(1, 10))
    for told in apart.told:
        one = told.get(timeout=WAIT_S)
        assert isinstance(one.error, InvalidInput)
        assert "was not committed" in str(one.error)
    assert apart.in_home() == []


def test_one_rank_of_a_host_is_responsible_for_each_saved_rank() -> None:
    """Four ranks have saved into a folder that now has ranks 1 and 3 of another world."""
    configs = [
        KeeperConfig("home", "r", 2, rank, 4, False, Keep(3), 5.0, 5.0, local="near", local_ranks=(1, 3))
        for rank in (1, 3)
    ]
    for saved in range(8):
        assert [one.is_responsible_for(saved) for one in configs].count(True) == 1
    assert configs[0].is_responsible_for(1)
    assert configs[1].is_responsible_for(3)


def test_a_part_of_another_writer_in_home_is_not_replaced() -> None:
    bench = Bench((5,))
    name, put = names.part(5, 1, 0), bench.home.inner.put

    def put_first(asked: str, data: bytes, *, if_absent: bool = False) -> None:
        if asked == name:
            bench.home.inner.put = put  # pyright: ignore[reportAttributeAccessIssue]
            put(asked, b"another writer's")
        put(asked, data, if_absent=if_absent)

    bench.home.inner.put = put_first  # pyright: ignore[reportAttributeAccessIssue]
    bench.drain.request(CheckpointId(1, 5))
    told = bench.next_told()
    assert isinstance(told.error, Corrupt)
    assert bench.home.get(name) == b"another writer's"


def losses(loss: float) -> SaveValues:
    return SaveValues({"loss": loss})


def test_metrics_are_drained_before_the_manifest() -> None:
    bench = Bench((10,))
    write_metrics(bench.near, bench.config.writer, 10, losses(2.0), {})
    bench.drain.update_metrics(CheckpointId(1, 10), losses(2.0))  # not in home: they come with it
    bench.drain.request(CheckpointId(1, 10))
    bench.next_told()
    puts = [call.name for call in bench.home.calls("put") if call.name.startswith("step-")]
    assert puts[0] == names.metrics(10, 1)
    assert names.manifest(10, 1) in puts


@pytest.mark.parametrize("fault", ["none", "home fails", "local deleted"])
def test_late_metrics_reach_the_checkpoints_that_are_in_home(fault: str) -> None:
    """Home may fail once, and the local folder may have deleted its copy since."""
    bench = Bench((10, 20))
    bench.drain.request(CheckpointId(1, 10))
    bench.next_told()
    if fault == "local deleted":
        for entry in list(bench.near.list(names.step_dir(10))):
            bench.near.delete(entry.name)
    if fault == "home fails":
        bench.home.fail("put", RetryLater("503"), matching="metrics")
    for step in (10, 20):
        bench.drain.update_metrics(CheckpointId(1, step), losses(1.0))
    bench.drain.close()
    assert read_metrics(bench.home, CheckpointId(1, 10)) == {"loss": 1.0}
    assert bench.home.size(names.metrics(20, 1)) is None


def test_late_metrics_do_not_hold_up_the_end_while_home_fails() -> None:
    """However many there are, they have the time that a keeper lingers, together."""
    bench = Bench((10, 20), patience_s=math.inf)
    drain = bench.make(replace(bench.config, linger_s=0.0))
    bench.drain.close()
    for step in (10, 20):
        drain.request(CheckpointId(1, step))
        bench.next_told()
    bench.home.fail("put", RetryLater("503"), matching="metrics", times=None)
    for step in (10, 20):
        drain.update_metrics(CheckpointId(1, step), losses(1.0))
    drain.close()
    assert read_metrics(bench.home, CheckpointId(1, 10)) == {}


def test_the_best_checkpoints_are_not_forgotten_for_newer_ones() -> None:
    bench = Bench((10, 20, 30, 40))
    gate = bench.near.hold("get")
    bench.drain.request(CheckpointId(1, 10))
    assert gate.reached.wait(WAIT_S)
    bench.drain.set_best({CheckpointId(1, 20)}, is_due=True)
    bench.drain.request(CheckpointId(1, 30))
    bench.drain.request(CheckpointId(1, 40))
    assert bench.drain.needed == {(1, 10), (1, 20), (1, 30), (1, 40)}
    gate.opened.set()
    assert [bench.next_told().step for _ in range(3)] == [10, 40, 20]
    bench.drain.set_best({CheckpointId(1, 20), CheckpointId(1, 40)}, is_due=True)  # both are there
    bench.drain.close()
    assert bench.in_home() == [(1, 40), (1, 20), (1, 10)]
    assert bench.told.empty()


def test_files_of_other_ranks_are_not_deleted_in_home_while_their_checkpoint_is_on_its_way() -> None:
    """Another rank has copied its files of the best checkpoint before this one, which deletes for all."""
    bench = Bench((10, 20))
    bench.home.put(names.part(10, 1, 1), b"of another rank")
    bench.drain.set_best({CheckpointId(1, 10)}, is_due=False)
    bench.drain.request(CheckpointId(1, 20))
    bench.drain.close()
    assert bench.in_home() == [(1, 20)]
    assert bench.home.get(names.part(10, 1, 1)) == b"of another rank"


def test_a_missing_best_checkpoint_is_given_up() -> None:
    bench = Bench((10,))
    bench.drain.set_best({CheckpointId(1, 99)}, is_due=True)
    assert isinstance(bench.next_told().error, NotFound)
    bench.drain.close()
    assert bench.told.empty()
