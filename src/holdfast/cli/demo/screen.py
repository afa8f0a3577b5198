"""Screen of the demo: its progress as bars or lines, and its results as tables."""

from __future__ import annotations

import signal
import threading
import time
from operator import attrgetter
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from holdfast.cli.demo.claims import DemoClaim, Recovery
from holdfast.cli.tables import Column, print_table, terminal_width
from holdfast.system.units import format_duration

_PIPED_WIDTH = 120


class Screen:
    """Output with progress bars on a terminal, and with occasional lines otherwise. Threads may share it."""

    def __init__(self, file: TextIO, *, steps: int, home: str) -> None:
        self.console = Console(file=file, width=terminal_width() or _PIPED_WIDTH, highlight=False)
        self._home = home
        self._steps = steps
        self._shown: dict[str, int] = {}
        self._tasks: dict[str, TaskID] = {}
        self._began = time.monotonic()
        self._lock = threading.Lock()
        columns = TextColumn("{task.description:<9}"), BarColumn(bar_width=40), MofNCompleteColumn()
        loss = TextColumn("{task.fields[loss]}")
        self._bars = Progress(*columns, loss, console=self.console) if file.isatty() else None

    def __enter__(self) -> Screen:
        if self._bars is not None:
            self._bars.start()
            for name in ("reference", "survivor"):
                self._tasks[name] = self._bars.add_task(name, total=self._steps, loss="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def show_event(self, text: str) -> None:
        """Show an event with the seconds since the start."""
        self._line(Text(f"{time.monotonic() - self._began:5.1f} s ", style="dim"), Text(text))

    def show_output(self, line: str) -> None:
        """Show a line that a training has written to stderr."""
        short = line.replace(self._home, "HOME")
        style = "yellow" if "skipped step" in short else "green" if short.startswith("holdfast: ") else "red"
        self._line(Text(" " * 8), Text(short, style=style))

    def show_step(self, name: str, step: int, loss: float) -> None:
        """Update a progress bar, or print a line after each quarter of the steps."""
        if self._bars is not None:
            self._bars.update(self._tasks[name], completed=step, loss=f"loss {loss:.2f}")
            return
        quarter = step * 4 // self._steps
        with self._lock:
            is_new = quarter > self._shown.get(name, 0)
            self._shown[name] = max(quarter, self._shown.get(name, 0))
        if is_new:
            self.show_event(f"{name}: step {step} of {self._steps}, loss {loss:.2f}")

    def _line(self, margin: Text, text: Text) -> None:
        """Print a text beside a margin. On a terminal it is wrapped within its column."""
        if not self.console.is_terminal:
            self.console.print(Text.assemble(margin, " ", text), soft_wrap=True)
            return
        row = Table.grid(padding=(0, 1, 0, 0))
        row.add_column(no_wrap=True, min_width=len(margin))
        row.add_column(overflow="fold")
        row.add_row(margin, text)
        self.console.print(row)

    def show_results(self, claims: list[DemoClaim], recoveries: list[Recovery]) -> None:
        """Print the table of recoveries, and every claim with its evidence."""
        self.console.print()
        print_table(RECOVERY_COLUMNS, recoveries)
        self.console.print()
        for claim in claims:
            mark = Text("proven ", style="green") if claim.holds else Text("FAILED ", style="bold red")
            self._line(mark, Text(claim.text))
            self._line(Text(" " * 7), Text(claim.evidence, style="dim"))


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
