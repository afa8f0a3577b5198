"""Catalogs of all ranks are merged if they agree; a disagreement raises an error that names the tensor."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from format.drawing import catalogs, partitions
from holdfast.checkpoint.format.agreement import Agreement, agree
from holdfast.checkpoint.format.catalog import Catalog, Tensor, catalog_text
from holdfast.checkpoint.format.layout import (
    EvenPartitioning,
    ListedPartitioning,
    Partitioning,
    Region,
    whole,
)
from holdfast.errors import Corrupt, InvalidInput

F32 = "F32"
Cut = tuple[tuple[int, ...], list[Region]]  # a shape, and the regions that it is cut into
Sides = tuple[tuple[int, int], tuple[int, int]]


def agreed(*by_rank: Catalog) -> Agreement:
    """Return the agreement of ranks with these catalogs; equal ones are passed once."""
    texts = list(map(catalog_text, by_rank))
    different = list(dict.fromkeys(texts))
    return agree(tuple(different), tuple(different.index(text) for text in texts))


def catalog(**tensors: Tensor) -> Catalog:
    return Catalog(tensors, {})


def shared(
    partitioning: Partitioning, *held_by: int, shape: tuple[int, ...] = (4,), dtype: str = F32
) -> Tensor:
    return Tensor(dtype, shape, partitioning, held_by)


def listed(*regions: Region, shape: tuple[int, ...]) -> list[Catalog]:
    """A catalog for each rank, which lists only its own region of the tensor w."""
    return [
        catalog(w=Tensor(F32, shape, ListedPartitioning(((rank, region),)), (rank,)))
        for rank, region in enumerate(regions)
    ]


def refused(*by_rank: Catalog) -> InvalidInput:
    """The error that these catalogs raise; it names the tensor w."""
    with pytest.raises(InvalidInput) as caught:
        agreed(*by_rank)
    assert caught.value.key == "w"
    return caught.value


# -- what fits -----------------------------------------------------------------------------------------------


@st.composite
def stages(draw: st.DrawFn) -> list[tuple[list[int], Catalog]]:
    """Groups of ranks, each with a catalog of its own, as pipeline stages have."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    ranks = draw(st.permutations(range(sum(sizes))))
    found = []
    for index, size in enumerate(sizes):
        mine = sorted(ranks[sum(sizes[:index]) :][:size])
        held = draw(catalogs(mine))
        renamed = {f"{index}.{name}": tensor for name, tensor in held.tensors.items()}
        found.append((mine, Catalog(renamed, {f"{index}/{a}": f"{index}.{n}" for a, n in held.tied.items()})))
    return found


@settings(max_examples=40)
@given(stages())
def test_catalogs_that_agree_are_merged(groups: list[tuple[list[int], Catalog]]) -> None:
    """Every tensor of every stage, all aliases, and how many regions each rank wrote."""
    of_rank = {rank: one for ranks, one in groups for rank in ranks}
    by_rank = [of_rank[rank] for rank in range(len(of_rank))]
    found = agreed(*by_rank)
    assert found.tensors == {name: t for _, one in groups for name, t in one.tensors.items()}
    assert found.tied == {alias: name for _, one in groups for alias, name in one.tied.items()}
    assert list(found.num_shards) == [len(list(of_rank[r].written_by(r))) for r in range(len(by_rank))]


@given(partitions())
def test_regions_that_ranks_list_separately_are_merged(case: Cut) -> None:
    shape, regions = case
    found = agreed(*listed(*regions, shape=shape))
    ranks = tuple(range(len(regions)))
    assert found.tensors == {"w": Tensor(F32, shape, ListedPartitioning(tuple(enumerate(regions))), ranks)}
    assert found.num_shards == (1,) * len(regions)


def test_a_tensor_in_two_pipeline_stages_is_one_tensor() -> None:
    """Tied embeddings of the first and the last stage: both list it, each besides what the other lacks."""
    tied = shared(whole(2), 0, 2)
    first, last = catalog(w=tied, a=shared(whole(0), 0, 1)), catalog(w=tied, b=shared(whole(2), 2))
    middle = catalog(a=shared(whole(0), 0, 1))
    found = agreed(first, middle, last)
    assert found.tensors == {"w": tied, "a": shared(whole(0), 0, 1), "b": shared(whole(2), 2)}
    assert found.num_shards == (1, 0, 2)


def test_2000_tensors_over_1024_ranks_are_checked_quickly() -> None:
    """Two million regions are not visited one by one."""
    ranks = tuple(range(1024))
    partitioning = EvenPartitioning(((0, 64), (1, 16)), ranks)
    held = {f"w{number}": shared(partitioning, *ranks, shape=(640, 320)) for number in range(2000)}
    found = agree((catalog_text(Catalog(held, {})),), (0,) * 1024)
    assert found.num_shards == (2000,) * 1024


# -- what does not -------------------------------------------------------------------------------------------


def has(partitioning: Partitioning, *held_by: int, **facts: Any) -> Catalog:
    """Return a catalog of the tensor w alone."""
    return catalog(w=shared(partitioning, *held_by, **facts))


def ruled(splits: tuple[tuple[int, int], ...], writers: tuple[int, ...]) -> tuple[list[Catalog], None, str]:
    """Return catalogs of three ranks with a rule that does not have one writer for each region."""
    held = catalog(w=shared(EvenPartitioning(splits, writers), 0, 1, 2), fine=shared(whole(0), 0, 1, 2))
    found = f"{2 ** len(splits)} regions, but its writers are ranks {', '.join(map(str, writers))} of 3"
    return [held] * 3, None, f"w is split into {found}, one region each."


HALVES = EvenPartitioning(((0, 2),), (0, 1))
ALL = Region((0,), (4,))
ONE, OTHER = listed(Region((0,), (2,)), Region((2,), (2,)), shape=(4,))
UPPER, POINT = Region((2,), (2,)), Region((), ())
MOVED = replace(OTHER.tensors["w"], partitioning=ListedPartitioning(((1, UPPER), (0, UPPER))))
WRITERS = "Ranks 0 and 1 disagree about the writers of regions of w."
HOLDERS = "Ranks 1 are listed as writers of w, but its holders are ranks 0."
OUTSIDE = "of w, which is outside of its shape [4]"
UNLIKE = {"F64[4]": {"dtype": "F64"}, "F32[5]": {"shape": (5,)}, "F32[2, 2]": {"shape": (2, 2)}}
REFUSED: dict[str, tuple[list[Catalog], int | None, str]] = {
    "lacking": (
        [has(whole(0), 0, 1, 2), has(whole(0), 0, 1, 2), catalog()],
        2,
        "Rank 2 lacks w, which rank 0 has and lists as held by ranks 0, 1, 2.",
    ),
    "lacking of many": (
        [*[has(whole(0), *range(12))] * 11, catalog()],
        None,
        "lists as held by ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more",
    ),
    **{
        f"another {found}": (
            [has(whole(0), 0, 1), has(whole(0), 0, 1, **facts)],
            1,
            f"Ranks disagree about w: rank 0 has F32[4], rank 1 has {found}.",
        )
        for found, facts in UNLIKE.items()
    },
    "another writer": ([has(whole(0), 0, 1), has(whole(1), 0, 1)], 1, WRITERS),
    "another rule": ([has(whole(0), 0, 1), has(HALVES, 0, 1)], 1, WRITERS),
    "another order": ([has(HALVES, 0, 1), has(EvenPartitioning(((0, 2),), (1, 0)), 0, 1)], 1, WRITERS),
    "no rule": ([has(ListedPartitioning(((0, ALL),)), 0, 1), has(whole(0), 0, 1)], 1, WRITERS),
    # Otherwise the manifest would not list the regions that rank 1 wrote.
    "another writer, from no holder": ([has(whole(0), 0), has(whole(1), 0)], None, WRITERS),
    "other holders": (
        [has(whole(0), 0, 1), has(whole(0), 0, 1, 2), catalog()],
        1,
        "the holders of w: rank 0 lists 0, 1, rank 1 lists 0, 1, 2.",
    ),
    "a holder outside": ([has(whole(0), 0, 7)], None, "w is listed as held by ranks 7, of 1 rank."),
    "too few": ruled(((0, 2),), (0,)),
    "too many": ruled(((0, 2),), (0, 1, 2)),
    "half": ruled(((0, 2), (0, 2)), (0, 1)),
    "twice": ruled(((0, 2),), (1, 1)),
    "beyond": ruled(((0, 2),), (0, 3)),
    "two whole": ruled((), (0, 1)),
    "whole beyond": ruled((), (3,)),
    "a whole writer that is no holder": ([has(whole(1), 0), catalog()], 1, HOLDERS),
    "a writer by rule that is no holder": ([has(HALVES, 0), catalog()], 1, HOLDERS),
    "a listed writer that is no holder": ([has(ListedPartitioning(((1, ALL),)), 0), catalog()], 1, HOLDERS),
    "a region across the end": (listed(ALL, Region((3,), (2,)), shape=(4,)), 1, f"[3:5] {OUTSIDE}"),
    "a region beyond the end": (listed(ALL, Region((4,), (1,)), shape=(4,)), 1, f"[4:5] {OUTSIDE}"),
    # The number of elements alone is right here.
    "a region outside for one that is missing": (
        listed(Region((0,), (2,)), Region((3,), (2,)), shape=(4,)),
        None,
        "is outside of its shape",
    ),
    "a region twice on one rank": (
        [has(ListedPartitioning(((0, ALL), (0, ALL))), 0)],
        0,
        "Rank 0 holds twice the region [0:4] of w",
    ),
    # Also if only another rank's catalog lists the second one.
    "other regions of a rank": (
        [ONE, catalog(w=MOVED)],
        None,
        "Ranks disagree about the regions of w on rank 0: one lists [0:2], another [2:4]",
    ),
    "a scalar with two writers": (listed(POINT, POINT, shape=()), None, "Ranks 0 and 1 both hold"),
    "a scalar without a writer": (
        [has(ListedPartitioning(()), 0, shape=())],
        None,
        "No rank holds the region [] of w",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_error_names_the_ranks_that_disagree(name: str) -> None:
    by_rank, rank, says = REFUSED[name]
    error = refused(*by_rank)
    assert says in str(error)
    assert rank in (None, error.rank)


def test_the_error_names_a_rank_without_a_tensor_even_if_writers_differ() -> None:
    """Without v, rank 1 assigns the rest to other writers. The error names v, the cause."""
    a = catalog(v=shared(whole(0), 0, 1), w=shared(whole(1), 0, 1))
    b = catalog(w=shared(whole(0), 0, 1))
    with pytest.raises(InvalidInput, match=r"Rank 1 lacks v, which rank 0 has") as caught:
        agreed(a, b)
    assert (caught.value.rank, caught.value.key) == (1, "v")


@given(partitions(), st.data())
def test_the_error_names_a_missing_region(case: Cut, data: st.DataObject) -> None:
    """A region that is named is inside the region that is missing."""
    shape, regions = case
    full = [region for region in regions if region.num_items]
    gone = full.pop(data.draw(st.integers(0, len(full) - 1)))
    error = refused(*listed(*full, Region((0,) * len(shape), (0,) * len(shape)), shape=shape))
    found = str(error).partition("No rank holds the region [")[2].partition("] of w")[0]
    sides = [tuple(map(int, side.split(":"))) for side in found.split(", ")]
    named = Region(tuple(low for low, _ in sides), tuple(high - low for low, high in sides))
    assert named.num_items
    assert named.overlap(gone) == named
    assert str(error).endswith(f"whose shape is {list(shape)}.")


@given(partitions(), st.data())
def test_the_error_names_a_region_of_two_ranks(case: Cut, data: st.DataObject) -> None:
    shape, regions = case
    full = [region for region in regions if region.num_items]
    twice = data.draw(st.integers(0, len(full) - 1))
    error = refused(*listed(*full, full[twice], shape=shape))
    shown = ", ".join(f"{at}:{at + length}" for at, length in zip(*full[twice], strict=True))
    assert f"Ranks {twice} and {len(full)} both hold the region [{shown}] of w." in str(error)


@given(st.lists(st.tuples(*[st.tuples(st.integers(0, 4), st.integers(1, 4))] * 2), min_size=2, max_size=5))
def test_each_element_must_be_covered_exactly_once(sides: list[Sides]) -> None:
    """Regions drawn at random are accepted exactly if every element is in one of them."""
    regions = [Region((a, b), (min(n, 5 - a), min(m, 5 - b))) for (a, n), (b, m) in sides]
    counts = dict.fromkeys(itertools.product(range(5), range(5)), 0)
    for (a, b), (n, m) in regions:
        for place in itertools.product(range(a, a + n), range(b, b + m)):
            counts[place] += 1
    ranks = listed(*regions, shape=(5, 5))
    if set(counts.values()) == {1}:
        assert agreed(*ranks).tensors["w"].owner == "split"
    else:
        refused(*ranks)


def test_a_rank_may_hold_several_regions() -> None:
    """In one catalog, and where each rank's catalog lists its own regions."""
    thirds = [Region((at,), (2,)) for at in (0, 2, 4)]
    rows = (0, thirds[0]), (1, thirds[1]), (0, thirds[2])
    together = shared(ListedPartitioning(rows), 0, 1, shape=(6,))
    separate = [
        catalog(w=replace(together, partitioning=ListedPartitioning(own), held_by=held))
        for own, held in ((rows[::2], (0,)), (rows[1:2], (1,)))
    ]
    for by_rank in ([catalog(w=together)] * 2, separate):
        found = agreed(*by_rank)
        assert found.num_shards == (2, 1)
        partitioning = found.tensors["w"].partitioning
        assert partitioning is not None
        assert sorted(partitioning.regions((6,))) == sorted(rows)


@pytest.mark.parametrize("is_own_alone", [True, False])
def test_an_overlap_among_thousands_of_listed_regions_is_found_quickly(is_own_alone: bool) -> None:
    """A mesh of 64 x 32 ranks: all pairs of 2048 regions for many tensors would hold up the commit.

    Whether each rank lists its own region alone, or every rank all of them.
    """
    regions = [Region((10 * row, 10 * column), (10, 10)) for row in range(64) for column in range(32)]
    random.Random(1).shuffle(regions)
    names = ("u", "v", "w")

    def one(rows: Sequence[tuple[int, Region]], of_w: Sequence[tuple[int, Region]]) -> bytes:
        listed = zip(names, (ListedPartitioning(tuple(one)) for one in (rows, rows, of_w)), strict=True)
        tensors = {name: Tensor(F32, (640, 320), one, one.ranks) for name, one in listed}
        return catalog_text(Catalog(tensors, {}))

    def agree_with(of_w: Sequence[Region]) -> Agreement:
        rows, rows_of_w = list(enumerate(regions)), list(enumerate(of_w))
        if not is_own_alone:
            return agree((one(rows, rows_of_w),), (0,) * 2048)
        texts = tuple(one([row], [row_of_w]) for row, row_of_w in zip(rows, rows_of_w, strict=True))
        return agree(texts, tuple(range(2048)))

    assert agree_with(regions).num_shards == (3,) * 2048
    with pytest.raises(InvalidInput, match=r"Ranks (7 and 8|8 and 7) both hold the region") as caught:
        agree_with([*regions[:7], regions[8], *regions[8:]])
    assert caught.value.key == "w"


def test_the_error_of_an_invalid_catalog_names_its_rank() -> None:
    good = catalog_text(catalog(w=shared(whole(0), 0)))
    with pytest.raises(Corrupt, match="the catalog of rank 2"):
        agree((good, b"{}"), (0, 0, 1))
