"""Watch that starts a standby for the next start of the script, once the first save is durable."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, ClassVar

from typing_extensions import override

from holdfast.checkpoint.keeper.save import Save
from holdfast.checkpoint.watch import Watch
from holdfast.system.documents import to_plain
from holdfast.system.entry import command
from holdfast.system.process_exit import is_failure
from holdfast.watch.standby import prebuilt
from holdfast.watch.standby.documents import PrebuildRequest
from holdfast.watch.standby.start.sitecustomize import STANDBY, connect, send_document


class Standby(Watch):
    """Watch that starts the standby process. The environment names it, see `start/sitecustomize.py`."""

    name: ClassVar[str] = "standby"

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._is_done = False

    @override
    def saved(self, save: Save) -> None:
        name, _, position = os.environ.get(STANDBY, "").partition(":")
        if self._is_done or not name:
            return
        if (end := connect(name)) is not None:
            self._is_done = True
            with end, contextlib.suppress(OSError):  # the standby has ended, or is busy
                _have_built(end)
        elif self._process is None:  # else it is importing
            self._start(name, int(position))

    def _start(self, name: str, position: int) -> None:
        plan = {"path": _path(), "modules": list(sys.modules)}
        plan_fd = os.memfd_create("holdfast-standby")  # a pipe would be full, and hold up the training
        os.write(plan_fd, json.dumps(plan).encode())
        python, *words = command("holdfast.watch.standby", name, str(plan_fd))
        self._process = subprocess.Popen(
            [python, *sys.orig_argv[1:position], *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(plan_fd,),
            env=dict(_first_environment()),
            start_new_session=True,
        )
        os.close(plan_fd)
        assert self._process.stdin is not None
        atexit.register(_end, self._process.stdin)  # closed by the end of this process, however that comes


def _path() -> list[str]:
    return [folder for folder in sys.path if isinstance(folder, str)]  # others find nothing


def _have_built(end: socket.socket) -> None:
    """Have the standby at the other end make the call of `prebuild` for the next start of this rank."""
    if prebuilt.first_call is not None:
        variables = {os.fsdecode(name): os.fsdecode(value) for name, value in _first_environment()}
        request = PrebuildRequest(_path(), variables, prebuilt.first_call)
        send_document(end, json.dumps(to_plain(request)).encode())


def _first_environment() -> Iterator[tuple[bytes, bytes]]:
    """Yield the variables of this process at its start, without the tag of a node.

    By that tag the processes of an attempt are found and ended.
    """
    for line in Path("/proc/self/environ").read_bytes().split(b"\0"):
        name, equals, value = line.partition(b"=")
        if equals and name != b"HOLDFAST_NODE":
            yield name, value


def _end(pipe: IO[bytes]) -> None:
    """Have the standby exit if the training is complete."""
    with contextlib.suppress(OSError):  # it has ended
        if not is_failure():
            pipe.write(b".")
        pipe.close()
