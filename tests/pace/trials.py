"""Trials of a training whose ranks have different amounts of work, with its history."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hang.trials import Trial
from holdfast.watch.pace.windows import QUEUE_CAUSE, SlowPeriod, list_slow_periods
from nursery import Nursery

TRAINING = Path(__file__).with_name("training.py")


class PaceTrial(Trial):
    """One run of the training."""

    def __init__(self, folder: Path, nursery: Nursery, *, world_size: int, kind: str = "ddp") -> None:
        super().__init__(folder, nursery, world_size=world_size)
        self._kind = kind
        self._hog: subprocess.Popen[bytes] | None = None

    def begin(self, way: str, *, odd: int, seconds: float, num_hosts: int = 1, **options: Any) -> None:
        """Start all ranks."""
        words = [TRAINING, way, odd, self.home, seconds, json.dumps(options), self._kind]
        self.start_ranks(words, num_hosts=num_hosts)

    def hog(self, rank: int, seconds: float) -> None:
        """Let another process compete for the one processor that a rank may use, for a limited time."""
        os.sched_setaffinity(self.ranks[rank].pid, {0})
        for other, child in enumerate(self.ranks):
            if other != rank:
                os.sched_setaffinity(child.pid, set(os.sched_getaffinity(0)) - {0} or {0})
        code = f"import time\nend = time.monotonic() + {seconds}\nwhile time.monotonic() < end: pass"
        self._hog = subprocess.Popen([sys.executable, "-S", "-c", code])
        os.sched_setaffinity(self._hog.pid, {0})

    def end(self) -> None:
        """End the training in order."""
        (self.folder / "stop").touch()
        self.finish()

    def slow(self) -> list[tuple[int, SlowPeriod]]:
        """Return the slow periods in the history, with their attempts."""
        return list_slow_periods(self.lines("slow-rank", "slow-rank-over"))

    def accused(self) -> set[int]:
        """Return the ranks that were named for what they do.

        On a busy machine a rank may really wait longer for a processor than the others.
        """
        return {period.rank for _, period in self.slow() if period.cause != QUEUE_CAUSE}

    def kill(self) -> None:
        """Kill everything that is left."""
        super().kill()
        if self._hog is not None:
            self._hog.kill()
            self._hog.wait()
