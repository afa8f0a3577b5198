"""Saves of Lightning whose optimizer is copied beside the next batch, in real trainings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.running import run_ranks
from holdfast.checkpoint.stage.watch import Watcher

pytest.importorskip("lightning", reason="lightning is not installed: pip install 'torch-holdfast[lightning]'")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of Lightning's own there are many
    pytest.mark.skipif(Watcher().refusal is not None, reason="the kernel does not record writes"),
]

from adapters.lightning.copies import SAVED, play  # noqa: E402


def assert_saved(path: str | Path, state: tuple[Any, Any]) -> None:
    """Check that a file has the weights and the optimizer of a state."""
    found = torch.load(path)
    weights, optimizer = state
    torch.testing.assert_close(found["state_dict"], weights, rtol=0, atol=0)
    torch.testing.assert_close(found["optimizer_states"][0]["state"], optimizer["state"], rtol=0, atol=0)


@pytest.mark.parametrize("spoil", ["", "weights"])
def test_the_optimizer_is_copied_beside_the_next_batch_and_its_step_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoil: str
) -> None:
    model, callback, said = play(tmp_path, monkeypatch, spoil, steps=3)
    assert model.was_held
    assert said == []
    assert callback.best_model_path.endswith("step=2.ckpt")
    assert_saved(callback.best_model_path, model.states[SAVED])
    assert_saved(callback.last_model_path, model.states[SAVED])


def test_a_save_whose_optimizer_was_written_to_is_replaced_by_the_next_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, callback, said = play(tmp_path, monkeypatch, "moments", steps=3)
    assert model.was_held
    assert len(said) == 1, said
    assert "The state after step 3 was saved in its place" in said[0]
    assert_saved(callback.best_model_path, model.states[SAVED + 1])
    assert_saved(callback.last_model_path, model.states[SAVED + 1])


def test_a_dropped_save_is_replaced_at_the_end_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, callback, said = play(tmp_path, monkeypatch, "moments", steps=SAVED)
    assert len(said) == 1, said
    assert torch.load(callback.best_model_path)["global_step"] == SAVED


def test_ranks_replace_a_dropped_save_together(tmp_path: Path) -> None:
    script = Path(__file__).with_name("copies.py")
    ended = run_ranks([script, tmp_path, "moments"], 2, env={"HOLDFAST_PREEMPTION": "none"})
    assert [one.status for one in ended] == [0, 0], ended
    first, second = [one.last() for one in ended]
    assert first["was_held"]
    assert (len(first["said"]), second["said"]) == (1, [])
    # The outcome of an exchange is one batch old on several ranks.
    assert "The state after step 4 was saved in its place" in first["said"][0]
    assert torch.load(tmp_path / "ckpt" / "epoch=0-step=2.ckpt")["global_step"] == 4
