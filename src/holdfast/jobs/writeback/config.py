"""Uploader configuration, sent once at startup."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from fnmatch import fnmatch

from holdfast.errors import InvalidInput
from holdfast.jobs.writeback.journal import FOLDER
from holdfast.jobs.writeback.ownership import check_owner
from holdfast.system.documents import decode_dataclass

EXCLUDED = ("*.tmp", "*.partial", "*.part", ".nfs*", ".unfinished-*", "tmp-checkpoint-*")
"""Names that conventionally mean unfinished files. These are uploaded once they are renamed."""


@dataclass(frozen=True, slots=True)
class UploaderConfig:
    """Configuration of an uploader.

    Args:
        directory: absolute path of the write-back directory.
        place: URL or path that its files are uploaded to.
        fetch: True to download the place's files at the start.
        fetch_bytes: limit for the download. None: as much as the disk has room for.
        exclude: globs. A file is not uploaded if any part of its path matches.
        owner: owner of the mount, such as a job. Without one, other mounts cannot take over.
        attempt: attempt of the owner, from 1. A newer one takes over, the same one writes side by side.
        is_shared: True if other directories are mounted for the same attempts of the owner.
        copy_bytes: files up to this size are kept as copies, so that every version is uploaded.
        kept_bytes: limit for versions whose files have been deleted or replaced.
        open_limit_s: limit for waiting for a file that was reopened before it was uploaded.
        linger_s: limit for waiting for open files after the last holder is gone.
        give_up_s: limit for retrying a failing place after the last holder is gone.
        until_signal: True if the uploader has no holders and exits on a signal.
    """

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
    open_limit_s: float = 600.0
    linger_s: float = 60.0
    give_up_s: float = 3600.0
    until_signal: bool = False

    def __post_init__(self) -> None:
        check_owner(self.owner, self.attempt)
        if self.copy_bytes < 0 or self.kept_bytes < 0:
            raise InvalidInput("copy_bytes and kept_bytes must not be negative.")

    def is_excluded(self, name: str) -> bool:
        """Return True if a name in the directory is not uploaded."""
        return is_excluded(name, self.exclude)

    def text(self) -> str:
        """Return the configuration as one line for `parse_config`."""
        return json.dumps(asdict(self))


def is_excluded(name: str, exclude: tuple[str, ...]) -> bool:
    """Return True if a name matches a glob or is in Holdfast's own folder."""
    parts = name.split("/")
    return parts[0] == FOLDER or any(fnmatch(part, glob) for part in parts for glob in exclude)


def parse_config(text: str) -> UploaderConfig:
    """Parse a configuration."""
    return decode_dataclass(UploaderConfig, text, "the config of an uploader", any_text=True)
