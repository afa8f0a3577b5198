"""`ravex`: the runtime around a training function, whose engine is moonclip."""

from __future__ import annotations

import importlib

from .contract import Peer, Pending


class Ravex(Peer):
    """`ravex.checkpoint()` within a `train_loop`, with its defaults but without saves of its own.

    `train_loop` decorates a function. What it does before and after that function is called here by itself,
    since the benchmark's training is not one function.
    """

    title = "ravex"
    module = package = "ravex"
    syncs = True
    overlaps = True

    def open(self) -> None:
        """Start the runtime; metrics, the signal handler and the last checkpoint at the end are off.

        Raises:
            ValueError: the state has no optimizer, whose steps are what Ravex counts.
        """
        ravex = importlib.import_module("ravex")  # pyright finds this file under that name

        if self.subject.optimizer is None:
            raise ValueError("Ravex counts optimizer.step(), and this state has no optimizer")
        ravex._activate(
            storage={"type": "local", "path": str(self.directory / "store")},
            checkpoint_every=10**9,
            delta=False,  # a save at every step otherwise
            keep_last=2,
            metrics=False,
            handle_sigterm=False,
            checkpoint_on_exit=False,
            fallback_on_error=False,
        )
        ravex.track(self.subject.model, self.subject.optimizer)
        self._ravex = ravex

    def save(self, step: int) -> Pending:
        """Copy on the caller; compress and write in threads.

        Raises:
            RuntimeError: Ravex skipped the save.
        """
        if not self._ravex.checkpoint():
            raise RuntimeError("Ravex skipped the save: no optimizer step since the last one")
        return Pending(wait_complete=self._ravex.flush)

    def load(self, step: int) -> None:
        """Resume, which brings back the newest checkpoint."""
        # step() resumes; a checkpoint before the first optimizer step has step 0
        if self._ravex.step() < 0 or not self._ravex.status()["resumed"]:
            raise RuntimeError("Ravex did not resume")

    def delete(self, step: int) -> None:
        """Leave it to the retention."""

    def close(self) -> None:
        """Stop the runtime, if one was started."""
        ravex = importlib.import_module("ravex")  # pyright finds this file under that name

        ravex.deactivate()
