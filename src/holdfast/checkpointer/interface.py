"""The Checkpointer: options, the training loop, and the calls that save, restore, wait and end."""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, SupportsFloat

from holdfast.callsite import warn
from holdfast.checkpointer.attempt import Attempt, AttemptOptions, Selection, Shared, describe_skipped
from holdfast.checkpointer.cadence import Cadence, Flags, HomeCadence
from holdfast.checkpointer.call_guard import CallGuard
from holdfast.checkpointer.done_marker import DoneMarker
from holdfast.checkpointer.loop_exit import is_orderly, looping
from holdfast.checkpointer.metrics import Metrics
from holdfast.checkpointer.options import (
    CompileCache,
    Home,
    Limits,
    Local,
    Memory,
    Preemption,
    Reads,
    parse_compile_cache,
    parse_home,
    parse_keep,
    parse_local,
    parse_memory,
    parse_preemption,
)
from holdfast.checkpointer.pipeline import Pipeline
from holdfast.checkpointer.position import Position
from holdfast.checkpointer.tiers import Tiers
from holdfast.checkpointer.trial import Trial
from holdfast.compiled import CLOSE_LIMIT_S, CompiledCode, Sent
from holdfast.errors import (
    PREEMPTED_STATUS,
    HoldfastError,
    InvalidInput,
    Preempted,
    ResumeWarning,
    SaveWarning,
)
from holdfast.keeper import Save
from holdfast.log import get_logger
from holdfast.notice import NoticeWatcher
from holdfast.policy import Every, Keep, single_policies
from holdfast.process_exit import hard_exit, hard_exit_at_exit
from holdfast.ranks import RankGroup, Ranks
from holdfast.restore.request import Restored
from holdfast.state import State, stepping
from holdfast.state.review import refuse_snapshots
from holdfast.units import Duration, format_bytes, format_duration, parse_step, parse_timeout, plural

_log = get_logger("checkpointer")


class Checkpointer:
    """Checkpoints of a training run: saved in the background, verified, and restored at the next start.

    Where an option has a class of its own, its first field may be given alone: `keep=3` is `keep=Keep(3)`.

    Args:
        home: folder or URL that holds this run's checkpoints, or a `Home`; one run, one home.
        state: objects to save: modules, optimizers, anything with `state_dict`/`load_state_dict`, tensors,
            generators, and plain values. `restore` writes plain values back into this mapping.
            The random number generators of python, numpy and torch are always included.
        every: when to save: steps (500), a duration ("10m"), "auto" (as often as 1 % of the time allows),
            or a policy.
        keep: number of newest checkpoints to keep, a `Keep`, or None for all.
        local: folder on each host's fast disk, or a `Local`, for a `home` that is slow or far.
        memory: limit of this rank's staging memory, in bytes or as "8GiB", or a `Memory`.
        reads: reads of a restore: their number, patience and sharing.
        preemption: sources of preemption notices, such as "aws", or a `Preemption`. By default signals and
            the cloud of this machine.
        compile_cache: size of the place in home for the output of torch.compile, or a `CompileCache`; False
            for none.
        limits: number of failures and waiting times after which the run raises.
        group: ranks that save together, if they are not all of torch.distributed's process group; see
            `holdfast.ranks`.
        take_over: save even if a living process on one of these hosts saves to this home. That process can
            no longer commit. By default the first save raises `Conflict` and names the process.
        quiet: print no lines about what was restored.

    Raises:
        InvalidInput: an argument or an entry of `state` cannot be used; or one of `local` and `home` is
            inside the other.
        Unsupported: other processes cannot reach the home.

    Ranks: collective; every rank makes it with the same arguments.
    """

    def __init__(
        self,
        home: str | os.PathLike[str] | Home,
        state: MutableMapping[str, Any],
        *,
        every: int | str | datetime.timedelta | Every = 500,
        keep: int | Keep | None = 3,
        local: str | os.PathLike[str] | Local | None = None,
        memory: int | str | Memory = "8GiB",
        reads: Reads = Reads(),
        preemption: str | Preemption | None = None,
        compile_cache: int | str | bool | CompileCache = "1GiB",
        limits: Limits = Limits(),
        group: RankGroup | None = None,
        take_over: bool = False,
        quiet: bool = False,
    ) -> None:
        policies, now_s = single_policies(every), time.monotonic()
        staging, notices = parse_memory(memory), parse_preemption(preemption)
        self._tiers = tiers = Tiers(
            parse_home(home),
            parse_local(local),
            keep_in_memory_s=staging.keep_for_s,
            restore_patience_s=reads.patience_s,
        )
        self.home = tiers.home
        self.state = state
        self.preempted: str | None = None
        """Reason why the run has to stop, agreed by all ranks; None while it need not."""
        self._quiet = quiet
        self._compiled = self._open_compile_cache(tiers, parse_compile_cache(compile_cache))
        self._keep = parse_keep(keep)
        options = AttemptOptions(self._keep, limits, reads, take_over)
        refuse_snapshots(state)
        objects = State(state, world=None if group is None else (group.rank, group.world_size))
        self._ranks: RankGroup = group or Ranks(timeout_s=limits.rank_timeout_s)
        rank, world_size = self._ranks.rank, self._ranks.world_size
        self._metrics = Metrics()
        self._pipeline = Pipeline(
            objects,
            self._ranks,
            self._metrics,
            memory_bytes=staging.limit_bytes,
            skips_when_full=staging.skips_when_full(is_far=tiers.is_far),
        )
        home_cadence = HomeCadence(tiers.home_every, now_s=now_s)
        self._cadence = Cadence(policies, home_cadence, rank=rank, world_size=world_size, now_s=now_s)
        self._done = DoneMarker(tiers.home_store, rank=rank)
        self._attempt = Attempt(
            Shared(
                options,
                tiers,
                self._ranks,
                self._pipeline,
                self._cadence,
                self._metrics,
                self._done,
                self._compiled,
                self._show,
            )
        )
        self._selection: Selection | None = None  # of a `restore` that `steps` repeats
        self._position = Position(lambda: (self._pipeline.stager.num_steps, self._pipeline.objects.marks()))
        self._saved = Position(lambda: (self._pipeline.stager.num_steps, self._pipeline.objects.marks()))
        """Step of the last save, as long as training has not changed the state since."""
        self._trial = Trial.of_environment()
        self._pid, self._calls = os.getpid(), CallGuard()
        self._closed = self._has_reviewed = False
        # An exception that was being handled here already does not make the end of a loop disorderly.
        self._around = id(sys.exc_info()[1])
        self._notices = NoticeWatcher(notices.sources)
        self._watches_signals = notices.signals and self._notices.watch_signals()
        self._notices.poll_clouds()

    def _open_compile_cache(self, tiers: Tiers, options: CompileCache | None) -> CompiledCode | None:
        if options is None:
            return None

        def note(sent: Sent, seconds: float) -> None:
            if self._attempt.keeper is not None:
                self._attempt.keeper.record(
                    "compiled-sent",
                    step=None,
                    num_bytes=sent.num_bytes,
                    seconds=seconds,
                    detail=plural(sent.num_files, "file"),
                    tier="home",
                )

        return CompiledCode(
            tiers.home_store,
            tiers.home,
            limit_bytes=options.limit_bytes,
            trust_home=options.trust,
            told=note,
        )

    # -- the loop --------------------------------------------------------------------------------------------

    def steps(self, total: int) -> Iterator[int]:
        """Yield the steps of a training loop, from where the run stopped up to `total`.

        Claims the home and restores first: the newest checkpoint, or the step that `restore(step=...)` has
        restored before, with its `strict` and `rename`. Yields the number of steps completed so far; the
        loop's body completes one more. Saves when due, and calls `finish` at the end. A loop that is left by
        `break` or `return` is saved too, but not finished. One that is left by an exception is not saved,
        since its last step may be incomplete. A run that has all its steps already yields nothing.

        Raises:
            InvalidInput: `total` is not a whole number from 0.
            Conflict: another living process saves to this home; see `take_over`.
            Preempted: after a preemption notice, once the save of the agreed step is durable, unless that is
                the last step. It is a SystemExit with status 75; do not catch it.

        Ranks: collective; every rank runs the same steps.
        """
        self._check_process()
        total, around = parse_step(total, "steps()"), sys.exc_info()[1]
        if self._watches_signals:
            self._notices.watch_signals()
        self._attempt.begin(restores_later=True)
        step = self._restore_again() or 0
        self._cadence.restart(step, time.monotonic())
        self._show_what_is_left(step, total)
        self._pipeline.watch_optimizers()
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
            if self.preempted and step < total:  # else the run is complete and need not start again
                self._stop(step)
        self.finish(step)

    def _restore_again(self) -> int | None:
        """Restore, as the caller has asked for it since the last save, if at all."""
        asked = self._selection if self._attempt.saves.last is None else None
        if asked is None:
            found = self.restore()
        else:
            found = self.restore(asked.step, best=asked.best, strict=asked.strict, rename=asked.rename)
        self._selection = None
        return found

    def _leave(self, *, is_orderly: bool | None) -> None:
        """Save at the end of a loop that was left early; None: `close` decides whether it was in order."""
        if not self._is_open():
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
        """Save the steps since the last save, if they were counted."""
        last, step = self._attempt.saves.last, self._position.step_now()
        newest = last.step if last is not None else self._attempt.base_step or 0
        if step is None and self._position.step is not None:
            self._show(
                f"training has gone on after step {self._position.step}, and up to which step is not known; "
                f"the newest save is that of step {newest}. Call finish(step) to save the end"
            )
        if step is None or (step <= newest and not self._can_repeat(step)):
            return None
        return self._save(step, must=True)

    def _can_repeat(self, step: int) -> bool:
        """Return True if the last save is of `step`, was torn and may be repeated."""
        self._pipeline.stager.wait()
        saves = self._attempt.saves
        is_last = saves.last is not None and saves.last.step == step
        return is_last and saves.must_repeat and self._ranks.world_size == 1

    def should_save(self, step: int) -> bool:
        """Return True if `step` should be saved now: it is due, or a preemption notice arrived.

        After a notice `preempted` holds the reason, on all ranks at the same step.

        Args:
            step: optimizer steps completed.

        Raises:
            InvalidInput: `step` is not a whole number from 0, or this thread is within another call.

        Ranks: collective; every rank calls it after every step.
        Blocks: hardly; the ranks exchange a few flags while the step runs.
        """
        self._check_process()
        with self._calls.guard("should_save()"):
            step = parse_step(step, "should_save()")
            is_due = self._exchange(step)
            if self._trial is not None:
                is_due = self._trial.reach(step, is_due=is_due, wait=self._attempt.wait)
            self._position.reach(step)
            return is_due

    def step_done(self) -> int:
        """Count one completed step, save it if due, and return the number of completed steps.

        One call per step is all that a loop of your own needs between `restore` and `finish`. The count
        continues from the restored step, and is the step of a checkpoint: the optimizer steps completed.

        Raises:
            Preempted: after a preemption notice, once the save of this step is durable. It is a SystemExit
                with status 75; do not catch it.
            HoldfastError: as `save`.

        Ranks: collective; every rank calls it after every step.
        Blocks: as `should_save` and `save`.
        """
        step = self._metrics.num_done + 1
        if self.should_save(step):
            self.save(step)
        if self.preempted:
            self._stop(step)
        return step

    def _exchange(self, step: int) -> bool:
        """Exchange flags with the other ranks; return True if all save this step."""
        attempt, saves, cadence = self._attempt, self._attempt.saves, self._cadence
        self._metrics.num_done, now_s = step, time.monotonic()
        cadence.end_step(now_s, in_flight=bool(saves.pending))
        saves.settle()
        attempt.warn_if_overdue()
        newest, lacks_proposal = saves.stable.propose()
        flags = cadence.flags(
            step,
            now_s,
            is_preempted=self._notices.reason is not None,
            is_advised=self._notices.pop_rebalance() is not None,
            lacks_proposal=lacks_proposal,
            is_torn=saves.must_repeat,
        )
        values, (lowest, score) = self._ranks.exchange_flags(step, flags, (newest, attempt.send_score()))
        received = Flags(*values)
        attempt.receive_stable(lowest, is_lacked=received.lacks_proposal)
        attempt.receive_score(score)
        decision = cadence.decide(step, now_s, received)
        if decision.is_repeat:
            saves.note_tear()
        if received.is_preempted and self.preempted is None:
            self.preempted = self._notices.reason or "another rank's notice"
        if not self._pipeline.has_plan:
            self._pipeline.prepare_in_background()
        cadence.begin_step(time.monotonic())
        return decision.is_due and not (saves.last is not None and saves.last.step == step)

    def record(self, step: int | None = None, /, **values: SupportsFloat) -> None:
        """Record metrics of a step in the history, such as `record(loss=loss, lr=lr)`. Rank 0's count.

        The report draws them as one curve across all attempts. A tensor on a device is read when its value
        has arrived; no step waits for it. A checkpoint keeps the values of its own step, or else the newest
        since the save before; see `Keep`.

        Args:
            step: optimizer steps completed; by default the one that is running. For a checkpoint, values
                without a step that are recorded after `save`, before training changes the state, count for
                the step that was saved.
            values: a number, or a tensor of one element, by name. The last value of a name and step counts.

        Raises:
            InvalidInput: a value is not a number, a name is not valid, or there are too many; or `step` is
                not a whole number from 0.

        Ranks: not collective.
        Blocks: no. A failed write is a SaveWarning, and training continues.
        """
        self._check_process()
        with self._calls.guard("record()"):
            of_save = self._saved.step_now() if step is None else None
            step = self._metrics.num_done + 1 if step is None else parse_step(step, "record()")
            if of_save is None:
                self._saved.clear()
            if self._trial is not None:
                self._trial.note("recorded", {name: repr(float(one)) for name, one in values.items()}, step)
            if self._ranks.rank == 0:
                self._metrics.add(step, values, of_save=of_save)
                if self._attempt.keeper is not None:
                    self._metrics.flush_if_due(self._attempt.keeper)

    def _stop(self, step: int) -> None:
        """End a preempted run: wait until everything is durable, then raise SystemExit."""
        with self._calls.guard("the save after a preemption notice"):
            self._save_last(step)
            self._attempt.wait()
        reason = self.preempted or "notice"
        self._attempt.note_end(f"preempted ({reason})")
        self._show(f"preempted ({reason}); step {step} is durable")
        self.close()
        if self._ranks.world_size > 1:  # gloo's threads may abort this rank, which would look like a crash
            hard_exit_at_exit(PREEMPTED_STATUS)
        raise Preempted(step, reason)

    def _save_last(self, step: int) -> None:
        """Save `step` unless it is saved; a save of it that turns out to be torn is repeated."""
        self._pipeline.stager.wait()
        if not self._attempt.saves.has(step):
            self._save(step, must=True)

    # -- saving ----------------------------------------------------------------------------------------------

    def save(self, step: int, *, to_home: bool = False) -> Save:
        """Save the present state as the checkpoint of `step`.

        Returns once everything is copied that may change before the next optimizer step. Parameters and
        optimizer state are copied in the background; the optimizer's next `step()` waits for that copy.

        Args:
            step: optimizer steps completed; more than at the save before.
            to_home: copy it to home whether or not that is due; equal on every rank.

        Raises:
            InvalidInput: a value that cannot be saved, named with its key path; or `step` is not a whole
                number from 0, or not new; or the home holds checkpoints and `restore` was not called; or a
                signal handler has interrupted another call in this thread.
            Conflict: a newer attempt has taken over the home; or, at the first save, another living process
                saves to it, or has committed a checkpoint since `restore` read it.
            Corrupt: at the first save: there are signs of lost checkpoints, so training would begin from
                zero unnoticed.
            RetryLater: more saves than `limits` allows have failed in a row.

        Ranks: every rank calls it for the same step. Not collective, unless it may skip, or
            nothing was restored or saved before.
        Blocks: for the copy of what no optimizer owns, and while no staging memory is free.
        """
        self._check_process()
        with self._calls.guard("save()", alone=True):
            step = parse_step(step, "save()")
            if (optimizer := stepping()) is not None:
                raise InvalidInput(
                    f"save({step}) was called in the middle of {optimizer}.step(), by a signal handler or by "
                    "the step itself, when only some parameters have been updated. Nothing was saved. Save "
                    "between two steps: let the handler set a flag that the loop checks.",
                    step=step,
                )
            if self._trial is not None:
                self._trial.begin_save(step, wait=self._attempt.wait)
            save = self._save(step, must=False, to_home=to_home)
            self._position.follow(step)
            if self._trial is not None and self._trial.is_last(step):
                self._end_trial()
            return save

    def _save(self, step: int, *, must: bool, to_home: bool = False) -> Save:
        self._check_process()
        save = self._attempt.save(step, must=must, to_home=to_home)
        if self._ranks.rank == 0:
            self._saved.reach(step)
        if not (self._has_reviewed or save.skipped):
            self._has_reviewed = True
            self._review()
        return save

    def _review(self) -> None:
        """Warn of state that will not resume exactly; in a new run suggest `holdfast check`."""
        doubts = self._pipeline.objects.review()
        if self._trial is not None:
            self._trial.note("doubts", [asdict(doubt) for doubt in doubts])
            return
        for doubt in doubts:
            warn(f"The run will not resume exactly: {doubt.text}", ResumeWarning)
        if self._attempt.base_step is None:
            name = Path(sys.argv[0]).name
            script = name if name.endswith(".py") else "train.py"
            self._show(f"to see whether resuming is exact: holdfast check {script} [ARGS]")

    def _end_trial(self) -> NoReturn:
        self._attempt.wait()
        self._release(None, goodbye=True)
        hard_exit(0)

    def prepare(self) -> None:
        """Prepare the staging memory, so that the first save is as quick as later ones.

        The loop of `steps` does this in the background, after its first step.

        Blocks: for about 1 s per GB of memory that the machine has not touched before, and as long to put
            the state into huge pages.
        """
        with self._calls.guard("prepare()"):
            self._pipeline.prepare()

    def forget(self) -> None:
        """Release the memory of the last saved objects before the next save does.

        For states that are made for one save and removed from the mapping after it.
        """
        self._pipeline.objects.forget()

    def send_home(self, step: int) -> None:
        """Copy an older save of this attempt from `local` to home, in the background.

        Ranks: every rank calls it; not collective.
        """
        step, keeper = parse_step(step, "send_home()"), self._attempt.keeper
        if keeper is not None and keeper.config.local is not None:
            keeper.drain_checkpoint(keeper.config.attempt, step)

    def wait(self, timeout: Duration | None = None) -> None:
        """Wait until everything saved so far is durable, and the newest save is in home.

        Args:
            timeout: seconds, or text such as "10m"; None for no limit.

        Raises:
            HoldfastError: the newest save failed.
            RetryLater: not within `timeout`; also a TimeoutError.

        Ranks: not collective, but waits for every rank's parts.
        Blocks: until the keepers are done.
        """
        self._check_process()
        with self._calls.guard("wait()"):
            self._attempt.wait(parse_timeout(timeout, "wait()"))

    def latest_step(self) -> int | None:
        """Return the step of the newest complete checkpoint of the run; None without one.

        The newest is the last one of the newest attempt. Its step may be smaller than an older attempt's.

        Raises:
            RetryLater: a store failed.
            Denied: a store refuses access.

        Ranks: not collective.
        Blocks: for a listing of home, and of the local folder.
        """
        return max(self._tiers.complete_checkpoints(), default=(0, None))[1]

    def all_steps(self) -> list[int]:
        """Return the steps of all complete checkpoints of the run, in ascending order.

        Raises:
            RetryLater: a store failed.
            Denied: a store refuses access.

        Ranks: not collective.
        Blocks: for a listing of home, and of the local folder.
        """
        return sorted({step for _, step in self._tiers.complete_checkpoints()})

    @property
    def num_skipped(self) -> int:
        """Number of saves that were skipped because no staging memory was free."""
        return self._pipeline.num_skipped

    @property
    def waited_for_memory_s(self) -> float:
        """Time that `save` has waited for staging memory, in all."""
        return self._pipeline.waited_for_memory_s

    @property
    def waited_for_copy_s(self) -> float:
        """Time that optimizers have waited in `step()` for a copy under way, in all."""
        return self._pipeline.stager.waited_s

    # -- restoring -------------------------------------------------------------------------------------------

    def restore(
        self,
        step: int | None = None,
        *,
        best: bool = False,
        strict: bool = True,
        only: Collection[str] | None = None,
        rename: Mapping[str, str] | Callable[[str], str] | None = None,
    ) -> int | None:
        """Restore the newest checkpoint that verifies into the live objects.

        A loop of `steps` that follows trains from the same step. This only reads, so another training may
        save to the same home meanwhile. The first `save` claims the home, as `steps` does before it restores.

        Args:
            step: restore this step and no other.
            best: restore the checkpoint with the best value of the metric in `keep=Keep(metric=...)`. The
                next best is tried where one is damaged. Training continues from it as from `step`.
            strict: refuse a checkpoint whose names differ from the state's.
            only: top-level keys of the state to restore; the others stay as they are.
            rename: saved names to names in the state: a map of prefixes, or a function.

        Returns:
            The step restored, or None if the home holds no checkpoint.

        Raises:
            Corrupt: the home holds checkpoints, or signs that it held some, but none of them verifies.
                Nothing was restored for use.
            RetryLater: the newest checkpoint, or that of `step`, could not be read, see `Reads`.
            Denied: a store refuses access.
            InvalidInput: the checkpoint does not fit the state; the message lists the differences.
            NotFound: `step` has no checkpoint; or `best`, but no checkpoint has a value of the metric.

        Ranks: collective; all ranks restore the same checkpoint.
        Blocks: until the state is restored.
        """
        self._check_process()
        with self._calls.guard("restore()", alone=True):
            step = None if step is None else parse_step(step, "restore()")
            if best:
                self._check_best(step)
            selection = Selection(step, strict, only, rename, best)
            if self._attempt.saves.last is not None:
                self._attempt = self._attempt.go_back()  # checkpoints of both must not mix
            found = self._attempt.restore(selection)
            self._selection = selection
            if found is None:
                return None
            self._show_restored(found)
            self._position.clear()  # the state is no longer that of the step which a loop has reached
            self._metrics.restart(found.step)
            self._saved.clear()
            if self._trial is not None:
                self._trial.note("restored", found.step)
            self._cadence.restart(found.step, time.monotonic())
            self._attempt.report_progress(found.step)
            return found.step

    def _check_best(self, step: int | None) -> None:
        if step is not None:
            raise InvalidInput("restore() takes step= or best=True, not both.")
        if self._keep.metric is None:
            raise InvalidInput(
                "restore(best=True) needs a metric: give the Checkpointer "
                'keep=Keep(best=1, metric="loss", mode="min"), and call record(loss=...).'
            )

    def _show_restored(self, found: Restored) -> None:
        for line in describe_skipped(found):
            self._show(line)
        rate = f"{format_bytes(found.num_bytes)} in {format_duration(found.seconds)}"
        sources = self._tiers.describe_sources(found.sources)
        where = f"from {sources} ({rate}, verified)"
        self._done.read()
        if self._done.step == found.step:
            self._show(f"this run was finished at step {found.step}; restored that step {where}")
        else:
            self._show(f"restored step {found.step} {where}")

    def _show_what_is_left(self, step: int, total: int) -> None:
        if step and step >= total:
            self._show(
                f"all {total} steps are done, so nothing is trained; to train on, raise the total: "
                f"steps({total}) asks for no more"
            )
        elif self._done.step == step:
            self._show(f"training continues from step {step} to step {total}")

    # -- ending ----------------------------------------------------------------------------------------------

    def finish(self, step: int | None = None) -> None:
        """Save the last step, wait until it is durable, and mark the run as finished.

        `steps` calls it at its end. A loop of your own calls it once, after its last step.

        Args:
            step: optimizer steps completed; by default the newest that `should_save` was called with.

        Raises:
            InvalidInput: `step` is not a whole number from 0; or it is not given, and not known.
            HoldfastError: the save failed.

        Ranks: not collective, but waits for every rank's parts; every rank calls it.
        Blocks: until the newest save is durable in home.
        """
        self._check_process()
        with self._calls.guard("finish()"):
            step = self._last_step() if step is None else parse_step(step, "finish()")
            if step != self._attempt.base_step:
                self._save_last(step)
            self._attempt.wait()
            self._attempt.note_end("finished")
            if not self._is_marked(step):
                config = self._attempt.begin().config  # only a claimed attempt may write the marker
                self._done.write(config.run, config.attempt, step)
            self._position.clear()
            self._notices.release_signals()

    def _is_marked(self, step: int) -> bool:
        """Return True if the run is marked as finished at `step`; before the claim, on all ranks."""
        is_marked = self._done.step == step
        return is_marked if self._attempt.keeper is not None else self._ranks.share(is_marked)

    def _last_step(self) -> int:
        """Return the step of the present state.

        Raises:
            InvalidInput: it is not known.
        """
        step, last = self._position.step_now(), self._attempt.saves.last
        if step is None and self._position.step is None:
            step = last.step if last is not None else self._attempt.base_step
        if step is None:
            raise InvalidInput(
                "finish(): the last step is not known, since training has gone on after the newest call of "
                "should_save(), or never called it. Nothing was done. Write finish(step)."
            )
        return step

    def close(self, timeout: Duration | None = None) -> None:
        """Save the last step, wait until everything saved is durable, and let the keeper end.

        The last step is saved if `should_save` was called with it and training has not continued since; not
        while an exception is being handled, and not after a loop over `steps` that an exception has ended.

        Args:
            timeout: seconds, or text such as "10m"; None for no limit.

        Raises:
            HoldfastError: the newest save failed.
            RetryLater: not durable within `timeout`; also a TimeoutError. The keeper continues by itself.

        Ranks: collective; no rank leaves while another still needs it.
        Blocks: until the keeper has ended, at most `timeout`, and until every rank has called it.
        """
        if self._is_open():
            self._close(parse_timeout(timeout, "close()"), is_orderly=id(sys.exc_info()[1]) == self._around)

    def _close(self, timeout_s: float | None, *, is_orderly: bool) -> None:
        with self._calls.guard("close()"):
            try:
                if is_orderly:
                    self._save_rest()
                self._pipeline.stager.wait()
                self._attempt.wait(timeout_s)
                self._attempt.note_end("closed")
                self._ranks.barrier_and_close()
            except BaseException:
                self._release(timeout_s, goodbye=False)
                raise
            self._release(timeout_s, goodbye=True)

    def _release(self, timeout_s: float | None, *, goodbye: bool) -> None:
        """Release everything that this object holds; the keeper ends when it is done."""
        self._closed = True
        self._notices.close()
        self._pipeline.stager.close()
        if self._compiled is not None:
            self._compiled.close(min(CLOSE_LIMIT_S, CLOSE_LIMIT_S if timeout_s is None else timeout_s))
        if self._attempt.keeper is not None:
            self._attempt.keeper.close(timeout_s, frees_memory=goodbye)
        self._pipeline.arenas.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._is_open():
            return
        if kind is None:
            self._close(None, is_orderly=True)
        else:
            self._attempt.note_end(kind.__name__)
            # The keeper completes what was staged; the exception must not wait for it.
            self._release(timeout_s=0.0, goodbye=False)

    def _is_open(self) -> bool:
        return not self._closed and os.getpid() == self._pid

    def _check_process(self) -> None:
        if self._closed:
            raise InvalidInput("This Checkpointer is closed. Make a new one.")
        if os.getpid() != self._pid:
            raise InvalidInput(
                f"This Checkpointer belongs to process {self._pid} and was carried into process "
                f"{os.getpid()} by a fork. Use it only in the process that made it."
            )

    def _show(self, text: str) -> None:
        """Log a line on rank 0, unless `quiet`."""
        if self._ranks.rank == 0 and not self._quiet:
            _log.info(text)
