"""Folders `checkpoint-N` of a run in Holdfast: the Trainer's counters, the configuration, the home's name."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from holdfast.adapters.kit.saved_files import read_json
from holdfast.adapters.transformers.stock_folder import TRAINER_STATE, list_folders, step_of
from holdfast.system.linux.partial_files import remove_folder, remove_partial_files

HOME_FILE = "holdfast.json"
"""File that names the home of the checkpoint whose folder it is in."""
_CONFIGS = ("config", "generation_config")
_OURS = {HOME_FILE, TRAINER_STATE, *(f"{name}.json" for name in _CONFIGS)}


class Folders:
    """Folders `checkpoint-N` in a Trainer's output directory.

    They are there for everything that expects them: `get_last_checkpoint`, callbacks that add files of their
    own, and `resume_from_checkpoint=PATH`. A checkpoint exists when it is complete in home, with or without
    its folder.

    Args:
        output_dir: the Trainer's.
        home: URL of the run's home.
        writes: this rank writes the folders, as it would write the Trainer's own ones.
    """

    def __init__(self, output_dir: str, home: str, *, writes: bool) -> None:
        self.output_dir = output_dir
        self._home = home
        self._writes = writes

    def path(self, step: int) -> str:
        """Return the path of a step's folder."""
        return str(Path(self.output_dir) / f"checkpoint-{step}")

    def steps(self) -> list[int]:
        """Return the steps that have a folder, in ascending order."""
        return [step for step, _ in list_folders(Path(self.output_dir))]

    def make(self, step: int, state: str, model: Any, *, home: str | None = None) -> None:
        """Make the folder of a step, with the Trainer's state and the model's configuration.

        Args:
            step: step of the checkpoint.
            state: content of the Trainer's state.
            model: the model.
            home: home of the checkpoint, if it is another run's.
        """
        if not self._writes:
            return
        folder = Path(self.path(step))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / HOME_FILE).write_text(json.dumps({"home": home or self._home}) + "\n")
        (folder / TRAINER_STATE).write_text(state)  # not atomic: it is written again when training resumes
        for name in _CONFIGS:
            config: Any = getattr(model, name, None)
            if hasattr(config, "save_pretrained"):
                config.save_pretrained(folder)

    def make_readable(self, step: int, state: str) -> None:
        """Write the Trainer's state, unless this rank sees the one that was written."""
        file = Path(self.path(step)) / TRAINER_STATE
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(state)

    def remove(self, step: int) -> None:
        """Remove the folder of a step, whatever it contains."""
        if self._writes:
            remove_folder(Path(self.path(step)))

    def remove_interrupted(self, after: int, complete: Collection[int]) -> None:
        """Remove folders of interrupted saves and deletions, which nothing may take for checkpoints.

        Args:
            after: step from which training resumes.
            complete: steps of the checkpoints in home.
        """
        if self._writes:
            remove_partial_files(Path(self.output_dir))
        for step, folder in list_folders(Path(self.output_dir)):
            is_older = step <= after and self.home_of(str(folder)) != self._home
            if step == after or step in complete or is_older:
                continue
            if {one.name for one in folder.iterdir()} <= _OURS:
                self.remove(step)

    def home_of(self, path: str) -> str | None:
        """Return the home that a folder `checkpoint-N` names; None if the Trainer has written it itself."""
        content = read_json(Path(path) / HOME_FILE)
        home = content.get("home") if isinstance(content, dict) else None
        return home if isinstance(home, str) else None

    def is_here(self, path: str) -> bool:
        """Return True if a path is that of a folder `checkpoint-N` in the output directory."""
        same = Path(path).absolute().parent.resolve() == Path(self.output_dir).absolute().resolve()
        return same and step_of(path) is not None


def surplus(steps: Sequence[int], *, limit: int | None, best: int | None) -> list[int]:
    """Return the steps to delete, oldest first, so that `limit` of them are left.

    The newest one and the best one are always left, as by the Trainer's own rule.

    Args:
        steps: steps in the order in which they were saved.
        limit: the Trainer's `save_total_limit`; None or 0 for no limit.
        best: step of the best model.
    """
    if not limit or limit < 0 or len(steps) <= limit:
        return []
    protected = {steps[-1], best} & set(steps)
    num_left = max(limit, len(protected))
    return [step for step in steps if step not in protected][: len(steps) - num_left]
