"""Packets of one message each over a Unix socket, with file descriptors."""

from __future__ import annotations

import array
import os
import socket
from typing import Any

from holdfast.checkpoint.keeper.messages import MAX_MESSAGE_BYTES, Message, encode, parse

_MAX_FDS = 4


def make_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected sockets that keep the borders of packets."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(end: socket.socket, message: Message, fds: tuple[int, ...] = (), *, flags: int = 0) -> None:
    """Send a message.

    Args:
        flags: flags of sendmsg(2).

    Blocks: while the socket is full, unless `flags` has MSG_DONTWAIT.
    """
    send_encoded(end, encode(message), fds, flags=flags)


def send_encoded(end: socket.socket, packet: bytes, fds: tuple[int, ...] = (), *, flags: int = 0) -> None:
    """Send an encoded message, as `send` does."""
    # Not socket.send_fds: up to Python 3.13 it drops its flags, and would block.
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    end.sendmsg([packet], rights, flags)


def receive(end: socket.socket) -> tuple[Message | None, list[int]]:
    """Return the next message and its descriptors, which the caller must close.

    Returns:
        None and no descriptors if the other end is closed.

    Blocks: until a packet arrives.
    """
    try:
        packet, fds, _, _ = _receive_packet(end)
    except ConnectionError:
        return None, []
    message = None
    try:
        message = parse(packet) if packet else None
    finally:
        if message is None:
            for fd in fds:
                os.close(fd)
    return message, ([] if message is None else fds)


def _receive_packet(end: socket.socket) -> tuple[bytes, list[int], int, Any]:
    """Receive the next packet, even if its sender has died since."""
    try:
        return socket.recv_fds(end, MAX_MESSAGE_BYTES, _MAX_FDS)
    except ConnectionResetError:
        # Reported once, if the other end died before it had received everything, and ahead of the packets
        # that it had sent, which can still be received.
        return socket.recv_fds(end, MAX_MESSAGE_BYTES, _MAX_FDS)
