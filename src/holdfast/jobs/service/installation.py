"""Installation of the service of a state folder, and the start of its jobs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.errors import NotFound, Unsupported
from holdfast.jobs.engine import Job
from holdfast.jobs.local.engine import LocalEngine
from holdfast.jobs.records import Records
from holdfast.jobs.service import systemd
from holdfast.jobs.service.boot_command import BootCommand, make_boot_command, service_name
from holdfast.jobs.state_folder import STATE, state_dir, state_path


@dataclass(frozen=True, slots=True)
class Service:
    """Service of a state folder.

    Attributes:
        name: its name.
        state: path of the state folder.
        unit: path of the installed unit; None if there is none.
        command: the command that runs after a restart, for a shell.
        cron_line: the line of a crontab that runs it instead; None if it is too long for cron.
        starts: numbers of the jobs that it would continue now.
        problems: reasons why it may not start the jobs, each with the remedy.
    """

    name: str
    state: str
    unit: str | None
    command: str
    cron_line: str | None
    starts: tuple[int, ...]
    problems: tuple[str, ...]


def install() -> Service:
    """Install the service of the state folder. A second time changes nothing.

    Raises:
        Unsupported: no systemd manager of this user is running.
        InvalidInput: a path cannot be written in a unit.
    """
    command = make_boot_command(state_dir())
    if not systemd.is_current(command):
        if not systemd.has_manager():
            raise Unsupported(
                "The service cannot be installed on this machine: no systemd manager of this user is "
                "running. Nothing was changed. Log in as this user in a session of systemd, and repeat the "
                "command. "
                f"{systemd.other_way(command)}"
            )
        systemd.install_unit(command)
    systemd.enable_lingering()
    return status()


def uninstall() -> bool:
    """Remove the service of the state folder. Return True if there was one. Jobs continue."""
    return systemd.remove_unit(service_name(state_path()))


def status() -> Service:
    """Return the service of the state folder.

    Raises:
        InvalidInput: a path could not be written in a unit.
    """
    command = make_boot_command(state_dir())
    is_installed = systemd.is_enabled(command.name)
    records = Records(command.state).all(LocalEngine.name)
    return Service(
        name=command.name,
        state=str(command.state),
        unit=str(systemd.unit_path(command.name)) if is_installed else None,
        command=command.shell_text(),
        cron_line=command.cron_line(),
        starts=tuple(record.id for record in records if not record.job_state.status.is_final),
        problems=tuple(_problems(command)) if is_installed else (),
    )


def start() -> list[Job]:
    """Start the controllers of all jobs that have not ended, and return these jobs.

    Jobs on Slurm and SkyPilot are not among them: those systems restart them.

    Raises:
        NotFound: the state folder does not exist.
    """
    if not state_path().is_dir():
        raise NotFound(
            f"The state folder {state_path()} does not exist. Nothing was started. If it is on a disk that "
            f"is mounted later, run `{STATE}={shlex.quote(str(state_path()))} holdfast service start` then."
        )
    return [job for job in LocalEngine().jobs() if not job.status.is_final]


def _problems(command: BootCommand) -> Iterator[str]:
    """Yield why an installed service may not start the jobs."""
    if not systemd.lingers():
        user = systemd.user_name()
        yield (
            f"systemd starts it only when {user} logs in, and ends its jobs when {user} logs out. To "
            f"start it with the machine, run: sudo loginctl enable-linger {user}"
        )
    if not systemd.is_current(command):
        yield (
            f"it was installed for another Python or Holdfast than this one ({sys.executable}). To use this "
            "one, run: holdfast service install"
        )
