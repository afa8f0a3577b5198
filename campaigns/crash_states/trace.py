"""System calls on files of one process tree, recorded with strace and parsed from its log."""

from __future__ import annotations

import codecs
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

CALLS = (
    "open,openat,openat2,creat,mkdir,mkdirat,rmdir,unlink,unlinkat,rename,renameat,renameat2,link,linkat,symlink,"
    "symlinkat,write,pwrite64,writev,pwritev,pwritev2,truncate,ftruncate,fallocate,fsync,fdatasync,sync,syncfs,"
    "copy_file_range,sendfile,splice,mknod,mknodat"
)
"""Every call that can change a file or make it durable."""
_MAX_WRITE_BYTES = 16 << 20  # no longer write is ever made; a longer one is an error, not a wrong state
_CALL = re.compile(r"(\d+) +(\w+)\((.*)\)\s+= (.+)$", re.DOTALL)
_UNFINISHED = re.compile(r"(\d+) +(\w+)\((.*) <unfinished \.\.\.>$", re.DOTALL)
_RESUMED = re.compile(r"(\d+) +<\.\.\. (\w+) resumed>(.*)$", re.DOTALL)
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"(\.\.\.)?')


@dataclass(frozen=True, slots=True)
class Call:
    """A system call that succeeded, or whose process was killed in it."""

    began: int  # line of the log at which it was entered
    ended: int  # line at which it returned
    name: str
    arguments: str  # as strace prints them
    result: str  # likewise; "?" if the process was killed in it

    @property
    def strings(self) -> list[bytes]:
        """The quoted arguments: paths, or the data of a write.

        Raises:
            ValueError: strace has cut one short.
        """
        found = []
        for text, is_cut in _STRING.findall(self.arguments):
            if is_cut:
                raise ValueError(f"line {self.ended}: strace cut the data of {self.name} short")
            found.append(codecs.escape_decode(text.encode())[0])
        return [bytes(one) for one in found]


def record(
    command: Sequence[str],
    log: Path,
    *,
    env: Mapping[str, str],
    fsync_delay_us: int = 0,
    timeout_s: float = 600,
) -> None:
    """Run a command to its end, with every process that it starts, and write a log of its system calls.

    Args:
        command: program and arguments.
        log: file to write.
        env: environment of the command.
        fsync_delay_us: how long each fsync waits before it begins, which widens the windows around it.
        timeout_s: how long it may take.

    Raises:
        FileNotFoundError: strace is not installed.
        subprocess.CalledProcessError: the command failed.
    """
    if shutil.which("strace") is None:
        message = "strace is not installed; on Debian: apt-get install strace"
        raise FileNotFoundError(message)
    slow = ["-e", f"inject=fsync:delay_enter={fsync_delay_us}"] if fsync_delay_us else []
    strace = ["strace", "-f", "-y", "--seccomp-bpf", "-s", str(_MAX_WRITE_BYTES), "-o", str(log)]
    subprocess.run(
        [*strace, "-e", f"trace={CALLS}", *slow, *command],
        env=dict(env),
        check=True,
        timeout=timeout_s,
        stdin=subprocess.DEVNULL,
    )


def parse(lines: Iterable[str], about: Sequence[str]) -> Iterator[Call]:
    """Return the calls of a log whose text contains one of the strings `about`, in the order of their ends.

    Raises:
        ValueError: a line about them cannot be parsed.
    """
    entered: dict[str, tuple[int, str]] = {}  # process -> the line at which it entered a call, and its text
    for number, raw in enumerate(lines, start=1):
        line, began = raw.rstrip("\n"), number
        resumed = _RESUMED.match(line)
        if resumed:
            began, head = entered.pop(resumed[1], (number, ""))
            line = head + resumed[3]
        if not any(one in line for one in about) or line.endswith("+++"):
            continue
        if unfinished := _UNFINISHED.match(line):
            entered[unfinished[1]] = began, f"{unfinished[1]} {unfinished[2]}({unfinished[3]}"
            continue
        yield from _call(line, began, number)


def _call(line: str, began: int, ended: int) -> Iterator[Call]:
    """Return the call of a line, unless it failed."""
    found = _CALL.match(line.replace(" <unfinished ...>) ", ") "))  # killed in it: its result is "?"
    if found is None:
        raise ValueError(f"line {ended} of the log cannot be parsed: {line[:200]}")
    if not found[4].startswith("-1 "):
        yield Call(began, ended, found[2], found[3].strip(), found[4])
