"""Command that continues the jobs of a state folder after a restart of the machine."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import InvalidInput, RetryLater
from holdfast.jobs.state_folder import STATE
from holdfast.system.entry import command
from holdfast.system.linux import program_runs

_PATH = "PYTHONPATH"
_MAX_NAME = 40
_LIMIT_S = 60.0
_RUNTIME = "XDG_RUNTIME_DIR"


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

    @property
    def log(self) -> Path:
        """Path for its output under cron, which would send it by mail."""
        return self.state / "service.log"


def make_boot_command(state: Path) -> BootCommand:
    """Return the command for a state folder, with this process's interpreter and package.

    Raises:
        InvalidInput: a path cannot be written in a unit or a crontab.
    """
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
    """Check that a text has neither control characters nor bytes that are not UTF-8.

    Raises:
        InvalidInput: it has.
    """
    if any(one < " " or one == "\x7f" or "\ud800" <= one <= "\udfff" for one in text):
        raise InvalidInput(
            f"{text!r} has a line break, another control character or bytes that are not UTF-8, and cannot "
            "be part of a service. Nothing was changed. Use a folder with another name."
        )


def has_program(name: str) -> bool:
    """Return True if a program is on the PATH."""
    return shutil.which(name) is not None


def run_program(*words: str, given: bytes = b"") -> program_runs.Ended:
    """Run a program, and return its result.

    Args:
        given: its standard input.
    """
    environment = {**os.environ, "LC_ALL": "C"}
    runtime = Path(f"/run/user/{os.getuid()}")
    if _RUNTIME not in environment and runtime.is_dir():  # unset by su, sudo and cron
        environment[_RUNTIME] = str(runtime)
    try:
        return program_runs.run_program(words, timeout_s=_LIMIT_S, given=given, env=environment)
    except subprocess.TimeoutExpired as error:
        raise RetryLater(
            f"`{' '.join(words)}` did not end within {_LIMIT_S:.0f} s, and was killed."
        ) from error
    except OSError as error:
        raise RetryLater(f"`{' '.join(words)}` could not be started: {error}.") from error
