"""Which homes a user trusts to bring code: by a word, the environment, or a file of the user's own."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from holdfast.errors import InvalidInput
from holdfast.store.address import SCHEMES, parse_address

VARIABLE = "HOLDFAST_TRUST_HOMES"
"""Homes, or what their addresses begin with, separated by commas."""
_DECIDING_OPTIONS = ("endpoint_url", "account")  # with another one the same name is another place


@dataclass(frozen=True, slots=True)
class Place:
    """A home, or a folder of homes: on which server, and the parts of its path."""

    server: tuple[str, ...]
    path: tuple[str, ...]

    def covers(self, other: Place) -> bool:
        """True if the other place is this one or lies in it."""
        return self.server == other.server and other.path[: len(self.path)] == self.path


def place_of(text: str) -> Place:
    """The place that a user means by a path or URL.

    Raises:
        InvalidInput: it names none.
    """
    scheme, mark, rest = text.partition("://")
    if not text.strip():
        raise InvalidInput("An empty string is no home to be trusted.")
    if mark and scheme.lower() in SCHEMES:
        address = parse_address(text)
        options = tuple(f"{name}={address.option(name) or ''}" for name in _DECIDING_OPTIONS)
        parts = tuple(address.prefix.split("/")) if address.prefix else ()
        return Place((address.protocol, address.bucket, *options), parts)
    if mark and scheme.lower() != "file":
        raise InvalidInput(f"{text!r} is no place for checkpoints, so it cannot be trusted.")
    path = "/" + unquote(rest.partition("/")[2]) if mark else text
    try:
        return Place(("file",), PurePosixPath(Path(path).expanduser().resolve()).parts)
    except (OSError, RuntimeError, ValueError) as error:  # no such user, a loop of links, a NUL character
        raise InvalidInput(f"{text!r} is no path of a home: {error}.") from error


def is_trusted(home: str) -> bool:
    """Whether the environment or the user's file trusts a home.

    Raises:
        InvalidInput: one of them cannot be used as it is.
    """
    there = place_of(home)
    named = [word.strip() for word in os.environ.get(VARIABLE, "").split(",") if word.strip()]
    return any(place_of(word).covers(there) for word in (*named, *trusted()))


# -- the user's file -----------------------------------------------------------------------------------------


def file_path() -> Path:
    """Where the user's file is: `$XDG_CONFIG_HOME/holdfast/trusted`, else `~/.config/holdfast/trusted`."""
    parent = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(parent).expanduser().absolute() / "holdfast" / "trusted"


def trusted() -> list[str]:
    """What the user's file lists, in its order.

    Raises:
        InvalidInput: somebody else could have written it.
    """
    path = file_path()
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []  # also where there is no home directory to speak of
    with os.fdopen(fd) as file:
        facts = os.fstat(fd)
        if facts.st_uid not in (os.getuid(), 0) or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise InvalidInput(
                f"{path} says which homes may bring code, but others than you can write it (mode "
                f"{stat.S_IMODE(facts.st_mode):04o}, owner {facts.st_uid}), so it was not read. Look at "
                "what it says, then make it yours: chmod 600."
            )
        lines = [line.strip() for line in file]
    return [line for line in lines if line and not line.startswith("#")]


def trust(home: str) -> str:
    """Trust a home, or everything in a folder of homes, from now on.

    Returns:
        How it stands in the file: a path is absolute.

    Raises:
        InvalidInput: it names no place.
    """
    line = _line_of(home)
    _write([*(one for one in trusted() if place_of(one) != place_of(line)), line])
    return line


def distrust(home: str) -> bool:
    """Take a line out of the user's file; False if it was not there.

    Raises:
        InvalidInput: it names no place.
    """
    lines = trusted()
    left = [one for one in lines if place_of(one) != place_of(home)]
    if len(left) < len(lines):
        _write(left)
    return len(left) < len(lines)


def _line_of(home: str) -> str:
    place_of(home)  # refuses what is none
    if "\n" in home or "\r" in home:
        raise InvalidInput("A home with a line break in its name cannot stand in a list of lines.")
    return home if "://" in home else str(Path(home).expanduser().resolve())


def _write(lines: Iterable[str]) -> None:
    path = file_path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd, made = tempfile.mkstemp(prefix=".trusted-", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(fd, "w") as file:
            file.write("# Homes whose compile caches are loaded, and run, by `holdfast trust`.\n")
            file.writelines(f"{line}\n" for line in lines)
        Path(made).replace(path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            Path(made).unlink()
