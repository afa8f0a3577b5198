"""A session: one home, the tags that are being saved to it, and what they become. All calls end here."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import DistError

from holdfast import host_memory
from holdfast.adapters.nebula.board import Board, Plan, is_grouped, own_rank, world
from holdfast.adapters.nebula.buffer import Buffer
from holdfast.adapters.nebula.circle import Circle
from holdfast.adapters.nebula.packing import Packed, pack
from holdfast.adapters.nebula.settings import Settings, place_of
from holdfast.adapters.nebula.shelf import Shelf, Tier, Volume, meta_of
from holdfast.adapters.nebula.tags import EXPLICIT, META, goes_back, key_of, named_step, next_step
from holdfast.adapters.nebula.writer import RANKS_S, Writer, local_folder, run_of
from holdfast.callsite import warn
from holdfast.errors import HoldfastError, InvalidInput, NotFound, RetryLater, SaveWarning
from holdfast.keeper import HeldStore, wait_for_orphans
from holdfast.store import open_store

_WATCH_S = 0.05
_LAST_S = 5.0
_POLL_S = 0.05
_boards: Counter[str] = Counter()


@dataclass(slots=True)
class Draft:
    """A tag that is not complete yet."""

    tag: str
    key: str  # on the board
    num_files: int | None
    label: str | None = None
    files: dict[str, Packed] = field(default_factory=dict)

    @property
    def is_explicit(self) -> bool:
        """True if only `commit` completes it."""
        return self.num_files == EXPLICIT


@dataclass(frozen=True, slots=True)
class Done:
    """A tag that is complete in this attempt."""

    names: frozenset[str]  # of this rank's partitions
    key: str | None  # on the board; None: it is what the attempt goes on from


class Session:
    """Saves to and loads from one home. For any thread.

    Args:
        settings: what `init` was told.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.home = settings.home
        self._buffer = Buffer.read(os.environ, host_memory.available_bytes())
        self._lock = threading.RLock()
        self._board: Board | None = None
        self._writer: Writer | None = None
        self._drafts: dict[str, Draft] = {}
        self._done: dict[str, Done] = {}  # tags complete in this attempt
        self._rounds: Counter[str] = Counter()
        self._verified: set[tuple[int, int]] = set()
        self._trouble: list[HoldfastError] = []  # of the thread that watches
        self._loaded: int | None = None  # step, not yet told to the other ranks
        self._sent_s = time.monotonic()  # when a checkpoint last went home by the clock
        self._watching: threading.Thread | None = None
        self._is_closed = threading.Event()
        self._pid = os.getpid()

    @property
    def is_usable(self) -> bool:
        """True until it is closed, in the process that made it."""
        return not self._is_closed.is_set() and os.getpid() == self._pid

    # -- saving ----------------------------------------------------------------------------------------------

    def announce(self, tag: str, num_files: int | None) -> None:
        """Take part in a tag that `commit` is to complete, before any file of it is saved."""
        with self._lock:
            if num_files != EXPLICIT or tag in self._drafts:
                return
            if tag in self._done:
                self._forget_if_back(tag)
            if not self._is_repeated(tag):
                self._begin_draft(tag, num_files)

    def save(self, tag: str, name: str, value: Any, num_files: int | None, label: str | None = None) -> bool:
        """Take one partition of a tag; completes the tag if it is the last.

        Returns:
            True if the partition is on its way; False if it was left out, with a warning.

        Raises:
            InvalidInput, Unsupported: it cannot be saved; nothing was taken.
            HoldfastError: an earlier save failed, or this one.

        Blocks: for a copy of what it holds.
        """
        packed = pack(value, name)
        packed.check(name)
        key_of(name)
        with self._lock:
            self._settle()
            draft = self._drafts.get(tag)
            if draft is None and tag in self._done:
                self._forget_if_back(tag)
            if draft is None and self._is_done(tag) and label is None:
                if name in self._done[tag].names and self._is_repeated(tag):
                    return self._leave_out(tag, name)
                if name not in self._done[tag].names:
                    return self._extend(tag, name, packed)
            draft = draft or self._begin_draft(tag, num_files)
            draft.label = label
            return self._take(draft, name, packed)

    def _is_done(self, tag: str) -> bool:
        """True if a tag is complete in this attempt, and some rank has saved a file of it."""
        done = self._done.get(tag)
        return done is not None and (done.key is None or self._the_board().files(done.key) > 0)

    def _is_repeated(self, tag: str) -> bool:
        """True if a tag that names a step is complete in this attempt, so that it need not be saved again."""
        return named_step(tag) is not None and self._is_done(tag)

    def _leave_out(self, tag: str, name: str) -> bool:
        message = (
            f"{tag} is complete and holds {name!r} already; it was not saved again. Use another tag for "
            "another state."
        )
        warn(message, SaveWarning)
        return False

    def _extend(self, tag: str, name: str, packed: Packed) -> bool:
        """Make a new version of a complete tag that holds one more partition."""
        volume = self.shelf().find(tag)
        if volume is not None and volume.checkpoint.world_size > 1:
            message = (
                f"{tag} was completed by {volume.checkpoint.world_size} ranks before {name!r} came. Nothing "
                "was saved. Give num_of_files= the number of files of all ranks together."
            )
            raise InvalidInput(message, key=name)
        draft = self._begin_draft(tag, None)
        if volume is not None:
            draft.files.update({one: volume.packed(one, 0) for one in volume.names()})
        return self._take(draft, name, packed)

    def _begin_draft(self, tag: str, num_files: int | None) -> Draft:
        board = self._the_board()
        draft = self._drafts[tag] = Draft(tag, f"{tag}/{self._rounds[tag]}", num_files)
        if draft.is_explicit:
            board.join(draft.key)
        return draft

    def _take(self, draft: Draft, name: str, packed: Packed) -> bool:
        board = self._the_board()
        count = 0 if name in draft.files else board.count(draft.key)
        if draft.is_explicit or not count:
            draft.files[name] = packed.kept()
            return True
        wanted = draft.num_files or 1
        if count < wanted:
            draft.files[name] = packed.kept()
            self._watch()
            return True
        if count > wanted:
            del self._drafts[draft.tag]
            raise self._too_many(draft, name, board)
        draft.files[name] = packed  # the live tensors: the save itself copies them
        return self._complete(draft)

    def _too_many(self, draft: Draft, name: str, board: Board) -> InvalidInput:
        plan = board.plan(draft.key)
        who = (
            "others"
            if plan is None
            else f"rank {plan.members[0]}"
            if len(plan.members) == 1
            else "other ranks"
        )
        count = "was not given" if draft.num_files is None else f"is {draft.num_files}"
        message = (
            f"{draft.tag} was complete when rank {board.rank} saved {name!r}: num_of_files {count}, and "
            f"{who} had "
            "saved as many. This file was not saved. Save on one rank only (if rank == 0:), or give "
            "num_of_files= the number of files of all ranks together."
        )
        return InvalidInput(message, rank=board.rank, key=name)

    def commit(self, tag: str) -> bool:
        """Complete a tag with the files that it has.

        Returns:
            True if it is complete: staged, and in the hands of the keeper.

        Raises:
            HoldfastError: an earlier save failed, or this one.
        """
        with self._lock:
            self._settle()
            draft = self._drafts.get(tag)
            if draft is not None and (draft.files or self._the_board().world_size > 1):
                return self._complete(draft)
            if tag not in self._done:
                message = f"commit() of {tag}, of which nothing was saved here: there is nothing to complete."
                warn(message, SaveWarning)
            return tag in self._done

    def _complete(self, draft: Draft) -> bool:
        """Complete a tag: decide how, unless another rank has, and hand this rank's part over."""
        board = self._the_board()
        plan = board.plan(draft.key)
        if plan is None:
            try:
                plan = board.propose(draft.key, self._plan(draft, board))
            except BaseException:
                self._drafts.pop(draft.tag, None)
                raise
        return self._hand_over(draft, plan)

    def _plan(self, draft: Draft, board: Board) -> Plan:
        if draft.is_explicit:
            members = board.members(draft.key)
        else:
            wanted = draft.num_files or 1
            members = board.savers(draft.key, min(wanted, board.files(draft.key)))  # fewer if committed early
        claimed = board.claim_run(members)
        if claimed != members:
            message = (
                f"{draft.tag} was saved by ranks {list(members)}, but the checkpoints before it by ranks "
                f"{list(claimed)}: one home holds one line of checkpoints. Nothing was saved. Let the same "
                "ranks save every tag (torch.distributed.barrier() after Checkpoint(tag, -2) lets all "
                "of them take "
                "part), or keep the others in a place of their own."
            )
            raise InvalidInput(message)
        last, loaded = board.noted("last"), board.noted("loaded")
        begins = self._writer is None
        if begins:
            last = loaded if loaded is not None else self.shelf().last_step()
        elif goes_back(draft.tag, last, loaded):
            begins, last = True, loaded
        step = next_step(draft.tag, last)
        board.note("last", step)
        board.note("loaded", None)
        return Plan(members, step, begins, last if begins else None, self._is_due())

    def _is_due(self) -> bool:
        """True if the clock says that a checkpoint should go home; one rank alone has a clock of its own."""
        interval_s = self.settings.interval_s
        return interval_s is not None and time.monotonic() - self._sent_s >= interval_s

    def _hand_over(self, draft: Draft, plan: Plan) -> bool:
        self._drafts.pop(draft.tag, None)
        self._rounds[draft.tag] += 1
        board = self._the_board()
        if board.rank not in plan.members:
            message = (
                f"{draft.tag} was completed by ranks {list(plan.members)} before rank {board.rank} took "
                "part, so "
                "its files were not saved. Call torch.distributed.barrier() after Checkpoint(tag, -2), or "
                "give num_of_files= the number of files of all ranks together."
            )
            raise InvalidInput(message, rank=board.rank)
        self._buffer.check((t for packed in draft.files.values() for t in packed.tensors()), draft.tag)
        writer = self._the_writer(plan, draft.key, board)
        keyed = {name: (key_of(name), packed) for name, packed in draft.files.items()}
        state = {key: packed.tree for key, packed in keyed.values()}
        state[META] = meta_of(draft.tag, draft.label, board.rank, keyed)
        save = writer.write(plan, state)
        if plan.to_home:
            self._sent_s = time.monotonic()
        if save.skipped or save.failed is not None:
            return False
        self._done[draft.tag] = Done(frozenset(draft.files), draft.key)
        return True

    def _the_writer(self, plan: Plan, key: str, board: Board) -> Writer:
        if self._writer is not None and self._writer.members != plan.members:
            self._writer.close()
            self._writer = None
        if plan.begins or self._writer is None:
            self._done.clear()
            if plan.base is not None:
                self._note_base(plan.base)
        if self._writer is None:
            local = local_folder(self.settings, run_of(self.home, make=True))
            writer = Writer(self.settings, local, self._buffer.cap_bytes, plan.members)
            writer.begin(plan, self._circle(plan, key, board))
            self._writer = writer
        elif plan.begins:
            self._writer.begin(plan, self._circle(plan, key, board))
        return self._writer

    def _note_base(self, step: int) -> None:
        """What an attempt goes on from is complete, so its tag need not be saved again."""
        for volume in self.shelf().volumes():
            if volume.step == step:
                self._done[volume.tag] = Done(frozenset(volume.names()), None)
                return

    def _circle(self, plan: Plan, key: str, board: Board) -> Circle:
        return Circle(board.store, f"{board.name}/{key}/circle", plan.members, board.rank, timeout_s=RANKS_S)

    def _forget_if_back(self, tag: str) -> None:
        """After going back, tags that were saved before are a new attempt's to save."""
        board = self._the_board()
        if goes_back(tag, board.noted("last"), board.noted("loaded")):
            self._done.pop(tag, None)

    # -- other ranks' decisions ------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Follow what other ranks have decided meanwhile, and tell what has gone wrong."""
        self._check_process()
        self._follow()
        if self._trouble:
            raise self._trouble.pop(0)

    def _follow(self) -> None:
        board = self._the_board()
        if board.world_size == 1:
            return
        waiting = [draft for draft in self._drafts.values() if not draft.is_explicit]
        decided = [(plan, draft) for draft in waiting if (plan := board.plan(draft.key)) is not None]
        for plan, draft in sorted(decided, key=lambda pair: pair[0].step):
            self._hand_over(draft, plan)

    def _watch(self) -> None:
        """Have a thread follow the others' decisions, so that none waits for this rank's next call."""
        if self._the_board().world_size == 1 or (self._watching is not None and self._watching.is_alive()):
            return
        self._watching = threading.Thread(target=self._keep_watching, name="holdfast-nebula", daemon=True)
        self._watching.start()

    def _keep_watching(self) -> None:
        while not self._is_closed.wait(_WATCH_S):
            with self._lock:
                try:
                    self._follow()
                except HoldfastError as error:
                    self._trouble.append(error)
                except Exception as error:  # noqa: BLE001 - told by the next call, as of the wrong kind
                    self._trouble.append(RetryLater(f"Saving beside the training failed: {error!r}."))
                if not any(not draft.is_explicit for draft in self._drafts.values()):
                    self._watching = None
                    return

    def _the_board(self) -> Board:
        """The board of the process group as it is now; of the one there was, when that has ended."""
        known = self._board
        if known is None or (is_grouped() and (known.rank, known.world_size) != world()):
            known = self._board = Board(self.home, _boards[self.home])
            self._tell_loaded(known)
        return known

    # -- looking ---------------------------------------------------------------------------------------------

    def shelf(self, persist_path: Any = None) -> Shelf:
        """The checkpoints of a place, by default of this session's tiers.

        Blocks: while keepers of dead trainers, and the one of this process, complete what they have.
        """
        self._check_process()
        if persist_path is not None and (place := place_of(persist_path)) != self.home:
            return Shelf(place, [Tier("home", open_store(place))])
        wait_for_orphans(self.home, timeout_s=RANKS_S, say=lambda _: None)
        with self._lock:
            if self._writer is not None:
                self._writer.wait_complete()
            local = self._writer.local if self._writer is not None else self._known_local()
        held = HeldStore(self.home)
        tiers = [Tier("memory", held)] if held else []
        if local is not None:
            tiers.append(Tier("local", open_store(local)))
        return Shelf(self.home, [*tiers, Tier("home", open_store(self.home))])

    def _known_local(self) -> str | None:
        return local_folder(self.settings, run_of(self.home, make=False))

    def find(self, tag: str, persist_path: Any = None) -> Volume | None:
        """The newest checkpoint of a tag."""
        return self.shelf(persist_path).find(tag)

    def newest(self, persist_path: Any = None) -> Volume | None:
        """The newest checkpoint that verifies; with a path, of those that are complete there."""
        shelf = self.shelf(persist_path)
        is_own = persist_path is None or place_of(persist_path) == self.home
        return shelf.newest(only_home=persist_path is not None, verified=self._verified if is_own else set())

    def load(self, volume: Volume, name: str, map_location: Any) -> Any:
        """A partition of a checkpoint, see `Volume.load`; what is saved next may go on from there."""
        value = volume.load(name, own_rank(), map_location)
        with self._lock:
            if volume.home == self.home:
                self._loaded = volume.step
                if self._writer is None:  # what is saved first goes on from it
                    self._done = {volume.tag: Done(frozenset(volume.names()), None)}
                with contextlib.suppress(InvalidInput):  # there is no process group yet: told when there is
                    self._tell_loaded(self._the_board())
        return value

    def _tell_loaded(self, board: Board) -> None:
        if self._loaded is not None:
            board.note("loaded", self._loaded)
            self._loaded = None

    def flush(self, tag: str | None = None, timeout_s: float | None = None) -> None:
        """Wait until a tag, or everything that near tiers hold, is in home.

        Raises:
            NotFound: there is no such tag.
            RetryLater: not within `timeout_s`.
            HoldfastError: the newest save failed.

        Blocks: until then.
        """
        with self._lock:
            self._settle()
            writer = self._writer
        shelf = self.shelf()
        every = [one for one in shelf.volumes() if tag in (None, one.tag)]
        if tag is not None and not every:
            raise NotFound(f"There is no checkpoint of {tag!r} to be persisted.", key=tag)
        lacking = [one for one in every[: 1 if tag else None] if "home" not in one.tiers]
        if writer is None:
            if tag is not None and lacking:
                message = (
                    f"{tag} is not in {self.home}, and this process has saved nothing that could bring it "
                    "there: the run's next save does. Nothing is lost, it is in the local tier."
                )
                raise RetryLater(message, step=lacking[0].step)
            return
        for volume in reversed(lacking):
            if volume.step != writer.last:
                self._bring_home(shelf, volume, writer, timeout_s)
        if tag is None or any(one.step == writer.last for one in lacking):
            writer.wait_home(timeout_s)

    def _bring_home(self, shelf: Shelf, volume: Volume, writer: Writer, timeout_s: float | None) -> None:
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        writer.send_home(volume.step)
        while (volume.checkpoint.attempt, volume.step) not in shelf:
            if deadline_s is not None and time.monotonic() > deadline_s:
                message = f"{volume.tag} is not yet in {self.home} after {timeout_s} s; it goes on."
                raise RetryLater(message, step=volume.step)
            time.sleep(_POLL_S)

    # -- ending ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Make everything durable in home.

        Raises:
            HoldfastError: the newest save failed.

        Blocks: until then.
        """
        if self._is_closed.is_set() or os.getpid() != self._pid:
            return
        with self._lock:
            try:
                self._follow_at_end()
            finally:
                self._is_closed.set()
                if self._board is not None:
                    _boards[self.home] += 1
                lost = [d for d in self._drafts.values() if d.files]
                for draft in lost:
                    message = (
                        f"{draft.tag} was never complete, so it is no checkpoint: {sorted(draft.files)} "
                        "were saved "
                        f"here, and num_of_files is {draft.num_files}."
                    )
                    warn(message, SaveWarning)
                if self._writer is not None:
                    self._writer.close()
        if self._board is not None and self._writer is not None:
            self._board.leave(self._writer.members)

    def _follow_at_end(self) -> None:
        """Wait a little for the others to complete what this rank has saved a part of."""
        deadline_s = time.monotonic() + _LAST_S
        board = self._board
        with contextlib.suppress(DistError):  # the store is gone, and with it whoever could complete anything
            while board is not None and board.world_size > 1:
                self._follow()
                if time.monotonic() > deadline_s or all(one.is_explicit for one in self._drafts.values()):
                    return
                time.sleep(_WATCH_S)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            message = (
                f"This session of {self.home} belongs to process {self._pid} and was carried into process "
                f"{os.getpid()} by a fork. Save and load only in the process that called init()."
            )
            raise InvalidInput(message)
        if self._is_closed.is_set():
            message = f"The session of {self.home} has ended. Call init() again."
            raise InvalidInput(message)
