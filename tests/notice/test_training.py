"""Notices in a training loop: those in files, a Slurm job's time limit, and a deadline."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import PREEMPTED_STATUS, InvalidInput
from holdfast.watch.preemption.sources import (
    Deadline,
    Notice,
    SlurmLimit,
    Unreachable,
    parse_sources,
    read_notice,
    write_notice,
)
from stage import ranks


def train(home: Path, state: dict[str, Any], path: Path, notice: Notice, *, at: int, total: int) -> None:
    """Train, and write a notice to `path` before step `at` is completed."""
    with holdfast.Checkpointer(
        home, state, every=1000, quiet=True, watches=[holdfast.Preemption(f"file:{path}", signals=False)]
    ) as ckpt:
        for step in ckpt.steps(total):
            state["seen"] = step + 1
            if step + 1 == at:
                write_notice(path, notice)


def saved_steps(home: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in home.glob("step-*"))


def test_a_notice_in_a_file_ends_the_run_with_a_durable_save(tmp_path: Path) -> None:
    state: dict[str, Any] = {"seen": 0}
    with pytest.raises(holdfast.Preempted, match="holdfast preempt") as preempted:
        train(tmp_path / "home", state, tmp_path / "notice", Notice("holdfast preempt"), at=4, total=10)
    assert preempted.value.step == 4
    assert saved_steps(tmp_path / "home") == [4]
    (tmp_path / "notice").unlink()
    state = {"seen": 0}
    train(tmp_path / "home", state, tmp_path / "notice", Notice("late"), at=99, total=10)
    assert state["seen"] == 10


def test_a_rebalance_notice_causes_one_save_and_training_continues(tmp_path: Path) -> None:
    state: dict[str, Any] = {"seen": 0}
    notice = Notice("aws", "rebalance recommendation", is_final=False)
    train(tmp_path / "home", state, tmp_path / "notice", notice, at=4, total=10)
    assert state["seen"] == 10
    first, *others = saved_steps(tmp_path / "home")
    assert first in (4, 5), "in the step of the notice, or in the next"
    assert others == [10]


def test_a_notice_in_the_last_step_lets_the_run_finish(tmp_path: Path) -> None:
    """A restart would have nothing left to do."""
    state: dict[str, Any] = {"seen": 0}
    train(tmp_path / "home", state, tmp_path / "notice", Notice("holdfast preempt"), at=10, total=10)
    assert saved_steps(tmp_path / "home") == [10]
    assert (tmp_path / "home" / "done.json").exists()


NOTICE = Notice("holdfast preempt", "again")


def test_a_written_notice_is_read_back(tmp_path: Path) -> None:
    assert read_notice(tmp_path / "notice") is None
    write_notice(tmp_path / "notice", NOTICE)
    assert read_notice(tmp_path / "notice") == NOTICE
    assert [path.name for path in tmp_path.iterdir()] == ["notice"]


@pytest.mark.parametrize("text", ["", "the end is near\n", "[]", '{"detail": 3}', "\x00\xff"])
def test_any_file_is_a_notice(tmp_path: Path, text: str) -> None:
    (tmp_path / "notice").write_text(text, encoding="latin-1")
    notice = read_notice(tmp_path / "notice")
    assert notice is not None
    assert notice.is_final
    assert notice.reason


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file whose contents squeue prints as the time left of job 7."""
    answer, program = tmp_path / "left", tmp_path / "bin" / "squeue"
    program.parent.mkdir()
    program.write_text(
        f'#!/bin/sh\necho "$SLURM_LOCALID" >> {tmp_path}/calls\n'
        f'[ "$2" = --jobs=7 ] && exec cat {answer}\nexit 1\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    return answer


def train_until_notice(rank: int, home: Path, environment: dict[str, str], *, is_alone: bool) -> list[Any]:
    """Train as a task of srun does, and return the status and the step of the end."""
    for name in [name for name in os.environ if name.startswith(("SLURM_", "HOLDFAST_", "LOCAL_"))]:
        del os.environ[name]  # the fork server may have been started in the middle of another test
    os.environ |= {**environment, "SLURM_LOCALID": str(rank)}
    if is_alone:
        torch.distributed.destroy_process_group()
        home = home.with_name(f"home-{rank}")
    try:
        with holdfast.Checkpointer(
            home, {"x": torch.zeros(1)}, every=10**9, quiet=True, watches=[holdfast.Preemption("slurm")]
        ) as ckpt:
            for _ in ckpt.steps(6000):
                time.sleep(0.01)
    except holdfast.Preempted as end:
        return [end.code, end.step]
    return ["no notice arrived", sorted(os.environ.items())]


@pytest.mark.ranks
@pytest.mark.parametrize("is_alone", [False, True])
def test_one_task_of_a_host_asks_slurm_for_all_that_train_together(
    squeue: Path, tmp_path: Path, *, is_alone: bool
) -> None:
    """Its srun sets no LOCAL_RANK. Tasks that train alone would not receive the notice of another."""
    squeue.write_text("0:00\n")
    train = functools.partial(train_until_notice, is_alone=is_alone)
    environment = {name: os.environ[name] for name in ("PATH", "SLURM_JOB_ID", "HOLDFAST_RUNTIME_DIR")}
    ended = ranks.run_ranks(3, train, tmp_path / "home", environment)
    assert [one[0] for one in ended] == [PREEMPTED_STATUS] * 3, ended
    assert is_alone or len({one[1] for one in ended}) == 1, ended
    callers = set((tmp_path / "calls").read_text().split())
    assert callers == ({"0", "1", "2"} if is_alone else {"0"})


def test_a_limit_that_slurm_changes_later_is_followed(squeue: Path) -> None:
    source = SlurmLimit()
    squeue.write_text("1-02:00:00\n")
    assert source.poll() is None
    squeue.write_text("UNLIMITED\n")
    assert source.poll() is None
    squeue.write_text("10:00\n")
    assert source.poll() is None
    squeue.write_text("0:59\n")
    notice = source.poll()
    assert notice is not None
    assert notice.is_final
    assert notice.reason.startswith("slurm: time limit in 59")


def test_a_slow_save_moves_the_notice_forward(squeue: Path) -> None:
    source = SlurmLimit()
    squeue.write_text("2:00:00\n")
    assert source.poll() is None
    squeue.write_text("15:00\n")
    assert source.poll() is None
    source.save_s = 500.0
    assert source.poll() is not None


def test_the_last_answer_counts_while_slurm_does_not_answer(
    squeue: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Unreachable, match="job 7"):
        SlurmLimit().poll()
    source = SlurmLimit()
    squeue.write_text("0:02\n")
    assert source.poll() is None, "half of a short time is for training"
    squeue.unlink()
    while source.poll() is None:
        time.sleep(0.05)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 7200))
    later = SlurmLimit()
    assert later.poll() is None


def test_auto_has_the_limit_of_the_job_it_is_in(squeue: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [cloud.name for cloud in parse_sources("auto").clouds] == ["slurm"]
    assert parse_sources("none").clouds == ()
    monkeypatch.delenv("SLURM_JOB_ID")
    assert parse_sources("auto").clouds == ()
    with pytest.raises(InvalidInput, match="SLURM_JOB_ID"):
        parse_sources("slurm")


@pytest.mark.parametrize("text", ["deadline", "deadline=soon", "deadline=-1"])
def test_a_deadline_needs_a_duration(text: str) -> None:
    with pytest.raises(InvalidInput, match="duration"):
        parse_sources(text)


def test_a_deadline_far_away_is_no_notice() -> None:
    assert Deadline(3600).poll() is None


def test_a_deadline_ends_the_run_with_a_durable_save(tmp_path: Path) -> None:
    state: dict[str, Any] = {"seen": 0}
    notices = holdfast.Preemption("deadline=500ms", signals=False)

    def train() -> None:
        with holdfast.Checkpointer(
            tmp_path / "home", state, every=10**9, quiet=True, watches=[notices]
        ) as ckpt:
            for step in ckpt.steps(10**9):
                state["seen"] = step + 1
                time.sleep(0.01)

    with pytest.raises(holdfast.Preempted, match="deadline: time is over") as preempted:
        train()
    assert preempted.value.code == 75
    assert holdfast.open(tmp_path / "home").step == preempted.value.step
