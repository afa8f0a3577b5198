"""Server of the dash on 127.0.0.1, and the browser that opens its page."""

from __future__ import annotations

import contextlib
import html
import logging
import socket
import webbrowser
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from holdfast.errors import InvalidInput, Unsupported
from holdfast.system.linux.partial_files import temporary_folder

if TYPE_CHECKING:
    from holdfast.jobs.dash.application import Application

_ADDRESS = "127.0.0.1"
_NUM_THREADS = 4
_MAX_CONNECTIONS = 50
_MAX_HEADER_BYTES = 16 << 10
_MAX_BODY_BYTES = 1 << 10  # no request has a body
_IDLE_S = 60
_NOT_INSTALLED = "`holdfast dash` needs a web server: pip install 'torch-holdfast[dash]'."


def listen(application: Application, port: int = 0) -> tuple[Any, int]:
    """Return a server of an application, which already listens, and its port."""
    try:
        from waitress.server import create_server
    except ImportError as error:
        raise Unsupported(_NOT_INSTALLED) from error
    listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was just closed
        listening.bind((_ADDRESS, port))
    except (OSError, OverflowError) as error:
        listening.close()
        raise InvalidInput(
            f"Port {port} of {_ADDRESS} cannot be used: {error}. Choose another one, or leave out --port for "
            "any free one."
        ) from error
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)  # requests that wait are no news
    server = create_server(
        application,
        sockets=[listening],
        threads=_NUM_THREADS,
        connection_limit=_MAX_CONNECTIONS,
        channel_timeout=_IDLE_S,
        max_request_header_size=_MAX_HEADER_BYTES,
        max_request_body_size=_MAX_BODY_BYTES,
        ident="",
    )
    return server, listening.getsockname()[1]


def has_desktop(env: Mapping[str, str]) -> bool:
    """Return True if a browser can show a window to the user of this terminal."""
    is_remote = "SSH_CONNECTION" in env or "SSH_TTY" in env
    return not is_remote and bool(env.get("DISPLAY") or env.get("WAYLAND_DISPLAY"))


@contextlib.contextmanager
def opened(url: str) -> Iterator[None]:
    """Open a browser at a URL with a token, by way of a private file, as all users see its arguments."""
    with temporary_folder("dash") as folder:
        path = folder / "dash.html"
        to = f'<meta http-equiv="refresh" content="0;url={html.escape(url, quote=True)}">'
        path.write_text(f"<!DOCTYPE html>{to}\n", encoding="utf-8")
        webbrowser.open(path.as_uri())
        yield
