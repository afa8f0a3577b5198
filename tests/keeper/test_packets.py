"""Packets arrive in order, with their descriptors, even if the sender has died; others are rejected."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from socket import MSG_DONTWAIT, send_fds, socket

import pytest

from holdfast.checkpoint.keeper import packets
from holdfast.checkpoint.keeper.messages import (
    MAX_MESSAGE_BYTES,
    ArenaReleased,
    Close,
    Ping,
    Pong,
    ResumeCommit,
    parse,
)
from holdfast.errors import Corrupt

Ends = tuple[socket, socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = packets.make_pair()
    with ours, theirs:
        yield ours, theirs


def test_a_send_that_may_not_wait_does_not_when_the_socket_is_full(ends: Ends):
    ours, _ = ends
    ours.settimeout(None)

    def send_often() -> None:
        for _ in range(100_000):
            packets.send(ours, Ping(), (draft.fileno(),), flags=MSG_DONTWAIT)

    with os.fdopen(os.memfd_create("draft"), "w+b") as draft, pytest.raises(BlockingIOError):
        send_often()


def test_messages_arrive_in_order_with_their_descriptors(ends: Ends):
    ours, theirs = ends
    with os.fdopen(os.memfd_create("draft"), "w+b") as draft:
        draft.write(b"a draft")
        draft.flush()
        packets.send(ours, Close(frees_memory=True))
        packets.send(ours, ResumeCommit(1, 100, to_home=False), (draft.fileno(),))
    assert packets.receive(theirs) == (Close(frees_memory=True), [])
    message, (fd,) = packets.receive(theirs)
    assert message == ResumeCommit(1, 100, to_home=False)
    assert os.pread(fd, 100, 0) == b"a draft"
    os.close(fd)


@pytest.mark.parametrize("num_unread", [0, 1, 3])
def test_packets_that_were_sent_before_an_end_died_are_received(ends: Ends, num_unread: int):
    """The kernel reports the death first if the dead end had unread packets."""
    ours, theirs = ends
    for number in range(num_unread):
        packets.send(theirs, ArenaReleased(number))
    for step in range(3):
        packets.send(ours, ResumeCommit(step, 0, to_home=True))
    ours.close()
    assert [packets.receive(theirs)[0] for _ in range(4)] == [
        *(ResumeCommit(step, 0, to_home=True) for step in range(3)),
        None,
    ]
    with contextlib.suppress(OSError):
        packets.send(theirs, Pong())
    assert packets.receive(theirs) == (None, [])


def test_the_descriptors_of_a_packet_that_is_not_a_message_are_closed(ends: Ends):
    ours, theirs = ends
    with tempfile.TemporaryFile() as file:
        device, inode = os.fstat(file.fileno()).st_dev, os.fstat(file.fileno()).st_ino
        send_fds(ours, [b'{"kind":"Unknown"}'], [file.fileno()])
        with pytest.raises(Corrupt, match="kind"):
            packets.receive(theirs)
        opened = list(Path("/proc/self/fd").iterdir())
        same = [one for one in opened if _is_file(one, device, inode)]
        assert same == [Path(f"/proc/self/fd/{file.fileno()}")]


def _is_file(path: Path, device: int, inode: int) -> bool:
    try:
        found = path.stat()
    except OSError:  # closed meanwhile, by another test's thread
        return False
    return (found.st_dev, found.st_ino) == (device, inode)


@pytest.mark.parametrize(
    ("members", "fault"),
    [
        ({}, "missing required field `kind`"),
        ({"kind": "Message"}, "Invalid value 'Message'"),
        ({"kind": ["Ping"]}, "Expected `str`, got `list` - at `..kind`"),
        ({"kind": "ArenaReleased"}, "missing required field `arena`"),
        ({"kind": "ArenaReleased", "arena": -1}, "`int` >= 0 - at `..arena`"),
        ({"kind": "ArenaReleased", "arena": True}, "Expected `int`, got `bool` - at `..arena`"),
        ({"kind": "ArenaReleased", "arena": 1, "more": 1}, "unknown field `more`"),
        ({"kind": "ArenaImages", "images": [{"name": "a", "offset": -1, "num_bytes": 2}]}, "offset"),
        ({"kind": "UpdateMetrics", "step": 1, "metrics": {"a": "low"}}, "Invalid enum value 'low'"),
        ({"kind": "Close", "frees_memory": 1}, "Expected `bool`, got `int`"),
    ],
)
def test_a_message_with_a_wrong_member_is_rejected(members: dict[str, object], fault: str):
    with pytest.raises(Corrupt, match=fault):
        parse(json.dumps(members).encode())


def test_a_message_that_is_too_long_is_rejected():
    with pytest.raises(Corrupt, match=str(MAX_MESSAGE_BYTES)):
        parse(b'{"kind":"Ping"}'.ljust(MAX_MESSAGE_BYTES + 1))
    assert parse(b'{"kind":"Ping"}'.ljust(MAX_MESSAGE_BYTES)) == Ping()
