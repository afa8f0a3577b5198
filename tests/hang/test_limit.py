"""A trainer's pulse, and the limit that is learnt from it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from holdfast.checkpoint.keeper.pulse import (
    NUM_DURATIONS,
    NUM_SLOTS,
    NUM_WORDS,
    Pulse,
    PulseReader,
    TrainerProgress,
)
from holdfast.errors import Corrupt, InvalidInput
from holdfast.watch.hang.watch import MIN_STEPS, HangLimits, StallClock, learn_limit

TRAINING = TrainerProgress(
    is_training=True, beats=50, beats_here=50, step=50, beat_ns=0, phase="", phase_count=0, phase_ns=0,
    durations_s=(12.0,) * 50, thread=1,
)  # fmt: skip


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
    clock.extend(50.0)
    assert not ticks(clock, TRAINING, 40)
    assert ticks(clock, TRAINING, 10)
    assert ticks(clock, changed(beats=51), 7)


@pytest.fixture
def pulse() -> Iterator[Pulse]:
    found = Pulse()
    found.words("hang")[0] = 7
    yield found
    found.close()


def reader(pulse: Pulse) -> PulseReader:
    return PulseReader.of_process(os.getpid(), pulse.share())


def test_what_was_written_before_it_is_shared_is_read(pulse: Pulse) -> None:
    pulse.begin(40)
    pulse.beat(41)
    found = reader(pulse).read()
    assert (found.is_training, found.step, found.beats, found.beats_here) == (True, 41, 1, 1)
    assert (found.words("hang")[0], found.thread, found.phase) == (7, threading.get_ident(), "")
    assert found.durations_s == (), "the first step compiles and connects"


def test_steps_are_read_as_they_happen(pulse: Pulse) -> None:
    watched = reader(pulse)
    assert not watched.read().is_training
    for step in range(1, NUM_DURATIONS + 20):
        pulse.beat(step)
        assert watched.read().step == step
    found = watched.read()
    assert len(found.durations_s) == NUM_DURATIONS
    assert min(found.durations_s) > 0
    pulse.begin(5)  # after going back
    assert (watched.read().beats_here, watched.read().step) == (0, 5)
    pulse.end()
    assert not watched.read().is_training


def test_phases_are_named_nested_and_not_part_of_a_step(
    pulse: Pulse, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [100.0]
    monkeypatch.setattr("holdfast.checkpoint.keeper.pulse.time.monotonic_ns", lambda: int(now_s[0] * 1e9))
    watched = reader(pulse)
    pulse.begin(0)
    pulse.beat(1)
    now_s[0] += 1.0
    with pulse.phase("eval"):
        now_s[0] += 50.0
        assert watched.read().phase == "eval"
        with pulse.phase("save()"):
            now_s[0] += 10.0
            assert watched.read().phase == "save()"
        assert watched.read().phase == "eval"
    assert watched.read().phase == ""
    now_s[0] += 2.0
    pulse.beat(2)
    assert watched.read().durations_s == (pytest.approx(3.0),)
    assert watched.read().phase_count == 4


def test_another_thread_marks_no_phase(pulse: Pulse) -> None:
    watched = reader(pulse)
    pulse.begin(0)

    def waits() -> None:
        with pulse.phase("wait()"):
            assert watched.read().phase == ""

    thread = threading.Thread(target=waits)
    thread.start()
    thread.join()
    assert watched.read().phase_count == 0


def test_a_long_name_is_cut_and_other_memory_is_refused(pulse: Pulse) -> None:
    with pulse.phase("ä" * 100):
        assert reader(pulse).read().phase.startswith("ä" * 30)
    for content in (b"", bytes(4096)):
        fd = os.memfd_create("other")
        os.write(fd, content)
        with pytest.raises(Corrupt, match="not that of a pulse"):
            PulseReader.of_process(os.getpid(), fd)
        os.close(fd)
    with pytest.raises(OSError, match="No such file"):
        PulseReader.of_process(os.getpid(), 10_000)


def test_a_reader_keeps_the_memory_of_a_trainer_that_has_closed_it() -> None:
    pulse = Pulse()
    watched = reader(pulse)
    pulse.begin(3)
    pulse.close()
    assert (watched.read().step, watched.read().is_training) == (3, False)
    with pulse.phase("close()"):
        pulse.beat(4)  # changes nothing that anybody reads
    assert watched.read().step == 3


def test_each_watch_has_words_of_its_own(pulse: Pulse) -> None:
    pulse.words("later")[NUM_WORDS - 1] = -5
    found = reader(pulse).read()
    assert found.words("hang") == (7, *(0,) * (NUM_WORDS - 1))
    assert found.words("later") == (*(0,) * (NUM_WORDS - 1), -5)
    assert found.words("another") == (0,) * NUM_WORDS
    pulse.words("hang")[1] = 3  # after they were shared
    assert reader(pulse).read().words("hang")[:2] == (7, 3)


def test_too_many_watches_with_words_are_refused(pulse: Pulse) -> None:
    for number in range(NUM_SLOTS - 1):
        pulse.words(f"watch-{number}")
    with pytest.raises(InvalidInput, match="At most 32 watches"):
        pulse.words("one-more")
