"""Lease of an attempt on its mounts, which the mounter keeps in place."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from typing_extensions import override

from holdfast.jobs.environment import TAG
from holdfast.jobs.folder import JobFolder
from holdfast.jobs.node.lease import Lease
from holdfast.jobs.node.spawn import spawn_once
from holdfast.jobs.node_spec import read_environment
from holdfast.system.documents import decode_object
from holdfast.system.linux import locks

HOLDERS, LOCK, READY = "holders", "lock", "ready"
"""Files of the mounter: a FIFO whose writers keep it alive, its lock, and its result for waiting nodes."""


class MountLease(Lease):
    """Lease that keeps an attempt's mounts in place as long as this process lives.

    Args:
        attempt: folder of the attempt.
        log: log of the mounter, if this node starts it.
        environment: returns the environment of the mounter, with the job's credentials. It raises
            `FileNotFoundError` if the job has ended.
    """

    def __init__(self, attempt: Path, log: Path, environment: Callable[[], Mapping[str, str]]) -> None:
        super().__init__(attempt, "mounter", "its mounts were ready")
        self._environment = environment
        self._folder = attempt / "mounter"
        self._log = log
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileExistsError):
            os.mkfifo(self._folder / HOLDERS, 0o600)
        self._fd = os.open(self._folder / HOLDERS, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def close(self) -> None:
        """Release the mounts."""
        os.close(self._fd)

    @override
    def _result(self) -> str | None:
        try:
            document = decode_object((self._folder / READY).read_bytes(), READY, any_text=True)
        except FileNotFoundError:
            return None
        return document.text("error") if "error" in document.members else ""

    @override
    def _start(self) -> bool:
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
