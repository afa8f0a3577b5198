"""Append logs kept in memory: no line is lost, and failed writes are reported and retried."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.checkpoint.store import bucket
from holdfast.checkpoint.store.bucket import AppendLogs
from holdfast.errors import RetryLater


class Place:
    """Objects in memory, with an event for each write, and failures on demand."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.written = threading.Event()
        self.tried = threading.Event()
        self.is_down = False

    def reach(self) -> None:
        self.tried.set()
        if self.is_down:
            raise RetryLater("down")

    def load(self, name: str, limit_s: float | None) -> bytes | None:
        self.reach()
        return self.objects.get(name)

    def save(self, name: str, text: bytes, limit_s: float | None) -> None:
        self.reach()
        self.objects[name] = text
        self.written.set()


@pytest.fixture
def place() -> Place:
    return Place()


@pytest.fixture
def log(place: Place) -> AppendLogs:
    return AppendLogs(place.load, place.save)


def test_lines_are_written_in_the_background(
    place: Place, log: AppendLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket, "LOG_PAUSE_S", 0.01)
    log.append("a", b"one\n")
    assert place.written.wait(600)
    assert place.objects["a"] == b"one\n"


def test_lines_follow_those_of_an_earlier_process(place: Place, log: AppendLogs) -> None:
    place.objects["a"] = b"before\n"
    log.append("a", b"one\n")
    log.append("a", b"two\n")
    log.flush()
    assert place.objects["a"] == b"before\none\ntwo\n"


def test_flush_writes_only_what_has_changed(place: Place, log: AppendLogs) -> None:
    for name in ("a/1", "a/2", "b"):
        log.append(name, b"x")
    log.flush("a/")
    assert sorted(place.objects) == ["a/1", "a/2"]
    place.objects.clear()
    log.flush()
    assert sorted(place.objects) == ["b"]


def test_a_failed_write_is_reported_at_the_next_line_and_retried(
    place: Place, log: AppendLogs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket, "LOG_PAUSE_S", 0.01)
    place.is_down = True
    log.append("a", b"1\n")
    failure, lines = "", 1
    while not failure:  # each line comes after one more try has failed
        place.tried.clear()
        assert place.tried.wait(600)
        lines += 1
        try:
            log.append("a", b"%d\n" % lines)
        except RetryLater as error:
            failure = str(error)
    assert "down" in failure
    with pytest.raises(RetryLater):
        log.flush()
    place.is_down = False
    log.flush()
    assert place.objects["a"] == b"".join(b"%d\n" % number for number in range(1, lines + 1))


def test_a_log_is_bounded(place: Place, log: AppendLogs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "MAX_LOG_BYTES", 10)
    log.append("a", b"x" * 10)
    with pytest.raises(RetryLater, match="nothing was appended"):
        log.append("a", b"y")
    log.flush()
    assert place.objects["a"] == b"x" * 10


def test_many_threads_lose_no_line(place: Place, log: AppendLogs) -> None:

    def work(number: int) -> None:
        for turn in range(50):
            log.append("a", b"%d-%d\n" % (number, turn))
            if turn % 10 == 0:
                log.flush()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    log.flush()
    expected = [b"%d-%d" % (number, turn) for number in range(4) for turn in range(50)]
    assert sorted(place.objects["a"].split()) == sorted(expected)
