"""Jobs whose commands run in a container image: files, variables, attempts, kills, and what is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.jobs import describe
from holdfast.jobs.engine import Job
from holdfast.jobs.node import processes
from holdfast.jobs.status import JobStatus
from jobs.containers.images import IMAGE
from jobs.containers.runtimes import RuntimeUnderTest
from jobs.harness import JobHarness, with_word

HEAD = f"resources: {{image_id: 'docker:{IMAGE}'}}\n"
IMAGE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
INSTALL = "echo installed by setup > /srv/installed"
UNTIL_GO = "until [ -e go ]; do sleep 0.05; done"
pytestmark = pytest.mark.usefixtures("runtime")


def ended(harness: JobHarness, job: Job, status: JobStatus = JobStatus.SUCCEEDED) -> str:
    """Return the log of a job that is expected to end with a status."""
    return harness.log(harness.wait(job, status))


def start_installed(harness: JobHarness, rest: str) -> Job:
    """Start a job that shows what its setup has installed, and wait for that."""
    shown = "echo attempt $HOLDFAST_ATTEMPT has $(cat /srv/installed)"
    job = harness.submit(f"{shown}; {rest}", setup=f"{INSTALL}; echo set up", head=HEAD)
    harness.wait_for_output(job, "attempt 1 has installed by setup")
    return job


def test_setup_and_run_see_the_files_of_the_image_and_what_setup_installed(harness: JobHarness) -> None:
    setup = f"echo the image is $(cat /srv/marker); {INSTALL}"
    log = ended(harness, harness.submit("cat /srv/installed", setup=setup, head=HEAD))
    assert f"the image is {IMAGE}" in log
    assert "installed by setup" in log
    assert not Path("/srv/installed").exists(), "outside"


def test_the_workdir_mounts_and_home_are_inside(harness: JobHarness) -> None:
    for name in ("work", "data"):
        (harness.folder / name).mkdir()
        (harness.folder / name / "file").write_text(f"of {name}\n")
    job = harness.submit(
        f"""
        cat file ~/sky_workdir/file ~/data/file copied/file /srv/deep/own/file {harness.folder}/data/file
        echo changed > ~/data/file
        echo saved > /srv/bucket/checkpoint; echo saved > out/result
        echo "home is $HOME"
        """,
        head=f"""{HEAD}
workdir: {harness.folder}/work
file_mounts:
  ~/data: {harness.folder}/data
  copied: {harness.folder}/data
  /srv/deep/own: {{source: {harness.folder}/data, mode: MOUNT}}
  {harness.folder}/data: {{source: {harness.folder}/data, mode: MOUNT}}
  /srv/bucket: {{name: a-bucket, mode: MOUNT}}
  out: {{name: results, mode: MOUNT}}
""",
    )
    log = ended(harness, job)
    assert log.count("of work\n") == 2
    assert log.count("of data\n") == 4
    assert "home is /srv/home" in log
    buckets = harness.state / "buckets"
    assert (buckets / "a-bucket" / "checkpoint").read_text() == "saved\n"
    assert (buckets / "results" / "result").read_text() == "saved\n"
    assert (harness.folder / "data" / "file").read_text() == "of data\n", "the copy was changed"
    assert not (Path.home() / "data").exists(), "outside"


@pytest.mark.slow
def test_a_mount_through_a_write_back_directory_is_uploaded(harness: JobHarness) -> None:
    place = harness.folder / "place"
    head = f'{HEAD}file_mounts: {{/srv/out: {{source: "{place}", mode: MOUNT_CACHED}}}}'
    ended(harness, harness.submit("echo saved > /srv/out/checkpoint", head=head))
    assert (place / "checkpoint").read_text() == "saved\n"


@pytest.mark.slow
def test_paths_of_checkpoints_are_described_as_they_are_outside(harness: JobHarness) -> None:
    job = harness.submit(
        """echo "{\\"home\\": \\"$HOME/run/a\\", \\"step\\": 7}" >> $HOLDFAST_PROGRESS""",
        head=f"{HEAD}file_mounts: {{~/run: {{name: progress, mode: MOUNT}}}}",
    )
    ended(harness, job)
    assert describe(job.id).checkpoints == {str(harness.state / "buckets" / "progress" / "a"): 7}


def test_variables_are_those_of_the_image_and_of_the_task(
    harness: JobHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_SHELL", "not for images")
    hostile = "two\nlines, 'quotes', \"more\", a=b, $HOME `id` \\ \t end "
    run = """
    echo "setting: $SETTING, shell: [$OF_THE_SHELL], path: $PATH, task: $SKYPILOT_TASK_ID"
    printf %s "$HOSTILE" > value
    """
    job = harness.submit(run, head=HEAD, HOSTILE=hostile, PLAIN="x")
    log = ended(harness, job)
    assert f"setting: of-the-image, shell: [], path: {IMAGE_PATH}, task: {job.task_id}" in log
    assert (harness.files(job).workdir(0) / "value").read_text() == hostile


def test_secrets_are_on_no_command_line(harness: JobHarness) -> None:
    job = harness.submit(f"echo up; {UNTIL_GO}; [ $TOKEN = hush-hush ]", head=HEAD, TOKEN="hush-hush")
    harness.wait_for_output(job, "up")
    assert with_word(list(processes.snapshot().values()), "sleep"), "command lines can be read"
    assert not with_word(list(processes.snapshot().values()), "hush-hush")
    harness.let_go(job)
    ended(harness, job)


@pytest.mark.parametrize("commands", ["exit 3", "kill -9 $$"], ids=["exit", "kill"])
def test_the_end_of_the_commands_is_the_end_of_the_job(harness: JobHarness, commands: str):
    job = harness.submit(commands, setup="true", head=HEAD)
    if "kill" in commands:  # as the loss of a node: the first restart is free
        harness.wait_for_output(job, "attempt 2")
        harness.engine.cancel(job.id)
        harness.wait(job)
    else:
        ended(harness, job, JobStatus.FAILED)
        assert "status 3" in harness.engine.job(job.id).reason


@pytest.mark.essential
def test_a_preemption_notice_reaches_the_trainer(harness: JobHarness) -> None:
    run = f"""
    trap 'echo saving; touch saved; exit 75' TERM
    echo attempt $HOLDFAST_ATTEMPT is up
    [ -e saved ] || {UNTIL_GO}
    """
    job = harness.submit(run, head=HEAD)
    harness.wait_for_output(job, "attempt 1 is up")
    harness.engine.preempt(job.id, lead_s=60)
    log = ended(harness, job)
    assert "saving" in log
    assert "attempt 2 is up" in log


@pytest.mark.slow
def test_a_cancelled_job_leaves_neither_processes_nor_its_container(
    harness: JobHarness, runtime: RuntimeUnderTest
) -> None:
    other = harness.submit(f"echo up; {UNTIL_GO}", head=HEAD)
    for_ever = "while true; do sleep 0.1; done"
    job = harness.submit(f"trap '' TERM; ({for_ever}) & echo up; {for_ever}", head=HEAD)
    for one in (other, job):
        harness.wait_for_output(one, "up")
    assert len(runtime.containers(job)) == 1
    harness.cancel(job)
    harness.wait_for(job, lambda: not runtime.containers(job), "the removal of the container")
    assert not harness.of_job(job)
    assert len(runtime.containers(other)) == 1, "the other job's"
    harness.finish(other)


@pytest.mark.slow
def test_each_node_has_a_container_of_its_own(harness: JobHarness, runtime: RuntimeUnderTest) -> None:
    job = harness.submit(
        f"echo node $SKYPILOT_NODE_RANK has $(cat /srv/rank); {UNTIL_GO}",
        setup="echo $SKYPILOT_SETUP_NODE_RANK >> /srv/rank",
        head=f"{HEAD}num_nodes: 2",
    )
    for node in range(2):
        harness.wait_for_output(job, f"node {node} has {node}", node=node)
    assert len(runtime.containers(job)) == 2
    for node in range(2):
        harness.let_go(job, node)
    ended(harness, job)


@pytest.mark.slow
def test_a_killed_container_is_started_again_with_its_files(harness: JobHarness, runtime: RuntimeUnderTest):
    job = start_installed(harness, f"[ $HOLDFAST_ATTEMPT = 2 ] || {{ {UNTIL_GO}; exit 75; }}")
    (container,) = runtime.containers(job)
    killed = runtime.pid(container)
    runtime.kill(container)
    harness.wait_for(job, lambda: runtime.pid(container) not in (0, killed), "another process")
    assert harness.engine.job(job.id).attempt == 1, "the commands were not disturbed"
    harness.let_go(job)
    assert "attempt 2 has installed by setup" in ended(harness, job)


SLOW = [
    pytest.param(one, marks=pytest.mark.slow) for one in (["warden"], ["controller"], ["agent", "warden"])
]


@pytest.mark.parametrize("roles", [*SLOW, ["controller", "agent"]])
def test_killed_processes_of_holdfast_are_replaced(harness: JobHarness, roles: list[str]) -> None:
    job = start_installed(harness, f"[ -e go ] || {UNTIL_GO}")
    for role in roles:
        processes.kill(harness.roles(job, role))
    attempt = 2 if "agent" in roles else 1
    harness.wait_for(job, lambda: harness.engine.job(job.id).attempt == attempt, "the attempt")
    harness.wait_for_output(job, f"attempt {attempt} has installed by setup")
    harness.wait_for(job, lambda: all(harness.roles(job, role) for role in roles), "others")
    harness.let_go(job)
    assert ended(harness, job).count("set up\n") == 1, "setup is not repeated"


def test_a_job_continues_after_all_its_processes_were_killed_at_once(
    harness: JobHarness, runtime: RuntimeUnderTest
) -> None:
    """As after a restart of the machine, where containers are stopped and no process exists."""
    job = start_installed(harness, f"[ -e go ] || {UNTIL_GO}")
    (container,) = runtime.containers(job)
    processes.kill([*harness.roles(job, "controller"), *harness.roles(job, "warden")])
    runtime.kill(container)
    processes.kill([*harness.roles(job, "agent"), *harness.roles(job, "warden"), *harness.of_job(job)])
    harness.let_go(job)
    assert "attempt 2 has installed by setup" in ended(harness, job)


@pytest.mark.slow
def test_a_job_that_is_forgotten_leaves_no_container(harness: JobHarness, runtime: RuntimeUnderTest) -> None:
    job = harness.submit("mkdir sub; touch sub/file; chown -R 1000:1000 sub || true", head=HEAD)
    ended(harness, job)
    harness.engine.forget(job.id)
    assert not runtime.containers(job)
    assert not harness.files(job).path.exists()
