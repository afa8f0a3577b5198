"""Admission of a node to an attempt: its checks run beside the preparation, and may refuse it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from holdfast.jobs.folder import JobFolder, NodeFolder
from holdfast.jobs.node.checks.gate import CheckedPlaces, NodeGate, make_plan
from holdfast.jobs.node.checks.result import (
    MODE,
    OFF,
    STOP,
    NodeChecks,
    describe_failures,
    read_mode,
    write_checks,
)
from holdfast.jobs.node.mounts.mount_spec import outside_path, read_links
from holdfast.jobs.node.virtual_environment import activate
from holdfast.jobs.node_spec import NodeSpec, machine_name
from holdfast.system.environment import read_progress

_GPU_DEVICES = (Path("/dev/nvidiactl"), Path("/dev/kfd"))
_GPU_SCRIPT = Path(__file__).with_name("gpu_script.py")
_NUM_GPUS, _NUM_NODES = "SKYPILOT_NUM_GPUS_PER_NODE", "SKYPILOT_NUM_NODES"
_MAX_REFUSAL = 500


class Admission:
    """Checks of a node that run while the attempt is prepared.

    Args:
        job: folder of the job.
        log: descriptor of the node's log.
        is_contained: the commands run in a container, which has temporary files and programs of its own.
    """

    def __init__(
        self, plan: NodeSpec, job: JobFolder, node: NodeFolder, log: int, *, is_contained: bool
    ) -> None:
        self._path, self._log = node.checks, log
        self._mode = self._read_mode(plan.environment.get(MODE))
        self._gate: NodeGate | None = None
        if self._mode == OFF:
            return
        try:
            gpus = None if is_contained else _gpu_command(plan)
            self._gate = NodeGate(machine_name(), make_plan(_places(plan, job, is_contained)), gpus)
        except OSError as error:  # no process or descriptor is left: the commands will need some too
            self._write(f"the checks of this node cannot start: {error}")

    def refusal(self, meanwhile: Callable[[], None]) -> str:
        """Return why the attempt is not started on this node, or an empty string.

        Args:
            meanwhile: called repeatedly.

        Blocks: until all checks have ended, or their time is over.
        """
        if self._gate is None:
            return ""
        found = self._gate.wait(meanwhile)
        stopping = [one for one in found.failed if one.stops] if self._mode == STOP else []
        for one in found.failed:
            self._write(f"a check of this node failed: {describe_failures([one])}")
        self._record(found, was_refused=bool(stopping))
        return describe_failures(stopping)[:_MAX_REFUSAL]

    def _record(self, found: NodeChecks, *, was_refused: bool) -> None:
        changed = NodeChecks(
            found.machine, found.unix_s, found.took_s, found.added_s, found.checks, was_refused
        )
        with suppress(OSError):  # the disk is full or broken, which a check has found
            write_checks(self._path, changed)

    def _read_mode(self, text: str | None) -> str:
        mode = read_mode(text)
        if mode is None:
            self._write(f"{MODE} is {text!r:.100}, expected stop, report or off. It is taken for stop.")
        return mode or STOP

    def _write(self, text: str) -> None:
        os.write(self._log, f"holdfast: {text}\n".encode())


def _places(plan: NodeSpec, job: JobFolder, is_contained: bool) -> CheckedPlaces:
    links = read_links(job)
    outside = [outside_path(home, links) for home in read_progress(job.progress)]
    # Mounts are not there yet, and a folder below a mount point would be another one.
    homes = [
        home for home in outside if "://" not in home and not _is_below(home, job) and Path(home).is_dir()
    ]
    temporary = Path("/tmp" if is_contained else plan.environment.get("TMPDIR") or "/tmp")
    num_nodes = plan.environment.get(_NUM_NODES, "1")
    return CheckedPlaces(
        folder=job.path,
        temporary=temporary,
        homes=tuple(homes),
        num_nodes=int(num_nodes) if num_nodes.isdecimal() else 1,
    )


def _is_below(home: str, job: JobFolder) -> bool:
    return Path(home).is_relative_to(job.copies)


def _gpu_command(plan: NodeSpec) -> tuple[list[str], Mapping[str, str]] | None:
    """Return the command that checks the GPUs of a job; None without GPUs."""
    num_gpus = plan.environment.get(_NUM_GPUS, "0")
    if not (num_gpus.isdecimal() and int(num_gpus)) or not any(path.exists() for path in _GPU_DEVICES):
        return None
    environment = dict(plan.environment)
    if plan.venv is not None and Path(plan.venv).is_dir():
        environment = activate(environment, plan.venv)
    python = next(
        (
            found
            for name in ("python", "python3")
            if (found := shutil.which(name, path=environment.get("PATH")))
        ),
        None,
    )
    return None if python is None else ([python, str(_GPU_SCRIPT), "cuda"], environment)
