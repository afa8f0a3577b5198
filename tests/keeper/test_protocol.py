"""What trainer and keeper say to each other arrives, also what is said last."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from socket import socket

import pytest

from holdfast.keeper import protocol

Ends = tuple[socket, socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = protocol.pair()
    with ours, theirs:
        yield ours, theirs


def test_messages_arrive_in_order_with_their_descriptors(ends: Ends):
    ours, theirs = ends
    with os.fdopen(os.memfd_create("draft"), "w+b") as draft:
        draft.write(b"a draft")
        draft.flush()
        protocol.send(ours, {"op": "goodbye"})
        protocol.send(ours, {"op": "commit", "step": 1}, (draft.fileno(),))
    assert protocol.receive(theirs) == ({"op": "goodbye"}, [])
    message, (fd,) = protocol.receive(theirs)
    assert message == {"op": "commit", "step": 1}
    assert os.pread(fd, 100, 0) == b"a draft"
    os.close(fd)


@pytest.mark.parametrize("unread", [0, 1, 3])
def test_what_was_sent_before_an_end_died_is_received(ends: Ends, unread: int):
    """The kernel tells of the death first if the dead end had something left to read."""
    ours, theirs = ends
    for number in range(unread):
        protocol.send(theirs, {"event": "released", "arena": number})
    for step in range(3):
        protocol.send(ours, {"op": "commit", "step": step})
    ours.close()
    assert [protocol.receive(theirs)[0] for _ in range(4)] == [
        *({"op": "commit", "step": step} for step in range(3)),
        None,
    ]
    with contextlib.suppress(OSError):
        protocol.send(theirs, {"event": "too late"})
    assert protocol.receive(theirs) == (None, [])
