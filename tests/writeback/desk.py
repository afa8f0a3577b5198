"""A write-back directory under test: its bucket, its uploader, and waiting for what must come."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast.store import open_store
from holdfast.writeback import Mount, Status, mount, status_of
from holdfast.writeback.claim import FOLDER
from holdfast.writeback.status import is_locked

LIMIT_S = 60.0


def wait_for(what: Callable[[], Any], name: str, told: Callable[[], str] = str) -> Any:
    """Wait until `what()` is true; returns what it said. `told()` is shown if it never is."""
    give_up_s = time.monotonic() + LIMIT_S
    while not (found := what()):
        assert time.monotonic() < give_up_s, f"waited in vain for {name}. {told()}"
        time.sleep(0.01)
    return found


class Desk:
    """One directory and the place its files go to."""

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
        """Write a file as a program does: opened, written, closed."""
        path = self.directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())
        return path

    def bucket(self) -> dict[str, bytes]:
        """All that the bucket holds, but for what the mounts themselves put there."""
        names = [entry.name for entry in self.store.list() if not entry.name.startswith(FOLDER)]
        return {name: self.store.get(name) for name in names}

    def local(self) -> dict[str, bytes]:
        """All that the directory holds."""
        found = {}
        for path in self.directory.rglob("*"):
            name = path.relative_to(self.directory).as_posix()
            if path.is_file() and not name.startswith(".holdfast-writeback"):
                found[name] = path.read_bytes()
        return found

    def drain(self) -> Status:
        """Wait until nothing is left to be sent."""
        assert self.held
        return self.held[-1].drain(timeout_s=LIMIT_S)

    def drained(self) -> dict[str, bytes]:
        """The bucket after a drain that must find everything sent."""
        status = self.drain()
        assert status.is_drained, status
        return self.bucket()

    def status(self) -> Status:
        return status_of(self.directory)

    def pid(self) -> int:
        """The living uploader."""
        return wait_for(lambda: self.status().pid, "an uploader")

    def signal(self, number: int) -> None:
        os.kill(self.pid(), number)

    def kill(self) -> None:
        """SIGKILL the uploader; returns when it is gone."""
        self.signal(signal.SIGKILL)
        self.wait_until_gone()

    def wait_until_gone(self) -> None:
        wait_for(lambda: not is_locked(self.directory), "the uploader's end")

    def told(self) -> str:
        """All there is to know, for a test that failed."""
        return f"{self.status()}\n{self.log()}"

    def log(self) -> str:
        """What the uploader has said."""
        return (self.directory / ".holdfast-writeback" / "log").read_text()

    def close(self) -> None:
        """Let go of everything, and see that no process is left."""
        for held in self.held:
            held.close()
        give_up_s = time.monotonic() + 5.0
        while is_locked(self.directory) and time.monotonic() < give_up_s:
            time.sleep(0.01)
        if is_locked(self.directory):  # it still has something to send: a failed test
            with suppress(ProcessLookupError, TypeError):
                os.kill(self.status().pid, signal.SIGKILL)  # type: ignore[arg-type]
            self.wait_until_gone()
