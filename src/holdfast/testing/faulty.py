"""A store that fails, lies or waits on command, and remembers what was asked of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.errors import Corrupt, InvalidInput
from holdfast.store.contract import Buffer, Entry, Store

METHODS = ("put", "link", "get", "read_into", "append", "list", "size", "delete", "sweep", "sync")


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a store's method.

    `name` is the object's name or the prefix; `offset` and `num_bytes` say what a `read_into` wanted, and
    `num_bytes` what a `put` or `append` was given or a `get` returned.
    """

    method: str
    name: str
    offset: int = 0
    num_bytes: int = 0


class Gate:
    """Where a call waits: `reached` is set when it arrives, and it goes on when `opened` is set."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()


@dataclass(slots=True)
class _Fault:
    method: str
    matching: str
    skip: int  # matching calls to let through first
    times: int | None  # how many calls to hit after that; None for all
    after: bool
    error: BaseException | None = None
    gate: Gate | None = None


class FaultyStore(Store):
    """Wraps any store; without orders it changes nothing.

    Example:
        >>> store = FaultyStore(open_store("runs/gpt"))
        >>> store.fail("put", OSError("cable pulled"), nth=3)

    Args:
        inner: the store that does the work.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.url = inner.url
        self.properties = inner.properties
        self._lock = threading.Lock()
        self._faults: list[_Fault] = []
        self._flips: dict[str, set[int]] = {}
        self._sizes: dict[str, int] = {}
        self._calls: list[Call] = []

    def fail(
        self,
        method: str,
        error: BaseException,
        *,
        nth: int = 1,
        times: int | None = 1,
        matching: str = "",
        after: bool = False,
    ) -> None:
        """Have calls of a method raise.

        Args:
            method: one of `METHODS`.
            error: what is raised, the same object each time.
            nth: first call that fails, counted from now; 1 is the next one.
            times: how many calls fail from there; None for all.
            matching: only calls whose name or prefix contains this count.
            after: the call takes effect before it raises: the answer is lost, not the deed.
        """
        self._order(_Fault(method, matching, nth - 1, times, after, error=error))

    def hold(self, method: str, *, nth: int = 1, matching: str = "", after: bool = False) -> Gate:
        """Have one call of a method wait; arguments as in `fail`.

        Returns:
            The gate where it waits.
        """
        gate = Gate()
        self._order(_Fault(method, matching, nth - 1, 1, after, gate=gate))
        return gate

    def flip_bit(self, name: str, bit: int) -> None:
        """Have reads of `name` see bit `bit % 8` of byte `bit // 8` flipped; stored bytes stay."""
        with self._lock:
            self._flips.setdefault(name, set()).add(bit)

    def truncate(self, name: str, num_bytes: int) -> None:
        """Have `name` look as if it ended after `num_bytes`. Stored bytes stay as they are."""
        with self._lock:
            self._sizes[name] = num_bytes

    def clear(self) -> None:
        """Take all orders back and open all gates; what was recorded stays."""
        with self._lock:
            gates = [fault.gate for fault in self._faults if fault.gate]
            self._faults, self._flips, self._sizes = [], {}, {}
        for gate in gates:
            gate.opened.set()

    def calls(self, method: str | None = None) -> list[Call]:
        """All calls so far that came to the inner store or failed on the way, or those of one method."""
        with self._lock:
            return [call for call in self._calls if method in (None, call.method)]

    def forget(self) -> None:
        """Drop what was recorded."""
        with self._lock:
            self._calls = []

    @property
    def bytes_read(self) -> int:
        """Bytes asked for by `read_into` and returned by `get`."""
        return sum(call.num_bytes for call in self.calls() if call.method in ("get", "read_into"))

    @property
    def bytes_written(self) -> int:
        """Bytes given to `put` and `append`."""
        return sum(call.num_bytes for call in self.calls() if call.method in ("put", "append"))

    def put(self, name: str, data: Buffer, *, if_absent: bool = False) -> None:
        """See `Store.put`."""
        after = self._begin(Call("put", name, num_bytes=memoryview(data).nbytes))
        self.inner.put(name, data, if_absent=if_absent)
        _do(after)

    def link(self, source: str, name: str) -> None:
        """See `Store.link`."""
        after = self._begin(Call("link", name))
        self.inner.link(source, name)
        _do(after)

    def get(self, name: str) -> bytes:
        """See `Store.get`."""
        after = self._begin(None, "get", name)
        data = bytearray(self.inner.get(name)[: self._sizes.get(name)])
        self._record(Call("get", name, num_bytes=len(data)))
        self._flip(name, 0, memoryview(data))
        _do(after)
        return bytes(data)

    def read_into(self, name: str, offset: int, buffer: memoryview) -> None:
        """See `Store.read_into`."""
        after = self._begin(Call("read_into", name, offset, len(buffer)))
        num_bytes = self._sizes.get(name)
        if num_bytes is not None and offset + len(buffer) > num_bytes:
            raise Corrupt(f"{self.url}/{name} ends at byte {num_bytes} (told to).", key=name)
        self.inner.read_into(name, offset, buffer)
        self._flip(name, offset, buffer)
        _do(after)

    def append(self, name: str, data: bytes) -> None:
        """See `Store.append`."""
        after = self._begin(Call("append", name, num_bytes=len(data)))
        self.inner.append(name, data)
        _do(after)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """See `Store.list`."""
        after = self._begin(Call("list", prefix))
        found = [
            Entry(entry.name, self._seen(entry.name, entry.num_bytes)) for entry in self.inner.list(prefix)
        ]
        _do(after)
        return iter(found)

    def size(self, name: str) -> int | None:
        """See `Store.size`."""
        after = self._begin(Call("size", name))
        num_bytes = self.inner.size(name)
        _do(after)
        return None if num_bytes is None else self._seen(name, num_bytes)

    def delete(self, name: str) -> None:
        """See `Store.delete`."""
        after = self._begin(Call("delete", name))
        self.inner.delete(name)
        _do(after)

    def sync(self, folder: str) -> None:
        """See `Store.sync`."""
        after = self._begin(Call("sync", folder))
        self.inner.sync(folder)
        _do(after)

    def check(self) -> None:
        """See `Store.check`."""
        self.inner.check()

    def flush(self) -> None:
        """See `Store.flush`."""
        self.inner.flush()

    def close(self) -> None:
        """See `Store.close`."""
        self.inner.close()

    def sweep(self, prefix: str = "") -> None:
        """See `Store.sweep`."""
        after = self._begin(Call("sweep", prefix))
        self.inner.sweep(prefix)
        _do(after)

    def _order(self, fault: _Fault) -> None:
        if fault.method not in METHODS:
            raise InvalidInput(f"A store has no method {fault.method!r}; it has {', '.join(METHODS)}.")
        with self._lock:
            self._faults.append(fault)

    def _record(self, call: Call) -> None:
        with self._lock:
            self._calls.append(call)

    def _begin(self, call: Call | None, method: str = "", name: str = "") -> list[_Fault]:
        """Record a call and carry out what is ordered before it; returns what is ordered after it."""
        if call:
            self._record(call)
            method, name = call.method, call.name
        due = self._due(method, name)
        _do([fault for fault in due if not fault.after])
        return [fault for fault in due if fault.after]

    def _due(self, method: str, name: str) -> list[_Fault]:
        due = []
        with self._lock:
            for fault in self._faults:
                if fault.method != method or fault.matching not in name or fault.times == 0:
                    continue
                if fault.skip:
                    fault.skip -= 1
                    continue
                if fault.times is not None:
                    fault.times -= 1
                due.append(fault)
        return due

    def _seen(self, name: str, num_bytes: int) -> int:
        return min(num_bytes, self._sizes.get(name, num_bytes))

    def _flip(self, name: str, offset: int, buffer: memoryview) -> None:
        with self._lock:
            flips = sorted(self._flips.get(name, ()))
        for bit in flips:
            index = bit // 8 - offset
            if 0 <= index < len(buffer):
                buffer[index] ^= 1 << bit % 8


def _do(faults: list[_Fault]) -> None:
    for fault in faults:
        if fault.gate:
            fault.gate.reached.set()
            fault.gate.opened.wait()
        if fault.error:
            raise fault.error
