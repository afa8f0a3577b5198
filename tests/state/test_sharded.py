"""Sharded states on real ranks: all ranks together write the whole state, and it loads into any layout."""

from __future__ import annotations

from pathlib import Path

import pytest

from state.worlds import FOUR, TWO, load_all, run, save_all, trip


@pytest.mark.slow
@pytest.mark.ranks
def test_every_layout_loads_into_every_layout_on_4_2_and_1_ranks(tmp_path: Path) -> None:
    """Parameters, moments and counters, bit for bit, whether or not the optimizer has stepped.

    On the way, what the ranks write of each layout is put together and compared with what DTensor gathers.
    """
    (tmp_path / "1").mkdir()
    save_all(0, tmp_path / "1", ("alone",))
    run(4, trip, tmp_path, FOUR, ("on-meta",))
    run(2, trip, tmp_path, TWO)
    assert len(list(tmp_path.rglob("*.pt"))) == 1 + len(FOUR) + len(TWO)
    load_all(0, tmp_path, ("alone",))
