"""Local jobs with real processes: statuses, environment, recovery, and whoever is killed."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import sys
import threading
from pathlib import Path

import pytest

from holdfast.errors import PREEMPTED_STATUS, Conflict, InvalidInput, NotFound
from holdfast.jobs.node import locks, processes
from holdfast.jobs.status import Status
from jobs.desk import Desk

FREE = "resources: {job_recovery: {max_restarts_on_errors: 100}}"
WAITS = """
echo attempt $HOLDFAST_ATTEMPT is there
if [ $HOLDFAST_ATTEMPT = 1 ]; then sleep 1000; fi
echo done
"""
"""The first attempt waits to be killed; the second finishes."""


def test_a_job_runs_to_its_end(desk: Desk) -> None:
    job = desk.submit("echo hello $NAME; pwd; echo made > made.txt", head="name: greet\nenvs: {NAME: you}")
    assert job.status in (Status.PENDING, Status.STARTING)
    ended = desk.wait(job)
    assert ended.status is Status.SUCCEEDED
    assert (ended.name, ended.attempt, ended.recoveries, ended.reason) == ("greet", 1, 0, "")
    assert "hello you" in desk.log(job)
    assert (desk.files(job).workdir(0) / "made.txt").read_text() == "made\n"


def test_the_environment_is_skypilot_s_and_stable_over_recoveries(desk: Desk) -> None:
    show = (
        "env | grep -E '^(SKYPILOT|HOLDFAST)_' | tr '\\n' ' ' > env-$HOLDFAST_ATTEMPT-$SKYPILOT_NODE_RANK\n"
    )
    ips = 'echo "$SKYPILOT_NODE_IPS" > ips-$SKYPILOT_NODE_RANK\n'
    job = desk.submit(
        show + ips + "[ $HOLDFAST_ATTEMPT = 2 ] || exit 75",
        head="num_nodes: 2\nresources: {accelerators: A100:4}",
    )
    assert desk.wait(job).status is Status.SUCCEEDED
    for rank in range(2):
        work = desk.files(job).workdir(rank)
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
        assert (work / f"ips-{rank}").read_text() == "127.0.0.1\n127.0.0.2\n"
        assert "HOLDFAST_NOTICES=file:" in first


def test_nodes_have_addresses_on_which_they_find_each_other(desk: Desk) -> None:
    """Node 1 serves on its own address, node 0 reads from it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))
        port = probe.getsockname()[1]
    (desk.folder / "serve.py").write_text(
        f"import socket; s = socket.create_server(('127.0.0.2', {port})); s.accept()[0].sendall(b'found')"
    )
    (desk.folder / "ask.py").write_text(
        "import socket, time\n"
        "for _ in range(1000):\n"
        f"    try: print(socket.create_connection(('127.0.0.2', {port})).recv(9).decode()); break\n"
        "    except OSError: time.sleep(0.01)\n"
    )
    job = desk.submit(
        f"""
        if [ $SKYPILOT_NODE_RANK = 1 ]; then what=serve.py; else what=ask.py; fi
        {sys.executable} {desk.folder}/$what
        """,
        head="num_nodes: 2",
    )
    assert desk.wait(job).status is Status.SUCCEEDED
    assert "found" in desk.log(job)


def test_setup_is_done_once_and_its_failure_has_a_name(desk: Desk) -> None:
    job = desk.submit("[ $HOLDFAST_ATTEMPT = 2 ] || exit 75", setup="echo set up $SKYPILOT_SETUP_NODE_RANK")
    assert desk.wait(job).status is Status.SUCCEEDED
    assert desk.log(job).count("set up 0") == 1
    failed = desk.wait(desk.submit("echo never", setup="echo no such thing; exit 3"))
    assert failed.status is Status.FAILED_SETUP
    assert "failed in setup with status 3" in failed.reason
    assert "no such thing" in failed.reason, "the last lines of the log are told"


def test_errors_are_failures_and_told_with_the_log(desk: Desk) -> None:
    failed = desk.wait(desk.submit("echo the reason >&2; exit 7"))
    assert failed.status is Status.FAILED
    assert "node 0 failed in run with status 7" in failed.reason
    assert "the reason" in failed.reason


def test_errors_restart_up_to_the_limit(desk: Desk) -> None:
    job = desk.submit(
        "[ $HOLDFAST_ATTEMPT = 2 ] || exit 7", head="resources: {job_recovery: {max_restarts_on_errors: 1}}"
    )
    ended = desk.wait(job)
    assert (ended.status, ended.recoveries, ended.restarts_after_errors) == (Status.SUCCEEDED, 1, 1)


@pytest.mark.slow
def test_a_crash_loop_ends(desk: Desk) -> None:
    """The exit code is free, but no checkpoint ever advances."""
    job = desk.submit(
        """echo '{"home": "h", "step": 5}' >> $HOLDFAST_PROGRESS; exit 33""",
        head="resources: {job_recovery: {recover_on_exit_codes: 33}}",
    )
    ended = desk.wait(job)
    assert ended.status is Status.FAILED
    assert ended.step == 5
    assert "no newer checkpoint" in ended.reason


# -- kills -----------------------------------------------------------------------------------------------


def test_a_lost_node_costs_no_restart(desk: Desk) -> None:
    job = desk.submit(WAITS)
    desk.wait_until_said(job, "attempt 1 is there")
    desk.kill_node(job, 0)
    ended = desk.wait(job)
    assert (ended.status, ended.recoveries, ended.restarts_after_errors) == (Status.SUCCEEDED, 1, 0)
    assert "after: node 0 was lost" in desk.log(job)


def test_one_lost_node_takes_the_others_with_it(desk: Desk) -> None:
    job = desk.submit(WAITS, head="num_nodes: 2")
    for node in range(2):
        desk.wait_until_said(job, "attempt 1 is there", node=node)
    desk.kill_node(job, 1)
    assert desk.wait(job).status is Status.SUCCEEDED
    for node in range(2):
        assert desk.log(job, node).count("done") == 1


def test_a_killed_warden_leaves_no_process_behind(desk: Desk) -> None:
    """Also one in a session of its own, as torchrun's workers are, and one that hides its environment."""
    naps = [f"{1000 + os.getpid() / 1e8:.8f}", f"{2000 + os.getpid() / 1e8:.8f}"]
    job = desk.submit(f"setsid sleep {naps[0]} & setsid env -i sleep {naps[1]} &\n" + WAITS)
    desk.wait_until_said(job, "attempt 1 is there")
    desk.wait_for(job, lambda: len(sleeping(naps)) == 2, "the sleepers")
    processes.end(desk.roles(job, "warden"))
    desk.wait_until_said(job, "attempt 2 of job")
    assert desk.wait(job).status is Status.SUCCEEDED
    assert desk.of_job(job) == []
    assert sleeping(naps) == []


def sleeping(naps: list[str]) -> list[int]:
    """Pids of those who sleep exactly so long."""
    return [
        pid for pid in processes.living() if _words(pid).split(b"\0")[1:2] in [[nap.encode()] for nap in naps]
    ]


def _words(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_what_a_script_leaves_in_the_background_ends_with_it(desk: Desk) -> None:
    job = desk.submit("setsid sleep 1003 & disown; echo done")
    assert desk.wait(job).status is Status.SUCCEEDED
    assert desk.of_job(job) == []


def test_a_killed_controller_is_replaced_and_the_job_adopted(desk: Desk) -> None:
    job = desk.submit("echo begun; until [ -e go ]; do sleep 0.02; done; echo done")
    desk.wait_until_said(job, "begun")
    desk.kill_controller(job)
    assert [one.status for one in desk.engine.jobs()] == [Status.RUNNING]
    desk.wait_for(job, lambda: locks.is_held(desk.files(job).lock), "a new controller")
    (desk.files(job).workdir(0) / "go").touch()
    ended = desk.wait(job)
    assert (ended.status, ended.attempt) == (Status.SUCCEEDED, 1)
    assert desk.log(job).count("begun") == 1


def test_a_killed_controller_is_replaced_without_any_command(desk: Desk) -> None:
    """By the warden, which lives as long as the attempt; on two nodes one of them is enough."""
    job = desk.submit(
        "echo begun; until [ -e go ]; do sleep 0.02; done; [ $HOLDFAST_ATTEMPT = 2 ] || exit 75; echo done",
        head="num_nodes: 2",
    )
    desk.wait_until_said(job, "begun", node=1)
    for _ in range(2):
        processes.end(desk.roles(job, "controller"))
        desk.wait_for(job, lambda: len(desk.roles(job, "controller")) == 1, "another controller")
    for rank in range(2):
        (desk.files(job).workdir(rank) / "go").touch()
    desk.wait_for(job, lambda: desk.record(job).life.status.is_final, "the end")
    life = desk.record(job).life
    assert (life.status, life.attempt) == (Status.SUCCEEDED, 2), desk.tell(job)


def test_what_happens_while_nobody_looks_is_found_out(desk: Desk) -> None:
    job = desk.submit("echo begun; until [ -e go ]; do sleep 0.02; done; exit 5")
    desk.wait_until_said(job, "begun")
    desk.kill_controller(job)
    (desk.files(job).workdir(0) / "go").touch()
    desk.wait_for(job, lambda: desk.files(job).node(1, 0).ended.exists(), "the end of the node")
    ended = desk.wait(job)
    assert ended.status is Status.FAILED
    assert "status 5" in ended.reason


def test_a_node_lost_while_nobody_looks_is_recovered(desk: Desk) -> None:
    job = desk.submit(WAITS)
    desk.wait_until_said(job, "attempt 1 is there")
    desk.kill_controller(job)
    desk.kill_node(job, 0)
    ended = desk.wait(job)
    assert (ended.status, ended.recoveries) == (Status.SUCCEEDED, 1)


def test_however_many_look_after_a_job_one_copy_runs(desk: Desk) -> None:
    job = desk.submit("echo begun; until [ -e go ]; do sleep 0.02; done")
    desk.wait_until_said(job, "begun")
    desk.kill_controller(job)
    askers = [threading.Thread(target=desk.engine.jobs) for _ in range(8)]
    for asker in askers:
        asker.start()
    for asker in askers:
        asker.join()
    desk.wait_for(job, lambda: len(desk.roles(job, "controller")) == 1, "one controller")
    assert len(desk.roles(job, "warden")) == 1
    (desk.files(job).workdir(0) / "go").touch()
    assert desk.wait(job).status is Status.SUCCEEDED
    assert desk.log(job).count("begun") == 1


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
def test_random_kills_of_all_that_looks_after_a_job_end_in_its_success(desk: Desk) -> None:
    """Never do two copies of it run, and none of the kills is taken for an error of the job."""
    chance = random.Random(7)
    job = desk.submit(COUNTS)
    for kill in range(1, 21):
        desk.wait_for(
            job, lambda reached=15 * kill: (desk.engine.job(job.id).step or 0) >= reached, "progress"
        )
        what = chance.choice(["controller", "warden", "run.sh"])
        processes.end(desk.named(job, what) if what == "run.sh" else desk.roles(job, what))
    ended = desk.wait(job)
    assert (ended.status, ended.restarts_after_errors) == (Status.SUCCEEDED, 0), desk.tell(job)
    assert ended.recoveries >= 3, "it was killed indeed"
    assert (desk.files(job).workdir(0) / "n").read_text() == "400\n"
    assert not (desk.files(job).workdir(0).parent / "wrong").exists()


# -- notices ---------------------------------------------------------------------------------------------

TRAPS = """
trap 'echo told; exit %d' TERM
echo attempt $HOLDFAST_ATTEMPT is there
if [ $HOLDFAST_ATTEMPT = 1 ]; then while true; do sleep 0.02; done; fi
"""


@pytest.mark.parametrize("status", [PREEMPTED_STATUS, 1])
def test_a_preempted_job_is_told_and_comes_back(desk: Desk, status: int) -> None:
    job = desk.submit(TRAPS % status)
    desk.wait_until_said(job, "attempt 1 is there")
    desk.wait(job, Status.RUNNING)
    desk.engine.preempt(job.id, lead_s=60)
    ended = desk.wait(job)
    assert (ended.status, ended.recoveries, ended.restarts_after_errors) == (Status.SUCCEEDED, 1, 0)
    assert "told" in desk.log(job)
    notice = json.loads(desk.files(job).node(1, 0).notice.read_text())
    assert notice["source"] == "holdfast preempt"
    assert not desk.files(job).node(2, 0).notice.exists()


def test_who_does_not_listen_is_ended_when_the_lead_is_over(desk: Desk) -> None:
    job = desk.submit("trap '' TERM\n" + WAITS)
    desk.wait_until_said(job, "attempt 1 is there")
    desk.wait(job, Status.RUNNING)
    desk.engine.preempt(job.id, lead_s=0.2)
    ended = desk.wait(job)
    assert (ended.status, ended.recoveries) == (Status.SUCCEEDED, 1)


def test_a_notice_reaches_the_trainer_through_shells_and_pipes(desk: Desk) -> None:
    """The shell and `tee` would die of the signal, and the trainer of the broken pipe."""
    trainer = desk.folder / "trainer.py"
    trainer.write_text(
        "import signal, sys, time\n"
        "told = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: told.append(1))\n"
        "print('ready', flush=True)\n"
        "while not told: time.sleep(0.01)\n"
        "print('saved', flush=True)\n"
        "sys.exit(75)\n"
    )
    job = desk.submit(
        f"""
        set -o pipefail
        [ $HOLDFAST_ATTEMPT = 1 ] || exit 0
        (cd /; {sys.executable} {trainer} 2>&1 | tee /dev/null | cat)
        """
    )
    desk.wait_until_said(job, "ready")
    desk.engine.preempt(job.id, lead_s=60)
    ended = desk.wait(job)
    assert ended.status is Status.SUCCEEDED
    assert "saved" in desk.log(job)


def test_a_preemption_that_was_asked_while_nobody_looked_is_still_given(desk: Desk) -> None:
    job = desk.submit(TRAPS % PREEMPTED_STATUS)
    desk.wait_until_said(job, "attempt 1 is there")
    desk.wait(job, Status.RUNNING)
    desk.kill_controller(job)
    desk.engine.preempt(job.id, lead_s=60)
    assert desk.wait(job).recoveries == 1


def test_cancelling_tells_and_ends(desk: Desk) -> None:
    job = desk.submit(TRAPS % PREEMPTED_STATUS)
    desk.wait_until_said(job, "attempt 1 is there")
    desk.engine.cancel(job.id)
    ended = desk.wait(job)
    assert (ended.status, ended.attempt) == (Status.CANCELLED, 1)
    assert "told" in desk.log(job)
    with pytest.raises(Conflict, match="has ended already"):
        desk.engine.cancel(job.id)
    with pytest.raises(Conflict, match="has ended already"):
        desk.engine.preempt(job.id, lead_s=1)


def test_cancelling_what_does_not_listen_ends_it_at_once(desk: Desk) -> None:
    job = desk.submit("echo here; sleep 1000")
    desk.wait_until_said(job, "here")
    desk.engine.cancel(job.id)
    desk.wait(job)
    due = desk.record(job).due
    assert due.kill_unix_s is not None
    assert due.tell_until_unix_s is not None
    assert due.kill_unix_s < due.tell_until_unix_s, "its 30 s were not waited for"


def test_a_signal_to_the_controller_is_a_notice_to_the_job(desk: Desk) -> None:
    """As when the machine shuts down; the next command goes on from there."""
    job = desk.submit(TRAPS % PREEMPTED_STATUS)
    desk.wait_until_said(job, "attempt 1 is there")
    desk.wait(job, Status.RUNNING)
    (controller,) = desk.roles(job, "controller")
    processes.send(controller, signal.SIGTERM)
    assert processes.wait_gone([controller], 60)
    ended = desk.wait(job)
    assert (ended.status, ended.recoveries) == (Status.SUCCEEDED, 1)
    assert "told" in desk.log(job)


def test_a_shell_killed_from_outside_is_no_error_of_the_job(desk: Desk) -> None:
    job = desk.submit(WAITS)
    desk.wait_until_said(job, "attempt 1 is there")
    processes.end(desk.named(job, "run.sh"))
    ended = desk.wait(job)
    assert (ended.status, ended.restarts_after_errors) == (Status.SUCCEEDED, 0)


# -- mounts and workdir ----------------------------------------------------------------------------------


def test_the_workdir_is_a_copy(desk: Desk) -> None:
    work = desk.folder / "work"
    work.mkdir()
    (work / "a.txt").write_text("one")
    (work / "link").symlink_to("a.txt")
    job = desk.submit("cat a.txt link; echo two > a.txt", head=f"workdir: {work}")
    assert desk.wait(job).status is Status.SUCCEEDED
    assert "oneone" in desk.log(job)
    assert (work / "a.txt").read_text() == "one"


def test_mounts_lead_where_they_say(desk: Desk) -> None:
    data = desk.folder / "data"
    data.mkdir()
    (data / "x").write_text("seen ")
    head = f"""
file_mounts:
  here: {data}
  {desk.folder}/there: {{source: {data}, mode: MOUNT}}
  {desk.folder}/bucket: {{name: results, mode: MOUNT}}
"""
    job = desk.submit(
        f"cat here/x {desk.folder}/there/x; echo 1 > here/y; echo 2 > {desk.folder}/bucket/z", head=head
    )
    assert desk.wait(job).status is Status.SUCCEEDED, desk.tell(job)
    assert "seen seen" in desk.log(job)
    assert not (data / "y").exists(), "what was copied is a copy"
    assert (desk.state / "buckets" / "results" / "z").read_text() == "2\n"


def test_a_mount_never_replaces_what_is_there(desk: Desk) -> None:
    data = desk.folder / "data"
    data.mkdir()
    (desk.folder / "mine").mkdir()
    with pytest.raises(Conflict, match="was left alone"):
        desk.submit("true", head=f"file_mounts: {{{desk.folder}/mine: {data}}}")
    (desk.folder / "link").symlink_to(data)
    ended = desk.wait(desk.submit("true", head=f"file_mounts: {{{desk.folder}/link: {desk.folder}/mine}}"))
    assert ended.status is Status.FAILED_CONTROLLER, "it may have been made since the job was submitted"
    assert "was left alone" in ended.reason
    assert (desk.folder / "link").readlink() == data


def test_a_job_launched_by_a_job_outlives_it(desk: Desk) -> None:
    """Its controller has become a child of the first one's warden, which leaves nothing else behind."""
    (desk.folder / "inner.yaml").write_text("run: |\n  until [ -e go ]; do sleep 0.02; done\n")
    command = f"{sys.executable} -m holdfast.cli launch {desk.folder}/inner.yaml"
    outer = desk.submit(f"{command} && echo launched")
    assert desk.wait(outer).status is Status.SUCCEEDED, desk.tell(outer)
    inner = desk.wait(desk.engine.job(outer.id + 1), Status.RUNNING)
    (desk.files(inner).workdir(0) / "go").touch()
    ended = desk.wait(inner)
    assert (ended.status, ended.attempt) == (Status.SUCCEEDED, 1)


@pytest.mark.parametrize(
    ("mount", "error", "said"),
    [
        ("/x: r2://bucket/a", InvalidInput, "speak S3's protocol"),
        ("/x: {source: /etc/hostname, mode: MOUNT_CACHED}", InvalidInput, "is a file"),
        ("/x: {name: a/b, mode: MOUNT_CACHED}", InvalidInput, "the name of a bucket"),
        ("/x: /no/such/folder", NotFound, "there is no /no/such/folder"),
    ],
)
def test_what_cannot_be_mounted_is_refused_before_anything_starts(
    desk: Desk, mount: str, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        desk.submit("true", head=f"file_mounts:\n  {mount}\n")
    assert desk.engine.jobs() == []
