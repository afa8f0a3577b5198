"""Homes that the user trusts for compiled code: by argument, environment, or the user's own file."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from urllib.parse import unquote

from msgspec import Struct
from msgspec.structs import replace

from holdfast.checkpoint.store.address import SCHEMES, parse_address
from holdfast.checkpoint.store.endpoints import is_unencrypted, with_environment
from holdfast.checkpoint.store.factory import absolute_place
from holdfast.errors import InvalidInput
from holdfast.system.linux.files import write_atomic

VARIABLE = "HOLDFAST_TRUST_HOMES"
"""Variable with trusted homes or prefixes of their addresses, separated by commas."""
_DECIDING_OPTIONS = ("endpoint_url", "account", "profile")  # with another one the same name is another place
_DEFAULT_REGION = "us-east-1"
_OTHER_PARTITIONS = ("cn-", "us-gov-", "us-iso", "eu-iso", "eusc-")
"""Prefixes of AWS regions where the same bucket name may belong to someone else."""


class TrustedPlace(Struct, frozen=True):
    """A home, or a folder of homes: its server and the parts of its path."""

    server: tuple[str, ...]
    path: tuple[str, ...]
    region: str = ""

    def covers(self, other: TrustedPlace) -> bool:
        """Return True if the other place is this one or inside it."""
        if self.server != other.server or other.path[: len(self.path)] != self.path:
            return False
        if self.region:
            return self.region == (other.region or _DEFAULT_REGION)
        return not other.region.startswith(_OTHER_PARTITIONS)


def place_of(text: str, *, here: bool = False) -> TrustedPlace:
    """Return the place of a path or URL; `here`: with the server from the environment, as for an access."""
    scheme, mark, rest = text.partition("://")
    if not text.strip():
        raise InvalidInput("Cannot trust an empty string as a home.")
    if mark and scheme.lower() in SCHEMES:
        address = with_environment(parse_address(text)) if here else parse_address(text)
        options = tuple(f"{name}={(address.option(name) or '').rstrip('/')}" for name in _DECIDING_OPTIONS)
        parts = tuple(address.prefix.split("/")) if address.prefix else ()
        region = "" if address.option("endpoint_url") else address.option("region") or ""
        return TrustedPlace((address.protocol, address.bucket, *options), parts, region)
    if mark and scheme.lower() != "file":
        raise InvalidInput(f"Cannot trust {text!r}: it is not a place for checkpoints.")
    path = "/" + unquote(rest.partition("/")[2]) if mark else text
    try:
        return TrustedPlace(("file",), PurePosixPath(Path(path).expanduser().resolve()).parts)
    except (OSError, RuntimeError, ValueError) as error:  # no such user, a loop of links, a NUL character
        raise InvalidInput(f"{text!r} is not a valid path of a home: {error}.") from error


def is_trusted(home: str) -> bool:
    """Return True if the environment or the user's file trusts a home.

    Entries apply to the server that they name. The environment determines the server of the home, and a
    trusted name is not trusted on another server.
    """
    there = place_of(home, here=True)
    named = [word.strip() for word in os.environ.get(VARIABLE, "").split(",") if word.strip()]
    return any(place_of(word).covers(there) for word in (*named, *trusted()))


def file_path() -> Path:
    """Return the path of the user's file, `~/.config/holdfast/trusted` by default."""
    parent = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(parent).expanduser().absolute() / "holdfast" / "trusted"


def trusted() -> list[str]:
    """Return the lines of the user's file."""
    path = file_path()
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []  # also without a home directory
    with os.fdopen(fd) as file:
        facts = os.fstat(fd)
        if facts.st_uid not in (os.getuid(), 0) or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise InvalidInput(
                f"{path} lists homes whose code may run, but other users can write it (mode "
                f"{stat.S_IMODE(facts.st_mode):04o}, owner {facts.st_uid}), so it was not read. Check its "
                "contents, then protect it: chmod 600."
            )
        lines = [line.strip() for line in file]
    return [line for line in lines if line and not line.startswith("#")]


def trust(home: str, *, allow_http: bool = False) -> str:
    """Trust a home, or all homes in a folder, from now on.

    Returns:
        Its line in the file: an absolute path, or a URL with endpoint, account, profile and region as far
        as the URL or the environment gives them.
    """
    line = _line_of(home, allow_http=allow_http)
    _write([*(one for one in trusted() if place_of(one) != place_of(line)), line])
    return line


def distrust(home: str) -> bool:
    """Remove a home from the user's file. Return False if the file does not contain it."""
    lines, meant = trusted(), (place_of(home), place_of(home, here=True))
    left = [one for one in lines if place_of(one) not in meant]
    if len(left) < len(lines):
        _write(left)
    return len(left) < len(lines)


def _line_of(home: str, *, allow_http: bool) -> str:
    place_of(home)  # raises if it is invalid
    if "\n" in home or "\r" in home:
        raise InvalidInput("Cannot trust a home with a line break in its name.")
    scheme, mark, _ = home.partition("://")
    if not mark:
        return absolute_place(home)
    if scheme.lower() not in SCHEMES:
        return home
    address = with_environment(parse_address(home))
    if is_unencrypted(address) and not allow_http:
        raise InvalidInput(
            f"{address.place} uses {address.option('endpoint_url')}: others on the network could change the "
            "compiled code that this machine would run. It was not trusted. Use an https endpoint, or repeat "
            "with --allow-http if you trust the network."
        )
    deciding = (*_DECIDING_OPTIONS, "region")
    return replace(address, options=tuple(one for one in address.options if one[0] in deciding)).url


def _write(lines: Iterable[str]) -> None:
    path = file_path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    comment = "# Homes whose compile caches are loaded, and run, by `holdfast trust`."
    text = "".join(f"{line}\n" for line in (comment, *lines))
    write_atomic(path, text, is_durable=False)
