"""Placement of copies: properties for any hosts, zones and numbers of copies."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.run.mirroring import RankPlace, place_copies, writers_of


@st.composite
def clusters(draw: st.DrawFn) -> list[RankPlace]:
    """Ranks of hosts in zones, in the order of the hosts, as launchers number them, or in any other."""
    hosts = draw(st.lists(st.sampled_from(["", "rack 1", "rack 2", "rack 3"]), min_size=1, max_size=12))
    places = [
        RankPlace(f"host {number}", zone)
        for number, zone in enumerate(hosts)
        for _ in range(draw(st.integers(1, 4)))
    ]
    return draw(st.permutations(places)) if draw(st.booleans()) else places


@given(clusters(), st.integers(1, 4))
def test_no_copy_shares_a_host_with_another_one(places: list[RankPlace], num_copies: int) -> None:
    num_hosts = len({place.host for place in places})
    for rank, holders in enumerate(place_copies(places, num_copies)):
        hosts = [places[rank].host, *(places[holder].host for holder in holders)]
        assert len(set(hosts)) == len(hosts)
        assert len(holders) == min(num_copies, num_hosts - 1)


@given(st.integers(2, 12), st.integers(1, 3), st.integers(1, 4))
def test_every_rank_of_equal_hosts_holds_equally_many_copies(hosts: int, each: int, num_copies: int) -> None:
    places = [RankPlace(f"host {rank // each}") for rank in range(hosts * each)]
    holders = place_copies(places, num_copies)
    held = Counter(holder for those in holders for holder in those)
    assert set(held.values()) == {min(num_copies, hosts - 1)}
    for rank in range(len(places)):
        assert all(rank in holders[writer] for writer in writers_of(holders, rank))
        assert len(writers_of(holders, rank)) == held[rank]


@given(st.integers(2, 5), st.integers(1, 6), st.integers(1, 3), st.randoms())
def test_copies_are_in_other_zones_where_these_are_equal(
    zones: int, size: int, num_copies: int, order: object
) -> None:
    places = [
        RankPlace(f"host {zone}.{number}", f"zone {zone}") for zone in range(zones) for number in range(size)
    ]
    order.shuffle(places)  # type: ignore[attr-defined]
    for rank, holders in enumerate(place_copies(places, min(num_copies, zones - 1))):
        found = [places[rank].zone, *(places[holder].zone for holder in holders)]
        assert len(set(found)) == len(found)


def test_a_host_of_its_own_has_no_peers() -> None:
    assert place_copies([RankPlace("host")] * 4, 2) == [()] * 4
