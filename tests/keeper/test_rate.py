"""A limit of bytes per second: kept by drains, and by saves that go straight home."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import holdfast
from faulty_store import FaultyStore
from holdfast.checkpoint.keeper import persist as persist_module
from holdfast.checkpoint.keeper.persist import paced, persist
from holdfast.checkpoint.store.memory import MemoryStore
from making import data_file


class Clock:
    """Clock that only advances when code sleeps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr("holdfast.checkpoint.keeper.persist.time.monotonic", lambda: self.now_s)
        monkeypatch.setattr("holdfast.checkpoint.keeper.persist.time.sleep", self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now_s += seconds


def test_a_rate_is_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 blocks of 100 bytes at 50 bytes a second take 8 seconds."""
    clock = Clock(monkeypatch)
    assert len(list(paced([memoryview(bytes(100))] * 4, 50.0))) == 4
    assert clock.now_s == pytest.approx(8.0)


def test_a_save_in_home_observes_the_rate_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    monkeypatch.setattr(persist_module, "BLOCK_BYTES", 1000)
    store = FaultyStore(MemoryStore())
    image = bytes(range(250)) * 10
    assert persist(store, "file", memoryview(image), bytes_per_s=500.0) == data_file(image)
    assert store.get("file") == image
    assert clock.now_s == pytest.approx(5.0)
    assert [call.name for call in store.calls("put")] == ["file"]


def test_without_a_rate_a_save_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    store = MemoryStore()
    persist(store, "file", memoryview(bytes(5000)))
    assert store.size("file") == 5000
    assert clock.now_s == 0.0


def test_a_checkpointer_without_a_local_folder_observes_the_rate(tmp_path: Path) -> None:
    """4 MB at 8 MB a second take half a second at least, and what is saved is whole."""
    state = {"w": torch.zeros(1_000_000)}
    began = time.monotonic()
    with holdfast.Checkpointer(holdfast.Home(tmp_path / "home", bandwidth="8MB"), state, quiet=True) as ckpt:
        ckpt.save(1).wait_durable()
        assert time.monotonic() - began >= 0.5
    assert holdfast.open(tmp_path / "home").verify().is_good
