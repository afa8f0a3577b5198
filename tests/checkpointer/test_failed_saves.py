"""Saves that fail, whatever the cause: a warning, a pause or an error, as the user has chosen."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from fault_proxy import FaultProxy
from holdfast.checkpoint.format import names
from holdfast.checkpoint.keeper import KeeperConfig
from holdfast.checkpoint.run import attempt
from holdfast.checkpoint.store import open_store
from holdfast.errors import Conflict, Denied, HoldfastError, InvalidInput, Preempted, RetryLater, SaveWarning
from holdfast.system.environment import PROGRESS, read_progress
from holdfast.watch.report.summary import read_summary
from making import steps_kept
from servers import Server
from small_disk import fill_up, small_disk
from stage import ranks
from stage.training import keeper_of, make_checkpointer, wait_until

SOON_S = 600.0


@dataclass
class Trouble:
    """A home that fails, and its cause.

    Attributes:
        begin: makes the home fail.
        end: repairs it.
    """

    home: Path | str
    error: type[HoldfastError]
    text: str
    begin: Callable[[], object]
    end: Callable[[], object]


def remount(disk: Path, how: str) -> None:
    # It is busy during a write.
    wait_until(lambda: subprocess.call(["mount", "-o", f"remount,{how}", str(disk)]) == 0)


@pytest.fixture
def bucket(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trouble]:
    """A bucket that refuses writes."""
    for name, value in server.env.items():
        monkeypatch.setenv(name, value)
    with FaultProxy("127.0.0.1", server.port) as proxy:
        home = server.home(uuid.uuid4().hex, port=proxy.port)
        deny = partial(proxy.inject, "403", method="PUT", times=None, code="AccessDenied")
        yield Trouble(home, Denied, "AccessDenied", deny, proxy.clear)


@pytest.fixture
def away(tmp_path: Path) -> Trouble:
    """A store that is away."""
    home, other = tmp_path / "home", tmp_path / "other"
    return Trouble(home, RetryLater, "vanished", lambda: home.rename(other), lambda: other.rename(home))


@pytest.fixture(params=["away", "full", "denied", pytest.param("bucket", marks=pytest.mark.slow)])
def trouble(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Trouble]:
    """A store that is away, a full disk, one that refuses writes, and a bucket; the disks as root only."""
    if request.param in ("away", "bucket"):
        yield request.getfixturevalue(request.param)
        return
    with small_disk(tmp_path, "600k") as disk:
        home, ballast = disk / "home", disk / "ballast"
        if request.param == "full":
            yield Trouble(home, RetryLater, "No space left", lambda: fill_up(ballast), ballast.unlink)
        else:
            yield Trouble(home, Denied, "Read-only", lambda: remount(disk, "ro"), lambda: remount(disk, "rw"))


pytestmark = [
    pytest.mark.filterwarnings("ignore:The history of the run:holdfast.errors.SaveWarning"),
    pytest.mark.filterwarnings("ignore:Old checkpoints could not be deleted:holdfast.errors.SaveWarning"),
]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short pauses between the tries of a keeper, and between the lines of a pause."""
    monkeypatch.setattr(attempt, "KeeperConfig", partial(KeeperConfig, retry_s=0.01))
    monkeypatch.setattr(attempt, "_PAUSE_LINE_S", 0.05)


def begin(trouble: Trouble, failed_saves: str, patience: str = "1h", **options: Any) -> holdfast.Checkpointer:
    """Return a Checkpointer after its first save. Its home fails from then on."""
    ckpt = make_checkpointer(
        trouble.home,
        {"x": torch.ones(1)},
        limits=holdfast.Limits(failed_saves=failed_saves, patience=patience),
        **options,
    )
    ckpt.save(1).wait_durable(SOON_S)
    trouble.begin()
    return ckpt


def test_each_failed_save_is_a_warning_that_the_job_counts(
    trouble: Trouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default, and the same for every cause."""
    monkeypatch.setenv(PROGRESS, str(tmp_path / "progress"))
    with begin(trouble, "warn") as ckpt:
        assert isinstance(ckpt.save(2).exception(SOON_S), trouble.error)
        for step in (3, 4):
            with pytest.warns(SaveWarning, match=trouble.text):
                save = ckpt.save(step)
            assert isinstance(save.exception(SOON_S), trouble.error)
        trouble.end()
        with pytest.warns(SaveWarning) as warned:
            ckpt.save(5).wait_durable(SOON_S)
        assert any(trouble.text in str(one.message) for one in warned)
    assert steps_kept(trouble.home) == [1, 5]
    assert len(read_progress(tmp_path / "progress").failed_saves) == 3


def test_the_first_failed_save_is_an_error(trouble: Trouble) -> None:
    with begin(trouble, "raise") as ckpt:
        assert isinstance(ckpt.save(2).exception(SOON_S), trouble.error)
        with pytest.raises(trouble.error, match=trouble.text):
            ckpt.save(3)
        trouble.end()
        ckpt.save(4).wait_durable(SOON_S)
    assert steps_kept(trouble.home) == [1, 4]


def test_training_pauses_until_the_save_is_durable(trouble: Trouble, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a line that has the cause; the pause is an event and a problem of the report."""
    lines: list[str] = []
    monkeypatch.setattr(attempt._log, "warning", lines.append)
    with begin(trouble, "pause") as ckpt:
        save = ckpt.save(2)
        wait_until(lambda: save.delay)

        def repair() -> None:
            wait_until(lambda: lines)
            trouble.end()

        repairing = threading.Thread(target=repair)
        repairing.start()
        ckpt.save(3)
        repairing.join()
        assert save.durable
    assert "training is paused for at most 1 h" in lines[0]
    assert trouble.text in lines[0]
    assert steps_kept(trouble.home) == [1, 2, 3]
    summary = read_summary(open_store(trouble.home))
    assert [(one.kind, one.step) for one in summary.problems] == [("paused", 2)]


def test_a_notice_ends_a_pause_at_once(
    away: Trouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save that training has come to is begun, and the end waits until it is durable."""

    def notify(line: str) -> None:
        if "training is paused" in line:
            (tmp_path / "notice").touch()

    monkeypatch.setattr(attempt._log, "warning", notify)
    preemption = holdfast.Preemption(f"file:{tmp_path / 'notice'}", signals=False)
    ckpt = begin(away, "pause", "100s", watches=[preemption])
    save = ckpt.save(2)
    ckpt.save(3)
    assert not save.durable
    ckpt.should_save(3)
    assert ckpt.preempted
    away.end()
    with pytest.raises(Preempted):
        ckpt.stop(3)
    assert steps_kept(away.home)[-1] == 3


def test_a_failed_save_is_counted_before_another_one_or_a_wait(
    away: Trouble, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PROGRESS, str(tmp_path / "progress"))
    ckpt = begin(away, "warn")
    ckpt.save(2).exception(SOON_S)
    ckpt.should_save(3)
    assert len(read_progress(tmp_path / "progress").failed_saves) == 1
    away.end()
    with pytest.warns(SaveWarning, match="vanished"):
        ckpt.save(3).wait_durable(SOON_S)
    ckpt.close()


@pytest.mark.ranks
def test_a_notice_to_one_rank_ends_the_pause_of_all(tmp_path: Path) -> None:
    """The disk of rank 1 fails, and rank 0, whose files are safe, is notified while it waits for it."""
    found = ranks.run_ranks(2, ranks.pause_for_one, tmp_path, is_local=True, notified=0)
    assert found == [["durable", 75], ["staged", 75]], found
    assert steps_kept(tmp_path / "home")[-1] > 3


@pytest.mark.ranks
@pytest.mark.parametrize("is_local", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_all_ranks_pause_for_the_disk_of_one(tmp_path: Path, is_local: bool) -> None:
    found = ranks.run_ranks(2, ranks.pause_for_one, tmp_path, is_local=is_local, notified=None)
    assert found == [["durable"]] * 2, found
    assert steps_kept(tmp_path / "home")[-1] == 3


def test_a_pause_ends_with_the_error_at_its_limit(away: Trouble) -> None:
    with begin(away, "pause", "0.1s") as ckpt:
        ckpt.save(2)
        with pytest.raises(RetryLater, match="vanished"):
            ckpt.save(3)
        away.end()
        ckpt.save(4).wait_durable(SOON_S)
    assert steps_kept(away.home) == [1, 4]


def test_home_behind_a_local_folder_may_fail_for_as_long_whatever_the_cause(
    trouble: Trouble, tmp_path: Path
) -> None:
    options = {"local": tmp_path / "near", "limits": holdfast.Limits(patience="0.1s")}
    ckpt = make_checkpointer(trouble.home, {"x": torch.ones(1)}, **options)
    ckpt.save(1)
    ckpt.wait(SOON_S)
    trouble.begin()
    ckpt.save(2).wait_durable(SOON_S)
    wait_until(lambda: keeper_of(ckpt).home_lost is not None)
    with pytest.warns(SaveWarning, match="Home cannot be reached"), pytest.raises(trouble.error):
        ckpt.save(3)
    trouble.end()
    with contextlib.suppress(HoldfastError):
        ckpt.close()
    assert steps_kept(tmp_path / "near") == [1, 2]


def test_a_refused_save_is_a_warning_too(tmp_path: Path) -> None:
    """A file is in the way of step 2, which no other try can change."""
    home = tmp_path / "home"
    with make_checkpointer(home, {"x": torch.ones(1)}) as ckpt:
        ckpt.save(1).wait_durable(SOON_S)
        (home / "step-00000002").write_text("in the way")
        assert isinstance(ckpt.save(2).exception(SOON_S), InvalidInput)
        with pytest.warns(SaveWarning, match="step-00000002"):
            ckpt.save(3).wait_durable(SOON_S)
    assert steps_kept(home) == [1, 3]


def use_up_files(disk: Path, *, but: int) -> list[Path]:
    """Leave a number of files that the disk may still hold."""
    made = [disk / f"ballast-{i}" for i in range(os.statvfs(disk).f_ffree - but)]
    for path in made:
        path.touch()
    return made


@pytest.mark.slow
@pytest.mark.parametrize("failed_saves", ["warn", "pause"])
def test_a_disk_that_fills_between_part_and_manifest_is_named_within_seconds(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], failed_saves: str
) -> None:
    """Nothing was printed for ten minutes, and the error of the wait had no cause."""
    limits = holdfast.Limits(failed_saves=failed_saves)
    with (
        small_disk(tmp_path, "4m,nr_inodes=100") as disk,
        make_checkpointer(disk / "home", {"x": torch.ones(1)}, keep=100, limits=limits) as ckpt,
    ):
        ckpt.save(1).wait_durable(SOON_S)
        before = os.statvfs(disk).f_ffree
        ckpt.save(2).wait_durable(SOON_S)
        ballast = use_up_files(disk, but=before - os.statvfs(disk).f_ffree)  # a link takes one for a moment
        save, said = ckpt.save(3), ""

        def read_until(text: str) -> None:
            def is_shown() -> bool:
                nonlocal said
                said += capfd.readouterr().err
                return text in said

            wait_until(is_shown)

        read_until("step 3 is not durable yet")
        assert "No space left on device" in said
        assert (disk / "home" / names.part(3, 1, 0)).exists()
        assert steps_kept(disk / "home") == [1, 2]
        with pytest.raises(RetryLater, match=r"not durable after 0\.1 s\..*No space left on device"):
            save.wait_durable(0.1)

        def repair() -> None:
            if failed_saves == "pause":
                read_until("training is paused")
            for path in ballast:
                path.unlink()

        with ThreadPoolExecutor() as pool:
            repairing = pool.submit(repair)
            if failed_saves == "warn":
                repairing.result()
                save.wait_durable(SOON_S)
            ckpt.save(4).wait_durable(SOON_S)
        assert save.durable
        assert steps_kept(disk / "home") == [1, 2, 3, 4]


def test_close_after_a_conflict_does_not_wait_for_the_memory_that_the_keeper_keeps(tmp_path: Path) -> None:
    options: dict[str, Any] = {"local": tmp_path / "local", "memory": holdfast.Memory(keep_for="1h")}
    old = make_checkpointer(tmp_path / "home", {"x": torch.ones(3)}, **options)
    old.restore()
    old.save(1).wait_durable()
    keeper = keeper_of(old)
    try:
        new = {"x": torch.zeros(3)}
        with make_checkpointer(tmp_path / "home", new, take_over=True, **options) as ckpt:
            ckpt.restore()
            ckpt.save(2)
        with pytest.raises(Conflict):
            old.save(3).wait_durable(600)
        with contextlib.suppress(Conflict):
            old.close()
        assert Path(f"/proc/{keeper.pid}").exists()
    finally:
        os.kill(keeper.pid, signal.SIGKILL)
        keeper.wait_ended(60)
