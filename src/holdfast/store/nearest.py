"""One home in several tiers, seen as one store: every object is taken from the nearest tier that has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from holdfast.errors import Corrupt, Denied, HoldfastError, NotFound, RetryLater
from holdfast.store.contract import Entry, Store
from holdfast.store.readonly import ReadOnly

_T = TypeVar("_T")
_ELSEWHERE = (NotFound, Corrupt, Denied, RetryLater)
"""What one tier says that another may not."""


class Nearest(ReadOnly):
    """Reads from the nearest of several stores; writing is refused, since it would have to say where.

    Args:
        tiers: nearest first, at least one; the last is home, whose URL and properties this store has.
    """

    def __init__(self, tiers: Sequence[Store]) -> None:
        self._tiers = tuple(tiers)
        self.url = tiers[-1].url
        self.properties = tiers[-1].properties

    def copies(self) -> tuple[Store, ...]:
        """See `Store.copies`."""
        return self._tiers

    def get(self, name: str) -> bytes:
        """See `Store.get`."""
        return first_good(self, lambda tier: tier.get(name))

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """See `Store.read_into`."""
        first_good(self, lambda tier: tier.read_into(name, offset, buffer))

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """See `Store.list`; an object in several tiers is listed once, as the nearest has it."""
        seen: set[str] = set()
        for tier in self._tiers:
            for entry in tier.list(prefix):
                if entry.name not in seen:
                    seen.add(entry.name)
                    yield entry

    def size(self, name: str) -> int | None:
        """See `Store.size`."""
        sizes = (tier.size(name) for tier in self._tiers)
        return next((size for size in sizes if size is not None), None)

    @property
    def why(self) -> str:
        """See `ReadOnly.why`."""
        return "it is seen through several tiers here, and this would not say in which."


def first_good(store: Store, take: Callable[[Store], _T]) -> _T:
    """What `take` makes of the first copy that it finds good.

    Raises:
        NotFound, Corrupt, RetryLater: no copy is good; the error that counts, see `verdict`.
    """
    errors: list[HoldfastError] = []
    for copy in store.copies():
        try:
            return take(copy)
        except _ELSEWHERE as error:
            errors.append(error)
    raise verdict(errors)


def verdict(errors: Sequence[HoldfastError]) -> HoldfastError:
    """Return the error that counts of those of several copies, of which none is good.

    A copy that could not be read may be whole, so its error counts before damage, and damage counts before
    absence.
    """
    unread = (error for error in errors if not isinstance(error, (Corrupt, NotFound)))
    there = (error for error in errors if not isinstance(error, NotFound))
    return next(unread, None) or next(there, errors[0])
