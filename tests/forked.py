"""A command that runs a Python program in a process that the nursery forks.

Commands that start Python programs, such as `holdfast check`, get it in place of `python`. As a script it
sends its arguments, directory and environment to the test over a socket, waits, and ends as the program did.
The program finds torch imported already, which saves 2 to 5 seconds of processor time.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def forking(folder: Path) -> Iterator[list[str]]:
    """Serve programs from the shared nursery; yield the words that start one, without its arguments.

    Args:
        folder: for the socket; its path must be shorter than 90 characters.
    """
    address = str(folder / "fork")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        threading.Thread(target=_accept, args=(server,), daemon=True).start()
        try:
            yield [sys.executable, "-I", "-S", __file__, address]
        finally:
            server.shutdown(socket.SHUT_RDWR)


def _accept(server: socket.socket) -> None:
    while True:
        try:
            asked, _ = server.accept()
        except OSError:  # the test has ended
            return
        threading.Thread(target=_run, args=(asked,), daemon=True).start()


def _run(asked: socket.socket) -> None:
    from nursery import shared

    with asked, asked.makefile("rw") as lines:
        words = json.loads(lines.readline())
        output = Path(words["output"])
        child = shared().start(words["arguments"], output, cwd=Path(words["cwd"]), env=words["env"])
        lines.write(f"{child.wait()}\n")


def _ask(address: str, arguments: list[str]) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        words = {
            "arguments": arguments,
            "output": str(Path("/proc/self/fd/1").readlink()),
            "cwd": str(Path.cwd()),
            "env": dict(os.environ),
        }
        with server.makefile("rw") as lines:
            lines.write(json.dumps(words) + "\n")
            lines.flush()
            status = int(lines.readline())
    if status < 0:
        os.kill(os.getpid(), -status)
        signal.pause()
    sys.exit(status)


if __name__ == "__main__":
    _ask(sys.argv[1], sys.argv[2:])
