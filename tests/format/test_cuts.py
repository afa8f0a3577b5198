"""A cut's boxes cover a tensor exactly once, and are found without looking at all of them."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from format.drawing import partitions, splits
from holdfast.format.cuts import Box, Boxes, Cut, whole

shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Cut, tuple[int, ...]]:
    """A cut, its writers in any order, and a shape that it can cut."""
    shape = draw(shapes)
    chosen = draw(splits(len(shape)))
    num_boxes = math.prod(parts for _, parts in chosen)
    return Cut(chosen, tuple(draw(st.permutations(range(10, 10 + num_boxes))))), shape


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """Any box of a tensor, empty ones too."""
    offsets = tuple(draw(st.integers(0, size)) for size in shape)
    return Box(offsets, tuple(draw(st.integers(0, n - at)) for n, at in zip(shape, offsets, strict=True)))


def elements(box: Box) -> set[tuple[int, ...]]:
    """The indices of all elements of a box."""
    sides = (range(at, at + length) for at, length in zip(*box, strict=True))
    return set(itertools.product(*sides))


def by_torch(shape: tuple[int, ...], chosen: tuple[tuple[int, int], ...]) -> list[torch.Tensor]:
    """The pieces that torch.chunk makes, split by split, the empty ones that it leaves out added."""
    pieces = [torch.arange(math.prod(shape)).reshape(shape)]
    for dim, parts in chosen:
        chunked: list[torch.Tensor] = []
        for piece in pieces:
            some = list(piece.chunk(parts, dim)) if piece.shape[dim] else []
            chunked += some + [piece.narrow(dim, 0, 0)] * (parts - len(some))
        pieces = chunked
    return pieces


@given(cuts())
def test_boxes_are_those_of_torch_chunk_in_order(case: tuple[Cut, tuple[int, ...]]) -> None:
    """The sizes, the elements and the order, the index of the first split varying slowest."""
    cut, shape = case
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    expected = by_torch(shape, cut.splits)
    assert len(expected) == len(cut.ranks)
    for index, piece in enumerate(expected):
        box = cut.box_at(index, shape)
        assert box.is_inside(shape)
        assert box.lengths == tuple(piece.shape)
        found = numbers[tuple(slice(at, at + length) for at, length in zip(*box, strict=True))]
        assert torch.equal(found, piece)


@given(cuts())
def test_every_element_is_in_exactly_one_box(case: tuple[Cut, tuple[int, ...]]) -> None:
    cut, shape = case
    found = [element for _, box in cut.boxes(shape) for element in elements(box)]
    assert sorted(found) == sorted(elements(Box.whole(shape)))


@given(cuts())
def test_a_rank_finds_its_own_box(case: tuple[Cut, tuple[int, ...]]) -> None:
    cut, shape = case
    for rank, box in cut.boxes(shape):
        assert cut.box_of(rank, shape) == box
    assert cut.box_of(9, shape) is None


@given(st.data())
def test_touching_finds_what_looking_at_every_box_finds(data: st.DataObject) -> None:
    cut, shape = data.draw(cuts())
    wanted = data.draw(regions(shape))
    slow = [(rank, box) for rank, box in cut.boxes(shape) if elements(box) & elements(wanted)]
    assert list(cut.touching(wanted, shape)) == slow


@given(st.data())
def test_listed_boxes_are_found_alike(data: st.DataObject) -> None:
    shape, listed = data.draw(partitions())
    cut = Boxes(tuple(enumerate(listed)))
    wanted = data.draw(regions(shape))
    slow = [(rank, box) for rank, box in enumerate(listed) if elements(box) & elements(wanted)]
    assert list(cut.touching(wanted, shape)) == slow
    assert list(cut.boxes(shape)) == list(enumerate(listed))
    assert [cut.box_of(rank, shape) for rank in cut.ranks] == listed
    assert cut.box_of(len(listed), shape) is None


@given(st.data())
def test_an_overlap_is_what_both_boxes_hold(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    a, b = data.draw(regions(shape)), data.draw(regions(shape))
    both = a.overlap(b)
    assert (elements(both) if both else set()) == elements(a) & elements(b)
    assert both == b.overlap(a)
    assert a.num_items == len(elements(a))


@pytest.mark.parametrize(
    "box",
    [
        Box((0,), (5,)),
        Box((4,), (1,)),
        Box((-1,), (1,)),
        Box((0,), (-1,)),
        Box((0, 0), (1, 1)),
        Box((0,), ()),
    ],
)
def test_a_box_outside_the_shape_is_told(box: Box) -> None:
    assert not box.is_inside((4,))
    assert Box((4,), (0,)).is_inside((4,))


def test_touching_costs_what_it_finds() -> None:
    """One row of a tensor over a thousand ranks: only its own box is made."""

    class Counted(Box):
        made = 0

        def overlap(self, other: Box) -> Box | None:
            Counted.made += 1
            return super().overlap(other)

    cut = Cut(((0, 64), (1, 16)), tuple(range(1024)))
    found = list(cut.touching(Counted((130, 3), (1, 1)), (640, 160)))
    assert found == [(13 * 16, Box((130, 0), (10, 10)))]
    assert Counted.made == 1


def test_strided_shards_are_the_same_splits_in_another_order() -> None:
    """FSDP over tensor parallel on a 2 x 2 mesh: dimension 0 is cut for tensor parallel first."""
    cut = Cut(((0, 2), (0, 2)), (0, 2, 1, 3))
    assert [(rank, box.offsets[0], box.lengths[0]) for rank, box in cut.boxes((10,))] == [
        (0, 0, 3),
        (2, 3, 2),
        (1, 5, 3),
        (3, 8, 2),
    ]


def test_a_tensor_that_one_rank_wrote_is_a_cut_without_splits() -> None:
    assert whole(3).box_of(3, (2, 5)) == Box((0, 0), (2, 5))
    assert whole(3).box_of(0, (2, 5)) is None
    assert list(whole(3).boxes(())) == list(whole(3).touching(Box((), ()), ())) == [(3, Box((), ()))]
