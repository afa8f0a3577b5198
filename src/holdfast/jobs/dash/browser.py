"""Browser of this desktop, opened at a URL that no other user may see."""

from __future__ import annotations

import contextlib
import html
import webbrowser
from collections.abc import Iterator, Mapping

from holdfast.system.linux.partial_files import temporary_folder


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
    with temporary_folder("dash") as folder:
        path = folder / "dash.html"
        address = html.escape(url, quote=True)
        path.write_text(
            f'<!DOCTYPE html><meta http-equiv="refresh" content="0;url={address}">\n', encoding="utf-8"
        )
        webbrowser.open(path.as_uri())
        yield
