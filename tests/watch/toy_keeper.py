"""Half of a user's watch in the keeper, in a module of its own beside the script."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from typing_extensions import override

from holdfast.checkpoint.format.sections import Mark, Section
from holdfast.checkpoint.home.judges import CompleteSave
from holdfast.checkpoint.keeper.watch import KeeperRun, KeeperWatch, PersistedSave


class ToyKeeper(KeeperWatch):
    """Half in the keeper that writes its options into a file, and may fail."""

    @override
    def start(self, run: KeeperRun) -> None:
        if self.options["fails"]:
            raise ValueError("cannot start")
        Path(self.options["file"]).write_text(json.dumps([run.name, os.getpid()]))
        run.show("the toy has started")


class DyingKeeper(KeeperWatch):
    """Half in the keeper that kills its process with every save."""

    @override
    def persisted(self, save: PersistedSave) -> Section | None:
        os.kill(os.getpid(), signal.SIGKILL)
        return None


class LeavingKeeper(KeeperWatch):
    """Half in the keeper that ends its process, without a signal, once the trainer has closed."""

    @override
    def trainer_ended(self, *, in_order: bool) -> None:
        os._exit(1)


class BusyKeeper(KeeperWatch):
    """Half in the keeper with all events, which checks their order and what they receive."""

    @override
    def start(self, run: KeeperRun) -> None:
        self.num_bytes, self.is_over = 0, False

    @override
    def persisting(self, image: memoryview) -> Callable[[int, int], None]:
        self.num_bytes = 0

        def add(start: int, stop: int) -> None:
            assert start == self.num_bytes
            self.num_bytes = stop

        return add

    @override
    def persisted(self, save: PersistedSave) -> Section | None:
        assert save.section is not None
        assert save.section.data == {"trainer": save.step}
        assert self.num_bytes > 0
        return replace(save.section, data={**save.section.data, "num_bytes": self.num_bytes})

    @override
    def committing(self, save: CompleteSave) -> Section | None:
        assert list(save.sections) == list(range(save.world_size))
        before = None if save.base is None else save.base.data["trainer"]
        assert before is None or before < save.step
        return Section(1, {"trainer": save.step, "before": before}, Mark.FOR, ("it is busy",))

    @override
    def committed(self, step: int, section: Section | None) -> None:
        assert section is not None
        assert section.data["trainer"] == step

    @override
    def trainer_ended(self, *, in_order: bool) -> None:
        assert not self.is_over
        self.is_over = True
