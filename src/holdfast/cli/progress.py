"""Progress bar on stderr for work measured in bytes, shown only on a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple


class Bar(NamedTuple):
    """Callbacks of the work. Both are None without a terminal."""

    on_total: Callable[[int], None] | None
    on_bytes: Callable[[int], None] | None


@contextlib.contextmanager
def byte_bar(label: str) -> Iterator[Bar]:
    """Show a progress bar during the block, if stderr is a terminal."""
    if not sys.stderr.isatty():
        yield Bar(None, None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    # On a terminal, output is printed above the bar. If stdout is a pipe, it is not redirected.
    options = {"transient": True, "redirect_stdout": sys.stdout.isatty()}
    with Progress(*columns, console=Console(stderr=True), **options) as progress:
        task = progress.add_task(label, total=None)
        yield Bar(
            lambda num_bytes: progress.update(task, total=num_bytes),
            lambda num_bytes: progress.advance(task, num_bytes),
        )
