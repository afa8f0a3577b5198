"""What the tests of the format draw: boxes, cuts and catalogs that fit together."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from holdfast.format.catalog import Catalog, Tensor
from holdfast.format.cuts import AnyCut, Box, Boxes, Cut
from holdfast.format.dtypes import ITEM_BYTES
from holdfast.format.limits import RUN_ID

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
tensor_names = text.filter(lambda name: name != "__metadata__" and "@" not in name)
run_ids = st.from_regex(RUN_ID, fullmatch=True)
dtypes = st.sampled_from(sorted(ITEM_BYTES))


@st.composite
def splits(draw: st.DrawFn, num_dims: int, most: int = 24) -> tuple[tuple[int, int], ...]:
    """Splits of a tensor of so many dimensions into at most `most` boxes."""
    found: list[tuple[int, int]] = []
    for _ in range(draw(st.integers(0, 3)) if num_dims else 0):
        parts = draw(st.integers(1, 5))
        if math.prod(n for _, n in found) * parts <= most:
            found.append((draw(st.integers(0, num_dims - 1)), parts))
    return tuple(found)


@st.composite
def partitions(draw: st.DrawFn, most_cuts: int = 8) -> tuple[tuple[int, ...], list[Box]]:
    """A shape and boxes that cover it exactly, made by cutting boxes again and again, in any order."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, most_cuts))):
        offsets, lengths = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, lengths[dim]))  # 0 leaves an empty box, as uneven sharding does
        upper = tuple(o + at * (d == dim) for d, o in enumerate(offsets))
        lower_lengths = tuple(at if d == dim else n for d, n in enumerate(lengths))
        upper_lengths = tuple(n - at * (d == dim) for d, n in enumerate(lengths))
        boxes += [Box(offsets, lower_lengths), Box(upper, upper_lengths)]
    return shape, draw(st.permutations(boxes))


@st.composite
def tensors(draw: st.DrawFn, ranks: list[int]) -> Tensor:
    """A tensor that some of `ranks` have written together, by a rule or box by box."""
    cut: AnyCut
    if draw(st.booleans()):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        chosen = draw(splits(len(shape), most=len(ranks)))
        num_boxes = math.prod(parts for _, parts in chosen)
        cut = Cut(chosen, tuple(draw(st.permutations(ranks))[:num_boxes]))
    else:
        shape, boxes = draw(partitions(most_cuts=min(len(ranks) - 1, 3)))
        cut = Boxes(tuple(zip(draw(st.permutations(ranks)), boxes, strict=False)))
    others = draw(st.lists(st.sampled_from(ranks), max_size=3))
    return Tensor(draw(dtypes), shape, cut, tuple(sorted({*cut.ranks, *others})), draw(st.booleans()))


@st.composite
def catalogs(draw: st.DrawFn, ranks: list[int]) -> Catalog:
    """What some ranks have in common."""
    held = draw(st.dictionaries(tensor_names, tensors(ranks), max_size=4))
    aliases = draw(st.dictionaries(text, st.sampled_from(sorted(held)), max_size=2)) if held else {}
    return Catalog(held, aliases)
