"""Record of the newest step: it survives the object, and refuses other contents."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.adapters.trackers.libraries import NONE, StepRecord
from holdfast.errors import Corrupt


@given(steps=st.lists(st.integers(0, 2**63 - 1), max_size=5))
def test_the_newest_step_is_read_again(steps: list[int], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("record") / "step"
    for step in steps:
        StepRecord(path).raise_to(step)
    assert StepRecord(path).step == (steps[-1] if steps else NONE)


@pytest.mark.parametrize("contents", [b"12\n", b"1" * 21, b"x" * 20 + b"\n", b"1" * 20 + b"\n1"])
def test_other_contents_are_refused(contents: bytes, tmp_path: Path) -> None:
    path = tmp_path / "step"
    path.write_bytes(contents)
    with pytest.raises(Corrupt, match="delete it"):
        StepRecord(path)
    assert path.read_bytes() == contents


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "step").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic"):
        StepRecord(tmp_path / "step")
    assert not (tmp_path / "other").exists()
