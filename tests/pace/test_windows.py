"""Windows of the pace: in the history, of several hosts, and the slow periods that follow from them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.watch.pace.judgement import SlowRankAnnouncer
from holdfast.watch.pace.sampler import Activity
from holdfast.watch.pace.windows import (
    CAUSES,
    QUEUE_CAUSE,
    PaceWindow,
    RankWindow,
    SlowPeriod,
    WindowTable,
    block_of_end,
    block_of_slow,
    decode_period,
    decode_windows,
    encode_windows,
    find_cause,
    list_paces,
    list_slow_periods,
)

USUAL = RankWindow(0.4, 0.0, 0.0)
HOSTS = {0: "kelp", 1: "kelp", 2: "dulse"}


def window(number: int, slow: RankWindow | None = None) -> PaceWindow:
    return PaceWindow(number, 0.5, {0: USUAL, 1: USUAL, 2: slow or USUAL})


def test_shares_are_those_of_the_samples() -> None:
    counts = [0] * 8
    counts[Activity.RUNS], counts[Activity.LOADS], counts[Activity.WAITS], counts[Activity.APART] = (
        30,
        10,
        40,
        20,
    )
    found = RankWindow.of_samples(counts, 0.1)
    assert found is not None
    assert found == RankWindow(0.3, 0.1, 0.0, 0.1)
    assert found.own == pytest.approx(0.4), "a phase is not a rank's own time"


def test_too_few_samples_are_no_window() -> None:
    assert RankWindow.of_samples([3, 0, 0, 2, 0, 0, 0, 0], 0.0) is None


def test_a_window_in_which_hardly_anything_was_trained_has_no_shares() -> None:
    assert PaceWindow(1, 1.0, {0: RankWindow(0.02, 0.0, 0.0), 1: RankWindow(0.1, 0.0, 0.0)}).shares == {}


def test_windows_are_written_and_read_back() -> None:
    windows = [window(7), PaceWindow(8, 0.25, {0: USUAL})]
    document = encode_windows(windows, host="kelp", window_s=15.0)
    line = json.loads(json.dumps({"event": "pace", "attempt": 3, "pace": document}))
    assert decode_windows(line) == ("kelp", 15.0, windows)
    assert [(one.attempt, one.unix_s, one.shares) for one in list_paces([line])] == [
        (3, 105.0, {0: 0.4, 1: 0.4, 2: 0.4}),
        (3, 120.0, {0: 0.4}),
    ]


LINE: dict[str, Any] = {
    "event": "pace",
    "attempt": 1,
    "pace": encode_windows([window(7)], host="h", window_s=1.0),
}


@given(
    st.sampled_from(["host", "window_s", "numbers", "step_s", "ranks"]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=8,
    ),
)
def test_what_is_no_window_is_not_used(name: str, value: object) -> None:
    found = decode_windows({**LINE, "pace": {**LINE["pace"], name: value}})
    for one in () if found is None else found[2]:
        assert all(0 <= rank.own <= 3 for rank in one.ranks.values())
    assert decode_windows({**LINE, "pace": value}) is None or isinstance(value, dict)
    assert decode_period({"event": "slow-rank", "slow": {"rank": value}}) is None


def test_windows_of_several_hosts_are_joined_and_taken_in_order() -> None:
    table = WindowTable(3)
    table.add(PaceWindow(2, 0.5, {2: USUAL}))
    table.add(PaceWindow(1, 0.5, {0: USUAL, 1: USUAL}))
    assert table.take() == []
    table.add(PaceWindow(2, 0.6, {0: USUAL, 1: USUAL}))
    assert [(one.number, one.step_s, set(one.ranks)) for one in table.take()] == [(2, 0.6, {0, 1, 2})]
    table.add(PaceWindow(1, 0.5, {2: USUAL}))
    assert table.take() == [], "it is older than one that was judged"


@pytest.mark.parametrize(
    ("slow", "cause"),
    [
        (RankWindow(0.4, 0.5, 0.0), CAUSES[Activity.LOADS]),
        (RankWindow(0.4, 0.0, 0.5), CAUSES[Activity.SLEEPS]),
        (RankWindow(0.9, 0.0, 0.0), CAUSES[Activity.RUNS]),
        (RankWindow(0.9, 0.0, 0.0, 0.45), QUEUE_CAUSE),
        (USUAL, ""),
    ],
)
def test_the_cause_is_the_largest_difference_to_the_others(slow: RankWindow, cause: str) -> None:
    assert find_cause([window(number, slow) for number in range(4)], 2) == cause


def test_a_slow_rank_is_announced_once_and_its_end_once() -> None:
    announcer, slow = SlowRankAnnouncer(3, 1.15), RankWindow(0.4, 0.5, 0.0)
    changed: list[SlowPeriod] = []
    for number in range(100, 160):
        found = window(number, slow if 120 <= number < 140 else None)
        changed += announcer.add(found, window_s=15.0, hosts=HOSTS)
    begun, ended = changed
    assert begun.until_unix_s is None
    assert (begun.rank, begun.host, begun.since_unix_s) == (2, "dulse", 120 * 15.0)
    assert begun.cause == CAUSES[Activity.LOADS]
    assert begun.cost_share == pytest.approx(0.5)
    assert begun.cost_s == pytest.approx(0.25)
    assert (ended.since_unix_s, ended.until_unix_s) == (begun.since_unix_s, pytest.approx(143 * 15.0, abs=60))
    assert "SLOW RANK: all ranks wait for rank 2 (dulse)" in block_of_slow([begun], "home")
    assert "is as quick as the others again" in block_of_end(ended)
    lines = [
        {"event": event, "attempt": 2, **one.members()}
        for event, one in (("slow-rank", begun), ("slow-rank-over", ended))
    ]
    assert [(one.attempt, one.period) for one in list_slow_periods(lines)] == [(2, ended)]
