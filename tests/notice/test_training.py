"""Notices in files, and in a training loop: a final one saves and ends it, a rebalance notice only saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.watch.preemption.notice import Notice, read_notice, write_notice


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


NOTICE = Notice("holdfast preempt", "again", 1782181800.0)


def test_a_written_notice_is_read_back(tmp_path: Path) -> None:
    assert read_notice(tmp_path / "notice") is None
    write_notice(tmp_path / "notice", NOTICE)
    assert read_notice(tmp_path / "notice") == NOTICE
    assert [path.name for path in tmp_path.iterdir()] == ["notice"]


@pytest.mark.parametrize("text", ["", "the end is near\n", "[]", '{"deadline_unix_s": "x"}', "\x00\xff"])
def test_any_file_is_a_notice(tmp_path: Path, text: str) -> None:
    (tmp_path / "notice").write_text(text, encoding="latin-1")
    notice = read_notice(tmp_path / "notice")
    assert notice is not None
    assert notice.is_final
    assert notice.reason
