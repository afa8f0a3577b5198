"""The learnt limit of a step, and the clock that never counts a suspended machine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from holdfast.checkpoint.keeper.pulse import TrainerProgress
from holdfast.watch.hang.limit import MIN_LIMIT_S, MIN_STEPS, HangLimits, StallClock, learn_limit

TRAINING = TrainerProgress(
    is_training=True,
    beats=50,
    beats_here=50,
    step=50,
    beat_ns=0,
    phase="",
    phase_count=0,
    phase_ns=0,
    durations_s=(12.0,) * 50,
    thread=1,
)


def ticks(clock: StallClock, progress: TrainerProgress, seconds: float) -> bool:
    """Tick once a second; return the last result."""
    is_late = False
    for _ in range(int(seconds)):
        is_late = clock.tick(progress, 1.0)
    return is_late


def changed(**members: object) -> TrainerProgress:
    return replace(TRAINING, **members)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("durations_s", "limit_s"),
    [
        ((0.01,) * 100, 60.0),
        ((12.0,) * 50, 120.0),
        ((12.0,) * 49 + (400.0,), 800.0),  # one with an evaluation
        ((1.0,) * (MIN_STEPS - 1), None),
    ],
)
def test_the_limit_follows_the_steps(durations_s: tuple[float, ...], limit_s: float | None) -> None:
    assert learn_limit(durations_s) == limit_s


@given(st.lists(st.floats(1e-6, 1e4), min_size=MIN_STEPS, max_size=100))
def test_no_step_like_those_before_reaches_the_limit(durations_s: list[float]) -> None:
    found = learn_limit(tuple(durations_s))
    assert found is not None
    assert found >= max(MIN_LIMIT_S, 2 * max(durations_s))


@pytest.mark.parametrize(
    ("limits", "progress", "limit_s"),
    [
        (HangLimits(), TRAINING, 120),
        (HangLimits(first_s=300.0), changed(beats_here=0), 300),
        (HangLimits(first_s=300.0), changed(durations_s=(0.1,) * 3), 300),  # too few to learn from
        (HangLimits(step_s=5.0, first_s=30.0), changed(beats_here=0), 30),
        (HangLimits(step_s=5.0, first_s=30.0), TRAINING, 5),
    ],
)
def test_a_stall_is_late_after_its_limit(limits: HangLimits, progress: TrainerProgress, limit_s: int) -> None:
    clock = StallClock(limits)
    for seen in (progress, replace(progress, beats=51)):
        assert not ticks(clock, seen, limit_s + 1)  # the first tick only begins
        assert ticks(clock, seen, 1)


@pytest.mark.parametrize("jump_s", [3600.0, 1e9])
def test_a_machine_that_was_suspended_does_not_hang(jump_s: float) -> None:
    clock = StallClock(HangLimits())
    ticks(clock, TRAINING, 10)
    assert not clock.tick(TRAINING, jump_s)
    assert clock.stalled_s < 20


def test_outside_of_a_loop_nothing_is_late() -> None:
    clock = StallClock(HangLimits(step_s=5.0))
    assert not ticks(clock, changed(is_training=False), 10_000)


def test_a_phase_has_a_limit_that_follows_the_longest_of_its_name() -> None:
    clock = StallClock(HangLimits(phase_s=100.0))
    evaluates = changed(phase="eval", phase_count=1)
    assert not ticks(clock, evaluates, 51)
    assert not ticks(clock, changed(phase_count=2), 10)
    again = changed(beats=60, phase="eval", phase_count=3)
    assert not ticks(clock, again, 501)
    assert ticks(clock, again, 1)
    assert ticks(clock, changed(phase="other", phase_count=5), 102)


def test_an_extended_limit_ends_with_the_next_progress() -> None:
    clock = StallClock(HangLimits(step_s=5.0, phase_s=50.0))
    ticks(clock, TRAINING, 5)
    clock.extend()
    assert not ticks(clock, TRAINING, 40)
    assert ticks(clock, TRAINING, 10)
    assert ticks(clock, changed(beats=51), 7)
