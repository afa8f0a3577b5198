"""The position in the data, as the state of a Checkpointer."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip(
    "torchtitan.components.checkpointer", reason="torchtitan is not installed: pip install torchtitan"
)

from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from holdfast.adapters.torchtitan import DataPosition

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
