"""Environment variables of a pod: those of the task, SkyPilot's and Holdfast's; pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.jobs.environment import TAG, UNBUFFERED, add_notice_file
from holdfast.jobs.k8s.escaping import escape, reference
from holdfast.jobs.k8s.names import object_name
from holdfast.jobs.task.model import Task
from holdfast.jobs.task.variables import fill_in
from holdfast.system.environment import KEEP_IN_MEMORY, PREEMPTION

WORKDIR_URL = "HOLDFAST_WORKDIR_URL"
"""Variable with the URL of the workdir's repository."""
_NAMESPACE = "HOLDFAST_NAMESPACE"
_NOTICE = "/tmp/holdfast-notice"
_FIRST = (_NAMESPACE, TAG)


@dataclass(frozen=True, slots=True)
class PodNodes:
    """Nodes of a job, as its pods see them."""

    addresses: tuple[str, ...]  # by rank
    rank: Mapping[str, Any] | None  # source of a pod's rank. None: the script of the pod derives it
    num_gpus: int
    grace_s: int


def secret_name(task: Task) -> str:
    """Return the name of the Secret with the values of a task's `secrets`."""
    return f"{object_name(task)}-secrets"


def environment(task: Task, nodes: PodNodes) -> list[dict[str, Any]]:
    """Return the `env` of the container.

    Holdfast's variables override those of the task. A variable may refer to those before it.
    """
    addresses = "\n".join(nodes.addresses)
    num_gpus = str(nodes.num_gpus)
    ours: dict[str, Any] = {
        _NAMESPACE: _field("metadata.namespace"),
        TAG: _field("metadata.name"),
        # The same after every restart. Two namespaces may have jobs of one name.
        "SKYPILOT_TASK_ID": {"value": f"{reference(_NAMESPACE)}-{object_name(task)}"},
        "SKYPILOT_TASK_IDS": {"value": f"{reference(_NAMESPACE)}-{object_name(task)}"},
        "SKYPILOT_JOB_RANK": {"value": "0"},
        "SKYPILOT_NODE_IPS": {"value": addresses},
        "SKYPILOT_NUM_NODES": {"value": str(len(nodes.addresses))},
        "SKYPILOT_NUM_GPUS_PER_NODE": {"value": num_gpus},
        "SKYPILOT_SETUP_NODE_IPS": {"value": addresses},
        "SKYPILOT_SETUP_NUM_GPUS_PER_NODE": {"value": num_gpus},
        PREEMPTION: {"value": escape(add_notice_file(task.envs.get(PREEMPTION, "auto"), _NOTICE))},
    }
    if nodes.rank is not None:
        ours |= {"SKYPILOT_NODE_RANK": dict(nodes.rank), "SKYPILOT_SETUP_NODE_RANK": dict(nodes.rank)}
    if task.repository is not None:
        ours[WORKDIR_URL] = {"value": _repository_url(task)}
    defaults = {
        # torchrun kills its workers after 30 s by default, even if the pod has more time.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": {"value": str(nodes.grace_s)},
        # A keeper ends with its pod, so its memory is of no use to the next attempt.
        KEEP_IN_MEMORY: {"value": "0"},
        **{name: {"value": value} for name, value in UNBUFFERED.items()},
    }
    first = {name: ours[name] for name in _FIRST}
    merged = {**first, **defaults, **_variables(task), **ours}
    return [{"name": name, **source} for name, source in merged.items()]


def _variables(task: Task) -> dict[str, Any]:
    """Return the variables of `envs` and `secrets`. Values of secrets are in a Secret of the cluster."""
    plain = {name: {"value": escape(value)} for name, value in task.envs.items()}
    return {**plain, **{name: _secret(task, name) for name in task.secrets}}


def _secret(task: Task, name: str) -> dict[str, Any]:
    return {"valueFrom": {"secretKeyRef": {"name": secret_name(task), "key": name}}}


def _field(path: str) -> dict[str, Any]:
    return {"valueFrom": {"fieldRef": {"fieldPath": path}}}


def _repository_url(task: Task) -> str:
    """Return the URL of the repository, with references to secrets."""
    marked = {name: f"\0{name}\0" for name in task.secrets}  # no value contains this character
    url = str(fill_in(task.document["workdir"]["url"], {**task.envs, **marked}))
    return re.sub("\0(.*?)\0", lambda found: reference(found[1]), escape(url))
