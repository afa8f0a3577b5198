"""Worker of a keeper under errors of the store: passing ones fail no save, and end no keeper."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from faulty_store import FaultyStore
from holdfast.checkpoint.format import names, run
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.home.commit import MAX_REFUSALS, check_not_refused, refuse
from holdfast.checkpoint.home.metrics import read_metrics
from holdfast.checkpoint.home.retain import Retention
from holdfast.checkpoint.keeper import committer, packets, worker
from holdfast.checkpoint.keeper.committer import Committed, PendingSave
from holdfast.checkpoint.keeper.inbox import StagedSave, TrainerInbox
from holdfast.checkpoint.keeper.lockfile import KeeperInfo, Lockfile
from holdfast.checkpoint.keeper.messages import (
    ArenaLayout,
    ArenaReleased,
    Close,
    DropSave,
    RecordEvent,
    SaveDelayed,
    SaveFailed,
    SaveReached,
    SubmitSave,
    UpdateMetrics,
)
from holdfast.checkpoint.keeper.worker import Worker
from holdfast.checkpoint.retention import Keep
from holdfast.checkpoint.store.local import LocalStore
from holdfast.checkpoint.store.memory import MemoryStore
from holdfast.errors import Denied, HoldfastError, InvalidInput, RetryLater
from holdfast.system import log
from holdfast.system.linux.processes import start_time
from keeper.test_commit import make_config, put_part
from making import RecordingInbox

Made = tuple[Worker, FaultyStore, RecordingInbox]
MakeWorker = Callable[..., Made]


@pytest.fixture
def make_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeWorker:
    def make(
        store: FaultyStore | None = None,
        *,
        commit_timeout_s: float = 60.0,
        rank: int = 0,
        world_size: int = 1,
    ) -> Made:
        store = store or FaultyStore(MemoryStore())
        inbox, pid = RecordingInbox(), os.getpid()
        monkeypatch.setattr(worker, "open_store", lambda _: store)
        lockfile = Lockfile.create(str(tmp_path), KeeperInfo(1, rank, pid, start_time(pid) or 0, busy=True))
        return Worker(inbox, make_config("home", rank, world_size, commit_timeout_s), lockfile), store, inbox

    return make


def check_commit(made: Worker, save: PendingSave, times: int = 1) -> None:
    """Let a worker check for the commit of a save, whenever the check is due."""
    made._pending = [save]
    for _ in range(times):
        save.next_look_s = 0.0
        made._commit_ready()


def only_failure(inbox: RecordingInbox) -> SaveFailed:
    (failed,) = inbox.replies
    assert isinstance(failed, SaveFailed)
    return failed


def staged(step: int, **changes: Any) -> StagedSave:
    """A save whose arena has a single byte."""
    arena_fd = os.memfd_create("arena")
    os.write(arena_fd, b"x")
    request = SubmitSave(step, 1, (1,), ArenaLayout(1), to_home=True, **changes)
    return StagedSave(request, arena_fd, os.open(os.devnull, os.O_RDONLY), time.monotonic())


def test_late_metrics_outlast_a_passing_error_at_the_end(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer ends as soon as it has sent them, and the store fails just then."""
    monkeypatch.setattr(worker, "_LAST_LOOK_S", 0.01)
    made, store, inbox = make_worker()
    put_part(store, 0, world_size=1)
    store.fail("put", RetryLater("No space left on device"), times=2, matching="metrics")
    inbox.put(UpdateMetrics(5, {"loss": 1.0}))
    inbox.trainer_gone = True
    made.run()
    assert read_metrics(store, CheckpointId(1, 5)) == {"loss": 1.0}


def test_late_metrics_are_written_before_the_next_save_counts_as_persisted(make_worker: MakeWorker) -> None:
    """From then on the trainer would not send them to the next keeper, if this one were killed."""
    made, store, inbox = make_worker()
    put_part(store, 0, world_size=1)
    store.put(names.manifest(9, 1), b"newer")
    made._handle(UpdateMetrics(5, {"loss": 1.0}))
    made._handle(staged(6, is_resent=True))
    assert inbox.replies[0] == SaveReached(6, "persisted")
    assert read_metrics(store, CheckpointId(1, 5)) == {"loss": 1.0}


@pytest.mark.parametrize("error", [RetryLater("stale"), Denied("expired")])
@pytest.mark.parametrize("method", ["list", "put", "put whose response is lost", "get", "size", "sync"])
def test_a_commit_is_retried_after_a_passing_error(
    make_worker: MakeWorker, method: str, error: HoldfastError
) -> None:
    made, store, inbox = make_worker()
    put_part(store, 0, world_size=1)
    store.fail(method.split()[0], error, times=1, matching="step-", after="lost" in method)
    check_commit(made, PendingSave(5, received_s=time.monotonic()), times=3)
    assert inbox.replies == [SaveReached(5, "durable")]
    store.clear()
    assert store.size(names.manifest(5, 1)) is not None


def test_a_commit_that_fails_for_too_long_is_reported(make_worker: MakeWorker) -> None:
    made, store, inbox = make_worker(commit_timeout_s=0.0)
    put_part(store, 0, world_size=1)
    store.fail("list", RetryLater("stale"), times=None, matching="step-")
    check_commit(made, PendingSave(5, received_s=time.monotonic() - 1))
    assert inbox.replies == [SaveFailed(5, "RetryLater", "stale")]
    assert not made._pending


def test_a_bug_fails_one_save_and_not_the_keeper(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, store, inbox = make_worker()
    put_part(store, 0, world_size=1)

    def broken(*_: Any, **__: Any) -> None:
        raise KeyError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(committer, "commit", broken)
        check_commit(made, PendingSave(5))
    assert only_failure(inbox).error == "Internal"
    check_commit(made, PendingSave(5, received_s=time.monotonic()))
    assert inbox.replies[1:] == [SaveReached(5, "durable")]


def test_a_save_that_was_deleted_behind_a_newer_one_is_not_a_failure(make_worker: MakeWorker) -> None:
    """An earlier keeper had committed it and died; retention has deleted it since."""
    made, store, inbox = make_worker()
    store.put(names.manifest(9, 1), b"newer")
    made._persist(staged(5, is_resent=True))
    assert inbox.replies == [SaveReached(5, "persisted"), ArenaReleased(1)]
    check_commit(made, made._pending[0])
    assert inbox.replies[2:] == [SaveReached(5, "durable")]


def test_a_refused_save_that_was_deleted_behind_a_newer_one_fails(make_worker: MakeWorker) -> None:
    """Rank 0 has refused it, committed a newer one and deleted it, all between two checks of this rank."""
    made, store, inbox = make_worker(rank=1, world_size=2)
    for rank in (0, 1):
        put_part(store, rank)
    refuse(store, make_config("home").writer, 5, InvalidInput("Ranks disagree about w", step=5, rank=0))
    store.put(names.manifest(9, 1), b"newer")
    assert [one.step for one in Retention(store, Keep(3)).apply(CheckpointId(1, 9), (), ())] == [5]
    assert store.size(names.part(5, 1, 1)) is None
    check_commit(made, PendingSave(5, received_s=time.monotonic()))
    assert inbox.replies == [SaveFailed(5, "InvalidInput", "Ranks disagree about w")]


def test_a_save_that_was_never_committed_fails_behind_a_newer_one(make_worker: MakeWorker) -> None:
    """Rank 0 has given it up, committed a newer one and deleted it, all between two checks of this rank."""
    made, store, inbox = make_worker(rank=1, world_size=2)
    first, *_ = make_worker(store, rank=0, world_size=2)
    for rank in (0, 1):
        put_part(store, rank)
    store.put(names.manifest(9, 1), b"newer")
    first._tiers.finish(PendingSave(9), Committed(()), 0.0)
    first._tiers.join_retention()
    assert store.size(names.part(5, 1, 1)) is None
    check_commit(made, PendingSave(5, received_s=time.monotonic()))
    assert only_failure(inbox).detail.startswith("Step 5 was not complete when step 9 was committed")


def test_a_resent_save_that_was_refused_is_neither_written_nor_durable(make_worker: MakeWorker) -> None:
    made, store, inbox = make_worker(rank=1, world_size=2)
    refuse(store, make_config("home").writer, 5, InvalidInput("Ranks disagree about w", step=5, rank=0))
    store.put(names.manifest(9, 1), b"newer")
    made._persist(staged(5, is_resent=True))
    assert inbox.replies == [SaveFailed(5, "InvalidInput", "Ranks disagree about w"), ArenaReleased(1)]


def test_a_save_that_a_newer_attempt_may_have_deleted_is_not_durable(make_worker: MakeWorker) -> None:
    """The next attempt deletes incomplete saves of this one without a refusal."""
    made, store, inbox = make_worker(rank=1, world_size=2)
    for name in (names.manifest(9, 1), names.attempt(2)):
        store.put(name, b"newer")
    check_commit(made, PendingSave(5, received_s=time.monotonic()))
    assert only_failure(inbox).error == "Conflict"


def test_a_save_whose_refusal_may_be_deleted_is_not_durable(make_worker: MakeWorker) -> None:
    made, store, inbox = make_worker(rank=1, world_size=2, commit_timeout_s=0.0)
    for step in range(10, 10 + MAX_REFUSALS):
        refuse(store, make_config("home").writer, step, InvalidInput("torn", step=step))
    store.put(names.manifest(500, 1), b"newer")
    check_commit(made, PendingSave(5, received_s=time.monotonic() - 1))
    failed = only_failure(inbox)
    assert failed.error == "RetryLater"
    assert "It is not known whether step 5 was committed" in failed.detail


def test_a_keeper_retries_to_open_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[str] = []

    def open_store(place: str) -> MemoryStore:
        tries.append(place)
        if len(tries) < 3:
            raise RetryLater("input/output error")
        return MemoryStore()

    monkeypatch.setattr(worker, "open_store", open_store)
    monkeypatch.setattr(worker, "_OPEN_PAUSE_S", 0.0)
    assert worker.open_patiently("home", RecordingInbox())
    assert len(tries) == 3


def test_the_oldest_save_is_taken_with_all_other_messages() -> None:
    """A save that waits behind another does not delay the events that follow it."""
    ours, theirs = packets.make_pair()
    inbox = TrainerInbox(theirs, os.getpid())
    event, drop = RecordEvent("saved", 1, 0.0), DropSave(3, "torn")
    with ours, theirs, Path(os.devnull).open() as file:
        fds = file.fileno(), file.fileno()
        for step in (1, 2):
            packets.send(ours, SubmitSave(step, step, (1, 2), ArenaLayout(1), to_home=True), fds)
        for message in (event, drop, Close(frees_memory=True)):
            packets.send(ours, message)
        inbox.start()
        taken = []
        while (items := inbox.receive(None, has_work=False)) is not None:
            taken += items
    assert inbox.frees_memory
    saves = [item for item in taken if isinstance(item, StagedSave)]
    assert [save.request.step for save in saves] == [1, 2]
    assert [item for item in taken if item not in saves] == [event, drop]
    for save in saves:
        os.close(save.arena_fd)
        os.close(save.draft_fd)


@pytest.mark.parametrize("error", [RetryLater("No space left on device"), Denied("expired")])
def test_the_cause_of_a_commit_that_waits_is_sent_once(make_worker: MakeWorker, error: HoldfastError) -> None:
    """A disk that is full between part and manifest: nothing was printed for ten minutes."""
    made, store, inbox = make_worker()
    put_part(store, 0, world_size=1)
    store.fail("put", error, times=3, matching="manifest")
    check_commit(made, PendingSave(5, received_s=time.monotonic() - 4.0), times=3)
    assert inbox.replies == [SaveDelayed(5, str(error))]


def test_the_ranks_whose_parts_are_missing_are_sent(make_worker: MakeWorker) -> None:
    made, store, inbox = make_worker(world_size=2)
    put_part(store, 0, world_size=2)
    check_commit(made, PendingSave(5, received_s=time.monotonic() - 4.0), times=3)
    assert inbox.replies == [SaveDelayed(5, "The parts of ranks [1] are missing.")]


def test_saves_are_told_that_their_keeper_still_waits_for_its_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home that was away before the first look gave no line for a minute. Later saves get one too."""
    monkeypatch.setattr(log, "QUIET_S", 0.0)
    monkeypatch.setattr(worker, "_OPEN_PAUSE_S", 0.01)
    home = LocalStore(tmp_path / "home")
    ours, theirs = packets.make_pair()
    inbox = TrainerInbox(theirs, os.getpid())
    waiting = threading.Thread(target=worker.wait_for_run, args=(home, "run", inbox))
    with ours, theirs, Path(os.devnull).open() as file:
        inbox.start()
        waiting.start()
        for step in (1, 2):
            fds = file.fileno(), file.fileno()
            packets.send(ours, SubmitSave(step, step, (1, 2), ArenaLayout(1), to_home=True), fds)
            delayed, _ = packets.receive(ours)
            assert isinstance(delayed, SaveDelayed)
            assert delayed.step == step
            assert "does not show run run, which was claimed there" in delayed.detail
        home.put(names.RUN, run.document(run.Run("run", 1.0)))
        waiting.join()
        assert not inbox.trainer_gone
        for save in inbox.receive(None, has_work=False) or ():
            assert isinstance(save, StagedSave)
            os.close(save.arena_fd)
            os.close(save.draft_fd)


def test_a_save_that_one_rank_cannot_write_fails_on_all_at_once(make_worker: MakeWorker) -> None:
    """The others would wait for its part for ten minutes, or as long as a pause may last."""
    made, store, inbox = make_worker(rank=1, world_size=2)
    store.fail("put", RetryLater("No space left on device"), times=None, matching=names.data(5, 1, 1))
    made._persist(staged(5))
    assert SaveFailed(5, "RetryLater", "No space left on device") in inbox.replies
    with pytest.raises(InvalidInput, match="Rank 1 has no copy of it: No space left on device"):
        check_not_refused(store, make_config("home", 0, 2).writer, 5)
