"""The store contract: what every place that holds bytes must do, and what it may declare about itself.

Names are relative, "/"-separated, without "." or ".." parts. A store makes no promise about order of listing
and none about time. Every method may be called from several threads at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from holdfast.errors import InvalidInput

Buffer: TypeAlias = "bytes | bytearray | memoryview"


@dataclass(frozen=True, slots=True)
class Entry:
    """One object in a listing."""

    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Properties:
    """What a store can do; callers ask this, never which class it is.

    `survives_host` - bytes outlive the machine. `read_align_bytes` - reads whose offset, length and buffer
    address are multiples of this take the fastest path; 1 means no difference. `parallel_reads` - how many
    calls of `read_into` at once bring the store to its speed. `read_bytes` - length from which on a longer
    read brings no more speed. `lends_memory` - bytes arrive in memory of the store's own, so `lend` spares
    the copy that `read_into` makes.
    """

    survives_host: bool
    read_align_bytes: int = 1
    parallel_reads: int = 4
    read_bytes: int = 8 << 20
    lends_memory: bool = False


class Store(ABC):
    """A place that holds named bytes. Implementations are final: to change behaviour, wrap."""

    url: str
    properties: Properties

    def copies(self) -> tuple[Store, ...]:
        """The places where an object may be, nearest first; all hold the same bytes under the same name.

        Whoever can tell good bytes from bad takes them from the first copy that is good.
        """
        return (self,)

    @abstractmethod
    def put(self, name: str, data: Buffer, *, if_absent: bool = False) -> None:
        """Make `data` durable under `name`, visible all at once or not at all.

        An existing object is replaced, also all at once; with `if_absent` it is left alone. `data` is read
        until the call returns and must not change meanwhile. Missing parents are made.

        Raises:
            Conflict: `if_absent` and the name exists.
            RetryLater: the store refused or failed (full disk, unreachable); `name` is as it was before.

        Blocks: until data and name would survive a power cut.
        """

    def put_parts(
        self, name: str, parts: Iterable[Buffer], num_bytes: int, *, if_absent: bool = False
    ) -> None:
        """`put` for an object that is made piece by piece and may be larger than memory.

        What `parts` raises is raised, and `name` is then as it was before. A store that can stream holds one
        part at a time; this default holds all.

        Args:
            name: as in `put`.
            parts: the object's bytes in order; each part may be reused by the iterator after it was taken.
            num_bytes: of all parts together, told beforehand since some places plan by it.
            if_absent: as in `put`.

        Raises:
            InvalidInput: the parts have another length together; nothing was made.
            Conflict: as in `put`.
            RetryLater: as in `put`.

        Blocks: until data and name would survive a power cut.
        """
        whole = bytearray()
        for part in parts:
            whole += part
        if len(whole) != num_bytes:
            raise wrong_length(name, num_bytes, len(whole))
        self.put(name, whole, if_absent=if_absent)

    @abstractmethod
    def link(self, source: str, name: str) -> None:
        """Make the bytes of `source` durable under `name` too, without sending them again.

        An existing object is replaced. Deleting either leaves the other whole.

        Raises:
            NotFound: no object `source`.
            Unsupported: this store cannot; put the bytes instead.
            RetryLater: the store failed; `name` is as it was before.

        Blocks: until the name would survive a power cut.
        """

    @abstractmethod
    def get(self, name: str) -> bytes:
        """All bytes of a (small) object.

        Raises:
            NotFound: no such object.
            Corrupt: it is a document of a home and larger than any of its kind, see `names.check_size`.
            RetryLater: the store failed.
        """

    @abstractmethod
    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` (writable, contiguous, format "B") from `name` at `offset`.

        Raises:
            NotFound: no such object.
            Corrupt: the object ends before the buffer is full.
            RetryLater: the store failed.
        """

    def lend(self, name: str, offset: int, num_bytes: int) -> memoryview:
        """`num_bytes` of `name` at `offset`, read-only, for readers that look at them once.

        The memory is nobody else's and is freed with the view. Worth it where `properties.lends_memory`; this
        default reads into new memory.

        Raises:
            NotFound: no such object.
            Corrupt: the object ends before that.
            RetryLater: the store failed.
        """
        room = memoryview(bytearray(num_bytes))
        self.read_into(name, offset, room)
        return room.toreadonly()

    @abstractmethod
    def append(self, name: str, data: bytes) -> None:
        """Add `data` at the end of a small log object, made if absent; one writer per name.

        Not atomic: after a crash the tail may be missing or torn, so readers ignore a torn last line.
        Not durable at return, and others may see it only after `flush`.

        Raises:
            RetryLater: the store failed.
        """

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Every object whose name starts with `prefix`, in no order. Unfinished puts are never listed."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Bytes of an object, None if there is none."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove an object; no error if there is none.

        Blocks: until the removal would survive a power cut.
        """

    @abstractmethod
    def sweep(self, prefix: str = "") -> None:
        """Remove what unfinished puts of dead processes left under `prefix`; live objects stay."""

    def sync(self, folder: str) -> None:
        """Make every name in a folder durable, and the folder's own, whoever wrote them.

        An object may be visible before its name is durable. Call this before relying on what another process
        has put. Places where a visible object is durable have nothing to do: this default does nothing.

        Args:
            folder: the part of names before their last slash; nothing happens if there is none.

        Raises:
            RetryLater: the store failed; names in the folder may not survive a power cut.

        Blocks: until the names would survive a power cut.
        """
        return

    def check(self) -> None:
        """Find out whether this place can be written to and keeps what `if_absent` promises.

        Places whose promises come with their kind have nothing to find out: this default does nothing.

        Raises:
            Unsupported: it replaces objects that `put(if_absent=True)` must leave alone.
            NotFound: the bucket does not exist.
            RetryLater: it cannot be reached, or not be written to.
        """
        return

    def flush(self) -> None:
        """Have everything that was appended visible to others.

        A place that appends at once has nothing to do.

        Raises:
            RetryLater: the store failed; what was appended is kept for the next flush.
        """
        return

    def close(self) -> None:
        """Flush, and give connections up; the store can be used again afterwards.

        Raises:
            RetryLater: as `flush`.
        """
        self.flush()


def wrong_length(name: str, expected: int, found: int) -> InvalidInput:
    """The error for parts that are not as long as was said."""
    message = f"{name} was to be {expected} bytes long, but its parts have {found}; it was not made."
    return InvalidInput(message, key=name)
