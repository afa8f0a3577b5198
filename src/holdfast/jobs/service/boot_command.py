"""Command that continues the jobs of a state folder after a restart of the machine."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import InvalidInput
from holdfast.jobs.state_folder import STATE
from holdfast.system.entry import command

_PATH = "PYTHONPATH"
_MAX_NAME = 40


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
