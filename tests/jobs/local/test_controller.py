"""Local jobs with real processes: statuses, environment, recovery, and kills of any process."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from holdfast.errors import PREEMPTED_STATUS, Conflict, InvalidInput, NotFound
from holdfast.jobs.history import read_changes
from holdfast.jobs.local.controller import addresses
from holdfast.jobs.node import processes
from holdfast.jobs.status import JobStatus
from jobs.harness import JobHarness, command_line
from servers import reserve_port

FREE = "resources: {job_recovery: {max_restarts_on_errors: 100}}"
WAITS = """
echo attempt $HOLDFAST_ATTEMPT is there
if [ $HOLDFAST_ATTEMPT = 1 ]; then sleep 1000; fi
echo done
"""
"""The first attempt waits to be killed, and the second finishes."""


def test_a_job_runs_to_its_end_and_so_does_its_controller_with_its_guardian(harness: JobHarness) -> None:
    job = harness.submit("echo hello $NAME; pwd; echo made > made.txt", head="name: greet\nenvs: {NAME: you}")
    assert job.status in (JobStatus.PENDING, JobStatus.STARTING)
    ended = harness.succeed(job)
    assert (ended.name, ended.attempt, ended.recoveries, ended.reason) == ("greet", 1, 0, "")
    assert "hello you" in harness.log(job)
    assert (harness.files(job).workdir(0) / "made.txt").read_text() == "made\n"
    harness.wait_for(job, lambda: not harness.roles(job, "controller"), "the end of both")


@pytest.mark.essential
def test_the_environment_is_skypilot_s_and_stable_across_recoveries(harness: JobHarness) -> None:
    show = (
        "env | grep -E '^(SKYPILOT|HOLDFAST)_' | tr '\\n' ' ' > env-$HOLDFAST_ATTEMPT-$SKYPILOT_NODE_RANK\n"
    )
    ips = 'echo "$SKYPILOT_NODE_IPS" > ips-$SKYPILOT_NODE_RANK\n'
    job = harness.run(
        show + ips + "[ $HOLDFAST_ATTEMPT = 2 ] || exit 75",
        head="num_nodes: 2\nresources: {accelerators: A100:4}",
    )
    for rank in range(2):
        work = harness.files(job).workdir(rank)
        first, second = ((work / f"env-{attempt}-{rank}").read_text() for attempt in (1, 2))
        for name, value in {
            "SKYPILOT_TASK_ID": job.task_id,
            "SKYPILOT_NODE_RANK": rank,
            "SKYPILOT_NUM_NODES": 2,
            "SKYPILOT_NUM_GPUS_PER_NODE": 4,
            "SKYPILOT_MANAGED_JOB_ID": job.id,
        }.items():
            assert f"{name}={value} " in first
            assert f"{name}={value} " in second
        assert (work / f"ips-{rank}").read_text() == "".join(f"{one}\n" for one in addresses(2, job.id))
        assert "HOLDFAST_PREEMPTION=file:" in first


def test_nodes_can_connect_to_each_other_s_addresses(harness: JobHarness) -> None:
    """Node 1 serves on its own address, and node 0 reads from it."""
    port = reserve_port("127.0.0.2")
    serve = f"import socket; s = socket.create_server(('127.0.0.2', {port})); s.accept()[0].sendall(b'found')"
    (harness.folder / "serve.py").write_text(serve)
    (harness.folder / "ask.py").write_text(
        "import socket, time\n"
        "while True:\n"
        f"    try: print(socket.create_connection(('127.0.0.2', {port})).recv(9).decode()); break\n"
        "    except OSError: time.sleep(0.01)\n"
    )
    run = f"""
    if [ $SKYPILOT_NODE_RANK = 1 ]; then what=serve.py; else what=ask.py; fi
    {sys.executable} {harness.folder}/$what
    """
    job = harness.run(run, head="num_nodes: 2")
    assert "found" in harness.log(job)


def test_setup_runs_once_and_its_failure_has_its_own_status(harness: JobHarness) -> None:
    job = harness.run("[ $HOLDFAST_ATTEMPT = 2 ] || exit 75", setup="echo set up $SKYPILOT_SETUP_NODE_RANK")
    assert harness.log(job).count("set up 0") == 1
    failed = harness.run("echo never", setup="echo no such thing; exit 3", ends=JobStatus.FAILED_SETUP)
    assert "failed in setup with status 3" in failed.reason
    assert "no such thing" in failed.reason, "the last lines of the log are told"


def test_the_last_lines_are_those_of_the_node_that_failed(harness: JobHarness) -> None:
    run = "echo of node $SKYPILOT_NODE_RANK; if [ $SKYPILOT_NODE_RANK = 1 ]; then exit 10; fi; sleep 1000"
    failed = harness.run(run, head="num_nodes: 2", ends=JobStatus.FAILED)
    assert failed.reason.startswith("node 1 failed in run with status 10")
    assert "The last lines of node 1:" in failed.reason
    assert "of node 1" in failed.reason
    assert "of node 0" not in failed.reason, "it was stopped because of the other"


def test_why_has_the_line_that_names_the_error(harness: JobHarness) -> None:
    said = "holdfast.errors.Conflict: /runs/a is being written by attempt 1: process 7 on host x."
    failed = harness.run(f"echo Traceback; echo '{said}'; exit 1", ends=JobStatus.FAILED)
    assert failed.reason.partition("\n")[0] == f"node 0 failed in run with status 1: {said}"
    failed = harness.run("echo epoch 3, loss 0.1 >&2; exit 7", ends=JobStatus.FAILED)
    assert failed.reason.partition("\n")[0] == "node 0 failed in run with status 7"
    assert "epoch 3, loss 0.1" in failed.reason, "the end of the log"


def test_errors_restart_up_to_the_limit(harness: JobHarness) -> None:
    once = "resources: {job_recovery: {max_restarts_on_errors: 1}}"
    ended = harness.run("[ $HOLDFAST_ATTEMPT = 2 ] || exit 7", head=once)
    assert (ended.recoveries, ended.restarts_after_errors) == (1, 1)


@pytest.mark.slow
def test_a_crash_loop_ends(harness: JobHarness) -> None:
    """The exit code does not count as an error, but no checkpoint ever advances."""
    ended = harness.run(
        """echo '{"home": "h", "step": 5}' >> $HOLDFAST_PROGRESS; exit 33""",
        head="resources: {job_recovery: {recover_on_exit_codes: 33}}",
        ends=JobStatus.FAILED,
    )
    assert ended.step == 5
    assert "without a newer checkpoint" in ended.reason


def test_a_preempted_training_in_a_pipe_is_started_again(harness: JobHarness) -> None:
    """The status of a pipe is that of its last program, such as `tee`."""
    run = """[ $HOLDFAST_ATTEMPT = 2 ] || echo '{"preempted": 5}' >> $HOLDFAST_PROGRESS; echo | tee out.txt"""
    assert harness.run(run).recoveries == 1


def test_commands_get_the_signals_of_a_shell(harness: JobHarness) -> None:
    """Python ignores some, and what it starts would too: `yes | head` would never end."""
    job = harness.run("trap -p; yes | head -n 1; echo ${PIPESTATUS[0]}")
    assert harness.log(job).splitlines()[-2:] == ["y", "141"]
    assert "SIGPIPE" not in harness.log(job)
    assert "SIGXFSZ" not in harness.log(job)


# -- kills -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["node", "shell", "node and controller"])
def test_what_is_killed_is_started_again_and_costs_no_restart(harness: JobHarness, what: str) -> None:
    job = harness.submit(WAITS)
    harness.wait_for_output(job, "attempt 1 is there")
    if what == "node and controller":
        harness.kill_controller(job)
    if what == "shell":
        processes.kill(harness.named(job, "run.sh"))
    else:
        harness.kill_node(job, 0)
    ended = harness.succeed(job)
    assert (ended.recoveries, ended.restarts_after_errors) == (1, 0)
    assert ("after: node 0 was lost" in harness.log(job)) == (what != "shell")


def test_a_lost_node_stops_the_others(harness: JobHarness) -> None:
    job = harness.submit(WAITS, head="num_nodes: 2")
    for node in range(2):
        harness.wait_for_output(job, "attempt 1 is there", node=node)
    harness.kill_node(job, 1)
    harness.succeed(job)
    for node in range(2):
        assert harness.log(job, node).count("done") == 1


def test_a_killed_agent_leaves_no_process_behind(harness: JobHarness) -> None:
    """Including one in its own session, like torchrun's workers, and one that hides its environment."""
    naps = [f"{1000 + os.getpid() / 1e8:.8f}", f"{2000 + os.getpid() / 1e8:.8f}"]
    job = harness.submit(f"setsid sleep {naps[0]} & setsid env -i sleep {naps[1]} &\n" + WAITS)
    harness.wait_for_output(job, "attempt 1 is there")
    harness.wait_for(job, lambda: len(sleeping(naps)) == 2, "the sleepers")
    processes.kill(harness.roles(job, "agent"))
    harness.wait_for_output(job, "attempt 2 of job")
    harness.succeed(job)
    assert harness.of_job(job) == []
    assert sleeping(naps) == []


def sleeping(naps: list[str]) -> list[int]:
    """Return the pids of processes that sleep exactly this long."""
    wanted = [[nap.encode()] for nap in naps]
    return [pid for pid in processes.snapshot() if command_line(pid)[1:2] in wanted]


def test_background_processes_of_a_script_are_killed_when_it_exits(harness: JobHarness) -> None:
    job = harness.run("setsid sleep 1003 & disown; echo done")
    assert harness.of_job(job) == []


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_status_is_never_recorded_without_its_change(harness: JobHarness, number: int) -> None:
    """The controller is killed right after it has recorded STARTING, RUNNING or the end."""
    job = harness.submit_and_kill(f"jobs.recorded:{number}", lambda: harness.submit("true"))
    harness.succeed(job)
    changes = read_changes(harness.files(job))
    assert [one.status for one in changes] == [JobStatus.STARTING, JobStatus.RUNNING, JobStatus.SUCCEEDED]


@pytest.mark.parametrize("number", [1, 3], ids=["before the first attempt", "between two attempts"])
def test_a_controller_killed_while_no_node_runs_starts_again_without_any_command(
    harness: JobHarness, number: int
) -> None:
    """No agent is there that could start one, as when the kernel frees memory."""
    run = "[ $HOLDFAST_ATTEMPT = 2 ] || exit 75"
    job = harness.submit_and_kill(f"jobs.recorded:{number}", lambda: harness.submit(run))
    assert harness.end_without_command(job) == (JobStatus.SUCCEEDED, 2)
    assert "was killed by signal 9" in harness.files(job).controller_log.read_text()


@pytest.mark.essential
def test_a_killed_controller_is_replaced_without_any_command(harness: JobHarness) -> None:
    """The agent does so, which lives as long as the attempt. On two nodes one of them is enough."""
    job = harness.submit(
        "echo begun; until [ -e go ]; do sleep 0.02; done; [ $HOLDFAST_ATTEMPT = 2 ] || exit 75; echo done",
        head="num_nodes: 2",
    )
    harness.wait_for_output(job, "begun", node=1)
    for _ in range(2):
        processes.kill(harness.roles(job, "controller"))
        harness.wait_for(job, lambda: harness.has_controller(job), "another controller")
    for rank in range(2):
        harness.let_go(job, rank)
    assert harness.end_without_command(job) == (JobStatus.SUCCEEDED, 2), harness.describe(job)


def test_an_exit_without_a_controller_is_noticed_later(harness: JobHarness) -> None:
    job = harness.submit("echo begun; until [ -e go ]; do sleep 0.02; done; exit 5")
    harness.wait_for_output(job, "begun")
    harness.kill_controller(job)
    harness.let_go(job)
    harness.wait_for(job, lambda: harness.files(job).node(1, 0).ended.exists(), "the end of the node")
    ended = harness.wait(job, JobStatus.FAILED)
    assert "status 5" in ended.reason


def test_the_job_of_a_killed_controller_is_adopted_once_however_many_commands_supervise_it(
    harness: JobHarness,
) -> None:
    job = harness.submit("echo begun; until [ -e go ]; do sleep 0.02; done")
    harness.wait_running(job, "begun")
    harness.kill_controller(job)
    assert [one.status for one in harness.engine.jobs()] == [JobStatus.RUNNING]
    askers = [threading.Thread(target=harness.engine.jobs) for _ in range(8)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    harness.wait_for(job, lambda: harness.has_controller(job), "one controller")
    assert len(harness.roles(job, "agent")) == 1
    harness.let_go(job)
    assert harness.succeed(job).attempt == 1
    assert harness.log(job).count("begun") == 1


COUNTS = """
exec 9> lock
flock -n 9 || echo two copies >> ../wrong
n=$(cat n 2> /dev/null || echo 0)
while [ $n -lt 400 ]; do
  n=$((n + 1))
  echo $n > n.new
  mv n.new n
  echo "{\\"home\\": \\"h\\", \\"step\\": $n}" >> $HOLDFAST_PROGRESS
  sleep 0.01
done
"""


@pytest.mark.slow
def test_a_job_succeeds_despite_random_kills_of_its_controller_and_agents(harness: JobHarness) -> None:
    """Two copies never run at once, and no kill counts as an error of the job."""
    chance = random.Random(7)
    job = harness.submit(COUNTS)
    for kill in range(1, 21):
        harness.wait_for(job, lambda to=15 * kill: (harness.engine.job(job.id).step or 0) >= to, "progress")
        what = chance.choice(["controller", "agent", "run.sh"])
        processes.kill(harness.named(job, what) if what == "run.sh" else harness.roles(job, what))
    ended = harness.succeed(job)
    assert ended.restarts_after_errors == 0
    assert ended.recoveries >= 3, "it was killed indeed"
    assert (harness.files(job).workdir(0) / "n").read_text() == "400\n"
    assert not (harness.files(job).workdir(0).parent / "wrong").exists()


# -- notices ---------------------------------------------------------------------------------------------

TRAPS = """
trap 'echo told; exit %d' TERM
echo attempt $HOLDFAST_ATTEMPT is there
if [ $HOLDFAST_ATTEMPT = 1 ]; then while true; do sleep 0.02; done; fi
"""


@pytest.mark.parametrize(("status", "has_controller"), [(PREEMPTED_STATUS, True), (1, True), (75, False)])
def test_a_preempted_job_is_notified_and_recovers(
    harness: JobHarness, status: int, has_controller: bool
) -> None:
    job = harness.submit(TRAPS % status)
    harness.wait_running(job, "attempt 1 is there")
    if not has_controller:
        harness.kill_controller(job)
    harness.engine.preempt(job.id, lead_s=600)
    ended = harness.succeed(job)
    assert (ended.recoveries, ended.restarts_after_errors) == (1, 0)
    assert "told" in harness.log(job)
    notice = json.loads(harness.files(job).node(1, 0).notice.read_text())
    assert notice["source"] == "holdfast preempt"
    assert not harness.files(job).node(2, 0).notice.exists()


def test_a_job_without_a_handler_is_killed_at_the_end_of_the_lead(harness: JobHarness) -> None:
    job = harness.submit("trap '' TERM\n" + WAITS)
    harness.wait_running(job, "attempt 1 is there")
    harness.engine.preempt(job.id, lead_s=0.2)
    assert harness.succeed(job).recoveries == 1


def write_trainer(harness: JobHarness, then: str, start: str = "") -> Path:
    """Write a program that starts, waits for a notice, does something, and exits as preempted."""
    path = harness.folder / "trainer.py"
    path.write_text(
        "import os, signal, subprocess, sys, time\n"
        "told = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: told.append(1))\n"
        f"{start}\n"
        "print('ready', flush=True)\n"
        "while not told: time.sleep(0.01)\n"
        f"{then}\n"
        "sys.exit(75)\n"
    )
    return path


def test_a_notice_reaches_the_trainer_through_shells_and_pipes(harness: JobHarness) -> None:
    """The signal would kill the shell and `tee`, and the broken pipe the trainer."""
    trainer = write_trainer(harness, "print('saved', flush=True)")
    run = f"""
    set -o pipefail
    [ $HOLDFAST_ATTEMPT = 1 ] || exit 0
    (cd /; {sys.executable} {trainer} 2>&1 | tee /dev/null | cat)
    """
    job = harness.submit(run)
    harness.wait_running(job, "ready")
    harness.engine.preempt(job.id, lead_s=600)
    harness.succeed(job)
    assert "saved" in harness.log(job)


def test_a_child_of_the_trainer_that_keeps_a_pipe_open_does_not_delay_the_restart(
    harness: JobHarness,
) -> None:
    """`tee` waits for the child, and the shell for `tee`."""
    report = "with open(os.environ['HOLDFAST_PROGRESS'], 'a') as log: print('{\"preempted\": 5}', file=log)"
    trainer = write_trainer(harness, report, start="subprocess.Popen(['sleep', '1000'])")
    run = f"""
    [ $HOLDFAST_ATTEMPT = 1 ] || exit 0
    {sys.executable} {trainer} | tee trained.txt
    echo the shell ended by itself
    """
    job = harness.submit(run)
    harness.wait_running(job, "ready")
    harness.engine.preempt(job.id, lead_s=100_000)
    harness.succeed(job)
    assert "the shell ended by itself" in harness.log(job)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_command_that_dies_of_a_notice_before_it_handles_it_is_started_again(
    harness: JobHarness, number: int
) -> None:
    job = harness.submit(f"""[ $HOLDFAST_ATTEMPT = 2 ] || sh -c 'kill -{int(number)} $$'""")
    ended = harness.succeed(job)
    assert (ended.recoveries, ended.restarts_after_errors) == (1, 0)
    assert f"was ended by {signal.Signals(number).name} in run" in harness.log(job)


def test_cancelling_notifies_the_job_and_ends_it(harness: JobHarness) -> None:
    job = harness.submit(TRAPS % PREEMPTED_STATUS)
    harness.wait_for_output(job, "attempt 1 is there")
    assert harness.cancel(job).attempt == 1
    assert "told" in harness.log(job)
    for again in (harness.engine.cancel, partial(harness.engine.preempt, lead_s=1)):
        with pytest.raises(Conflict, match="has already ended"):
            again(job.id)


def test_cancelling_a_job_without_a_handler_ends_it_at_once(harness: JobHarness) -> None:
    job = harness.submit("echo here; sleep 1000")
    harness.wait_for_output(job, "here")
    harness.cancel(job)
    due = harness.record(job).state.due
    assert due.kill_unix_s is not None
    assert due.notice_until_unix_s is not None
    assert due.kill_unix_s < due.notice_until_unix_s, "its 30 s were not waited for"


def test_a_signal_to_the_controller_is_a_notice_to_the_job(harness: JobHarness) -> None:
    """As at a shutdown of the machine. The next command continues the job."""
    job = harness.submit(TRAPS % PREEMPTED_STATUS)
    harness.wait_running(job, "attempt 1 is there")
    controller = harness.controller(job)
    processes.send(controller, signal.SIGTERM)
    assert processes.wait_exited([controller], 600)
    assert harness.succeed(job).recoveries == 1
    assert "told" in harness.log(job)


# -- mounts and workdir ----------------------------------------------------------------------------------


def test_the_workdir_is_a_copy(harness: JobHarness) -> None:
    work = harness.folder / "work"
    work.mkdir()
    (work / "a.txt").write_text("one")
    (work / "link").symlink_to("a.txt")
    job = harness.run("cat a.txt link; echo two > a.txt", head=f"workdir: {work}")
    assert "oneone" in harness.log(job)
    assert (work / "a.txt").read_text() == "one"


def test_mounts_link_to_their_sources(harness: JobHarness) -> None:
    data = harness.folder / "data"
    data.mkdir()
    (data / "x").write_text("seen ")
    there, bucket = f"{harness.folder}/there", f"{harness.folder}/bucket"
    mounts = (
        f"here: {data}, {there}: {{source: {data}, mode: MOUNT}}, {bucket}: {{name: results, mode: MOUNT}}"
    )
    run = f"cat here/x {there}/x; echo 1 > here/y; echo 2 > {bucket}/z"
    job = harness.run(run, head=f"file_mounts: {{{mounts}}}")
    assert "seen seen" in harness.log(job)
    assert not (data / "y").exists(), "what was copied is a copy"
    assert (harness.state / "buckets" / "results" / "z").read_text() == "2\n"


def test_a_mount_never_replaces_an_existing_file(harness: JobHarness) -> None:
    data = harness.folder / "data"
    data.mkdir()
    (harness.folder / "mine").mkdir()
    with pytest.raises(Conflict, match="was not changed"):
        harness.submit("true", head=f"file_mounts: {{{harness.folder}/mine: {data}}}")
    (harness.folder / "link").symlink_to(data)
    head = f"file_mounts: {{{harness.folder}/link: {harness.folder}/mine}}"
    ended = harness.run("true", head=head, ends=JobStatus.FAILED_CONTROLLER)  # it may have been made since
    assert "was not changed" in ended.reason
    assert (harness.folder / "link").readlink() == data


def test_a_job_launched_by_a_job_outlives_it(harness: JobHarness) -> None:
    """Its controller is a child of the outer job's agent, which kills everything else."""
    (harness.folder / "inner.yaml").write_text("run: |\n  until [ -e go ]; do sleep 0.02; done\n")
    command = f"{sys.executable} -m holdfast.cli launch {harness.folder}/inner.yaml"
    outer = harness.run(f"{command} && echo launched")
    inner = harness.wait(harness.engine.job(outer.id + 1), JobStatus.RUNNING)
    ended = harness.finish(inner)
    assert (ended.status, ended.attempt) == (JobStatus.SUCCEEDED, 1)


@pytest.mark.parametrize(
    ("mount", "error", "said"),
    [
        ("/x: r2://bucket/a", InvalidInput, "compatible with S3"),
        ("/x: {source: /etc/hostname, mode: MOUNT_CACHED}", InvalidInput, "is a file"),
        ("/x: {name: a/b, mode: MOUNT_CACHED}", InvalidInput, "the name of a bucket"),
        ("/x: /no/such/folder", NotFound, "/no/such/folder does not exist"),
    ],
)
def test_an_invalid_mount_is_rejected_before_anything_starts(
    harness: JobHarness, mount: str, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        harness.submit("true", head=f"file_mounts:\n  {mount}\n")
    assert harness.engine.jobs() == []
