"""Mirror of a keeper: copies of this rank's saves on peers, and of the peers' saves here, all in memory."""

from __future__ import annotations

import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Collection
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from holdfast.checkpoint.format import names
from holdfast.checkpoint.format import part as parts
from holdfast.checkpoint.home.history import History
from holdfast.checkpoint.keeper import messages
from holdfast.checkpoint.keeper.config import KeeperConfig, PeerAddress, PeersConfig
from holdfast.checkpoint.keeper.inbox import StagedSave, TrainerInbox
from holdfast.checkpoint.keeper.messages import Image, lay_out_images
from holdfast.checkpoint.keeper.peers.conversation import (
    Conversation,
    Held,
    Hello,
    Offer,
    Ready,
    Refused,
    Welcome,
    call,
)
from holdfast.checkpoint.keeper.peers.holder import Holder
from holdfast.checkpoint.keeper.persist import describe_file
from holdfast.checkpoint.keeper.reports import bugs_as_errors
from holdfast.errors import Denied, HoldfastError, RetryLater


class OwnCopy(Struct, frozen=True):
    """Files of one save of this rank, in its arena."""

    step: int
    document: bytes  # the part
    files: tuple[memoryview, ...]  # the data file, and that of the frozen tensors if there is one
    keep: tuple[int, ...] = ()  # steps of earlier copies that peers keep beside it


class PeerSender:
    """Sender to one peer.

    Args:
        rank: whose files are sent.
        on_end: called in the thread with the step of each copy, and with the error if the peer has none.
    """

    def __init__(
        self,
        address: PeerAddress,
        rank: int,
        config: PeersConfig,
        on_end: Callable[[int, HoldfastError | None], None],
    ) -> None:
        self._address, self._rank, self._config, self._on_end = address, rank, config, on_end
        self._waiting: OwnCopy | None = None
        self._given_up = -1  # step of a copy that is not sent again
        self._conversation: Conversation | None = None
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="holdfast-peer", daemon=True).start()

    def send(self, copy: OwnCopy) -> None:
        """Send a copy, after the one that is being sent."""
        with self._changed:
            self._waiting = copy
            self._changed.notify_all()

    def give_up(self, step: int) -> None:
        """Stop sending the copy of a step, whose arena is about to change. It ends with an error."""
        with self._changed:
            self._given_up = step
            if self._conversation is not None:
                self._conversation.interrupt()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                copy, self._waiting = self._waiting, None
            assert copy is not None
            error = self._try(copy)
            if error is not None:
                self._disconnect()
            step = copy.step
            del copy  # it refers to the memory of an arena
            self._on_end(step, error)

    def _try(self, copy: OwnCopy) -> HoldfastError | None:
        was_connected = self._conversation is not None
        try:
            self._send(self._connected(), copy)
        except HoldfastError as error:
            if was_connected and isinstance(error, RetryLater) and copy.step != self._given_up:
                self._disconnect()
                return self._try(copy)  # the peer may have been replaced since the copy before
            where = f"rank {self._address.rank} at {self._address.host}"
            return RetryLater(f"Rank {self._rank} has no copy of step {copy.step} on {where}: {error}")
        return None

    def _connected(self) -> Conversation:
        """Return the open conversation. The peer may have closed it, which the first message finds out."""
        if self._conversation is None:
            found = call(self._address, self._config.secret, self._config.tls)
            with self._changed:
                self._conversation = found
            found.send(Hello(self._rank))
            found.expect(Welcome)
            found.end_opening()
        return self._conversation

    def _send(self, conversation: Conversation, copy: OwnCopy) -> None:
        conversation.send(Offer(copy.step, copy.keep))
        conversation.send_document(copy.document)
        reply = conversation.expect(Ready, Refused)
        if isinstance(reply, Refused):
            raise Denied(reply.reason)
        for file in copy.files[:1] if reply.has_frozen else copy.files:
            conversation.send_bytes(file, self._config.bandwidth)
        conversation.expect(Held)

    def _disconnect(self) -> None:
        with self._changed:
            if self._conversation is not None:
                self._conversation.close()
            self._conversation = None


class _Kept(Struct):
    """Save in an arena that stays as it is while its copies are needed."""

    arena: int
    arena_fd: int
    images: tuple[Image, ...]
    document: bytes  # the part
    missing: set[int]  # ranks that do not hold it yet
    step: int
    began_s: float


class Mirror:
    """Mirror of one keeper. It holds up no save: what peers cannot take in time is reported, and dropped.

    Args:
        listener: socket on which the peers of this keeper call.
    """

    def __init__(
        self, config: KeeperConfig, listener: socket.socket, history: History, inbox: TrainerInbox
    ) -> None:
        peers = config.peers
        assert peers is not None
        self._config, self._history, self._inbox = config, history, inbox
        self._holder = Holder(listener, config.attempt, peers)
        self._senders = {
            address.rank: PeerSender(address, config.rank, peers, partial(self._end, address.rank))
            for address in peers.holders
        }
        self._kept: dict[int, _Kept] = {}  # by step
        self._coming: set[int] = set()  # arenas of saves that are not described yet
        self._read: set[int] = set()  # arenas that nothing but their copies needs any more
        self._is_failing = False  # since the last copy that all peers hold
        self._lock = threading.Lock()

    # -- copies of this rank's saves -------------------------------------------------------------------------
    def add(self, save: StagedSave) -> None:
        """Copy a save to the peers, beside its way into a store. The inbox calls this once it is received."""
        try:
            own = replace(save, arena_fd=os.dup(save.arena_fd), draft_fd=os.dup(save.draft_fd))
        except OSError as error:  # no descriptor is left
            self._fail(save.request.step, RetryLater(f"Step {save.request.step} has no copy: {error}."))
            return
        with self._lock:
            self._coming.add(save.request.arena)
        threading.Thread(target=self._describe, args=(own,), name="holdfast-mirror", daemon=True).start()

    def _describe(self, save: StagedSave) -> None:
        """Hash the files of a save, and give them to the senders."""
        request, step = save.request, save.request.step
        try:
            with bugs_as_errors(f"The copy of step {step}"):
                arena = memoryview(mmap.mmap(save.arena_fd, 0, access=mmap.ACCESS_READ))
                layout, key = request.layout, (step, self._config.attempt, self._config.rank)
                images = layout.images(*key)
                files = tuple(arena[one.offset : one.offset + one.num_bytes] for one in images)
                draft = os.pread(save.draft_fd, os.fstat(save.draft_fd).st_size, 0)
                found, _ = parts.findings_of(draft, names.part(*key))
                document = parts.finish(draft, *map(describe_file, files), watches=found)
        except HoldfastError as error:
            self._drop(request.arena, save.arena_fd)
            self._fail(step, error)
            return
        finally:
            os.close(save.draft_fd)
        with self._lock:
            keep = tuple(self._kept)
            missing = set(self._senders)
            self._kept[step] = _Kept(
                request.arena, save.arena_fd, images, document, missing, step, save.received_s
            )
            self._coming.discard(request.arena)
        for sender in self._senders.values():
            sender.send(OwnCopy(step, document, files, keep))

    def _end(self, rank: int, step: int, error: HoldfastError | None) -> None:
        """Count a peer that holds a copy. A sender calls this."""
        with self._lock:
            kept = self._kept.get(step)
        if kept is None:
            return  # all ranks have given it up
        if error is not None:
            self._fail(step, error)
            return
        with self._lock:
            kept.missing.discard(rank)
            if kept.missing:
                return
            self._is_failing = False
        seconds = time.monotonic() - kept.began_s
        self._inbox.reply(messages.CopyEnded(step))  # first: the history may wait for a store
        num_bytes = sum(image.num_bytes for image in kept.images)
        self._history.record("mirrored", step=step, num_bytes=num_bytes, seconds=seconds, tier="peers")

    def _fail(self, step: int, error: HoldfastError) -> None:
        self._inbox.reply(messages.CopyEnded(step, str(error)[: messages.MAX_DETAIL]))
        with self._lock:
            was_failing, self._is_failing = self._is_failing, True
        if not was_failing:
            self._history.record("mirror-failed", step=step, detail=str(error), tier="peers")

    def keep(self, steps: Collection[int]) -> None:
        """Keep the copies of these steps only. Peers drop the others with the next copy."""
        with self._lock:
            dropped = [self._kept.pop(step) for step in list(self._kept) if step not in steps]
        for one in dropped:
            for rank in one.missing:
                self._senders[rank].give_up(one.step)  # before the arena changes
            self._drop(one.arena, one.arena_fd)

    @property
    def newest_s(self) -> float:
        """Arrival of the newest save with copies, in seconds of the monotonic clock; 0 without one."""
        return max((kept.began_s for kept in tuple(self._kept.values())), default=0.0)

    @property
    def arenas(self) -> set[int]:
        """Numbers of the arenas that must stay as they are."""
        with self._lock:
            return {kept.arena for kept in self._kept.values()} | self._coming

    def release(self, arena: int) -> None:
        """Release an arena that is persisted, now or once its copies are dropped."""
        if arena in self.arenas:
            self._read.add(arena)
        else:
            self._inbox.reply(messages.ArenaReleased(arena))

    def _drop(self, arena: int, arena_fd: int) -> None:
        os.close(arena_fd)
        with self._lock:
            self._coming.discard(arena)
            is_read = arena in self._read
            self._read.discard(arena)
        if is_read:
            self._inbox.reply(messages.ArenaReleased(arena))

    # -- everything in memory --------------------------------------------------------------------------------
    def images(self) -> dict[int, tuple[Image, ...]]:
        """Return the images of all copies here, of any rank, by the descriptor of their memory."""
        with self._lock:
            own = {kept.arena_fd: kept.images for kept in self._kept.values()}
            documents = {
                names.part(step, self._config.attempt, self._config.rank): kept.document
                for step, kept in self._kept.items()
            }
        # The documents are in a new memfd, which stays open as long as this process.
        fd = os.memfd_create("holdfast-parts")
        images, end = lay_out_images((name, len(document)) for name, document in documents.items())
        for image in images:
            os.pwrite(fd, documents[image.name], image.offset)
        os.ftruncate(fd, end)
        return own | {fd: images} | self._holder.memory.images()
