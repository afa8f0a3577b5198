"""Jobs that fail in the same way, in different ways, and at a later step each time."""

from __future__ import annotations

import pytest

from holdfast.jobs.history import list_attempts, read_changes
from holdfast.jobs.status import JobStatus
from jobs.harness import JobHarness

FIVE_RESTARTS = "resources: {job_recovery: {max_restarts_on_errors: 5}}"
SAME = """\
echo "started at $(date +%T.%N) as process $$ in $(mktemp -d)"
python -c "import flash_atn"
"""
AT_A_LATER_STEP = """\
step=$(( $(cat step 2>/dev/null || echo 0) + 10 ))
echo $step > step
echo "{\\"home\\": \\"runs/gpt\\", \\"step\\": $step}" >> "$HOLDFAST_PROGRESS"
[ $step -lt 60 ] || exit 0
echo "step $step loss 0.$step"
echo "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate $step MiB." >&2
exit 1
"""
IN_OTHER_WAYS = """\
number=$(( $(cat number 2>/dev/null || echo 0) + 1 ))
echo $number > number
words=(zero one two three four five)
[ $number -lt 4 ] || exit 0
echo "RuntimeError: ${words[$number]}"
exit 1
"""


def test_a_job_that_fails_in_the_same_way_ends_with_the_cause(harness: JobHarness) -> None:
    job = harness.wait(harness.submit(SAME, head=FIVE_RESTARTS))
    assert job.status is JobStatus.FAILED
    assert job.attempt == 3, "three of six"
    first = job.reason.partition("\n")[0]
    assert first == (
        "3 attempts in a row failed in the same way, without a newer checkpoint: "
        "ModuleNotFoundError: No module named 'flash_atn' (node 0 failed in run with status 1)"
    )
    assert job.exit_status == 1
    attempts = list_attempts(read_changes(harness.files(job)))
    assert attempts[-1].reason.startswith(first)


def test_a_job_that_fails_at_a_later_step_each_time_is_restarted(harness: JobHarness) -> None:
    job = harness.wait(harness.submit(AT_A_LATER_STEP, head=FIVE_RESTARTS))
    assert job.status is JobStatus.SUCCEEDED
    assert (job.attempt, job.step) == (6, 60)


@pytest.mark.slow
def test_a_job_that_fails_in_other_ways_is_restarted(harness: JobHarness) -> None:
    job = harness.wait(harness.submit(IN_OTHER_WAYS, head=FIVE_RESTARTS))
    assert job.status is JobStatus.SUCCEEDED
    assert job.attempt == 4


@pytest.mark.slow
def test_a_word_lets_all_restarts_be_used(harness: JobHarness) -> None:
    head = "resources: {job_recovery: {max_restarts_on_errors: 3}}\nenvs: {HOLDFAST_SAME_FAILURES: any}"
    job = harness.wait(harness.submit(SAME, head=head))
    assert job.status is JobStatus.FAILED
    assert job.attempt == 4
    assert "all 3 restarts after errors are used up" in job.reason
