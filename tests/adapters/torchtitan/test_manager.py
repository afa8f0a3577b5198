"""The manager of torchtitan in this process: the position in the data, and steps of a folder not its own."""

# torchtitan has no type information where it is not installed.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip(
    "torchtitan.components.checkpointer", reason="torchtitan is not installed: pip install torchtitan"
)

from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.checkpointer import dcp

from holdfast.adapters.torchtitan import DataPosition, HoldfastCheckpointManager

DATA = TensorDataset(torch.arange(8))


@pytest.mark.filterwarnings("ignore:.*set_vital:UserWarning")  # of torchdata, by its import of a loader
def test_the_first_batch_after_a_restore_leaves_the_restored_generator_unchanged() -> None:
    """A new iterator of a loader draws a number, which the uninterrupted training drew long before."""
    saved = StatefulDataLoader(DATA, batch_size=2)
    next(iter(saved))
    loader = StatefulDataLoader(DATA, batch_size=2)
    position = DataPosition(loader)
    position.load_state_dict(saved.state_dict())
    torch.manual_seed(3)
    restored = torch.get_rng_state()
    position.set("no home is read", 1, None)
    assert next(iter(loader))[0].tolist() == [2, 3]
    assert torch.equal(torch.get_rng_state(), restored)


def test_the_newest_complete_checkpoint_of_another_folder_is_found(tmp_path: Path) -> None:
    """As torchtitan's extensions ask for it."""
    for step, file in ((10, ".metadata"), (20, ".metadata"), (30, "shard")):
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}" / file).touch()
    manager = HoldfastCheckpointManager.__new__(HoldfastCheckpointManager)
    if hasattr(dcp, "_FilesystemCheckpointStorage"):  # not in 0.3.0, which asks the file system itself
        manager._storage = dcp._FilesystemCheckpointStorage()
    assert manager._find_load_step(folder=str(tmp_path)) == 20
    assert manager._find_load_step() == -1, "the own folder is searched before"
