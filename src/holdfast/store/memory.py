"""A store in this process's memory, for tests and examples."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from holdfast.errors import Conflict, Corrupt, NotFound
from holdfast.store.contract import Buffer, Entry, Properties, Store
from holdfast.store.naming import check_name, check_prefix


class MemoryStore(Store):
    """A store whose objects are lost when the process ends.

    Args:
        name: part of the URL; see `open_store` for stores that are shared by name.
    """

    def __init__(self, name: str = "") -> None:
        self.url = f"memory://{name}"
        self.properties = Properties(survives_host=False)
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def put(self, name: str, data: Buffer, *, if_absent: bool = False) -> None:
        """See `Store.put`."""
        check_name(name)
        copy = bytes(data)
        with self._lock:
            if if_absent and name in self._objects:
                raise Conflict(f"{self.url}/{name} exists already; it was left alone.", key=name)
            self._objects[name] = copy

    def link(self, source: str, name: str) -> None:
        """See `Store.link`."""
        data = self.get(source)
        self.put(name, data)

    def get(self, name: str) -> bytes:
        """See `Store.get`."""
        check_name(name)
        with self._lock:
            data = self._objects.get(name)
        if data is None:
            raise NotFound(f"{self.url} has no object {name!r}.", key=name)
        return data

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """See `Store.read_into`."""
        data = self.get(name)
        found = data[offset : offset + len(buffer)]
        if len(found) < len(buffer):
            raise Corrupt(
                f"{self.url}/{name} ends at byte {len(data)}; {len(buffer)} bytes at {offset} were wanted.",
                key=name,
            )
        buffer[:] = found

    def append(self, name: str, data: bytes) -> None:
        """See `Store.append`."""
        check_name(name)
        with self._lock:
            self._objects[name] = self._objects.get(name, b"") + data

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """See `Store.list`."""
        check_prefix(prefix)
        with self._lock:
            found = [Entry(name, len(data)) for name, data in self._objects.items()]
        return (entry for entry in found if entry.name.startswith(prefix))

    def size(self, name: str) -> int | None:
        """See `Store.size`."""
        check_name(name)
        with self._lock:
            data = self._objects.get(name)
        return None if data is None else len(data)

    def delete(self, name: str) -> None:
        """See `Store.delete`."""
        check_name(name)
        with self._lock:
            self._objects.pop(name, None)

    def sweep(self, prefix: str = "") -> None:
        """See `Store.sweep`; a put into memory leaves nothing unfinished."""
        check_prefix(prefix)
