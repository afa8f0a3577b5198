"""Notices in files: written atomically, valid with any contents, seen by every watcher."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.watch.preemption.notice import Notice, read_notice, write_notice

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
