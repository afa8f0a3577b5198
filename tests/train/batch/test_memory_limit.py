"""Memory limit of one rank."""

from __future__ import annotations

import torch

from holdfast.train.batch.finder import find_memory_limit


def test_ranks_on_one_host_share_its_available_memory() -> None:
    cpu = torch.device("cpu")
    alone, shared = (find_memory_limit(cpu, 0, num_sharing=num) for num in (1, 4))
    assert 0 < shared < alone / 2
