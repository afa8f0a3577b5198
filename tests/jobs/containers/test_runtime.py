"""Choice of a container runtime, its command lines, and its failures, with a stand-in."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from holdfast.errors import InvalidInput, Unsupported
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.journal import write_document
from holdfast.jobs.node.containers import node_container
from holdfast.jobs.node.containers.container import ContainerRuntime, ImageSpec, make_image_spec
from holdfast.jobs.node.mounts.mount_records import MountSpec
from holdfast.jobs.status import JobStatus
from holdfast.jobs.task.model import MountMode, qualified
from holdfast.jobs.task.parser import Overrides, parse_tasks
from jobs.containers.stand_in import StandIn
from jobs.harness import JobHarness, needs_namespaces, write_program

HEAD = "resources: {image_id: 'docker:an/image'}\n"
RUN = f"{HEAD}run: 'true'"
ROOTFUL = '["name=seccomp,profile=default"]'
ROOTLESS = '["name=rootless","name=cgroupns"]'


def notes(harness: JobHarness, text: str = RUN) -> list[str]:
    """Return the keys that a launch of a task notes."""
    return [
        one.key for one in harness.engine.unsupported_keys(parse_tasks(text, "task.yaml", Overrides()).only())
    ]


def without_programs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put programs on the PATH that answer as podman and docker do where they cannot run containers."""
    for name in ("podman", "docker"):
        write_program(folder / name, "echo cannot >&2\nexit 1")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


# -- choice --------------------------------------------------------------------------------------------------


def test_without_a_runtime_the_commands_run_on_the_machine_which_a_launch_notes(
    harness: JobHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_programs(harness.folder / "path", monkeypatch)
    assert notes(harness) == ["resources.image_id"]
    assert "here" in harness.log(harness.run("echo here", head=HEAD))


def test_with_podman_nothing_is_noted(harness: JobHarness, stand_in: StandIn) -> None:
    assert notes(harness) == []
    assert notes(harness, "resources: {image_id: ami-1}\nrun: 'true'") == ["resources.image_id"]
    assert stand_in.calls("info")


@pytest.mark.parametrize(("answer", "is_refused"), [(ROOTFUL, True), (ROOTLESS, False)])
def test_docker_that_runs_containers_as_another_user_is_refused(
    harness: JobHarness, monkeypatch: pytest.MonkeyPatch, answer: str, is_refused: bool
) -> None:
    without_programs(harness.folder / "path", monkeypatch)
    StandIn(harness.folder / "docker", "docker", answer)
    monkeypatch.setenv("PATH", f"{harness.folder}/docker:{os.environ['PATH']}")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    if is_refused:
        with pytest.raises(Unsupported, match=r"docker runs containers as root here.*Install podman"):
            harness.submit("true", head=HEAD)
        assert harness.engine.jobs() == []
    else:
        assert notes(harness) == []


@pytest.mark.parametrize("image", ["--privileged", "", "a b", "a;b", "a\nb", "$(id)", "-v/:/host"])
def test_a_name_that_is_not_one_of_an_image_is_refused(
    harness: JobHarness, stand_in: StandIn, image: str
) -> None:
    head = f"resources: {{image_id: {('docker:' + image)!r}}}\n".replace("\\n", "\n\n")
    with pytest.raises(InvalidInput, match=r"resources\.image_id: expected docker:IMAGE"):
        harness.submit("true", head=head)
    assert stand_in.calls("create") == []


# -- command lines -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ubuntu:24.04", "docker.io/library/ubuntu:24.04"),
        ("vllm/vllm-openai:v0.9", "docker.io/vllm/vllm-openai:v0.9"),
        ("nvcr.io/nvidia/pytorch:25.01-py3", "nvcr.io/nvidia/pytorch:25.01-py3"),
        ("localhost/a", "localhost/a"),
        ("registry:5000/a", "registry:5000/a"),
    ],
)
def test_images_are_pulled_from_dockers_registry_by_default(name: str, expected: str) -> None:
    assert qualified(name) == expected


@pytest.mark.parametrize(
    ("runtime", "option"),
    [
        (ContainerRuntime.PODMAN, ("--device", "nvidia.com/gpu=all")),
        (ContainerRuntime.DOCKER, ("--gpus", "all")),
    ],
)
def test_a_container_shares_the_machine_and_nothing_is_published(
    runtime: ContainerRuntime, option: tuple[str, str]
) -> None:
    """The options for GPUs are by the runtimes' documents: no test has run them on a machine with GPUs."""
    for has_gpus in (True, False):
        places = ("/home/me/a,b:c", "/state/jobs/1")
        spec = ImageSpec(runtime, "an/image", "sky-managed-1_a_1-0", places, has_gpus)
        words = node_container.create_command(spec, 1, "sha256:1")
        assert words[:4] == [runtime.value, "create", "--name", "holdfast-sky-managed-1_a_1-0-1"]
        assert words[-5:] == ["--entrypoint", "bash", "sha256:1", "-c", "exec sleep 2147483647"]
        pairs = set(itertools.pairwise(words))
        for shared in ("network", "pid", "uts", "userns"):
            assert (f"--{shared}", "host") in pairs
        assert ("--label", "holdfast.node=sky-managed-1_a_1-0/1") in pairs
        mounts = [after for before, after in pairs if before == "--mount"]
        assert 'type=bind,"source=/home/me/a,b:c","target=/home/me/a,b:c"' in mounts
        assert not {"--env", "-e", "--env-file", "--privileged", "--publish"} & set(words)
        assert (option in pairs) == (option[0] in words) == has_gpus


def test_file_systems_that_are_mounted_later_appear_inside(harness: JobHarness) -> None:
    folder = harness.state / "jobs" / "1"
    folder.mkdir(parents=True)
    job = JobFolder(folder)
    for mode, expected in ((MountMode.COPY, False), (MountMode.MOUNT, True)):
        write_document(job.mounts, [MountSpec(mode, "s3://a/b", str(folder / "mounts" / "0"), "/b")])
        found = make_image_spec(job, ContainerRuntime.PODMAN, "an/image", "sky-1", has_gpus=False)
        words = node_container.create_command(found, 0, "sha256:1")
        assert (f"type=bind,source={folder},target={folder},bind-propagation=rslave" in words) == expected


OTHER = {"SKYPILOT_DOCKER_SERVER": "registry.example"}
REGISTRIES = [({}, "docker.io"), pytest.param(OTHER, "registry.example", marks=pytest.mark.slow)]


@pytest.mark.parametrize(("variables", "registry"), REGISTRIES)
def test_an_image_that_is_not_here_is_pulled_with_its_progress_in_the_log(
    harness: JobHarness, stand_in: StandIn, variables: dict[str, str], registry: str
) -> None:
    job = harness.submit("true", head=HEAD, **variables)
    harness.wait(job)
    image = f"{registry}/an/image"
    assert stand_in.calls("pull") == [["pull", image]]
    assert f"pulling {image} with podman\nTrying to pull {image}...\n" in harness.log(job)


@pytest.mark.slow
def test_gpus_are_passed_on_if_the_task_asks_for_some(
    harness: JobHarness, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with_gpus = "resources: {image_id: 'docker:an/image', accelerators: A100:1}\n"
    for head in (HEAD, with_gpus):
        harness.wait(harness.submit("true", head=head))
    assert ["--device" in words for words in stand_in.calls("create")] == [False, True]


# -- failures ------------------------------------------------------------------------------------------------


# For each command of the runtime its message, and what the log says about it.
FAILURES = {
    "pull": (
        "Error: requested access to the resource is denied",
        "the job cannot start: `podman pull` failed: Error: requested access",
        "log in first: `podman login REGISTRY`",
    ),
    "start": (
        'Error: exec: "bash": executable file not found in $PATH',
        "The image an/image has no bash, in which the commands of a task run",
    ),
    "create": (
        "Error: setting up CDI devices: unresolvable CDI devices nvidia.com/gpu=all",
        "nvidia-ctk cdi generate",
    ),
}


@pytest.mark.parametrize("command", FAILURES)
def test_a_failure_of_the_runtime_fails_the_setup_in_its_words_and_is_explained(
    harness: JobHarness, stand_in: StandIn, command: str
) -> None:
    words, *expected = FAILURES[command]
    stand_in.will(command, words)
    job = harness.run("true", head=HEAD, ends=JobStatus.FAILED_SETUP)
    for line in expected:
        assert line in harness.log(job)
    harness.wait_for(job, lambda: not stand_in.containers(), "the removal of the container")


def test_a_job_that_is_cancelled_while_its_image_is_pulled_ends_at_once(
    harness: JobHarness, stand_in: StandIn
) -> None:
    stand_in.will("wait")
    job = harness.submit("true", head=HEAD)
    harness.wait_for_output(job, "Trying to pull")
    harness.cancel(job)
    harness.wait_for(job, lambda: not harness.roles(job, "warden"), "the warden's end")
    assert stand_in.containers() == []


@pytest.mark.slow
@needs_namespaces
def test_a_container_that_cannot_be_removed_is_removed_with_the_job(
    harness: JobHarness, stand_in: StandIn
) -> None:
    stand_in.add_image("an/image", HOME="/srv/home")
    stand_in.will("rm", "Error: the storage is busy")
    job = harness.run("true", head=HEAD)
    harness.wait_for(job, lambda: not harness.roles(job, "warden"), "the warden's end")
    said = "cannot remove the container yet: `podman rm` failed: Error: the storage is busy"
    assert said in harness.log(job)
    assert stand_in.containers()
    stand_in.will_not("rm")
    harness.engine.forget(job.id)
    assert stand_in.containers() == []


@needs_namespaces
def test_links_replace_files_and_empty_folders_of_an_image_but_no_others(
    harness: JobHarness, stand_in: StandIn
) -> None:
    stand_in.add_image("an/image", HOME="/srv/home")
    (harness.folder / "data").mkdir()
    for target, status in (("/srv/marker", JobStatus.SUCCEEDED), ("/srv", JobStatus.FAILED_SETUP)):
        head = f"{HEAD}file_mounts: {{{target}: {harness.folder}/data}}"
        job = harness.run("[ -d /srv/marker ]", head=head, ends=status)
    assert "the image has a folder with files at /srv, which was not changed" in harness.log(job)


@pytest.mark.parametrize("source", ["/", "/etc", "/usr/share", "/home"])
def test_folders_that_would_hide_those_of_an_image_are_refused(
    harness: JobHarness, stand_in: StandIn, source: str
) -> None:
    with pytest.raises(Unsupported, match="would hide what the image has"):
        harness.submit("true", head=f"{HEAD}file_mounts: {{~/x: {{source: {source}, mode: MOUNT}}}}")
    assert stand_in.calls("create") == []
