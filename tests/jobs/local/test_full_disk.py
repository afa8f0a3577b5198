"""Jobs whose commands fill the disk of their folder: they end as what they are, and nothing is repeated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.jobs.engine import Job
from holdfast.jobs.status import JobStatus
from jobs.harness import JobHarness, started_harness
from small_disk import small_disk

FILL = "echo ran >> $RAN; cat /dev/zero > $BALLAST"
"""Command that notes its run on another disk, and fills that of the job."""
FILL_BESIDE = f"""
  if [ $SKYPILOT_NODE_RANK = 0 ]; then until [ -e $RAN ]; do sleep 0.05; done; {FILL}; touch $FULL
  else echo ran >> $RAN; until [ -e $FULL ]; do sleep 0.05; done; fi"""
"""Commands of two nodes, of which the first fills the disk that both have once the other one runs."""


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[JobHarness]:
    """Return a harness whose jobs are on a file system of 2 MB."""
    with small_disk(tmp_path, "2m") as disk, started_harness(tmp_path, disk / "state") as found:
        yield found
        (disk / "ballast").unlink(missing_ok=True)


def run_job(harness: JobHarness, run: str, num_nodes: int, ends: JobStatus) -> Job:
    """Return a job with the variables of `FILL` at its end, which is that of its first attempt."""
    names = {"RAN": "ran", "BALLAST": "disk/ballast", "FULL": "full"}
    variables = {variable: str(harness.folder / name) for variable, name in names.items()}
    ended = harness.run(run, head=f"num_nodes: {num_nodes}", ends=ends, **variables)
    assert ended.attempt == 1, harness.describe(ended)
    return ended


@pytest.mark.parametrize(("fill", "num_nodes"), [(FILL, 1), (FILL_BESIDE, 2)], ids=["one", "two"])
def test_work_that_has_succeeded_is_not_repeated(harness: JobHarness, fill: str, num_nodes: int) -> None:
    run_job(harness, f"{fill}; true", num_nodes, JobStatus.SUCCEEDED)
    assert (harness.folder / "ran").read_text() == "ran\n" * num_nodes
    assert (harness.folder / "disk" / "ballast").exists(), "the disk is still full"


@pytest.mark.parametrize(
    ("run", "num_nodes"), [(FILL, 1), (f"{FILL_BESIDE}; test $SKYPILOT_NODE_RANK = 0", 2)], ids=["one", "two"]
)
def test_the_failure_of_a_node_names_the_full_disk(harness: JobHarness, run: str, num_nodes: int) -> None:
    ended = run_job(harness, run, num_nodes, JobStatus.FAILED)
    failed = f"node {num_nodes - 1} failed in run with status 1"
    assert f"{failed}; no space is left on the file system of " in ended.reason
