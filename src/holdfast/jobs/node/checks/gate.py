"""Gate before an attempt: checks of a node in child processes, whose results are collected in time."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.jobs.node.checks.disk import FEW_BYTES, NUM_BYTES, check_disk
from holdfast.jobs.node.checks.memory import check_free_memory, check_memory
from holdfast.jobs.node.checks.product import check_products
from holdfast.jobs.node.checks.result import MAX_RESULT_BYTES, Check, NodeChecks, read_results, write_result
from holdfast.system.host_memory import available_bytes

LIMIT_S = 10.0
"""Time limit of all checks. What has no result by then is reported, and does not stop the attempt."""
GPU_LIMIT_S = 60.0
"""The same for GPUs, whose check has to import torch first."""
_MAX_HOMES = 4
_MAX_FDS = 1024


@dataclass(frozen=True, slots=True)
class CheckedPlaces:
    """Places that a job uses on a node.

    Attributes:
        folder: the job's folder, or its working directory.
        temporary: its TMPDIR.
        homes: folders to which its training saves, from what it has reported.
        num_nodes: nodes of the job, which stage equal parts of a save.
    """

    folder: Path
    temporary: Path
    homes: tuple[str, ...] = ()
    num_nodes: int = 1


class NodeGate:
    """Checks of a node that are running.

    Args:
        machine: name of this machine.
        plan: the checks, by name. Each runs in a process of its own, because a disk may hang.
        gpus: command that checks the GPUs and prints results as lines, with its environment; or None.
    """

    def __init__(
        self,
        machine: str,
        plan: Mapping[str, Callable[[], Iterator[Check]]],
        gpus: tuple[list[str], Mapping[str, str]] | None = None,
    ) -> None:
        self._machine = machine
        self._unix_s, self._started_s = time.time(), time.monotonic()
        self._children = [_Child(name, _fork(check)) for name, check in plan.items()]
        self._limit_s = LIMIT_S
        if gpus is not None:
            self._limit_s = GPU_LIMIT_S
            self._children.append(_Child("gpu", _spawn(*gpus)))

    def wait(self, meanwhile: Callable[[], None]) -> NodeChecks:
        """Return the results.

        Args:
            meanwhile: called about once a second.

        Blocks: until all checks have ended, or their time is over.
        """
        began_s = time.monotonic()
        deadline_s = self._started_s + self._limit_s
        while (left := [one for one in self._children if not one.has_ended]) and (
            remaining_s := deadline_s - time.monotonic()
        ) > 0:
            poll = select.poll()
            for one in left:
                poll.register(one.fd, select.POLLIN)
            poll.poll(min(1.0, remaining_s) * 1000)
            for one in left:
                one.read()
            meanwhile()
        now_s = time.monotonic()
        results = tuple(check for one in self._children for check in one.end(self._limit_s))
        return NodeChecks(self._machine, self._unix_s, now_s - self._started_s, now_s - began_s, results)


def make_plan(places: CheckedPlaces) -> dict[str, Callable[[], Iterator[Check]]]:
    """Return the checks of a node, by name."""
    plan: dict[str, Callable[[], Iterator[Check]]] = {}
    plan[f"disk {places.folder}"] = lambda: check_disk(places.folder)
    plan[f"disk {places.temporary}"] = lambda: check_disk(
        places.temporary,
        num_bytes=_num_bytes(places.temporary, places.folder),
        stops=False,  # most programs find another folder for temporary files
    )
    for home in places.homes[:_MAX_HOMES]:
        plan[f"disk {home}"] = lambda home=home: _check_home(home, places)
    plan["product memory"] = _check_machine
    return plan


def _check_home(home: str, places: CheckedPlaces) -> Iterator[Check]:
    from holdfast.checkpoint.home.space import measure_space

    yield from check_disk(Path(home), num_bytes=_num_bytes(Path(home), places.folder))
    found = measure_space(home)
    if found is not None:
        values = {"needed_bytes": found.needed_bytes, "free_bytes": found.free_bytes}
        yield Check("space", home, found.trouble, stops=bool(found.trouble), values=values)
        if found.needed_bytes:
            needed = found.needed_bytes // max(1, places.num_nodes)
            yield from (one for one in check_free_memory(available_bytes(), needed) if one.trouble)


def _check_machine() -> Iterator[Check]:
    yield from check_products()
    yield from check_memory(0)


def _num_bytes(folder: Path, other: Path) -> int:
    """Return the bytes to write to a folder: few if its disk is checked already."""
    try:
        return FEW_BYTES if folder.stat().st_dev == other.stat().st_dev else NUM_BYTES
    except OSError:
        return FEW_BYTES


class _Child:
    """Process of one check, which writes results to a pipe."""

    def __init__(self, name: str, started: tuple[int, int]) -> None:
        self._name = name
        self._pid, self.fd = started
        self._data = b""
        self.has_ended = False

    def read(self) -> None:
        """Read what it has written, without blocking."""
        if not select.select([self.fd], [], [], 0)[0]:
            return
        data = os.read(self.fd, 1 << 16)
        self._data = (self._data + data)[-MAX_RESULT_BYTES:]
        self.has_ended = not data

    def end(self, limit_s: float) -> Iterator[Check]:
        """End it, and yield its results. A check without an end has failed."""
        os.close(self.fd)
        name, _, where = self._name.partition(" ")
        if not self.has_ended:
            os.kill(self._pid, signal.SIGKILL)  # one in an uninterruptible wait stays until the disk answers
        status = os.waitpid(self._pid, 0 if self.has_ended else os.WNOHANG)[1]
        yield from read_results(self._data)
        if not self.has_ended:
            yield Check(name, where, f"no result within {limit_s:.0f} s")
        elif status:
            yield Check(name, where, f"the check ended with status {os.waitstatus_to_exitcode(status)}")


def _fork(check: Callable[[], Iterator[Check]]) -> tuple[int, int]:
    """Run a check in a copy of this process. Return its pid and the pipe with its results."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        _run(check, writer)
    os.close(writer)
    return pid, reader


def _run(check: Callable[[], Iterator[Check]], writer: int) -> None:
    """Run a check in this new process. Never returns."""
    status = 1
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)  # else the process counts as a trainer with a handler
        os.closerange(3, writer)  # locks and leases of this process must not outlive it
        os.closerange(writer + 1, _MAX_FDS)
        for one in check():
            os.write(writer, write_result(one))
        status = 0
    except Exception as error:  # noqa: BLE001 - reported as the result of the check
        os.write(writer, write_result(Check("check", "", f"{type(error).__name__}: {error}"[:300])))
    finally:
        os._exit(status)


def _spawn(command: list[str], environment: Mapping[str, str]) -> tuple[int, int]:
    reader, writer = os.pipe2(os.O_CLOEXEC)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        pid = os.posix_spawnp(
            command[0],
            command,
            dict(environment),
            file_actions=[
                (os.POSIX_SPAWN_DUP2, null, 0),
                (os.POSIX_SPAWN_DUP2, writer, 1),
                (os.POSIX_SPAWN_DUP2, null, 2),
            ],
            setsigmask=[],
            setsigdef=[signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2],
        )
    finally:
        os.close(writer)
        os.close(null)
    return pid, reader
