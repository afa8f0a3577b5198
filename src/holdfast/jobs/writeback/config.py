"""Uploader configuration, sent once at startup."""

from __future__ import annotations

import re
from fnmatch import fnmatch

from msgspec import Struct

from holdfast.errors import InvalidInput
from holdfast.jobs.writeback.journal import FOLDER

EXCLUDED = ("*.tmp", "*.partial", "*.part", ".nfs*", ".unfinished-*", "tmp-checkpoint-*")
"""Names that conventionally mean unfinished files. These are uploaded once they are renamed."""
OPEN_LIMIT_S = 600.0  # limit of waiting for a file that was reopened before it was uploaded
_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")


class UploaderConfig(Struct, frozen=True):
    """Configuration of an uploader. `mount` describes the fields without a comment."""

    directory: str
    place: str
    fetch: bool = True
    fetch_bytes: int | None = None
    exclude: tuple[str, ...] = EXCLUDED
    owner: str = ""
    attempt: int = 0
    is_shared: bool = False
    copy_bytes: int = 4 << 20
    kept_bytes: int = 16 << 30
    until_signal: bool = False  # the uploader has no holders, and exits on a signal

    def __post_init__(self) -> None:
        owner, attempt = self.owner, self.attempt
        if owner and not _OWNER.fullmatch(owner):
            raise InvalidInput(f"owner may only contain letters, digits, '.', '_' and '-', got {owner!r}.")
        if bool(owner) != (attempt > 0):
            found = f"{owner!r} and {attempt}"
            raise InvalidInput(f"Give both owner and attempt (from 1), or neither; got {found}.")
        if self.copy_bytes < 0 or self.kept_bytes < 0:
            raise InvalidInput("copy_bytes and kept_bytes must not be negative.")

    def is_excluded(self, name: str) -> bool:
        """Return True if a name in the directory is not uploaded."""
        return is_excluded(name, self.exclude)


def is_excluded(name: str, exclude: tuple[str, ...]) -> bool:
    """Return True if a name matches a glob or is in Holdfast's own folder."""
    parts = name.split("/")
    return parts[0] == FOLDER or any(fnmatch(part, glob) for part in parts for glob in exclude)
