"""A real training loop, measured in short spans without and with a save, one after the other."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from comparison import Comparison, undisturbed
from cputime import cpu_s, others_s
from idle import wait_idle
from limits import MemoryCopy
from pagecache import sync
from peers.contract import Peer
from states import Subject

BATCHES = {"cpu": (1, 64), "cuda": (8, 1024)}
"""Sequences and tokens of each, by device type: a step then takes some tenths of a second."""
LARGE_BYTES, LARGE_BATCH = 10 << 30, (1, 1024)
"""A state from this size on, and its batch, whose activations fit beside it on a device of 80 GB."""
MIN_STEPS, MAX_SPAN_S = 2, 120.0
MAX_ATTEMPTS = 2
"""Comparisons made, for each that is wanted, until enough were undisturbed."""


@dataclass(slots=True)
class Span:
    """Seconds of some training steps and what a save in them cost: its call, waits, processor time."""

    wall_s: float = 0.0
    blocked_s: float = 0.0
    waits_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    others_s: float = 0.0

    @property
    def num_steps(self) -> int:
        """Steps that were taken."""
        return len(self.waits_s)


class Loop:
    """Forward, backward and optimizer step of a subject on random tokens."""

    def __init__(self, subject: Subject) -> None:
        if subject.optimizer is None or subject.vocabulary is None:
            raise ValueError(f"{subject.name} cannot be trained")
        self._subject = subject
        self._optimizer = subject.optimizer
        batch = LARGE_BATCH if subject.num_bytes >= LARGE_BYTES else BATCHES[subject.device.type]
        self._is_cuda = subject.device.type == "cuda"
        self._tokens = torch.randint(subject.vocabulary, batch, device=subject.device)
        self._entered_s = 0.0
        self._span = Span()
        self._begin: torch.cuda.Event | None = None
        self._waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []  # begin and end on the device

    def watch_last(self) -> None:
        """Add the hook that runs after all others; call when the peer has added its own."""
        self._last = self._optimizer.register_step_pre_hook(self._note_start)

    def run(
        self, num_steps: int, peer: Peer | None = None, save: Callable[[], _Completion | None] | None = None
    ) -> Span:
        """Train, and with `save` call it before the first step.

        Args:
            num_steps: optimizer steps to take, at least; until one step after the save is durable.
            peer: its guard is entered around each optimizer step.
            save: starts a save; without a completion, the save is not waited for.
        """
        self._span = span = Span()
        self._synchronize()
        self._waits.clear()
        before_s, others_before_s, started = cpu_s(), others_s(), time.perf_counter()
        completion = None
        if save is not None:
            completion = save()
            span.blocked_s = time.perf_counter() - started
        is_durable = False
        while span.num_steps < num_steps or not is_durable:
            is_durable = completion is None or completion.is_done(time.perf_counter() - started)
            self._step(peer)
        self._synchronize()
        span.wall_s, span.cpu_s = time.perf_counter() - started, cpu_s() - before_s
        span.others_s = others_s() - others_before_s
        for number, (begin, end) in enumerate(self._waits):
            span.waits_s[number] += begin.elapsed_time(end) / 1e3
        return span

    def queue(self, num_steps: int) -> bool:
        """Take steps without waiting for the device. Return True if it has not done them yet."""
        self._span = Span()
        for _ in range(num_steps):
            self._step(None)
        return self._is_cuda and not torch.cuda.current_stream().query()

    def _step(self, peer: Peer | None) -> None:
        # gradients stay allocated: fresh pages every step would add noise
        self._optimizer.zero_grad(set_to_none=False)
        self._subject.model(self._tokens).backward()
        asked = time.perf_counter()
        with peer.guard() if peer is not None else contextlib.nullcontext():
            self._entered_s = time.perf_counter()
            guarded_s = self._entered_s - asked
            self._span.waits_s.append(0.0)
            self._begin = self._mark()
            self._optimizer.step()
        self._span.waits_s[-1] += guarded_s

    def _note_start(self, *_: object) -> None:
        self._span.waits_s[-1] += time.perf_counter() - self._entered_s
        end = self._mark()
        if self._begin is not None and end is not None:
            self._waits.append((self._begin, end))

    def _mark(self) -> torch.cuda.Event | None:
        """Return an event with the time at which the GPU reaches this point of the stream."""
        if not self._is_cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _synchronize(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()


class _Completion:
    """A save under way: a thread waits for it, and fsyncs its files if the peer has not."""

    def __init__(self, peer: Peer, number: int) -> None:
        self._pending = peer.save(number)
        self._peer, self._number = peer, number
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._wait, name="durable", daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        try:
            self._pending.wait_complete()
            if not self._peer.syncs:
                sync(self._peer.path(self._number))
        except BaseException as error:  # noqa: BLE001 - raised by `is_done`, in the thread that trains
            self._error = error

    def is_done(self, so_far_s: float) -> bool:
        """Return True if the checkpoint is durable.

        Raises:
            TimeoutError: it is not, after `MAX_SPAN_S`.
        """
        if self._thread.is_alive():
            if so_far_s > MAX_SPAN_S:
                message = f"the save was not durable after {so_far_s:.0f} s of training"
                raise TimeoutError(message)
            return False
        if self._error is not None:
            raise self._error
        return True


def compare(subject: Subject, loop: Loop, peer: Peer, *, first_step: int, times: int) -> list[Comparison]:
    """Return what single saves cost training, each compared with the steps just before and after it.

    A span with a save ends one step after the save is durable, so all its work in the background is in it.
    The machine's drift cancels out, as the spans without a save are on both sides. Before and after each,
    the disk is idle: what the deletion of the last checkpoint left behind is not in any span.

    Args:
        subject: trained state, whose copy in memory is timed too.
        loop: the training.
        peer: what saves, opened and warm.
        first_step: number of the first save; later ones count on.
        times: comparisons wanted without other programs at work; if there are few, up to twice as many are
            made.
    """
    loop.watch_last()
    loop.run(3, peer)
    memory_copy = MemoryCopy(subject)
    num_steps = _span_with_save(loop, peer, first_step).num_steps  # not counted: it has costs of its own
    found: list[Comparison] = []
    number = first_step
    while len(undisturbed(found)) < times and len(found) < MAX_ATTEMPTS * times:
        number += 1
        copy_s = memory_copy.run()
        before = loop.run(num_steps, peer)
        saving = _span_with_save(loop, peer, number)
        num_steps = saving.num_steps
        found.append(_difference(saving, before, loop.run(num_steps, peer), copy_s))
    return found


def _difference(saving: Span, before: Span, after: Span, copy_s: float) -> Comparison:
    """Compare a span with those around it, step by step: they may differ in length."""

    def extra(of: Callable[[Span], float]) -> float:
        quiet = (of(before) / before.num_steps + of(after) / after.num_steps) / 2
        return of(saving) - saving.num_steps * quiet

    return Comparison(
        lost_s=extra(lambda span: span.wall_s),
        cpu_s=extra(lambda span: span.cpu_s),
        wait_s=extra(lambda span: sum(span.waits_s)),
        blocked_s=saving.blocked_s,
        num_steps=saving.num_steps,
        step_s=(before.wall_s + after.wall_s) / (before.num_steps + after.num_steps),
        copy_s=copy_s,
        others=sum(one.others_s for one in (before, saving, after))
        / sum(one.wall_s for one in (before, saving, after)),
    )


def _span_with_save(loop: Loop, peer: Peer, number: int) -> Span:
    span = loop.run(MIN_STEPS, peer, lambda: _Completion(peer, number))
    before_s = cpu_s()
    peer.settle()
    span.cpu_s += cpu_s() - before_s  # of the save too
    peer.delete(number)
    wait_idle(peer.directory)
    return span
