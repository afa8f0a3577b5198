"""Installation of a service: chosen between systemd and cron, never both."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import Denied, NotFound, Unsupported
from holdfast.jobs.engine import Job
from holdfast.jobs.local.engine import LocalEngine
from holdfast.jobs.records import Records
from holdfast.jobs.service import crontab, systemd
from holdfast.jobs.service.boot_command import BootCommand, has_program, make_boot_command, service_name
from holdfast.jobs.state_folder import STATE, state_dir, state_path

WAYS = ("systemd", "cron")
"""Programs that can run a service."""
_DAEMONS = frozenset({"cron", "crond", "fcron", "busybox"})


@dataclass(frozen=True, slots=True)
class Service:
    """Service of a state folder.

    Attributes:
        name: its name.
        state: path of the state folder.
        way: "systemd" or "cron"; None if it is not installed.
        place: path of the unit, or the crontab that has the line.
        command: the command that runs after a restart, for a shell.
        starts: numbers of the jobs that it would continue now.
        problems: reasons why it may not start the jobs, each with the remedy.
    """

    name: str
    state: str
    way: str | None
    place: str
    command: str
    starts: tuple[int, ...]
    problems: tuple[str, ...]


def install(way: str | None = None) -> Service:
    """Install the service of the state folder. A second time changes nothing.

    Args:
        way: "systemd" or "cron". Default: the present one, or systemd if a manager of this user is running,
            or else cron.

    Raises:
        Unsupported: this machine has neither of them, or not the chosen one.
        InvalidInput: a path cannot be written there.
        Denied: this user cannot have a crontab.
    """
    command = make_boot_command(state_dir())
    if (way or _choose(command)) == "systemd":
        if not systemd.is_current(command):
            _check(systemd.has_manager(), "no systemd manager of this user is running", command)
            systemd.install_unit(command)
        systemd.enable_lingering()
        _remove_line(command.name)
    else:
        _check(has_program("crontab"), "the program crontab is not installed", command)
        table = crontab.read_crontab()
        if (changed := crontab.with_line(table, crontab.cron_line(command), command.name)) != table:
            crontab.write_crontab(changed)
        systemd.remove_unit(command.name)
    return status()


def uninstall() -> bool:
    """Remove the service of the state folder. Return True if there was one. Jobs continue."""
    name = service_name(state_path())
    had_unit, had_line = systemd.remove_unit(name), _remove_line(name)
    if had_line:
        (state_path() / "service.log").unlink(missing_ok=True)
    return had_unit or had_line


def status() -> Service:
    """Return the service of the state folder.

    Raises:
        InvalidInput: a path could not be written in a unit or a crontab.
    """
    command = make_boot_command(state_dir())
    line = crontab.find_line(_table(), command.name)
    way = "systemd" if systemd.is_enabled(command.name) else "cron" if line is not None else None
    place = {"systemd": str(systemd.unit_path(command.name)), "cron": f"crontab of {systemd.user_name()}"}
    records = Records(command.state).all(LocalEngine.name)
    return Service(
        name=command.name,
        state=str(command.state),
        way=way,
        place=place.get(way or "", ""),
        command=_shell_text(command),
        starts=tuple(record.id for record in records if not record.job_state.status.is_final),
        problems=tuple(_problems(command, way, line)),
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


def _choose(command: BootCommand) -> str:
    """Return the present way, or the one that this machine has."""
    if systemd.is_enabled(command.name):
        return "systemd"
    if crontab.find_line(_table(), command.name) is not None:
        return "cron"
    if systemd.has_manager():
        return "systemd"
    _check(
        has_program("crontab"),
        "no systemd manager of this user is running, and the program crontab is not installed",
        command,
    )
    return "cron"


def _check(is_possible: bool, why: str, command: BootCommand) -> None:
    """Check that a program can run the service.

    Raises:
        Unsupported: it cannot.
    """
    if not is_possible:
        raise Unsupported(
            f"The service cannot be installed on this machine: {why}. Nothing was changed. Install cron, or "
            "log in as this user in a session of systemd, and repeat the command. Or have this command run "
            f"as this user after each start of the machine: {_shell_text(command)}"
        )


def _table() -> bytes:
    """Return the user's crontab. For a user without access it counts as empty."""
    if not has_program("crontab"):
        return b""
    try:
        return crontab.read_crontab()
    except Denied:
        return b""


def _remove_line(name: str) -> bool:
    table = _table()
    without = crontab.without_line(table, name)
    if without == table:
        return False
    crontab.write_crontab(without)
    return True


def _shell_text(command: BootCommand) -> str:
    variables = [f"{name}={shlex.quote(value)}" for name, value in command.environment.items()]
    return " ".join([*variables, shlex.join(command.words)])


def _problems(command: BootCommand, way: str | None, line: bytes | None) -> Iterator[str]:
    """Yield why an installed service may not start the jobs."""
    if way == "systemd":
        is_current = systemd.is_current(command)
        if not systemd.lingers():
            user = systemd.user_name()
            yield (
                f"systemd starts it only when {user} logs in, and ends its jobs when {user} logs out. To "
                f"start it with the machine, run: sudo loginctl enable-linger {user}"
            )
    elif way == "cron":
        is_current = line == crontab.cron_line(command)
        if not _has_cron_daemon():
            yield "no cron daemon was found among the running processes. Start it, or have it enabled."
    else:
        return
    if not is_current:
        yield (
            f"it was installed for another Python or Holdfast than this one ({sys.executable}). To use this "
            "one, run: holdfast service install"
        )


def _has_cron_daemon() -> bool:
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            try:
                name = Path(entry.path, "comm").read_text().strip()
            except OSError:
                continue  # it has ended
            if name in _DAEMONS:
                return True
    return False
