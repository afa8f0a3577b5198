"""Container runtimes of this machine: podman, or docker where its containers belong to this user."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from enum import Enum

from holdfast.errors import NotFound, RetryLater, Unsupported
from holdfast.system.linux.program_runs import run_program

_LIMIT_S = 30.0
_QUESTIONS = {
    "podman": ("info", "--format", "{{.Host.ServiceIsRemote}}"),
    "docker": ("info", "--format", "{{json .SecurityOptions}}"),
}
_MAX_WORDS = 2000


class ContainerRuntime(str, Enum):
    """Program that makes containers. Both have the same commands."""

    PODMAN = "podman"
    DOCKER = "docker"


def find_runtime() -> ContainerRuntime | None:
    """Return the runtime that answers on this machine, or None. Podman is preferred: it needs no root."""
    if _ask("podman") == "false":
        return ContainerRuntime.PODMAN
    options = _ask("docker")
    if options is None:
        return None
    if os.geteuid() != 0 and "name=rootless" not in options:
        raise Unsupported(
            "docker runs containers as root here, so that the processes of the job could be neither notified "
            "nor ended by you, and its files would belong to root. Install podman (`apt-get install podman "
            "uidmap`) or docker's rootless mode, or remove image_id: then the commands run on this machine "
            "as it is. Nothing was started."
        )
    return ContainerRuntime.DOCKER


def _ask(program: str) -> str | None:
    """Return the answer of a runtime about itself, or None if it does not answer."""
    path = shutil.which(program)
    return None if path is None else _answer(path, *_QUESTIONS[program])


@functools.cache
def _answer(*command: str) -> str | None:
    try:
        done = run_program(command, timeout_s=_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.text if done.status == 0 else None


class RuntimeCalls:
    """Calls of a container runtime.

    Args:
        is_wanted: returns False once calls should end.
    """

    def __init__(self, is_wanted: Callable[[], bool]) -> None:
        self._is_wanted = is_wanted

    def run(self, command: Sequence[str], *, is_logged: bool = False) -> str:
        """Run a command, and return what it prints.

        Args:
            is_logged: write its output to the log of this process as it comes.

        Blocks: as long as the command runs.
        """
        what = f"`{command[0]} {command[1]}`"

        def check() -> None:
            if not self._is_wanted():
                raise RetryLater(f"{what} was stopped: the job has ended.")

        def log(data: bytes) -> None:
            if is_logged:
                os.write(sys.stdout.fileno(), data)

        try:
            done = run_program(command, timeout_s=None, has_own_session=True, on_output=log, on_look=check)
        except FileNotFoundError as error:
            raise NotFound(f"The program {command[0]} is not installed on this machine any more.") from error
        if done.status != 0:
            raise RetryLater(f"{what} failed: {done.error[-_MAX_WORDS:] or f'status {done.status}'}")
        return done.text
