"""One start of the demo's training as its parent sees it: a process, its progress and words, its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable

from holdfast.entry import command
from holdfast.errors import RetryLater
from holdfast.units import format_duration

_POLL_S = 0.001  # a save is in flight for less than a tenth of a second
_LIMIT_S = 300.0


class Child:
    """A running training.

    Args:
        who: name for messages.
        options: its command line.
        on_step: told (step, loss) after each step, in another thread.
        on_line: told each line that it writes to stderr, in another thread.
    """

    def __init__(
        self,
        who: str,
        options: list[str],
        *,
        on_step: Callable[[int, float], None],
        on_line: Callable[[str], None],
    ) -> None:
        self.who = who
        self.step = 0  # the last one it has completed
        self.sha256: str | None = None  # of weights and optimizer, told when it has finished
        self.optimizer_s: dict[int, float] = {}  # by step, what the optimizer's step() took
        self.first_step_s: float | None = None  # from start to the end of its first step
        self.said: list[str] = []
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
            start_new_session=True,  # a Ctrl-C is for the demo, which ends its children itself
        )
        os.close(writing)
        listen = (
            threading.Thread(target=self._hear_steps, args=(reading, on_step), daemon=True),
            threading.Thread(target=self._hear_lines, args=(on_line,), daemon=True),
        )
        for thread in listen:
            thread.start()
        self._listening = listen

    def _hear_steps(self, reading: int, on_step: Callable[[int, float], None]) -> None:
        with os.fdopen(reading) as lines:
            for line in lines:
                try:
                    facts = json.loads(line)
                except ValueError:
                    return  # the kill has cut it off
                if "sha256" in facts:
                    self.sha256 = facts["sha256"]
                    continue
                if self.first_step_s is None:
                    self.first_step_s = time.monotonic() - self._began
                self.step = facts["step"]
                self.optimizer_s[self.step] = facts["optimizer_s"]
                on_step(self.step, facts["loss"])

    def _hear_lines(self, on_line: Callable[[str], None]) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                self.said.append(line.rstrip())
                on_line(line.rstrip())

    def wait_for(self, what: Callable[[], object], name: str) -> None:
        """Wait until `what()` is true.

        Raises:
            RetryLater: it ended before, or it takes too long.
        """
        deadline = time.monotonic() + _LIMIT_S
        while not what():
            status = self._process.poll()
            if status is not None or time.monotonic() > deadline:
                how = (
                    f"is still running after {format_duration(_LIMIT_S)}"
                    if status is None
                    else f"ended with {status}"
                )
                told = "\n".join(self.said[-20:]) or "nothing"
                raise RetryLater(
                    f"The demo's {self.who} {how}, while it was waited for {name}. It said:\n{told}"
                )
            time.sleep(_POLL_S)

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, if it is still there."""
        self._process.send_signal(number)

    def wait(self) -> int:
        """Exit status, negative if a signal ended it; then all that it told has been heard.

        Raises:
            RetryLater: it takes too long.
        """
        try:
            status = self._process.wait(_LIMIT_S)
        except subprocess.TimeoutExpired as error:
            raise RetryLater(
                f"The demo's {self.who} has not ended after {format_duration(_LIMIT_S)}."
            ) from error
        for thread in self._listening:
            thread.join(_LIMIT_S)
        return status

    def end(self) -> None:
        """Kill it, if it is still there."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
