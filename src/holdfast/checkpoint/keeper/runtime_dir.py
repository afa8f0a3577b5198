"""Private folder on this host for the lock files and sockets of a home's keepers."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from holdfast.errors import Denied, RetryLater, Unsupported
from holdfast.system.privacy import is_own, is_private, is_unshared, make_private

_VARIABLE = "HOLDFAST_RUNTIME_DIR"


def runtime_dir(home: str) -> Path:
    """Return the runtime folder of a home, after creating it if necessary.

    It is below $HOLDFAST_RUNTIME_DIR, or below the first of a few fixed places that does not belong to
    another user. $TMPDIR and $XDG_RUNTIME_DIR are not used: all attempts of a run must choose the same
    folder, and those may differ between a login, a scheduler and a service.
    """
    name = _folder_name(home)
    for place in _places():
        if _is_usable(place) and make_private(place / name):
            return place / name
    first = _places()[0]
    with contextlib.suppress(FileExistsError), runtime_dir_errors(first):
        if not os.path.lexists(first) or is_own(first):
            (first / name).mkdir(mode=0o700, parents=True)
    tried = ", ".join(map(str, _places()))
    raise Unsupported(
        f"None of {tried} is, or can be made, a folder that only you can change. Another user may have "
        f"created it first. Set {_VARIABLE} to a folder of yours on this host."
    )


def runtime_dirs(home: str) -> Iterator[Path]:
    """Yield all existing runtime folders of a home, as attempts may have chosen different places."""
    for place in _places():
        folder = place / _folder_name(home)
        if is_own(place) and is_private(folder):
            yield folder


@contextlib.contextmanager
def runtime_dir_errors(folder: Path) -> Iterator[None]:
    """Raise errors of the runtime folder as errors of Holdfast."""
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        kind = Denied if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS) else RetryLater
        raise kind(
            f"Cannot use {folder} for the lock files of keepers: {error.strerror}. Nothing was saved. Free "
            f"space or set permissions there, or set {_VARIABLE} to another folder on this host."
        ) from error


def _places() -> tuple[Path, ...]:
    chosen = os.environ.get(_VARIABLE)
    if chosen:
        return (Path(os.path.realpath(chosen)),)
    user = os.geteuid()
    return (
        Path(f"/tmp/holdfast-{user}"),
        Path(f"/run/user/{user}/holdfast"),
        Path(f"/dev/shm/holdfast-{user}"),
        Path(f"/var/tmp/holdfast-{user}"),
    )


def _is_usable(place: Path) -> bool:
    """Create a folder if necessary. Return True if it is this user's, and no other user can write to it."""
    with contextlib.suppress(OSError):
        place.mkdir(mode=0o700, parents=_VARIABLE in os.environ, exist_ok=True)
    return is_unshared(place)


def _folder_name(home: str) -> str:
    return hashlib.sha256(os.fsencode(home)).hexdigest()[:16]
