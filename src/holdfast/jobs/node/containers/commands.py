"""Command lines of container runtimes; pure. None contains variables or secrets of the job."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from holdfast.jobs.node.containers.image_spec import ContainerOwner, ImageSpec
from holdfast.jobs.node.containers.runtime import ContainerRuntime
from holdfast.jobs.node.processes import CONTAINER_PREFIX

_LABEL = "holdfast.node"
_MACHINE_LABEL = "holdfast.machine"
_SHARED_MEMORY = "/dev/shm"
_SLEEP = "exec sleep 2147483647"
"""Command of a container: its only process waits, and holds the namespaces that the job's processes join."""


def container_name(spec: ImageSpec, rank: int) -> str:
    """Return the name of a node's container, as the lists of the runtime show it."""
    return CONTAINER_PREFIX.decode() + _node(spec, rank).replace("/", "-")


def create_command(spec: ImageSpec, rank: int, image_id: str) -> list[str]:
    """Return the command that creates a node's container.

    It shares the machine's network, names and processes, so that addresses and pids mean the same inside.
    """
    # Docker refuses it for a file system that the machine does not share.
    propagation = ("bind-propagation=rslave",) if spec.has_file_systems else ()
    return [
        *(spec.runtime.value, "create"),
        *("--name", container_name(spec, rank), "--label", _label(spec, rank), *_machine_label(spec)),
        *("--pull", "never", "--log-driver", "none", "--no-healthcheck"),
        # For a rootless runtime, the host's user namespace is its own: root inside is the user outside.
        *("--network", "host", "--pid", "host", "--uts", "host", "--userns", "host"),
        *("--user", "0:0", "--workdir", "/"),
        *_bind(_SHARED_MEMORY),
        *(word for path in spec.binds for word in _bind(path, *propagation)),
        *(_gpus(spec.runtime) if spec.has_gpus else ()),
        *("--entrypoint", "bash", image_id, "-c", _SLEEP),
    ]


def find_command(spec: ImageSpec, rank: int) -> list[str]:
    """Return the command that prints the id of a node's container, or nothing."""
    return _list_command(spec, _label(spec, rank))


def find_earlier_command(spec: ImageSpec, owner: ContainerOwner) -> list[str]:
    """Return the command that lists all containers of a job on a machine."""
    return _list_command(spec, f"{_MACHINE_LABEL}={spec.task_id}/{owner.machine}")


def start_command(spec: ImageSpec, container: str) -> list[str]:
    """Return the command that starts a container."""
    return [spec.runtime.value, "start", container]


def inspect_command(spec: ImageSpec, container: str) -> list[str]:
    """Return the command that prints a container as a JSON array of one object."""
    return [spec.runtime.value, "container", "inspect", container]


def remove_command(spec: ImageSpec, container: str) -> list[str]:
    """Return the command that ends and removes a container, with its anonymous volumes."""
    return [spec.runtime.value, "rm", "--force", "--volumes", container]


def image_command(spec: ImageSpec, image: str) -> list[str]:
    """Return the command that prints an image as such an array, or fails."""
    return [spec.runtime.value, "image", "inspect", image]


def pull_command(spec: ImageSpec, image: str) -> list[str]:
    """Return the command that pulls an image."""
    return [spec.runtime.value, "pull", image]


def _list_command(spec: ImageSpec, label: str) -> list[str]:
    return [spec.runtime.value, "ps", "--all", "--quiet", "--no-trunc", "--filter", f"label={label}"]


def _label(spec: ImageSpec, rank: int) -> str:
    return f"{_LABEL}={_node(spec, rank)}"


def _node(spec: ImageSpec, rank: int) -> str:
    """Return the name of a node among all containers of a machine."""
    if spec.owner is None:
        return f"{spec.task_id}/{rank}"
    return f"{spec.task_id}/{spec.owner.machine}/{spec.owner.attempt}"


def _machine_label(spec: ImageSpec) -> tuple[str, ...]:
    if spec.owner is None:
        return ()
    return ("--label", f"{_MACHINE_LABEL}={spec.task_id}/{spec.owner.machine}")


def _bind(path: str, *further: str) -> Iterator[str]:
    """Yield the options for a path that is the same outside and inside."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(("type=bind", f"source={path}", f"target={path}", *further))
    yield from ("--mount", line.getvalue())


def _gpus(runtime: ContainerRuntime) -> tuple[str, ...]:
    """Return the options for all GPUs of this machine. `CUDA_VISIBLE_DEVICES` selects those of the job.

    Source: podman-create(1), with the Container Device Interface; the reference of `docker run`.
    """
    if runtime is ContainerRuntime.PODMAN:
        return ("--device", "nvidia.com/gpu=all")
    return ("--gpus", "all")
