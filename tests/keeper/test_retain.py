"""Retention: what goes, what stays, and that a store that fails in the middle leaves only what verifies."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import holdfast
from faulty_store import FaultyStore
from holdfast.checkpoint.format import names
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.format.part import Ancestors
from holdfast.checkpoint.format.sections import Mark
from holdfast.checkpoint.home import retain
from holdfast.checkpoint.home.commit import refuse
from holdfast.checkpoint.home.listing import WriterId, candidates, list_home
from holdfast.checkpoint.home.newest import Skipped, drop_note, note_skipped
from holdfast.checkpoint.home.retain import Retention, ShareRetention
from holdfast.checkpoint.keeper import KeeperConfig
from holdfast.checkpoint.keeper.committer import Committed, PendingSave
from holdfast.checkpoint.keeper.retention_thread import TierRetention
from holdfast.checkpoint.keeper.tiers import KeeperTiers
from holdfast.checkpoint.retention import Keep
from holdfast.checkpoint.store.local import LocalStore
from holdfast.checkpoint.store.memory import MemoryStore
from holdfast.errors import InvalidInput, NotFound, RetryLater
from making import make_checkpoint, make_components, make_home, make_reports

FROM_10: Ancestors = (CheckpointId(1, 10),)

MARKS = {True: Mark.FOR, False: Mark.AGAINST, None: Mark.UNSURE}


def make_store(*saved: tuple[int, int, Ancestors]) -> FaultyStore:
    """A home with checkpoints (attempt, step, ancestors)."""
    store = FaultyStore(MemoryStore())
    make_home(store, attempts=sorted({attempt for attempt, _, _ in saved}))
    for attempt, step, line in saved:
        make_checkpoint(store, step, attempt, [{"w": torch.full((4,), float(step))}], ancestors=line)
    return store


def listed(store: FaultyStore) -> list[tuple[int, int]]:
    return sorted(
        (f.attempt, f.step)
        for e in store.list("step-")
        if (f := names.parse(e.name)) and f.kind == "manifest"
    )


def has_files(store: FaultyStore, attempt: int, step: int) -> bool:
    found = (names.parse(entry.name) for entry in store.list(names.step_dir(step)))
    return any(facts and facts.attempt == attempt for facts in found)


def check_all_verify(store: FaultyStore) -> int:
    """Verify all complete checkpoints, and return their number."""
    found = list(candidates(list_home(store)))
    for attempt, step in found:
        assert holdfast.open(store, step=step, attempt=attempt).verify().is_good
    return len(found)


def test_the_newest_checkpoints_and_the_multiples_stay() -> None:
    store = make_store(*[(1, step, ()) for step in (100, 150, 200, 250, 300, 350)])
    deleted = list(Retention(store, Keep(2, every=100)).apply(CheckpointId(1, 350), (), ()))
    assert [(one.step, one.was_complete) for one in deleted] == [(150, True), (250, True)]
    assert listed(store) == [(1, 100), (1, 200), (1, 300), (1, 350)]
    assert check_all_verify(store) == 4
    assert not has_files(store, 1, 150)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from([True, False, None]), min_size=1, max_size=8), st.integers(1, 3), st.data())
def test_the_newest_healthy_checkpoint_always_stays(
    healthy: list[bool | None], last: int, data: st.DataObject
) -> None:
    """Also while steps are committed one after the other, and when a new process begins in between."""
    store = make_store()
    retention = Retention(store, Keep(last))
    for step, one in enumerate(healthy, 1):
        make_checkpoint(store, step, tensors=[{"w": torch.ones(1)}], mark=MARKS[one])
        if data.draw(st.booleans()):
            retention = Retention(store, Keep(last))
        list(retention.apply(CheckpointId(1, step), (), ()))
        good = [number for number, found in enumerate(healthy[:step], 1) if found]
        kept = {*range(max(1, step - last + 1), step + 1), *good[-1:]}
        assert listed(store) == [(1, number) for number in sorted(kept)]


def note(store: FaultyStore, attempt: int, step: int) -> None:
    note_skipped(store, [Skipped(step, attempt, "chunk 3 is damaged")], "run")


def test_skipped_checkpoints_stay_and_do_not_count() -> None:
    """Attempt 2 resumed from 10, since 20 and 30 did not verify. It has saved them again, and more."""
    later = [(2, step, FROM_10) for step in (20, 30, 40, 50)]
    store = make_store((1, 10, ()), (1, 20, ()), (1, 30, ()), *later)
    note(store, 1, 20)
    note(store, 1, 30)
    list(Retention(store, Keep(2)).apply(CheckpointId(2, 50), FROM_10, ()))
    assert listed(store) == [(1, 20), (1, 30), (2, 40), (2, 50)]
    assert check_all_verify(store) == 4


def test_a_skipped_checkpoint_without_its_note_is_deleted_like_others() -> None:
    store = make_store((1, 10, ()), (1, 20, ()), (1, 30, ()), (1, 40, ()))
    note(store, 1, 20)
    drop_note(store, CheckpointId(attempt=1, step=20))
    list(Retention(store, Keep(2)).apply(CheckpointId(1, 40), (), ()))
    assert listed(store) == [(1, 30), (1, 40)]
    note(store, 1, 20)  # there is nothing any more that it could be about
    assert not has_files(store, 1, 20)


def test_skipped_checkpoints_of_the_three_newest_attempts_stay() -> None:
    """Otherwise a disk that damages one checkpoint after the other would fill up."""
    saved = [(attempt, 20, FROM_10) for attempt in (2, 3, 4, 5, 6)]
    store = make_store((1, 10, ()), *saved, (7, 30, FROM_10))
    for attempt, step, _ in saved:
        note(store, attempt, step)
    list(Retention(store, Keep(1)).apply(CheckpointId(7, 30), FROM_10, ()))
    assert listed(store) == [(4, 20), (5, 20), (6, 20), (7, 30)]


def test_skipped_node_local_checkpoints_stay() -> None:
    store = make_store(*[(1, step, ()) for step in (10, 20, 30, 40)])
    note(store, 1, 20)
    list(ShareRetention(store, Keep(1), lambda rank: rank == 0).apply(CheckpointId(1, 40), (), ()))
    assert {step for step in (10, 20, 30, 40) if has_files(store, 1, step)} == {20, 40}


def test_incomplete_saves_are_deleted_unless_they_are_in_work() -> None:
    store = make_store((1, 10, ()), (1, 50, ()))
    for step in (20, 30, 60):
        store.put(names.data(step, 1, 0), b"half")
    deleted = list(Retention(store, Keep(3)).apply(CheckpointId(1, 50), (), needed=[CheckpointId(1, 30)]))
    assert [(one.step, one.was_complete) for one in deleted] == [(20, False)]
    assert has_files(store, 1, 30)
    assert has_files(store, 1, 60), "newer than the newest: on its way"


def test_incomplete_saves_of_earlier_attempts_are_deleted_once_if_everything_is_kept() -> None:
    """No manifest is read, and the home is listed only once, however many checkpoints it has."""
    store = make_store((1, 10, ()), (1, 20, ()), (2, 40, FROM_10))
    for attempt, step in ((1, 30), (2, 15), (2, 50)):
        store.put(names.data(step, attempt, 0), b"half")
    store.clear_calls()
    retention = Retention(store, Keep(None))
    assert retention.is_due
    deleted = list(retention.apply(CheckpointId(2, 40), FROM_10, ()))
    assert [(one.attempt, one.step) for one in deleted] == [(1, 30)]
    assert listed(store) == [(1, 10), (1, 20), (2, 40)], "not even an abandoned one goes"
    assert has_files(store, 2, 15)
    assert has_files(store, 2, 50)
    assert not store.calls("get")
    assert not retention.is_due


def test_a_cleanup_that_fails_is_repeated_if_everything_is_kept() -> None:
    store = make_store((1, 10, ()), (2, 20, FROM_10))
    store.put(names.data(15, 1, 0), b"half")
    retention = Retention(store, Keep(None))
    store.fail("delete", RetryLater("gone for a moment"))
    with pytest.raises(RetryLater):
        list(retention.apply(CheckpointId(2, 20), FROM_10, ()))
    assert retention.is_due
    assert [one.step for one in retention.apply(CheckpointId(2, 20), FROM_10, ())] == [15]


def refuse_save(store: FaultyStore, attempt: int, step: int) -> None:
    for name in (names.data(step, attempt, 0), names.part(step, attempt, 0)):
        store.put(name, b"of a rank")
    refuse(store, WriterId("run", attempt, 0, 2), step, InvalidInput("torn", step=step))


def left(store: FaultyStore, step: int) -> list[str]:
    found = (names.parse(entry.name) for entry in store.list(names.step_dir(step)))
    return [facts.kind for facts in found if facts]


def test_a_refusal_stays_until_the_next_attempt() -> None:
    """Ranks that have not read it yet would take the save for a checkpoint that was deleted."""
    store = make_store((1, 10, ()), (1, 30, ()))
    refuse_save(store, 1, 20)
    retention = Retention(store, Keep(3))
    assert [one.step for one in retention.apply(CheckpointId(1, 30), (), ())] == [20]
    assert left(store, 20) == ["refusal"]
    assert list(retention.apply(CheckpointId(1, 30), (), ())) == []
    make_checkpoint(store, 40, 2, [{"w": torch.zeros(4)}], ancestors=(CheckpointId(1, 30),))
    assert [
        one.step for one in Retention(store, Keep(3)).apply(CheckpointId(2, 40), (CheckpointId(1, 30),), ())
    ] == [20]
    assert left(store, 20) == []


def test_refusals_that_stay_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retain, "MAX_REFUSALS", 2)
    store = make_store((1, 10, ()), (1, 60, ()))
    for step in (20, 30, 40, 50):
        refuse_save(store, 1, step)
    list(Retention(store, Keep(3)).apply(CheckpointId(1, 60), (), ()))
    assert [left(store, step) for step in (20, 30, 40, 50)] == [[], [], ["refusal"], ["refusal"]]


def test_an_incomplete_save_is_refused_before_its_files_are_deleted() -> None:
    """Keepers of other ranks must not take it for a checkpoint that was deleted."""
    store = make_store((1, 10, ()), (1, 30, ()))
    for name in (names.data(20, 1, 0), names.part(20, 1, 0)):
        store.put(name, b"of a rank")
    refused: list[int] = []

    def refuse_first(step: int) -> None:
        assert left(store, step) == ["data", "part"]
        refused.append(step)
        raise RetryLater("gone for a moment")

    with pytest.raises(RetryLater):
        list(Retention(store, Keep(1), refuse=refuse_first).apply(CheckpointId(1, 30), (), ()))
    assert refused == [20]
    assert left(store, 20) == ["data", "part"]
    list(Retention(store, Keep(1), refuse=refused.append).apply(CheckpointId(1, 30), (), ()))
    assert refused == [20, 20], "the complete step 10 is deleted without a refusal"
    assert left(store, 20) == []


def test_a_committed_save_whose_deletion_is_interrupted_is_not_refused() -> None:
    store = make_store((1, 10, ()), (1, 30, ()))
    refused: list[int] = []
    retention = Retention(store, Keep(1), refuse=refused.append)
    store.fail("delete", RetryLater("gone for a moment"), matching=names.part(10, 1, 0), after=True)
    with pytest.raises(RetryLater):
        list(retention.apply(CheckpointId(1, 30), (), ()))
    assert listed(store) == [(1, 30)]
    assert [(one.step, one.was_complete) for one in retention.apply(CheckpointId(1, 30), (), ())] == [
        (10, True)
    ]
    assert refused == []


def test_abandoned_checkpoints_are_deleted_once_training_is_past_them_and_do_not_count() -> None:
    saved = [(1, 10, ()), (1, 20, ()), (1, 30, ()), (2, 15, FROM_10)]
    store = make_store(*saved)
    assert list(Retention(store, Keep(2)).apply(CheckpointId(2, 15), FROM_10, ())) == []
    assert listed(store) == [(1, 10), (1, 20), (1, 30), (2, 15)], "not passed yet"
    make_checkpoint(store, 25, 2, [{"w": torch.zeros(4)}], ancestors=FROM_10)
    deleted = list(Retention(store, Keep(2)).apply(CheckpointId(2, 25), FROM_10, ()))
    assert sorted((one.attempt, one.step) for one in deleted) == [(1, 10), (1, 20)]
    assert listed(store) == [(1, 30), (2, 15), (2, 25)]


def test_a_checkpoint_with_an_unreadable_manifest_is_not_deleted() -> None:
    store = make_store(*[(1, step, ()) for step in (10, 20, 30)])
    name = names.manifest(10, 1)
    store.put(name, store.get(name)[:-20])
    deleted = list(Retention(store, Keep(1)).apply(CheckpointId(1, 30), (), ()))
    assert [one.step for one in deleted] == [20]
    assert has_files(store, 1, 10)


def test_a_fenced_attempt_that_commits_late_keeps_its_newest_and_what_the_newer_attempt_has() -> None:
    """Step 10 was just reported as durable. Step 5 of the newer attempt, which began anew, is not its own."""
    store = make_store((1, 10, ()), (2, 5, ()), (2, 20, ()), (2, 30, ()))
    list(Retention(store, Keep(1)).apply(CheckpointId(1, 10), (), ()))
    assert listed(store) == [(1, 10), (2, 5), (2, 20), (2, 30)]


def test_after_any_failure_of_the_store_all_checkpoints_verify() -> None:
    """Each delete, read and listing fails once; the next round finishes the work."""
    num_calls = 0
    for method in ("delete", "get", "list"):
        for nth in range(1, 20):
            store = make_store(*[(1, step, ()) for step in (10, 20, 30, 40)])
            store.clear_calls()
            store.fail(method, RetryLater("gone for a moment"), nth=nth)
            retention = Retention(store, Keep(2))
            try:
                list(retention.apply(CheckpointId(1, 40), (), ()))
            except RetryLater:
                num_calls += 1
            else:
                break
            assert check_all_verify(store) >= 2
            list(retention.apply(CheckpointId(1, 40), (), ()))
            assert listed(store) == [(1, 30), (1, 40)]
            assert not has_files(store, 1, 10)
            assert check_all_verify(store) == 2
    assert num_calls >= 8


def test_deleting_begins_with_the_manifest() -> None:
    store = make_store((1, 10, ()), (1, 20, ()))
    store.clear_calls()
    list(Retention(store, Keep(1)).apply(CheckpointId(1, 20), (), ()))
    deleted = [call.name for call in store.calls("delete")]
    assert deleted[0] == names.manifest(10, 1)
    assert sorted(deleted[1:]) == sorted([names.data(10, 1, 0), names.part(10, 1, 0)])
    with pytest.raises(NotFound):
        holdfast.open(store, step=10)


def test_going_back_by_hand_keeps_the_checkpoints_that_training_continues() -> None:
    """Attempt 2 resumed before 30 of attempt 1. Attempt 3 resumed from 30, and abandons attempt 2."""
    back = (CheckpointId(1, 30),)
    store = make_store((1, 10, ()), (1, 30, ()), (2, 15, FROM_10), (2, 25, FROM_10), (3, 35, back))
    deleted = list(Retention(store, Keep(2)).apply(CheckpointId(3, 35), back, ()))
    assert sorted((one.attempt, one.step) for one in deleted) == [(1, 10), (2, 15), (2, 25)]
    assert listed(store) == [(1, 30), (3, 35)]
    assert check_all_verify(store) == 2


def test_files_of_frozen_tensors_are_deleted_with_their_checkpoint() -> None:
    store = FaultyStore(MemoryStore())
    make_home(store)
    for step in (10, 20):
        make_checkpoint(store, step, 1, [{"w": torch.ones(4), "base": torch.ones(9)}], frozen=["base"])
    assert [one.step for one in Retention(store, Keep(1)).apply(CheckpointId(1, 20), (), ())] == [10]
    assert not list(store.list(names.step_dir(10)))
    assert check_all_verify(store) == 1


def test_an_older_save_that_commits_last_retains_as_of_the_newest(tmp_path: Path) -> None:
    """Under load a save may wait longer for another rank's part than the one after it."""
    store = LocalStore(tmp_path)
    make_home(store)
    for step in (18, 20):
        make_checkpoint(store, step, 1, [{"w": torch.full((4,), float(step))}])
    config = KeeperConfig(store.url, "run-one", 1, 0, 1, True, Keep(3), 5.0, 5.0)
    tiers = KeeperTiers(make_components(store, config), set)
    for step in (24, 22):
        make_checkpoint(store, step, 1, [{"w": torch.full((4,), float(step))}])
        tiers.finish(PendingSave(step), Committed(()), 0.0)
        tiers.join_retention()
    assert candidates(list_home(store)) == [(1, 24), (1, 22), (1, 20)]


def share(*saved: tuple[int, int, Ancestors], rank: int = 1) -> FaultyStore:
    """A folder with one rank's files of checkpoints of two ranks."""
    whole, store = MemoryStore(), FaultyStore(MemoryStore())
    make_home(store)
    for attempt, step, line in saved:
        make_checkpoint(
            whole, step, attempt, [{"w": torch.ones(4)}, {"b": torch.ones(2)}], ancestors=line, commit=False
        )
        for name in (names.data(step, attempt, rank), names.part(step, attempt, rank)):
            store.put(name, whole.get(name))
    return store


def retain_share(
    store: FaultyStore, keep: int, complete: CheckpointId, needed: set[CheckpointId] | None = None
) -> list[CheckpointId]:
    """Apply a policy, and return the rank's remaining checkpoints."""
    config = KeeperConfig(
        "home", "run-one", 2, 1, 2, False, Keep(3), 5.0, 5.0, local="near", local_ranks=(1,)
    )
    list(ShareRetention(store, Keep(keep), config.is_responsible_for).apply(complete, (), needed or set()))
    found = (names.parse(entry.name) for entry in store.list("step-"))
    return sorted(f.checkpoint_id for f in found if f and f.kind == "data")


def test_checkpoints_that_may_become_complete_stay() -> None:
    """The other host is behind: 10 is the newest that both have reported."""
    store = share(*[(1, step, ()) for step in (5, 10, 20, 30, 40)])
    assert retain_share(store, 1, CheckpointId(1, 10)) == [(1, 10), (1, 20), (1, 30), (1, 40)]
    assert retain_share(store, 2, CheckpointId(1, 30)) == [(1, 20), (1, 30), (1, 40)]


def test_needed_checkpoints_stay() -> None:
    store = share(*[(1, step, ()) for step in (5, 10, 20)])
    assert retain_share(store, 1, CheckpointId(1, 20), {CheckpointId(1, 5)}) == [(1, 5), (1, 20)]


def test_abandoned_node_local_checkpoints_are_deleted_first() -> None:
    """Attempt 2 resumed from 10: step 20 of attempt 1 does not count."""
    store = share((1, 10, ()), (1, 20, ()), (2, 30, FROM_10))
    assert retain_share(store, 2, CheckpointId(2, 30)) == [(1, 10), (2, 30)]


def test_incomplete_saves_before_the_complete_one_are_deleted() -> None:
    store = share((1, 10, ()), (1, 20, ()), (1, 30, ()))
    store.delete(names.part(10, 1, 1))
    store.delete(names.part(30, 1, 1))
    assert retain_share(store, 3, CheckpointId(1, 20)) == [(1, 20), (1, 30)]


def both_ranks() -> FaultyStore:
    """A folder with the files of both ranks of two checkpoints."""
    store = share((1, 10, ()), (1, 20, ()))
    other = share((1, 10, ()), (1, 20, ()), rank=0)
    for entry in list(other.list("step-")):
        store.put(entry.name, other.get(entry.name))
    return store


def test_files_of_other_ranks_of_the_host_stay() -> None:
    store = both_ranks()
    retention = ShareRetention(store, Keep(1), lambda rank: rank == 0)
    assert [one.step for one in retention.apply(CheckpointId(1, 20), (), ())] == [10]
    left = [f.rank for e in store.list(names.step_dir(10)) if (f := names.parse(e.name))]
    assert left == [1, 1]


def test_files_of_ranks_that_do_not_exist_any_more_are_deleted() -> None:
    """Two ranks of this host saved; in the new world it has rank 1 alone."""
    assert retain_share(both_ranks(), 1, CheckpointId(1, 20)) == [(1, 20), (1, 20)]


def test_a_part_is_deleted_before_the_file_that_it_describes() -> None:
    """A store that fails in the middle leaves no part that describes nothing."""
    store = share((1, 10, ()), (1, 20, ()))
    store.fail("delete", RetryLater("gone"), nth=2)
    with pytest.raises(RetryLater):
        retain_share(store, 1, CheckpointId(1, 20))
    left = [f.kind for e in store.list(names.step_dir(10)) if (f := names.parse(e.name))]
    assert left == ["data"]
    assert retain_share(store, 1, CheckpointId(1, 20)) == [(1, 20)]


def test_a_run_that_another_thread_has_just_requested_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drain requests while the keeper ends: an error there would end it with metrics unsent."""
    store = make_store((1, 1, ()), (1, 2, ()))
    _, reports = make_reports(store, KeeperConfig(store.url, "run-one", 1, 0, 1, True, Keep(3), 5.0, 5.0))
    deletion = TierRetention(Retention(store, Keep(last=1)), "home", reports, tuple)
    deletion.add(CheckpointId(1, 2))
    failed: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    waiting = threading.Thread(target=deletion.join)
    start = threading.Thread.start

    def start_late(thread: threading.Thread) -> None:
        if thread is not waiting:
            start(waiting)
            waiting.join(0.2)  # it may end only after the thread that is started here
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_late)
    deletion.request()
    waiting.join()
    assert not failed
    assert listed(store) == [(1, 2)]
