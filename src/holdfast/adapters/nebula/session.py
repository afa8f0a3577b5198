"""Session of one home: the tags that are being saved to it, and their completion."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict
from torch.distributed import DistError

from holdfast.adapters.kit.store_ranks import StoreRanks
from holdfast.adapters.nebula import tag_index, tag_writer
from holdfast.adapters.nebula.tag_index import EXPLICIT, META, TaggedCheckpoint, TagIndex, TagMeta
from holdfast.adapters.nebula.tag_writer import RANKS_S, Settings, TagCoordinator, TagPlan, TagWriter
from holdfast.checkpoint.exchange.packed_value import Packed, describe_partitions, pack
from holdfast.checkpoint.format.names import CheckpointId
from holdfast.checkpoint.home.claim import read_run
from holdfast.checkpoint.keeper import MemoryTierStore, wait_for_orphans
from holdfast.checkpoint.ranks import world
from holdfast.checkpoint.run import Checkpointer
from holdfast.checkpoint.store import Store, open_store
from holdfast.errors import HoldfastError, InvalidInput, NotFound, RetryLater, SaveWarning
from holdfast.system import host_memory
from holdfast.system.callsite import warn

_VERSION = 1
_WATCH_S = 0.05
_LAST_S = 5.0
_POLL_S = 0.05
_SEND_AGAIN_S = 1.0
_num_coordinators: Counter[str] = Counter()


class TagDraft(Struct):
    """Tag that is not complete yet."""

    tag: str
    key: str  # key of the coordinator
    num_files: int | None
    label: str | None = None
    files: dict[str, Packed] = {}

    @property
    def is_explicit(self) -> bool:
        """True if only `commit` completes the tag."""
        return self.num_files == EXPLICIT


class CompleteTag(Struct, frozen=True):
    """Tag that is complete in this attempt."""

    names: frozenset[str]  # of this rank's partitions
    key: str | None  # key of the coordinator; None for the base of the attempt


class Session:
    """Session that saves to and loads from one home. Any thread may use it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.home = settings.home
        self._memory_bytes = tag_writer.memory_limit(os.environ, host_memory.available_bytes())
        self._lock = threading.RLock()
        self._last_coordinator: TagCoordinator | None = None
        self._writer: TagWriter | None = None
        self._drafts: dict[str, TagDraft] = {}
        self._done: dict[str, CompleteTag] = {}  # tags complete in this attempt
        self._rounds: Counter[str] = Counter()
        self._verified: set[CheckpointId] = set()
        self._errors: list[HoldfastError] = []  # errors of the watching thread
        self._loaded: int | None = None  # step that is not published to the other ranks yet
        self._last_sent_s = time.monotonic()  # when the interval last made a checkpoint go home
        self._watching: threading.Thread | None = None
        self._is_closed = threading.Event()
        self._pid = os.getpid()

    @property
    def is_usable(self) -> bool:
        """True until the session is closed, in the process that created it."""
        return not self._is_closed.is_set() and os.getpid() == self._pid

    # -- saving ----------------------------------------------------------------------------------------------
    def join(self, tag: str, num_files: int | None) -> None:
        """Join a tag that `commit` completes, before any file of it is saved."""
        with self._lock:
            if num_files != EXPLICIT or tag in self._drafts:
                return
            if self._find_done(tag) is None or tag_index.named_step(tag) is None:
                self._start_draft(tag, num_files)

    def save(self, tag: str, name: str, value: Any, num_files: int | None, label: str | None = None) -> bool:
        """Save one partition of a tag, which the last one completes; return False if it was skipped."""
        packed = pack(value, name)
        packed.check(name)
        tag_index.key_of(name)
        with self._lock:
            self._check_errors()
            draft = self._drafts.get(tag)
            done = self._find_done(tag) if draft is None else None
            if done is not None and label is None:
                if name not in done.names:
                    return self._add_version(tag, name, packed)
                if tag_index.named_step(tag) is not None:  # it need not be saved again then
                    warn(
                        f"{tag} is complete and already contains {name!r}, so it was not saved again. Use "
                        "another tag for another state.",
                        SaveWarning,
                    )
                    return False
            draft = draft or self._start_draft(tag, num_files)
            draft.label = label
            return self._add_partition(draft, name, packed)

    def _find_done(self, tag: str) -> CompleteTag | None:
        """Return a tag that is complete in this attempt; None after going back, when it is saved again."""
        done = self._done.get(tag)
        if done is None:
            return None
        if tag_index.goes_back(tag, self._ranks.published("last"), self._ranks.published("loaded")):
            del self._done[tag]
            return None
        is_saved = done.key is None or self._ranks.files(done.key) > 0  # by some rank
        return done if is_saved else None

    def _add_version(self, tag: str, name: str, packed: Packed) -> bool:
        """Make a new version of a complete tag with one more partition."""
        tagged = self.index().find(tag)
        if tagged is not None and tagged.checkpoint.world_size > 1:
            raise InvalidInput(
                f"{tag} was completed by {tagged.checkpoint.world_size} ranks before {name!r} was saved. "
                "Nothing was saved. Pass num_of_files= with the number of files of all ranks together.",
                key=name,
            )
        draft = self._start_draft(tag, None)
        if tagged is not None:
            draft.files.update({one: tagged.packed(one, 0) for one in tagged.names()})
        return self._add_partition(draft, name, packed)

    def _start_draft(self, tag: str, num_files: int | None) -> TagDraft:
        draft = self._drafts[tag] = TagDraft(tag, f"{tag}/{self._rounds[tag]}", num_files)
        if draft.is_explicit:
            self._ranks.join(draft.key)
        return draft

    def _add_partition(self, draft: TagDraft, name: str, packed: Packed) -> bool:
        count = 0 if name in draft.files else self._ranks.count(draft.key)
        if draft.is_explicit or not count:
            draft.files[name] = packed.copied()
            return True
        wanted = draft.num_files or 1
        if count < wanted:
            draft.files[name] = packed.copied()
            if self._ranks.world_size > 1 and (self._watching is None or not self._watching.is_alive()):
                self._watching = threading.Thread(target=self._watch, name="holdfast-nebula", daemon=True)
                self._watching.start()
            return True
        if count > wanted:
            del self._drafts[draft.tag]
            raise self._too_many(draft, name)
        draft.files[name] = packed  # the live tensors, which the save itself copies
        return self._complete(draft)

    def _too_many(self, draft: TagDraft, name: str) -> InvalidInput:
        plan = self._ranks.plan(draft.key)
        members = plan.members if plan is not None else ()
        others = f"rank {members[0]}" if len(members) == 1 else "other ranks"
        count = "was not given" if draft.num_files is None else f"is {draft.num_files}"
        return InvalidInput(
            f"{draft.tag} was complete when rank {self._ranks.rank} saved {name!r}: num_of_files {count}, "
            f"and {others} had saved as many. This file was not saved. Save on one rank only (if rank == "
            "0:), or pass num_of_files= with the number of files of all ranks together.",
            rank=self._ranks.rank,
            key=name,
        )

    def commit(self, tag: str) -> bool:
        """Complete a tag with the files that it has; return True if it is submitted to the keeper."""
        with self._lock:
            self._check_errors()
            draft = self._drafts.get(tag)
            if draft is not None and (draft.files or self._ranks.world_size > 1):
                return self._complete(draft)
            if tag not in self._done:
                warn(
                    f"commit() of {tag}: nothing was saved under it, so there is nothing to complete.",
                    SaveWarning,
                )
            return tag in self._done

    def _complete(self, draft: TagDraft) -> bool:
        """Complete a tag: propose a plan, unless another rank has, and submit this rank's part."""
        plan = self._ranks.plan(draft.key)
        if plan is None:
            try:
                plan = self._ranks.propose(draft.key, self._make_plan(draft))
            except BaseException:
                self._drafts.pop(draft.tag, None)
                raise
        return self._submit(draft, plan)

    def _make_plan(self, draft: TagDraft) -> TagPlan:
        if draft.is_explicit:
            members = self._ranks.members(draft.key)
        else:
            num_files = min(draft.num_files or 1, self._ranks.files(draft.key))  # fewer if committed early
            members = self._ranks.savers(draft.key, num_files)
        owners = self._ranks.claim_run(members)
        if owners != members:
            raise InvalidInput(
                f"{draft.tag} was saved by ranks {list(members)}, but the checkpoints before it by ranks "
                f"{list(owners)}. Nothing was saved. Save every tag on the same ranks (call "
                "torch.distributed.barrier() after Checkpoint(tag, -2), so that all of them join it), or use "
                "another home for the others."
            )
        last, loaded = self._ranks.published("last"), self._ranks.published("loaded")
        begins = self._writer is None
        if begins:
            last = loaded if loaded is not None else self.index().last_step()
        elif tag_index.goes_back(draft.tag, last, loaded):
            begins, last = True, loaded
        step = tag_index.next_step(draft.tag, last)
        self._ranks.publish("last", step)
        self._ranks.publish("loaded", None)
        interval_s, passed_s = self.settings.interval_s, time.monotonic() - self._last_sent_s
        is_due = interval_s is not None and passed_s >= interval_s  # by this rank's clock, for all
        return TagPlan(members, step, begins, last if begins else None, is_due)

    def _submit(self, draft: TagDraft, plan: TagPlan) -> bool:
        self._drafts.pop(draft.tag, None)
        self._rounds[draft.tag] += 1
        if self._ranks.rank not in plan.members:
            raise InvalidInput(
                f"{draft.tag} was completed by ranks {list(plan.members)} before rank {self._ranks.rank} "
                "joined it, so its files were not saved. Call torch.distributed.barrier() after "
                "Checkpoint(tag, -2), or pass num_of_files= with the number of files of all ranks "
                "together.",
                rank=self._ranks.rank,
            )
        writer = self._get_writer(plan, draft.key)
        keyed = {name: (tag_index.key_of(name), packed) for name, packed in draft.files.items()}
        state: dict[str, Any] = {key: packed.tree for key, packed in keyed.values()}
        meta = TagMeta(_VERSION, draft.tag, draft.label, self._ranks.rank, describe_partitions(keyed))
        state[META] = asdict(meta)
        save = writer.write(plan, state)
        if plan.to_home:
            self._last_sent_s = time.monotonic()
        if save.skipped or save.failed is not None:
            return False
        self._done[draft.tag] = CompleteTag(frozenset(draft.files), draft.key)
        return True

    def _get_writer(self, plan: TagPlan, key: str) -> TagWriter:
        writer = self._writer
        if writer is not None and writer.members != plan.members:
            writer.checkpointer.close()
            writer = self._writer = None
        if plan.begins or writer is None:
            # The tag of the attempt's base is complete, and need not be saved again.
            every = self.index().checkpoints() if plan.base is not None else ()
            base = next((one for one in every if one.step == plan.base), None)
            self._done = {} if base is None else {base.tag: CompleteTag(frozenset(base.names()), None)}
        if writer is None:
            name = f"{self._ranks.name}/{key}/ranks"
            ranks = StoreRanks(self._ranks.store, name, plan.members, self._ranks.rank, timeout_s=RANKS_S)
            writer = self._writer = TagWriter(self.settings, self._memory_bytes, plan, ranks)
        elif plan.begins:
            writer.begin(plan)
        return writer

    # -- other ranks' decisions ------------------------------------------------------------------------------
    def _check_errors(self) -> None:
        """Apply the decisions of other ranks, and raise a pending error."""
        self._check_process()
        self._apply_decisions()
        if self._errors:
            raise self._errors.pop(0)

    def _apply_decisions(self) -> None:
        if self._ranks.world_size == 1:
            return
        waiting = [draft for draft in self._drafts.values() if not draft.is_explicit]
        decided = [(plan, draft) for draft in waiting if (plan := self._ranks.plan(draft.key)) is not None]
        for plan, draft in sorted(decided, key=lambda pair: pair[0].step):
            self._submit(draft, plan)

    def _watch(self) -> None:
        """Apply the decisions of other ranks between calls, in a thread."""
        while not self._is_closed.wait(_WATCH_S):
            with self._lock:
                try:
                    self._apply_decisions()
                except HoldfastError as error:
                    self._errors.append(error)
                except Exception as error:  # noqa: BLE001 - raised by the next call
                    self._errors.append(RetryLater(f"A save in the background failed: {error!r}."))
                if not any(not draft.is_explicit for draft in self._drafts.values()):
                    self._watching = None
                    return

    @property
    def _ranks(self) -> TagCoordinator:
        """Return the coordinator of the current process group, or of the last one."""
        last = self._last_coordinator
        if last is None or (tag_writer.is_grouped() and (last.rank, last.world_size) != world()):
            last = self._last_coordinator = TagCoordinator(self.home, _num_coordinators[self.home])
            self._publish_loaded()
        return last

    # -- looking ---------------------------------------------------------------------------------------------
    def index(self, persist_path: Any = None) -> TagIndex:
        """Return the checkpoints of a home, by default in this session's tiers."""
        self._check_process()
        if persist_path is not None and (place := tag_writer.parse_location(persist_path)) != self.home:
            return TagIndex(place, {"home": open_store(place)})
        wait_for_orphans(self.home, timeout_s=RANKS_S, notify=lambda _: None)
        with self._lock:
            if self._writer is not None:
                self._writer.wait_complete()
            if self._writer is not None:
                local = self._writer.local
            else:  # the folder of the nearer tier, if the run exists
                run = read_run(open_store(self.home))
                local = tag_writer.local_folder(self.settings, run.id if run else None)
        held = MemoryTierStore(self.home)
        tiers: dict[str, Store] = {"memory": held} if held else {}
        if local is not None:
            tiers["local"] = open_store(local)
        return TagIndex(self.home, {**tiers, "home": open_store(self.home)})

    def newest(self, persist_path: Any = None) -> TaggedCheckpoint | None:
        """Return the newest checkpoint with valid bytes, among those complete at `path`, if given."""
        index = self.index(persist_path)
        verified = self._verified if index.home == self.home else set()
        return index.newest(only_home=persist_path is not None, verified=verified)

    def load(self, tagged: TaggedCheckpoint, name: str, map_location: Any) -> Any:
        """Load a partition of a checkpoint. The next save may continue from it."""
        value = tagged.load(name, tag_writer.own_rank(), map_location)
        with self._lock:
            if tagged.home == self.home:
                self._loaded = tagged.step
                if self._writer is None:  # the first save continues from it
                    self._done = {tagged.tag: CompleteTag(frozenset(tagged.names()), None)}
                with contextlib.suppress(InvalidInput):  # published later if there is no process group yet
                    self._publish_loaded()
        return value

    def _publish_loaded(self) -> None:
        ranks = self._ranks  # new ones are told by this method at once
        if self._loaded is not None:
            ranks.publish("loaded", self._loaded)
            self._loaded = None

    def flush(self, tag: str | None = None) -> None:
        """Wait until a tag, or everything in near tiers, is in home."""
        with self._lock:
            self._check_errors()
            writer = self._writer
        index = self.index()
        every = [tagged for tagged in index.checkpoints() if tag in (None, tagged.tag)]
        if tag is not None and not every:
            raise NotFound(f"The checkpoint {tag!r} to persist does not exist.", key=tag)
        lacking = [tagged for tagged in every[: 1 if tag else None] if "home" not in tagged.tiers]
        if writer is None:
            if tag is not None and lacking:
                raise RetryLater(
                    f"{tag} is not in {self.home} yet, and this process has no keeper that could copy it. "
                    "The run's next save copies it. Nothing is lost: it is in the local tier.",
                    step=lacking[0].step,
                )
            return
        for tagged in reversed(lacking):
            if tagged.step != writer.last:
                _send_home(writer.checkpointer, index, tagged, is_required=tag is not None)
        if tag is None or any(tagged.step == writer.last for tagged in lacking):
            writer.checkpointer.wait()

    # -- ending ----------------------------------------------------------------------------------------------
    def close(self) -> None:
        """Make everything durable in home."""
        if self._is_closed.is_set() or os.getpid() != self._pid:
            return
        with self._lock:
            try:
                self._wait_for_decisions()
            finally:
                self._is_closed.set()
                if self._last_coordinator is not None:
                    _num_coordinators[self.home] += 1
                lost = [d for d in self._drafts.values() if d.files]
                for draft in lost:
                    warn(
                        f"{draft.tag} was never complete, so it is not a checkpoint: "
                        f"{sorted(draft.files)} were saved here, and num_of_files is {draft.num_files}.",
                        SaveWarning,
                    )
                if self._writer is not None:
                    self._writer.checkpointer.close()
        if self._last_coordinator is not None and self._writer is not None:
            self._last_coordinator.leave(self._writer.members)

    def _wait_for_decisions(self) -> None:
        """Wait briefly for other ranks to complete the tags of this rank's files."""
        deadline_s = time.monotonic() + _LAST_S
        coordinator = self._last_coordinator
        with contextlib.suppress(DistError):  # the store has exited, so no rank can complete anything
            while coordinator is not None and coordinator.world_size > 1:
                self._apply_decisions()
                if time.monotonic() > deadline_s or all(one.is_explicit for one in self._drafts.values()):
                    return
                time.sleep(_WATCH_S)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise InvalidInput(
                f"This session of {self.home} belongs to process {self._pid}, but was used in its fork "
                f"{os.getpid()}. Save and load only in the process that called init()."
            )
        if self._is_closed.is_set():
            raise InvalidInput(f"The session of {self.home} has ended. Call init() again.")


def _send_home(
    checkpointer: Checkpointer, index: TagIndex, tagged: TaggedCheckpoint, *, is_required: bool
) -> None:
    """Wait until a checkpoint is in home, or in no tier any more: near ones keep only the newest."""
    found = tagged.checkpoint.manifest.checkpoint_id
    again_s = 0.0
    while "home" not in (tiers := index.tiers_of(found)):
        if not tiers:
            if is_required:
                raise NotFound(
                    f"{tagged.tag} was deleted from the local tier before it was in home.", key=tagged.tag
                )
            return
        if time.monotonic() >= again_s:  # again, since a newer checkpoint on its way home replaces older ones
            checkpointer.send_home(found.step, attempt=found.attempt)
            again_s = time.monotonic() + _SEND_AGAIN_S
        time.sleep(_POLL_S)
