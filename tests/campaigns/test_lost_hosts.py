"""Lost hosts and troubled peers of a training whose saves are in memory of peers, one run of each kind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli.demo.hosts import isolated
from holdfast.errors import Unsupported

ROOT = Path(__file__).parents[2]
LIMIT_S = 900.0  # more than all waits of one run together


@pytest.mark.alone
@pytest.mark.parametrize(
    "options",
    [["--runs", "1", "--hosts", "3", "--steps", "30"], ["--troubles"]],
    ids=["lost hosts", "troubles"],
)
def test_a_lost_host_costs_nothing_after_the_last_copy_and_no_trouble_stops_the_training(
    options: list[str], tmp_path: Path
) -> None:
    """In trouble no step waits for its end, and copies are made again after it."""
    program = [sys.executable, "-m", "campaigns.lost_hosts", "--inside", "--seed", "1"]
    try:
        command = isolated([*program, "--folder", str(tmp_path), *options])
    except Unsupported as error:
        pytest.skip(str(error))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
