"""Container runtimes of this machine: podman, or docker where its containers belong to this user."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from enum import Enum

from holdfast.errors import Unsupported
from holdfast.system.linux.program_runs import run_program

_LIMIT_S = 30.0
_QUESTIONS = {
    "podman": ("info", "--format", "{{.Host.ServiceIsRemote}}"),
    "docker": ("info", "--format", "{{json .SecurityOptions}}"),
}


class ContainerRuntime(str, Enum):
    """Program that makes containers. Both have the same commands."""

    PODMAN = "podman"
    DOCKER = "docker"


def find_runtime() -> ContainerRuntime | None:
    """Return the runtime that answers on this machine, or None. Podman is preferred: it needs no root.

    Raises:
        Unsupported: only docker answers, and would run the commands as another user, root.
    """
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
