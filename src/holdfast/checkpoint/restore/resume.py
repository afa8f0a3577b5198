"""Restore of the newest or best checkpoint that verifies, the same one on every rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

from msgspec import Struct

from holdfast.checkpoint.format import names
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.format.part import Ancestors
from holdfast.checkpoint.home.losses import check_no_losses
from holdfast.checkpoint.home.newest import Patience, Skipped
from holdfast.checkpoint.ranks import RankOutcome, raise_first
from holdfast.checkpoint.restore.candidates import Request, find_candidates, gather_values
from holdfast.checkpoint.restore.stages import Restored, Stages
from holdfast.checkpoint.retention import best_first, line_of
from holdfast.errors import Corrupt, Denied, HoldfastError, NotFound, RetryLater, Unsupported
from holdfast.system.units import format_duration, plural, some

SKIPPABLE = (Corrupt, NotFound, Unsupported, RetryLater)
"""Errors that count against the checkpoint. Any other is the caller's or ours, and is raised.

After a RetryLater alone the checkpoint is tried again and never skipped: it may be whole.
"""
_FAILURE = "failed to restore the state"
SUPERSEDED = "superseded"
"""Kind of reason of a checkpoint that a newer attempt has gone back behind."""
_KINDS = {kind.kind: kind for kind in (Corrupt, Denied, NotFound, RetryLater, Unsupported)}


class Verdict(Struct, frozen=True):
    """Verdict on one checkpoint, equal on all ranks."""

    kinds: tuple[str, ...] = ()  # of the errors of all ranks; empty if there were none
    reason: str = ""
    ancestors: Ancestors | None = None  # None if no rank could read its manifest

    @property
    def is_good(self) -> bool:
        """True if no rank has failed."""
        return not self.kinds

    @property
    def is_unread(self) -> bool:
        """True if some rank could not read it, and no rank has found damage."""
        return bool(self.kinds) and all(kind == RetryLater.kind for kind in self.kinds)


def _judge(outcomes: Sequence[RankOutcome[Any]], rank: int, ancestors: Ancestors | None) -> Verdict:
    """Return the verdict after one stage, from the outcomes of all ranks."""
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    if not failed:
        return Verdict(ancestors=ancestors)
    others = [outcome for outcome in failed if not isinstance(outcome.error, SKIPPABLE)]
    raise_first(others, rank, _FAILURE)
    ranks: dict[str, list[int]] = {}
    for failure in failed:
        ranks.setdefault(str(failure.error), []).append(failure.rank)
    lines = [
        f"{'rank' if len(those) == 1 else 'ranks'} {some(those, 10)}: {text}" for text, those in ranks.items()
    ]
    kinds = tuple(one.error.kind for one in failed if isinstance(one.error, HoldfastError))
    return Verdict(kinds, " | ".join(lines), ancestors)


def _shown(checkpoint: CheckpointId) -> str:
    return f"step {checkpoint.step} of attempt {checkpoint.attempt}"


def restore_newest(request: Request) -> Restored | None:
    """Fill live objects from the newest checkpoint that every rank can verify.

    A checkpoint is skipped when it does not verify on some rank. One that cannot be read may be whole: its
    reads are retried, and then the restore raises. Saves that lack only their manifest are committed first,
    or read as they are. A checkpoint that a newer attempt went back behind is skipped, unless its step is
    requested.

    Returns:
        The restored checkpoint; None if the home holds none, so that training begins from zero.

    Ranks: collective; every rank returns the same step, None, or raises.
    Blocks: until all ranks are restored.
    """
    return _Restore(request).run()


class _Restore:
    """One rank's side of a restore over several candidates."""

    def __init__(self, request: Request) -> None:
        self._began = time.perf_counter()
        self._request, self._group, self._url = request, request.group, request.store.url
        self._patience = Patience(request.patience_s, request.show)
        self._found = find_candidates(request, self._patience)
        self._skipped = list(self._found.denied)
        self._kinds = {Denied.kind} if self._skipped else set[str]()  # of the reasons
        self._lines: dict[int, dict[int, int]] = {}  # attempt -> last step of each attempt that it continues
        self._unhealthy: list[str] = []  # checkpoints that were passed, with their health
        self._touched: set[str] = set()  # live tensors that may hold bytes of a skipped checkpoint

    def run(self) -> Restored | None:
        """Try the candidates in order; see `restore_newest`."""
        selection = self._request.selection
        order = self._order_by_value() if selection.best else self._found.found
        if selection.step is not None:
            order = [one for one in order if one.step == selection.step]
        for index, checkpoint in enumerate(order):
            if selection.choices is not None:
                if checkpoint not in selection.choices:
                    continue
            elif selection.step is None and not selection.best and self._skip_superseded(checkpoint):
                continue
            if selection.healthy and self._pass_unhealthy(checkpoint, order[index + 1 :]):
                continue
            stages, verdict = self._try_patiently(checkpoint, order[index + 1 :])
            if verdict.is_good:
                return self._complete(stages, verdict.ancestors or ())
            self._skip(checkpoint, verdict)
        self._show_lacking(CheckpointId(attempt=0, step=0))
        if self._unhealthy and not self._skipped:
            raise self._make_none_healthy_error()
        # A run begins from zero only in a home that shows no sign of a checkpoint, never unnoticed: note 001.
        if not order and selection.step is None and not self._skipped:
            check_no_losses(list(self._found.losses), self._url)
            return None
        raise self._make_none_good_error()

    # -- one candidate ---------------------------------------------------------------------------------------
    def _try_patiently(
        self, checkpoint: CheckpointId, older: Sequence[CheckpointId], *, only_open: bool = False
    ) -> tuple[Stages, Verdict]:
        """Try a checkpoint. Retry while some rank cannot read it, within rank 0's patience, then raise."""
        while True:
            stages = Stages(self._request, self._found, checkpoint, self._touched)
            verdict = self._try(stages, only_open=only_open)
            if not verdict.is_unread:
                self._patience.reset()
                return stages, verdict
            if not self._group.share(self._patience.lasts()):
                # It may be whole, so no older one is restored in its place: note 015.
                self._raise_unread(checkpoint, verdict, older)
            self._patience.pause(_shown(checkpoint), verdict.reason)

    def _try(self, stages: Stages, *, only_open: bool) -> Verdict:
        """Run the stages until some rank fails in one. All ranks agree after each."""
        group = self._group
        stages.exchange_parts()
        opened = group.agree(stages.open)
        rows = None
        for outcome in opened:
            if rows is None:  # [] is a checkpoint without ancestors
                rows = outcome.value
        ancestors = None if rows is None else tuple(CheckpointId(*row) for row in rows)
        verdict = _judge(opened, group.rank, ancestors)
        # Every rank judges the outcomes of all, and none begins a stage before all have completed the one
        # before. So nothing live changes unless every rank can read the checkpoint and fits it, and all ranks
        # end with the same step or the same error (note 043: nothing live changes before it is verified).
        for stage in () if only_open else (stages.check, stages.plan, stages.read):
            if not verdict.is_good:
                return verdict
            outcomes = group.agree(stage)
            verdict = _judge(outcomes, group.rank, ancestors)
            for outcome in outcomes:
                if outcome.value and verdict.is_good:
                    step = stages.manifest.step
                    raise Corrupt(
                        f"A newer checkpoint was found to be damaged after {some(outcome.value, 10)} had "
                        f"been read from it, and step {step} does not hold these. The live state mixes "
                        f"steps: make it anew, then restore step {step} by its number.",
                        step=step,
                        rank=outcome.rank,
                        key=outcome.value[0],
                    )
        if verdict.is_good and not only_open:
            raise_first(group.agree(stages.finish), group.rank, _FAILURE)
        return verdict

    # -- the order -------------------------------------------------------------------------------------------
    def _order_by_value(self) -> Sequence[CheckpointId]:
        """Return the checkpoints that the newest one continues and that have a value, best first."""
        keep, order = self._request.keep, self._found.found
        if not order:
            return order
        metric = keep.metric or ""
        found = gather_values(self._request, self._found, metric, self._patience)
        mode = found.choose_mode(keep.mode, metric)
        ordered = best_first(line_of(order, *self._find_newest()).current, found.values, mode)
        if not ordered:
            raise NotFound(
                f"{self._url} holds {plural(len(order), 'checkpoint')}, but none has a finite value of "
                f"{keep.metric!r}. Values are those given to record() for the step of a save. Nothing was "
                f"restored. `holdfast ls {self._url} --sort {keep.metric}` lists them."
            )
        return ordered

    def _find_newest(self) -> tuple[CheckpointId, Ancestors]:
        """Return the newest checkpoint whose manifest can be read, with its ancestors."""
        superseding = self._found.rollbacks.superseding
        order = [one for one in self._found.found if superseding(one) is None]
        for index, checkpoint in enumerate(order):
            _, verdict = self._try_patiently(checkpoint, order[index + 1 :], only_open=True)
            if verdict.is_good and verdict.ancestors is not None:
                return checkpoint, verdict.ancestors
        return self._found.found[0], ()

    def _pass_unhealthy(self, checkpoint: CheckpointId, older: Sequence[CheckpointId]) -> bool:
        """Pass a checkpoint that is not marked as healthy. Return False if it is, or cannot be read.

        All ranks have its manifest, so all decide the same.
        """
        stages, verdict = self._try_patiently(checkpoint, older, only_open=True)
        if not verdict.is_good:
            return False  # it is tried, and skipped with the reason
        health = stages.manifest.health
        if health.healthy:
            return False
        self._unhealthy.append(f"{_shown(checkpoint)} is {health.word}: {'; '.join(health.reasons)}")
        self._request.show(f"passed {self._unhealthy[-1]}")
        self._note_line(checkpoint, verdict.ancestors or ())
        return True

    def _make_none_healthy_error(self) -> NotFound:
        found = "\n  ".join(self._unhealthy[:10])
        return NotFound(
            f"{self._url} holds no checkpoint that is marked as healthy. Nothing was restored. Found:\n  "
            f"{found}\nrestore() restores the newest one, and restore(step=...) another one, whatever their "
            "health."
        )

    def _skip_superseded(self, checkpoint: CheckpointId) -> bool:
        """Skip a checkpoint if a newer attempt resumed from an older one. Otherwise return False."""
        newer = self._resumed_before(checkpoint)
        rollback = self._found.rollbacks.superseding(checkpoint)
        if newer is not None:
            base = list(self._lines[newer].values())[-1:] or [0]
            reason = f"superseded: attempt {newer} continued from step {base[0]}"
        elif rollback is not None:
            reason = f"superseded: training went back to step {rollback.base_step} ({rollback.reason})"
        else:
            return False
        self._skipped.append(
            Skipped(step=checkpoint.step, attempt=checkpoint.attempt, reason=reason, is_superseded=True)
        )
        self._kinds.add(SUPERSEDED)
        return True

    def _resumed_before(self, checkpoint: CheckpointId) -> int | None:
        """Return an attempt that resumed from an earlier step than a checkpoint's; None without one."""
        for newer, line in self._lines.items():
            if newer > checkpoint.attempt and checkpoint.step > line.get(checkpoint.attempt, -1):
                return newer
        return None

    def _note_line(self, checkpoint: CheckpointId, ancestors: Ancestors) -> None:
        """Remember what the attempt of a checkpoint continues."""
        self._lines[checkpoint.attempt] = {ancestor.attempt: ancestor.step for ancestor in ancestors}

    def _skip(self, checkpoint: CheckpointId, verdict: Verdict) -> None:
        self._skipped.append(Skipped(step=checkpoint.step, attempt=checkpoint.attempt, reason=verdict.reason))
        self._kinds |= {*verdict.kinds}
        if verdict.ancestors is not None:
            self._note_line(checkpoint, verdict.ancestors)

    # -- the end ---------------------------------------------------------------------------------------------
    def _complete(self, stages: Stages, ancestors: Ancestors) -> Restored:
        manifest, found = stages.manifest, self._found
        restored = manifest.checkpoint_id
        self._show_lacking(restored)
        for copy in self._request.store.copies() if self._group.rank == 0 else ():
            # The writer of its names may have been killed before they were durable.
            with suppress(HoldfastError):  # every byte is verified, and a save notices that the store fails
                copy.sync(names.step_dir(manifest.step))
        damaged = [skipped for skipped in self._skipped if not skipped.is_superseded]
        if damaged or restored in found.marked:
            self._mark(damaged, restored)
        return Restored(
            step=manifest.step,
            attempt=manifest.attempt,
            ancestors=ancestors,
            world_size=manifest.world_size,
            num_bytes=stages.stats.num_bytes,
            seconds=time.perf_counter() - self._began,
            skipped=tuple(self._skipped),
            sources=stages.stats.sources,
            recovered_from=stages.stats.recovered_from,
            finished=found.finished,
            whole=found.whole,
            seen=found.found,
            rollbacks=found.rollbacks,
            watches=manifest.watches,
            is_in_store=restored not in found.node_local,
            in_store=next((one for one in found.found if one not in found.node_local), None),
        )

    def _mark(self, skipped: Sequence[Skipped], restored: CheckpointId) -> None:
        """Record on every rank which checkpoints were skipped."""
        mark, patience = self._request.mark, self._patience
        noted = self._group.agree(
            lambda: patience.spend("The note about skipped checkpoints", lambda: mark(skipped, restored))
        )
        raise_first(noted, self._group.rank, _FAILURE)

    def _raise_unread(
        self, checkpoint: CheckpointId, verdict: Verdict, older: Sequence[CheckpointId]
    ) -> NoReturn:
        """Raise for a checkpoint that cannot be read, and mark it: an older one may be requested next."""
        request = self._request
        newest = Skipped(step=checkpoint.step, attempt=checkpoint.attempt, reason=verdict.reason)
        with suppress(HoldfastError):
            request.mark([newest], None)
        if verdict.ancestors is not None:
            self._note_line(checkpoint, verdict.ancestors)
        wanted = request.selection
        steps = [other.step for other in older if wanted.best or self._resumed_before(other) is None]
        step, touched, choice = newest.step, sorted(self._touched), ""
        if wanted.step is None and steps:
            choice = (
                f" To resume from an older one instead, call restore(step={steps[0]}); step {step} then "
                f"stays until you delete it with `holdfast rm {self._url} --step {step}`."
            )
        mixed = f" {some(touched, 3)} may hold bytes of it: do not train with them." if touched else ""
        raise RetryLater(
            f"Step {step} of attempt {newest.attempt} in {self._url} could not be read for "
            f"{format_duration(self._patience.spent_s)}: {newest.reason} It may be whole, so no older one "
            f"was restored in its place.{mixed} Start again when the store answers.{choice}",
            step=step,
        )

    def _make_none_good_error(self) -> HoldfastError:
        """Return the error for no usable checkpoint: Corrupt, or the kind that all reasons have."""
        step, num_touched = self._request.selection.step, len(self._touched)
        every = "".join(f"\n  step {one.step}, attempt {one.attempt}: {one.reason}" for one in self._skipped)
        asked = plural(len(self._skipped), "checkpoint") + ("" if step is None else f" of step {step}")
        mixed = f" {num_touched} live tensors may hold bytes of a damaged checkpoint: do not train with them."
        message = (
            f"{self._url} has {asked}, but none could be restored, and training must not start from zero "
            f"unnoticed.{mixed if num_touched else ''} Repair one, or start afresh in another home.{every}"
        )
        kind = next(iter(self._kinds)) if len(self._kinds) == 1 else Corrupt.kind
        return _KINDS.get(kind, Corrupt)(message, step=step)

    def _show_lacking(self, restored: CheckpointId) -> None:
        """Name the newer saves that are not complete, with the ranks whose files are missing."""
        for checkpoint, ranks in sorted(self._found.lacking.items(), reverse=True):
            if checkpoint > restored:
                self._request.show(
                    f"{_shown(checkpoint)} is incomplete: the files of ranks {some(ranks, 10)} are missing"
                )
