"""The path ~/sky_workdir, which is SkyPilot's workdir on every machine; pure."""

from __future__ import annotations

import re

SKY_WORKDIR = "sky_workdir"  # name of the folder in the user's home
_PATH = re.compile(r"(?<![\w/.~-])(?:~|\$HOME|\$\{HOME\})/sky_workdir(?![\w.-]|/+\.\.)")
_TARGET = re.compile(r"~/+sky_workdir(?:/+(.*))?")
_PLAIN = re.compile(r"[\w/.@%+=-]+")
_MAX_WORD = 1000
_BLANK = re.compile(r"[\s\"'();|&<>]")


def replace_sky_workdir(text: str, workdir: str) -> str:
    """Return commands or a value with a plain path in the place of ~/sky_workdir and $HOME/sky_workdir."""

    def replaced(found: re.Match[str]) -> str:  # except after `HOST:`, as that path is of another machine
        before = text[max(0, found.start() - _MAX_WORD) : found.start()]
        word = _BLANK.split(before)[-1]
        return found[0] if word.endswith(":") and "=" not in word else workdir

    return _PATH.sub(replaced, text)


def is_plain(path: str) -> bool:
    """Return True if a shell reads a path as it is, with and without quotes."""
    return _PLAIN.fullmatch(path) is not None


def path_in_workdir(target: str) -> str | None:
    """Return the path of a mount's target relative to the workdir, "" for the workdir itself, or None."""
    found = _TARGET.fullmatch(target)
    if found is None or ".." in (found[1] or "").split("/"):
        return None
    return (found[1] or "").rstrip("/")
