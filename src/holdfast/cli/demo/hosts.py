"""Hosts made of namespaces: each has an address, a name, processes and a folder of its own, and can die.

The process that makes them runs inside `isolated`: as root of a network of its own, whoever its user is.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from holdfast.errors import Unsupported

_PROGRAMS = {"unshare": "util-linux", "nsenter": "util-linux", "ip": "iproute2"}  # and their packages
_NETWORK = "10.83.0"
_BRIDGE = "hosts"
_START_S = 10.0


def isolated(command: Sequence[str]) -> list[str]:
    """Return a command that runs another one as root of new namespaces, or raise `Unsupported`."""
    missing = [package for program, package in _PROGRAMS.items() if shutil.which(program) is None]
    if missing:
        raise Unsupported(f"Hosts are made with programs of {missing[0]}, which is not installed here.")
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    # The first process of a PID namespace: with it the kernel ends all hosts.
    start = ["unshare", *user, "--net", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
    done = subprocess.run([*start, "ip", "link", "set", "lo", "up"], capture_output=True, text=True)
    if done.returncode != 0:
        raise Unsupported(
            f"This machine does not allow network namespaces for this user: {done.stderr.strip()}. Run as "
            "root, or allow unprivileged user namespaces."
        )
    # The shell reaps processes whose parent was killed: else a namespace would wait for them for ever.
    return [*start, "sh", "-c", '"$@"; exit $?', "sh", *command]


class Host:
    """Host with an address, a name, processes and a folder.

    Args:
        number: from 1, unique.
        folder: of all files that die with it.
    """

    def __init__(self, number: int, folder: Path) -> None:
        self.name, self.address, self.folder = f"host{number}", f"{_NETWORK}.{number}", folder
        folder.mkdir(parents=True)
        # The first process of the namespaces: with it all others die.
        command = f"hostname {self.name}; ip link set lo up; exec sleep 100000"
        namespaces = ("--net", "--uts", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc")
        self._outer = subprocess.Popen(
            ["unshare", *namespaces, "sh", "-c", command], stderr=subprocess.PIPE, text=True
        )
        self._first = _first_process(self._outer)
        link, inner = f"link{number}", ("type", "veth", "peer", "name", "eth0", "netns", str(self._first))
        _run("ip", "link", "add", link, *inner)
        _run("ip", "link", "set", link, "master", _BRIDGE, "up")
        self.run("ip", "addr", "add", f"{self.address}/24", "dev", "eth0")
        self.run("ip", "link", "set", "eth0", "up")

    def start(self, command: Sequence[str], env: Mapping[str, str], output: Path) -> subprocess.Popen[bytes]:
        """Start a process here, in a process group of its own, which writes into a file."""
        with output.open("ab") as file:
            return subprocess.Popen(
                self._entered(command),
                env={**os.environ, "HOLDFAST_RUNTIME_DIR": str(self.folder / "runtime"), **env},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )

    def run(self, *command: str) -> None:
        """Run a command here, such as `tc`, and wait for its end."""
        _run(*self._entered(command))

    def kill(self) -> None:
        """Kill all processes at once, and delete the folder."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._first, signal.SIGKILL)
        self._outer.communicate()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _entered(self, command: Sequence[str]) -> list[str]:
        return ["nsenter", "-t", str(self._first), "-n", "-u", "-p", "-m", *command]


def make_network() -> None:
    """Make the network that hosts are connected to. This process has the last address of it."""
    _run("ip", "link", "set", "lo", "up")
    _run("ip", "link", "add", _BRIDGE, "type", "bridge")
    _run("ip", "addr", "add", f"{_NETWORK}.254/24", "dev", _BRIDGE)
    _run("ip", "link", "set", _BRIDGE, "up")


def _first_process(outer: subprocess.Popen[str]) -> int:
    """Return the first process of a host, once it has executed its last program."""
    deadline_s = time.monotonic() + _START_S
    while outer.poll() is None and time.monotonic() < deadline_s:
        with contextlib.suppress(OSError, ValueError):
            child = int(Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text())
            if Path(f"/proc/{child}/comm").read_text().strip() == "sleep":
                return child
        time.sleep(0.01)
    outer.kill()
    raise Unsupported(f"The namespaces of a host could not be made: {outer.communicate()[1].strip()}")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise Unsupported(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
