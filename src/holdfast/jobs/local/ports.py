"""Ports of distributed training: those that commands name, and those that Holdfast chooses."""

from __future__ import annotations

import errno
import os
import re
import socket
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path

from holdfast.errors import RetryLater

_FIRST = 20_000
_NUM_PORTS = 10_000
"""Range of chosen ports. It is below those that Linux gives to outgoing connections."""
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
_OPTION = re.compile(r"--(?:master|main[-_]process)[-_]port[ =]+[\"']?(\d{2,5})\b")
_ENDPOINT = re.compile(r"--rdzv[-_]endpoint[ =][^\n]*?:(\d{2,5})\b")
_ASSIGNED = re.compile(r"\bMASTER_PORT=[\"']?(\d{2,5})\b")
_MASTER_PORT = "MASTER_PORT"


def fixed_ports(commands: str, variables: Mapping[str, str]) -> tuple[int, ...]:
    """Return the rendezvous ports that commands or their variables name; pure."""
    text = _VARIABLE.sub(lambda found: variables.get(found[1] or found[2], found[0]), commands)
    named = [found[1] for pattern in (_OPTION, _ENDPOINT, _ASSIGNED) for found in pattern.finditer(text)]
    given = variables.get(_MASTER_PORT, "")
    named += [given] if given.isascii() and given.isdecimal() else []
    return tuple(sorted({int(port) for port in named}))


def needs_port(commands: str, num_nodes: int) -> bool:
    """Return True if a job is given a port: if it has several nodes or names the variable; pure."""
    return num_nodes > 1 or _MASTER_PORT in commands


def choose_port(folder: Path, taken: Collection[int]) -> int:
    """Return a port that no other job has, and that no program listens on.

    Args:
        folder: folder of the job. The search begins at its hash: jobs of other users, whose ports are not in
            `taken`, may not listen yet.
        taken: ports of other jobs in the same state folder.
    """
    start = zlib.crc32(os.fsencode(folder))
    for offset in range(_NUM_PORTS):
        port = _FIRST + (start + offset) % _NUM_PORTS
        if port not in taken and _is_free(port):
            return port
    raise RetryLater(f"All ports from {_FIRST} to {_FIRST + _NUM_PORTS - 1} are in use on this machine.")


def _is_free(port: int) -> bool:
    """Return True if a process could listen on a port of all addresses."""
    family, address = (socket.AF_INET6, "::") if socket.has_dualstack_ipv6() else (socket.AF_INET, "")
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        try:
            probe.bind((address, port))
            probe.listen(1)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
    return True
