"""Specification and outcome of a node: two documents in its folder."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from holdfast.errors import Corrupt, Internal
from holdfast.jobs.environment import JobPipeline
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.journal import load_document, read_document
from holdfast.jobs.outcome import Outcome
from holdfast.system.documents import to_plain
from holdfast.system.linux.files import write_atomic

MAX_OWN_BYTES = 64 << 20  # limit for a document that contains an environment


_OUTCOME_BYTES = 2048  # size of the document with the outcome of a node, with spaces at its end


class NodeSpec(Struct, frozen=True):
    """Specification of a node's work in one attempt."""

    headline: str  # first line of the attempt in the log
    setup: str | None  # path of a script, or None if there is nothing to set up
    run: str  # path of a script
    set_up: str  # path of a file that marks a successful `setup`
    workdir: str
    log: str
    wakeup: str
    notice: str
    environment: Mapping[str, str]  # of `run`; `setup` has a few more
    grace_s: float
    gpus: tuple[tuple[str, ...], ...] = ()  # given to each node of the job
    port: int | None = None  # chosen for the job
    venv: str | None = None  # folder of the node's virtual environment. None: it has none of its own

    @classmethod
    def read(cls, path: Path) -> NodeSpec:
        """Read a specification."""
        return load_document(path, cls, max_bytes=MAX_OWN_BYTES)


class Environment(Struct, frozen=True):
    """Environment of a job: that of its user, the variables of its task, and its pipeline."""

    base: Mapping[str, str]
    task: Mapping[str, str]
    pipeline: JobPipeline | None = None


def read_environment(job: JobFolder) -> Environment:
    """Read the environment of a job."""
    return load_document(job.environment, Environment, max_bytes=MAX_OWN_BYTES)


def reserve_outcome(path: Path) -> None:
    """Reserve disk space for the outcome of a node, whose commands may fill the disk."""
    write_atomic(_reserved(path), " " * _OUTCOME_BYTES)


def write_outcome(path: Path, outcome: Outcome) -> None:
    """Write the outcome of a node, into the space that was reserved for it."""
    reserved = _reserved(path)
    with reserved.open("r+b") as file:
        file.write(json.dumps(to_plain(outcome)).ljust(_OUTCOME_BYTES).encode())
        file.flush()
        os.fsync(file.fileno())
    reserved.replace(path)


def _reserved(path: Path) -> Path:
    return path.with_name(f"{path.name}.reserved")


def read_outcome(path: Path) -> Outcome | None:
    """Return the outcome of a node, or None if it does not exist."""
    try:
        return read_document(path, Outcome)
    except Corrupt as error:
        raise Internal(f"{path} is not a valid outcome of a node: {error}") from error


def machine_name() -> str:
    """Return the name of this machine, in a job of Slurm that of the node."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
