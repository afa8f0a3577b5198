"""Read-only stores, and several tiers of one home as one: each object comes from the nearest that has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn, TypeVar

from typing_extensions import override

from holdfast.checkpoint.store.contract import Buffer, ObjectInfo, Store
from holdfast.errors import Corrupt, Denied, HoldfastError, NotFound, RetryLater, Unsupported


class ReadOnlyStore(Store):
    """A store whose changing methods all raise `Unsupported`, for the reason `why_read_only`."""

    why_read_only: str

    @override
    def put(self, name: str, data: Buffer, *, if_absent: bool = False) -> None:
        self._refuse(name)

    @override
    def link(self, source: str, name: str) -> None:
        self._refuse(name)

    @override
    def append(self, name: str, data: bytes) -> None:
        self._refuse(name)

    @override
    def delete(self, name: str) -> None:
        self._refuse(name)

    @override
    def sweep(self, prefix: str = "") -> None:
        self._refuse(prefix)

    def _refuse(self, name: str) -> NoReturn:
        raise Unsupported(f"{name!r} in {self.url} is read-only: {self.why_read_only}", key=name)


_T = TypeVar("_T")
_TRY_NEXT = (NotFound, Corrupt, Denied, RetryLater)
"""Errors of one tier that the next one may not have."""


class TieredStore(ReadOnlyStore):
    """Reads from the nearest of several stores. Refuses writes, which would have to name a tier.

    Args:
        tiers: nearest first, at least one. The last is home, whose URL and properties this store has.
    """

    why_read_only = "this is a read-only view of several tiers. Write to one tier directly."

    def __init__(self, tiers: Sequence[Store]) -> None:
        self._tiers = tuple(tiers)
        self.url = tiers[-1].url
        self.properties = tiers[-1].properties

    @override
    def copies(self) -> tuple[Store, ...]:
        return self._tiers

    @override
    def get(self, name: str) -> bytes:
        return first_good(self, lambda tier: tier.get(name))

    @override
    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        first_good(self, lambda tier: tier.read_into(name, offset, buffer))

    @override
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield each object once, as the nearest tier lists it."""
        seen: set[str] = set()
        for tier in self._tiers:
            for entry in tier.list(prefix):
                if entry.name not in seen:
                    seen.add(entry.name)
                    yield entry

    @override
    def size(self, name: str) -> int | None:
        sizes = (tier.size(name) for tier in self._tiers)
        return next((size for size in sizes if size is not None), None)


def first_good(store: Store, read: Callable[[Store], _T]) -> _T:
    """Return the result of `read` for the first copy that it accepts."""
    errors: list[HoldfastError] = []
    try:
        for copy in store.copies():
            try:
                return read(copy)
            except _TRY_NEXT as error:
                errors.append(error)
        raise decisive_error(errors)
    finally:
        errors.clear()  # an error refers to this frame: the cycle would keep all callers' objects in memory


def decisive_error(errors: Sequence[HoldfastError]) -> HoldfastError:
    """Return the error to raise when every copy has failed.

    An unreadable copy may be whole, so its error ranks before damage, and damage ranks before absence.
    """
    unread = (error for error in errors if not isinstance(error, (Corrupt, NotFound)))
    damaged = (error for error in errors if not isinstance(error, NotFound))
    return next(unread, None) or next(damaged, errors[0])
