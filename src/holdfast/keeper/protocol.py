"""How trainer and keeper talk: one JSON object per packet over a Unix socket, with descriptors beside it."""

from __future__ import annotations

import json
import math
import os
import socket
from typing import Any

from holdfast.documents import Fields, decode_object, read_integers, refuse, shown
from holdfast.errors import Corrupt

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

    Raises:
        Corrupt: it is no message; its descriptors are closed.

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
    try:
        return read_message(packet), fds
    except Corrupt:
        for fd in fds:
            os.close(fd)
        raise


def _receive_packet(end: socket.socket) -> tuple[bytes, list[int], int, Any]:
    """The next packet, also where its sender has died since."""
    try:
        return socket.recv_fds(end, MAX_PACKET_BYTES, MAX_FDS)
    except ConnectionResetError:
        # Told once, when the other end died with something unread, and before the packets that it had sent:
        # they are still there.
        return socket.recv_fds(end, MAX_PACKET_BYTES, MAX_FDS)


_COUNT, _COUNT_OR_NONE, _NUMBER, _TEXT, _TEXT_OR_NONE, _FLAG, _COUNTS, _METRICS = range(8)
_MEMBERS = {
    **dict.fromkeys(("attempt", "arena", "bytes", "frozen_at"), _COUNT),
    **dict.fromkeys(("step", "frozen_bytes"), _COUNT_OR_NONE),
    **dict.fromkeys(("t", "seconds"), _NUMBER),
    **dict.fromkeys(("op", "event", "detail", "tier", "kind", "terms"), _TEXT),
    "history_trouble": _TEXT_OR_NONE,
    **dict.fromkeys(("to_home", "is_frozen_unchanged", "goodbye"), _FLAG),
    **dict.fromkeys(("arenas", "steps"), _COUNTS),
    "metrics": _METRICS,
}
_NEEDED = {
    "save": (
        "step",
        "arena",
        "arenas",
        "to_home",
        "bytes",
        "frozen_at",
        "frozen_bytes",
        "is_frozen_unchanged",
    ),
    **dict.fromkeys(("drain", "known"), ("attempt", "step")),
    "commit": ("step",),
    "drop": ("step", "detail"),
    "metrics": ("step", "metrics"),
    "best": ("steps",),
    "note": ("event",),
    "close": ("goodbye",),
    "released": ("arena",),
    **dict.fromkeys(("persisted", "committed", "kept", "drained"), ("step",)),
    **dict.fromkeys(("retain-failed", "failed", "fenced", "drain-failed"), ("step", "kind", "detail")),
}


def read_message(packet: bytes) -> Message:
    """Return the message in a packet, with the types of its members checked.

    Raises:
        Corrupt: it is no message, or lacks a member that messages of its kind have.
    """
    what = "a message between trainer and keeper"
    body = decode_object(packet, what, max_bytes=MAX_PACKET_BYTES, any_text=True)  # paths that are not UTF-8
    members = body.members
    if not members.keys() & {"op", "event", "terms", "images"}:
        raise Corrupt(f"{what} is of no kind.", key=what)
    for name, value in members.items():
        if name in _MEMBERS and not _is_of(_MEMBERS[name], value):
            refuse(what, name, "of another type", value)
    kind = members.get("op") or members.get("event") or ""
    for name in _NEEDED.get(kind, ()):
        if name not in members:
            raise Corrupt(f"{what} of the kind {shown(kind)} lacks {name!r}.", key=what)
    if "images" in members:
        _check_images(body)
    return members


def _is_of(kind: int, value: Any) -> bool:
    if value is None:
        return kind in (_COUNT_OR_NONE, _TEXT_OR_NONE)
    if kind in (_COUNT, _COUNT_OR_NONE):
        return type(value) is int and value >= 0
    if kind in (_TEXT, _TEXT_OR_NONE):
        return type(value) is str
    if kind == _NUMBER:
        return type(value) in (int, float) and math.isfinite(value)
    if kind == _FLAG:
        return type(value) is bool
    if kind == _METRICS:  # as `format.run.encode_metric` writes them
        return type(value) is dict and all(
            type(one) in (int, float) or one in ("nan", "inf", "-inf") for one in value.values()
        )
    return type(value) is list and all(type(item) is int and item >= 0 for item in value)


def _check_images(body: Fields) -> None:
    if "images" not in body:
        return
    for row in body.array("images"):
        if type(row) is not list or len(row) != 3 or type(row[0]) is not str:
            refuse(body.what, "images", "an array of (name, offset, bytes)", row)
        try:
            read_integers(row[1:])
        except ValueError as error:
            raise Corrupt(f"{body.what}: images: {error}", key=body.what) from error
