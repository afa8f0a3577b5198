"""`holdfast logs`, `queue`, `describe`, `wait` and `cancel`: what they show, and their exit statuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cli.conftest import Command
from holdfast.cli.jobs import format_span
from holdfast.jobs.status import JobStatus
from jobs.harness import JobHarness

BAR = r"for i in 1 2 3; do printf '\r%s/3' $i; done; printf '\n'"
WAITS = "until [ -e go ]; do sleep 0.02; done"


# -- logs ------------------------------------------------------------------------------------------------


def test_the_last_lines_are_printed_and_bars_as_one_line(jobs: JobHarness, holdfast: Command) -> None:
    job = jobs.run(f"seq 5\n{BAR}\necho end")
    assert holdfast("logs", job.id, "--tail", 3).out == "5\n3/3\nend\n"
    assert holdfast("logs", "task", "--tail", 1).out == "end\n"
    assert holdfast("logs", job.id, "--tail", 0).out == ""
    assert holdfast("logs", job.id).out.count("/3") == 1


def test_each_line_has_its_time_on_request(jobs: JobHarness, holdfast: Command) -> None:
    job = jobs.run("echo first; echo second")
    lines = holdfast("logs", job.id, "--tail", 2, "-t").out.splitlines()
    assert [re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", "", line) for line in lines] == ["first", "second"]
    assert lines[0] != "first"
    rows = [json.loads(line) for line in holdfast("logs", job.id, "--json").out.splitlines()]
    assert [row["line"] for row in rows[1:]] == ["first", "second"]
    assert all(job.submitted_unix_s - 1 < row["unix_s"] for row in rows)


def test_nodes_are_labelled_and_a_missing_one_is_reported(jobs: JobHarness, holdfast: Command) -> None:
    job = jobs.run("echo from $SKYPILOT_NODE_RANK", head="num_nodes: 2")
    out = holdfast("logs", job.id, "--tail", 1).out
    assert sorted(out.splitlines()) == ["(node 0) from 0", "(node 1) from 1"]
    assert holdfast("logs", job.id, "--tail", 1, "--node", 1).out == "from 1\n"
    said = f"Job {job.id} has no node 2: it has 2 nodes, counted from 0"
    holdfast("logs", job.id, "--node", 2).refused(said)


@pytest.mark.parametrize(
    ("run", "head", "status"),
    [
        ("true", "", 0),
        ("exit 7", "", 7),
        ("if [ $SKYPILOT_NODE_RANK = 1 ]; then exit 9; fi; sleep 1000", "num_nodes: 2", 9),
    ],
)
def test_following_ends_with_the_exit_status_of_the_job(
    jobs: JobHarness, holdfast: Command, run: str, head: str, status: int
) -> None:
    job = jobs.submit(run, head=head)
    assert holdfast("logs", job.id, "-f").status == status
    assert holdfast("logs", job.id).status == 0
    assert holdfast("wait", job.id).status == status


@pytest.mark.slow
@pytest.mark.parametrize("line", [b"x" * 99 + b"\n", b"x" * 100], ids=["lines", "one line"])
def test_a_gigabyte_is_printed_whole(jobs: JobHarness, tmp_path: Path, line: bytes) -> None:
    job = jobs.run("true")
    with jobs.files(job).log(0).open("wb") as file:
        for _ in range(100):
            file.write(line * 100_000)
    code = f"import sys; from holdfast.cli import main; main(['logs', '{job.id}']); sys.stdout.flush(); "
    code += "sys.stderr.write(open('/proc/self/status').read().partition('VmHWM:')[2].split()[0])"
    with (tmp_path / "out").open("wb") as out:
        done = subprocess.run([sys.executable, "-c", code], stdout=out, stderr=subprocess.PIPE, check=True)
    assert (tmp_path / "out").stat().st_size in (10**9, 10**9 + 1)
    assert int(done.stderr) < 100_000, "kilobytes"


# -- queue -----------------------------------------------------------------------------------------------


def test_active_jobs_come_first_and_always(jobs: JobHarness, holdfast: Command) -> None:
    running = jobs.submit(WAITS, head="name: long")
    ended = [jobs.wait(jobs.submit("exit 3", head=f"name: short-{number}")) for number in range(3)]
    jobs.wait(running, JobStatus.RUNNING)
    rows = holdfast("queue", "--json").json
    assert [row["id"] for row in rows] == [running.id, *(job.id for job in reversed(ended))]
    assert rows[0]["total_s"] >= rows[0]["running_s"] >= 0
    assert rows[0]["down_s"] == 0
    out = holdfast("queue", "--tail", 1).out
    assert [line.split()[1] for line in out.splitlines()[1:-1]] == ["long", "short-2"]
    assert "2 older jobs not shown" in out
    assert holdfast("queue", "--all").out.count("short-") == 3
    assert [row["id"] for row in holdfast("queue", "--json", "--tail", 0).json] == [running.id]
    assert len(holdfast("queue", "--json", "--status", "failed").json) == 3
    assert [row["id"] for row in holdfast("queue", "--json", "--status", "RUNNING").json] == [running.id]
    holdfast("queue", "--status", "sleeping").refused("Unknown status 'sleeping'")
    jobs.finish(running)


def test_the_table_fits_80_columns(
    jobs: JobHarness, holdfast: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = jobs.submit("echo why; exit 3", head="name: a-name-that-is-much-too-long-for-a-narrow-terminal")
    jobs.wait(job)
    monkeypatch.setenv("COLUMNS", "80")
    out = holdfast("queue").out
    assert all(len(line) <= 80 for line in out.splitlines())
    heading, row, why = out.splitlines()
    assert " ".join(heading.split()) == "ID NAME STATUS TOTAL RUNNING DOWN REC STEP ON"  # without NODES
    assert "FAILED" in row
    assert "node 0 failed in run with status 3" in why


def test_durations_are_apart(jobs: JobHarness, holdfast: Command) -> None:
    """The first attempt is lost, and the second succeeds."""
    job = jobs.submit(f"if [ $HOLDFAST_ATTEMPT = 1 ]; then sleep 1000; fi; {WAITS}")
    jobs.wait(job, JobStatus.RUNNING)
    jobs.kill_node(job, 0)
    jobs.wait_for(job, lambda: jobs.engine.job(job.id).attempt == 2, "the second attempt")
    jobs.wait(job, JobStatus.RUNNING)
    jobs.finish(job)
    (row,) = holdfast("queue", "--json").json
    assert min(row["running_s"], row["down_s"]) > 0
    assert row["running_s"] + row["down_s"] <= row["total_s"]
    assert row["recoveries"] == 1


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0s"), (59.9, "59s"), (61, "1m01s"), (3600, "1h00m"), (86399, "23h59m"), (90000, "1d01h")],
)
def test_spans_are_short(seconds: float, text: str) -> None:
    assert format_span(seconds) == text


# -- describe --------------------------------------------------------------------------------------------


def test_a_description_has_attempts_cost_checkpoints_lines_and_paths(
    jobs: JobHarness, holdfast: Command
) -> None:
    job = jobs.submit(
        'echo "{\\"home\\": \\"/runs/a\\", \\"step\\": $((HOLDFAST_ATTEMPT * 10))}" >> $HOLDFAST_PROGRESS\n'
        "echo the last words\n"
        "if [ $HOLDFAST_ATTEMPT = 1 ]; then exit 75; fi\nexit 4",
        head="name: gpt",
    )
    jobs.wait(job)
    found = holdfast("describe", "gpt", "--json").json
    assert (found["job"]["status"], found["job"]["exit_status"]) == ("FAILED", 4)
    assert [(one["number"], one["step"]) for one in found["attempts"]] == [(1, 10), (2, 20)]
    assert [one["outcomes"]["0"]["code"] for one in found["attempts"]] == [75, 4]
    assert found["attempts"][0]["reason"] == "node 0 was preempted (status 75)"
    for one in found["attempts"]:
        assert one["started_unix_s"] <= one["running_unix_s"] <= one["ended_unix_s"]
    assert found["checkpoints"] == {"/runs/a": 20}
    assert found["last_lines"]["0"][-1] == "the last words"
    assert found["logs"] == [str(jobs.files(job).log(0))]
    shown = ("status        FAILED", "exit status   4", "1 recovery: ", "/runs/a", "the last words")
    out = holdfast("describe", job.id).printed(*shown, str(jobs.files(job).workdir(0))).out
    assert re.search(r"^1  .* 10  75 ", out, re.MULTILINE), out


def test_a_job_without_an_attempt_can_be_described(jobs: JobHarness, holdfast: Command) -> None:
    job = jobs.submit(WAITS)
    holdfast("describe", job.id).printed(f"job           {job.id} (task)")
    holdfast("cancel", job.id)
    jobs.wait(job)
    missing = holdfast("describe", "nothing").refused()
    assert missing.err == "holdfast: There is no job named 'nothing'. See `holdfast queue`.\n"


# -- wait and cancel -------------------------------------------------------------------------------------


def test_waiting_ends_with_the_last_job_and_the_first_failure(jobs: JobHarness, holdfast: Command) -> None:
    chosen = [jobs.submit(run, head="name: sweep") for run in ("true", "exit 5", "exit 6")]
    assert holdfast("wait", *(job.id for job in chosen)).status == 5
    assert holdfast("wait", "sweep").status == 6, "the newest, as all have ended"
    assert holdfast("wait", chosen[0].id).out == "job 1 (sweep) is SUCCEEDED\n"
    assert [row["exit_status"] for row in holdfast("wait", 1, 2, "--json").json] == [0, 5]
    assert holdfast("wait", 99).status == 2
    result = holdfast("wait", 99, chosen[0].id)
    assert (result.status, result.out) == (2, "job 1 (sweep) is SUCCEEDED\n"), "the other is waited for"


def test_waiting_has_a_limit(jobs: JobHarness, holdfast: Command) -> None:
    job = jobs.submit(WAITS)
    holdfast("wait", job.id, "--timeout", "50ms").refused("1 job did not end in time")
    holdfast("cancel", "--all")
    assert holdfast("wait", job.id).status == 1


def test_several_jobs_are_cancelled_by_number_by_name_and_all(jobs: JobHarness, holdfast: Command) -> None:
    old = jobs.wait(jobs.submit("true", head="name: sweep"))
    running = [jobs.submit(WAITS, head=f"name: {name}") for name in ("one", "sweep", "sweep", "two")]
    ids = [job.id for job in running]
    result = holdfast("cancel", "no-such", "sweep", old.id).refused()
    assert result.out.splitlines() == [f"job {number} (sweep) is being cancelled" for number in ids[1:3]]
    assert f"Job {old.id} has already ended: SUCCEEDED" in result.err
    assert "no job named 'no-such'" in result.err
    assert holdfast("cancel", ids[0]).out == f"job {ids[0]} (one) is being cancelled\n"
    for job in running[:3]:
        assert jobs.wait(job).status is JobStatus.CANCELLED
    assert [row["id"] for row in holdfast("cancel", "--all", "--json").json] == ids[3:]
    jobs.wait(running[3])
    assert holdfast("cancel", "--all").out == "no jobs\n"
    assert [holdfast("cancel", *words).status for words in ((), ("--all", old.id))] == [2, 2]
    assert "named 'sweep' that has not ended" in holdfast("cancel", "sweep").err
