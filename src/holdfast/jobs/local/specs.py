"""Node specifications of an attempt, from the record of a job."""

from __future__ import annotations

from dataclasses import replace

from holdfast.jobs.environment import Node, container_base
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.node.preparation import make_node_spec
from holdfast.jobs.node_spec import Environment, NodeSpec, read_environment
from holdfast.jobs.records import JobRecord
from holdfast.jobs.state_machine import JobState


def addresses(num_nodes: int, job: int) -> tuple[str, ...]:
    """Return loopback addresses of the nodes, by rank. All of 127.0.0.0/8 is this machine.

    Jobs with several nodes have addresses of their own, so that their servers do not meet.
    """
    if num_nodes == 1:
        return ("127.0.0.1",)
    # Numbers that are 65024 apart share their addresses, and so do some of jobs with more than 254 nodes.
    blocks = [(job + rank // 254) % (254 * 256) for rank in range(num_nodes)]
    return tuple(
        f"127.{1 + block // 256}.{block % 256}.{1 + rank % 254}" for rank, block in enumerate(blocks)
    )


def make_specs(record: JobRecord, job_state: JobState, folder: JobFolder) -> list[NodeSpec]:
    """Return the specifications of an attempt's nodes, by rank.

    Args:
        job_state: current state, with the attempt and its reason.
    """
    environment = read_environment(folder)
    if folder.image.exists():
        environment = replace(environment, base=container_base(environment.base))
    return [_plan(record, job_state, folder, rank, environment) for rank in range(record.spec.num_nodes)]


def _plan(
    record: JobRecord, job_state: JobState, folder: JobFolder, rank: int, environment: Environment
) -> NodeSpec:
    spec = record.spec
    node = Node(
        task_id=record.task_id,
        job=record.id,
        name=record.name,
        attempt=job_state.attempt,
        rank=rank,
        addresses=addresses(spec.num_nodes, record.id),
        num_gpus=spec.num_gpus,
        user=spec.user,
        notice=str(folder.node(job_state.attempt, rank).notice),
        progress=str(folder.progress),
        grace_s=record.policy.grace_s,
        pipeline=environment.pipeline,
        port=record.port,
    )
    return make_node_spec(
        folder,
        node,
        environment.base,
        environment.task,
        begins=_begins(record, job_state, rank),
        wakeup=folder.wakeup,
        set_up=folder.set_up(rank) if spec.has_setup else None,
        gpus=record.gpus,
    )


def _begins(record: JobRecord, job_state: JobState, rank: int) -> str:
    where = f" on node {rank}" if record.spec.num_nodes > 1 else ""
    why = f", after: {job_state.reason}" if job_state.reason else ""
    return f"attempt {job_state.attempt} of job {record.id} starts{where}{why}"
