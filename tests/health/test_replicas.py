"""Comparison of replicas: who is named, who is not, and for how long."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.format.sections import Mark, Section
from holdfast.checkpoint.home.judges import CompleteSave
from holdfast.watch.replicas.comparison import (
    Comparison,
    Replica,
    ReplicaDifference,
    ReplicaHashes,
    ReplicaWatch,
)
from holdfast.watch.replicas.keeper import ReplicasKeeper

NAMES = ["w", "buffer"]
A, B, C = "a" * 16, "b" * 16, "c" * 16


def hashes(
    found: Sequence[str | None], *, tensor: int = 0, region: Sequence[int] | None = None
) -> ReplicaHashes:
    """Hashes of one tensor by rank; None where a rank has left it out. The first tensor is trained."""
    collected = ReplicaHashes()
    for rank, one in enumerate(found):
        number = 0 if region is None else region[rank]
        replicas = () if one is None else (Replica(tensor, number, tensor == 0, one),)
        collected.add(rank, f"node{rank}", replicas, NAMES)
    return collected


def compare(*audits: Sequence[str | None], tensor: int = 0) -> tuple[ReplicaWatch, Comparison]:
    """The comparison of the last of some audits, at steps 10, 20 and so on."""
    watch, compared = ReplicaWatch(), Comparison()
    for number, one in enumerate(audits):
        compared = watch.compare(10 * number + 10, hashes(one, tensor=tensor))
    return watch, compared


def named(*audits: Sequence[str | None], tensor: int = 0) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The ranks that the last audit names, and those that they are compared with."""
    return [(one.ranks, one.others) for one in compare(*audits, tensor=tensor)[1].differences]


@pytest.mark.parametrize(
    ("found", "ranks", "others"),
    [
        ([A, A, B], (2,), (0, 1)),
        ([B, A, A, A], (0,), (1, 2, 3)),
        ([A, B, C, A, A], (1, 2), (0, 3, 4)),
        ([A, B], (0, 1), ()),  # two ranks, no majority
        ([A, A, B, B], (0, 1, 2, 3), ()),
        ([A, B, C], (0, 1, 2), ()),
        ([A, None, A, B], (3,), (0, 2)),  # rank 1's copy was torn
    ],
)
def test_the_minority_is_named(
    found: list[str | None], ranks: tuple[int, ...], others: tuple[int, ...]
) -> None:
    assert named(found) == [(ranks, others)]


@pytest.mark.parametrize("found", [[A, A], [A, None], [None, None], [A]])
def test_equal_or_lone_copies_are_not_accused(found: list[str | None]) -> None:
    assert named(found) == []


def test_regions_are_compared_with_the_same_region() -> None:
    """HSDP on four ranks: 0 and 2 hold one half, 1 and 3 the other."""
    watch = ReplicaWatch()
    assert watch.compare(1, hashes([A, B, A, B], region=[0, 1, 0, 1])) == Comparison(2, ())
    (found,) = watch.compare(2, hashes([A, B, A, C], region=[0, 1, 0, 1])).differences
    assert (found.ranks, found.others, found.equal_at) == ((1, 3), (), 1)


@given(st.integers(3, 9), st.data())
def test_any_single_odd_rank_is_named(world_size: int, data: st.DataObject) -> None:
    odd = data.draw(st.integers(0, world_size - 1))
    found = [B if rank == odd else A for rank in range(world_size)]
    assert named(found) == [((odd,), tuple(rank for rank in range(world_size) if rank != odd))]


BUFFERS = {
    "statistics of each rank's own batches": [[A, B, C], [B, C, A], [C, A, B]],
    "equal before training only": [[A, A, A], [A, B, C]],
    "all changed at once": [[A, A, A], [A, A, A], [B, C, C]],
    "seen once": [[A, A, B]],
}


@pytest.mark.parametrize("audits", BUFFERS.values(), ids=BUFFERS)
def test_what_differs_by_nature_is_not_accused(audits: list[list[str]]) -> None:
    for number in range(len(audits)):
        assert named(*audits[: number + 1], tensor=1) == []


def test_a_constant_that_changes_on_one_rank_is_named_even_with_two_ranks() -> None:
    assert named([A, A], [A, A], [A, B], tensor=1) == [((1,), (0,))]
    assert named([A, A], [A, A], [B, A], tensor=1) == [((0,), (1,))]


def test_a_count_that_all_ranks_had_alike_is_compared() -> None:
    assert named([A, A, A], [B, B, B], [C, C, A], tensor=1) == [((2,), (0, 1))]


def test_a_difference_counts_until_the_copies_are_equal_again() -> None:
    watch, _ = compare([A, A, A], [A, B, A])
    (still,) = watch.compare(30, hashes([None, None, None])).differences  # another turn
    assert (still.step, still.equal_at, still.hosts) == (20, 10, ("node1",))
    assert watch.compare(40, hashes([C, C, C])).differences == ()


def test_a_difference_is_new_once() -> None:
    watch, _ = compare([A, A, A], [A, B, A])
    assert [one.ranks for one in watch.take_new()] == [(1,)]
    watch.compare(30, hashes([A, C, A]))
    assert watch.take_new() == ()


def test_a_repeated_commit_compares_the_same_step_again() -> None:
    watch = ReplicaWatch()
    for step in (10, 20, 20, 20):
        watch.compare(step, hashes([A, A], tensor=1))
    assert [one.ranks for one in watch.compare(20, hashes([A, B], tensor=1)).differences] == []
    assert [one.ranks for one in watch.compare(30, hashes([A, B], tensor=1)).differences] == []


def test_an_older_checkpoint_that_is_committed_later_settles_nothing() -> None:
    watch, _ = compare([A, A, A], [A, A, A], [A, B, A])
    assert watch.compare(25, hashes([A, A, A])).differences == ()
    assert [one.step for one in watch.compare(40, hashes([None, None])).differences] == [30]


def test_an_older_checkpoint_with_the_difference_is_not_healthy_either() -> None:
    watch, _ = compare([A, A, A], [A, A, A], [A, B, A])
    (found,) = watch.compare(25, hashes([A, B, A])).differences
    assert (found.step, found.ranks, found.equal_at) == (25, (1,), 20)
    assert watch.take_new()


def test_an_older_checkpoint_with_a_difference_that_is_gone_is_not_healthy() -> None:
    """A flipped bit that made all ranks NaN: equal again in the newer checkpoint."""
    watch, _ = compare([A, A, A], [A, A, A], [C, C, C])
    assert [(one.step, one.ranks) for one in watch.compare(25, hashes([A, B, A])).differences] == [(25, (1,))]
    assert [one.ranks for one in watch.take_new()] == [(1,)]
    assert watch.compare(40, hashes([C, C, C])).differences == ()


def test_a_part_with_an_audit_of_an_unknown_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="tensor 7, but the catalog has 2"):
        ReplicaHashes().add(0, "n", (Replica(7, 0, True, A),), NAMES)


def test_the_text_names_tensors_ranks_hosts_and_the_step_before() -> None:
    tensors = tuple(f"w{i}" for i in range(8))
    one = ReplicaDifference(30, tensors, 12, (2,), (0, 1), ("node2",), 20)
    assert one.text == (
        "rank 2 (node2) has other bytes than ranks 0 and 1 in w0, w1, w2 and 9 more (equal at step 20)"
    )
    two = ReplicaDifference(30, ("w",), 1, (0, 1), (), ("a", "b"), None)
    assert two.text == "ranks 0 (a) and 1 (b) differ in w (not compared before); no bytes have a majority"
    many = ReplicaDifference(30, ("w",), 1, (5,), tuple(range(6, 30)), ("a",), None)
    assert "than ranks 6, 7, 8, 9, 10, 11, 12 and 17 others in w" in many.text


def judged(step: int, found: Sequence[str], keeper: ReplicasKeeper) -> Section:
    data = [{"rows": [[0, 0, 1]], "host": f"node{rank}", "hashes": one} for rank, one in enumerate(found)]
    rows = {rank: Section(1, one) for rank, one in enumerate(data)}
    section = keeper.committing(CompleteSave(step, len(found), rows, lambda _: tuple(NAMES)))
    assert section is not None
    return section


def test_a_checkpoint_with_different_copies_is_not_healthy() -> None:
    keeper = ReplicasKeeper({})
    equal = judged(10, [A, A, A], keeper)
    assert (equal.mark, equal.reasons) == (
        Mark.NONE,
        ("1 replicated tensor compared and equal on all ranks",),
    )
    different = judged(20, [A, B, A], keeper)
    assert different.mark is Mark.AGAINST
    assert different.reasons[0].startswith("at step 20 rank 1 (node1) has other bytes")
