"""Compile cache of a training: downloaded from home before the first compilation, uploaded after saves."""

from __future__ import annotations

import os
import queue
import shlex
import sys
import threading
import time
from collections.abc import Callable
from typing import final

from holdfast.checkpoint.store import Store
from holdfast.errors import HoldfastError
from holdfast.system.log import get_logger, reported_if_slow
from holdfast.system.process_exit import complete_at_exit
from holdfast.system.units import format_bytes, format_duration
from holdfast.watch.compiled import directory as directories
from holdfast.watch.compiled.build_environment import current_environment, environment_key
from holdfast.watch.compiled.transfer import CacheUploader, DownloadResult, UploadResult, load, read_indices
from holdfast.watch.compiled.trust import VARIABLE, is_trusted

_log = get_logger("watch.compiled")
LOAD_LIMIT_S = 120.0
"""Longest wait for compiled code at the start. Files that are missing then are compiled again."""
CLOSE_LIMIT_S = 10.0  # longest wait for uploads at the end of a training
_COMPILER = "torch._inductor.codecache"
_MAX_LISTED = 3


@final
class CompiledCode:
    """Compile cache of one rank's process.

    After construction it does not raise: code can always be compiled again, so training continues, and the
    user is warned.

    Args:
        trust_home: allow running code from this home. None uses the environment and the user's file.
    """

    def __init__(
        self,
        store: Store,
        home: str,
        *,
        limit_bytes: int,
        trust_home: bool | None = None,
        warn: Callable[[str], None],
    ) -> None:
        self._store, self._home, self._limit_bytes, self._warn = store, home, limit_bytes, warn
        self._asks_for_trust = trust_home is None
        self.is_trusted = is_trusted(home) if trust_home is None else trust_home
        self._loaded: DownloadResult | None = None
        self._has_failed = False  # reported once, even if uploads keep failing
        self._uploader: CacheUploader | None = None
        self._orders: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_ended = threading.Event()
        if self.is_trusted:
            self._point()

    def _point(self) -> None:
        """Point torch.compile to a directory of this run, unless the user has chosen one."""
        found = directories.current() if directories.is_chosen() else None
        if found is not None and not directories.is_own(found.path):
            return
        try:
            own = directories.own(self._home, environment_key(current_environment()))
        except OSError as error:
            self._warn(
                f"Cannot create a directory for compiled code: {error}. Compiled code is not saved in "
                f"{self._home}. Training is not affected."
            )
            self.is_trusted = False
        else:
            os.environ[directories.VARIABLE] = str(own)

    @property
    def place(self) -> str:
        """The directory, to find ranks that share it. A placeholder before torch has chosen one."""
        found = directories.current() if directories.is_chosen() else None
        return str(found.path) if found else "chosen by torch"

    # -- from home -------------------------------------------------------------------------------------------

    def load(self) -> tuple[DownloadResult, str | None]:
        """Download the files of home into the directory, once, if the home is trusted.

        Returns:
            The result, and a message for the user, if any.

        Blocks: for some reads, at most about two minutes.
        """
        if self._loaded is not None:
            return DownloadResult(), None
        self._loaded = DownloadResult()
        facts = current_environment()
        key, began = environment_key(facts), time.monotonic()
        try:
            if not self.is_trusted:
                return self._loaded, self._trust_hint(key)
            found = directories.current()
            assert found is not None
            loaded = load(self._store, key, facts, found, limit_s=LOAD_LIMIT_S)
        except HoldfastError as error:
            self._warn(f"Cannot read the compile cache in {self._home}: {error} The code is compiled again.")
            return self._loaded, None
        self._loaded = loaded
        if problems := loaded.problems:
            more = f" (and {len(problems) - _MAX_LISTED} more)" if len(problems) > _MAX_LISTED else ""
            self._warn(
                f"Part of the compile cache in {self._home} was not used, and is compiled again: "
                f"{' '.join(problems[:_MAX_LISTED])}{more}"
            )
        if not loaded.num_placed:
            return loaded, None
        return loaded, (
            f"compiled code from {self._home}: {loaded.num_placed} files, {format_bytes(loaded.num_bytes)} "
            f"in {format_duration(time.monotonic() - began)}, verified"
        )

    def _trust_hint(self, key: str) -> str | None:
        """Return a message about compiled code in an untrusted home, or None."""
        indices, _ = read_indices(self._store, key, current_environment())
        if not indices or not self._asks_for_trust:
            return None
        return (
            f"{self._home} has compiled code for this machine. It was not loaded, because that runs it. If "
            f"you trust everyone who can write there, run `holdfast trust {shlex.quote(self._home)}`, set "
            f"{VARIABLE}=... or pass watches=[CompileCache(trust=True)]"
        )

    # -- to home ---------------------------------------------------------------------------------------------

    def begin(
        self,
        *,
        attempt: int,
        rank: int,
        turn: int,
        notify: Callable[[UploadResult, float], None] = lambda *_: None,
    ) -> None:
        """Start uploads from this rank. One of the ranks that share a directory uploads.

        Args:
            turn: number of ranks that upload before this one.
            notify: called in a thread with each result and its duration in seconds.
        """
        self._notify = notify
        facts, loaded = current_environment(), self._loaded or DownloadResult()
        self._uploader = CacheUploader(
            self._store,
            environment_key(facts),
            facts,
            attempt=attempt,
            rank=rank,
            limit_bytes=self._limit_bytes,
            turn=turn,
            known=loaded.there,
            lacking=loaded.lacking,
        )

    def upload_soon(self) -> None:
        """Upload new files in a thread, if this process has compiled anything."""
        if self._uploader is None or self._is_ended.is_set() or _COMPILER not in sys.modules:
            return
        if self._thread is None:
            complete_at_exit(self)
            self._thread = threading.Thread(target=self._work, name="holdfast-compiled", daemon=True)
            self._thread.start()
        if self._orders.empty():
            self._orders.put("upload")

    def close(self, timeout_s: float = CLOSE_LIMIT_S) -> None:
        """Upload the remaining files, and end.

        Blocks: at most `timeout_s`. Files that are missing then are not uploaded.
        """
        if timeout_s > 0:
            self.upload_soon()
        if self._thread is not None and timeout_s > 0:
            self._orders.put("last")
            with reported_if_slow(lambda: _log.info("waiting for the upload of compiled code")):
                self._thread.join(timeout_s)
        self._is_ended.set()
        self._orders.put("last")

    def end_with_interpreter(self, timeout_s: float) -> None:
        """End the thread. Files that have not been uploaded are not."""
        self.close(0.0)
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _work(self) -> None:
        order = ""
        while order != "last":
            order = self._orders.get()
            uploader = self._uploader  # of the present attempt: a rollback begins another one
            if uploader is not None and not self._is_ended.is_set():
                self._upload(uploader, is_last=order == "last")

    def _upload(self, uploader: CacheUploader, *, is_last: bool) -> None:
        found, began = directories.current(), time.monotonic()
        if found is None:
            return
        try:
            result = uploader.upload(found, is_last=is_last, is_ended=self._is_ended.is_set)
        except (HoldfastError, OSError) as error:
            result = UploadResult(
                problem=f"Cannot upload compiled code to {self._home}: {error} Holdfast tries again after "
                "later saves. Training and checkpoints are not affected."
            )
        if result.problem and not self._has_failed:
            self._has_failed = True
            self._warn(result.problem)
        if result.num_files:
            self._notify(result, time.monotonic() - began)
