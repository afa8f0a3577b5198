"""A browser's requests to the application, through the standard library's check of WSGI."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from wsgiref.util import setup_testing_defaults
from wsgiref.validate import validator

from holdfast.jobs.dash.application import Application
from holdfast.jobs.dash.messages import COOKIE, AccessKeys

PORT = 8321


@dataclass(frozen=True)
class Answer:
    """A response as a browser gets it."""

    status: int
    headers: dict[str, str]
    content: bytes

    @property
    def json(self) -> Any:
        """Its content as JSON."""
        return json.loads(self.content)

    @property
    def text(self) -> str:
        """Its content as text."""
        return self.content.decode()


class Client:
    """A browser that has opened the URL with the token.

    Args:
        homes: those of the command line.
    """

    def __init__(self, *homes: str) -> None:
        self.keys = AccessKeys()
        self._application = validator(Application(self.keys, homes))

    def get(self, path: str = "", *, query: str = "", tag: str = "", **changed: str | None) -> Answer:
        """Request a path below the space.

        Args:
            tag: ETag of the version that the browser has.
            changed: other parts of the WSGI environment; None removes one.
        """
        own = {"QUERY_STRING": query, "HTTP_COOKIE": f"other=1; {COOKIE}={self.keys.session}"}
        own |= {"HTTP_IF_NONE_MATCH": tag} if tag else {}
        return self.get_raw(f"/{self.keys.space}/{path}", **{**own, **changed})

    def get_raw(self, path: str, **changed: str | None) -> Answer:
        """Request any path, without a cookie."""
        environ: dict[str, Any] = {
            "SCRIPT_NAME": "",
            "PATH_INFO": path,
            "HTTP_HOST": f"127.0.0.1:{PORT}",
            "QUERY_STRING": "",
        }
        environ |= {name: value for name, value in changed.items() if value is not None}
        removed = [name for name, value in changed.items() if value is None]
        setup_testing_defaults(environ)
        for name in removed:
            environ.pop(name, None)
        found: list[Any] = []

        def start_response(status: str, headers: list[tuple[str, str]], _: Any = None) -> Any:
            found.append((status, headers))
            return lambda _data: None

        result = self._application(environ, start_response)
        try:
            content = b"".join(result)
        finally:
            result.close()  # pyright: ignore[reportAttributeAccessIssue] the check has one
        ((status, headers),) = found
        return Answer(int(status.split()[0]), dict(headers), content)
