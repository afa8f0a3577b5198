"""Drain: copies committed checkpoints from the local tier to home in the background, newest first."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping

from holdfast.checkpoint.format import manifest as manifests
from holdfast.checkpoint.format import names
from holdfast.checkpoint.format import part as parts
from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.format.part import Ancestors, DataFile, Part
from holdfast.checkpoint.home.claim import check_not_fenced
from holdfast.checkpoint.home.commit import check_not_refused, merge_parts, publish
from holdfast.checkpoint.home.documents import expected_sizes
from holdfast.checkpoint.home.judges import Judges
from holdfast.checkpoint.home.listing import scan, scan_step
from holdfast.checkpoint.home.metrics import SaveValues, copy_metrics, write_metrics
from holdfast.checkpoint.home.retain import Retention
from holdfast.checkpoint.keeper.components import KeeperComponents
from holdfast.checkpoint.keeper.config import KeeperConfig
from holdfast.checkpoint.keeper.persist import has_image, paced, verified_blocks
from holdfast.checkpoint.keeper.reports import TRANSIENT_ERRORS, bugs_as_errors
from holdfast.checkpoint.keeper.retention_thread import TierRetention
from holdfast.checkpoint.keeper.save_files import FrozenFile
from holdfast.checkpoint.store import Store
from holdfast.errors import Conflict, Corrupt, HoldfastError, NotFound, RetryLater
from holdfast.system import backoff
from holdfast.system.failpoint import failpoint

_FIRST_PAUSE_S, _LAST_PAUSE_S, _PAUSE_SHARE = 0.25, 30.0, 0.2
"""Shortest and longest pause before a retry, and the share of the outage so far that a pause lasts."""

_OVERTAKEN_S = 1.0
"""Time without new files of other ranks after which home is listed for newer checkpoints."""
Sizes = Mapping[str, int]
"""Bytes of each object of a step in home, by name."""


class Drain:
    """Thread that copies this rank's files of each checkpoint that is due, and reports each outcome.

    Rank 0 also writes the manifests in home, and deletes old checkpoints there.

    Args:
        home: the tier behind the nearest one.
        is_complete: returns True if a checkpoint is complete in the local tier.
        on_arrived: called in the thread with each checkpoint that is complete in home.
    """

    def __init__(
        self,
        components: KeeperComponents,
        home: Store,
        is_complete: Callable[[CheckpointId], bool],
        on_arrived: Callable[[CheckpointId], None] = lambda _: None,
    ) -> None:
        self._local, self._home, self._config = components.store, home, components.config
        self._reports, self._watches = components.reports, components.watches
        self._is_complete, self._on_arrived = is_complete, on_arrived
        self._retention = Retention(home, self._config.keep, healthy_back=self._config.healthy_back)
        # Other ranks may have copied their files of a checkpoint that this rank has yet to copy.
        self._deletion = TierRetention(
            self._retention, "home", self._reports, lambda: self.needed, deletes=self._config.rank == 0
        )
        self._wanted: set[CheckpointId] = set()  # to be copied as soon as they are committed
        self._due: set[CheckpointId] = set()
        self._requested: set[CheckpointId] = set()  # copied even after newer ones
        self._newest = CheckpointId(attempt=0, step=0)  # newest one that a copy was begun of
        self._best: set[CheckpointId] = set()  # they stay in the local tier until they are in home
        self._due_best: set[CheckpointId] = set()  # those that are sent home although they are not due
        self._ready_best: set[CheckpointId] = set()  # those that are complete; newer ones do not replace them
        self._in_home: set[CheckpointId] = set()
        self._new_metrics: dict[CheckpointId, SaveValues] = {}  # that have changed since they were copied
        self._current: CheckpointId | None = None
        self._is_closing = False
        self._has_copied_older_histories = False
        self._changed = threading.Condition()
        self._frozen = FrozenFile(home, self._config)
        self._compressing = None
        if self._config.compress:  # else zstandard and numpy need not be there
            from holdfast.checkpoint.keeper.compressing import CompressingUpload

            self._compressing = CompressingUpload(self._local, home, self._config)
        self._thread = threading.Thread(target=self._run, name="holdfast-drain", daemon=True)
        self._thread.start()

    @property
    def needed(self) -> set[CheckpointId]:
        """Checkpoints on their way home, and the best, which no tier must delete yet."""
        with self._changed:
            current = {self._current} if self._current else set[CheckpointId]()
            return self._due | self._ready_best | current | self._wanted | (self._best - self._in_home)

    def request(self, checkpoint: CheckpointId) -> None:
        """Copy a checkpoint, now or once it is complete."""
        is_complete = self._is_complete(checkpoint)
        with self._changed:
            if is_complete:
                self._submit(checkpoint)
            else:
                self._wanted.add(checkpoint)

    def add_committed(self, checkpoint: CheckpointId, *, is_due: bool) -> None:
        """Copy a new checkpoint of the local tier if it is due in home, or was requested.

        One that is merely due is not copied once a newer one was begun: keepers may process the same
        checkpoints in another order. If one of them returned to an older checkpoint, it would wait there for
        files that the others no longer send.
        """
        with self._changed:
            if checkpoint in self._wanted:
                self._wanted.discard(checkpoint)
                self._submit(checkpoint)
                return
            if is_due:
                if checkpoint > self._newest:
                    self._due.add(checkpoint)
                    self._changed.notify_all()
                return
        if checkpoint in self._due_best:
            self._send_best()

    def _submit(self, checkpoint: CheckpointId) -> None:
        self._requested.add(checkpoint)
        self._due.add(checkpoint)
        self._changed.notify_all()

    def set_best(self, best: set[CheckpointId], *, is_due: bool) -> None:
        """Keep the best checkpoints in the local tier until they are in home. Replaces the previous set.

        If due, they are copied once they are complete, instead of those that were to be copied.
        """
        self._best = best
        if is_due:
            self._due_best = best
            self._send_best()

    def _send_best(self) -> None:
        with contextlib.suppress(*TRANSIENT_ERRORS):  # the next change of the set sends them
            complete = {checkpoint for checkpoint in self._due_best if self._is_complete(checkpoint)}
            with self._changed:
                self._ready_best = complete - self._in_home
                self._changed.notify_all()

    def update_metrics(self, checkpoint: CheckpointId, metrics: SaveValues) -> None:
        """Replace the metrics of a checkpoint, if it is in home, even if the local tier has deleted it."""
        self._retention.note_metrics(checkpoint, metrics.values)
        with self._changed:
            self._new_metrics[checkpoint] = metrics
            self._changed.notify_all()

    def delete(self, step: int) -> None:
        """Delete the checkpoints of a step, after the next drain or at the end."""
        self._retention.unwanted.add(step)

    def close(self, newest: CheckpointId | None = None) -> None:
        """Complete everything that is due, also `newest` and the best, if it is given; earlier if fenced.

        Blocks: until home has everything, or has failed for too long (for the last metrics: `linger_s`).
        """
        if newest is not None:
            with self._changed:
                self._submit(newest)
            self.set_best(self._best, is_due=True)
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join()
        self._copy_history()  # with the events since the last checkpoint arrived in home
        self._deletion.run()  # for steps that were to be deleted after the last drain
        if self._compressing is not None:
            self._compressing.delete_local_bases()

    # -- the loop --------------------------------------------------------------------------------------------
    def _run(self) -> None:
        failing_since_s: dict[bool, float] = {}  # for checkpoints (False) and for metrics alone (True)
        while (work := self._next()) is not None:
            checkpoint, metrics = work
            of_metrics = metrics is not None
            try:
                with bugs_as_errors(f"The drain of step {checkpoint.step}"):
                    if metrics is not None:
                        self._send_metrics(checkpoint, metrics)
                    else:
                        self._send(checkpoint)
            except HoldfastError as error:
                is_transient = isinstance(error, TRANSIENT_ERRORS)
                now_s = time.monotonic()
                outage_s = now_s - failing_since_s.setdefault(of_metrics, now_s)  # 0 at the first failure
                if is_transient and outage_s < self._patience_s(of_metrics=of_metrics):
                    self._retry_later(checkpoint, error, of_metrics=of_metrics, outage_s=outage_s)
                    continue
                if metrics is not None:
                    self._give_up_metrics(checkpoint, metrics, error, with_others=is_transient)
                else:
                    self._give_up(checkpoint, error)
                if isinstance(error, Conflict):  # fenced: the newer attempt drains
                    return
            failing_since_s.pop(of_metrics, None)

    def _patience_s(self, *, of_metrics: bool) -> float:
        """Return for how long a failing home is tried. At the end, metrics alone do not hold up the close."""
        limit_s = self._config.patience_s
        return min(limit_s, self._config.linger_s) if of_metrics and self._is_closing else limit_s

    def _next(self) -> tuple[CheckpointId, SaveValues | None] | None:
        """Return the newest due checkpoint, else one of the best, else one with new metrics; None at the end.

        Older ones that were due are dropped.
        """
        with self._changed:
            self._current = None
            self._changed.wait_for(
                lambda: self._due or self._ready_best or self._new_metrics or self._is_closing
            )
            if found := self._due or self._ready_best:
                self._current = checkpoint = max(found)
                self._due.clear()
                self._requested &= {checkpoint}
                self._newest = max(self._newest, checkpoint)
                return checkpoint, None
            return max(self._new_metrics.items(), default=None, key=lambda item: item[0])

    def _retry_later(
        self, checkpoint: CheckpointId, error: HoldfastError, *, of_metrics: bool, outage_s: float
    ) -> None:
        """Keep what could not be sent, report the first of many tries to send a checkpoint, and wait."""
        with self._changed:
            if not of_metrics:  # metrics are kept until they are sent
                self._due.add(checkpoint)
            self._current = None
        if outage_s == 0 and not of_metrics:
            self._reports.warn("drain-delayed", checkpoint.step, error)
        # A share of the outage, not of the number of tries, since each new save is one more.
        pause_s = backoff.proportional(outage_s, _PAUSE_SHARE, _FIRST_PAUSE_S, _LAST_PAUSE_S)
        with self._changed:
            self._changed.wait(pause_s)

    def _give_up(self, checkpoint: CheckpointId, error: HoldfastError) -> None:
        with self._changed:
            self._current = None
            self._ready_best.discard(checkpoint)
        self._reports.failed(checkpoint.step, error, in_home=not isinstance(error, Conflict))

    def _give_up_metrics(
        self, checkpoint: CheckpointId, metrics: SaveValues, error: HoldfastError, *, with_others: bool
    ) -> None:
        """Drop metrics that could not be sent, `with_others` all of them: home has failed for too long."""
        with self._changed:
            if with_others:
                self._new_metrics.clear()
            self._drop_metrics(checkpoint, metrics)
        self._reports.warn("metrics-lost", checkpoint.step, error)

    def _drop_metrics(self, checkpoint: CheckpointId, metrics: SaveValues) -> None:
        """Forget metrics of a checkpoint, unless they have changed again. The caller holds the lock."""
        if self._new_metrics.get(checkpoint) is metrics:
            del self._new_metrics[checkpoint]

    def _is_overtaken(self, checkpoint: CheckpointId, waited_s: float) -> bool:
        """Return True if this rank should abandon a checkpoint whose other files are still missing.

        A newer one that is merely due does not suffice: if every rank switched to its own newest, and home
        were slower than the saves, they might never send the same one. A rank stays until another one has
        begun a newer checkpoint, and follows; or until a newer one is complete, if this one was only due.
        """
        with self._changed:
            newer = {other for other in self._due | self._ready_best if other > checkpoint}
            is_wanted = checkpoint in self._requested | self._ready_best
        if not newer and (is_wanted or waited_s < _OVERTAKEN_S):
            return False
        found = [facts for _, facts in scan(self._home, "step-")]
        begun = {facts.checkpoint_id for facts in found if facts.rank >= 0}
        complete = {facts.checkpoint_id for facts in found if facts.kind == "manifest"}
        return not newer.isdisjoint(begun) or (
            not is_wanted and max(complete, default=checkpoint) > checkpoint
        )

    # -- one checkpoint --------------------------------------------------------------------------------------
    def _send(self, checkpoint: CheckpointId) -> None:
        """Copy one checkpoint, unless a newer one becomes due meanwhile that replaces it."""
        try:
            self._copy(checkpoint)
        except NotFound:
            with self._changed:
                if any(other > checkpoint for other in self._due):
                    return  # deleted from the local tier meanwhile; the newer one is copied next
            raise

    def _copy(self, checkpoint: CheckpointId) -> None:
        attempt, step = checkpoint.attempt, checkpoint.step
        began = time.monotonic()
        name = names.manifest(step, attempt)
        plan = DrainPlan(self._local, self._home, self._config, checkpoint, self._watches.judges)
        check_not_fenced(self._home, self._config.attempt)  # the newer attempt drains what is left (note 014)
        in_home = self._sizes(step)
        if 0 in plan.ranks:  # before the manifest: a complete checkpoint has its metrics
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
                return
            if self._config.is_node_local:  # the others' files may never come, or a newer attempt sends them
                check_not_fenced(self._home, self._config.attempt)
            if attempt == self._config.attempt and names.refusal(step, attempt) in in_home:
                check_not_refused(self._home, self._config.writer, step)
            if in_home != before:
                changed_s, before = time.monotonic(), in_home
            self._wait_for_others(plan, step, in_home, time.monotonic() - changed_s)
        self._home.sync(names.step_dir(step))  # the writer of the manifest may not have reached its own sync
        ancestors = plan.ancestors() if self._config.rank == 0 else ()
        with self._changed:
            self._current = None
            self._ready_best.discard(checkpoint)
            self._in_home.add(checkpoint)
        self._on_arrived(checkpoint)  # first: after the report the trainer may end this process
        detail = "" if attempt == self._config.attempt else f"attempt {attempt}"
        seconds = time.monotonic() - began
        self._reports.reached(
            step, "in home", num_bytes=num_bytes, seconds=seconds, detail=detail, tier="home"
        )
        self._deletion.add(checkpoint, ancestors)  # one of the best may be older
        self._deletion.run(step)
        self._copy_history()

    def _sizes(self, step: int) -> Sizes:
        return {entry.name: entry.num_bytes for entry in self._home.list(f"{names.step_dir(step)}/")}

    def _copy_rank(self, checkpoint: CheckpointId, rank: int, in_home: Sizes) -> int:
        key = checkpoint.step, checkpoint.attempt, rank
        name = names.part(*key)
        text = self._local.get(name)
        part = parts.parse(text, name)
        num_bytes = 0 if part.frozen is None else self._copy_frozen(part, part.frozen, in_home)
        num_bytes += self._copy_file(names.data(*key), part.file, in_home)
        # As in a save, a part follows the files that it describes, and the manifest follows all parts (003).
        if name in in_home and in_home[name] != len(text):  # damaged, in a step without a manifest
            self._home.put(name, text)
        elif name not in in_home:
            try:
                self._home.put_once(name, text)
            except Conflict as error:
                raise self._conflict(name) from error
        return num_bytes

    def _copy_frozen(self, part: Part, file: DataFile, in_home: Sizes) -> int:
        name = names.frozen(part.step, part.attempt, part.rank)
        if in_home.get(name) == file.num_bytes or self._frozen.link(name, file):
            return 0
        num_bytes = self._copy_file(name, file, in_home)
        self._frozen.remember(name, file)
        return num_bytes

    def _copy_file(self, name: str, file: DataFile, in_home: Sizes) -> int:
        """Send a file, unless it exists. A name is never used for other bytes."""
        if in_home.get(name) == file.num_bytes:
            return 0
        is_free = name not in in_home  # else it is damaged, in a step without a manifest, and is replaced
        try:
            if self._compressing is not None:
                self._compressing.send(name, file, if_absent=is_free)
            else:
                blocks = paced(verified_blocks(self._local, name, file), self._config.bandwidth)
                self._home.put_parts(name, blocks, file.num_bytes, if_absent=is_free)
        except Conflict as error:
            if not has_image(self._home, name, file):
                raise self._conflict(name) from error
        failpoint("keeper.drained-file")
        return file.num_bytes

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
    def _send_metrics(self, checkpoint: CheckpointId, metrics: SaveValues) -> None:
        """Replace the metrics of a checkpoint in home. Those of one on its way there are copied with it."""
        if self._home.size(names.manifest(checkpoint.step, checkpoint.attempt)) is not None:
            write_metrics(self._home, self._config.writer, checkpoint.step, metrics, self._config.modes)
        with self._changed:
            self._drop_metrics(checkpoint, metrics)

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


class DrainPlan:
    """Plan of one checkpoint: ranks whose files this rank sends, and the manifest once all exist.

    If it is complete in the local tier, its manifest names all files, and is copied like them. A node-local
    folder has the files of some ranks: there the parts that arrive in home name the files, and the manifest
    is made of them.
    """

    def __init__(
        self, local: Store, home: Store, config: KeeperConfig, checkpoint: CheckpointId, judges: Judges
    ) -> None:
        self._home, self._config, self._judges, self._checkpoint = home, config, judges, checkpoint
        self._name = names.manifest(checkpoint.step, checkpoint.attempt)
        self._manifest: Manifest | None = None  # of the local tier
        self._expected: dict[int, dict[str, int]] = {}  # files of each saved rank, as far as they are known
        if config.is_node_local:
            found = (facts for _, facts in scan_step(local, checkpoint.step) if facts.kind == "part")
            saved = {facts.rank for facts in found if facts.attempt == checkpoint.attempt}
            self._world_size: int | None = None
        else:
            self._document = local.get(self._name)
            self._manifest = manifests.parse(self._document, self._name)
            self._expected = expected_sizes(self._manifest)
            self._world_size = self._manifest.world_size
            saved = set(range(self._world_size))
        # Saved ranks whose files this rank sends:
        self.ranks = tuple(rank for rank in sorted(saved) if config.is_responsible_for(rank))

    def manifest(self, in_home: Sizes) -> bytes | None:
        """Return the manifest, or None if a file that it names is missing in home. Only rank 0 calls this."""
        if self.missing(in_home):
            return None
        if self._manifest is not None:
            return self._document
        assert self._world_size is not None
        is_own = self._checkpoint.attempt == self._config.attempt
        judges = self._judges if is_own else None
        return manifests.document(
            merge_parts(self._home, self._config.writer, self._checkpoint, self._world_size, judges=judges)
        )

    def missing(self, in_home: Sizes) -> list[str]:
        """Return the names of missing files, as far as documents name them; read each part in home once."""
        step, attempt = self._checkpoint.step, self._checkpoint.attempt
        if self._manifest is None:
            for name in in_home:
                facts = names.parse(name)
                if facts and facts.kind == "part" and facts.attempt == attempt:
                    self._read_part(name, facts.rank, in_home[name])
        if self._world_size is None:
            return ["any part"]
        absent = sorted(set(range(self._world_size)) - self._expected.keys())
        files = {name: size for sizes in self._expected.values() for name, size in sizes.items()}
        return [names.part(step, attempt, rank) for rank in absent] + [
            name for name, num_bytes in files.items() if in_home.get(name) != num_bytes
        ]

    def ancestors(self) -> Ancestors:
        """Return the ancestors of a checkpoint that is complete in home."""
        found = self._manifest or manifests.parse(self._home.get(self._name), self._name)
        return found.ancestors

    def _read_part(self, name: str, rank: int, num_bytes: int) -> None:
        if rank not in self._expected:
            part = parts.parse(self._home.get(name), name)
            self._world_size = part.world_size
            self._expected[rank] = {name: num_bytes} | {
                file: facts.num_bytes for file, facts in part.files.items()
            }
