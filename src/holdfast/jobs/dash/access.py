"""Access to the dash: the keys of one server, and the requests that it answers; pure."""

from __future__ import annotations

import hmac
import re
import secrets
from dataclasses import dataclass, field

from holdfast.jobs.dash.messages import COOKIE, PageRequest, PageResponse, text_response

_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:[0-9]{1,5})?", re.IGNORECASE | re.ASCII)
_OWN_PAGE = ("", "none", "same-origin")
_NO_TOKEN = "Open the URL that `holdfast dash` has printed. It ends with a token, which is missing here."
_SIGN_IN = (
    '<!DOCTYPE html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="0;url=./">'
    '<title>Holdfast</title><p><a href="./">Continue</a></p></html>'
)
_NO_SCRIPTS = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


@dataclass(frozen=True, slots=True)
class AccessKeys:
    """Random keys of one server.

    Attributes:
        space: first part of all paths. The cookie is sent for it only, and not to servers of other users on
            other ports, as browsers send cookies to all ports of a host.
        token: part of the printed URL.
        session: value of the cookie that a browser gets for the token.
    """

    space: str = field(default_factory=lambda: secrets.token_hex(16))
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    session: str = field(default_factory=lambda: secrets.token_urlsafe(32))

    def url(self, port: int) -> str:
        """Return the URL to print."""
        return f"http://127.0.0.1:{port}/{self.space}/?token={self.token}"


def check_access(request: PageRequest, keys: AccessKeys) -> PageResponse | None:
    """Return the response to a request without access, or to the token; None if the request is allowed."""
    if not _HOST.fullmatch(request.host):
        # The page of a stranger whose name was pointed at this machine (DNS rebinding).
        return text_response(403, "This server answers to 127.0.0.1 and localhost only.")
    if request.origin and request.origin != f"http://{request.host}":
        return text_response(403, "This server answers to its own page only.")
    if request.method not in ("GET", "HEAD"):
        return text_response(405, "This server only shows things, and changes none.")
    space, slash, path = request.path.removeprefix("/").partition("/")
    if not slash or not _is_equal(space, keys.space):
        return text_response(403, _NO_TOKEN)
    if not path and "token" in request.query:
        is_right = _is_equal(request.query["token"], keys.token)
        return _signed_in(keys) if is_right else text_response(403, _NO_TOKEN)
    if not _is_equal(request.session, keys.session):
        return text_response(403, _NO_TOKEN)
    if request.fetch_site not in _OWN_PAGE:
        return text_response(403, "This server answers to its own page only.")
    return None


def _is_equal(given: str, secret: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), secret.encode())


def _signed_in(keys: AccessKeys) -> PageResponse:
    """Return the response that replaces the token by a cookie.

    It is a page, not a redirect: browsers keep a strict cookie from a redirect that began at another site.
    """
    cookie = f"{COOKIE}={keys.session}; Path=/{keys.space}/; HttpOnly; SameSite=Strict"
    return PageResponse(
        200,
        _SIGN_IN.encode(),
        "text/html; charset=utf-8",
        policy=_NO_SCRIPTS,
        headers=(("Set-Cookie", cookie),),
    )
