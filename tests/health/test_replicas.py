"""Replicas: the ranks whose copies differ are named, and every tensor has its turn."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.copies import Copies
from holdfast.checkpoint.format.sections import Mark, Section
from holdfast.checkpoint.home.judges import CompleteSave
from holdfast.checkpoint.state.capture import shared_tensors
from holdfast.checkpoint.state.sharding import Sharding, ShardLayout, held_by
from holdfast.watch.replicas import (
    FREE_BYTES,
    MAX_TURNS,
    Comparison,
    RankReplicas,
    Replica,
    ReplicaDifference,
    ReplicaHashes,
    ReplicasKeeper,
    ReplicaWatch,
    turns_of,
)

NAMES = ["w", "buffer"]
A, B, C = "a" * 16, "b" * 16, "c" * 16


def hashes(
    found: Sequence[str | None], *, tensor: int = 0, region: Sequence[int] | None = None
) -> ReplicaHashes:
    """Hashes of one tensor by rank; None where a rank has left it out. The first tensor is trained."""
    collected = ReplicaHashes()
    for rank, one in enumerate(found):
        number = 0 if region is None else region[rank]
        rows = () if one is None else (Replica(tensor, number, 1 if tensor == 0 else 0),)
        collected.add(rank, RankReplicas(f"node{rank}", rows, one or ""), NAMES)
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
        ReplicaHashes().add(0, RankReplicas("n", (Replica(7, 0, 1),), A), NAMES)


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


DDP4 = held_by((0, 1, 2, 3))
HSDP = ShardLayout(((0, 2),), ((0, 1), (2, 3)))
PAIR = held_by((0, 1))
ALONE = held_by((0,))


def captured(tensors: dict[str, tuple[int, ShardLayout]], lowest: tuple[str, ...] = ()) -> Any:
    """A state of float32 vectors. Their memory is never touched."""
    structure = SimpleNamespace(
        shardings={
            name: Sharding((size,), ALONE if name in lowest else layout)
            for name, (size, layout) in tensors.items()
        },
        lowest={name: tensors[name][1] for name in lowest},
        owned=frozenset(tensors),
    )
    vectors = {name: torch.empty(size, device="meta") for name, (size, _) in tensors.items()}
    return SimpleNamespace(tensors=vectors, structure=structure)


def turns_on(state: Any, rank: int, *, within: int | None = None) -> Copies:
    """The turns that a rank computes for its tensors."""
    catalog: Any = SimpleNamespace(tensors=list(state.tensors))
    return turns_of(shared_tensors(state, catalog, rank), within=within)


def names(turns: Copies, attempt: int = 1) -> list[set[str]]:
    return [set(turns.names_at(save, attempt)) for save in range(max(turns.num_saves, 1))]


layouts = st.sampled_from([DDP4, HSDP, PAIR, ALONE])
states = st.dictionaries(
    st.text("abcdef", min_size=1, max_size=4), st.tuples(st.integers(0, 50 << 20), layouts), max_size=30
)


@given(states, st.none() | st.integers(1, 70), st.integers(1, 999))
def test_every_shared_tensor_has_its_turn(
    tensors: dict[str, tuple[int, ShardLayout]], within: int | None, attempt: int
) -> None:
    turns = turns_on(captured(tensors), 0, within=within)
    shared = {name for name, (size, layout) in tensors.items() if size and len(layout.copies) > 1}
    assert set().union(*names(turns, attempt)) == shared
    assert turns.num_saves <= (MAX_TURNS if within is None else within)


@given(states, st.integers(0, 99))
def test_all_holders_find_the_same_turn(tensors: dict[str, tuple[int, ShardLayout]], save: int) -> None:
    found: dict[str, set[bool]] = {}
    for rank in range(4):
        held = {name: one for name, one in tensors.items() if rank in one[1].holders}
        due = set(turns_on(captured(held), rank).names_at(save, 3))
        for name, (size, layout) in held.items():
            if size and len(layout.copies) > 1:
                found.setdefault(name, set()).add(name in due)
    assert all(len(one) == 1 for one in found.values())


@given(st.lists(st.integers(1, 4 << 20), min_size=1, max_size=200))
def test_a_turn_has_an_eighth_of_what_a_rank_writes_or_the_free_bytes(sizes: list[int]) -> None:
    """Beyond that, at most one more tensor: none is divided."""
    turns = turns_on(captured({f"t{i}": (size, PAIR) for i, size in enumerate(sizes)}), 0)
    bound = max(FREE_BYTES, 4 * sum(sizes) / 2 / 8) + 4 * max(sizes)
    sizes_by_name = {f"t{i}": 4 * size for i, size in enumerate(sizes)}
    assert all(sum(sizes_by_name[name] for name in one) <= bound for one in names(turns))


def test_a_small_state_is_compared_at_each_save() -> None:
    assert names(turns_on(captured({"w": (10, PAIR), "b": (10, DDP4)}), 0)) == [{"w", "b"}]


def test_buffers_that_the_lowest_rank_writes_are_compared_too() -> None:
    state = captured({"buffer": (10, PAIR)}, lowest=("buffer",))
    assert [names(turns_on(state, rank)) for rank in (0, 1)] == [[{"buffer"}]] * 2


def test_pure_shards_have_no_copy() -> None:
    shards = ShardLayout(((0, 4),), ((0, 1, 2, 3),))
    assert turns_on(captured({"w": (10, shards)}), 0).num_saves == 0


def test_short_attempts_compare_different_tensors() -> None:
    turns = turns_on(captured({f"t{i}": (10, PAIR) for i in range(8)}), 0, within=8)
    seen = [next(iter(set(turns.names_at(0, attempt)))) for attempt in range(1, 9)]
    assert len(set(seen)) >= 6, "attempts that end after one save"
