"""Copies from CUDA devices to host memory, queued on a side stream of each device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DeviceCopies:
    """Copies that are queued: on each device an event that follows them."""

    events: Mapping[torch.device, torch.cuda.Event]

    def followed_by(self, later: DeviceCopies) -> DeviceCopies:
        """Return both as one; `later` was queued after these."""
        return DeviceCopies({**self.events, **later.events})

    def delay_writes(self) -> None:
        """Make the current stream of each device wait for its copies, without waiting here."""
        for device, event in self.events.items():
            torch.cuda.current_stream(device).wait_event(event)

    def wait(self) -> None:
        """Wait until all copies have run.

        Raises:
            RuntimeError: a device has failed.
        """
        for device, event in self.events.items():
            with torch.cuda.device(
                device
            ):  # in a new thread, the runtime would use memory of the first device
                event.synchronize()


def queue_copies(views: Sequence[torch.Tensor], live: Sequence[torch.Tensor]) -> DeviceCopies:
    """Queue copies of `live` into `views`, behind the work of each device's current stream.

    Tensors in host memory are copied before this returns. `live` must exist until the copies have run.

    Args:
        views: contiguous host tensors, one for each of `live`, with its shape and dtype.
        live: tensors on any devices.
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
