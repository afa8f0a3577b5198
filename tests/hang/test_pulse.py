"""The pulse of a trainer, as another reader sees it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from holdfast.checkpoint.keeper.pulse import NUM_DURATIONS, NUM_SLOTS, NUM_WORDS, Pulse, PulseReader
from holdfast.errors import Corrupt, InvalidInput


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
