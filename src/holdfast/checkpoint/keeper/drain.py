"""Drain: copies committed checkpoints from the local tier to home in the background, newest first."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from holdfast.checkpoint.format import names
from holdfast.checkpoint.format import part as parts
from holdfast.checkpoint.format.names import CheckpointId, OfCheckpoint
from holdfast.checkpoint.format.part import Ancestors, DataFile, Part
from holdfast.checkpoint.home.claim import check_not_fenced
from holdfast.checkpoint.home.commit import check_not_refused, publish
from holdfast.checkpoint.home.listing import scan
from holdfast.checkpoint.home.metrics import copy_metrics
from holdfast.checkpoint.keeper.config import KeeperConfig
from holdfast.checkpoint.keeper.drain_plan import DrainPlan, Sizes
from holdfast.checkpoint.keeper.persist import has_image, paced, verified_blocks
from holdfast.checkpoint.keeper.save_files import FrozenFile
from holdfast.checkpoint.keeper.watch import KeeperWatches
from holdfast.checkpoint.store import Store
from holdfast.errors import Conflict, Corrupt, Denied, HoldfastError, Internal, NotFound, RetryLater
from holdfast.system import backoff
from holdfast.system.failpoint import failpoint

_FIRST_PAUSE_S, _LAST_PAUSE_S, _PAUSE_SHARE = 0.25, 30.0, 0.2
"""Shortest and longest pause before a retry, and the share of the outage so far that a pause lasts."""

_OVERTAKEN_S = 1.0
"""Time without new files of other ranks after which home is listed for newer checkpoints."""


@dataclass(frozen=True, slots=True)
class Drained(OfCheckpoint):
    """Outcome of the drain of one checkpoint, or of one failed try."""

    attempt: int
    step: int
    num_bytes: int = 0  # sent by this rank
    seconds: float = 0.0
    ancestors: Ancestors = ()
    error: HoldfastError | None = None
    is_over: bool = True  # False if it will be tried again


class Drain:
    """Thread that copies this rank's files of each checkpoint that is due. Rank 0 also writes the manifest.

    It calls `on_drained` with each outcome.
    """

    def __init__(
        self,
        local: Store,
        home: Store,
        config: KeeperConfig,
        on_drained: Callable[[Drained], None],
        watches: KeeperWatches,
    ) -> None:
        self._local, self._home, self._config = local, home, config
        self._on_drained, self._watches = on_drained, watches
        self._due: set[CheckpointId] = set()
        self._requested: set[CheckpointId] = set()  # copied even after newer ones
        self._newest = CheckpointId(attempt=0, step=0)  # newest one that a copy was begun of
        self._best: set[CheckpointId] = set()  # copied when no other is due; newer ones do not replace them
        self._in_home: set[CheckpointId] = set()
        self._new_metrics: set[CheckpointId] = set()  # whose metrics have changed since they were copied
        self._current: CheckpointId | None = None
        self._is_closing = False
        self._has_copied_older_histories = False
        self._changed = threading.Condition()
        self._frozen = FrozenFile(home, config)
        self._thread = threading.Thread(target=self._run, name="holdfast-drain", daemon=True)
        self._thread.start()

    def submit(self, checkpoint: CheckpointId) -> None:
        """Copy a checkpoint that is complete in the local tier, and that the trainer requests."""
        with self._changed:
            self._requested.add(checkpoint)
            self._due.add(checkpoint)
            self._changed.notify_all()

    def submit_due(self, checkpoint: CheckpointId) -> None:
        """Copy a new checkpoint of the local tier, unless a newer one was begun before.

        Keepers may process the same checkpoints in another order. If one of them returned to an older
        checkpoint, it would wait there for files that the others no longer send.
        """
        with self._changed:
            if checkpoint > self._newest:
                self._due.add(checkpoint)
                self._changed.notify_all()

    def set_best(self, found: set[CheckpointId]) -> None:
        """Copy these checkpoints too, even if newer ones become due. Replaces the previous set."""
        with self._changed:
            self._best = found - self._in_home
            self._changed.notify_all()

    def update_metrics(self, checkpoint: CheckpointId) -> None:
        """Copy the metrics of a checkpoint again, if it is in home."""
        with self._changed:
            self._new_metrics.add(checkpoint)
            self._changed.notify_all()

    def needed(self) -> set[CheckpointId]:
        """Return the checkpoints that the local tier must not delete yet."""
        with self._changed:
            return self._due | self._best | ({self._current} if self._current else set())

    def not_in_home(self, found: set[CheckpointId]) -> set[CheckpointId]:
        """Return those of some checkpoints that this drain has not sent."""
        with self._changed:
            return found - self._in_home

    def close(self) -> None:
        """Complete everything that is due, and stop; earlier if fenced, or if home fails for too long."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join()
        self._copy_new_metrics()
        self._copy_history()  # with the events since the last checkpoint arrived in home

    # -- the loop --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        failing_since_s: float | None = None
        while (checkpoint := self._pop_newest()) is not None:
            try:
                drained = self._copy_or_raise(checkpoint)
            except HoldfastError as error:
                now_s = time.monotonic()
                failing_since_s = now_s if failing_since_s is None else failing_since_s
                retry = (
                    isinstance(error, (Denied, RetryLater))
                    and now_s - failing_since_s < self._config.patience_s
                )
                with self._changed:
                    if retry:
                        self._due.add(checkpoint)
                    else:
                        failing_since_s = None
                        self._best.discard(checkpoint)
                    self._current = None
                self._on_drained(
                    Drained(attempt=checkpoint.attempt, step=checkpoint.step, error=error, is_over=not retry)
                )
                if isinstance(error, Conflict):  # fenced: the newer attempt drains
                    return
                if retry and failing_since_s is not None:
                    # A share of the outage, not of the number of tries, since each new save is one more.
                    outage_s = now_s - failing_since_s
                    pause_s = backoff.proportional(outage_s, _PAUSE_SHARE, _FIRST_PAUSE_S, _LAST_PAUSE_S)
                    with self._changed:
                        self._changed.wait(pause_s)
            else:
                failing_since_s = None
                with self._changed:
                    self._current = None
                    if drained is not None:
                        self._best.discard(checkpoint)
                        self._in_home.add(checkpoint)
                if drained is not None:
                    self._on_drained(drained)
                    self._copy_history()

    def _copy_or_raise(self, checkpoint: CheckpointId) -> Drained | None:
        """Copy one checkpoint, and raise bugs as errors. A thread that died would be waited for for ever."""
        try:
            return self._copy(checkpoint)
        except NotFound:
            with self._changed:
                if any(other > checkpoint for other in self._due):
                    return None  # deleted from the local tier meanwhile; the newer one is copied next
            raise
        except HoldfastError:
            raise
        except Exception as error:
            raise Internal(
                f"The drain of step {checkpoint.step} failed because of a bug in Holdfast: {error!r}.",
                step=checkpoint.step,
            ) from error

    def _pop_newest(self) -> CheckpointId | None:
        """Return the newest due checkpoint, and drop older ones; else one of the best. None at the end."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._wanted() or self._new_metrics or self._is_closing)
                if self._wanted() or self._is_closing:
                    self._current = max(self._wanted(), default=None)
                    self._due.clear()
                    self._requested &= {self._current}
                    self._newest = max(self._newest, self._current or self._newest)
                    return self._current
            self._copy_new_metrics()

    def _wanted(self) -> set[CheckpointId]:
        return self._due or self._best

    def _is_overtaken(self, checkpoint: CheckpointId, waited_s: float) -> bool:
        """Return True if this rank should abandon a checkpoint whose other files are still missing.

        A newer one that is merely due does not suffice: if every rank switched to its own newest, and home
        were slower than the saves, they might never send the same one. A rank stays until another one has
        begun a newer checkpoint, and follows; or until a newer one is complete, if this one was only due.
        """
        with self._changed:
            newer = {other for other in self._due | self._best if other > checkpoint}
            is_wanted = checkpoint in self._requested | self._best
        if not newer and (is_wanted or waited_s < _OVERTAKEN_S):
            return False
        found = [facts for _, facts in scan(self._home, "step-")]
        begun = {facts.checkpoint_id for facts in found if facts.rank >= 0}
        complete = {facts.checkpoint_id for facts in found if facts.kind == "manifest"}
        return not newer.isdisjoint(begun) or (
            not is_wanted and max(complete, default=checkpoint) > checkpoint
        )

    # -- one checkpoint --------------------------------------------------------------------------------------

    def _copy(self, checkpoint: CheckpointId) -> Drained | None:
        """Copy one checkpoint. Return None if a newer one has become due meanwhile."""
        attempt, step = checkpoint.attempt, checkpoint.step
        began = time.monotonic()
        name = names.manifest(step, attempt)
        plan = DrainPlan(self._local, self._home, self._config, checkpoint, self._watches.judges)
        check_not_fenced(self._home, self._config.attempt)  # the newer attempt drains what is left (note 014)
        in_home = self._sizes(step)
        if 0 in plan.ranks:  # before the manifest: a complete checkpoint has its metrics
            with self._changed:
                self._new_metrics.discard(checkpoint)
            copy_metrics(self._local, self._home, checkpoint)
        num_bytes = sum(self._copy_rank(checkpoint, rank, in_home) for rank in plan.ranks)
        changed_s, before = time.monotonic(), in_home
        while name not in (in_home := self._sizes(step)):
            document = plan.manifest(in_home) if self._config.rank == 0 else None
            if document is not None:
                failpoint("keeper.drained")
                publish(self._home, self._config.writer, step, name, document)
                if self._config.is_node_local and attempt == self._config.attempt:
                    self._watches.committed(step)
                break
            if self._is_overtaken(checkpoint, time.monotonic() - changed_s):
                return None
            if self._config.is_node_local:  # the others' files may never come, or a newer attempt sends them
                check_not_fenced(self._home, self._config.attempt)
            if attempt == self._config.attempt and names.refusal(step, attempt) in in_home:
                check_not_refused(self._home, self._config.writer, step)
            if in_home != before:
                changed_s, before = time.monotonic(), in_home
            self._wait_for_others(plan, step, in_home, time.monotonic() - changed_s)
        self._home.sync(names.step_dir(step))  # the writer of the manifest may not have reached its own sync
        ancestors = plan.ancestors() if self._config.rank == 0 else ()
        return Drained(
            attempt=attempt,
            step=step,
            num_bytes=num_bytes,
            seconds=time.monotonic() - began,
            ancestors=ancestors,
        )

    def _sizes(self, step: int) -> Sizes:
        return {entry.name: entry.num_bytes for entry in self._home.list(f"{names.step_dir(step)}/")}

    def _copy_rank(self, checkpoint: CheckpointId, rank: int, in_home: Sizes) -> int:
        name = names.part(checkpoint.step, checkpoint.attempt, rank)
        text = self._local.get(name)
        part = parts.parse(text, name)
        num_bytes = 0
        if part.frozen is not None:
            num_bytes += self._copy_frozen(part, part.frozen, in_home)
        num_bytes += self._copy_file(
            names.data(checkpoint.step, checkpoint.attempt, rank), part.file, in_home
        )
        # As in a save, a part follows the files that it describes, and the manifest follows all parts (003).
        if in_home.get(name) != len(text):
            self._put_part(name, text, exists=name in in_home)
        return num_bytes

    def _put_part(self, name: str, text: bytes, *, exists: bool) -> None:
        if exists:  # with another size, in a step without a manifest: damaged, so it is sent again
            self._home.put(name, text)
            return
        try:
            self._home.put_once(name, text)
        except Conflict as error:
            raise self._conflict(name) from error

    def _copy_frozen(self, part: Part, file: DataFile, in_home: Sizes) -> int:
        name = names.frozen(part.step, part.attempt, part.rank)
        if in_home.get(name) == file.num_bytes:
            return 0
        if self._frozen.link(name, file):
            return 0
        num_bytes = self._copy_file(name, file, in_home)
        self._frozen.remember(name, file)
        return num_bytes

    def _copy_file(self, name: str, file: DataFile, in_home: Sizes) -> int:
        """Send a file, unless it exists. A name is never used for other bytes."""
        if in_home.get(name) == file.num_bytes:
            return 0
        blocks = verified_blocks(self._local, name, file)
        if self._config.bandwidth is not None:
            blocks = paced(blocks, self._config.bandwidth)
        if name in in_home:  # with another size, in a step without a manifest: damaged, so it is sent again
            self._home.put_parts(name, blocks, file.num_bytes)
        else:
            self._create(name, blocks, file)
        failpoint("keeper.drained-file")
        return file.num_bytes

    def _create(self, name: str, blocks: Iterator[memoryview], file: DataFile) -> None:
        try:
            self._home.put_parts(name, blocks, file.num_bytes, if_absent=True)
        except Conflict as error:
            if not has_image(self._home, name, file):
                raise self._conflict(name) from error

    def _conflict(self, name: str) -> Corrupt:
        """Return the error for an object with other bytes. A Conflict would mean that it is fenced."""
        return Corrupt(f"{name} in {self._home.url} has other bytes than in {self._local.url}.", key=name)

    def _wait_for_others(self, plan: DrainPlan, step: int, in_home: Sizes, waited_s: float) -> None:
        """Wait a little for files of other ranks. The last one arrived `waited_s` ago."""
        if waited_s > self._config.commit_timeout_s:
            missing = plan.missing(in_home) or ["rank 0's manifest"]
            shown = ", ".join(missing[:3])
            # Those of a node-local one may never arrive: their host may have failed to save, or be gone.
            kind = NotFound if self._config.is_node_local else RetryLater
            raise kind(f"Step {step} is not in home: {shown} did not arrive in {waited_s:.0f} s.", step=step)
        with self._changed:
            self._changed.wait(min(max(0.1 * waited_s, 0.02), 2.0))

    # -- metrics and history ---------------------------------------------------------------------------------

    def _copy_new_metrics(self) -> None:
        """Copy metrics that have changed. A failure is ignored: the next change sends all of them again."""
        with self._changed:
            changed, self._new_metrics = self._new_metrics, set[CheckpointId]()
        for checkpoint in changed:
            with contextlib.suppress(HoldfastError):
                if self._home.size(names.manifest(checkpoint.step, checkpoint.attempt)) is not None:
                    copy_metrics(self._local, self._home, checkpoint)  # else copied with the rest

    def _copy_history(self) -> None:
        """Copy this attempt's log. It is for people, so after a failure the next copy is enough."""
        name = names.history(self._config.attempt, self._config.rank)
        with contextlib.suppress(HoldfastError):
            self._copy_older_histories()
            self._home.put(name, self._local.get(name))

    def _copy_older_histories(self) -> None:
        """Copy, once, the logs of earlier attempts. Their keepers may have been killed before."""
        if self._has_copied_older_histories:
            return
        config = self._config
        for entry in self._local.list("history/"):
            log = names.parse_record("history", entry.name)
            if log is None or log.attempt >= config.attempt or not config.is_responsible_for(log.rank):
                continue
            if (self._home.size(entry.name) or 0) < entry.num_bytes:
                self._home.put(entry.name, self._local.get(entry.name))
        self._has_copied_older_histories = True
