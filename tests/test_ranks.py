"""Several ranks: what one number of ranks saved another restores; they save, skip and stop together."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from nursery import shared
from stage import ranks

pytestmark = pytest.mark.ranks


def check_same_weights(found: dict[str, Any], expected: dict[str, Any]) -> None:
    names = [name for name in expected if name not in ("drawn", "python")]
    assert len(names) == 9
    for name in names:
        assert np.array_equal(found[name], expected[name]), name


@pytest.mark.parametrize(("saving", "restoring"), [(2, 2), (2, 1), (2, 3), (1, 2)])
def test_any_number_of_ranks_restores_what_another_saved(tmp_path: Path, saving: int, restoring: int) -> None:
    """The weights are those of the save; on as many ranks as before each draws its own next numbers again."""
    kept = ranks.run_ranks(saving, ranks.train_and_save, tmp_path / "home")
    found = ranks.run_ranks(restoring, ranks.restore, tmp_path / "home")
    assert holdfast.open(tmp_path / "home").verify().is_good
    for rank, one in enumerate(found):
        assert not isinstance(one, str), one
        assert one["step"] == 3
        check_same_weights(one, kept[0])
        assert one["moments"] == found[0]["moments"]
        if saving == restoring:
            assert np.array_equal(one["drawn"], kept[rank]["drawn"])
            assert one["python"] == kept[rank]["python"]
    assert len({one["drawn"].tobytes() for one in found}) == restoring, "no two ranks draw the same"


def test_ranks_at_different_steps_raise(tmp_path: Path) -> None:
    for said in ranks.run_ranks(2, ranks.drift_apart, tmp_path / "home"):
        assert "The ranks are at different steps: the first at 2, the last at 3" in said


def test_a_timed_save_is_made_once_on_all_ranks_at_one_step(tmp_path: Path) -> None:
    """Rank 0's clock decides; the decision arrives one step later, and only once."""
    assert ranks.run_ranks(2, ranks.save_on_time, tmp_path / "home") == [[5], [5]]


def test_if_one_rank_must_skip_all_skip(tmp_path: Path) -> None:
    said = ranks.run_ranks(2, ranks.skip_together, tmp_path / "home")
    assert said == [["skipped", "durable"]] * 2
    assert not (tmp_path / "home" / "step-00000002").exists()


def test_ranks_without_a_process_group_are_refused(tmp_path: Path) -> None:
    program = "import sys, holdfast; holdfast.Checkpointer(sys.argv[1], {'n': 1})"
    done = shared().run(["-c", program, str(tmp_path / "home")], env={**os.environ, "WORLD_SIZE": "2"})
    assert done.returncode == 1
    assert "InvalidInput: WORLD_SIZE is 2 but there is no process group" in done.stderr
    assert "init_process_group()" in done.stderr
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("is_claimed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_save_on_rank_0_only_is_reported_while_it_waits(tmp_path: Path, is_claimed: bool) -> None:
    """`if rank == 0: ckpt.save()` hung for an hour, at the first save and at later ones."""
    function = functools.partial(ranks.save_on_rank_0_only, is_claimed=is_claimed)
    found = ranks.run_ranks(2, function, tmp_path / "home")
    assert "very rank has to call save()" in "".join(found[0]), found
