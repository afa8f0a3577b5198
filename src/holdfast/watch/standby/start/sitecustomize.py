"""Start of Python in a job with standbys: hands the start of a script to its standby process, if it has one.

Python imports this file before a script, as its folder is on PYTHONPATH. It imports nothing but the standard
library, as the script may belong to an environment without Holdfast.
"""

from __future__ import annotations

import array
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

STANDBY = "HOLDFAST_STANDBY"
"""Variable with the name of the socket of this script's standby, and the position of the script."""
WATCH = "HOLDFAST_WATCH"
_REPLY_S = 30.0  # a standby that does not answer for so long is left out
_WITH_VALUE = ("-W", "-X")  # options of Python whose value is the next word
FORWARDED = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT", "SIGWINCH")
LIMITS = range(16)  # numbers of the limits of a process on Linux
_FACTS = ("Groups", "Uid", "Gid", "CapEff", "NoNewPrivs", "Seccomp")
"""Lines of /proc/self/status that a forked process has in common with its standby."""


def find_script(argv: list[str]) -> int | None:
    """Return the position of the script, or of `-m` before a module; None for other kinds of programs."""
    position = 1
    while position < len(argv):
        word = argv[position]
        if word == "-m":
            return position if position + 1 < len(argv) else None
        if not word.startswith("-"):
            return position if os.path.isfile(word) else None
        if not word.startswith(("-W", "-X", "--")) and ("c" in word or "m" in word or word == "-"):
            return None
        position += 2 if word in _WITH_VALUE else 1
    return None


def surroundings() -> dict[str, Any]:
    """Return what a process inherits, besides its environment, and a forked process cannot change."""
    import resource

    with open("/proc/self/status") as file:
        facts = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    with open("/proc/self/cgroup") as file:
        groups = file.read()
    folder = "/proc/self/ns"
    return {
        "rights": [facts.get(name) for name in _FACTS],
        "control groups": groups,
        "namespaces": [os.readlink(f"{folder}/{name}") for name in sorted(os.listdir(folder))],
        "hard limits": [resource.getrlimit(number)[1] for number in LIMITS],
        "priorities": os.getpriority(os.PRIO_PROCESS, 0),
    }


def socket_name(position: int) -> str:
    """Return the name of the socket on which the standby of this program, in this folder, would listen."""
    import hashlib

    node = os.environ.get("SKYPILOT_NODE_RANK", "")  # the nodes of a job may all be on this machine
    words = [str(os.getuid()), node, sys.executable, os.getcwd(), str(position), *sys.orig_argv[1:]]
    return "holdfast-standby-" + hashlib.sha256(os.fsencode("\0".join(words))).hexdigest()[:32]


def connect(name: str) -> socket.socket | None:
    """Return a connection to the standby of this user with a name; None without one."""
    end = socket.socket(socket.AF_UNIX)
    end.settimeout(1.0)  # a standby that is stopped holds up nothing for longer
    try:
        end.connect(f"\0{name}")
        if user_of(end) == os.getuid():  # any user may take the name
            return end
    except OSError:
        pass
    end.close()
    return None


def user_of(end: socket.socket) -> int:
    """Return the user id of the process at the other end of a connection."""
    return int.from_bytes(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[4:8], sys.byteorder)


def _hand_over(end: socket.socket, position: int) -> None:
    """Have the standby run this program, and exit as the program does. Return if the standby cannot."""
    import json
    import resource

    mask = os.umask(0)
    os.umask(mask)
    path = [folder for folder in sys.path if folder != os.path.dirname(os.path.abspath(__file__))]
    start = {
        "words": sys.orig_argv,
        "position": position,
        "path": path,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "surroundings": surroundings(),
        "ignored": [name for name in FORWARDED if signal.getsignal(getattr(signal, name)) == signal.SIG_IGN],
        "soft_limits": [resource.getrlimit(number)[0] for number in LIMITS],
        "processors": list(os.sched_getaffinity(0)),
        "umask": mask,
    }
    end.settimeout(_REPLY_S)
    send_document(end, json.dumps(start).encode(), [0, 1, 2])
    reply, fds, _, _ = socket.recv_fds(end, 1000, 1)
    if not fds:
        reason = reply.decode(errors="replace") or "it ended"
        _write(reason)
        return
    _act_for(end, fds[0])


def send_document(end: socket.socket, document: bytes, fds: Sequence[int] = ()) -> None:
    """Send a document to a standby, and open files with it."""
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    end.sendmsg([len(document).to_bytes(4, "big")], rights)
    end.sendall(document)


def _act_for(end: socket.socket, pidfd: int) -> NoReturn:
    """Forward the signals of this process to the program, and exit as the program does."""

    def forward(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):  # the exit status is on its way
            signal.pidfd_send_signal(pidfd, number)

    for number in (getattr(signal, name) for name in FORWARDED):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, forward)
    end.settimeout(None)
    reply = end.recv(100)
    exit_as(int(reply) if reply else -signal.SIGKILL)  # the standby was killed, and the program with it


def exit_as(status: int) -> NoReturn:
    """Exit with the status of another process, or by the signal that has killed it."""
    if status < 0:
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # any dump of memory is the program's
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _write(reason: str) -> None:
    sys.stderr.write(f"holdfast: this start does not use its standby: {reason}\n")


def _begin() -> None:
    """Use the standby of this program, or have its watch make one for the next start."""
    os.environ.pop(STANDBY, None)  # of a program that has started this one
    position = find_script(sys.orig_argv)
    if position is None:
        return
    name = socket_name(position)
    os.environ[STANDBY] = f"{name}:{position}"
    os.environ.setdefault(WATCH, "holdfast.watch.standby.watch:Standby")
    end = connect(name)
    if end is None:
        return
    try:
        _hand_over(end, position)
    except OSError as error:
        _write(str(error))
    end.close()


def _import_next() -> None:
    """Import the file of this name that Python would have imported without this one."""
    import importlib.machinery
    import importlib.util

    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if path != folder]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize")
    if spec is not None and spec.loader is not None:
        module = sys.modules["sitecustomize"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if __name__ == "sitecustomize":
    if sys.platform == "linux":
        _begin()
    _import_next()
