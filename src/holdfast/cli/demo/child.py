"""Child process with one start of the training: its progress, its output and its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable

from holdfast.errors import RetryLater
from holdfast.system.entry import command
from holdfast.system.units import format_duration

_POLL_S = 0.001  # a save is in flight for less than a tenth of a second
_LIMIT_S = 300.0


class Child:
    """A running training.

    Args:
        options: its command line.
        on_step: called with step and loss after each step, in another thread.
        on_line: called with each line that it writes to stderr, in another thread.
    """

    def __init__(
        self,
        name: str,
        options: list[str],
        *,
        on_step: Callable[[int, float], None],
        on_line: Callable[[str], None],
    ) -> None:
        self.name = name
        self.step = 0  # newest completed step
        self.sha256: str | None = None  # of weights and optimizer, after it has finished
        self.optimizer_s: dict[int, float] = {}  # duration of optimizer.step(), by step
        self.first_step_s: float | None = None  # from its start to the end of its first step
        self.output: list[str] = []  # lines on stderr
        self._began = time.monotonic()
        reading, writing = os.pipe()
        self._process = subprocess.Popen(
            command(f"{__package__}.training", *options, "--progress", str(writing)),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            pass_fds=(writing,),
            start_new_session=True,  # Ctrl-C interrupts only the demo, which ends its children
        )
        os.close(writing)
        self._receivers = (
            threading.Thread(target=self._receive_steps, args=(reading, on_step), daemon=True),
            threading.Thread(target=self._receive_lines, args=(on_line,), daemon=True),
        )
        for thread in self._receivers:
            thread.start()

    def _receive_steps(self, reading: int, on_step: Callable[[int, float], None]) -> None:
        with os.fdopen(reading) as lines:
            for line in lines:
                try:
                    facts = json.loads(line)
                except ValueError:
                    return  # cut off by the kill
                if "sha256" in facts:
                    self.sha256 = facts["sha256"]
                    continue
                if self.first_step_s is None:
                    self.first_step_s = time.monotonic() - self._began
                self.step = facts["step"]
                self.optimizer_s[self.step] = facts["optimizer_s"]
                on_step(self.step, facts["loss"])

    def _receive_lines(self, on_line: Callable[[str], None]) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                self.output.append(line.rstrip())
                on_line(line.rstrip())

    def wait_for(self, condition: Callable[[], object], name: str) -> None:
        """Wait until `condition()` is true.

        Raises:
            RetryLater: the training ended before, or it takes too long.
        """
        deadline = time.monotonic() + _LIMIT_S
        while not condition():
            status = self._process.poll()
            if status is not None or time.monotonic() > deadline:
                how = (
                    f"is still running after {format_duration(_LIMIT_S)}"
                    if status is None
                    else f"ended with status {status}"
                )
                tail = "\n".join(self.output[-20:])
                raise RetryLater(
                    f"The {self.name} of the demo {how}, before {name}. The end of its output:\n{tail}"
                )
            time.sleep(_POLL_S)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it is still running."""
        self._process.send_signal(number)

    def wait(self) -> int:
        """Wait until the process has ended and all its output is received.

        Returns:
            Exit status; -N if signal N ended it.

        Raises:
            RetryLater: it takes too long.
        """
        try:
            status = self._process.wait(_LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise RetryLater(
                f"The {self.name} of the demo has not ended after {format_duration(_LIMIT_S)}."
            ) from error
        for thread in self._receivers:
            thread.join(_LIMIT_S)
        return status

    def end(self) -> None:
        """Kill the process, if it is still running."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
