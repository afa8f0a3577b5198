"""Half of a user's watch in the keeper, in a module of its own beside the script."""

from __future__ import annotations

import json
import os
from pathlib import Path

from typing_extensions import override

from holdfast.checkpoint.keeper.watch import KeeperRun, KeeperWatch


class ToyKeeper(KeeperWatch):
    """Half in the keeper that writes its options into a file, and may fail."""

    @override
    def start(self, run: KeeperRun) -> None:
        if self.options["fails"]:
            raise ValueError("cannot start")
        Path(self.options["file"]).write_text(json.dumps([run.name, os.getpid()]))
        run.show("the toy has started")
