"""Jobs whose commands fill the disk of their folder: they end as what they are, and nothing is repeated."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

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


def files(harness: JobHarness) -> dict[str, str]:
    """Return the variables of `FILL`."""
    names = {"RAN": "ran", "BALLAST": "disk/ballast", "FULL": "full"}
    return {variable: str(harness.folder / name) for variable, name in names.items()}


def test_work_that_has_succeeded_is_not_repeated(harness: JobHarness) -> None:
    ended = harness.wait(harness.submit(f"{FILL}; true", **files(harness)))
    assert (ended.status, ended.attempt) == (JobStatus.SUCCEEDED, 1), harness.describe(ended)
    assert (harness.folder / "ran").read_text() == "ran\n"
    assert (harness.folder / "disk" / "ballast").exists(), "the disk is still full"


def test_a_failure_names_the_full_disk(harness: JobHarness) -> None:
    ended = harness.wait(harness.submit(FILL, **files(harness)))
    assert (ended.status, ended.attempt) == (JobStatus.FAILED, 1), harness.describe(ended)
    assert "node 0 failed in run with status 1; no space is left on the file system of " in ended.reason


def test_nodes_beside_the_one_that_fills_the_disk_are_not_repeated_either(harness: JobHarness) -> None:
    ended = harness.wait(harness.submit(f"{FILL_BESIDE}; true", head="num_nodes: 2", **files(harness)))
    assert (ended.status, ended.attempt) == (JobStatus.SUCCEEDED, 1), harness.describe(ended)
    assert (harness.folder / "ran").read_text() == "ran\n" * 2


def test_the_failure_of_one_of_two_nodes_names_the_full_disk(harness: JobHarness) -> None:
    run = f"{FILL_BESIDE}; test $SKYPILOT_NODE_RANK = 0"
    ended = harness.wait(harness.submit(run, head="num_nodes: 2", **files(harness)))
    assert (ended.status, ended.attempt) == (JobStatus.FAILED, 1), harness.describe(ended)
    assert "node 1 failed in run with status 1; no space is left on the file system of " in ended.reason
