"""Torn copies on several ranks: a tear on any rank drops the save on all of them, and all repeat it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast.errors import HoldfastError
from stage import tearing
from stage.ranks import run_ranks


def train(home: Path, tears: tearing.Tears, total: int, **options: Any) -> list[dict[str, Any]]:
    """What two ranks bring back from a training."""
    kills = options.pop("kills", ())
    found = run_ranks(2, tearing.train, home, tears, total, options, kills)
    for one in found:
        assert isinstance(one, dict), one
    return found


def exact_steps(home: Path, found: list[dict[str, Any]]) -> list[int]:
    """Return the steps that have a checkpoint, each of which has the bytes of all ranks at its step."""
    assert found[0]["expected"].keys() == found[1]["expected"].keys(), "all ranks save the same steps"
    steps = []
    for step, tensors in found[0]["expected"].items():
        try:
            saved = holdfast.open(home, step=step)
        except HoldfastError:
            continue
        steps.append(step)
        for name, expected in tensors.items():
            assert np.array_equal(found[1]["expected"][step][name], expected)
            assert np.array_equal(saved[name].numpy(), expected), (step, name)
    return steps


@pytest.mark.essential
@pytest.mark.parametrize("torn", [{0}, {1}, {0, 1}], ids=str)
def test_a_save_torn_on_one_rank_is_repeated_by_all(tmp_path: Path, torn: set[int]) -> None:
    """Ranks write other tensors, so a tear on both is one in different tensors."""
    home = tmp_path / "home"
    found = train(home, {2: torn}, 6)
    assert exact_steps(home, found) == [4]
    for rank, one in enumerate(found):
        assert list(one["failures"]) == [2]
        message = "was written while it was being copied"
        assert message in one["failures"][2]
        assert ("has no copy of it" in one["failures"][2]) == (rank not in torn)
        assert len([text for text in one["told"] if message in text]) == 1, "reported once by each rank"
        assert not one["ending"]
    (first, again) = train(home, {}, 7)
    assert first["first"] == again["first"] == 7, "training resumes from the end"


@pytest.mark.parametrize(
    ("tears", "kills", "failed", "saved"),
    [
        ({2: {0}, 4: {0}}, (), [2, 4], [6]),
        # Else many ranks would be torn one after the other, and no save would be complete.
        ({2: {0}, 4: {1}}, (), [2], [4]),
        ({2: {0}}, (2,), [2], [4]),
    ],
    ids=["a torn repeat is repeated", "the same write tears no rank", "a keeper is killed during the save"],
)
def test_a_torn_save_is_repeated_until_it_is_whole(
    tmp_path: Path, tears: tearing.Tears, kills: tuple[int, ...], failed: list[int], saved: list[int]
) -> None:
    found = train(tmp_path / "home", tears, saved[0] + 2, kills=kills)
    assert exact_steps(tmp_path / "home", found) == saved
    assert [list(one["failures"]) for one in found] == [failed, failed]


def test_a_repeat_skipped_for_lack_of_memory_is_made_later(tmp_path: Path) -> None:
    found = train(tmp_path / "home", {2: {1}}, 12, memory=holdfast.Memory("200kB", when_full="skip"))
    steps = exact_steps(tmp_path / "home", found)
    assert steps
    assert 2 not in steps


def test_a_torn_step_is_not_saved_again_under_the_same_number(tmp_path: Path) -> None:
    """The other rank has saved it as it was before the write: together they would be a mixture."""
    for rank, (torn, again, later) in enumerate(run_ranks(2, tearing.save_twice, tmp_path / "home")):
        assert "was written while it was being copied" in torn
        assert f"has failed on rank {rank}, and cannot be made again" in again
        assert not later
    with pytest.raises(HoldfastError):
        holdfast.open(tmp_path / "home", step=1)
    holdfast.open(tmp_path / "home", step=2).verify()
