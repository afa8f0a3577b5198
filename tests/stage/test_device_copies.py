"""Order of copies from devices: on a stream of each, behind its work and before later writes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from holdfast.checkpoint.stage import device_copies
from holdfast.checkpoint.stage.device_copies import queue_copies

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


class OnDevice(torch.Tensor):
    """A tensor in host memory that claims to be on a device."""

    place: torch.device

    @property
    def device(self) -> torch.device:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The claimed device."""
        return self.place


def on(device: torch.device, *values: float) -> torch.Tensor:
    tensor = torch.tensor(values).as_subclass(OnDevice)
    tensor.place = device
    return tensor


class Runtime:
    """Streams and events as lists of operations, in the order in which they are queued."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.main = {device: Stream(self, device, "main") for device in (FIRST, SECOND)}
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(self, device, "side"))
        monkeypatch.setattr(torch.cuda, "Event", lambda: Event(self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.main[device])
        monkeypatch.setattr(torch.cuda, "stream", self.use)
        monkeypatch.setattr(torch.cuda, "device", self.use)
        monkeypatch.setattr(device_copies, "_streams", {})
        monkeypatch.setattr(device_copies, "copy_all", self.copy_all)

    @contextmanager
    def use(self, what: Any) -> Iterator[None]:
        self.log.append(f"use {what}")
        yield

    def copy_all(self, views: list[Any], live: list[Any], *, non_blocking: bool = False) -> None:
        self.log.append(f"copy {len(views)} of {live[0].device}, {non_blocking=}")


class Stream:
    """Stream of a device."""

    def __init__(self, runtime: Runtime, device: torch.device, name: str) -> None:
        self.runtime, self.text = runtime, f"{name} of {device}"

    def __repr__(self) -> str:
        return self.text

    def wait_stream(self, other: Stream) -> None:
        self.runtime.log.append(f"{self} waits for {other}")

    def wait_event(self, event: Event) -> None:
        self.runtime.log.append(f"{self} waits for event in {event.recorded}")

    def synchronize(self) -> None:
        self.runtime.log.append(f"synchronize {self}")


class Event:
    """Event that is recorded in a stream."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime, self.recorded = runtime, "none"

    def record(self, stream: Stream) -> None:
        self.recorded = str(stream)
        self.runtime.log.append(f"record in {stream}")

    def synchronize(self) -> None:
        self.runtime.log.append(f"synchronize event in {self.recorded}")


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    return Runtime(monkeypatch)


def test_each_device_copies_on_its_own_stream_behind_its_own_work(runtime: Runtime) -> None:
    live = [on(FIRST, 1.0), on(SECOND, 2.0), on(FIRST, 3.0), torch.ones(1)]
    queue_copies([torch.zeros(1) for _ in live], live)
    expected = []
    for device, count in ((FIRST, 2), (SECOND, 1)):
        expected += [
            f"side of {device} waits for main of {device}",
            f"use side of {device}",
            f"copy {count} of {device}, non_blocking=True",
            f"record in side of {device}",
        ]
    assert runtime.log == [*expected, "copy 1 of cpu, non_blocking=False"]


def test_later_work_of_each_device_waits_for_its_own_copies(runtime: Runtime) -> None:
    copies = queue_copies([torch.zeros(1)] * 2, [on(FIRST, 1.0), on(SECOND, 2.0)])
    runtime.log.clear()
    copies.delay_writes()
    assert runtime.log == [f"main of {one} waits for event in side of {one}" for one in (FIRST, SECOND)]


def test_waiting_for_two_groups_waits_for_devices_of_either(runtime: Runtime) -> None:
    first = queue_copies([torch.zeros(1)] * 2, [on(FIRST, 1.0), on(SECOND, 1.0)])
    both = first.followed_by(queue_copies([torch.zeros(1)], [on(FIRST, 2.0)]))
    runtime.log.clear()
    both.wait()
    expected = []
    for device in (FIRST, SECOND):
        expected += [f"use {device}", f"synchronize event in side of {device}"]
    assert runtime.log == expected


def test_a_copy_that_fails_waits_for_those_queued_before_it(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(device_copies, "copy_all", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        queue_copies([torch.zeros(1)], [on(FIRST, 1.0)])
    assert runtime.log[-1] == f"synchronize side of {FIRST}"


def test_host_tensors_are_copied_at_once() -> None:
    view = torch.zeros(2)
    copies = queue_copies([view], [torch.tensor([1.0, 2.0])])
    assert view.tolist() == [1.0, 2.0]
    assert not copies.events
    copies.delay_writes()
    copies.wait()
