"""Which numbers of ranks can share a copy, and what that is called."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import InvalidInput
from holdfast.train.sharding.layout import lay_out


@given(ranks=st.integers(1, 512), shards=st.integers(-3, 600))
def test_a_copy_is_shared_by_a_number_that_divides_the_ranks(ranks: int, shards: int) -> None:
    if shards < 1 or ranks % shards:
        with pytest.raises(InvalidInput, match=f"shards={shards} ranks.*among {ranks} rank"):
            lay_out(shards, ranks)
        return
    layout = lay_out(shards, ranks)
    assert layout.copies * layout.shards == ranks
    assert math.prod(layout.mesh_shape) == ranks
    assert len(layout.mesh_names) == len(layout.mesh_shape)
    assert layout.mesh_shape[-1] == (ranks if layout.copies == 1 else shards)


def test_all_ranks_share_one_copy_by_default() -> None:
    assert lay_out("all", 6).shards == 6


@pytest.mark.parametrize("wrong", [True, 2.0, "two", None])
def test_what_is_no_number_of_ranks_is_refused(wrong: object) -> None:
    with pytest.raises(InvalidInput, match="number of ranks or 'all'"):
        lay_out(wrong, 4)  # type: ignore[arg-type]


def test_the_fitting_numbers_are_told() -> None:
    with pytest.raises(InvalidInput, match="may be 1, 2, 3, 6, or 'all'"):
        lay_out(4, 6)


@pytest.mark.parametrize(
    ("ranks", "shards", "keep", "said"),
    [
        (1, 1, False, "on 1 rank, which holds all of it"),
        (4, 1, False, "replicated on 4 ranks (DDP)"),
        (4, 4, False, "sharded over 4 ranks (ZeRO-3)"),
        (4, 4, True, "sharded over 4 ranks (ZeRO-2)"),
        (8, 4, False, "on 8 ranks: 2 copies, each sharded over 4 (hybrid ZeRO-3)"),
    ],
)
def test_a_layout_is_told_by_the_names_that_it_has_elsewhere(
    ranks: int, shards: int, keep: bool, said: str
) -> None:
    assert lay_out(shards, ranks).in_words(keep=keep) == said
