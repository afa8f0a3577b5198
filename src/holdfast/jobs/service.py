"""Service of a state folder: a systemd user unit continues its jobs after a restart of the machine.

Source: systemd.service(5), systemd.exec(5) and systemd.syntax(7) about units and their quoting.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pwd
import re
import shlex
import shutil
import sys
from pathlib import Path

from msgspec import Struct

from holdfast.errors import InvalidInput, NotFound, RetryLater, TimedOut, Unsupported
from holdfast.jobs.engine import Job
from holdfast.jobs.folder import STATE, state_dir, state_path
from holdfast.jobs.local.engine import LocalEngine
from holdfast.jobs.records import Records
from holdfast.system.entry import command
from holdfast.system.linux import program_runs
from holdfast.system.linux.files import write_atomic

_PATH = "PYTHONPATH"
_MAX_NAME = 40
_LIMIT_S = 60.0
_RUNTIME = "XDG_RUNTIME_DIR"
_TARGET = "default.target"
_STOP_S = 60  # time for the jobs at the end of the machine: the lead of their notice, and as much again


class Service(Struct, frozen=True):
    """Service of a state folder."""

    name: str  # its name
    state: str  # path of the state folder
    unit: str | None  # path of the installed unit; None if there is none
    command: str  # the command that runs after a restart, for a shell
    starts: tuple[int, ...]  # numbers of the jobs that it would continue now
    problems: tuple[str, ...]  # reasons why it may not start the jobs, each with the remedy


def install() -> Service:
    """Install the service of the state folder. A second time changes nothing."""
    boot = make_boot_command(state_dir())
    if not boot.is_installed():
        if not _has_manager():
            raise Unsupported(
                "The service cannot be installed on this machine: no systemd manager of this user is "
                "running. Nothing was changed. Log in as this user in a session of systemd, and repeat the "
                f"command. {boot.other_way()}"
            )
        path, _ = _unit_paths(boot.name)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(path, boot.unit_text())
        for words in (("daemon-reload",), ("enable", path.name)):
            done = run_program("systemctl", "--user", *words)
            if done.status != 0:
                _remove_unit(boot.name)
                raise Unsupported(
                    f"`systemctl --user {' '.join(words)}` failed for {path}: {done.message}. Nothing was "
                    f"installed. {boot.other_way()}"
                )
    user = pwd.getpwuid(os.getuid()).pw_name
    if not _lingers(user) and shutil.which("loginctl"):
        run_program("loginctl", "--no-ask-password", "enable-linger", user)
    return status()


def uninstall() -> bool:
    """Remove the service of the state folder. Return True if there was one. Jobs continue."""
    return _remove_unit(service_name(state_path()))


def status() -> Service:
    """Return the service of the state folder."""
    boot = make_boot_command(state_dir())
    path, link = _unit_paths(boot.name)
    is_enabled = path.exists() and link.is_symlink()
    problems: list[str] = []
    user = pwd.getpwuid(os.getuid()).pw_name
    if is_enabled and not _lingers(user):
        problems.append(
            f"systemd starts it only when {user} logs in, and ends its jobs when {user} logs out. To "
            f"start it with the machine, run: sudo loginctl enable-linger {user}"
        )
    if is_enabled and not boot.is_installed():
        problems.append(
            f"it was installed for another Python or Holdfast than this one ({sys.executable}). To use this "
            "one, run: holdfast service install"
        )
    records = Records(boot.state).all(LocalEngine.name)
    return Service(
        name=boot.name,
        state=str(boot.state),
        unit=str(path) if is_enabled else None,
        command=boot.shell_text(),
        starts=tuple(record.job.number for record in records if not record.state.job_state.status.is_final),
        problems=tuple(problems),
    )


def start() -> list[Job]:
    """Start the controllers of all local jobs that have not ended, and return these jobs."""
    if not state_path().is_dir():
        raise NotFound(
            f"The state folder {state_path()} does not exist. Nothing was started. If it is on a disk that "
            f"is mounted later, run `{STATE}={shlex.quote(str(state_path()))} holdfast service start` then."
        )
    return [job for job in LocalEngine().jobs() if not job.status.is_final]


class BootCommand(Struct, frozen=True):
    """Command with its environment."""

    name: str  # name of the service, made of that of the folder and a hash of its path
    state: Path  # the state folder
    environment: dict[str, str]  # variables that it requires, by name
    words: tuple[str, ...]  # the program and its arguments, all paths absolute

    def shell_text(self) -> str:
        """Return it for a shell."""
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(self.words)])

    def unit_text(self) -> str:
        """Return the text of its unit."""
        # The jobs stay in it after the command has ended. At the shutdown of the machine they get SIGTERM,
        # which is a preemption notice. A job that is out of memory does not end the others.
        pairs = (f"{name}={value}" for name, value in self.environment.items())
        variables = "\n".join(f"Environment={_quoted(pair)}" for pair in pairs)
        words = " ".join(_quoted(word).replace("$", "$$") for word in self.words)
        state = str(self.state).replace("%", "%%")
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

    def is_installed(self) -> bool:
        """Return True if the unit of exactly this command is installed."""
        path, link = _unit_paths(self.name)
        return path.exists() and link.is_symlink() and path.read_text() == self.unit_text()

    def other_way(self) -> str:
        """Return how to run it after each start of the machine without systemd."""
        return f"Or have this command run as this user after each start of the machine: {self.shell_text()}"


def make_boot_command(state: Path) -> BootCommand:
    """Return the command for a state folder, with this process's interpreter and package."""
    words = tuple(command("holdfast.cli", "service", "start"))
    environment = {STATE: str(state)}
    if parts := [part for part in os.environ.get(_PATH, "").split(os.pathsep) if part]:
        environment[_PATH] = os.pathsep.join(str(Path(part).absolute()) for part in parts)
    for text in (*words, *environment.values()):
        if any(one < " " or one == "\x7f" or "\ud800" <= one <= "\udfff" for one in text):
            raise InvalidInput(
                f"{text!r} has a line break, another control character or bytes that are not UTF-8, and "
                "cannot be part of a service. Nothing was changed. Use a folder with another name."
            )
    return BootCommand(service_name(state), state, environment, words)


def service_name(state: Path) -> str:
    """Return the name of a folder's service: a name of a file, without characters that need quotes."""
    place = os.fsencode(state.resolve())
    shown = re.sub(r"[^A-Za-z0-9_]+", "-", state.name).strip("-")[:_MAX_NAME]
    return f"holdfast-{shown or 'jobs'}-{hashlib.sha256(place).hexdigest()[:8]}"


def _quoted(text: str) -> str:
    """Quote a text for a unit. A backslash escapes there, and a percent sign begins a specifier."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'


def _unit_paths(name: str) -> tuple[Path, Path]:
    """Return the path of a service's unit, and that of the link that enables it."""
    configuration = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    path = Path(configuration).expanduser().absolute() / "systemd" / "user" / f"{name}.service"
    return path, path.parent / f"{_TARGET}.wants" / path.name


def _has_manager() -> bool:
    is_there = shutil.which("systemctl") is not None
    return is_there and run_program("systemctl", "--user", "show-environment").status == 0


def _remove_unit(name: str) -> bool:
    """Remove a service's unit, also without a manager. Return True if it existed. Its jobs continue."""
    path, link = _unit_paths(name)
    existed = path.exists() or link.is_symlink()
    link.unlink(missing_ok=True)
    path.unlink(missing_ok=True)
    for folder in (link.parent, path.parent, path.parent.parent):
        with contextlib.suppress(OSError):  # it is not empty, or does not exist
            folder.rmdir()
    if existed and _has_manager():
        run_program("systemctl", "--user", "daemon-reload")
    return existed


def _lingers(user: str) -> bool:
    """Return True if the manager of a user starts with the machine."""
    if shutil.which("loginctl") is None:
        return False
    done = run_program("loginctl", "show-user", user, "--property=Linger", "--value")
    return done.status == 0 and done.out.strip() == b"yes"


def run_program(*words: str) -> program_runs.Ended:
    """Run a program, and return its result."""
    environment = {**os.environ, "LC_ALL": "C"}
    line, runtime = " ".join(words), Path(f"/run/user/{os.getuid()}")
    if _RUNTIME not in environment and runtime.is_dir():  # unset by su and sudo
        environment[_RUNTIME] = str(runtime)
    try:
        return program_runs.run_program(words, timeout_s=_LIMIT_S, env=environment)
    except TimedOut:
        raise
    except OSError as error:
        raise RetryLater(f"`{line}` could not be started: {error}.") from error
