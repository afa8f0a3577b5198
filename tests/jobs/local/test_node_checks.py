"""Checks of the node before an attempt of a real job: recorded, reported, and able to refuse it."""

from __future__ import annotations

import pytest

from holdfast.jobs import describe, nodes
from holdfast.jobs.status import JobStatus
from jobs.harness import JobHarness

REPORT = """\
echo "{\\"home\\": \\"/sys/kernel\\", \\"step\\": $HOLDFAST_ATTEMPT}" >> "$HOLDFAST_PROGRESS"
[ $HOLDFAST_ATTEMPT -gt 1 ] || exit 75
"""
"""Commands that report a home to which nobody can write."""


def test_the_checks_of_an_attempt_are_recorded(harness: JobHarness) -> None:
    job = harness.run("echo hello", head="num_nodes: 2", HOLDFAST_NODE_CHECKS="stop")
    (checks,) = describe(job.id).checks.values()
    assert set(checks) == {0, 1}
    assert {"disk", "clock", "product", "memory", "copy"} <= {one.name for one in checks[0].checks}
    assert not any(one.is_wrong for one in checks[0].checks)
    (here,) = nodes()
    assert (here.attempts, here.lost) == (1, 0), "two nodes on one machine are one"


def test_no_checks_are_recorded_without_them(harness: JobHarness) -> None:
    job = harness.run("true", head="envs: {HOLDFAST_NODE_CHECKS: off}")
    assert describe(job.id).checks == {}


@pytest.mark.slow
def test_an_attempt_that_cannot_save_is_not_started(harness: JobHarness) -> None:
    job = harness.run(REPORT, ends=JobStatus.FAILED, HOLDFAST_NODE_CHECKS="stop")
    first = job.reason.partition("\n")[0]
    assert first.startswith("node 0 is not fit for the job: disk /sys/kernel: it cannot be written to"), first
    assert harness.log(job).count("a check of this node failed: disk /sys/kernel") == job.attempt - 1
    assert job.exit_status == 1
    (here,) = nodes()
    assert (here.lost, here.stands_out) == (job.attempt - 1, False)


@pytest.mark.slow
def test_a_failed_check_can_be_reported_only(harness: JobHarness) -> None:
    job = harness.run(REPORT, HOLDFAST_NODE_CHECKS="report")
    assert "a check of this node failed: disk /sys/kernel" in harness.log(job)
    assert describe(job.id).checks[2][0].failed[0].name == "disk"
