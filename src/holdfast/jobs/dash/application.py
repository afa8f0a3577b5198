"""Application that answers the browser's requests, its server on 127.0.0.1, and the browser it opens."""

from __future__ import annotations

import contextlib
import html
import logging
import re
import socket
import webbrowser
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from holdfast.errors import HoldfastError, InvalidInput, NotFound, Unsupported
from holdfast.jobs.dash import messages
from holdfast.jobs.dash.pages import JobBoard, RunPlace, RunView, find_place, homes_of, job_page, output_page
from holdfast.system.linux.partial_files import temporary_folder
from holdfast.watch.report.page import chart_library

_JOB = r"api/jobs/(?P<job>[0-9]{1,9})"
_HOME = r"homes/(?P<home>[0-9a-f]{16})"
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


_STATUSES = {NotFound: 404, InvalidInput: 400, HoldfastError: 503}
"""Status of the response to a request that fails, by the first class that its error has."""


class Application:
    """Dash as a WSGI application. It only reads."""

    def __init__(self, keys: messages.AccessKeys, homes: Sequence[str] = ()) -> None:
        self._keys, self._homes = keys, tuple(homes)
        self._files: dict[str, messages.PageResponse] = {}
        for file in (resources.files("holdfast.jobs.dash") / "assets").iterdir():
            if file.is_file():
                kind = _KINDS[Path(file.name).suffix]
                self._files[file.name] = messages.PageResponse(200, file.read_bytes(), kind)
        self._board, self._runs = JobBoard(), RunView()
        table: dict[str, Callable[..., messages.PageResponse]] = {
            r"api/jobs": self._list,
            _JOB: lambda _, job: messages.json_response(self._board.read(int(job), "page", job_page)),
            rf"{_JOB}/output": self._output,
            rf"{_JOB}/{_HOME}/curves": self._curves,
            rf"{_JOB}/{_HOME}/report": self._report,
            rf"api/{_HOME}/curves": self._curves,
            rf"api/{_HOME}/state": lambda _, home: messages.json_response(
                self._runs.state(self._place(home))
            ),
            rf"api/{_HOME}/report": self._report,
            r"charts\.js": lambda _: messages.PageResponse(200, chart_library().encode(), _KINDS[".js"]),
        }
        self._routes = [(re.compile(path, re.ASCII), respond) for path, respond in table.items()]

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., object]) -> Iterable[bytes]:
        """Answer one request."""
        response = messages.check_access(environ, self._keys) or self._respond(environ)
        start_response(*response.head())
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [response.content]

    def _respond(self, environ: messages.Environ) -> messages.PageResponse:
        path = messages.decoded_path(environ).removeprefix(f"/{self._keys.space}/")
        if file := self._files.get(path or "index.html"):
            return file
        for pattern, respond in self._routes:
            if found := pattern.fullmatch(path):
                try:
                    response = respond(environ, **found.groupdict())
                except HoldfastError as error:
                    statuses = [status for kind, status in _STATUSES.items() if isinstance(error, kind)]
                    return messages.json_response({"error": str(error)}, statuses[0])
                # An equal tag is that of the version which the browser has.
                is_known = response.tag and response.tag == environ.get("HTTP_IF_NONE_MATCH")
                return messages.PageResponse(304, b"", "", tag=response.tag) if is_known else response
        return messages.text_response(404, "Not found.")

    def _list(self, _: messages.Environ) -> messages.PageResponse:
        homes = [RunPlace(place).as_json() for place in self._homes]
        return messages.json_response({**self._board.listing().as_json(), "homes": homes})

    def _output(self, environ: messages.Environ, job: str) -> messages.PageResponse:
        query = messages.parse_query(environ)
        cursor, node = query.get("after", ""), query.get("node", "")
        part = f"output of {node!r} after {cursor}"
        page = self._board.read(int(job), part, lambda found: output_page(found, cursor=cursor, node=node))
        return messages.json_response(page)

    def _curves(self, _: messages.Environ, home: str, job: str = "") -> messages.PageResponse:
        return messages.json_response(self._runs.curves(self._place(home, job)))

    def _report(self, _: messages.Environ, home: str, job: str = "") -> messages.PageResponse:
        page = self._runs.report(self._place(home, job))
        return messages.PageResponse(200, page.encode(), _KINDS[".html"], policy=messages.REPORT_POLICY)

    def _place(self, wanted: str, job: str = "") -> RunPlace:
        homes = self._board.read(int(job), "homes", homes_of) if job else self._homes
        return find_place(homes, wanted)


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
