"""Contents of each tier, from commits, drains and deletions."""

from __future__ import annotations

from holdfast.watch.report.saves import collect_saves, tier_levels
from report.made_up_run import START, MadeUpRun


def levels(made_up: MadeUpRun) -> list[tuple[float, str, int, int]]:
    """Return every change: time, tier, bytes, checkpoints."""
    events = made_up.by_time()
    found = tier_levels(events, collect_saves(events))
    return [(one.unix_s - START, one.tier, one.num_bytes, one.num_checkpoints) for one in found]


def test_commits_add_and_deletions_remove() -> None:
    made_up = MadeUpRun()
    made_up.save(1, 5, 10.0, num_bytes=100)
    made_up.save(1, 6, 20.0, num_bytes=300)
    made_up.add(1, 22.0, "retained", 5, detail="attempt 1, complete")
    assert levels(made_up) == [(11.0, "home", 100, 1), (21.0, "home", 400, 2), (22.0, "home", 300, 1)]


def test_tiers_are_counted_separately() -> None:
    made_up = MadeUpRun()
    made_up.save(1, 5, 10.0, num_bytes=100, tier="local")
    made_up.add(1, 30.0, "drained", 5, num_bytes=100)
    made_up.add(1, 40.0, "retained", 5, tier="local", detail="attempt 1, complete")
    assert levels(made_up) == [(11.0, "local", 100, 1), (30.0, "home", 100, 1), (40.0, "local", 0, 0)]


def test_a_later_attempt_deletes_and_drains_checkpoints_of_an_earlier_one() -> None:
    made_up = MadeUpRun()
    made_up.save(1, 5, 10.0, num_bytes=100, tier="local")
    made_up.add(2, 30.0, "drained", 5, num_bytes=100)
    made_up.add(3, 40.0, "retained", 5, detail="attempt 1, complete")
    assert levels(made_up)[1:] == [(30.0, "home", 100, 1), (40.0, "home", 0, 0)]


def test_a_restored_checkpoint_counts_without_a_recorded_commit() -> None:
    made_up = MadeUpRun()
    made_up.save(1, 5, 10.0, durable_after_s=None, num_bytes=100)
    made_up.add(2, 30.0, "restored", 5)
    assert levels(made_up) == [(30.0, "home", 100, 1)]


def test_deleting_incomplete_files_changes_nothing() -> None:
    made_up = MadeUpRun()
    made_up.save(1, 5, 10.0, durable_after_s=None)
    made_up.add(1, 30.0, "retained", 5, detail="attempt 1, half done")
    assert levels(made_up) == []


def test_a_commit_recorded_by_all_ranks_counts_once() -> None:
    made_up = MadeUpRun()
    for rank in (0, 1):
        made_up.add(1, 10.0, "persisted", 5, rank=rank, num_bytes=100)
        made_up.add(1, 11.0 + rank, "committed", 5, rank=rank, num_bytes=100)
    assert levels(made_up) == [(11.0, "home", 200, 1)]
