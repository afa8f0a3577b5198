"""A real training loop, run in turns without and with a save, to see what a save costs it."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from cputime import cpu_s
from peers.contract import Peer
from states import Subject

BATCHES = {"cpu": (1, 64), "cuda": (8, 1024)}
"""Sequences and tokens of each, by device type: a step then takes some tenths of a second."""
LARGE_BYTES, LARGE_BATCH = 10 << 30, (1, 1024)
"""A state from this size on, and its batch, whose activations fit beside it on a device of 80 GB."""
MIN_STEPS, MAX_SPAN_S = 4, 30.0


@dataclass(slots=True)
class Span:
    """Seconds of some training steps and what a save in them cost: its call, waits, processor time."""

    wall_s: float = 0.0
    blocked_s: float = 0.0
    waits_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    finished: bool = True

    @property
    def wait_s(self) -> float:
        """Seconds that optimizer steps waited for the save."""
        return sum(self.waits_s)


class Loop:
    """Forward, backward and optimizer step of a subject on random tokens."""

    def __init__(self, subject: Subject) -> None:
        if subject.optimizer is None or subject.vocabulary is None:
            raise ValueError(f"{subject.name} cannot be trained")
        self._subject = subject
        self._optimizer = subject.optimizer
        batch = LARGE_BATCH if subject.num_bytes >= LARGE_BYTES else BATCHES[subject.device.type]
        self._tokens = torch.randint(subject.vocabulary, batch, device=subject.device)
        self._entered_s = 0.0
        self._span = Span()

    def watch_last(self) -> None:
        """Add the hook that runs after all others; call when the peer has added its own."""
        self._last = self._optimizer.register_step_pre_hook(self._note_start)

    def run(self, num_steps: int, peer: Peer | None = None, save: Callable[[], object] | None = None) -> Span:
        """Train; with `save`, call it before the first step.

        Args:
            num_steps: optimizer steps to take.
            peer: whose guard stands around each optimizer step.
            save: starts a save.
        """
        self._span = span = Span()
        self._synchronize()
        started = time.perf_counter()
        if save is not None:
            save()
            span.blocked_s = time.perf_counter() - started
        for _ in range(num_steps):
            self._step(peer)
        self._synchronize()
        span.wall_s = time.perf_counter() - started
        return span

    def _step(self, peer: Peer | None) -> None:
        # gradients stay allocated: fresh pages every step would add noise
        self._optimizer.zero_grad(set_to_none=False)
        self._subject.model(self._tokens).backward()
        asked = time.perf_counter()
        with peer.guard() if peer is not None else contextlib.nullcontext():
            self._entered_s = time.perf_counter()
            guarded_s = self._entered_s - asked
            self._span.waits_s.append(0.0)
            self._optimizer.step()
        self._span.waits_s[-1] += guarded_s

    def _note_start(self, *_: object) -> None:
        self._span.waits_s[-1] += time.perf_counter() - self._entered_s

    def _synchronize(self) -> None:
        if self._subject.device.type == "cuda":
            torch.cuda.synchronize()


def measure(loop: Loop, peer: Peer, *, first_step: int, in_flight_s: float, pairs: int) -> dict[str, float]:
    """What one save costs training: seconds of steps with a save less seconds of as many without.

    Turns go quiet, save, save, quiet, ... so that a drift of the machine cancels out.

    Args:
        loop: the training.
        peer: what saves, opened and warm.
        first_step: number of the first save; later ones count on.
        in_flight_s: seconds that a save goes on after its call; steps are taken for longer than that.
        pairs: how many spans of each kind.
    """
    loop.watch_last()
    step_s = loop.run(3).wall_s / 3
    num_steps = max(MIN_STEPS, math.ceil(min(1.5 * in_flight_s, MAX_SPAN_S) / step_s) + 1)
    quiet: list[Span] = []
    saving: list[Span] = []
    number = first_step
    for turn in range(pairs):
        for with_save in (False, True) if turn % 2 == 0 else (True, False):
            if not with_save:
                quiet.append(_span_without(loop, peer, num_steps))
                continue
            saving.append(_span_with_save(loop, peer, number, num_steps))
            number += 1
    quiet_s = sum(span.wall_s for span in quiet) / pairs
    saving_s = sum(span.wall_s for span in saving) / pairs
    return {
        "step_s": quiet_s / num_steps,
        "train_steps": float(num_steps),
        "train_blocked_s": sum(span.blocked_s for span in saving) / pairs,
        "train_wait_s": (sum(s.wait_s for s in saving) - sum(s.wait_s for s in quiet)) / pairs,
        "lost_s": saving_s - quiet_s,
        "save_cpu_s": (sum(span.cpu_s for span in saving) - sum(span.cpu_s for span in quiet)) / pairs,
        "quiet_range_s": max(span.wall_s for span in quiet) - min(span.wall_s for span in quiet),
        "lost_in_view": float(all(span.finished for span in saving)),
    }


def _span_without(loop: Loop, peer: Peer, num_steps: int) -> Span:
    before_s = cpu_s()
    span = loop.run(num_steps, peer)
    span.cpu_s = cpu_s() - before_s
    return span


def _span_with_save(loop: Loop, peer: Peer, number: int, num_steps: int) -> Span:
    pending = []
    before_s = cpu_s()
    span = loop.run(num_steps, peer, lambda: pending.append(peer.save(number)))
    started = time.perf_counter()
    pending[0].wait_complete()
    # a save that outlives the steps has slowed down steps that were not counted
    span.finished = time.perf_counter() - started < 0.05
    peer.settle()
    span.cpu_s = cpu_s() - before_s
    peer.delete(number)
    return span
