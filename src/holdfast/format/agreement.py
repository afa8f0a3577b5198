"""Whether the catalogs of all ranks fit together and cover every tensor exactly once; pure."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from holdfast.errors import InvalidInput
from holdfast.format.catalog import Catalog, Tensor, parse_catalog
from holdfast.format.cuts import Box, Boxes, Cut

Row = tuple[int, Box]


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks together have written, once it is known that it fits together."""

    tensors: dict[str, Tensor]
    tied: dict[str, str]
    num_pieces: tuple[int, ...]  # by rank: how many of `tensors` it wrote


@lru_cache(
    maxsize=2
)  # a run's catalogs stay the same from save to save, and checking them is most of a commit
def agree(texts: tuple[bytes, ...], catalog_of: tuple[int, ...]) -> Agreement:
    """Check that the catalogs fit together.

    Args:
        texts: each different catalog.
        catalog_of: by rank, the index of its catalog.

    Raises:
        Corrupt: a catalog cannot be read.
        InvalidInput: ranks disagree about a tensor, or its boxes do not cover it exactly once; tensor, ranks
            and region are named.
    """
    catalogs = [
        parse_catalog(text, f"the catalog of rank {catalog_of.index(i)}") for i, text in enumerate(texts)
    ]
    ranks_of = [tuple(r for r, i in enumerate(catalog_of) if i == index) for index in range(len(texts))]
    tensors = _unite(catalogs, ranks_of)
    tied: dict[str, str] = {}
    for catalog in catalogs:
        tied.update(catalog.tied)
    _check_held(tensors, catalogs, ranks_of)
    cuts: dict[int, tuple[Cut, int]] = {}  # by id: thousands of tensors share a few
    counts: Counter[int] = Counter()
    for name, tensor in tensors.items():
        cut = tensor.cut
        if isinstance(cut, Boxes):
            _check_boxes(name, tensor.shape, cut.rows)
            counts.update(cut.ranks)
        elif cut is not None:
            _check_dims(name, tensor.shape, cut)
            cuts[id(cut)] = cut, cuts.get(id(cut), (cut, 0))[1] + 1
    for cut, count in cuts.values():
        _check_cut(cut, len(catalog_of), [name for name, tensor in tensors.items() if tensor.cut is cut])
        counts.update(dict.fromkeys(cut.ranks, count))
    return Agreement(tensors, tied, tuple(counts[rank] for rank in range(len(catalog_of))))


def _unite(catalogs: Sequence[Catalog], ranks_of: Sequence[tuple[int, ...]]) -> dict[str, Tensor]:
    """The tensors of all catalogs; those that are cut by no rule get the boxes of all of them."""
    tensors = dict(catalogs[0].tensors)
    first_in = dict.fromkeys(tensors, 0)
    for index, catalog in enumerate(catalogs[1:], 1):
        for name, tensor in catalog.tensors.items():
            known = tensors.setdefault(name, tensor)
            if known is tensor:
                first_in[name] = index
            elif known != tensor:
                pair = ranks_of[first_in[name]][0], ranks_of[index][0]
                tensors[name] = _united(name, known, tensor, pair)
    return tensors


def _united(name: str, a: Tensor, b: Tensor, ranks: tuple[int, int]) -> Tensor:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        raise InvalidInput(
            f"Ranks disagree about {name}: rank {ranks[0]} has {a.dtype}{list(a.shape)}, rank {ranks[1]} has "
            f"{b.dtype}{list(b.shape)}.",
            rank=ranks[1],
            key=name,
        )
    if isinstance(a.cut, Boxes) and isinstance(b.cut, Boxes):
        rows = tuple(dict.fromkeys((*a.cut.rows, *b.cut.rows)))
        held_by = tuple(sorted({*a.held_by, *b.held_by}))
        return Tensor(a.dtype, a.shape, Boxes(rows), held_by, a.frozen)
    if a.held_by != b.held_by:
        raise InvalidInput(
            f"Ranks disagree about who holds {name}: rank {ranks[0]} says {_some(a.held_by)}, rank "
            f"{ranks[1]} says {_some(b.held_by)}. If ranks hold different parts of a model, they must hold "
            "them when the Checkpointer first restores or saves.",
            rank=ranks[1],
            key=name,
        )
    # The same holders and yet another writer: the spreading over them came out otherwise, since one of them
    # lacks a tensor or has one more; which one is found by who holds what.
    return a


def _check_held(
    tensors: dict[str, Tensor], catalogs: Sequence[Catalog], ranks_of: Sequence[tuple[int, ...]]
) -> None:
    """Every rank that is said to hold a tensor lists it, in the same way."""
    index_of = {rank: index for index, ranks in enumerate(ranks_of) for rank in ranks}
    holding: dict[int, set[int]] = {}  # id of `held_by` -> indices of the catalogs of these ranks
    for name, tensor in tensors.items():
        indices = holding.get(id(tensor.held_by))
        if indices is None:
            indices = holding[id(tensor.held_by)] = _catalogs_of(name, tensor.held_by, index_of)
        if len(catalogs) == 1:
            continue
        for index in indices:
            rank = next(rank for rank in tensor.held_by if index_of[rank] == index)
            _check_listed(name, tensor, rank, catalogs[index], catalogs, ranks_of)


def _catalogs_of(name: str, held_by: tuple[int, ...], index_of: dict[int, int]) -> set[int]:
    outside = [rank for rank in held_by if rank not in index_of]
    if outside:
        message = f"{name} is said to be on ranks {_some(outside)}, of {len(index_of)} ranks."
        raise InvalidInput(message, key=name)
    return {index_of[rank] for rank in held_by}


def _check_listed(
    name: str,
    tensor: Tensor,
    rank: int,
    its_catalog: Catalog,
    catalogs: Sequence[Catalog],
    ranks_of: Sequence[tuple[int, ...]],
) -> None:
    listed = its_catalog.tensors.get(name)
    if listed is None:
        have = next(ranks[0] for ranks, one in zip(ranks_of, catalogs, strict=True) if name in one.tensors)
        message = (
            f"Rank {rank} lacks {name}, which rank {have} has and says is on ranks {_some(tensor.held_by)}."
        )
        raise InvalidInput(message, rank=rank, key=name)
    if listed.cut != tensor.cut and not isinstance(tensor.cut, Boxes):
        message = (
            f"Ranks disagree about which rank writes which region of {name}; rank {rank} is one of them."
        )
        raise InvalidInput(message, rank=rank, key=name)


def _check_dims(name: str, shape: tuple[int, ...], cut: Cut) -> None:
    if not all(0 <= dim < len(shape) and parts > 0 for dim, parts in cut.splits):
        message = f"{name} of shape {list(shape)} cannot be cut by {list(cut.splits)}."
        raise InvalidInput(message, key=name)


def _check_cut(cut: Cut, world_size: int, of: Sequence[str]) -> None:
    """A cut covers its tensors by its rule, if only it has as many writers as boxes."""
    num_boxes = math.prod(parts for _, parts in cut.splits)
    are_ranks = all(0 <= rank < world_size for rank in cut.ranks)
    if not (are_ranks and len(cut.ranks) == num_boxes == len(set(cut.ranks))):
        message = (
            f"{of[0]} is cut into {num_boxes} regions, but ranks {_some(cut.ranks)} of {world_size} are to "
            "write them, one each."
        )
        raise InvalidInput(message, key=of[0])


def _check_boxes(name: str, shape: tuple[int, ...], rows: Sequence[Row]) -> None:
    """Inside the shape, without overlap, and as many elements as the shape has: then nothing is missing."""
    for rank, box in rows:
        if not box.is_inside(shape):
            message = (
                f"Rank {rank} holds {_region(box)} of {name}, which is not inside its shape {list(shape)}."
            )
            raise InvalidInput(message, rank=rank, key=name)
    ranks = [rank for rank, _ in rows]
    if len(set(ranks)) < len(ranks):
        twice = next(rank for rank in ranks if ranks.count(rank) > 1)
        raise InvalidInput(
            f"Rank {twice} holds two regions of {name}; it can hold one.", rank=twice, key=name
        )
    held = [(rank, box) for rank, box in rows if box.num_items]
    if clash := _find_overlap(held):
        (rank_a, a), (rank_b, b) = clash
        both = a.overlap(b)
        assert both is not None
        message = f"Ranks {rank_b} and {rank_a} both hold the region {_region(both)} of {name}."
        raise InvalidInput(message, rank=rank_a, key=name)
    if sum(box.num_items for _, box in held) != math.prod(shape):
        gap = _find_gap(shape, [box for _, box in held])
        message = f"No rank holds the region {_region(gap)} of {name}, whose shape is {list(shape)}."
        raise InvalidInput(message, key=name)


def _find_overlap(held: list[Row]) -> tuple[Row, Row] | None:
    """Two boxes that overlap, if any.

    Sweeps along the dimension that is cut most often, and compares a box only with those that reach its
    start: n * log n steps for n boxes under the usual shardings, where comparing all pairs of a thousand
    ranks would take minutes.
    """
    dims = range(len(held[0][1].lengths)) if held else range(0)
    dim = max(dims, key=lambda d: len({box.offsets[d] for _, box in held}), default=None)
    if dim is None:  # no dimension: every box is the one element
        return (held[1], held[0]) if len(held) > 1 else None
    reaching: list[Row] = []
    for rank, box in sorted(held, key=lambda row: row[1].offsets[dim]):
        start = box.offsets[dim]
        reaching = [other for other in reaching if other[1].offsets[dim] + other[1].lengths[dim] > start]
        for other in reaching:
            if box.overlap(other[1]):
                return (rank, box), other
        reaching.append((rank, box))
    return None


def _find_gap(shape: tuple[int, ...], boxes: list[Box]) -> Box:
    """A region that no box covers, when there is one: the first cell of the grid that all borders make."""
    borders = [
        sorted({0, size, *(b.offsets[d] for b in boxes), *(b.offsets[d] + b.lengths[d] for b in boxes)})
        for d, size in enumerate(shape)
    ]
    for cell in itertools.product(*(itertools.pairwise(edges) for edges in borders)):
        one = Box(tuple(low for low, _ in cell), tuple(high - low for low, high in cell))
        if not any(one.overlap(box) for box in boxes):
            return one
    return Box.whole(shape)


def _region(box: Box) -> str:
    """A box as one writes a slice."""
    return "[" + ", ".join(f"{at}:{at + long}" for at, long in zip(*box, strict=True)) + "]"


def _some(ranks: Iterable[int], most: int = 8) -> str:
    ranks = list(ranks)
    more = f" and {len(ranks) - most} more" if len(ranks) > most else ""
    return ", ".join(map(str, ranks[:most])) + more
