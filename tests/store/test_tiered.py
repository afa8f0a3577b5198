"""Several tiers as one read-only store that returns the nearest good copy."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref

import pytest

from faulty_store import FaultyStore
from holdfast.checkpoint.store.contract import ObjectInfo, Store
from holdfast.checkpoint.store.memory import MemoryStore
from holdfast.checkpoint.store.tiered import TieredStore, first_good
from holdfast.errors import Corrupt, NotFound, RetryLater, Unsupported


@pytest.fixture
def tiers() -> tuple[FaultyStore, FaultyStore]:
    near, home = FaultyStore(MemoryStore("near")), FaultyStore(MemoryStore("home"))
    near.put("both", b"near")
    home.put("both", b"from home")
    home.put("far", b"far")
    return near, home


def test_the_nearest_copy_is_used(tiers: tuple[FaultyStore, FaultyStore]) -> None:
    store = TieredStore(tiers)
    assert store.get("both") == b"near"
    assert store.get("far") == b"far"
    assert store.size("both") == 4
    assert store.size("none") is None
    target = memoryview(bytearray(2))
    store.read_into("far", 1, target)
    assert target == b"ar"


def test_each_object_is_listed_once(tiers: tuple[FaultyStore, FaultyStore]) -> None:
    found = sorted(TieredStore(tiers).list(), key=lambda e: e.name)
    assert found == [ObjectInfo("both", 4), ObjectInfo("far", 3)]


def test_the_url_is_that_of_home(tiers: tuple[FaultyStore, FaultyStore]) -> None:
    assert TieredStore(tiers).url == tiers[1].url


@pytest.mark.parametrize("error", [RetryLater("slow"), Corrupt("short")])
def test_a_failing_tier_is_skipped(tiers: tuple[FaultyStore, FaultyStore], error: Exception) -> None:
    tiers[0].fail("get", error)
    assert TieredStore(tiers).get("both") == b"from home"


def test_an_object_in_no_tier_is_not_found_if_no_tier_failed(tiers: tuple[FaultyStore, FaultyStore]) -> None:
    with pytest.raises(NotFound):
        TieredStore(tiers).get("none")
    tiers[1].fail("get", RetryLater("503"))
    with pytest.raises(RetryLater, match="503"):
        TieredStore(tiers).get("none")


def test_the_first_good_copy_is_used(tiers: tuple[FaultyStore, FaultyStore]) -> None:
    def take(copy: Store) -> bytes:
        found = copy.get("both")
        if b"home" not in found:
            raise Corrupt("not the right one")
        return found

    assert first_good(TieredStore(tiers), take) == b"from home"


def test_objects_of_callers_are_freed_after_an_error(tiers: tuple[FaultyStore, FaultyStore]) -> None:
    """An error that stays in a reference cycle keeps the frames of all callers, with their variables."""

    def look() -> weakref.ref[threading.Event]:
        mine = threading.Event()
        with contextlib.suppress(NotFound):
            TieredStore(tiers).get("none")
        return weakref.ref(mine)

    gc.disable()
    try:
        assert look()() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "write",
    [
        lambda store: store.put("a", b""),
        lambda store: store.link("both", "a"),
        lambda store: store.append("a", b""),
        lambda store: store.delete("both"),
        lambda store: store.sweep(),
    ],
)
def test_writes_are_refused(tiers: tuple[FaultyStore, FaultyStore], write) -> None:
    with pytest.raises(Unsupported, match="several tiers"):
        write(TieredStore(tiers))
    assert tiers[0].get("both") == b"near"
