"""Trainings on hosts made of namespaces: a host is lost, replaced or not, or its peers have trouble."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli.demo.hosts import isolated
from holdfast.errors import Unsupported

ROOT = Path(__file__).parents[2]
LIMIT_S = 900.0  # more than all waits of one run together

pytestmark = pytest.mark.alone


def run(campaign: str, folder: Path, *options: str) -> None:
    """Run a campaign of one kind of host, which checks itself."""
    program = [
        sys.executable,
        "-m",
        f"campaigns.{campaign}",
        "--inside",
        "--seed",
        "1",
        "--folder",
        str(folder),
    ]
    try:
        command = isolated([*program, *options])
    except Unsupported as error:
        pytest.skip(f"this machine makes no hosts: {error}")
    environment = {**os.environ, "HOLDFAST_KEEP_IN_MEMORY": "2m"}  # other tests keep nothing
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "options",
    [[], ["--standby"], ["--silent", "--ranks-each", "2"]],
    ids=["plain", "standbys", "silent"],
)
def test_a_lost_host_is_continued_without_and_taken_in_again(options: list[str], tmp_path: Path) -> None:
    """The steps since the last copy are lost, and neither samples, losses nor weights change by a bit."""
    run("fewer_hosts", tmp_path, "--runs", "1", *options)


@pytest.mark.parametrize("late_s", [0, 40])
def test_a_lost_host_that_is_replaced_costs_nothing_before_the_last_copy(tmp_path: Path, late_s: int) -> None:
    """After 30 s keepers give up the saves that the lost host has no part of, but not their memory."""
    run("lost_hosts", tmp_path, "--runs", "1", "--hosts", "3", "--steps", "30", "--late", str(late_s))


def test_trouble_of_peers_stops_no_training(tmp_path: Path) -> None:
    """No step waits for the end of a trouble, and copies are made again after it."""
    run("lost_hosts", tmp_path, "--troubles")
