"""First process of a pod, run for real: signals, exit statuses, keepers, and the clone of the workdir."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.errors import PREEMPTED_STATUS
from holdfast.jobs.environment import read_packaged
from holdfast.jobs.k8s.manifest import pod_arguments
from holdfast.jobs.task.model import JobRecovery, Task

LIMIT_S = 60
KUBEFLOW = 143
SAVES = """
import pathlib, signal, sys, time
def save(*_):
    print("saved", flush=True)
    sys.exit(int(sys.argv[1]))
signal.signal(signal.SIGTERM, save)
pathlib.Path("ready").touch()
while True:
    time.sleep(0.02)
"""
WATCHES = """
import os, pathlib, sys, time
notice = pathlib.Path(os.environ["HOLDFAST_PREEMPTION"].rpartition("file:")[2])
pathlib.Path("ready").touch()
while not notice.exists():
    time.sleep(0.02)
sys.exit(75)
"""
KEEPS = """
import os, pathlib, signal, sys, time
pathlib.Path("keeping").touch()
while not pathlib.Path("go").exists():
    time.sleep(0.02)
os.kill(int(sys.argv[2]), 0)  # fails if the first process of the pod has ended
pathlib.Path("kept").touch()
"""


class Pod:
    """Processes of a pod, without a container around them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._started: list[subprocess.Popen[str]] = []

    def start(self, run: str, setup: str = "", free: tuple[int, ...] = (), **rule: int) -> None:
        (self.folder / "home").mkdir(exist_ok=True)
        asked = Task("gpt", run, setup, recovery=JobRecovery(0, frozenset(free)))
        words = pod_arguments(asked, **{"status": PREEMPTED_STATUS, "in_place": 0, **rule}, grace_s=LIMIT_S)
        # The tag is that of the keepers to wait for, as other processes of this machine are visible too.
        variables = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.folder / "home"),
            "PYTHON": sys.executable,
            "HOLDFAST_NODE": uuid.uuid4().hex,
            "HOLDFAST_PREEMPTION": f"none,file:{self.folder}/notice",
            "RANK": "3",
        }
        command = ["bash", "-c", read_packaged("k8s/pod.sh"), *words]
        pipe, both = subprocess.PIPE, subprocess.STDOUT
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=variables,
            stdout=pipe,
            stderr=both,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)

    def wait_for(self, name: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline, f"{name} was not created"
            time.sleep(0.02)

    def notify(self) -> None:
        self._started[-1].send_signal(signal.SIGTERM)

    def end(self) -> tuple[int, str]:
        """Wait for the end, and return status and output."""
        output, _ = self._started[-1].communicate(timeout=LIMIT_S)
        return self._started[-1].returncode, output

    def kill(self) -> None:
        for process in self._started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
            elif process.stdout is not None:
                process.stdout.close()


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[Pod]:
    for name, code in (("saves.py", SAVES), ("watches.py", WATCHES), ("keeps.py", KEEPS)):
        (tmp_path / name).write_text(code)
    found = Pod(tmp_path)
    yield found
    found.kill()


@pytest.mark.parametrize(
    ("status", "expected", "on_kubeflow"),
    [(0, 0, 0), (75, 75, KUBEFLOW), (33, 75, KUBEFLOW), (3, 3, 3), (137, 137, 1)],
)
def test_the_status_decides_about_a_restart(pod: Pod, status: int, expected: int, on_kubeflow: int) -> None:
    pod.start(f"exit {status}", free=(33, 34))
    assert pod.end()[0] == expected
    pod.start(f"exit {status}", free=(33, 34), status=KUBEFLOW)
    assert pod.end()[0] == on_kubeflow


PIPED = "$PYTHON %s | tee output\nexit ${PIPESTATUS[0]}"


@pytest.mark.parametrize(
    ("run", "status", "output"),
    [
        # A shell and `tee` are around it. Whatever its status is then, as torchrun's 1, it has not failed.
        *((PIPED % f"saves.py {status}", 75, "saved\n") for status in (75, 1)),
        ("exec $PYTHON saves.py 0", 0, "saved\n"),  # it was complete
        (PIPED % "watches.py", 75, ""),  # the notice is also a file
    ],
)
def test_sigterm_reaches_the_training_and_nothing_else(pod: Pod, run: str, status: int, output: str) -> None:
    pod.start(run)
    pod.wait_for("ready")
    pod.notify()
    ended, shown = pod.end()
    assert (ended, output in shown) == (status, True)
    if "tee" in run:
        assert (pod.folder / "output").read_text() == output
    else:
        assert shown == output


def test_setup_runs_first_and_its_failure_is_no_preemption(pod: Pod) -> None:
    pod.start("cat made; echo $SKYPILOT_NODE_RANK", setup="echo set up >made")
    assert pod.end() == (0, "set up\n3\n")
    pod.start("touch run", setup="exit 75")
    assert pod.end() == (1, "holdfast: setup exited with 75\n")
    # Without a container around it, the script survives its first process.
    pod.start("touch run", setup="exec >/dev/null 2>&1; touch ready; until [ -e stop ]; do sleep 0.02; done")
    pod.wait_for("ready")
    pod.notify()
    assert pod.end()[0] == 75
    (pod.folder / "stop").touch()
    assert not (pod.folder / "run").exists()


def test_the_pod_waits_for_a_keeper_that_is_still_saving(pod: Pod) -> None:
    """It is in a session of its own, and would end with the first process of the container."""
    keeper = "setsid $PYTHON keeps.py holdfast.checkpoint.keeper $PPID >/dev/null 2>&1 &"
    pod.start(f"{keeper}\nuntil [ -e keeping ]; do sleep 0.02; done\ntouch ended; exit 3")
    pod.wait_for("ended")
    (pod.folder / "go").touch()
    assert pod.end()[0] == 3
    assert (pod.folder / "kept").exists()


@pytest.mark.slow
def test_errors_are_retried_in_place_where_the_operator_cannot_count_them(pod: Pod) -> None:
    pod.start("echo once more; exit 9", status=KUBEFLOW, in_place=1)
    status, output = pod.end()
    assert (status, output.count("once more\n")) == (9, 2)


@pytest.fixture
def repository(tmp_path: Path) -> Callable[..., str]:
    """Return a function that calls git in a repository with a branch and a tag."""

    def git(*words: str) -> str:
        environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull}
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        command = ["git", "-C", str(tmp_path / "origin"), *identity, *words]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        return done.stdout.strip()

    (tmp_path / "origin").mkdir()
    git("init", "-q", "-b", "main")
    for number in ("first", "second"):
        (tmp_path / "origin" / "file").write_text(number)
        git("add", "file")
        git("commit", "-q", "-m", number)
    git("tag", "v1", "HEAD~1")
    git("branch", "dev", "HEAD~1")
    return git


def test_the_workdir_is_cloned_at_a_branch_tag_or_commit(tmp_path: Path, repository: Callable[..., str]):
    url = (tmp_path / "origin").as_uri()
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "HOLDFAST_WORKDIR_URL": url}
    first, second = repository("rev-parse", "HEAD~1"), repository("rev-parse", "HEAD")
    cases = [(None, "second"), ("dev", "first"), ("v1", "first"), (first, "first"), (second, "second")]
    for number, (ref, content) in enumerate(cases):
        folder = tmp_path / f"workdir-{number}"
        folder.mkdir()
        command = ["bash", "-c", read_packaged("k8s/clone.sh"), "holdfast", str(folder), ref or ""]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, (folder / "file").read_text()) == (0, content), done.stderr
    folder = tmp_path / "none"
    folder.mkdir()
    command = ["bash", "-c", read_packaged("k8s/clone.sh"), "holdfast", str(folder), "gone"]
    assert subprocess.run(command, env=environment, capture_output=True, check=False).returncode != 0


def test_sky_workdir_leads_to_the_folder_where_commands_start(pod: Pod) -> None:
    pod.start("touch made; cd /; ls ~/sky_workdir/made >/dev/null && echo $1 found")
    assert pod.end() == (0, "found\n")
    pod.start("echo again")  # the link exists
    assert pod.end() == (0, "again\n")
    (pod.folder / "home" / "sky_workdir").unlink()
    (pod.folder / "home" / "sky_workdir").mkdir()
    pod.start("cd ~/sky_workdir; touch wrong")
    status, output = pod.end()
    assert status == 1
    assert "~/sky_workdir already exists in the image" in output


def test_a_pod_without_conda_ends_at_its_activation(pod: Pod) -> None:
    pod.start("echo begun\nno-such-program\nconda activate gpt\necho went on")
    status, output = pod.end()
    assert status == 127
    assert "line 2: no-such-program: command not found" in output
    assert "`conda activate gpt` cannot work" in output
    assert "went on" not in output
