"""Attachment to an object of another library, and its run: Checkpointer, ranks, notices and memory."""

from __future__ import annotations

import atexit
import contextlib
import warnings
import weakref
from collections.abc import Iterable, Mapping, MutableMapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, NoReturn

import torch
from msgspec import Struct
from torch.optim import Optimizer
from typing_extensions import override

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
from holdfast.errors import HoldfastError, InvalidInput, Preempted, ResumeWarning, Unsupported
from holdfast.system.callsite import warn
from holdfast.system.log import get_logger
from holdfast.watch.preemption.trainer import NoticeWatcher, Preemption

HOME = "holdfast"
"""Name of a home in the folder of a trainer's checkpoints, if the user does not choose another place."""
NO_NOTICES = Preemption("none", signals=False)
"""Watch of a Checkpointer beside a trainer that watches for notices itself."""
_log = get_logger("adapters")


def check_versions(extra: str, oldest: Mapping[str, tuple[int, int]]) -> None:
    """Check that the packages of an extra, each with its oldest supported version, are installed."""
    for name, least in oldest.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            if find_spec(name) is not None:
                continue  # a source folder on the path has no version
            found = None
        if found is None or tuple(int(part) for part in found.split(".")[:2]) < least:
            state = "it is not installed" if found is None else f"{found} is installed"
            raise Unsupported(
                f"holdfast.adapters.{extra} needs {name} {'.'.join(map(str, least))} or later, and {state}. "
                f"Run: pip install 'torch-holdfast[{extra}]'."
            )


def check_attach(
    target: Any, added: type, options: Mapping[str, Any], decided: Mapping[str, str], *, name: str
) -> None:
    """Check the arguments of an adapter's `attach`. An object is attached once.

    `decided` are options that the object decides, each with the place to set it.
    """
    going = next((one.name for one in options.get("watches") or () if one.goes_back is not None), None)
    if going is not None:
        raise InvalidInput(
            f"attach() of this {name} does not take a watch that goes back, as {going!r} does: the loop, its "
            "counter of steps and its data belong to the trainer, which cannot go back while it runs. "
            'Nothing was changed. Use Spike("report") (the default), stop at the report, and start again '
            "from the newest healthy checkpoint; or train in a loop of your own over Checkpointer.steps()."
        )
    for option, fix in decided.items():
        if option in options:
            raise InvalidInput(f"attach() does not take {option}=: {fix}. The {name} was not changed.")
    if isinstance(target, added):
        raise InvalidInput(f"This {name} is already attached. Call attach() once.")


def insert_class(target: Any, added: type, *, before: type) -> Any:
    """Insert a class into the class of an object, directly before one of its bases. Returns the object.

    Methods of classes derived from `before` still run first, and their `super()` calls reach `added`. If
    `before` is the class of the object itself, those of `added` run first.
    """
    kind: type = type(target)
    bases = (added, kind) if kind is before else (kind, added)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    # Data loaders of Accelerate have a property `__class__`, which cannot be set.
    object.__dict__["__class__"].__set__(target, type(kind.__name__, bases, names))
    return target


def unwrapped(value: Any) -> Any:
    """Return what Accelerate's wrapper of an optimizer or a scheduler contains; anything else as it is."""
    from accelerate.optimizer import AcceleratedOptimizer  # here, since not every trainer needs Accelerate
    from accelerate.scheduler import AcceleratedScheduler

    if isinstance(value, AcceleratedOptimizer):
        return value.optimizer
    return value.scheduler if isinstance(value, AcceleratedScheduler) else value


def warn_of_persistent_workers(option: str) -> None:
    """Warn of an option that keeps the workers of a loader after an epoch."""
    warn(
        f"The run will not resume exactly within an epoch, because of {option}=True: a loader draws a seed "
        "for its workers when it starts them, from the generator of dropout. After a resume they start "
        f"at another moment. Set {option}=False, or give the loader a generator of its own.",
        ResumeWarning,
    )


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
        open_runs.add(self)

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


open_runs: weakref.WeakSet[TrainerRun] = weakref.WeakSet()
"""Runs of this process that are still referred to."""


def end_preempted(error: Exception) -> None:
    """End the process by `Preempted` if a loader has failed after a notice.

    Its workers may have died of it. Nothing is saved: only the script knows where its step ends. The last
    save becomes durable.
    """
    for run in list(open_runs):
        if run.notices is not None and run.notices.reason is not None:
            reason = f"{run.notices.reason}; {type(error).__name__} has ended the next batch: {error}"
            raise Preempted(run.saved_step, reason) from error


def _wait_copied() -> None:
    """Wait for copies under way before the process ends."""
    for run in list(open_runs):
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


class Notices(NoticeWatcher):
    """Watcher of one training's notices, which all ranks agree on. Ctrl-C keeps its usual effect.

    `agreed` is the reason of the notice that all ranks have agreed on, and None while there is none.
    """

    def __init__(self, sources: str | Iterable[str] | None, ranks: Ranks, *, signals: bool) -> None:
        super().__init__(sources)
        self.agreed: str | None = None
        self._ranks, self._num_exchanges = ranks, 0
        if signals:
            self.watch_signals(with_interrupt=False)
        self.poll_clouds(is_first_here=ranks.is_first_here())

    @property
    @override
    def reason(self) -> str | None:
        """Reason of the notice that this rank has, or that all have agreed on."""
        return self.agreed or super().reason

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
