"""Training of this process: its steps, saves, restores and end, over all attempts."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from functools import partial
from typing import Any, ClassVar, NoReturn, SupportsFloat

from torch.optim import Optimizer

from holdfast.checkpoint.home.metrics import read_recent_values
from holdfast.checkpoint.keeper import Save
from holdfast.checkpoint.restore.candidates import Selection
from holdfast.checkpoint.restore.stages import Restored
from holdfast.checkpoint.run import status_lines
from holdfast.checkpoint.run.attempt import Attempt
from holdfast.checkpoint.run.components import Components
from holdfast.checkpoint.run.going_back import GoingBack, describe_skipped_samples, leave_out, range_to_skip
from holdfast.checkpoint.run.position import Position, StepFollowers
from holdfast.checkpoint.run.restoration import DifferenceReport
from holdfast.checkpoint.run.watching import NamedVote
from holdfast.checkpoint.state import stepping
from holdfast.checkpoint.state.load import renamer
from holdfast.checkpoint.state.loader_watch import unwatched_loaders
from holdfast.checkpoint.watch import Act, RestoredState, WatchedRun
from holdfast.errors import (
    PREEMPTED_STATUS,
    HoldfastError,
    InvalidInput,
    LoaderWarning,
    Preempted,
    RetryLater,
    SaveWarning,
)
from holdfast.system.callsite import is_loading, warn
from holdfast.system.environment import JobReport, report_to_job
from holdfast.system.failpoint import failpoint
from holdfast.system.process_exit import hard_exit, hard_exit_at_exit

_OTHERS_S = 5.0
"""Time that other ranks have to make a save durable, when an error has ended this one after a notice."""


class Training:
    """Training of this process, between the calls of a Checkpointer."""

    all: ClassVar[weakref.WeakSet[Training]] = weakref.WeakSet()

    def __init__(self, components: Components) -> None:
        self.attempt = Attempt(components)  # going back to a checkpoint replaces it
        self.position = Position(self._mark)  # newest completed step of the loop
        self.preempted: str | None = None  # reason why the run has to stop, agreed by all ranks
        self._interrupted = Position(self._mark)  # of the loop that an exception has ended
        self._saved = Position(self._mark)  # last save, as long as training has not changed the state since
        self._components = components
        self._pipeline, self._cadence = components.pipeline, components.cadence
        self._watching = components.watching
        tiers, ranks, meter = components.tiers, components.ranks, components.cadence.meter
        is_first_here = ranks.is_first_here()
        self._watching.begin(
            lambda name, warn: WatchedRun(
                name,
                tiers.home,
                tiers.home_store,
                ranks.rank,
                ranks.world_size,
                is_first_here,
                components.pulse,
                note=lambda *line, **members: self.attempt.note(*line, **members),
                warn=warn,
                show=components.show,
                save_s=lambda: meter.step_s + (meter.durable_s or 0.0),
                wait=lambda: self.attempt.wait(),
                leave=self._leave,
            )
        )
        self._followers = StepFollowers(components.pipeline.objects)
        self._ranks, self._metrics, self._done = components.ranks, components.metrics, components.done
        self._has_restored = False  # from the attempt's base; the script may have changed the state since
        self._differences = DifferenceReport(components)
        self._going_back = GoingBack(components)
        self._calls = CallGuard()
        self._has_reviewed = False
        # An exception that was being handled here already does not make the end of a loop disorderly.
        self._around = id(sys.exc_info()[1])
        self.all.add(self)
        self._end_at_exit = partial(_end_at_exit, weakref.ref(self))
        atexit.register(self._end_at_exit)

    def _mark(self) -> object:
        """Return a value that changes with the state."""
        return self._pipeline.stager.num_steps, self._pipeline.objects.marks()

    @property
    def is_open(self) -> bool:
        """True until the end, in the process that made it."""
        return self._calls.is_open

    @contextlib.contextmanager
    def guard(self, name: str, *, alone: bool = False, is_phase: bool = True) -> Iterator[None]:
        """Guard a call of the Checkpointer, see `CallGuard.guard`; as a phase it may outlast a step."""
        phase = self._components.pulse.phase(name) if is_phase else contextlib.nullcontext()
        with self._calls.guard(name, alone=alone), phase:
            yield

    @contextlib.contextmanager
    def phase_of_user(self, name: str) -> Iterator[None]:
        """Mark a phase of the user's loop. Data loaders that it reads do not feed the training."""
        with unwatched_loaders(), self._components.pulse.phase(name):
            yield

    # -- the loop --------------------------------------------------------------------------------------------
    def begin_loop(self, total: int) -> int:
        """Claim the home, restore unless the script has; return the first step of a loop."""
        self._calls.check()
        self._watching.set_looping(True)
        if self._has_restored and self.attempt.saves.last is None:
            self.attempt.begin()  # what the script has set since its restore stays
            step = self.attempt.base_step or 0
        else:
            self.attempt.begin(restores_later=True)
            with self.guard("restore()", alone=True):
                step = self.restore(Selection()) or 0
        self._has_restored = False
        self._cadence.restart(step, time.monotonic())
        status_lines.show_what_is_left(self._components, step, total)
        self._pipeline.watch_optimizers()
        self._components.pulse.begin(step)
        return step

    def end_step(self, step: int) -> bool:
        """Record that a step is complete; return True if all ranks save it."""
        self._watching.set_looping(True)
        attempt, self._metrics.num_done = self.attempt, step
        self._followers.reach(step)
        self._components.pulse.beat(step)
        self._going_back.check()
        self._cadence.end_step(time.monotonic(), in_flight=attempt.saves.has_pending)
        votes = self._votes(step)  # not before: a slow watch is no part of the step
        outcome = attempt.step_sync.exchange(step, attempt.keeper, [one.vote for one in votes])
        attempt.warn_if_overdue()
        if outcome.must_go_back and not outcome.is_preempted:
            with self._components.pulse.phase("the decision about going back"):
                self._going_back.decide(step, attempt, votes)
        if outcome.is_preempted and self.preempted is None:
            own = next((one.vote.reason for one in votes if one.vote.act is Act.STOP), None)
            self.preempted = own or self._watching.stop_reason() or "another rank's notice"
        if self._components.has_state and self._pipeline.plan is None:
            self._pipeline.prepare_in_background()
        self._cadence.begin_step(time.monotonic())
        self.position.reach(step)
        return outcome.is_due and self._going_back.planned is None

    def _votes(self, step: int) -> list[NamedVote]:
        """Return what the watches ask for, without votes to go back that the ranks have decided about."""
        self._watching.record(self._metrics.take_new)
        votes = self._watching.step(step)
        back = self._going_back.unanswered(votes)
        return [one for one in votes if one.vote.act is not Act.GO_BACK or one in back]

    @property
    def must_go_back(self) -> str | None:
        """Reason why training has to go back, agreed by all ranks; None while it need not."""
        return None if self._going_back.planned is None else self._going_back.planned.vote.reason

    def record(self, step: int | None, values: Mapping[str, SupportsFloat]) -> None:
        """Record metrics of a step; of the one that is running if it is None."""
        of_save = self._saved.step_now() if step is None else None
        step = self._metrics.num_done + 1 if step is None else step
        if of_save is None:
            self._saved.clear()
        if self._ranks.rank == 0:
            self._metrics.add(step, values, of_save=of_save)
            if self.attempt.keeper is not None:
                self._metrics.flush_if_due(self.attempt.keeper)

    def leave(self, *, is_orderly: bool | None) -> None:
        """Save at the end of a loop that was left early.

        Args:
            is_orderly: it was not left by an exception; None if that is not known, and `close` decides.
        """
        if not self.is_open:
            return
        self._components.pulse.end()
        # Not after a notice: then the end of a worker must not interrupt the save.
        if is_orderly or self._watching.stop_reason() is None:
            self._watching.set_looping(False)
        if is_orderly is None:
            return
        try:
            with self.guard("the save at the end of the loop"):
                if is_orderly and (save := self._save_rest()) is not None:
                    save.wait_staged()  # the process may end at once
        except HoldfastError as error:  # an error raised here would be lost with the generator
            warn(f"The last steps of the loop were not saved: {error}", SaveWarning)
        self._interrupted, self.position = self.position, Position(self._mark)

    def stop(self, step: int) -> NoReturn:
        """End a preempted run: wait until everything is durable, then raise SystemExit."""
        with self.guard("the save after a preemption notice"):
            self._save_last(step)
            self.attempt.wait()
        reason = self.preempted or "notice"
        self._end_run(step, reason)
        self.close(None)
        raise Preempted(step, reason)

    def end_preempted(self, error: BaseException | None) -> None:
        """End the run if an error has ended its loop after a preemption notice.

        Errors of Holdfast have a meaning of their own, and are left as they are. The notice may have ended
        workers of a data loader too: if the trainer was waiting for the first batch of a step, it saves the
        step before. Other ranks do the same, and this one waits for them only shortly: they may wait for it.
        """
        reason = self._watching.stop_reason()
        if reason is None or not isinstance(error, Exception) or isinstance(error, HoldfastError):
            return
        frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        left = self._interrupted if self.position.step is None else self.position
        step = left.step_between() if is_loading(frames) else None
        is_alone = self._ranks.world_size == 1
        with self.guard("the save after a preemption notice"):
            can_save = self._components.has_state and (is_alone or self.attempt.keeper is not None)
            if can_save and step is not None and step > (self.attempt.latest() or 0):
                self._save_last(step)
            with contextlib.nullcontext() if is_alone else contextlib.suppress(RetryLater):
                self.attempt.wait(None if is_alone else _OTHERS_S)
        newest = self.attempt.latest()
        self._end_run(newest, f"{reason}; {type(error).__name__} has ended the step: {error}")
        self.abandon(reason)
        raise Preempted(newest or 0, reason) from error

    def _end_run(self, step: int | None, reason: str) -> None:
        """Record and show that a preempted run ends, with its newest durable step."""
        self.attempt.note_end(f"preempted ({reason})")
        report_to_job(JobReport(preempted=step or 0))
        durable = "nothing was saved" if step is None else f"step {step} is durable"
        self._components.show(f"preempted ({reason}); {durable}")
        if self._ranks.world_size > 1:  # gloo's threads may abort this rank, which would look like a crash
            hard_exit_at_exit(PREEMPTED_STATUS)

    # -- saves -----------------------------------------------------------------------------------------------
    def save_given(
        self, step: int, state: Mapping[str, Any], optimizers: Iterable[Optimizer], *, to_home: bool
    ) -> Save:
        """Save objects other than the Checkpointer's own, and release the references to them."""
        with self._pipeline.objects.lent(dict(state), optimizers):
            return self.save(step, to_home=to_home)

    def save(self, step: int, *, to_home: bool) -> Save:
        """Save the present state as the checkpoint of `step`."""
        if (optimizer := stepping()) is not None:
            raise InvalidInput(
                f"save({step}) was called in the middle of {optimizer}.step(), by a signal handler or by "
                "the step itself, when only some parameters have been updated. Nothing was saved. Save "
                "between two steps: let the handler set a flag that the loop checks.",
                step=step,
            )
        self._watching.notify("save_began", step)
        save = self._save(step, must=False, to_home=to_home)
        self.position.follow(step)
        return save

    def _save(self, step: int, *, must: bool, to_home: bool = False) -> Save:
        self._followers.reach(step)
        save = self.attempt.save(step, must=must, to_home=to_home)
        if self.position.step == step:
            status_lines.warn_of_gradients(self._components)
        if self._ranks.rank == 0:
            self._saved.reach(step)
        if self._has_reviewed:
            # At the first save no loader may have been read, as between two epochs.
            for doubt in self._pipeline.objects.review_loaders():
                warn(f"The run will not resume exactly: {doubt}", LoaderWarning)
        elif not save.skipped:
            self._has_reviewed = True
            status_lines.warn_of_doubts(self._components, is_new_run=self.attempt.base_step is None)
        return save

    def _save_last(self, step: int) -> None:
        """Save `step` unless it is saved; a save of it that turns out to be torn is repeated."""
        self._pipeline.stager.wait()
        if self.attempt.saves.has(step):
            return
        if not self._components.has_state:
            raise InvalidInput(
                f"Step {step} was not saved, and this Checkpointer was made without a state to save. Nothing "
                f"was written. Call save({step}, state) first.",
                step=step,
            )
        self._save(step, must=True)

    def _save_rest(self) -> Save | None:
        """Save the steps since the last save, if they were counted."""
        if not self._components.has_state:
            return None
        last, step = self.attempt.saves.last, self.position.step_now()
        newest = last.step if last is not None else self.attempt.base_step or 0
        if step is None and self.position.step is not None:
            self._components.show(
                f"training continued after step {self.position.step} without counting its steps; the newest "
                f"save is that of step {newest}. Call finish(step) to save the end"
            )
        if step is None or (step <= newest and not self._can_repeat(step)):
            return None
        return self._save(step, must=True)

    def _can_repeat(self, step: int) -> bool:
        """Return True if the last save is of `step`, was torn and may be repeated."""
        self._pipeline.stager.wait()
        saves = self.attempt.saves
        is_last = saves.last is not None and saves.last.step == step
        return is_last and saves.must_repeat and self._ranks.world_size == 1

    # -- restores --------------------------------------------------------------------------------------------
    def restore(self, selection: Selection) -> int | None:
        """Restore the newest checkpoint that verifies, or the selected one."""
        if self.attempt.saves.last is not None:
            self.attempt = self.attempt.go_back()  # checkpoints of both must not mix
        found = self.attempt.restore(selection)
        self._has_restored = True
        if found is None:
            self._followers.restart(0)
            self._watching.restored(lambda _: RestoredState(None, None, False, lambda _: {}))
            return None
        self._metrics.restart(found.step)
        self._pass_on_restored(found, is_rollback=False)
        self._continue_from(found, selection)
        return found.step

    def _pass_on_restored(self, found: Restored, *, is_rollback: bool) -> None:
        """Have the watches observe a restored checkpoint, after what was recorded before it."""
        self._watching.record(self._metrics.take_new)
        line, stores = (*found.ancestors, found.checkpoint_id), self._components.tiers.durable_stores()
        self._watching.restored(
            lambda name: RestoredState(
                found.step, found.watches.get(name), is_rollback, partial(read_recent_values, stores, line)
            )
        )

    def _continue_from(self, found: Restored, selection: Selection) -> None:
        """Continue from a checkpoint that was restored, without the samples of earlier rollbacks."""
        status_lines.show_restored(self._components, found)
        self.position.clear()  # the state is no longer that of the step which a loop has reached
        self._saved.clear()
        self._followers.restart(found.step)
        self._going_back.restart(found.rollbacks)
        self._differences.show(found.step, self.attempt.restoration.differences)
        objects = self._pipeline.objects
        unknown = leave_out(objects.skippables(), found.rollbacks.skipped(), renamer(selection.rename))
        if self._ranks.rank == 0:
            status_lines.warn_of_samples(found, unknown, has_kept=bool(selection.kept))
            report_to_job(JobReport(home=self._components.tiers.home, step=found.step))
        self._cadence.restart(found.step, time.monotonic())

    def roll_back(self) -> int:
        """Go back to the agreed checkpoint, save it anew, and return its step.

        If this process is killed before the record is written, nothing has happened: the next start resumes
        from the newest checkpoint, and the watch votes again. After that, no start resumes from the stretch
        that the record names.
        """
        plan = self._going_back.planned
        if plan is None:
            raise InvalidInput(
                "roll_back() is for a loop of your own with a watch that goes back, such as "
                'Spike("rollback"), once `must_go_back` is set. Nothing was done.'
            )
        objects, config = self._pipeline.objects, self.attempt.begin().config
        before = {key: (one.position, one.skipped) for key, one in objects.skippables().items()}
        kept = tuple(objects.streams())
        self.attempt = self.attempt.go_back(plan.vote.reason)
        selection = Selection(choices=plan.choices, kept=kept)
        found = self.attempt.restore(selection)
        assert found is not None  # one of those that were chosen, or an error was raised
        failpoint("rollback.restored")
        self._has_restored = False
        self._metrics.restart(found.step)
        self._pass_on_restored(found, is_rollback=True)
        self._continue_from(found, selection)
        ranges = {
            key: range_to_skip(
                one.position,
                *before[key],
                num_steps=plan.last_step - found.step,
                in_a_row=plan.in_a_row,
                extra_steps=plan.vote.skip,
            )
            for key, one in objects.skippables().items()
            if key in before
        }
        ranges = self._ranks.share(ranges)
        rollback = self._going_back.record(config, plan, found, ranges, kept)
        failpoint("rollback.noted")
        leave_out(objects.skippables(), {key: [one] for key, one in ranges.items()}, lambda key: key)
        self._going_back.finish(rollback)
        status_lines.show_rollback(self._components, rollback, plan.watch)
        samples = describe_skipped_samples(rollback.skipped, rollback.kept)
        self.attempt.note("rollback", step=found.step, detail=f"{rollback.reason}; {samples}")
        self._save(found.step, must=True)
        return found.step

    def load(self, selection: Selection, into: MutableMapping[str, Any]) -> bool:
        """Load the newest checkpoint that verifies, or the selected one; return False without any."""
        with self._pipeline.objects.lent(into):
            return self.restore(selection) is not None

    # -- the end ---------------------------------------------------------------------------------------------
    def finish(self, step: int | None) -> None:
        """Save the last step, wait until it is durable, and mark the run as finished."""
        step = self._last_step() if step is None else step
        if step != self.attempt.base_step:
            self._save_last(step)
        self.attempt.wait()
        self.attempt.note_end("finished")
        if not self._is_marked(step):
            config = self.attempt.begin().config  # only a claimed attempt may write the marker
            self._done.write(config.run, config.attempt, step)
        self.position.clear()
        self._components.pulse.end()
        self._watching.set_looping(False)

    def _is_marked(self, step: int) -> bool:
        """Return True if the run is marked as finished at `step`; before the claim, on all ranks."""
        is_marked = self._done.step == step
        return is_marked if self.attempt.keeper is not None else self._ranks.share(is_marked)

    def _last_step(self) -> int:
        """Return the step of the present state."""
        step, last = self.position.step_now(), self.attempt.saves.last
        if step is None and self.position.step is None:
            step = last.step if last is not None else self.attempt.base_step
        if step is None:
            raise InvalidInput(
                "finish() cannot determine the last step: training continued after the newest call of "
                "should_save(), or never called it. Nothing was done. Call finish(step)."
            )
        return step

    def close(self, timeout_s: float | None, *, is_orderly: bool | None = None) -> None:
        """Wait until everything saved is durable, and let the keeper end.

        Args:
            timeout_s: longest wait; None for no limit.
            is_orderly: save the last step too; by default unless an exception is being handled.
        """
        if not self.is_open:
            return
        if is_orderly is None:
            is_orderly = id(sys.exc_info()[1]) == self._around
        if not is_orderly:
            self.end_preempted(sys.exc_info()[1])
        with self.guard("close()"):
            try:
                if is_orderly:
                    self._save_rest()
                self._pipeline.stager.wait()
                self.attempt.wait(timeout_s)
                self.attempt.note_end("closed")
                self._ranks.barrier_and_close()
            except BaseException:
                self._release(timeout_s, goodbye=False)
                raise
            self._release(timeout_s, goodbye=True)

    def _leave(self) -> NoReturn:
        """End this process once everything saved is durable, as if the script had ended."""
        self.attempt.wait()
        self._release(None, goodbye=True)
        hard_exit(0)

    def abandon(self, reason: str) -> None:
        """End without waiting; the keeper completes what was staged."""
        if self.is_open:
            self.attempt.note_end(reason)
            self._release(timeout_s=0.0, goodbye=False)

    def _release(self, timeout_s: float | None, *, goodbye: bool) -> None:
        """Release everything that this object holds; the keeper ends when it is done."""
        self._calls.close()
        atexit.unregister(self._end_at_exit)
        self._watching.end(timeout_s)
        self._components.pulse.end()
        self._pipeline.stager.close()
        if self.attempt.keeper is not None:
            self.attempt.keeper.close(timeout_s, frees_memory=goodbye)
        self._pipeline.arenas.close()
        self._components.pulse.close()
        self.attempt.warn_of_problems()


def _end_at_exit(training: weakref.ref[Training]) -> None:
    """End a preempted run with its own status if no code has handled the error."""
    found = training()
    if found is None or not found.is_open:
        return
    try:
        found.end_preempted(getattr(sys, "last_value", None))
    except Preempted:
        hard_exit_at_exit(PREEMPTED_STATUS)


class CallGuard:
    """Registry of the calls under way on one Checkpointer, by thread.

    A signal handler runs in the main thread, in the middle of whatever the main thread does. A call from it
    that needs an interrupted call to finish first would block for ever, so it is refused.
    """

    def __init__(self) -> None:
        self._running: dict[int, str] = {}
        self._alone = threading.Lock()
        self._pid, self._is_closed = os.getpid(), False

    @property
    def is_open(self) -> bool:
        """True until `close`, in the process that made it."""
        return not self._is_closed and os.getpid() == self._pid

    def close(self) -> None:
        """Refuse all further calls."""
        self._is_closed = True

    def check(self) -> None:
        """Check that calls can be served."""
        if self._is_closed:
            raise InvalidInput("This Checkpointer is closed. Make a new one.")
        if os.getpid() != self._pid:
            raise InvalidInput(
                f"This Checkpointer belongs to process {self._pid} and was carried into process "
                f"{os.getpid()} by a fork. Use it only in the process that made it."
            )

    @contextlib.contextmanager
    def guard(self, name: str, *, alone: bool = False) -> Iterator[None]:
        """Refuse further calls of this thread while the body runs; `alone` waits for other threads' too."""
        self.check()
        thread = threading.get_ident()
        if thread in self._running:
            raise InvalidInput(
                f"{name} was called while {self._running[thread]} was running in the same thread, and would "
                "wait for it for ever. This call did nothing. Call it neither in a signal handler nor in a "
                "state_dict(): let the handler set a flag that the loop checks after each step, or rely on "
                "should_save(), which is true after SIGTERM, SIGUSR1, SIGHUP and Ctrl-C."
            )
        try:
            self._running[thread] = name
            with self._alone if alone else contextlib.nullcontext():
                yield
        finally:
            self._running.pop(thread, None)
