"""Agreement of all ranks' catalogs: they fit together and cover every tensor exactly once; pure."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

from msgspec import Struct
from msgspec.structs import replace

from holdfast.checkpoint.format.catalog import Catalog, Tensor, parse_catalog
from holdfast.checkpoint.format.layout import EvenPartitioning, ListedPartitioning, Partitioning, Region
from holdfast.checkpoint.format.limits import MAX_SPLIT_DIMS
from holdfast.errors import InvalidInput
from holdfast.system.units import plural, some

Row = tuple[int, Region]

_MIN_WORK = 300_000  # corners, and one more for each byte of the catalogs
_MAX_COMPARISONS = 200_000  # of regions, to name the region that an error is about


class Agreement(Struct, frozen=True):
    """Result of the check: the tensors that all ranks together have written."""

    tensors: dict[str, Tensor]
    tied: dict[str, str]
    num_shards: tuple[int, ...]  # by rank: the number of shards of `tensors` that it wrote


# A run's catalogs stay the same from save to save, and checking them is most of a commit.
@lru_cache(maxsize=2)
def agree(texts: tuple[bytes, ...], catalog_of: tuple[int, ...]) -> Agreement:
    """Check that the different catalogs fit together; `catalog_of` has the index of each rank's."""
    ranks_of: list[list[int]] = [[] for _ in texts]
    for rank, index in enumerate(catalog_of):
        ranks_of[index].append(rank)
    if not all(ranks_of):
        raise InvalidInput(f"Catalog {ranks_of.index([])} belongs to no rank.")
    catalogs = [
        parse_catalog(text, f"the catalog of rank {ranks[0]}")
        for text, ranks in zip(texts, ranks_of, strict=True)
    ]
    work = _Work(_MIN_WORK + sum(map(len, texts)))
    tensors, disputed = _unite(catalogs, ranks_of, work)
    tied = {alias: name for catalog in catalogs for alias, name in catalog.tied.items()}
    _check_held(tensors, catalogs, ranks_of)
    for name, (rank_a, rank_b) in disputed.items():
        raise InvalidInput(
            f"Ranks {rank_a} and {rank_b} disagree about the writers of regions of {name}.",
            rank=rank_b,
            key=name,
        )
    counts = _check_partitionings(tensors, len(catalog_of), work)
    return Agreement(tensors, tied, tuple(map(counts.__getitem__, range(len(catalog_of)))))


class _Work:
    """Limit on the work of checking listed regions, in corners of regions.

    Short catalogs from an untrusted home can require any amount of work, because many tensors can share few
    lists. In catalogs that ranks write, each list is counted once and has more bytes than corners.
    """

    def __init__(self, most: int) -> None:
        self._left = most

    @classmethod
    def enough_for(cls, num_regions: int) -> _Work:
        """Return a limit that one list of regions of a trusted source does not reach."""
        return cls(_MIN_WORK + (num_regions + 1 << MAX_SPLIT_DIMS + 1))

    def count(self, corners: int, name: str) -> None:
        """Count corners."""
        self._left -= corners
        if self._left < 0:
            raise InvalidInput(
                f"The regions of {name} and of tensors before it are too many to be checked.", key=name
            )


def _check_partitionings(tensors: dict[str, Tensor], world_size: int, work: _Work) -> Counter[int]:
    """Check that every tensor is covered exactly once by its holders; count each rank's regions."""
    # By id: thousands of tensors share a few partitionings and holders.
    uses: Counter[int] = Counter()
    partitionings: dict[int, Partitioning] = {}
    writers: set[tuple[int, int]] = set()
    covered: dict[int, tuple[int, ...]] = {}  # id of regions -> shape that they cover
    for name, tensor in tensors.items():
        partitioning = tensor.partitioning
        assert partitioning is not None
        if id(partitioning) not in partitionings:
            partitionings[id(partitioning)] = partitioning
            if isinstance(partitioning, EvenPartitioning):
                _check_even(name, partitioning, world_size)
        uses[id(partitioning)] += 1
        if (id(partitioning), id(tensor.held_by)) not in writers:
            writers.add((id(partitioning), id(tensor.held_by)))
            _check_writers(name, partitioning.ranks, tensor.held_by)
        if isinstance(partitioning, ListedPartitioning) and covered.get(id(partitioning)) != tensor.shape:
            check_regions(name, tensor.shape, partitioning.rows, work)
            covered[id(partitioning)] = tensor.shape
    counts: Counter[int] = Counter()
    for key, partitioning in partitionings.items():
        regions_of = Counter(partitioning.ranks)
        counts.update({rank: count * uses[key] for rank, count in regions_of.items()})
    return counts


def _check_writers(name: str, writers: Iterable[int], held_by: tuple[int, ...]) -> None:
    holders = set(held_by)
    if not holders.issuperset(writers):
        others = sorted({*writers} - holders)
        raise InvalidInput(
            f"Ranks {some(others)} are listed as writers of {name}, but its holders are ranks "
            f"{some(held_by)}.",
            rank=others[0],
            key=name,
        )


def _unite(
    catalogs: Sequence[Catalog], ranks_of: Sequence[Sequence[int]], work: _Work
) -> tuple[dict[str, Tensor], dict[str, tuple[int, int]]]:
    """Return the tensors of all catalogs, and for each with two partitionings the ranks that list these.

    Listed regions are united. If the holders are the same nevertheless, the assignment to writers differed,
    because one of them lacks a tensor or has one more. That is better reported as a difference of holders.
    """
    compared: dict[tuple[int, int], bool] = {}  # each pair once, since lists of ranks may be long

    def is_same(a: object, b: object) -> bool:
        if a is not b and (id(a), id(b)) not in compared:
            compared[id(a), id(b)] = a == b
        return a is b or compared[id(a), id(b)]

    disputed: dict[str, tuple[int, int]] = {}
    listed: dict[str, list[Tensor]] = {}  # as all ranks list them, those without a rule
    tensors = dict(catalogs[0].tensors)
    first_in = dict.fromkeys(tensors, 0)
    for index, catalog in enumerate(catalogs[1:], 1):
        for name, tensor in catalog.tensors.items():
            known = tensors.setdefault(name, tensor)
            if known is tensor:
                first_in[name] = index
                continue
            is_cut_alike = is_same(known.partitioning, tensor.partitioning)
            if (
                (known.dtype, known.shape, known.frozen) == (tensor.dtype, tensor.shape, tensor.frozen)
                and is_cut_alike
                and is_same(known.held_by, tensor.held_by)
            ):
                continue
            pair = ranks_of[first_in[name]][0], ranks_of[index][0]
            are_listed = {type(one.partitioning) for one in (known, tensor)} == {ListedPartitioning}
            _check_alike(
                name, known, tensor, pair, are_held_alike=are_listed or is_same(known.held_by, tensor.held_by)
            )
            if are_listed:
                listed.setdefault(name, [known]).append(tensor)
            elif not is_cut_alike:
                disputed.setdefault(name, pair)
    tensors |= _united(tensors, listed, work)
    return tensors, disputed


def _united(
    tensors: dict[str, Tensor], listed: dict[str, list[Tensor]], work: _Work
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors without a rule, with the regions and holders of all catalogs."""
    unions: dict[tuple[int, ...], tuple[ListedPartitioning, tuple[int, ...]]] = {}
    for name, found in listed.items():
        key = tuple(id(thing) for one in found for thing in (one.partitioning, one.held_by))
        if key not in unions:  # once for all tensors with the same lists
            unions[key] = _union(name, found, work)
        partitioning, held_by = unions[key]
        yield name, replace(tensors[name], partitioning=partitioning, held_by=held_by)


def _union(name: str, listed: Sequence[Tensor], work: _Work) -> tuple[ListedPartitioning, tuple[int, ...]]:
    """Return all regions of a tensor that several catalogs list, and the ranks that hold it."""
    regions: dict[int, tuple[Region, ...]] = {}
    holders: set[int] = set()
    for tensor in listed:
        assert isinstance(tensor.partitioning, ListedPartitioning)
        work.count(len(tensor.partitioning.rows) + len(tensor.held_by), name)
        for rank, own in _by_rank(tensor.partitioning.rows).items():
            if regions.setdefault(rank, own) != own:
                raise InvalidInput(
                    f"Ranks disagree about the regions of {name} on rank {rank}: one lists "
                    f"{some(map(_as_slices, regions[rank]))}, another {some(map(_as_slices, own))}.",
                    rank=rank,
                    key=name,
                )
        holders.update(tensor.held_by)
    rows = tuple((rank, region) for rank, own in regions.items() for region in own)
    return ListedPartitioning(rows), tuple(sorted(holders))


def _by_rank(rows: Iterable[Row]) -> dict[int, tuple[Region, ...]]:
    found: dict[int, list[Region]] = {}
    for rank, region in rows:
        found.setdefault(rank, []).append(region)
    return {rank: tuple(regions) for rank, regions in found.items()}


def _check_alike(name: str, a: Tensor, b: Tensor, ranks: tuple[int, int], *, are_held_alike: bool) -> None:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        raise InvalidInput(
            f"Ranks disagree about {name}: rank {ranks[0]} has {a.dtype}{list(a.shape)}, rank {ranks[1]} has "
            f"{b.dtype}{list(b.shape)}.",
            rank=ranks[1],
            key=name,
        )
    if not are_held_alike:
        raise InvalidInput(
            f"Ranks disagree about the holders of {name}: rank {ranks[0]} lists {some(a.held_by)}, rank "
            f"{ranks[1]} lists {some(b.held_by)}. If ranks hold different parts of a model, they must hold "
            "them when the Checkpointer first restores or saves.",
            rank=ranks[1],
            key=name,
        )


def _check_held(
    tensors: dict[str, Tensor], catalogs: Sequence[Catalog], ranks_of: Sequence[Sequence[int]]
) -> None:
    """Check that every listed holder of a tensor lists it, in the same way."""
    index_of = {rank: index for index, ranks in enumerate(ranks_of) for rank in ranks}
    holding: dict[int, dict[int, int]] = {}  # id of `held_by` -> catalogs of these ranks, a rank of each
    for name, tensor in tensors.items():
        indices = holding.get(id(tensor.held_by))
        if indices is None:
            indices = holding[id(tensor.held_by)] = _catalogs_of(name, tensor.held_by, index_of)
        for index, rank in indices.items():
            if name not in catalogs[index].tensors:
                have = next(r[0] for r, one in zip(ranks_of, catalogs, strict=True) if name in one.tensors)
                raise InvalidInput(
                    f"Rank {rank} lacks {name}, which rank {have} has and lists as held by ranks "
                    f"{some(tensor.held_by)}.",
                    rank=rank,
                    key=name,
                )


def _catalogs_of(name: str, held_by: tuple[int, ...], index_of: dict[int, int]) -> dict[int, int]:
    outside = [rank for rank in held_by if rank not in index_of]
    if outside:
        raise InvalidInput(
            f"{name} is listed as held by ranks {some(outside)}, of {plural(len(index_of), 'rank')}.",
            key=name,
        )
    return {index_of[rank]: rank for rank in reversed(held_by)}


def _check_even(name: str, partitioning: EvenPartitioning, world_size: int) -> None:
    """Check that a rule has as many writers as regions. It then covers its tensors."""
    num_regions = math.prod(parts for _, parts in partitioning.splits)
    are_ranks = min(partitioning.ranks) >= 0 and max(partitioning.ranks) < world_size
    if not (are_ranks and len(partitioning.ranks) == num_regions == len(set(partitioning.ranks))):
        raise InvalidInput(
            f"{name} is split into {num_regions} regions, but its writers are ranks "
            f"{some(partitioning.ranks)} of {world_size}, one region each.",
            key=name,
        )


def check_regions(name: str, shape: tuple[int, ...], rows: Sequence[Row], work: _Work | None = None) -> None:
    """Check that each element is in exactly one region. Some regions may be empty."""
    work = work or _Work.enough_for(len(rows))
    work.count(len(rows), name)
    for rank, region in rows:
        if not region.is_inside(shape):
            raise InvalidInput(
                f"Rank {rank} holds {_as_slices(region)} of {name}, which is outside of its shape "
                f"{list(shape)}.",
                rank=rank,
                key=name,
            )
    held = [(rank, region) for rank, region in rows if region.num_items]
    if _cover_once(name, shape, [region for _, region in held], work):
        return
    if clash := _find_overlap(held):
        (rank_a, a), (rank_b, b) = clash
        both = a.overlap(b)
        assert both is not None
        who = f"Ranks {rank_b} and {rank_a} both hold" if rank_a != rank_b else f"Rank {rank_a} holds twice"
        raise InvalidInput(f"{who} the region {_as_slices(both)} of {name}.", rank=rank_a, key=name)
    gap = _find_gap(shape, [region for _, region in held])
    if gap is None:
        message = f"The regions of {name} do not cover its shape {list(shape)} exactly once."
    else:
        message = f"No rank holds the region {_as_slices(gap)} of {name}, whose shape is {list(shape)}."
    raise InvalidInput(message, key=name)


def covers_once(name: str, shape: tuple[int, ...], regions: Sequence[Region]) -> bool:
    """Return True if each element of a tensor is in exactly one region. Some may be empty."""
    held = [region for region in regions if region.num_items]
    return _cover_once(name, shape, held, _Work.enough_for(len(held)))


def _cover_once(name: str, shape: tuple[int, ...], regions: Sequence[Region], work: _Work) -> bool:
    """Return True if each element is in exactly one of the regions. None of them may be empty.

    The number of regions over an element is a function of its position. It is zero outside, so its
    differences along all dimensions determine it. Those of one region are +1 and -1 at its corners. So the
    regions cover a shape once if all their corners, with their signs, add up to the corners of the shape.
    This takes n * log n steps for n corners, where comparing regions with each other takes n * n, or a number
    of cells that is exponential in the dimensions.
    """
    if not math.prod(shape):
        return not regions
    whole = Region.whole(shape)
    split_dims = [d for d in range(len(shape)) if any(b.sizes[d] != shape[d] for b in regions)]
    if len(split_dims) > MAX_SPLIT_DIMS:
        raise InvalidInput(
            f"{name} is split along {len(split_dims)} dimensions; at most {MAX_SPLIT_DIMS} are allowed.",
            key=name,
        )
    work.count(len(regions) << len(split_dims), name)
    signs = [math.prod(corner) for corner in itertools.product((1, -1), repeat=len(split_dims))]
    signed: list[tuple[tuple[int, ...], int]] = []
    for region, sign in itertools.chain(((whole, -1),), ((region, 1) for region in regions)):
        sides = [(region.offsets[d], region.offsets[d] + region.sizes[d]) for d in split_dims]
        signed += ((corner, sign * one) for corner, one in zip(itertools.product(*sides), signs, strict=True))
    signed.sort()  # not a dict: an attacker can choose corners with equal hashes
    groups = itertools.groupby(signed, key=lambda row: row[0])
    return not any(sum(one for _, one in rows) for _, rows in groups)


def _find_overlap(held: list[Row]) -> tuple[Row, Row] | None:
    """Return two regions that overlap, or None after a limit on steps."""
    dims = range(len(held[0][1].sizes)) if held else range(0)
    dim = max(dims, key=lambda d: len({region.offsets[d] for _, region in held}), default=None)
    if dim is None:  # no dimension: every region is the one element
        return (held[1], held[0]) if len(held) > 1 else None
    left = _MAX_COMPARISONS
    reaching: list[Row] = []
    for rank, region in sorted(held, key=lambda row: row[1].offsets[dim]):
        start = region.offsets[dim]
        reaching = [other for other in reaching if other[1].offsets[dim] + other[1].sizes[dim] > start]
        left -= len(reaching)
        if left < 0:
            return None
        for other in reaching:
            if region.overlap(other[1]):
                return (rank, region), other
        reaching.append((rank, region))
    return None


def _find_gap(shape: tuple[int, ...], regions: list[Region]) -> Region | None:
    """Return a region that no rank holds: the first such cell of the grid of all borders.

    None if no such cell is found within a limit on steps.
    """
    borders = [
        sorted({0, size, *(b.offsets[d] for b in regions), *(b.offsets[d] + b.sizes[d] for b in regions)})
        for d, size in enumerate(shape)
    ]
    cells = itertools.product(*(itertools.pairwise(edges) for edges in borders))
    for cell in itertools.islice(cells, 1 + _MAX_COMPARISONS // (1 + len(regions))):
        cover = Region(tuple(low for low, _ in cell), tuple(high - low for low, high in cell))
        if not any(cover.overlap(region) for region in regions):
            return cover
    return None


def _as_slices(region: Region) -> str:
    """Return a region in slice notation."""
    return "[" + ", ".join(f"{at}:{at + long}" for at, long in zip(*region, strict=True)) + "]"
