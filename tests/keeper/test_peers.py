"""Peers: conversations that strangers cannot join, and copies that are checked and limited."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import resource
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from holdfast.checkpoint.format import names
from holdfast.checkpoint.format import part as parts
from holdfast.checkpoint.format.hashes import digest
from holdfast.checkpoint.home.history import History
from holdfast.checkpoint.keeper.config import KeeperConfig, PeerAddress, PeersConfig, TlsFiles
from holdfast.checkpoint.keeper.inbox import StagedSave
from holdfast.checkpoint.keeper.messages import ArenaLayout, ArenaReleased, CopyEnded, SubmitSave
from holdfast.checkpoint.keeper.peers import conversation
from holdfast.checkpoint.keeper.peers.conversation import Conversation, Hello, Offer, Welcome, answer, call
from holdfast.checkpoint.keeper.peers.mirror import Mirror, OwnCopy, PeerSender
from holdfast.checkpoint.store.memory import MemoryStore
from holdfast.errors import Corrupt, Denied, HoldfastError, RetryLater
from keeper.test_commit import make_config, make_draft, make_image
from making import RecordingInbox
from stage.training import wait_until

SECRET = "00" * 32
PEERS_OF_1 = PeersConfig(SECRET, (), (1,), 1 << 30)
HERE = "127.0.0.1"


def listen() -> socket.socket:
    return socket.create_server((HERE, 0))


def port_of(listener: socket.socket) -> int:
    return listener.getsockname()[1]


class Node:
    """Keeper's mirror on a host of its own, with the messages that it would send to its trainer."""

    def __init__(self, rank: int, listener: socket.socket, peers: PeersConfig) -> None:
        self.config: KeeperConfig = replace(make_config("home", rank), peers=peers)
        self.inbox, self.store, self.listener = RecordingInbox(), MemoryStore(), listener
        self.mirror = Mirror(self.config, listener, History(self.store, self.config.writer), self.inbox)

    def save(self, step: int, *, arena: int = 1, frozen: bytes = b"", content: bytes | None = None) -> bytes:
        """Stage a save and give it to the mirror; return the bytes of its data file."""
        image, catalog = make_image(self.config.rank)
        image = content or image[:-4] + step.to_bytes(4, "little")
        fd, draft_fd = os.memfd_create("arena"), os.memfd_create("draft")
        os.write(fd, image.ljust(mmap.PAGESIZE * (1 + len(image) // mmap.PAGESIZE), b"\0"))
        at = os.fstat(fd).st_size
        os.write(fd, frozen)
        os.write(draft_fd, make_draft(self.config.rank, catalog, step=step))
        layout = ArenaLayout(len(image), at if frozen else 0, len(frozen))
        request = SubmitSave(step, arena, (arena,), layout, to_home=True, to_peers=True)
        self.mirror.add(StagedSave(request, fd, draft_fd, 0.0))
        os.close(fd)
        os.close(draft_fd)
        return image

    def has(self, step: int) -> bool:
        """Return True once all peers hold a step."""
        return CopyEnded(step) in self.inbox.replies

    def failures(self) -> list[CopyEnded]:
        return [one for one in self.inbox.replies if isinstance(one, CopyEnded) and one.failure]

    def held(self) -> dict[str, bytes]:
        """Everything that the next attempt on this host would find in its memory."""
        return {
            image.name: os.pread(fd, image.num_bytes, image.offset)
            for fd, images in self.mirror.images().items()
            for image in images
        }


@pytest.fixture
def make_pair() -> Iterator[Callable[..., tuple[Node, Node]]]:
    """Two keepers that hold each other's copies."""
    listeners = [listen(), listen()]

    def make(**more: object) -> tuple[Node, Node]:
        ports = [port_of(one) for one in listeners]
        nodes = [
            Node(
                rank,
                listeners[rank],
                PeersConfig(
                    **{
                        "secret": SECRET,
                        "holders": (PeerAddress(1 - rank, HERE, ports[1 - rank]),),
                        "writers": (1 - rank,),
                        "memory_bytes": 1 << 30,
                        **more,
                    }
                ),
            )
            for rank in range(2)
        ]
        return nodes[0], nodes[1]

    yield make
    for one in listeners:
        with contextlib.suppress(OSError):  # closed by the test
            one.shutdown(socket.SHUT_RDWR)  # which ends the thread that accepts
        one.close()


def test_a_peer_holds_all_files_of_a_save(make_pair: Callable[..., tuple[Node, Node]]) -> None:
    first, second = make_pair()
    frozen = os.urandom(100_000)
    data = first.save(5, frozen=frozen)
    wait_until(lambda: first.has(5))
    held = second.held()
    assert held[names.data(5, 1, 0)] == data
    assert held[names.frozen(5, 1, 0)] == frozen
    part = parts.parse(held[names.part(5, 1, 0)], "part")
    assert (part.step, part.rank, part.file.num_bytes) == (5, 0, len(data))
    assert first.held() == held  # its own host has the same files
    (line,) = [line for line in first.store.get(names.history(1, 0)).splitlines() if b'"mirrored"' in line]
    assert b'"step":5' in line


def test_copies_stay_until_they_are_dropped(make_pair: Callable[..., tuple[Node, Node]]) -> None:
    first, second = make_pair()
    for step in (1, 2):
        first.save(step, arena=step)
        wait_until(lambda step=step: first.has(step))
    assert {names.data(1, 1, 0), names.data(2, 1, 0)} <= second.held().keys()
    first.mirror.keep([2])
    first.save(3, arena=3)
    wait_until(lambda: first.has(3))
    data = {name for name in second.held() if name.endswith(".safetensors")}
    assert data == {names.data(2, 1, 0), names.data(3, 1, 0)}


def test_an_arena_is_released_once_it_is_persisted_and_not_kept(
    make_pair: Callable[..., tuple[Node, Node]],
) -> None:
    first, _ = make_pair()
    first.save(1, arena=7)
    wait_until(lambda: first.has(1))
    first.mirror.release(7)
    assert ArenaReleased(7) not in first.inbox.replies
    first.mirror.keep([])
    assert ArenaReleased(7) in first.inbox.replies
    first.mirror.release(8)  # of a save that no peer copies
    assert ArenaReleased(8) in first.inbox.replies


def test_frozen_tensors_that_a_peer_has_are_not_sent_again(
    make_pair: Callable[..., tuple[Node, Node]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make_pair()
    frozen, sent = os.urandom(3 << 20), list[int]()
    send_bytes = Conversation.send_bytes

    def count(self: Conversation, data: memoryview, bytes_per_s: float | None) -> None:
        sent.append(len(data))
        send_bytes(self, data, bytes_per_s)

    monkeypatch.setattr(Conversation, "send_bytes", count)
    for step in (1, 2):
        first.save(step, arena=step, frozen=frozen)
        wait_until(lambda step=step: first.has(step))
    assert sorted(sent)[-2:] == [len(make_image(0)[0]), len(frozen)] or sent.count(len(frozen)) == 1
    assert second.held()[names.frozen(2, 1, 0)] == frozen


def test_a_full_peer_refuses_a_copy_and_takes_the_next_one(
    make_pair: Callable[..., tuple[Node, Node]],
) -> None:
    first, second = make_pair(memory_bytes=3 * mmap.PAGESIZE)
    first.save(1, content=os.urandom(10 * mmap.PAGESIZE))
    wait_until(lambda: bool(first.failures()))
    assert "Raise Peers(memory=)" in first.failures()[0].failure
    first.mirror.keep([])
    first.save(2)
    wait_until(lambda: first.has(2))
    assert names.data(2, 1, 0) in second.held()


def test_a_copy_that_is_damaged_on_its_way_is_not_held(
    make_pair: Callable[..., tuple[Node, Node]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make_pair()
    send_bytes = Conversation.send_bytes

    def damage(self: Conversation, data: memoryview, bytes_per_s: float | None) -> None:
        changed = bytearray(data)
        changed[-1] ^= 1
        send_bytes(self, memoryview(changed), bytes_per_s)

    monkeypatch.setattr(Conversation, "send_bytes", damage)
    first.save(1)
    wait_until(lambda: bool(first.failures()))
    monkeypatch.undo()
    assert not first.has(1)
    assert names.data(1, 1, 0) not in second.held()
    first.save(2)
    wait_until(lambda: first.has(2))


def test_a_peer_that_was_replaced_is_called_again(make_pair: Callable[..., tuple[Node, Node]]) -> None:
    first, second = make_pair()
    first.save(1, arena=1)
    wait_until(lambda: first.has(1))
    for open_one, _ in second.mirror._holder._open.values():
        open_one.interrupt()  # as its death would
    first.save(2, arena=2)
    wait_until(lambda: first.has(2))


def test_a_copy_that_is_dropped_while_it_is_sent_is_given_up_in_silence(
    make_pair: Callable[..., tuple[Node, Node]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer writes its next save into the arena then, whose bytes must not be sent as the old ones."""
    first, second = make_pair()
    first.save(0, arena=3)
    wait_until(lambda: first.has(0))
    is_sending, may_send = threading.Event(), threading.Event()
    send_bytes = Conversation.send_bytes

    def wait(self: Conversation, data: memoryview, bytes_per_s: float | None) -> None:
        is_sending.set()
        may_send.wait(60)
        send_bytes(self, data, bytes_per_s)

    monkeypatch.setattr(Conversation, "send_bytes", wait)
    first.save(1, arena=1)
    assert is_sending.wait(60)
    first.mirror.keep([])
    first.mirror.release(1)
    assert ArenaReleased(1) in first.inbox.replies
    may_send.set()
    first.save(2, arena=2)
    wait_until(lambda: first.has(2))
    assert not first.failures()
    assert names.data(1, 1, 0) not in second.held()


def test_an_unreachable_peer_holds_up_nothing(make_pair: Callable[..., tuple[Node, Node]]) -> None:
    first, second = make_pair()
    second.listener.shutdown(socket.SHUT_RDWR)
    second.listener.close()
    first.save(1)
    wait_until(lambda: bool(first.failures()))
    assert "rank 1 at 127.0.0.1" in first.failures()[0].failure
    first.mirror.release(1)
    first.mirror.keep([])
    assert ArenaReleased(1) in first.inbox.replies


# -- conversations -------------------------------------------------------------------------------------------
def converse(caller_secret: str, holder_secret: str, *tls: TlsFiles) -> tuple[object, object]:
    """Outcomes of a greeting on both sides: the message that each received, or its error.

    `tls` are the files of the holder and of the caller.
    """
    listener, found = listen(), dict[str, object]()
    holder_tls, caller_tls = tls or (None, None)

    def hold() -> None:
        try:
            side = answer(listener.accept()[0], holder_secret, holder_tls)
            with contextlib.closing(side):
                found["holder"] = side.expect(Hello)
                side.send(Welcome())
        except HoldfastError as error:
            found["holder"] = error

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        side = call(PeerAddress(1, HERE, port_of(listener)), caller_secret, caller_tls)
        with contextlib.closing(side):
            side.send(Hello(4))
            found["caller"] = side.expect(Welcome)
    except HoldfastError as error:
        found["caller"] = error
    thread.join()
    listener.close()
    return found["caller"], found["holder"]


def test_two_keepers_of_one_attempt_converse() -> None:
    assert converse("5e" * 32, "5e" * 32) == (Welcome(), Hello(4))


@pytest.mark.parametrize("lowest_fd", [0, 1100])  # select() takes none of 1024 or more
def test_a_wait_ends_when_another_thread_ends_the_conversation(lowest_fd: int) -> None:
    """The waiting thread still owns the descriptor, which no other connection can have got meanwhile."""
    listener, limits = listen(), resource.getrlimit(resource.RLIMIT_NOFILE)
    near, far = socket.create_connection((HERE, port_of(listener))), listener.accept()[0]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 1200), limits[1]))
    number = fcntl.fcntl(near.fileno(), fcntl.F_DUPFD, lowest_fd)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    with socket.socket(fileno=number) as end, near, far, listener:
        far.sendall(b"n" * 32)
        side = Conversation(end, bytes(32), is_caller=True)
        ended = threading.Event()

        def wait() -> None:
            side.wait()
            with pytest.raises(RetryLater):
                side.expect(Welcome)
            ended.set()

        thread = threading.Thread(target=wait)
        thread.start()
        assert not ended.is_set()
        side.interrupt()
        thread.join(60)
        assert ended.is_set()
        assert end.fileno() >= lowest_fd


def test_a_stranger_is_refused() -> None:
    caller, held = converse("aa" * 32, "5e" * 32)
    assert isinstance(held, Denied)
    assert isinstance(caller, RetryLater)  # it is disconnected without an answer


def test_a_stranger_that_listens_is_refused() -> None:
    """A process that has taken the port of a dead keeper proves nothing, so no bytes are sent to it."""
    listener = listen()

    def pretend() -> None:
        end, _ = listener.accept()
        with end:
            end.sendall(b"n" * 32)
            end.recv(1 << 16)
            end.sendall((2).to_bytes(4, "big") + b"m" * 32 + b"{}")
            end.recv(1 << 16)

    thread = threading.Thread(target=pretend)
    thread.start()
    side = call(PeerAddress(1, HERE, port_of(listener)), "5e" * 32, None)
    side.send(Hello(0))
    with pytest.raises(Denied, match="secret"):
        side.expect(Welcome)
    side.close()
    thread.join()
    listener.close()


class Relay:
    """Relay that records what a caller sends, or changes it."""

    def __init__(self, port: int, change: Callable[[bytes], bytes] = bytes) -> None:
        self.listener, self.recorded = listen(), bytearray()
        self._port, self._change = port, change
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        near, _ = self.listener.accept()
        with self.listener, near, socket.create_connection((HERE, self._port)) as far:
            back = threading.Thread(target=self._copy, args=(far, near, bytes))
            back.start()
            self._copy(near, far, self._record)
            back.join()

    def _record(self, data: bytes) -> bytes:
        self.recorded += data
        return self._change(data)

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket, change: Callable[[bytes], bytes]) -> None:
        try:
            while data := source.recv(1 << 16):
                target.sendall(change(data))
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # the other side has disconnected


@pytest.fixture
def node() -> Iterator[Node]:
    listener = listen()
    yield Node(0, listener, PEERS_OF_1)
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def caller_of(port: int, node: Node) -> PeerSender:
    ends = node.__dict__.setdefault("ends", [])
    return PeerSender(
        PeerAddress(0, HERE, port),
        1,
        PEERS_OF_1,
        lambda step, error: ends.append((step, error)),
    )


def own_copy(step: int) -> OwnCopy:
    image, catalog = make_image(1)
    file = parts.DataFile(len(image), 32 << 10, "")
    file = replace(file, hashes=digest(image))
    document = parts.finish(make_draft(1, catalog, step=step), file)
    return OwnCopy(step, document, (memoryview(image),))


def test_a_recorded_conversation_cannot_be_repeated(node: Node) -> None:
    relay = Relay(port_of(node.listener))
    caller_of(port_of(relay.listener), node).send(own_copy(1))
    wait_until(lambda: bool(node.__dict__.get("ends")))
    assert node.__dict__["ends"] == [(1, None)]
    before = node.held()
    with socket.create_connection((HERE, port_of(node.listener))) as end:
        received = b""
        with contextlib.suppress(OSError):  # it is disconnected with what was not read, at any moment
            end.sendall(bytes(relay.recorded))
            end.shutdown(socket.SHUT_WR)
            while data := end.recv(1 << 16):
                received += data
    assert len(received) in (0, 32)  # at most the number that the caller has to answer
    assert node.held() == before


@pytest.mark.parametrize("at", [40, 80, 150, 400])
def test_a_message_that_was_changed_is_not_used(node: Node, at: int) -> None:
    seen = 0

    def change(data: bytes) -> bytes:
        nonlocal seen
        start, seen = seen, seen + len(data)
        changed = bytearray(data)
        if start <= at < seen:
            changed[at - start] ^= 0x20
        return bytes(changed)

    relay = Relay(port_of(node.listener), change)
    caller_of(port_of(relay.listener), node).send(own_copy(1))
    wait_until(lambda: bool(node.__dict__.get("ends")))
    (step, error), *_ = node.__dict__["ends"]
    assert step == 1
    assert isinstance(error, RetryLater)
    assert names.data(1, 1, 1) not in node.held()


def test_a_stranger_that_says_nothing_is_disconnected(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "OPENING_S", 0.2)
    with socket.create_connection((HERE, port_of(node.listener))) as end:
        end.settimeout(60)
        assert len(end.recv(64)) == 32
        assert end.recv(64) == b""


def test_many_silent_strangers_do_not_keep_out_a_peer(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversation, "OPENING_S", 0.5)
    strangers = [socket.create_connection((HERE, port_of(node.listener))) for _ in range(40)]
    sending = caller_of(port_of(node.listener), node)

    def arrived() -> bool:
        ends = node.__dict__.get("ends", [])
        if not any(error is None for _, error in ends) and len(ends) == sent[0]:
            sending.send(own_copy(sent[0] + 1))  # a peer that was turned away calls with the next save
            sent[0] += 1
        return any(error is None for _, error in ends)

    sent = [0]
    wait_until(arrived)
    for one in strangers:
        one.close()


def test_a_message_without_end_is_not_read(node: Node) -> None:
    with socket.create_connection((HERE, port_of(node.listener))) as end:
        end.sendall(b"n" * 32 + (0xFFFFFFFF).to_bytes(4, "big"))
        end.settimeout(60)
        assert len(end.recv(64)) == 32
        with contextlib.suppress(ConnectionResetError):
            assert end.recv(64) == b""


def test_a_copy_of_another_rank_is_refused(node: Node) -> None:
    image, catalog = make_image(0)
    file = parts.DataFile(len(image), 32 << 10, digest(image))
    side = call(PeerAddress(0, HERE, port_of(node.listener)), SECRET, None)
    with contextlib.closing(side):
        side.send(Hello(1))
        side.expect(Welcome)
        side.send(Offer(1, ()))
        side.send_document(parts.finish(make_draft(0, catalog, step=1), file))  # of rank 0, not 1
        with pytest.raises(RetryLater):
            side.expect(Welcome)
    assert not node.held()


def test_a_rank_whose_copies_are_elsewhere_is_refused(node: Node) -> None:
    side = call(PeerAddress(0, HERE, port_of(node.listener)), SECRET, None)
    with contextlib.closing(side):
        side.send(Hello(3))
        with pytest.raises(RetryLater):
            side.expect(Welcome)


def test_a_message_of_another_kind_is_refused() -> None:
    listener = listen()
    ends = list[Conversation]()
    thread = threading.Thread(target=lambda: ends.append(answer(listener.accept()[0], "5e" * 32, None)))
    thread.start()
    side = call(PeerAddress(1, HERE, port_of(listener)), "5e" * 32, None)
    thread.join()
    with listener, contextlib.closing(side), contextlib.closing(ends[0]):
        ends[0].send(Welcome())
        with pytest.raises(Corrupt, match="another kind"):
            side.expect(Offer)


# -- TLS -----------------------------------------------------------------------------------------------------
def run_openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def make_tls(folder: Path, name: str) -> TlsFiles:
    """An authority of its own, and a certificate that it has signed."""
    authority, key = folder / f"{name}-ca.pem", folder / f"{name}.key"
    certificate, request = folder / f"{name}.pem", folder / f"{name}.csr"
    run_openssl(
        "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", 2, "-subj", f"/CN=authority of {name}",
        "-keyout", folder / f"{name}-ca.key", "-out", authority,
    )  # fmt: skip
    run_openssl(
        "req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}", "-keyout", key, "-out", request
    )  # fmt: skip
    run_openssl(
        "x509", "-req", "-in", request, "-CA", authority, "-CAkey", folder / f"{name}-ca.key",
        "-CAcreateserial", "-days", 2, "-out", certificate,
    )  # fmt: skip
    return TlsFiles(str(certificate), str(key), str(authority))


def test_tls_hides_the_bytes_and_requires_the_authority(tmp_path: Path) -> None:
    good, other = make_tls(tmp_path, "good"), make_tls(tmp_path, "other")
    assert converse("5e" * 32, "5e" * 32, good, good) == (Welcome(), Hello(4))
    caller, held = converse("5e" * 32, "5e" * 32, good, other)
    assert isinstance(caller, RetryLater)
    assert isinstance(held, RetryLater)
    assert "certificate" in f"{caller}{held}".lower()


def test_a_copy_over_tls_is_the_same(make_pair: Callable[..., tuple[Node, Node]], tmp_path: Path) -> None:
    first, second = make_pair(tls=make_tls(tmp_path, "cluster"))
    data = first.save(5, content=os.urandom(20 << 20))
    wait_until(lambda: first.has(5))
    assert hashlib.sha256(second.held()[names.data(5, 1, 0)]).digest() == hashlib.sha256(data).digest()
    assert ssl.OPENSSL_VERSION
