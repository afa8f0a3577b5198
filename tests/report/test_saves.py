"""Saves and their copies in every tier."""

from __future__ import annotations

from holdfast.watch.report.events import HistoryEvent
from holdfast.watch.report.saves import SaveRecord, collect_saves
from report.made_up_run import START, MadeUpRun


def only(events: list[HistoryEvent]) -> SaveRecord:
    """Return the only save in the events."""
    (save,) = collect_saves(events)
    return save


def test_a_save_of_two_ranks_is_as_large_as_both_and_as_slow_as_the_slowest() -> None:
    made_up = MadeUpRun()
    for rank, more in ((0, 0.0), (1, 0.5)):
        made_up.add(1, 10.2 + more, "saved", 5, seconds=0.2 + more, rank=rank, num_bytes=100)
        made_up.add(1, 11.0 + more, "staged", 5, seconds=1.0 + more, rank=rank, num_bytes=100)
        made_up.add(1, 13.0 + more, "persisted", 5, seconds=2.0 + more, rank=rank, num_bytes=100)
    made_up.add(1, 14.0, "committed", 5, seconds=4.0, rank=0, num_bytes=100)
    made_up.add(1, 14.3, "committed", 5, seconds=4.0, rank=1, num_bytes=100)
    save = only(made_up.by_time())
    assert (save.num_ranks, save.num_bytes, save.started_unix_s) == (2, 200, START + 10.0)
    assert (save.blocked_s, save.staged_s, save.outcome) == (0.7, 1.5, "durable")
    (copy,) = save.copies
    assert (copy.tier, copy.write_s, copy.durable_unix_s, copy.durable_s) == ("home", 2.5, START + 14.0, 4.0)
    assert copy.bytes_per_s == 80


def test_each_tier_has_its_own_times() -> None:
    made_up = MadeUpRun()
    made_up.save(1, 5, 10.0, durable_after_s=2.0, tier="local")
    made_up.add(1, 40.0, "drained", 5, seconds=8.0, num_bytes=1000)
    local, home = only(made_up.by_time()).copies
    assert (local.tier, local.durable_s, local.write_s, local.was_drained) == ("local", 2.0, 2.0, False)
    assert (home.tier, home.durable_s, home.write_s, home.was_drained) == ("home", 30.0, 8.0, True)
    assert only(made_up.by_time()).durable == home


def test_a_drain_by_a_later_attempt_belongs_to_the_drained_checkpoint() -> None:
    made_up = MadeUpRun()
    made_up.save(1, 5, 10.0, tier="local")
    made_up.save(1, 6, 12.0, tier="local")
    made_up.add(2, 40.0, "drained", 6, num_bytes=1000)
    assert [len(save.copies) for save in collect_saves(made_up.by_time())] == [1, 2]


def test_a_drain_that_names_an_attempt_belongs_to_its_checkpoint() -> None:
    made_up = MadeUpRun()
    for attempt in (1, 2):
        made_up.save(attempt, 5, 10.0 * attempt, tier="local")
    made_up.add(3, 40.0, "drained", 5, detail="attempt 1")
    assert [len(save.copies) for save in collect_saves(made_up.by_time())] == [2, 1]


def test_a_commit_by_the_next_attempt_belongs_to_the_interrupted_save() -> None:
    made_up = MadeUpRun()
    made_up.save(1, 5, 10.0, durable_after_s=None)
    made_up.add(2, 40.0, "committed", 5, detail="attempt 1, which fell before it could write the manifest")
    save = only(made_up.by_time())
    assert (save.attempt, save.outcome) == (1, "durable")


def test_a_failed_save_has_its_reason() -> None:
    made_up = MadeUpRun()
    made_up.save(1, 5, 10.0, durable_after_s=None)
    made_up.add(1, 12.0, "failed", 5, detail="disk full")
    save = only(made_up.by_time())
    assert (save.outcome, save.detail, save.durable) == ("failed", "disk full", None)


def test_a_save_without_a_recorded_end_is_unfinished() -> None:
    made_up = MadeUpRun()
    made_up.save(1, 5, 10.0, durable_after_s=None)
    assert only(made_up.by_time()).outcome == "unfinished"


def test_a_killed_keeper_may_leave_only_a_persisted_event() -> None:
    made_up = MadeUpRun()
    made_up.add(1, 13.0, "persisted", 5, seconds=2.0, num_bytes=100)
    made_up.add(1, 14.0, "committed", 5, num_bytes=100)
    save = only(made_up.by_time())
    assert (save.started_unix_s, save.blocked_s, save.num_bytes) == (START + 11.0, None, 100)


def test_a_commit_with_the_bytes_of_all_ranks_does_not_count_them_twice() -> None:
    made_up = MadeUpRun()
    for rank in (0, 1):
        made_up.add(1, 13.0, "persisted", 5, seconds=2.0, rank=rank, num_bytes=100)
    made_up.add(1, 14.0, "committed", 5, num_bytes=200)
    assert only(made_up.by_time()).num_bytes == 200


def test_deletions_and_restores_are_not_saves() -> None:
    made_up = MadeUpRun()
    made_up.add(2, 1.0, "restored", 5)
    made_up.add(2, 2.0, "retained", 4, detail="attempt 1, complete")
    made_up.add(2, 2.0, "drain-failed", 4, detail="503")
    assert collect_saves(made_up.by_time()) == []
