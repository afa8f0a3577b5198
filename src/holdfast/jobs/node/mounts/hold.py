"""A node's hold on the porter of its attempt: starts it, waits for what it brings, replaces a dead one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from holdfast.documents import decode_object
from holdfast.jobs.environment import MARK
from holdfast.jobs.node import locks
from holdfast.jobs.node.folder import JobFolder
from holdfast.jobs.node.mounts.porter import HOLDERS, LOCK, THERE
from holdfast.jobs.node.plan import read_environment
from holdfast.jobs.node.spawning import spawn

STOPPED = "stopped"
"""In the folder of an attempt that is to end."""
_POLL_S = 0.05
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_MAX_STARTS = 3
"""So often is a porter started that dies without a word before all is there."""


class Hold:
    """Keeps what an attempt needs where it is, as long as this process lives.

    Args:
        attempt: folder of the attempt.
        log: where the porter, if this node starts it, says what it does.
    """

    def __init__(self, attempt: Path, log: Path) -> None:
        self._job = JobFolder(attempt.parents[1])
        self._attempt = attempt
        self._folder = attempt / "porter"
        self._again_s, self._pause_s = 0.0, _PAUSE_S
        self._log = log
        self._folder.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileExistsError):
            os.mkfifo(self._folder / HOLDERS, 0o600)
        self._fd = os.open(self._folder / HOLDERS, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def wait_until_there(self, meanwhile: Callable[[], None]) -> str | None:
        """Wait for all that the job needs.

        Args:
            meanwhile: called again and again.

        Returns:
            Why it cannot be had; None if it is there.

        Blocks: as long as that takes, while a porter lives.
        """
        num_starts = 0
        while (told := self._told()) is None:
            if (self._attempt / STOPPED).exists():
                return "the attempt was ended before its mounts were there"
            if self._start():
                num_starts += 1
            if num_starts > _MAX_STARTS:
                return f"what brings the mounts died {_MAX_STARTS} times"
            meanwhile()
            time.sleep(_POLL_S)
        return told.get("error")

    def look(self) -> None:
        """Have another porter if this one was killed."""
        if time.monotonic() >= self._again_s and self._start():
            self._again_s = time.monotonic() + self._pause_s
            self._pause_s = min(_LONGEST_PAUSE_S, 2 * self._pause_s)

    def close(self) -> None:
        """Let go."""
        os.close(self._fd)

    def _told(self) -> dict[str, str] | None:
        try:
            told = decode_object((self._folder / THERE).read_bytes(), THERE, any_text=True)
        except FileNotFoundError:
            return None
        return {name: told.text(name) for name in told.members}

    def _start(self) -> bool:
        """Start a porter, unless there is one; True if there was none."""
        lock = locks.take(self._folder / LOCK)
        if lock is None:
            return False
        try:
            environment = job_environment(self._job)
            spawn("porter", self._folder, log=self._log, lock=lock, environment=environment)
        finally:
            os.close(lock)
        return True


def job_environment(job: JobFolder) -> dict[str, str]:
    """The environment in which a job's mounts are made: the keys that the job was given open its buckets."""
    told = read_environment(job)
    return {name: value for name, value in {**told.base, **told.task}.items() if name != MARK}
