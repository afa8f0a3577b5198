"""Free space for the next save of a home in a folder, and its size."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from holdfast.checkpoint.home.listing import candidates, list_home
from holdfast.checkpoint.store.factory import open_store
from holdfast.system.units import format_bytes


@dataclass(frozen=True, slots=True)
class SaveSpace:
    """Space of the next save."""

    home: str
    needed_bytes: int  # size of the newest checkpoint, without frozen tensors, which are linked
    free_bytes: int  # for this user, on the file system of the home

    @property
    def trouble(self) -> str:
        """Why the next save does not fit; empty if it does."""
        if self.free_bytes >= self.needed_bytes:
            return ""
        return (
            f"the next save does not fit: the newest checkpoint has {format_bytes(self.needed_bytes)}, and "
            f"{format_bytes(self.free_bytes)} are free"
        )


def is_folder(home: str) -> bool:
    """Return True for a home that is a folder which exists."""
    return "://" not in home and Path(home).is_dir()


def free_bytes(folder: str) -> int:
    """Return the free bytes of a folder's file system for this user."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def measure_space(home: str) -> SaveSpace | None:
    """Return the space of the next save. None: the home is not a folder, or has no checkpoint."""
    if not is_folder(home):
        return None
    listing = list_home(open_store(home))
    newest = next(iter(candidates(listing)), None)
    if newest is None:
        return None
    saved = listing.saved[newest]
    needed = sum(saved.data.values()) + sum(saved.parts.values()) + (saved.manifest_bytes or 0)
    return SaveSpace(home, needed, free_bytes(home))
