"""Places of a run: its home, and the files beside it, in a local folder or on a remote file system."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs
from fsspec.utils import get_protocol

from holdfast.checkpoint.format.hashes import digest
from holdfast.checkpoint.store.address import SCHEMES
from holdfast.system.callsite import warn
from holdfast.system.linux.partial_files import temporary_folder

_SUFFIX = ".holdfast"


def is_local(path: str) -> bool:
    """Return True for a path, or a URL of this machine's file system."""
    return get_protocol(path) in ("file", "local")


def absolute(path: str | os.PathLike[str]) -> str:
    """Return an absolute path without a protocol, or a URL as it is."""
    text = os.fspath(path)
    if not is_local(text):
        return text
    return str(Path(text.removeprefix("file://").removeprefix("local://")).absolute())


def folder_of(path: str) -> str:
    """Return the folder of an absolute path or URL."""
    return path.rpartition("/")[0]


def is_inside(path: str, folder: Path) -> bool:
    """Return True if a path is below a folder once links are resolved."""
    try:
        return is_local(path) and Path(path).parent.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # a loop of links, or a name that is too long
        return False


def home_beside(folder: str | os.PathLike[str]) -> str:
    """Return the default home of the checkpoints in a folder: its name with ".holdfast", beside it.

    For a file system that cannot hold a home, it is a folder of this user on this machine.
    """
    place = absolute(folder).rstrip("/")
    if is_local(place) or get_protocol(place) in SCHEMES:
        return f"{place}{_SUFFIX}"
    parent = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser().absolute()
    home = parent / "holdfast" / "lightning" / f"{digest(place.encode())}{_SUFFIX}"
    warn(
        f"{place} is on a file system that cannot hold a home, which every save needs first. It is {home} on "
        'this machine: another one cannot continue an interrupted save. Choose one with home="...".',
        UserWarning,
    )
    return str(home)


@dataclass(frozen=True, slots=True)
class HomePlace:
    """Home of a run, and its files."""

    home: str
    storage_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        """Folder that contains the home, with a slash at its end."""
        return folder_of(self.home).rstrip("/") + "/"

    def relative(self, path: str) -> str:
        """Return a path relative to the home's folder, if it is in there."""
        return path.removeprefix(self.folder)

    def absolute(self, path: str) -> str:
        """Return the path that `relative` was called with."""
        return path if path.startswith("/") or "://" in path else self.folder + path

    def exists(self, path: str) -> bool:
        """Return True if a file exists."""
        if is_local(path):
            return Path(path).is_file()
        fs, name = url_to_fs(path, **self.storage_options)
        return bool(fs.isfile(name))

    def write(self, path: str, write: Callable[[Path], None]) -> None:
        """Write a file, which appears when it is complete."""
        if is_local(path):
            write(Path(path))
            return
        fs, name = url_to_fs(path, **self.storage_options)
        with temporary_folder("lightning") as folder:
            local = Path(folder) / "file.ckpt"
            write(local)
            fs.makedirs(os.path.dirname(name), exist_ok=True)  # noqa: PTH120 - a URL is not a path
            fs.put_file(str(local), name)
