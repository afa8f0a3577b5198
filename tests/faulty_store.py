"""Store wrapper for tests that fails, corrupts or delays calls on command, and records them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from typing_extensions import override

from holdfast.checkpoint.store.contract import Buffer, ObjectInfo, Store
from holdfast.errors import Corrupt, InvalidInput

METHODS = ("put", "link", "get", "read_into", "append", "list", "size", "delete", "sweep", "sync")


@dataclass(frozen=True, slots=True)
class Call:
    """Recorded call of a store's method, with the range of a `read_into` or the size of the data."""

    method: str
    name: str
    offset: int = 0
    num_bytes: int = 0


class Gate:
    """Gate that holds a call: the call sets `reached` when it arrives, and waits until `opened` is set."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()


@dataclass(slots=True)
class Fault:
    """An error or a gate, and the calls that have it."""

    method: str  # one of `METHODS`
    nth: int = 1  # first matching call, counted from now; 1 is the next one
    times: int | None = 1  # number of calls from then on; None for all
    matching: str = ""  # text that the object's name or prefix must contain
    after: bool = False  # after the call has taken effect, as if only its response was lost
    error: BaseException | None = None
    gate: Gate | None = None


class FaultyStore(Store):
    """Wrapper around any store. Until a fault is injected, it behaves like the store inside."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.url = inner.url
        self.properties = inner.properties
        self.check, self.flush, self.close = inner.check, inner.flush, inner.close
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._flips: dict[str, set[int]] = {}
        self._sizes: dict[str, int] = {}
        self._calls: list[Call] = []

    def fail(self, method: str, error: BaseException, **options: Any) -> None:
        """Make calls of a method raise an error, the same object each time; options as of `Fault`."""
        self._add(Fault(method, error=error, **options))

    def hold(self, method: str, **options: Any) -> Gate:
        """Hold one call of a method until the returned gate opens; options as of `Fault`."""
        gate = Gate()
        self._add(Fault(method, gate=gate, **options))
        return gate

    def flip_bit(self, name: str, bit: int) -> None:
        """Flip bit `bit % 8` of byte `bit // 8` in all reads of `name`. Stored bytes do not change."""
        with self._lock:
            self._flips.setdefault(name, set()).add(bit)

    def truncate(self, name: str, num_bytes: int) -> None:
        """Make `name` appear to end after `num_bytes`. Stored bytes do not change."""
        with self._lock:
            self._sizes[name] = num_bytes

    def clear(self) -> None:
        """Remove all faults and open all gates. Recorded calls stay."""
        with self._lock:
            gates = [fault.gate for fault in self._faults if fault.gate]
            self._faults, self._flips, self._sizes = [], {}, {}
        for gate in gates:
            gate.opened.set()

    def calls(self, method: str | None = None) -> list[Call]:
        """Return all recorded calls, or those of one method. A `get` is recorded once it has data."""
        with self._lock:
            return [call for call in self._calls if method in (None, call.method)]

    def clear_calls(self) -> None:
        """Delete the recorded calls."""
        with self._lock:
            self._calls = []

    @property
    def bytes_read(self) -> int:
        """Number of bytes requested by `read_into` and returned by `get`."""
        return sum(call.num_bytes for call in self.calls() if call.method in ("get", "read_into"))

    @property
    def bytes_written(self) -> int:
        """Number of bytes passed to `put` and `append`."""
        return sum(call.num_bytes for call in self.calls() if call.method in ("put", "append"))

    @override
    def put(self, name: str, data: Buffer, *, if_absent: bool = False) -> None:
        with self._call(Call("put", name, num_bytes=memoryview(data).nbytes)):
            self.inner.put(name, data, if_absent=if_absent)

    @override
    def link(self, source: str, name: str) -> None:
        with self._call(Call("link", name)):
            self.inner.link(source, name)

    @override
    def get(self, name: str) -> bytes:
        with self._inject("get", name):
            data = bytearray(self.inner.get(name)[: self._sizes.get(name)])
            self._record(Call("get", name, num_bytes=len(data)))
            self._flip(name, 0, memoryview(data))
        return bytes(data)

    @override
    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        with self._call(Call("read_into", name, offset, len(buffer))):
            num_bytes = self._sizes.get(name)
            if num_bytes is not None and offset + len(buffer) > num_bytes:
                raise Corrupt(f"{self.url}/{name} ends at byte {num_bytes} (truncated by a test).", key=name)
            self.inner.read_into(name, offset, buffer)
            self._flip(name, offset, buffer)

    @override
    def append(self, name: str, data: bytes) -> None:
        with self._call(Call("append", name, num_bytes=len(data))):
            self.inner.append(name, data)

    @override
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        with self._call(Call("list", prefix)):
            listed = [(one.name, one.num_bytes) for one in self.inner.list(prefix)]
            found = [ObjectInfo(name, self._truncated(name, num_bytes)) for name, num_bytes in listed]
        return iter(found)

    @override
    def size(self, name: str) -> int | None:
        with self._call(Call("size", name)):
            num_bytes = self.inner.size(name)
        return None if num_bytes is None else self._truncated(name, num_bytes)

    @override
    def delete(self, name: str) -> None:
        with self._call(Call("delete", name)):
            self.inner.delete(name)

    @override
    def sync(self, folder: str) -> None:
        with self._call(Call("sync", folder)):
            self.inner.sync(folder)

    @override
    def sweep(self, prefix: str = "") -> None:
        with self._call(Call("sweep", prefix)):
            self.inner.sweep(prefix)

    def _add(self, fault: Fault) -> None:
        if fault.method not in METHODS:
            raise InvalidInput(f"A store has no method {fault.method!r}. It has {', '.join(METHODS)}.")
        with self._lock:
            self._faults.append(fault)

    def _record(self, call: Call) -> None:
        with self._lock:
            self._calls.append(call)

    @contextmanager
    def _call(self, call: Call) -> Iterator[None]:
        """Record a call and apply the faults due before and after it."""
        self._record(call)
        with self._inject(call.method, call.name):
            yield

    @contextmanager
    def _inject(self, method: str, name: str) -> Iterator[None]:
        due = self._due(method, name)
        _apply([fault for fault in due if not fault.after])
        yield
        _apply([fault for fault in due if fault.after])

    def _due(self, method: str, name: str) -> list[Fault]:
        due = []
        with self._lock:
            for fault in self._faults:
                if fault.method != method or fault.matching not in name or fault.times == 0:
                    continue
                if fault.nth > 1:
                    fault.nth -= 1
                    continue
                if fault.times is not None:
                    fault.times -= 1
                due.append(fault)
        return due

    def _truncated(self, name: str, num_bytes: int) -> int:
        return min(num_bytes, self._sizes.get(name, num_bytes))

    def _flip(self, name: str, offset: int, buffer: memoryview) -> None:
        with self._lock:
            flips = sorted(self._flips.get(name, ()))
        for bit in flips:
            index = bit // 8 - offset
            if 0 <= index < len(buffer):
                buffer[index] ^= 1 << bit % 8


def _apply(faults: list[Fault]) -> None:
    for fault in faults:
        if fault.gate:
            fault.gate.reached.set()
            fault.gate.opened.wait()
        if fault.error:
            raise fault.error
