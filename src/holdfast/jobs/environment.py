"""The environment of a job's commands: SkyPilot's names, and Holdfast's; pure."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.surroundings import NOTICES, PROGRESS

MARK = "HOLDFAST_NODE"
"""Variable by which the processes of a node are known: task id, attempt and rank of the node."""


@dataclass(frozen=True, slots=True)
class Node:
    """One node of one attempt, as its commands are to know it."""

    task_id: str
    job: int
    name: str
    attempt: int
    rank: int
    addresses: tuple[str, ...]  # of all nodes, by rank
    num_gpus: int  # per node
    user: str
    notice: str  # path of the file where a preemption notice will be
    progress: str  # path of the file where the training tells its steps
    grace_s: float  # how long a last save may take
    cloud: str = "local"  # where it is, in SkyPilot's words

    @property
    def mark(self) -> str:
        """Value of `MARK`."""
        return mark(self.task_id, self.attempt, self.rank)


def mark(task_id: str, attempt: int | None = None, rank: int | None = None) -> str:
    """What the marks of a job, of one of its attempts or of one node of that begin with."""
    parts = (task_id, *(str(part) for part in (attempt, rank) if part is not None))
    return "/".join(parts) + ("" if rank is not None else "/")


def mint_task_id(name: str, job: int, now_unix_s: float) -> str:
    """An id as SkyPilot's managed jobs have them; the same for all of a job's life."""
    moment = datetime.datetime.fromtimestamp(now_unix_s, datetime.timezone.utc)
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name)
    return f"sky-managed-{moment:%Y-%m-%d-%H-%M-%S-%f}_{plain}_{job}-0"


def run_environment(
    node: Node, base: Mapping[str, str], task: Mapping[str, str], *, gpus: Sequence[str] = ()
) -> dict[str, str]:
    """The environment of `run`.

    Args:
        node: whose it is.
        base: of whoever launched the job.
        task: `envs` and `secrets` of the task; they come before `base`, and ours before them.
        gpus: devices of this node alone; empty leaves the choice to the job.
    """
    ips = "\n".join(node.addresses)
    ours = {
        "SKYPILOT_TASK_ID": node.task_id,
        "SKYPILOT_TASK_IDS": node.task_id,
        "SKYPILOT_MANAGED_JOB_ID": str(node.job),
        "SKYPILOT_INTERNAL_JOB_ID": str(node.job),
        "SKYPILOT_JOB_RANK": "0",
        "SKYPILOT_NODE_RANK": str(node.rank),
        "SKYPILOT_NODE_IPS": ips,
        "SKYPILOT_NUM_NODES": str(len(node.addresses)),
        "SKYPILOT_NUM_GPUS_PER_NODE": str(node.num_gpus),
        "SKYPILOT_USER": node.user,
        "SKYPILOT_CLUSTER_INFO": json.dumps(
            {"cluster_name": node.name, "cloud": node.cloud, "region": None, "zone": None}
        ),
        "HOLDFAST_JOB": str(node.job),
        "HOLDFAST_ATTEMPT": str(node.attempt),
        MARK: node.mark,
        PROGRESS: node.progress,
        NOTICES: _notices({**base, **task}.get(NOTICES, "auto"), node.notice),
    }
    # torchrun ends its workers by force after 30 s, whatever time the notice leaves them.
    defaults = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(node.grace_s))}
    devices = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
    return {**defaults, **base, **devices, **task, **ours}


def setup_environment(
    node: Node, base: Mapping[str, str], task: Mapping[str, str], *, gpus: Sequence[str] = ()
) -> dict[str, str]:
    """The environment of `setup`; see `run_environment`."""
    return {
        **run_environment(node, base, task, gpus=gpus),
        "SKYPILOT_SETUP_NODE_RANK": str(node.rank),
        "SKYPILOT_SETUP_NODE_IPS": "\n".join(node.addresses),
        "SKYPILOT_SETUP_NUM_GPUS_PER_NODE": str(node.num_gpus),
    }


def _notices(before: str, path: str) -> str:
    """The sources of notices, and the job's own file."""
    kept = [word for word in before.split(",") if word.strip() not in ("", "none")]
    return ",".join([*kept, f"file:{path}"])


def share_gpus(devices: Sequence[str], wanted: int, num_nodes: int) -> list[list[str]]:
    """Devices of this machine for each node, so that nodes do not meet on one.

    Empty lists where there is nothing to share out: no wish, one node, or fewer devices than are wanted.
    """
    if num_nodes < 2 or not wanted or len(devices) < wanted * num_nodes:
        return [[] for _ in range(num_nodes)]
    return [list(devices[rank * wanted : (rank + 1) * wanted]) for rank in range(num_nodes)]
