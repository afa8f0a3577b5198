"""Compile cache of all ranks: one rank per directory downloads before the start and uploads later."""

from __future__ import annotations

import time
from collections.abc import Callable

from holdfast.checkpoint.ranks import RankGroup
from holdfast.system.callsite import warn
from holdfast.watch.compiled.cache import CompiledCode
from holdfast.watch.compiled.upload import UploadResult


def download_cache(
    cache: CompiledCode, ranks: RankGroup, *, record: Callable[..., None], show: Callable[[str], None]
) -> None:
    """Download compiled code before anything is compiled.

    Args:
        record: writes an event to the history.
        show: prints a message to the user.

    Ranks: collective.
    Blocks: until every directory has the files of home, at most about two minutes.
    """
    first = ranks.ranks_sharing(cache.place)[0]
    if ranks.rank == first:
        began = time.perf_counter()
        loaded, line = cache.load()
        if loaded.num_placed:
            seconds, detail = time.perf_counter() - began, f"{loaded.num_placed} files"
            record(
                "compiled-loaded",
                step=None,
                num_bytes=loaded.num_bytes,
                seconds=seconds,
                detail=detail,
                tier="home",
            )
        if line is not None:
            show(line)
    ranks.gather(None)  # the other ranks wait here for the download


def start_uploads(
    cache: CompiledCode, ranks: RankGroup, *, attempt: int, notify: Callable[[UploadResult, float], None]
) -> None:
    """Start uploads of newly compiled code, as part of an attempt.

    Args:
        notify: called in a thread with each result and its duration in seconds.

    Ranks: collective.
    """
    first = ranks.ranks_sharing(cache.place)[0]
    firsts = sorted(set(ranks.gather(first)))
    if ranks.rank == first:
        cache.begin(attempt=attempt, rank=first, turn=firsts.index(first), notify=notify)


def warn_of_problems(cache: CompiledCode) -> None:
    """Warn about problems since the last call. Training continues."""
    while cache.problems:
        warn(cache.problems.pop(0), UserWarning)
