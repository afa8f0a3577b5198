"""Compiled code for all ranks of a start: one rank of each directory brings it, and later sends."""

from __future__ import annotations

import time
from collections.abc import Callable

from holdfast.callsite import warn
from holdfast.compiled.cache import CompileCache
from holdfast.ranks import RankGroup


def bring(
    cache: CompileCache, ranks: RankGroup, *, note: Callable[..., None], say: Callable[[str], None]
) -> None:
    """Have compiled code in place before anything is compiled.

    Args:
        cache: of this rank.
        ranks: that train together.
        note: writes an event into the history.
        say: tells people.

    Ranks: collective.
    Blocks: until every directory has what home has, at most about two minutes.
    """
    first = ranks.beside(cache.place)[0]
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
    ranks.gather(None)  # the others wait here for what is being brought


def begin_sending(cache: CompileCache, ranks: RankGroup, *, attempt: int) -> None:
    """Let what is compiled from now on be sent home, in the name of an attempt.

    Args:
        cache: of this rank.
        ranks: that train together.
        attempt: this start's number.

    Ranks: collective.
    """
    first = ranks.beside(cache.place)[0]
    firsts = sorted(set(ranks.gather(first)))
    if ranks.rank == first:
        cache.begin(attempt=attempt, rank=first, turn=firsts.index(first))


def warn_of_problems(cache: CompileCache) -> None:
    """Tell the user what did not work since the last call; training goes on."""
    while cache.problems:
        warn(cache.problems.pop(0), UserWarning)
