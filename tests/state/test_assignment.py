"""Which copy is written: covered once, evenly, and alike on every rank that holds a tensor."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from holdfast.format.cuts import Box, Cut
from holdfast.state import Sharding, assign
from holdfast.state.sharding import ShardLayout, held_by

_names = st.text("abc.", min_size=1, max_size=6)
_sizes = st.dictionaries(_names, st.integers(0, 10**9), max_size=40)


@given(_sizes, st.integers(1, 9), st.randoms())
def test_every_tensor_is_written_once_and_evenly(sizes: dict[str, int], world_size: int, random: Any) -> None:
    """Same answer for any order of names; no rank is over the mean by more than the largest tensor."""
    layout = held_by(tuple(range(world_size)))
    shardings = {name: Sharding((size,), layout) for name, size in sizes.items()}
    cuts = assign(sizes, shardings)
    assert cuts.keys() == sizes.keys()
    shuffled = list(shardings.items())
    random.shuffle(shuffled)
    assert assign(sizes, dict(shuffled)) == cuts
    loads = [sum(sizes[n] for n, cut in cuts.items() if cut.ranks == (rank,)) for rank in range(world_size)]
    assert sum(loads) == sum(sizes.values())
    assert max(loads) <= sum(loads) / world_size + max(sizes.values(), default=0)


def test_ranks_that_see_other_tensors_agree_about_those_that_both_hold() -> None:
    """A pipeline stage's own tensors do not move those that it shares with the others."""
    shared = {f"shared.{i}": Sharding((i,), held_by((0, 1, 2, 3))) for i in range(9)}
    first = {f"first.{i}": Sharding((i,), held_by((0, 1))) for i in range(5)}
    second = {f"second.{i}": Sharding((i,), held_by((2, 3))) for i in range(7)}
    sizes = {name: sharding.shape[0] * 4 for name, sharding in {**shared, **first, **second}.items()}
    here, there = assign(sizes, {**first, **shared}), assign(sizes, {**shared, **second})
    assert [here[name] for name in shared] == [there[name] for name in shared]
    assert len({cut.ranks for cut in here.values()}) == 4


def test_copies_that_are_cut_differently_are_spread_together() -> None:
    """Two replica groups: rows and columns of equal tensors, half of them from each group."""
    copies = ((0, 1), (2, 3))
    rows, columns = ShardLayout(((0, 2),), copies), ShardLayout(((1, 2),), copies)
    shardings = {f"{i}": Sharding((4, 4), rows if i < 4 else columns) for i in range(8)}
    cuts = assign(dict.fromkeys(shardings, 64), shardings)
    assert sorted(cut.ranks for cut in cuts.values()) == [(0, 1)] * 4 + [(2, 3)] * 4
    assert len({id(cut) for cut in cuts.values()}) == 4


def test_boxes_without_a_rule_are_listed() -> None:
    """Uneven boxes are written as they are."""
    boxes = (Box((0,), (3,)), Box((3,), (1,)))
    sharding = Sharding((4,), ShardLayout((), ((5, 7),), boxes))
    cut = assign({"t": 16}, {"t": sharding})["t"]
    assert list(cut.boxes((4,))) == [(5, boxes[0]), (7, boxes[1])]
    assert sharding.box_of(7) == boxes[1]
    assert sharding.box_of(6) is None
    assert sharding.holders == {5, 7}


def test_equal_layouts_make_one_group() -> None:
    """Layouts that are equal, but other objects, are balanced together."""
    shardings = {str(i): Sharding((1,), ShardLayout((), ((0,), (1,)))) for i in range(4)}
    cuts = assign(dict.fromkeys(shardings, 4), shardings)
    assert sorted(cut.ranks for cut in cuts.values()) == [(0,), (0,), (1,), (1,)]
    assert Cut((), (0,)) in cuts.values()
