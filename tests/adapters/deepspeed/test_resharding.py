"""Partitions of ZeRO for another number of ranks."""

# DeepSpeed has no type information.
# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownParameterType=false

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("deepspeed", reason="needs torch-holdfast[deepspeed]")

from deepspeed.runtime.zero.utils import ZeRORuntimeException

from holdfast.adapters.deepspeed.resharding import reshard
from holdfast.errors import Unsupported


def state(base: Any) -> dict[str, Any]:
    """Return the state of one of two ranks, with half of a parameter of 6 elements."""
    return {
        "zero_stage": 2,
        "single_partition_of_fp32_groups": [torch.arange(3.0)],
        "base_optimizer_state": base,
    }


@pytest.mark.parametrize("kind", [Unsupported, ZeRORuntimeException])
def test_a_state_of_elastic_checkpoints_is_refused_with_an_error_of_both(kind: type[Exception]) -> None:
    lean = [{"exp_avg": torch.zeros(3)}]
    with pytest.raises(kind, match="elastic_checkpoint"):
        reshard([state(lean), state(lean)], [[("weight", 6)]], [6], 0, 1)


def test_a_state_with_other_elements_than_the_parameters_is_refused() -> None:
    factored = {"state": {0: {"exp_avg": torch.zeros(2)}}, "param_groups": []}
    with pytest.raises(Unsupported, match="an element per parameter"):
        reshard([state(factored), state(factored)], [[("weight", 6)]], [6], 0, 1)


def test_partitions_are_joined_for_one_rank() -> None:
    base = {"state": {0: {"exp_avg": torch.ones(3), "step": torch.tensor(5.0)}}, "param_groups": []}
    joined = reshard([state(base), state(base)], [[("weight", 6)]], [6], 0, 1)
    assert joined["single_partition_of_fp32_groups"][0].tolist() == [0, 1, 2, 0, 1, 2]
    assert joined["base_optimizer_state"]["state"][0]["exp_avg"].tolist() == [1] * 6
    assert joined["base_optimizer_state"]["state"][0]["step"] == 5
