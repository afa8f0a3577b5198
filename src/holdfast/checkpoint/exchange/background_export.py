"""Export in the background: a thread writes it while training continues."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import final

from holdfast.checkpoint.exchange.export_names import check_kind
from holdfast.checkpoint.exchange.exporter import Exported, export_checkpoint
from holdfast.checkpoint.keeper.save import Save
from holdfast.checkpoint.restore.checkpoint import open as open_checkpoint
from holdfast.checkpoint.store.contract import Store
from holdfast.errors import HoldfastError, Internal, InvalidInput, NotFound, SaveWarning, TimedOut
from holdfast.system.callsite import warn
from holdfast.system.units import Duration, parse_bytes, parse_step, parse_timeout

_NICENESS = 10
_EXIT_S = 5.0  # to remove what was written


class _Stopped(Exception):
    """The program ends before the export does."""


@final
class BackgroundExport:
    """Export that a thread writes; the future of an `Exported`. Made by `export_in_background`.

    Attributes:
        path: file or folder that appears when the export is complete.
        total_bytes: size of all tensors; None until the checkpoint is open.
        num_bytes: bytes of tensors that have been verified so far.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.total_bytes: int | None = None
        self.num_bytes = 0
        self._ended = threading.Event()
        self._is_stopped = False
        self._exported: Exported | None = None
        self._error: HoldfastError | None = None

    def done(self) -> bool:
        """Return True if the export is complete or has failed."""
        return self._ended.is_set()

    def result(self, timeout: Duration | None = None) -> Exported:
        """Wait until the export is durable, and return its facts.

        Args:
            timeout: seconds, or text such as "10m"; None for no limit.

        Raises:
            HoldfastError: the export failed, as `export_checkpoint`; or the save that it waits for did.
            RetryLater: not complete within `timeout`; also a TimeoutError. The export continues.

        Blocks: until the export ends, at most `timeout`.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        assert self._exported is not None
        return self._exported

    def exception(self, timeout: Duration | None = None) -> HoldfastError | None:
        """Wait until the export ends, and return its error, or None.

        Raises:
            RetryLater: not within `timeout`; also a TimeoutError. The export continues.

        Blocks: as `result`.
        """
        timeout_s = parse_timeout(timeout, "timeout")
        if not self._ended.wait(timeout_s):
            raise TimedOut(
                f"The export to {self.path} is not complete after {timeout_s} s: {self.num_bytes} of "
                f"{self.total_bytes or 'unknown'} bytes. It continues in the background."
            )
        return self._error

    # -- set by the thread and at the end of the program -----------------------------------------------------

    def count(self, num_bytes: int) -> None:
        """Count bytes that have been verified. Ends the export if the program does."""
        if self._is_stopped:
            raise _Stopped
        self.num_bytes += num_bytes

    def set_total(self, num_bytes: int) -> None:
        """Set the size of all tensors."""
        self.total_bytes = num_bytes

    def complete(self, exported: Exported) -> None:
        """Record that the export is durable."""
        self._exported = exported
        self._ended.set()

    def fail(self, error: HoldfastError) -> None:
        """Record the error, and warn."""
        self._error = error
        try:
            warn(f"The export to {self.path} failed: {error}", SaveWarning)
        finally:
            self._ended.set()

    def stop(self, thread: threading.Thread) -> None:
        """Stop the export of a program that ends, and warn."""
        if self.done():
            return
        self._is_stopped = True
        thread.join(_EXIT_S)
        if not self.done():
            warn(
                f"The program ended before the export to {self.path} did, so nothing is there. Call result() "
                "of the export before the end, or run `holdfast export`.",
                SaveWarning,
            )


_running: weakref.WeakKeyDictionary[BackgroundExport, threading.Thread] = weakref.WeakKeyDictionary()


def export_in_background(
    home: str | os.PathLike[str] | Store,
    path: str | os.PathLike[str],
    *,
    after: Save | None = None,
    step: int | None = None,
    kind: str = "safetensors",
    only: Iterable[str] | None = None,
    rename: Mapping[str, str] | None = None,
    max_shard_bytes: int | str = "5GB",
    rank: int = 0,
    overwrite: bool = False,
) -> BackgroundExport:
    """Start an export of a checkpoint in the background. Every byte is read from home and verified.

    The thread has a lower priority and reads one block after the other, so that training keeps the processor.
    A failure is a SaveWarning, and raised by `result`. A program that ends earlier stops the export, with a
    warning: call `result` first. Nothing incomplete ever appears at `path`.

    Memory: as `export_checkpoint`. The tensors in memory are not used, so that no second copy of them exists.

    Args:
        home: home of the run, as for `holdfast.open`.
        path: file or folder to write; its parent must exist.
        after: a save of this program, whose step is exported as soon as it is in home. Keep that checkpoint
            long enough: an export of one that `keep` deletes meanwhile fails.
        step: step to export; by default the newest.
        kind: see `export_checkpoint`.
        only: see `export_checkpoint`.
        rename: see `export_checkpoint`.
        max_shard_bytes: see `export_checkpoint`.
        rank: see `export_checkpoint`.
        overwrite: replace an older export.

    Returns:
        The export under way.

    Raises:
        InvalidInput: the kind, the size or the step is invalid, or both `after` and `step` are given.

    Ranks: not collective. Call it on one rank.
    Blocks: no.
    """
    check_kind(kind)
    limit = parse_bytes(max_shard_bytes, "max_shard_bytes")
    if after is not None and step is not None:
        raise InvalidInput("export_in_background() takes after= or step=, not both. Nothing was exported.")
    chosen = None if step is None else parse_step(step, "export_in_background()")
    export = BackgroundExport(Path(path).expanduser())

    def write() -> Exported:
        found = chosen if after is None else _wait_for(after)
        return export_checkpoint(
            open_checkpoint(home, found),
            export.path,
            kind=kind,
            only=only,
            rename=rename,
            max_shard_bytes=limit,
            rank=rank,
            overwrite=overwrite,
            num_threads=1,
            on_total=export.set_total,
            on_bytes=export.count,
        )

    def run() -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)  # of this thread
        try:
            export.complete(write())
        except _Stopped:
            pass
        except NotFound as error:
            export.fail(_not_in_home(error, after))
        except HoldfastError as error:
            export.fail(error)
        except Exception as error:  # noqa: BLE001 - the thread must not end without a result
            export.fail(
                Internal(f"{error!r}. Nothing was written there. This is a bug of Holdfast: report it.")
            )

    thread = threading.Thread(target=run, name="holdfast-export", daemon=True)
    _running[export] = thread
    thread.start()
    return export


def _wait_for(save: Save) -> int:
    """Wait until a save is in home, and return its step."""
    save.wait_home()
    if save.skipped:
        raise NotFound(
            f"The save of step {save.step} was skipped, since no staging memory was free. Nothing was "
            "exported. Export another step.",
            step=save.step,
        )
    return save.step


def _not_in_home(error: NotFound, after: Save | None) -> HoldfastError:
    if after is None or after.skipped:
        return error
    return NotFound(
        f"{error} It was saved by this program: if it was only due in the local folder, save it with "
        "to_home=True; if `keep` has deleted it since, keep more.",
        step=after.step,
    )


@atexit.register
def _stop_all() -> None:
    for export, thread in list(_running.items()):
        export.stop(thread)
