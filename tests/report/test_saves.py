"""What became of each save, in every tier."""

from __future__ import annotations

from holdfast.report.events import Event
from holdfast.report.saves import Save, saves_of
from report.telling import START, Telling


def only(events: list[Event]) -> Save:
    """The one save that they tell of."""
    (save,) = saves_of(events)
    return save


def test_a_save_of_two_ranks_is_as_large_as_both_and_as_slow_as_the_slowest() -> None:
    told = Telling()
    for rank, more in ((0, 0.0), (1, 0.5)):
        told.tell(1, 10.2 + more, "saved", 5, seconds=0.2 + more, rank=rank, num_bytes=100)
        told.tell(1, 11.0 + more, "staged", 5, seconds=1.0 + more, rank=rank, num_bytes=100)
        told.tell(1, 13.0 + more, "persisted", 5, seconds=2.0 + more, rank=rank, num_bytes=100)
    told.tell(1, 14.0, "committed", 5, seconds=4.0, rank=0, num_bytes=100)
    told.tell(1, 14.3, "committed", 5, seconds=4.0, rank=1, num_bytes=100)
    save = only(told.by_time())
    assert (save.num_ranks, save.num_bytes, save.began_unix_s) == (2, 200, START + 10.0)
    assert (save.blocked_s, save.staged_s, save.outcome) == (0.7, 1.5, "durable")
    (copy,) = save.copies
    assert (copy.tier, copy.write_s, copy.durable_unix_s, copy.durable_s) == ("home", 2.5, START + 14.0, 4.0)
    assert copy.bytes_per_s == 80


def test_each_tier_has_its_own_times() -> None:
    told = Telling()
    told.save(1, 5, 10.0, durable_after_s=2.0, tier="local")
    told.tell(1, 40.0, "drained", 5, seconds=8.0, num_bytes=1000)
    local, home = only(told.by_time()).copies
    assert (local.tier, local.durable_s, local.write_s, local.was_drained) == ("local", 2.0, 2.0, False)
    assert (home.tier, home.durable_s, home.write_s, home.was_drained) == ("home", 30.0, 8.0, True)
    assert only(told.by_time()).durable == home


def test_a_drain_by_a_later_attempt_is_of_the_checkpoint_that_it_drained() -> None:
    told = Telling()
    told.save(1, 5, 10.0, tier="local")
    told.save(1, 6, 12.0, tier="local")
    told.tell(2, 40.0, "drained", 6, num_bytes=1000)
    assert [len(save.copies) for save in saves_of(told.by_time())] == [1, 2]


def test_a_drain_that_names_an_attempt_is_believed() -> None:
    told = Telling()
    for attempt in (1, 2):
        told.save(attempt, 5, 10.0 * attempt, tier="local")
    told.tell(3, 40.0, "drained", 5, detail="attempt 1")
    assert [len(save.copies) for save in saves_of(told.by_time())] == [2, 1]


def test_a_commit_that_the_next_attempt_made_is_of_the_save_that_fell_before_it() -> None:
    told = Telling()
    told.save(1, 5, 10.0, durable_after_s=None)
    told.tell(2, 40.0, "committed", 5, detail="attempt 1, which fell before it could write the manifest")
    save = only(told.by_time())
    assert (save.attempt, save.outcome) == (1, "durable")


def test_a_save_that_failed_says_why() -> None:
    told = Telling()
    told.save(1, 5, 10.0, durable_after_s=None)
    told.tell(1, 12.0, "failed", 5, detail="disk full")
    save = only(told.by_time())
    assert (save.outcome, save.detail, save.durable) == ("failed", "disk full", None)


def test_a_save_of_which_no_end_is_known_is_unfinished() -> None:
    told = Telling()
    told.save(1, 5, 10.0, durable_after_s=None)
    assert only(told.by_time()).outcome == "unfinished"


def test_a_killed_keeper_may_leave_no_more_than_that_it_wrote() -> None:
    told = Telling()
    told.tell(1, 13.0, "persisted", 5, seconds=2.0, num_bytes=100)
    told.tell(1, 14.0, "committed", 5, num_bytes=100)
    save = only(told.by_time())
    assert (save.began_unix_s, save.blocked_s, save.num_bytes) == (START + 11.0, None, 100)


def test_a_commit_that_tells_the_bytes_of_all_ranks_does_not_count_them_twice() -> None:
    told = Telling()
    for rank in (0, 1):
        told.tell(1, 13.0, "persisted", 5, seconds=2.0, rank=rank, num_bytes=100)
    told.tell(1, 14.0, "committed", 5, num_bytes=200)
    assert only(told.by_time()).num_bytes == 200


def test_deletions_and_restores_are_no_saves() -> None:
    told = Telling()
    told.tell(2, 1.0, "restored", 5)
    told.tell(2, 2.0, "retained", 4, detail="attempt 1, complete")
    told.tell(2, 2.0, "drain-failed", 4, detail="503")
    assert saves_of(told.by_time()) == []
