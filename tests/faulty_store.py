"""Store wrapper for tests that fails or delays calls on command, and records them."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint.store.contract import Store
from holdfast.errors import InvalidInput

METHODS = ("put", "link", "get", "read_into", "append", "list", "size", "delete", "sweep", "sync")


@dataclass(frozen=True, slots=True)
class Call:
    """Recorded call of a store's method; for `link` with the new name."""

    method: str
    name: str


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


def _forwarded(method: str) -> Any:
    """Return a method that records its call, and applies the faults due before and after it."""

    def call(self: FaultyStore, name: str = "", *arguments: Any, **options: Any) -> Any:
        recorded = Call(method, arguments[0] if method == "link" else name)
        if method != "get":
            self._record(recorded)
        due = self._due(recorded)
        _apply([fault for fault in due if not fault.after])
        found = getattr(self.inner, method)(name, *arguments, **options)
        if method == "list":
            found = iter(list(found))  # all of it, before a fault after the call
        if method == "get":
            self._record(recorded)
        _apply([fault for fault in due if fault.after])
        return found

    return call


class FaultyStore(Store):
    """Wrapper around any store. Until a fault is injected, it behaves like the store inside."""

    put, link, get, read_into = map(_forwarded, METHODS[:4])
    append, list, size, delete, sweep, sync = map(_forwarded, METHODS[4:])

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.url = inner.url
        self.properties = inner.properties
        self.check, self.flush, self.close = inner.check, inner.flush, inner.close
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._calls: list[Call] = []

    def fail(self, method: str, error: BaseException, **options: Any) -> None:
        """Make calls of a method raise an error, the same object each time; options as of `Fault`."""
        self._add(Fault(method, error=error, **options))

    def hold(self, method: str, **options: Any) -> Gate:
        """Hold one call of a method until the returned gate opens; options as of `Fault`."""
        gate = Gate()
        self._add(Fault(method, gate=gate, **options))
        return gate

    def clear(self) -> None:
        """Remove all faults and open all gates. Recorded calls stay."""
        with self._lock:
            gates = [fault.gate for fault in self._faults if fault.gate]
            self._faults = []
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

    def _add(self, fault: Fault) -> None:
        if fault.method not in METHODS:
            raise InvalidInput(f"A store has no method {fault.method!r}. It has {', '.join(METHODS)}.")
        with self._lock:
            self._faults.append(fault)

    def _record(self, call: Call) -> None:
        with self._lock:
            self._calls.append(call)

    def _due(self, call: Call) -> list[Fault]:
        due = []
        with self._lock:
            for fault in self._faults:
                if fault.method != call.method or fault.matching not in call.name or fault.times == 0:
                    continue
                if fault.nth > 1:
                    fault.nth -= 1
                    continue
                if fault.times is not None:
                    fault.times -= 1
                due.append(fault)
        return due


def _apply(faults: list[Fault]) -> None:
    for fault in faults:
        if fault.gate:
            fault.gate.reached.set()
            fault.gate.opened.wait()
        if fault.error:
            raise fault.error
