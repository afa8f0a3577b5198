"""Response to spikes of the recorded metrics: reported by rank 0, and decided by all ranks together."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.format.run import Rollback
from holdfast.checkpoint.home.patience import Patience
from holdfast.checkpoint.home.rollbacks import Rollbacks, find_healthy
from holdfast.checkpoint.run.attempt import Attempt
from holdfast.checkpoint.run.components import Components
from holdfast.checkpoint.run.metrics import ObservedSpike
from holdfast.errors import Diverged, HoldfastError, InvalidInput
from holdfast.system.environment import report_divergence
from holdfast.system.log import get_logger
from holdfast.system.units import plural

_log = get_logger("checkpoint.run")


@dataclass(frozen=True, slots=True)
class PlannedRollback:
    """Rollback that all ranks have agreed on.

    Attributes:
        first_step: first step of the spike.
        last_step: newest step of the training.
        reason: the value that is high.
        choices: checkpoints to go back to, the newest first.
        in_a_row: rollbacks without progress, with this one.
    """

    first_step: int
    last_step: int
    reason: str
    choices: tuple[CheckpointId, ...]
    in_a_row: int


class SpikeResponse:
    """Response of one rank, over all attempts of a Checkpointer.

    Attributes:
        planned: rollback that all ranks have agreed on; None while training need not go back.
        rollbacks: rollbacks of the run so far.
    """

    def __init__(self, components: Components) -> None:
        self.planned: PlannedRollback | None = None
        self.rollbacks = Rollbacks()
        self._components, self._option = components, components.options.spike
        self._spike: ObservedSpike | None = None  # the present one; on rank 0
        self._is_answered = False  # nothing more is done about it

    def check(self) -> None:
        """Check that training has gone back, where it must.

        Raises:
            InvalidInput: it continues behind a spike.
        """
        if self.planned is not None:
            raise InvalidInput(
                f"{self.planned.reason}, so training has to go back, and it continued. With "
                'on_spike="rollback" a loop of your own calls `step = ckpt.roll_back()` when `ckpt.spike` is '
                "set after should_save(), or counts by step_done(), or runs over steps(). Nothing was "
                "restored.",
                step=self.planned.last_step,
            )

    def observe(self, attempt: Attempt) -> bool:
        """Report a new spike. Return True if the ranks have to decide about one. On rank 0 only."""
        if self._option.action == "off" or self._components.ranks.rank != 0:
            return False
        spike = self._components.metrics.watch()
        if spike is None:
            self._spike, self._is_answered = None, False
            return False
        if self._spike is None:
            attempt.note("spike", step=spike.first_step, detail=spike.detail)
        self._spike = spike
        if self._option.action == "report" and not self._is_answered:
            self._is_answered = True
            _log.warning('SPIKE: %s. Nothing was done (on_spike="report").', spike.detail)
        return not self._is_answered

    def decide(self, step: int, attempt: Attempt) -> None:
        """Agree on the checkpoint to go back to, if there is one.

        Raises:
            Diverged: training went back as often as allowed.
            HoldfastError: home cannot be read.

        Ranks: collective.
        Blocks: until the saves under way are complete, and for the manifests of the newest checkpoints.
        """
        attempt.begin()
        with contextlib.suppress(HoldfastError):  # a save that fails is not chosen
            attempt.saves.wait(None)
        facts = self._components.ranks.of_rank_0(lambda: self._plan(step, attempt))
        if facts is None:
            return
        choices = tuple(CheckpointId(*row) for row in facts["choices"])
        self.planned = plan = PlannedRollback(**{**facts, "choices": choices})
        if plan.in_a_row > self._option.max_rollbacks:
            self.planned = None
            self._diverge(plan)

    def _plan(self, step: int, attempt: Attempt) -> dict[str, Any] | None:
        """Return the members of the planned rollback; None if training continues. On rank 0 only."""
        spike, keeper = self._spike, attempt.keeper
        self._is_answered = True
        if spike is None or keeper is None:
            return None  # it ended before the ranks could agree
        tiers, upto = self._components.tiers, self._newest_choice(spike)
        stores, newest = tiers.durable_stores(), CheckpointId(attempt=keeper.config.attempt, step=step)
        choices = Patience(tiers.restore_patience_s, self._components.show).spend(
            tiers.home,
            lambda: find_healthy(stores, newest, attempt.ancestors, run_id=keeper.config.run, upto_step=upto),
        )
        if not choices:
            text = (
                f"{spike.detail}. There is no healthy checkpoint to go back to, up to step {max(upto, 0)}: "
                "training continues"
            )
            attempt.note("spike", step=spike.first_step, detail=text)
            _log.warning("SPIKE: %s.", text)
            return None
        return {
            "first_step": spike.first_step,
            "last_step": step,
            "reason": spike.detail,
            "choices": [tuple(one) for one in choices],  # a message has no named tuples
            "in_a_row": self._count(choices[0].step),
        }

    def _newest_choice(self, spike: ObservedSpike) -> int:
        """Return the newest step to go back to: some steps before the spike.

        If a spike returns at once, its cause is rather in the data than in the state, which was good before.
        Then training goes back to the same checkpoint, and leaves out more.
        """
        upto, last = spike.first_step - 1 - self._option.back, self._last
        return upto if last is None or last.base_step >= spike.first_step else max(upto, last.base_step)

    @property
    def _last(self) -> Rollback | None:
        return self.rollbacks.found[-1] if self.rollbacks.found else None

    def _count(self, step: int) -> int:
        """Return the number of rollbacks in a row, with the one to `step`.

        A healthy checkpoint after the last spike is progress, and the count begins again. So each series of
        rollbacks ends with a later checkpoint than the one before, and there are only so many.
        """
        last = self._last
        return 1 if last is None or step > last.last_step else last.in_a_row + 1

    def _diverge(self, plan: PlannedRollback) -> None:
        newest = plan.choices[0]
        allowed = plural(self._option.max_rollbacks, "rollback")
        reason = f"{plan.reason}, again after {allowed} in a row"
        if self._components.ranks.rank == 0:
            report_divergence(plan.last_step, reason)
        raise Diverged(
            f"{reason}. Nothing was restored: the newest healthy checkpoint before the spike is step "
            f"{newest.step} of attempt {newest.attempt} in {self._components.tiers.home}. Look at the "
            "samples of these steps, or lower the learning rate, and start again: a restart resumes from the "
            "newest checkpoint, and restore(healthy=True) from a healthy one. Spike(max_rollbacks=) allows "
            "more rollbacks, and Spike(skip=) leaves out more samples in each.",
            step=plan.last_step,
        )

    def finish(self, rollback: Rollback) -> None:
        """Record a completed rollback."""
        self.planned, self._spike, self._is_answered = None, None, False
        self.rollbacks = Rollbacks((*self.rollbacks.found, rollback), self.rollbacks.unreadable)

    def restart(self, rollbacks: Rollbacks) -> None:
        """Continue after a restore.

        Args:
            rollbacks: those of the run.
        """
        self.planned, self._spike, self._is_answered = None, None, False
        self.rollbacks = rollbacks
