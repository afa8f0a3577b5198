"""Notices in a file: whoever knows that the machine goes writes it, whole or not at all."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path

from holdfast.documents import decode_object
from holdfast.errors import Corrupt
from holdfast.notice.word import Word

_MAX_BYTES = 1 << 16


def write_notice(path: Path, word: Word) -> None:
    """Put a notice where trainings look for it.

    Raises:
        OSError: it cannot be written there.
    """
    fd, name = tempfile.mkstemp(prefix=".notice-", dir=path.parent)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        json.dump(asdict(word), file)
    os.replace(name, path)  # noqa: PTH105 - whoever reads sees all of it or nothing


def read_notice(path: Path) -> Word | None:
    """The notice in a file; None if there is no such file.

    A file that is no document of `write_notice` is a notice too: `touch PATH` says enough.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES).decode("utf-8", "replace").strip()
    except OSError:
        return None
    try:
        told = decode_object(text, str(path), any_text=True)
        return Word(
            (told.text("source") if "source" in told else "") or "file",
            told.text("detail") if "detail" in told else "",
            told.number("deadline_unix_s") if "deadline_unix_s" in told else None,
            is_final=told.flag("is_final") if "is_final" in told else True,
        )
    except Corrupt:
        return Word("file", text.splitlines()[0][:200] if text else str(path))
