"""Sender of copies: a thread that sends this rank's newest files to one peer, and never holds up anything."""

from __future__ import annotations

import threading
from collections.abc import Callable

from msgspec import Struct

from holdfast.checkpoint.keeper.config import PeerAddress, PeersConfig
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
