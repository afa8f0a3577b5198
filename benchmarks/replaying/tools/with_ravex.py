"""ravex (PyPI), with its own engine: the objects are named, since the training has made them before."""

from __future__ import annotations

import os
from collections.abc import Callable

from holdfast.system.environment import JobReport, report_to_job

from .contract import KEPT, Tool, limit_ops


class WithRavex(Tool):
    """A function under `ravex.train_loop`."""

    title = "ravex"
    module = "ravex"

    def run(self, total: int, body: Callable[[int], None]) -> None:
        """Run the steps that are left within a decorated function."""
        import ravex  # pyright: ignore[reportMissingImports] - not a dependency

        training = self.training
        os.environ |= {"RAVEX_STORAGE_PATH": str(training.home)}

        @ravex.train_loop(preemption_handler=True, checkpoint_every=training.every, keep_last=KEPT)
        def loop() -> None:
            ravex.track(training.model, training.optimizer)
            for step in range(ravex.step(), total):
                ravex.batch_boundary()
                body(step)
                limit_ops()
                if training.rank == 0 and (step + 1) % training.every == 0:
                    report_to_job(JobReport(home="ravex", step=step + 1))

        loop()
