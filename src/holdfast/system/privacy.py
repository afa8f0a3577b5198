"""Private folders: no other user can read, change or replace what is in them."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from holdfast.errors import Unsupported

_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_made: dict[Path, Path] = {}  # folders that this process made in place of taken ones


def is_private(folder: Path) -> bool:
    """Return True for a folder, not a link, that only this user may enter."""
    return _is_own(folder, closed=_OTHERS)


def is_own(folder: Path) -> bool:
    """Return True for a folder of this user. A link is not one."""
    return _is_own(folder, closed=0)


def is_unshared(folder: Path) -> bool:
    """Return True for a folder of this user that no other user may write to."""
    return _is_own(folder, closed=stat.S_IWGRP | stat.S_IWOTH)


def _is_own(folder: Path, *, closed: int) -> bool:
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & closed


def make_private(folder: Path) -> bool:
    """Make a folder that only this user may enter; return whether it is one now.

    A folder that is there already is taken only if it is private: another user may have made it first.
    """
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        pass
    except OSError:
        return False
    return is_private(folder)


def private_folder(wanted: Path) -> Path:
    """Return a private folder: the wanted one, or, if another user has taken that name, a new one.

    The new one has a random name beside it, and is the same for the whole process.
    """
    if make_private(wanted):
        return wanted
    known = _made.get(wanted)
    if known is None or not is_private(known):
        try:
            known = Path(tempfile.mkdtemp(prefix=f"{wanted.name}-", dir=wanted.parent))
        except OSError as error:
            raise Unsupported(
                f"{wanted} is not a private folder of yours, and none could be made beside it: "
                f"{error.strerror}. Set TMPDIR to a folder of yours."
            ) from error
        _made[wanted] = known
    return known
