"""Kills at any moment: the bucket's contents stay in order, and in the end nothing is missing."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import NotFound, RetryLater
from holdfast.system.failpoint import POINTS
from writeback.checkpoint_writer import COPIED_BYTES
from writeback.harness import MountedDirectory, wait_for

JOB = Path(__file__).parent / "checkpoint_writer.py"
MakeDirectory = Callable[..., MountedDirectory]


def run_job(mounted: MountedDirectory, first: int, last: int) -> subprocess.Popen[bytes]:
    """Start a program that saves these steps."""
    words = [sys.executable, str(JOB), str(mounted.directory), str(first), str(last)]
    return subprocess.Popen(words, stdout=subprocess.PIPE)


def check_bucket(mounted: MountedDirectory) -> None:
    """Check that every marker in the bucket refers to complete data, and `latest` to an existing marker.

    The job deletes a marker before its data, so one that is still there after its data was read must be
    right.
    """
    found = [entry.name for entry in mounted.store.list("marker-")]
    for name in found:
        try:
            hashes = json.loads(mounted.store.get(name))
            for data, digest in hashes.items():
                assert hashlib.sha256(mounted.store.get(data)).hexdigest() == digest
        except NotFound:
            assert mounted.store.size(name) is None, f"{name} refers to missing data. {mounted.describe()}"
    try:
        latest = mounted.store.get("latest").decode()
        if not latest:
            return  # the job was killed between truncating and writing it
        missing = mounted.store.size(f"marker-{latest}") is None
        assert not missing or mounted.store.get("latest").decode() != latest, f"latest says {latest}"
    except NotFound:
        pass


def wait_and_check(mounted: MountedDirectory, is_over: Callable[[], Any]) -> None:
    def looked() -> Any:
        check_bucket(mounted)
        return is_over()

    wait_for(looked, "the end of a job", mounted.describe)


POINTS_OF_STORE = ("store.written", "store.synced", "store.linked")


@pytest.mark.parametrize("count", [1, pytest.param(7, marks=pytest.mark.slow)])
@pytest.mark.parametrize("point", [*(p for p in POINTS if p.startswith("writeback.")), *POINTS_OF_STORE])
def test_a_kill_of_the_uploader_between_any_two_effects_loses_nothing(
    make_directory: MakeDirectory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, point: str, count: int
):
    """SIGKILL at each failpoint. Another uploader continues, and the order holds throughout."""
    mounted = make_directory()
    for number in range(10):
        mounted.store.put(f"early-{number}", b"to be fetched")
    mark = tmp_path / "killed"
    monkeypatch.setenv("HOLDFAST_KILL_AT", f"{point}:{count}")
    monkeypatch.setenv("HOLDFAST_KILL_MARK", str(mark))
    options = {"copy_bytes": COPIED_BYTES}
    is_early = False
    try:
        mounted.mount(**options)
    except RetryLater:
        is_early = mark.exists()
        mounted.mount(**options)
    with run_job(mounted, 1, 5) as job:
        wait_and_check(mounted, lambda: job.poll() is not None)
    wait_and_check(mounted, lambda: mark.exists() or mounted.status().is_settled)
    assert mark.exists(), f"nobody was killed at {point}"
    if not is_early:
        mounted.wait_until_gone()  # the mark is made just before the kill
    mounted.mount(**options)
    wait_and_check(mounted, lambda: mounted.status().is_settled)
    assert mounted.drained() == mounted.local()
    assert mounted.bucket()["latest"] == b"5"


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(100, 125))]
)
def test_random_kills(make_directory: MakeDirectory, seed: int):
    """Kill the job, the uploader or both at random moments, then let a job finish."""
    mounted, draw, num_kills = make_directory(), random.Random(seed), 6 if seed else 3
    mounted.mount(copy_bytes=COPIED_BYTES)
    step = 1
    for _ in range(num_kills):
        with run_job(mounted, step, step + 500) as job:
            assert job.stdout is not None
            for _ in range(draw.randint(1, 6)):
                step = int(job.stdout.readline())
            victim = draw.choice(["job", "uploader", "both"])
            check_bucket(mounted)
            if victim != "job":
                mounted.kill()
            if victim == "uploader":  # the job continues without an uploader for a while
                for _ in range(draw.randint(0, 3)):
                    step = int(job.stdout.readline())
            job.kill()
            for line in job.stdout.read().split():
                step = int(line)
        check_bucket(mounted)
        assert mounted.status().is_drained is False or mounted.bucket() == mounted.local()
        mounted.mount(copy_bytes=COPIED_BYTES)
        step += 1
    with run_job(mounted, step, step + 2) as job:
        wait_and_check(mounted, lambda: job.poll() is not None)
    wait_and_check(mounted, lambda: mounted.status().is_settled)
    assert mounted.drained() == mounted.local()
    assert mounted.bucket()["latest"] == str(step + 2).encode()
