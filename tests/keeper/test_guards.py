"""A keeper's work under errors of the store: no save fails for one that passes, and no keeper ends."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import Denied, HoldfastError, RetryLater
from holdfast.format import names
from holdfast.keeper import process
from holdfast.keeper.presence import Presence, Trace, process_start
from holdfast.keeper.process import Desk, Job, Work
from holdfast.store.memory import MemoryStore
from holdfast.testing import FaultyStore
from keeper.test_commit import make_terms, put_part


class Told(Desk):
    """A desk that keeps what it would send to the trainer."""

    def __init__(self) -> None:
        super().__init__(None, os.getpid())  # pyright: ignore[reportArgumentType] - nothing is sent
        self.said: list[dict[str, Any]] = []

    def tell(self, message: dict[str, Any]) -> None:
        self.said.append(message)

    def events(self) -> list[str]:
        return [message["event"] for message in self.said]


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Work, FaultyStore, Told]]:
    def make(*, commit_timeout_s: float = 60.0) -> tuple[Work, FaultyStore, Told]:
        store, desk, pid = FaultyStore(MemoryStore()), Told(), os.getpid()
        monkeypatch.setattr(process, "open_store", lambda _: store)
        presence = Presence.claim(str(tmp_path), Trace(1, 0, pid, process_start(pid) or 0, busy=True))
        return Work(desk, make_terms("home", 0, 1, commit_timeout_s), presence), store, desk

    return make


def look(made: Work, job: Job, times: int = 1) -> None:
    for _ in range(times):
        job.next_look_s = 0.0
        made._look_for_parts()


@pytest.mark.parametrize("error", [RetryLater("stale"), Denied("expired")])
@pytest.mark.parametrize("method", ["list", "put", "get", "size", "sync"])
def test_a_commit_is_tried_again_after_an_error_that_passes(
    work: Callable[..., tuple[Work, FaultyStore, Told]], method: str, error: HoldfastError
) -> None:
    made, store, desk = work()
    put_part(store, 0, world_size=1)
    store.fail(method, error, times=1, matching="step-")
    job = Job(5, received_s=process.time.monotonic())
    made.waiting.append(job)
    look(made, job, times=3)
    assert desk.events() == ["committed"]
    store.clear()
    assert store.size(names.manifest(5, 1)) is not None


def test_a_commit_whose_answer_was_lost_is_no_failure(
    work: Callable[..., tuple[Work, FaultyStore, Told]],
) -> None:
    made, store, desk = work()
    put_part(store, 0, world_size=1)
    store.fail("put", RetryLater("connection reset"), matching="manifest", after=True)
    job = Job(5, received_s=process.time.monotonic())
    made.waiting.append(job)
    look(made, job, times=3)
    assert desk.events() == ["committed"]


def test_a_commit_that_fails_for_too_long_is_told(
    work: Callable[..., tuple[Work, FaultyStore, Told]],
) -> None:
    made, store, desk = work(commit_timeout_s=0.0)
    put_part(store, 0, world_size=1)
    store.fail("list", RetryLater("stale"), times=None, matching="step-")
    job = Job(5, received_s=process.time.monotonic() - 1)
    made.waiting.append(job)
    look(made, job)
    assert desk.events() == ["failed"]
    assert not made.waiting


def test_a_bug_fails_one_save_and_not_the_keeper(
    work: Callable[..., tuple[Work, FaultyStore, Told]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, store, desk = work()
    put_part(store, 0, world_size=1)

    def broken(*_: Any) -> None:
        raise KeyError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(process, "commit", broken)
        made.waiting.append(job := Job(5))
        look(made, job)
    assert desk.said[-1]["kind"] == "Internal"
    made.waiting.append(job := Job(5, received_s=process.time.monotonic()))
    look(made, job)
    assert desk.events() == ["failed", "committed"]


@pytest.mark.parametrize("step", [-1, True, "5", None, 5.0])
def test_a_step_that_no_file_can_have_fails_at_once(
    work: Callable[..., tuple[Work, FaultyStore, Told]], step: Any
) -> None:
    made, _, desk = work()
    made._persist(Job(step, draft_fd=os.open(os.devnull, os.O_RDONLY)))
    assert desk.said[0]["kind"] == "InvalidInput"
    assert not made.waiting


def test_a_save_that_was_retired_behind_a_newer_one_is_no_failure(
    work: Callable[..., tuple[Work, FaultyStore, Told]],
) -> None:
    """The keeper before this one had committed it and died; retention has deleted it since."""
    made, store, desk = work()
    store.put(names.manifest(9, 1), b"newer")
    desk.arenas[0] = process.Mapped(-1, mmap.mmap(-1, 1))
    made._persist(Job(5, draft_fd=os.open(os.devnull, os.O_RDONLY), was_sent=True))
    assert desk.events() == ["persisted", "released"]
    look(made, made.waiting[0])
    assert desk.events()[-1] == "committed"


def test_a_keeper_whose_place_cannot_be_opened_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[str] = []

    def open_store(place: str) -> MemoryStore:
        tries.append(place)
        if len(tries) < 3:
            raise RetryLater("input/output error")
        return MemoryStore()

    monkeypatch.setattr(process, "open_store", open_store)
    monkeypatch.setattr(process, "_LAST_LOOK_S", 0.0)
    assert process._open_patiently("home", Told())
    assert len(tries) == 3
