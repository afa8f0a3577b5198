"""How trainer and keeper talk: one JSON object per packet over a Unix socket, with descriptors beside it."""

from __future__ import annotations

import json
import os
import socket
from typing import Any

MAX_PACKET_BYTES = 64 << 10  # messages are small: tensors and drafts travel as descriptors
MAX_DETAIL = 5000  # characters of free text in a message; as JSON none takes more than 12 bytes
MAX_FDS = 4

Message = dict[str, Any]


def pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends. Packets keep their borders, and an end that dies reads as an empty packet."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(end: socket.socket, message: Message, fds: tuple[int, ...] = (), *, flags: int = 0) -> None:
    """Send one message.

    Args:
        end: this side's.
        message: for the other side.
        fds: sent with it.
        flags: of sendmsg(2).

    Raises:
        BlockingIOError: with MSG_DONTWAIT, the socket has no room.
        OSError: the other end is gone.

    Blocks: until the socket has room, unless `flags` has MSG_DONTWAIT.
    """
    packet = json.dumps(message, separators=(",", ":")).encode()
    if fds:
        socket.send_fds(end, [packet], list(fds), flags)
    else:
        end.send(packet, flags)


def receive(end: socket.socket) -> tuple[Message | None, list[int]]:
    """The next message and its descriptors, which the caller must close; None when the other end is gone.

    Blocks: until a message comes.
    """
    try:
        packet, fds, _, _ = _receive_packet(end)
    except ConnectionError:
        return None, []
    if not packet:
        for fd in fds:
            os.close(fd)
        return None, []
    return json.loads(packet), fds


def _receive_packet(end: socket.socket) -> tuple[bytes, list[int], int, Any]:
    """The next packet, also where its sender has died since."""
    try:
        return socket.recv_fds(end, MAX_PACKET_BYTES, MAX_FDS)
    except ConnectionResetError:
        # Told once, when the other end died with something unread, and before the packets that it had sent:
        # they are still there.
        return socket.recv_fds(end, MAX_PACKET_BYTES, MAX_FDS)
