"""Copies from devices to host memory, without making training wait: of tensors and of single numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, SupportsFloat

import torch
from msgspec import Struct

from holdfast.checkpoint.state.tensors import is_dtensor
from holdfast.errors import InvalidInput


class DeviceCopies(Struct, frozen=True):
    """Copies that are queued: on each device an event that follows them."""

    events: Mapping[torch.device, torch.cuda.Event]

    def followed_by(self, later: DeviceCopies) -> DeviceCopies:
        """Return copies and others that were queued after them as one."""
        return DeviceCopies({**self.events, **later.events})

    def delay_writes(self) -> None:
        """Make the current stream of each device wait for its copies, without waiting here."""
        for device, event in self.events.items():
            torch.cuda.current_stream(device).wait_event(event)

    def wait(self) -> None:
        """Wait until all copies have run."""
        for device, event in self.events.items():
            # In a new thread, the runtime would use memory of the first device.
            with torch.cuda.device(device):
                event.synchronize()


def queue_copies(views: Sequence[torch.Tensor], live: Sequence[torch.Tensor]) -> DeviceCopies:
    """Queue copies of `live` into the host tensors `views`, behind the work of each device's current stream.

    Tensors in host memory are copied before this returns. `live` must exist until the copies have run.
    """
    by_device: dict[torch.device, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for view, tensor in zip(views, live, strict=True):
        targets, sources = by_device.setdefault(tensor.device, ([], []))
        targets.append(view)
        sources.append(tensor)
    events = {}
    for device, (targets, sources) in by_device.items():
        if device.type == "cuda":
            events[device] = _queue(device, targets, sources)
        else:
            copy_all(targets, sources)
    return DeviceCopies(events)


def _queue(device: torch.device, views: list[torch.Tensor], live: list[torch.Tensor]) -> torch.cuda.Event:
    # On a stream of another device, copies would run on that device's current stream, and the event would not
    # follow them.
    stream = _side_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    copied = torch.cuda.Event()
    try:
        with torch.no_grad(), torch.cuda.stream(stream):
            # A conjugate or negative view would be resolved in host memory, while its bytes still arrive.
            copy_all(views, [tensor.resolve_conj().resolve_neg() for tensor in live], non_blocking=True)
            copied.record(stream)
    except BaseException:  # the caller may release `views`, into which the first copies run
        stream.synchronize()
        raise
    return copied


def copy_all(views: list[torch.Tensor], live: list[torch.Tensor], *, non_blocking: bool = False) -> None:
    """Copy all tensors in one call, without the interpreter's lock."""
    if views:
        torch._foreach_copy_(views, live, non_blocking)  # pyright: ignore[reportPrivateImportUsage]


_streams: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


class PendingScalar(Struct, frozen=True):
    """A number that is being copied from a device."""

    host: torch.Tensor
    copied: torch.cuda.Event | None  # None: only a read shows it

    @property
    def is_ready(self) -> bool:
        """True if reading it would not wait."""
        return self.copied is None or self.copied.query()

    def read(self) -> float:
        """Return the number.

        Blocks: until the device has computed it.
        """
        if self.copied is not None:
            self.copied.synchronize()
        return float(self.host)


def copy_scalar(value: SupportsFloat | torch.Tensor, name: str) -> float | PendingScalar:
    """Return a number, or its pending copy, which is queued behind the device's current work."""
    if not isinstance(value, torch.Tensor):
        return _number(value, name)
    if is_dtensor(value) or value.numel() != 1 or value.is_complex() or value.is_meta:
        raise InvalidInput(
            f"{name}: expected one number, found a {type(value).__name__} of shape "
            f"{tuple(value.shape)} and {value.dtype}. Nothing was recorded. Reduce it first."
        )
    value = value.detach()
    if value.device.type == "cpu":
        return float(value)
    if value.device.type != "cuda":
        return PendingScalar(value.clone(), None)
    host = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True)
    host.copy_(value, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(value.device))
    return PendingScalar(host, copied)


def _number(value: Any, name: str) -> float:
    try:
        if hasattr(value, "__float__"):  # a text would be parsed
            return float(value)
    except (OverflowError, TypeError, ValueError) as error:
        raise InvalidInput(
            f"{name}: {value!r:.100} does not fit into a float. Nothing was recorded."
        ) from error
    raise InvalidInput(f"{name}: expected a number, found {value!r:.100}. Nothing was recorded.")
