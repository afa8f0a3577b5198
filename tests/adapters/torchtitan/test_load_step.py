"""Steps that the manager finds in a folder that is not its own, as torchtitan's extensions ask for them."""

# torchtitan has no type information where it is not installed.
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip(
    "torchtitan.components.checkpointer", reason="torchtitan is not installed: pip install torchtitan"
)

from torchtitan.components.checkpointer import dcp

from holdfast.adapters.torchtitan import HoldfastCheckpointManager


def test_the_newest_complete_checkpoint_of_another_folder_is_found(tmp_path: Path) -> None:
    for step, file in ((10, ".metadata"), (20, ".metadata"), (30, "shard")):
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}" / file).touch()
    manager = HoldfastCheckpointManager.__new__(HoldfastCheckpointManager)
    if hasattr(dcp, "_FilesystemCheckpointStorage"):  # not in 0.3.0, which asks the file system itself
        manager._storage = dcp._FilesystemCheckpointStorage()
    assert manager._find_load_step(folder=str(tmp_path)) == 20
    assert manager._find_load_step() == -1, "the own folder is searched before"
