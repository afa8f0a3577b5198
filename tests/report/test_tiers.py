"""How much each tier held, from commits, drains and deletions."""

from __future__ import annotations

from holdfast.report.saves import saves_of
from holdfast.report.tiers import levels_of, tiers_in
from report.telling import START, Telling


def levels(told: Telling) -> list[tuple[float, str, int, int]]:
    """Every change: when, where, bytes, checkpoints."""
    events = told.by_time()
    found = levels_of(events, saves_of(events))
    return [(one.unix_s - START, one.tier, one.num_bytes, one.num_checkpoints) for one in found]


def test_commits_add_and_deletions_take_away() -> None:
    told = Telling()
    told.save(1, 5, 10.0, num_bytes=100)
    told.save(1, 6, 20.0, num_bytes=300)
    told.tell(1, 22.0, "retained", 5, detail="attempt 1, complete")
    assert levels(told) == [(11.0, "home", 100, 1), (21.0, "home", 400, 2), (22.0, "home", 300, 1)]


def test_tiers_are_counted_each_by_itself() -> None:
    told = Telling()
    told.save(1, 5, 10.0, num_bytes=100, tier="local")
    told.tell(1, 30.0, "drained", 5, num_bytes=100)
    told.tell(1, 40.0, "retained", 5, tier="local", detail="attempt 1, complete")
    assert levels(told) == [(11.0, "local", 100, 1), (30.0, "home", 100, 1), (40.0, "local", 0, 0)]
    events = told.by_time()
    assert tiers_in(levels_of(events, saves_of(events))) == ["local", "home"]


def test_a_later_attempt_deletes_and_drains_what_an_earlier_one_has_saved() -> None:
    told = Telling()
    told.save(1, 5, 10.0, num_bytes=100, tier="local")
    told.tell(2, 30.0, "drained", 5, num_bytes=100)
    told.tell(3, 40.0, "retained", 5, detail="attempt 1, complete")
    assert levels(told)[1:] == [(30.0, "home", 100, 1), (40.0, "home", 0, 0)]


def test_what_was_restored_was_there_although_no_commit_was_told() -> None:
    told = Telling()
    told.save(1, 5, 10.0, durable_after_s=None, num_bytes=100)
    told.tell(2, 30.0, "restored", 5)
    assert levels(told) == [(30.0, "home", 100, 1)]


def test_deleting_what_was_half_done_changes_nothing() -> None:
    told = Telling()
    told.save(1, 5, 10.0, durable_after_s=None)
    told.tell(1, 30.0, "retained", 5, detail="attempt 1, half done")
    assert levels(told) == []


def test_all_ranks_tell_of_a_commit_and_it_counts_once() -> None:
    told = Telling()
    for rank in (0, 1):
        told.tell(1, 10.0, "persisted", 5, rank=rank, num_bytes=100)
        told.tell(1, 11.0 + rank, "committed", 5, rank=rank, num_bytes=100)
    assert levels(told) == [(11.0, "home", 200, 1)]
