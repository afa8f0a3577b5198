"""Command that continues the jobs of a state folder after a restart of the machine.

Source: crontab(5), about `@reboot` and `%`.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import InvalidInput, RetryLater
from holdfast.jobs.folder import STATE
from holdfast.system.entry import command
from holdfast.system.linux import program_runs

_PATH = "PYTHONPATH"
_MAX_NAME = 40
_LIMIT_S = 60.0
_RUNTIME = "XDG_RUNTIME_DIR"
_MAX_CRON_BYTES = 999
"""Longest command that all versions of cron run. Vixie's and Debian's cut off the rest silently."""


@dataclass(frozen=True, slots=True)
class BootCommand:
    """Command with its environment.

    Attributes:
        name: name of the service, made of that of the folder and a hash of its path.
        state: the state folder.
        environment: variables that it requires, by name.
        words: the program and its arguments, all paths absolute.
    """

    name: str
    state: Path
    environment: dict[str, str]
    words: tuple[str, ...]

    def shell_text(self) -> str:
        """Return it for a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(self.words)])

    def cron_line(self) -> str | None:
        """Return the line of a crontab that runs it, or None if cron would cut it off."""
        variables = [f"{name}={_quoted_for_cron(value)}" for name, value in self.environment.items()]
        words = ["/usr/bin/env", *variables, *map(_quoted_for_cron, self.words)]
        log = _quoted_for_cron(str(self.state / "service.log"))  # cron would send the output by mail
        text = f"{' '.join(words)} >>{log} 2>&1"
        return None if len(text.encode()) > _MAX_CRON_BYTES else f"@reboot {text}"


def make_boot_command(state: Path) -> BootCommand:
    """Return the command for a state folder, with this process's interpreter and package."""
    words = tuple(command("holdfast.cli", "service", "start"))
    environment = {STATE: str(state)}
    if parts := [part for part in os.environ.get(_PATH, "").split(os.pathsep) if part]:
        environment[_PATH] = os.pathsep.join(str(Path(part).absolute()) for part in parts)
    for text in (*words, *environment.values()):
        _check_text(text)
    return BootCommand(service_name(state), state, environment, words)


def service_name(state: Path) -> str:
    """Return the name of a folder's service: a name of a file, without characters that need quotes."""
    place = os.fsencode(state.resolve())
    shown = re.sub(r"[^A-Za-z0-9_]+", "-", state.name).strip("-")[:_MAX_NAME]
    return f"holdfast-{shown or 'jobs'}-{hashlib.sha256(place).hexdigest()[:8]}"


def _check_text(text: str) -> None:
    """Check that a text has neither control characters nor bytes that are not UTF-8."""
    if any(one < " " or one == "\x7f" or "\ud800" <= one <= "\udfff" for one in text):
        raise InvalidInput(
            f"{text!r} has a line break, another control character or bytes that are not UTF-8, and cannot "
            "be part of a service. Nothing was changed. Use a folder with another name."
        )


def _quoted_for_cron(text: str) -> str:
    """Quote a text for the shell, in a way that cron does not change.

    cron ends the command at a `%`, unless a backslash precedes it, and some versions leave that backslash for
    the shell. Some take two backslashes for one. So neither is within the same quotes as its neighbours.
    """
    parts = re.split(r"([%\\])", text)
    quoted = "".join("\\%" if part == "%" else shlex.quote(part) if part else "" for part in parts)
    return quoted or "''"


def has_program(name: str) -> bool:
    """Return True if a program is on the PATH."""
    return shutil.which(name) is not None


def run_program(*words: str) -> program_runs.Ended:
    """Run a program, and return its result."""
    environment = {**os.environ, "LC_ALL": "C"}
    runtime = Path(f"/run/user/{os.getuid()}")
    if _RUNTIME not in environment and runtime.is_dir():  # unset by su and sudo
        environment[_RUNTIME] = str(runtime)
    try:
        return program_runs.run_program(words, timeout_s=_LIMIT_S, env=environment)
    except subprocess.TimeoutExpired as error:
        raise RetryLater(
            f"`{' '.join(words)}` did not end within {_LIMIT_S:.0f} s, and was killed."
        ) from error
    except OSError as error:
        raise RetryLater(f"`{' '.join(words)}` could not be started: {error}.") from error
