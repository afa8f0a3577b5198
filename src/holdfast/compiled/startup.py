"""Compile cache of all ranks: one rank per directory downloads before the start and uploads later."""

from __future__ import annotations

import time
from collections.abc import Callable

from holdfast.callsite import warn
from holdfast.compiled.cache import CompiledCode
from holdfast.ranks import RankGroup


def bring(
    cache: CompiledCode, ranks: RankGroup, *, note: Callable[..., None], say: Callable[[str], None]
) -> None:
    """Download compiled code before anything is compiled.

    Args:
        cache: this rank's cache.
        ranks: the ranks that train together.
        note: writes an event to the history.
        say: prints a message to the user.

    Ranks: collective.
    Blocks: until every directory has the files of home, at most about two minutes.
    """
    first = ranks.ranks_sharing(cache.place)[0]
    if ranks.rank == first:
        began = time.perf_counter()
        loaded, line = cache.load()
        if loaded.num_placed:
            seconds, detail = time.perf_counter() - began, f"{loaded.num_placed} files"
            note(
                "compiled-loaded",
                step=None,
                num_bytes=loaded.num_bytes,
                seconds=seconds,
                detail=detail,
                tier="home",
            )
        if line is not None:
            say(line)
    ranks.gather(None)  # the other ranks wait here for the download


def begin_sending(cache: CompiledCode, ranks: RankGroup, *, attempt: int) -> None:
    """Start uploads of newly compiled code, as part of an attempt.

    Args:
        cache: this rank's cache.
        ranks: the ranks that train together.
        attempt: number of this attempt.

    Ranks: collective.
    """
    first = ranks.ranks_sharing(cache.place)[0]
    firsts = sorted(set(ranks.gather(first)))
    if ranks.rank == first:
        cache.begin(attempt=attempt, rank=first, turn=firsts.index(first))


def warn_of_problems(cache: CompiledCode) -> None:
    """Warn about problems since the last call. Training continues."""
    while cache.problems:
        warn(cache.problems.pop(0), UserWarning)
