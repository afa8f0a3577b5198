"""Limits of the format at save(): a checkpoint that no reader takes is never written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast import Checkpointer
from holdfast.checkpoint.format.limits import MAX_NAME_CHARS
from holdfast.errors import InvalidInput


def _save(home: Path, state: Any) -> None:
    with Checkpointer(home, {"state": state}, quiet=True) as checkpointer:
        checkpointer.save(1).wait_durable()


@pytest.mark.parametrize("value", [torch.ones(3), {"more": 1}], ids=["tensor", "values"])
def test_a_key_that_is_too_long_is_refused_when_it_is_saved(tmp_path: Path, value: Any) -> None:
    with pytest.raises(InvalidInput, match="at most 16384 are allowed") as caught:
        _save(tmp_path, {"k" * MAX_NAME_CHARS: value})
    assert len(str(caught.value)) < 1000
    assert not list(tmp_path.glob("step-*/manifest*"))


def test_keys_in_each_other_count_as_one_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="at most 16384 are allowed"):
        _save(tmp_path, {"a" * 9000: {"b" * 9000: torch.ones(3)}})


def test_the_longest_key_is_saved_and_read(tmp_path: Path) -> None:
    key = "k" * (MAX_NAME_CHARS - len("state."))
    _save(tmp_path, {key: torch.arange(3.0)})
    assert torch.equal(holdfast.open(tmp_path)[f"state.{key}"], torch.arange(3.0))


@pytest.mark.slow
def test_half_a_million_tensors_are_saved_and_restored(tmp_path: Path) -> None:
    count = 500_000
    state = {f"t{i}": torch.tensor([float(i)]) for i in range(count)}
    _save(tmp_path, state)
    again = {name: torch.zeros(1) for name in state}
    with Checkpointer(tmp_path, {"state": again}, quiet=True) as checkpointer:
        assert checkpointer.restore() == 1
    assert all(torch.equal(again[name], state[name]) for name in state)
