"""Template of a job's pods; pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.jobs.k8s import pod_resources
from holdfast.jobs.k8s.escaping import escape
from holdfast.jobs.k8s.names import is_subdomain, labels
from holdfast.jobs.k8s.pod_config import grace_s, merge_pod_config, pod_config
from holdfast.jobs.k8s.pod_environment import PodNodes, environment
from holdfast.jobs.k8s.pod_script import RestartRule, clone_command, pod_command
from holdfast.jobs.k8s.refusal import invalid
from holdfast.jobs.k8s.volumes import WORKDIR, volumes
from holdfast.jobs.task.model import Task

_IMAGE = re.compile(r"docker:([A-Za-z0-9][\w./:@-]*)", re.A)
_MAX_WORD_BYTES = 128 * 1024 - 1
"""Longest argument or variable that Linux accepts."""


@dataclass(frozen=True, slots=True)
class Container:
    """Settings of the training's container that depend on the kind of object."""

    name: str
    addresses: tuple[str, ...]  # of all nodes, by rank
    rank: Mapping[str, Any] | None  # see `PodNodes`
    rule: RestartRule


def pod_template(task: Task, container: Container) -> dict[str, Any]:
    """Return the template of a task's pods.

    Raises:
        InvalidInput: Kubernetes would reject a value of the task.
        Unsupported: Kubernetes cannot provide what the task requests.
    """
    time_s = grace_s(task)
    _, num_gpus = pod_resources.gpu_choice(task)
    env = environment(task, PodNodes(container.addresses, container.rank, num_gpus, time_s))
    found = volumes(task)
    mounts = [volume.as_mount() for volume in found]
    image = _image(task)
    training = _container(
        container.name, image, pod_command(task, container.rule, grace_s=time_s), env, mounts
    )
    training |= {"workingDir": WORKDIR} if task.repository is not None else {}
    required = pod_resources.requirements(task)
    training |= {"resources": required} if required else {}
    spec: dict[str, Any] = {"terminationGracePeriodSeconds": time_s}
    if task.repository is not None:
        spec["initContainers"] = [_container("workdir", image, clone_command(task, WORKDIR), env, mounts)]
    spec["containers"] = [training]
    spec["volumes"] = [volume.as_volume() for volume in found]
    spec |= _placement(task)
    _check_sizes(task, spec)
    return merge_pod_config(task, {"metadata": {"labels": labels(task)}, "spec": spec})


def _container(
    name: str, image: str, command: list[str], env: list[dict[str, Any]], mounts: list[dict[str, Any]]
) -> dict[str, Any]:
    words = [escape(word) for word in command]
    return {
        "name": name,
        "image": image,
        "command": words[:3],
        "args": words[3:],
        "env": env,
        "volumeMounts": mounts,
    }


def _placement(task: Task) -> dict[str, Any]:
    """Return the keys of a pod's spec that choose nodes and their order."""
    asked = pod_config(task).get("spec", {})
    wanted = pod_resources.affinity(task)
    found: dict[str, Any] = {}
    if wanted and "affinity" not in asked and "nodeSelector" not in asked:
        found["affinity"] = wanted
    priority_class = (task.document.get("resources") or {}).get("priority_class")
    if priority_class is not None:
        if not is_subdomain(str(priority_class)):
            what = f"expected the name of a PriorityClass, found {str(priority_class)[:100]!r}."
            raise invalid(task, "resources.priority_class", what)
        found["priorityClassName"] = str(priority_class)
    return found


def _image(task: Task) -> str:
    key = "resources.image_id"
    asked = (task.document.get("resources") or {}).get("image_id")
    if isinstance(asked, Mapping) and len(asked) == 1:
        (asked,) = asked.values()
    found = _IMAGE.fullmatch(str(asked or ""))
    if found is None:
        what = "expected the container image of the training, such as docker:registry.example/gpt:1, found "
        raise invalid(task, key, f"{what}{str(asked)[:200]!r}.")
    return found[1]


def _check_sizes(task: Task, spec: Mapping[str, Any]) -> None:
    (training,) = spec["containers"]
    words = [*training["command"], *training["args"]]
    words += [f"{one['name']}={one.get('value', '')}" for one in training["env"]]
    for word in words:
        if "\0" in word:
            raise invalid(task, "run", "expected scripts and variables without NUL characters.")
        if len(word.encode()) > _MAX_WORD_BYTES:
            what = (
                f"expected scripts, variables and lists of nodes of less than {_MAX_WORD_BYTES} bytes, found"
            )
            raise invalid(task, "run", f"{what} one with {len(word.encode())}: {word[:60]!r}...")
