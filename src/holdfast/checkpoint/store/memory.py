"""Store in this process's memory, for tests and examples."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from typing_extensions import override

from holdfast.checkpoint.store import contract
from holdfast.checkpoint.store.contract import Buffer, ObjectInfo, Properties, Store
from holdfast.errors import NotFound


class MemoryStore(Store):
    """A store whose objects are lost when the process exits.

    Args:
        name: part of the URL; `open_store` returns the same store for the same name.
    """

    def __init__(self, name: str = "") -> None:
        self.url = f"memory://{name}"
        self.properties = Properties(survives_host=False)
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    @override
    def put(self, name: str, data: Buffer, *, if_absent: bool = False) -> None:
        contract.check_name(name)
        copy = bytes(data)
        with self._lock:
            if if_absent and name in self._objects:
                raise contract.already_exists(f"{self.url}/{name}", name)
            self._objects[name] = copy

    @override
    def link(self, source: str, name: str) -> None:
        data = self.get(source)
        self.put(name, data)

    @override
    def get(self, name: str) -> bytes:
        contract.check_name(name)
        with self._lock:
            data = self._objects.get(name)
        if data is None:
            raise NotFound(f"{self.url} has no object {name!r}.", key=name)
        return data

    @override
    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        data = self.get(name)
        found = data[offset : offset + len(buffer)]
        if len(found) < len(buffer):
            raise contract.ends_early(f"{self.url}/{name}", name, len(data), offset, len(buffer))
        buffer[:] = found

    @override
    def append(self, name: str, data: bytes) -> None:
        contract.check_name(name)
        with self._lock:
            self._objects[name] = self._objects.get(name, b"") + data

    @override
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        contract.check_prefix(prefix)
        with self._lock:
            found = [ObjectInfo(name, len(data)) for name, data in self._objects.items()]
        return (entry for entry in found if entry.name.startswith(prefix))

    @override
    def size(self, name: str) -> int | None:
        contract.check_name(name)
        with self._lock:
            data = self._objects.get(name)
        return None if data is None else len(data)

    @override
    def delete(self, name: str) -> None:
        contract.check_name(name)
        with self._lock:
            self._objects.pop(name, None)

    @override
    def sweep(self, prefix: str = "") -> None:
        contract.check_prefix(prefix)  # puts into memory leave nothing unfinished
