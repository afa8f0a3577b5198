"""Catalogs of all ranks are united when they fit, and each way not to fit is told by name."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from format.drawing import catalogs, partitions
from holdfast.errors import Corrupt, InvalidInput
from holdfast.format.agreement import Agreement, agree
from holdfast.format.catalog import Catalog, Tensor, catalog_text
from holdfast.format.cuts import AnyCut, Box, Boxes, Cut, whole

F32 = "F32"


def agreed(*by_rank: Catalog) -> Agreement:
    """What ranks with these catalogs agree on; equal ones are handed over once."""
    texts = list(map(catalog_text, by_rank))
    different = list(dict.fromkeys(texts))
    return agree(tuple(different), tuple(different.index(text) for text in texts))


def catalog(**tensors: Tensor) -> Catalog:
    return Catalog(tensors, {})


def shared(cut: AnyCut, *held_by: int, shape: tuple[int, ...] = (4,), dtype: str = F32) -> Tensor:
    return Tensor(dtype, shape, cut, held_by)


def listed(*boxes: Box, shape: tuple[int, ...]) -> list[Catalog]:
    """A catalog for each rank, which lists only its own box of the tensor w."""
    return [catalog(w=Tensor(F32, shape, Boxes(((rank, box),)), (rank,))) for rank, box in enumerate(boxes)]


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
def test_catalogs_that_fit_are_united(groups: list[tuple[list[int], Catalog]]) -> None:
    """Every tensor of every stage, all aliases, and how many boxes each rank wrote."""
    of_rank = {rank: one for ranks, one in groups for rank in ranks}
    by_rank = [of_rank[rank] for rank in range(len(of_rank))]
    found = agreed(*by_rank)
    assert found.tensors == {name: t for _, one in groups for name, t in one.tensors.items()}
    assert found.tied == {alias: name for _, one in groups for alias, name in one.tied.items()}
    assert list(found.num_pieces) == [len(list(of_rank[r].written_by(r))) for r in range(len(by_rank))]


@given(partitions())
def test_any_partition_is_united_of_what_each_rank_lists(case: tuple[tuple[int, ...], list[Box]]) -> None:
    shape, boxes = case
    found = agreed(*listed(*boxes, shape=shape))
    ranks = tuple(range(len(boxes)))
    assert found.tensors == {"w": Tensor(F32, shape, Boxes(tuple(enumerate(boxes))), ranks)}
    assert found.num_pieces == (1,) * len(boxes)


def test_a_tensor_that_two_stages_share_is_one_tensor() -> None:
    """Tied embeddings of the first and the last stage: both list it, each besides what the other lacks."""
    tied = shared(whole(2), 0, 2)
    first, last = catalog(w=tied, a=shared(whole(0), 0, 1)), catalog(w=tied, b=shared(whole(2), 2))
    middle = catalog(a=shared(whole(0), 0, 1))
    found = agreed(first, middle, last)
    assert found.tensors == {"w": tied, "a": shared(whole(0), 0, 1), "b": shared(whole(2), 2)}
    assert found.num_pieces == (1, 0, 2)


def test_thousands_of_tensors_over_a_thousand_ranks_are_checked_in_a_moment() -> None:
    """Two million boxes, as long as nobody looks at each."""
    ranks = tuple(range(1024))
    cut = Cut(((0, 64), (1, 16)), ranks)
    held = {f"w{number}": shared(cut, *ranks, shape=(640, 320)) for number in range(2000)}
    found = agree((catalog_text(Catalog(held, {})),), (0,) * 1024)
    assert found.num_pieces == (2000,) * 1024


# -- what does not -------------------------------------------------------------------------------------------


def test_a_rank_that_lacks_a_tensor_is_named() -> None:
    have = catalog(w=shared(whole(0), 0, 1, 2))
    error = refused(have, have, catalog())
    assert error.rank == 2
    assert "Rank 2 lacks w, which rank 0 has and lists as held by ranks 0, 1, 2." in str(error)


def test_a_rank_that_lacks_a_tensor_is_named_although_writers_came_out_otherwise() -> None:
    """Since it lacks v, rank 1 has spread the rest otherwise; what to tell is what it lacks."""
    a = catalog(v=shared(whole(0), 0, 1), w=shared(whole(1), 0, 1))
    b = catalog(w=shared(whole(0), 0, 1))
    with pytest.raises(InvalidInput, match=r"Rank 1 lacks v, which rank 0 has") as caught:
        agreed(a, b)
    assert (caught.value.rank, caught.value.key) == (1, "v")


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (shared(whole(0), 0, 1, dtype="F64"), "rank 0 has F32[4], rank 1 has F64[4]"),
        (shared(whole(0), 0, 1, shape=(5,)), "rank 0 has F32[4], rank 1 has F32[5]"),
        (shared(whole(0), 0, 1, shape=(2, 2)), "rank 0 has F32[4], rank 1 has F32[2, 2]"),
    ],
)
def test_another_dtype_or_shape_is_told(other: Tensor, says: str) -> None:
    error = refused(catalog(w=shared(whole(0), 0, 1)), catalog(w=other))
    assert error.rank == 1
    assert f"Ranks disagree about w: {says}." in str(error)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (whole(0), whole(1)),
        (whole(0), Cut(((0, 2),), (0, 1))),
        (Cut(((0, 2),), (0, 1)), Cut(((0, 2),), (1, 0))),
        (Boxes(((0, Box((0,), (4,))),)), whole(0)),
    ],
)
def test_another_writer_is_told(one: AnyCut, other: AnyCut) -> None:
    error = refused(catalog(w=shared(one, 0, 1)), catalog(w=shared(other, 0, 1)))
    assert error.rank == 1
    assert "Ranks 0 and 1 disagree about the writers of regions of w." in str(error)


def test_another_writer_is_told_also_by_a_rank_that_does_not_hold_it() -> None:
    """Else the boxes that rank 1 has written in fact would not be those that the manifest tells of."""
    error = refused(catalog(w=shared(whole(0), 0)), catalog(w=shared(whole(1), 0)))
    assert "disagree about the writers" in str(error)


def test_other_holders_are_told() -> None:
    error = refused(catalog(w=shared(whole(0), 0, 1)), catalog(w=shared(whole(0), 0, 1, 2)), catalog())
    assert error.rank == 1
    assert "the holders of w: rank 0 lists 0, 1, rank 1 lists 0, 1, 2." in str(error)


def test_many_holders_are_not_all_listed() -> None:
    held = catalog(w=shared(whole(0), *range(12)))
    assert "lists as held by ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more" in str(refused(*[held] * 11, catalog()))


def test_a_holder_that_there_is_not_is_told() -> None:
    error = refused(catalog(w=shared(whole(0), 0, 7)))
    assert "w is listed as held by ranks 7, of 1 rank." in str(error)


@pytest.mark.parametrize(
    ("splits", "writers"),
    [
        (((0, 2),), (0,)),
        (((0, 2),), (0, 1, 2)),
        (((0, 2), (0, 2)), (0, 1)),
        (((0, 2),), (1, 1)),
        (((0, 2),), (0, 3)),
        ((), (0, 1)),
        ((), (3,)),
    ],
    ids=["too few", "too many", "half", "twice", "beyond", "two whole", "whole beyond"],
)
def test_a_cut_without_one_writer_for_each_box_is_told(
    splits: tuple[tuple[int, int], ...], writers: tuple[int, ...]
) -> None:
    held = catalog(w=shared(Cut(splits, writers), 0, 1, 2), fine=shared(whole(0), 0, 1, 2))
    num_boxes = 2 ** len(splits)
    some = ", ".join(map(str, writers))
    expected = f"w is split into {num_boxes} regions, but its writers are ranks {some} of 3, one region each."
    assert expected in str(refused(held, held, held))


@pytest.mark.parametrize("cut", [whole(1), Cut(((0, 2),), (0, 1)), Boxes(((1, Box((0,), (4,))),))])
def test_a_writer_that_does_not_hold_it_is_told(cut: AnyCut) -> None:
    error = refused(catalog(w=shared(cut, 0)), catalog())
    assert error.rank == 1
    assert "Ranks 1 are listed as writers of w, but its holders are ranks 0." in str(error)


@given(partitions(), st.data())
def test_a_missing_region_is_named(case: tuple[tuple[int, ...], list[Box]], data: st.DataObject) -> None:
    """A region that is named is inside the box that is missing."""
    shape, boxes = case
    full = [box for box in boxes if box.num_items]
    gone = full.pop(data.draw(st.integers(0, len(full) - 1)))
    error = refused(*listed(*full, Box((0,) * len(shape), (0,) * len(shape)), shape=shape))
    found = str(error).partition("No rank holds the region [")[2].partition("] of w")[0]
    sides = [tuple(map(int, side.split(":"))) for side in found.split(", ")]
    region = Box(tuple(low for low, _ in sides), tuple(high - low for low, high in sides))
    assert region.num_items
    assert region.overlap(gone) == region
    assert str(error).endswith(f"whose shape is {list(shape)}.")


@given(partitions(), st.data())
def test_a_region_that_two_ranks_hold_is_named(
    case: tuple[tuple[int, ...], list[Box]], data: st.DataObject
) -> None:
    shape, boxes = case
    full = [box for box in boxes if box.num_items]
    twice = data.draw(st.integers(0, len(full) - 1))
    error = refused(*listed(*full, full[twice], shape=shape))
    shown = ", ".join(f"{at}:{at + length}" for at, length in zip(*full[twice], strict=True))
    assert f"Ranks {twice} and {len(full)} both hold the region [{shown}] of w." in str(error)


@given(st.lists(st.tuples(*[st.tuples(st.integers(0, 4), st.integers(1, 4))] * 2), min_size=2, max_size=5))
def test_coverage_agrees_with_counting_elements(cuts: list[tuple[tuple[int, int], tuple[int, int]]]) -> None:
    """Boxes drawn at random are accepted exactly if every element is in one of them."""
    boxes = [Box((a, b), (min(n, 5 - a), min(m, 5 - b))) for (a, n), (b, m) in cuts]
    counts = dict.fromkeys(itertools.product(range(5), range(5)), 0)
    for (a, b), (n, m) in boxes:
        for place in itertools.product(range(a, a + n), range(b, b + m)):
            counts[place] += 1
    ranks = listed(*boxes, shape=(5, 5))
    if set(counts.values()) == {1}:
        assert agreed(*ranks).tensors["w"].owner == "split"
    else:
        refused(*ranks)


@pytest.mark.parametrize("box", [Box((3,), (2,)), Box((4,), (1,))])
def test_a_box_outside_the_shape_is_told(box: Box) -> None:
    error = refused(*listed(Box((0,), (4,)), box, shape=(4,)))
    assert error.rank == 1
    assert f"[{box.offsets[0]}:{sum(map(sum, box))}] of w, which is outside of its shape [4]" in str(error)


def test_a_box_outside_cannot_stand_for_a_missing_one() -> None:
    """The number of elements alone is right here."""
    error = refused(*listed(Box((0,), (2,)), Box((3,), (2,)), shape=(4,)))
    assert "is outside of its shape" in str(error)


def test_a_rank_that_holds_two_boxes_is_told() -> None:
    """Also if another rank says of it what it does not say itself."""
    halves = Box((0,), (2,)), Box((2,), (2,))
    one = catalog(w=shared(Boxes(((0, halves[0]), (0, halves[1]))), 0))
    error = refused(one)
    assert error.rank == 0
    assert "Rank 0 holds two regions of w" in str(error)
    a, b = listed(*halves, shape=(4,))
    said = Boxes(((1, halves[1]), (0, halves[1])))
    assert "Rank 0 holds two regions" in str(refused(a, catalog(w=replace(b.tensors["w"], cut=said))))


def test_an_empty_box_beside_the_whole_does_no_harm() -> None:
    found = agreed(*listed(Box((0,), (4,)), Box((4,), (0,)), shape=(4,)))
    assert found.tensors["w"].held_by == (0, 1)
    assert found.num_pieces == (1, 1)


def test_a_tensor_without_dimensions_held_twice_is_told() -> None:
    assert "Ranks 0 and 1 both hold" in str(refused(*listed(Box((), ()), Box((), ()), shape=())))


def test_a_tensor_without_dimensions_held_by_nobody_is_told() -> None:
    assert "No rank holds the region [] of w" in str(refused(catalog(w=shared(Boxes(()), 0, shape=()))))


@pytest.mark.parametrize("is_own_alone", [True, False])
def test_a_clash_among_thousands_of_listed_boxes_is_found_in_a_moment(is_own_alone: bool) -> None:
    """A mesh of 64 x 32 ranks: all pairs of 2048 boxes for many tensors would hold up the commit.

    Whether each rank lists its own box alone, or every rank all of them.
    """
    boxes = [Box((10 * row, 10 * column), (10, 10)) for row in range(64) for column in range(32)]
    random.Random(1).shuffle(boxes)
    names = ("u", "v", "w")

    def one(rows: Sequence[tuple[int, Box]], of_w: Sequence[tuple[int, Box]]) -> bytes:
        cuts = zip(names, (Boxes(tuple(one)) for one in (rows, rows, of_w)), strict=True)
        tensors = {name: Tensor(F32, (640, 320), cut, cut.ranks) for name, cut in cuts}
        return catalog_text(Catalog(tensors, {}))

    def agree_with(of_w: Sequence[Box]) -> Agreement:
        rows, rows_of_w = list(enumerate(boxes)), list(enumerate(of_w))
        if not is_own_alone:
            return agree((one(rows, rows_of_w),), (0,) * 2048)
        texts = tuple(one([row], [row_of_w]) for row, row_of_w in zip(rows, rows_of_w, strict=True))
        return agree(texts, tuple(range(2048)))

    assert agree_with(boxes).num_pieces == (3,) * 2048
    with pytest.raises(InvalidInput, match=r"Ranks (7 and 8|8 and 7) both hold the region") as caught:
        agree_with([*boxes[:7], boxes[8], *boxes[8:]])
    assert caught.value.key == "w"


def test_a_catalog_that_cannot_be_read_names_its_rank() -> None:
    good = catalog_text(catalog(w=shared(whole(0), 0)))
    with pytest.raises(Corrupt, match="the catalog of rank 2"):
        agree((good, b"{}"), (0, 0, 1))
