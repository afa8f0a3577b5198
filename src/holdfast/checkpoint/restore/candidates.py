"""Candidates of a restore: the checkpoints in the tiers of all ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.format.run import Rollback
from holdfast.checkpoint.home.documents import read_run
from holdfast.checkpoint.home.listing import Listing, candidates, list_home
from holdfast.checkpoint.home.losses import find_losses
from holdfast.checkpoint.home.metrics import MetricByCheckpoint, read_values
from holdfast.checkpoint.home.patience import Patience
from holdfast.checkpoint.home.recovery import merge_saved, recover_commit
from holdfast.checkpoint.home.rollbacks import NO_ROLLBACKS, Rollbacks, read_rollbacks
from holdfast.checkpoint.home.skipped import Skipped
from holdfast.checkpoint.ranks import raise_first, values_of
from holdfast.checkpoint.restore.node_local import Holding, NodeLocalCheckpoint, find_holdings, put_together
from holdfast.checkpoint.restore.request import Request
from holdfast.checkpoint.store.contract import Store
from holdfast.errors import Denied, NotFound, RetryLater


@dataclass(frozen=True, slots=True)
class Survey:
    """Checkpoints that rank 0 has found. Equal on all ranks."""

    run: str | None
    found: tuple[CheckpointId, ...] = ()  # newest first
    whole: tuple[CheckpointId, ...] = ()  # of these, those that lack their manifest
    denied: tuple[Skipped, ...] = ()  # where it could not be written
    finished: tuple[tuple[CheckpointId, str], ...] = ()  # where it was written, with the URL
    marked: tuple[CheckpointId, ...] = ()  # skipped by an earlier restore
    losses: tuple[str, ...] = ()  # signs of lost checkpoints, if none was found
    rollbacks: Rollbacks = NO_ROLLBACKS
    holdings: tuple[Holding, ...] = ()  # files in home of checkpoints that are not complete there


@dataclass(frozen=True, slots=True)
class Candidates:
    """Checkpoints that may be restored. Equal on all ranks."""

    survey: Survey
    order: tuple[CheckpointId, ...]  # newest first
    skipped: tuple[Skipped, ...]  # complete but for a manifest that could not be written
    node_local: Mapping[CheckpointId, NodeLocalCheckpoint]  # complete in all local folders and home together
    lacking: Mapping[CheckpointId, list[int]]  # ranks whose files no tier has

    @property
    def seen(self) -> tuple[CheckpointId, ...]:
        """Everything that could be restored."""
        return tuple({*self.survey.found, *self.node_local})


def find_candidates(request: Request, patience: Patience) -> Candidates:
    """Find the checkpoints that may be restored. Commits those that lack only their manifest.

    Ranks: collective.
    """
    survey = _survey(request, patience)
    node_local: dict[CheckpointId, NodeLocalCheckpoint] = {}
    lacking: dict[CheckpointId, list[int]] = {}
    if request.own_local is not None:
        node_local, lacking = _find_node_local(request.own_local, request, survey, patience)
    # By attempt, then step, never by time: clocks differ. An attempt continues what it restored: note 001.
    order = tuple(sorted({*survey.found, *node_local}, reverse=True))
    skipped = tuple(one for one in survey.denied if one.checkpoint_id not in node_local)
    if request.step is not None:
        skipped = tuple(one for one in skipped if one.step == request.step)
        if not skipped and not any(one.step == request.step for one in order):
            shown = ", ".join(f"{one.step} (attempt {one.attempt})" for one in order[:20]) or "none"
            raise NotFound(
                f"{request.store.url} does not contain a complete step {request.step}. Complete steps, "
                f"newest first: {shown}.",
                step=request.step,
            )
        order = tuple(one for one in order if one.step == request.step)
    return Candidates(survey, order, skipped, node_local, lacking)


def _survey(request: Request, patience: Patience) -> Survey:
    """List the tiers on rank 0: all of them, or only home if other ranks have other local folders."""
    store = request.store if request.own_local is None else request.store.copies()[-1]

    find = partial(patience.spend, store.url, partial(_list_tiers, store, request))
    if request.group.world_size == 1:
        return find()  # there is no other rank to send it to
    outcome = request.group.on_first(lambda: _as_message(find()))
    raise_first([outcome], request.group.rank, f"could not list {store.url}")
    return _from_message(outcome.value or {})


def _as_message(survey: Survey) -> dict[str, Any]:
    """Return the members of a survey for the other ranks: a message has no named tuples."""
    members = asdict(survey)
    for name in ("found", "whole", "marked"):
        members[name] = [tuple(one) for one in members[name]]
    members["finished"] = [(tuple(one), url) for one, url in survey.finished]
    return members


def _from_message(members: Mapping[str, Any]) -> Survey:
    checkpoints = {
        name: tuple(CheckpointId(*row) for row in members[name]) for name in ("found", "whole", "marked")
    }
    return Survey(
        run=members["run"],
        **checkpoints,
        denied=tuple(Skipped(**one) for one in members["denied"]),
        finished=tuple((CheckpointId(*row), url) for row, url in members["finished"]),
        losses=members["losses"],
        rollbacks=_rollbacks_of(members["rollbacks"]),
        holdings=tuple(Holding(**one) for one in members["holdings"]),
    )


def _rollbacks_of(members: Mapping[str, Any]) -> Rollbacks:
    return Rollbacks(tuple(Rollback(**one) for one in members["found"]), members["unreadable"])


def _list_tiers(store: Store, request: Request) -> Survey:
    """List every copy of a store, and complete the saves that lack only their manifest."""
    run = read_run(store)
    run_id = run.id if run else None
    homes = [(copy, list_home(copy)) for copy in store.copies()]
    complete = {found for _, home in homes for found in candidates(home)}
    marked = {one for _, home in homes for one, saved in home.saved.items() if saved.was_skipped}
    found, whole = set(complete), set[CheckpointId]()
    denied: list[Skipped] = []
    finished: list[tuple[CheckpointId, str]] = []
    for copy, home in homes:
        if not request.may_commit:
            whole.update(_find_whole(copy, home, run_id, complete, request.step))
            continue
        here = _finish_commits(copy, home, run_id, complete, denied, request.step)
        finished += here
        found.update(candidates(list_home(copy) if here else home))
    found |= whole
    is_alone = request.own_local is None
    return Survey(
        run=run_id,
        found=tuple(sorted(found, reverse=True)),
        whole=tuple(sorted(whole)),
        denied=tuple(denied),
        finished=tuple(finished),
        marked=tuple(sorted(marked)),
        losses=() if found else tuple(find_losses(store.copies())),
        rollbacks=read_rollbacks(store.copies(), run_id),
        holdings=() if is_alone else tuple(find_holdings(store, run_id, besides=found)),
    )


def _find_whole(
    store: Store, home: Listing, run_id: str | None, complete: Collection[CheckpointId], step: int | None
) -> Iterator[CheckpointId]:
    """Yield the saves that lack only their manifest, without writing it. See `_finish_commits`."""
    for saved in home.by_step():
        if step not in (None, saved.step) or saved.checkpoint_id in complete:
            continue
        if merge_saved(store, saved, run_id) is not None:
            yield saved.checkpoint_id


def _finish_commits(
    store: Store,
    home: Listing,
    run_id: str | None,
    complete: Collection[CheckpointId],
    denied: list[Skipped],
    step: int | None,
) -> list[tuple[CheckpointId, str]]:
    """Commit the saves that lack only their manifest. Return each with the store's URL.

    Args:
        store: one copy.
        complete: checkpoints that are complete in some copy; a failure to complete them here does no harm.
        denied: receives the saves that could not be completed, since the store refuses writes.
        step: consider this step only; None for all.
    """
    finished: list[tuple[CheckpointId, str]] = []
    for saved in home.by_step():
        if step not in (None, saved.step):
            continue
        try:
            if recover_commit(store, saved, run_id):
                finished.append((saved.checkpoint_id, store.url))
        except Denied as error:
            if saved.checkpoint_id not in complete:
                reason = f"its manifest is missing and could not be written: {error}"
                denied.append(Skipped(step=saved.step, attempt=saved.attempt, reason=reason))
        except RetryLater as error:
            if saved.checkpoint_id not in complete:
                raise RetryLater(
                    f"Step {saved.step} lacks only its manifest, which could not be written: {error}",
                    step=saved.step,
                ) from error
    return finished


def _find_node_local(
    own_local: Store, request: Request, survey: Survey, patience: Patience
) -> tuple[dict[CheckpointId, NodeLocalCheckpoint], dict[CheckpointId, list[int]]]:
    """Return the checkpoints that all folders and home hold together, and missing ranks of others."""

    def list_folder() -> list[dict[str, Any]]:
        found = patience.spend(
            own_local.url, lambda: find_holdings(own_local, survey.run, besides=survey.found)
        )
        return [one.wire() for one in found]

    group = request.group
    rows = values_of(group.agree(list_folder), group.rank, "could not list its local folder")
    found, lacking = put_together([[Holding(**one) for one in theirs] for theirs in rows], survey.holdings)
    return {one.checkpoint: one for one in found}, lacking


def gather_values(request: Request, found: Candidates, metric: str, patience: Patience) -> MetricByCheckpoint:
    """Return the values of a metric, from the tiers of all ranks.

    Ranks: collective.
    """
    store = request.store if request.group.rank == 0 else request.own_local

    def read() -> tuple[list[tuple[int, int, float]], str | None]:
        return ([], None) if store is None else _read_values(store, metric, found.order, patience)

    rows = values_of(
        request.group.agree(read), request.group.rank, "could not read the metrics of checkpoints"
    )
    values = {
        CheckpointId(attempt=attempt, step=step): value
        for theirs, _ in reversed(rows)
        for attempt, step, value in theirs
    }
    return MetricByCheckpoint(values, next((mode for _, mode in rows if mode is not None), None))


def _read_values(
    store: Store, metric: str, order: Sequence[CheckpointId], patience: Patience
) -> tuple[list[tuple[int, int, float]], str | None]:
    found = patience.spend(store.url, lambda: read_values(store, metric, order))
    return [(one.attempt, one.step, value) for one, value in found.values.items()], found.mode
