"""The user's own `sky`, in an environment of its own: a program that is called, never a library."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from holdfast.errors import RetryLater, Unsupported
from holdfast.jobs.sky.states import Managed, read_queue

PROGRAM = "HOLDFAST_SKY"
"""Variable that names the program; else `sky` on the PATH."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_JOB_ID = re.compile(r"Managed Job ID: *(\d+)", re.I)
_SHORT_S = 300.0
_LAUNCH_S = 3600.0
"""Workdir and file mounts are uploaded meanwhile."""


def program() -> str:
    """The path of `sky`.

    Raises:
        Unsupported: there is none.
    """
    named = os.environ.get(PROGRAM) or "sky"
    found = shutil.which(str(Path(named).expanduser()))
    if found is None:
        raise Unsupported(
            f"There is no {named} here. `--on sky` calls your own SkyPilot: install it in an environment of "
            f"its own, and put `sky` on the PATH or name it with {PROGRAM}. Nothing was started."
        )
    return found


def version() -> str:
    """What `sky --version` says.

    Raises:
        Unsupported: there is no `sky`.
        RetryLater: it does not work.
    """
    return _run(["--version"]).strip()


def launch_words(name: str, path: str, secrets: Mapping[str, str]) -> list[str]:
    """What `sky` is called with to launch a job; values of secrets are in its environment, not here."""
    chosen = [word for secret in secrets for word in ("--secret", secret)]
    return ["jobs", "launch", "-y", "-d", "-n", name, *chosen, path]


def launch(name: str, path: Path, secrets: Mapping[str, str]) -> str | None:
    """Launch a job; its number, or None if SkyPilot has not told it.

    Raises:
        RetryLater: it was not taken.

    Blocks: until SkyPilot has uploaded files and started its controller: minutes, the first time.
    """
    said = _run(launch_words(name, str(path), secrets), secrets, timeout_s=_LAUNCH_S)
    found = _JOB_ID.search(said)
    return None if found is None else found[1]


def queue() -> list[Managed]:
    """All managed jobs of this user.

    Raises:
        RetryLater: SkyPilot did not answer.
    """
    return read_queue(_run(["jobs", "queue", "--all", "--output", "json"]))


def cancel(number: str) -> None:
    """Cancel a job; files in write-back caches are uploaded first, as far as there is time.

    Raises:
        RetryLater: SkyPilot did not do it.
    """
    _run(["jobs", "cancel", "-y", "--graceful", number])


def logs(number: str, *, follow: bool) -> Iterator[str]:
    """The output of a job, in lines.

    Raises:
        Unsupported: there is no `sky`.
    """
    words = [program(), "jobs", "logs", "--follow" if follow else "--no-follow", number]
    with subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=_environment()
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                yield _COLOURS.sub("", line.decode("utf-8", "replace")).rstrip("\r\n")
        finally:
            process.terminate()


def _run(
    words: list[str], environment: Mapping[str, str] | None = None, *, timeout_s: float = _SHORT_S
) -> str:
    command = [program(), *words]
    told = f"sky {' '.join(words)}"
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
            env=_environment(environment),
        )
    except subprocess.TimeoutExpired as error:
        raise RetryLater(f"`{told}` did not end within {timeout_s:.0f} s.") from error
    if done.returncode:
        said = _COLOURS.sub("", done.stderr.strip() or done.stdout.strip())[-1500:]
        raise RetryLater(f"`{told}` ended with {done.returncode}:\n{said}")
    return _COLOURS.sub("", done.stdout)


def _environment(further: Mapping[str, str] | None = None) -> dict[str, str]:
    """Ours, without what would lead its Python to our packages."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return {**kept, **(further or {})}
