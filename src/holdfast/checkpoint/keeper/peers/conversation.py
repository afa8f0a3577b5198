"""Conversation of two keepers over TCP. Both prove that they have the secret, and neither sends it.

Both sides choose a random number, and authenticate every message with a key of the secret and both numbers.
So a recorded conversation cannot be repeated, and a message cannot be changed, moved or left out. The bytes
of data files follow as they are: the receiver compares them with the hashes in an authenticated message.
Without TLS they can be read on the way.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import select
import socket
import ssl
import struct
import time
from collections.abc import Iterator
from typing import TypeAlias, TypeVar

from holdfast.checkpoint.format.limits import MAX_DOCUMENT_BYTES
from holdfast.checkpoint.keeper.config import PeerAddress, TlsFiles
from holdfast.checkpoint.keeper.messages import KindMessage
from holdfast.checkpoint.keeper.persist import paced
from holdfast.errors import Corrupt, Denied, RetryLater
from holdfast.system.documents import Count, decode_as, to_plain

OPENING_S = 10.0  # within which both sides prove the secret; a stranger is disconnected after it
SILENCE_S = 20.0  # after which a connection that transfers nothing is given up
_SEND_BYTES = 1 << 20  # of one call of the socket, which `SILENCE_S` is the limit of
_NONCE_BYTES = 32
_MAC = "sha256"
_MAC_BYTES = 32
_MAX_MESSAGE_BYTES = 16 << 10
_LENGTH = struct.Struct("!I")
_COUNTER = struct.Struct("!Q")
_PROTOCOL = b"holdfast peers 1"


class Hello(KindMessage, frozen=True):
    """First message of a caller."""

    rank: Count  # whose files follow


class Welcome(KindMessage, frozen=True):
    """Reply of the holder. It proves the secret too."""


class Offer(KindMessage, frozen=True):
    """Copy that the caller offers. The part that describes its files follows."""

    step: Count
    keep: tuple[Count, ...]  # steps of earlier copies that the holder keeps beside it


class Ready(KindMessage, frozen=True):
    """Request for the files of the offered copy, one after the other."""

    has_frozen: bool  # not the file of the frozen tensors: an earlier copy has its bytes


class Held(KindMessage, frozen=True):
    """Confirmation that the copy is in memory, and that all of its hashes are right."""


class Refused(KindMessage, frozen=True):
    """Refusal of a copy, and its reason. The conversation continues."""

    reason: str


PeerMessage: TypeAlias = Hello | Welcome | Offer | Ready | Held | Refused
_M = TypeVar("_M", bound=PeerMessage)


class Conversation:
    """One side of a conversation. Not for two threads at once.

    Every method raises RetryLater if the other side is silent or gone, Denied if it does not have the secret,
    and Corrupt if it sends something else than expected.
    """

    def __init__(self, end: socket.socket, secret: bytes, *, is_caller: bool) -> None:
        self._end = end
        self._opened_by_s: float | None = time.monotonic() + OPENING_S  # None once it is open
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        own = secrets.token_bytes(_NONCE_BYTES)
        # The holder speaks first: a caller that only repeats what it has heard has no key for this number.
        if is_caller:
            other = self._receive_exactly(_NONCE_BYTES)
            self._send_all(own)
            numbers = other + own
        else:
            self._send_all(own)
            numbers = own + self._receive_exactly(_NONCE_BYTES)
        key = hmac.digest(secret, _PROTOCOL + numbers, _MAC)
        of_caller, of_holder = hmac.digest(key, b"caller", _MAC), hmac.digest(key, b"holder", _MAC)
        self._send_key, self._receive_key = (of_caller, of_holder) if is_caller else (of_holder, of_caller)
        self._num_sent = self._num_received = 0

    def end_opening(self) -> None:
        """Allow the pauses of a conversation between two that have both proved the secret."""
        self._opened_by_s = None
        self._end.settimeout(SILENCE_S)

    def wait(self) -> None:
        """Wait until the other side sends something, or the connection is closed.

        Blocks: without a limit.
        """
        if not (isinstance(self._end, ssl.SSLSocket) and self._end.pending()):  # else it is here already
            ready = select.poll()  # select() fails for a descriptor of 1024 or more
            ready.register(self._end, select.POLLIN)
            ready.poll()

    def send(self, message: PeerMessage) -> None:
        """Send a message."""
        self.send_document(json.dumps(to_plain(message)).encode())

    def expect(self, *kinds: type[_M]) -> _M:
        """Return the next message, which is of one of these kinds."""
        message = decode_as(PeerMessage, self.receive_document(_MAX_MESSAGE_BYTES), "a message of a peer")
        if not isinstance(message, kinds):
            raise Corrupt(f"A peer sent a message of another kind than expected: {type(message).__name__}.")
        return message

    def send_document(self, message: bytes) -> None:
        """Send an authenticated text."""
        mac = hmac.digest(self._send_key, _COUNTER.pack(self._num_sent) + message, _MAC)
        self._num_sent += 1
        self._send_all(_LENGTH.pack(len(message)) + mac + message)

    def receive_document(self, max_bytes: int = MAX_DOCUMENT_BYTES) -> bytes:
        """Return the next text, if the peer has authenticated it."""
        (num_bytes,) = _LENGTH.unpack(self._receive_exactly(_LENGTH.size))
        if num_bytes > max_bytes:
            raise Corrupt(f"A peer sends a message of {num_bytes} bytes; at most {max_bytes} are allowed.")
        mac, message = self._receive_exactly(_MAC_BYTES), self._receive_exactly(num_bytes)
        expected = hmac.digest(self._receive_key, _COUNTER.pack(self._num_received) + message, _MAC)
        if not hmac.compare_digest(mac, expected):
            raise Denied("A peer does not have the secret of this attempt. Its message was not used.")
        self._num_received += 1
        return message

    def send_bytes(self, data: memoryview, bytes_per_s: float | None) -> None:
        """Send the bytes of a file, within a rate; None for no limit."""
        blocks = (data[start : start + _SEND_BYTES] for start in range(0, len(data), _SEND_BYTES))
        for block in paced(blocks, bytes_per_s):
            self._send_all(block)

    def receive_into(self, data: memoryview) -> None:
        """Receive the next bytes of a file."""
        with _reported():
            while data:
                if self._opened_by_s is not None:
                    self._end.settimeout(max(0.001, self._opened_by_s - time.monotonic()))
                num_bytes = self._end.recv_into(data)
                if not num_bytes:
                    raise ConnectionError("the connection was closed")
                data = data[num_bytes:]

    def interrupt(self) -> None:
        """End the connection from another thread. The thread that uses it then fails, and closes it."""
        # Closing it here would leave that thread a descriptor that may soon be another connection's.
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._end, socket.SHUT_RDWR)  # that of SSLSocket ends encryption first

    def close(self) -> None:
        """Close the connection."""
        self.interrupt()
        self._end.close()

    def _send_all(self, data: bytes | memoryview) -> None:
        with _reported():
            self._end.sendall(data)

    def _receive_exactly(self, num_bytes: int) -> bytes:
        room = bytearray(num_bytes)
        self.receive_into(memoryview(room))
        return bytes(room)


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """Raise errors of the connection as errors of Holdfast."""
    try:
        yield
    except TimeoutError as error:
        raise RetryLater("A peer did not answer in time.") from error
    except OSError as error:  # also errors of TLS
        raise RetryLater(f"The connection to a peer failed: {error}.") from error


def call(address: PeerAddress, secret: str, tls: TlsFiles | None) -> Conversation:
    """Open a conversation with the keeper at an address.

    Blocks: until the peer has answered, at most `OPENING_S` for each step of the opening.
    """
    with _reported():
        end = socket.create_connection((address.host, address.port), OPENING_S)
    return answer(end, secret, tls, is_caller=True)


def answer(end: socket.socket, secret: str, tls: TlsFiles | None, *, is_caller: bool = False) -> Conversation:
    """Open the conversation that a caller has connected for; see `call`."""
    try:
        with _reported():
            end.settimeout(OPENING_S)
            if tls is not None:
                end = _context(tls, is_caller=is_caller).wrap_socket(end, server_side=not is_caller)
        return Conversation(end, bytes.fromhex(secret), is_caller=is_caller)
    except BaseException:
        end.close()
        raise


def _context(tls: TlsFiles, *, is_caller: bool) -> ssl.SSLContext:
    """Return the context of one side. Each side requires a certificate of the given authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if is_caller else ssl.PROTOCOL_TLS_SERVER)
    context.check_hostname = False  # keepers have addresses, and the authority signs only for this cluster
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(tls.authority)
    context.load_cert_chain(tls.certificate, tls.key)
    return context
