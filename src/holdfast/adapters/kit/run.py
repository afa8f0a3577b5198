"""Run of an attached trainer: its Checkpointer, ranks, notices and memory, as every door needs them."""

from __future__ import annotations

import atexit
import contextlib
import warnings
import weakref
from collections.abc import Iterable, Mapping, MutableMapping
from typing import Any, NoReturn

import torch
from msgspec import Struct
from torch.optim import Optimizer

import holdfast
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.home.commit import merge_in_memory
from holdfast.checkpoint.keeper import Save
from holdfast.checkpoint.ranks import Ranks
from holdfast.checkpoint.restore.checkpoint import Checkpoint
from holdfast.checkpoint.run import Checkpointer
from holdfast.checkpoint.run.options import Home, Limits
from holdfast.checkpoint.store import open_store
from holdfast.checkpoint.store.tiered import TieredStore
from holdfast.checkpoint.watch import Watch
from holdfast.errors import HoldfastError, InvalidInput, Preempted
from holdfast.system.log import get_logger
from holdfast.watch.preemption.trainer import NoticeWatcher, Preemption

HOME = "holdfast"
"""Name of a home in the folder of a trainer's checkpoints, if the user does not choose another place."""
NO_NOTICES = Preemption("none", signals=False)
"""Watch of a Checkpointer beside a trainer that watches for notices itself."""
_log = get_logger("adapters")


def split_notices(watches: Iterable[Watch] | None) -> tuple[Preemption, list[Watch] | None]:
    """Return the watch of notices that a user has given or gets, and watches of a run without notices."""
    if watches is None:
        return NO_NOTICES, None
    given = list(watches)
    found = next((one for one in given if isinstance(one, Preemption)), Preemption())
    return found, [NO_NOTICES, *(one for one in given if not isinstance(one, Preemption))]


class Choice(Struct, frozen=True):
    """Checkpoint to load, which a folder of the trainer names."""

    folder: str
    step: int
    home: str | None = None  # None for a folder that the trainer has written itself


class TrainerRun:
    """Run of a trainer that owns the loop and the rhythm of saves: a door's session is a subclass.

    `options` are those that the user has given to `attach`, and `decided` those of the Checkpointer that the
    door decides. Without a `state`, each save has a dictionary of its own.

    Ranks: collective, and so are all methods but those that wait.
    """

    def __init__(
        self, home: Home, state: MutableMapping[str, Any] | None, options: Mapping[str, Any], **decided: Any
    ) -> None:
        given = {"keep": None, **options, **decided}
        self._is_quiet = bool(given.pop("quiet", False))
        self._timeout_s = given.get("limits", Limits()).rank_timeout_s
        self.ranks = Ranks(timeout_s=self._timeout_s)
        self.checkpointer = Checkpointer(
            home, state, **{"every": None, "group": self.ranks, **given}, quiet=True
        )
        self.home = self.checkpointer.home
        self.pending: list[Save] = []  # saves that are not settled yet, the oldest first
        self.doomed: dict[int, str] = {}  # folders of deleted checkpoints by step, see `pop_doomed`
        self.notices: Notices | None = None  # of a trainer that watches for them itself
        self.saved_step = 0  # newest durable save of this process
        _open.add(self)

    # -- saves -----------------------------------------------------------------------------------------------
    def save_step(
        self,
        step: int,
        state: Mapping[str, Any] | None = None,
        *,
        silenced: Iterable[type[Warning]] = (),
        **options: Any,
    ) -> Save:
        """Save a step in the background, without warnings that do not apply to this trainer."""
        given = () if state is None else (state,)
        with warnings.catch_warnings():
            for category in silenced:
                warnings.simplefilter("ignore", category)
            save = self.checkpointer.save(step, *given, **options)
        self.pending.append(save)
        return save

    def settle(self) -> list[Save]:
        """Return the saves that have ended since the last call, durable or failed."""
        ended = [save for save in self.pending if save.done()]
        self.pending = [save for save in self.pending if save not in ended]
        self.saved_step = max([self.saved_step, *(save.step for save in ended if save.durable)])
        return ended

    def pop_doomed(self) -> dict[int, str]:
        """Return the folders that are to be removed now, by step: a newer checkpoint is durable."""
        due = [step for step in self.doomed if step < self.saved_step]
        return {step: self.doomed.pop(step) for step in due}

    def wait_copied(self) -> None:
        """Wait until training can no longer change what was saved; not collective."""
        for save in self.pending:
            if save.state == "staging":
                with contextlib.suppress(InvalidInput):  # it was dropped, which the next save reports
                    save.wait_staged()

    def wait_settled(self) -> None:
        """Wait until no save is under way; not collective. Failures are reported by the next save."""
        for save in self.pending:
            with contextlib.suppress(HoldfastError):
                save.wait_durable()

    # -- the run that the home holds -------------------------------------------------------------------------
    def refuse_new_run(self, newest: int, what: str, done: str, advice: str) -> None:
        """Refuse to begin anew in a home that holds a run; `advice` is the call that continues it."""
        raise InvalidInput(
            f"{self.home} holds a run up to step {newest}, and {what}. Nothing was {done}. {advice} to "
            "continue it. To begin anew, give attach() another home, or delete this one: "
            f"`holdfast rm {self.home}`."
        )

    def reader_of(self, home: str, state: MutableMapping[str, Any]) -> Checkpointer:
        """Return a Checkpointer that only reads another run's home into a state."""
        return Checkpointer(home, state, watches=None, group=Ranks(timeout_s=self._timeout_s), quiet=True)

    def announce(self, line: str, *values: object) -> None:
        """Log a line on rank 0, unless the user has asked for quiet."""
        if self.ranks.rank == 0 and not self._is_quiet:
            _log.info(line, *values)


_open: weakref.WeakSet[TrainerRun] = weakref.WeakSet()


def open_runs() -> list[TrainerRun]:
    """Return the runs of this process that are still referred to."""
    return list(_open)


def end_preempted(error: Exception) -> None:
    """End the process by `Preempted` if a loader has failed after a notice.

    Its workers may have died of it. Nothing is saved: only the script knows where its step ends. The last
    save becomes durable.
    """
    for run in open_runs():
        if run.notices is not None and run.notices.reason is not None:
            reason = f"{run.notices.reason}; {type(error).__name__} has ended the next batch: {error}"
            raise Preempted(run.saved_step, reason) from error


def _wait_copied() -> None:
    """Wait for copies under way before the process ends."""
    for run in open_runs():
        run.wait_copied()


atexit.register(_wait_copied)


def open_loaded(home: str, step: int, attempt: int | None) -> Checkpoint:
    """Open a checkpoint that was just loaded.

    If a keeper was killed between the last file and the manifest, the checkpoint lacks its manifest until the
    next save, which claims the run. A load takes it nevertheless.
    """
    store = open_store(home)
    made = None
    if attempt is not None:
        made = merge_in_memory(store, CheckpointId(attempt=attempt, step=step), None)
    return holdfast.open(store if made is None else TieredStore([made, *store.copies()]), step, attempt)


class Notices:
    """Preemption notices of one training, which all ranks agree on. Ctrl-C keeps its usual effect.

    `agreed` is the reason of the notice that all ranks have agreed on, and None while there is none.
    """

    def __init__(self, sources: str | Iterable[str] | None, ranks: Ranks, *, signals: bool) -> None:
        self.agreed: str | None = None
        self._ranks, self._num_exchanges = ranks, 0
        self._watcher = NoticeWatcher(sources)
        if signals:
            self._watcher.watch_signals(with_interrupt=False)
        self._watcher.poll_clouds(is_first_here=ranks.is_first_here())

    @property
    def reason(self) -> str | None:
        """Reason of the notice that this rank has, or that all have agreed on."""
        return self.agreed or self._watcher.reason

    def end_step(self, save_s: float) -> None:
        """Measure the step since the last call; `save_s` is the time of a durable save."""
        self._watcher.end_step(save_s)

    def exchange(self, *flags: bool) -> tuple[bool, ...]:
        """Exchange notices with the other ranks; return for each of `flags` whether it is true on any rank.

        With several ranks, the result is one call late.

        Ranks: collective; every rank calls it equally often.
        """
        self._num_exchanges += 1
        own = self.reason is not None, *flags
        (has_notice, *others), _ = self._ranks.exchange_flags(self._num_exchanges, own, ())
        if has_notice:
            self.agreed = self.reason or "another rank's notice"
        return tuple(others)

    def finish(self) -> None:
        """Complete the exchange of the ranks at an orderly end; collective."""
        self._ranks.barrier_and_close()

    def close(self) -> None:
        """Stop watching."""
        self._watcher.close()


class PrivateMemory(Optimizer):
    """Stand-in for a trainer's optimizer: memory that no script writes to, which a save copies later."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__(list(tensors), {})

    def step(self, closure: Any = None) -> NoReturn:
        """Refuse to step: it only names memory."""
        raise AssertionError(f"a {type(self).__name__} is not an optimizer that trains")


def private_memory(owned: Iterable[torch.Tensor], shared: Iterable[torch.Tensor]) -> list[PrivateMemory]:
    """Return the tensors that only the optimizer's step writes to, to be copied beside it; [] without any.

    Those in memory that scripts may write to at any time (`shared`) are left out. So is memory of devices:
    writes through `.data` cannot be detected there.
    """
    addresses = {_storage_of(tensor) for tensor in shared}
    found = {id(one): one for one in owned if one.numel() and _storage_of(one) not in addresses}
    if not found or any(tensor.device.type != "cpu" for tensor in found.values()):
        return []
    return [PrivateMemory(found.values())]


def _storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
