"""Output files and folders that appear when they are complete; they replace others on request."""

from __future__ import annotations

import contextlib
import fnmatch
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from holdfast.errors import Conflict, HoldfastError, InvalidInput, RetryLater
from holdfast.system.linux.partial_files import partial_file


@contextlib.contextmanager
def atomic_file(path: Path, *, overwrite: bool) -> Iterator[Path]:
    """Yield the path of a new file to write to. It is renamed to `path` at the end, durably.

    Its name until then is random and new, so that a link that another user has left is never followed.

    Args:
        overwrite: replace an older one.
    """
    path = path.absolute()
    if path.is_dir():
        raise InvalidInput(f"{path} is a folder; give the name of a file.", key=str(path))
    if path.exists() and not overwrite:
        raise _exists_error(path)
    check_parent(path)
    with _translated_errors(path):
        with partial_file(path, mode=0o666) as partial:
            yield partial
            _sync(partial)
            partial.replace(path)
        _sync(path.parent)


@contextlib.contextmanager
def atomic_folder(path: Path, patterns: Sequence[str], *, overwrite: bool) -> Iterator[Path]:
    """Yield a folder to write into. Its files are moved to `path` at the end, durably.

    Files in `path` that match none of the patterns are left alone: a tokenizer, a model card.

    Args:
        path: the folder, which may exist.
        patterns: globs of the files of such an export. The last one matches the file that makes it complete:
            that of an older export is removed first, and that of the new one is moved last.
        overwrite: replace an older export.
    """
    path = path.absolute()
    if path.exists() and not path.is_dir():
        raise InvalidInput(f"{path} is a file; give the name of a folder.", key=str(path))
    there = _matching(path, patterns) if path.is_dir() else []
    if there and not overwrite:
        raise _exists_error(there[0])
    check_parent(path)
    with _translated_errors(path):
        with partial_file(path, mode=0o777, is_folder=True) as partial:
            yield partial
            for file in partial.iterdir():
                _sync(file)
            _sync(partial)
            if not path.exists():
                partial.rename(path)
            else:
                _move_in(partial, path, patterns)
        _sync(path)
        _sync(path.parent)


def _move_in(partial: Path, path: Path, patterns: Sequence[str]) -> None:
    for old in reversed(_matching(path, patterns)):
        old.unlink()
    _sync(path)  # after a power cut the old completing file must not be among new files
    for new in _matching(partial, patterns):
        new.rename(path / new.name)


def _matching(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """Return the files that match, in the order of the first pattern that they match."""
    found = []
    for file in sorted(folder.iterdir()):
        order = next(
            (i for i, pattern in enumerate(patterns) if fnmatch.fnmatchcase(file.name, pattern)), None
        )
        if order is not None:
            found.append((order, file))
    return [file for _, file in sorted(found)]


def check_parent(path: Path) -> None:
    """Check that the parent folder of a new file or folder exists."""
    parent = path.absolute().parent
    if not parent.is_dir():
        raise InvalidInput(f"{parent} does not exist; make the folder first.", key=str(path))


def _exists_error(path: Path) -> Conflict:
    message = f"{path} exists; it was not changed. To replace it, pass overwrite=True (--overwrite)."
    return Conflict(message, key=str(path))


@contextlib.contextmanager
def _translated_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except HoldfastError:
        raise
    except OSError as error:
        raise RetryLater(
            f"{path} could not be written: {error.strerror}. What was written of it has been removed.",
            key=str(path),
        ) from error


def _sync(path: Path) -> None:
    flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECTORY if path.is_dir() else 0)
    fd = os.open(path, flags)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
