"""Watch of compiled code: the output of torch.compile travels with the checkpoints."""

from __future__ import annotations

import queue
import shlex
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from holdfast.checkpoint.keeper.save import Save
from holdfast.checkpoint.watch import SharedPlace, Watch, WatchedRun
from holdfast.errors import HoldfastError
from holdfast.system.log import get_logger, reported_if_slow
from holdfast.system.process_exit import complete_at_exit
from holdfast.system.units import format_bytes, format_duration, parse_bytes, plural

if TYPE_CHECKING:
    from holdfast.watch.compiled.transfer import CacheUploader, DownloadResult

_log = get_logger("watch.compiled")
LOAD_LIMIT_S = 120.0
"""Longest wait for compiled code at the start. Files that are missing then are compiled again."""
CLOSE_LIMIT_S = 10.0  # longest wait for uploads at the end of a training
_COMPILER = "torch._inductor.codecache"  # imported once something is compiled
_MAX_LISTED = 3


@dataclass
class CompileCache(Watch):
    """Cache in home for compiled code: a start on another machine loads it instead of compiling.

    Args:
        limit: largest size, in bytes or as "1GiB"; "off" for no cache. It is sent in the background after
            saves.
        trust: whether compiled code from this home may be loaded, and so run; by default only if
            `holdfast trust` or HOLDFAST_TRUST_HOMES names the home.

    Raises:
        InvalidInput: `limit` is not a size.
    """

    # Code can always be compiled again, so training continues after an error, and the user is warned. The
    # modules of the transfer are imported when they are needed: commands and most restores do without.

    name: ClassVar[str] = "compile-cache"
    events: ClassVar[Mapping[str, str]] = {
        "compiled-loaded": "the compile cache from home, at the start",
        "compiled-sent": "the compile cache to home",
    }

    limit: int | str = "1GiB"
    _: KW_ONLY
    trust: bool | None = None

    def __post_init__(self) -> None:
        self._limit_bytes = 0 if self.limit == "off" else parse_bytes(self.limit, "CompileCache(limit=)")

    @override
    def applies(self, run: WatchedRun) -> bool:
        return self.limit != "off"

    @override
    def begin(self, run: WatchedRun) -> None:
        from holdfast.watch.compiled import directory
        from holdfast.watch.compiled.trust import is_trusted

        self._run = run
        self._is_trusted = is_trusted(run.home) if self.trust is None else self.trust
        if self._is_trusted:
            try:
                directory.point_to_own(run.home)
            except OSError as error:
                self._is_trusted = False
                run.warn(
                    f"Cannot create a directory for compiled code: {error}. Compiled code is not saved in "
                    f"{run.home}. Training is not affected."
                )
        found = directory.current() if directory.is_chosen() else None
        self._place = str(found.path) if found else "chosen by torch"
        self._has_looked = False  # into home
        self._loaded: DownloadResult | None = None
        self._claim: tuple[int, int] | None = None  # attempt and turn, on the rank that uploads
        self._uploader: CacheUploader | None = None
        self._has_failed = False  # reported once, even if uploads keep failing
        self._sender = _Sender(self._upload)

    @property
    @override
    def place(self) -> str | None:
        return self._place

    @override
    def prepare(self) -> None:
        from holdfast.watch.compiled.directory import FOLDER

        if self._has_looked or not (self._is_trusted or self.trust is None):
            return
        self._has_looked = True
        try:
            if any(True for _ in self._run.store.list(FOLDER)):
                self._load()
        except HoldfastError as error:
            self._run.warn(
                f"Cannot read the compile cache in {self._run.home}: {error} The code is compiled again."
            )

    def _load(self) -> None:
        """Download the files of home into the directory if the home is trusted; else ask for trust."""
        from holdfast.watch.compiled import directory, transfer
        from holdfast.watch.compiled.trust import VARIABLE

        run, facts, began = self._run, directory.current_environment(), time.monotonic()
        key = directory.environment_key(facts)
        if not self._is_trusted:
            if transfer.read_indices(run.store, key, facts, []):
                run.show(
                    f"{run.home} has compiled code for this machine. It was not loaded, because that runs "
                    "it. If you trust everyone who can write there, run `holdfast trust "
                    f"{shlex.quote(run.home)}`, set {VARIABLE}=... or pass watches=[CompileCache(trust=True)]"
                )
            return
        found = directory.current()
        assert found is not None
        loaded = self._loaded = transfer.load(run.store, key, facts, found, limit_s=LOAD_LIMIT_S)
        if problems := loaded.problems:
            more = f" (and {len(problems) - _MAX_LISTED} more)" if len(problems) > _MAX_LISTED else ""
            run.warn(
                f"Part of the compile cache in {run.home} was not used, and is compiled again: "
                f"{' '.join(problems[:_MAX_LISTED])}{more}"
            )
        if loaded.num_placed:
            seconds, size = time.monotonic() - began, format_bytes(loaded.num_bytes)
            detail = f"{loaded.num_placed} files"
            self._note("compiled-loaded", loaded.num_bytes, seconds, detail)
            duration = format_duration(seconds)
            run.show(f"compiled code from {run.home}: {detail}, {size} in {duration}, verified")

    def _note(self, event: str, num_bytes: int, seconds: float, detail: str) -> None:
        self._run.note(event, step=None, num_bytes=num_bytes, seconds=seconds, detail=detail, tier="home")

    @override
    def claimed(self, attempt: int, place: SharedPlace) -> None:
        self._claim = (attempt, place.turn) if place.is_first else None

    @override
    def saved(self, save: Save) -> None:
        self._upload_soon()

    def _upload_soon(self) -> None:
        """Upload new files in a thread, if this process has compiled anything."""
        if self._claim is not None and _COMPILER in sys.modules:
            self._sender.send()

    @override
    def end(self, timeout_s: float | None) -> None:
        limit_s = CLOSE_LIMIT_S if timeout_s is None else min(CLOSE_LIMIT_S, timeout_s)
        if limit_s > 0:
            self._upload_soon()
        self._sender.end(limit_s)

    def _upload(self, is_last: bool) -> None:
        from holdfast.watch.compiled import directory, transfer

        found, claim, began = directory.current(), self._claim, time.monotonic()
        if found is None or claim is None:
            return
        attempt, turn = claim
        if self._uploader is None or self._uploader.attempt != attempt:  # a rollback begins another one
            facts, loaded = directory.current_environment(), self._loaded or transfer.DownloadResult()
            self._uploader = transfer.CacheUploader(
                self._run.store,
                directory.environment_key(facts),
                facts,
                attempt=attempt,
                rank=self._run.rank,
                limit_bytes=self._limit_bytes,
                turn=turn,
                known=loaded.there,
                lacking=loaded.lacking,
            )
        try:
            result = self._uploader.upload(found, is_last=is_last, is_ended=self._sender.is_ended.is_set)
        except (HoldfastError, OSError) as error:
            result = transfer.UploadResult(
                problem=f"Cannot upload compiled code to {self._run.home}: {error} Holdfast tries again "
                "after later saves. Training and checkpoints are not affected."
            )
        if result.problem and not self._has_failed:
            self._has_failed = True
            self._run.warn(result.problem)
        if result.num_files:
            detail = plural(result.num_files, "file")
            self._note("compiled-sent", result.num_bytes, time.monotonic() - began, detail)


class _Sender:
    """Thread that uploads in the background, from the first order on."""

    def __init__(self, upload: Callable[[bool], None]) -> None:
        self.is_ended = threading.Event()
        self._upload = upload  # called with True for the last upload
        self._orders: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def send(self) -> None:
        """Upload soon."""
        if self._thread is None and not self.is_ended.is_set():
            complete_at_exit(self)
            self._thread = threading.Thread(target=self._work, name="holdfast-compiled", daemon=True)
            self._thread.start()
        if self._orders.empty():
            self._orders.put("next")

    def end(self, timeout_s: float) -> None:
        """Upload the rest, and end. Files that are missing after the timeout are not uploaded."""
        if self._thread is not None and timeout_s > 0:
            self._orders.put("last")
            with reported_if_slow(lambda: _log.info("waiting for the upload of compiled code")):
                self._thread.join(timeout_s)
        self.is_ended.set()
        self._orders.put("last")

    def end_with_interpreter(self, timeout_s: float) -> None:
        """End the thread. Files that have not been uploaded are not."""
        self.end(0.0)
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _work(self) -> None:
        order = ""
        while order != "last":
            order = self._orders.get()
            if not self.is_ended.is_set():
                self._upload(order == "last")
