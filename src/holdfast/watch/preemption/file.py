"""Preemption notice in a file, which is written atomically."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from holdfast.errors import Corrupt
from holdfast.system.documents import decode_object
from holdfast.system.linux.files import write_atomic
from holdfast.watch.preemption.notice import Notice

_MAX_BYTES = 1 << 16


def write_notice(path: Path, notice: Notice) -> None:
    """Write a notice to a file that training processes watch.

    Raises:
        OSError: the file cannot be written.
    """
    write_atomic(path, json.dumps(asdict(notice)), is_durable=False)


def read_notice(path: Path) -> Notice | None:
    """Return the notice in a file, or None if the file does not exist.

    Any other contents are a notice too, so that `touch PATH` is enough.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES).decode("utf-8", "replace").strip()
    except OSError:
        return None
    try:
        document = decode_object(text, str(path), any_text=True)
        return Notice(
            (document.text("source") if "source" in document else "") or "file",
            document.text("detail") if "detail" in document else "",
            document.number("deadline_unix_s") if "deadline_unix_s" in document else None,
            is_final=document.flag("is_final") if "is_final" in document else True,
        )
    except Corrupt:
        return Notice("file", text.splitlines()[0][:200] if text else str(path))
