"""Assignment of writers: each tensor is written once, evenly, and alike on all its holders."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.format.layout import Region
from holdfast.checkpoint.state import Sharding, assign
from holdfast.checkpoint.state.sharding import ShardLayout, held_by

_names = st.text("abc.", min_size=1, max_size=6)
_sizes = st.dictionaries(_names, st.integers(0, 10**9), max_size=40)


@given(_sizes, st.integers(1, 9), st.randoms())
def test_every_tensor_is_written_once_and_evenly(sizes: dict[str, int], world_size: int, random: Any) -> None:
    """Same answer for any order of names; no rank is over the mean by more than the largest tensor."""
    layout = held_by(tuple(range(world_size)))
    shardings = {name: Sharding((size,), layout) for name, size in sizes.items()}
    partitionings = assign(sizes, shardings)
    assert partitionings.keys() == sizes.keys()
    shuffled = list(shardings.items())
    random.shuffle(shuffled)
    assert assign(sizes, dict(shuffled)) == partitionings
    loads = [
        sum(sizes[n] for n, one in partitionings.items() if one.ranks == (rank,))
        for rank in range(world_size)
    ]
    assert sum(loads) == sum(sizes.values())
    assert max(loads) <= sum(loads) / world_size + max(sizes.values(), default=0)


def test_ranks_assign_the_tensors_they_share_alike() -> None:
    """A pipeline stage's own tensors do not move those that it shares with the others."""
    shared = {f"shared.{i}": Sharding((i,), held_by((0, 1, 2, 3))) for i in range(9)}
    first = {f"first.{i}": Sharding((i,), held_by((0, 1))) for i in range(5)}
    second = {f"second.{i}": Sharding((i,), held_by((2, 3))) for i in range(7)}
    sizes = {name: sharding.shape[0] * 4 for name, sharding in {**shared, **first, **second}.items()}
    here, there = assign(sizes, {**first, **shared}), assign(sizes, {**shared, **second})
    assert [here[name] for name in shared] == [there[name] for name in shared]
    assert len({one.ranks for one in here.values()}) == 4


def test_tensors_with_equal_copies_are_balanced_together() -> None:
    """Two replica groups: rows and columns of equal tensors, half of them from each group."""
    copies = ((0, 1), (2, 3))
    rows, columns = ShardLayout(((0, 2),), copies), ShardLayout(((1, 2),), copies)
    shardings = {f"{i}": Sharding((4, 4), rows if i < 4 else columns) for i in range(8)}
    partitionings = assign(dict.fromkeys(shardings, 64), shardings)
    assert sorted(one.ranks for one in partitionings.values()) == [(0, 1)] * 4 + [(2, 3)] * 4
    assert len({id(one) for one in partitionings.values()}) == 4


def test_regions_without_a_rule_are_listed() -> None:
    regions = (Region((0,), (3,)), Region((3,), (1,)))
    sharding = Sharding((4,), ShardLayout((), ((5, 7),), regions))
    partitioning = assign({"t": 16}, {"t": sharding})["t"]
    assert list(partitioning.regions((4,))) == [(5, regions[0]), (7, regions[1])]
    assert sharding.regions_of(7) == (regions[1],)
    assert sharding.regions_of(6) == ()
    assert sharding.layout.holders == {5, 7}
