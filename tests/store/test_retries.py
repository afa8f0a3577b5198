"""Failures between an object store and its client, and the outcome of each call."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from fault_proxy import FaultProxy
from holdfast.checkpoint.format import names
from holdfast.checkpoint.restore.parts import Parts
from holdfast.checkpoint.restore.read import FileRead, Want, read
from holdfast.checkpoint.store import Store, open_store
from holdfast.errors import Conflict, Corrupt, Denied, RetryLater
from making import make_checkpoint
from servers import reserve_port

PART_BYTES = 5 << 20
BROKEN = ("503", "500", "429", "reset-before", "reset-request", "reset-after")
Home = Callable[..., str]


@pytest.fixture
def store(home: Home, proxy: FaultProxy) -> Store:
    """A store behind the proxy, with a time limit that is not reached."""
    return open_store(home(port=proxy.port, timeout="600", part_bytes=str(PART_BYTES)))


@pytest.fixture
def behind(home: Home) -> Store:
    """The same place, accessed without the proxy."""
    return open_store(home())


def faults(proxy: FaultProxy) -> int:
    return sum(one.fault is not None for one in proxy.requests())


SOME = ("503", "reset-before", "reset-after")
WRITES = [
    *((fault, 100_000, {"method": "PUT", "times": 2}) for fault in BROKEN),
    *((fault, 2 * PART_BYTES + 5, {"method": "PUT", "target": "partNumber", "times": 2}) for fault in BROKEN),
    *((fault, PART_BYTES + 5, {"method": "POST", "target": "uploads"}) for fault in SOME),
    *((fault, PART_BYTES + 5, {"method": "POST", "target": "uploadId"}) for fault in SOME),
    ("corrupt-request", 1001, {"method": "PUT"}),
]
"""Faults of a small put, of the parts of an upload, of its begin and of its end, and a spoilt body."""


@pytest.mark.parametrize(("fault", "num_bytes", "where"), WRITES)
def test_a_put_survives(
    store: Store, behind: Store, proxy: FaultProxy, fault: str, num_bytes: int, where: dict[str, Any]
) -> None:
    data = os.urandom(num_bytes)
    proxy.inject(fault, after_bytes=1000, **where)
    store.put("a", data)
    assert behind.get("a") == data
    assert faults(proxy) == where.get("times", 1)


@pytest.mark.parametrize("fault", BROKEN)
def test_a_create_knows_its_own_object(store: Store, behind: Store, proxy: FaultProxy, fault: str) -> None:
    """Also if the answer is lost, and the next try is refused because the name is taken: by us."""
    proxy.inject(fault, method="PUT", times=2, after_bytes=1000)
    store.put("a", b"x" * 10_000, if_absent=True)
    assert behind.get("a") == b"x" * 10_000
    assert faults(proxy) == (1 if fault == "reset-after" else 2)


@pytest.mark.parametrize("fault", BROKEN)
def test_a_taken_name_stays_a_conflict(store: Store, behind: Store, proxy: FaultProxy, fault: str) -> None:
    behind.put("a", b"somebody else's")
    proxy.inject(fault, method="PUT", times=1, after_bytes=5)
    with pytest.raises(Conflict):
        store.put("a", b"one of our own", if_absent=True)
    assert (behind.get("a"), faults(proxy)) == (b"somebody else's", 1)


def test_a_lost_answer_is_resolved_by_a_second_read(store: Store, behind: Store, proxy: FaultProxy) -> None:
    proxy.inject("reset-after", method="PUT")
    proxy.inject("503", method="GET")
    store.put("manifest.json", b"id 1", if_absent=True)
    assert behind.get("manifest.json") == b"id 1"
    assert faults(proxy) == 2


@pytest.mark.parametrize("fault", ["503", "429", "reset-before", "reset-after", "truncate"])
def test_a_read_survives(store: Store, behind: Store, proxy: FaultProxy, fault: str) -> None:
    data = os.urandom(3 << 20)
    behind.put("a", data)
    proxy.inject(fault, method="GET", times=2, after_bytes=1 << 20)
    assert store.get("a") == data
    proxy.inject(fault, method="GET", times=2, after_bytes=1 << 20)
    room = memoryview(bytearray(len(data) - 10))
    store.read_into("a", 10, room)
    assert room == data[10:]
    assert faults(proxy) == 4


@pytest.mark.parametrize("fault", SOME)
def test_look_list_and_delete_survive(store: Store, behind: Store, proxy: FaultProxy, fault: str) -> None:
    behind.put("a", b"x")
    for method in ("HEAD", "GET", "DELETE"):
        proxy.inject(fault, method=method)
    assert store.size("a") == 1
    assert [entry.name for entry in store.list()] == ["a"]
    store.delete("a")
    assert behind.size("a") is None
    assert faults(proxy) == 3


@pytest.mark.parametrize("fault", ["503", "reset-before"])
def test_a_server_side_copy_survives(store: Store, behind: Store, proxy: FaultProxy, fault: str) -> None:
    behind.put("a", b"x" * 1000)
    proxy.inject(fault, method="PUT")
    store.link("a", "b")
    assert (behind.get("b"), faults(proxy)) == (b"x" * 1000, 1)


def test_a_stalled_request_is_cut_off_and_retried(home: Home, behind: Store, proxy: FaultProxy) -> None:
    store = open_store(home(port=proxy.port, timeout="600", request_timeout="500ms"))
    proxy.inject("stall", method="PUT", seconds=600)
    proxy.inject("stall", method="GET", seconds=600)
    store.put("a", b"x")
    assert store.get("a") == b"x"
    assert faults(proxy) == 2


@pytest.mark.parametrize("num_bytes", [10, 2 * PART_BYTES])
def test_a_dead_store_changes_nothing(home: Home, behind: Store, proxy: FaultProxy, num_bytes: int) -> None:
    store = open_store(home(port=proxy.port, timeout="300ms", part_bytes=str(PART_BYTES)))
    behind.put("a", b"old")
    proxy.inject("503", times=None)
    calls: list[Callable[[], object]] = [
        lambda: store.put("a", bytes(num_bytes)),
        lambda: store.put_parts("a", iter([bytes(num_bytes)]), num_bytes),
        lambda: store.put("b", b"x", if_absent=True),
        lambda: store.get("a"),
        lambda: store.read_into("a", 0, memoryview(bytearray(1))),
        lambda: list(store.list()),
        lambda: store.size("a"),
        lambda: store.delete("a"),
    ]
    for call in calls:
        with pytest.raises(RetryLater, match="503") as caught:
            call()
        assert "s3://test/" in str(caught.value)
        assert caught.value.__cause__ is None
    assert behind.get("a") == b"old"
    assert behind.size("b") is None


def test_the_message_names_object_limit_and_cause_and_no_keys(
    home: Home, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(name, f"HIDE-{name}")
    store = open_store(home(port=proxy.port, timeout="500ms"))
    for fault, code, kind, match in (
        ("503", "", RetryLater, r"a/b.*limit 500.0 ms"),
        ("403", "InvalidAccessKeyId", Denied, "a/b"),
    ):
        proxy.clear()
        proxy.inject(fault, times=None, code=code)
        with pytest.raises(kind, match=match) as caught:
            store.put("a/b", b"x")
        assert "HIDE" not in str(caught.value)
        assert fault in str(caught.value)


def test_a_store_that_comes_back_within_the_limit_is_used(home: Home, s3, behind: Store) -> None:  # type: ignore[no-untyped-def]
    """A call that meets a closed port waits for it to open."""
    port = reserve_port()
    store = open_store(home(port=port, timeout="600"))
    with ThreadPoolExecutor(1) as pool:
        put = pool.submit(store.put, "a", b"x")
        with FaultProxy("127.0.0.1", s3.port, listen_on=port):
            put.result(600)
    assert behind.get("a") == b"x"


def test_expired_keys_are_read_again(
    home: Home, behind: Store, proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While keys are rejected, calls raise. Once the file has valid ones, the same store works."""
    keys = tmp_path / "credentials"
    behind.put("before", b"x")

    def write(key: str) -> None:
        keys.write_text(f"[default]\naws_access_key_id = {key}\naws_secret_access_key = HIDE\n")

    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))
    write("OLDKEY")
    store = open_store(home(port=proxy.port, timeout="5"))
    store.put("a", b"1")
    proxy.inject("403", header="Credential=OLDKEY", times=None, code="ExpiredToken")
    with pytest.raises(Denied, match=r"ExpiredToken.*credentials.*renew") as caught:
        store.put("a", b"2")
    assert "HIDE" not in str(caught.value)
    write("NEWKEY")
    store.put("a", b"3")
    assert behind.get("a") == b"3"


def test_a_full_quota_is_not_an_error_of_keys(store: Store, proxy: FaultProxy) -> None:
    proxy.inject("403", method="PUT", code="QuotaExceeded", times=None)
    with pytest.raises(Denied, match=r"QuotaExceeded.*Raise the quota") as caught:
        store.put("a", b"x")
    assert "credentials" not in str(caught.value)
    assert len(proxy.requests("PUT")) == 1  # trying again would not help


def test_a_byte_flipped_during_a_read_is_detected(store: Store, behind: Store, proxy: FaultProxy) -> None:
    """The client returns it silently; the reader compares every chunk."""
    made = make_checkpoint(behind, 1, 1, [{"t": torch.arange(100_000, dtype=torch.uint8)}])
    part, name = Parts(behind, made).part(0), names.data(1, 1, 0)
    image = behind.get(name)
    got = bytearray(len(image))

    def take(offset: int, view: memoryview) -> None:
        got[offset : offset + len(view)] = view

    proxy.inject("corrupt", method="GET", target="safetensors", after_bytes=5000)
    with pytest.raises(Corrupt, match="damaged in chunk"):
        read(store, [FileRead(part, [Want(0, len(image), take)])])
    assert faults(proxy) == 1
    read(store, [FileRead(part, [Want(0, len(image), take)])])
    assert bytes(got) == image


@pytest.mark.parametrize("num_bytes", [1000, 2 * PART_BYTES])
def test_put_returns_after_the_answer(store: Store, behind: Store, proxy: FaultProxy, num_bytes: int) -> None:
    """An arena is recycled when put returns, so put must not return before the last byte is acknowledged."""
    data = bytearray(os.urandom(num_bytes))
    expected = bytes(data)
    in_parts = {"method": "POST", "target": "uploadId"}
    gate = proxy.hold(**(in_parts if num_bytes > PART_BYTES else {"method": "PUT"}))
    with ThreadPoolExecutor(1) as pool:
        put = pool.submit(store.put, "a", data)
        assert gate.reached.wait(600)
        assert not put.done()
        gate.opened.set()
        put.result(600)
    data[:] = bytes(num_bytes)
    assert behind.get("a") == expected


def test_a_buffer_can_be_resized_after_put(store: Store) -> None:
    """The store keeps no reference to it, so an arena can be unmapped."""
    for num_bytes in (1000, PART_BYTES + 1):
        data = bytearray(num_bytes)
        store.put("a", data)
        store.put("b", data, if_absent=True)
        store.delete("b")
        data.clear()
