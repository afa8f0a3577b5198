"""Capture of stacks: it waits for a handler that is interrupted while it writes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.system.linux.locks import try_flock
from holdfast.watch.hang import stacks as capturing
from holdfast.watch.hang.stacks import capture

SLOW_WRITER = """
import os, signal, sys, time
number = int(sys.argv[1])
file = os.memfd_create("stacks")

def write(_, frame):
    # As faulthandler's handler, which the kernel runs with the signal blocked.
    signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    os.write(file, b'Thread 0x22 (most recent call first):\\n  File "/x/helper.py", line 1 in helper\\n')
    time.sleep(0.6)  # on a busy machine the process does not run for a while
    os.write(file, b'Thread 0x11 (most recent call first):\\n  File "/x/train.py", line 1 in step\\n')
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])

signal.signal(number, write)
print(file, flush=True)
while True:
    time.sleep(0.01)
"""


@pytest.fixture
def slow_writer() -> Iterator[tuple[int, int]]:
    """Yield the process id of a process that pauses while it writes its stacks, and their descriptor."""
    command = [sys.executable, "-c", SLOW_WRITER, str(int(capturing.STACKS_SIGNAL))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def test_a_writer_that_pauses_is_waited_for(slow_writer: tuple[int, int]) -> None:
    own, _ = capture(*slow_writer)
    assert [one.ident for one in own.threads] == [0x22, 0x11]


def test_another_capture_that_is_stopped_is_not_waited_for_without_end(
    slow_writer: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keeper that reports a hang would have hung itself."""
    monkeypatch.setattr(capturing, "_OTHERS_S", 0.1, raising=False)
    pid, fd = slow_writer
    with Path(f"/proc/{pid}/fd/{fd}").open("rb") as file:
        assert try_flock(file.fileno())
        own, workers = capture(pid, fd)
    assert (own.pid, own.threads, workers) == (pid, (), ())
