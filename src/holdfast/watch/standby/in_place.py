"""Rolling back in place: a rank calls the function of the training again, in the process that it has."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import traceback
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from typing_extensions import override

from holdfast.checkpoint import ranks
from holdfast.checkpoint.keeper.save import Save
from holdfast.checkpoint.run.training import Training
from holdfast.checkpoint.state import rng
from holdfast.checkpoint.watch import Watch
from holdfast.system.environment import WATCH
from holdfast.system.log import get_logger
from holdfast.watch.standby.rounds import COMPLETE, Launch, RankLink, Rounds

_T = TypeVar("_T")
_log = get_logger("watch.standby")
_NOTICE_S = 2.0  # until the death of a rank is in the store, after its connections have broken
_LEAVE_S = 60.0  # for a step without communication, and the end of what the function has made


def run_rounds(
    function: Callable[..., _T],
    arguments: tuple[Any, ...],
    launch: Launch,
    link: RankLink,
    number: int,
    *,
    stays: bool,
    most: int,
) -> _T:
    """Call the function of a training in each round until it returns, from round `number` on.

    Args:
        stays: call it again in this process; else the process ends, and its supervisor forks again.
        most: last round.
    """
    StepWatch.link, fresh = link, rng.process_states()
    while True:
        link.begin(number)
        watcher: _Watcher | None = None
        try:
            if launch.world_size > 1:
                rounds = Rounds(launch)
                if not rounds.meet(number):
                    number = rounds.next_after(number + 1)
                    continue
                watcher = _Watcher(launch, number)
            found = function(*arguments)
        except Exception as error:
            reason = None if watcher is None else watcher.reason(_NOTICE_S)
            if watcher is None or reason is None or not stays or number + 1 > most:
                raise
            _release(error, reason)
        else:
            if watcher is not None:
                watcher.close()
            return found
        rng.restore(fresh)  # as in a forked process
        number = Rounds(launch).next_after(number + 1)
        watcher.close()
        if launch.rank == 0:
            _log.info("rank 0 rolls back in place, as %s", reason)


def add_watch() -> None:
    """Have each Checkpointer of this process and its forks report its steps to the supervisor."""
    name = f"{__name__}:{StepWatch.__name__}"
    os.environ[WATCH] = ",".join(filter(None, (os.environ.get(WATCH), name)))


class StepWatch(Watch):
    """Watch that reports steps to the supervisor, and once the modules to import."""

    name: ClassVar[str] = "restart"
    link: ClassVar[RankLink | None] = None

    @override
    def step(self, step: int) -> None:
        if self.link is not None:
            self.link.step()

    @override
    def saved(self, save: Save) -> None:
        if self.link is not None:
            self.link.send_modules()


class _Watcher:
    """Thread that waits for the end of a round, and then ends the communication of this process."""

    def __init__(self, launch: Launch, number: int) -> None:
        self._rounds, self._number = Rounds(launch), number
        self._reason: str | None = None
        self._has_reason, self._is_over = threading.Event(), threading.Event()
        threading.Thread(target=self._watch, name="holdfast-rounds", daemon=True).start()

    def reason(self, timeout_s: float) -> str | None:
        """Return the cause of the end of the round; None if it goes on."""
        self._has_reason.wait(timeout_s)
        return self._reason

    def close(self) -> None:
        """Leave this process alone from now on."""
        self._is_over.set()

    def _watch(self) -> None:
        try:
            reason = self._rounds.wait(self._number)
        except RuntimeError:
            return  # the store was on a host that is lost: the launcher starts all ranks again
        if reason == COMPLETE or self._is_over.is_set():
            return
        self._reason = reason
        self._has_reason.set()
        _abort()
        if not self._is_over.wait(_LEAVE_S):
            _log.warning("this rank has not left its step after %.0f s, and is started again", _LEAVE_S)
            os.kill(os.getpid(), signal.SIGKILL)


def _abort() -> None:
    """Have the collectives under way fail, in whatever thread they are."""
    for group in list(distributed_c10d._world.pg_names):
        with contextlib.suppress(RuntimeError, AttributeError):  # backends without it: connections break
            group.abort()


def _release(error: BaseException, reason: str) -> None:
    """Release what the function has made."""
    for training in list(Training.all):
        training.abandon(reason)
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__
    if dist.is_initialized():
        dist.destroy_process_group()
    ranks.forget()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
