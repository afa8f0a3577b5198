"""Parts of local jobs that can be tested without a job: locks, records, timers, environments, processes."""

from __future__ import annotations

import ipaddress
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.jobs.environment import create_task_id, setup_variables, tag
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.local.controller import addresses
from holdfast.jobs.local.engine import visible_gpus
from holdfast.jobs.node import processes
from holdfast.jobs.node.preparation import make_node_spec
from holdfast.jobs.node_spec import Environment
from holdfast.jobs.records import JobSpec, Submission
from holdfast.jobs.state_machine import RestartPolicy
from holdfast.jobs.timers import Timers
from holdfast.system.environment import JobReport, read_progress, report_to_job
from holdfast.system.linux import locks
from holdfast.system.linux.wakeup_pipe import WakeupPipe, wake

SPEC = JobSpec(2, 2, has_setup=False, user="me")


def test_a_lock_is_held_until_its_holder_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not locks.is_held(path)
    held = locks.acquire(path)
    assert held is not None
    assert locks.acquire(path) is None
    assert locks.is_held(path)
    os.close(held)
    assert not locks.is_held(path)


def test_a_lock_is_inherited_with_its_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    held = locks.acquire(path)
    assert held is not None
    child = subprocess.Popen(["sleep", "1000"], pass_fds=[held])
    os.close(held)
    assert locks.is_held(path)
    child.kill()
    child.wait()
    assert not locks.is_held(path)


def test_several_wakeups_are_cleared_at_once(tmp_path: Path) -> None:
    wake(tmp_path / "wakeup")  # nobody is there
    wakeup = WakeupPipe(tmp_path / "wakeup")
    for _ in range(10_000):
        wake(tmp_path / "wakeup")
    wakeup.clear()
    wakeup.clear()
    wake(tmp_path / "wakeup")
    assert os.read(wakeup.fd, 10) == b"!"
    wakeup.close()
    wake(tmp_path / "wakeup")


def test_the_earliest_of_several_deadlines_counts() -> None:
    due = Timers(wake_unix_s=3.0).with_notice(130.0, "x", kills_keepers=True)
    assert (due.wake_unix_s, due.notice_until_unix_s, due.kill_unix_s) == (3.0, 130.0, 130.0)
    assert due.kill_keepers
    assert due.with_kill(190.0) == due
    assert due.with_kill(101.0).kill_unix_s == 101.0
    assert Timers().next_unix_s() is None


def test_the_task_overrides_the_user_s_environment_and_holdfast_the_task_s(tmp_path: Path) -> None:
    folder, job = JobFolder(tmp_path), Submission(3, "n", "id", "local", SPEC, RestartPolicy(2), 0.0)
    base = {"PATH": "/bin", "A": "base", "SKYPILOT_NODE_RANK": "9", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}
    environment = Environment(base, {"A": "task", "HOLDFAST_PREEMPTION": "aws"})
    spec = make_node_spec(
        *(folder, job, 2, 1, ("127.0.0.1", "127.0.0.2"), environment),
        wakeup=folder.wakeup,
        set_up=folder.set_up(1),
        num_gpus=2,
        gpus=(("2", "3"), ("4", "5")),
    )
    found = spec.environment
    assert (found["PATH"], found["A"], found["SKYPILOT_NODE_RANK"]) == ("/bin", "task", "1")
    assert found["SKYPILOT_NODE_IPS"] == "127.0.0.1\n127.0.0.2"
    assert found["HOLDFAST_PREEMPTION"] == f"aws,file:{folder.node(2, 1).notice}"
    assert found["HOLDFAST_NODE"] == tag("id", 2, 1) == "id/2/1"
    assert found["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "5"
    assert found["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert setup_variables(found) == {
        "SKYPILOT_SETUP_NODE_RANK": "1",
        "SKYPILOT_SETUP_NODE_IPS": "127.0.0.1\n127.0.0.2",
        "SKYPILOT_SETUP_NUM_GPUS_PER_NODE": "2",
    }


def test_task_ids_look_like_skypilot_s() -> None:
    assert create_task_id("bert qa", 8, 0.750781) == "sky-managed-1970-01-01-00-00-00-750781_bert-qa_8-0"


def test_gpus_are_found_as_devices_unless_the_environment_chooses_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("nvidia0", "nvidia10", "nvidia2", "nvidiactl"):
        (tmp_path / name).touch()
    assert visible_gpus(tmp_path) == ["0", "2", "10"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-x")
    assert visible_gpus(tmp_path) == ["3", "GPU-x"]


def test_every_node_has_its_own_address() -> None:
    assert addresses(1, 7) == ("127.0.0.1",)
    assert addresses(2, 7) == ("127.1.7.1", "127.1.7.2")
    assert addresses(2, 300) == ("127.2.44.1", "127.2.44.2")
    assert len(set(addresses(1000, 7))) == 1000
    together = [address for job in range(1, 3000) for address in addresses(4, job)]
    assert len(set(together)) == len(together)
    assert all(ipaddress.ip_address(one).is_loopback for one in addresses(3, 254 * 256 - 1))


def test_a_process_is_not_confused_with_a_later_one_of_the_same_pid() -> None:
    child = subprocess.Popen(["sleep", "1000"])
    found = processes.find(child.pid)
    assert found is not None
    stranger = processes.Process(found.pid, found.parent, found.session, found.start + 1)
    assert not processes.send(stranger, signal.SIGKILL)
    assert processes.wait_exited([stranger], 10), "it is gone, whoever has its number"
    assert not processes.wait_exited([found], 0)
    assert processes.send(found, signal.SIGKILL)
    assert processes.wait_exited([found], 10)
    assert child.wait() == -signal.SIGKILL


def test_only_the_topmost_processes_with_a_handler_are_signalled() -> None:
    listens = "import signal,sys,subprocess; signal.signal(signal.SIGTERM, lambda *_: 0); "
    inner = f"{listens} print('ready', flush=True); sys.stdin.read()"
    outer = f"{listens} subprocess.run([sys.executable, '-c', {inner!r}])"
    shell = subprocess.Popen(
        ["bash", "-c", f'{sys.executable} -c "$CODE"; true'],
        env={**os.environ, "CODE": outer},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert shell.stdout is not None
    assert shell.stdin is not None
    assert shell.stdout.readline() == b"ready\n"
    told = processes.topmost_handlers(shell.pid)
    tree = processes.descendants(shell.pid, processes.snapshot())
    assert [one.pid for one in told] == [tree[0].pid]
    assert len(tree) == 2
    shell.communicate()


def test_progress_is_the_greatest_step_of_each_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_progress(tmp_path / "progress").steps == {}
    report_to_job(JobReport(home="a", step=1))  # nobody asks
    monkeypatch.setenv("HOLDFAST_PROGRESS", str(tmp_path / "progress"))
    for home, step in (("a", 5), ("a", 10), ("b", 1), ("a", 7)):
        report_to_job(JobReport(home=home, step=step))
    with (tmp_path / "progress").open("a") as file:
        file.write('torn {"home"\n[]\n{"home": "a"}\n')
    assert read_progress(tmp_path / "progress").steps == {"a": 10, "b": 1}
    monkeypatch.setenv("HOLDFAST_PROGRESS", str(tmp_path / "no" / "such" / "folder"))
    report_to_job(JobReport(home="a", step=11))
