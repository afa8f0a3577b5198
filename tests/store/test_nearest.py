"""Several tiers as one store: the nearest good copy, and nothing written to an unknown place."""

from __future__ import annotations

import pytest

from holdfast.errors import Corrupt, NotFound, RetryLater, Unsupported
from holdfast.store.contract import Entry, Store
from holdfast.store.memory import MemoryStore
from holdfast.store.nearest import Nearest, first_good
from holdfast.testing import FaultyStore


@pytest.fixture
def tiers() -> tuple[FaultyStore, FaultyStore]:
    near, home = FaultyStore(MemoryStore("near")), FaultyStore(MemoryStore("home"))
    near.put("both", b"near")
    home.put("both", b"from home")
    home.put("far", b"far")
    return near, home


def test_the_nearest_copy_is_taken(tiers: tuple[FaultyStore, FaultyStore]) -> None:
    store = Nearest(tiers)
    assert store.get("both") == b"near"
    assert store.get("far") == b"far"
    assert store.size("both") == 4
    assert store.size("none") is None
    target = memoryview(bytearray(2))
    store.read_into("far", 1, target)
    assert target == b"ar"


def test_a_listing_names_each_object_once(tiers: tuple[FaultyStore, FaultyStore]) -> None:
    assert sorted(Nearest(tiers).list(), key=lambda e: e.name) == [Entry("both", 4), Entry("far", 3)]


def test_it_has_the_name_of_home(tiers: tuple[FaultyStore, FaultyStore]) -> None:
    assert Nearest(tiers).url == tiers[1].url


@pytest.mark.parametrize("error", [RetryLater("slow"), Corrupt("short")])
def test_a_tier_that_fails_is_passed_over(tiers: tuple[FaultyStore, FaultyStore], error: Exception) -> None:
    tiers[0].fail("get", error)
    assert Nearest(tiers).get("both") == b"from home"


def test_what_no_tier_has_is_not_found(tiers: tuple[FaultyStore, FaultyStore]) -> None:
    with pytest.raises(NotFound):
        Nearest(tiers).get("none")


def test_a_failure_says_more_than_an_absence(tiers: tuple[FaultyStore, FaultyStore]) -> None:
    tiers[1].fail("get", RetryLater("503"))
    with pytest.raises(RetryLater, match="503"):
        Nearest(tiers).get("none")


def test_the_first_copy_that_is_good_for_something_is_taken(tiers: tuple[FaultyStore, FaultyStore]) -> None:
    def take(copy: Store) -> bytes:
        found = copy.get("both")
        if b"home" not in found:
            raise Corrupt("not the right one")
        return found

    assert first_good(Nearest(tiers), take) == b"from home"


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
def test_nothing_is_written(tiers: tuple[FaultyStore, FaultyStore], write) -> None:
    with pytest.raises(Unsupported, match="several tiers"):
        write(Nearest(tiers))
    assert tiers[0].get("both") == b"near"
