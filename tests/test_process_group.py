"""Process groups: nothing of a command is left at the end of its block, and its output is in the log."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from holdfast.system.linux.processes import end_of, process_group, read_stat
from stage.training import wait_until

# Prints the pid of a child that ignores every polite signal and outlives its parent.
_LEAVES_A_CHILD = """
import os, signal
if child := os.fork():
    print(child, flush=True)
else:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pause()
"""


def test_a_child_that_a_command_leaves_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with process_group([sys.executable, "-c", _LEAVES_A_CHILD], os.environ, log) as process:
        assert process.wait() == 0
        child = int(log.read_text())
        assert read_stat(child) is not None
    wait_until(lambda: read_stat(child) is None)


def test_a_command_is_killed_if_the_block_fails(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    with pytest.raises(KeyError), process_group(command, os.environ, tmp_path / "log") as process:
        raise KeyError
    assert process.returncode == -signal.SIGKILL


def test_the_log_has_all_output_and_its_end_is_shown(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = "import sys; [print(i) for i in range(40)]; sys.stdout.flush(); print('failed', file=sys.stderr)"
    with process_group([sys.executable, "-c", code], os.environ, log) as process:
        process.wait()
    assert end_of(log).splitlines() == [*map(str, range(26, 40)), "failed"]
    assert len(log.read_text().splitlines()) == 41
