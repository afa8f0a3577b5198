"""Secrets of a job in its folder, and their removal after its end."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from msgspec.structs import replace

from holdfast.errors import Conflict, Corrupt
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.journal import write_document
from holdfast.jobs.node_spec import NodeSpec
from holdfast.system.failpoint import failpoint
from holdfast.system.linux import locks
from holdfast.system.linux.files import write_atomic
from holdfast.system.log import get_logger

_log = get_logger("jobs")

_CREDENTIALS = re.compile(rb"(?i)(https?://)[^\s/]+@")
"""User and password, or a token, in the URL of a repository."""
_LEFT_BY_KILLS = (
    ".*.json.*",
    "attempts/*/*/.plan.json.*",
    "attempts/*/.*/plan.json",
    "attempts/*/.*/.plan.json.*",
)
"""Files that a process was writing when it was killed."""


def has_secrets(folder: JobFolder) -> bool:
    """Return True if the secrets of a job may still be in its folder."""
    return not folder.without_secrets.exists()


def check_has_secrets(folder: JobFolder) -> None:
    """Check that a job can be started: its secrets are removed when it has ended."""
    if not has_secrets(folder):
        raise Conflict(
            f"The job in {folder.path} had ended, so its variables and secrets were removed, and it cannot "
            "be started again. Launch it as a new job."
        )


def remove_secrets(folder: JobFolder) -> None:
    """Remove the secrets of a job that has ended from its folder, unless they are gone.

    Uploads that continue after the end have them in their processes. The next call completes a killed one.
    """
    if not has_secrets(folder):
        return
    try:
        failpoint("jobs.ended")
        for plan in folder.path.glob("attempts/*/*/plan.json"):
            _remove_environment(plan)
        failpoint("jobs.plans")
        for pattern in _LEFT_BY_KILLS:
            for path in folder.path.glob(pattern):
                path.unlink(missing_ok=True)
        for config in _settings_of_git(folder):
            text = config.read_bytes()
            if (without := _CREDENTIALS.sub(rb"\1", text)) != text:
                write_atomic(config, without)
        folder.environment.unlink(missing_ok=True)
        folder.without_secrets.touch(mode=0o600)
    except FileNotFoundError:
        return  # the job is being removed
    except OSError as error:
        _log.warning("cannot remove the secrets of a job that has ended from %s: %s", folder.path, error)


def remove_secrets_of_ended(folder: JobFolder) -> None:
    """Remove the secrets of an ended job, unless its controller is running, which does so itself."""
    if has_secrets(folder):
        # An error: the job is being removed, or the next call tries again.
        with suppress(OSError), locks.held(folder.lock) as lock:
            if lock is not None:
                remove_secrets(folder)


def _remove_environment(path: Path) -> None:
    """Remove the environments from the specification of a node. The rest describes the attempt."""
    try:
        plan = NodeSpec.read(path)
        if plan.environment:
            write_document(path, replace(plan, environment={}))
    except FileNotFoundError:
        return
    except (Corrupt, OSError):  # damaged, or the disk is full
        path.unlink(missing_ok=True)


def _settings_of_git(folder: JobFolder) -> Iterator[Path]:
    """Yield git's settings in workdirs, also those of submodules. Nothing outside of the job's folder."""
    own = folder.path.resolve()
    for repository in folder.path.glob("nodes/*/workdir/.git"):
        for path in (repository / "config", *repository.glob("modules/**/config")):
            if path.resolve().is_relative_to(own) and path.is_file():
                yield path
