"""Drain: copy committed checkpoints from the near tier to home, newest first, beside everything else."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from holdfast import backoff
from holdfast.errors import Conflict, Corrupt, Denied, HoldfastError, Internal, NotFound, RetryLater
from holdfast.failpoint import failpoint
from holdfast.format import names
from holdfast.format import part as parts
from holdfast.format.part import Ancestors, DataFile, Part
from holdfast.home.attempts import check_not_fenced
from holdfast.home.commit import check_not_refused, publish
from holdfast.home.history import History
from holdfast.home.listing import CheckpointId, scan
from holdfast.home.metrics import copy_metrics
from holdfast.keeper.cargo import Cargo, Share, Sizes, Whole
from holdfast.keeper.config import KeeperConfig
from holdfast.keeper.frozen import FrozenFile
from holdfast.keeper.persist import has_image, verified_blocks
from holdfast.keeper.rate import paced
from holdfast.store import Store

_FIRST_PAUSE_S, _LAST_PAUSE_S, _PAUSE_SHARE = 0.25, 30.0, 0.2


@dataclass(frozen=True, slots=True)
class Drained:
    """What came of one checkpoint: it is complete in home, or why it is not, or not yet."""

    attempt: int
    step: int
    num_bytes: int = 0  # sent by this rank
    seconds: float = 0.0
    ancestors: Ancestors = ()
    error: HoldfastError | None = None
    is_over: bool = True  # False: it will be tried again


class Drain:
    """Copies what this rank's files are of each checkpoint that is due; rank 0 also writes the manifest.

    Args:
        near: where the checkpoints are committed.
        home: where they go.
        terms: of the keeper.
        history: of this attempt and rank in `near`; its log is copied along.
        done: told, in the drain's thread, what came of each checkpoint, and of each failed try.
    """

    def __init__(
        self, near: Store, home: Store, terms: KeeperConfig, history: History, done: Callable[[Drained], None]
    ) -> None:
        self._near, self._home, self._terms, self._history = near, home, terms, history
        self._done = done
        self._due: set[CheckpointId] = set()
        self._best: set[CheckpointId] = set()  # copied when nothing is due; not forgotten for newer ones
        self._arrived: set[CheckpointId] = set()
        self._new_metrics: set[CheckpointId] = (
            set()
        )  # checkpoints whose metrics have changed since they were copied
        self._working_on: CheckpointId | None = None
        self._closing = False
        self._has_older_histories = False  # home has, of this rank
        self._changed = threading.Condition()
        self._frozen = FrozenFile(home, terms)
        self._thread = threading.Thread(target=self._run, name="holdfast-drain", daemon=True)
        self._thread.start()

    def submit(self, attempt: int, step: int) -> None:
        """Have a checkpoint copied that is complete in the near tier."""
        with self._changed:
            self._due.add((attempt, step))
            self._changed.notify_all()

    def set_best(self, found: set[CheckpointId]) -> None:
        """Have these checkpoints copied too, whatever newer ones become due; replaces those set before."""
        with self._changed:
            self._best = found - self._arrived
            self._changed.notify_all()

    def update_metrics(self, attempt: int, step: int) -> None:
        """Have the metrics of a checkpoint copied again, if it is in home."""
        with self._changed:
            self._new_metrics.add((attempt, step))
            self._changed.notify_all()

    def needed(self) -> set[CheckpointId]:
        """Checkpoints that the near tier must not lose yet."""
        with self._changed:
            return self._due | self._best | ({self._working_on} if self._working_on else set())

    def close(self) -> None:
        """End when all that is due is in home.

        Blocks: until then, or until the attempt is fenced or home has failed for longer than is allowed.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._copy_new_metrics()
        self._copy_history()  # what was told since the last checkpoint came home

    # -- the loop --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        failing_since_s: float | None = None
        while (one := self._take_newest()) is not None:
            try:
                drained = self._copy_or_tell(one)
            except HoldfastError as error:
                now_s = time.monotonic()
                failing_since_s = now_s if failing_since_s is None else failing_since_s
                retry = (
                    isinstance(error, (Denied, RetryLater))
                    and now_s - failing_since_s < self._terms.patience_s
                )
                with self._changed:
                    if retry:
                        self._due.add(one)
                    else:
                        failing_since_s = None
                        self._best.discard(one)
                    self._working_on = None
                self._done(Drained(*one, error=error, is_over=not retry))
                if isinstance(error, Conflict):  # fenced: the newer attempt drains
                    return
                if retry and failing_since_s is not None:
                    # A share of the outage so far: not of the tries, since each new save is one more.
                    pause_s = backoff.proportional(
                        now_s - failing_since_s, _PAUSE_SHARE, _FIRST_PAUSE_S, _LAST_PAUSE_S
                    )
                    with self._changed:
                        self._changed.wait(pause_s)
            else:
                failing_since_s = None
                with self._changed:
                    self._working_on = None
                    if drained is not None:
                        self._best.discard(one)
                        self._arrived.add(one)
                if drained is not None:
                    self._done(drained)
                    self._copy_history()

    def _copy_or_tell(self, one: CheckpointId) -> Drained | None:
        """`_copy`, whose bugs become errors: a thread that ended in silence would be waited for for ever."""
        try:
            return self._copy(one)
        except NotFound:
            with self._changed:
                if any(other > one for other in self._due):
                    return None  # retired from the near tier meanwhile; the newer one is copied next
            raise
        except HoldfastError:
            raise
        except Exception as error:
            message = f"The drain of step {one[1]} failed by a bug of Holdfast's: {error!r}."
            raise Internal(message, step=one[1]) from error

    def _take_newest(self) -> CheckpointId | None:
        """Return the newest that is due, else of the best. Older due ones are forgotten. None at the end."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted() or self._new_metrics or self._closing)
                if self._wanted() or self._closing:
                    break
            self._copy_new_metrics()
        with self._changed:
            self._working_on = max(self._wanted(), default=None)
            self._due.clear()
            return self._working_on

    def _wanted(self) -> set[CheckpointId]:
        return self._due or self._best

    def _is_overtaken(self, one: CheckpointId) -> bool:
        """Whether this rank should leave a checkpoint whose other files are still missing.

        Not for a newer one that is merely due: if every rank ran after the newest in its own time, and home
        were slower than saves come, they might never bring the same one. So they stay until somebody has
        begun a newer one, and follow.
        """
        with self._changed:
            newer = {other for other in self._due if other > one}
        if not newer:
            return False
        found = (facts for _, facts in scan(self._home, "step-") if facts.rank >= 0)
        begun = {(facts.attempt, facts.step) for facts in found}
        return not newer.isdisjoint(begun)

    # -- one checkpoint --------------------------------------------------------------------------------------

    def _copy(self, one: CheckpointId) -> Drained | None:
        """Copy one checkpoint; None if a newer one has become due meanwhile."""
        attempt, step = one
        began = time.monotonic()
        name = names.manifest(step, attempt)
        cargo = self._cargo(attempt, step)
        check_not_fenced(self._home, self._terms.attempt)
        there = self._sizes(step)
        if 0 in cargo.ranks:  # before the manifest: a complete checkpoint has its metrics
            with self._changed:
                self._new_metrics.discard(one)
            copy_metrics(self._near, self._home, step, attempt)
        num_bytes = sum(self._copy_rank(attempt, step, rank, there) for rank in cargo.ranks)
        news_s, before = time.monotonic(), there
        while name not in (there := self._sizes(step)):
            document = cargo.manifest(there) if self._terms.rank == 0 else None
            if document is not None:
                failpoint("keeper.drained")
                publish(self._home, self._terms.writer, step, name, document)
                break
            if self._is_overtaken(one):
                return None
            if self._terms.is_scattered:  # the others' files may never come, or be brought by a newer attempt
                check_not_fenced(self._home, self._terms.attempt)
            if attempt == self._terms.attempt and names.refusal(step, attempt) in there:
                check_not_refused(self._home, self._terms.writer, step)
            if there != before:
                news_s, before = time.monotonic(), there
            self._wait_for_others(cargo, step, there, time.monotonic() - news_s)
        self._home.sync(names.step_dir(step))  # who wrote the manifest may not have come to that
        ancestors = cargo.ancestors() if self._terms.rank == 0 else ()
        return Drained(attempt, step, num_bytes, time.monotonic() - began, ancestors)

    def _cargo(self, attempt: int, step: int) -> Cargo:
        if self._terms.is_scattered:
            return Share(self._near, self._home, self._terms, attempt, step)
        return Whole(self._near, self._terms, attempt, step)

    def _sizes(self, step: int) -> Sizes:
        return {entry.name: entry.num_bytes for entry in self._home.list(f"{names.step_dir(step)}/")}

    def _copy_rank(self, attempt: int, step: int, rank: int, there: Sizes) -> int:
        name = names.part(step, attempt, rank)
        text = self._near.get(name)
        part = parts.parse(text, name)
        num_bytes = 0
        if part.frozen is not None:
            num_bytes += self._copy_frozen(part, part.frozen, there)
        num_bytes += self._copy_file(names.data(step, attempt, rank), part.file, there)
        if there.get(name) != len(text):
            self._put_part(name, text, is_there=name in there)
        return num_bytes

    def _put_part(self, name: str, text: bytes, *, is_there: bool) -> None:
        if is_there:  # of another size, in a step without a manifest: damaged, and sent again
            self._home.put(name, text)
            return
        try:
            self._home.put_once(name, text)
        except Conflict as error:  # not of this attempt being fenced, as a Conflict would be taken for
            message = f"{name} in {self._home.url} has other bytes than in {self._near.url}."
            raise Corrupt(message, key=name) from error

    def _copy_frozen(self, part: Part, file: DataFile, there: Sizes) -> int:
        name = names.frozen(part.step, part.attempt, part.rank)
        if there.get(name) == file.num_bytes:
            return 0
        if self._frozen.link(name, file):
            return 0
        num_bytes = self._copy_file(name, file, there)
        self._frozen.note(name, file)
        return num_bytes

    def _copy_file(self, name: str, file: DataFile, there: Sizes) -> int:
        """Send a file, unless it is there; a name is never used for other bytes."""
        if there.get(name) == file.num_bytes:
            return 0
        blocks = verified_blocks(self._near, name, file)
        if self._terms.bandwidth is not None:
            blocks = paced(blocks, self._terms.bandwidth)
        if name in there:  # of another size, in a step without a manifest: damaged, and sent again
            self._home.put_parts(name, blocks, file.num_bytes)
        else:
            self._create(name, blocks, file)
        failpoint("keeper.drained-file")
        return file.num_bytes

    def _create(self, name: str, blocks: Iterator[memoryview], file: DataFile) -> None:
        try:
            self._home.put_parts(name, blocks, file.num_bytes, if_absent=True)
        except Conflict as error:  # not of this attempt being fenced, as a Conflict would be taken for
            if not has_image(self._home, name, file):
                message = f"{name} in {self._home.url} has other bytes than in {self._near.url}."
                raise Corrupt(message, key=name) from error

    def _wait_for_others(self, cargo: Cargo, step: int, there: Sizes, waited_s: float) -> None:
        """Wait a little.

        Args:
            cargo: of the checkpoint.
            step: of the checkpoint.
            there: what is in home of it.
            waited_s: how long nothing has come.
        """
        if waited_s > self._terms.commit_timeout_s:
            lacking = cargo.lacking(there) or ["rank 0's manifest"]
            shown = ", ".join(lacking[:3])
            message = f"Step {step} is not in home: {shown} did not come in {waited_s:.0f} s."
            # A scattered one may never come: another host may have failed to save it, or be gone.
            raise (NotFound if self._terms.is_scattered else RetryLater)(message, step=step)
        with self._changed:
            self._changed.wait(min(max(0.1 * waited_s, 0.02), 2.0))

    def _copy_new_metrics(self) -> None:
        """Copy metrics that have changed; a failure is forgotten, since the next change sends all again."""
        with self._changed:
            changed, self._new_metrics = self._new_metrics, set[CheckpointId]()
        for attempt, step in changed:
            with contextlib.suppress(HoldfastError):
                if self._home.size(names.manifest(step, attempt)) is not None:  # else they are copied with it
                    copy_metrics(self._near, self._home, step, attempt)

    def _copy_history(self) -> None:
        """Bring this attempt's log home; it is for people, so a failure waits for the next time."""
        name = names.history(self._terms.attempt, self._terms.rank)
        with contextlib.suppress(HoldfastError):
            self._copy_older_histories()
            self._home.put(name, self._near.get(name))

    def _copy_older_histories(self) -> None:
        """Bring home, once, what keepers of attempts before could not, who may have been killed before it."""
        if self._has_older_histories:
            return
        for entry in self._near.list("history/"):
            attempt, rank = names.parse_history(entry.name) or (self._terms.attempt, 0)
            is_mine = attempt < self._terms.attempt and self._terms.is_mine(rank)
            if is_mine and (self._home.size(entry.name) or 0) < entry.num_bytes:
                self._home.put(entry.name, self._near.get(entry.name))
        self._has_older_histories = True
