"""Targets of notifications, within time limits: webhooks, which get a POST, and commands of the user."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

from holdfast.system.linux.program_runs import end_program, given_input

_TIMEOUT_S = 10.0
_TOTAL_S = 20.0
_MAX_ANSWER_BYTES = 64 << 10
_AGAIN = frozenset({408, 425, 429})
"""Statuses below 500 that may pass."""
_LIMIT_S = 60.0


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refusal of redirects: another server must not receive the message."""

    def redirect_request(self, *args: object, **kwargs: object) -> None:
        """Follow nothing, so that the response is an error."""
        return


def post(url: str, body: bytes) -> tuple[str, bool]:
    """Send a POST, and return why it failed and whether it may succeed later. No reason: it was accepted.

    The reason never contains the URL or its host. The proxies of the environment are used. Only for a main
    thread, as the limit of the whole request is a signal.
    """
    headers = {"Content-Type": "application/json", "User-Agent": "holdfast"}
    opener = urllib.request.build_opener(_NoRedirect)
    try:
        request = urllib.request.Request(url, body, headers, method="POST")
        with _limited(_TOTAL_S), opener.open(request, timeout=_TIMEOUT_S) as response:
            response.read(_MAX_ANSWER_BYTES)
    except urllib.error.HTTPError as error:
        error.close()
        return f"the server answered with status {error.code}", error.code >= 500 or error.code in _AGAIN
    except urllib.error.URLError as error:
        return _reason(error.reason), True
    except (OSError, http.client.HTTPException, ValueError) as error:
        return _reason(error), True
    return "", False


def _reason(error: object) -> str:
    """Return a failure without the names of hosts that some messages contain."""
    if isinstance(error, ssl.SSLError):
        return f"TLS failed ({type(error).__name__})"
    if isinstance(error, TimeoutError):
        return "the server did not answer in time"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"the request failed ({type(error).__name__})"


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block after some seconds, also if the server sends single bytes."""

    def stop(_: int, __: FrameType | None) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run_hook(command: str, given: bytes, *, environment: Mapping[str, str], directory: str) -> str:
    """Run a command, and return why it failed; empty if it succeeded. Its output is this process's.

    Args:
        given: its standard input, which it may ignore.
    """
    try:
        with given_input(given) as stdin:
            process = subprocess.Popen(
                ["/bin/sh", "-c", command],
                stdin=stdin,
                env=dict(environment),
                cwd=directory if Path(directory).is_dir() else "/",
                start_new_session=True,
            )
    except (OSError, ValueError) as error:
        return f"it could not be started: {error.strerror if isinstance(error, OSError) else 'invalid text'}"
    try:
        process.wait(_LIMIT_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        end_program(process)
        return f"it did not end within {_LIMIT_S:.0f} s, and was killed"
    status = process.returncode
    return "" if status == 0 else f"exit status {status}" if status > 0 else f"killed by signal {-status}"
