"""A progress bar on stderr for work that is counted in bytes, if a person sees it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple


class Bar(NamedTuple):
    """What work calls; both are None where nobody looks."""

    on_total: Callable[[int], None] | None
    on_bytes: Callable[[int], None] | None


@contextlib.contextmanager
def byte_bar(label: str) -> Iterator[Bar]:
    """A bar that is there for the block, on a terminal only; without a total it only moves."""
    if not sys.stderr.isatty():
        yield Bar(None, None)
        return
    from rich.console import Console  # not above: help must not wait for it
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    # What is printed beside the bar must go around it on a terminal, and stay on stdout if that is piped.
    options = {"transient": True, "redirect_stdout": sys.stdout.isatty()}
    with Progress(*columns, console=Console(stderr=True), **options) as progress:
        task = progress.add_task(label, total=None)
        yield Bar(
            lambda num_bytes: progress.update(task, total=num_bytes),
            lambda num_bytes: progress.advance(task, num_bytes),
        )
