"""Jobs that fail in the same way, in different ways, and at a later step each time."""

from __future__ import annotations

import pytest

from holdfast.jobs.history import list_attempts, read_changes
from holdfast.jobs.status import JobStatus
from jobs.harness import JobHarness

FIVE_RESTARTS = "resources: {job_recovery: {max_restarts_on_errors: 5}}"
ANY = "envs: {HOLDFAST_SAME_FAILURES: any}"
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


THREE_RESTARTS = FIVE_RESTARTS.replace("5", "3")
THREE_OF_SIX = (
    "3 attempts in a row failed in the same way, without a newer checkpoint: "
    "ModuleNotFoundError: No module named 'flash_atn' (node 0 failed in run with status 1)"
)
ALL_USED = (
    "node 0 failed in run with status 1: ModuleNotFoundError: No module named 'flash_atn'; "
    "all 3 restarts after errors are used up"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "head", "attempt", "reason"),
    [
        pytest.param(SAME, FIVE_RESTARTS, 3, THREE_OF_SIX, id="the same way"),
        pytest.param(AT_A_LATER_STEP, FIVE_RESTARTS, 6, "", id="at a later step"),
        pytest.param(IN_OTHER_WAYS, FIVE_RESTARTS, 4, "", id="other ways"),
        pytest.param(SAME, f"{THREE_RESTARTS}\n{ANY}", 4, ALL_USED, id="a word"),
    ],
)
def test_a_job_that_fails_in_one_way_ends_with_the_cause_and_others_are_restarted(
    harness: JobHarness, run: str, head: str, attempt: int, reason: str
) -> None:
    job = harness.wait(harness.submit(run, head=head))
    expected = JobStatus.FAILED if reason else JobStatus.SUCCEEDED
    assert (job.status, job.attempt, job.exit_status) == (expected, attempt, 1 if reason else 0)
    assert job.step == (60 if run == AT_A_LATER_STEP else None)
    first = job.reason.partition("\n")[0]
    assert first == reason
    assert list_attempts(read_changes(harness.files(job)))[-1].reason.startswith(first)
