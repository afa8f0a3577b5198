"""The line of a service in the user's crontab. All other lines stay as they are, byte by byte.

Source: crontab(5), about `@reboot` and `%`.
"""

from __future__ import annotations

import re
import shlex

from holdfast.errors import Denied, InvalidInput, RetryLater
from holdfast.jobs.service.boot_command import BootCommand, run_program

_MAX_BYTES = 999
"""Longest command that all versions of cron run. Vixie's and Debian's cut off the rest silently."""
_BEGIN = b"@reboot "


def cron_line(command: BootCommand) -> bytes:
    """Return the line of a command, without a line break.

    Raises:
        InvalidInput: it is too long.
    """
    variables = [f"{name}={_quoted(value)}" for name, value in command.environment.items()]
    words = ["/usr/bin/env", *variables, *map(_quoted, command.words)]
    text = f"{' '.join(words)} >>{_quoted(str(command.log))} 2>&1".encode() + _mark(command.name)
    if len(text) > _MAX_BYTES:
        raise InvalidInput(
            f"The command for cron has {len(text)} bytes, and cron runs at most {_MAX_BYTES}: "
            f"{text[:300]!r}... Nothing was changed. Use shorter paths for the state folder and Python, or "
            "the systemd manager."
        )
    return _BEGIN + text


def _mark(name: str) -> bytes:
    """Return the comment that ends a service's line and identifies it."""
    return f" # holdfast service {name}".encode()


def _quoted(text: str) -> str:
    """Quote a text for the shell, in a way that cron does not change.

    cron ends the command at a `%`, unless a backslash precedes it, and some versions leave that backslash for
    the shell. Some take two backslashes for one. So neither is within the same quotes as its neighbours.
    """
    parts = re.split(r"([%\\])", text)
    quoted = "".join("\\%" if part == "%" else shlex.quote(part) if part else "" for part in parts)
    return quoted or "''"


def with_line(table: bytes, line: bytes, name: str) -> bytes:
    """Return a crontab with a service's line, which replaces an earlier one."""
    lines = table.splitlines(keepends=True)
    own = [place for place, one in enumerate(lines) if _is_own(one, name)]
    if own:
        lines[own[0]] = line + b"\n"
        return b"".join(one for place, one in enumerate(lines) if place not in own[1:])
    if lines and not lines[-1].endswith(b"\n"):
        lines[-1] += b"\n"
    return b"".join([*lines, line + b"\n"])


def without_line(table: bytes, name: str) -> bytes:
    """Return a crontab without a service's line."""
    return b"".join(line for line in table.splitlines(keepends=True) if not _is_own(line, name))


def find_line(table: bytes, name: str) -> bytes | None:
    """Return a service's line in a crontab, or None."""
    return next((line.rstrip() for line in table.splitlines() if _is_own(line, name)), None)


def _is_own(line: bytes, name: str) -> bool:
    return line.startswith(_BEGIN) and line.rstrip().endswith(_mark(name))


def read_crontab() -> bytes:
    """Return the user's crontab. A missing one counts as empty."""
    done = run_program("crontab", "-l")
    if done.status == 0:
        return done.out
    # Any other failure must not look like an empty crontab, which would then replace the real one.
    if not done.out.strip() and re.search(rb"no crontab for|can't open '[^/']*'", done.err):
        return b""
    raise Denied(
        f"`crontab -l` failed: {done.message}. Nothing was changed. If cron is not for this user, ask the "
        "administrator for an entry in /etc/cron.allow."
    )


def write_crontab(table: bytes) -> None:
    """Replace the user's crontab, and compare it with what was written. Remove an empty one.

    Raises:
        Denied: crontab refuses it.
        RetryLater: another program has changed it at the same time, or crontab does not end.
    """
    done = run_program("crontab", "-r") if not table else run_program("crontab", "-", given=table)
    if done.status != 0:
        raise Denied(f"crontab refused the new table: {done.message}. The crontab was not changed.")
    if table and table not in read_crontab():  # some versions list comments of their own above it
        raise RetryLater(
            "The crontab differs from what was just written: another program has changed it at the same "
            "time. Look at it with `crontab -l`, and repeat the command."
        )
