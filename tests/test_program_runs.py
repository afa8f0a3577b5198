"""Programs run to their end: all output arrives, and what they leave behind delays nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.errors import TimedOut
from holdfast.jobs import notifications
from holdfast.system.linux import program_runs
from holdfast.system.linux.processes import read_stat
from holdfast.system.linux.program_runs import run_program


@pytest.fixture
def pid_file(tmp_path: Path) -> Iterator[Path]:
    """A file for the process id of a daemon, which is killed at the end."""
    yield tmp_path / "pid"
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)


def test_a_daemon_that_keeps_pipes_delays_nothing(pid_file: Path) -> None:
    """As those that git and SkyPilot start. Every command of the system failed at its time limit."""
    code = f"sleep 600 & echo $! > {pid_file}; echo out; echo err >&2; exit 3"
    done = run_program(("sh", "-c", code), timeout_s=5.0)
    assert (done.status, done.text, done.error, done.message) == (3, "out", "err", "err")
    assert read_stat(int(pid_file.read_text())) is not None


def test_a_hook_with_a_daemon_ends_at_its_limit(pid_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It had been killed, and the rest of its input was still to be sent."""
    monkeypatch.setattr(notifications, "_HOOK_LIMIT_S", 0.5)
    command = f"setsid sleep 600 <&0 & echo $! > {pid_file}; sleep 600"
    failure = notifications.run_hook(command, bytes(1 << 20), environment=os.environ, directory="/")
    assert failure.endswith("and was killed")


def test_a_program_that_ignores_its_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_runs, "_END_S", 0.1)
    pids: list[bytes] = []
    code = "trap '' TERM; echo $$; while :; do sleep 0.05; done"
    with pytest.raises(TimedOut, match="did not end within"):
        run_program(["sh", "-c", code], timeout_s=0.3, on_output=pids.append)
    assert read_stat(int(pids[0])) is None


def test_a_program_is_ended_by_an_error_of_its_owner() -> None:
    pids: list[bytes] = []

    def stop() -> None:
        if pids:
            raise KeyError

    command = ["sh", "-c", "echo $$; exec sleep 600"]
    with pytest.raises(KeyError):
        run_program(command, timeout_s=None, on_output=pids.append, on_look=stop)
    assert read_stat(int(pids[0])) is None


def test_all_output_passes_and_no_input() -> None:
    """More than a pipe holds."""
    assert run_program(["head", "-c", f"{1 << 20}", "/dev/zero"], timeout_s=60.0).out == bytes(1 << 20)
    assert run_program(["cat"], timeout_s=60.0).out == b""


def test_a_program_beside_a_folder_of_path_that_may_not_be_searched_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with the PATH of root after `su`. A file that may not be executed has the same error for root."""
    (tmp_path / "sinfo").write_text("")
    monkeypatch.setenv("PATH", str(tmp_path))
    for env in (None, {"PATH": str(tmp_path)}):
        with pytest.raises(FileNotFoundError, match="sinfo"):
            run_program(["sinfo"], timeout_s=5.0, env=env)
    with pytest.raises(PermissionError):
        run_program([str(tmp_path / "sinfo")], timeout_s=5.0)
