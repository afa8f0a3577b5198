"""Notices in files: written atomically, valid with any contents, seen by every watcher."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.watch.preemption import Notice, NoticeWatcher
from holdfast.watch.preemption.notice import read_notice, write_notice

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


def test_a_file_is_seen_when_it_appears(tmp_path: Path) -> None:
    notices = NoticeWatcher(f"file:{tmp_path / 'notice'}")
    assert notices.reason is None
    write_notice(tmp_path / "notice", NOTICE)
    assert notices.reason == "holdfast preempt: again"
    assert notices.notice == NOTICE


def test_a_rebalance_notice_is_returned_once_and_ends_nothing(tmp_path: Path) -> None:
    notices = NoticeWatcher(f"file:{tmp_path / 'notice'}")
    write_notice(tmp_path / "notice", Notice("somebody", is_final=False))
    assert notices.reason is None
    assert notices.pop_rebalance() == Notice("somebody", is_final=False)
    assert notices.reason is None
    assert notices.pop_rebalance() is None
