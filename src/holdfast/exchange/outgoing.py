"""What is to leave a checkpoint: chosen names, their facts, their bytes in order, values beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from holdfast.exchange.selection import is_under, select
from holdfast.format.layout import Piece
from holdfast.restore.checkpoint import Checkpoint


@dataclass(slots=True)
class Outgoing:
    """A checkpoint as one rank sees it, or a part of it.

    Attributes:
        pieces: the chosen tensors by name, tied ones included.
        only: prefixes that were chosen; None for all.
        rename: prefix -> what stands in its place; "" takes it off.
        num_bytes: bytes of tensors that have been given out so far.
    """

    checkpoint: Checkpoint
    rank: int
    only: tuple[str, ...] | None
    rename: dict[str, str]
    num_threads: int
    on_bytes: Callable[[int], None] | None = None
    pieces: dict[str, Piece] = field(default_factory=dict)
    num_bytes: int = 0
    _first_of: dict[str, str] = field(
        default_factory=dict
    )  # tensor that is not chosen -> first alias that is

    @classmethod
    def choose(
        cls,
        checkpoint: Checkpoint,
        *,
        rank: int,
        only: Iterable[str] | None,
        rename: Mapping[str, str] | None,
        num_threads: int,
    ) -> Outgoing:
        """What is under any of the prefixes.

        Raises:
            NotFound: nothing is under a prefix, or a part is missing.
            InvalidInput: there is no such rank.
            Corrupt: a part is damaged.
        """
        prefixes = None if only is None else tuple(only)
        one = cls(checkpoint, rank, prefixes, dict(rename or {}), num_threads)
        facts = checkpoint.facts(rank)
        names = [*facts, *(key for key in checkpoint.values(rank) if key not in facts)]
        taken = select(names, prefixes, f"Step {checkpoint.step}")
        one.pieces = {name: Piece.whole(name, *facts[name]) for name in taken if name in facts}
        for name in one.pieces:
            one.original(name)  # in this order, so that the first alias is the same for whoever asks
        return one

    def original(self, name: str) -> str:
        """The name whose bytes a name shows: the first chosen one of those that are tied to each other."""
        root = self.checkpoint.info(name).tied_to or name
        if root in self.pieces:
            return root
        return self._first_of.setdefault(root, name)

    def values(self) -> dict[str, Any]:
        """The chosen values by top-level key, decoded, with a `TensorRef` where a tensor is."""
        every = self.checkpoint.values(self.rank)
        if self.only is None:
            return every
        return {
            key: value
            for key, value in every.items()
            if any(is_under(key, prefix) or is_under(prefix, key) for prefix in self.only)
        }

    def feed(self, names: Sequence[str]) -> Feed:
        """The bytes of some tensors, one after the other."""
        return Feed(self, names)


class Feed:
    """Bytes of tensors in a fixed order, taken tensor by tensor."""

    def __init__(self, outgoing: Outgoing, names: Sequence[str]) -> None:
        self._outgoing = outgoing
        self._pieces = [outgoing.pieces[name] for name in names]
        self._slabs = outgoing.checkpoint.slabs(
            [piece.name for piece in self._pieces if piece.num_bytes],
            rank=outgoing.rank,
            num_threads=outgoing.num_threads,
        )
        self._at = 0

    def take(self, num_bytes: int) -> Iterator[memoryview]:
        """The next tensor, which has `num_bytes`; each view is valid until the next one.

        Raises:
            Corrupt: damage was found.
            NotFound: a file is missing.
            RetryLater: the store failed.
        """
        piece = self._pieces[self._at]
        assert piece.num_bytes == num_bytes, (piece, num_bytes)
        self._at += 1
        left = num_bytes
        while left:
            view = next(self._slabs).view
            left -= len(view)
            self._outgoing.num_bytes += len(view)
            if self._outgoing.on_bytes is not None:
                self._outgoing.on_bytes(len(view))
            yield view
