"""The Checkpointer: wires state, staging, keeper and restore together for one training run."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, SupportsFloat, cast

from holdfast.callsite import warn
from holdfast.checkpointer.call_guard import Reentry
from holdfast.checkpointer.loop_exit import is_orderly, looping
from holdfast.checkpointer.metrics import Metrics
from holdfast.checkpointer.position import Position
from holdfast.checkpointer.stable_step import Consensus
from holdfast.checkpointer.tiers import Base, Tiers
from holdfast.checkpointer.trial import Trial
from holdfast.compiled import (
    CLOSE_LIMIT_S,
    CompileCache,
    Sent,
    begin_sending,
    bring,
    warn_of_problems,
)
from holdfast.ending import leave, leave_at_exit
from holdfast.errors import (
    PREEMPTED_STATUS,
    Denied,
    HoldfastError,
    InvalidInput,
    Preempted,
    ResumeWarning,
    RetryLater,
    SaveWarning,
)
from holdfast.format import names
from holdfast.format import part as parts
from holdfast.format import run as runs
from holdfast.format.manifest import Manifest
from holdfast.format.part import Ancestors
from holdfast.home.skipped import Passed
from holdfast.home.writer import LiveTrainer
from holdfast.keeper import (
    Images,
    Keeper,
    KeeperConfig,
    Save,
    find_writers,
    wait_for_let_go,
    wait_for_orphans,
)
from holdfast.killpoint import kill_point
from holdfast.notice import NoticeWatcher
from holdfast.policy import Every, Keep, Meter, Overdue, Pace, single_policies
from holdfast.quantity import plural, read_bytes, read_seconds, read_step, say_bytes, say_seconds
from holdfast.ranks import RankGroup, Ranks
from holdfast.restore.resume import Restored, restore_newest
from holdfast.stage import Arena, Arenas, Plan, Stager, Staging
from holdfast.state import Captured, Load, State, catalog_of, stepping
from holdfast.state.review import refuse_snapshots
from holdfast.surroundings import tell_progress

Mark = tuple[Sequence[Passed], "tuple[int, int] | None"]  # what was passed over, and what was restored
_log = logging.getLogger(__name__)
_TOLD_WAIT_S = 0.001  # a wait for memory that is shorter is none


class Checkpointer:
    """Saves a training run without stopping it, and brings it back.

    Args:
        home: folder that holds this run's checkpoints; one run, one home.
        state: what to save: modules, optimizers, anything with `state_dict`/`load_state_dict`, tensors,
            generators, and plain values. Plain values are written back into this mapping by `restore`.
            The random number generators of python, numpy and torch are always included.
        every: when to save: steps (500), a duration ("10m"), "auto" (as often as 1 % of the time allows),
            or a policy.
        keep: how many of the newest checkpoints stay, a `Keep` policy, or None for all.
        keep_every: checkpoints whose step is a multiple of this stay too.
        local: folder on this host's fast disk, for a `home` that is slow or far. Saves are durable there
            first, and brought home in the background. Each host has its own.
        keep_local: how many of the newest checkpoints stay there.
        home_every: which saves are brought home, with `local`: as `every`, or None for all. The newest
            always is at the end, and by `wait`.
        home_bandwidth: bytes per second that each rank may send home, or as "200MB"; None for no limit.
            Without `local` a save is durable only when it is there, and holds its staging memory until then.
        home_patience: how long home may fail before `save` raises, with `local` or where home is a bucket.
            Training goes on meanwhile.
        restore_patience: how long `restore` tries again what cannot be read, before it raises. What cannot be
            read may be whole, so no older checkpoint is restored in its place.
        hold: how long the last save stays in memory for the next start on this host when this process dies;
            by default what HOLDFAST_HOLD says, else "2m".
        memory: cap of this rank's staging memory in all, in bytes or as "8GiB".
        when_full: what `save` does when no staging memory is free because earlier saves are still being
            written: "wait" or "skip". By default it waits for a disk, and skips where saves go straight to a
            bucket, which may not answer for minutes.
        signals: take SIGTERM, SIGUSR1 and SIGINT as preemption notices (in the main thread only).
        notices: where else they come from: "aws", "gcp", "azure", "file:PATH", several with commas, "none",
            or "auto" for the cloud that this machine is of; by default what HOLDFAST_NOTICES says, or auto.
        max_failures: saves that may fail in a row; one more and `save` raises. Each is a SaveWarning.
        commit_timeout: how long a keeper waits for the other ranks' parts.
        ranks_timeout: how long a rank waits for the others in `restore` and `should_save`.
        num_read_threads: parallel reads in `restore`; by default what suits the place that is read.
        share_reads: in `restore`, read what several ranks need once, and pass it on from rank to rank: for a
            home that is slower than the network between the ranks.
        rank_from: in `restore`, chooses the saved rank whose per-rank state (random numbers, data loaders) a
            rank takes, from its number, the number of ranks and the number that saved. By default a rank
            takes that of the same number, or on fewer saved ranks `rank % saved`.
        group: the ranks that save together, if they are not all of torch.distributed's process group; see
            `holdfast.ranks`.
        compile_cache: how many bytes of home may hold what torch.compile has made, so that a start on another
            machine need not compile it again; False for none. It is sent beside the training after saves.
        trust_home: whether compiled code of this home may be loaded, and so run; by default if `holdfast
            trust` or HOLDFAST_TRUST_HOMES names it.
        take_over: save even if a living process on one of these hosts saves to this home: from then on that
            one may not commit any more. By default the first save raises `Conflict` and names the process.
        quiet: print no lines about what was restored.

    Raises:
        InvalidInput: an argument or an entry of `state` cannot be used; or of `local` and `home` one is
            inside the other.
        Unsupported: a home that other processes cannot reach.

    Ranks: collective; every rank makes it with the same arguments.
    """

    def __init__(
        self,
        home: str | os.PathLike[str],
        state: MutableMapping[str, Any],
        *,
        every: int | str | datetime.timedelta | Every = 500,
        keep: int | Keep | None = 3,
        keep_every: int | None = None,
        local: str | os.PathLike[str] | None = None,
        keep_local: int = 2,
        home_every: int | str | datetime.timedelta | Every | None = None,
        home_bandwidth: int | str | None = None,
        home_patience: str | float | datetime.timedelta = "1h",
        restore_patience: str | float | datetime.timedelta = "2m",
        hold: str | float | datetime.timedelta | None = None,
        memory: int | str = "8GiB",
        when_full: str | None = None,
        signals: bool = True,
        notices: str | None = None,
        max_failures: int = 3,
        commit_timeout: str | float | datetime.timedelta = "10m",
        ranks_timeout: str | float | datetime.timedelta = "1h",
        num_read_threads: int | None = None,
        share_reads: bool = False,
        rank_from: Callable[[int, int, int], int] | None = None,
        group: RankGroup | None = None,
        compile_cache: int | str | bool = "1GiB",
        trust_home: bool | None = None,
        take_over: bool = False,
        quiet: bool = False,
    ) -> None:
        if when_full not in ("wait", "skip", None):
            raise InvalidInput(f"when_full must be 'wait' or 'skip', got {when_full!r}.")
        self._tiers = Tiers(
            home,
            local,
            keep_local=keep_local,
            home_every=home_every,
            bandwidth=home_bandwidth,
            patience=home_patience,
            restore_patience=restore_patience,
            hold=hold,
        )
        self.home = self._tiers.home
        self._compiled = self._open_compiled(compile_cache, trust_home)
        self.state = state
        self.preempted: str | None = None
        """Why the run has to stop, agreed by all ranks; None while it need not."""
        self._every = single_policies(every)
        self._keep = keep if isinstance(keep, Keep) else Keep(keep, keep_every)
        self._skip_when_full = (self._tiers.is_far and when_full is None) or when_full == "skip"
        self._max_failures = max_failures
        self._commit_timeout_s = read_seconds(commit_timeout, "commit_timeout")
        self._num_read_threads = num_read_threads
        self._share_reads = share_reads
        self._rank_from = rank_from
        self._take_over, self._quiet = take_over, quiet
        self._pid, self._calls = os.getpid(), Reentry()
        self._arenas = Arenas(read_bytes(memory, "memory"))
        world = None if group is None else (group.rank, group.world_size)
        refuse_snapshots(state)
        self._objects = State(state, world=world)
        self._ranks: RankGroup = group or Ranks(timeout_s=read_seconds(ranks_timeout, "ranks_timeout"))
        self._stager = Stager(self._objects.optimizers())
        self._meter, self._metrics, self._overdue = Meter(), Metrics(), Overdue(now_s=time.monotonic())
        self._notices = NoticeWatcher(notices)
        self._run: str | None = None
        self._keeper: Keeper | None = None
        # Of the time before the claim: events for the history, and checkpoints that were passed over.
        self._early_notes, self._marks = list[dict[str, Any]](), list[Mark]()
        # Whether `restore` was called since the last claim was given up, and what came of it.
        self._has_looked, self._restored = False, cast("Restored | None", None)
        # The last save that only other ranks had torn; the attempt, and how its history says tears are found.
        self._tear_step, self._guarantee = cast("int | None", None), cast("tuple[int, str] | None", None)
        self._in_use: dict[int, Arena] = {}
        self._plan, self._plan_key = cast("Plan | None", None), cast("object", None)
        self._ancestors, self._newest_durable = cast("Ancestors", ()), cast("int | None", None)
        self._attempt, self._pulse_step, self._closed = 0, 0, False
        # The consensus is on the newest save that every rank has.
        self._consensus, self._trial = Consensus(), Trial.of_environment()
        # Saves not yet settled, by any thread that calls `save` or `wait`; and what `restore` was asked for.
        self._saves, self._settling, self._asked = deque[Save](), threading.RLock(), dict[str, Any]()
        self._last, self._failures = cast("Save | None", None), 0
        self.num_skipped = 0
        """Saves that were skipped because no staging memory was free."""
        self.waited_for_memory_s = 0.0
        """Time that `save` has waited for staging memory, in all."""
        self._step_ended_s, self._failing_since_s = cast("float | None", None), cast("float | None", None)
        self._pace = Pace(step=0, now_s=time.monotonic(), saved_step=0, saved_s=time.monotonic())
        self._stagings: dict[int, Staging] = {}  # of the saves not yet settled, and of the last, by step
        self._has_told_end = self._has_warned_of_tear = self._has_reviewed = False
        self._position = Position(lambda: (self._stager.num_steps, self._objects.marks()))
        # An exception that is being handled all the time does not make the end of a loop disorderly.
        self._around, self._done = id(sys.exc_info()[1]), cast("runs.Done | None", None)
        self._watches_signals = signals and self._notices.watch_signals()
        self._notices.poll_clouds()

    # -- the loop --------------------------------------------------------------------------------------------

    def steps(self, total: int) -> Iterator[int]:
        """Steps of a training loop from where the run stopped, up to `total`.

        Claims the home and restores first: the newest checkpoint, or the step that `restore(step=...)` has
        restored before, with its `strict` and `rename`. Yields the number of steps completed so far: the
        loop's body makes it one more. Saves when due, and at the end, where it calls `finish`. A loop that is
        left by `break` or `return` is saved too, and is not finished; one that is left by an exception is not
        saved, since its last step may be half done. A run that has all its steps already yields nothing.

        Raises:
            InvalidInput: `total` is no whole number from 0.
            Conflict: another process saves to this home and lives; see `take_over`.
            Preempted: after a preemption notice, when the save of the agreed step is durable, unless that is
                the last step. It is a SystemExit with status 75; let it pass.

        Ranks: collective; every rank runs the same steps.
        """
        total, around = read_step(total, "steps()"), sys.exc_info()[1]
        if self._watches_signals:
            self._notices.watch_signals()
        self._begin(restores_later=True)
        step = self.restore(**self._take_asked()) or 0
        self._asked = {}
        self._pace = Pace(step=step, now_s=time.monotonic(), saved_step=step, saved_s=time.monotonic())
        self._say_what_is_left(step, total)
        self._stager.watch(self._objects.optimizers())
        while step < total:
            self._position.reach(step, is_counted=True)
            loop = looping()
            try:
                yield step
            except GeneratorExit as leaving:
                self._leave(is_orderly=is_orderly(leaving, loop, around))
                raise
            step += 1
            if self.should_save(step):
                self.save(step)
            if self.preempted and step < total:  # else it is done, and has nothing to come back for
                self._stop(step)
        self.finish(step)

    def _take_asked(self) -> dict[str, Any]:
        """Return the arguments of a `restore` after which nothing was saved; its choice of a step counts."""
        return self._asked if self._last is None else {}

    def _leave(self, *, is_orderly: bool | None) -> None:
        """Save at the end of a loop that was left early; None: `close` decides whether it was in order."""
        if self._closed or os.getpid() != self._pid:
            return
        self._notices.release_signals()
        if is_orderly is None:
            return
        try:
            with self._calls.guard("the save at the end of the loop"):
                if is_orderly and (save := self._save_rest()) is not None:
                    save.wait_staged()  # the process may end at once
        except HoldfastError as error:  # an error raised here would be lost with the generator
            warn(f"The last steps of the loop were not saved: {error}", SaveWarning)
        self._position.clear()

    def _save_rest(self) -> Save | None:
        """Save what training has done since the last save, if it is known which step that is."""
        newest = self._last.step if self._last is not None else self._base_step() or 0
        step = self._position.step_now()
        if step is None and self._position.step is not None:
            self._say(
                f"training has gone on after step {self._position.step}, and up to which step is not known; "
                f"the newest save is that of step {newest}. Call finish(step) to save the end"
            )
        if step is None or (step <= newest and not self._can_repeat(step)):
            return None
        return self._save(step, must=True)

    def _can_repeat(self, step: int) -> bool:
        """True if the last save was torn, is of `step`, and can be made again under the same number."""
        self._stager.wait()
        is_last = self._last is not None and self._last.step == step
        return is_last and self._must_repeat() and self._ranks.world_size == 1

    def finish(self, step: int | None = None) -> None:
        """Save the last step, wait until it is durable, and mark the run as finished.

        `steps` calls it at its end. A loop of your own calls it once, after its last step.

        Args:
            step: optimizer steps completed; by default the newest that `should_save` was asked about.

        Raises:
            InvalidInput: `step` is no whole number from 0; or it is not given, and not known.
            HoldfastError: the save failed.

        Ranks: not collective, but waits for every rank's parts; every rank calls it.
        Blocks: until the newest save is durable in home.
        """
        self._check_process()
        with self._calls.guard("finish()"):
            step = self._last_step() if step is None else read_step(step, "finish()")
            self._stager.wait()  # a save that turns out to be torn is made again
            if not self._is_saved(step) and step != self._base_step():
                self._save(step, must=True)
            self._wait()
            self._note_end("finished")
            if self._done is None or self._done.step != step:
                self._begin()  # who only looked marks nothing
            self._mark_done(step)
            self._position.clear()
            self._notices.release_signals()

    def _last_step(self) -> int:
        """Return the step that the state is of.

        Raises:
            InvalidInput: it is not known.
        """
        step = self._position.step_now()
        if step is None and self._position.step is None:
            step = self._last.step if self._last is not None else self._base_step()
        if step is None:
            message = (
                "finish(): the last step is not known, since training has gone on after the newest call of "
                "should_save(), or never called it. Nothing was done. Write finish(step)."
            )
            raise InvalidInput(message)
        return step

    def should_save(self, step: int) -> bool:
        """True if a checkpoint of `step` should be saved now: due by policy, or a preemption notice came.

        After a notice `preempted` says why, on all ranks at the same step.

        Args:
            step: optimizer steps completed.

        Raises:
            InvalidInput: `step` is no whole number from 0, or a call is under way in this thread.

        Ranks: collective; every rank calls it after every step.
        Blocks: hardly; the ranks exchange two flags beside the step.
        """
        self._check_process()
        with self._calls.guard("should_save()"):
            step = read_step(step, "should_save()")
            is_due = self._ask_if_due(step)
            if self._trial is not None:
                is_due = self._trial.reach(step, is_due=is_due, wait=self._wait)
            self._position.reach(step)
            return is_due

    def _ask_if_due(self, step: int) -> bool:
        self._metrics.num_done = step
        now_s = time.monotonic()
        if self._step_ended_s is not None:
            self._meter.step(now_s - self._step_ended_s, in_flight=bool(self._saves))
        self._settle_durable()
        self._warn_if_overdue()
        pace = Pace(
            step,
            now_s,
            self._pace.saved_step,
            self._pace.saved_s,
            self._meter.save_cost_s,
            self._meter.durable_s,
        )
        due_here = any(policy.due(pace) for policy in self._every if not policy.timed)
        is_first = self._ranks.rank == 0
        timed = is_first and any(policy.due(pace) for policy in self._every if policy.timed)
        timed_home = is_first and self._tiers.is_due_by_clock(step)
        advised = self._notices.pop_rebalance() is not None  # a machine that may go: one save, on all ranks
        newest_here, lacks_proposed = self._consensus.say()
        flags = (
            self._notices.reason is not None,
            timed or advised,
            timed_home,
            lacks_proposed,
            self._must_repeat(),
        )
        heard, lowest = self._ranks.pulse(step, flags, newest_here)
        noticed, timed, timed_home, is_lacked, repeated = heard
        self._hear_of_saves(lowest, is_lacked=is_lacked)
        said_step, self._pulse_step = (step if self._ranks.world_size == 1 else self._pulse_step), step
        has_saved_since = self._pace.saved_step >= said_step
        timed, repeated = timed and not has_saved_since, repeated and not has_saved_since
        self._tiers.hear(is_due=timed_home, said_step=said_step)
        if repeated:
            self._learn_of_tear(self._last)
        if noticed and self.preempted is None:
            self.preempted = self._notices.reason or "another rank's notice"
        if self._plan is None:
            plan, captured = self._prepare_in_background()
            self._stager.settle_in_background(plan, captured.tensors)
        self._step_ended_s = time.monotonic()
        already = self._last is not None and self._last.step == step
        return (due_here or timed or noticed or repeated) and not already

    def _hear_of_saves(self, lowest: int, *, is_lacked: bool) -> None:
        """Let the keeper know when all ranks have a save in local folders of which none has all."""
        step = self._consensus.hear(lowest, is_lacked=is_lacked)
        if step is not None and self._keeper is not None and self._keeper.terms.is_scattered:
            self._keeper.tell_complete(self._attempt, step)

    def record(self, step: int | None = None, /, **values: SupportsFloat) -> None:
        """Put numbers of a step into the history, such as `record(loss=loss, lr=lr)`; those of rank 0 count.

        The report draws them as one curve, whatever interrupted the training. A tensor on a device is read
        when its number is there; no step waits for it.

        Args:
            step: optimizer steps completed; by default the one that is being made.
            values: a number, or a tensor of one element, by name. Of a name and step told twice the last
                counts.

        Raises:
            InvalidInput: a value is no number, a name cannot be one, or there are too many; or `step` is no
                whole number from 0.

        Ranks: not collective.
        Blocks: no. What cannot be written is told as a SaveWarning, and training goes on.
        """
        self._check_process()
        with self._calls.guard("record()"):
            step = self._metrics.num_done + 1 if step is None else read_step(step, "record()")
            if self._trial is not None:
                self._trial.note("recorded", {name: repr(float(one)) for name, one in values.items()}, step)
            if self._ranks.rank == 0:
                self._metrics.add(step, values)
                if self._keeper is not None:
                    self._metrics.tell_if_due(self._keeper.tell_metrics)

    def _stop(self, step: int) -> None:
        """End a preempted run: everything durable, then SystemExit."""
        with self._calls.guard("the save after a preemption notice"):
            self._stager.wait()  # a save that turns out to be torn is made again
            if not self._is_saved(step):
                self._save(step, must=True)
            self._wait()
        reason = self.preempted or "notice"
        self._note_end(f"preempted ({reason})")
        self._say(f"preempted ({reason}); step {step} is durable")
        self.close()
        if self._ranks.world_size > 1:  # gloo's threads may abort this rank, and it would look like a crash
            leave_at_exit(PREEMPTED_STATUS)
        raise Preempted(step, reason)

    def _is_saved(self, step: int) -> bool:
        """True if the last save is of `step` and has not failed."""
        return self._last is not None and self._last.step == step and self._last.failed is None

    # -- saving ----------------------------------------------------------------------------------------------

    def save(self, step: int, *, to_home: bool = False) -> Save:
        """Save the state as it is now, as the checkpoint of `step`.

        Returns when everything is copied that may change before the next optimizer step. Parameters and
        optimizer state are copied beside what follows; the optimizer's next `step()` waits for that copy.

        Args:
            step: optimizer steps completed; more than at the save before.
            to_home: bring it home whether or not `home_every` is due; alike on every rank.

        Raises:
            InvalidInput: a value that cannot be saved, named with its key path; or `step` is no whole number
                from 0, or not new; or the home holds checkpoints and `restore` was not called; or a call is
                under way in this thread, which a signal handler has interrupted.
            Conflict: a newer attempt has taken over the home; or, at the first save, another process saves to
                it and lives, or has committed a checkpoint since `restore` looked.
            Corrupt: at the first save: there are signs of checkpoints that are lost, so training would begin
                from zero unnoticed.
            RetryLater: more than `max_failures` saves have failed in a row.

        Ranks: every rank calls it for the same step. Not collective, unless it may skip (`when_full`) or
            nothing was restored or saved before.
        Blocks: for the copy of what no optimizer owns, and while no staging memory is free.
        """
        self._check_process()
        with self._calls.guard("save()", alone=True):
            step = read_step(step, "save()")
            if (optimizer := stepping()) is not None:
                raise InvalidInput(
                    f"save({step}) was called in the middle of {optimizer}.step(), by a signal handler or by "
                    "the step itself, when only some parameters have been updated. Nothing was saved. Save "
                    "between two steps: let the handler set a flag that the loop checks.",
                    step=step,
                )
            if self._trial is not None:
                self._trial.begin_save(step, wait=self._wait)
            save = self._save(step, must=False, to_home=to_home)
            self._position.follow(step)
            if self._trial is not None and self._trial.is_last(step):
                self._end_trial()
            return save

    def _end_trial(self) -> NoReturn:
        self._wait()
        self._let_go(None, goodbye=True)
        leave(0)

    def forget(self) -> None:
        """Let go of the memory of the objects saved last, which else stays taken until the next save.

        For states that are made for one save and taken out of the mapping after it.
        """
        self._objects.forget()

    def send_home(self, step: int) -> None:
        """Have an older save of this attempt brought home from `local`, in the background.

        Ranks: every rank calls it; not collective.
        """
        step = read_step(step, "send_home()")
        if self._keeper is not None and self._tiers.local is not None:
            self._keeper.drain_other(self._attempt, step)

    def _save(self, step: int, *, must: bool, to_home: bool = False) -> Save:
        """Save; with `must` a save that there is no room for waits, whatever `when_full` says."""
        began, waited_before_s = time.perf_counter(), self.waited_for_memory_s
        self._check_process()
        self._stager.check_thread()
        self._surface()
        if self._last is not None and step <= self._last.step:
            if step == self._last.step and self._last.failed is None:
                return self._last
            if step == self._last.step and self._ranks.world_size > 1:
                # Others have saved this step, perhaps before something was written that is in it now.
                raise InvalidInput(
                    f"The save of step {step} has failed on rank {self._ranks.rank}, and cannot be made "
                    "again under the same number: the other ranks have saved that step as it was then. "
                    f"Earlier checkpoints stand. Save a later step. It failed because: {self._last.failed}",
                    step=step,
                    rank=self._ranks.rank,
                )
            if step < self._last.step:
                raise InvalidInput(
                    f"Step {step} comes after step {self._last.step} was saved. To go back, call "
                    "restore(step=...) first.",
                    step=step,
                )
        keeper = self._begin()
        save = Save(step)
        to_home = self._tiers.goes_home(step, must=must or to_home, alone=self._ranks.world_size == 1)
        captured = self._objects.capture()
        plan = self._plan_for(captured)
        draft = self._draft(step, plan, captured)
        arena = self._acquire(plan, may_skip=self._skip_when_full and not must)
        if arena is None:
            return self._skip(save)
        self._stager.watch(self._objects.optimizers())

        def hand_over(staging: Staging) -> None:
            self._hand_over(staging, save, plan, draft, keeper, to_home=to_home)

        self._metrics.num_done = step
        save.num_bytes = plan.num_bytes
        try:
            staging = self._stager.stage(plan, captured.tensors, arena, then=hand_over, at_once=must)
        except BaseException:
            self._release(arena.number)
            raise
        with self._settling:
            unsettled = {one.step for one in self._saves}
            self._stagings = {n: one for n, one in self._stagings.items() if n in unsettled} | {step: staging}
            self._overdue.begin(time.monotonic())
            self._saves.append(save)
            self._last = save
        save.blocked_s = time.perf_counter() - began
        waited_s = self.waited_for_memory_s - waited_before_s
        detail = f"waited {waited_s:.3f} s for memory" if waited_s >= _TOLD_WAIT_S else ""
        self._unmark_done()
        if not self._has_reviewed:
            self._has_reviewed = True
            self._review()
        self._note_guarantee(keeper, plan)
        keeper.note("saved", step=step, num_bytes=save.num_bytes, seconds=save.blocked_s, detail=detail)
        now_s = self._step_ended_s = time.monotonic()
        self._pace = Pace(step, now_s, saved_step=step, saved_s=now_s)
        return save

    def _note_guarantee(self, keeper: Keeper, plan: Plan) -> None:
        """Record by which means torn copies are found, at the first save and when that changes."""
        guarantee = keeper.terms.attempt, self._stager.guarantee(plan)
        if guarantee == self._guarantee:
            return
        self._guarantee = guarantee
        keeper.note("tear-check", step=None, detail=guarantee[1])
        _log.info("rank %d of %s: torn copies are found by %s", self._ranks.rank, self.home, guarantee[1])

    def _review(self) -> None:
        """Warn of what will not resume exactly, and in a new run offer the check that would show it."""
        doubts = self._objects.review()
        if self._trial is not None:
            self._trial.note("doubts", [asdict(doubt) for doubt in doubts])
            return
        for doubt in doubts:
            warn(f"The run will not resume exactly: {doubt.text}", ResumeWarning)
        if self._base_step() is None:
            name = Path(sys.argv[0]).name
            script = name if name.endswith(".py") else "train.py"
            self._say(f"to see whether resuming is exact: holdfast check {script} [ARGS]")

    def _plan_for(self, captured: Captured) -> Plan:
        if self._plan is None or captured.structure is not self._plan_key:
            self._plan = Plan.make(
                captured.tensors,
                catalog=catalog_of(captured),
                per_rank=captured.per_rank,
                owned=captured.owned,
                rank=self._ranks.rank,
            )
            self._plan_key = captured.structure
        return self._plan

    def _draft(self, step: int, plan: Plan, captured: Captured) -> bytes:
        return parts.draft(
            run=self._run or "",
            step=step,
            attempt=self._attempt,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            ancestors=self._ancestors,
            values=captured.values,
            own=plan.own,
            starts=plan.shared_starts,
            catalog=plan.catalog,
        )

    def _acquire(self, plan: Plan, *, may_skip: bool) -> Arena | None:
        num_bytes = plan.arena_bytes
        if may_skip and not all(self._ranks.gather(self._arenas.has_room(num_bytes))):
            return None  # all ranks skip together: a checkpoint of some ranks can never be complete
        began = time.perf_counter()
        arena = self._arenas.acquire(num_bytes)
        assert arena is not None
        self.waited_for_memory_s += time.perf_counter() - began
        self._in_use[arena.number] = arena
        return arena

    def _skip(self, save: Save) -> Save:
        self.num_skipped += 1
        save.mark_skipped()
        message = (
            f"step {save.step} was skipped: earlier saves still hold all staging "
            f"memory ({self.num_skipped} so far)"
        )
        warn(f"{message}. Raise memory=, or save less often.", SaveWarning)
        assert self._keeper is not None
        self._keeper.note("skipped", step=save.step, detail=message)
        return save

    def _hand_over(
        self, staging: Staging, save: Save, plan: Plan, draft: bytes, keeper: Keeper, *, to_home: bool
    ) -> None:
        """Runs in the staging thread when the copy is complete."""
        error = staging.error
        if staging.torn:
            error = _torn(save.step, staging.changed)
        elif error is not None and not isinstance(error, HoldfastError):
            error = RetryLater(f"The copy of step {save.step} failed: {error!r}. Earlier checkpoints stand.")
        if error is not None:
            keeper.note("dropped", step=save.step, detail=str(error))
            keeper.drop(save.step, str(error))
            self._release(staging.arena.number)
            save.mark_failed(error)  # last: whoever waits for it may save again at once
            return
        kill_point("trainer.staged")
        self._metrics.tell(keeper.tell_metrics, upto=save.step)  # first: then they are there if the save is
        try:
            keeper.submit(
                save,
                arena=staging.arena.number,
                arena_fd=staging.arena.fd,
                arenas=self._arenas.numbers(),
                images=_images(plan, staging),
                draft=draft,
                to_home=to_home,
            )
        except OSError as error:
            self._release(staging.arena.number)
            message = f"Step {save.step} could not be handed to the keeper: {error}."
            keeper.drop(save.step, message)
            save.mark_failed(RetryLater(message, step=save.step))
            return
        kill_point("trainer.handed")
        keeper.note("staged", step=save.step, num_bytes=plan.num_bytes, seconds=save.staged_s or 0.0)

    def _release(self, number: int) -> None:
        arena = self._in_use.pop(number, None)
        if arena is not None:
            self._arenas.release(arena)

    def prepare(self) -> None:
        """Make the staging memory ready now, so that the first save is as quick as the others.

        The loop of `steps` does this by itself, in the background, after its first step.

        Blocks: for about 1 s per GB of memory that the machine has not touched before, and as long to put
            the state into huge pages.
        """
        with self._calls.guard("prepare()"):
            plan, captured = self._prepare_in_background()
            self._arenas.wait_prepared()
            self._stager.settle(plan, captured.tensors)

    def _prepare_in_background(self) -> tuple[Plan, Captured]:
        captured = self._objects.capture()
        plan = self._plan_for(captured)
        self._stager.watch(self._objects.optimizers())
        self._arenas.prepare(plan.arena_bytes, then=plan.views)
        return plan, captured

    @property
    def waited_for_copy_s(self) -> float:
        """Time that optimizers have waited in `step()` for a copy under way, in all."""
        return self._stager.waited_s

    # -- what became of saves --------------------------------------------------------------------------------

    def _settle_durable(self) -> None:
        """Let go of the saves that have become durable, and learn what they cost."""
        with self._settling:
            for save in [save for save in self._saves if save.durable]:
                self._settle(save)

    def _settle(self, save: Save) -> None:
        self._saves.remove(save)
        self._failures, self._failing_since_s = 0, None
        self._overdue.succeed(time.monotonic())
        self._newest_durable = save.step
        self._consensus.add(save.step)
        self._tell_progress(save.step)
        if self._compiled is not None:
            self._compiled.send_soon()
        self._meter.saved(blocked_s=save.blocked_s, durable_s=save.durable_s or 0.0)

    def _surface(self) -> None:
        """Raise or warn about what has gone wrong in the background since the last call."""
        with self._settling:
            self._surface_all()

    def _surface_all(self) -> None:
        keeper = self._keeper
        if keeper is not None:
            while keeper.problems:
                warn(keeper.problems.pop(0), SaveWarning)
            if keeper.fenced is not None:
                raise keeper.fenced
            if keeper.home_lost is not None:
                raise keeper.home_lost
        if self._compiled is not None:
            warn_of_problems(self._compiled)
        self._settle_durable()
        for save in [save for save in self._saves if save.failed is not None]:
            self._surface_failed(save)
        self._warn_if_overdue()

    def _surface_failed(self, save: Save) -> None:
        assert save.failed is not None
        is_torn = self._is_torn(save)
        self._saves.remove(save)
        staging = self._stagings.get(save.step)
        by_keeper = is_torn and staging is not None and not staging.torn  # else the copy has counted it
        self._stager.distrust_frozen(for_long=by_keeper)
        if self._ranks.world_size > 1 and isinstance(save.failed, InvalidInput):
            self._learn_of_tear(save)  # also in loops that never call should_save()
        self._failures += 1
        self._overdue.fail()
        if self._failing_since_s is None:
            self._failing_since_s = time.monotonic()
        if self._is_too_much(save.failed, self._failing_since_s):
            raise save.failed
        if not (is_torn and self._has_warned_of_tear):  # later ones are in the history
            warn(str(save.failed), SaveWarning)
        self._has_warned_of_tear |= is_torn

    def _is_torn(self, save: Save) -> bool:
        """True if a failed save was torn: found by its copy, or by the keeper in frozen tensors."""
        staging = self._stagings.get(save.step)
        if staging is None or save.failed is None:
            return False
        return staging.torn or (staging.is_frozen_unchanged and isinstance(save.failed, InvalidInput))

    def _must_repeat(self) -> bool:
        """True if the last save was torn: the next step is saved in its place."""
        return self._last is not None and self._is_torn(self._last)

    def _learn_of_tear(self, save: Save | None) -> None:
        """Copy everything at once for some saves, if one was torn on another rank only."""
        if save is not None and save.step != self._tear_step and not self._is_torn(save):
            self._tear_step = save.step
            self._stager.repeats.note_torn_elsewhere()

    def _warn_if_overdue(self) -> None:
        """Warn that no save has succeeded for long, and again each time that this takes twice as long."""
        since_s = self._overdue.look(time.monotonic())
        if since_s is None:
            return
        newest = self.latest()
        stands = (
            f"The newest checkpoint is of step {newest}" if newest is not None else "There is no checkpoint"
        )
        warn(
            f"NO SAVE HAS SUCCEEDED for {say_seconds(since_s)}, in which {self._overdue.num_failed} failed. "
            f"{stands}; a crash now would lose everything since. The reasons are in "
            f"`holdfast history {self.home}`.",
            SaveWarning,
        )

    def _is_too_much(self, error: HoldfastError, failing_since_s: float) -> bool:
        """True if training shall not go on without saves any longer."""
        if isinstance(error, Denied) and self._newest_durable is None:
            return True  # it never worked: credentials or permissions are wrong, and waiting mends nothing
        if self._tiers.is_far and isinstance(error, (Denied, RetryLater)):  # it may come back
            return time.monotonic() - failing_since_s > self._tiers.terms["patience_s"]
        return self._failures > self._max_failures

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until everything saved so far is durable, and the newest save is in home.

        Raises:
            HoldfastError: the newest save failed.
            RetryLater: not within `timeout_s`.

        Ranks: not collective, but waits for every rank's parts.
        Blocks: until the keepers are done.
        """
        self._check_process()
        with self._calls.guard("wait()"):
            self._wait(timeout_s)

    def _wait(self, timeout_s: float | None = None) -> None:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._settling:
            unsettled = list(self._saves)
        for save in unsettled:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            try:
                save.wait_durable(left)
            except HoldfastError:
                if save.failed is None:
                    raise  # not yet durable, but on its way
                with self._settling:
                    if save is self._last and save in self._saves:
                        self._saves.remove(save)  # raised now, so that no later call raises it again
                        raise
        self._bring_home(deadline)
        self._surface()

    def _bring_home(self, deadline: float | None) -> None:
        """Wait until the newest save is in home, also if it was not due there."""
        save, keeper = self._last, self._keeper
        if self._tiers.local is None or save is None or keeper is None or save.failed is not None:
            return
        keeper.drain(save)
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            save.wait_home(left)
        except RetryLater as error:
            if keeper.home_lost is not None:
                raise
            message = (
                f"Step {save.step} is complete in {self._tiers.local}, and not yet in {self.home}: {error}"
            )
            raise RetryLater(message, step=save.step) from error

    def _tell_progress(self, step: int) -> None:
        """Tell the job that this training is part of, if any, how far its checkpoints are."""
        if self._ranks.rank == 0:
            tell_progress(self.home, step)

    def latest(self) -> int | None:
        """Step of the newest save of this attempt that is durable, else the step that was restored."""
        self._settle_durable()
        return self._newest_durable if self._newest_durable is not None else self._base_step()

    def _base_step(self) -> int | None:
        """Step that this attempt was restored from; None if it began from nothing."""
        return self._ancestors[-1][1] if self._ancestors else None

    # -- beginning -------------------------------------------------------------------------------------------

    def _begin(self, *, restores_later: bool = False) -> Keeper:
        """Claim an attempt and start its keeper, once.

        Args:
            restores_later: the home is claimed before it is looked at, so that nothing can be committed in
                between.

        Ranks: collective, the first time.
        """
        if self._keeper is not None:
            return self._keeper
        all_here, local_ranks = self._meet()
        claim = self._claim(local_ranks, restores_later=restores_later)
        self._run, self._attempt = claim.run, claim.number
        terms = KeeperConfig(
            run=claim.run,
            attempt=claim.number,
            claim=runs.document(claim).decode(),
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            all_ranks_here=all_here,
            local_ranks=local_ranks,
            keep_last=self._keep.last,
            keep_every=self._keep.every,
            commit_timeout_s=self._commit_timeout_s,
            linger_s=min(30.0, self._commit_timeout_s),
            **self._tiers.terms,
        )
        self._keeper = keeper = Keeper(terms, released=self._release)
        for note in self._early_notes:
            self._keeper.note(**note)
        self._early_notes.clear()
        if self._compiled is not None:
            begin_sending(self._compiled, self._ranks, attempt=self._attempt)
        everyone = range(self._ranks.world_size)
        self._ranks.first_of(everyone, lambda: self._settle_marks(keeper))
        self._settle_restored(self._keeper)
        return self._keeper

    def _meet(self) -> tuple[bool, tuple[int, ...]]:
        """Wait for what is left of earlier attempts, agree on what is saved, and bring compiled code.

        Returns:
            Whether all ranks are on this host, and which share this one's local folder.

        Ranks: collective.
        """
        wait_for_let_go(self.home, timeout_s=self._commit_timeout_s)
        wait_for_orphans(self.home, timeout_s=self._commit_timeout_s, say=self._say)
        self._objects.agree(self._ranks.gather)
        self._ranks.gather(None)  # every host's keepers are done before rank 0 looks at the home
        if self._compiled is not None:
            bring(self._compiled, self._ranks, note=self._note, say=self._say)
            warn_of_problems(self._compiled)
        return self._ranks.all_here(), self._ranks.beside(self._tiers.local or "")

    def _note(self, event: str, **facts: Any) -> None:
        """Write an event into the history, now or when there is a keeper."""
        if self._keeper is None:
            self._early_notes.append({"event": event, **facts})
        else:
            self._keeper.note(event, **facts)

    def _claim(self, local_ranks: tuple[int, ...], *, restores_later: bool) -> runs.Attempt:
        """Claim the next attempt for all ranks.

        Ranks: collective.
        """
        is_fresh = not (restores_later or self._has_looked)
        writers = [] if self._take_over else find_writers(self.home)
        host = socket.gethostname()
        rows = self._ranks.gather([(host, one.attempt, one.rank, one.pid) for one in writers])
        above = max(self._ranks.gather(self._newest_local_number()))
        base = None if restores_later else self._base()

        def claim() -> bytes:
            if is_fresh:
                self._tiers.refuse_unrestored()
            made = self._tiers.claim(
                world_size=self._ranks.world_size,
                base=base,
                above=above,
                writers=[(host, LiveTrainer(*facts)) for its_rows in rows for host, *facts in its_rows],
            )
            return runs.document(made)

        document = self._ranks.first_of({0}, claim)
        assert document is not None
        made = runs.parse(runs.Attempt, document, "the claim")
        if base is not None:  # once more: from its claim on, nobody else commits
            self._ranks.first_of({0}, lambda: self._tiers.check_fresh(base))
        if self._tiers.local is not None:
            firsts = {ranks[0] for ranks in self._ranks.gather(local_ranks)}
            to_join = firsts if len(firsts) > 1 else ()  # alone, rank 0 has done it with its claim
            self._ranks.first_of(to_join, lambda: self._tiers.join(made, fresh=is_fresh))
        return made

    def _newest_local_number(self) -> int:
        """Return the highest attempt number in this rank's local folder, damaged or not."""
        return self._tiers.newest_local_number()

    def _base(self) -> Base:
        if self._restored is None:
            return Base(None)
        return Base((self._restored.attempt, self._restored.step), frozenset(self._restored.seen))

    def _open_compiled(self, limit: int | str | bool, trust_home: bool | None) -> CompileCache | None:
        if limit is False:
            return None
        limit_bytes = read_bytes("1GiB" if limit is True else limit, "compile_cache")

        def told(sent: Sent, seconds: float) -> None:
            if self._keeper is not None:
                self._keeper.note(
                    "compiled-sent",
                    step=None,
                    num_bytes=sent.num_bytes,
                    seconds=seconds,
                    detail=f"{plural(sent.num_files, 'file')}",
                    tier="home",
                )

        return CompileCache(
            self._tiers.home_store, self.home, limit_bytes=limit_bytes, trust_home=trust_home, told=told
        )

    # -- restoring -------------------------------------------------------------------------------------------

    def restore(
        self,
        step: int | None = None,
        *,
        strict: bool = True,
        only: Collection[str] | None = None,
        rename: Mapping[str, str] | Callable[[str], str] | None = None,
    ) -> int | None:
        """Bring the newest checkpoint that verifies into the live objects.

        A loop of `steps` that follows trains from the same step. This only reads: it may be called beside a
        training that saves to the same home. The first `save`
        claims the home, as `steps` does before it restores.

        Args:
            step: restore this step and no other.
            strict: refuse a checkpoint whose names differ from the state's.
            only: top-level keys of the state to restore; the others stay as they are.
            rename: saved names to names in the state: a map of prefixes, or a function.

        Returns:
            The step restored, or None if the home holds no checkpoint.

        Raises:
            Corrupt: there are checkpoints, but none of them verifies, or there are signs that there were
                some. Nothing was restored for use.
            RetryLater: the newest checkpoint, or that of `step`, could not be read for `restore_patience`.
            Denied: a store refuses access.
            InvalidInput: the checkpoint does not fit the state; says what differs.
            NotFound: no checkpoint of `step`.

        Ranks: collective; all ranks restore the same checkpoint.
        Blocks: until the state is restored.
        """
        self._check_process()
        with self._calls.guard("restore()", alone=True):
            step = None if step is None else read_step(step, "restore()")
            found = self._restore(step, strict=strict, only=only, rename=rename)
            self._asked = {"step": step, "strict": strict, "rename": rename}  # `steps` restores it again
            return found

    def _restore(
        self,
        step: int | None,
        *,
        strict: bool,
        only: Collection[str] | None,
        rename: Mapping[str, str] | Callable[[str], str] | None,
    ) -> int | None:
        if self._last is not None:
            self._end_attempt()  # what is saved after going back must not mix with what was saved before
        _, local_ranks = self._meet()
        if self._keeper is not None:
            self._metrics.tell(self._keeper.tell_metrics)  # before it is told that training goes back
        elif self._tiers.local is not None:
            self._ranks.first_of(range(self._ranks.world_size), self._tiers.check_one_run)
        is_scattered = self._tiers.local is not None and 0 < len(local_ranks) < self._ranks.world_size

        def load(manifest: Manifest, values: Sequence[Mapping[str, Any]]) -> Load:
            own_rank = manifest.world_size == self._ranks.world_size
            own, *others = values
            return self._objects.load(
                manifest.tensors,
                manifest.tied,
                own,
                others=others,
                strict=strict,
                only=only,
                rename=rename,
                own_rank=own_rank,
            )

        def mark(passed: Sequence[Passed], restored: tuple[int, int] | None) -> None:
            if restored is None or self._keeper is not None:
                # Without a claim too where nothing was restored: the next start may be another process.
                self._mark(passed, restored, is_scattered=is_scattered)
            else:
                self._marks.append((passed, restored))

        with self._tiers.reading() as store:
            found = restore_newest(
                store,
                load,
                rank=self._ranks.rank,
                world_size=self._ranks.world_size,
                group=self._ranks,
                step=step,
                num_threads=self._num_read_threads,
                share_reads=self._share_reads,
                rank_from=self._rank_from,
                own_local=self._tiers.local_store if is_scattered else None,
                may_commit=self._keeper is not None,
                say=self._say,
                patience_s=self._tiers.restore_patience_s,
                mark=mark,
            )
        self._has_looked, self._restored = True, found
        if self._keeper is not None:
            self._settle_restored(self._keeper)
        if found is None:
            return None
        self._say_restored(found)
        self._ancestors = (*found.ancestors, (found.attempt, found.step))
        self._plan = None
        self._metrics.num_done = found.step
        if self._trial is not None:
            self._trial.note("restored", found.step)
        self._pace = Pace(found.step, time.monotonic(), saved_step=found.step, saved_s=time.monotonic())
        self._tell_progress(found.step)
        return found.step

    def _settle_marks(self, keeper: Keeper) -> None:
        """Note in the home what was passed over before the claim, so that retention keeps it."""
        while self._marks:
            self._mark(*self._marks[0], is_scattered=keeper.terms.is_scattered)
            self._marks.pop(0)

    def _mark(
        self, passed: Sequence[Passed], restored: tuple[int, int] | None, *, is_scattered: bool
    ) -> None:
        self._tiers.mark(passed, restored, run=self._run, rank=self._ranks.rank, is_scattered=is_scattered)

    def _settle_restored(self, keeper: Keeper) -> None:
        """Record what this attempt continues, and finish what only a writer may finish."""
        found = self._restored
        if self._has_looked:
            self._tiers.end_held()
        if found is None:
            return
        finished = found.finished
        if self._ranks.rank == 0:
            finished = (*finished, *self._tiers.finish_commits(keeper.terms.run, found.whole))
            for step, attempt, url in finished:
                detail = f"attempt {attempt}, which fell before it could write the manifest"
                keeper.note("committed", step=step, detail=detail, tier=self._tiers.name_of({url: 1}))
        if self._tiers.local is not None:
            keeper.drain_other(found.attempt, found.step)  # its own attempt may not have come to that
        if keeper.terms.is_scattered:
            keeper.tell_complete(found.attempt, found.step)
        keeper.note_restored(
            step=found.step,
            num_bytes=found.num_bytes,
            seconds=found.seconds,
            detail="; ".join((f"attempt {found.attempt}", *_passed_over(found), *found.mended)),
            tier=self._tiers.name_of(found.sources),
        )

    def _say_restored(self, found: Restored) -> None:
        for line in (*_passed_over(found), *found.mended):
            self._say(line)
        rate = f"{say_bytes(found.num_bytes)} in {say_seconds(found.seconds)}"
        where = f"from {self._tiers.say_sources(found.sources)} ({rate}, verified)"
        self._done = self._read_done()
        if self._done is not None and self._done.step == found.step:
            self._say(f"this run was finished at step {found.step}; restored that step {where}")
        else:
            self._say(f"restored step {found.step} {where}")

    def _say_what_is_left(self, step: int, total: int) -> None:
        is_finished = self._done is not None and self._done.step == step
        if step and step >= total:
            self._say(
                f"all {total} steps are done, so nothing is trained; to train on, raise the total: "
                f"steps({total}) asks for no more"
            )
        elif is_finished:
            self._say(f"training continues from step {step} to step {total}")

    def _note_end(self, how: str) -> None:
        """Have the history tell how this attempt ends; the first word counts."""
        if self._keeper is None:
            return
        self._metrics.tell(self._keeper.tell_metrics)
        if not self._has_told_end:
            self._has_told_end = True
            self._keeper.note("ended", step=self._pace.step, detail=how)

    def _end_attempt(self) -> None:
        with contextlib.suppress(HoldfastError):
            self._wait()  # a failed save does not matter any more: we are going back
        self._stager.wait()
        if self._keeper is not None:
            self._note_end("went back")
            self._keeper.close(goodbye=True)
        self._has_told_end = False
        self._keeper, self._last, self._ancestors, self._newest_durable = None, None, (), None
        self._restored = None
        self._consensus = Consensus()
        self._saves.clear()

    def _read_done(self) -> runs.Done | None:
        """Return the marker of a finished run, on rank 0; None if there is none that can be read."""
        if self._ranks.rank != 0:
            return None
        try:
            return runs.parse(runs.Done, self._tiers.home_store.get(names.DONE), names.DONE)
        except HoldfastError:  # it only chooses a line of text; `finish` writes it anew
            return None

    def _unmark_done(self) -> None:
        """Delete the marker of a finished run that is trained on."""
        if self._done is not None:
            self._tiers.home_store.delete(names.DONE)
            self._done = None

    def _mark_done(self, step: int) -> None:
        """Write the durable word that the run has finished; an exit status alone is not to be trusted."""
        if self._ranks.rank == 0 and (self._done is None or self._done.step != step):
            done = runs.Done(self._run or "", self._attempt, step, finished_unix_s=time.time())
            self._tiers.home_store.put(names.DONE, runs.document(done))

    # -- ending ----------------------------------------------------------------------------------------------

    def close(self, timeout_s: float | None = None) -> None:
        """Save the last step, wait until everything saved is durable, and let the keeper end.

        The last step is saved if `should_save` was asked about it and training has not gone on since; not
        while an exception is being handled, and not after a loop over `steps` that an exception has ended.

        Raises:
            HoldfastError: the newest save failed.
            RetryLater: not durable within `timeout_s`; the keeper goes on by itself.

        Ranks: collective; no rank leaves while another still needs it.
        Blocks: until the keeper has ended, at most `timeout_s`, and until every rank has called it.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._end(timeout_s, is_orderly=id(sys.exc_info()[1]) == self._around)

    def _end(self, timeout_s: float | None, *, is_orderly: bool) -> None:
        with self._calls.guard("close()"):
            self._close(timeout_s, is_orderly=is_orderly)

    def _close(self, timeout_s: float | None, *, is_orderly: bool) -> None:
        try:
            if is_orderly:
                self._save_rest()
            self._stager.wait()
            self._wait(timeout_s)
            self._note_end("closed")
            self._ranks.part()
        except BaseException:
            self._let_go(timeout_s, goodbye=False)
            raise
        self._let_go(timeout_s, goodbye=True)

    def _let_go(self, timeout_s: float | None, *, goodbye: bool) -> None:
        self._closed = True
        self._notices.close()
        self._stager.close()
        if self._compiled is not None:
            self._compiled.close(min(CLOSE_LIMIT_S, CLOSE_LIMIT_S if timeout_s is None else timeout_s))
        if self._keeper is not None:
            self._keeper.close(timeout_s, goodbye=goodbye)
        self._arenas.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            if not self._closed and os.getpid() == self._pid:
                self._end(None, is_orderly=True)
        elif not self._closed and os.getpid() == self._pid:
            self._note_end(kind.__name__)
            # The keeper finishes what was staged; the error must not wait for it.
            self._let_go(timeout_s=0.0, goodbye=False)

    def _check_process(self) -> None:
        if self._closed:
            message = "This Checkpointer is closed. Make a new one."
            raise InvalidInput(message)
        if os.getpid() != self._pid:
            raise InvalidInput(
                f"This Checkpointer belongs to process {self._pid} and was carried into process "
                f"{os.getpid()} by a "
                "fork. Use it only in the process that made it."
            )

    def _say(self, text: str) -> None:
        if self._ranks.rank == 0 and not self._quiet:
            sys.stderr.write(f"holdfast: {text}\n")
            sys.stderr.flush()


def _torn(step: int, changed: Sequence[str]) -> InvalidInput:
    more = f" (and {len(changed) - 1} more)" if len(changed) > 1 else ""
    return InvalidInput(
        f"The save of step {step} was dropped: {changed[0]}{more} was written while it was being copied, and "
        "not by step() of an optimizer, so the copy may mix two moments. Earlier checkpoints are whole. The "
        "next call of should_save() asks for another save in its place, and the next saves copy such tensors "
        "before save() returns, which takes longer. To keep saves short, write to them before save(), or "
        "call save(...).wait_staged() first.",
        step=step,
        key=changed[0],
    )


def _passed_over(found: Restored) -> list[str]:
    return [f"passed over step {one.step} of attempt {one.attempt}: {one.reason}" for one in found.passed]


def _images(plan: Plan, staging: Staging) -> Images:
    if plan.frozen_file is None:
        return Images(plan.file.file_bytes)
    return Images(
        plan.file.file_bytes, plan.frozen_at, plan.frozen_file.file_bytes, staging.is_frozen_unchanged
    )
