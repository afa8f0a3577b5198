"""Attempt: one start of the training, with its restore, claim, saves and end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from holdfast.checkpoint.format import run as runs
from holdfast.checkpoint.format.part import Ancestors
from holdfast.checkpoint.home.history import FailureRate, read_failures
from holdfast.checkpoint.home.inventory import measure_space
from holdfast.checkpoint.keeper import Keeper, KeeperConfig, Save, wait_for_closed, wait_for_orphans
from holdfast.checkpoint.policy import MIN_FAILURES, EveryAuto
from holdfast.checkpoint.restore.candidates import Selection
from holdfast.checkpoint.restore.stages import Restored
from holdfast.checkpoint.run.components import Components
from holdfast.checkpoint.run.restoration import Restoration
from holdfast.checkpoint.run.saves import Saves, remaining_s
from holdfast.checkpoint.run.step_sync import StepSync
from holdfast.errors import HoldfastError, InvalidInput, RetryLater, SaveWarning, TimedOut
from holdfast.system.callsite import warn
from holdfast.system.environment import JobReport, report_to_job
from holdfast.system.log import get_logger
from holdfast.system.units import format_duration, plural

if TYPE_CHECKING:
    from holdfast.checkpoint.run.mirroring import Mirroring

_log = get_logger("checkpoint.run")
_MIN_REPORTED_WAIT_S = 0.001  # a shorter wait for memory is not recorded
_PAUSE_LINE_S = 60.0
_PAUSE_ROUND_S = 0.2  # longest time until a notice on any rank ends a pause


class Attempt:
    """One attempt of a run: restore, claim, keeper, saves, end. Going back to a checkpoint makes a new one.

    Args:
        run: id of the run, if an earlier attempt of this process has claimed it.
    """

    def __init__(self, components: Components, *, run: str | None = None) -> None:
        self.keeper: Keeper | None = None  # None before the claim
        self.ancestors: Ancestors = ()  # checkpoints that this attempt continues
        self._components, self._run = components, run
        self._tiers, self._ranks, self._pipeline = components.tiers, components.ranks, components.pipeline
        self._limits = components.options.limits
        self.saves = Saves(
            self._limits.patience_s,
            self._pipeline.stager,
            world_size=self._ranks.world_size,
            on_durable=self._on_durable,
            on_failed=self._report_failed,
        )
        self._mirroring: Mirroring | None = None
        if components.options.peers is not None:
            from holdfast.checkpoint.run.mirroring import Mirroring

            self._mirroring = Mirroring(components.options.peers)
        self.step_sync = StepSync(components, self.saves, self._mirroring)
        self.restoration = Restoration(components)
        self._pause_limit_s, self._commit_timeout_s = self._limits.pause_s, self._limits.commit_timeout_s
        self._keeps_best = components.options.keep.best is not None
        self._interval: SaveInterval | None = None
        if components.cadence.auto is not None and components.ranks.rank == 0:
            self._interval = SaveInterval(components, components.cadence.auto)
        self._early: list[Callable[[Keeper], None]] = []  # calls of the keeper that wait for the claim
        self._guarantee: str | None = None
        self._has_noted_end = False
        self._has_warned_of_unmeasured = False

    @property
    def base_step(self) -> int | None:
        """Step that this attempt was restored from; None if it started from scratch."""
        return self.ancestors[-1].step if self.ancestors else None

    @property
    def base_attempt(self) -> int | None:
        """Attempt that saved the checkpoint of `base_step`."""
        return self.ancestors[-1].attempt if self.ancestors else None

    def prepare(self) -> None:
        """Prepare the first save: the claim and the keeper too, if `restore` has chosen what it follows.

        Ranks: collective, the first time after `restore`.
        Blocks: until the staging memory is ready and the state is in huge pages.
        """
        if self.restoration.has_run:
            self.begin()  # first: it may change the names of the state
        self._pipeline.prepare()

    def latest(self) -> int | None:
        """Return the newest durable step of this attempt, else the step that was restored."""
        self.saves.settle()
        return self.saves.newest_durable if self.saves.newest_durable is not None else self.base_step

    # -- claim -----------------------------------------------------------------------------------------------
    def begin(self, *, restores_later: bool = False) -> Keeper:
        """Claim an attempt number and start the keeper, once.

        Args:
            restores_later: claim the home before it is read, so that no other process can commit in between.

        Ranks: collective, the first time.
        """
        if self.keeper is not None:
            return self.keeper
        all_here, local_ranks = self._meet()
        base = None if restores_later else self.restoration.base
        take_over = self._components.options.take_over
        claim = self._tiers.claim(self._ranks, local_ranks, base, take_over=take_over)
        self._run = claim.run
        config = self._config(claim, all_here=all_here, local_ranks=local_ranks)
        with_peers: dict[str, Any] = {}
        if self._mirroring is not None:
            config, with_peers = self._mirroring.meet(self._ranks, config)
        pulse_fd, released = self._components.pulse.share(), self._pipeline.release
        self.keeper = keeper = Keeper(config, released=released, pulse_fd=pulse_fd, **with_peers)
        while self._early:
            self._early.pop(0)(keeper)
        self._components.watching.claimed(claim.number)
        self.restoration.end_claim(keeper)
        if self._interval is not None:
            self._interval.begin(keeper)
        if self._ranks.rank == 0:
            _warn_of_space(self._tiers.home, self._tiers.local)
        return keeper

    def _config(
        self, claim: runs.AttemptClaim, *, all_here: bool, local_ranks: tuple[int, ...]
    ) -> KeeperConfig:
        options = self._components.options
        return KeeperConfig(
            run=claim.run,
            attempt=claim.number,
            claim=runs.document(claim).decode(),
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            all_ranks_here=all_here,
            local_ranks=local_ranks,
            keep=options.keep,
            commit_timeout_s=max(self._commit_timeout_s, self._pause_limit_s),
            patience_s=options.limits.patience_s,
            pause_s=self._pause_limit_s,
            linger_s=min(30.0, self._commit_timeout_s),
            healthy_back=self._components.watching.goes_back,
            watches=self._components.watching.keeper_halves(),
            home=self._tiers.home,
            local=self._tiers.local,
            keep_local=1 if options.local is None else options.local.keep,
            bandwidth=options.home.bandwidth_bytes,
            compress=options.home.compress,
            keep_in_memory_s=options.memory.keep_for_s,
        )

    def _meet(self) -> tuple[bool, tuple[int, ...]]:
        """Wait for earlier keepers, agree on the state's names, and have the watches prepare.

        Returns:
            Whether all ranks are on this host, and which ranks share this one's local folder.

        Ranks: collective.
        """
        timeout_s, show = self._commit_timeout_s, self._components.show
        wait_for_closed(self._tiers.home, timeout_s=timeout_s, notify=show)
        wait_for_orphans(self._tiers.home, timeout_s=timeout_s, notify=show)
        self._pipeline.objects.agree(self._ranks.gather)
        self._components.watching.meet(self._ranks)  # every host's keepers have ended then
        return self._ranks.all_here(), self._ranks.ranks_sharing(self._tiers.local or "")

    def restore(self, selection: Selection) -> Restored | None:
        """Restore the newest checkpoint that verifies, or the selected one.

        Ranks: collective.
        """
        _, local_ranks = self._meet()
        if self.keeper is not None:
            self._components.metrics.flush(self.keeper)  # before its history goes back
        found = self.restoration.run(selection, self.keeper, run=self._run, local_ranks=local_ranks)
        if found is not None:
            self.ancestors = (*found.ancestors, found.checkpoint_id)
            self.step_sync.must_save = self._mirroring is not None and not found.is_in_store
            self._pipeline.plan = None  # the state was replaced
        return found

    # -- saves -----------------------------------------------------------------------------------------------
    def save(self, step: int, *, must: bool, to_home: bool = False) -> Save:
        """Begin a save of `step`, as `Pipeline.run`. Return the earlier one if the step was saved already."""
        pipeline, cadence = self._pipeline, self._components.cadence
        began, waited_before_s = time.perf_counter(), pipeline.waited_for_memory_s
        pipeline.stager.hook.check_threads()
        if self._pause_limit_s and not must:
            self._pause()
        self.surface()
        if self._mirroring is not None and self._mirroring.held is not None:
            self.restoration.free_memory()
        last = self.saves.last
        if last is not None and self.saves.has(step):
            return last
        self._check_step(step)
        keeper = self.begin()
        if self._keeps_best:
            self._warn_of_unmeasured()
            self.step_sync.score_alone(keeper)
        to_home = cadence.home.decide(
            step, time.monotonic(), must=must or to_home, alone=self._ranks.world_size == 1
        )
        save = Save(step)
        mirroring = None if keeper.config.peers is None else self._mirroring
        to_peers = mirroring is not None and mirroring.begin(step)
        pending = pipeline.run(
            save, keeper, ancestors=self.ancestors, to_home=to_home, to_peers=to_peers, must=must
        )
        if pending is None:
            self._skip(save, keeper)
            if mirroring is not None:
                mirroring.end(step, is_held=False)
            return save
        self.saves.add(pending)
        if to_home and self._keeps_best:
            self.step_sync.send_best_home(keeper)
        save.blocked_s = time.perf_counter() - began
        if self._guarantee is None:
            self._components.done.delete()  # the run is trained further
        self._note_guarantee(keeper)
        waited_s = pipeline.waited_for_memory_s - waited_before_s
        detail = f"waited {waited_s:.3f} s for memory" if waited_s >= _MIN_REPORTED_WAIT_S else ""
        keeper.record("saved", step=step, num_bytes=save.num_bytes, seconds=save.blocked_s, detail=detail)
        cadence.save(step, time.monotonic())
        return save

    def _pause(self) -> None:
        """Wait until the saves before are durable or have failed on all ranks; a notice ends the wait.

        Ranks: collective, as all pause for the one whose save is late.
        """
        saves, began_s = self.saves.pending, time.monotonic()
        reported_s = began_s
        while True:
            # New phases are no hang, however long the pause is.
            with self._components.pulse.phase("a pause until a save is durable"):
                late = next((save for save in saves if not _ends_soon(save)), None)
                must_stop = self._components.watching.stop_reason() is not None
                rows = self._ranks.gather((late is not None, must_stop))
            if not any(is_late for is_late, _ in rows) or any(is_preempted for _, is_preempted in rows):
                break
            now_s = time.monotonic()
            if late is not None and now_s - reported_s >= _PAUSE_LINE_S:
                reported_s = now_s
                _log.warning(
                    f"training is paused for at most {format_duration(self._pause_limit_s)} "
                    f'(Limits(failed_saves="pause")): step {late.step} is not durable after '
                    f"{format_duration(now_s - began_s)}. {late.wait_reason}"
                )
        for save in saves:
            if save.delay and self.keeper is not None:
                paused_s = time.monotonic() - began_s
                self.keeper.record("paused", step=save.step, seconds=paused_s, detail=save.delay)

    def delete(self, step: int) -> None:
        """Delete the checkpoints of `step` once a newer one is complete."""
        self._now_or_once_claimed(lambda keeper: keeper.delete(step))  # only a claimed attempt may delete

    def _check_step(self, step: int) -> None:
        """Check that a save of `step` may follow the last one."""
        last = self.saves.last
        if last is None or step > last.step:
            return
        if step < last.step:
            raise InvalidInput(
                f"Step {step} comes after step {last.step} was saved. To go back, call "
                "restore(step=...) first.",
                step=step,
            )
        if self._ranks.world_size > 1:
            # The others have saved this step, perhaps before a write that it includes now.
            raise InvalidInput(
                f"The save of step {step} has failed on rank {self._ranks.rank}, and cannot be made "
                "again under the same number: the other ranks have saved that step as it was then. "
                f"Earlier checkpoints remain. Save a later step. The cause: {last.failed}",
                step=step,
                rank=self._ranks.rank,
            )

    def _skip(self, save: Save, keeper: Keeper) -> None:
        self._pipeline.num_skipped += 1
        save.mark_skipped()
        message = (
            f"step {save.step} was skipped: earlier saves still hold all staging memory "
            f"({self._pipeline.num_skipped} so far)"
        )
        warn(f"{message}. Raise memory=, or save less often.", SaveWarning)
        keeper.record("skipped", step=save.step, detail=message)

    def _note_guarantee(self, keeper: Keeper) -> None:
        """Record how torn copies are detected, at the first save and when that changes."""
        guarantee = self._pipeline.guarantee()
        if guarantee == self._guarantee:
            return
        self._guarantee = guarantee
        keeper.record("tear-check", step=None, detail=guarantee)
        _log.debug(
            "rank %d of %s: torn copies are detected by %s", self._ranks.rank, self._tiers.home, guarantee
        )

    def _on_durable(self, save: Save) -> None:
        self._components.watching.notify("saved", save)
        if self._mirroring is not None and self.keeper is not None and not self.keeper.config.is_node_local:
            self.restoration.free_memory()
        self._components.cadence.meter.saved(blocked_s=save.blocked_s, durable_s=save.durable_s or 0.0)
        if self._interval is not None and self.keeper is not None:
            self._interval.note(save.step, self.keeper)

    def _report_failed(self, save: Save) -> None:
        if self.keeper is not None:
            report_to_job(JobReport(attempt=self.keeper.config.attempt, failed_save=save.step))

    # -- problems and waits ----------------------------------------------------------------------------------
    def surface(self) -> None:
        """Raise or warn about what has failed in the background since the last call."""
        with self.saves.lock:
            keeper = self.keeper
            if keeper is not None:
                self.warn_of_problems()
                if keeper.fenced is not None:
                    raise keeper.fenced
                if keeper.home_lost is not None:
                    raise keeper.home_lost
            self._components.watching.show_warnings()
            self.saves.surface()
            self.warn_if_overdue()

    def warn_of_problems(self) -> None:
        """Warn about problems of the keeper that have failed no save."""
        while self.keeper is not None and self.keeper.problems:
            warn(*self.keeper.problems.pop(0))

    def warn_if_overdue(self) -> None:
        """Warn that no save has succeeded for a long time. Each further warning waits twice as long."""
        overdue = self.saves.overdue()
        if overdue is None:
            return
        newest, (since_s, num_failed) = self.latest(), overdue
        found = f"The newest checkpoint is of step {newest}" if newest is not None else "No checkpoint exists"
        warn(
            f"NO SAVE HAS SUCCEEDED for {format_duration(since_s)}, in which {num_failed} failed. "
            f"{found}; a crash now would lose everything since. The reasons are in "
            f"`holdfast history {self._tiers.home}`.",
            SaveWarning,
        )

    def _warn_of_unmeasured(self) -> None:
        """Warn once if the last save has a metric of weights without a checkpoint."""
        keep, last = self._components.options.keep, self.saves.last
        if last is None or keep.best is None or keep.metric is None or self._has_warned_of_unmeasured:
            return
        measured = self._components.metrics.unsaved_step(last.step, keep.metric)
        if measured is not None:
            self._has_warned_of_unmeasured = True
            warn(
                f"The best checkpoint may have other weights than those measured: {keep.metric!r} was "
                f"recorded for step {measured}, which was not saved, so the checkpoint of step {last.step} "
                "has that value. Save where you evaluate: in a loop over steps(), call ckpt.save(step + 1) "
                f"before ckpt.record({keep.metric}=...).",
                SaveWarning,
            )

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all saves are durable, and the newest is in home."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self.saves.wait(deadline)
        self._wait_home(deadline)
        self.surface()

    def _wait_home(self, deadline: float | None) -> None:
        """Wait until the newest save is in home, whether or not it was due there."""
        save, keeper = self.saves.last, self.keeper
        if self._tiers.local is None or save is None or keeper is None or save.failed is not None:
            return
        self.step_sync.score_alone(keeper)
        self.step_sync.send_best_home(keeper)
        keeper.drain(save)
        try:
            save.wait_home(remaining_s(deadline))
        except RetryLater as error:
            if keeper.home_lost is not None:
                raise
            kind = TimedOut if isinstance(error, TimedOut) else RetryLater
            raise kind(
                f"Step {save.step} is complete in {self._tiers.local}, and not yet in {self._tiers.home}: "
                f"{error}",
                step=save.step,
            ) from error

    # -- history and end -------------------------------------------------------------------------------------
    def note(self, event: str, **facts: Any) -> None:
        """Write an event into the history, now or once the attempt is claimed."""
        self._now_or_once_claimed(lambda keeper: keeper.record(event, **facts))

    def _now_or_once_claimed(self, call: Callable[[Keeper], None]) -> None:
        if self.keeper is None:
            self._early.append(call)
        else:
            call(self.keeper)

    def note_end(self, reason: str) -> None:
        """Write into the history how this attempt ends; only the first call counts."""
        if self.keeper is None:
            return
        self.saves.settle()
        self._components.metrics.flush(self.keeper)
        self._warn_of_unmeasured()
        if not self._has_noted_end:
            self._has_noted_end = True
            newest = max(self._components.cadence.saved_step, self._components.metrics.num_done)
            self.keeper.record("ended", step=newest, detail=reason)

    def go_back(self, reason: str = "") -> Attempt:
        """End this attempt, and return the one that restores and saves from an earlier step."""
        with contextlib.suppress(HoldfastError):
            self.wait()  # training goes back, so a failed save no longer matters
        self._pipeline.stager.wait()
        if self.keeper is not None:
            self.note_end(f"went back ({reason})" if reason else "went back")
            self.keeper.close(frees_memory=True)
        if self._mirroring is not None:
            self._mirroring.close()
        return Attempt(self._components, run=self._run)


def _ends_soon(save: Save) -> bool:
    """Wait a moment for the end of a save, and return True if it came."""
    try:
        save.exception(_PAUSE_ROUND_S)
    except TimedOut:
        return False
    return True


def _warn_of_space(*places: str | None) -> None:
    """Log a warning for each folder without space for the next save. URLs and empty homes are not checked."""
    for place in places:
        if place is None:
            continue
        try:
            found = measure_space(place)
        except (HoldfastError, OSError):
            continue  # the first save reports what is wrong with it
        if found is not None and found.trouble:
            _log.warning(
                "%s: %s. Older checkpoints are deleted only once it is complete.", place, found.trouble
            )


_CHANGE = 1.5
"""Change of the interval from which it is recorded again."""


class SaveInterval:
    """Interval that the policy of one attempt chooses, on rank 0."""

    def __init__(self, components: Components, policy: EveryAuto) -> None:
        self._components, self._policy = components, policy
        self._failures: FailureRate | None = None
        self._noted_s: float | None = None
        self._noted_reason = ""

    def begin(self, keeper: Keeper) -> None:
        """Read the failures of the attempts before, if the policy uses them."""
        with contextlib.suppress(HoldfastError):  # without them the budget decides, as in a new run
            failures = read_failures(self._components.tiers.home_store, before=keeper.config.attempt)
            if failures.num_failures >= MIN_FAILURES:
                self._failures, self._components.cadence.mtbf_s = failures, failures.mtbf_s

    def note(self, step: int, keeper: Keeper) -> None:
        """Record the interval and its reason, if it has changed much since the last record."""
        cadence = self._components.cadence
        cost_s = cadence.meter.save_cost_s
        if cost_s is None:
            return
        found = self._policy.choose(cost_s, cadence.meter.durable_s, cadence.mtbf_s)
        last_s, is_same = self._noted_s, found.reason == self._noted_reason
        if is_same and last_s is not None and last_s / _CHANGE <= found.interval_s <= last_s * _CHANGE:
            return
        self._noted_s, self._noted_reason = found.interval_s, found.reason
        failures = self._failures
        known = (
            f"; {plural(failures.num_failures, 'failure')} in {format_duration(failures.up_s)} of training"
            if failures is not None
            else ""
        )
        every, cost = format_duration(found.interval_s), format_duration(cost_s)
        detail = f"a save every {every}, by {found.reason}; a save costs {cost}{known}"
        keeper.record("interval", step=step, seconds=found.interval_s, detail=detail)
