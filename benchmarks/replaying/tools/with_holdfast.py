"""Holdfast, as its documentation shows it."""

from __future__ import annotations

from collections.abc import Iterator

import holdfast

from .contract import HANG_S, KEPT, Loop


class WithHoldfast(Loop):
    """A Checkpointer, with the hang watchdog's restart."""

    title = "holdfast"
    module = "holdfast"

    def steps(self, total: int) -> Iterator[int]:
        """Resume, and yield the steps that are left."""
        training = self.training
        state = {"model": training.model, "optimizer": training.optimizer}
        with holdfast.Checkpointer(
            training.home,
            state,
            every=training.every,
            keep=KEPT,
            watches=[holdfast.Hang("restart", limit=f"{HANG_S:.0f}s")],
        ) as ckpt:
            yield from ckpt.steps(total)


class WithStandby(WithHoldfast):
    """The same, in a job that was launched with --standby."""

    title = "holdfast launch --standby"
