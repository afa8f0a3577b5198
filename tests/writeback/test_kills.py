"""Whatever is killed, whenever: what the bucket shows is in order, and in the end nothing is missing."""

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
from holdfast.killpoint import POINTS
from writeback.desk import Desk, wait_for
from writeback.job import COPIED_BYTES

JOB = Path(__file__).parent / "job.py"
MakeDesk = Callable[..., Desk]


def run_job(desk: Desk, first: int, last: int) -> subprocess.Popen[bytes]:
    """Start a program that saves these steps."""
    words = [sys.executable, str(JOB), str(desk.directory), str(first), str(last)]
    return subprocess.Popen(words, stdout=subprocess.PIPE)


def check_bucket(desk: Desk) -> None:
    """Every marker in the bucket speaks of data that is there, whole; `latest` of a marker that is there.

    The job deletes a marker before its data, so one that is still there after its data was read must be
    right.
    """
    found = [entry.name for entry in desk.store.list("marker-")]
    for name in found:
        try:
            hashes = json.loads(desk.store.get(name))
            for data, digest in hashes.items():
                assert hashlib.sha256(desk.store.get(data)).hexdigest() == digest
        except NotFound:
            assert desk.store.size(name) is None, f"{name} speaks of what is not there"
    try:
        latest = desk.store.get("latest").decode()
        if not latest:
            return  # the job was killed between emptying and writing it
        missing = desk.store.size(f"marker-{latest}") is None
        assert not missing or desk.store.get("latest").decode() != latest, f"latest says {latest}"
    except NotFound:
        pass


def wait_and_check(desk: Desk, is_over: Callable[[], Any]) -> None:
    def looked() -> Any:
        check_bucket(desk)
        return is_over()

    wait_for(looked, "the end of a job", desk.told)


POINTS_OF_STORE = ("store.written", "store.synced", "store.linked")


@pytest.mark.parametrize("count", [1, pytest.param(7, marks=pytest.mark.slow)])
@pytest.mark.parametrize("point", [*(p for p in POINTS if p.startswith("writeback.")), *POINTS_OF_STORE])
def test_a_kill_of_the_uploader_between_any_two_effects_loses_nothing(
    desks: MakeDesk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, point: str, count: int
):
    """SIGKILL at each named place; another uploader goes on, and the order holds throughout."""
    desk = desks()
    for number in range(10):
        desk.store.put(f"early-{number}", b"to be fetched")
    mark = tmp_path / "killed"
    monkeypatch.setenv("HOLDFAST_KILL_AT", f"{point}:{count}")
    monkeypatch.setenv("HOLDFAST_KILL_MARK", str(mark))
    options = {"copy_bytes": COPIED_BYTES}
    is_early = False
    try:
        desk.mount(**options)
    except RetryLater:
        is_early = mark.exists()
        desk.mount(**options)
    with run_job(desk, 1, 5) as job:
        wait_and_check(desk, lambda: job.poll() is not None)
    wait_and_check(desk, lambda: mark.exists() or desk.status().is_settled)
    assert mark.exists(), f"nobody was killed at {point}"
    if not is_early:
        desk.wait_until_gone()  # the mark is made just before the kill
    desk.mount(**options)
    wait_and_check(desk, lambda: desk.status().is_settled)
    assert desk.drained() == desk.local()
    assert desk.bucket()["latest"] == b"5"


def check_random_kills(desk: Desk, seed: int, num_kills: int) -> None:
    """Kill job, uploader or both at random moments; then let a job finish."""
    draw = random.Random(seed)
    desk.mount(copy_bytes=COPIED_BYTES)
    step = 1
    for _ in range(num_kills):
        with run_job(desk, step, step + 500) as job:
            assert job.stdout is not None
            for _ in range(draw.randint(1, 6)):
                step = int(job.stdout.readline())
            victim = draw.choice(["job", "uploader", "both"])
            check_bucket(desk)
            if victim != "job":
                desk.kill()
            if victim == "uploader":  # the job goes on unwatched for a while
                for _ in range(draw.randint(0, 3)):
                    step = int(job.stdout.readline())
            job.kill()
            for line in job.stdout.read().split():
                step = int(line)
        check_bucket(desk)
        assert desk.status().is_drained is False or desk.bucket() == desk.local()
        desk.mount(copy_bytes=COPIED_BYTES)
        step += 1
    with run_job(desk, step, step + 2) as job:
        wait_and_check(desk, lambda: job.poll() is not None)
    wait_and_check(desk, lambda: desk.status().is_settled)
    assert desk.drained() == desk.local()
    assert desk.bucket()["latest"] == str(step + 2).encode()


@pytest.mark.parametrize("seed", range(1))
def test_random_kills(desks: MakeDesk, seed: int):
    """A few of the random kills that the long suite makes by the hundred."""
    check_random_kills(desks(), seed, num_kills=3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 125))
def test_hundreds_of_random_kills(desks: MakeDesk, seed: int):
    check_random_kills(desks(), seed, num_kills=6)
