"""Folder `checkpoint-N` as the Trainer itself writes it, made from a verified checkpoint."""

from __future__ import annotations

from pathlib import Path

from transformers import Trainer

from holdfast.adapters.transformers.live_state import MODEL
from holdfast.checkpoint.exchange.export_selection import ExportSelection
from holdfast.checkpoint.exchange.mapped_weights import map_weights
from holdfast.checkpoint.exchange.trainer_export import write_training_files
from holdfast.checkpoint.restore.checkpoint import open as open_checkpoint
from holdfast.errors import NotFound
from holdfast.system.log import get_logger

_log = get_logger("adapters")


def write_folder(trainer: Trainer, home: str, step: int, folder: str) -> None:
    """Write the folder of a step, for `from_pretrained` and for a Trainer without Holdfast.

    Raises:
        Corrupt: the checkpoint is damaged.
        RetryLater: the home or the folder failed.
    """
    try:
        checkpoint = open_checkpoint(home, step)
    except NotFound:  # the step is only in a local folder
        _log.warning("%s was not written, because %s does not have step %d", folder, home, step)
        return
    everything = ExportSelection.choose(checkpoint, rank=0, only=None, rename=None, num_threads=4)
    write_training_files(everything, Path(folder), overwrite=True)
    trainer._save(folder, state_dict=map_weights(checkpoint, MODEL, Path(folder)))
