"""What a warden is told to do, and what it tells in the end: two documents in its folder."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from holdfast.documents import decode_dataclass
from holdfast.errors import Corrupt, Internal
from holdfast.jobs.node.folder import JobFolder
from holdfast.jobs.outcome import Outcome

MAX_OWN_BYTES = 64 << 20
"""Bytes of a document that holds an environment."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The work of a node in one attempt."""

    headline: str  # first line of the attempt in the log
    setup: str | None  # path of a script; None: nothing to set up, or it is done already
    run: str  # path of a script
    set_up: str  # path of the file that says that `setup` has succeeded
    workdir: str
    log: str
    bell: str
    notice: str
    environment: Mapping[str, str]  # of `run`
    setup_environment: Mapping[str, str]
    grace_s: float

    def write(self, path: Path) -> None:
        """Write it; only the owner may read it, since values of secrets stand there."""
        write_whole(path, json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Read it.

        Raises:
            Corrupt: it is no plan.
        """
        return decode_dataclass(cls, path.read_bytes(), str(path), max_bytes=MAX_OWN_BYTES, any_text=True)


@dataclass(frozen=True, slots=True)
class Environment:
    """The environment of a job: of who submitted it, and what its task adds."""

    base: Mapping[str, str]
    task: Mapping[str, str]


def read_environment(job: JobFolder) -> Environment:
    """Return the environment of a job.

    Raises:
        Corrupt: its document is damaged.
    """
    text, what = job.environment.read_bytes(), str(job.environment)
    return decode_dataclass(Environment, text, what, max_bytes=MAX_OWN_BYTES, any_text=True)


def write_outcome(path: Path, outcome: Outcome) -> None:
    """Write down how a node ended."""
    told = {"phase": outcome.phase.value, "code": outcome.code, "killed_by": outcome.killed_by}
    write_whole(path, json.dumps(told))


def read_outcome(path: Path) -> Outcome | None:
    """How a node ended; None if nobody has written it down.

    Raises:
        Internal: it is no such document.
    """
    try:
        text = path.read_text()
    except FileNotFoundError:
        return None
    try:
        return decode_dataclass(Outcome, text, str(path))
    except Corrupt as error:
        raise Internal(f"{path} does not say how a node ended: {error}") from error


def write_whole(path: Path, text: str) -> None:
    """Write a file so that whoever reads it sees all of it or nothing."""
    fd, beside = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(beside).replace(path)
    except BaseException:
        Path(beside).unlink(missing_ok=True)
        raise
