"""Hypothesis strategies for the tests of the format: regions, partitionings and catalogs that agree."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from holdfast.checkpoint.format.catalog import Catalog, Tensor
from holdfast.checkpoint.format.dtypes import ITEM_BYTES
from holdfast.checkpoint.format.layout import EvenPartitioning, ListedPartitioning, Partitioning, Region
from holdfast.checkpoint.format.limits import RUN_ID
from holdfast.checkpoint.format.sections import WATCH_NAME, Mark, Section

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
tensor_names = text.filter(lambda name: name != "__metadata__" and "@" not in name)
run_ids = st.from_regex(RUN_ID)
dtypes = st.sampled_from(sorted(ITEM_BYTES))
_values = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | text
sections = st.dictionaries(
    st.from_regex(WATCH_NAME, fullmatch=True),
    st.builds(
        Section,
        st.integers(0, 99),
        st.dictionaries(text, _values | st.lists(_values, max_size=3), max_size=3),
        st.sampled_from(Mark),
        st.lists(text, max_size=3).map(tuple),
    ),
    max_size=3,
)
"""Any findings of watches."""


@st.composite
def splits(draw: st.DrawFn, num_dims: int, most: int = 24) -> tuple[tuple[int, int], ...]:
    """Splits of a tensor of so many dimensions into at most `most` regions."""
    found: list[tuple[int, int]] = []
    for _ in range(draw(st.integers(0, 3)) if num_dims else 0):
        parts = draw(st.integers(1, 5))
        if math.prod(n for _, n in found) * parts <= most:
            found.append((draw(st.integers(0, num_dims - 1)), parts))
    return tuple(found)


@st.composite
def partitions(draw: st.DrawFn, most_splits: int = 8) -> tuple[tuple[int, ...], list[Region]]:
    """A shape and regions that cover it exactly, made by cutting regions again and again, in any order."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    regions = [Region.whole(shape)]
    for _ in range(draw(st.integers(0, most_splits))):
        offsets, sizes = regions.pop(draw(st.integers(0, len(regions) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, sizes[dim]))  # 0 leaves an empty region, as uneven sharding does
        upper = tuple(o + at * (d == dim) for d, o in enumerate(offsets))
        lower_sizes = tuple(at if d == dim else n for d, n in enumerate(sizes))
        upper_sizes = tuple(n - at * (d == dim) for d, n in enumerate(sizes))
        regions += [Region(offsets, lower_sizes), Region(upper, upper_sizes)]
    return shape, draw(st.permutations(regions))


@st.composite
def tensors(draw: st.DrawFn, ranks: list[int]) -> Tensor:
    """A tensor that some of `ranks` have written together, by a rule or region by region."""
    partitioning: Partitioning
    if draw(st.booleans()):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        chosen = draw(splits(len(shape), most=len(ranks)))
        num_regions = math.prod(parts for _, parts in chosen)
        partitioning = EvenPartitioning(chosen, tuple(draw(st.permutations(ranks))[:num_regions]))
    else:
        shape, regions = draw(partitions(most_splits=min(len(ranks) - 1, 3)))
        partitioning = ListedPartitioning(tuple(zip(draw(st.permutations(ranks)), regions, strict=False)))
    others = draw(st.lists(st.sampled_from(ranks), max_size=3))
    holders = tuple(sorted({*partitioning.ranks, *others}))
    return Tensor(draw(dtypes), shape, partitioning, holders, draw(st.booleans()))


@st.composite
def catalogs(draw: st.DrawFn, ranks: list[int]) -> Catalog:
    """Draw tensors and values that some ranks have in common."""
    held = draw(st.dictionaries(tensor_names, tensors(ranks), max_size=4))
    aliases = draw(st.dictionaries(text, st.sampled_from(sorted(held)), max_size=2)) if held else {}
    return Catalog(held, aliases)
