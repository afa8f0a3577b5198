"""Lease of a node on its attempt's mounts: starts the mounter, waits for it, replaces a dead one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from holdfast.jobs.environment import TAG
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.node.spawn import spawn_once
from holdfast.jobs.node_spec import read_environment
from holdfast.system import backoff
from holdfast.system.documents import decode_object
from holdfast.system.linux import locks

HOLDERS, LOCK, READY = "holders", "lock", "there"
"""Files of the mounter: a FIFO whose writers keep it alive, its lock, and its result for waiting nodes."""
STOPPED = "stopped"
"""File in the folder of an attempt that is being killed."""
_POLL_S = 0.05
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_MAX_STARTS = 3
"""Limit of starts of a mounter that dies before the mounts are ready."""


class MountLease:
    """Lease that keeps an attempt's mounts in place as long as this process lives.

    Args:
        attempt: folder of the attempt.
        log: log of the mounter, if this node starts it.
        environment: returns the environment of the mounter, with the job's credentials. It raises
            `FileNotFoundError` if the job has ended.
    """

    def __init__(self, attempt: Path, log: Path, environment: Callable[[], Mapping[str, str]]) -> None:
        self._attempt = attempt
        self._environment = environment
        self._folder = attempt / "mounter"
        self._again_s, self._num_starts = 0.0, 0
        self._log = log
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileExistsError):
            os.mkfifo(self._folder / HOLDERS, 0o600)
        self._fd = os.open(self._folder / HOLDERS, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def wait_until_there(self, meanwhile: Callable[[], None]) -> str | None:
        """Wait until all mounts are ready.

        Args:
            meanwhile: called repeatedly.

        Returns:
            Why a mount failed, or None.

        Blocks: as long as that takes, while a mounter is running.
        """
        num_starts = 0
        while (result := self._result()) is None:
            if (self._attempt / STOPPED).exists():
                return "the attempt was ended before its mounts were ready"
            if self._start():
                num_starts += 1
            if num_starts > _MAX_STARTS:
                return f"the mounter died {_MAX_STARTS} times"
            meanwhile()
            time.sleep(_POLL_S)
        return result.get("error")

    def poll(self) -> None:
        """Replace a mounter that was killed."""
        if time.monotonic() >= self._again_s and self._start():
            self._num_starts += 1
            self._again_s = time.monotonic() + backoff.doubled(self._num_starts, _PAUSE_S, _LONGEST_PAUSE_S)

    def close(self) -> None:
        """Release the mounts."""
        os.close(self._fd)

    def _result(self) -> dict[str, str] | None:
        try:
            document = decode_object((self._folder / READY).read_bytes(), READY, any_text=True)
        except FileNotFoundError:
            return None
        return {name: document.text(name) for name in document.members}

    def _start(self) -> bool:
        """Start a mounter, unless one is running. Return True if it was started."""
        lock = self._folder / LOCK
        if locks.is_held(lock):
            return False
        try:
            environment = self._environment()
        except FileNotFoundError:
            return False  # the job has ended, and this node is being killed
        return spawn_once("mounter", self._folder, log=self._log, lock=lock, environment=environment)


def job_environment(job: JobFolder) -> dict[str, str]:
    """Return the environment for a job's mounts, which contains the job's credentials."""
    document = read_environment(job)
    return {name: value for name, value in {**document.base, **document.task}.items() if name != TAG}
