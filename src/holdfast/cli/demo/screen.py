"""Screen of the demo: its progress as bars or lines, and its results as tables."""

from __future__ import annotations

import atexit
import signal
import threading
import time
from operator import attrgetter
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn

from holdfast.cli.demo.claims import DemoClaim, Recovery
from holdfast.cli.tables import Column, print_table
from holdfast.system.units import format_duration


class Screen:
    """Lines with the seconds since the start, above progress bars on a terminal. Threads may share it."""

    def __init__(self, file: TextIO, *, steps: int = 0, home: str = "") -> None:
        self._file, self._steps, self._home = file, steps, home
        self._shown: dict[str, int] = {}
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._tasks: dict[str, TaskID] = {}
        columns = TextColumn("{task.description:<9}"), BarColumn(), MofNCompleteColumn()
        loss = TextColumn("loss {task.fields[loss]:.2f}")
        self._bars = Progress(*columns, loss, console=Console(file=file)) if steps and file.isatty() else None
        if self._bars is not None:
            self._bars.start()
            atexit.register(self._bars.stop)  # also after an error: it has hidden the cursor

    def show_event(self, text: str) -> None:
        """Show an event with the seconds since the start."""
        self._print(f"{time.monotonic() - self._began:5.1f} s  {text}")

    def show_output(self, line: str) -> None:
        """Show a line that a training has written to stderr."""
        self._print(" " * 9 + line.replace(self._home, "HOME"))

    def show_step(self, name: str, step: int, loss: float) -> None:
        """Update a progress bar, or print a line after each quarter of all steps."""
        if self._bars is not None:
            with self._lock:
                if name not in self._tasks:
                    self._tasks[name] = self._bars.add_task(name, total=self._steps, loss=loss)
            self._bars.update(self._tasks[name], completed=step, loss=loss)
            return
        quarter = step * 4 // self._steps
        with self._lock:
            is_new = quarter > self._shown.get(name, 0)
            self._shown[name] = max(quarter, self._shown.get(name, 0))
        if is_new:
            self.show_event(f"{name}: step {step} of {self._steps}, loss {loss:.2f}")

    def show_results(self, claims: list[DemoClaim], recoveries: list[Recovery]) -> None:
        """Print the table of recoveries, and every claim with its evidence."""
        if self._bars is not None:
            self._bars.stop()
        print()
        print_table(RECOVERY_COLUMNS, recoveries)
        print()
        for claim in claims:
            print(f"{'proven' if claim.holds else 'FAILED'}  {claim.text}\n        {claim.evidence}")

    def _print(self, line: str) -> None:
        if self._bars is not None:
            self._bars.console.out(line, highlight=False)
            return
        print(f"{line}\n", end="", file=self._file, flush=True)  # in one call, as threads share it


RECOVERY_COLUMNS = (
    Column("FAILURE", lambda row: f"{row.what}, newest damaged" if row.passed_over else row.what, "text"),
    Column("EXIT", lambda row: signal.Signals(-row.status).name if row.status < 0 else row.status, "right"),
    Column("AT STEP", attrgetter("at_step"), "right"),
    Column("RESTORED", attrgetter("restored"), "right"),
    Column("STEPS LOST", attrgetter("steps_lost"), "right"),
    Column("RESTORE TOOK", lambda row: format_duration(row.restore_s), "right"),
    Column("TRAINING AFTER", lambda row: row.back_s and format_duration(row.back_s), "right", 1),
)
