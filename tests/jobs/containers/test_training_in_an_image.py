"""A training in an image: it is preempted and lost, and ends with the weights of one that was not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from holdfast.errors import PREEMPTED_STATUS
from holdfast.jobs import describe
from jobs.containers.images import IMAGE_FOR_TORCH, require_for_torch
from jobs.harness import JobHarness

ROOT = Path(__file__).parents[3]
TOTAL = 60
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _podman() -> None:
    if Path(sys.base_prefix).is_relative_to("/usr"):
        pytest.skip("this Python is in /usr, which is the image's own in a container")
    require_for_torch("podman")


def test_a_training_in_an_image_resumes_exactly(harness: JobHarness) -> None:
    train = f"{sys.executable} {ROOT}/tests/jobs/training.py"
    whole = harness.folder / "whole"
    reference = harness.submit(f"{train} {whole}/home {TOTAL}", setup=f"mkdir {whole}")
    places = {str(ROOT), sys.prefix, sys.base_prefix}
    mounts = "\n".join(f"  {place}: {{source: {place}, mode: MOUNT}}" for place in sorted(places))
    job = harness.submit(
        f"mkdir -p /runs/one; [ -x /bin/busybox ] && {train} /runs/one/home {TOTAL} --step-s 0.2",
        head=f"resources: {{image_id: 'docker:{IMAGE_FOR_TORCH}'}}\n"
        f"file_mounts:\n{mounts}\n  /runs: {{name: runs, mode: MOUNT}}",
    )
    folder = harness.state / "buckets" / "runs" / "one"
    progress = folder / "progress.log"

    def steps() -> int:
        return len(progress.read_text().splitlines()) if progress.exists() else 0

    harness.wait_for(job, lambda: steps() > 5, "some steps")
    harness.engine.preempt(job.id, lead_s=60)
    harness.wait_for(job, lambda: harness.engine.job(job.id).attempt == 2, "the second attempt")
    reached = steps()
    harness.wait_for(job, lambda: steps() > reached + 5, "more steps")
    harness.kill_node(job, 0)
    for one in (reference, job):
        harness.succeed(one)
    first, second, _ = describe(job.id).attempts
    assert first.outcomes[0].code == PREEMPTED_STATUS
    assert second.outcomes[0].is_lost
    assert (folder / "final.txt").read_text() == (whole / "final.txt").read_text()
