"""The parts of one checkpoint, each read and checked once, and where in them the pieces of a tensor are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.errors import Corrupt, HoldfastError, InvalidInput, NotFound
from holdfast.format.cuts import Box
from holdfast.format.layout import Piece
from holdfast.format.manifest import EACH, Manifest
from holdfast.format.part import Part
from holdfast.home.documents import read_part
from holdfast.store.contract import Store
from holdfast.units import plural


@dataclass(frozen=True, slots=True)
class Located:
    """A box of a tensor, and where it is."""

    rank: int  # that wrote it
    piece: Piece
    box: Box
    start: int  # its first byte in the data file


class Parts:
    """The parts of a checkpoint, read when asked for. Not for several threads at once."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self.manifest = manifest
        self._store = store
        self._parts: dict[int, Part] = {}
        self._pieces: dict[int, dict[str, tuple[Piece, int]]] = {}

    def part(self, rank: int) -> Part:
        """The part of a rank.

        Raises:
            InvalidInput: the checkpoint has no such rank.
            NotFound: the part is missing.
            Corrupt: the part is damaged.
            RetryLater: the store failed.
        """
        if not 0 <= rank < self.manifest.world_size:
            count, step = self.manifest.world_size, self.manifest.step
            message = (
                f"Step {step} was saved by {plural(count, 'rank')} (0 to {count - 1}); "
                f"there is no rank {rank}."
            )
            raise InvalidInput(message, step=step, rank=rank)
        if rank not in self._parts:
            self._parts[rank] = read_part(self._store, self.manifest, rank)
        return self._parts[rank]

    def pieces_of(self, name: str, rank: int, box: Box | None = None) -> Iterator[Located]:
        """Where the boxes are that together hold a box of a tensor, as `rank` sees it; empty ones left out.

        Reads only the parts of the ranks that wrote them.

        Args:
            name: a tensor of the manifest, no alias.
            rank: whose copy of a per-rank tensor, see `holder`.
            box: what is wanted of it; all of it by default.

        Raises:
            Corrupt: the parts do not hold what the manifest says.
            NotFound: a part is missing.
            RetryLater: the store failed.
        """
        tensor = self.manifest.tensors[name]
        if tensor.cut is None:
            yield self._located(name, self.holder(name, rank), NotFound)
            return
        wanted = Box.whole(tensor.shape) if box is None else box
        for one, expected in tensor.cut.touching(wanted, tensor.shape):
            found = self._located(name, one, Corrupt)
            if (found.box, found.piece.dtype, found.piece.shape) != (expected, tensor.dtype, tensor.shape):
                message = (
                    f"The manifest of step {self.manifest.step} says that {name} is "
                    f"{tensor.dtype}{list(tensor.shape)} and that rank {one} holds {expected}; it holds "
                    f"{found.piece}."
                )
                raise Corrupt(message, step=self.manifest.step, rank=one, key=name)
            yield found

    def _located(self, name: str, rank: int, error: type[HoldfastError]) -> Located:
        held = self._pieces_in(rank).get(name)
        if held is None:
            message = (
                f"The manifest of step {self.manifest.step} names {name}, but rank {rank} did not save it."
            )
            raise error(message, step=self.manifest.step, rank=rank, key=name)
        piece, start = held
        return Located(rank, piece, Box(piece.offsets, piece.lengths), start)

    def structures(self, rank: int) -> list[int]:
        """Ranks whose parts together hold the values of all structures: `rank` first, one for each other."""
        own = rank % self.manifest.world_size
        first_of = {self.manifest.parts[own].catalog: own}
        for part in self.manifest.parts:
            first_of.setdefault(part.catalog, part.rank)
        return list(first_of.values())

    def holder(self, name: str, rank: int) -> int:
        """The rank whose copy of a per-rank tensor `rank` takes.

        It is `rank` modulo the saved number of ranks. If that one saved none, it is the first of `structures`
        that did: a buffer of a pipeline stage is wanted by ranks that were in another stage.
        """
        own = rank % self.manifest.world_size
        for one in self.structures(rank):
            if name in self._pieces_in(one):
                return one
        return own

    def shape_of(self, name: str, rank: int) -> tuple[str, tuple[int, ...]] | None:
        """Dtype and shape of a tensor as `rank` sees it; None if it is per rank and none is there for it.

        Ranks may differ in the shape of a per-rank tensor; the manifest knows only the first.

        Raises:
            NotFound: a part is missing.
            Corrupt: a part is damaged.
            RetryLater: the store failed.
        """
        tensor = self.manifest.tensors[name]
        if tensor.owner != EACH:
            return tensor.dtype, tensor.shape
        held = self._pieces_in(self.holder(name, rank)).get(name)
        return None if held is None else (held[0].dtype, held[0].shape)

    def _pieces_in(self, rank: int) -> dict[str, tuple[Piece, int]]:
        if rank not in self._pieces:
            part = self.part(rank)
            placed = zip(part.pieces, part.starts, strict=True)
            self._pieces[rank] = {piece.name: (piece, start) for piece, start in placed}
        return self._pieces[rank]
