"""The store contract: required behaviour of every store, and the properties that it declares.

Names are relative and "/"-separated, without "." or ".." parts. A store guarantees neither the order of
listings nor their timing. Every method may be called from several threads at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import TypeAlias

from msgspec import Struct

from holdfast.errors import Conflict, Corrupt, InvalidInput

UNFINISHED = ".unfinished-"
"""Prefix of name parts that is reserved for files of unfinished puts."""
MAX_PART_BYTES = 255
"""Longest name part that common file systems accept, in UTF-8."""


def check_name(name: str) -> str:
    """Return the name if it is valid."""
    for part in name.split("/"):
        if fault := _fault(part):
            raise InvalidInput(f"{name!r} is not a valid object name: {fault}.", key=name)
    return name


def check_prefix(prefix: str) -> str:
    """Return the prefix if names can begin with it; its last part may be empty or incomplete."""
    if parent := prefix.rpartition("/")[0]:
        check_name(parent)
    elif prefix.startswith("/"):
        raise InvalidInput(f"{prefix!r} is not a valid prefix: names are relative.", key=prefix)
    return prefix


def _fault(part: str) -> str | None:
    if part == "":
        return 'a part is empty (names are relative, with single "/" between parts)'
    if part in (".", ".."):
        return f"it has a {part!r} part"
    if part.startswith(UNFINISHED):
        return f"parts that begin with {UNFINISHED!r} are reserved for unfinished puts"
    if "\0" in part:
        return "it contains a NUL character"
    try:
        num_bytes = len(part.encode())
    except UnicodeEncodeError:
        return "it is not valid Unicode text"
    if num_bytes > MAX_PART_BYTES:
        return f"a part has {num_bytes} bytes; the limit is {MAX_PART_BYTES}"
    return None


Buffer: TypeAlias = "bytes | bytearray | memoryview"


class ObjectInfo(Struct, frozen=True):
    """One object in a listing."""

    name: str
    num_bytes: int


class Properties(Struct, frozen=True):
    """Properties of a store. Callers check these, never the class.

    `survives_host` - bytes outlive the machine. `parallel_reads` - concurrent calls of `read_into` that reach
    full speed. `read_bytes` - read length that reaches full speed.
    `zero_copy_views` - bytes arrive in memory of the store's own, so `read_view` saves the copy of
    `read_into`. `has_documents` - False for data files in memory, which prove no loss of the others.
    """

    survives_host: bool
    parallel_reads: int = 4
    read_bytes: int = 8 << 20
    zero_copy_views: bool = False
    has_documents: bool = True


class Store(ABC):
    """A place that holds named bytes. Implementations are final: wrap one to change its behaviour."""

    url: str
    properties: Properties

    def copies(self) -> tuple[Store, ...]:
        """Return the places that may hold an object, nearest first.

        All hold the same bytes under the same name. A caller that can detect damage takes the first good
        copy.
        """
        return (self,)

    @abstractmethod
    def put(self, name: str, data: Buffer, *, if_absent: bool = False) -> None:
        """Make `data` durable under `name`, visible all at once or not at all.

        An existing object is replaced atomically; with `if_absent` it is left unchanged. `data` is read until
        the call returns and must not change before. Missing parent folders are made.

        Raises:
            Conflict: `if_absent` and the name exists.
            RetryLater: the store refused or failed (full disk, unreachable); `name` is unchanged.

        Blocks: until data and name survive a power cut.
        """

    def put_parts(
        self, name: str, parts: Iterable[Buffer], num_bytes: int, *, if_absent: bool = False
    ) -> None:
        """Put an object that is produced in parts and may be larger than memory.

        If `parts` raises, its exception is raised and `name` is unchanged. A store that can stream holds one
        part at a time; this default holds all.

        Args:
            name: as in `put`.
            parts: the object's bytes in order; the iterator may reuse the memory of parts that it has
                yielded.
            num_bytes: total size, given in advance because some stores plan by it.
            if_absent: as in `put`.

        Raises:
            InvalidInput: the parts have another total size; nothing was written.
            Conflict: as in `put`.
            RetryLater: as in `put`.

        Blocks: until data and name survive a power cut.
        """
        whole = bytearray()
        for part in parts:
            whole += part
        if len(whole) != num_bytes:
            raise length_error(name, num_bytes, len(whole))
        self.put(name, whole, if_absent=if_absent)

    def put_once(self, name: str, data: Buffer) -> None:
        """Make `data` durable under a new name, or confirm that it has these bytes.

        For writers that may repeat a put after a failure, or that all write the same bytes.

        Raises:
            Conflict: the name has other bytes.
            RetryLater: as in `put`.

        Blocks: until data and name survive a power cut.
        """
        try:
            self.put(name, data, if_absent=True)
        except Conflict:
            if self.get(name) != data:
                raise
            self.sync(name.rpartition("/")[0])  # an earlier try may not have made the name durable

    @abstractmethod
    def link(self, source: str, name: str) -> None:
        """Make the bytes of `source` durable under `name` too, without sending them again.

        An existing object is replaced. Deleting one of the names keeps the other.

        Raises:
            NotFound: `source` does not exist.
            Unsupported: this store cannot link; put the bytes instead.
            RetryLater: the store failed; `name` is unchanged.

        Blocks: until the name survives a power cut.
        """

    @abstractmethod
    def get(self, name: str) -> bytes:
        """Return all bytes of a (small) object.

        Raises:
            NotFound: the object does not exist.
            Corrupt: it is a document of a home, and larger than any document of its kind; see
                `names.check_size`.
            RetryLater: the store failed.
        """

    @abstractmethod
    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` (writable, contiguous, format "B") from `name` at `offset`.

        Raises:
            NotFound: the object does not exist.
            Corrupt: the object ends before the buffer is full.
            RetryLater: the store failed.
        """

    def read_view(self, name: str, offset: int, num_bytes: int) -> memoryview:
        """Return `num_bytes` of `name` at `offset` as a read-only view.

        For readers that need the bytes once. The memory belongs to the view alone and is freed with it. Use
        it where `properties.zero_copy_views` is True; this default reads into new memory.
        """
        room = memoryview(bytearray(num_bytes))
        self.read_into(name, offset, room)
        return room.toreadonly()

    @abstractmethod
    def append(self, name: str, data: bytes) -> None:
        """Append `data` to a small log object, created if absent. Each name has one writer.

        Not atomic: after a crash the tail may be missing or torn, so readers ignore a torn last line.
        Not durable at return, and possibly not visible to others before `flush`.
        """

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield all objects whose names start with `prefix`, in no order. Unfinished puts are not listed."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Return the size of an object in bytes, or None if it does not exist."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Remove an object. Does nothing if it does not exist.

        Blocks: until the removal survives a power cut.
        """

    @abstractmethod
    def sweep(self, prefix: str = "") -> None:
        """Remove the remains of unfinished puts of dead processes under `prefix`. Objects stay."""

    def sync(self, folder: str) -> None:
        """Make all names in a folder and its own name durable, regardless of the writer.

        An object may be visible before its name is durable. Call this before relying on an object that
        another process has put. The default does nothing, for stores where a visible object is durable.

        Args:
            folder: the part of names before their last slash. Nothing happens if it does not exist.

        Blocks: until the names survive a power cut.
        """
        return

    def check(self) -> None:
        """Raise if this place cannot be written to, or ignores `if_absent`.

        The default does nothing, for stores that guarantee both by their kind.

        Raises:
            Unsupported: it replaces objects that `put(if_absent=True)` must leave alone.
            NotFound: the bucket does not exist.
            RetryLater: it cannot be reached or written to.
        """
        return

    def flush(self) -> None:
        """Make all appended data visible to others. The default does nothing, for stores that append at once.

        Raises:
            RetryLater: the store failed; the data is kept for the next flush.
        """
        return

    def close(self) -> None:
        """Flush, and release connections. The store can be used again afterwards."""
        self.flush()


def as_bytes(data: Buffer) -> memoryview:
    """Return a one-dimensional view of a buffer's bytes, without a copy."""
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")


def already_exists(place: object, name: str) -> Conflict:
    """Return the error for a name that is already in use."""
    return Conflict(f"{place} already exists and was left unchanged.", key=name)


def ends_early(place: object, name: str, size: int | None, offset: int, num_bytes: int) -> Corrupt:
    """Return the error for a read that goes beyond the end of an object."""
    return Corrupt(
        f"{place} ends at byte {size}, so {num_bytes} bytes at {offset} cannot be read. It is not the object "
        "that was written.",
        key=name,
    )


def length_error(name: str, expected: int, found: int) -> InvalidInput:
    """Return the error for parts whose total size is not the announced one."""
    message = f"{name} should be {expected} bytes long, but its parts have {found}. Nothing was written."
    return InvalidInput(message, key=name)
