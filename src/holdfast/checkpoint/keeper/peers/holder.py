"""Holder of copies: takes other ranks' files, checks every byte on arrival, and keeps them in memory."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
from collections.abc import Collection

from msgspec import Struct

from holdfast.checkpoint.format import names
from holdfast.checkpoint.format import part as parts
from holdfast.checkpoint.format.part import DataFile, Part
from holdfast.checkpoint.keeper.config import PeersConfig
from holdfast.checkpoint.keeper.messages import Image, lay_out_images
from holdfast.checkpoint.keeper.peers.conversation import (
    Conversation,
    Held,
    Hello,
    Offer,
    Ready,
    Refused,
    Welcome,
    answer,
)
from holdfast.checkpoint.keeper.persist import BLOCK_BYTES, check_chunks
from holdfast.errors import Corrupt, HoldfastError, RetryLater
from holdfast.system.units import format_bytes


class Room(Struct):
    """A memfd for one copy."""

    fd: int
    memory: mmap.mmap

    @classmethod
    def make(cls, num_bytes: int) -> Room:
        """Allocate memory, or raise RetryLater: later writes to missing memory would end this process."""
        fd = os.memfd_create("holdfast-copy")
        try:
            os.posix_fallocate(fd, 0, num_bytes)
            return cls(fd, mmap.mmap(fd, num_bytes))
        except OSError as error:
            os.close(fd)
            raise RetryLater(
                f"the host of the peer has no {format_bytes(num_bytes)} of memory: {error.strerror}"
            ) from error


class HeldCopy(Struct):
    """Copy of the files of one rank of one save."""

    part: Part
    room: Room
    images: tuple[Image, ...]  # of the data file, that of the frozen tensors if there is one, and the part
    is_whole: bool = False  # all bytes are there, and match their hashes

    def view(self, number: int) -> memoryview:
        """Return the memory of an image."""
        image = self.images[number]
        return memoryview(self.room.memory)[image.offset : image.offset + image.num_bytes]

    @property
    def files(self) -> list[DataFile]:
        """The files of tensors, in the order of the images."""
        return [self.part.file] if self.part.frozen is None else [self.part.file, self.part.frozen]


class CopyMemory:
    """Memory for the copies of other ranks. Threads may share it.

    Args:
        limit_bytes: of all copies together.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._copies: dict[int, list[HeldCopy]] = {}  # by the rank that wrote them
        self._free: list[Room] = []  # to be used again: new pages take a second per GB
        self._lock = threading.Lock()

    def begin(self, part: Part, document: bytes, keep: Collection[int]) -> HeldCopy:
        """Return a new copy of a rank's files without their bytes. Drops earlier ones but those to keep.

        Raises:
            RetryLater: there is no memory for it.
        """
        key = part.step, part.attempt, part.rank
        sizes = [(names.data(*key), part.file.num_bytes), (names.part(*key), len(document))]
        if part.frozen is not None:
            sizes.insert(1, (names.frozen(*key), part.frozen.num_bytes))
        images, end = lay_out_images(sizes)
        with self._lock:
            own = self._copies.setdefault(part.rank, [])
            for copy in [one for one in own if one.part.step not in keep or not one.is_whole]:
                own.remove(copy)
                self._free.append(copy.room)
            copy = HeldCopy(part, self._take_room(end), images)
            own.append(copy)
        copy.view(-1)[:] = document
        return copy

    def _take_room(self, num_bytes: int) -> Room:
        for room in self._free:
            if num_bytes <= len(room.memory) <= 2 * num_bytes:
                self._free.remove(room)
                return room
        while self._free:
            room = self._free.pop()
            room.memory.close()
            os.close(room.fd)
        used = sum(len(copy.room.memory) for own in self._copies.values() for copy in own)
        if used + num_bytes > self._limit_bytes:
            raise RetryLater(
                f"its memory for copies is full: {format_bytes(used)} of {format_bytes(self._limit_bytes)} "
                f"are in use, and {format_bytes(num_bytes)} more are needed. Raise Peers(memory=)"
            )
        return Room.make(num_bytes)

    def frozen_like(self, wanted: HeldCopy) -> memoryview | None:
        """Return the file of frozen tensors of an earlier copy, if it has the same bytes."""
        with self._lock:
            for copy in self._copies.get(wanted.part.rank, ()):
                if copy.is_whole and copy.part.frozen == wanted.part.frozen:
                    return copy.view(1)
        return None

    def images(self) -> dict[int, tuple[Image, ...]]:
        """Return the images of all whole copies by the descriptor of their memory."""
        with self._lock:
            return {
                copy.room.fd: copy.images for own in self._copies.values() for copy in own if copy.is_whole
            }


_MAX_STRANGERS = 16  # connections at once whose callers have not proved the secret; more are closed


class Holder:
    """Server of one keeper's listening socket, with a thread for each caller.

    Args:
        attempt: of the run, whose copies are taken.
        config: the ranks whose copies are taken, and what they must prove.
    """

    def __init__(self, listener: socket.socket, attempt: int, config: PeersConfig) -> None:
        self.memory = CopyMemory(config.memory_bytes)
        self._listener, self._attempt, self._config = listener, attempt, config
        self._strangers = threading.Semaphore(_MAX_STRANGERS)
        # By rank, each with its thread: a new call ends the one before.
        self._open: dict[int, tuple[Conversation, threading.Thread]] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, name="holdfast-holder", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                end, _ = self._listener.accept()
            except OSError:  # the socket is closed
                return
            if not self._strangers.acquire(blocking=False):
                end.close()
                continue
            threading.Thread(target=self._serve, args=(end,), name="holdfast-caller", daemon=True).start()

    def _serve(self, end: socket.socket) -> None:
        """Take copies from one caller until it disconnects, or is a stranger."""
        rank = -1
        try:
            conversation = answer(end, self._config.secret, self._config.tls)
            with contextlib.suppress(HoldfastError):
                rank = conversation.expect(Hello).rank
        except HoldfastError:
            return
        finally:
            self._strangers.release()
        with contextlib.closing(conversation), contextlib.suppress(HoldfastError):  # the caller calls again
            if rank not in self._config.writers:
                return
            with self._lock:
                before = self._open.get(rank)
                self._open[rank] = conversation, threading.current_thread()
            if before is not None:
                before[0].interrupt()
                before[1].join()  # it may still write into memory that is about to hold another copy
            conversation.end_opening()
            conversation.send(Welcome())
            while True:
                self._take(conversation, rank)

    def _take(self, conversation: Conversation, rank: int) -> None:
        """Take one copy."""
        conversation.wait()
        offer, document = conversation.expect(Offer), conversation.receive_document()
        name = names.part(offer.step, self._attempt, rank)
        part = parts.parse(document, name)
        if (part.step, part.attempt, part.rank) != (offer.step, self._attempt, rank):
            raise Corrupt(f"A peer sent another part than {name}.", key=name)
        try:
            copy = self.memory.begin(part, document, offer.keep)
        except RetryLater as error:
            conversation.send(Refused(str(error)))
            return
        frozen = None if part.frozen is None else self.memory.frozen_like(copy)
        conversation.send(Ready(has_frozen=frozen is not None))
        if frozen is not None:
            copy.view(1)[:] = frozen
        for number, file in enumerate(copy.files[:1] if frozen is not None else copy.files):
            _receive_file(conversation, copy, number, file)
        copy.is_whole = True
        conversation.send(Held())


def _receive_file(conversation: Conversation, copy: HeldCopy, number: int, file: DataFile) -> None:
    """Receive a file, and compare each chunk with its hash while it is in the cache."""
    image = copy.view(number)
    for start in range(0, file.num_bytes, BLOCK_BYTES):  # a multiple of every size of chunks
        block = image[start : start + BLOCK_BYTES]
        conversation.receive_into(block)
        check_chunks(block, start, file, copy.images[number].name, "on its way to a peer")
