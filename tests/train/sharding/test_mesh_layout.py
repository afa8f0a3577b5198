"""Layouts of a mesh: valid numbers of shards, and their names."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import InvalidInput
from holdfast.train.sharding.process_group import make_mesh_layout


@given(ranks=st.integers(1, 512), shards=st.integers(-3, 600))
def test_shards_must_divide_the_ranks(ranks: int, shards: int) -> None:
    if shards < 1 or ranks % shards:
        with pytest.raises(InvalidInput, match=f"shards={shards} does not divide {ranks} rank"):
            make_mesh_layout(shards, ranks)
        return
    layout = make_mesh_layout(shards, ranks)
    assert layout.copies * layout.shards == ranks
    assert math.prod(layout.mesh_shape) == ranks
    assert len(layout.mesh_names) == len(layout.mesh_shape)
    assert layout.mesh_shape[-1] == (ranks if layout.copies == 1 else shards)


@pytest.mark.parametrize("wrong", [True, 2.0, "two", None, 4])
def test_other_shards_are_rejected_with_the_valid_ones(wrong: Any) -> None:
    assert make_mesh_layout("all", 6).shards == 6
    message = "may be 1, 2, 3, 6, or 'all'" if wrong == 4 else "number of ranks or 'all'"
    with pytest.raises(InvalidInput, match=message):
        make_mesh_layout(wrong, 6)


@pytest.mark.parametrize(
    ("ranks", "shards", "reshard_after_forward", "text"),
    [
        (1, 1, True, "on 1 rank, not sharded"),
        (4, 1, True, "replicated on 4 ranks (DDP)"),
        (4, 4, True, "sharded over 4 ranks (ZeRO-3)"),
        (4, 4, False, "sharded over 4 ranks (ZeRO-2)"),
        (8, 4, True, "on 8 ranks: 2 copies, each sharded over 4 (hybrid ZeRO-3)"),
    ],
)
def test_a_layout_is_described_with_common_names(
    ranks: int, shards: int, reshard_after_forward: bool, text: str
) -> None:
    assert make_mesh_layout(shards, ranks).describe(reshard_after_forward=reshard_after_forward) == text
