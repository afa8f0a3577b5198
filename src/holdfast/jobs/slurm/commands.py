"""Slurm's command-line programs, whose options change less than its API."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from holdfast.errors import RetryLater, Unsupported
from holdfast.jobs.machines import NodeStanding, judge, read_events
from holdfast.jobs.records import JobSpec
from holdfast.system.entry import command
from holdfast.system.environment import NOTIFY, NOTIFY_ON
from holdfast.system.linux.program_runs import run_program
from holdfast.system.log import get_logger

_log = get_logger("jobs")

_TIMEOUT_S = 60.0
_NUM_TRIES = 3
"""Tries of a command that may be repeated. Slurm sends its SIGTERM to all programs of a job, also to ours."""
MAX_SHARE = 0.1  # greatest share of the usable machines that is left out, except that one always may be
_KILL_WAIT_S = 30.0  # Slurm's default for KillWait
_FIXES = {
    "invalid generic resource": "The cluster has no GPUs of this name: `sinfo -o %G` prints those it has. "
    "Give them with --gpus NAME:N or as gres in config.slurm.sbatch_options, or use --gpus none.",
    "invalid partition": "`sinfo -s` prints the partitions. Give one as partition in "
    "config.slurm.sbatch_options.",
    "requested node configuration": "No node has as much: `sinfo -o '%n %c %m %G'` prints the CPUs, MiB and "
    "GPUs of each. Ask for less in resources.",
    "invalid account": "Give your account as account in config.slurm.sbatch_options.",
    "invalid qos": "Give a QOS of your account as qos in config.slurm.sbatch_options.",
}
"""Advice by words of sbatch's refusals."""


class Queued(Struct, frozen=True):
    """State of a job in Slurm."""

    state: str  # such as PENDING
    reason: str  # why it is pending


def require() -> None:
    """Check that Slurm is installed."""
    if shutil.which("sbatch") is None:
        message = "sbatch is not on the PATH. Use `--on slurm` on a login node of a Slurm cluster."
        raise Unsupported(f"{message} Nothing was started.")


def submit(script: Path, *, exclude: str = "") -> str:
    """Submit a script with the nodes to leave out, if not those that it names, and return the job's id."""
    try:
        output = _sbatch("--parsable", script, exclude)
    except RetryLater as error:
        fix = next((fix for words, fix in _FIXES.items() if words in str(error).lower()), "")
        raise RetryLater(f"{error}. {fix}".removesuffix(". ")) from error
    return output.strip().split(";")[0]


def can_run_without(script: Path, nodes: str) -> bool:
    """Return True if Slurm could run a script without these nodes."""
    try:
        _sbatch("--test-only", script, nodes)
    except RetryLater:
        return False
    return True


def _sbatch(option: str, script: Path, exclude: str) -> str:
    words = ["sbatch", option, *([f"--exclude={exclude}"] if exclude else []), str(script)]
    return _run(words, _outer_environment())


def _outer_environment() -> dict[str, str]:
    """Return the variables for a submission."""
    # Launched from within a job, whose nodes and limits do not apply. A job has no use for the secrets.
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in (NOTIFY, NOTIFY_ON) and (name == "SLURM_CONF" or not name.startswith("SLURM_"))
    }
    if paths := [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]:
        # The job runs in another folder, where relative paths would not work.
        environment["PYTHONPATH"] = os.pathsep.join(str(Path(path).absolute()) for path in paths)
    return environment


def query_queue(ids: Sequence[str]) -> dict[str, Queued]:
    """Return the states of jobs. Jobs that Slurm has forgotten are left out."""
    if not ids:
        return {}
    words = ["squeue", "--noheader", "--states=all", "--format=%i|%T|%r", f"--jobs={','.join(ids)}"]
    try:
        output = _run(words)
    except RetryLater as error:
        if "Invalid job id" not in str(error):
            raise
        output = ""
    rows = [line.split("|", 2) for line in output.splitlines() if line.count("|") >= 2]
    return {number: Queued(state, reason) for number, state, reason in rows}


def query_accounting(number: str) -> str | None:
    """Return a job's final state from the accounting, or None."""
    words = ["sacct", "--noheader", "--allocations", "--parsable2", "--format=State", f"--jobs={number}"]
    with contextlib.suppress(RetryLater, Unsupported):
        return next(iter(_run(words).split()), None)
    return None


def cancel_waiting(number: str) -> None:
    """Cancel a job if it is pending."""
    _run(["scancel", "--state=PENDING", number])


def kill_steps(number: str) -> None:
    """Send SIGKILL to all processes of a job except its batch script."""
    _run(["scancel", "--signal=KILL", number], num_tries=_NUM_TRIES)


def requeue(number: str) -> None:
    """Requeue a job, so that it starts from the beginning on any nodes."""
    _run(["scontrol", "requeue", number])


def leave_out(number: str, nodes: str) -> None:
    """Replace the nodes that a pending job leaves out. Slurm refuses that for one that is running."""
    _run(["scontrol", "update", f"JobId={number}", f"ExcNodeList={nodes}"], num_tries=_NUM_TRIES)


def usable_nodes(partition: str) -> tuple[str, ...]:
    """Return the nodes of a partition, or of the default one, that run jobs now, or will."""
    rows = _node_rows([f"--partition={partition}"] if partition else [])
    of_partition = [row for row in rows if partition or row[2].endswith("*")]
    usable = (name for name, state, _ in of_partition if not _has_failed(state))
    return tuple(dict.fromkeys(usable))


def failed_nodes(nodes: Sequence[str]) -> frozenset[str]:
    """Return which of some nodes have failed, or do not respond."""
    rows = _node_rows([f"--nodes={','.join(nodes)}"])
    return frozenset(name for name, state, _ in rows if _has_failed(state))


def _node_rows(options: list[str]) -> list[list[str]]:
    """Return the name, state and partition of nodes; the default partition ends with a star."""
    output = _run(["sinfo", "--noheader", "--Node", "--format=%N|%T|%P", *options])
    return [line.split("|") for line in output.splitlines() if line.count("|") == 2]


def _has_failed(state: str) -> bool:
    """Return True if no job can run on a node in a state of sinfo."""
    return state.endswith("*") or state.startswith(("down", "drain", "fail", "err", "unk", "power", "maint"))


def kill_wait_s() -> float:
    """Return the time between SIGTERM and SIGKILL on this cluster, in seconds; Slurm's option KillWait."""
    try:
        found = re.search(r"^KillWait\s*=\s*(\d+) sec", _run(["scontrol", "show", "config"]), re.MULTILINE)
    except RetryLater:
        found = None
    return float(found[1]) if found else _KILL_WAIT_S


def sweep(num_nodes: int, folder: Path) -> None:
    """Kill what a killed runner has left, on all nodes that still respond."""
    words = ["srun", "--overlap", f"--nodes={num_nodes}", f"--ntasks={num_nodes}", "--ntasks-per-node=1"]
    with contextlib.suppress(RetryLater):  # a lost node has no processes
        _run([*words, *command("holdfast.jobs.slurm", "sweep", str(folder))])


def node_names(nodelist: str) -> tuple[str, ...]:
    """Return the names of nodes, in Slurm's order; see `addresses`."""
    return tuple(_run(["scontrol", "show", "hostnames", nodelist]).split())


def addresses(nodelist: str) -> tuple[str, ...]:
    """Return the addresses of nodes, in Slurm's order, which is that of SLURM_NODEID."""
    names = node_names(nodelist)
    known: dict[str, str] = {}
    for line in _run(["scontrol", "--oneliner", "show", "node", nodelist]).splitlines():
        facts = dict(word.split("=", 1) for word in line.split() if "=" in word)
        known[facts.get("NodeName", "")] = facts.get("NodeAddr", "")
    found = [known.get(name) or name for name in names]
    for number, name in enumerate(found):
        with contextlib.suppress(OSError):  # srun resolves it
            found[number] = socket.gethostbyname(name)
    return tuple(found)


def _run(words: list[str], environment: Mapping[str, str] | None = None, *, num_tries: int = 1) -> str:
    """Run a program, and return its output. It is run again if a signal has ended it."""
    try:
        done = run_program(words, timeout_s=_TIMEOUT_S, env=environment)
    except FileNotFoundError as error:
        raise Unsupported(f"{words[0]} is not on the PATH of this machine.") from error
    if done.status < 0 and num_tries > 1:
        return _run(words, environment, num_tries=num_tries - 1)
    if done.status:
        raise RetryLater(f"`{' '.join(words)}` exited with {done.status}: {done.error[-500:]}")
    return done.out.decode("utf-8", "replace")


def choose_left_out(state: Path, script: Path, spec: JobSpec, *, partition: str) -> tuple[str, ...]:
    """Return the nodes that stand out and that a job can do without."""
    standings = [] if spec.is_pinned else judge(read_events(state))
    if not any(one.stands_out for one in standings):
        return ()
    try:
        left_out = node_names(spec.exclude) if spec.exclude else ()
        usable = [name for name in usable_nodes(partition) if name not in left_out]
        chosen = choose_excluded(standings, usable, num_nodes=spec.num_nodes)
        # Slurm knows more about its nodes: their memory, devices and features.
        return chosen if chosen and can_run_without(script, joined(chosen, spec.exclude)) else ()
    except (RetryLater, Unsupported) as error:
        _log.warning("no node is left out: %s", error)
        return ()


def joined(names: tuple[str, ...], unwanted: str) -> str:
    """Return a list of nodes for Slurm: some names, and those that the user leaves out."""
    return ",".join(filter(None, (unwanted, *names)))


def choose_excluded(
    standings: Sequence[NodeStanding], usable: Collection[str], *, num_nodes: int
) -> tuple[str, ...]:
    """Return the machines to leave out, the most conspicuous first."""
    room = min(max(1, int(len(usable) * MAX_SHARE)), len(usable) - num_nodes)
    chosen = [one.name for one in standings if one.stands_out and one.name in usable]
    return tuple(chosen[: max(0, room)])
