"""Screen of the demo: its progress as lines, and its results as tables."""

from __future__ import annotations

import signal
import threading
import time
from operator import attrgetter
from typing import TextIO

from holdfast.cli.demo.claims import DemoClaim, Recovery
from holdfast.cli.tables import Column, print_table
from holdfast.system.units import format_duration


class Screen:
    """Lines with the seconds since the start. Threads may share it."""

    def __init__(self, file: TextIO, *, steps: int = 0, home: str = "") -> None:
        self._file, self._steps, self._home = file, steps, home
        self._shown: dict[str, int] = {}
        self._began = time.monotonic()
        self._lock = threading.Lock()

    def show_event(self, text: str) -> None:
        """Show an event with the seconds since the start."""
        self._print(f"{time.monotonic() - self._began:5.1f} s  {text}")

    def show_output(self, line: str) -> None:
        """Show a line that a training has written to stderr."""
        self._print(" " * 9 + line.replace(self._home, "HOME"))

    def show_step(self, name: str, step: int, loss: float) -> None:
        """Show a step after each quarter of all steps."""
        quarter = step * 4 // self._steps
        with self._lock:
            is_new = quarter > self._shown.get(name, 0)
            self._shown[name] = max(quarter, self._shown.get(name, 0))
        if is_new:
            self.show_event(f"{name}: step {step} of {self._steps}, loss {loss:.2f}")

    def show_results(self, claims: list[DemoClaim], recoveries: list[Recovery]) -> None:
        """Print the table of recoveries, and every claim with its evidence."""
        print()
        print_table(RECOVERY_COLUMNS, recoveries)
        print()
        for claim in claims:
            print(f"{'proven' if claim.holds else 'FAILED'}  {claim.text}\n        {claim.evidence}")

    def _print(self, line: str) -> None:
        self._file.write(f"{line}\n")  # in one call, as threads share it
        self._file.flush()


def _exit_status(recovery: Recovery) -> str:
    return signal.Signals(-recovery.status).name if recovery.status < 0 else str(recovery.status)


RECOVERY_COLUMNS = (
    Column("FAILURE", lambda row: f"{row.what}, newest damaged" if row.passed_over else row.what, "text"),
    Column("EXIT", _exit_status, "right"),
    Column("AT STEP", attrgetter("at_step"), "right"),
    Column("RESTORED", attrgetter("restored"), "right"),
    Column("STEPS LOST", attrgetter("steps_lost"), "right"),
    Column("RESTORE TOOK", lambda row: format_duration(row.restore_s), "right"),
    Column("TRAINING AFTER", lambda row: row.back_s and format_duration(row.back_s), "right", 1),
)
