"""Windows of the pace: the activities that they count, the history, and the slow periods that follow."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.keeper.pulse import Pulse, PulseReader
from holdfast.watch.pace.sampler import NAME, Activity, ActivitySampler, activity_of
from holdfast.watch.pace.windows import (
    CAUSES,
    QUEUE_CAUSE,
    PaceJudge,
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
from stage.training import wait_until

USUAL = RankWindow(0.4, 0.0, 0.0)
HOSTS = {0: "kelp", 1: "kelp", 2: "dulse"}


def window(number: int, slow: RankWindow | None = None) -> PaceWindow:
    return PaceWindow(number, 0.5, {0: USUAL, 1: USUAL, 2: slow or USUAL})


def test_shares_are_those_of_the_samples() -> None:
    counts = [0] * 8
    counts[Activity.RUNS], counts[Activity.LOADS] = 30, 10
    counts[Activity.WAITS], counts[Activity.APART] = 40, 20
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
    judge, slow = PaceJudge(3, 15.0), RankWindow(0.4, 0.5, 0.0)
    changed: list[SlowPeriod] = []
    for number in range(100, 160):
        found = window(number, slow if 120 <= number < 140 else None)
        changed += judge.add(found, HOSTS)
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
    assert list_slow_periods(lines) == [(2, ended)]


SITE = "/venv/lib/python3.11/site-packages"
FRAMES = {
    "script": ("/home/me/train.py", "main"),
    "linear": (f"{SITE}/torch/nn/modules/linear.py", "forward"),
    "backward": (f"{SITE}/torch/autograd/graph.py", "_engine_run_backward"),
    "all_reduce": (f"{SITE}/torch/distributed/distributed_c10d.py", "all_reduce"),
    "fsdp": (f"{SITE}/torch/distributed/fsdp/_fully_shard/_fsdp_state.py", "_pre_forward"),
    "loader": (f"{SITE}/torch/utils/data/dataloader.py", "__next__"),
    "dataset": ("/home/me/data.py", "__getitem__"),
    "compiled": (f"{SITE}/torch/_dynamo/eval_frame.py", "compile_wrapper"),
    "compiler": (f"{SITE}/torch/_dynamo/convert_frame.py", "_compile"),
    "evaluate": ("/home/me/train.py", "evaluate"),
    "exchange": (f"{SITE}/holdfast/ranks.py", "exchange_flags"),
}


def codes(*names: str) -> list[CodeType]:
    """Return functions at the places of some frames, innermost first."""
    made = (lambda: None).__code__
    return [made.replace(co_filename=FRAMES[name][0], co_name=FRAMES[name][1]) for name in names]


@pytest.mark.parametrize(
    ("frames", "state", "activity"),
    [
        (("linear", "script"), "R", Activity.RUNS),
        (("backward", "script"), "R", Activity.RUNS),
        (("backward", "script"), "S", Activity.WAITS),
        (("all_reduce", "script"), "S", Activity.WAITS),
        (("all_reduce", "fsdp", "linear", "script"), "S", Activity.WAITS),
        (("exchange", "script"), "S", Activity.WAITS),
        (("script",), "S", Activity.SLEEPS),
        (("script",), "D", Activity.SLEEPS),
        (("loader", "script"), "S", Activity.LOADS),
        (("loader", "script"), "R", Activity.LOADS),
        (("dataset", "loader", "script"), "S", Activity.LOADS),
        (("linear", "compiled", "script"), "R", Activity.RUNS),
        (("compiler", "compiled", "script"), "R", Activity.APART),
        (("all_reduce", "evaluate", "script"), "S", Activity.APART),
        ((), "S", Activity.SLEEPS),
    ],
)
def test_place_and_state_give_the_activity(frames: tuple[str, ...], state: str, activity: Activity) -> None:
    assert activity_of(codes(*frames), state) is activity


@pytest.fixture
def pulse() -> Iterator[Pulse]:
    found = Pulse()
    yield found
    found.close()


def sampled(pulse: Pulse, work: Callable[[], object]) -> tuple[int, ...]:
    """Return the samples of a thread that works, by activity, once there are some."""
    reading, stop = PulseReader.of_process(threading.get_native_id(), pulse.share()), threading.Event()

    def train() -> None:
        pulse.begin(0)
        pulse.beat(1)
        while not stop.is_set():
            work()

    thread = threading.Thread(target=train)
    sampler = ActivitySampler(pulse, 0.3)
    thread.start()
    sampler.start()
    try:
        wait_until(lambda: sum(reading.read().words(NAME)) >= 30)
        return reading.read().words(NAME)
    finally:
        sampler.close()
        stop.set()
        thread.join()
        reading.close()


class SlowData(torch.utils.data.Dataset[int]):
    """Samples that each take a while."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        time.sleep(0.02)
        return index


def evaluate(pulse: Pulse) -> None:
    """Take a while in a phase."""
    with pulse.phase("eval"):
        time.sleep(0.05)


NUMBERS, LOADER = torch.randn(64, 64), torch.utils.data.DataLoader(SlowData())


@pytest.mark.parametrize(
    ("work", "activity"),
    [
        (lambda _: time.sleep(0.05), Activity.SLEEPS),
        (lambda _: NUMBERS @ NUMBERS, Activity.RUNS),
        (lambda _: list(LOADER), Activity.LOADS),
        (evaluate, Activity.APART),
    ],
)
def test_a_thread_is_sampled_in_its_activity(
    pulse: Pulse, work: Callable[[Pulse], object], activity: Activity
) -> None:
    found = sampled(pulse, lambda: work(pulse))
    assert found[activity] > 0.6 * sum(found)


def test_nothing_is_sampled_before_the_first_step_is_complete(pulse: Pulse) -> None:
    pulse.begin(0)
    assert not pulse.is_in_loop
    pulse.beat(1)
    assert pulse.is_in_loop
    pulse.end()
    assert not pulse.is_in_loop
