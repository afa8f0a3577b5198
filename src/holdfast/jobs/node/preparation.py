"""Preparation of a job: files of its nodes at the launch, and each node's specification before an attempt."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from holdfast.errors import Conflict, InvalidInput, Unsupported
from holdfast.jobs.environment import (
    TAG,
    UNBUFFERED,
    JobPipeline,
    activates_conda,
    add_notice_file,
    conda_start,
    sky_variables,
    tag,
)
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.node.mounts.mount_plan import place
from holdfast.jobs.node.mounts.mount_records import Link, link_user
from holdfast.jobs.node.virtual_environment import install_here, is_wanted
from holdfast.jobs.node.workdir import create_workdir
from holdfast.jobs.node_spec import Environment, NodeSpec
from holdfast.jobs.records import Records, Submission
from holdfast.jobs.task.model import SKY_WORKDIR, Task, is_plain, replace_sky_workdir
from holdfast.system.environment import PREEMPTION, PROGRESS
from holdfast.system.linux.files import write_atomic

_MAX_BYTES = 1 << 20
_YAML = frozenset({".yaml", ".yml"})
_SUFFIXES = _YAML | {"", ".py", ".sh", ".bash", ".ipynb", ".json", ".toml", ".cfg", ".ini"}
"""Suffixes of programs and settings, which may name the folder."""
_TASK_FILE = re.compile(rb"^(?:run|setup):", re.M)


def prepare(task: Task, folder: JobFolder, records: Records, state: Path, *, prefix: str = "") -> None:
    """Write the scripts, workdirs and mounts of a job. `prefix` begins the first line of each script."""
    folder.path.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.logs.mkdir(exist_ok=True)
    _write_scripts(task, folder, prefix)
    create_workdir(task, folder)
    links = _workdir_links(task, folder, records) if task.image is None else []
    place(task, folder, state, links)


def make_node_spec(
    folder: JobFolder,
    job: Submission,
    attempt: int,
    rank: int,
    addresses: Sequence[str],
    environment: Environment,
    *,
    wakeup: Path,
    set_up: Path,
    num_gpus: int,
    where: str = "",
    machine: str = "",
    cloud: str = "local",
    gpus: tuple[tuple[str, ...], ...] = (),
    port: int | None = None,
) -> NodeSpec:
    """Return the specification of a node's work in one attempt.

    `where` ends the first line in the log. `machine` is named if another attempt may run on a different one.
    """
    own = _node_variables(environment.task, folder, rank)
    base = environment.base
    venv = None if job.spec.image else _choose_venv({**base, **own}, folder, rank, machine)
    base = base if venv is None else install_here(base)
    needs_setup = job.spec.has_setup and not set_up.exists()
    notice = str(folder.node(attempt, rank).notice)
    ours = {
        **sky_variables(job.task_id, addresses, num_gpus),
        **_job_variables(job, attempt, rank, environment.pipeline, cloud),
        PROGRESS: str(folder.progress),
        PREEMPTION: add_notice_file({**base, **own}.get(PREEMPTION, "auto"), notice),
    }
    # torchrun kills its workers after 30 s by default, even if the notice leaves more time.
    defaults = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(job.policy.grace_s))}
    ports = {"MASTER_PORT": str(port)} if port is not None else {}
    if ports and len(addresses) > 1:  # with one node, torchrun itself finds a free port
        ports["PET_MASTER_PORT"] = str(port)  # torchrun's default for its option
    devices = {"CUDA_VISIBLE_DEVICES": ",".join(gpus[rank])} if gpus and gpus[rank] else {}
    run = {**defaults, **base, **UNBUFFERED, **ports, **own, **devices, **ours}
    return NodeSpec(
        headline=f"holdfast: {time.strftime('%F %T')} attempt {attempt} of job {job.number} starts{where}",
        setup=str(folder.script("setup", rank)) if needs_setup else None,
        run=str(folder.script("run", rank)),
        set_up=str(set_up),
        workdir=str(folder.workdir(rank)),
        log=str(folder.log(rank)),
        wakeup=str(wakeup),
        notice=notice,
        environment=run,
        grace_s=job.policy.grace_s,
        gpus=gpus,
        port=port,
        venv=None if venv is None else str(venv),
    )


def _job_variables(
    job: Submission, attempt: int, rank: int, pipeline: JobPipeline | None, cloud: str
) -> dict[str, str]:
    """Return the variables that identify a job, an attempt and a node."""
    pipeline = pipeline or JobPipeline(job.number, (job.task_id,))
    cluster = {"cluster_name": job.name, "cloud": cloud, "region": None, "zone": None}
    return {
        "SKYPILOT_TASK_IDS": "\n".join(pipeline.task_ids),
        "SKYPILOT_MANAGED_JOB_ID": str(pipeline.job),
        "SKYPILOT_INTERNAL_JOB_ID": str(job.number),
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_USER": job.spec.user,
        "SKYPILOT_CLUSTER_INFO": json.dumps(cluster),
        "HOLDFAST_JOB": str(job.number),
        "HOLDFAST_ATTEMPT": str(attempt),
        TAG: tag(job.task_id, attempt, rank),
    }


def _write_scripts(task: Task, folder: JobFolder, prefix: str) -> None:
    """Write the scripts of all nodes, with each node's workdir in the place of ~/sky_workdir."""
    write_atomic(folder.shell_start, conda_start(task.setup, task.run))
    # On one line, so that line numbers in messages stay those of the task.
    start = f"{prefix}. {shlex.quote(str(folder.shell_start))}; "
    for rank in range(task.num_nodes):
        folder.workdir(rank).parent.mkdir(parents=True, exist_ok=True)
        for name, text in _texts(task, folder, rank):
            write_atomic(folder.script(name, rank), start + text.rstrip("\n") + "\n")


def _texts(task: Task, folder: JobFolder, rank: int) -> Iterator[tuple[str, str]]:
    workdir = str(folder.workdir(rank))
    for name, text in (("setup", task.setup), ("run", task.run)):
        replaced = replace_sky_workdir(text, workdir)
        if replaced != text and not is_plain(workdir):
            raise InvalidInput(
                f"{task.where(name)}: ~/sky_workdir means {workdir} in this job, "
                "which a shell does not read without quotes. Set HOLDFAST_STATE to a folder whose path has "
                "only letters, digits and any of / . _ - + @ % =. Nothing was started."
            )
        if text:
            yield name, replaced


def _choose_venv(variables: Mapping[str, str], folder: JobFolder, rank: int, machine: str) -> Path | None:
    """Return the folder of a node's own virtual environment, or None without one."""
    if not is_wanted(variables):
        return None
    for name in ("setup", "run"):
        with contextlib.suppress(FileNotFoundError):
            if activates_conda(folder.script(name, rank).read_text(errors="replace")):
                return None
    return folder.venv(rank, machine)


def _node_variables(variables: Mapping[str, str], folder: JobFolder, rank: int) -> dict[str, str]:
    """Return variables of a task, with a node's workdir in the place of ~/sky_workdir."""
    workdir = str(folder.workdir(rank))
    # As after the `=` of an assignment, where a shell replaces ~ after each colon too.
    return {
        name: replace_sky_workdir(f"={value}", workdir).removeprefix("=") for name, value in variables.items()
    }


def _workdir_links(task: Task, folder: JobFolder, records: Records) -> list[Link]:
    """Return the link that a job needs in its user's home, if any. The workdir must be complete."""
    used_in = next(_uses(task, folder), None)  # commands need none: the path is replaced in them
    if used_in is None:
        return []
    target = Path.home() / SKY_WORKDIR
    what = f"{used_in} names {SKY_WORKDIR}"
    way_out = "Use paths relative to the workdir, in which commands start. Nothing was started."
    if task.num_nodes > 1:
        raise Unsupported(
            f"{task.path}: {what}. Each of the {task.num_nodes} nodes has a workdir of its own, and {target} "
            f"can lead to one only. {way_out}"
        )
    user = link_user(records, folder, str(target))
    if user is not None:
        raise Conflict(
            f"{task.path}: {what}. {target} leads to the workdir of job {user} until that job has ended. "
            f"Wait for it or cancel it. To run both at once: {way_out[0].lower()}{way_out[1:]}"
        )
    is_left = target.is_symlink() and target.readlink().is_relative_to(folder.path.parent)
    if os.path.lexists(target) and not is_left:
        raise Conflict(
            f"{task.path}: {what}. {target} already exists and does not belong to a job, so it was not "
            f"changed. Move it away, or: {way_out[0].lower()}{way_out[1:]}"
        )
    return [Link(str(target), str(folder.workdir(0)), f"~/{SKY_WORKDIR}")]


def _uses(task: Task, folder: JobFolder) -> Iterator[str]:
    """Yield the places that name the folder, except for those where its path is replaced."""
    workdir = str(folder.workdir(0))
    for name, text in (("setup", task.setup), ("run", task.run)):
        if SKY_WORKDIR in replace_sky_workdir(text, workdir).replace(workdir, ""):
            yield name
    for name, value in _node_variables({**task.envs, **task.secrets}, folder, 0).items():
        if SKY_WORKDIR in value.replace(workdir, ""):
            yield f"envs.{name}"
    yield from _files(Path(workdir))


def _files(workdir: Path) -> Iterator[str]:
    """Yield the programs and settings in a workdir that name the folder."""
    for parent, folders, names in os.walk(workdir):
        folders[:] = sorted(name for name in folders if name != ".git")
        for name in sorted(names):
            path = Path(parent, name)
            if path.suffix not in _SUFFIXES or not path.is_file() or path.stat().st_size > _MAX_BYTES:
                continue
            data = path.read_bytes()
            is_task_file = path.suffix in _YAML and _TASK_FILE.search(data) is not None
            if SKY_WORKDIR.encode() in data and not is_task_file:
                yield str(path.relative_to(workdir))
