"""Notices in files: written whole, read whatever they hold, seen by whoever watches."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.notice import Notices, Word
from holdfast.notice.file import read_notice, write_notice

WORD = Word("holdfast preempt", "again", 1782181800.0)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    assert read_notice(tmp_path / "notice") is None
    write_notice(tmp_path / "notice", WORD)
    assert read_notice(tmp_path / "notice") == WORD
    assert [path.name for path in tmp_path.iterdir()] == ["notice"]


@pytest.mark.parametrize("text", ["", "the end is near\n", "[]", '{"deadline_unix_s": "x"}', "\x00\xff"])
def test_any_file_is_a_notice(tmp_path: Path, text: str) -> None:
    (tmp_path / "notice").write_text(text, encoding="latin-1")
    word = read_notice(tmp_path / "notice")
    assert word is not None
    assert word.is_final
    assert word.reason


def test_a_file_is_seen_when_it_appears(tmp_path: Path) -> None:
    notices = Notices(f"file:{tmp_path / 'notice'}")
    assert notices.reason is None
    write_notice(tmp_path / "notice", WORD)
    assert notices.reason == "holdfast preempt: again"
    assert notices.word == WORD


def test_advice_is_told_once_and_ends_nothing(tmp_path: Path) -> None:
    notices = Notices(f"file:{tmp_path / 'notice'}")
    write_notice(tmp_path / "notice", Word("somebody", is_final=False))
    assert notices.reason is None
    assert notices.take_advice() == Word("somebody", is_final=False)
    assert notices.reason is None
    assert notices.take_advice() is None
