"""A training on four hosts under an elastic torchrun: one is lost, the others continue, and it comes back."""

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
    [[], ["--standby"], ["--silent", "--ranks-each", "2"]],
    ids=["plain", "standbys", "silent"],
)
def test_a_lost_host_is_continued_without_and_taken_in_again(options: list[str], tmp_path: Path) -> None:
    """The steps since the last copy are lost, and neither samples, losses nor weights change by a bit."""
    program = [sys.executable, "-m", "campaigns.fewer_hosts", "--inside", "--runs", "1", "--seed", "1"]
    try:
        command = isolated([*program, "--folder", str(tmp_path), *options])
    except Unsupported as error:
        pytest.skip(str(error))
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
