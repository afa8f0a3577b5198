"""Options of sbatch for a task; pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.errors import InvalidInput
from holdfast.jobs.task.amounts import memory_mib, parse_cpus
from holdfast.jobs.task.model import Task, value_at

GRACE_S = 60  # default time before the end at which Slurm sends its notice
FURTHER = "config.slurm.sbatch_options"
"""Key of a task file for more options, which SkyPilot's parser accepts."""
_NODES_WAY = "the number of nodes is `num_nodes`, and `run` starts once on each"
_LOGS_WAY = "the output of all nodes is in `holdfast logs`"
_REQUEUE_WAY = "it requeues a job after a preemption and, as `resources.job_recovery` says, after errors"
_OURS = {
    "job-name": "use `name`, or --name",
    "comment": "it recognises its jobs by it",
    "nodes": _NODES_WAY,
    "ntasks-per-node": _NODES_WAY,
    "chdir": "commands start in the workdir, which `workdir` names",
    "output": _LOGS_WAY,
    "open-mode": _LOGS_WAY,
    "requeue": _REQUEUE_WAY,
    "parsable": "it reads what sbatch prints",
}
"""Options that Holdfast sets, with the way to what a user may want."""
_REFUSED = {
    "array": (
        "launch the file once for each value: "
        "`for i in 1 2 3; do holdfast launch FILE --on slurm --env I=$i; done`"
    ),
    "ntasks": _NODES_WAY,
    "error": _LOGS_WAY,
    "input": "standard input is empty; read a file instead",
    "no-requeue": _REQUEUE_WAY,
    "wrap": "the commands are those of `run`",
    "wait": "use `holdfast launch --attach` or `holdfast wait`",
    "hold": "use `begin` with a time, or `scontrol hold` after the launch",
    "export": "use `envs` and `secrets`, or --env and --secret",
}
"""Options that would break a job, with the way to what a user may want."""
CONTAINERS = frozenset({"container", "container-image"})
"""Options with which Slurm itself, or Pyxis, a plugin for it, runs a job in a container."""
NODES = frozenset({"nodelist", "nodefile"})  # options that name the nodes of a job
_SIGNAL = re.compile(r"(?:[RB]+:)?(?:SIG)?USR1@(\d+)")

Options = dict[str, str | None]  # options by name without dashes. None: the option has no value


def wanted_options(task: Task) -> Options:
    """Return the options of sbatch for a task."""
    found: Options = dict(_from_resources(task))
    found["signal"] = f"USR1@{GRACE_S}"
    further = value_at(task.document, FURTHER)
    if further is not None and not isinstance(further, Mapping):
        raise InvalidInput(
            f"{task.where(FURTHER)}: expected a map of options, found {further!r}. Nothing was started."
        )
    for name, value in (further or {}).items():
        option = str(name).replace("_", "-").lstrip("-")
        _check(task, option, value)
        if value is False:
            found.pop(option, None)
        else:
            has_no_value = value is None or value is True or value == ""  # 1 equals True, and is a value
            found[option] = None if has_no_value else str(value)
    return found


def grace_s(options: Options) -> float:
    """Return how long before its end a job is notified, in seconds."""
    match = _SIGNAL.fullmatch(options.get("signal") or "")
    return float(match[1]) if match else float(GRACE_S)


def _check(task: Task, option: str, value: Any) -> None:
    where = f"{task.path}:{task.line_of(f'{FURTHER}.{option}')}: {FURTHER}"
    if way := _OURS.get(option):
        raise InvalidInput(f"{where}: Holdfast sets --{option} itself: {way}. Nothing was started.")
    if way := _REFUSED.get(option):
        raise InvalidInput(f"{where}: --{option} is not possible here: {way}. Nothing was started.")
    if not re.fullmatch(r"[a-z][a-z0-9-]*", option) or "\n" in str(value):
        raise InvalidInput(
            f"{where}: expected an option of sbatch and its value, found {option!r}: {value!r}."
        )
    if option == "signal" and not _SIGNAL.fullmatch(str(value)):
        raise InvalidInput(
            f"{where}: expected USR1@SECONDS, found {value!r}: SIGUSR1 is the preemption notice."
        )


def _from_resources(task: Task) -> Iterator[tuple[str, str]]:
    resources = task.document.get("resources") or {}
    cpus = parse_cpus(resources.get("cpus"))
    if cpus is not None:
        yield "cpus-per-task", str(max(1, int(cpus)))
    memory = memory_mib(resources.get("memory"))
    if memory is not None:
        yield "mem", f"{memory}M"
    if task.accelerators.choices:
        name, count = task.accelerators.choices[0]
        yield "gres", f"gpu:{name.lower()}:{max(1, int(count))}"
    partition = _partition(task, resources)
    if partition:
        yield "partition", partition


def _partition(task: Task, resources: Mapping[str, Any]) -> str | None:
    """Return the partition of `infra: slurm/CLUSTER/PARTITION`, or SkyPilot's one for CPU-only jobs."""
    parts = str(resources.get("infra") or "").split("/")
    if len(parts) == 3 and parts[0].lower() == "slurm" and parts[2] not in ("", "*"):
        return parts[2]
    named = value_at(task.document, "config.slurm.cpu_partition")
    return str(named) if named and not task.accelerators.choices else None
