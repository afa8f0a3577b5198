"""Installation of the service of a state folder, as a systemd user unit, and the start of its jobs.

Source: systemd.service(5), systemd.exec(5) and systemd.syntax(7) about units and their quoting.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.errors import NotFound, Unsupported
from holdfast.jobs.engine import Job
from holdfast.jobs.folder import STATE, state_dir, state_path
from holdfast.jobs.local.engine import LocalEngine
from holdfast.jobs.records import Records
from holdfast.jobs.service.boot_command import (
    BootCommand,
    has_program,
    make_boot_command,
    run_program,
    service_name,
)
from holdfast.system.linux.files import write_atomic


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
    """Install the service of the state folder. A second time changes nothing."""
    command = make_boot_command(state_dir())
    if not is_current(command):
        if not has_manager():
            raise Unsupported(
                "The service cannot be installed on this machine: no systemd manager of this user is "
                "running. Nothing was changed. Log in as this user in a session of systemd, and repeat the "
                "command. "
                f"{other_way(command)}"
            )
        install_unit(command)
    enable_lingering()
    return status()


def uninstall() -> bool:
    """Remove the service of the state folder. Return True if there was one. Jobs continue."""
    return remove_unit(service_name(state_path()))


def status() -> Service:
    """Return the service of the state folder."""
    command = make_boot_command(state_dir())
    is_installed = is_enabled(command.name)
    records = Records(command.state).all(LocalEngine.name)
    return Service(
        name=command.name,
        state=str(command.state),
        unit=str(unit_path(command.name)) if is_installed else None,
        command=command.shell_text(),
        cron_line=command.cron_line(),
        starts=tuple(record.id for record in records if not record.job_state.status.is_final),
        problems=tuple(_problems(command)) if is_installed else (),
    )


def start() -> list[Job]:
    """Start the controllers of all jobs that have not ended, and return these jobs.

    Jobs on Slurm and SkyPilot are not among them: those systems restart them.
    """
    if not state_path().is_dir():
        raise NotFound(
            f"The state folder {state_path()} does not exist. Nothing was started. If it is on a disk that "
            f"is mounted later, run `{STATE}={shlex.quote(str(state_path()))} holdfast service start` then."
        )
    return [job for job in LocalEngine().jobs() if not job.status.is_final]


def _problems(command: BootCommand) -> Iterator[str]:
    """Yield why an installed service may not start the jobs."""
    if not lingers():
        user = user_name()
        yield (
            f"systemd starts it only when {user} logs in, and ends its jobs when {user} logs out. To "
            f"start it with the machine, run: sudo loginctl enable-linger {user}"
        )
    if not is_current(command):
        yield (
            f"it was installed for another Python or Holdfast than this one ({sys.executable}). To use this "
            "one, run: holdfast service install"
        )


_TARGET = "default.target"
_STOP_S = 60
"""Time for the jobs at the end of the machine: the lead of their notice, and as much again."""


def unit_text(command: BootCommand) -> str:
    """Return the unit of a command.

    The jobs stay in the unit after the command has ended. At the shutdown of the machine they get SIGTERM,
    which is a preemption notice. A job that is out of memory does not end the others.
    """
    variables = "\n".join(
        f"Environment={_quoted(f'{name}={value}')}" for name, value in command.environment.items()
    )
    words = " ".join(_quoted(word).replace("$", "$$") for word in command.words)
    state = str(command.state).replace("%", "%%")
    return f"""\
# Written by `holdfast service install`. `holdfast service uninstall` removes it.
[Unit]
Description=Continue the jobs in {state} after a restart

[Service]
Type=oneshot
RemainAfterExit=yes
OOMPolicy=continue
TasksMax=infinity
TimeoutStopSec={_STOP_S}
{variables}
ExecStart=/usr/bin/env {words}

[Install]
WantedBy={_TARGET}
"""


def _quoted(text: str) -> str:
    """Quote a text for a unit. A backslash escapes there, and a percent sign begins a specifier."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


def unit_path(name: str) -> Path:
    """Return the path of a service's unit."""
    configuration = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(configuration).expanduser().absolute() / "systemd" / "user" / f"{name}.service"


def other_way(command: BootCommand) -> str:
    """Return how to run a command after each start of the machine without systemd."""
    line = command.cron_line()
    by_cron = f"add this line with `crontab -e`: {line}" if line else "use another program"
    return f"Or have `{command.shell_text()}` run as this user after each start of the machine: {by_cron}"


def has_manager() -> bool:
    """Return True if a systemd manager of this user is running."""
    return has_program("systemctl") and run_program("systemctl", "--user", "show-environment").status == 0


def is_enabled(name: str) -> bool:
    """Return True if a service's unit exists, and the manager starts it."""
    return unit_path(name).exists() and _link(name).is_symlink()


def is_current(command: BootCommand) -> bool:
    """Return True if the unit of exactly this command is installed."""
    return is_enabled(command.name) and unit_path(command.name).read_text() == unit_text(command)


def install_unit(command: BootCommand) -> None:
    """Write the unit of a command, and enable it."""
    path = unit_path(command.name)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomic(path, unit_text(command))
    for words in (("daemon-reload",), ("enable", path.name)):
        done = run_program("systemctl", "--user", *words)
        if done.status != 0:
            remove_unit(command.name)
            raise Unsupported(
                f"`systemctl --user {' '.join(words)}` failed for {path}: {done.message}. Nothing was "
                f"installed. {other_way(command)}"
            )


def remove_unit(name: str) -> bool:
    """Remove a service's unit, also without a manager. Return True if it existed.

    Jobs that it has started continue.
    """
    path, link = unit_path(name), _link(name)
    existed = path.exists() or link.is_symlink()
    link.unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    for folder in (link.parent, path.parent, path.parent.parent):
        with contextlib.suppress(OSError):  # it is not empty, or does not exist
            folder.rmdir()
    if existed and has_manager():
        run_program("systemctl", "--user", "daemon-reload")
    return existed


def _link(name: str) -> Path:
    path = unit_path(name)
    return path.parent / f"{_TARGET}.wants" / path.name


def user_name() -> str:
    """Return the name of this user."""
    return pwd.getpwuid(os.getuid()).pw_name


def lingers() -> bool:
    """Return True if this user's manager starts with the machine."""
    if not has_program("loginctl"):
        return False
    done = run_program("loginctl", "show-user", user_name(), "--property=Linger", "--value")
    return done.status == 0 and done.out.strip() == b"yes"


def enable_lingering() -> bool:
    """Enable the start of this user's manager with the machine. Return True if that is allowed."""
    if not lingers() and has_program("loginctl"):
        run_program("loginctl", "--no-ask-password", "enable-linger", user_name())
    return lingers()
