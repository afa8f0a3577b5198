"""Bring the newest checkpoint that verifies back into live objects, the same one on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

from holdfast.errors import (
    Conflict,
    Corrupt,
    Denied,
    HoldfastError,
    Internal,
    InvalidInput,
    NotFound,
    RetryLater,
    Unsupported,
)
from holdfast.format import names
from holdfast.format.manifest import Manifest
from holdfast.format.part import Ancestors
from holdfast.home.documents import check_listed, read_manifest, read_run
from holdfast.home.listing import Listing, candidates, list_home
from holdfast.home.losses import check_no_losses, find_losses
from holdfast.home.metrics import read_values
from holdfast.home.patience import LIMIT_S, Patience
from holdfast.home.recovery import merge_in_memory, merge_saved, recover_commit
from holdfast.home.skipped import Passed
from holdfast.policy import Keep, best_first, line_of
from holdfast.restore.fill import plan_fill
from holdfast.restore.parts import Parts
from holdfast.restore.read import Job, ReadStats, read
from holdfast.restore.scattered import Holding, Scattered, assemble, find_holdings, put_together, read_texts
from holdfast.restore.share import Exchange, Lending, read_shared
from holdfast.state.load import Target
from holdfast.store.contract import Store
from holdfast.store.nearest import Nearest
from holdfast.units import format_duration, plural

_PASSABLE = (Corrupt, NotFound, Unsupported, RetryLater)
"""What speaks against a checkpoint; any other error speaks against the caller or us, and is raised.

For RetryLater alone a checkpoint is tried again, and never passed over: it may be whole.
"""
_KINDS = {
    kind.kind: kind
    for kind in (
        *(Conflict, Corrupt, Denied, Internal, InvalidInput),
        *(NotFound, RetryLater, Unsupported, HoldfastError),
    )
}

Mark = Callable[[Sequence[Passed], "tuple[int, int] | None"], None]
"""Notes what was passed over, and drops the note about the (attempt, step) that was restored, if any."""


class Group(Exchange, Protocol):
    """The ranks of a restore; gathered and shared values are small and JSON-able."""

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank, on every rank. Collective."""
        ...

    def share(self, value: Any) -> Any:
        """Rank 0's value, on every rank. Collective."""
        ...


class Loading(Protocol):
    """A plan for filling live objects from one checkpoint; nothing live has changed when it is made."""

    @property
    def targets(self) -> Mapping[str, Target]:
        """Name of a saved tensor -> contiguous tensor of the saved dtype, and which box of it that is."""
        ...

    def finish(self) -> None:
        """Called once all targets of all ranks are filled and verified."""
        ...


RankFrom = Callable[[int, int, int], int]
"""From a rank, the number of ranks and the number that saved: the rank whose per-rank state it takes."""
StateLoad = Callable[[Manifest, Sequence[Mapping[str, Any]]], Loading]


@dataclass(frozen=True, slots=True)
class Restored:
    """What was restored, and what was passed over for it. Bytes and seconds are this rank's."""

    step: int
    attempt: int
    ancestors: Ancestors
    world_size: int  # ranks that saved it
    num_bytes: int
    seconds: float
    passed: tuple[Passed, ...]
    sources: Mapping[str, int]  # bytes by the URL of the tier they came from
    mended: tuple[str, ...]  # what was wrong with nearer copies of what a farther tier had
    finished: tuple[tuple[int, int, str], ...] = ()  # (step, attempt, where) that lacked only their manifest
    whole: tuple[tuple[int, int], ...] = ()  # (attempt, step) that still lack it, since nothing was committed
    seen: tuple[tuple[int, int], ...] = ()  # (attempt, step) of everything that could have been restored


@dataclass(slots=True)
class _Result:
    """How a stage went on this rank; its `wire()` form travels."""

    kind: str = ""  # "" is success
    message: str = ""
    is_fatal: bool = False
    error: BaseException | None = None  # stays on its rank

    def wire(self) -> list[Any]:
        return [self.kind, self.message, self.is_fatal]


@contextmanager
def _stage(result: _Result, *, passable: tuple[type[HoldfastError], ...] = _PASSABLE) -> Iterator[None]:
    """Turn whatever goes wrong inside into a result, so that no rank is missing from the next collective."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - what is not passable is raised by `_agree`, once all ranks know
        known = isinstance(error, HoldfastError)
        result.kind = error.kind if known else HoldfastError.kind
        result.message = str(error) if known else f"{type(error).__name__}: {error}"
        result.is_fatal = not isinstance(error, passable)
        result.error = error


def restore_newest(
    store: Store,
    state_load: StateLoad,
    *,
    rank: int,
    world_size: int,
    group: Group,
    step: int | None = None,
    best: Keep | None = None,
    num_threads: int | None = None,
    on_bytes: Callable[[int], None] | None = None,
    share_reads: bool = False,
    rank_from: RankFrom | None = None,
    own_local: Store | None = None,
    may_commit: bool = True,
    say: Callable[[str], None] = lambda _: None,
    patience_s: float = LIMIT_S,
    mark: Mark = lambda passed, restored: None,
) -> Restored | None:
    """Fill live objects from the newest checkpoint that every rank can verify.

    A checkpoint is passed over when it does not verify on some rank. One that cannot be read may be whole: it
    is tried again for `patience_s`, and then the restore ends with an error.

    Saves that lack only their manifest are committed first, or read as they are. A checkpoint that a newer
    attempt went back behind is not fallen back to; it can be asked for by its step.

    Args:
        store: the home.
        state_load: makes the plan for filling this rank's live objects from a checkpoint and its values:
            those of rank `rank` modulo the saved world size, then those of one rank of each other structure.
        rank: this rank.
        world_size: number of ranks that restore; need not be the number that saved.
        group: the ranks that restore.
        step: restore this step and no other; the attempts that saved it are tried newest first.
        best: restore the best checkpoint by the metric of this policy.
        num_threads: threads that read, hash and copy; None for what suits the places that are nearest.
        on_bytes: called with the bytes of each read when it is done; never by two threads at once.
        share_reads: have each chunk read by one of the ranks that need it, which passes it on to the others.
        rank_from: chooses the saved rank whose per-rank state a rank takes; default `rank % saved`.
        own_local: this rank's local folder, if other ranks have others: then what lies in all of them and in
            home counts together, and ranks pass on what others lack.
        may_commit: write the manifests that are lacking; False for those who have not claimed an attempt, and
            may be beside a living writer.
        say: told in a line of each save that is newer than what is restored, and not all there.
        patience_s: seconds for which what cannot be read is tried again.
        mark: notes durably what was passed over, so that retention keeps it. Called on every rank, tried
            again while it raises RetryLater.

    Returns:
        What was restored; None if the home holds no checkpoint, so that training starts afresh.

    Raises:
        NotFound: there is no checkpoint of `step`; or `best`, but none has a finite value of the metric.
        Corrupt: there are checkpoints, but none that every rank could restore; each is named with the reason.
            Or there is none, but signs that there were.
            Or what can be restored does not hold tensors that a damaged one had already been read into.
        RetryLater: the home, or the newest checkpoint, could not be read on some rank within `patience_s`.
        Denied: a store refuses access.
        NotFound, Unsupported: there are checkpoints, all passed over for this kind of reason.
        InvalidInput: the live objects do not fit the checkpoint, on some rank.
        HoldfastError: another rank failed with an error that is none of Holdfast's.

    Ranks: collective; every rank returns the same step, None, or raises.
    Blocks: until all ranks are restored.
    """
    began = time.perf_counter()
    patience = Patience(patience_s, say)
    survey = _survey(store, rank, group, patience, step=step, alone=own_local is None, may_commit=may_commit)
    scattered, lacking = (
        _spread(own_local, rank, group, survey, patience) if own_local is not None else ({}, {})
    )
    every, passed = _choose(store.url, survey, scattered, step)
    one = _Restore(
        store,
        state_load,
        rank,
        world_size,
        group,
        num_threads,
        on_bytes,
        survey["run"],
        share_reads=share_reads and world_size > 1,
        rank_from=rank_from,
        scattered=scattered,
        whole={(attempt, number) for attempt, number in survey["whole"]},
    )
    if best is not None:
        every = _order_by_value(one, every, best, store if rank == 0 else own_local, patience)
    kinds = [Denied.kind] * len(passed)
    lines: dict[int, dict[int, int]] = {}  # attempt -> the last step of each attempt that it continues
    for attempt, number in every:
        behind = _attempts_resumed_before(attempt, number, lines)
        if step is None and best is None and behind:
            base = list(lines[behind[0]].values())[-1:] or [0]
            reason = f"superseded: attempt {behind[0]} went on from step {base[0]}"
            passed.append(Passed(number, attempt, reason, is_superseded=True))
            kinds.append("superseded")
            continue
        tried = _try_patiently(one.attempt, number, attempt, patience, group)
        if tried.is_unread:
            with suppress(HoldfastError):  # an older one may be asked for by its number next
                mark([Passed(number, attempt, tried.reason)], None)
            if tried.ancestors is not None:
                lines[attempt] = dict(tried.ancestors)
            left = every[every.index((attempt, number)) + 1 :] if step is None else ()
            older = [s for a, s in left if best is not None or not _attempts_resumed_before(a, s, lines)]
            newest = Passed(number, attempt, tried.reason)
            raise _unread(store.url, newest, patience.spent_s, older, one.touched)
        patience.reset()
        if tried.kinds:
            passed.append(Passed(number, attempt, tried.reason))
            kinds += tried.kinds
            if tried.ancestors is not None:
                lines[attempt] = dict(tried.ancestors)
            continue
        _tell_lacking(lacking, (attempt, number), say)
        _make_durable(store, number, rank)
        marked = [one for one in passed if not one.is_superseded]
        if marked or [attempt, number] in map(list, survey["marked"]):
            one.mark(partial(mark, marked, (attempt, number)), patience)
        return Restored(
            step=number,
            attempt=attempt,
            ancestors=tried.ancestors or (),
            world_size=tried.saved_world_size,
            num_bytes=tried.stats.num_bytes,
            seconds=time.perf_counter() - began,
            passed=tuple(passed),
            sources=tried.stats.sources,
            mended=tried.stats.mended,
            finished=tuple((s, a, url) for s, a, url in survey["finished"]),
            whole=tuple((a, s) for a, s in survey["whole"]),
            seen=tuple({(a, s) for a, s in survey["candidates"]} | scattered.keys()),
        )
    _tell_lacking(lacking, (0, 0), say)
    if not every and step is None and not passed:
        check_no_losses(survey["losses"], store.url)
        return None
    raise _none_good(store.url, passed, kinds, one.touched, step)


def _try_patiently(
    call: Callable[[int, int], _Tried], step: int, attempt: int, patience: Patience, group: Group
) -> _Tried:
    """Try a candidate, and again while some rank cannot read it and rank 0's patience lasts."""
    tried = call(step, attempt)
    while tried.is_unread and group.share(patience.lasts()):
        patience.pause(f"step {step} of attempt {attempt}", tried.reason)
        tried = call(step, attempt)
    return tried


def _make_durable(store: Store, step: int, rank: int) -> None:
    """Make the names of a restored checkpoint durable, whose writer may have been killed before that."""
    for copy in store.copies() if rank == 0 else ():
        with suppress(HoldfastError):  # every byte verified, and saving will find out that the store fails
            copy.sync(names.step_dir(step))


def _survey(
    store: Store,
    rank: int,
    group: Group,
    patience: Patience,
    *,
    step: int | None,
    alone: bool,
    may_commit: bool,
) -> dict[str, Any]:
    """Rank 0's look at the home, on every rank.

    Args:
        store: all tiers of this rank.
        rank: this rank.
        group: the ranks.
        patience: for what cannot be read.
        step: complete saves of this step only; None for all.
        alone: all ranks see the same tiers; else rank 0 looks into home only.
        may_commit: write the manifests that are lacking.
    """
    result, found = _Result(), {}
    if rank == 0:
        seen = store if alone else store.copies()[-1]
        with _stage(result):
            found = patience.spend(store.url, lambda: _look(seen, step, may_commit=may_commit))
            if not alone:
                besides = {(a, s) for a, s in found["candidates"]}
                in_home = patience.spend(
                    store.url, lambda: find_holdings(seen, found["run"], besides=besides)
                )
                found["holdings"] = [one.wire() for one in in_home]
    shared = group.share([result.wire(), found])
    if shared[0][0]:
        if result.error is not None:
            raise result.error
        kind, message, _ = shared[0]
        raise _KINDS[kind](f"Rank 0 could not look into {store.url}: {message}", rank=0)
    return shared[1]


def _look(store: Store, step: int | None, *, may_commit: bool) -> dict[str, Any]:
    run = read_run(store)
    run_id = run.id if run else None
    homes = [(copy, list_home(copy)) for copy in store.copies()]
    complete = {found for _, home in homes for found in candidates(home)}
    marked = {(one.attempt, one.step) for _, home in homes for one in home.saved.values() if one.was_passed}
    found, whole, passed, finished = set(complete), set[tuple[int, int]](), [], []
    for copy, home in homes:
        if not may_commit:
            whole.update(_find_whole(copy, home, run_id, complete, step))
            continue
        here = _finish_commits(copy, home, run_id, complete, passed, step)
        finished += here
        found.update(candidates(list_home(copy) if here else home))
    return {
        "run": run_id,
        "candidates": sorted(found | whole, reverse=True),
        "whole": sorted(whole),
        "passed": passed,
        "finished": finished,
        "marked": sorted(marked),
        "losses": [] if found or whole else find_losses(store.copies()),
    }


def _find_whole(
    store: Store,
    home: Listing,
    run_id: str | None,
    complete: Collection[tuple[int, int]],
    step: int | None,
) -> Iterator[tuple[int, int]]:
    """Find what lacks only its manifest, and leave it so; the arguments are those of `_finish_commits`.

    Raises:
        RetryLater: the store failed.
    """
    for (saved_step, attempt), saved in sorted(home.saved.items()):
        if step not in (None, saved_step) or (attempt, saved_step) in complete:
            continue
        if merge_saved(store, saved, run_id) is not None:
            yield attempt, saved_step


def _finish_commits(
    store: Store,
    home: Listing,
    run_id: str | None,
    complete: Collection[tuple[int, int]],
    passed: list[list[Any]],
    step: int | None,
) -> list[list[Any]]:
    """Commit what lacks only its manifest, and return it as (step, attempt, URL).

    Args:
        store: one copy.
        home: its listing.
        run_id: the run.
        complete: checkpoints that some copy has whole; a failure to complete them here does no harm.
        passed: gets what could not be completed, since the store may not be written to.
        step: complete saves of this step only; None for all.

    Raises:
        RetryLater: the store failed.
    """
    finished: list[list[Any]] = []
    for (saved_step, attempt), saved in sorted(home.saved.items()):
        if step not in (None, saved_step):
            continue
        try:
            if recover_commit(store, saved, run_id):
                finished.append([saved_step, attempt, store.url])
        except Denied as error:
            if (attempt, saved_step) not in complete:
                reason = f"its manifest is missing and could not be written: {error}"
                passed.append([saved_step, attempt, reason])
        except RetryLater as error:
            if (attempt, saved_step) not in complete:
                message = f"Step {saved_step} lacks only its manifest, which could not be written: {error}"
                raise RetryLater(message, step=saved_step) from error
    return finished


def _spread(
    own_local: Store, rank: int, group: Group, survey: dict[str, Any], patience: Patience
) -> tuple[dict[tuple[int, int], Scattered], dict[tuple[int, int], list[int]]]:
    """What all folders and home hold together: the complete checkpoints, and what others lack.

    Raises:
        HoldfastError: a rank could not look into its folder.
    """
    result, mine = _Result(), []
    besides = {(attempt, step) for attempt, step in survey["candidates"]}
    with _stage(result):
        holdings = patience.spend(
            own_local.url, lambda: find_holdings(own_local, survey["run"], besides=besides)
        )
        mine = [one.wire() for one in holdings]
    rows = group.gather([result.wire(), mine])
    for other, ((kind, text, _), _) in enumerate(rows):
        if kind and other == rank and result.error is not None:
            raise result.error
        if kind:
            raise _KINDS.get(kind, HoldfastError)(
                f"Rank {other} could not look into its local folder: {text}", rank=other
            )
    local = [[Holding(**one) for one in theirs] for _, theirs in rows]
    found, lacking = put_together(local, [Holding(**one) for one in survey["holdings"]])
    return {(one.attempt, one.step): one for one in found}, lacking


def _choose(
    url: str, survey: dict[str, Any], scattered: Mapping[tuple[int, int], Scattered], step: int | None
) -> tuple[list[tuple[int, int]], list[Passed]]:
    """The candidates, newest first, and what is passed over already; the same on every rank.

    Raises:
        NotFound: there is nothing of `step`.
    """
    every = sorted({(a, s) for a, s in survey["candidates"]} | scattered.keys(), reverse=True)
    passed = [Passed(*row) for row in survey["passed"]]
    passed = [one for one in passed if (one.attempt, one.step) not in scattered]
    if step is None:
        return every, passed
    passed = [one for one in passed if one.step == step]
    if not passed and not any(found == step for _, found in every):
        shown = ", ".join(f"{s} (attempt {a})" for a, s in every[:20]) or "none"
        message = f"{url} holds no complete step {step}. Complete steps, newest first: {shown}."
        raise NotFound(message, step=step)
    return [pair for pair in every if pair[1] == step], passed


def _order_by_value(
    one: _Restore, every: list[tuple[int, int]], keep: Keep, store: Store | None, patience: Patience
) -> list[tuple[int, int]]:
    """Return the checkpoints that the newest one continues and that have a value, best first.

    Raises:
        NotFound: there are checkpoints, but none has a finite value.
        HoldfastError: a rank could not read its tiers.
    """
    if not every:
        return every
    values = _gather_values(store, every, keep.metric or "", one.group, patience)
    newest = _find_ancestors(one, every, patience)
    found = best_first(line_of(every, *newest).current, values, keep.mode)
    if not found:
        raise NotFound(
            f"{one.url} holds {plural(len(every), 'checkpoint')}, but none has a finite value of "
            f"{keep.metric!r}. Values are those given to record() for the step of a save. Nothing was "
            f"restored. `holdfast ls {one.url} --sort {keep.metric}` lists them."
        )
    return found


def _gather_values(
    store: Store | None, every: Sequence[tuple[int, int]], metric: str, group: Group, patience: Patience
) -> dict[tuple[int, int], float]:
    """Return the value of a metric by checkpoint, as the tiers of all ranks have it.

    Raises:
        HoldfastError: a rank could not read its tiers.
    """
    result, found = _Result(), dict[tuple[int, int], float]()
    with _stage(result):
        if store is not None:
            found = patience.spend(store.url, lambda: read_values(store, metric, every))
    rows = group.gather([result.wire(), [[*one, repr(value)] for one, value in found.items()]])
    for rank, ((kind, text, _), _) in enumerate(rows):
        if kind and result.error is not None:
            raise result.error
        if kind:
            raise _KINDS.get(kind, HoldfastError)(f"Rank {rank} could not read metrics: {text}", rank=rank)
    return {(attempt, step): float(value) for _, theirs in reversed(rows) for attempt, step, value in theirs}


def _find_ancestors(
    one: _Restore, every: Sequence[tuple[int, int]], patience: Patience
) -> tuple[tuple[int, int], Ancestors]:
    """Return the newest checkpoint that can be opened, with its ancestors.

    Raises:
        RetryLater: the newest checkpoint could not be read.
        Corrupt: none can be opened.
    """
    for attempt, number in every:
        tried = _try_patiently(one.look, number, attempt, patience, one.group)
        if tried.is_unread:
            raise RetryLater(f"Step {number} of attempt {attempt} could not be read: {tried.reason}")
        patience.reset()
        if not tried.kinds and tried.ancestors is not None:
            return (attempt, number), tried.ancestors
    return every[0], ()


def _tell_lacking(
    lacking: Mapping[tuple[int, int], list[int]], restored: tuple[int, int], say: Callable[[str], None]
) -> None:
    for (attempt, step), ranks in sorted(lacking.items(), reverse=True):
        if (attempt, step) > restored:
            files = f"the files of ranks {_some(ranks)}"
            say(f"step {step} of attempt {attempt} is not complete: nobody has {files}")


_NO_READ = ReadStats(0, 0, 0.0)


@dataclass(slots=True)
class _Tried:
    """What came of one candidate, the same on every rank but for `stats`."""

    kinds: list[str]  # of the reasons against it; none: it is restored
    reason: str = ""
    ancestors: Ancestors | None = None  # None: no rank could read its manifest
    saved_world_size: int = 0
    stats: ReadStats = _NO_READ

    @property
    def is_unread(self) -> bool:
        """True if some rank could not read it, and none found anything wrong with its bytes."""
        return bool(self.kinds) and all(kind == RetryLater.kind for kind in self.kinds)


class _Restore:
    """One rank's side of a restore over several candidates."""

    def __init__(
        self,
        store: Store,
        state_load: StateLoad,
        rank: int,
        world_size: int,
        group: Group,
        num_threads: int | None,
        on_bytes: Callable[[int], None] | None,
        run_id: str | None,
        *,
        share_reads: bool,
        rank_from: RankFrom | None,
        scattered: Mapping[tuple[int, int], Scattered],
        whole: Collection[tuple[int, int]],
    ) -> None:
        self.touched: set[str] = set()  # names of targets that may hold bytes of a checkpoint passed over
        self.group, self.url = group, store.url
        self._store = store
        self._state_load = state_load
        self._rank = rank
        self._world_size = world_size
        self._group = group
        self._num_threads = num_threads
        self._on_bytes = on_bytes
        self._run_id = run_id
        self._share_reads = share_reads
        self._rank_from = rank_from
        self._scattered = scattered
        self._whole = whole  # (attempt, step) of candidates that lack their manifest

    def attempt(self, step: int, attempt: int) -> _Tried:
        """Restore one candidate, or learn on all ranks why not.

        The cheap checks are agreed on before any rank changes anything live.
        """
        return self._attempt(step, attempt, only_look=False)

    def look(self, step: int, attempt: int) -> _Tried:
        """Open one candidate without restoring it, or learn on all ranks why not."""
        return self._attempt(step, attempt, only_look=True)

    def _attempt(self, step: int, attempt: int, *, only_look: bool) -> _Tried:
        result, lines = _Result(), []
        spread = self._scattered.get((attempt, step))
        told = None if spread is None else self._exchange_parts(spread)
        with _stage(result):
            store, listings = self._store, []
            if spread is not None and told is not None:
                listings = [spread.listing]
                store = Nearest([assemble(spread, _texts_of(told)), *store.copies()])
            elif (attempt, step) in self._whole:
                made = merge_in_memory(store, step, attempt, self._run_id)
                store = store if made is None else Nearest([made, *store.copies()])
            manifest = read_manifest(store, step, attempt, self._run_id)
            lines.append(manifest.ancestors)
            check_listed(store, manifest, besides=listings)
            parts = Parts(store, manifest)
            source = self._source(manifest)
            values = [parts.part(rank).values for rank in parts.structures(source)]
        against, ancestors = self._agree(result, lines)
        if against or only_look:
            return _Tried(*_reason(against), ancestors=ancestors)
        loading, jobs = self._plan(result, manifest, values, parts)
        if self._share_reads or spread is not None:
            against, _ = self._agree(result, lines)  # a rank without a plan would be waited for
            if against:
                return _Tried(*_reason(against), ancestors=ancestors)
        stats = self._read(result, loading, jobs, spread, parts)
        against, _ = self._agree(result, lines)
        if against:
            return _Tried(*_reason(against), ancestors=ancestors)
        with _stage(result, passable=()):
            loading.finish()
        self._agree(result, lines)
        return _Tried([], ancestors=ancestors, saved_world_size=manifest.world_size, stats=stats)

    def _exchange_parts(self, spread: Scattered) -> list[tuple[_Result, dict[int, str]]]:
        """What each rank tells of the parts that it alone is to tell."""
        result, told = _Result(), {}
        with _stage(result):
            told = read_texts(self._store, spread.sent_by(self._rank))
        # As rows: the keys of what travels may become strings.
        rows = self._group.gather([result.wire(), list(told.items())])
        others = [(_Result(*wire), dict(theirs)) for wire, theirs in rows]
        return [(result, told) if rank == self._rank else row for rank, row in enumerate(others)]

    def _source(self, manifest: Manifest) -> int:
        """The saved rank whose per-rank state this rank takes.

        Raises:
            InvalidInput: the hook answers a rank that there was not.
        """
        saved = manifest.world_size
        if self._rank_from is None:
            return self._rank % saved
        source = self._rank_from(self._rank, self._world_size, saved)
        if source not in range(saved):
            message = (
                f"rank_from answered {source!r} for rank {self._rank} of {self._world_size}; the checkpoint "
                f"was saved by ranks 0 to {saved - 1}. Nothing was changed."
            )
            raise InvalidInput(message, step=manifest.step, rank=self._rank)
        return source

    def _plan(
        self, result: _Result, manifest: Manifest, values: Sequence[Mapping[str, Any]], parts: Parts
    ) -> tuple[Loading, list[Job]]:
        """Plan what is read; what it returns counts only if `result` is a success."""
        loading, jobs = _NOTHING, []
        with _stage(result):
            loading = self._state_load(manifest, values)
        if not result.kind:
            with _stage(result, passable=()):
                self._check_left_over(loading, manifest)
        if not result.kind:
            with _stage(result):
                jobs = plan_fill(manifest, loading.targets, self._source(manifest), parts)
        return loading, jobs

    def _read(
        self, result: _Result, loading: Loading, jobs: list[Job], spread: Scattered | None, parts: Parts
    ) -> ReadStats:
        """Fill the targets, if `result` is a success so far; answers what this rank has read."""
        stats = _NO_READ
        if not result.kind:
            with _stage(result):
                self.touched.update(loading.targets)
                if spread is not None:
                    stats = self._read_spread(jobs, spread, parts)
                elif self._share_reads:
                    stats = read_shared(self._store, jobs, self._group, on_bytes=self._on_bytes)
                else:
                    stats = read(self._store, jobs, num_threads=self._num_threads, on_bytes=self._on_bytes)
        return stats

    def _read_spread(self, jobs: list[Job], spread: Scattered, parts: Parts) -> ReadStats:
        """Read what this rank's own tiers have, and take the rest from ranks whose tiers have it."""
        near = [job for job in jobs if self._rank in spread.holders[job.part.rank]]
        far = [job for job in jobs if self._rank not in spread.holders[job.part.rank]]
        # First what others may need from us: whoever fails below must not be waited for.
        lending = Lending(spread.holders, parts.part)
        lent = read_shared(self._store, far, self._group, on_bytes=self._on_bytes, lending=lending)
        own = read(self._store, near, num_threads=self._num_threads, on_bytes=self._on_bytes)
        return lent.plus(own)

    def mark(self, mark: Callable[[], None], patience: Patience) -> None:
        """Note what was passed over, on every rank.

        Raises:
            HoldfastError: some rank could not: retention would delete what was passed over.
        """
        result = _Result()
        with _stage(result, passable=()):
            patience.spend("The note about what was passed over", mark)
        self._agree(result, [])

    def _check_left_over(self, loading: Loading, manifest: Manifest) -> None:
        left = sorted(self.touched - loading.targets.keys())
        if left:
            message = (
                f"A newer checkpoint was found to be damaged after {_some(left)} had been read from it, and "
                f"step {manifest.step} does not hold these. The live state mixes steps: make it anew, then "
                f"restore step {manifest.step} by its number."
            )
            raise Corrupt(message, step=manifest.step, rank=self._rank, key=left[0])

    def _agree(
        self, result: _Result, lines: list[Ancestors]
    ) -> tuple[list[tuple[int, str, str]], Ancestors | None]:
        """(rank, kind, message) of every rank that speaks against the candidate, and its ancestors.

        Raises:
            HoldfastError: a rank failed in a way that no other checkpoint would mend.
        """
        rows = self._group.gather([result.wire(), lines])
        found = [tuple((a, s) for a, s in line) for _, known in rows for line in known]
        against = [(rank, kind, text) for rank, ((kind, text, _), _) in enumerate(rows) if kind]
        fatal = [(rank, kind, text) for rank, ((kind, text, is_fatal), _) in enumerate(rows) if is_fatal]
        if fatal and result.is_fatal and result.error is not None:
            raise result.error
        if fatal:
            rank, kind, text = fatal[0]
            raise _KINDS.get(kind, HoldfastError)(f"Restoring failed on rank {rank}: {text}", rank=rank)
        return against, (found[0] if found else None)


def _texts_of(told: list[tuple[_Result, dict[int, str]]]) -> dict[int, str]:
    """The parts that all ranks together have told, by the rank that saved.

    Raises:
        HoldfastError: a rank could not tell its own.
    """
    for rank, (result, _) in enumerate(told):
        if result.error is not None:
            raise result.error
        if result.kind:
            message = f"rank {rank} could not tell the parts that it has: {result.message}"
            raise _KINDS.get(result.kind, HoldfastError)(message, rank=rank)
    return {rank: text for _, texts in told for rank, text in texts.items()}


def _unread(url: str, newest: Passed, seconds: float, older: Sequence[int], touched: set[str]) -> RetryLater:
    """Return the error for a checkpoint that cannot be read.

    Args:
        url: of the home.
        newest: the checkpoint, and why it could not be read.
        seconds: for which it was tried.
        older: steps that can be restored in its place, newest first.
        touched: names of live tensors that may hold bytes of it.
    """
    step = newest.step
    choice = (
        f" To resume from an older one instead, call restore(step={older[0]}); step {step} then stays until "
        f"you delete it with `holdfast rm {url} --step {step}`."
        if older
        else ""
    )
    mixed = f" {_some(sorted(touched), 3)} may hold bytes of it: do not train with them." if touched else ""
    message = (
        f"Step {step} of attempt {newest.attempt} in {url} could not be read for {format_duration(seconds)}: "
        f"{newest.reason} It may be whole, so no older one was restored in its place.{mixed} Start again "
        f"when the store answers.{choice}"
    )
    return RetryLater(message, step=step)


def _attempts_resumed_before(attempt: int, step: int, lines: Mapping[int, Mapping[int, int]]) -> list[int]:
    """Return the attempts that resumed from an earlier step than this one of `attempt`: they superseded it.

    Args:
        attempt: that saved the checkpoint.
        step: of the checkpoint.
        lines: for some attempts, the last step of each attempt that they continue.
    """
    return [newer for newer, line in lines.items() if newer > attempt and step > line.get(attempt, -1)]


class _Nothing:
    targets: Mapping[str, Target] = MappingProxyType({})

    def finish(self) -> None:
        """Never called: without a plan there is a reason against the checkpoint."""


_NOTHING = _Nothing()


def _reason(against: list[tuple[int, str, str]]) -> tuple[list[str], str]:
    """Kinds, and one line, of what ranks say against a candidate, those that say the same together."""
    ranks: dict[str, list[int]] = {}
    for rank, _, text in against:
        ranks.setdefault(text, []).append(rank)
    lines = [f"{'rank' if len(who) == 1 else 'ranks'} {_some(who)}: {text}" for text, who in ranks.items()]
    return [kind for _, kind, _ in against], " | ".join(lines)


def _some(items: Sequence[object], most: int = 10) -> str:
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(str(item) for item in items[:most]) + more


def _none_good(
    url: str, passed: list[Passed], kinds: list[str], touched: set[str], step: int | None
) -> HoldfastError:
    """The error for a home whose checkpoints are all bad: of one kind if all reasons are, else Corrupt."""
    every = "".join(f"\n  step {one.step}, attempt {one.attempt}: {one.reason}" for one in passed)
    asked = "checkpoint" if step is None else f"checkpoint of step {step}"
    mixed = (
        f" {len(touched)} live tensors may hold bytes of a damaged checkpoint: do not train with them."
        if touched
        else ""
    )
    message = (
        f"{url} has {len(passed)} {asked}{'' if len(passed) == 1 else 's'}, but none could be restored, and "
        f"training must not start from zero unnoticed.{mixed} Repair one, or start afresh in another "
        f"home.{every}"
    )
    kind = _KINDS[kinds[0]] if len(set(kinds)) == 1 and kinds[0] in _KINDS else Corrupt
    return kind(message, step=step)
