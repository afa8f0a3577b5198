"""Holder of copies: takes the files of other ranks from their keepers, and checks every byte on arrival."""

from __future__ import annotations

import contextlib
import socket
import threading

from holdfast.checkpoint.format import names
from holdfast.checkpoint.format import part as parts
from holdfast.checkpoint.format.part import DataFile
from holdfast.checkpoint.keeper.config import PeersConfig
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
from holdfast.checkpoint.keeper.peers.copies import CopyMemory, HeldCopy
from holdfast.checkpoint.keeper.persist import BLOCK_BYTES, check_chunks
from holdfast.errors import Corrupt, HoldfastError, RetryLater

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
