"""A faulty store satisfies the contract until a fault is injected, and then shows exactly that fault."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from faulty_store import Call, FaultyStore
from holdfast.checkpoint.store import Store
from holdfast.checkpoint.store.local import LocalStore
from holdfast.checkpoint.store.memory import MemoryStore
from holdfast.errors import InvalidInput, RetryLater
from holdfast.testing import StoreSuite


class TestFaultyStoreWithoutFaults(StoreSuite):
    @pytest.fixture
    def store(self) -> Store:
        return FaultyStore(MemoryStore())


@pytest.fixture
def faulty() -> FaultyStore:
    return FaultyStore(MemoryStore())


def test_only_matching_names_count(faulty: FaultyStore) -> None:
    faulty.fail("put", RetryLater("injected"), nth=2, times=2, matching="manifest")
    for name in ("x", "manifest-1", "y", "z"):
        faulty.put(name, b"")
    for name in ("manifest-2", "manifest-3"):
        with pytest.raises(RetryLater):
            faulty.put(name, b"")
    faulty.put("manifest-4", b"")


def test_a_call_whose_response_is_lost_takes_effect(faulty: FaultyStore) -> None:
    faulty.fail("put", RetryLater("no response"), after=True)
    with pytest.raises(RetryLater):
        faulty.put("a", b"done", if_absent=True)
    assert faulty.inner.get("a") == b"done"


@pytest.mark.parametrize("method", ["put", "get", "read_into", "append", "list", "size", "delete", "sweep"])
def test_every_method_can_fail_every_time(faulty: FaultyStore, method: str) -> None:
    faulty.put("a", b"x")
    faulty.fail(method, OSError("cable pulled"), times=None)
    calls = {
        "put": lambda: faulty.put("a", b"y"),
        "get": lambda: faulty.get("a"),
        "read_into": lambda: faulty.read_into("a", 0, memoryview(bytearray(1))),
        "append": lambda: faulty.append("a", b"y"),
        "list": lambda: faulty.list(),
        "size": lambda: faulty.size("a"),
        "delete": lambda: faulty.delete("a"),
        "sweep": lambda: faulty.sweep(),
    }
    for _ in range(3):
        with pytest.raises(OSError, match="cable pulled"):
            calls[method]()
    assert faulty.inner.get("a") == b"x"
    faulty.clear()
    calls[method]()


def test_unknown_methods_are_refused(faulty: FaultyStore) -> None:
    with pytest.raises(InvalidInput, match="has no method 'write'"):
        faulty.fail("write", OSError())


@pytest.mark.parametrize("after", [False, True])
def test_a_held_call_waits_until_its_gate_is_opened(faulty: FaultyStore, after: bool) -> None:
    gate = faulty.hold("put", after=after)
    thread = threading.Thread(target=faulty.put, args=("a", b"x"))
    thread.start()
    assert gate.reached.wait(600)
    assert faulty.inner.size("a") == (1 if after else None)
    faulty.put("b", b"not held")
    gate.opened.set()
    thread.join()
    assert faulty.get("a") == b"x"


def test_clearing_faults_opens_all_gates(faulty: FaultyStore) -> None:
    gate = faulty.hold("get")
    faulty.put("a", b"x")
    thread = threading.Thread(target=faulty.get, args=("a",))
    thread.start()
    assert gate.reached.wait(600)
    faulty.clear()
    thread.join(600)
    assert not thread.is_alive()


def test_calls_are_recorded(tmp_path: Path) -> None:
    faulty = FaultyStore(LocalStore(tmp_path))
    faulty.put("a", b"0123456789")
    faulty.link("a", "b")
    faulty.get("a")
    list(faulty.list("a"))
    assert faulty.calls() == [Call("put", "a"), Call("link", "b"), Call("get", "a"), Call("list", "a")]
    assert faulty.calls("get") == [Call("get", "a")]
    faulty.clear_calls()
    assert faulty.calls() == []
    assert faulty.url == str(tmp_path)
    assert faulty.properties == faulty.inner.properties
