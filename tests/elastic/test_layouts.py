"""Any layout loads what any other has saved, bit for bit, through the Checkpointer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from elastic.conftest import Worlds
from elastic.runs import BY_SIZE
from elastic.trips import go_on, restore_each

pytestmark = [pytest.mark.ranks, pytest.mark.fsdp2_on_cpu]

CHAIN = (
    *((2, "fsdp"), (1, "alone"), (4, "fsdp-tp"), (3, "fsdp")),
    *((4, "hsdp"), (4, "pipeline-fsdp"), (2, "ddp"), (2, "meta")),
)
EVERY = tuple((size, layout) for size in (2, 3, 4, 1) for layout in BY_SIZE[size])


@pytest.mark.parametrize(
    "chain", [CHAIN[:4], pytest.param(CHAIN[3:], marks=pytest.mark.slow)], ids=["first", "others"]
)
def test_a_run_continues_in_one_layout_after_the_other(
    worlds: Worlds, tmp_path: Path, chain: Sequence[tuple[int, str]]
) -> None:
    """Each link restores what the one before saved, trains, and saves; every tensor is compared."""
    for step, (size, layout) in enumerate(chain, 1):
        worlds(size).run(go_on, tmp_path / "home", step, layout)
    assert len(list(tmp_path.glob("copy-*.pt"))) == len(chain)


@pytest.mark.slow
def test_every_layout_loads_what_every_layout_saved(worlds: Worlds, tmp_path: Path) -> None:
    for step, (size, layout) in enumerate(EVERY, 1):
        worlds(size).run(go_on, tmp_path / "home", step, layout)
    steps = list(range(1, len(EVERY) + 1))
    assert len(list(tmp_path.glob("copy-*.pt"))) == len(steps)
    for size, layout in EVERY:
        worlds(size).run(restore_each, tmp_path / "home", layout, steps)
