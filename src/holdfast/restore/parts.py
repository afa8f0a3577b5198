"""The parts of one checkpoint, each read and checked once, and where in them the pieces of a tensor are."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.errors import Corrupt, InvalidInput, NotFound
from holdfast.format.layout import Piece
from holdfast.format.manifest import EACH, SPLIT, Manifest
from holdfast.format.part import Part
from holdfast.restore.find import read_part
from holdfast.store.contract import Store


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
            message = f"Step {step} was saved by {count} ranks (0 to {count - 1}); there is no rank {rank}."
            raise InvalidInput(message, step=step, rank=rank)
        if rank not in self._parts:
            self._parts[rank] = read_part(self._store, self.manifest, rank)
        return self._parts[rank]

    def pieces_of(self, name: str, rank: int) -> Iterator[tuple[int, Piece, int]]:
        """(writing rank, piece, its byte in that rank's file) of all pieces of a tensor, as `rank` sees it.

        Args:
            name: a tensor of the manifest, no alias.
            rank: whose copy of a per-rank tensor; of another world size, so taken modulo the saved one.

        Raises:
            Corrupt: the parts do not hold what the manifest says.
            NotFound: a part is missing, or `rank` did not save this per-rank tensor.
            RetryLater: the store failed.
        """
        manifest = self.manifest
        tensor = manifest.tensors[name]
        if tensor.owner == SPLIT:
            ranks: range | tuple[int, ...] = range(manifest.world_size)
        else:
            ranks = (rank % manifest.world_size if tensor.owner == EACH else int(tensor.owner),)
        found = False
        for one in ranks:
            held = self._pieces_in(one).get(name)
            if held is None:
                continue
            found = True
            self._check(name, one, held[0])
            yield one, *held
        if found:
            return
        message = f"The manifest of step {manifest.step} names {name}, but rank {ranks[0]} did not save it."
        error = NotFound if tensor.owner == EACH else Corrupt
        raise error(message, step=manifest.step, rank=ranks[0], key=name)

    def shape_of(self, name: str, rank: int) -> tuple[str, tuple[int, ...]] | None:
        """Dtype and shape of a tensor as `rank` sees it; None if it is per rank and this rank saved none.

        Ranks may differ in the shape of a per-rank tensor; the manifest knows only the first.

        Raises:
            NotFound: a part is missing.
            Corrupt: a part is damaged.
            RetryLater: the store failed.
        """
        tensor = self.manifest.tensors[name]
        if tensor.owner != EACH:
            return tensor.dtype, tensor.shape
        held = self._pieces_in(rank % self.manifest.world_size).get(name)
        return None if held is None else (held[0].dtype, held[0].shape)

    def _pieces_in(self, rank: int) -> dict[str, tuple[Piece, int]]:
        if rank not in self._pieces:
            part = self.part(rank)
            placed = zip(part.pieces, part.starts, strict=True)
            self._pieces[rank] = {piece.name: (piece, start) for piece, start in placed}
        return self._pieces[rank]

    def _check(self, name: str, rank: int, piece: Piece) -> None:
        tensor = self.manifest.tensors[name]
        whole = tensor.owner == SPLIT or piece.is_whole
        same = tensor.owner == EACH or (piece.dtype, piece.shape) == (tensor.dtype, tensor.shape)
        if not (whole and same and piece.per_rank == (tensor.owner == EACH)):
            message = (
                f"The manifest of step {self.manifest.step} says that {name} is "
                f"{tensor.dtype}{list(tensor.shape)}; rank {rank} holds {piece}."
            )
            raise Corrupt(message, step=self.manifest.step, rank=rank, key=name)
