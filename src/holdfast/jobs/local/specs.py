"""Node specifications of an attempt, from the record of a job."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, replace

from holdfast.jobs.environment import JobPipeline, Node, container_base, run_environment, setup_environment
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.node.scripts import choose_venv, node_variables, write_scripts
from holdfast.jobs.node.virtual_environment import install_here
from holdfast.jobs.node_spec import Environment, NodeSpec, read_environment
from holdfast.jobs.records import JobRecord
from holdfast.jobs.state_machine import JobState
from holdfast.jobs.task.model import Task
from holdfast.system.linux.files import write_atomic


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


def write_commands(
    task: Task, folder: JobFolder, base: dict[str, str], pipeline: JobPipeline | None = None
) -> None:
    """Write the scripts of a job, and its user's environment.

    Raises:
        InvalidInput: see `write_scripts`.
    """
    folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.logs.mkdir(exist_ok=True)
    write_scripts(task, folder)
    environment = Environment(base, {**task.envs, **task.secrets}, pipeline)
    write_atomic(folder.environment, json.dumps(asdict(environment)))


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
    notice = folder.node(job_state.attempt, rank).notice
    node = Node(
        task_id=record.task_id,
        job=record.id,
        name=record.name,
        attempt=job_state.attempt,
        rank=rank,
        addresses=addresses(spec.num_nodes, record.id),
        num_gpus=spec.num_gpus,
        user=spec.user,
        notice=str(notice),
        progress=str(folder.progress),
        grace_s=record.policy.grace_s,
        pipeline=environment.pipeline,
        port=record.port,
    )
    gpus = record.gpus[rank] if record.gpus else ()
    variables = node_variables(environment.task, folder, rank)
    venv = choose_venv({**environment.base, **variables}, folder, rank)
    base = environment.base if venv is None else install_here(environment.base)
    needs_setup = spec.has_setup and not folder.set_up(rank).exists()
    return NodeSpec(
        headline=_headline(record, job_state, rank),
        setup=str(folder.script("setup", rank)) if needs_setup else None,
        run=str(folder.script("run", rank)),
        set_up=str(folder.set_up(rank)),
        workdir=str(folder.workdir(rank)),
        log=str(folder.log(rank)),
        wakeup=str(folder.wakeup),
        notice=str(notice),
        environment=run_environment(node, base, variables, gpus=gpus),
        setup_environment=setup_environment(node, base, variables, gpus=gpus),
        grace_s=record.policy.grace_s,
        gpus=record.gpus,
        port=record.port,
        venv=None if venv is None else str(venv),
    )


def _headline(record: JobRecord, job_state: JobState, rank: int) -> str:
    where = f" on node {rank}" if record.spec.num_nodes > 1 else ""
    why = f", after: {job_state.reason}" if job_state.reason else ""
    what = f"attempt {job_state.attempt} of job {record.id} starts{where}{why}"
    return f"holdfast: {time.strftime('%F %T')} {what}"
