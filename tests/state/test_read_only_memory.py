"""Tensors in memory that is mapped read-only: named at the first save and before a restore."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import holdfast
from holdfast.checkpoint.state import State
from holdfast.errors import InvalidInput, ResumeWarning
from nursery import shared
from stage.training import make_checkpointer
from state.trip import kept, same


def _mapped(path: Path, value: float, mode: Any = "r") -> torch.Tensor:
    np.save(path, np.full(3000, value, dtype=np.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, about arrays that are not writable
        return torch.from_numpy(np.load(path, mmap_mode=mode))


def _model(table: torch.Tensor) -> nn.Module:
    model = nn.Linear(2, 2)
    model.register_buffer("table", table)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["filled", "copied"])
@pytest.mark.parametrize("is_view", [False, True], ids=["whole", "view"])
def test_a_restore_to_read_only_memory_is_refused(tmp_path: Path, dtype: torch.dtype, is_view: bool) -> None:
    """Writing to it would end the process with SIGSEGV."""
    live = _mapped(tmp_path / "table.npy", 1.0)
    live = live[1::2] if is_view else live
    saved = kept({"m": _model(torch.ones(live.shape, dtype=dtype))})
    other = _model(live)
    before = other.get_parameter("weight").detach().clone()
    with pytest.raises(InvalidInput, match=r"^m\.table is in memory that is mapped read-only.*clone\(\)"):
        saved.plan(State({"m": other}))
    assert same(other.get_parameter("weight").detach(), before)
    saved.restore(State({"m": other, "x": 1}), only=["x"], strict=False)


def test_tensors_and_containers_in_read_only_memory_are_named(tmp_path: Path) -> None:
    live = _mapped(tmp_path / "table.npy", 1.0)
    state = {"t": live[:5], "c": {"inner": live[5:]}}
    saved = kept({"t": torch.zeros(5), "c": {"inner": torch.zeros(2995)}})
    with pytest.raises(InvalidInput, match="are in memory that is mapped read-only") as caught:
        saved.plan(State(state))
    assert "t, c: c.inner" in str(caught.value)


@pytest.mark.parametrize("mode", ["c", "r+"])
def test_a_writable_mapping_is_restored(tmp_path: Path, mode: str) -> None:
    """Private copies of a file's pages, and shared pages."""
    live = _mapped(tmp_path / "table.npy", 1.0, mode)
    kept({"m": _model(torch.full((3000,), 7.0))}).restore(State({"m": _model(live)}))
    assert same(live, torch.full((3000,), 7.0))


def test_the_first_save_warns_of_read_only_memory(tmp_path: Path) -> None:
    """Later, the run may have trained for days before its restart is refused."""
    state = {"m": _model(_mapped(tmp_path / "table.npy", 1.0))}
    with make_checkpointer(tmp_path / "run", state) as ckpt:
        with pytest.warns(ResumeWarning, match=r"m\.table is in memory that is mapped read-only"):
            ckpt.save(1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ckpt.save(2)


_PROGRAM = """
import sys
import holdfast, numpy, torch

table = torch.from_numpy(numpy.load(sys.argv[1] + "/table.npy", mmap_mode="r"))
with holdfast.Checkpointer(sys.argv[1] + "/run", {"t": table}) as ckpt:
    ckpt.restore()
"""


def test_a_restart_with_read_only_memory_ends_with_the_error(tmp_path: Path) -> None:
    """In a process of its own, because a write would kill it."""
    live = _mapped(tmp_path / "table.npy", 1.0)
    with make_checkpointer(tmp_path / "run", {"t": torch.ones(3000)}) as ckpt:
        ckpt.save(1)
    done = shared().run(["-c", _PROGRAM, str(tmp_path)])
    assert done.returncode == 1, done
    assert "InvalidInput: t is in memory that is mapped read-only" in done.stderr
    with pytest.raises(InvalidInput, match="mapped read-only"):
        holdfast.open(tmp_path / "run").load_into({"t": live})
