"""The user's own `sky` program, which runs in its own environment."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct

from holdfast.errors import Corrupt, RetryLater, Unsupported
from holdfast.jobs.status import JobStatus
from holdfast.system.documents import Count, decode_as, read_as
from holdfast.system.linux.program_runs import end_program, output_of, run_program

PROGRAM = "HOLDFAST_SKY"  # variable with the path of the program. Default: `sky` on the PATH.
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_JOB_ID = re.compile(r"Managed Job ID: *(\d+)", re.I)
_MAX_BYTES = 64 << 20
_SHORT_S = 300.0
_LAUNCH_S = 3600.0  # includes the upload of workdir and file mounts
_OURS: Mapping[str, JobStatus] = {
    "SUBMITTED": JobStatus.PENDING,
    "WINDING_DOWN": JobStatus.RUNNING,
    "FAILED_PRECHECKS": JobStatus.FAILED,
    "FAILED_NO_RESOURCE": JobStatus.FAILED,
}
"""Statuses of SkyPilot that Holdfast does not have. All others have the same names."""


def program() -> str:
    """Return the path of `sky`."""
    named = os.environ.get(PROGRAM) or "sky"
    found = shutil.which(str(Path(named).expanduser()))
    if found is None:
        raise Unsupported(
            f"{named} was not found. `--on sky` calls your own SkyPilot: install it in its own "
            f"environment, and put `sky` on the PATH or set {PROGRAM} to its path. Nothing was started."
        )
    return found


def version() -> str:
    """Return the output of `sky --version`."""
    return _run(["--version"]).strip()


def launch_words(name: str, path: str, secrets: Mapping[str, str]) -> list[str]:
    """Return the arguments of `sky` for a launch. Values of secrets are in its environment instead."""
    chosen = [word for secret in secrets for word in ("--secret", secret)]
    return ["jobs", "launch", "-y", "-d", "-n", name, *chosen, path]


def launch(name: str, path: Path, secrets: Mapping[str, str]) -> str | None:
    """Launch a job in minutes, and return its id, or None if SkyPilot has not printed it."""
    output = _run(launch_words(name, str(path), secrets), secrets, timeout_s=_LAUNCH_S)
    found = _JOB_ID.search(output)
    return None if found is None else found[1]


def queue() -> list[ManagedJob]:
    """Return all managed jobs of this user."""
    return parse_queue(_run(["jobs", "queue", "--all", "--output", "json"]))


def cancel(number: str) -> None:
    """Cancel a job. SkyPilot uploads files of write-back caches first, if time permits."""
    _run(["jobs", "cancel", "-y", "--graceful", number])


def logs(number: str, *, follow: bool) -> Iterator[str]:
    """Yield the output of a job in lines."""
    words = [program(), "jobs", "logs", "--follow" if follow else "--no-follow", number]
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=_environment()
    )
    try:
        begun = b""
        for _, data in output_of(process):
            *lines, begun = (begun + data).split(b"\n")
            yield from map(_plain, lines)
        if begun:
            yield _plain(begun)
    finally:
        end_program(process)


def _plain(line: bytes) -> str:
    return _COLOURS.sub("", line.decode("utf-8", "replace")).rstrip("\r")


def _run(words: list[str], secrets: Mapping[str, str] | None = None, timeout_s: float = _SHORT_S) -> str:
    command = [program(), *words]
    done = run_program(command, timeout_s=timeout_s, env=_environment(secrets))
    if done.status:
        output = _COLOURS.sub("", done.error or done.text)[-1500:]
        raise RetryLater(f"`sky {' '.join(words)}` exited with {done.status}:\n{output}")
    return _COLOURS.sub("", done.text)


def _environment(further: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment without variables that point Python to other packages."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return {**kept, **(further or {})}


_MEMBERS = {"id": "job_id", "name": "job_name", "recoveries": "recovery_count"}
_TIMES = {"started_unix_s": "start_at", "ended_unix_s": "end_at"}


class ManagedJob(Struct, frozen=True, rename={**_MEMBERS, **_TIMES}):
    """Managed job of `sky jobs queue`."""

    id: str
    name: str
    status: JobStatus
    reason: str
    recoveries: Count = 0
    started_unix_s: float | None = None
    ended_unix_s: float | None = None


def parse_queue(text: str) -> list[ManagedJob]:
    """Parse the output of `sky jobs queue --output json`, newest job first."""
    start = text.find("[")  # messages about the server may precede it
    try:
        listed = text[start:] if start >= 0 else "[]"
        rows = decode_as(list[dict[str, Any]], listed, "SkyPilot's queue", max_bytes=_MAX_BYTES)
        return [_managed(row) for row in rows if row.get("job_id") is not None]
    except (Corrupt, ValueError) as error:
        raise RetryLater(f"Cannot parse SkyPilot's queue: {error} In {text[:200]!r}.") from error


def _managed(row: dict[str, Any]) -> ManagedJob:
    word = str(row.get("status") or "PENDING").rpartition(".")[2]
    status = _OURS.get(word) or JobStatus(word)
    special = f"{word}: " if word in _OURS and status.is_final else ""
    why = row.get("failure_reason") or row.get("details") or ""
    ours = {"job_id": str(row["job_id"]), "job_name": str(row.get("job_name") or ""), "status": status.value}
    ours |= {"reason": f"{special}{why}".strip(), "end_at": row.get("end_at") if status.is_final else None}
    given = {name: value for name, value in row.items() if value is not None}
    return read_as(ManagedJob, given | ours, "a job of SkyPilot")
