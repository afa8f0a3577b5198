"""Errors of a local store: those of the operating system translated into Holdfast's."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from holdfast.checkpoint.store.lookup import NotRegular
from holdfast.errors import Conflict, Corrupt, Denied, InvalidInput, NotFound, RetryLater, Unsupported

_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_IN_THE_WAY = (errno.ENOTDIR, errno.EISDIR)
_LINK = (
    "it is a symbolic link or below one, and links inside a home are not followed. If you made the link "
    "yourself, replace it with the file or folder."
)
NOT_REGULAR = "it is not a regular file."


@contextmanager
def translating(root: Path, verb: str, name: str, num_bytes: int | None = None) -> Iterator[None]:
    """Translate errors of the operating system in the block into ours.

    Args:
        root: of the store.
        verb: failed action, for messages.
        name: object or folder.
        num_bytes: size of what was to be written or read, if any.
    """
    try:
        yield
    except (Conflict, Corrupt, Denied, InvalidInput, NotFound, RetryLater, Unsupported):
        raise
    except OSError as error:
        path = root / name
        if is_foreign(error):
            raise refused(f"Cannot {verb} {path}", name, why_foreign(error)) from None
        if error.errno in _IN_THE_WAY:
            raise InvalidInput(
                f"Cannot {verb} {path}: the name belongs to a directory, or a part of the path is a file "
                f"({error.strerror}). Nothing was changed.",
                key=name,
            ) from error
        kind = Denied if error.errno in _DENIED else RetryLater
        raise kind(_failure(verb, path, error, num_bytes), key=name) from error


def _failure(verb: str, path: Path, error: OSError, num_bytes: int | None) -> str:
    amount = "" if num_bytes is None else f" ({num_bytes} bytes)"
    space = ""
    if error.errno in _FULL:
        space = f" {_free_space(path)} Free some space, or keep fewer checkpoints."
    if error.errno in _DENIED:
        space = " Change its permissions, or use a place that this user may write to."
    changed = " Earlier data is unchanged." if verb == "write" else ""
    return f"Could not {verb} {path}{amount}: {error.strerror} (errno {error.errno}).{space}{changed}"


def _free_space(path: Path) -> str:
    for place in path.parents:
        with suppress(OSError):
            info = os.statvfs(place)
            return f"Its file system has {info.f_bavail * info.f_frsize} bytes free (a quota may allow less)."
    return "Its free space is unknown."


def is_foreign(error: OSError) -> bool:
    """Return True if the error is about a file that a store did not create."""
    return isinstance(error, NotRegular) or error.errno == errno.ELOOP


def why_foreign(error: OSError) -> str:
    """Return why a store does not use such a file."""
    return NOT_REGULAR if isinstance(error, NotRegular) else _LINK


def refused(cannot: str, name: str, why: str) -> InvalidInput:
    """Return the error for a file that a store did not create."""
    return InvalidInput(f"{cannot}: {why} Nothing was changed.", key=name)
