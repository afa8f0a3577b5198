"""A start whose next save does not fit in the home warns before training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from small_disk import small_disk


def test_a_home_without_space_for_the_next_save_is_named_at_the_start(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    state = {"weight": torch.zeros(200_000)}
    with small_disk(tmp_path, "2m") as disk:
        with holdfast.Checkpointer(disk / "home", state, every=1) as ckpt:
            ckpt.save(1).wait_durable()
        with holdfast.Checkpointer(disk / "home", state, every=1) as ckpt:
            assert list(ckpt.steps(2)) == [1]
        assert "does not fit" not in capfd.readouterr().err
        (disk / "ballast").write_bytes(bytes(100_000))
        with holdfast.Checkpointer(disk / "home", state, every=100) as ckpt:
            for step in ckpt.steps(3):
                assert step == 2
                shown = capfd.readouterr().err
                assert f"{disk}/home: the next save does not fit: the newest checkpoint has 8" in shown
                (disk / "ballast").unlink()
                break
