"""A write-back directory under test, with its bucket and uploader, and waiting for conditions."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast.checkpoint.store import open_store
from holdfast.errors import NotFound
from holdfast.jobs.writeback import DirectoryStatus, Mount, mount, status_of
from holdfast.jobs.writeback.journal import FOLDER
from holdfast.jobs.writeback.status import has_uploader

LIMIT_S = 600.0


def wait_for(what: Callable[[], Any], name: str, describe: Callable[[], str] = str) -> Any:
    """Wait until `what()` returns something true, and return that. On a timeout, `describe()` is shown."""
    give_up_s = time.monotonic() + LIMIT_S
    while not (found := what()):
        assert time.monotonic() < give_up_s, f"timed out waiting for {name}. {describe()}"
        time.sleep(0.01)
    return found


class MountedDirectory:
    """A write-back directory and its place."""

    def __init__(self, directory: Path, place: str) -> None:
        self.directory = directory
        self.place = place
        self.store = open_store(place)
        self.held: list[Mount] = []

    def mount(self, **options: Any) -> Mount:
        """Mount, or mount again."""
        held = mount(self.directory, self.place, timeout_s=LIMIT_S, **options)
        self.held.append(held)
        return held

    def write(self, name: str, data: bytes | str) -> Path:
        """Write a file as a program does: open, write, close."""
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        return path

    def bucket(self) -> dict[str, bytes]:
        """Return all objects of the bucket, except those of the mounts themselves."""
        names = [entry.name for entry in self.store.list() if not entry.name.startswith(FOLDER)]
        found: dict[str, bytes] = {}
        for name in names:
            with suppress(NotFound):  # the uploader has deleted it since it was listed
                found[name] = self.store.get(name)
        return found

    def local(self) -> dict[str, bytes]:
        """Return all files of the directory."""
        found = {}
        for path in self.directory.rglob("*"):
            name = path.relative_to(self.directory).as_posix()
            if path.is_file() and not name.startswith(".holdfast-writeback"):
                found[name] = path.read_bytes()
        return found

    def drain(self) -> DirectoryStatus:
        """Wait until nothing is left to upload."""
        assert self.held
        return self.held[-1].drain(timeout_s=LIMIT_S)

    def drained(self) -> dict[str, bytes]:
        """Return the bucket's contents after a drain that must upload everything."""
        status = self.drain()
        assert status.is_drained, status
        return self.bucket()

    def status(self) -> DirectoryStatus:
        return status_of(self.directory)

    def pid(self) -> int:
        """Return the process id of the running uploader."""
        return wait_for(lambda: self.status().pid, "an uploader")

    def signal(self, number: int) -> None:
        os.kill(self.pid(), number)

    def kill(self) -> None:
        """Kill the uploader with SIGKILL and wait until it is gone."""
        self.signal(signal.SIGKILL)
        self.wait_until_gone()

    def wait_until_gone(self) -> None:
        wait_for(lambda: not has_uploader(self.directory), "the uploader's end")

    def describe(self) -> str:
        """Return status and log, for a test that failed."""
        return f"{self.status()}\n{self.log()}"

    def log(self) -> str:
        """Return the uploader's log."""
        return (self.directory / ".holdfast-writeback" / "log").read_text()

    def close(self) -> None:
        """Close all handles, and kill the uploader if it does not exit."""
        for held in self.held:
            held.close()
        give_up_s = time.monotonic() + 5.0
        while has_uploader(self.directory) and time.monotonic() < give_up_s:
            time.sleep(0.01)
        if has_uploader(self.directory):  # files are left to upload: a failed test
            with suppress(ProcessLookupError, TypeError):
                os.kill(self.status().pid, signal.SIGKILL)  # type: ignore[arg-type]
            self.wait_until_gone()
