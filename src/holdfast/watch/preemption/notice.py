"""Notice of a preemption, its file, and the interface of the sources that are polled for it."""

from __future__ import annotations

import datetime
import json
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from msgspec import Struct

from holdfast.errors import Corrupt
from holdfast.system.documents import decode_as, read_as, to_plain
from holdfast.system.linux.files import write_atomic


class Notice(Struct, frozen=True):
    """Notice that this machine will be reclaimed, or may be."""

    source: str  # such as "SIGTERM", "aws", "holdfast preempt"
    detail: str = ""
    deadline_unix_s: float | None = None  # the machine's end, if the source gives it
    is_final: bool = True  # False: the machine may be reclaimed soon, so save once and continue

    @property
    def reason(self) -> str:
        """Source and detail in a few words."""
        return f"{self.source}: {self.detail}" if self.detail else self.source


def parse_time(text: str) -> float | None:
    """Parse a time in ISO 8601 or RFC 1123 format into Unix time. Return None if it is neither."""
    text = text.strip()
    for form in ("%Y-%m-%dT%H:%M:%SZ", "%Y-%m-%dT%H:%M:%S.%fZ", "%a, %d %b %Y %H:%M:%S GMT"):
        try:
            moment = datetime.datetime.strptime(text, form)
        except ValueError:
            continue
        return moment.replace(tzinfo=datetime.timezone.utc).timestamp()
    return None


_MAX_FILE_BYTES = 1 << 16


def write_notice(path: Path, notice: Notice) -> None:
    """Write a notice to a file that training processes watch."""
    write_atomic(path, json.dumps(to_plain(notice)), is_durable=False)


def read_notice(path: Path) -> Notice | None:
    """Return the notice in a file, or None if the file does not exist.

    Any other contents are a notice too, so that `touch PATH` is enough.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_FILE_BYTES).decode("utf-8", "replace").strip()
    except OSError:
        return None
    try:
        members = decode_as(dict[str, Any], text, str(path), any_text=True)
        known = {name: value for name, value in members.items() if value is not None}
        return read_as(Notice, known | {"source": known.get("source") or "file"}, str(path))
    except Corrupt:
        return Notice("file", text.splitlines()[0][:200] if text else str(path))


class Unreachable(Exception):
    """Failure of a service to answer correctly, which may pass. Not raised outside of this folder."""


class Cloud(ABC):
    """Source of notices about this machine, of a cloud or a scheduler."""

    name: str  # the name that users write
    pause_s: float
    """Pause between two polls. 0 if the service itself holds a request until its response changes."""

    save_s: float = 0.0
    """Measured time of one step and one durable save, for sources that choose the moment themselves."""

    @abstractmethod
    def poll(self) -> Notice | None:
        """Return the notice for this machine, or None. Raises Unreachable if the service does not answer.

        Blocks: for one request, at most for about its `timeout_s`.
        """
