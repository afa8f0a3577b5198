"""Browser of this desktop, opened at a URL that no other user may see."""

from __future__ import annotations

import contextlib
import html
import os
import tempfile
import webbrowser
from collections.abc import Iterator, Mapping
from pathlib import Path


def has_desktop(env: Mapping[str, str]) -> bool:
    """Return True if a browser can show a window to the user of this terminal."""
    is_remote = "SSH_CONNECTION" in env or "SSH_TTY" in env
    return not is_remote and bool(env.get("DISPLAY") or env.get("WAYLAND_DISPLAY"))


@contextlib.contextmanager
def opened(url: str) -> Iterator[None]:
    """Open a browser at a URL, by way of a private file.

    All users see the arguments of a browser, and the URL contains a token. The file is removed after the
    block.
    """
    fd, name = tempfile.mkstemp(prefix="holdfast-dash-", suffix=".html")  # readable by this user only
    path = Path(name)
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            address = html.escape(url, quote=True)
            file.write(f'<!DOCTYPE html><meta http-equiv="refresh" content="0;url={address}">\n')
        webbrowser.open(path.as_uri())
        yield
    finally:
        path.unlink(missing_ok=True)
