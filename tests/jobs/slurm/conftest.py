"""Fixtures of Slurm jobs: a cluster, and a harness that submits to it."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.slurm.harness import SlurmHarness
from jobs.slurm.onebox import OneBox, missing, one_box
from jobs.slurm.stand_in import StandIn


@pytest.fixture(scope="session")
def cluster() -> Iterator[OneBox]:
    """Return a cluster of two nodes on this machine. Skips where Slurm is not installed."""
    if why := missing():
        pytest.skip(why)
    with one_box() as found:
        yield found


@pytest.fixture
def slurm(cluster: OneBox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmHarness]:
    """Return a harness for the idle cluster."""
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    monkeypatch.setenv("HOLDFAST_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("HOLDFAST_NODE_CHECKS", "off")  # they would take a part of the time of all tests
    deadline = time.monotonic() + 60
    while not cluster.is_idle():
        assert time.monotonic() < deadline, subprocess.run(["squeue"], capture_output=True, text=True).stdout
        time.sleep(0.2)
    found = SlurmHarness(tmp_path)
    yield found
    found.leave()


@pytest.fixture
def desk(stand_in: StandIn, tmp_path: Path) -> SlurmHarness:
    """Return a harness for the stand-in."""
    return SlurmHarness(tmp_path)


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Return a stand-in for Slurm that is first on the PATH. Each node has a disk of its own."""
    found = StandIn(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{found.folder}:{os.environ['PATH']}")
    monkeypatch.setenv("HOLDFAST_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("HOLDFAST_SCRATCH", f"{tmp_path}/disks/$SLURMD_NODENAME")
    monkeypatch.setenv("HOLDFAST_PREEMPTION", "none")
    return found
